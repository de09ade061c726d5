package netns

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

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
	l, ok := h.known[h.tenants[addr.Unmap()]]
	return Tenant{ID: l.id, Name: l.title, Policy: l.policy}, ok
}

// Peer returns the address of another member of a sandbox's group, by its name
// or id.
func (h *Host) Peer(id sandbox.ID, name string) (netip.Addr, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	me, ok := h.known[id]
	if !ok || me.group == 0 || name == "" {
		return netip.Addr{}, false
	}
	for other, l := range h.known {
		if l.group == me.group && (l.title == name || string(other) == name) {
			return l.addr, true
		}
	}
	return netip.Addr{}, false
}

// Redirect sends what sandboxes ask of the gateway's port 53, and the web
// traffic of gated ones, to the daemon's services. Repeating it is safe; a
// service left out is closed again.
func (h *Host) Redirect(ctx context.Context, s Services) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	h.order.Lock()
	defer h.order.Unlock()
	if err := h.table.redirect(planServices(h.Gateway(), s)); err != nil {
		return fmt.Errorf("leading sandboxes to the daemon's services: %w", err)
	}
	// Flows to the ports of the daemon before this one lead nowhere.
	h.reap.dropServed(h.Gateway())
	return nil
}

// planServices returns the elements of the sets that tell of services.
func planServices(gateway netip.Addr, s Services) map[string][]nftables.SetElement {
	out := map[string][]nftables.SetElement{setServices: nil, setResolver: nil, setGates: nil, setGate: nil}
	lead := func(list, at string, port, to uint16, protos ...byte) {
		if to == 0 {
			return
		}
		for _, proto := range protos {
			out[list] = append(out[list], nftables.SetElement{Key: serviceKey(proto, port), Val: []byte{byte(to >> 8), byte(to)}})
			key := nftables.SetElement{Key: pinTail{proto, to}.key(gateway)}
			if !slices.ContainsFunc(out[at], func(e nftables.SetElement) bool { return bytes.Equal(e.Key, key.Key) }) {
				out[at] = append(out[at], key)
			}
		}
	}
	lead(setServices, setResolver, portDNS, s.DNS, unix.IPPROTO_UDP, unix.IPPROTO_TCP)
	lead(setGates, setGate, portHTTP, s.Gate, unix.IPPROTO_TCP)
	lead(setGates, setGate, portHTTPS, s.Gate, unix.IPPROTO_TCP)
	return out
}

// CheckPolicy reports what the operator's configuration forbids in a policy,
// and what is more than the kernel should hold. Errors are of class
// ErrForbidden, ErrTooLarge or ErrInvalid.
func (h *Host) CheckPolicy(p sandbox.NetworkPolicy) error {
	var l linkPlan
	if err := l.planPolicy(p, ""); err != nil {
		return err
	}
	for _, r := range l.allow {
		if r.Domain != "" {
			continue
		}
		whole := []addrRange{rangeOf(r.Prefix)}
		if len(subtract(whole, h.table.plan.closed)) == 0 {
			return sandbox.Errorf(sandbox.ErrForbidden, "range_not_admitted",
				"network allow %s: no sandbox of this daemon may reach that range; its operator opens a private range with network.admit in the configuration, and closes one with network.deny", r)
		}
	}
	return nil
}

// groupMark returns the mark of a policy's group, 0 for none. No two groups
// that live have the same.
func (h *Host) groupMark(p sandbox.NetworkPolicy) uint32 {
	if p.Group == "" || !p.Connected() {
		return 0
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	mark, ok := h.groups[p.Group]
	if ok {
		return mark
	}
	used := map[uint32]bool{}
	lives := map[string]bool{}
	for _, l := range h.known {
		lives[l.policy.Group] = true
	}
	for name, m := range h.groups {
		if !lives[name] && len(h.groups) > maxIdleGroups {
			delete(h.groups, name)
			continue
		}
		used[m] = true
	}
	for mark = markOf("group\x00" + p.Group); used[mark] || mark == 0; mark++ {
	}
	h.groups[p.Group] = mark
	return mark
}

// maxIdleGroups is how many groups without members are remembered.
const maxIdleGroups = 1024
