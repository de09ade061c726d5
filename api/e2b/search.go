package e2b

import (
	"context"
	"net"
	"net/http"
	"sync"

	"golang.org/x/time/rate"

	"github.com/sandboxd/sandboxd/sandbox"
)

// A signed URL that names no sandbox is a question to all of them: each one's
// tokens are derived and tried, one for each key that may act there, some
// microseconds for each, without the database. Nobody has proven anything before that, so each address has a
// pace, and all together go one after another.
const (
	searchRate  = 20 // a second, from one address
	searchBurst = 60
	maxSearcher = 4096 // addresses remembered; beyond them all begin anew
)

// pace is how often each address may search.
type pace struct {
	turn sync.Mutex // held by a search

	mu     sync.Mutex
	known  map[string]*rate.Limiter // guarded by mu
	owners map[sandbox.ID]string    // guarded by mu; of sandboxes that were looked for
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

// signedFor returns the living sandbox, and the API key, whose token reproduces
// the signature of a URL that names none; empty if there is none.
func (s *Server) signedFor(r *http.Request) (sandbox.ID, error) {
	if !s.pace.allow(r.RemoteAddr) {
		return "", sandbox.Errorf(sandbox.ErrExhausted, "too_many_requests", "more than %d signed URLs a second that name no sandbox: wait, or send the header %s along", searchRate, sandboxHeader)
	}
	s.pace.turn.Lock()
	defer s.pace.turn.Unlock()
	keys := map[string][]string{} // of owners
	for _, id := range s.living() {
		if r.Context().Err() != nil {
			break
		}
		owner, err := s.ownerOf(r.Context(), id)
		if err != nil {
			continue // it has just gone
		}
		if _, known := keys[owner]; !known {
			keys[owner] = s.callers.ActingKeys(owner)
		}
		for _, key := range keys[owner] {
			if reproduces(r, s.tokenOf(id, key)) {
				return id, nil
			}
		}
	}
	return "", nil
}

// maxOwnersKnown bounds what ownerOf remembers.
const maxOwnersKnown = 8192

// ownerOf returns whose a sandbox is, which never changes.
func (s *Server) ownerOf(ctx context.Context, id sandbox.ID) (string, error) {
	s.pace.mu.Lock()
	owner, known := s.pace.owners[id]
	s.pace.mu.Unlock()
	if known {
		return owner, nil
	}
	box, err := s.find(ctx, id)
	if err != nil {
		return "", err
	}
	s.pace.mu.Lock()
	defer s.pace.mu.Unlock()
	if s.pace.owners == nil || len(s.pace.owners) >= maxOwnersKnown {
		s.pace.owners = map[sandbox.ID]string{}
	}
	s.pace.owners[id] = box.Owner
	return box.Owner, nil
}
