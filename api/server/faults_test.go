package server_test

import (
	"errors"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

// TestFaultRoundTrip sets, reads and clears a fault through client and server.
func TestFaultRoundTrip(t *testing.T) {
	c := start(t).client(t)
	create(t, c, sandbox.Spec{Name: "box"})
	if f, err := c.Fault(t.Context(), "box"); err != nil || f != (sandbox.NetworkFault{}) {
		t.Errorf("before: %+v, %v", f, err)
	}
	want := sandbox.NetworkFault{LatencyMS: 200, JitterMS: 20, LossPercent: 0.5, RateBPS: 1_000_000, Seconds: 300}
	if f, err := c.SetFault(t.Context(), "box", want); err != nil || f != want {
		t.Errorf("set: %+v, %v", f, err)
	}
	if f, err := c.Fault(t.Context(), "box"); err != nil || f != want {
		t.Errorf("read: %+v, %v", f, err)
	}
	for range 2 {
		if err := c.ClearFault(t.Context(), "box"); err != nil {
			t.Errorf("clear: %v", err)
		}
	}
	if f, err := c.Fault(t.Context(), "box"); err != nil || !f.Zero() {
		t.Errorf("after: %+v, %v", f, err)
	}
	if _, err := c.SetFault(t.Context(), "box", sandbox.NetworkFault{}); sandbox.CodeOf(err) != "invalid_fault" {
		t.Errorf("an empty fault: %v", err)
	}
	if _, err := c.SetFault(t.Context(), "box", sandbox.NetworkFault{LossPercent: 101}); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("too much loss: %v", err)
	}
	if _, err := c.SetFault(t.Context(), "nobody", want); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("no sandbox: %v", err)
	}
}
