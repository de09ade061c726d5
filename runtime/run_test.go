package runtime

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// living lists the sandboxes that have not ended.
func living(t *testing.T, h *house) []sandbox.Sandbox {
	t.Helper()
	page, err := h.List(t.Context(), sandbox.Filter{})
	if err != nil {
		t.Fatal(err)
	}
	return page.Items
}

func TestRun(t *testing.T) {
	k := newKernel(t)
	h := open(t, k, t.TempDir())
	req := sandbox.CreateRequest{Spec: sandbox.Spec{Name: "a"}, IdempotencyKey: "k", Actor: "uid:0"}
	spec := sandbox.ProcessSpec{Argv: []string{"x"}}
	sb, p, err := h.Run(t.Context(), req, spec)
	if err != nil || sb.Status != sandbox.StatusRunning || p.Process().ID == "" {
		t.Fatalf("%+v %v", sb, err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	// The key runs nothing again, and the sandbox stays.
	<-time.After(2 * time.Millisecond) // Run tells an older sandbox by its time
	again, _, err := h.Run(t.Context(), req, spec)
	if !errors.Is(err, sandbox.ErrConflict) || sandbox.CodeOf(err) != "already_run" || again.ID != sb.ID {
		t.Errorf("again: %s, %v", again.ID, err)
	}
	if got := living(t, h); len(got) != 1 || got[0].ID != sb.ID {
		t.Errorf("%+v", got)
	}
}

func TestRunThatCannotStartLeavesNothing(t *testing.T) {
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for name, tc := range map[string]struct {
		ctx  context.Context
		fail string
		spec sandbox.ProcessSpec
	}{
		"no such command":  {t.Context(), "guest.exec", sandbox.ProcessSpec{Argv: []string{"x"}}},
		"no sandbox":       {t.Context(), "guest.configure", sandbox.ProcessSpec{Argv: []string{"x"}}},
		"no command":       {t.Context(), "", sandbox.ProcessSpec{}},
		"caller went away": {gone, "", sandbox.ProcessSpec{Argv: []string{"x"}}},
	} {
		t.Run(name, func(t *testing.T) {
			k := newKernel(t)
			h := open(t, k, t.TempDir())
			k.setFail(tc.fail, true)
			if _, p, err := h.Run(tc.ctx, sandbox.CreateRequest{Actor: "uid:0"}, tc.spec); err == nil || p != nil {
				t.Errorf("%v %v", p, err)
			}
			if got := living(t, h); len(got) != 0 {
				t.Errorf("left: %+v", got)
			}
			h.agree(t)
			k.setFail(tc.fail, false)
			if _, _, err := h.Run(t.Context(), sandbox.CreateRequest{Actor: "uid:0"}, sandbox.ProcessSpec{Argv: []string{"x"}}); err != nil {
				t.Errorf("control: %v", err)
			}
		})
	}
}
