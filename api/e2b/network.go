package e2b

import (
	"encoding/json"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

// networkConfig is a network as the dialect tells it. Of its two lists the one
// of what is allowed wins, and without them all is allowed; a policy is the
// other way round, so that one is made of both.
type networkConfig struct {
	AllowOut           []string        `json:"allowOut,omitempty"`
	DenyOut            []string        `json:"denyOut,omitempty"`
	AllowPublicTraffic *bool           `json:"allowPublicTraffic,omitempty"`
	MaskRequestHost    string          `json:"maskRequestHost,omitempty"`
	Rules              json.RawMessage `json:"rules,omitempty"`
	EgressProxy        json.RawMessage `json:"egressProxy,omitempty"`
	HTTPSPorts         []int           `json:"httpsPorts,omitempty"`
}

// everything is what stands for all destinations.
var everything = netip.MustParsePrefix("0.0.0.0/0")

// policy is the policy that keeps what the config and internet say; what of
// the one before they do not tell stays. Class ErrInvalid, or ErrUnsupported
// where nothing here can keep it.
func (c networkConfig) policy(internet *bool, before sandbox.NetworkPolicy) (sandbox.NetworkPolicy, error) {
	p := sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen, DNS: before.DNS, Limits: before.Limits}
	if err := c.refuse(); err != nil {
		return p, err
	}
	denied, all, err := prefixes(c.DenyOut)
	if err != nil {
		return p, err
	}
	var allowed []netip.Prefix
	allowsAll, names := false, ""
	for _, text := range c.AllowOut {
		rule, err := sandbox.ParseNetworkRule(text)
		switch {
		case err != nil:
			return p, err
		case rule.Domain != "":
			names = text
		case rule.Prefix == everything && len(rule.Ports) == 0 && rule.Protocol == "":
			allowsAll = true
			continue
		case len(rule.Ports) > 0 || rule.Protocol != "":
			names = text
		default:
			allowed = append(allowed, rule.Prefix)
		}
		p.Allow = append(p.Allow, text)
	}
	p.Group = before.Group
	switch {
	case allowsAll: // it wins over every denial
		return p, nil
	case all || internet != nil && !*internet:
		p.Mode = sandbox.NetworkAllow
		if len(p.Allow) == 0 && p.Group == "" {
			p.Mode = sandbox.NetworkOff
		}
		return p, nil
	case len(denied) > 0 && names != "":
		return p, bad("invalid_network", "allowOut %.80q beside denyOut: a name is allowed only where all else is denied; add 0.0.0.0/0 to denyOut", names)
	}
	for _, d := range denied {
		for _, rest := range without(d, allowed) {
			p.Deny = append(p.Deny, rest.String())
		}
	}
	return p, p.Validate()
}

// refuse refuses what this daemon cannot keep.
func (c networkConfig) refuse() error {
	no := func(what, instead string) error {
		return sandbox.Errorf(sandbox.ErrUnsupported, "not_offered", "network.%s is not offered by this daemon: %s", what, instead)
	}
	var rules map[string][]struct {
		Transform json.RawMessage `json:"transform"`
	}
	if given(c.Rules) {
		if err := json.Unmarshal(c.Rules, &rules); err != nil {
			return bad("invalid_network", "network.rules: %w", err)
		}
	}
	for host, list := range rules {
		for _, r := range list {
			if given(r.Transform) {
				return no("rules", "it does not open TLS, so it cannot change requests to "+host+"; for plain HTTP see 'sandbox net set --help'")
			}
		}
	}
	switch {
	case given(c.EgressProxy):
		return no("egressProxy", "leave it out")
	case len(c.HTTPSPorts) > 0:
		return no("httpsPorts", "serve plain HTTP inside the sandbox")
	}
	return nil
}

// prefixes reads a list of denials; all if one of them is everything. There is
// no IPv6 in a sandbox to deny.
func prefixes(list []string) (out []netip.Prefix, all bool, err error) {
	for _, text := range list {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			var a netip.Addr
			if a, err = netip.ParseAddr(text); err == nil {
				p = netip.PrefixFrom(a, a.BitLen())
			}
		}
		switch {
		case err != nil:
			return nil, false, bad("invalid_network", "denyOut %.80q: use an address or a prefix, as 203.0.113.0/24", text)
		case p.Masked() == everything:
			all = true
		case p.Addr().Is4():
			out = append(out, p.Masked())
		}
	}
	return out, all, nil
}

// without is a prefix less others, as prefixes.
func without(p netip.Prefix, others []netip.Prefix) []netip.Prefix {
	i := slices.IndexFunc(others, p.Overlaps)
	switch {
	case i < 0:
		return []netip.Prefix{p}
	case others[i].Bits() <= p.Bits():
		return nil
	}
	low := netip.PrefixFrom(p.Addr(), p.Bits()+1)
	b := low.Addr().As4()
	b[p.Bits()/8] |= 0x80 >> (p.Bits() % 8)
	return append(without(low, others), without(netip.PrefixFrom(netip.AddrFrom4(b), p.Bits()+1), others)...)
}

// maxHost is the longest Host a note has room for.
const maxHost = 120

// host is the mask of the Host header, in which ${PORT} is the port.
func (c networkConfig) host() (string, error) {
	h := c.MaskRequestHost
	if len(h) > maxHost || strings.ContainsFunc(h, func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune(`/\"<>?#@`, r) }) {
		return "", bad("invalid_network", "maskRequestHost %.130q: use a host name of at most %d characters, with :${PORT} if need be", h, maxHost)
	}
	return h, nil
}

// networkOf is a policy as the dialect tells it; nil for that of a sandbox
// that asked for nothing.
func networkOf(n note, p sandbox.NetworkPolicy) *networkConfig {
	c := networkConfig{AllowOut: p.Allow, MaskRequestHost: n.Host}
	switch p.Mode {
	case sandbox.NetworkOpen:
		c.DenyOut = p.Deny
	default:
		c.DenyOut = []string{everything.String()}
	}
	if len(c.AllowOut)+len(c.DenyOut) == 0 && !n.Private && n.Host == "" {
		return nil
	}
	public := !n.Private
	c.AllowPublicTraffic = &public
	return &c
}

// internetOf is what the caller said about the internet, as far as it still is
// so; nil where nothing was said.
func internetOf(n note, p sandbox.NetworkPolicy) *bool {
	if n.Internet == nil || *n.Internet != (p.Mode == sandbox.NetworkOpen) {
		return nil
	}
	return n.Internet
}

// setNetwork replaces what a sandbox may reach.
func (s *Server) setNetwork(w http.ResponseWriter, r *http.Request, actor string) (int, any, error) {
	var req struct {
		networkConfig
		Internet *bool `json:"allow_internet_access"`
	}
	if err := read(w, r, &req); err != nil {
		return 0, nil, err
	}
	box, err := s.boxOf(r)
	if err != nil {
		return 0, nil, err
	}
	p, err := req.policy(req.Internet, box.Spec.Network)
	if err == nil {
		_, err = s.m.SetNetwork(r.Context(), string(box.ID), p, actor)
	}
	return http.StatusNoContent, nil, gone(err)
}
