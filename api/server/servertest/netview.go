package servertest

import (
	"context"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Network implements server.Manager.
func (m *Memory) Network(ctx context.Context, ref string) (sandbox.NetworkState, error) {
	if err := m.fail("Network"); err != nil {
		return sandbox.NetworkState{}, err
	}
	sb, err := m.Sandbox(ctx, ref)
	if err != nil {
		return sandbox.NetworkState{}, err
	}
	return sandbox.NetworkState{Sandbox: sb.ID, Policy: sb.Spec.Network, Address: sb.Address, Usage: sb.Usage}, nil
}
