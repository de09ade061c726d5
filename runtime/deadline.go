package runtime

import (
	"context"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// eventDeadline tells that a deadline was moved.
const eventDeadline = "sandbox.deadline"

// newDeadline is the deadline of a sandbox that begins to run, or goes on, and
// has none: its whole lifetime from now. Nil where it has one, or no lifetime.
func newDeadline(sb sandbox.Sandbox) *time.Time {
	if sb.Deadline != nil || sb.Spec.TTLSeconds <= 0 {
		return nil
	}
	at := time.Now().UTC().Add(time.Duration(sb.Spec.TTLSeconds) * time.Second)
	return &at
}

// SetDeadline moves the deadline of a living sandbox, or says what becomes of
// it then. On return it is written: a crash loses nothing of it. Repeating it
// counts from then. ErrConflict where the sandbox has ended or is not up yet.
func (m *Manager) SetDeadline(ctx context.Context, ref string, req sandbox.DeadlineRequest) (sandbox.Sandbox, error) {
	if err := req.Validate(); err != nil {
		return sandbox.Sandbox{}, err
	}
	return m.change(ctx, ref, func(ctx context.Context, b *box, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
		switch sb.Status {
		case sandbox.StatusRunning, sandbox.StatusPaused, sandbox.StatusStopped:
		default:
			return sb, wrongState(sb, "change the deadline of", sandbox.StatusRunning)
		}
		ch, changes := deadlineChange(sb, req, time.Now().UTC())
		if !changes {
			return sb, nil
		}
		if err := m.state.Update(ctx, b.id, ch); err != nil {
			return sb, err
		}
		row, err := m.state.Sandbox(ctx, b.id)
		if err == nil {
			m.armDeadline(b, row)
		}
		return row, err
	})
}

// deadlineChange is what a request does to a row; false where that is nothing.
func deadlineChange(sb sandbox.Sandbox, req sandbox.DeadlineRequest, now time.Time) (ch state.Change, changes bool) {
	spec := sb.Spec.Clone()
	next := time.Time{} // none
	if sb.Deadline != nil {
		next = *sb.Deadline
	}
	switch {
	case req.Hold:
		next = time.Time{}
	case req.TTLSeconds == nil:
	case *req.TTLSeconds == 0:
		next, spec.TTLSeconds = time.Time{}, 0
	default:
		at := now.Add(time.Duration(*req.TTLSeconds) * time.Second)
		held := sb.Deadline == nil && sb.Spec.TTLSeconds > 0
		if !req.AtLeast || held || sb.Deadline != nil && at.After(*sb.Deadline) {
			next, spec.TTLSeconds = at, *req.TTLSeconds
		}
	}
	if req.OnDeadline != "" {
		spec.OnDeadline = req.OnDeadline
	}
	before := time.Time{}
	if sb.Deadline != nil {
		before = *sb.Deadline
	}
	if next.Equal(before) && spec.TTLSeconds == sb.Spec.TTLSeconds && spec.OnDeadline == sb.Spec.OnDeadline {
		return ch, false
	}
	ch = state.Change{Spec: &spec, Deadline: &next, EventType: eventDeadline, Actor: req.Actor, Data: map[string]string{"deadline": "none"}}
	if !next.IsZero() {
		ch.Data["deadline"] = next.Format(time.RFC3339)
	}
	if spec.OnDeadline != "" {
		ch.Data["on_deadline"] = string(spec.OnDeadline)
	}
	return ch, true
}

// armDeadline starts the timer of the sandbox's lifetime, in place of an
// earlier one.
func (m *Manager) armDeadline(b *box, row sandbox.Sandbox) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ttl != nil {
		b.ttl.Stop()
		b.ttl = nil
	}
	if row.Deadline == nil || m.open() != nil { // an older row has an older deadline
		return
	}
	m.nap(b, *row.Deadline)
}

// deadlineNap bounds the wait for a deadline: timers do not count the time in which
// the host sleeps (timer_create(2), CLOCK_MONOTONIC), nor that by which its clock is
// set.
const deadlineNap = time.Minute

// nap waits for a deadline; b.mu is held.
func (m *Manager) nap(b *box, at time.Time) {
	var t *time.Timer
	t = time.AfterFunc(min(time.Until(at), deadlineNap), func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		switch {
		case b.ttl != t: // another was set
		case time.Until(at) > 0:
			m.nap(b, at)
		default:
			m.spawn(func() { m.atDeadline(b) })
		}
	})
	b.ttl = t
}

// atDeadline does what the row says, which may have changed since the timer
// was set. What fails is tried again.
func (m *Manager) atDeadline(b *box) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(m.life), teardownTimeout)
	defer cancel()
	again := func() { m.later(func() { m.atDeadline(b) }) }
	if b.lock(ctx) != nil {
		again()
		return
	}
	defer b.unlock()
	if m.box(b.id) != b {
		return // it has ended
	}
	row, err := m.state.Sandbox(ctx, b.id)
	switch {
	case err != nil:
		m.log.ErrorContext(ctx, "read a sandbox whose lifetime is over", "sandbox", b.id, "err", err)
		again()
	case row.Deadline == nil:
	case time.Until(*row.Deadline) > 0:
		m.armDeadline(b, row)
	case row.Spec.OnDeadline.Rests():
		if err := m.rest(ctx, b, row); err != nil {
			m.log.ErrorContext(ctx, "bring a sandbox whose lifetime is over to rest: tried again", "sandbox", b.id, "action", row.Spec.OnDeadline, "err", err)
			again()
		}
	default:
		_ = m.endLocked(ctx, b, ending{reason: sandbox.ReasonTTL, detail: lifetimeOver, actor: "daemon"}) // logs, and tries again by itself
	}
}

const lifetimeOver = "its lifetime was over"

// rest pauses or stops a sandbox at its deadline, and takes that away in the
// same commit. A stop that a crash cut off is finished by recovery, and the
// deadline then taken from the stopped row.
func (m *Manager) rest(ctx context.Context, b *box, row sandbox.Sandbox) error {
	reason, detail, none := sandbox.ReasonTTL, lifetimeOver, time.Time{}
	ch := state.Change{Actor: "daemon", Reason: &reason, Detail: &detail, Deadline: &none}
	stop := row.Spec.OnDeadline == sandbox.DeadlineStop
	switch {
	case row.Status == sandbox.StatusRunning && !stop:
		_, err := m.setFrozen(ctx, b, row, sandbox.StatusPaused, ch)
		return err
	case stop && (row.Status == sandbox.StatusRunning || row.Status == sandbox.StatusPaused):
		if err := m.state.Update(ctx, b.id, state.Change{InitPID: new(int)}); err != nil {
			return err
		}
		if row.Status == sandbox.StatusRunning {
			m.terminate(ctx, b)
		}
		_, _ = m.halt(ctx, b, row, ch) // logs, and tries again by itself
		return nil
	case row.Status == sandbox.StatusPaused, row.Status == sandbox.StatusStopped: // it rests already
		return m.state.Update(ctx, b.id, state.Change{Deadline: &none})
	}
	return wrongState(row, "end the lifetime of", sandbox.StatusRunning)
}
