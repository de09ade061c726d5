package sandbox

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// NetworkMode is the first word of a network policy.
type NetworkMode string

// The network modes.
const (
	NetworkOff   NetworkMode = "off"   // nothing in or out but loopback inside
	NetworkAllow NetworkMode = "allow" // what the allow list names, and nothing else
	NetworkOpen  NetworkMode = "open"  // the public internet by NAT; never the host, private or metadata ranges
)

// NetworkPolicy says what a sandbox may reach, how fast, and with whom it
// shares a network. It may be changed while the sandbox runs.
type NetworkPolicy struct {
	Mode   NetworkMode   `json:"mode,omitempty" enum:"off,allow,open" doc:"off (default), allow (only what the allow list names) or open (the public internet)."`
	Allow  []string      `json:"allow,omitempty" maxItems:"256" doc:"Destinations, each DEST[:PORTS][/PROTO]: 203.0.113.0/24:80,8000-8100/tcp, example.com:443, *.example.com. Private ranges only where the operator admits them."`
	Deny   []string      `json:"deny,omitempty" maxItems:"256" doc:"Destinations in the same form; these win over everything else."`
	DNS    []netip.Addr  `json:"dns,omitempty" maxItems:"3" doc:"Resolvers the daemon asks for this sandbox; empty means the daemon's."`
	Group  string        `json:"group,omitempty" maxLength:"63" doc:"Sandboxes of one group reach each other and resolve each other's names; needs mode allow or open."`
	Limits NetworkLimits `json:"limits,omitzero"`
	HTTP   *HTTPGate     `json:"http,omitempty" doc:"Sends web traffic through the daemon's gate, which checks names, methods and paths and adds credentials."`
}

// NetworkLimits bounds a sandbox's traffic. Zero means no limit of that kind.
type NetworkLimits struct {
	EgressBPS            uint64 `json:"egress_bps,omitempty" doc:"Bits per second out of the sandbox."`
	IngressBPS           uint64 `json:"ingress_bps,omitempty" doc:"Bits per second into the sandbox."`
	PacketsPerSecond     uint64 `json:"packets_per_second,omitempty" maximum:"4294967295" doc:"Packets sent."`
	ConnectionsPerSecond uint64 `json:"connections_per_second,omitempty" maximum:"4294967295" doc:"New flows."`
	Flows                uint32 `json:"flows,omitempty" maximum:"8192" doc:"Flows at one time; 0 means 8192."`
}

// HTTPGate is what the gate does with the web traffic of a sandbox (TCP to
// ports 80 and 443). TLS is not decrypted: of it only the name is checked.
type HTTPGate struct {
	Rules  []string     `json:"rules,omitempty" maxItems:"256" doc:"Requests permitted over plain HTTP, each [METHOD[,METHOD] ]HOST[/PATH]: 'GET,HEAD example.com/api/*'. Empty means all to permitted names."`
	Inject []Credential `json:"inject,omitempty" maxItems:"32" doc:"Headers added to plain HTTP requests on their way out; their values never enter the sandbox."`
}

// Credential is a header the gate adds to requests to one host.
type Credential struct {
	Host   string `json:"host" maxLength:"253" doc:"example.com, or *.example.com."`
	Header string `json:"header" maxLength:"128" doc:"Authorization, for instance; replaces what the sandbox sent under this name."`
	Secret string `json:"secret" maxLength:"63" doc:"Name of a secret of the daemon that holds the header's whole value."`
	Plain  bool   `json:"plain,omitempty" doc:"Send on in plain HTTP; without it the gate speaks TLS to the host, so that the secret is not on the wire."`
}

// Bounds of a policy.
const (
	maxNetworkRules = 256
	maxPortRanges   = 16
	minRateBPS      = 8 << 10 // a packet of 1500 bytes every 1.5 s
)

// NetworkRule is one entry of an allow or deny list.
type NetworkRule struct {
	// Prefix is the addresses meant; invalid where Domain is set.
	Prefix netip.Prefix
	// Domain is a name in lower case without its last dot. "*.example.com"
	// means every name below example.com, not itself; "*" every name.
	Domain string
	// Ports is empty for every port.
	Ports []PortRange
	// Protocol is tcp, udp, icmp or empty for every protocol. With ports and
	// none given, tcp and udp are meant.
	Protocol string
}

// PortRange is the ports from First to Last, both included.
type PortRange struct{ First, Last uint16 }

// The protocols of rules.
const (
	ProtocolTCP  = "tcp"
	ProtocolUDP  = "udp"
	ProtocolICMP = "icmp"
)

// ParseNetworkRule reads DEST[:PORTS][/PROTO]. DEST is an IPv4 address or
// prefix, a name, or *.name; PORTS are ports and ranges separated by commas.
// Errors are of class ErrInvalid, code invalid_rule.
func ParseNetworkRule(text string) (NetworkRule, error) {
	var r NetworkRule
	bad := func(format string, args ...any) (NetworkRule, error) {
		return NetworkRule{}, Errorf(ErrInvalid, "invalid_rule",
			"network rule %.80q: %s; write it as 203.0.113.0/24:80,8000-8100/tcp, example.com:443 or *.example.com", text, fmt.Sprintf(format, args...))
	}
	rest := text
	if head, proto, ok := cutLast(rest, "/"); ok {
		switch proto {
		case ProtocolTCP, ProtocolUDP, ProtocolICMP:
			rest, r.Protocol = head, proto
		}
	}
	if strings.Count(rest, ":") > 1 {
		return bad("sandboxes have no IPv6, so no rule is needed for it")
	}
	if head, ports, ok := strings.Cut(rest, ":"); ok {
		var err error
		if r.Ports, err = parsePorts(ports); err != nil {
			return bad("%s", err)
		}
		rest = head
	}
	if len(r.Ports) > 0 && r.Protocol == ProtocolICMP {
		return bad("icmp has no ports")
	}
	if p, ok := parsePrefix(rest); ok {
		if !p.Addr().Is4() {
			return bad("sandboxes have no IPv6, so no rule is needed for it")
		}
		r.Prefix = p
		return r, nil
	}
	if strings.Contains(rest, "/") || looksLikeAddress(rest) {
		return bad("%q is not an address or prefix", rest)
	}
	name, err := NormalizeDomain(rest)
	if err != nil {
		return bad("%s", err)
	}
	r.Domain = name
	return r, nil
}

func parsePrefix(s string) (netip.Prefix, bool) {
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(a, a.BitLen()), a.Zone() == ""
	}
	p, err := netip.ParsePrefix(s)
	return p.Masked(), err == nil
}

// looksLikeAddress tells of digits and dots alone: never a name people mean
// (RFC 3696, 2: the last label of a name is not all digits).
func looksLikeAddress(s string) bool {
	return strings.Trim(s, "0123456789.") == ""
}

func parsePorts(s string) ([]PortRange, error) {
	var out []PortRange
	for word := range strings.SplitSeq(s, ",") {
		first, last, isRange := strings.Cut(word, "-")
		if !isRange {
			last = first
		}
		a, errA := strconv.ParseUint(first, 10, 16)
		b, errB := strconv.ParseUint(last, 10, 16)
		if errA != nil || errB != nil || a == 0 || a > b {
			return nil, fmt.Errorf("%.20q is not a port or range of ports", word)
		}
		out = append(out, PortRange{uint16(a), uint16(b)})
	}
	if len(out) > maxPortRanges {
		return nil, fmt.Errorf("at most %d ports and ranges, %d given", maxPortRanges, len(out))
	}
	slices.SortFunc(out, func(x, y PortRange) int { return int(x.First) - int(y.First) })
	merged := out[:1]
	for _, p := range out[1:] {
		if end := &merged[len(merged)-1]; int(p.First) <= int(end.Last)+1 {
			end.Last = max(end.Last, p.Last)
		} else {
			merged = append(merged, p)
		}
	}
	return merged, nil
}

// NormalizeDomain returns a name, or a name after "*.", or "*", in lower case
// and without its last dot. Names of other scripts must be given in their
// ASCII form (xn--…, RFC 5891), as they are on the wire.
func NormalizeDomain(s string) (string, error) {
	name := strings.ToLower(strings.TrimSuffix(s, "."))
	if name == "*" {
		return name, nil
	}
	bare := strings.TrimPrefix(name, "*.")
	if bare == "" || len(bare) > 253 {
		return "", fmt.Errorf("a name has 1 to 253 characters")
	}
	for label := range strings.SplitSeq(bare, ".") {
		if label == "" || len(label) > 63 || strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" ||
			label[0] == '-' || label[len(label)-1] == '-' {
			return "", fmt.Errorf("%.64q is not a label of a name", label)
		}
	}
	return name, nil
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

// String returns the rule in the form ParseNetworkRule reads.
func (r NetworkRule) String() string {
	var b strings.Builder
	switch {
	case r.Domain != "":
		b.WriteString(r.Domain)
	case r.Prefix.IsSingleIP():
		b.WriteString(r.Prefix.Addr().String())
	default:
		b.WriteString(r.Prefix.String())
	}
	for i, p := range r.Ports {
		b.WriteByte(":,"[min(i, 1)])
		b.WriteString(strconv.Itoa(int(p.First)))
		if p.Last != p.First {
			b.WriteString("-" + strconv.Itoa(int(p.Last)))
		}
	}
	if r.Protocol != "" {
		b.WriteString("/" + r.Protocol)
	}
	return b.String()
}

// MatchesName reports whether a domain rule means a name, which must be
// normalised.
func (r NetworkRule) MatchesName(name string) bool {
	return r.Domain != "" && MatchesDomain(r.Domain, name)
}

// MatchesDomain reports whether a pattern (name, *.name or *) means a name;
// both must be normalised.
func MatchesDomain(pattern, name string) bool {
	switch {
	case pattern == "*":
		return name != ""
	case strings.HasPrefix(pattern, "*."):
		return strings.HasSuffix(name, pattern[1:]) && len(name) >= len(pattern)
	}
	return pattern == name
}

// MatchesPort reports whether the rule means a protocol and port.
func (r NetworkRule) MatchesPort(protocol string, port uint16) bool {
	if r.Protocol != "" && r.Protocol != protocol {
		return false
	}
	if len(r.Ports) == 0 {
		return true
	}
	return (protocol == ProtocolTCP || protocol == ProtocolUDP) &&
		slices.ContainsFunc(r.Ports, func(p PortRange) bool { return p.First <= port && port <= p.Last })
}

// opensBeside reports whether the rule, about a name, opens a TCP port other
// than 80 of a host that the pattern means.
func (r NetworkRule) opensBeside(pattern string) bool {
	return (r.MatchesName(pattern) || r.Domain != "" && MatchesDomain(pattern, r.Domain)) && (r.Protocol == "" || r.Protocol == ProtocolTCP) &&
		(len(r.Ports) == 0 || slices.ContainsFunc(r.Ports, func(p PortRange) bool { return p != PortRange{80, 80} }))
}

// Rules returns the parsed allow and deny lists of a valid policy.
func (p NetworkPolicy) Rules() (allow, deny []NetworkRule, err error) {
	if allow, err = parseRules(p.Allow); err != nil {
		return nil, nil, err
	}
	deny, err = parseRules(p.Deny)
	return allow, deny, err
}

func parseRules(texts []string) ([]NetworkRule, error) {
	out := make([]NetworkRule, len(texts))
	for i, text := range texts {
		var err error
		if out[i], err = ParseNetworkRule(text); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// Connected reports whether the policy asks for a link at all.
func (p NetworkPolicy) Connected() bool { return p.Mode == NetworkAllow || p.Mode == NetworkOpen }

// Clone returns a deep copy.
func (p NetworkPolicy) Clone() NetworkPolicy {
	p.Allow, p.Deny, p.DNS = slices.Clone(p.Allow), slices.Clone(p.Deny), slices.Clone(p.DNS)
	if p.HTTP != nil {
		p.HTTP = &HTTPGate{Rules: slices.Clone(p.HTTP.Rules), Inject: slices.Clone(p.HTTP.Inject)}
	}
	return p
}

// Validate checks what can be judged without a host. Errors are of class
// ErrInvalid and name the field.
func (p NetworkPolicy) Validate() error {
	bad := func(format string, args ...any) error { return Errorf(ErrInvalid, "invalid_network", format, args...) }
	switch p.Mode {
	case "", NetworkOff, NetworkAllow, NetworkOpen:
	default:
		return bad("network mode %.40q: use off, allow or open", p.Mode)
	}
	if len(p.Allow) > maxNetworkRules || len(p.Deny) > maxNetworkRules {
		return bad("network rules: at most %d in a list", maxNetworkRules)
	}
	if len(p.Allow) > 0 && !p.Connected() {
		return bad("network allow: needs mode allow, or open for private ranges the operator admits")
	}
	allow, _, err := p.Rules()
	if err != nil {
		return err
	}
	if len(p.DNS) > 3 {
		return bad("network dns: at most 3 resolvers, %d given", len(p.DNS))
	}
	for _, a := range p.DNS {
		if !a.IsValid() || a.IsUnspecified() || a.IsMulticast() || a.IsLoopback() {
			return bad("network dns %s: use the unicast address of a resolver that is not on the host itself", a)
		}
	}
	if p.Group != "" {
		if err := ValidateName(p.Group); err != nil {
			return bad("network group %.64q: %w", p.Group, err)
		}
		if !p.Connected() {
			return bad("network group: needs mode allow (an empty allow list is enough) or open")
		}
	}
	if err := p.Limits.validate(); err != nil {
		return err
	}
	return p.HTTP.validate(p.Mode, allow)
}

func (l NetworkLimits) validate() error {
	for name, bps := range map[string]uint64{"egress_bps": l.EgressBPS, "ingress_bps": l.IngressBPS} {
		if bps != 0 && bps < minRateBPS {
			return Errorf(ErrInvalid, "invalid_network", "network limits %s %d: use at least %d bits per second", name, bps, minRateBPS)
		}
	}
	return nil
}

func (g *HTTPGate) validate(mode NetworkMode, allow []NetworkRule) error {
	bad := func(format string, args ...any) error { return Errorf(ErrInvalid, "invalid_gate", format, args...) }
	if g == nil {
		return nil
	}
	if mode != NetworkAllow && mode != NetworkOpen {
		return bad("http gate: needs mode allow or open")
	}
	for _, text := range g.Rules {
		rule, err := ParseRequestRule(text)
		if err != nil {
			return err
		}
		if len(rule.Methods) == 0 && rule.Path == "/*" {
			continue // it confines to nothing
		}
		if mode == NetworkOpen {
			return bad("http rule %.80q: request rules hold on port 80 alone, and mode open opens every other port of the host: use mode allow with %s:80", text, rule.Host)
		}
		for _, a := range allow {
			if a.opensBeside(rule.Host) {
				return bad("http rule %.80q: request rules hold on port 80 alone, and allow rule %.80q opens other ports of the host: write %s:80 there", text, a.String(), a.Domain)
			}
		}
	}
	for _, c := range g.Inject {
		if _, err := NormalizeDomain(c.Host); err != nil || c.Host == "*" {
			return bad("http gate: host %.80q of a credential: use a name or *.name", c.Host)
		}
		if !validHeader(c.Header) {
			return bad("http gate: header %.80q: use the name of a header that belongs to the request, as Authorization", c.Header)
		}
		if err := ValidateName(c.Secret); err != nil {
			return bad("http gate: secret %.64q: %w", c.Secret, err)
		}
	}
	return nil
}

// validHeader accepts the names of end-to-end headers (RFC 9110, 5.1, 7.6.1).
func validHeader(name string) bool {
	const token = "abcdefghijklmnopqrstuvwxyz0123456789!#$%&'*+-.^_`|~"
	lower := strings.ToLower(name)
	switch lower {
	case "", "host", "connection", "content-length", "transfer-encoding", "upgrade", "te", "trailer", "keep-alive", "proxy-connection":
		return false
	}
	return strings.Trim(lower, token) == ""
}

// RequestRule permits requests over plain HTTP.
type RequestRule struct {
	Methods []string // upper case; empty means every method
	Host    string   // normalised name, *.name or *
	Path    string   // begins with a slash; a last * matches whatever follows
}

// ParseRequestRule reads [METHOD[,METHOD…] ]HOST[/PATH]. Errors are of class
// ErrInvalid, code invalid_gate.
func ParseRequestRule(text string) (RequestRule, error) {
	bad := func(why string) error {
		return Errorf(ErrInvalid, "invalid_gate", "http rule %.80q: %s; write it as 'GET,HEAD example.com/api/*'", text, why)
	}
	var r RequestRule
	target := text
	if methods, rest, ok := strings.Cut(text, " "); ok {
		target = rest
		for m := range strings.SplitSeq(methods, ",") {
			if m == "" || strings.Trim(m, "ABCDEFGHIJKLMNOPQRSTUVWXYZ") != "" {
				return RequestRule{}, bad("methods are in capitals, separated by commas")
			}
			r.Methods = append(r.Methods, m)
		}
	}
	host, path, hasPath := strings.Cut(target, "/")
	var err error
	if r.Host, err = NormalizeDomain(host); err != nil {
		return RequestRule{}, bad(err.Error())
	}
	r.Path = "/*"
	if hasPath {
		r.Path = "/" + path
	}
	if i := strings.IndexByte(r.Path, '*'); i >= 0 && i < len(r.Path)-1 {
		return RequestRule{}, bad("a * stands only at the end of a path")
	}
	if strings.ContainsAny(r.Path, " ?#") {
		return RequestRule{}, bad("a path has no spaces, ? or #")
	}
	return r, nil
}

// Matches reports whether the rule permits a request. The host must be
// normalised, the path cleaned of dot segments and escapes.
func (r RequestRule) Matches(method, host, path string) bool {
	if len(r.Methods) > 0 && !slices.Contains(r.Methods, method) {
		return false
	}
	if !MatchesDomain(r.Host, host) {
		return false
	}
	if prefix, ok := strings.CutSuffix(r.Path, "*"); ok {
		return strings.HasPrefix(path, prefix)
	}
	return path == r.Path
}
