package gate

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"golang.org/x/time/rate"

	"github.com/sandboxd/sandboxd/sandbox"
)

// The kernel counts the connections a sandbox makes, not those the gate makes
// for it: one connection can carry requests to a thousand hosts. So the gate
// keeps to the policy's connections a second itself.
const (
	paceWait  = 2 * time.Second // for one's turn
	paceLeast = 4               // at once, as in the rules of netns
	paceKept  = 1024            // sandboxes remembered that do nothing now
)

// pace waits until a sandbox may have one connection more made.
func (s *Server) pace(ctx context.Context, t Tenant) *refusal {
	n := t.Policy.Limits.ConnectionsPerSecond
	if n == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, paceWait)
	defer cancel()
	if s.pacer(t.ID, n).Wait(ctx) != nil { // at once, where the turn would come too late
		return &refusal{
			status: http.StatusTooManyRequests, code: codeLimit,
			detail: fmt.Sprintf("more than %d new connections a second, the limit of the network policy: try again more slowly", n),
		}
	}
	return nil
}

// pacer returns the limiter of a sandbox.
func (s *Server) pacer(id sandbox.ID, n uint64) *rate.Limiter {
	limit, burst := rate.Limit(n), int(min(max(n/4, paceLeast), 1<<16))
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.paces[id]
	if l == nil {
		if len(s.paces) >= paceKept {
			for old, l := range s.paces {
				if l.Tokens() >= float64(l.Burst()) {
					delete(s.paces, old)
				}
			}
		}
		l = rate.NewLimiter(limit, burst)
		s.paces[id] = l
	}
	if l.Limit() != limit {
		l.SetLimit(limit)
		l.SetBurst(burst)
	}
	return l
}
