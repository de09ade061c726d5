package resolver

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestAliases(t *testing.T) {
	p := allow("*.example.com")
	p.Deny = []string{"*.evil.org"}
	records := []string{
		"plain.example.com. 60 IN CNAME cdn.example.net.", "cdn.example.net. 20 IN A 93.184.216.34",
		"bad.example.com. 60 IN CNAME x.evil.org.", "x.evil.org. 60 IN A 93.184.216.35",
		"far.example.com. 60 IN CNAME mid.example.net.", "mid.example.net. 60 IN CNAME x.evil.org.",
		"loop.example.com. 60 IN CNAME loop2.example.net.", "loop2.example.net. 60 IN CNAME loop.example.com.",
		"self.example.com. 60 IN CNAME self.example.com.",
		"home.example.com. 60 IN CNAME router.local.", "router.local. 60 IN A 93.184.216.36",
		"me.example.com. 60 IN CNAME localhost.", "num.example.com. 60 IN CNAME 10.0.0.1.",
		`odd.example.com. 60 IN CNAME a\.b.example.net.`,
		"rebind.example.com. 60 IN CNAME in.example.net.", "in.example.net. 60 IN A 10.0.0.1",
		"nowhere.example.com. 60 IN CNAME nosuch.example.net.",
		"deep1.example.com. 60 IN CNAME c2.example.net.",
		"deep0.example.com. 60 IN CNAME deep1.example.com.",
	}
	for i := 2; i < 9; i++ {
		records = append(records, fmt.Sprintf("c%d.example.net. 60 IN CNAME c%d.example.net.", i, i+1))
	}
	records = append(records, "c9.example.net. 60 IN A 93.184.216.37")
	b := newBench(t, p, records...)
	for name, c := range map[string]struct {
		rcode int
		want  string
		why   string
	}{
		"plain.example.com.":   {ok, "93.184.216.34", ""},
		"bad.example.com.":     {nx, "", "deny rule"},
		"far.example.com.":     {nx, "", "deny rule"},
		"loop.example.com.":    {nx, "", "alias of itself"},
		"self.example.com.":    {nx, "", "alias of itself"},
		"home.example.com.":    {nx, "", "outside the public tree"},
		"me.example.com.":      {nx, "", "outside the public tree"},
		"num.example.com.":     {nx, "", "outside the public tree"},
		"odd.example.com.":     {nx, "", "no host's name"},
		"rebind.example.com.":  {nx, "", "private"},
		"nowhere.example.com.": {nx, "", ""},
		"deep1.example.com.":   {ok, "93.184.216.37", ""}, // eight aliases
		"deep0.example.com.":   {nx, "", "more than 8"},
	} {
		r := b.get(t, name, dns.TypeA)
		_, text := extended(r)
		if got := strings.Join(addrsOf(r), " "); r.Rcode != c.rcode || got != c.want || !strings.Contains(text, c.why) || (c.why == "") != (text == "") {
			t.Errorf("%s: %s %q %q, want %s %q %q", name, dns.RcodeToString[r.Rcode], got, text, dns.RcodeToString[c.rcode], c.want, c.why)
		}
	}
	r := b.get(t, "PLAIN.example.com.", dns.TypeA)
	if len(r.Answer) != 2 || r.Answer[0].Header().Name != "PLAIN.example.com." || r.Answer[1].Header().Name != "cdn.example.net." || r.Answer[1].Header().Ttl > 20 || r.Answer[0].Header().Ttl > 20 {
		t.Errorf("an alias is answered with %v", r.Answer)
	}
	for _, pin := range b.net.pinnedNow() {
		if !strings.HasSuffix(pin.name, ".example.com") {
			t.Errorf("pinned under %s, which no rule names", pin.name)
		}
	}
}

// TestAliasInPieces: a server that does not follow aliases itself is asked for
// the next name.
func TestAliasInPieces(t *testing.T) {
	b := newBench(t, allow("www.example.com"), "www.example.com. 60 IN CNAME cdn.example.net.")
	b.up.add(t, "cdn.example.net. 60 IN A 93.184.216.34")
	whole := b.up.zone
	b.up.before(func(q dns.Question) {
		b.up.mu.Lock()
		defer b.up.mu.Unlock()
		b.up.zone = map[string][]string{q.Name: nil}
		for _, kind := range []string{"A", "CNAME"} {
			b.up.zone[q.Name+kind] = whole[q.Name+kind]
		}
		if q.Name == "www.example.com." {
			b.up.zone["cdn.example.net."] = nil
		}
	})
	if got := addrsOf(b.get(t, "www.example.com.", dns.TypeA)); !slices.Equal(got, []string{"93.184.216.34"}) {
		t.Errorf("%v", got)
	}
	if b.up.count("cdn.example.net.A") != 1 {
		t.Error("the second name was not asked for once")
	}
}

// TestForeignRecords: what an answer holds besides the chain asked for is not
// believed.
func TestForeignRecords(t *testing.T) {
	b := newBench(t, allow("*.example.com"))
	msg := new(dns.Msg)
	for _, text := range []string{
		"www.example.com. 60 IN A 93.184.216.34", "other.example.com. 60 IN A 93.184.216.35", "www.example.com. 60 CH A 93.184.216.36",
		"www.example.com. 60 IN AAAA 2606:2800::1",
	} {
		rr, err := dns.NewRR(text)
		if err != nil {
			t.Fatal(err)
		}
		msg.Answer = append(msg.Answer, rr)
	}
	b.cache.put(cacheKey(b.cfg.Upstreams, "www.example.com", dns.TypeA), trim(msg, dns.TypeA, time.Now()))
	if got := addrsOf(b.get(t, "www.example.com.", dns.TypeA)); !slices.Equal(got, []string{"93.184.216.34"}) {
		t.Errorf("%v", got)
	}
	b.get(t, "other.example.com.", dns.TypeA)
	if b.up.count("other.example.com.A") != 1 {
		t.Error("a record that was not asked for went into the cache")
	}
}

// clock is a time that tests move. Real time goes on beneath it.
type clock struct{ ahead atomic.Int64 }

func (c *clock) now() time.Time          { return time.Now().Add(time.Duration(c.ahead.Load())) }
func (c *clock) advance(d time.Duration) { c.ahead.Add(int64(d)) }

func TestCache(t *testing.T) {
	b := newBench(t, sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}, "www.example.com. 100 IN A 93.184.216.34", "zero.example.com. 0 IN A 93.184.216.34")
	var c clock
	b.now = c.now
	ask := func(name string) uint32 {
		r := b.get(t, name, dns.TypeA)
		if len(r.Answer) == 0 {
			return 0
		}
		return r.Answer[0].Header().Ttl
	}
	first := ask("www.example.com.")
	c.advance(40 * time.Second)
	second := ask("WWW.example.com.")
	if first < 99 || second > 60 || second < 58 || b.up.count("www.example.com.A") != 1 {
		t.Errorf("TTL %d, 40 s later %d, asked %d times", first, second, b.up.count("www.example.com.A"))
	}
	c.advance(61 * time.Second)
	if ask("www.example.com."); b.up.count("www.example.com.A") != 2 {
		t.Error("an expired answer was given")
	}
	ask("no.example.com.")
	ask("no.example.com.")
	if n := b.up.count("no.example.com.A"); n != 1 {
		t.Errorf("a name that does not exist: asked %d times", n)
	}
	c.advance(21 * time.Second) // the zone's SOA says 20
	if ask("no.example.com."); b.up.count("no.example.com.A") != 2 {
		t.Error("that a name does not exist was believed too long")
	}
	if s := b.Stats(); s.CacheHits != 2 || s.CacheMisses != 4 {
		t.Errorf("%+v", s)
	}
}

// TestCacheByUpstream: what a sandbox's own resolver says stays with those who
// chose it.
func TestCacheByUpstream(t *testing.T) {
	b := newBench(t, sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}, "www.example.com. 60 IN A 93.184.216.34")
	liar := startUpstream(t, "www.example.com. 60 IN A 93.184.216.66")
	one, other := compile(sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}), b.up.addr
	for range 2 {
		for _, up := range []*upstream{liar, b.up} {
			b.cfg.Upstreams[0] = up.addr
			c, err := b.follow(t.Context(), b.clients.get(id1, time.Now()), one, b.upstreamsFor(one), "www.example.com", dns.TypeA)
			if err != nil {
				t.Fatal(err)
			}
			if got := c.records[0].(*dns.A).A.String(); (up.addr == other) != (got == "93.184.216.34") {
				t.Errorf("asking %s: %s", up.addr, got)
			}
		}
	}
}

func TestCacheIsBounded(t *testing.T) {
	c := newCache(64 << 10)
	rr, _ := dns.NewRR(`x. 60 IN TXT "` + strings.Repeat("a", 200) + `"`)
	later := time.Now().Add(time.Hour)
	for i := range 5000 {
		c.put(fmt.Sprint("key", i), answer{records: []dns.RR{rr}, expires: later})
	}
	if c.bytes > c.most || len(c.entries) != c.order.Len() || c.order.Len() > 200 || c.order.Len() < 20 {
		t.Errorf("%d bytes in %d entries", c.bytes, len(c.entries))
	}
	if _, found := c.get("key4999", time.Now()); !found {
		t.Error("the newest is gone")
	}
	if _, found := c.get("key0", time.Now()); found {
		t.Error("the oldest is still there")
	}
	c.put("large", answer{records: slices.Repeat([]dns.RR{rr}, 100), expires: later})
	if _, found := c.get("large", time.Now()); found {
		t.Error("one answer took the whole cache")
	}
	for i := range 5000 {
		c.get(fmt.Sprint("key", i), later)
	}
	if c.bytes != 0 || len(c.entries) != 0 {
		t.Errorf("all expired: %d bytes in %d entries", c.bytes, len(c.entries))
	}
}

func TestOneFlight(t *testing.T) {
	b := newBench(t, sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}, "zero.example.com. 0 IN A 93.184.216.34")
	release := make(chan struct{})
	b.up.before(func(dns.Question) { <-release })
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			if r := b.respond(t.Context(), client1, question("zero.example.com.", dns.TypeA)); len(addrsOf(r)) != 1 {
				t.Errorf("%v", r)
			}
		})
	}
	waitFor(t, "all to wait", func() bool { return b.Stats().CacheMisses == 20 })
	close(release)
	all.Wait()
	if n := b.up.count("zero.example.com.A"); n > 3 {
		t.Errorf("20 at once were asked upstream %d times", n)
	}
}

func waitFor(t *testing.T, what string, done func() bool) {
	t.Helper()
	deadline := time.After(10 * time.Second)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !done() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("waited too long for %s", what)
		}
	}
}
