package resolver

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/sandboxd/sandboxd/sandbox"
)

// errBusy means that as much is being asked upstream as may be.
var errBusy = errors.New("too many questions are being asked upstream")

// errRecently means that upstream did not answer a moment ago.
var errRecently = errors.New("no upstream resolver answered a moment ago")

// Bounds of an answer.
const (
	maxAddrs = 64
	maxData  = 4096 // bytes of other records
)

// data are the types that are answered besides A and PTR. They are asked
// seldom and can carry much, so their rate is lower.
var data = []uint16{dns.TypeCNAME, dns.TypeMX, dns.TypeTXT, dns.TypeSRV, dns.TypeNS, dns.TypeSOA, dns.TypeCAA, dns.TypeNAPTR}

// empty are the types that are answered with nothing: sandboxes have no IPv6,
// and service bindings (RFC 9460) hold addresses no rule has looked at and the
// keys that would hide a name from the web gate.
var empty = []uint16{dns.TypeAAAA, dns.TypeHTTPS, dns.TypeSVCB}

// reply is what a question comes to.
type reply struct {
	rcode   int
	records []dns.RR
	addrs   []netip.Addr // those of records
	pin     bool         // open them first
	ttl     time.Duration
	code    uint16 // of the extended error
	text    string // of the extended error; empty for none
	ruling  ruling
	quiet   bool // nothing for the audit
}

// refusal is a reply with an extended error (RFC 8914).
func refusal(rcode int, code uint16, text string) reply {
	return reply{rcode: rcode, code: code, text: text, quiet: true}
}

// denial is the reply to a name that policy keeps from a sandbox.
func denial(r ruling) reply {
	r.permitted = false
	return reply{rcode: dns.RcodeNameError, code: dns.ExtendedErrorCodeBlocked, text: "sandboxd: not permitted: " + r.why, ruling: r}
}

// accept looks at a message's header: questions only, one at a time.
func accept(h dns.Header) dns.MsgAcceptAction {
	const response, opcode = 1 << 15, 0xf
	switch {
	case h.Bits&response != 0:
		return dns.MsgIgnore
	case int(h.Bits>>11)&opcode != dns.OpcodeQuery:
		return dns.MsgRejectNotImplemented
	case h.Qdcount != 1 || h.Ancount != 0 || h.Nscount != 0 || h.Arcount > 2:
		return dns.MsgReject
	}
	return dns.MsgAccept
}

// ServeDNS answers one message.
func (s *Server) ServeDNS(w dns.ResponseWriter, req *dns.Msg) {
	resp := s.respond(s.ctx, addrOf(w.RemoteAddr()), req)
	if resp == nil {
		return
	}
	size := dns.MaxMsgSize
	if w.LocalAddr().Network() == "udp" {
		size = dns.MinMsgSize
		if opt := req.IsEdns0(); opt != nil {
			size = min(max(int(opt.UDPSize()), dns.MinMsgSize), udpSize)
		}
	}
	resp.Compress = true
	resp.Truncate(size)
	if err := w.WriteMsg(resp); err != nil {
		s.cfg.Log.Debug("answer a sandbox's question", "to", w.RemoteAddr(), "err", err)
	}
}

// respond makes the response to a message from an address; nil for none.
func (s *Server) respond(ctx context.Context, from netip.Addr, req *dns.Msg) *dns.Msg {
	t, ok := s.cfg.Sandboxes.Tenant(from)
	if !ok {
		return pack(req, refusal(dns.RcodeRefused, dns.ExtendedErrorCodeProhibited, "sandboxd: no sandbox has this address"))
	}
	s.stats.queries.Add(1)
	c := s.clients.get(t.ID, s.now())
	if !c.queries.Allow() || !c.enter() {
		s.stats.limited.Add(1)
		return pack(req, refusal(dns.RcodeRefused, dns.ExtendedErrorCodeOther, "sandboxd: too many questions, ask more slowly"))
	}
	defer c.leave()
	if r, bad := malformed(req); bad {
		return pack(req, r)
	}
	ctx, cancel := context.WithTimeout(ctx, totalTimeout)
	defer cancel()
	q := req.Question[0]
	p := c.compiled(t.Policy)
	r := s.decide(ctx, c, t, p, q)
	// Asking took time: the address may have passed to another sandbox, the
	// policy may have changed. What the cache holds now makes it short.
	now, ok := s.cfg.Sandboxes.Tenant(from)
	if !ok || now.ID != t.ID {
		return nil
	}
	if !p.same(now.Policy) {
		p = c.compiled(now.Policy)
		r = s.decide(ctx, c, now, p, q)
	}
	if r.pin {
		if err := s.pin(ctx, c, t.ID, q, r); err != nil {
			s.warn("open a name's addresses to a sandbox", "sandbox", t.ID, "name", q.Name, "err", err)
			r = refusal(dns.RcodeServerFailure, dns.ExtendedErrorCodeOther, "sandboxd: the addresses could not be opened: "+reason(err))
		}
	}
	s.tell(c, t.ID, q, r)
	return pack(req, r)
}

// warn logs one warning in a while: what brings it about is up to sandboxes.
func (s *Server) warn(msg string, args ...any) {
	if s.warnings.Allow() {
		s.cfg.Log.Warn(msg, args...)
	}
}

// reason is what a sandbox may know of an error: the sentence of a classified
// one, and of others nothing.
func reason(err error) string {
	if e, ok := errors.AsType[*sandbox.Error](err); ok {
		return e.Detail
	}
	return "an internal error"
}

// malformed replies to what is no question we could answer.
func malformed(req *dns.Msg) (reply, bool) {
	if len(req.Question) != 1 || req.Response || req.Opcode != dns.OpcodeQuery {
		return reply{rcode: dns.RcodeFormatError}, true
	}
	if opt := req.IsEdns0(); opt != nil && opt.Version() != 0 {
		return reply{rcode: dns.RcodeBadVers}, true
	}
	q := req.Question[0]
	if q.Qclass != dns.ClassINET {
		return refusal(dns.RcodeRefused, dns.ExtendedErrorCodeNotSupported, "sandboxd: only class IN is served"), true
	}
	if q.Qtype != dns.TypeA && q.Qtype != dns.TypePTR && !slices.Contains(data, q.Qtype) && !slices.Contains(empty, q.Qtype) {
		return refusal(dns.RcodeRefused, dns.ExtendedErrorCodeNotSupported, "sandboxd: records of type "+typeName(q.Qtype)+" are not served"), true
	}
	return reply{}, false
}

// typeName is the name of a record type; the library has none for most numbers.
func typeName(t uint16) string { return dns.Type(t).String() }

// decide rules on one question and answers it.
func (s *Server) decide(ctx context.Context, c *client, t Tenant, p *policy, q dns.Question) reply {
	if !p.source.Connected() {
		r := refusal(dns.RcodeRefused, dns.ExtendedErrorCodeProhibited, "sandboxd: the network is off")
		r.ruling, r.quiet = ruling{why: "the network is off"}, false
		return r
	}
	name, ok := normalize(q.Name)
	if !ok {
		return denial(ruling{why: "it is not the name of a host"})
	}
	if r, hit := p.refusedBy(name); hit {
		return denial(r)
	}
	switch placeOf(name) {
	case loopback:
		return local(q)
	case withdrawn:
		return reply{rcode: dns.RcodeNameError, quiet: true}
	case nowhere:
		return denial(ruling{why: "such names mean nothing on the internet and are not asked for"})
	case peers:
		return s.peer(t, p, name, q)
	case reverse:
		return s.reverse(ctx, c, t, p, name, q)
	}
	r := p.judge(name)
	if !r.permitted {
		return denial(r)
	}
	return s.resolve(ctx, c, p, r, name, q)
}

// local answers names of this machine (RFC 6761, 6.3).
func local(q dns.Question) reply {
	r := reply{quiet: true}
	h := header(q.Name, q.Qtype, peerTTL)
	switch q.Qtype {
	case dns.TypeA:
		r.records = []dns.RR{&dns.A{Hdr: h, A: []byte{127, 0, 0, 1}}}
	case dns.TypeAAAA:
		r.records = []dns.RR{&dns.AAAA{Hdr: h, AAAA: []byte{15: 1}}}
	}
	return r
}

// peer answers a name of the sandbox's group. Such names never go upstream.
func (s *Server) peer(t Tenant, p *policy, name string, q dns.Question) reply {
	peer, ok := peerName(name, p.source.Group)
	if !ok {
		return denial(ruling{why: "such names are for groups, and this sandbox has none or another"})
	}
	addr, ok := s.cfg.Sandboxes.Peer(t.ID, peer)
	if !ok {
		return denial(ruling{why: "no sandbox of the group " + sandbox.Unmarked(p.source.Group) + " has this name"})
	}
	r := reply{ruling: ruling{permitted: true}}
	if q.Qtype == dns.TypeA {
		r.addrs = []netip.Addr{addr}
		r.records = []dns.RR{&dns.A{Hdr: header(q.Name, dns.TypeA, peerTTL), A: addr.AsSlice()}}
	}
	return r
}

// reverse answers the name of an address: of a public one what upstream says,
// of a member of the group its name, of others nothing.
func (s *Server) reverse(ctx context.Context, c *client, t Tenant, p *policy, name string, q dns.Question) reply {
	addr := reverseAddr(name)
	if addr.IsValid() && s.cfg.Pool.Contains(addr) {
		return s.reversePeer(t, p, addr, q)
	}
	if !addr.IsValid() || !s.reach.outside(addr) || !sandbox.IsPublic(addr) {
		return denial(ruling{why: "it is not the reverse name of one public address"})
	}
	r := p.judge(name)
	if !r.permitted {
		return denial(r)
	}
	return s.resolve(ctx, c, p, r, name, q)
}

func (s *Server) reversePeer(t Tenant, p *policy, addr netip.Addr, q dns.Question) reply {
	other, ok := s.cfg.Sandboxes.Tenant(addr)
	if !ok || (other.ID != t.ID && (p.source.Group == "" || other.Policy.Group != p.source.Group)) {
		return denial(ruling{why: "no sandbox of the group has this address"})
	}
	r := reply{quiet: true}
	if q.Qtype == dns.TypePTR {
		target := other.Name
		if target == "" {
			target = string(other.ID)
		}
		if p.source.Group != "" {
			target += "." + sandbox.Unmarked(p.source.Group) + "." + internalZone
		}
		r.records = []dns.RR{&dns.PTR{Hdr: header(q.Name, dns.TypePTR, peerTTL), Ptr: dns.Fqdn(target)}}
	}
	return r
}

// resolve answers a permitted public name.
func (s *Server) resolve(ctx context.Context, c *client, p *policy, by ruling, name string, q dns.Question) reply {
	if slices.Contains(empty, q.Qtype) {
		return reply{ruling: by, quiet: true}
	}
	if slices.Contains(data, q.Qtype) && !c.heavy.Allow() {
		s.stats.limited.Add(1)
		return refusal(dns.RcodeRefused, dns.ExtendedErrorCodeOther, "sandboxd: too many questions of type "+typeName(q.Qtype)+", ask more slowly")
	}
	found, err := s.follow(ctx, c, p, s.upstreamsFor(p), name, q.Qtype)
	switch {
	case errors.Is(err, errNoServer):
		return refusal(dns.RcodeServerFailure, dns.ExtendedErrorCodeNotReady, "sandboxd: no resolver to ask: the operator sets network.resolvers, or the policy's own may not be asked")
	case errors.Is(err, errBusy):
		s.stats.limited.Add(1)
		return refusal(dns.RcodeServerFailure, dns.ExtendedErrorCodeNotReady, "sandboxd: too many names are being looked up")
	case err != nil:
		return refusal(dns.RcodeServerFailure, dns.ExtendedErrorCodeNoReachableAuthority, "sandboxd: no upstream resolver answered")
	case found.refused != nil:
		return denial(*found.refused)
	}
	if q.Qtype == dns.TypeA {
		return s.addresses(p, by, found, q)
	}
	r := reply{rcode: found.rcode, ruling: by, ttl: found.ttl}
	r.records = present(append(found.links, found.records...), q.Name, found.ttl)
	size := 0
	for _, rr := range r.records {
		size += dns.Len(rr)
	}
	if size > maxData {
		return refusal(dns.RcodeServerFailure, dns.ExtendedErrorCodeOther, "sandboxd: the answer is larger than is passed on")
	}
	return r
}

// addresses answers with those of the found addresses that the sandbox may
// know, and asks for them to be opened where only named ones are open.
func (s *Server) addresses(p *policy, by ruling, found chain, q dns.Question) reply {
	r := reply{rcode: found.rcode, ruling: by, ttl: found.ttl}
	owner := q.Name
	if n := len(found.links); n > 0 {
		owner = found.links[n-1].(*dns.CNAME).Target //nolint:errcheck // cnameOf returns no other
	}
	for _, rr := range found.records {
		a, ok := rr.(*dns.A)
		if !ok {
			continue
		}
		addr, ok := netip.AddrFromSlice(a.A)
		if addr = addr.Unmap(); ok && s.reach.permits(p, addr) && !slices.Contains(r.addrs, addr) && len(r.addrs) < maxAddrs {
			r.addrs = append(r.addrs, addr)
		}
	}
	if len(r.addrs) == 0 && len(found.records) > 0 {
		return denial(ruling{rule: by.rule, why: "it stands for addresses that are private, the host's own, or denied"})
	}
	r.records = present(found.links, q.Name, found.ttl)
	for _, addr := range r.addrs {
		r.records = append(r.records, &dns.A{Hdr: header(owner, dns.TypeA, found.ttl), A: addr.AsSlice()})
	}
	r.pin = len(r.addrs) > 0 && p.source.Mode == sandbox.NetworkAllow
	return r
}

// present copies records for an answer: the first name as it was asked, so
// that clients which vary its case recognise it, and all with one TTL.
func present(records []dns.RR, asked string, ttl time.Duration) []dns.RR {
	out := make([]dns.RR, len(records))
	lower, _ := normalize(asked)
	for i, rr := range records {
		out[i] = dns.Copy(rr)
		h := out[i].Header()
		h.Ttl = uint32(ttl / time.Second)
		if owns(rr, lower) {
			h.Name = asked
		}
	}
	return out
}

func header(name string, rrtype uint16, ttl time.Duration) dns.RR_Header {
	return dns.RR_Header{Name: name, Rrtype: rrtype, Class: dns.ClassINET, Ttl: uint32(ttl / time.Second)}
}

// pin opens the addresses of a reply for as long as the sandbox may use it.
// One of a sandbox and a few of all do so at a time: whoever changes the rules
// for another reason must not wait behind everything that sandboxes ask.
func (s *Server) pin(ctx context.Context, c *client, id sandbox.ID, q dns.Question, r reply) error {
	for _, turn := range []chan struct{}{c.pinning, s.pinning} {
		select {
		case turn <- struct{}{}:
			defer func() { <-turn }()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	name, _ := normalize(q.Name)
	return s.cfg.Sandboxes.Pin(ctx, id, name, r.addrs, max(r.ttl+pinGrace, minPin))
}

// pack makes the response to a message.
func pack(req *dns.Msg, r reply) *dns.Msg {
	resp := new(dns.Msg)
	resp.SetRcode(req, r.rcode)
	resp.RecursionAvailable = true
	resp.Answer = r.records
	if req.IsEdns0() != nil {
		resp.SetEdns0(udpSize, false)
		if r.text != "" {
			opt := resp.IsEdns0()
			opt.Option = append(opt.Option, &dns.EDNS0_EDE{InfoCode: r.code, ExtraText: r.text})
		}
	}
	return resp
}

// tell counts refusals and passes what happened on to the audit.
func (s *Server) tell(c *client, id sandbox.ID, q dns.Question, r reply) {
	if r.quiet {
		return
	}
	name, ok := normalize(q.Name)
	if !ok {
		name = q.Name[:min(len(q.Name), 255)]
	}
	e := NameEvent{Sandbox: id, Name: name, Type: typeName(q.Qtype), Verdict: Denied, Rule: r.ruling.rule, Reason: r.ruling.why, Addrs: r.addrs}
	if r.ruling.permitted {
		if !c.told.Allow() {
			return
		}
		e.Verdict = Allowed
	} else {
		s.stats.denied.Add(1)
	}
	s.cfg.Tell(e)
}

// Lookup returns the addresses a name stands for to a sandbox, under the rules
// its own questions are answered by and within the bounds of what is asked
// upstream for it; nothing is opened. Errors are of class
// ErrForbidden (code name_denied), ErrNotFound (no_such_name) or
// ErrUnavailable (no_resolver).
func (s *Server) Lookup(ctx context.Context, t Tenant, name string) ([]netip.Addr, error) {
	ctx, cancel := context.WithTimeout(ctx, totalTimeout)
	defer cancel()
	q := dns.Question{Name: dns.Fqdn(name), Qtype: dns.TypeA, Qclass: dns.ClassINET}
	c := s.clients.get(t.ID, s.now())
	if !c.enter() {
		s.stats.limited.Add(1)
		return nil, sandbox.Errorf(sandbox.ErrUnavailable, "no_resolver", "look up %.253s: too many of the sandbox's names are being looked up; try again", name)
	}
	defer c.leave()
	r := s.decide(ctx, c, t, c.compiled(t.Policy), q)
	switch {
	case len(r.addrs) > 0:
		return r.addrs, nil
	case r.ruling.why != "":
		return nil, sandbox.Errorf(sandbox.ErrForbidden, "name_denied", "name %.253s: not permitted: %s", name, r.ruling.why)
	case r.rcode == dns.RcodeServerFailure || r.rcode == dns.RcodeRefused:
		return nil, sandbox.Errorf(sandbox.ErrUnavailable, "no_resolver", "look up %.253s: %s; try again", name, cmp.Or(strings.TrimPrefix(r.text, "sandboxd: "), "no upstream resolver answered"))
	}
	return nil, sandbox.Errorf(sandbox.ErrNotFound, "no_such_name", "name %.253s: it has no IPv4 address", name)
}
