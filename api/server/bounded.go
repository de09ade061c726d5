package server

import (
	"net"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"
)

// Bounded returns a listener that takes at most so many connections at a time
// from one address (of IPv6: one /64), and at most all together, so that one
// client, slow or greedy, cannot keep others out. What is too many is closed
// at once: the client tries again when it has closed others.
func Bounded(ln net.Listener, perAddress, all int) net.Listener {
	return &bounded{Listener: ln, perAddress: perAddress, all: all, open: map[any]int{}, who: func(c net.Conn) (any, bool) {
		return clientOf(c.RemoteAddr()), false
	}}
}

// BoundedUnix is Bounded for a unix socket, where the clients are users. The
// operator, the user self, is not counted: whatever others hold open, he gets
// in.
func BoundedUnix(ln net.Listener, self uint32, perUser, all int) net.Listener {
	return &bounded{Listener: ln, perAddress: perUser, all: all, open: map[any]int{}, who: func(c net.Conn) (any, bool) {
		p := newPeer(c)
		return p.uid, p.known && p.uid == self
	}}
}

type bounded struct {
	net.Listener
	perAddress, all int
	who             func(net.Conn) (client any, free bool)

	mu    sync.Mutex
	open  map[any]int
	total int
}

// The daemon keeps ownFiles descriptors for itself and the operator; of the
// others a connection takes perConnection at most, and each of the three
// listeners has a third.
const (
	ownFiles      = 256
	perConnection = 4
	listeners     = 3
)

// most is how many connections the limit of open files leaves room for, which
// is looked at each time: it can be changed from outside (prlimit(1)).
func (b *bounded) most() int {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		return b.all
	}
	room := uint64(1)
	if lim.Cur > ownFiles {
		room = max(room, (lim.Cur-ownFiles)/(perConnection*listeners))
	}
	return int(min(room, uint64(b.all)))
}

func (b *bounded) Accept() (net.Conn, error) {
	for {
		c, err := b.Listener.Accept()
		if err != nil {
			return nil, err
		}
		at, free := b.who(c)
		if free {
			return c, nil
		}
		if b.enter(at) {
			return &boundedConn{Conn: c, leave: sync.OnceFunc(func() { b.leave(at) })}, nil
		}
		_ = c.Close() // it has not been spoken to
	}
}

func (b *bounded) enter(at any) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.total >= b.most() || b.open[at] >= b.perAddress {
		return false
	}
	b.total++
	b.open[at]++
	return true
}

func (b *bounded) leave(at any) {
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
