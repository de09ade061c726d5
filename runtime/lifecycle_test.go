package runtime

import (
	"context"
	"errors"
	"reflect"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/runtime/guest"
	"github.com/sandboxd/sandboxd/sandbox"
)

func TestResetKeepsIdentity(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	sb := create(t, h, sandbox.Spec{Name: "a", TTLSeconds: 1000})
	k.mu.Lock()
	k.before[sb.ID] = 3 // PID 1 had made p1 to p3 when it took the new root
	k.mu.Unlock()
	got, err := h.Reset(t.Context(), "a", "me")
	if err != nil {
		t.Fatal(err)
	}
	kept := h.get(t, sb.ID)
	for what, s := range map[string]sandbox.Sandbox{"answer": got, "row": kept} {
		if s.Status != sandbox.StatusRunning || s.ID != sb.ID || s.Address != sb.Address || s.InitPID != sb.InitPID || s.InitPID == 0 || !s.Deadline.Equal(*sb.Deadline) {
			t.Errorf("%s of a reset: %+v, want as before: %+v", what, s, sb)
		}
	}
	h.agree(t)
	events, err := h.Events(t.Context(), 0, "a", 10)
	if err != nil || events[len(events)-1].Type != eventReset || events[len(events)-1].Actor != "me" {
		t.Errorf("events: %v, %v", events, err)
	}
	// What a main process of before does, is over, also for the next daemon,
	// whatever the event log has lost.
	ended := sandbox.Process{ID: "p3", Argv: []string{"x"}, Main: true, Exit: &sandbox.ExitStatus{Code: 137, Signal: "SIGKILL"}}
	h.eventsToldTo(t, sb.ID, ended)
	h.crash()
	sqlDo(t, dir, "DELETE FROM events")
	h = open(t, k, dir)
	h.eventsToldTo(t, sb.ID, ended)
	if s := h.get(t, sb.ID); s.Status != sandbox.StatusRunning {
		t.Errorf("ended by a main process that the reset ended: %s (%s)", s.Status, s.Reason)
	}
	ended.ID = "p4" // one of the new root does end it
	k.eventsOf(sb.ID) <- guest.Event{Seq: 3, Type: processExited, Process: ended}
	until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status.Terminal() })
}

// TestResetOvertakesTheEndOfAMainProcess: the end is known, but a client still
// takes its output when the reset comes.
func TestResetOvertakesTheEndOfAMainProcess(t *testing.T) {
	k := newKernel(t)
	h := open(t, k, t.TempDir())
	sb := create(t, h, sandbox.Spec{})
	io, err := h.Exec(t.Context(), string(sb.ID), sandbox.ProcessSpec{Argv: []string{"x"}, Main: true})
	if err != nil {
		t.Fatal(err)
	}
	h.eventsToldTo(t, sb.ID, sandbox.Process{ID: "p1", Argv: []string{"x"}, Main: true, Exit: &sandbox.ExitStatus{}})
	k.mu.Lock()
	k.before[sb.ID] = 1
	k.mu.Unlock()
	if _, err := h.Reset(t.Context(), string(sb.ID), ""); err != nil {
		t.Fatal(err)
	}
	_ = io.Close() // lets the end go on
	h.eventsToldTo(t, sb.ID, sandbox.Process{ID: "p1", Argv: []string{"x"}, Exit: &sandbox.ExitStatus{}})
	<-time.After(50 * time.Millisecond)
	if s := h.get(t, sb.ID); s.Status != sandbox.StatusRunning {
		t.Errorf("it is %s (%s), want running: it was reset", s.Status, s.Reason)
	}
	h.agree(t)
}

// eventsToldTo tells of the end of a process and waits until it was heard.
func (h *house) eventsToldTo(t *testing.T, id sandbox.ID, p sandbox.Process) {
	t.Helper()
	ch := h.k.eventsOf(id)
	ch <- guest.Event{Seq: 1, Type: processExited, Process: p}
	ch <- guest.Event{Seq: 2, Type: "started"} // taken when the first was dealt with
	for deadline := time.Now().Add(5 * time.Second); len(ch) > 0; <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("nobody listens to PID 1")
		}
	}
}

func TestResetThatFailsStops(t *testing.T) {
	for _, step := range []string{"rootfs.discard", "rootfs.upper", "rootfs.mount", "guest.configure"} {
		t.Run(step, func(t *testing.T) {
			h := open(t, newKernel(t), t.TempDir())
			sb := create(t, h, sandbox.Spec{})
			h.k.setFail(step, true)
			if _, err := h.Reset(t.Context(), string(sb.ID), ""); !errors.Is(err, errInjected) {
				t.Fatalf("reset: %v", err)
			}
			h.k.setFail(step, false)
			if got := h.get(t, sb.ID); got.Status != sandbox.StatusStopped {
				t.Errorf("it is %s, want stopped", got.Status)
			}
			if _, err := h.Start(t.Context(), string(sb.ID), ""); err != nil {
				t.Error(err)
			}
			h.agree(t)
		})
	}
}

func TestResetOfWhatDoesNotRun(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	sb := create(t, h, sandbox.Spec{})
	ref := string(sb.ID)
	for _, c := range []struct {
		to     func(context.Context, string, string) (sandbox.Sandbox, error)
		status sandbox.Status
	}{{h.Pause, sandbox.StatusPaused}, {h.Stop, sandbox.StatusStopped}} {
		if _, err := c.to(t.Context(), ref, ""); err != nil {
			t.Fatal(err)
		}
		got, err := h.Reset(t.Context(), ref, "")
		if err != nil || got.Status != c.status {
			t.Errorf("reset of a %s one: %s, %v", c.status, got.Status, err)
		}
		h.agree(t)
	}
	if _, err := h.Remove(t.Context(), ref, ""); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Reset(t.Context(), ref, ""); sandbox.CodeOf(err) != "sandbox_ended" {
		t.Errorf("reset of one that ended: %v", err)
	}
}

// TestRemovalKeepsWhatWasSaid: also where PID 1's last words are written while
// it dies, and whether that works or not. The answer is the record.
func TestRemovalKeepsWhatWasSaid(t *testing.T) {
	k := newKernel(t)
	h := open(t, k, t.TempDir())
	for _, broken := range []bool{false, true} {
		sb := create(t, h, sandbox.Spec{})
		k.mu.Lock()
		k.procs[sb.ID] = []sandbox.Process{{ID: "p1", Argv: []string{"sleep"}}}
		k.mu.Unlock()
		if broken { // the kill goes wrong at first: what was said is known by then
			k.setFail("cgroup.kill", true)
			if _, err := h.Remove(t.Context(), string(sb.ID), "me"); !errors.Is(err, sandbox.ErrUnavailable) {
				t.Fatalf("a removal whose kill fails: %v", err)
			}
			k.setFail("cgroup.kill", false)
		}
		got, err := h.Remove(t.Context(), string(sb.ID), "me")
		if err != nil || got.Status != sandbox.StatusCompleted || got.Reason != sandbox.ReasonCancelled {
			t.Fatalf("removed: %+v, %v", got, err)
		}
		if record := h.get(t, sb.ID); !reflect.DeepEqual(record, got) {
			t.Errorf("the answer is not the record:\n%+v\n%+v", got, record)
		}
		procs, err := h.db.Processes(t.Context(), sb.ID)
		if err != nil || len(procs) != 1 || procs[0].ID != "p1" {
			t.Errorf("kill fails %v: processes of the record: %+v, %v", broken, procs, err)
		}
	}
}
