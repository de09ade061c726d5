package runtime

import (
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/runtime/guest"
	"github.com/sandboxd/sandboxd/sandbox"
)

// eventsOf counts the events of a type.
func (h *house) eventsOf(t *testing.T, kind string) (n int) {
	t.Helper()
	for after := int64(0); ; {
		page, err := h.Events(t.Context(), after, "", 1000)
		if err != nil {
			t.Fatal(err)
		}
		if len(page) == 0 {
			return n
		}
		for _, e := range page {
			after = e.Seq
			if e.Type == kind {
				n++
			}
		}
	}
}

// TestMainEndsAmongLostEvents: PID 1 keeps so many events; the end of the main process
// counts also where it is not among them.
func TestMainEndsAmongLostEvents(t *testing.T) {
	k := newKernel(t)
	h := open(t, k, t.TempDir())
	sb := create(t, h, sandbox.Spec{})
	k.mu.Lock()
	k.procs[sb.ID] = []sandbox.Process{{ID: "p1", Argv: []string{"x"}, Main: true, Exit: &sandbox.ExitStatus{Code: 7, At: time.Now()}}}
	k.mu.Unlock()
	k.eventsOf(sb.ID) <- guest.Event{Seq: 64, Type: eventsLost}
	if got := until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status.Terminal() }); got.Reason != sandbox.ReasonExited || got.ExitCode == nil || *got.ExitCode != 7 {
		t.Errorf("it ended as %s, %v", got.Reason, got.ExitCode)
	}
}

// TestEventsToldAgain: PID 1 tells the next daemon everything it still
// knows; the log takes each end once, and the main process's still counts.
func TestEventsToldAgain(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	sb := create(t, h, sandbox.Spec{})
	ended := func(seq int64, id sandbox.ProcessID, main bool) guest.Event {
		return guest.Event{Seq: seq, Type: processExited, Live: 1, Process: sandbox.Process{
			ID: id, Argv: []string{"x"}, Main: main, Exit: &sandbox.ExitStatus{At: time.Now()},
		}}
	}
	first := []guest.Event{ended(2, "p1", false), ended(4, "p2", false)}
	for _, e := range first {
		k.eventsOf(sb.ID) <- e
	}
	recorded := func(n int) {
		t.Helper()
		for deadline := time.Now().Add(10 * time.Second); h.eventsOf(t, "process.exited") < n; {
			if time.Now().After(deadline) {
				t.Fatalf("%d ends in the log, want %d", h.eventsOf(t, "process.exited"), n)
			}
			<-time.After(time.Millisecond)
		}
	}
	recorded(2)
	h.crash()
	h = open(t, k, dir)
	for _, e := range append(first, ended(6, "p3", false)) {
		k.eventsOf(sb.ID) <- e
	}
	recorded(3)
	k.eventsOf(sb.ID) <- ended(7, "p4", true)
	until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status.Terminal() })
	if n := h.eventsOf(t, "process.exited"); n != 4 {
		t.Errorf("%d ends in the log, want 4", n)
	}
}

// TestHostilePID1 floods the daemon with events that make no sense: it goes
// on, its log grows by a bounded number, and so does its work.
func TestHostilePID1(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	sb, other := create(t, h, sandbox.Spec{}), create(t, h, sandbox.Spec{})
	ch := h.k.eventsOf(sb.ID)
	const flood = 5 * recordBurst
	go func() {
		for i := range int64(flood) {
			select {
			case ch <- guest.Event{Seq: i + 1, Type: processExited, Process: sandbox.Process{ID: "p1", Exit: &sandbox.ExitStatus{}, Main: i >= flood-10}}:
			case <-t.Context().Done(): // nobody listens after the end
				return
			}
		}
	}()
	until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status.Terminal() })
	if n := h.eventsOf(t, "process.exited"); n > 2*recordBurst {
		t.Errorf("%d of %d events went to the log", n, flood)
	}
	if got := h.get(t, other.ID); got.Status != sandbox.StatusRunning {
		t.Errorf("the neighbour is %s", got.Status)
	}
	h.agree(t)
}
