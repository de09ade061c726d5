package runtime

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/runtime/launch"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// Reaching in: connections from the host to a port of a sandbox. Over the link
// the kernel counts their bytes; into the loopback of a sandbox only the daemon
// sees them pass, and counts itself:
//
//	bytes carried → memory → table carried, absolute, once a second
//	              → the row's usage, with the shell's other counters, at its end
//
// The table names the shell by PID 1's start time. A crash loses what was
// carried since the last second, and counts nothing twice: what the row holds
// belongs to shells before.

const (
	// dialTimeout is how long a server in a sandbox may take to answer.
	dialTimeout = 5 * time.Second
	// carriedEvery is how often what was carried is written down.
	carriedEvery = time.Second
)

// codePortClosed is the code of the error for a port nobody listens on.
const codePortClosed = "port_closed"

// DialPort connects to a TCP port of a running sandbox: by its address, and
// where it has no link or nobody listens there, on the loopback inside. The
// connection counts as a call for the idle timeout while it is open, and
// breaks when the sandbox's processes are killed. ErrConflict where it does not
// run, ErrUnavailable with code port_closed where nobody listens.
func (m *Manager) DialPort(ctx context.Context, ref string, port int) (net.Conn, error) {
	return m.dialPort(ctx, ref, "tcp", port, false)
}

// DialUDP makes a socket whose datagrams go to a port of a running sandbox, by
// its address if it has a link and inside is false, else on its loopback. That
// nobody listens is seen only by a later read or write (unix.ECONNREFUSED).
func (m *Manager) DialUDP(ctx context.Context, ref string, port int, inside bool) (net.Conn, error) {
	return m.dialPort(ctx, ref, "udp", port, inside)
}

func (m *Manager) dialPort(ctx context.Context, ref, network string, port int, inside bool) (net.Conn, error) {
	if port < 1 || port > 65535 {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_port", "port %d: use 1 to 65535", port)
	}
	b, err := m.running(ctx, ref)
	if err != nil {
		return nil, err
	}
	leave := b.enter()
	c, err := m.connect(ctx, b, network, uint16(port), inside, leave)
	if err != nil {
		leave()
		return nil, err
	}
	return c, nil
}

// connect takes the one way or the other.
func (m *Manager) connect(ctx context.Context, b *box, network string, port uint16, inside bool, leave func()) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	shell, ns, err := b.netNS()
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	sb, err := m.state.Sandbox(ctx, b.id) // not earlier: the address is to be this shell's,
	if err != nil {
		return nil, err
	}
	if sb.Status != sandbox.StatusRunning { // which a row that says so has
		return nil, notRunning(b.id)
	}
	if m.inForce(sb.Spec.Network).Connected() && !inside {
		c, err := dialLink(ctx, network, sb.Address, port)
		if err == nil {
			return b.reach.keep(b, shell, c, false, leave)
		}
		// Whatever went wrong on the link, the loopback may do.
	}
	c, err := m.net.DialInside(ctx, ns, network, port)
	switch {
	case err == nil:
		c, err := b.reach.keep(b, shell, c, true, leave)
		if err == nil {
			m.writeCarriedSoon(b)
		}
		return c, err
	case errors.Is(err, unix.ECONNREFUSED):
		return nil, sandbox.Errorf(sandbox.ErrUnavailable, codePortClosed, "nobody listens on %s port %d of sandbox %s: start the server in it, then try again", network, port, b.id)
	case ctx.Err() != nil:
		return nil, sandbox.Errorf(sandbox.ErrUnavailable, "port_silent", "%s port %d of sandbox %s does not answer: %w", network, port, b.id, err)
	}
	return nil, err
}

func notRunning(id sandbox.ID) error {
	return sandbox.Errorf(sandbox.ErrConflict, "sandbox_not_running", "sandbox %s is not running", id)
}

func dialLink(ctx context.Context, network string, to netip.Addr, port uint16) (net.Conn, error) {
	d := net.Dialer{Timeout: dialTimeout / 2} // the loopback is to have a chance, too
	return d.DialContext(ctx, network+"4", net.JoinHostPort(to.String(), strconv.Itoa(int(port))))
}

// netNS returns the present shell and a descriptor of its network namespace,
// which the caller closes.
func (b *box) netNS() (*launch.Shell, *os.File, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.shell == nil || b.shell.NetNS == nil {
		return nil, nil, notRunning(b.id)
	}
	// Of our own: the shell's is closed when it ends, and its number may then
	// stand for another sandbox's.
	fd, err := unix.FcntlInt(b.shell.NetNS.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("fcntl", err)
	}
	return b.shell, os.NewFile(uintptr(fd), b.shell.NetNS.Name()), nil
}

// reach is a box's connections from outside.
type reach struct {
	rx, tx  atomic.Uint64 // bytes carried into and out of the loopback, of the present shell
	pending atomic.Bool   // they will be written down
	written state.Carried // guarded by writing; what was written last
	writing sync.Mutex

	mu   sync.Mutex
	open map[*reached]bool // guarded by mu
}

// reached is one of them. Its methods for fast copying are the TCP
// connection's own, unless its bytes must be counted.
type reached struct {
	net.Conn
	close func() error
}

func (r *reached) Close() error { return r.close() }

// reachedTCP adds what TCP connections have besides.
type reachedTCP struct {
	*net.TCPConn
	r *reached
}

// Close closes the connection; it may be repeated.
func (t *reachedTCP) Close() error { return t.r.Close() }

// countedTCP counts what passes.
type countedTCP struct {
	net.Conn
	tcp    *net.TCPConn
	rx, tx *atomic.Uint64
}

func (c *countedTCP) CloseWrite() error       { return c.tcp.CloseWrite() }
func (c *countedTCP) CloseRead() error        { return c.tcp.CloseRead() }
func (c *countedTCP) SetLinger(sec int) error { return c.tcp.SetLinger(sec) }

// Read counts what came out of the sandbox.
func (c *countedTCP) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.tx.Add(uint64(n))
	return n, err
}

// Write counts what went into the sandbox.
func (c *countedTCP) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.rx.Add(uint64(n))
	return n, err
}

// countedUDP is countedTCP of datagrams.
type countedUDP struct {
	net.Conn
	rx, tx *atomic.Uint64
}

// Read counts what came out of the sandbox.
func (c *countedUDP) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.tx.Add(uint64(n))
	return n, err
}

// Write counts what went into the sandbox.
func (c *countedUDP) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.rx.Add(uint64(n))
	return n, err
}

// keep notes a new connection, if the shell it was made to is still there:
// otherwise the address may be another's by now.
func (r *reach) keep(b *box, shell *launch.Shell, c net.Conn, counted bool, leave func()) (net.Conn, error) {
	k := &reached{Conn: c}
	k.close = sync.OnceValue(func() error {
		leave()
		r.mu.Lock()
		delete(r.open, k)
		r.mu.Unlock()
		return c.Close()
	})
	b.mu.Lock()
	same := b.shell == shell
	if same { // within b.mu, so that whoever takes the shell finds it
		r.mu.Lock()
		if r.open == nil {
			r.open = map[*reached]bool{}
		}
		r.open[k] = true
		r.mu.Unlock()
	}
	b.mu.Unlock()
	if !same {
		_ = c.Close()
		return nil, sandbox.Errorf(sandbox.ErrConflict, "sandbox_not_running", "sandbox %s was stopped meanwhile", b.id)
	}
	tcp, isTCP := c.(*net.TCPConn)
	switch {
	case isTCP && counted:
		return &countedTCP{Conn: k, tcp: tcp, rx: &r.rx, tx: &r.tx}, nil
	case isTCP:
		return &reachedTCP{TCPConn: tcp, r: k}, nil
	case counted:
		return &countedUDP{Conn: k, rx: &r.rx, tx: &r.tx}, nil
	}
	return k, nil
}

// closeAll breaks every connection, with a reset: a socket that waits for the
// rest of a dead connection would hold the network namespace for a minute.
func (r *reach) closeAll() {
	r.mu.Lock()
	all := r.open
	r.open = nil
	r.mu.Unlock()
	for k := range all {
		if t, ok := k.Conn.(*net.TCPConn); ok {
			_ = t.SetLinger(0) // one that is gone needs none
		}
		_ = k.Close()
	}
}

// begin starts counting for a new shell.
func (r *reach) begin() {
	r.writing.Lock()
	defer r.writing.Unlock()
	r.rx.Store(0)
	r.tx.Store(0)
	r.written = state.Carried{}
}

// recall takes up what an earlier daemon wrote of the shell that is adopted.
func (r *reach) recall(row state.Row, all map[sandbox.ID]state.Carried) {
	c, ok := all[row.ID]
	if !ok || row.InitStart == 0 || c.InitStart != row.InitStart {
		return
	}
	r.writing.Lock()
	defer r.writing.Unlock()
	r.rx.Store(c.Rx)
	r.tx.Store(c.Tx)
	r.written = c
}

// add adds what was carried to the counters of the shell.
func (r *reach) add(u *sandbox.Usage) {
	*u = u.Add(sandbox.Usage{NetRxBytes: r.rx.Load(), NetTxBytes: r.tx.Load()})
}

// writeCarriedSoon has a box's counters written down, now and as long as there
// are connections.
func (m *Manager) writeCarriedSoon(b *box) {
	if b.reach.pending.Swap(true) {
		return
	}
	m.spawn(func() {
		t := time.NewTicker(carriedEvery)
		defer t.Stop()
		for last := false; !last; {
			select {
			case <-t.C:
			case <-m.life.Done():
				last = true
			}
			b.reach.mu.Lock()
			if len(b.reach.open) == 0 {
				last = true
				b.reach.pending.Store(false)
			}
			b.reach.mu.Unlock()
			m.writeCarried(b)
		}
	})
}

func (m *Manager) writeCarried(b *box) {
	r := &b.reach
	r.writing.Lock()
	defer r.writing.Unlock()
	shell := b.present()
	if shell == nil {
		return // its end has counted all
	}
	c := state.Carried{InitStart: shell.StartTime, Rx: r.rx.Load(), Tx: r.tx.Load()}
	if c == r.written {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(m.life), carriedEvery)
	defer cancel()
	if err := m.state.PutCarried(ctx, b.id, c); err != nil {
		m.log.WarnContext(ctx, "write down what was carried into a sandbox", "sandbox", b.id, "err", err)
		return
	}
	r.written = c
}
