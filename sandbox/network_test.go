package sandbox

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestParseNetworkRule(t *testing.T) {
	prefix := netip.MustParsePrefix
	for text, want := range map[string]NetworkRule{
		"203.0.113.9":                        {Prefix: prefix("203.0.113.9/32")},
		"203.0.113.9/24":                     {Prefix: prefix("203.0.113.0/24")},
		"203.0.113.0/24:80,8000-8100/tcp":    {Prefix: prefix("203.0.113.0/24"), Ports: []PortRange{{80, 80}, {8000, 8100}}, Protocol: "tcp"},
		"0.0.0.0/0/icmp":                     {Prefix: prefix("0.0.0.0/0"), Protocol: "icmp"},
		"Example.COM.:443":                   {Domain: "example.com", Ports: []PortRange{{443, 443}}},
		"*.example.com":                      {Domain: "*.example.com"},
		"*:443":                              {Domain: "*", Ports: []PortRange{{443, 443}}},
		"example.com:90,80-85,84-89/udp":     {Domain: "example.com", Ports: []PortRange{{80, 90}}, Protocol: "udp"},
		"xn--mnchen-3ya.example:1-65535":     {Domain: "xn--mnchen-3ya.example", Ports: []PortRange{{1, 65535}}},
		"_acme-challenge.example.com:53/udp": {Domain: "_acme-challenge.example.com", Ports: []PortRange{{53, 53}}, Protocol: "udp"},
	} {
		got, err := ParseNetworkRule(text)
		if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Prefix{})); err != nil || diff != "" {
			t.Errorf("ParseNetworkRule(%q): %v\n%s", text, err, diff)
		}
		again, err := ParseNetworkRule(got.String())
		if diff := cmp.Diff(got, again, cmpopts.EquateComparable(netip.Prefix{})); err != nil || diff != "" {
			t.Errorf("%q written as %q does not read the same: %v\n%s", text, got.String(), err, diff)
		}
	}
}

func TestParseNetworkRuleRefuses(t *testing.T) {
	for _, text := range []string{
		"", ":80", "/tcp", "example.com:", "example.com:0", "example.com:65536", "example.com:90-80", "example.com:a", "example.com:80/sctp",
		"1.2.3", "1.2.3.4.5", "256.1.1.1", "1.2.3.4/33", "example.com/24", "exa mple.com", "münchen.example", "-a.example", "a..b", "*.*.example.com",
		"a.*.com", "::1", "[::1]:80", "2001:db8::/32", "1.2.3.4:80/icmp", "http://example.com", strings.Repeat("a", 64) + ".example",
		"h:1,3,5,7,9,11,13,15,17,19,21,23,25,27,29,31,33",
	} {
		if got, err := ParseNetworkRule(text); CodeOf(err) != "invalid_rule" {
			t.Errorf("ParseNetworkRule(%q) = %v, %v; want invalid_rule", text, got, err)
		}
	}
}

func TestRuleMatches(t *testing.T) {
	for _, c := range []struct {
		rule, name string
		want       bool
	}{
		{"example.com", "example.com", true},
		{"example.com", "www.example.com", false},
		{"example.com", "badexample.com", false},
		{"*.example.com", "www.example.com", true},
		{"*.example.com", "a.b.example.com", true},
		{"*.example.com", "example.com", false},
		{"*.example.com", ".example.com", false},
		{"*.example.com", "badexample.com", false},
		{"*", "example.com", true},
		{"203.0.113.0/24", "203.0.113.1", false},
	} {
		r, err := ParseNetworkRule(c.rule)
		if got := r.MatchesName(c.name); err != nil || got != c.want {
			t.Errorf("rule %q matches name %q: %v (%v), want %v", c.rule, c.name, got, err, c.want)
		}
	}
	for _, c := range []struct {
		rule, protocol string
		port           uint16
		want           bool
	}{
		{"1.2.3.4", "tcp", 80, true},
		{"1.2.3.4", "icmp", 0, true},
		{"1.2.3.4:80", "tcp", 80, true},
		{"1.2.3.4:80", "udp", 80, true},
		{"1.2.3.4:80", "icmp", 80, false},
		{"1.2.3.4:80-90", "tcp", 91, false},
		{"1.2.3.4:80/tcp", "udp", 80, false},
		{"1.2.3.4/icmp", "icmp", 8, true},
	} {
		r, err := ParseNetworkRule(c.rule)
		if got := r.MatchesPort(c.protocol, c.port); err != nil || got != c.want {
			t.Errorf("rule %q matches %s %d: %v (%v), want %v", c.rule, c.protocol, c.port, got, err, c.want)
		}
	}
}

func TestRequestRules(t *testing.T) {
	for _, c := range []struct {
		rule, method, host, path string
		want                     bool
	}{
		{"example.com", "POST", "example.com", "/x", true},
		{"example.com", "GET", "www.example.com", "/", false},
		{"GET,HEAD *.example.com/api/*", "GET", "a.example.com", "/api/x", true},
		{"GET,HEAD *.example.com/api/*", "PUT", "a.example.com", "/api/x", false},
		{"GET example.com/api/*", "GET", "example.com", "/apix", false},
		{"GET example.com/api", "GET", "example.com", "/api", true},
		{"GET example.com/api", "GET", "example.com", "/api/x", false},
		{"GET example.com/", "GET", "example.com", "/x", false},
	} {
		r, err := ParseRequestRule(c.rule)
		if got := r.Matches(c.method, c.host, c.path); err != nil || got != c.want {
			t.Errorf("rule %q matches %s %s%s: %v (%v), want %v", c.rule, c.method, c.host, c.path, got, err, c.want)
		}
	}
	for _, text := range []string{"", "get example.com", "GET, example.com", "GET example.com/a*b", "GET exa mple.com", "GET example.com/a?b"} {
		if _, err := ParseRequestRule(text); CodeOf(err) != "invalid_gate" {
			t.Errorf("ParseRequestRule(%q): %v, want invalid_gate", text, err)
		}
	}
}

func TestNetworkPolicyValidate(t *testing.T) {
	secret := func(host, header, name string) *HTTPGate {
		return &HTTPGate{Inject: []Credential{{Host: host, Header: header, Secret: name}}}
	}
	for name, p := range map[string]NetworkPolicy{
		"empty":  {},
		"off":    {Mode: NetworkOff},
		"group":  {Mode: NetworkAllow, Group: "team"},
		"listed": {Mode: NetworkAllow, Allow: []string{"*.example.com:443"}, Deny: []string{"bad.example.com"}},
		"gate":   {Mode: NetworkOpen, HTTP: secret("api.example.com", "Authorization", "token")},
		"rules":  {Mode: NetworkAllow, Allow: []string{"a.example.com:80", "b.example.com:443", "*.example.org:80/tcp", "a.example.com:443/udp", "192.0.2.1"}, HTTP: &HTTPGate{Rules: []string{"GET a.example.com/x", "PUT *.example.org", "b.example.com"}}},
		"open":   {Mode: NetworkOpen, HTTP: &HTTPGate{Rules: []string{"example.com"}}},
		"rates":  {Mode: NetworkOpen, Limits: NetworkLimits{EgressBPS: 50_000_000}},
	} {
		if err := p.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, c := range map[string]struct {
		p    NetworkPolicy
		code string
	}{
		"mode":            {NetworkPolicy{Mode: "host"}, "invalid_network"},
		"allow when off":  {NetworkPolicy{Allow: []string{"example.com"}}, "invalid_network"},
		"group when off":  {NetworkPolicy{Group: "team"}, "invalid_network"},
		"bad rule":        {NetworkPolicy{Mode: NetworkAllow, Allow: []string{"::1"}}, "invalid_rule"},
		"bad deny":        {NetworkPolicy{Mode: NetworkOpen, Deny: []string{"a b"}}, "invalid_rule"},
		"loopback dns":    {NetworkPolicy{Mode: NetworkOpen, DNS: []netip.Addr{netip.MustParseAddr("127.0.0.53")}}, "invalid_network"},
		"too slow":        {NetworkPolicy{Mode: NetworkOpen, Limits: NetworkLimits{IngressBPS: 100}}, "invalid_network"},
		"gate when off":   {NetworkPolicy{HTTP: &HTTPGate{}}, "invalid_gate"},
		"hop header":      {NetworkPolicy{Mode: NetworkOpen, HTTP: secret("example.com", "Connection", "token")}, "invalid_gate"},
		"host header":     {NetworkPolicy{Mode: NetworkOpen, HTTP: secret("example.com", "Host", "token")}, "invalid_gate"},
		"injected header": {NetworkPolicy{Mode: NetworkOpen, HTTP: secret("example.com", "A\r\nB", "token")}, "invalid_gate"},
		"secret for all":  {NetworkPolicy{Mode: NetworkOpen, HTTP: secret("*", "Authorization", "token")}, "invalid_gate"},
	} {
		if err := c.p.Validate(); CodeOf(err) != c.code {
			t.Errorf("%s: %v, want code %s", name, err, c.code)
		}
	}
	// Request rules that a permitted port would lead past.
	for allow, rule := range map[string]string{
		"a.example.com": "GET a.example.com/x", "a.example.com:443": "GET a.example.com", "a.example.com:80,8080": "a.example.com/x", "a.example.com:79-80": "PUT a.example.com",
		"*.example.com": "GET a.example.com", "b.example.com:8080/tcp": "GET *.example.com/x", "*.b.example.com": "GET *.example.com", "*": "GET a.example.com", "c.example.com": "GET */x",
	} {
		p := NetworkPolicy{Mode: NetworkAllow, Allow: []string{"d.example.org:80", allow}, HTTP: &HTTPGate{Rules: []string{rule}}}
		if err := p.Validate(); CodeOf(err) != "invalid_gate" {
			t.Errorf("allow %s, rule %s: %v", allow, rule, err)
		}
		if p.Mode, p.Allow = NetworkOpen, nil; CodeOf(p.Validate()) != "invalid_gate" {
			t.Errorf("open, rule %s: %v", rule, p.Validate())
		}
	}
}

// FuzzNetworkRule: what is accepted is written in one way only.
func FuzzNetworkRule(f *testing.F) {
	f.Add("203.0.113.0/24:80,8000-8100/tcp")
	f.Add("*.example.com:443")
	f.Fuzz(func(t *testing.T, text string) {
		r, err := ParseNetworkRule(text)
		if err != nil {
			return
		}
		again, err := ParseNetworkRule(r.String())
		if err != nil || again.String() != r.String() {
			t.Fatalf("%q reads as %q, and that as %q (%v)", text, r, again, err)
		}
	})
}
