package resolver

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
)

// guard reads messages and throws a flood away before it costs anything.
type guard struct {
	dns.Reader
	s   *Server
	buf []byte
}

// ReadUDP returns the next packet of somebody who does not flood. It sets no
// deadline: that of a shutdown must stand.
func (g *guard) ReadUDP(conn *net.UDPConn, _ time.Duration) ([]byte, *dns.SessionUDP, error) {
	if g.buf == nil {
		g.buf = make([]byte, maxQuestion)
	}
	for {
		n, session, err := dns.ReadFromSessionUDP(conn, g.buf)
		if err != nil {
			return nil, nil, err
		}
		if g.s.hears(session.RemoteAddr()) {
			return bytes.Clone(g.buf[:n]), session, nil
		}
	}
}

// ReadTCP returns the next message of a connection; one that is larger than
// any question ends it.
func (g *guard) ReadTCP(conn net.Conn, timeout time.Duration) ([]byte, error) {
	if err := conn.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return nil, err
	}
	var length uint16
	if err := binary.Read(conn, binary.BigEndian, &length); err != nil {
		return nil, err
	}
	if length > maxQuestion {
		return nil, errors.New("a message too large for a question")
	}
	m := make([]byte, length)
	_, err := io.ReadFull(conn, m)
	return m, err
}

// hears reports whether to look at a packet at all.
func (s *Server) hears(from net.Addr) bool {
	t, ok := s.cfg.Sandboxes.Tenant(addrOf(from))
	if !ok {
		s.stats.strangers.Add(1)
		return s.strangers.Allow()
	}
	if s.clients.get(t.ID, s.now()).flood.Allow() {
		return true
	}
	s.stats.limited.Add(1)
	return false
}

// addrOf returns the IP address of a socket's.
func addrOf(a net.Addr) netip.Addr {
	switch a := a.(type) {
	case *net.UDPAddr:
		return a.AddrPort().Addr().Unmap()
	case *net.TCPAddr:
		return a.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}

// limitedListener accepts connections of sandboxes, few of each.
type limitedListener struct {
	*net.TCPListener
	s *Server

	mu    sync.Mutex
	total int
}

// Accept returns the next connection that is within the bounds; others are
// closed.
func (l *limitedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.TCPListener.Accept()
		if err != nil {
			if !errors.Is(err, net.ErrClosed) { // no descriptors left, most likely: do not spin
				timer := time.NewTimer(acceptAfterErr)
				select {
				case <-timer.C:
				case <-l.s.ctx.Done():
					timer.Stop()
				}
			}
			return nil, err
		}
		if held := l.hold(conn); held != nil {
			return held, nil
		}
		conn.Close()
	}
}

// hold counts a connection; nil where it is one too many.
func (l *limitedListener) hold(conn net.Conn) net.Conn {
	t, ok := l.s.cfg.Sandboxes.Tenant(addrOf(conn.RemoteAddr()))
	if !ok {
		l.s.stats.strangers.Add(1)
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.s.clients.get(t.ID, l.s.now())
	held := &heldConn{Conn: conn}
	held.release = sync.OnceFunc(func() {
		c.disconnect(held)
		l.mu.Lock()
		defer l.mu.Unlock()
		l.total--
	})
	if l.total >= totalConns || !c.connect(held) {
		l.s.stats.limited.Add(1)
		return nil
	}
	l.total++
	return held
}

// heldConn gives its place back when it is closed.
type heldConn struct {
	net.Conn
	release func()
	idle    atomic.Bool // answered, and nothing asked since
}

// Read reads of the next question.
func (c *heldConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.idle.Store(false)
	}
	return n, err
}

// Write writes within a bounded time: who does not read gives its place up.
func (c *heldConn) Write(b []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(tcpFirst)); err != nil {
		return 0, err
	}
	n, err := c.Conn.Write(b)
	c.idle.Store(err == nil)
	return n, err
}

// Close closes the connection.
func (c *heldConn) Close() error {
	defer c.release()
	return c.Conn.Close()
}
