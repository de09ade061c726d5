package runtime

import (
	"context"
	"strconv"

	"github.com/sandboxd/sandboxd/sandbox"
)

// The rows of published ports. Who listens for them is package ingress.

// OnEnd has f called with each sandbox that has ended, before whoever ended it
// hears of that. It must be set before Recover, and f must be quick.
func (m *Manager) OnEnd(f func(sandbox.ID)) { m.onEnd = f }

// Living returns the record of a sandbox that has not ended. ErrNotFound, or
// ErrConflict with code sandbox_ended.
func (m *Manager) Living(ctx context.Context, ref string) (sandbox.Sandbox, error) {
	_, sb, err := m.find(ctx, ref)
	return sb, err
}

// PutPort writes a published port down. ErrConflict where its sandbox has
// ended meanwhile.
func (m *Manager) PutPort(ctx context.Context, p sandbox.Port, actor string) error {
	if err := m.state.PutPort(ctx, p); err != nil {
		return err
	}
	m.record(ctx, sandbox.Event{Sandbox: p.Sandbox, Type: "port.published", Actor: actor, Data: portData(p)})
	return nil
}

// Ports returns the published ports of one sandbox, or with an empty id those
// of all that live.
func (m *Manager) Ports(ctx context.Context, id sandbox.ID) ([]sandbox.Port, error) {
	all, err := m.state.Ports(ctx, id)
	if err != nil {
		return nil, err
	}
	living := all[:0]
	for _, p := range all {
		if m.box(p.Sandbox) != nil {
			living = append(living, p)
		}
	}
	return living, nil
}

// DeletePort removes a published port. ErrNotFound.
func (m *Manager) DeletePort(ctx context.Context, id, actor string) (sandbox.Port, error) {
	p, err := m.state.DeletePort(ctx, id)
	if err != nil {
		return p, err
	}
	m.record(ctx, sandbox.Event{Sandbox: p.Sandbox, Type: "port.removed", Actor: actor, Data: portData(p)})
	return p, nil
}

// SetPortToken notes the hash of what opens a sandbox's host names; nil takes
// it away.
func (m *Manager) SetPortToken(ctx context.Context, id sandbox.ID, hash []byte, actor string) error {
	if err := m.state.SetPortToken(ctx, id, hash); err != nil {
		return err
	}
	kind := "port.token_set"
	if hash == nil {
		kind = "port.token_removed"
	}
	m.record(ctx, sandbox.Event{Sandbox: id, Type: kind, Actor: actor})
	return nil
}

// ReleaseHostName frees the host name an owner holds, for other owners. Errors
// as those of the store.
func (m *Manager) ReleaseHostName(ctx context.Context, name, actor string) (sandbox.HostName, error) {
	h, err := m.state.ReleaseHostName(ctx, name)
	if err == nil {
		m.record(ctx, sandbox.Event{Type: "host_name.released", Actor: actor, Data: map[string]string{"name": name, "owner": h.Owner}})
	}
	return h, err
}

// PortTokens returns the hash of every sandbox's token.
func (m *Manager) PortTokens(ctx context.Context) (map[sandbox.ID][]byte, error) {
	return m.state.PortTokens(ctx)
}

func portData(p sandbox.Port) map[string]string {
	return map[string]string{"port": strconv.Itoa(int(p.Port)) + "/" + p.Protocol, "at": p.Where().String(), "id": p.ID}
}
