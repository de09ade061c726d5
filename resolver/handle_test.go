package resolver

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	ok       = dns.RcodeSuccess
	nx       = dns.RcodeNameError
	refused  = dns.RcodeRefused
	servfail = dns.RcodeServerFailure
)

func TestNamesByPolicy(t *testing.T) {
	open := sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}
	openBut := sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen, Deny: []string{"*.bad.example.com", "evil.example.com"}}
	some := allow("www.example.com:443", "*.api.example.com", "xn--bcher-kva.example.com")
	someBut := allow("*.example.com")
	someBut.Deny = []string{"evil.example.com"}
	records := []string{
		"www.example.com. 60 IN A 93.184.216.34", "evil.example.com. 60 IN A 93.184.216.35", "a.api.example.com. 60 IN A 93.184.216.36",
		"api.example.com. 60 IN A 93.184.216.37", "x.bad.example.com. 60 IN A 93.184.216.38", "xn--bcher-kva.example.com. 60 IN A 93.184.216.39",
		"localdomain. 60 IN A 93.184.216.40", "printer.local. 60 IN A 93.184.216.41", "db.internal. 60 IN A 93.184.216.42",
		"use-application-dns.net. 60 IN A 93.184.216.43", "notexample.com. 60 IN A 93.184.216.44",
	}
	for _, c := range []struct {
		policy sandbox.NetworkPolicy
		name   string
		rcode  int
		want   string
	}{
		{some, "www.example.com.", ok, "93.184.216.34"},
		{some, "WwW.eXample.COM.", ok, "93.184.216.34"},
		{some, "evil.example.com.", nx, ""},
		{some, "a.api.example.com.", ok, "93.184.216.36"},
		{some, "api.example.com.", nx, ""},
		{some, "xn--bcher-kva.example.com.", ok, "93.184.216.39"},
		{some, `www\.example.com.`, nx, ""},
		{some, `www.example\.com.`, nx, ""},
		{some, "*.api.example.com.", nx, ""},
		{some, `a\000.api.example.com.`, nx, ""},
		{some, "b\u00fccher.example.com.", nx, ""},
		{some, "www.example.com.evil.org.", nx, ""},
		{allow("*.example.com"), "notexample.com.", nx, ""},
		{allow(), "www.example.com.", nx, ""},
		{allow("93.184.216.0/24"), "www.example.com.", nx, ""},
		{allow("*"), "www.example.com.", ok, "93.184.216.34"},
		{allow("*"), "printer.local.", nx, ""},
		{allow("*"), "db.internal.", nx, ""},
		{allow("*"), "localdomain.", nx, ""},
		{allow("*"), "1.2.3.4.", nx, ""},
		{allow("*"), ".", nx, ""},
		{someBut, "www.example.com.", ok, "93.184.216.34"},
		{someBut, "evil.example.com.", nx, ""},
		{someBut, "EVIL.example.com.", nx, ""},
		{open, "evil.example.com.", ok, "93.184.216.35"},
		{open, "nosuch.example.com.", nx, ""},
		{open, "use-application-dns.net.", nx, ""},
		{openBut, "www.example.com.", ok, "93.184.216.34"},
		{openBut, "evil.example.com.", nx, ""},
		{openBut, "x.bad.example.com.", nx, ""},
		{sandbox.NetworkPolicy{Mode: sandbox.NetworkOff}, "www.example.com.", refused, ""},
		{sandbox.NetworkPolicy{}, "www.example.com.", refused, ""},
	} {
		b := newBench(t, c.policy, records...)
		r := b.get(t, c.name, dns.TypeA)
		if got := strings.Join(addrsOf(r), " "); r.Rcode != c.rcode || got != c.want {
			t.Errorf("%v %v: %s: %s %q, want %s %q", c.policy.Mode, c.policy.Allow, c.name, dns.RcodeToString[r.Rcode], got, dns.RcodeToString[c.rcode], c.want)
		}
		if len(r.Question) != 1 || r.Question[0].Name != c.name {
			t.Errorf("%s: the question came back as %v", c.name, r.Question)
		}
		if c.want != "" && r.Answer[0].Header().Name != c.name {
			t.Errorf("%s: answered under the name %s", c.name, r.Answer[0].Header().Name)
		}
		if pins := b.net.pinnedNow(); (len(pins) > 0) != (c.want != "" && c.policy.Mode == sandbox.NetworkAllow) {
			t.Errorf("%s: pinned %v", c.name, pins)
		}
	}
}

// TestRefusalsNeverGoUpstream: what is refused is not even asked for.
func TestRefusalsNeverGoUpstream(t *testing.T) {
	b := newBench(t, allow("good.example.com", "*.internal", "single"))
	for _, name := range []string{"bad.example.com.", "single.", "x.internal.", "x.local.", "4.3.2.1.", "data.ip6.arpa."} {
		if r := b.get(t, name, dns.TypeA); r.Rcode != nx {
			t.Errorf("%s: %s", name, dns.RcodeToString[r.Rcode])
		}
		if n := b.up.count(name + "A"); n != 0 {
			t.Errorf("%s: asked upstream", name)
		}
	}
	b.get(t, "good.example.com.", dns.TypeA)
	if b.up.count("good.example.com.A") != 1 {
		t.Error("control: a permitted name is asked upstream")
	}
}

func TestRefusalIsExplained(t *testing.T) {
	p := allow("*.example.com")
	p.Deny = []string{"evil.example.com"}
	b := newBench(t, p, "www.example.com. 60 IN A 93.184.216.34")
	r := b.get(t, "evil.example.com.", dns.TypeA)
	if code, text := extended(r); code != dns.ExtendedErrorCodeBlocked || !strings.Contains(text, "deny rule") {
		t.Errorf("extended error %d %q", code, text)
	}
	plain := new(dns.Msg)
	plain.SetQuestion("evil.example.com.", dns.TypeA)
	if r := b.respond(t.Context(), client1, plain); r.IsEdns0() != nil {
		t.Error("EDNS in the answer to a question without")
	}
	b.get(t, "www.example.com.", dns.TypeA)
	want := []NameEvent{
		{Sandbox: id1, Name: "evil.example.com", Type: "A", Verdict: Denied, Rule: "evil.example.com", Reason: "a deny rule of the network policy names it"},
		{Sandbox: id1, Name: "evil.example.com", Type: "A", Verdict: Denied, Rule: "evil.example.com", Reason: "a deny rule of the network policy names it"},
		{Sandbox: id1, Name: "www.example.com", Type: "A", Verdict: Allowed, Rule: "*.example.com", Addrs: []netip.Addr{netip.MustParseAddr("93.184.216.34")}},
	}
	var got []NameEvent
	for range want {
		got = append(got, <-b.events)
	}
	if d := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" {
		t.Error(d)
	}
	if s := b.Stats(); s.Queries != 3 || s.Denied != 2 {
		t.Errorf("%+v", s)
	}
}

func TestRebinding(t *testing.T) {
	closed := []string{
		"10.0.0.1", "10.213.0.3", "10.213.0.1", "127.0.0.1", "127.8.8.8", "169.254.169.254", "172.16.0.1", "192.168.1.1", "100.64.0.1",
		"0.0.0.0", "0.1.2.3", "224.0.0.251", "240.0.0.1", "255.255.255.255", "198.18.0.1", "192.0.2.1", "93.184.215.1",
		"10.1.2.3", // admitted, but no rule names it
	}
	for _, mode := range []sandbox.NetworkPolicy{allow("*.example.com"), {Mode: sandbox.NetworkOpen}, allow("*.example.com", "127.0.0.0/8", "10.0.0.0/16", "93.184.215.1")} {
		for _, addr := range closed {
			b := newBench(t, mode, "x.example.com. 60 IN A "+addr, "mixed.example.com. 60 IN A "+addr, "mixed.example.com. 60 IN A 93.184.216.34")
			r := b.get(t, "x.example.com.", dns.TypeA)
			if code, _ := extended(r); r.Rcode != nx || len(r.Answer) != 0 || code != dns.ExtendedErrorCodeBlocked {
				t.Errorf("%s %v: %s %v", addr, mode.Allow, dns.RcodeToString[r.Rcode], r.Answer)
			}
			if e := <-b.events; e.Verdict != Denied || !strings.Contains(e.Reason, "private") {
				t.Errorf("%s: told %+v", addr, e)
			}
			if got := addrsOf(b.get(t, "mixed.example.com.", dns.TypeA)); !slices.Equal(got, []string{"93.184.216.34"}) {
				t.Errorf("%s mixed with a public one: %v", addr, got)
			}
			for _, p := range b.net.pinnedNow() {
				if !slices.Equal(p.addrs, []netip.Addr{netip.MustParseAddr("93.184.216.34")}) {
					t.Errorf("%s: pinned %v", addr, p)
				}
			}
		}
	}
	// The control: the operator admits the range and a rule names it.
	b := newBench(t, allow("*.example.com", "10.1.2.0/24"), "x.example.com. 60 IN A 10.1.2.3")
	if got := addrsOf(b.get(t, "x.example.com.", dns.TypeA)); !slices.Equal(got, []string{"10.1.2.3"}) {
		t.Errorf("admitted and named: %v", got)
	}
	denied := allow("*.example.com")
	denied.Deny = []string{"93.184.216.0/24"}
	b = newBench(t, denied, "x.example.com. 60 IN A 93.184.216.34")
	if r := b.get(t, "x.example.com.", dns.TypeA); r.Rcode != nx {
		t.Errorf("an address on the deny list: %v", r.Answer)
	}
}

func TestTypes(t *testing.T) {
	b := newBench(t, allow("*.example.com", "*.in-addr.arpa"),
		"www.example.com. 60 IN A 93.184.216.34", "www.example.com. 60 IN AAAA 2606:2800::1",
		`www.example.com. 60 IN HTTPS 1 . alpn=h2 ipv4hint=10.0.0.1`, `www.example.com. 60 IN TXT "hello"`,
		"www.example.com. 900 IN MX 10 mail.example.com.", "_s._tcp.example.com. 60 IN SRV 1 1 80 www.example.com.",
		"34.216.184.93.in-addr.arpa. 60 IN PTR www.example.com.", "1.0.168.192.in-addr.arpa. 60 IN PTR secret.example.com.")
	for _, c := range []struct {
		name    string
		qtype   uint16
		rcode   int
		records int
	}{
		{"www.example.com.", dns.TypeA, ok, 1},
		{"www.example.com.", dns.TypeAAAA, ok, 0},
		{"www.example.com.", dns.TypeHTTPS, ok, 0},
		{"www.example.com.", dns.TypeSVCB, ok, 0},
		{"www.example.com.", dns.TypeTXT, ok, 1},
		{"www.example.com.", dns.TypeMX, ok, 1},
		{"www.example.com.", dns.TypeCAA, ok, 0},
		{"_s._tcp.example.com.", dns.TypeSRV, ok, 1},
		{"nosuch.example.com.", dns.TypeTXT, nx, 0},
		{"www.example.org.", dns.TypeTXT, nx, 0},
		{"www.example.org.", dns.TypeAAAA, nx, 0},
		{"www.example.com.", dns.TypeANY, refused, 0},
		{"www.example.com.", dns.TypeAXFR, refused, 0},
		{"www.example.com.", dns.TypeIXFR, refused, 0},
		{"www.example.com.", dns.TypeDNSKEY, refused, 0},
		{"www.example.com.", dns.TypeNULL, refused, 0},
		{"www.example.com.", 65280, refused, 0},
		{"34.216.184.93.in-addr.arpa.", dns.TypePTR, ok, 1},
		{"1.0.168.192.in-addr.arpa.", dns.TypePTR, nx, 0},
		{"1.215.184.93.in-addr.arpa.", dns.TypePTR, nx, 0},
		{"184.93.in-addr.arpa.", dns.TypePTR, nx, 0},
		{"localhost.", dns.TypeA, ok, 1},
		{"x.localhost.", dns.TypeAAAA, ok, 1},
		{"localhost.", dns.TypeTXT, ok, 0},
	} {
		r := b.get(t, c.name, c.qtype)
		if r.Rcode != c.rcode || len(r.Answer) != c.records {
			t.Errorf("%s %s: %s with %d records, want %s with %d", c.name, dns.TypeToString[c.qtype],
				dns.RcodeToString[r.Rcode], len(r.Answer), dns.RcodeToString[c.rcode], c.records)
		}
		for _, rr := range r.Answer {
			if rr.Header().Ttl > 300 {
				t.Errorf("%s: TTL %d", c.name, rr.Header().Ttl)
			}
		}
	}
	if b.up.count("www.example.com.AAAA")+b.up.count("www.example.com.HTTPS")+b.up.count("1.0.168.192.in-addr.arpa.PTR") != 0 {
		t.Error("asked upstream for what is never passed on")
	}
}

func TestMalformedQuestions(t *testing.T) {
	b := newBench(t, sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}, "www.example.com. 60 IN A 93.184.216.34")
	for what, c := range map[string]struct {
		change func(*dns.Msg)
		rcode  int
	}{
		"as it should be": {func(*dns.Msg) {}, ok},
		"class CH":        {func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }, refused},
		"two questions":   {func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) }, dns.RcodeFormatError},
		"no question":     {func(m *dns.Msg) { m.Question = nil }, dns.RcodeFormatError},
		"a response":      {func(m *dns.Msg) { m.Response = true }, dns.RcodeFormatError},
		"an update":       {func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate }, dns.RcodeFormatError},
		"EDNS version 1":  {func(m *dns.Msg) { m.IsEdns0().SetVersion(1) }, dns.RcodeBadVers},
	} {
		m := question("www.example.com.", dns.TypeA)
		c.change(m)
		r := b.respond(t.Context(), client1, m)
		if r.Rcode != c.rcode {
			t.Errorf("%s: %s, want %s", what, dns.RcodeToString[r.Rcode], dns.RcodeToString[c.rcode])
		}
		if _, err := r.Pack(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	if r := b.respond(t.Context(), netip.MustParseAddr("10.213.0.99"), question("www.example.com.", dns.TypeA)); r.Rcode != refused {
		t.Errorf("a stranger is told %s", dns.RcodeToString[r.Rcode])
	}
}

func TestPins(t *testing.T) {
	b := newBench(t, allow("*.example.com"),
		"zero.example.com. 0 IN A 93.184.216.34", "long.example.com. 86400 IN A 93.184.216.35",
		"two.example.com. 60 IN A 93.184.216.36", "two.example.com. 90 IN A 93.184.216.37")
	for _, c := range []struct {
		name  string
		ttl   uint32
		pin   time.Duration
		addrs int
	}{
		{"zero.example.com.", 0, 30 * time.Second, 1},
		{"long.example.com.", 300, 305 * time.Second, 1},
		{"two.example.com.", 60, 65 * time.Second, 2},
	} {
		r := b.get(t, c.name, dns.TypeA)
		pins := b.net.pinnedNow()
		p := pins[len(pins)-1]
		ttl := r.Answer[0].Header().Ttl
		if c.ttl-ttl > 2 || p.ttl > c.pin || p.ttl < c.pin-2*time.Second || len(p.addrs) != c.addrs || p.name+"." != c.name {
			t.Errorf("%s: TTL %d, pinned %+v", c.name, ttl, p)
		}
		if p.ttl < time.Duration(ttl)*time.Second {
			t.Errorf("%s: the pin ends before the answer does", c.name)
		}
	}
	// TTL 0 is asked for again each time, and pinned each time.
	b.get(t, "zero.example.com.", dns.TypeA)
	if n := b.up.count("zero.example.com.A"); n != 2 {
		t.Errorf("TTL 0: asked upstream %d times, want 2", n)
	}
	b.net.refuse = errors.New("netlink: out of memory at 0xdeadbeef")
	r := b.get(t, "two.example.com.", dns.TypeA)
	if _, text := extended(r); r.Rcode != servfail || len(r.Answer) != 0 || strings.Contains(text, "beef") {
		t.Errorf("an address that could not be opened: %s %v %q", dns.RcodeToString[r.Rcode], r.Answer, text)
	}
}

// TestPolicyChangesWhileAsking: the answer obeys the policy at its end.
func TestPolicyChangesWhileAsking(t *testing.T) {
	b := newBench(t, allow("*.example.com"), "www.example.com. 60 IN A 93.184.216.34")
	b.up.before(func(dns.Question) { b.net.set(allow("other.example.com")) })
	if r := b.get(t, "www.example.com.", dns.TypeA); r.Rcode != nx || len(b.net.pinnedNow()) != 0 {
		t.Errorf("%s %v, pinned %v", dns.RcodeToString[r.Rcode], r.Answer, b.net.pinnedNow())
	}
	b.up.before(func(dns.Question) {
		b.net.mu.Lock()
		defer b.net.mu.Unlock()
		b.net.tenants[client1] = Tenant{ID: "sbbbbbbbbbbbbb", Policy: allow("*.example.com")}
	})
	b.net.set(allow("*.example.com"))
	if r := b.respond(t.Context(), client1, question("new.example.com.", dns.TypeA)); r != nil {
		t.Errorf("the address has passed to another sandbox, which is sent %v", r)
	}
}

// TestGroupOfADeveloper: a group that is kept with a mark of its owner has the
// name its owner gave it.
func TestGroupOfADeveloper(t *testing.T) {
	p := allow()
	p.Group = "crew" + sandbox.OwnerMark("alice")
	b := newBench(t, p)
	b.net.tenants[netip.MustParseAddr("10.213.0.3")] = Tenant{ID: "sbcccccccccccc", Name: "db", Policy: p}
	for name, want := range map[string]string{
		"db.": "10.213.0.3", "db.crew.internal.": "10.213.0.3", "db." + p.Group + ".internal.": "10.213.0.3",
		"db.else.internal.": "", "db.crew" + sandbox.OwnerMark("bob") + ".internal.": "",
	} {
		if got := strings.Join(addrsOf(b.get(t, name, dns.TypeA)), " "); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	r := b.get(t, "3.0.213.10.in-addr.arpa.", dns.TypePTR)
	if len(r.Answer) != 1 || r.Answer[0].(*dns.PTR).Ptr != "db.crew.internal." {
		t.Errorf("reverse: %v", r.Answer)
	}
}

func TestGroups(t *testing.T) {
	p := allow()
	p.Group = "crew"
	b := newBench(t, p, "db.example.com. 60 IN A 93.184.216.34")
	b.net.tenants[netip.MustParseAddr("10.213.0.3")] = Tenant{ID: "sbcccccccccccc", Name: "db", Policy: sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen, Group: "crew"}}
	b.net.tenants[netip.MustParseAddr("10.213.0.4")] = Tenant{ID: "sbdddddddddddd", Name: "other", Policy: sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen, Group: "else"}}
	b.net.tenants[netip.MustParseAddr("10.213.0.5")] = Tenant{ID: "sbeeeeeeeeeeee", Name: "db.example.com", Policy: sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen, Group: "crew"}}
	for name, want := range map[string]string{
		"db.": "10.213.0.3", "DB.": "10.213.0.3", "db.crew.internal.": "10.213.0.3", "sbcccccccccccc.": "10.213.0.3", "sbcccccccccccc.crew.internal.": "10.213.0.3",
		"other.": "", "other.else.internal.": "", "other.crew.internal.": "", "sbdddddddddddd.": "", "db.else.internal.": "", "db.internal.": "",
		"crew.internal.": "", "db.example.com.": "", // a member cannot take a public name
		"db.example.com.crew.internal.": "10.213.0.5",
	} {
		r := b.get(t, name, dns.TypeA)
		if got := strings.Join(addrsOf(r), " "); got != want || (r.Rcode == ok) != (want != "") {
			t.Errorf("%s: %s %q, want %q", name, dns.RcodeToString[r.Rcode], got, want)
		}
		if want != "" && r.Answer[0].Header().Ttl != 5 {
			t.Errorf("%s: TTL %d", name, r.Answer[0].Header().Ttl)
		}
	}
	for name, want := range map[string]string{
		"3.0.213.10.in-addr.arpa.": "db.crew.internal.", "4.0.213.10.in-addr.arpa.": "", "2.0.213.10.in-addr.arpa.": "asker.crew.internal.", "1.0.213.10.in-addr.arpa.": "",
	} {
		r := b.get(t, name, dns.TypePTR)
		got := ""
		if len(r.Answer) == 1 {
			got = r.Answer[0].(*dns.PTR).Ptr
		}
		if got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	if n := b.up.total(); n != 0 {
		t.Errorf("asked upstream %d times", n)
	}
	p.Deny = []string{"db"}
	b.net.set(p)
	if r := b.get(t, "db.", dns.TypeA); r.Rcode != nx {
		t.Errorf("a member's name on the deny list: %v", r.Answer)
	}
	p.Group = ""
	p.Deny = nil
	b.net.set(p)
	if r := b.get(t, "db.", dns.TypeA); r.Rcode != nx {
		t.Errorf("without a group: %v", r.Answer)
	}
}

func TestLookup(t *testing.T) {
	b := newBench(t, allow("*.example.com"), "www.example.com. 60 IN A 93.184.216.34", "in.example.com. 60 IN A 10.0.0.1")
	who := Tenant{ID: id1, Policy: allow("*.example.com")}
	got, err := b.Lookup(t.Context(), who, "WWW.example.com")
	if err != nil || !slices.Equal(got, []netip.Addr{netip.MustParseAddr("93.184.216.34")}) {
		t.Errorf("%v %v", got, err)
	}
	if len(b.net.pinnedNow()) != 0 {
		t.Error("a look-up of the gate opened an address")
	}
	for name, class := range map[string]error{
		"in.example.com": sandbox.ErrForbidden, "example.org": sandbox.ErrForbidden, "nosuch.example.com": sandbox.ErrNotFound,
		"localhost": sandbox.ErrNotFound, "10.0.0.1": sandbox.ErrForbidden,
	} {
		if got, err := b.Lookup(t.Context(), who, name); !errors.Is(err, class) {
			t.Errorf("%s: %v %v, want class %v", name, got, err, class)
		}
	}
	b.up.answer(servfail)
	if _, err := b.Lookup(t.Context(), who, "new.example.com"); !errors.Is(err, sandbox.ErrUnavailable) {
		t.Errorf("upstream fails: %v", err)
	}
}

// TestLookupsAreBounded: the gate looks a name up for each request that a
// sandbox sends it, so these questions have the bounds of the sandbox's own.
func TestLookupsAreBounded(t *testing.T) {
	b := newBench(t, allow("*.flood.example", "steady.example"), "steady.example. 60 IN A 93.184.216.34")
	tenant, _ := b.net.Tenant(client1)
	if _, err := b.Lookup(t.Context(), tenant, "steady.example"); err != nil {
		t.Fatal(err)
	}
	for i := range 3 * queriesBurst {
		_, err := b.Lookup(t.Context(), tenant, fmt.Sprintf("n%d.flood.example", i))
		if err != nil && !errors.Is(err, sandbox.ErrNotFound) && !errors.Is(err, sandbox.ErrUnavailable) {
			t.Fatal(err)
		}
	}
	if n := b.up.total(); n > 2*queriesBurst {
		t.Errorf("%d questions put upstream at once", n)
	}
	// The control: what the cache knows is answered on.
	if addrs, err := b.Lookup(t.Context(), tenant, "steady.example"); err != nil || len(addrs) != 1 {
		t.Errorf("a name in the cache: %v, %v", addrs, err)
	}
}

// TestLookupsInFlight: nor does one sandbox have more of them wait for
// upstream than questions of its own.
func TestLookupsInFlight(t *testing.T) {
	b := newBench(t, allow("*.slow.example"))
	release := make(chan struct{})
	b.up.before(func(dns.Question) { <-release })
	let := sync.OnceFunc(func() { close(release) })
	defer let()
	tenant, _ := b.net.Tenant(client1)
	ended := make(chan error, 2*inWorkMost)
	for i := range 2 * inWorkMost {
		go func() {
			_, err := b.Lookup(t.Context(), tenant, fmt.Sprintf("n%d.slow.example", i))
			ended <- err
		}()
	}
	for range inWorkMost { // those that are too many end at once
		select {
		case err := <-ended:
			if !errors.Is(err, sandbox.ErrUnavailable) {
				t.Errorf("one too many: %v", err)
			}
		case <-time.After(tryTimeout / 2):
			t.Fatal("all of them wait for upstream")
		}
	}
	let()
	for range inWorkMost {
		if err := <-ended; !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("one that waited: %v", err)
		}
	}
}
