package guest

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// pinger answers pings for as long as the connection lasts, with Idle frames
// or without, and counts connections and requests.
type pinger struct {
	idle              bool
	hangUp            atomic.Bool // after the answer, Idle or not
	extra             atomic.Bool // a frame too many after Idle
	conns, operations atomic.Int32
}

func (p *pinger) serve(c net.Conn) {
	p.conns.Add(1)
	for {
		p.operations.Add(1)
		hangUp := p.hangUp.Load()
		_ = sendJSON(c, initproto.FrameResponse, initproto.Info{Version: initproto.Version})
		if !p.idle {
			return
		}
		b, _ := initproto.AppendFrame(nil, initproto.FrameIdle, nil)
		if p.extra.Load() {
			b, _ = initproto.AppendFrame(b, initproto.FrameEnd, nil)
		}
		_, _ = c.Write(b)
		if hangUp {
			return
		}
		if _, err := initproto.ReadFrame(c, initproto.Daemon, nil); err != nil {
			return
		}
	}
}

func (p *pinger) ping(t *testing.T, g *Guest) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := g.Ping(ctx); err != nil {
		t.Fatal(err)
	}
}

// kept waits until what follows the last answer has come, and tells whether
// the connection was kept.
func (p *pinger) kept(t *testing.T, g *Guest) bool {
	t.Helper()
	before := p.conns.Load()
	p.ping(t, g)
	return p.conns.Load() == before
}

// corked makes the answer and Idle arrive together, as PID 1 sends them.
type corked struct {
	net.Conn
	held []byte
}

func (c *corked) Write(b []byte) (int, error) {
	if c.held = append(c.held, b...); len(b) > 0 && initproto.FrameType(b[0]) == initproto.FrameIdle {
		_, err := c.Conn.Write(c.held)
		c.held = nil
		return len(b), err
	}
	return len(b), nil
}

func newPinger(t *testing.T, idle bool) (*pinger, *Guest) {
	p := &pinger{idle: idle}
	return p, impostor(t, func(c net.Conn) {
		if idle {
			c = &corked{Conn: c}
		}
		p.serve(c)
	})
}

func TestConnectionIsKept(t *testing.T) {
	p, g := newPinger(t, true)
	for range 5 {
		p.ping(t, g)
	}
	if c, o := p.conns.Load(), p.operations.Load(); c != 1 || o != 5 {
		t.Errorf("%d operations on %d connections, want 5 on 1", o, c)
	}
	// One cancelled context takes nothing with it that is not its own.
	ctx, cancel := context.WithCancel(t.Context())
	if _, err := g.Ping(ctx); err != nil {
		t.Fatal(err)
	}
	cancel()
	if !p.kept(t, g) {
		t.Error("a context cancelled after its operation closed the connection")
	}
	g.CloseIdle()
	if p.kept(t, g) {
		t.Error("CloseIdle left the connection")
	}
	// Control: a PID 1 that does not offer it gets one connection for each.
	p, g = newPinger(t, false)
	for range 5 {
		p.ping(t, g)
	}
	if c := p.conns.Load(); c != 5 {
		t.Errorf("without Idle: %d connections for 5 operations", c)
	}
}

func TestSpareConnectionIsNotTrusted(t *testing.T) {
	p, g := newPinger(t, true)
	p.extra.Store(true)
	p.ping(t, g)
	if p.kept(t, g) {
		t.Error("a connection with an unasked frame on it was used again")
	}
	p.extra.Store(false)
	p.ping(t, g)
	if !p.kept(t, g) {
		t.Error("control: not kept")
	}
	// PID 1 ends, and another takes its place.
	p.hangUp.Store(true)
	p.ping(t, g)
	testenv.Eventually(t, 5*time.Second, "the end of the connection to be seen", func() bool {
		g.spare.mu.Lock()
		defer g.spare.mu.Unlock()
		return len(g.spare.conns) == 0 || !g.spare.conns[0].quiet()
	})
	p.hangUp.Store(false)
	if p.kept(t, g) {
		t.Error("a connection that had ended was used again")
	}
}

func TestSpareConnectionsAreFew(t *testing.T) {
	_, g := newPinger(t, true)
	var open []*conn
	for range 5 {
		c, err := g.call(t.Context(), initproto.OpPing, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, c)
	}
	for _, c := range open {
		c.last()
		_ = c.Close()
		_ = c.Close()
	}
	if n := len(g.spare.conns); n != maxSpare {
		t.Errorf("%d kept, want %d", n, maxSpare)
	}
	g.spare.expire()
	if n := len(g.spare.conns); n != 0 {
		t.Errorf("%d kept after their time", n)
	}
}

// TestCloseIdleEndsHolding: what is given back after it expires as ever.
func TestCloseIdleEndsHolding(t *testing.T) {
	p, g := newPinger(t, true)
	p.ping(t, g)
	g.spare.hold()
	g.spare.expire()
	if n := len(g.spare.conns); n != 1 {
		t.Fatalf("control: %d kept while held", n)
	}
	g.CloseIdle()
	p.ping(t, g)
	if n := len(g.spare.conns); n != 1 {
		t.Fatalf("control: %d kept", n)
	}
	g.spare.expire()
	if n := len(g.spare.conns); n != 0 {
		t.Errorf("%d kept after their time", n)
	}
}
