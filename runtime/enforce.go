package runtime

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"
	"sync"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// enforce makes all that lives in a budget's scope be as it must, and reports
// whether something is not so yet. It waits for none of it.
func (m *Manager) enforce(b cost.Budget, holds cost.Action, key string, unknown error) (again bool) {
	if m.open() != nil {
		return false // what is spent may be another's, or have been raised since
	}
	for _, x := range m.livingOf(payersBy(b)) {
		whose := x.payers()
		x.mu.Lock()
		do, busy := wanted(holds, x.status, x.byBudget), x.acted
		if do == cost.ActionResume && m.allow(whose) != nil {
			do = cost.ActionNone // another one holds it
		}
		x.acted = busy || do != cost.ActionNone
		x.mu.Unlock()
		if do == cost.ActionNone {
			continue
		}
		again = true
		if !busy {
			m.spawn(func() { m.carryOut(x, do, key, unknown) })
		}
	}
	return again
}

// wanted is what to do with a sandbox in some status.
func wanted(holds cost.Action, s sandbox.Status, byBudget bool) cost.Action {
	switch {
	case holds == cost.ActionPause && s == sandbox.StatusRunning:
		return cost.ActionPause
	case holds == cost.ActionStop && (s == sandbox.StatusRunning || s == sandbox.StatusPaused):
		return cost.ActionStop
	case holds == cost.ActionNone && s == sandbox.StatusPaused && byBudget:
		return cost.ActionResume
	}
	return cost.ActionNone
}

// carryOut pauses, stops or resumes a sandbox. What does not work is tried again
// after the next look.
func (m *Manager) carryOut(x *box, do cost.Action, key string, unknown error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(m.life), actTimeout)
	defer cancel()
	acts, detail := false, "budget "+key+" was spent"
	if unknown != nil {
		detail = "budget " + key + " is not known: " + unknown.Error()
	}
	_, err := m.change(ctx, string(x.id), func(ctx context.Context, b *box, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
		acts = true
		reason := sandbox.ReasonBudget
		// What was found may be over: somebody else had the sandbox until now,
		// or the budget was raised or removed.
		held := m.strongest(x.payers())
		switch {
		case do == cost.ActionStop && held != do, do == cost.ActionPause && held == cost.ActionNone, do == cost.ActionResume && m.allow(x.payers()) != nil:
		case do == cost.ActionPause && sb.Status == sandbox.StatusRunning:
			return m.setFrozen(ctx, b, sb, sandbox.StatusPaused, state.Change{Actor: "daemon", Reason: &reason, Detail: &detail})
		case do == cost.ActionResume && sb.Status == sandbox.StatusPaused && sb.Reason == sandbox.ReasonBudget:
			return m.goOn(ctx, b, sb, "daemon")
		case do == cost.ActionStop && (sb.Status == sandbox.StatusRunning || sb.Status == sandbox.StatusPaused):
			// At once: nobody is asked to end, for that would be paid with what
			// is not there. A crash after this lets it go on until the next
			// daemon looks.
			if err := m.cgroup.Freeze(ctx, b.id); err != nil {
				m.log.WarnContext(ctx, "freeze a sandbox before its stop", "sandbox", b.id, "err", err)
			}
			if err := m.state.Update(ctx, b.id, state.Change{InitPID: new(int)}); err != nil {
				return sb, errors.Join(err, m.freezeAs(ctx, b.id, sb.Status))
			}
			return m.halt(ctx, b, sb, state.Change{Actor: "daemon", Reason: &reason, Detail: &detail})
		}
		acts = false
		return sb, nil
	})
	if acts && err == nil {
		m.sums.acted(do)
	}
	x.mu.Lock()
	x.acted = false
	again := err != nil && do == cost.ActionResume && !x.resumesLater
	x.resumesLater = x.resumesLater || again
	x.mu.Unlock()
	if err != nil && m.life.Err() == nil && m.box(x.id) == x {
		m.log.ErrorContext(ctx, "carry out a budget: tried again soon", "budget", key, "sandbox", x.id, "action", do, "err", err)
	}
	switch {
	case again: // nobody looks at a budget that was removed
		m.later(func() {
			x.mu.Lock()
			x.resumesLater = false
			x.mu.Unlock()
			m.release(x)
		})
	case acts && err == nil && do == cost.ActionPause: // the budget may have been raised or removed meanwhile
		m.release(x)
	}
}

// hostMemory is all memory of this host, in bytes.
var hostMemory = sync.OnceValue(func() uint64 {
	b, err := os.ReadFile("/proc/meminfo")
	if err == nil {
		for line := range strings.Lines(string(b)) {
			if rest, ok := strings.CutPrefix(line, "MemTotal:"); ok {
				if kib, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 40); err == nil {
					return kib << 10
				}
			}
		}
	}
	return 1 << 46
})
