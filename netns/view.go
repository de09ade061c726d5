package netns

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// This file reads what the kernel has, for people: pins, and what a verdict
// depends on besides the policy.

// livePin is a pin in the kernel's set.
type livePin struct {
	name    string
	expires time.Time
}

// Explain tells what becomes of a new flow of a sandbox under a policy: by
// the steps of the rules, with the addresses and pins there are now. Nothing
// is sent. A name is judged as the resolver and the gate would. The query
// must be complete.
func (h *Host) Explain(a Attachment, q sandbox.NetworkQuery) (sandbox.NetworkVerdict, error) {
	l, err := h.planLink(a)
	if err != nil {
		return sandbox.NetworkVerdict{}, err
	}
	s, err := h.scene(l)
	if err != nil {
		return sandbox.NetworkVerdict{}, fmt.Errorf("explaining the network of sandbox %s: %w", a.ID, err)
	}
	if addr, err := netip.ParseAddr(q.Dest); err == nil {
		return s.explain(l, flow{addr.Unmap(), protocolNumber(q.Protocol), q.Port}), nil
	}
	return s.explainName(l, q.Dest, q.Protocol, q.Port), nil
}

// Pins returns the addresses a sandbox may reach by name now, those that end
// first first.
func (h *Host) Pins(id sandbox.ID) ([]sandbox.NetworkPin, error) {
	l, ok := h.lookup(id)
	if !ok {
		return nil, nil
	}
	pins, err := h.livePins(l)
	if err != nil {
		return nil, fmt.Errorf("reading the pins of sandbox %s: %w", id, err)
	}
	// One address may be pinned on several ports.
	var out []sandbox.NetworkPin
	for key, p := range pins {
		pin := sandbox.NetworkPin{Address: netip.AddrFrom4([4]byte([]byte(key[:4]))), Name: p.name, Expires: p.expires}
		i := slices.IndexFunc(out, func(o sandbox.NetworkPin) bool { return o.Address == pin.Address && o.Name == pin.Name })
		if i < 0 {
			out = append(out, pin)
		} else if out[i].Expires.Before(pin.Expires) {
			out[i].Expires = pin.Expires
		}
	}
	slices.SortFunc(out, func(a, b sandbox.NetworkPin) int {
		if c := a.Expires.Compare(b.Expires); c != 0 {
			return c
		}
		return a.Address.Compare(b.Address)
	})
	return out, nil
}

// livePins reads a sandbox's pins by their keys: those we know of that the
// kernel has, one by one, as all sandboxes share a set.
func (h *Host) livePins(l linkPlan) (map[string]livePin, error) {
	h.order.Lock()
	names := map[string]string{} // of keys
	prefix := ""
	if book := h.pins[l.id]; book != nil && book.prefix == l.prefix() {
		prefix = book.prefix
		for name, addrs := range book.names {
			for _, t := range l.tails(name) {
				for addr := range addrs {
					if key := string(t.key(addr)); !book.keys[key].IsZero() {
						names[key] = name
					}
				}
			}
		}
	}
	h.order.Unlock()
	now := time.Now()
	out := map[string]livePin{}
	for key, name := range names {
		left, ok, err := h.table.expires(setPins, pinKey(prefix, key))
		if err != nil {
			return nil, err
		}
		if ok {
			out[key] = livePin{name, now.Add(left)}
		}
	}
	return out, nil
}

// scene reads what a verdict on l depends on.
func (h *Host) scene(l linkPlan) (scene, error) {
	s := scene{table: h.table.plan, boxes: h.links(), tenant: h.linkAt}
	var err error
	if s.services.DNS, err = h.servicePort(setResolver); err != nil {
		return s, err
	}
	if s.services.Gate, err = h.servicePort(setGate); err != nil {
		return s, err
	}
	if s.pins, err = h.livePins(l); err != nil {
		return s, err
	}
	s.local, err = h.localAddresses()
	return s, err
}

// linkAt returns the plan of the sandbox that has an address.
func (h *Host) linkAt(addr netip.Addr) (linkPlan, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l, ok := h.known[h.tenants[addr]]
	return l, ok
}

// whyRefused returns what tells the reason of a refusal. It asks the kernel
// for the host's addresses at most every few seconds, and is for one goroutine.
func (h *Host) whyRefused() func(sandbox.ID, loggedPacket) string {
	var asked time.Time
	s := scene{table: h.table.plan, tenant: h.linkAt, services: Services{DNS: portDNS, Gate: portHTTP}}
	return func(id sandbox.ID, p loggedPacket) string {
		l, ok := h.lookup(id)
		if !ok {
			return ""
		}
		if time.Since(asked) > localKeep {
			local, err := h.localAddresses()
			if err != nil {
				return ""
			}
			s.local, asked = local, time.Now()
		}
		return s.whyRefused(l, p)
	}
}

// localKeep is how long the host's addresses are believed.
const localKeep = 5 * time.Second

// servicePort reads where one of the daemon's services listens, 0 for nowhere.
func (h *Host) servicePort(set string) (uint16, error) {
	keys, err := h.table.keys(set)
	if err != nil {
		return 0, err
	}
	const portAt = 8
	for _, k := range keys {
		if len(k) >= portAt+2 {
			return uint16(k[portAt])<<8 | uint16(k[portAt+1]), nil
		}
	}
	return 0, nil
}

// localAddresses returns what tells the kind of an address as the rules' fib
// lookup does: by the table of the host's own addresses, and else unicast.
func (h *Host) localAddresses() (func(netip.Addr) string, error) {
	routes, err := listing(func() ([]netlink.Route, error) {
		return h.route.RouteListFiltered(unix.AF_INET, &netlink.Route{Table: unix.RT_TABLE_LOCAL}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, fmt.Errorf("listing the host's addresses: %w", err)
	}
	return func(a netip.Addr) string { return kindOf(routes, a) }, nil
}

var (
	zeroNet   = netip.MustParsePrefix("0.0.0.0/8")
	broadcast = netip.MustParseAddr("255.255.255.255")
)

// kindOf is the kind of an address that is not a unicast one of somebody
// else's (inet_addr_type in the kernel's net/ipv4/fib_frontend.c).
func kindOf(routes []netlink.Route, a netip.Addr) string {
	switch {
	case zeroNet.Contains(a) || a == broadcast:
		return "broadcast"
	case a.IsMulticast():
		return "multicast"
	}
	best, kind := -1, ""
	for _, r := range routes {
		if r.Dst == nil {
			continue
		}
		base, ok := netip.AddrFromSlice(r.Dst.IP)
		bits, _ := r.Dst.Mask.Size()
		if !ok || bits <= best || !netip.PrefixFrom(base.Unmap(), bits).Contains(a) {
			continue
		}
		switch r.Type {
		case unix.RTN_LOCAL:
			best, kind = bits, "local"
		case unix.RTN_BROADCAST:
			best, kind = bits, "broadcast"
		case unix.RTN_ANYCAST, unix.RTN_MULTICAST:
			best, kind = bits, "multicast"
		default:
			best, kind = bits, ""
		}
	}
	return kind
}
