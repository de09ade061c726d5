package gate

import (
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

// The ports whose traffic is led here.
const (
	portHTTP = 80
	portTLS  = 443
)

// refusal is why something does not pass. It is shown to the sandbox.
type refusal struct {
	status int    // of HTTP
	code   string // stable
	detail string
	rule   string // the deny rule that decided, if one did
}

func (r *refusal) Error() string { return r.detail }

// The codes of refusals.
const (
	codeDenied    = "gate_denied"    // the policy does not permit it
	codeAmbiguous = "gate_ambiguous" // it cannot be judged
	codeSecret    = "gate_secret"    // a credential is missing or may not go there
	codeUpstream  = "gate_upstream"  // the other side does not answer
	codeLimit     = "gate_limit"     // more connections a second than the policy permits
)

func denied(format string, args ...any) *refusal {
	return &refusal{status: http.StatusForbidden, code: codeDenied, detail: fmt.Sprintf(format, args...)}
}

func ambiguous(format string, args ...any) *refusal {
	return &refusal{status: http.StatusBadRequest, code: codeAmbiguous, detail: fmt.Sprintf(format, args...)}
}

// grant is why a destination is permitted.
type grant struct {
	rule string
	addr netip.Addr // where to go; invalid: to an address of the name
}

// policy is a network policy made ready to judge by.
type policy struct {
	source      sandbox.NetworkPolicy
	allow, deny []sandbox.NetworkRule
	rules       []sandbox.RequestRule
	reach       reach
}

// compile reads the rules of a policy. One that cannot be read, which
// validation lets nobody set, permits nothing.
func compile(p sandbox.NetworkPolicy, r reach) *policy {
	out := &policy{source: p, reach: r}
	var err error
	if out.allow, out.deny, err = p.Rules(); err != nil {
		out.source.Mode = sandbox.NetworkOff
	}
	if p.HTTP == nil {
		return out
	}
	for _, text := range p.HTTP.Rules {
		rule, err := sandbox.ParseRequestRule(text)
		if err != nil {
			out.source.Mode = sandbox.NetworkOff
		}
		out.rules = append(out.rules, rule)
	}
	return out
}

// same reports whether the policy was made of p, as far as the gate goes.
func (p *policy) same(q sandbox.NetworkPolicy) bool {
	s := &p.source
	if s.Mode != q.Mode || !slices.Equal(s.Allow, q.Allow) || !slices.Equal(s.Deny, q.Deny) || (s.HTTP == nil) != (q.HTTP == nil) {
		return false
	}
	return s.HTTP == nil || slices.Equal(s.HTTP.Rules, q.HTTP.Rules) && slices.Equal(s.HTTP.Inject, q.HTTP.Inject)
}

// judge decides about a destination, which a client reached by dialing
// origin (invalid where it named its destination to a proxy).
func (p *policy) judge(t target, origin netip.AddrPort) (grant, *refusal) {
	if t.addr.IsValid() {
		return p.judgeAddress(t.addr, t.port)
	}
	for _, r := range p.deny {
		if r.MatchesName(t.host) && r.MatchesPort(sandbox.ProtocolTCP, t.port) {
			return grant{}, &refusal{
				status: http.StatusForbidden, code: codeDenied, rule: r.String(),
				detail: fmt.Sprintf("%s is denied by rule %s", t, r),
			}
		}
	}
	if p.source.Mode == sandbox.NetworkOpen {
		return grant{rule: string(sandbox.NetworkOpen)}, nil
	}
	if p.source.Mode == sandbox.NetworkAllow {
		for _, r := range p.allow {
			if r.MatchesName(t.host) && r.MatchesPort(sandbox.ProtocolTCP, t.port) {
				return grant{rule: r.String()}, nil
			}
		}
		// A rule about addresses permits them under whatever name.
		if _, named := p.names(origin); named && origin.Port() == t.port { // first, for it asks the kernel nothing
			if g, ref := p.judgeAddress(origin.Addr(), origin.Port()); ref == nil {
				return g, nil
			}
		}
	}
	return grant{}, denied("no rule permits %s: the policy would have to allow %s", t, t)
}

// judgeAddress decides about an address that was named itself.
func (p *policy) judgeAddress(addr netip.Addr, port uint16) (grant, *refusal) {
	if !addr.IsValid() {
		return grant{}, denied("no rule permits it")
	}
	dest := netip.AddrPortFrom(addr, port)
	if why := p.unreachable(dest); why != nil {
		return grant{}, why
	}
	if p.source.Mode == sandbox.NetworkOpen && sandbox.IsPublic(addr) {
		return grant{rule: string(sandbox.NetworkOpen), addr: addr}, nil
	}
	if rule, ok := p.names(dest); ok && p.source.Connected() {
		return grant{rule: rule, addr: addr}, nil
	}
	return grant{}, denied("no rule permits %s: the policy would have to allow %s", dest, dest)
}

// names returns the allow rule that names an address.
func (p *policy) names(dest netip.AddrPort) (string, bool) {
	for _, r := range p.allow {
		if r.Prefix.IsValid() && r.Prefix.Contains(dest.Addr()) && r.MatchesPort(sandbox.ProtocolTCP, dest.Port()) {
			return r.String(), true
		}
	}
	return "", false
}

// unreachable says why an address must not be dialed for this sandbox, by
// whatever name it was found; nil where it may.
func (p *policy) unreachable(dest netip.AddrPort) *refusal {
	addr := dest.Addr()
	for _, r := range p.deny {
		if r.Prefix.IsValid() && r.Prefix.Contains(addr) && r.MatchesPort(sandbox.ProtocolTCP, dest.Port()) {
			return &refusal{
				status: http.StatusForbidden, code: codeDenied, rule: r.String(),
				detail: fmt.Sprintf("%s is denied by rule %s", dest, r),
			}
		}
	}
	if !p.reach.outside(addr) {
		return denied("%s belongs to the host, to sandboxes or to nobody, or the operator denies it", addr)
	}
	if sandbox.IsPublic(addr) {
		return nil
	}
	if !contains(p.reach.admit, addr) {
		return denied("%s is private, and the operator does not admit it (network.admit)", addr)
	}
	if _, ok := p.names(dest); !ok {
		return denied("%s is private: the policy would have to allow %s", addr, dest)
	}
	return nil
}

// ask is a request over plain HTTP, taken apart.
type ask struct {
	method  string
	target  target
	path    string // plain; empty where pathErr says why there is none
	pathErr error
	// override is a header by which some servers take another method or path.
	override string
}

// ruling is how a permitted request is sent on.
type ruling struct {
	grant
	tls     bool   // upstream, spoken by the gate
	port    uint16 // upstream
	inject  []sandbox.Credential
	request string // the request rule, where there are any
}

// judgeRequest decides about a request.
func (p *policy) judgeRequest(a ask, origin netip.AddrPort) (ruling, *refusal) {
	r := ruling{port: a.target.port, inject: p.credentials(a.target)}
	r.tls = slices.ContainsFunc(r.inject, func(c sandbox.Credential) bool { return !c.Plain })
	if r.tls && r.port == portHTTP {
		r.port = portTLS
	}
	var ref *refusal
	if r.grant, ref = p.judge(a.target, origin); ref != nil && ref.rule != "" {
		return r, ref
	}
	if r.port != a.target.port { // what leaves the host goes to another port: deny rules hold there, allow rules may name it
		g, other := p.judge(target{host: a.target.host, addr: a.target.addr, port: r.port}, netip.AddrPort{})
		if other != nil && other.rule != "" {
			return r, other
		}
		if ref != nil {
			r.grant, ref = g, other
		}
	}
	if ref != nil {
		return r, ref
	}
	if len(r.inject) > 0 {
		if r.addr.IsValid() {
			return r, denied("credentials go to %s only where a rule permits it by name: the policy would have to allow %s", a.target.host, a.target)
		}
		if a.method == http.MethodTrace || a.method == "TRACK" {
			return r, denied("%s would have the server tell the credentials: use another method", a.method)
		}
	}
	return r, p.judgeRules(a, &r)
}

// judgeRules holds a request against the request rules.
func (p *policy) judgeRules(a ask, r *ruling) *refusal {
	if len(p.rules) == 0 {
		return nil
	}
	pathMatters := false
	for i, rule := range p.rules {
		whole := rule.Path == "/*"
		everything := whole && len(rule.Methods) == 0
		if whole {
			rule.Path = "*" // of a path that cannot be judged, too
		} else if a.pathErr != nil {
			pathMatters = pathMatters || rule.Matches(a.method, a.target.host, strings.TrimSuffix(rule.Path, "*"))
			continue
		}
		if !rule.Matches(a.method, a.target.host, a.path) {
			continue
		}
		if a.override != "" && !everything {
			return ambiguous("header %s could make the server see another request than the one permitted: leave it out", a.override)
		}
		r.request = p.source.HTTP.Rules[i]
		return nil
	}
	if pathMatters {
		return ambiguous("the request cannot be held against the rules: %s", a.pathErr)
	}
	return denied("no request rule permits it: the policy would need one, as '%s %s%s'", clip(a.method, 20), a.target.host, clip(a.path, 200))
}

// credentials returns what is added to requests to a host: of each header the
// first that is listed.
func (p *policy) credentials(t target) []sandbox.Credential {
	if p.source.HTTP == nil || t.addr.IsValid() {
		return nil
	}
	var out []sandbox.Credential
	for _, c := range p.source.HTTP.Inject {
		pattern, err := sandbox.NormalizeDomain(c.Host)
		if err != nil || !sandbox.MatchesDomain(pattern, t.host) {
			continue
		}
		if !slices.ContainsFunc(out, func(o sandbox.Credential) bool { return strings.EqualFold(o.Header, c.Header) }) {
			out = append(out, c)
		}
	}
	return out
}

func clip(s string, most int) string {
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}
