package e2b

import (
	"net"
	"net/http"
	"sync"

	"golang.org/x/time/rate"

	"github.com/sandboxd/sandboxd/sandbox"
)

// A signed URL that names no sandbox is a question to all of them: each one's
// token is derived and tried, some microseconds for each, without the
// database. Nobody has proven anything before that, so each address has a
// pace, and all together go one after another.
const (
	searchRate  = 20 // a second, from one address
	searchBurst = 60
	maxSearcher = 4096 // addresses remembered; beyond them all begin anew
)

// pace is how often each address may search.
type pace struct {
	turn sync.Mutex // held by a search

	mu    sync.Mutex
	known map[string]*rate.Limiter // guarded by mu
}

// allow takes one from an address's pace. All of an IPv6 network of 64 bits
// are one address.
func (p *pace) allow(remote string) bool {
	host, _, err := net.SplitHostPort(remote)
	if err != nil {
		host = remote
	}
	if ip := net.ParseIP(host); ip != nil && ip.To4() == nil {
		host = ip.Mask(net.CIDRMask(64, 128)).String()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.known == nil || len(p.known) >= maxSearcher {
		p.known = map[string]*rate.Limiter{}
	}
	l := p.known[host]
	if l == nil {
		l = rate.NewLimiter(searchRate, searchBurst)
		p.known[host] = l
	}
	return l.Allow()
}

// signedFor returns the living sandbox whose token reproduces the signature of
// a URL that names none; empty if there is none.
func (s *Server) signedFor(r *http.Request) (sandbox.ID, error) {
	if !s.pace.allow(r.RemoteAddr) {
		return "", sandbox.Errorf(sandbox.ErrExhausted, "too_many_requests", "more than %d signed URLs a second that name no sandbox: wait, or send the header %s along", searchRate, sandboxHeader)
	}
	s.pace.turn.Lock()
	defer s.pace.turn.Unlock()
	for _, id := range s.living() {
		if r.Context().Err() != nil {
			break
		}
		if reproduces(r, s.tokenOf(id)) {
			return id, nil
		}
	}
	return "", nil
}
