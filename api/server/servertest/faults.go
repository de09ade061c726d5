package servertest

import (
	"context"

	"github.com/sandboxd/sandboxd/sandbox"
)

// SetFault implements server.Manager.
func (m *Memory) SetFault(_ context.Context, ref string, f sandbox.NetworkFault, actor string) (sandbox.NetworkFault, error) {
	if err := f.Validate(); err != nil {
		return f, err
	}
	b, err := m.running("SetFault", ref)
	if err != nil {
		return f, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	b.sb.Fault = &f
	m.note(b.sb.ID, "net.fault.set", actor)
	return f, nil
}

// ClearFault implements server.Manager.
func (m *Memory) ClearFault(_ context.Context, ref, actor string) error {
	if err := m.fail("ClearFault"); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	b, err := m.find(ref)
	if err != nil {
		return err
	}
	if b.sb.Fault != nil {
		b.sb.Fault = nil
		m.note(b.sb.ID, "net.fault.cleared", actor)
	}
	return nil
}

// Fault implements server.Manager.
func (m *Memory) Fault(_ context.Context, ref string) (sandbox.NetworkFault, error) {
	if err := m.fail("Fault"); err != nil {
		return sandbox.NetworkFault{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	b, err := m.find(ref)
	if err != nil || b.sb.Fault == nil {
		return sandbox.NetworkFault{}, err
	}
	return *b.sb.Fault, nil
}
