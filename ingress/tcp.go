package ingress

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/duplex"
	"github.com/sandboxd/sandboxd/sandbox"
)

// acceptor takes the connections of one published TCP port.
type acceptor struct {
	in   *Ingress
	port sandbox.Port
	ln   *net.TCPListener

	mu     sync.Mutex
	closed bool              // guarded by mu
	conns  map[net.Conn]bool // guarded by mu; clients
	told   time.Time         // guarded by mu; when a refusal was logged last
}

// pauseAfter is how long no connection is taken after the daemon ran out of
// descriptors.
const pauseAfter = 50 * time.Millisecond

// tellEvery bounds how often the log tells of what happens often.
const tellEvery = 10 * time.Second

func (a *acceptor) run() {
	for {
		c, err := a.ln.AcceptTCP()
		switch {
		case err == nil:
			a.take(c)
		case errors.Is(err, net.ErrClosed), a.over():
			return
		default: // out of descriptors: those in use will be free again
			a.tell("take a connection of a published port", err)
			select {
			case <-time.After(pauseAfter):
			case <-a.in.life.Done():
				return
			}
		}
	}
}

// take serves a connection, or resets it where there are too many.
func (a *acceptor) take(c *net.TCPConn) {
	select {
	case a.in.slots <- struct{}{}:
	default:
		a.tell("refuse a connection of a published port: all of them together have too many", nil)
		duplex.Reset(c)
		return
	}
	a.mu.Lock()
	full := len(a.conns) >= maxConnsEach
	refused := full || a.closed
	if !refused {
		a.conns[c] = true
	}
	a.mu.Unlock()
	if refused {
		<-a.in.slots
		if full {
			a.tell("refuse a connection of a published port: it has too many", nil)
		}
		duplex.Reset(c)
		return
	}
	a.in.tasks.Go(func() {
		defer func() {
			a.mu.Lock()
			delete(a.conns, c)
			a.mu.Unlock()
			<-a.in.slots
		}()
		a.serve(c)
	})
}

func (a *acceptor) serve(c *net.TCPConn) {
	inner, err := a.in.cfg.Sandboxes.DialPort(a.in.life, string(a.port.Sandbox), int(a.port.Port))
	if err != nil {
		a.in.log.Debug("a published port leads nowhere now", "sandbox", a.port.Sandbox, "port", a.port.Port, "err", err)
		duplex.Reset(c) // as the sandbox would
		return
	}
	stop := context.AfterFunc(a.in.life, func() { _ = inner.Close() })
	defer stop()
	if err := duplex.Join(c, inner); err != nil {
		a.in.log.Debug("a connection of a published port broke", "sandbox", a.port.Sandbox, "port", a.port.Port, "err", err)
	}
}

// tell logs what happens often once in a while.
func (a *acceptor) tell(what string, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if time.Since(a.told) < tellEvery {
		return
	}
	a.told = time.Now()
	a.in.log.Warn(what, "sandbox", a.port.Sandbox, "at", a.port.Where(), "err", err)
}

func (a *acceptor) over() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.closed
}

// close ends listening and the connections; it may be repeated. The port is
// free when it returns: whoever polls the socket at this moment keeps it open
// for another while, but it listens no more.
func (a *acceptor) close() {
	a.mu.Lock()
	a.closed = true
	a.mu.Unlock()
	if rc, err := a.ln.SyscallConn(); err == nil {
		_ = rc.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) }) // closed already, if it fails
	}
	_ = a.ln.Close() // as well
	a.mu.Lock()
	defer a.mu.Unlock()
	for c := range a.conns {
		duplex.Reset(c)
	}
}
