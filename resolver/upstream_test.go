package resolver

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"github.com/sandboxd/sandboxd/sandbox"
)

var open = sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}

func TestFailover(t *testing.T) {
	b := newBench(t, open, "www.example.com. 60 IN A 93.184.216.34", "b.example.com. 60 IN A 93.184.216.34", "c.example.com. 60 IN A 93.184.216.34")
	broken := startUpstream(t)
	broken.answer(servfail)
	gone := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), closedPort(t))
	b.cfg.Upstreams = []netip.AddrPort{gone, broken.addr, b.up.addr}
	for _, name := range []string{"www.example.com.", "b.example.com."} {
		if got := addrsOf(b.get(t, name, dns.TypeA)); !slices.Equal(got, []string{"93.184.216.34"}) {
			t.Errorf("%s: %v", name, got)
		}
	}
	if s := b.Stats(); s.UpstreamErrors != 4 {
		t.Errorf("%+v", s)
	}
	// The one that did not answer twice goes last; the one that said it could
	// not is still there and keeps its place.
	want := []netip.AddrPort{broken.addr, b.up.addr, gone}
	if got := b.upstreams.order(b.cfg.Upstreams, time.Now()); !slices.Equal(got, want) {
		t.Errorf("order %v, want %v", got, want)
	}
	if got := b.upstreams.order(b.cfg.Upstreams, time.Now().Add(downFor+time.Second)); !slices.Equal(got, b.cfg.Upstreams) {
		t.Errorf("later: order %v", got)
	}
	b.cfg.Upstreams = []netip.AddrPort{gone}
	if r := b.get(t, "c.example.com.", dns.TypeA); r.Rcode != servfail {
		t.Errorf("nobody answers: %s", dns.RcodeToString[r.Rcode])
	}
	errs := b.Stats().UpstreamErrors
	if r := b.get(t, "c.example.com.", dns.TypeA); r.Rcode != servfail || b.Stats().UpstreamErrors != errs {
		t.Error("a failure is not remembered for a moment")
	}
}

// closedPort returns a port nobody listens on.
func closedPort(t *testing.T) uint16 {
	t.Helper()
	udp, tcp, err := listen(netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	defer tcp.Close()
	return netip.MustParseAddrPort(tcp.Addr().String()).Port()
}

// TestSilentUpstream: a server that does not answer costs one timeout, not the
// whole time.
func TestSilentUpstream(t *testing.T) {
	b := newBench(t, open, "www.example.com. 60 IN A 93.184.216.34")
	silent := startUpstream(t)
	stop := make(chan struct{})
	silent.before(func(dns.Question) { <-stop })
	defer close(stop)
	b.cfg.Upstreams = []netip.AddrPort{silent.addr, b.up.addr}
	if got := addrsOf(b.get(t, "www.example.com.", dns.TypeA)); len(got) != 1 {
		t.Errorf("%v", got)
	}
}

func TestLargeAnswerByTCP(t *testing.T) {
	records := []string{}
	for range 30 {
		records = append(records, `big.example.com. 60 IN TXT "`+strings.Repeat("x", 100)+string(rune('a'+len(records)))+`"`)
	}
	for range 80 {
		records = append(records, `huge.example.com. 60 IN TXT "`+strings.Repeat("x", 100)+string(rune('a'+len(records)%26))+`"`)
	}
	for i := range 100 {
		records = append(records, "many.example.com. 60 IN A "+netip.AddrFrom4([4]byte{93, 184, 216, byte(i)}).String())
	}
	b := newBench(t, allow("*.example.com"), records...)
	if r := b.get(t, "big.example.com.", dns.TypeTXT); len(r.Answer) != 30 {
		t.Errorf("%d records", len(r.Answer))
	}
	if r := b.get(t, "huge.example.com.", dns.TypeTXT); r.Rcode != servfail {
		t.Errorf("more than is passed on: %s with %d records", dns.RcodeToString[r.Rcode], len(r.Answer))
	}
	if r := b.get(t, "many.example.com.", dns.TypeA); len(r.Answer) != maxAddrs || len(b.net.pinnedNow()[0].addrs) != maxAddrs {
		t.Errorf("%d addresses", len(r.Answer))
	}
}

// TestNothingOfTheSandboxGoesUpstream: not its address, options or case.
func TestNothingOfTheSandboxGoesUpstream(t *testing.T) {
	b := newBench(t, open, "www.example.com. 60 IN A 93.184.216.34")
	q := question("wWw.example.com.", dns.TypeA)
	q.CheckingDisabled = true
	opt := q.IsEdns0()
	opt.SetDo()
	opt.Option = append(opt.Option, &dns.EDNS0_SUBNET{Code: dns.EDNS0SUBNET, Family: 1, SourceNetmask: 24, Address: []byte{10, 0, 0, 0}}, &dns.EDNS0_LOCAL{Code: 65001, Data: []byte("secret")})
	if r := b.respond(t.Context(), client1, q); len(addrsOf(r)) != 1 {
		t.Fatalf("%v", r)
	}
	b.up.mu.Lock()
	got := b.up.last
	b.up.mu.Unlock()
	if o := got.IsEdns0(); o == nil || len(o.Option) != 0 || o.Do() || o.UDPSize() != 1232 || got.CheckingDisabled || got.Id == q.Id || got.Question[0].Name != "www.example.com." {
		t.Errorf("upstream was asked %v", got)
	}
}

func TestUpstreamsOfAPolicy(t *testing.T) {
	addrs := func(texts ...string) (out []netip.Addr) {
		for _, text := range texts {
			out = append(out, netip.MustParseAddr(text))
		}
		return out
	}
	s := newServer(Config{
		Pool: netip.MustParsePrefix("10.213.0.0/16"), Admit: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16"), netip.MustParsePrefix("127.0.0.0/8")},
		Deny: []netip.Prefix{netip.MustParsePrefix("8.8.4.0/24")}, Upstreams: []netip.AddrPort{netip.MustParseAddrPort("192.168.1.53:53"), netip.MustParseAddrPort("10.0.0.53:5353")},
	})
	defer s.Close()
	s.reach.own = func() []netip.Addr { return addrs("93.184.215.1") }
	for _, c := range []struct {
		dns  []netip.Addr
		want string
	}{
		{nil, "192.168.1.53:53 10.0.0.53:5353"},
		{addrs("1.1.1.1", "9.9.9.9"), "1.1.1.1:53 9.9.9.9:53"},
		{addrs("10.0.0.53"), "10.0.0.53:5353"}, // the operator's, as configured
		{addrs("10.9.0.1"), "10.9.0.1:53"},
		{addrs("10.0.0.1", "127.0.0.53", "169.254.169.254", "10.213.0.5", "93.184.215.1", "8.8.4.4", "224.0.0.1", "::1", "2001:db8::1"), ""},
	} {
		var got []string
		for _, a := range s.upstreamsFor(compile(sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen, DNS: c.dns})) {
			got = append(got, a.String())
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%v: asks %v, want %s", c.dns, got, c.want)
		}
	}
	b := newBench(t, sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen, DNS: addrs("10.0.0.1")}, "www.example.com. 60 IN A 93.184.216.34")
	if r := b.get(t, "www.example.com.", dns.TypeA); r.Rcode != servfail || b.up.count("www.example.com.A") != 0 {
		t.Errorf("a policy whose only resolver may not be asked: %s", dns.RcodeToString[r.Rcode])
	}
}

func TestHostResolvConf(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resolv.conf")
	write := func(text string) {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("# by hand\nnameserver 127.0.0.53\nnameserver fe80::1%eth0\nnameserver nonsense\noptions edns0\n")
	h := &hostConf{path: path}
	addrs := func() (out []string) {
		for _, a := range h.get() {
			out = append(out, a.String())
		}
		return out
	}
	if d := cmp.Diff([]string{"127.0.0.53:53", "[fe80::1%eth0]:53"}, addrs()); d != "" {
		t.Error(d)
	}
	write("nameserver 192.0.2.1\nnameserver 192.0.2.2\nnameserver 192.0.2.3\nnameserver 192.0.2.4\n")
	h.looked = time.Now().Add(-hostConfAge)
	if d := cmp.Diff([]string{"192.0.2.1:53", "192.0.2.2:53", "192.0.2.3:53"}, addrs()); d != "" {
		t.Error(d)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	h.looked = time.Now().Add(-hostConfAge)
	if len(addrs()) != 3 {
		t.Error("the last servers are forgotten while the file is away")
	}
}
