package server

import (
	"context"
	"crypto/tls"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Bounded returns a listener that takes at most so many connections at a time
// from one address (of IPv6: one /64), and at most all together, so that one
// client, slow or greedy, cannot keep others out. Where there is no room, the
// oldest connection that nobody was admitted on (see Admitted) makes it: what
// is half sent holds no place that a newcomer could use. Where all have been
// admitted the newcomer is closed: the client tries again when it has closed others.
func Bounded(ln net.Listener, perAddress, all int) net.Listener {
	return &bounded{Listener: ln, perAddress: perAddress, all: all, open: map[any]map[*boundedConn]bool{}, closing: map[any]int{}, who: func(c net.Conn) (any, bool) {
		return clientOf(c.RemoteAddr()), false
	}}
}

// BoundedUnix is Bounded for a unix socket, where the clients are users. The
// operator, the user self, is not counted: whatever others hold open, he gets
// in.
func BoundedUnix(ln net.Listener, self uint32, perUser, all int) net.Listener {
	return &bounded{Listener: ln, perAddress: perUser, all: all, open: map[any]map[*boundedConn]bool{}, closing: map[any]int{}, who: func(c net.Conn) (any, bool) {
		p := newPeer(c)
		return p.uid, p.known && p.uid == self
	}}
}

type bounded struct {
	net.Listener
	perAddress, all int
	who             func(net.Conn) (client any, free bool)

	mu    sync.Mutex
	open  map[any]map[*boundedConn]bool // by client
	total int
	came  int64 // counts them all

	closing  map[any]int // by client, guarded by mu
	closings int         // all of them
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
		bc := &boundedConn{Conn: c, in: b, at: at}
		evicted, ok := b.enter(bc)
		if evicted != nil {
			b.closeLater(evicted) // its place is given away; nobody was admitted on it
		}
		if ok {
			return bc, nil
		}
		b.closeLater(bc) // it has not been spoken to
	}
}

// A connection that is too many is closed a moment later, so that a client that
// connects again and again does not keep the daemon busy with it. Of one
// client so many at most, and of all of them, are open meanwhile.
const (
	closedLater  = time.Second
	closingOf    = 64
	closingOfAll = ownFiles / 2
)

func (b *bounded) closeLater(c *boundedConn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closing[c.at] >= closingOf || b.closings >= closingOfAll {
		_ = c.Conn.Close()
		return
	}
	b.closings++
	b.closing[c.at]++
	time.AfterFunc(closedLater, func() {
		_ = c.Conn.Close()
		b.mu.Lock()
		defer b.mu.Unlock()
		b.closings--
		if b.closing[c.at]--; b.closing[c.at] == 0 {
			delete(b.closing, c.at)
		}
	})
}

// enter notes a connection, and says which one makes room for it.
func (b *bounded) enter(c *boundedConn) (evicted *boundedConn, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case len(b.open[c.at]) >= b.perAddress:
		evicted = oldest(nil, b.open[c.at])
	case b.total >= b.most():
		for _, of := range b.open {
			evicted = oldest(evicted, of)
		}
	default:
		ok = true
	}
	if evicted != nil {
		b.forget(evicted)
		ok = true
	}
	if !ok {
		return nil, false
	}
	if b.open[c.at] == nil {
		b.open[c.at] = map[*boundedConn]bool{}
	}
	b.came++
	c.nth, b.open[c.at][c] = b.came, true
	b.total++
	return evicted, true
}

// oldest returns the oldest of those that nobody was admitted on.
func oldest(than *boundedConn, of map[*boundedConn]bool) *boundedConn {
	for c := range of {
		if c.owner == "" && (than == nil || c.nth < than.nth) {
			than = c
		}
	}
	return than
}

// forget gives a connection's place away; b.mu is held.
func (b *bounded) forget(c *boundedConn) {
	of := b.open[c.at]
	if !of[c] {
		return
	}
	b.total--
	if delete(of, c); len(of) == 0 {
		delete(b.open, c.at)
	}
}

type boundedConn struct {
	net.Conn
	in *bounded
	at any // the client

	nth   int64  // guarded by in.mu, as owner is
	owner string // whose request came last on it; empty: nobody was admitted
}

func (c *boundedConn) Close() error {
	c.in.mu.Lock()
	c.in.forget(c)
	c.in.mu.Unlock()
	return c.Conn.Close()
}

// shareOfAddress is what one owner may have of the places of an address, in
// quarters.
const shareOfAddress = 3

// Admitted notes whose request came on the connection of a context: from then
// on it keeps its place. ErrExhausted where the owner has most of those of the
// address, of which others must get some, too.
func Admitted(ctx context.Context, owner string) error {
	conn := peerOf(ctx).conn
	if t, ok := conn.(*tls.Conn); ok {
		conn = t.NetConn()
	}
	c, ok := conn.(*boundedConn)
	if !ok {
		return nil
	}
	c.in.mu.Lock()
	defer c.in.mu.Unlock()
	if !c.in.open[c.at][c] {
		return sandbox.Errorf(sandbox.ErrExhausted, "too_many_connections", "this address has too many connections, and the place of this one was given away: close some first")
	}
	if c.owner == owner {
		return nil
	}
	n := 0
	for other := range c.in.open[c.at] {
		if other.owner == owner {
			n++
		}
	}
	if n >= max(1, c.in.perAddress*shareOfAddress/4) {
		return sandbox.Errorf(sandbox.ErrExhausted, "too_many_connections", "%s has %d connections from this address: close some first", owner, n)
	}
	c.owner = owner
	return nil
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
