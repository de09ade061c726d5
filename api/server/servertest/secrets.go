package servertest

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// SetSecret implements server.Manager.
func (m *Memory) SetSecret(_ context.Context, req sandbox.SecretRequest) (sandbox.Secret, error) {
	if err := m.fail("SetSecret"); err != nil {
		return sandbox.Secret{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s := sandbox.Secret{Name: req.Name, Owner: req.Actor, Hosts: req.Hosts, CreatedAt: time.Now(), UpdatedAt: time.Now()}
	m.secrets = slices.DeleteFunc(m.secrets, func(o sandbox.Secret) bool { return o.Name == s.Name })
	m.secrets = append(m.secrets, s)
	slices.SortFunc(m.secrets, func(a, b sandbox.Secret) int { return strings.Compare(a.Name, b.Name) })
	if m.Values == nil {
		m.Values = map[string]string{}
	}
	m.Values[s.Name] = req.Value
	return s, nil
}

// Secrets implements server.Manager.
func (m *Memory) Secrets(context.Context) ([]sandbox.Secret, error) {
	if err := m.fail("Secrets"); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.secrets), nil
}

// RemoveSecret implements server.Manager.
func (m *Memory) RemoveSecret(_ context.Context, name, _ string) error {
	if err := m.fail("RemoveSecret"); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	n := len(m.secrets)
	m.secrets = slices.DeleteFunc(m.secrets, func(o sandbox.Secret) bool { return o.Name == name })
	if len(m.secrets) == n {
		return sandbox.Errorf(sandbox.ErrNotFound, "secret_not_found", "no secret %q", name)
	}
	delete(m.Values, name)
	return nil
}
