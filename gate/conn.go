package gate

import (
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// conn is a connection of a sandbox to the gate.
type conn struct {
	*net.TCPConn
	server *Server
	id     sandbox.ID
	from   netip.Addr
	origin netip.AddrPort

	leave sync.Once

	mu       sync.Mutex
	ongoing  func(*policy) *refusal // judges what goes through it now; nil: nothing
	judgedBy *policy                // last
	upstream *http.Transport        // of HTTP, made for by
	by       *policy
}

// Close also gives the connection's place back. Repeating it is safe.
func (c *conn) Close() error {
	c.leave.Do(func() {
		c.server.exit(c)
		c.mu.Lock()
		up := c.upstream
		c.upstream = nil
		c.mu.Unlock()
		if up != nil {
			up.CloseIdleConnections()
		}
	})
	return c.TCPConn.Close()
}

// abort breaks the connection; whoever serves it closes it.
func (c *conn) abort() {
	_ = c.SetLinger(0)    // it may be closed already
	_ = c.TCPConn.Close() // as said
}

// begin notes what goes through the connection, so that a policy that no
// longer permits it can break it.
func (c *conn) begin(p *policy, judge func(*policy) *refusal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ongoing, c.judgedBy = judge, p
}

func (c *conn) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ongoing = nil
}

// forbidden reports whether what goes through the connection is no longer
// permitted.
func (c *conn) forbidden(p *policy) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ongoing == nil || c.judgedBy == p {
		return false
	}
	c.judgedBy = p
	return c.ongoing(p) != nil
}

// enter counts a connection, or says why there may be no more.
func (s *Server) enter(c *conn) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return "the gate is closing"
	case s.count[c.id] >= maxConnsSandbox:
		return "too many web connections of this sandbox at one time"
	case len(s.open) >= maxConns && s.count[c.id] >= maxConnsFew, len(s.open) >= maxConnsHard:
		return "too many web connections of all sandboxes at one time"
	}
	s.open[c] = true
	s.count[c.id]++
	if !s.sweeping {
		s.sweeping = true
		s.tasks.Go(s.sweep)
	}
	return ""
}

func (s *Server) exit(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, c)
	if s.count[c.id]--; s.count[c.id] <= 0 {
		delete(s.count, c.id)
		delete(s.policies, c.id)
	}
}

// sweep breaks what a changed policy no longer permits, and ends when no
// connection is left. It asks, rather than being told, so that no way of
// changing a policy can forget it.
func (s *Server) sweep() {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-s.life.Done():
			return
		}
		s.mu.Lock()
		if len(s.open) == 0 {
			s.sweeping = false
			s.mu.Unlock()
			return
		}
		byID := make(map[sandbox.ID][]*conn, len(s.count))
		for c := range s.open {
			byID[c.id] = append(byID[c.id], c)
		}
		s.mu.Unlock()
		for _, conns := range byID {
			s.sweepOne(conns)
		}
	}
}

// sweepOne looks at the connections of one sandbox.
func (s *Server) sweepOne(conns []*conn) {
	_, p, ok := s.policyOf(conns[0])
	for _, c := range conns {
		if !ok || c.forbidden(p) {
			s.log.Debug("gate: cut", "sandbox", c.id, "origin", c.origin)
			c.abort()
		}
	}
}
