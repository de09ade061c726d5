package runtime

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestQuarantineEndsNothing: whatever ends or stops a sandbox without being
// asked leaves it as it is in quarantine. The control is the next daemon, in
// none, which does it at once.
func TestQuarantineEndsNothing(t *testing.T) {
	budget := func(action cost.Action) func(t *testing.T, h *house, id sandbox.ID) {
		return func(t *testing.T, h *house, _ sandbox.ID) {
			setBudget(t, h, cost.BudgetRequest{Owner: "uid:1", Meter: cost.MeterMoney, Limit: "10", At: []cost.Threshold{{Percent: 100, Action: action}}})
		}
	}
	for name, c := range map[string]struct {
		spec          sandbox.Spec
		before, while func(t *testing.T, h *house, id sandbox.ID)
		reason        sandbox.Reason
	}{
		"budget of before":   {before: budget(cost.ActionStop), reason: sandbox.ReasonBudget},
		"budget":             {while: budget(cost.ActionStop), reason: sandbox.ReasonBudget},
		"budget that pauses": {while: budget(cost.ActionPause), reason: sandbox.ReasonBudget},
		"lifetime":           {spec: sandbox.Spec{TTLSeconds: 5}, reason: sandbox.ReasonTTL},
		"idle":               {spec: sandbox.Spec{IdleTimeoutSeconds: 5}, reason: sandbox.ReasonIdle},
		"PID 1": {while: func(_ *testing.T, h *house, id sandbox.ID) {
			h.k.mu.Lock()
			defer h.k.mu.Unlock()
			_ = unix.Kill(h.k.pids[id], unix.SIGKILL)
			delete(h.k.pids, id)
		}, reason: sandbox.ReasonCrashed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k, dir := newKernel(t), t.TempDir()
			h := openWith(t, k, dir, perSecond())
			sb, err := h.Create(t.Context(), sandbox.CreateRequest{Spec: c.spec, Actor: "uid:1"})
			if err != nil {
				t.Fatal(err)
			}
			if c.before != nil {
				c.before(t, h, sb.ID)
			}
			h.crash()
			k.burn(sb.ID, 90_000_000)
			h = openWith(t, k, dir, func(cfg *Config) { perSecond()(cfg); cfg.Quarantine = "the database is older than its volume" })
			if c.while != nil {
				c.while(t, h, sb.ID)
			}
			<-time.After(1500*time.Millisecond + 6*time.Second*time.Duration(min(1, c.spec.TTLSeconds+c.spec.IdleTimeoutSeconds)))
			if got := h.get(t, sb.ID); got.Status != sandbox.StatusRunning {
				t.Fatalf("in quarantine it became %s (%s: %s)", got.Status, got.Reason, got.Detail)
			}
			b, asked := h.box(sb.ID), make(chan error, 1)
			broke := sandbox.Errorf(sandbox.ErrUnavailable, "sandbox_unreachable", "it broke off")
			go func() { asked <- h.fate(b, b.present(), broke) }()
			select {
			case err := <-asked:
				if !errors.Is(err, broke) {
					t.Errorf("a call that broke off: %v", err)
				}
			case <-time.After(fateTimeout / 2):
				t.Error("a call that broke off waits for an end that cannot come")
			}
			if _, err := h.Stop(t.Context(), string(sb.ID), ""); sandbox.CodeOf(err) != codeQuarantine || !errors.Is(err, sandbox.ErrConflict) {
				t.Errorf("stop: %v", err)
			}
			h.crash()
			h = openWith(t, k, dir, perSecond())
			got := until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status != sandbox.StatusRunning })
			if c.reason != "" && got.Reason != c.reason {
				t.Errorf("afterwards %s (%s: %s), want %s", got.Status, got.Reason, got.Detail, c.reason)
			}
		})
	}
}
