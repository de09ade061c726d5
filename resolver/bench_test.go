package resolver

import (
	"fmt"
	"testing"

	"github.com/miekg/dns"
	"golang.org/x/time/rate"

	"github.com/sandboxd/sandboxd/sandbox"
)

// BenchmarkCached is one question that the cache answers, without the wire,
// under a policy with as many rules as there may be.
func BenchmarkCached(b *testing.B) {
	p := sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow}
	for i := range 255 {
		p.Allow = append(p.Allow, fmt.Sprintf("*.zone%d.example.org:443", i))
		p.Deny = append(p.Deny, fmt.Sprintf("bad%d.example.com", i))
	}
	p.Allow = append(p.Allow, "*.example.com")
	s := newBench(b, p, "www.example.com. 300 IN A 93.184.216.34")
	s.net.discard = true
	q := question("www.example.com.", dns.TypeA)
	s.clients.get(id1, s.now()).queries = rate.NewLimiter(rate.Inf, 1)
	b.ReportAllocs()
	for b.Loop() {
		if r := s.respond(b.Context(), client1, q); r.Rcode != ok {
			b.Fatal(r)
		}
	}
}

// BenchmarkDenied is one question that the policy refuses.
func BenchmarkDenied(b *testing.B) {
	s := newBench(b, allow("*.example.com"))
	q := question("www.example.org.", dns.TypeA)
	s.clients.get(id1, s.now()).queries = rate.NewLimiter(rate.Inf, 1)
	b.ReportAllocs()
	for b.Loop() {
		if r := s.respond(b.Context(), client1, q); r.Rcode != nx {
			b.Fatal(r)
		}
	}
}
