package netns

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

// stage is a scene without a kernel: a host at 93.184.216.1, one fellow, one
// stranger.
func stage(t *testing.T) scene {
	t.Helper()
	fellow := planned(t, "sbaaaaaaaaaaaa", "10.213.0.8", sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen, Group: "ring"})
	fellow.title = "db"
	stranger := planned(t, "sbbbbbbbbbbbbb", "10.213.0.9", sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen})
	all := []linkPlan{fellow, stranger}
	return scene{
		table: planTable(DefaultPool, nil, []netip.Prefix{prefix("10.1.0.0/16")}), services: Services{DNS: 9953, Gate: 9980}, boxes: all,
		tenant: func(a netip.Addr) (linkPlan, bool) {
			for _, l := range all {
				if l.addr == a {
					return l, true
				}
			}
			return linkPlan{}, false
		},
		local: func(a netip.Addr) string {
			if a == netipAddr("93.184.216.1") {
				return "local"
			}
			return ""
		},
	}
}

// TestExplainNames: what the resolver and the gate would make of a name, and
// what is said to mend it.
func TestExplainNames(t *testing.T) {
	allow := sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Allow: []string{"example.com:443", "*.example.org:8000-8100/udp"}, Deny: []string{"bad.example.org"}, Group: "ring"}
	marked := sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Group: "ring" + sandbox.OwnerMark("alice")}
	open := sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen, Deny: []string{"*.bad.example"}}
	gated := sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Allow: []string{"example.com"}, HTTP: &sandbox.HTTPGate{Rules: []string{"GET example.com/*"}}}
	for _, c := range []struct {
		p       sandbox.NetworkPolicy
		name    string
		proto   string
		port    uint16
		allowed bool
		step    string
		mend    string
	}{
		{allow, "example.com", "tcp", 443, true, stepAllow, ""},
		{allow, "example.com", "tcp", 80, false, stepDefault, "--add example.com:80"},
		{allow, "www.example.com", "tcp", 443, false, stepName, "--add www.example.com:443"},
		{allow, "a.example.org", "udp", 8000, true, stepAllow, ""},
		{allow, "a.example.org", "tcp", 8000, false, stepDefault, "--add a.example.org:8000"},
		{allow, "bad.example.org", "udp", 8000, false, stepDeny, "--remove bad.example.org"},
		{allow, "db", "tcp", 5432, true, stepGroup, ""},
		{allow, "db.ring.internal", "tcp", 5432, true, stepGroup, ""},
		{marked, "db.ring.internal", "tcp", 5432, true, stepGroup, ""},
		{allow, "db.other.internal", "tcp", 5432, false, stepName, ""},
		{open, "example.com", "tcp", 22, true, stepAllow, ""},
		{open, "x.bad.example", "tcp", 443, false, stepDeny, "--remove *.bad.example"},
		{open, "dns.example", "udp", 53, false, stepDNS, ""},
		{open, "dns.example", "tcp", 853, false, stepDNS, ""},
		{open, "dns.example", "icmp", 0, true, stepAllow, ""},
		{gated, "example.com", "tcp", 80, true, stepGate, ""},
		{gated, "example.com", "tcp", 443, true, stepAllow, ""},
		{gated, "example.com", "udp", 443, false, stepGate, ""},
		{sandbox.NetworkPolicy{}, "example.com", "tcp", 443, false, stepOff, "--allow example.com:443"},
	} {
		v := stage(t).explainName(planned(t, "sbcccccccccccc", "10.213.0.7", c.p), c.name, c.proto, c.port)
		if v.Allowed != c.allowed || v.Step != c.step || !strings.Contains(v.Mend, c.mend) || (c.mend == "" && c.allowed && v.Mend != "") {
			t.Errorf("%s:%d/%s under %+v: %+v", c.name, c.port, c.proto, c.p, v)
		}
		if n := len(v.Steps); n == 0 || v.Steps[n-1].Step != v.Step {
			t.Errorf("%s: the last of %+v is not what decided", c.name, v.Steps)
		}
	}
}

// TestExplainMends: what is said to permit a flow does.
func TestExplainMends(t *testing.T) {
	p := sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow}
	for _, f := range []flow{
		{netipAddr("8.8.8.8"), protocolNumber("tcp"), 443},
		{netipAddr("8.8.8.8"), protocolNumber("udp"), 123},
		{netipAddr("8.8.8.8"), protocolNumber("icmp"), 0},
		{netipAddr("10.1.2.3"), protocolNumber("tcp"), 22},
	} {
		v := stage(t).explain(planned(t, "sbcccccccccccc", "10.213.0.7", p), f)
		_, rule, ok := strings.Cut(v.Mend, " --add ")
		if v.Allowed || !ok {
			t.Errorf("%v: %+v", f, v)
			continue
		}
		mended := p
		mended.Allow = []string{rule}
		if v := stage(t).explain(planned(t, "sbcccccccccccc", "10.213.0.7", mended), f); !v.Allowed || v.Step != stepAllow {
			t.Errorf("%v with the rule %s: %+v", f, rule, v)
		}
		other := flow{f.dest, f.proto, f.port + 1}
		if v := stage(t).explain(planned(t, "sbcccccccccccc", "10.213.0.7", mended), other); v.Allowed && f.port != 0 {
			t.Errorf("the rule %s permits more: %+v", rule, v)
		}
	}
	// What no rule can mend is not said to be.
	for _, a := range []string{"93.184.216.1", "169.254.169.254", "10.213.0.9"} {
		if v := stage(t).explain(planned(t, "sbcccccccccccc", "10.213.0.7", p), flow{netipAddr(a), protocolNumber("tcp"), 80}); v.Allowed || strings.Contains(v.Mend, "--add") {
			t.Errorf("%s: %+v", a, v)
		}
	}
}

// TestWhyRefused names what no policy names.
func TestWhyRefused(t *testing.T) {
	s := stage(t)
	l := planned(t, "sbcccccccccccc", "10.213.0.7", sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen})
	limited := planned(t, "sbcccccccccccc", "10.213.0.7", sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen, Limits: sandbox.NetworkLimits{Flows: 1}})
	packet := loggedPacket{src: l.addr, dst: netipAddr("8.8.8.8"), protocol: protocolNumber("tcp"), version: 4, dstPort: 443}
	forged, private, six := packet, packet, packet
	forged.src, private.dst = netipAddr("1.2.3.4"), netipAddr("10.9.9.9")
	six.version, six.src, six.dst = 6, netipAddr("2001:db8::1"), netipAddr("2001:db8::2")
	for _, c := range []struct {
		l    linkPlan
		p    loggedPacket
		want string
	}{{l, forged, whyForged}, {l, private, stepClosed}, {l, six, stepIPv6}, {l, packet, whyState}, {limited, packet, whyLimit}} {
		if got := s.whyRefused(c.l, c.p); got != c.want {
			t.Errorf("%+v: %s, want %s", c.p, got, c.want)
		}
	}
}
