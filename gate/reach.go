package gate

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// never lists what no setting opens: the asking machine itself, everyone, or
// nobody.
var never = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("127.0.0.0/8"),
	netip.MustParsePrefix("224.0.0.0/4"),
	netip.MustParsePrefix("240.0.0.0/4"),
}

func contains(list []netip.Prefix, addr netip.Addr) bool {
	return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(addr) })
}

// reach knows which addresses the gate may dial for anybody at all. The
// daemon's own connections pass none of the rules that hold for sandboxes, so
// everything those forbid is looked at here again.
type reach struct {
	pool        netip.Prefix // of sandboxes
	admit, deny []netip.Prefix
	foreign     func(netip.Addr) (bool, error) // not the host's own
}

// outside reports whether addr is an IPv4 address beyond the host and the
// sandboxes that the operator does not deny.
func (r reach) outside(addr netip.Addr) bool {
	if !addr.Is4() || contains(never, addr) || contains(r.deny, addr) || r.pool.Contains(addr) {
		return false
	}
	foreign, err := r.foreign(addr)
	return err == nil && foreign
}

// Bounds of a dial: this many addresses of a name are tried, each for so
// long, all together for so long.
const (
	dialAddrs = 4
	dialEach  = 5 * time.Second
	dialAll   = 15 * time.Second
)

// dialer opens a connection to an address that was judged.
type dialer func(ctx context.Context, dest netip.AddrPort) (*net.TCPConn, error)

// dialTCP dials dest and looks at it once more at the last moment, where no
// mistake above can matter any longer.
func (r reach) dialTCP(ctx context.Context, dest netip.AddrPort) (*net.TCPConn, error) {
	d := net.Dialer{Control: func(_, address string, _ syscall.RawConn) error {
		to, err := netip.ParseAddrPort(address)
		if err != nil || to != dest || !r.outside(to.Addr()) || !sandbox.IsPublic(to.Addr()) && !contains(r.admit, to.Addr()) {
			return fmt.Errorf("dial %s: it is not an address the gate may dial", address)
		}
		return nil
	}}
	c, err := d.DialContext(ctx, "tcp4", dest.String())
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", dest, err)
	}
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("dial %s: a %T is no TCP connection", dest, c), c.Close())
	}
	return tcp, nil
}

// connect dials a destination that g permits: the address it names, or the
// addresses of the host's name, prefer first where it is one of them.
func (s *Server) connect(ctx context.Context, t Tenant, p *policy, g grant, to target, prefer netip.Addr) (*net.TCPConn, *refusal) {
	ctx, cancel := context.WithTimeout(ctx, dialAll)
	defer cancel()
	addrs := []netip.Addr{g.addr}
	if !g.addr.IsValid() {
		var err error
		if addrs, err = s.cfg.Names.Lookup(ctx, t, to.host); err != nil {
			return nil, lookupRefusal(to.host, err)
		}
		if i := slices.Index(addrs, prefer); i > 0 {
			addrs = append([]netip.Addr{prefer}, slices.Delete(slices.Clone(addrs), i, i+1)...)
		}
	}
	ref := &refusal{status: http.StatusBadGateway, code: codeUpstream, detail: fmt.Sprintf("%s has no address", to.host)}
	for _, a := range addrs[:min(len(addrs), dialAddrs)] {
		dest := netip.AddrPortFrom(a, to.port)
		if why := p.unreachable(dest); why != nil {
			ref = why
			continue
		}
		if why := s.pace(ctx, t); why != nil {
			return nil, why
		}
		each, cancel := context.WithTimeout(ctx, dialEach)
		c, err := s.dial(each, dest)
		cancel()
		if err == nil {
			return c, nil
		}
		s.log.DebugContext(ctx, "gate: dial", "sandbox", t.ID, "to", dest, "err", err)
		ref = &refusal{status: http.StatusBadGateway, code: codeUpstream, detail: fmt.Sprintf("%s does not answer: %s", to, dialWords(err))}
	}
	return nil, ref
}

// lookupRefusal turns a resolver's error into what the sandbox sees.
func lookupRefusal(host string, err error) *refusal {
	if errors.Is(err, sandbox.ErrForbidden) {
		return denied("the name %s is not permitted: %s", host, sandboxWords(err))
	}
	return &refusal{status: http.StatusBadGateway, code: codeUpstream, detail: fmt.Sprintf("the name %s has no address here: %s", host, sandboxWords(err))}
}

// sandboxWords returns the text of an error that was made for people, and
// nothing of any other.
func sandboxWords(err error) string {
	if e, ok := errors.AsType[*sandbox.Error](err); ok {
		return strings.TrimSpace(e.Detail)
	}
	return "it could not be looked up"
}

// dialWords says why a dial came to nothing, without addresses of the host.
func dialWords(err error) string {
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return "no answer in time"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "connection refused"
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return "no route"
	}
	return "the connection could not be made"
}
