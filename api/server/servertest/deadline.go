package servertest

import (
	"context"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// SetDeadline implements server.Manager. Nothing happens at the deadline.
func (m *Memory) SetDeadline(_ context.Context, ref string, req sandbox.DeadlineRequest) (sandbox.Sandbox, error) {
	if err := m.fail("SetDeadline"); err != nil {
		return sandbox.Sandbox{}, err
	}
	if err := req.Validate(); err != nil {
		return sandbox.Sandbox{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	b, err := m.find(ref)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	if b.sb.Status.Terminal() {
		return sandbox.Sandbox{}, sandbox.Errorf(sandbox.ErrConflict, "sandbox_ended", "sandbox %s has ended", ref)
	}
	if req.OnDeadline != "" {
		b.sb.Spec.OnDeadline = req.OnDeadline
	}
	switch t := req.TTLSeconds; {
	case req.Hold:
		b.sb.Deadline = nil
	case t == nil:
	case *t == 0:
		b.sb.Deadline, b.sb.Spec.TTLSeconds = nil, 0
	default:
		at := time.Now().UTC().Add(time.Duration(*t) * time.Second)
		if !req.AtLeast || b.sb.Deadline != nil && at.After(*b.sb.Deadline) {
			b.sb.Deadline, b.sb.Spec.TTLSeconds = &at, *t
		}
	}
	m.note(b.sb.ID, "sandbox.deadline", req.Actor)
	return b.sb, nil
}
