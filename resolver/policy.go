package resolver

import (
	"net/netip"
	"slices"

	"github.com/sandboxd/sandboxd/sandbox"
)

// policy is a network policy made ready for judging names.
type policy struct {
	source      sandbox.NetworkPolicy // what it was made of
	allow, deny []sandbox.NetworkRule
	admitted    []netip.Prefix // not public, yet within reach: admitted and named by an allow rule
	denied      []netip.Prefix // denied on every port
}

// compile reads the rules of a policy. A policy that cannot be read, which
// validation lets nobody set, permits nothing.
func compile(p sandbox.NetworkPolicy) *policy {
	out := &policy{source: p}
	allow, deny, err := p.Rules()
	if err != nil {
		out.source.Mode = sandbox.NetworkOff
		return out
	}
	out.allow, out.deny = allow, deny
	for _, r := range allow {
		if r.Prefix.IsValid() {
			out.admitted = append(out.admitted, r.Prefix)
		}
	}
	for _, r := range deny {
		if r.Prefix.IsValid() && len(r.Ports) == 0 && r.Protocol == "" {
			out.denied = append(out.denied, r.Prefix)
		}
	}
	return out
}

// same reports whether the policy was made of p, as far as names go.
func (p *policy) same(q sandbox.NetworkPolicy) bool {
	return p.source.Mode == q.Mode && p.source.Group == q.Group &&
		slices.Equal(p.source.Allow, q.Allow) && slices.Equal(p.source.Deny, q.Deny) && slices.Equal(p.source.DNS, q.DNS)
}

// ruling is what a policy says of a name.
type ruling struct {
	permitted bool
	rule      string // that decided; empty where none did
	why       string // for people, of a refusal
}

// judge rules on a public name.
func (p *policy) judge(name string) ruling {
	if r, hit := p.refusedBy(name); hit {
		return r
	}
	if !p.source.Connected() {
		return ruling{why: "the network is off"}
	}
	for _, r := range p.allow {
		if r.MatchesName(name) {
			return ruling{permitted: true, rule: r.String()}
		}
	}
	if p.source.Mode == sandbox.NetworkOpen {
		return ruling{permitted: true}
	}
	return ruling{why: "no allow rule of the network policy names it"}
}

// refusedBy returns the deny rule that means a name, be it public or a peer's.
func (p *policy) refusedBy(name string) (ruling, bool) {
	for _, r := range p.deny {
		if r.MatchesName(name) {
			return ruling{rule: r.String(), why: "a deny rule of the network policy names it"}, true
		}
	}
	return ruling{}, false
}
