package gate

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestParseAuthority(t *testing.T) {
	for in, want := range map[string]string{
		"example.com": "example.com:80", "EXAMPLE.com": "example.com:80", "example.com.": "example.com:80", "example.com:": "example.com:80",
		"example.com:8080": "example.com:8080", "a_b.example.com": "a_b.example.com:80", "xn--bcher-kva.example": "xn--bcher-kva.example:80",
		"93.184.216.34": "93.184.216.34:80", "localhost": "localhost:80", "1.example": "1.example:80", "0xa.example": "0xa.example:80",
	} {
		got, err := parseAuthority(in, 80)
		if err != nil || got.String() != want {
			t.Errorf("%q: %s, %v; want %s", in, got, err, want)
		}
	}
	for _, in := range []string{
		"", ".", ":80", "user@example.com", "example.com@evil.example", "[::1]", "[::1]:80", "::1", "example.com:0", "example.com:65536", "example.com:+80",
		"example.com:80:80", "example.com:x", "example..com", ".example.com", "example.com..", "bücher.example", "exa mple.com", "example.com/", "example.com\x00",
		"*", "*.example.com", "127.1", "2130706433", "0x7f.0.0.1", "0x7f000001", "017700000001", "127.0.0.1.", "1.2.3.4.5", "example.0x1", "exam%70le.com", "-a.com",
		strings.Repeat("a", 64) + ".com", strings.Repeat("a.", 127) + "com",
	} {
		if got, err := parseAuthority(in, 80); err == nil {
			t.Errorf("%q passed as %s", in, got)
		}
	}
}

func TestPlainPath(t *testing.T) {
	for in, want := range map[string]string{
		"/": "/", "/a/b": "/a/b", "/a/": "/a/", "/a%20b": "/a b", "/%61": "/a", "/a;v=1/b": "/a;v=1/b", "/a.b/..c/...": "/a.b/..c/...", "/%C3%BC": "/ü",
		"/a%3Fb": "/a?b", "/.hidden": "/.hidden",
	} {
		got, err := plainPath(in)
		if err != nil || got != want {
			t.Errorf("%q: %q, %v; want %q", in, got, err, want)
		}
	}
	for _, in := range []string{
		"", "*", "a", "/a/../b", "/a/./b", "/..", "/.", "/%2e%2e/a", "/%2E./a", "/a%2fb", "/a%2Fb", "/a%5cb", `/a\b`, "//a", "/a//b", "/a/..;/b", "/..;x=1", "/;/a",
		"/%252e%252e/a", "/%252f", "/a%2500", "/%00", "/a%0ab", "/%7f", "/%ff", "/%c0%af", "/%zz",
	} {
		if got, err := plainPath(in); err == nil {
			t.Errorf("%q passed as %q", in, got)
		}
	}
}

func TestJudge(t *testing.T) {
	foreign := func(a netip.Addr) (bool, error) { return a != netip.MustParseAddr("192.0.2.1") && a != otherAddr, nil }
	r := reach{
		pool: netip.MustParsePrefix("10.213.0.0/16"), admit: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8")},
		deny: []netip.Prefix{netip.MustParsePrefix("93.184.217.0/24")}, foreign: foreign,
	}
	for _, tc := range []struct {
		mode        sandbox.NetworkMode
		allow, deny string
		target      string
		origin      string
		permitted   bool
		rule        string
	}{
		{mode: "allow", allow: "example.com", target: "example.com:80", permitted: true, rule: "example.com"},
		{mode: "allow", allow: "example.com", target: "www.example.com:80"},
		{mode: "allow", allow: "example.com", target: "example.com.evil.net:80"},
		{mode: "allow", allow: "*.example.com", target: "www.example.com:443", permitted: true, rule: "*.example.com"},
		{mode: "allow", allow: "*.example.com", target: "example.com:443"},
		{mode: "allow", allow: "example.com:443", target: "example.com:443", permitted: true, rule: "example.com:443"},
		{mode: "allow", allow: "example.com:443", target: "example.com:80"},
		{mode: "allow", allow: "example.com/udp", target: "example.com:80"},
		{mode: "allow", allow: "*", deny: "evil.net", target: "evil.net:80", rule: "evil.net"},
		{mode: "allow", allow: "*", deny: "evil.net", target: "good.net:80", permitted: true, rule: "*"},
		{mode: "allow", allow: "*", deny: "*.evil.net:443", target: "x.evil.net:80", permitted: true, rule: "*"},
		{mode: "off", target: "example.com:80"},
		{mode: "open", target: "example.com:80", permitted: true, rule: "open"},
		{mode: "open", deny: "example.com", target: "example.com:80", rule: "example.com"},
		// A rule about names never means an address that is named itself.
		{mode: "allow", allow: "*", target: "93.184.216.34:80"},
		{mode: "allow", allow: "93.184.216.0/24", target: "93.184.216.34:80", permitted: true, rule: "93.184.216.0/24"},
		{mode: "allow", allow: "93.184.216.0/24:443", target: "93.184.216.34:80"},
		{mode: "allow", allow: "93.184.216.0/24", deny: "93.184.216.34", target: "93.184.216.34:80", rule: "93.184.216.34"},
		{mode: "open", target: "93.184.216.34:80", permitted: true, rule: "open"},
		{mode: "open", target: "10.9.8.7:80"},
		{mode: "open", allow: "10.9.8.7", target: "10.9.8.7:80", permitted: true, rule: "10.9.8.7"},
		{mode: "allow", allow: "172.16.0.1", target: "172.16.0.1:80"}, // not admitted
		{mode: "allow", allow: "10.213.0.9", target: "10.213.0.9:80"}, // a sandbox
		{mode: "allow", allow: "127.0.0.1", target: "127.0.0.1:80"},   // admitted or not
		{mode: "allow", allow: "169.254.169.254", target: "169.254.169.254:80"},
		{mode: "allow", allow: "93.184.216.35", target: "93.184.216.35:80"}, // the host's own
		{mode: "open", target: "93.184.217.1:80"},                           // the operator's deny list
		// What was dialed counts where a rule names that address.
		{mode: "allow", allow: "93.184.216.34", target: "any.name:80", origin: "93.184.216.34:80", permitted: true, rule: "93.184.216.34"},
		{mode: "allow", allow: "93.184.216.34", target: "any.name:80", origin: "93.184.216.36:80"},
		{mode: "allow", allow: "93.184.216.34:80", target: "any.name:8080", origin: "93.184.216.34:80"},
		{mode: "allow", allow: "93.184.216.34", deny: "any.name", target: "any.name:80", origin: "93.184.216.34:80", rule: "any.name"},
	} {
		p := sandbox.NetworkPolicy{Mode: tc.mode, HTTP: &sandbox.HTTPGate{}}
		if tc.allow != "" {
			p.Allow = []string{tc.allow}
		}
		if tc.deny != "" {
			p.Deny = []string{tc.deny}
		}
		to, err := parseAuthority(tc.target, 80)
		if err != nil {
			t.Fatal(err)
		}
		var origin netip.AddrPort
		if tc.origin != "" {
			origin = netip.MustParseAddrPort(tc.origin)
		}
		g, ref := compile(p, r).judge(to, origin)
		if (ref == nil) != tc.permitted {
			t.Errorf("%+v: %v", tc, ref)
			continue
		}
		rule := g.rule
		if ref != nil {
			rule = ref.rule
		}
		if rule != tc.rule {
			t.Errorf("%+v: by rule %q", tc, rule)
		}
		if tc.permitted && tc.origin != "" && g.addr != origin.Addr() {
			t.Errorf("%+v: leads to %s", tc, g.addr)
		}
	}
}

func TestJudgeRequestRules(t *testing.T) {
	p := compile(sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Allow: []string{"*.com"}, HTTP: &sandbox.HTTPGate{Rules: []string{
		"GET,HEAD a.com/api/*", "POST a.com/api/items", "b.com", "GET c.com",
	}}}, reach{foreign: func(netip.Addr) (bool, error) { return true, nil }})
	for _, tc := range []struct {
		method, host, path, override string
		want                         string // code; empty: permitted
	}{
		{method: "GET", host: "a.com", path: "/api/x"},
		{method: "HEAD", host: "a.com", path: "/api/"},
		{method: "GET", host: "a.com", path: "/api", want: codeDenied},
		{method: "GET", host: "a.com", path: "/", want: codeDenied},
		{method: "POST", host: "a.com", path: "/api/items"},
		{method: "POST", host: "a.com", path: "/api/items/", want: codeDenied},
		{method: "POST", host: "a.com", path: "/api/other", want: codeDenied},
		{method: "get", host: "a.com", path: "/api/x", want: codeDenied},
		{method: "GET", host: "a.com", path: "/api/../admin", want: codeAmbiguous},
		{method: "GET", host: "a.com", path: "/api/%2e%2e/admin", want: codeAmbiguous},
		{method: "DELETE", host: "a.com", path: "/api/%2e%2e/admin", want: codeDenied},
		{method: "GET", host: "a.com", path: "/api/x", override: "X-HTTP-Method-Override", want: codeAmbiguous},
		{method: "DELETE", host: "b.com", path: "/a/../b//c%2f"},
		{method: "DELETE", host: "b.com", path: "/", override: "X-Original-URL"},
		{method: "GET", host: "c.com", path: "/group%2fproject"},
		{method: "PUT", host: "c.com", path: "/group%2fproject", want: codeDenied},
		{method: "GET", host: "c.com", path: "/", override: "X-HTTP-Method", want: codeAmbiguous},
		{method: "GET", host: "d.com", path: "/", want: codeDenied},
	} {
		a := ask{method: tc.method, target: target{host: tc.host, port: 80}, override: tc.override}
		a.path, a.pathErr = plainPath(tc.path)
		_, ref := p.judgeRequest(a, netip.AddrPort{})
		got := ""
		if ref != nil {
			got = ref.code
		}
		if got != tc.want {
			t.Errorf("%+v: %q (%v)", tc, got, ref)
		}
	}
}

// TestCredentialRuling: where a credential goes, and that it goes nowhere else.
func TestCredentialRuling(t *testing.T) {
	inject := []sandbox.Credential{
		{Host: "api.example.com", Header: "Authorization", Secret: "one"},
		{Host: "*.example.com", Header: "authorization", Secret: "two"},
		{Host: "*.example.com", Header: "X-Key", Secret: "three"},
		{Host: "plain.net", Header: "Authorization", Secret: "four", Plain: true},
	}
	for _, tc := range []struct {
		allow, deny, host, origin, method string
		port                              uint16
		denied, tls                       bool
		to                                uint16
		secrets                           string
	}{
		{allow: "api.example.com", host: "api.example.com", port: 80, tls: true, to: 443, secrets: "one three"},
		{allow: "api.example.com:443", host: "api.example.com", port: 80, tls: true, to: 443, secrets: "one three"},
		{allow: "api.example.com:80", host: "api.example.com", port: 80, tls: true, to: 443, secrets: "one three"},
		{allow: "api.example.com:8443", host: "api.example.com", port: 80, denied: true},
		{allow: "api.example.com", host: "api.example.com", port: 8443, tls: true, to: 8443, secrets: "one three"},
		{allow: "api.example.com", deny: "api.example.com:443", host: "api.example.com", port: 80, denied: true},
		{allow: "*.example.com", host: "www.example.com", port: 80, tls: true, to: 443, secrets: "two three"},
		{allow: "*", host: "example.com", port: 80, to: 80},
		{allow: "plain.net", host: "plain.net", port: 80, to: 80, secrets: "four"},
		{allow: "plain.net", host: "plain.net", port: 80, method: "TRACE", denied: true},
		{allow: "*", host: "elsewhere.net", port: 80, method: "TRACE", to: 80},
		// By address: the client chose the server, so it must not get a secret.
		{allow: "93.184.216.34", host: "plain.net", origin: "93.184.216.34:80", port: 80, denied: true},
		{allow: "93.184.216.34", host: "api.example.com", origin: "93.184.216.34:80", port: 80, denied: true},
		{allow: "93.184.216.34", host: "elsewhere.net", origin: "93.184.216.34:80", port: 80, to: 80},
	} {
		p := sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Allow: []string{tc.allow}, HTTP: &sandbox.HTTPGate{Inject: inject}}
		if tc.deny != "" {
			p.Deny = []string{tc.deny}
		}
		var origin netip.AddrPort
		if tc.origin != "" {
			origin = netip.MustParseAddrPort(tc.origin)
		}
		a := ask{method: tc.method, target: target{host: tc.host, port: tc.port}, path: "/"}
		how, ref := compile(p, reach{foreign: func(netip.Addr) (bool, error) { return true, nil }}).judgeRequest(a, origin)
		if (ref != nil) != tc.denied {
			t.Errorf("%+v: %v", tc, ref)
		}
		if ref != nil {
			continue
		}
		var secrets []string
		for _, c := range how.inject {
			secrets = append(secrets, c.Secret)
		}
		if how.tls != tc.tls || how.port != tc.to || strings.Join(secrets, " ") != tc.secrets {
			t.Errorf("%+v: tls %t, port %d, secrets %v", tc, how.tls, how.port, secrets)
		}
	}
}

func FuzzPlainPath(f *testing.F) {
	for _, s := range []string{"/", "/a/b", "/%2e%2e/", "/..;/", "/%252e", "/a//b", `/\`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, escaped string) {
		path, err := plainPath(escaped)
		if err != nil {
			return
		}
		for _, s := range strings.Split(path, "/")[1:] {
			if s == "." || s == ".." || strings.HasPrefix(s, "..;") || strings.HasPrefix(s, ".;") || strings.ContainsAny(s, "\\\x00\n") {
				t.Errorf("%q passed as %q", escaped, path)
			}
		}
		if strings.Contains(path, "//") || !strings.HasPrefix(path, "/") {
			t.Errorf("%q passed as %q", escaped, path)
		}
	})
}

func FuzzAuthority(f *testing.F) {
	for _, s := range []string{"example.com", "example.com:80", "127.1", "a@b", "[::1]", "0x7f.1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		to, err := parseAuthority(s, 80)
		if err != nil {
			return
		}
		again, err := parseAuthority(to.String(), 80)
		if err != nil || again != to {
			t.Errorf("%q: %s, and then %s, %v", s, to, again, err)
		}
		if a, err := netip.ParseAddr(to.host); (err == nil) != to.addr.IsValid() || err == nil && a != to.addr {
			t.Errorf("%q: host %q, address %s", s, to.host, to.addr)
		}
		if to.host != strings.ToLower(to.host) || strings.HasSuffix(to.host, ".") || to.port == 0 {
			t.Errorf("%q: %+v", s, to)
		}
	})
}
