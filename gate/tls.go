package gate

import (
	"net/http"
	"net/netip"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// alertAccessDenied is a fatal TLS alert (RFC 8446, 6): programs say "access
// denied" instead of puzzling over a broken connection.
var alertAccessDenied = []byte{21, 3, 3, 0, 2, 2, 49}

// serveTLS judges a TLS connection by its hello and passes it on.
func (s *Server) serveTLS(c *conn) {
	defer func() { _ = c.Close() }()                    // both sides are done
	_ = c.SetReadDeadline(time.Now().Add(helloTimeout)) // a broken connection shows at the next read
	h, err := readHello(s.life, c)
	if err != nil {
		s.refuseTLS(c, target{port: portTLS}, KindTLS, ambiguous("it is no TLS that can be judged: %s", err), len(h.raw) > 0 && h.raw[0] == 22)
		return
	}
	to := target{host: h.name, port: portTLS}
	if h.name == "" { // programs name no server where they use an address
		to.host, to.addr = c.origin.Addr().String(), c.origin.Addr()
	}
	t, p, ok := s.policyOf(c)
	if !ok {
		return
	}
	g, ref := p.judgeTLS(h, to, c.origin)
	if ref != nil {
		s.refuseTLS(c, to, KindTLS, ref, true)
		return
	}
	c.begin(p, func(p *policy) *refusal { _, ref := p.judgeTLS(h, to, c.origin); return ref })
	up, ref := s.connect(s.life, t, p, g, to, c.origin.Addr())
	if ref != nil {
		s.failTLS(c, to, KindTLS, g, ref)
		return
	}
	s.tell(Event{Sandbox: c.id, Kind: KindTLS, Permitted: true, Host: to.host, Port: to.port, Origin: c.origin, Rule: g.rule})
	if _, err := up.Write(h.raw); err != nil {
		_ = up.Close() // it is broken
		return
	}
	splice(c.TCPConn, up)
}

// judgeTLS decides about a hello.
func (p *policy) judgeTLS(h hello, to target, origin netip.AddrPort) (grant, *refusal) {
	g, ref := p.judge(to, origin)
	if ref != nil {
		if h.name == "" && ref.rule == "" {
			ref.detail = "it names no server (SNI), and " + ref.detail
		}
		return g, ref
	}
	// Nobody can tell a name that is encrypted from the random bytes some
	// browsers send in its place. It passes where no name would be refused.
	if h.ech && !g.addr.IsValid() && p.namesMatter() {
		return g, ambiguous("the hello may hide another name (encrypted client hello): switch that off in the program")
	}
	return g, nil
}

// namesMatter reports whether any name would be refused.
func (p *policy) namesMatter() bool {
	return p.source.Mode != sandbox.NetworkOpen ||
		slices.ContainsFunc(p.deny, func(r sandbox.NetworkRule) bool { return r.Domain != "" })
}

// refuseTLS tells the client as far as TLS can, and the audit.
func (s *Server) refuseTLS(c *conn, to target, kind string, ref *refusal, alert bool) {
	s.tell(Event{Sandbox: c.id, Kind: kind, Host: to.host, Port: to.port, Origin: c.origin, Rule: ref.rule, Code: ref.code, Detail: ref.detail})
	if alert {
		_ = c.SetWriteDeadline(time.Now().Add(time.Second)) // the client learns less where this fails
		_, _ = c.Write(alertAccessDenied)
	}
}

// failTLS ends a connection that was permitted and came to nothing.
func (s *Server) failTLS(c *conn, to target, kind string, g grant, ref *refusal) {
	if ref.status != http.StatusBadGateway { // an address of the name is forbidden
		s.refuseTLS(c, to, kind, ref, true)
		return
	}
	s.failed.Add(1)
	s.tell(Event{Sandbox: c.id, Kind: kind, Permitted: true, Host: to.host, Port: to.port, Origin: c.origin, Rule: g.rule, Code: ref.code, Detail: ref.detail})
	refuseTCP(c.TCPConn)
}
