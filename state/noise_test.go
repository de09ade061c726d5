package state

import (
	"maps"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

// TestPruneSparesOthersEnded: who ends sandboxes without end loses the records
// of its own.
func TestPruneSparesOthersEnded(t *testing.T) {
	d := open(t)
	end := func(owner string) sandbox.ID {
		t.Helper()
		p := params("")
		p.Sandbox.Owner = owner
		sb, _, err := d.CreateSandbox(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		return bring(t, d, sb, sandbox.StatusCompleted).ID
	}
	left := func(all []sandbox.ID) (n int) {
		t.Helper()
		if err := d.Prune(t.Context(), 6, 1000); err != nil {
			t.Fatal(err)
		}
		for _, id := range all {
			if _, err := d.Sandbox(t.Context(), id); err == nil {
				n++
			}
		}
		return n
	}
	quiet := []sandbox.ID{end("uid:1"), end("uid:1")}
	var noisy []sandbox.ID
	for range 10 {
		noisy = append(noisy, end("uid:2"))
	}
	if q, old, n := left(quiet), left(noisy[:6]), left(noisy); q != 2 || old != 0 || n != 4 {
		t.Errorf("%d of the quiet owner's are left, %d of the noisy one's, %d of them old", q, n, old)
	}
	for range 6 { // the control: it has most now
		quiet = append(quiet, end("uid:1"))
	}
	if q, first, n := left(quiet), left(quiet[:2]), left(noisy); q != 3 || first != 0 || n != 3 {
		t.Errorf("%d of the first owner's are left, %d of the other's, %d of the oldest", q, n, first)
	}
}

// TestPruneSparesOthers: who makes events without end loses its own, not those
// that tell of others, nor what tells of itself besides.
func TestPruneSparesOthers(t *testing.T) {
	d := open(t)
	quiet, noisy := sandbox.NewID(), sandbox.NewID()
	const keep, own = 160, 15 // events of neither's network flood, 5 of them the noisy one's
	write := func(id sandbox.ID, kind string, n int) {
		t.Helper()
		all := make([]sandbox.Event, n)
		for i := range all {
			all[i] = sandbox.Event{Sandbox: id, Type: kind, Actor: "daemon"}
		}
		if err := d.AppendEvents(t.Context(), all); err != nil {
			t.Fatal(err)
		}
	}
	count := func(id sandbox.ID, kind string) (n int) {
		t.Helper()
		all, err := d.Events(t.Context(), 0, id, 1000)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range all {
			if e.Type == kind {
				n++
			}
		}
		return n
	}
	prune := func() {
		t.Helper()
		if err := d.Prune(t.Context(), 0, keep); err != nil {
			t.Fatal(err)
		}
	}
	write(quiet, sandbox.EventNetDenied, 6)
	write(quiet, "sandbox.created", 4)
	write(noisy, "sandbox.created", 5)
	write(noisy, sandbox.EventNetDenied, 300)
	prune()
	if n := count(quiet, sandbox.EventNetDenied) + count(quiet, "sandbox.created"); n != own-5 {
		t.Errorf("%d events of another sandbox are left, want all %d", n, own-5)
	}
	if n := count(noisy, "sandbox.created"); n != 5 {
		t.Errorf("%d of the noisy one's other events are left, want 5", n)
	}
	if n := count(noisy, sandbox.EventNetDenied); n != keep-own {
		t.Errorf("%d of the noisy one's events are left, want the %d that there is room for", n, keep-own)
	}
	// Control: where nobody has too many, the oldest go.
	for range 2 * noisyShare {
		write(sandbox.NewID(), sandbox.EventNetDenied, keep/noisyShare)
	}
	prune()
	if n := count(quiet, "sandbox.created"); n != 0 {
		t.Errorf("%d of the oldest events are left", n)
	}
	all, err := d.Events(t.Context(), 0, "", 1000)
	if err != nil || len(all) != keep {
		t.Errorf("%d events are left, %v; want %d", len(all), err, keep)
	}
}

// TestPruneSparesOthersEvents: an owner who makes events without end, of many
// sandboxes or of none, loses its own; of another not even those of a sandbox
// that has many.
func TestPruneSparesOthersEvents(t *testing.T) {
	d := open(t)
	const keep, share = 160, 160 / 4
	made := func(owner string) sandbox.ID {
		t.Helper()
		p := params("")
		p.Sandbox.Owner = owner
		sb, _, err := d.CreateSandbox(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		return sb.ID
	}
	write := func(e sandbox.Event, n int) {
		t.Helper()
		all := make([]sandbox.Event, n)
		for i := range all {
			all[i] = e
		}
		if err := d.AppendEvents(t.Context(), all); err != nil {
			t.Fatal(err)
		}
	}
	left := func(owner string) (n int) {
		t.Helper()
		if err := d.Prune(t.Context(), 100, keep); err != nil {
			t.Fatal(err)
		}
		of, err := d.OwnEvents(t.Context(), owner, 0, 1000)
		if err != nil {
			t.Fatal(err)
		}
		return len(of)
	}
	write(sandbox.Event{Sandbox: made("uid:1"), Type: sandbox.EventNetDenied}, 2*keep/noisyShare)
	write(sandbox.Event{Type: "daemon.x"}, 5)
	quiet := left("uid:1")
	for range 30 {
		write(sandbox.Event{Sandbox: made("uid:2"), Type: "sandbox.x"}, keep/noisyShare/2)
		write(sandbox.Event{Type: "image.tagged", Actor: "uid:3"}, 10)
	}
	if one, two, three := left("uid:1"), left("uid:2"), left("uid:3"); one != quiet || quiet <= 2*keep/noisyShare || two < share || three < share || two-three > 1 || three-two > 1 || one+two+three+5 != keep {
		t.Errorf("%d of the quiet owner's %d are left, %d and %d of the noisy ones'", one, quiet, two, three)
	}
	all, err := d.Events(t.Context(), 0, "", 1000)
	if err != nil || len(all) != keep {
		t.Errorf("%d events are left, %v", len(all), err)
	}
	if upto, err := d.PrunedEvents(t.Context()); err != nil || upto < all[quiet].Seq || upto >= all[len(all)-1].Seq {
		t.Errorf("pruned up to %d, %v; %d to %d are left", upto, err, all[0].Seq, all[len(all)-1].Seq)
	}
	write(sandbox.Event{Type: "image.tagged", Actor: "uid:1"}, 4*keep) // the control: it has most now
	if one := left("uid:1"); one > keep/2 || one < share {
		t.Errorf("%d of the first owner's are left", one)
	}
	if all, err = d.Events(t.Context(), 0, "", 1000); err != nil || len(all) != keep || all[0].Type != "daemon.x" {
		t.Errorf("%d events are left, %v; the first %+v", len(all), err, all[0])
	}
}

func TestDisplaced(t *testing.T) {
	for _, tc := range []struct {
		has, want map[string]int64
		over      int64
	}{
		{map[string]int64{"a": 10, "b": 2}, map[string]int64{"a": 3}, 3},
		{map[string]int64{"a": 10, "b": 9, "c": 2}, map[string]int64{"a": 6, "b": 5}, 11},
		{map[string]int64{"a": 10, "b": 2}, map[string]int64{"a": 10, "b": 2}, 20},
		{map[string]int64{"a": 10}, map[string]int64{}, 0},
		{map[string]int64{}, map[string]int64{}, 5},
		{map[string]int64{"a": 1, "b": 1, "c": 1, "d": 0}, map[string]int64{"a": 1, "b": 1, "c": 1}, 3},
	} {
		if got := displaced(tc.has, tc.over); !maps.Equal(got, tc.want) {
			t.Errorf("%d over %v: %v, want %v", tc.over, tc.has, got, tc.want)
		}
	}
}

// TestPruneOfMany: what one transaction does not delete, the next ones do.
func TestPruneOfMany(t *testing.T) {
	d := open(t)
	for range 2*pruneAtOnce/1000 + 1 {
		if err := d.AppendEvents(t.Context(), make([]sandbox.Event, 1000)); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Prune(t.Context(), 0, 7); err != nil {
		t.Fatal(err)
	}
	if left, err := d.Events(t.Context(), 0, "", 1000); err != nil || len(left) != 7 {
		t.Errorf("%d events left, %v, want 7", len(left), err)
	}
}
