package runtime

import (
	"context"
	"database/sql"
	"errors"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/runtime/guest"
	"github.com/sandboxd/sandboxd/sandbox"
)

func create(t *testing.T, h *house, spec sandbox.Spec) sandbox.Sandbox {
	t.Helper()
	sb, err := h.Create(t.Context(), sandbox.CreateRequest{Spec: spec, Actor: "uid:0"})
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

// until polls the record until ok says so.
func until(t *testing.T, h *house, id sandbox.ID, ok func(sandbox.Sandbox) bool) sandbox.Sandbox {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; {
		sb, err := h.Sandbox(t.Context(), string(id))
		if err != nil {
			t.Fatal(err)
		}
		if ok(sb) {
			return sb
		}
		if time.Now().After(deadline) {
			t.Fatalf("sandbox stayed %s (%s: %s)", sb.Status, sb.Reason, sb.Detail)
		}
		<-time.After(2 * time.Millisecond)
	}
}

func TestLifeFromNothingToGone(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	sb := create(t, h, sandbox.Spec{Name: "a"})
	if sb.Status != sandbox.StatusRunning || sb.InitPID == 0 || sb.UIDBase == 0 || !sb.Address.IsValid() || sb.StartedAt == nil {
		t.Fatalf("created: %+v", sb)
	}
	h.agree(t)
	type step struct {
		do   func(context.Context, string, string) (sandbox.Sandbox, error)
		want sandbox.Status
	}
	for i, s := range []step{
		{h.Pause, sandbox.StatusPaused},
		{h.Resume, sandbox.StatusRunning},
		{h.Stop, sandbox.StatusStopped},
		{h.Start, sandbox.StatusRunning},
		{h.Pause, sandbox.StatusPaused},
		{h.Stop, sandbox.StatusStopped},
	} {
		got, err := s.do(t.Context(), "a", "uid:0")
		if err != nil || got.Status != s.want {
			t.Fatalf("step %d: %s, %v; want %s", i, got.Status, err, s.want)
		}
		h.agree(t)
	}
	if _, err := h.Pause(t.Context(), "a", ""); !errors.Is(err, sandbox.ErrConflict) || sandbox.CodeOf(err) != "wrong_state" {
		t.Errorf("pause a stopped sandbox: %v", err)
	}
	got, err := h.Remove(t.Context(), "a", "uid:0")
	if err != nil || got.Status != sandbox.StatusCompleted || got.Reason != sandbox.ReasonCancelled || got.EndedAt == nil {
		t.Fatalf("removed: %+v, %v", got, err)
	}
	h.agree(t)
	// Two shells of one CPU second each; a stopped sandbox keeps its counters.
	if got.Usage.CPUSeconds != 2 {
		t.Errorf("usage over two shells: %v cpu seconds, want 2", got.Usage.CPUSeconds)
	}
	again, err := h.Remove(t.Context(), string(sb.ID), "uid:0")
	if err != nil || again.Status != sandbox.StatusCompleted {
		t.Errorf("removed again: %+v, %v", again, err)
	}
	if _, err := h.Exec(t.Context(), string(sb.ID), sandbox.ProcessSpec{Argv: []string{"x"}}); sandbox.CodeOf(err) != "sandbox_ended" {
		t.Errorf("exec in an ended sandbox: %v", err)
	}
	// The name is free again.
	create(t, h, sandbox.Spec{Name: "a"})
}

// creationSteps are the steps of a creation in their order.
var creationSteps = []string{
	"cgroup.create", "rootfs.upper", "shell.start", "cgroup.settle", "cgroup.limits", "net.attach",
	"rootfs.mount", "guest.configure",
}

// releaseSteps are the steps of the teardown; those after the first go in the
// background.
var releaseSteps = []string{"cgroup.kill", "net.detach", "cgroup.remove", "shell.remove", "rootfs.discard"}

func TestEachCreationStepFails(t *testing.T) {
	for _, step := range creationSteps {
		t.Run(step, func(t *testing.T) {
			h := open(t, newKernel(t), t.TempDir())
			h.k.setFail(step, true)
			_, err := h.Create(t.Context(), sandbox.CreateRequest{Spec: sandbox.Spec{Name: "a"}})
			if !errors.Is(err, errInjected) {
				t.Fatalf("create with %s failing: %v", step, err)
			}
			h.agree(t)
			sb, err := h.Sandbox(t.Context(), "a")
			if err != nil || sb.Status != sandbox.StatusFailed || sb.Reason != sandbox.ReasonCreateFailed || !strings.Contains(sb.Detail, step) {
				t.Errorf("record: %+v, %v", sb, err)
			}
			h.k.setFail(step, false) // positive control: the step was what failed it
			create(t, h, sandbox.Spec{Name: "a"})
			h.agree(t)
		})
	}
}

func TestEachReleaseStepFailsThenRecovers(t *testing.T) {
	for _, step := range releaseSteps {
		t.Run(step, func(t *testing.T) {
			k, dir := newKernel(t), t.TempDir()
			h := openPool(t, k, dir, 1, PoolConfig{})
			sb := create(t, h, sandbox.Spec{})
			k.setFail(step, true)
			_, err := h.Remove(t.Context(), string(sb.ID), "")
			got := h.get(t, sb.ID)
			if step == "cgroup.kill" {
				// One that may still run stays visible until it does not.
				if !errors.Is(err, sandbox.ErrUnavailable) || got.Status != sandbox.StatusCompleting || got.Reason != sandbox.ReasonCancelled {
					t.Fatalf("remove one that does not die: %v; %s %s", err, got.Status, got.Reason)
				}
			} else if err != nil || got.Status != sandbox.StatusCompleted {
				t.Fatalf("remove one that is dead: %v; %s", err, got.Status)
			}
			// Nobody gets the slot while something stands under it.
			if _, err := h.Create(t.Context(), sandbox.CreateRequest{}); sandbox.CodeOf(err) != "slots_exhausted" {
				t.Errorf("a second sandbox in the only slot: %v", err)
			}
			h.crash()
			k.setFail(step, false)
			h = openPool(t, k, dir, 1, PoolConfig{})
			got = until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status.Terminal() })
			if got.Reason != sandbox.ReasonCancelled {
				t.Errorf("reason %s, want the one it ended for", got.Reason)
			}
			h.agree(t)
			create(t, h, sandbox.Spec{}) // the slot is free again
		})
	}
}

// TestCleanUpIsTriedAgain: a failure in the background is not the end of it.
func TestCleanUpIsTriedAgain(t *testing.T) {
	k := newKernel(t)
	h := openPool(t, k, t.TempDir(), 1, PoolConfig{})
	h.retry = 10 * time.Millisecond
	sb := create(t, h, sandbox.Spec{})
	k.setFail("rootfs.discard", true)
	if _, err := h.Remove(t.Context(), string(sb.ID), ""); err != nil {
		t.Fatal(err)
	}
	if wrong := h.differences(t); len(wrong) == 0 {
		t.Error("nothing is left over: the step did not fail")
	}
	k.setFail("rootfs.discard", false)
	h.agree(t)
}

// TestCrashAtEachCreationStep kills the daemon inside each step: the step
// hangs, the daemon goes, the next one finds what was there.
func TestCrashAtEachCreationStep(t *testing.T) {
	for i, step := range creationSteps {
		t.Run(step, func(t *testing.T) {
			k, dir := newKernel(t), t.TempDir()
			h := open(t, k, dir)
			sb := create(t, h, sandbox.Spec{})
			h.crash()
			// The state a crash inside the step leaves: the row says creating,
			// objects of later steps do not exist.
			forge(t, k, dir, sb.ID, i)
			h = open(t, k, dir)
			h.agree(t)
			got, err := h.Sandbox(t.Context(), string(sb.ID))
			if err != nil || got.Status != sandbox.StatusFailed {
				t.Errorf("after the crash: %s %s, %v", got.Status, got.Reason, err)
			}
		})
	}
}

// forge rewrites history: a running sandbox becomes one whose creation came
// as far as the step before n.
func forge(t *testing.T, k *kernel, dir string, id sandbox.ID, n int) {
	t.Helper()
	db, err := sql.Open("sqlite3", filepath.Join(dir, "sandboxd.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.ExecContext(t.Context(), `UPDATE sandboxes SET status = 'creating', started_at = NULL, init_pid = 0 WHERE id = ?`, id); err != nil {
		t.Fatal(err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for i, undo := range []func(){
		0: func() { delete(k.cgroups, id) },
		1: func() { delete(k.uppers, id) },
		2: func() {
			_ = unix.Kill(k.pids[id], unix.SIGKILL)
			delete(k.pids, id)
			delete(k.sockets, id)
		},
		5: func() { delete(k.links, id) },
	} {
		if undo != nil && i >= n {
			undo()
		}
	}
}

func TestRestartAdoptsAndSecondRecoveryChangesNothing(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	running, paused, stopped := create(t, h, sandbox.Spec{}), create(t, h, sandbox.Spec{}), create(t, h, sandbox.Spec{})
	if _, err := h.Pause(t.Context(), string(paused.ID), ""); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Stop(t.Context(), string(stopped.ID), ""); err != nil {
		t.Fatal(err)
	}
	var before int64
	for range 3 {
		h.crash()
		h = open(t, k, dir)
		h.agree(t)
		for id, want := range map[sandbox.ID]sandbox.Status{running.ID: sandbox.StatusRunning, paused.ID: sandbox.StatusPaused, stopped.ID: sandbox.StatusStopped} {
			if sb, err := h.Sandbox(t.Context(), string(id)); err != nil || sb.Status != want || sb.InitPID != map[bool]int{true: 0, false: sb.InitPID}[want == sandbox.StatusStopped] {
				t.Errorf("after a restart %s is %s (pid %d), %v; want %s", id, sb.Status, sb.InitPID, err, want)
			}
		}
		events, err := h.Events(t.Context(), 0, "", 1000)
		if err != nil {
			t.Fatal(err)
		}
		if before != 0 && int64(len(events)) != before {
			t.Errorf("recovery wrote events: %d, had %d", len(events), before)
		}
		before = int64(len(events))
	}
	for _, id := range []sandbox.ID{running.ID, paused.ID, stopped.ID} {
		if _, err := h.Remove(t.Context(), string(id), ""); err != nil {
			t.Error(err)
		}
	}
	h.agree(t)
}

func TestPID1GoneWhileTheDaemonWasAway(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	sb := create(t, h, sandbox.Spec{})
	h.crash()
	k.mu.Lock()
	_ = unix.Kill(k.pids[sb.ID], unix.SIGKILL)
	_, _ = unix.Wait4(k.pids[sb.ID], nil, 0, nil)
	delete(k.pids, sb.ID)
	k.mu.Unlock()
	h = open(t, k, dir)
	h.agree(t)
	if got, err := h.Sandbox(t.Context(), string(sb.ID)); err != nil || got.Status != sandbox.StatusFailed || got.Reason != sandbox.ReasonCrashed {
		t.Errorf("%s %s, %v; want failed, crashed", got.Status, got.Reason, err)
	}
}

func TestPID1DiesUnderTheDaemon(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	sb := create(t, h, sandbox.Spec{})
	h.k.mu.Lock()
	_ = unix.Kill(h.k.pids[sb.ID], unix.SIGKILL)
	delete(h.k.pids, sb.ID)
	h.k.mu.Unlock()
	got := until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status.Terminal() })
	if got.Reason != sandbox.ReasonCrashed {
		t.Errorf("reason %s, want crashed", got.Reason)
	}
	h.agree(t)
}

func TestOrphansAreSwept(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	open(t, k, dir).crash()
	id := sandbox.NewID()
	k.cgroups[id], k.uppers[id], k.links[id], k.sockets[id] = true, true, true, true
	open(t, k, dir).crash()
	if !k.uppers[id] || !k.cgroups[id] {
		t.Error("files that somebody wrote, of a sandbox in no row, are gone, or what runs there is")
	}
	k.plain = true
	open(t, k, dir).agree(t)
}

func TestTTLAndIdle(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	ttl := create(t, h, sandbox.Spec{TTLSeconds: 1})
	if ttl.Deadline == nil {
		t.Fatal("no deadline in the record")
	}
	idle := create(t, h, sandbox.Spec{IdleTimeoutSeconds: 1})
	busy := create(t, h, sandbox.Spec{IdleTimeoutSeconds: 1})
	h.k.mu.Lock()
	ch := h.k.events[string(busy.ID)]
	if ch == nil {
		ch = make(chan guest.Event, 8)
		h.k.events[string(busy.ID)] = ch
	}
	h.k.mu.Unlock()
	p := sandbox.Process{ID: "p1", Argv: []string{"x"}}
	ch <- guest.Event{Seq: 1, Type: "started", Live: 1, Process: p}
	for id, want := range map[sandbox.ID]sandbox.Reason{ttl.ID: sandbox.ReasonTTL, idle.ID: sandbox.ReasonIdle} {
		if got := until(t, h, id, func(s sandbox.Sandbox) bool { return s.Status.Terminal() }); got.Reason != want {
			t.Errorf("reason %s, want %s", got.Reason, want)
		}
	}
	// Positive control: the one whose process runs outlived the other's end.
	if got, err := h.Sandbox(t.Context(), string(busy.ID)); err != nil || got.Status != sandbox.StatusRunning {
		t.Fatalf("a sandbox with a running process: %s %s, %v", got.Status, got.Reason, err)
	}
	p.Exit = &sandbox.ExitStatus{At: time.Now()}
	ch <- guest.Event{Seq: 2, Type: processExited, Live: 0, Process: p}
	if got := until(t, h, busy.ID, func(s sandbox.Sandbox) bool { return s.Status.Terminal() }); got.Reason != sandbox.ReasonIdle {
		t.Errorf("after its process: %s, want idle", got.Reason)
	}
}

// TestIdleIsJudgedAgain: a sandbox whose idle timeout was over is not ended where
// somebody called before its turn came, or where a process runs of which the events
// are not read yet. The control is ended.
func TestIdleIsJudgedAgain(t *testing.T) {
	for name, c := range map[string]struct{ called, works bool }{"control": {}, "called": {called: true}, "works": {works: true}} {
		t.Run(name, func(t *testing.T) {
			h := open(t, newKernel(t), t.TempDir())
			sb := create(t, h, sandbox.Spec{IdleTimeoutSeconds: 1})
			b := h.box(sb.ID)
			if err := b.lock(t.Context()); err != nil {
				t.Fatal(err)
			}
			<-time.After(2500 * time.Millisecond) // its end waits for the box
			if c.called {
				defer b.enter()()
			}
			if c.works {
				h.k.setLive(1)
			}
			b.unlock()
			if err := b.lock(t.Context()); err != nil { // after who waits
				t.Fatal(err)
			}
			if s := h.get(t, sb.ID).Status; s.Terminal() == (c.called || c.works) {
				t.Errorf("it is %s", s)
			}
			b.unlock()
		})
	}
}

func TestMainProcessEndsTheSandbox(t *testing.T) {
	for name, c := range map[string]struct {
		exit sandbox.ExitStatus
		oom  uint64
		want sandbox.Reason
	}{
		"exited":  {sandbox.ExitStatus{Code: 3}, 0, sandbox.ReasonExited},
		"killed":  {sandbox.ExitStatus{Code: 137, Signal: "SIGKILL"}, 0, sandbox.ReasonExited},
		"oom":     {sandbox.ExitStatus{Code: 137, Signal: "SIGKILL"}, 1, sandbox.ReasonOOM},
		"timeout": {sandbox.ExitStatus{Code: 137, Signal: "SIGKILL", TimedOut: true}, 0, sandbox.ReasonTimeout},
	} {
		t.Run(name, func(t *testing.T) {
			h := open(t, newKernel(t), t.TempDir())
			sb := create(t, h, sandbox.Spec{})
			h.k.mu.Lock()
			h.k.oom[sb.ID] = c.oom
			ch := make(chan guest.Event, 8)
			if have := h.k.events[string(sb.ID)]; have != nil {
				ch = have
			}
			h.k.events[string(sb.ID)] = ch
			h.k.mu.Unlock()
			c.exit.At = time.Now()
			ch <- guest.Event{Seq: 1, Type: processExited, Process: sandbox.Process{ID: "p1", Argv: []string{"x"}, Main: true, Exit: &c.exit}}
			got := until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status.Terminal() })
			if got.Reason != c.want || got.ExitCode == nil || *got.ExitCode != c.exit.Code {
				t.Errorf("ended %s with %v, want %s with %d", got.Reason, got.ExitCode, c.want, c.exit.Code)
			}
			h.agree(t)
		})
	}
}

func TestIdempotencyKeyAndNames(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	req := sandbox.CreateRequest{Spec: sandbox.Spec{Name: "a"}, IdempotencyKey: "k", Actor: "uid:0"}
	one, err := h.Create(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	two, err := h.Create(t.Context(), req)
	if err != nil || two.ID != one.ID || two.Status != sandbox.StatusRunning {
		t.Errorf("the same key again: %s %s, %v; want %s running", two.ID, two.Status, err, one.ID)
	}
	req.Spec.Hostname = "other"
	if _, err := h.Create(t.Context(), req); sandbox.CodeOf(err) != "idempotency_mismatch" {
		t.Errorf("the same key, another request: %v", err)
	}
	if _, err := h.Create(t.Context(), sandbox.CreateRequest{Spec: sandbox.Spec{Name: "a"}, Actor: "uid:0"}); sandbox.CodeOf(err) != "name_taken" {
		t.Errorf("a name in use: %v", err)
	}
	for range 7 {
		create(t, h, sandbox.Spec{})
	}
	if _, err := h.Create(t.Context(), sandbox.CreateRequest{}); !errors.Is(err, sandbox.ErrExhausted) {
		t.Errorf("the ninth of eight slots: %v", err)
	}
	if _, err := h.Create(t.Context(), sandbox.CreateRequest{Spec: sandbox.Spec{Image: "nope"}}); sandbox.CodeOf(err) != "image_not_found" {
		t.Errorf("an unknown image: %v", err)
	}
	h.agree(t)
}

func TestReplacedImageStaysForItsSandboxes(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	imp := func(content string) sandbox.Image {
		img, err := h.ImportImage(t.Context(), sandbox.ImportRequest{Name: "img"}, strings.NewReader(content))
		if err != nil {
			t.Fatal(err)
		}
		return img
	}
	old := imp("one")
	sb := create(t, h, sandbox.Spec{Image: "img"})
	imp("two")
	if _, err := h.Stop(t.Context(), string(sb.ID), ""); err != nil {
		t.Fatal(err)
	}
	got, err := h.db.ImageOf(t.Context(), sb.ID)
	if err != nil || got.Digest != old.Digest {
		t.Errorf("the stopped sandbox would start on %s, %v; want %s", got.Digest, err, old.Digest)
	}
	h.collect(t, "one", "two")
	if _, err := h.Start(t.Context(), string(sb.ID), ""); err != nil {
		t.Error(err)
	}
	images, err := h.Images(t.Context())
	if err != nil || len(images) != 2 {
		t.Errorf("images: %v, %v; want host and img", images, err)
	}
	if _, err := h.Remove(t.Context(), string(sb.ID), ""); err != nil {
		t.Fatal(err)
	}
	h.collect(t, "two")
}

// collect collects layers and checks which are left.
func (h *house) collect(t *testing.T, want ...string) {
	t.Helper()
	if err := h.collectLayers(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.k.mu.Lock()
	defer h.k.mu.Unlock()
	have := slices.Sorted(maps.Keys(h.k.layers))
	if !slices.Equal(have, want) {
		t.Errorf("layers left: %v, want %v", have, want)
	}
}

func TestFailedStartKeepsTheFilesystem(t *testing.T) {
	for _, step := range creationSteps {
		if step == "rootfs.upper" {
			continue // safe to repeat; its failure is covered by creation
		}
		t.Run(step, func(t *testing.T) {
			h := open(t, newKernel(t), t.TempDir())
			sb := create(t, h, sandbox.Spec{})
			if _, err := h.Stop(t.Context(), string(sb.ID), ""); err != nil {
				t.Fatal(err)
			}
			h.k.setFail(step, true)
			if _, err := h.Start(t.Context(), string(sb.ID), ""); !errors.Is(err, errInjected) {
				t.Fatalf("start with %s failing: %v", step, err)
			}
			h.agree(t)
			h.k.setFail(step, false)
			if got, err := h.Start(t.Context(), string(sb.ID), ""); err != nil || got.Status != sandbox.StatusRunning {
				t.Errorf("started again: %s, %v", got.Status, err)
			}
			h.agree(t)
		})
	}
}
