package runtime

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// fault is what the fake kernel's link has.
func (k *kernel) fault(id sandbox.ID) *sandbox.NetworkFault {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.faults[id]
}

// told returns the events of faults of a sandbox, and why each was cleared.
func (h *house) told(t *testing.T, ref string) (all []string) {
	t.Helper()
	events, err := h.Events(t.Context(), 0, ref, 1000)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range events {
		switch e.Type {
		case eventFaultSet:
			all = append(all, e.Actor+" sets")
		case eventFaultCleared:
			all = append(all, e.Actor+" clears: "+e.Data["why"])
		}
	}
	return all
}

func TestFaultIsSetSeenAndCleared(t *testing.T) {
	k := newKernel(t)
	h := open(t, k, t.TempDir())
	sb := create(t, h, sandbox.Spec{Name: "a"})
	if err := h.ClearFault(t.Context(), "a", "me"); err != nil {
		t.Errorf("clearing none: %v", err)
	}
	if _, err := h.SetFault(t.Context(), "a", sandbox.NetworkFault{}, "me"); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("an empty fault: %v", err)
	}
	want := sandbox.NetworkFault{LatencyMS: 200, Seconds: 1000}
	set, err := h.SetFault(t.Context(), "a", want, "me")
	if err != nil || set.Until == nil || time.Until(*set.Until) < 900*time.Second {
		t.Fatalf("set: %+v, %v", set, err)
	}
	if f := k.fault(sb.ID); f == nil || f.LatencyMS != 200 {
		t.Errorf("the link has %+v", f)
	}
	if f, err := h.Fault(t.Context(), "a"); err != nil || f.LatencyMS != 200 {
		t.Errorf("told %+v, %v", f, err)
	}
	if s, err := h.Inspect(t.Context(), "a"); err != nil || s.Fault == nil || !s.Fault.Until.Equal(*set.Until) {
		t.Errorf("inspect: %+v, %v", s.Fault, err)
	}
	if err := h.ClearFault(t.Context(), "a", "you"); err != nil {
		t.Fatal(err)
	}
	if f, err := h.Fault(t.Context(), "a"); err != nil || !f.Zero() || k.fault(sb.ID) != nil {
		t.Errorf("after clearing: told %+v, %v; the link has %+v", f, err, k.fault(sb.ID))
	}
	if got := h.told(t, "a"); !slices.Equal(got, []string{"me sets", "you clears: request"}) {
		t.Errorf("events: %q", got)
	}
}

func TestFaultThatCannotBeSet(t *testing.T) {
	k := newKernel(t)
	h := open(t, k, t.TempDir())
	create(t, h, sandbox.Spec{Name: "a"})
	fault := sandbox.NetworkFault{Partition: true}
	k.setFail("net.fault", true)
	if _, err := h.SetFault(t.Context(), "a", fault, ""); !errors.Is(err, errInjected) {
		t.Errorf("error %v", err)
	}
	if f, _ := h.Fault(t.Context(), "a"); !f.Zero() || len(h.told(t, "a")) != 0 {
		t.Errorf("told %+v, events %q", f, h.told(t, "a"))
	}
	k.setFail("net.fault", false)
	if _, err := h.Stop(t.Context(), "a", ""); err != nil {
		t.Fatal(err)
	}
	if _, err := h.SetFault(t.Context(), "a", fault, ""); !errors.Is(err, sandbox.ErrConflict) {
		t.Errorf("of a stopped sandbox: %v", err)
	}
	if err := h.ClearFault(t.Context(), "a", ""); err != nil {
		t.Errorf("clearing that of a stopped sandbox: %v", err)
	}
}

// TestFaultEndsWithItsTime: also where the link resists at first, and not
// where another fault took its place.
func TestFaultEndsWithItsTime(t *testing.T) {
	k := newKernel(t)
	h := open(t, k, t.TempDir())
	h.retry = 20 * time.Millisecond
	sb := create(t, h, sandbox.Spec{Name: "a"})
	other := create(t, h, sandbox.Spec{Name: "b"})
	for _, ref := range []string{"a", "b"} {
		if _, err := h.SetFault(t.Context(), ref, sandbox.NetworkFault{Partition: true, Seconds: 5}, "me"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := h.SetFault(t.Context(), "b", sandbox.NetworkFault{LossPercent: 3}, "me"); err != nil {
		t.Fatal(err)
	}
	k.setFail("net.fault", true)
	<-time.After(5100 * time.Millisecond)
	if k.fault(sb.ID) == nil {
		t.Error("the injected failure did not keep the fault")
	}
	k.setFail("net.fault", false)
	for deadline := time.Now().Add(10 * time.Second); k.fault(sb.ID) != nil; <-time.After(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the fault outlives its time")
		}
	}
	for deadline := time.Now().Add(10 * time.Second); len(h.told(t, "a")) < 2; <-time.After(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("its end is not told")
		}
	}
	if got := h.told(t, "a"); !slices.Equal(got, []string{"me sets", "daemon clears: time"}) {
		t.Errorf("events: %q", got)
	}
	if f := k.fault(other.ID); f == nil || f.LossPercent != 3 {
		t.Errorf("the fault that replaced one: %+v", f)
	}
}

// TestFaultsOfAnEarlierDaemonAreTold: recovery ends them.
func TestFaultsOfAnEarlierDaemonAreTold(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	sb := create(t, h, sandbox.Spec{Name: "a"})
	if _, err := h.SetFault(t.Context(), "a", sandbox.NetworkFault{Partition: true, Seconds: 1000}, "me"); err != nil {
		t.Fatal(err)
	}
	h.crash()
	k.disturbed = []sandbox.ID{sb.ID}
	h = open(t, k, dir)
	if got := h.told(t, "a"); !slices.Equal(got, []string{"me sets", "daemon clears: restart"}) {
		t.Errorf("events: %q", got)
	}
	if f, err := h.Fault(t.Context(), "a"); err != nil || !f.Zero() {
		t.Errorf("told %+v, %v", f, err)
	}
}
