package ingress

import (
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	// udpIdle is how long a peer of a UDP port is remembered without a
	// datagram; RFC 4787, 4.3, asks for two minutes or more.
	udpIdle = 2 * time.Minute
	// maxDatagram is the longest datagram there is.
	maxDatagram = 65535
	// udpDials bounds how many peers wait for their socket into the sandbox.
	udpDials = 64
)

// associations are the peers of one published UDP port: each has a socket of
// its own into the sandbox, so that answers find their way back.
type associations struct {
	in   *Ingress
	port sandbox.Port
	c    *net.UDPConn
	wait chan struct{} // a token for each dial

	mu     sync.Mutex
	peers  map[peer]*association // guarded by mu
	closed bool                  // guarded by mu
}

// peer is a client, and the address of the host it knows.
type peer struct {
	from  netip.AddrPort
	local netip.Addr // invalid where the socket has but one
}

type association struct {
	peer
	oob  []byte      // makes answers come from peer.local
	out  chan []byte // datagrams on their way in; full: they are lost, as datagrams are
	last atomic.Int64
	end  func()
	done chan struct{}
}

func newAssociations(in *Ingress, p sandbox.Port, c *net.UDPConn) *associations {
	return &associations{in: in, port: p, c: c, wait: make(chan struct{}, udpDials), peers: map[peer]*association{}}
}

// run takes datagrams until the socket is closed.
func (u *associations) run() {
	buf, oob := make([]byte, maxDatagram), make([]byte, 128)
	for {
		n, control, _, from, err := u.c.ReadMsgUDPAddrPort(buf, oob)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // an ICMP error of a peer that is gone, or no memory
			select {
			case <-time.After(time.Millisecond):
			case <-u.in.life.Done():
				return
			}
			continue
		}
		if a := u.peer(peer{from, localOf(oob[:control])}); a != nil {
			a.last.Store(time.Now().UnixNano())
			select {
			case a.out <- append([]byte(nil), buf[:n]...):
			default:
			}
		}
	}
}

// peer returns a client's association, or nil where there are too many.
func (u *associations) peer(from peer) *association {
	u.mu.Lock()
	defer u.mu.Unlock()
	if a := u.peers[from]; a != nil {
		return a
	}
	if u.closed || len(u.peers) >= maxConnsEach {
		return nil
	}
	select {
	case u.wait <- struct{}{}:
	default:
		return nil
	}
	a := &association{peer: from, oob: comeFrom(from.local), out: make(chan []byte, 64), done: make(chan struct{})}
	a.end = sync.OnceFunc(func() { close(a.done) })
	u.peers[from] = a
	u.in.tasks.Go(func() {
		defer u.forget(a)
		u.serve(a)
	})
	return a
}

func (u *associations) forget(a *association) {
	a.end()
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.peers, a.peer)
}

// serve carries one peer's datagrams. Where nobody listens on the sandbox's
// address, its loopback is tried once.
func (u *associations) serve(a *association) {
	var last []byte
	for _, inside := range []bool{false, true} {
		c, err := u.in.cfg.Sandboxes.DialUDP(u.in.life, string(u.port.Sandbox), int(u.port.Port), inside)
		if !inside {
			<-u.wait
		}
		if err != nil {
			u.in.log.Debug("a published port leads nowhere now", "sandbox", u.port.Sandbox, "port", u.port.Port, "err", err)
			return
		}
		refused := false
		last, refused = u.carry(a, c, last)
		_ = c.Close()
		if !refused {
			return
		}
	}
}

// carry carries datagrams until the peer is idle or one end is gone. refused
// says that nobody listened, and nothing ever came back; last is the datagram
// that was lost so.
func (u *associations) carry(a *association, c net.Conn, first []byte) (last []byte, refused bool) {
	var answered atomic.Bool
	var gone atomic.Bool // nobody listens
	back := make(chan struct{})
	u.in.tasks.Go(func() {
		defer close(back)
		buf := make([]byte, maxDatagram)
		for {
			n, err := c.Read(buf)
			if errors.Is(err, unix.ECONNREFUSED) {
				gone.Store(true)
				if !answered.Load() {
					return
				}
				continue // it was there, and may be again
			}
			if err != nil {
				return
			}
			answered.Store(true)
			a.last.Store(time.Now().UnixNano())
			_, _, _ = u.c.WriteMsgUDPAddrPort(buf[:n], a.oob, a.from) // lost, as datagrams are
		}
	})
	idle := time.NewTimer(udpIdle)
	defer idle.Stop()
	last = first
	if first != nil {
		_, _ = c.Write(first)
	}
	for {
		select {
		case last = <-a.out:
			_, err := c.Write(last)
			if refused := errors.Is(err, unix.ECONNREFUSED); refused && !answered.Load() || errors.Is(err, net.ErrClosed) {
				_ = c.Close()
				<-back
				return last, refused
			}
		case <-back: // nobody listens, or the sandbox is gone
			return last, gone.Load() && !answered.Load()
		case <-idle.C:
			left := udpIdle - time.Since(time.Unix(0, a.last.Load()))
			if left <= 0 {
				_ = c.Close()
				<-back
				return nil, false
			}
			idle.Reset(left)
		case <-a.done:
			_ = c.Close()
			<-back
			return nil, false
		}
	}
}

// close ends listening and forgets every peer.
func (u *associations) close() {
	_ = u.c.Close() // it may be repeated
	u.mu.Lock()
	defer u.mu.Unlock()
	u.closed = true
	for _, a := range u.peers {
		a.end()
	}
}
