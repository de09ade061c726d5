package resolver

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sandboxd/sandboxd/sandbox"
)

// openBench is a bench that listens, on loopback: there the sandbox's address
// is 127.0.0.1.
func openBench(t *testing.T, p sandbox.NetworkPolicy, records ...string) (*bench, string) {
	t.Helper()
	b := newBench(t, p, records...)
	b.net.tenants[netip.MustParseAddr("127.0.0.1")] = Tenant{ID: id1, Policy: p}
	s, err := Open(Config{
		Listen: netip.MustParseAddrPort("127.0.0.1:0"), Upstreams: []netip.AddrPort{b.up.addr},
		Pool: netip.MustParsePrefix("10.213.0.0/16"), Sandboxes: b.net,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	b.Server = s
	return b, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), s.Port()).String()
}

func TestOverTheWire(t *testing.T) {
	records := []string{}
	for i := range 60 {
		records = append(records, "many.example.com. 60 IN A "+netip.AddrFrom4([4]byte{93, 184, 216, byte(i)}).String())
	}
	b, at := openBench(t, allow("*.example.com"), append(records, "www.example.com. 60 IN A 93.184.216.34")...)
	for _, network := range []string{"udp", "tcp"} {
		c := dns.Client{Net: network, UDPSize: udpSize}
		r, _, err := c.ExchangeContext(t.Context(), question("www.example.com.", dns.TypeA), at)
		if err != nil || len(addrsOf(r)) != 1 {
			t.Errorf("%s: %v %v", network, r, err)
		}
		r, _, err = c.ExchangeContext(t.Context(), question("www.example.org.", dns.TypeA), at)
		if err != nil || r.Rcode != nx {
			t.Errorf("%s: %v %v", network, r, err)
		}
		update := question("www.example.com.", dns.TypeA)
		update.Opcode = dns.OpcodeUpdate
		r, _, err = c.ExchangeContext(t.Context(), update, at)
		if err != nil || r.Rcode != dns.RcodeNotImplemented {
			t.Errorf("%s: an update: %v %v", network, r, err)
		}
	}
	small := new(dns.Msg)
	small.SetQuestion("many.example.com.", dns.TypeA)
	r, _, err := (&dns.Client{}).ExchangeContext(t.Context(), small, at)
	if err != nil || !r.Truncated || len(addrsOf(r)) >= 60 {
		t.Errorf("60 addresses in 512 bytes: %v %v", r, err)
	}
	r, _, err = (&dns.Client{Net: "tcp"}).ExchangeContext(t.Context(), small, at)
	if err != nil || r.Truncated || len(addrsOf(r)) != 60 {
		t.Errorf("by TCP: %v", err)
	}
	b.net.mu.Lock()
	delete(b.net.tenants, netip.MustParseAddr("127.0.0.1"))
	b.net.mu.Unlock()
	r, _, err = (&dns.Client{}).ExchangeContext(t.Context(), small, at)
	if err != nil || r.Rcode != refused {
		t.Errorf("a stranger: %v %v", r, err)
	}
	if conn, err := net.Dial("tcp", at); err == nil {
		defer conn.Close()
		if !endsSoon(conn) {
			t.Error("a stranger may keep a TCP connection")
		}
	}
}

// endsSoon reports whether the other side closes a connection.
func endsSoon(conn net.Conn) bool {
	if err := conn.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		return false
	}
	_, err := conn.Read(make([]byte, 1))
	ne, isNet := err.(net.Error) //nolint:errorlint // as it is returned
	return err != nil && (!isNet || !ne.Timeout())
}

func TestConnectionsAreFew(t *testing.T) {
	b, at := openBench(t, allow("*.example.com"), "www.example.com. 60 IN A 93.184.216.34")
	var conns []net.Conn
	for range connsMost {
		conn, err := net.Dial("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conns = append(conns, conn)
	}
	waitFor(t, "all connections", func() bool {
		c := b.clients.get(id1, time.Now())
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.conns) == connsMost
	})
	more, err := net.Dial("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	defer more.Close()
	if !endsSoon(more) {
		t.Error("one connection too many is kept")
	}
	// A message no question has the size of ends a connection, and frees its place.
	if _, err := conns[0].Write([]byte{0xff, 0xff, 0}); err != nil {
		t.Fatal(err)
	}
	if !endsSoon(conns[0]) {
		t.Error("65,535 bytes are waited for")
	}
	waitFor(t, "a free place", func() bool {
		_, _, err := (&dns.Client{Net: "tcp"}).ExchangeContext(t.Context(), question("www.example.com.", dns.TypeA), at)
		return err == nil
	})
}

// TestIdleConnectionsMakeRoom: connections that have their answer do not keep
// others away, as when clients have closed theirs and the daemon is too busy to
// read that. The control is TestConnectionsAreFew: those in use do.
func TestIdleConnectionsMakeRoom(t *testing.T) {
	_, at := openBench(t, allow("*.example.com"), "www.example.com. 60 IN A 93.184.216.34")
	ask := func(conn *dns.Conn) error {
		return errors.Join(conn.WriteMsg(question("www.example.com.", dns.TypeA)), func() error { _, err := conn.ReadMsg(); return err }())
	}
	var conns []*dns.Conn
	for i := range 3 * connsMost {
		conn, err := dns.Dial("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := ask(conn); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		conns = append(conns, conn)
	}
	if !endsSoon(conns[0].Conn) {
		t.Error("the oldest is kept")
	}
	if err := ask(conns[len(conns)-1]); err != nil {
		t.Errorf("the latest: %v", err)
	}
}

func TestRates(t *testing.T) {
	b := newBench(t, allow("*.example.com"), "www.example.com. 60 IN A 93.184.216.34", `t.example.com. 60 IN TXT "x"`)
	b.net.tenants[netip.MustParseAddr("10.213.0.9")] = Tenant{ID: "sbffffffffffff", Policy: allow("*.example.com")}
	got := map[int]int{}
	for range 100 {
		got[b.get(t, "t.example.com.", dns.TypeTXT).Rcode]++
	}
	if got[ok] < heavyBurst || got[refused] == 0 {
		t.Errorf("100 TXT questions at once: %v", got)
	}
	got = map[int]int{}
	for range 2 * queriesBurst {
		r := b.get(t, "www.example.com.", dns.TypeA)
		if code, text := extended(r); r.Rcode == refused && (code != dns.ExtendedErrorCodeOther || !strings.Contains(text, "slowly")) {
			t.Fatalf("%d %q", code, text)
		}
		got[r.Rcode]++
	}
	if got[ok] == 0 || got[refused] == 0 || b.Stats().Limited == 0 {
		t.Errorf("%v, %+v", got, b.Stats())
	}
	if r := b.respond(t.Context(), netip.MustParseAddr("10.213.0.9"), question("www.example.com.", dns.TypeA)); r.Rcode != ok {
		t.Errorf("another sandbox pays for it: %s", dns.RcodeToString[r.Rcode])
	}
	from := &net.UDPAddr{IP: client1.AsSlice()}
	heard := 0
	for range 3 * floodBurst {
		if b.hears(from) {
			heard++
		}
	}
	if heard < floodBurst || heard > 2*floodBurst {
		t.Errorf("of a flood of %d packets %d are looked at", 3*floodBurst, heard)
	}
}

// TestFewInFlight: what the cache knows is answered however much is being
// asked upstream.
func TestFewInFlight(t *testing.T) {
	b := newBench(t, allow("*.example.com"), "www.example.com. 60 IN A 93.184.216.34", "b.example.com. 60 IN A 93.184.216.34")
	b.get(t, "www.example.com.", dns.TypeA)
	for range totalInFlight {
		b.inFlight <- struct{}{}
	}
	if r := b.get(t, "b.example.com.", dns.TypeA); r.Rcode != servfail {
		t.Errorf("one more upstream: %s", dns.RcodeToString[r.Rcode])
	}
	if r := b.get(t, "www.example.com.", dns.TypeA); r.Rcode != ok {
		t.Errorf("from the cache: %s", dns.RcodeToString[r.Rcode])
	}
	<-b.inFlight
	if r := b.get(t, "b.example.com.", dns.TypeA); r.Rcode != ok {
		t.Errorf("with a free place: %s", dns.RcodeToString[r.Rcode])
	}
}

// TestFewPinAtOnce: a sandbox that asks much has one turn at the rules, not
// one for each question.
func TestFewPinAtOnce(t *testing.T) {
	b := newBench(t, allow("*.example.com"), "www.example.com. 60 IN A 93.184.216.34")
	b.net.tenants[netip.MustParseAddr("10.213.0.9")] = Tenant{ID: "sbffffffffffff", Policy: allow("*.example.com")}
	b.get(t, "www.example.com.", dns.TypeA) // the cache knows it now
	var at, most atomic.Int64
	release := make(chan struct{})
	b.net.pinHook = func() {
		if n := at.Add(1); n > most.Load() {
			most.Store(n)
		}
		<-release
		at.Add(-1)
	}
	var all sync.WaitGroup
	ask := func(from netip.Addr) {
		all.Go(func() {
			if r := b.respond(t.Context(), from, question("www.example.com.", dns.TypeA)); r.Rcode != ok {
				t.Errorf("%s: %s", from, dns.RcodeToString[r.Rcode])
			}
		})
	}
	for range 30 {
		ask(client1)
	}
	waitFor(t, "the first at the rules", func() bool { return at.Load() == 1 })
	ask(netip.MustParseAddr("10.213.0.9"))
	waitFor(t, "another sandbox at the rules", func() bool { return at.Load() == 2 })
	close(release)
	all.Wait()
	if most.Load() != 2 {
		t.Errorf("%d at once", most.Load())
	}
}

// TestFewInWork: a sandbox whose questions hang does not gather more of them.
func TestFewInWork(t *testing.T) {
	b := newBench(t, allow("*"))
	stop := make(chan struct{})
	b.up.before(func(dns.Question) { <-stop })
	defer close(stop)
	for i := range inWorkMost {
		go b.respond(t.Context(), client1, question(string(rune('a'+i%26))+string(rune('a'+i/26))+".example.com.", dns.TypeA))
	}
	waitFor(t, "all in work", func() bool {
		c := b.clients.get(id1, time.Now())
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.inWork == inWorkMost
	})
	if r := b.get(t, "more.example.com.", dns.TypeA); r.Rcode != refused {
		t.Errorf("one more is %s", dns.RcodeToString[r.Rcode])
	}
}

func TestQuietClientsAreForgotten(t *testing.T) {
	c := clients{byID: map[sandbox.ID]*client{}}
	now := time.Now()
	c.get(id1, now)
	busy := c.get("sbbbbbbbbbbbbb", now)
	busy.connect(new(heldConn))
	c.get("sbcccccccccccc", now.Add(clientForgets+time.Second))
	if _, kept := c.byID[id1]; kept || c.byID["sbbbbbbbbbbbbb"] != busy || len(c.byID) != 2 {
		t.Errorf("%v", c.byID)
	}
}

func TestCloseEndsWhatIsAsked(t *testing.T) {
	defer func(was time.Duration) { closeTimeout = was }(closeTimeout)
	closeTimeout = 2 * time.Minute
	b, at := openBench(t, allow("*.example.com"))
	stop := make(chan struct{})
	asked := make(chan struct{})
	b.up.before(func(dns.Question) { close(asked); <-stop })
	defer close(stop)
	go func() {
		_, _, _ = (&dns.Client{}).ExchangeContext(t.Context(), question("www.example.com.", dns.TypeA), at)
	}()
	<-asked
	began := time.Now()
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took >= closeTimeout {
		t.Errorf("closing took %s", took)
	}
	if err := b.Close(); err != nil {
		t.Errorf("again: %v", err)
	}
}

// FuzzMessage: no bytes of a sandbox's break the server, and none get an
// answer that policy forbids.
func FuzzMessage(f *testing.F) {
	for _, m := range []*dns.Msg{question("www.example.com.", dns.TypeA), question(`a\.b\000.example.com.`, dns.TypeTXT), question("4.3.2.1.in-addr.arpa.", dns.TypePTR), question("db.crew.internal.", dns.TypeAAAA)} {
		b, err := m.Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	p := allow("www.example.com")
	p.Group = "crew"
	n := &network{tenants: map[netip.Addr]Tenant{client1: {ID: id1, Policy: p}}}
	s := newServer(Config{Sandboxes: n, Pool: netip.MustParsePrefix("10.213.0.0/16")})
	s.hostConf.path = "/nonexistent"
	s.now = (&clock{}).now
	f.Cleanup(func() { _ = s.Close() })
	f.Fuzz(func(t *testing.T, b []byte) {
		req := new(dns.Msg)
		if req.Unpack(b) != nil {
			return
		}
		s.clients.byID = map[sandbox.ID]*client{} // no rates
		resp := s.respond(t.Context(), client1, req)
		if resp == nil {
			return
		}
		resp.Truncate(dns.MinMsgSize)
		if _, err := resp.Pack(); err != nil {
			t.Errorf("response to %q cannot be sent: %v", b, err)
		}
		for _, rr := range resp.Answer {
			a, isA := rr.(*dns.A)
			if isA && a.A.String() != "127.0.0.1" {
				t.Errorf("an address without anybody to ask: %v", rr)
			}
		}
	})
}

// FuzzUpstream: no bytes of a name server's break the server, put an address
// into an answer that must not be there, or make one that cannot be sent.
func FuzzUpstream(f *testing.F) {
	for _, records := range [][]string{
		{"www.example.com. 60 IN A 93.184.216.34"},
		{"www.example.com. 60 IN A 10.0.0.1"},
		{"www.example.com. 60 IN CNAME a.example.net.", "a.example.net. 0 IN A 127.0.0.1"},
		{`www.example.com. 60 IN TXT "a" "b"`, "www.example.com. 60 IN MX 1 a.example.org."},
	} {
		m := new(dns.Msg)
		m.SetQuestion("www.example.com.", dns.TypeA)
		m.Response = true
		for _, text := range records {
			rr, err := dns.NewRR(text)
			if err != nil {
				f.Fatal(err)
			}
			m.Answer = append(m.Answer, rr)
		}
		b, err := m.Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, dns.TypeA)
		f.Add(b, dns.TypeTXT)
	}
	n := &network{discard: true, tenants: map[netip.Addr]Tenant{client1: {ID: id1, Policy: allow("*.example.com")}}}
	s := newServer(Config{Sandboxes: n, Pool: netip.MustParsePrefix("10.213.0.0/16"), Upstreams: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:1")}})
	s.cancel() // asks nobody
	f.Fuzz(func(t *testing.T, b []byte, qtype uint16) {
		msg := new(dns.Msg)
		if msg.Unpack(b) != nil || msg.Rcode == servfail {
			return
		}
		a := trim(msg, qtype, time.Now())
		a.expires = time.Now().Add(time.Minute)
		s.cache = newCache(cacheBytes)
		s.cache.put(cacheKey(s.cfg.Upstreams, "www.example.com", qtype), a)
		s.clients.byID = map[sandbox.ID]*client{}
		resp := s.respond(t.Context(), client1, question("www.example.com.", qtype))
		resp.Truncate(udpSize)
		if _, err := resp.Pack(); err != nil {
			t.Errorf("response cannot be sent: %v", err)
		}
		for _, text := range addrsOf(resp) {
			if !sandbox.IsPublic(netip.MustParseAddr(text)) {
				t.Errorf("%s is in the answer", text)
			}
		}
	})
}

func FuzzResolvConf(f *testing.F) {
	f.Add("nameserver 192.0.2.1\n")
	f.Fuzz(func(t *testing.T, text string) {
		for _, s := range nameServers(text) {
			if !s.IsValid() || s.Port() != 53 {
				t.Errorf("%q: %v", text, s)
			}
		}
	})
}
