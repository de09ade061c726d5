package resolver

import (
	"context"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// Bounds of what upstream may say.
const (
	maxDepth   = 8                // CNAMEs in a chain
	maxRecords = 256              // kept of one answer
	maxTTL     = 5 * time.Minute  // of an answer, and so of a pin
	maxNegTTL  = time.Minute      // that something does not exist
	failureTTL = time.Second      // that nobody answered (RFC 9520 asks for as much)
	peerTTL    = 5 * time.Second  // of a group's member
	minPin     = 30 * time.Second // so that an answer of TTL 0 can be used
	pinGrace   = 5 * time.Second  // the sandbox counts from when it has the answer
)

// chain is a name followed to its end.
type chain struct {
	rcode   int
	links   []dns.RR // the CNAMEs, in order
	records []dns.RR // of the type asked for, of the last name
	ttl     time.Duration
	refused *ruling // what broke the chain
}

// follow asks for the records of a permitted name and goes along its CNAMEs.
// Every name on the way is judged: what a deny rule means, or what has no
// place in the public tree, breaks the chain.
func (s *Server) follow(ctx context.Context, c *client, p *policy, servers []netip.AddrPort, name string, qtype uint16) (chain, error) {
	found := chain{ttl: maxTTL}
	seen := []string{name}
	for {
		a, err := s.ask(ctx, c, servers, name, qtype)
		if err != nil {
			return found, err
		}
		found.rcode = a.rcode
		if left := a.expires.Sub(s.now()); left < found.ttl {
			found.ttl = max(left, 0)
		}
		start := name
		for {
			if found.records = recordsOf(a.records, name, qtype); len(found.records) > 0 {
				return found, nil
			}
			link, target := cnameOf(a.records, name)
			if link == nil {
				break
			}
			next, ok := normalize(target)
			if why := p.breaks(next, ok, seen); why != nil {
				found.refused = why
				return found, nil
			}
			found.links = append(found.links, link)
			seen = append(seen, next)
			name = next
		}
		if name == start || a.rcode != dns.RcodeSuccess || a.final {
			return found, nil // a server that followed the chain itself has said the end of it
		}
	}
}

// breaks rules on the next name of a chain; nil lets it stand.
func (p *policy) breaks(next string, wellFormed bool, seen []string) *ruling {
	switch {
	case !wellFormed:
		return &ruling{why: "it is an alias of something that is no host's name"}
	case slices.Contains(seen, next):
		return &ruling{why: "it is an alias of itself"}
	case len(seen) > maxDepth:
		return &ruling{why: "it is an alias of an alias, more than " + strconv.Itoa(maxDepth) + " times"}
	case placeOf(next) != public:
		return &ruling{why: "it is an alias of a name outside the public tree"}
	}
	if r, hit := p.refusedBy(next); hit {
		r.why = "it is an alias of a name that a deny rule of the network policy names"
		return &r
	}
	return nil
}

// recordsOf returns the records of one name and type.
func recordsOf(all []dns.RR, name string, qtype uint16) []dns.RR {
	var out []dns.RR
	for _, rr := range all {
		if rr.Header().Rrtype == qtype && owns(rr, name) {
			out = append(out, rr)
		}
	}
	return out
}

// cnameOf returns the alias record of a name and what it points to.
func cnameOf(all []dns.RR, name string) (link dns.RR, target string) {
	for _, rr := range all {
		if c, ok := rr.(*dns.CNAME); ok && owns(rr, name) {
			return c, c.Target
		}
	}
	return nil, ""
}

func owns(rr dns.RR, name string) bool {
	owner, ok := strings.CutSuffix(rr.Header().Name, ".")
	return ok && strings.EqualFold(owner, name)
}

// ask returns the answer to one question from the cache or from upstream. The
// same question asked by many at once is asked upstream once, and its asking
// does not end with who began it.
func (s *Server) ask(ctx context.Context, c *client, servers []netip.AddrPort, name string, qtype uint16) (answer, error) {
	key := cacheKey(servers, name, qtype)
	if a, ok := s.cache.get(key, s.now()); ok {
		s.stats.hits.Add(1)
		return a, failed(a)
	}
	s.stats.misses.Add(1)
	if !c.upstream.Allow() {
		return answer{}, errBusy
	}
	done := s.flights.DoChan(key, func() (any, error) {
		select {
		case s.inFlight <- struct{}{}:
			defer func() { <-s.inFlight }()
		default:
			return answer{}, errBusy
		}
		ctx, cancel := context.WithTimeout(s.ctx, totalTimeout)
		defer cancel()
		msg, err := s.upstreams.ask(ctx, servers, name, qtype)
		if err != nil {
			s.warn("ask upstream for a sandbox", "name", name, "type", dns.TypeToString[qtype], "err", err)
			a := answer{rcode: dns.RcodeServerFailure, expires: s.now().Add(failureTTL)}
			s.cache.put(key, a)
			return a, err
		}
		a := trim(msg, qtype, s.now())
		if a.expires.After(s.now()) {
			s.cache.put(key, a)
		}
		return a, nil
	})
	select {
	case r := <-done:
		a, _ := r.Val.(answer)
		return a, r.Err
	case <-ctx.Done():
		return answer{}, ctx.Err()
	}
}

// failed is the error of a failure that the cache remembers.
func failed(a answer) error {
	if a.rcode == dns.RcodeServerFailure {
		return errRecently
	}
	return nil
}

// cacheKey tells questions apart, by whom they are put to as well: what one
// server says must not be believed of another.
func cacheKey(servers []netip.AddrPort, name string, qtype uint16) string {
	b := make([]byte, 0, 128)
	for _, s := range servers {
		b = s.AppendTo(b)
		b = append(b, ' ')
	}
	b = append(b, name...)
	b = append(b, ' ')
	return string(strconv.AppendUint(b, uint64(qtype), 10))
}

// trim keeps of a response what an answer may be made of: CNAMEs and the type
// asked for, and for how long they hold. Each record holds as long as the
// shortest of them.
func trim(msg *dns.Msg, qtype uint16, now time.Time) answer {
	a := answer{rcode: msg.Rcode}
	ttl := maxTTL
	for _, rr := range msg.Answer {
		h := rr.Header()
		if h.Class != dns.ClassINET || (h.Rrtype != qtype && h.Rrtype != dns.TypeCNAME) || len(a.records) == maxRecords {
			continue
		}
		a.records = append(a.records, rr)
		ttl = min(ttl, seconds(h.Ttl))
	}
	if !slices.ContainsFunc(a.records, func(rr dns.RR) bool { return rr.Header().Rrtype == qtype }) {
		negative, said := negativeTTL(msg)
		if a.final = said; said || len(a.records) == 0 {
			ttl = min(ttl, negative)
		}
	}
	a.expires = now.Add(ttl)
	return a
}

// negativeTTL is for how long a response says that something does not exist
// (RFC 2308, 5); not at all unless the zone's SOA is with it.
func negativeTTL(msg *dns.Msg) (time.Duration, bool) {
	for _, rr := range msg.Ns {
		if soa, ok := rr.(*dns.SOA); ok {
			return min(maxNegTTL, seconds(soa.Hdr.Ttl), seconds(soa.Minttl)), true
		}
	}
	return 0, false
}

func seconds(n uint32) time.Duration { return time.Duration(n) * time.Second }
