package resolver

import (
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// hostAddressesAge is for how long the host's own addresses are believed. The
// rules of netns close them besides, without any delay.
const hostAddressesAge = 5 * time.Second

// never lists the ranges no setting puts into an answer: they mean the asking
// machine itself, everyone, or nobody.
var never = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("127.0.0.0/8"),
	netip.MustParsePrefix("224.0.0.0/4"),
	netip.MustParsePrefix("240.0.0.0/4"),
}

func contains(list []netip.Prefix, addr netip.Addr) bool {
	return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(addr) })
}

// reach knows which addresses an answer may hold.
type reach struct {
	pool        netip.Prefix
	admit, deny []netip.Prefix
	own         func() []netip.Addr // the host's
}

// outside reports whether addr lies outside the host and the sandboxes, and
// neither the operator's deny list nor its own nature closes it.
func (r reach) outside(addr netip.Addr) bool {
	return addr.Is4() && !contains(never, addr) && !contains(r.deny, addr) &&
		!r.pool.Contains(addr) && !slices.Contains(r.own(), addr)
}

// permits reports whether an answer to a sandbox with policy p may hold addr:
// a public one, or one in a range that the operator admits and an allow rule
// names.
func (r reach) permits(p *policy, addr netip.Addr) bool {
	if !r.outside(addr) || contains(p.denied, addr) {
		return false
	}
	return sandbox.IsPublic(addr) || (contains(r.admit, addr) && contains(p.admitted, addr))
}

// permitsUpstream reports whether the daemon may ask a resolver that a
// sandbox's policy chose: not on the host, and in no private range but
// admitted ones.
func (r reach) permitsUpstream(addr netip.Addr) bool {
	return r.outside(addr) && (sandbox.IsPublic(addr) || contains(r.admit, addr))
}

// hostAddresses remembers the host's own addresses for a moment.
type hostAddresses struct {
	mu    sync.Mutex
	read  time.Time
	addrs []netip.Addr
}

// get returns the host's IPv4 addresses. Where they cannot be read the last
// ones stand.
func (h *hostAddresses) get() []netip.Addr {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.read.IsZero() && time.Since(h.read) < hostAddressesAge {
		return h.addrs
	}
	all, err := net.InterfaceAddrs()
	if err != nil {
		return h.addrs
	}
	h.read, h.addrs = time.Now(), nil
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok {
			if addr, ok := netip.AddrFromSlice(n.IP); ok && addr.Unmap().Is4() {
				h.addrs = append(h.addrs, addr.Unmap())
			}
		}
	}
	return h.addrs
}
