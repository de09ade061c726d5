package runtime

import (
	"context"

	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Network tells what a sandbox may reach now, and what it sent. Of one that
// has ended it is what it was.
func (m *Manager) Network(ctx context.Context, ref string) (sandbox.NetworkState, error) {
	sb, err := m.Inspect(ctx, ref)
	if err != nil {
		return sandbox.NetworkState{}, err
	}
	s := sandbox.NetworkState{Sandbox: sb.ID, Policy: m.inForce(sb.Spec.Network), Address: sb.Address, Gateway: m.net.Gateway(), Fault: sb.Fault, Usage: sb.Usage}
	if !sb.Status.Terminal() {
		s.Pins, err = m.net.Pins(sb.ID)
	}
	return s, err
}

// ExplainNetwork tells what would become of a new flow of a sandbox, by the
// rules in force now. Of one that does not run it is what they would be.
func (m *Manager) ExplainNetwork(ctx context.Context, ref string, q sandbox.NetworkQuery) (sandbox.NetworkVerdict, error) {
	sb, err := m.Sandbox(ctx, ref)
	if err != nil {
		return sandbox.NetworkVerdict{}, err
	}
	if sb.Status.Terminal() {
		return sandbox.NetworkVerdict{}, sandbox.Errorf(sandbox.ErrConflict, "sandbox_ended", "sandbox %s has ended: it reaches nothing", sb.ID)
	}
	return m.net.Explain(netns.Attachment{ID: sb.ID, Name: sb.Spec.Name, Slot: sb.Slot, Policy: m.inForce(sb.Spec.Network)}, q)
}
