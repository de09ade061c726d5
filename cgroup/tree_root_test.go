//go:build root

package cgroup

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestNoteOfAnEnd: it is there for another that opens the tree, and goes with
// the cgroup.
func TestNoteOfAnEnd(t *testing.T) {
	tree := newTree(t)
	id := sandbox.NewID()
	if err := tree.NoteEnd(id, []byte("x")); !errors.Is(err, unix.ENOENT) {
		t.Errorf("noted at no cgroup: %v", err)
	}
	for range 2 {
		if err := tree.Create(id); err != nil {
			t.Fatal(err)
		}
		if how := tree.EndNote(id); how != nil {
			t.Errorf("a new one says %q", how)
		}
		for _, how := range []string{"one", "another"} {
			if err := tree.NoteEnd(id, []byte(how)); err != nil {
				t.Fatal(err)
			}
			if got := tree.EndNote(id); string(got) != how {
				t.Errorf("says %q, want %q", got, how)
			}
		}
		if err := tree.Remove(soon(t), id); err != nil {
			t.Fatal(err)
		}
	}
}

func TestLifeOfATree(t *testing.T) {
	tree := newTree(t)
	id := sandbox.NewID()
	for range 2 {
		if err := tree.Create(id); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(dirOf(t, tree, id, partWork)); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("work before Settle: %v", err)
	}
	if u, err := tree.Usage(id); err != nil || u.PIDs != 0 {
		t.Fatalf("usage before Settle: %+v, %v", u, err)
	}
	init := start(t, dirOf(t, tree, id, partID), "wait", "")
	for range 2 {
		if err := tree.Settle(soon(t), id, init.Process.Pid, testUID); err != nil {
			t.Fatal(err)
		}
	}
	if pids, err := procs(dirOf(t, tree, id, partInit)); err != nil || !slices.Equal(pids, []int{init.Process.Pid}) {
		t.Fatalf("init holds %v, %v; want %d", pids, err, init.Process.Pid)
	}
	a := start(t, dirOf(t, tree, id, partWork), "wait", "")
	b := start(t, dirOf(t, tree, id, partWork), "wait", "")
	work, pids, err := tree.Processes(id)
	want := []int{init.Process.Pid, a.Process.Pid, b.Process.Pid}
	slices.Sort(want)
	if err != nil || work != 2 || !slices.Equal(pids, want) {
		t.Fatalf("%d in work, pids %v, %v; want 2, %v", work, pids, err, want)
	}
	if ids, err := tree.List(); err != nil || !slices.Equal(ids, []sandbox.ID{id}) {
		t.Fatalf("list %v, %v", ids, err)
	}

	for range 2 {
		if err := tree.KillWork(soon(t), id); err != nil {
			t.Fatal(err)
		}
	}
	if st := a.ended(t); st.Signal() != syscall.SIGKILL {
		t.Fatalf("a worker ended by %v", st)
	}
	b.ended(t)
	select {
	case <-init.done:
		t.Fatal("KillWork killed PID 1")
	default:
	}
	for range 2 {
		if err := tree.Kill(soon(t), id); err != nil {
			t.Fatal(err)
		}
	}
	init.ended(t)
	for range 2 {
		if err := tree.Remove(soon(t), id); err != nil {
			t.Fatal(err)
		}
	}
	if ids, err := tree.List(); err != nil || len(ids) != 0 {
		t.Fatalf("list after Remove: %v, %v", ids, err)
	}
}

func TestSettleMovesNobodyElse(t *testing.T) {
	tree := newTree(t)
	id, _ := settled(t, tree)
	for _, c := range []struct {
		pid int
		uid uint32
	}{{1, testUID}, {os.Getpid(), 0}} {
		if err := tree.Settle(soon(t), id, c.pid, c.uid); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("pid %d, uid %d: %v", c.pid, c.uid, err)
		}
	}
	gone := start(t, dirOf(t, tree, id, partWork), "cpus", "")
	gone.ended(t)
	if err := tree.Settle(soon(t), id, gone.Process.Pid, testUID); sandbox.CodeOf(err) != "process_gone" {
		t.Errorf("a process that ended: %v", err)
	}
}

// TestGuestRights plays PID 1 as the sandbox's own root: what it needs must
// work, what would lift a bound must not.
func TestGuestRights(t *testing.T) {
	testenv.Need(t, testenv.Userns)
	tree := newTree(t)
	id := sandbox.NewID()
	if err := tree.Create(id); err != nil {
		t.Fatal(err)
	}
	if err := makeCgroup(dirOf(t, tree, id, partWork)); err != nil {
		t.Fatal(err)
	}
	work, err := os.Open(dirOf(t, tree, id, partWork))
	if err != nil {
		t.Fatal(err)
	}
	defer work.Close()
	guest := start(t, dirOf(t, tree, id, partID), "guest", "", func(c *exec.Cmd) {
		maps := []syscall.SysProcIDMap{{ContainerID: 0, HostID: testUID, Size: 65536}}
		c.ExtraFiles = []*os.File{work}
		c.SysProcAttr.Cloneflags = unix.CLONE_NEWUSER
		// By unshare, not by clone: a cgroup namespace is rooted where its
		// maker stands, and at clone that still is the parent.
		c.SysProcAttr.Unshareflags = unix.CLONE_NEWCGROUP
		c.SysProcAttr.UidMappings, c.SysProcAttr.GidMappings = maps, maps
		c.SysProcAttr.Credential = &syscall.Credential{}
	})
	if err := tree.Settle(soon(t), id, guest.Process.Pid, testUID); err != nil {
		t.Fatal(err)
	}
	if _, err := guest.in.Write([]byte("go\n")); err != nil {
		t.Fatal(err)
	}
	var r guestReport
	if err := json.Unmarshal([]byte(guest.line(t)), &r); err != nil {
		t.Fatal(err)
	}
	if r.Cgroup[strings.LastIndex(r.Cgroup, "\n")+1:] != "0::/init" || !strings.HasSuffix(r.Born, "0::/work/p1") || !r.ChildLive {
		t.Errorf("PID 1 sees itself in %q, its child was born in %q, lives %v", r.Cgroup, r.Born, r.ChildLive)
	}
	for what, result := range r.Attempts {
		needed := what == "mkdir" || what == "fork"
		missing := result == unix.ENOENT.Error() && !tree.has(ctlMemory) // the file of a controller this host lacks
		switch {
		case needed && result != "":
			t.Errorf("%s: %s; PID 1 needs it", what, result)
		case !needed && !refused(result) && !missing:
			t.Errorf("%s: %q, want a refusal", what, result)
		}
	}
	// The control: host root may write what the guest may not.
	if err := write(dirOf(t, tree, id, partWork), "cgroup.max.descendants", "max"); err != nil {
		t.Errorf("host root: %v", err)
	}
	if err := tree.Remove(soon(t), id); err != nil {
		t.Fatal(err)
	}
}

func TestFreezeHoldsTheWorkloadAlone(t *testing.T) {
	tree := newTree(t)
	id, init := settled(t, tree)
	worker := start(t, dirOf(t, tree, id, partWork), "up", "")
	worker.line(t) // its signal handlers stand
	for range 2 {
		if err := tree.Freeze(soon(t), id); err != nil {
			t.Fatal(err)
		}
	}
	if frozen, err := tree.Frozen(id); err != nil || !frozen {
		t.Fatalf("frozen %v, %v", frozen, err)
	}
	// A signal with a handler waits for the thaw in a frozen process, and only
	// there. (One whose default action is death kills it frozen as it is.)
	for _, p := range []*process{worker, init} {
		if err := p.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
	}
	if st := init.ended(t); st.Signal() != syscall.SIGTERM {
		t.Fatalf("PID 1 ended by %v", st)
	}
	if n, _, err := tree.Processes(id); err != nil || n != 1 {
		t.Fatalf("%d processes in frozen work, %v; want 1", n, err)
	}
	for range 2 {
		if err := tree.Thaw(soon(t), id); err != nil {
			t.Fatal(err)
		}
	}
	if st := worker.ended(t); st.Signal() != syscall.SIGTERM {
		t.Fatalf("the thawed worker ended by %v", st)
	}
	if err := tree.Freeze(soon(t), sandbox.NewID()); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("freezing none: %v", err)
	}
}

func TestFreezeGivesUpThawed(t *testing.T) {
	tree := newTree(t)
	id, _ := settled(t, tree)
	worker := start(t, dirOf(t, tree, id, partWork), "burn", "")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	// Whether the kernel was faster than the look is not ours to say.
	err := tree.Freeze(ctx, id)
	if err != nil && !errors.Is(err, sandbox.ErrDeadline) {
		t.Fatal(err)
	}
	if err != nil {
		if wish, rerr := read(dirOf(t, tree, id, partWork), "cgroup.freeze"); rerr != nil || wish != "0" {
			t.Fatalf("given up, but cgroup.freeze is %q, %v", wish, rerr)
		}
	}
	if err := tree.Remove(soon(t), id); err != nil {
		t.Fatal(err)
	}
	worker.ended(t)
}

func TestRemoveOfWhateverIsLeft(t *testing.T) {
	tree := newTree(t)
	for name, prepare := range map[string]func(id sandbox.ID){
		"nothing": func(sandbox.ID) {},
		"never settled": func(id sandbox.ID) {
			if err := tree.Create(id); err != nil {
				t.Fatal(err)
			}
			start(t, dirOf(t, tree, id, partID), "wait", "")
		},
		"frozen, with cgroups of commands": func(id sandbox.ID) {
			if err := tree.Create(id); err != nil {
				t.Fatal(err)
			}
			init := start(t, dirOf(t, tree, id, partID), "wait", "")
			if err := tree.Settle(soon(t), id, init.Process.Pid, testUID); err != nil {
				t.Fatal(err)
			}
			for _, sub := range []string{"p1", "p2"} {
				dir := filepath.Join(dirOf(t, tree, id, partWork), sub)
				if err := makeCgroup(dir); err != nil {
					t.Fatal(err)
				}
				start(t, dir, "burn", "")
			}
			if err := tree.Freeze(soon(t), id); err != nil {
				t.Fatal(err)
			}
		},
	} {
		id := sandbox.NewID()
		prepare(id)
		for range 2 {
			if err := tree.Remove(soon(t), id); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		if _, err := os.Stat(dirOf(t, tree, id, partID)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: still there: %v", name, err)
		}
		if _, err := tree.Meter(id); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("meter of a removed cgroup: %v", err)
		}
		if _, err := tree.Usage(id); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("%s: usage: %v", name, err)
		}
		if err := tree.Kill(soon(t), id); err != nil {
			t.Errorf("%s: kill: %v", name, err)
		}
		if n, pids, err := tree.Processes(id); n != 0 || pids != nil || err != nil {
			t.Errorf("%s: processes %v, %v", name, pids, err)
		}
	}
}

func TestUsageCountsCPUWithoutControllers(t *testing.T) {
	tree := newTree(t)
	id, _ := settled(t, tree)
	before, err := tree.Usage(id)
	if err != nil {
		t.Fatal(err)
	}
	start(t, dirOf(t, tree, id, partWork), "burn", "")
	testenv.Eventually(t, 30*time.Second, "half a second of cpu time is counted", func() bool {
		now, err := tree.Usage(id)
		return err == nil && now.CPUSeconds > before.CPUSeconds+0.5 && now.CPUUserSeconds > 0
	})
	low, err := tree.Usage(id)
	metered, err2 := tree.Meter(id)
	high, err3 := tree.Usage(id)
	if err := errors.Join(err, err2, err3); err != nil || metered.CPUMicros < low.CPUMicros || metered.CPUMicros > high.CPUMicros || low.CPUMicros < 500_000 {
		t.Errorf("metered %d µs, between %d and %d, %v", metered.CPUMicros, low.CPUMicros, high.CPUMicros, err)
	}
	for _, c := range []string{ctlMemory, ctlPIDs, ctlIO} {
		u, err := tree.Usage(id)
		if err != nil || slices.Contains(u.Unknown, c) == tree.has(c) {
			t.Errorf("unknown %v, %v; the host has %v", u.Unknown, err, tree.Controllers())
		}
	}
}

func TestOpenNamesWhatIsMissing(t *testing.T) {
	tree := newTree(t)
	_, err := Open(Config{Mount: tree.mount, Parent: tree.parent})
	lack := missing(strings.Join(tree.Controllers(), " "), allControllers())
	if len(lack) == 0 {
		if err != nil {
			t.Fatalf("nothing is missing, yet %v", err)
		}
		return
	}
	if !errors.Is(err, sandbox.ErrUnsupported) || sandbox.CodeOf(err) != "cgroup_controllers_missing" {
		t.Fatalf("missing %v: %v", lack, err)
	}
	for _, word := range append(lack, "--cgroup=best-effort", "systemd.unified_cgroup_hierarchy=1") {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%q does not name %s", err, word)
		}
	}
}

func TestOpenStepsAside(t *testing.T) {
	tree := newTree(t)
	// As a unit's cgroup: it holds the daemon, and nothing is enabled in it.
	unit := filepath.Join(tree.dir, "unit.service")
	if err := makeCgroup(unit); err != nil {
		t.Fatal(err)
	}
	for _, parent := range []string{tree.parent + "/unit.service", tree.parent + "/unit.service/sandboxes"} {
		bystander := start(t, unit, "wait", "")
		daemon := start(t, unit, "open", parent)
		var r openReport
		if err := json.Unmarshal([]byte(daemon.line(t)), &r); err != nil {
			t.Fatal(err)
		}
		if own, err := parseOwnCgroup(r.Own); r.Err != "" || err != nil || own != tree.parent+"/unit.service/daemon" {
			t.Fatalf("opened with %q, stands in %q, %v", r.Err, own, err)
		}
		if pids, err := procs(unit); err != nil || len(pids) != 0 {
			t.Fatalf("still in the unit's cgroup: %v, %v", pids, err)
		}
		enabled, err := read(filepath.Join(tree.mount, parent), "cgroup.subtree_control")
		if lack := missing(enabled, tree.Controllers()); err != nil || len(lack) > 0 {
			t.Fatalf("not enabled for the sandboxes: %v, %v", lack, err)
		}
		_ = bystander.in.Close()
		bystander.ended(t)
		daemon.ended(t)
		if err := removeAll(unit); err != nil {
			t.Fatal(err)
		}
		if err := makeCgroup(unit); err != nil {
			t.Fatal(err)
		}
	}
	if ids, err := tree.List(); err != nil || len(ids) != 0 {
		t.Fatalf("a cgroup of another name is taken for a sandbox: %v, %v", ids, err)
	}
}

// TestHastenStays: the move that hastens others leads to where the daemon is.
func TestHastenStays(t *testing.T) {
	tree := newTree(t)
	before, err := ownCgroup()
	if err != nil {
		t.Fatal(err)
	}
	if err := stay(tree.mount); err != nil {
		t.Error("not moved to where it stands:", err)
	}
	tree.Hasten()
	if err := stay(tree.dir); err == nil {
		t.Errorf("moved below %s, which is not the root of its cgroup namespace", tree.dir)
	}
	if after, err := ownCgroup(); err != nil || after != before {
		t.Errorf("it stood in %s and stands in %s, %v", before, after, err)
	}
}

func TestOpenFindsWhatAnEarlierDaemonLeft(t *testing.T) {
	tree := newTree(t)
	id, init := settled(t, tree)
	if err := tree.SetLimits(id, sandbox.Limits{CPUs: 1}); err != nil {
		t.Fatal(err)
	}
	again, err := Open(Config{Mount: tree.mount, Parent: tree.parent, BestEffort: true})
	if err != nil {
		t.Fatal(err)
	}
	if ids, err := again.List(); err != nil || !slices.Equal(ids, []sandbox.ID{id}) {
		t.Fatalf("list %v, %v", ids, err)
	}
	if !slices.Equal(again.pinned[id].cpus, tree.pinned[id].cpus) {
		t.Fatalf("pinned to %v, was %v", again.pinned[id].cpus, tree.pinned[id].cpus)
	}
	select {
	case <-init.done:
		t.Fatal("opening ended a sandbox")
	default:
	}
	if err := again.Remove(soon(t), id); err != nil {
		t.Fatal(err)
	}
	if len(again.known) != 0 || len(again.pinned) != 0 {
		t.Fatalf("remembers %v, %v after Remove", again.known, again.pinned)
	}
}

// next returns the next event of a watcher.
func next(t testing.TB, w *Watcher) Event {
	t.Helper()
	select {
	case e, ok := <-w.Events():
		if !ok {
			t.Fatal("the watcher ended")
		}
		return e
	case <-time.After(20 * time.Second):
		t.Fatal("no event came")
	}
	return Event{}
}

func TestWatchTellsEnds(t *testing.T) {
	tree := newTree(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	w, err := tree.Watch(ctx)
	if err != nil {
		t.Fatal(err)
	}
	a, initA := settled(t, tree)
	b, _ := settled(t, tree)
	unwatched, _ := settled(t, tree)
	worker := start(t, dirOf(t, tree, a, partWork), "wait", "")
	for range 2 {
		for _, id := range []sandbox.ID{a, b, unwatched} {
			if err := w.Add(id); err != nil {
				t.Fatal(err)
			}
		}
		w.Remove(unwatched)
		w.Remove(unwatched)
	}
	if err := tree.Kill(soon(t), unwatched); err != nil {
		t.Fatal(err)
	}
	// Until the watcher has seen the worker live, its end is no change.
	testenv.Eventually(t, 10*time.Second, "the watcher knows the workload lives", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.watched[a].workLives
	})
	_ = worker.in.Close()
	if e := next(t, w); e != (Event{ID: a, Kind: EventWorkEmpty}) {
		t.Fatalf("event %+v", e)
	}
	_ = initA.in.Close()
	if e := next(t, w); e != (Event{ID: a, Kind: EventEmpty}) {
		t.Fatalf("event %+v", e)
	}
	if err := tree.Kill(soon(t), b); err != nil {
		t.Fatal(err)
	}
	if e := next(t, w); e != (Event{ID: b, Kind: EventEmpty}) {
		t.Fatalf("event %+v", e)
	}
	// Only now: the kernel tells of a second change within 10 ms by a timer
	// (cgroup_file_notify), and stops that with the removal.
	if err := tree.Remove(soon(t), b); err != nil { // under the watch
		t.Fatal(err)
	}
	// Whoever adds late hears of the end nevertheless.
	w.Remove(a)
	if err := w.Add(a); err != nil {
		t.Fatal(err)
	}
	if e := next(t, w); e != (Event{ID: a, Kind: EventEmpty}) {
		t.Fatalf("event %+v", e)
	}
	if err := w.Add(sandbox.NewID()); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("adding none: %v", err)
	}
	cancel()
	testenv.Eventually(t, 10*time.Second, "the watcher's channel closes with its context", func() bool {
		_, open := <-w.Events()
		return !open
	})
	if err := w.Add(b); !errors.Is(err, sandbox.ErrUnavailable) {
		t.Errorf("adding to an ended watcher: %v", err)
	}
}

func BenchmarkLife(b *testing.B) {
	tree := newTree(b)
	for b.Loop() {
		id, init := settled(b, tree)
		if err := tree.SetLimits(id, sandbox.Limits{CPUs: 1, MemoryBytes: 64 << 20, PIDs: 64}); err != nil {
			b.Fatal(err)
		}
		if err := tree.Kill(b.Context(), id); err != nil {
			b.Fatal(err)
		}
		<-init.done
		if err := tree.Remove(b.Context(), id); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkUsage(b *testing.B) {
	tree := newTree(b)
	id, _ := settled(b, tree)
	for b.Loop() {
		if _, err := tree.Usage(id); err != nil {
			b.Fatal(err)
		}
	}
}
