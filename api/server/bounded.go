package server

import (
	"net"
	"net/netip"
	"sync"
)

// Bounded returns a listener that takes at most so many connections at a time
// from one address (of IPv6: one /64), and at most all together, so that one
// client, slow or greedy, cannot keep others out. What is too many is closed
// at once: the client tries again when it has closed others.
func Bounded(ln net.Listener, perAddress, all int) net.Listener {
	return &bounded{Listener: ln, perAddress: perAddress, all: all, open: map[netip.Prefix]int{}}
}

type bounded struct {
	net.Listener
	perAddress, all int

	mu    sync.Mutex
	open  map[netip.Prefix]int
	total int
}

func (b *bounded) Accept() (net.Conn, error) {
	for {
		c, err := b.Listener.Accept()
		if err != nil {
			return nil, err
		}
		at := clientOf(c.RemoteAddr())
		if b.enter(at) {
			return &boundedConn{Conn: c, leave: sync.OnceFunc(func() { b.leave(at) })}, nil
		}
		_ = c.Close() // it has not been spoken to
	}
}

func (b *bounded) enter(at netip.Prefix) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.total >= b.all || b.open[at] >= b.perAddress {
		return false
	}
	b.total++
	b.open[at]++
	return true
}

func (b *bounded) leave(at netip.Prefix) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.total--
	if b.open[at]--; b.open[at] == 0 {
		delete(b.open, at)
	}
}

type boundedConn struct {
	net.Conn
	leave func()
}

func (c *boundedConn) Close() error {
	c.leave()
	return c.Conn.Close()
}

// clientOf is what one client can choose its address from.
func clientOf(a net.Addr) netip.Prefix {
	ap, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.Prefix{}
	}
	at := ap.Addr().Unmap().WithZone("")
	bits := at.BitLen()
	if at.Is6() {
		bits = 64
	}
	p, err := at.Prefix(bits)
	if err != nil {
		return netip.Prefix{}
	}
	return p
}
