package runtime

import (
	"context"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// SetSecret sets a secret, in force for the next request that needs it.
// Repeating it is safe.
func (m *Manager) SetSecret(ctx context.Context, req sandbox.SecretRequest) (sandbox.Secret, error) {
	if err := req.Validate(); err != nil {
		return sandbox.Secret{}, err
	}
	now := time.Now().UTC()
	s, err := m.state.PutSecret(ctx, sandbox.Secret{Name: req.Name, Owner: req.Actor, Hosts: req.Hosts, CreatedAt: now, UpdatedAt: now}, req.Value)
	if err != nil {
		return s, err
	}
	m.record(context.WithoutCancel(ctx), sandbox.Event{Type: "secret.set", Actor: req.Actor, Data: map[string]string{"secret": req.Name}})
	return s, nil
}

// Secrets lists the secrets, without values, by name.
func (m *Manager) Secrets(ctx context.Context) ([]sandbox.Secret, error) { return m.state.Secrets(ctx) }

// SecretValue returns a secret with its value. It is the gate's to call: no
// answer of the API may hold it. ErrNotFound with code secret_not_found.
func (m *Manager) SecretValue(ctx context.Context, name string) (sandbox.Secret, string, error) {
	return m.state.Secret(ctx, name)
}

// RemoveSecret forgets a secret; requests that need it are refused from then
// on. ErrNotFound.
func (m *Manager) RemoveSecret(ctx context.Context, name, actor string) error {
	if err := m.state.DeleteSecret(ctx, name); err != nil {
		return err
	}
	m.record(context.WithoutCancel(ctx), sandbox.Event{Type: "secret.removed", Actor: actor, Data: map[string]string{"secret": name}})
	return nil
}
