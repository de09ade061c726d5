package runtime

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// TestPowerCutInChangeOfRoot: a power cut during, or soon after, a change of the
// root of a sandbox that runs leaves row and files as each had reached the disk.
// In each order the row comes to say what the upper was written on, and no layer
// of that is collected.
func TestPowerCutInChangeOfRoot(t *testing.T) {
	for _, op := range []string{"reset", "rollback", "snapshot", "two snapshots", "snapshot and reset"} {
		for _, row := range []string{"before", "begun", "after"} {
			for _, files := range []string{"before", "between", "after"} {
				t.Run(fmt.Sprintf("%s, row %s, files %s", op, row, files), func(t *testing.T) { powerCutIn(t, op, row, files) })
			}
		}
	}
}

// onDisk is what of a sandbox's files had reached the disk.
type onDisk struct {
	upper  bool
	base   string
	layers map[string]bool
}

func (k *kernel) onDisk(id sandbox.ID) onDisk {
	k.mu.Lock()
	defer k.mu.Unlock()
	return onDisk{k.uppers[id], k.bases[id], maps.Clone(k.layers)}
}

func (k *kernel) put(id sandbox.ID, d onDisk) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.layers, k.bases[id] = maps.Clone(d.layers), d.base
	delete(k.uppers, id)
	if d.upper {
		k.uppers[id] = true
	}
}

func powerCutIn(t *testing.T, op, row, files string) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	sb := create(t, h, sandbox.Spec{})
	id := string(sb.ID)
	first, err := h.Snapshot(t.Context(), id, sandbox.SnapshotRequest{Sync: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.Snapshot(t.Context(), id, sandbox.SnapshotRequest{Sync: true}); err != nil {
		t.Fatal(err)
	}
	was, old := k.onDisk(sb.ID), h.root(t, sb.ID)
	do := func(op string) {
		t.Helper()
		var err error
		switch op {
		case "reset":
			_, err = h.Reset(t.Context(), id, "")
		case "rollback":
			_, err = h.Rollback(t.Context(), id, string(first.ID), "")
		case "snapshot":
			_, err = h.Snapshot(t.Context(), id, sandbox.SnapshotRequest{})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	switch op {
	case "two snapshots":
		do("snapshot")
		do("snapshot")
	case "snapshot and reset":
		do("snapshot")
		do("reset")
	default:
		do(op)
	}
	is, now := k.onDisk(sb.ID), h.root(t, sb.ID)
	h.crash()
	k.reboot("", "")
	want := [][]string{now.Stack}
	switch files {
	case "before":
		k.put(sb.ID, was)
		want = [][]string{old.Stack}
	case "between": // the old upper is away, the fresh one not there
		k.put(sb.ID, onDisk{layers: is.layers})
		want = [][]string{now.Stack, old.Stack}
	case "after":
		k.put(sb.ID, is)
	}
	put := func(r state.Root, pending string) {
		stack, _ := json.Marshal(r.Stack)
		sqlDo(t, dir, fmt.Sprintf(`UPDATE sandboxes SET boot_id = 'another', stack = '%s', point = '%s', pending = '%s' WHERE id = '%s'`, stack, r.Point, pending, id))
	}
	switch row {
	case "before":
		put(old, "")
	case "begun":
		p := state.PendingRoot{Op: state.RootReplace, Stack: now.Stack, Point: now.Point}
		if op == "snapshot" {
			p.Op, p.Layer = state.RootFreeze, now.Stack[len(now.Stack)-1]
		}
		if op == "two snapshots" { // of the first of them
			n := len(now.Stack) - 1
			p.Op, p.Layer, p.Stack = state.RootFreeze, now.Stack[n-1], now.Stack[:n]
		}
		text, _ := json.Marshal(p)
		put(old, string(text))
		want = append(want, p.Stack) // done again
		if files == "after" {
			want = [][]string{now.Stack}
		}
	case "after":
		put(now, "")
	}
	h = open(t, k, dir)
	got := h.root(t, sb.ID)
	if got.Pending != nil {
		t.Fatalf("a change is left pending: %+v", got.Pending)
	}
	if !slices.ContainsFunc(want, func(w []string) bool { return slices.Equal(w, got.Stack) }) {
		t.Errorf("it stands on %q, want one of %q (was %q)", got.Stack, want, old.Stack)
	}
	end := k.onDisk(sb.ID)
	if stack, _, known := h.baseOf(h.get(t, sb.ID), got.Image); end.upper && (!known || !slices.Equal(stack, got.Stack)) {
		t.Errorf("its upper was written on %q, %v; the row says %q", stack, known, got.Stack)
	}
	for _, l := range got.Stack {
		if isUpper(l) && !end.layers[l] {
			t.Errorf("layer %s is gone", l)
		}
	}
	if sb := h.get(t, sb.ID); sb.Status != sandbox.StatusStopped {
		t.Fatalf("it is %s (%s), want stopped", sb.Status, sb.Detail)
	}
	if _, err := h.Start(t.Context(), id, ""); err != nil {
		t.Error(err)
	}
}
