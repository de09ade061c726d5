package resolver

import (
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/sandboxd/sandboxd/sandbox"
)

// What one sandbox may ask of the resolver.
const (
	queriesPerSecond = 100 // then REFUSED
	queriesBurst     = 200
	heavyPerSecond   = 10 // of the types that carry data: TXT and the like
	heavyBurst       = 50
	floodPerSecond   = 1000 // then silence, before a packet is even read
	floodBurst       = 2000
	toldPerSecond    = 5 // permitted names told to the audit
	toldBurst        = 50
	inWorkMost       = 64 // questions waiting for upstream at one time
	connsMost        = 8  // TCP connections
	clientForgets    = 10 * time.Minute
	sweepEvery       = time.Minute
)

// client is what is kept of one sandbox while it asks.
type client struct {
	queries, heavy, flood, told *rate.Limiter
	upstream                    *rate.Limiter // whoever asks for it: its questions, its web traffic, long chains
	pinning                     chan struct{} // holds one

	mu     sync.Mutex
	inWork int
	conns  []*heldConn // oldest first
	policy *policy
	used   time.Time
}

// enter begins a question; false when too many are in work.
func (c *client) enter() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.inWork >= inWorkMost {
		return false
	}
	c.inWork++
	return true
}

func (c *client) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inWork--
}

// connect begins a TCP connection; false when there are too many. One that is
// idle makes room, the oldest first (RFC 7766, 6.2.3): most of these their
// clients have closed, which the server has not read yet.
func (c *client) connect(conn *heldConn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.conns) >= connsMost {
		i := slices.IndexFunc(c.conns, func(old *heldConn) bool { return old.idle.Load() })
		if i < 0 {
			return false
		}
		_ = c.conns[i].Conn.Close() // its reader ends, and gives the place back
		c.conns = slices.Delete(c.conns, i, i+1)
	}
	c.conns = append(c.conns, conn)
	return true
}

func (c *client) disconnect(conn *heldConn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conns = slices.DeleteFunc(c.conns, func(one *heldConn) bool { return one == conn })
}

// compiled returns the policy ready for judging, the same object as before
// while it has not changed.
func (c *client) compiled(p sandbox.NetworkPolicy) *policy {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.policy == nil || !c.policy.same(p) {
		c.policy = compile(p)
	}
	return c.policy
}

func (c *client) idle(now time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.inWork == 0 && len(c.conns) == 0 && now.Sub(c.used) > clientForgets
}

// clients are the sandboxes that asked lately.
type clients struct {
	mu    sync.Mutex
	byID  map[sandbox.ID]*client
	swept time.Time
}

// get returns what is kept of a sandbox, and now and then forgets those that
// went quiet.
func (c *clients) get(id sandbox.ID, now time.Time) *client {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now.Sub(c.swept) > sweepEvery {
		c.swept = now
		for id, old := range c.byID {
			if old.idle(now) {
				delete(c.byID, id)
			}
		}
	}
	one := c.byID[id]
	if one == nil {
		one = &client{
			queries:  rate.NewLimiter(queriesPerSecond, queriesBurst),
			heavy:    rate.NewLimiter(heavyPerSecond, heavyBurst),
			flood:    rate.NewLimiter(floodPerSecond, floodBurst),
			told:     rate.NewLimiter(toldPerSecond, toldBurst),
			upstream: rate.NewLimiter(queriesPerSecond, queriesBurst),
			pinning:  make(chan struct{}, 1),
		}
		c.byID[id] = one
	}
	one.mu.Lock()
	one.used = now
	one.mu.Unlock()
	return one
}
