package servertest

import (
	"context"

	"github.com/sandboxd/sandboxd/sandbox"
)

// SetNetwork implements server.Manager.
func (m *Memory) SetNetwork(_ context.Context, ref string, p sandbox.NetworkPolicy, actor string) (sandbox.Sandbox, error) {
	if err := m.fail("SetNetwork"); err != nil {
		return sandbox.Sandbox{}, err
	}
	if err := p.Validate(); err != nil {
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
	b.sb.Spec.Network = p.Clone()
	m.note(b.sb.ID, "net.policy", actor)
	return b.sb, nil
}
