package runtime

import (
	"context"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Network tells what a sandbox may reach now, and what it sent. Of one that
// has ended it is what it was.
func (m *Manager) Network(ctx context.Context, ref string) (sandbox.NetworkState, error) {
	sb, err := m.Inspect(ctx, ref)
	if err != nil {
		return sandbox.NetworkState{}, err
	}
	return sandbox.NetworkState{Sandbox: sb.ID, Policy: sb.Spec.Network, Address: sb.Address, Gateway: m.net.Gateway(), Usage: sb.Usage}, nil
}
