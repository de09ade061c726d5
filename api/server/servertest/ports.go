package servertest

import (
	"context"
	"io"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// PublishPort implements server.Manager; nothing listens.
func (m *Memory) PublishPort(ctx context.Context, ref string, req sandbox.PortRequest, _ string) (sandbox.Port, error) {
	if err := req.Validate(); err != nil {
		return sandbox.Port{}, err
	}
	sb, err := m.Sandbox(ctx, ref)
	if err != nil {
		return sandbox.Port{}, err
	}
	p := sandbox.Port{
		ID: sandbox.NewPortID(), Sandbox: sb.ID, Protocol: req.Protocol, Address: req.Address, HostPort: req.HostPort, Port: req.Port, Public: req.Public, CreatedAt: time.Now(),
	}
	if p.Protocol == "" {
		p.Protocol = sandbox.ProtocolTCP
	}
	if !p.Address.IsValid() {
		p.Address = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if slices.ContainsFunc(m.ports, func(o sandbox.Port) bool { return o.Where() == p.Where() && o.Protocol == p.Protocol }) {
		return p, sandbox.Errorf(sandbox.ErrConflict, "port_taken", "port %s is taken", p.Where())
	}
	if p.HostPort == 0 {
		p.HostPort = 40000 + uint16(len(m.ports))
	}
	m.ports = append(m.ports, p)
	return p, nil
}

// Ports implements server.Manager.
func (m *Memory) Ports(ctx context.Context, ref string) ([]sandbox.Port, error) {
	var id sandbox.ID
	if ref != "" {
		sb, err := m.Sandbox(ctx, ref)
		if err != nil {
			return nil, err
		}
		id = sb.ID
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(m.ports), func(p sandbox.Port) bool { return id != "" && p.Sandbox != id }), m.fail("Ports")
}

// UnpublishPort implements server.Manager.
func (m *Memory) UnpublishPort(_ context.Context, id, _ string) (sandbox.Port, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	i := slices.IndexFunc(m.ports, func(p sandbox.Port) bool { return p.ID == id })
	if i < 0 {
		return sandbox.Port{}, sandbox.Errorf(sandbox.ErrNotFound, "port_not_found", "no published port %.40q", id)
	}
	p := m.ports[i]
	m.ports = slices.Delete(m.ports, i, i+1)
	return p, m.fail("UnpublishPort")
}

// ReleaseHostName implements server.Manager.
func (m *Memory) ReleaseHostName(_ context.Context, name, _ string) (sandbox.HostName, error) {
	return sandbox.HostName{Name: name, Owner: "alice"}, m.fail("ReleaseHostName")
}

// NewPortToken implements server.Manager.
func (m *Memory) NewPortToken(ctx context.Context, ref, _ string) (string, error) {
	_, err := m.Sandbox(ctx, ref)
	return "TOKEN", err
}

// RemovePortToken implements server.Manager.
func (m *Memory) RemovePortToken(ctx context.Context, ref, _ string) error {
	_, err := m.Sandbox(ctx, ref)
	return err
}

// DialPort implements server.Manager: port 7 says back what it hears, and
// ends when its client does; nobody listens on others.
func (m *Memory) DialPort(ctx context.Context, ref string, port int) (net.Conn, error) {
	if _, err := m.Sandbox(ctx, ref); err != nil {
		return nil, err
	}
	if port != 7 {
		return nil, sandbox.Errorf(sandbox.ErrUnavailable, "port_closed", "nobody listens on port %d", port)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer ln.Close()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		return nil, err
	}
	back, err := ln.Accept()
	if err != nil {
		c.Close()
		return nil, err
	}
	go func() {
		_, _ = io.Copy(back, back) // until either end is gone
		back.Close()
	}()
	return c, nil
}
