package netns

import (
	"errors"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Groups of the kernel's packet log. The numbers are any that no other
// program on a host is likely to use.
const (
	logGranted uint16 = 23473 // the first packet of a flow let out
	logRefused uint16 = 23474 // a packet refused
)

const (
	auditRetry    = 2 * time.Second // before a group that is taken is tried again
	auditLinks    = 4096            // link names remembered by index
	auditLinkKeep = 10 * time.Second
)

// auditor reads the packet log and tells whose packets they were. Telling
// must not block: the kernel counts what a slow reader misses, not we.
type auditor struct {
	log  *slog.Logger
	tell func(sandbox.NetworkNews)
	name func(index int) (string, error) // of a link
	why  func(sandbox.ID, loggedPacket) string

	lost atomic.Uint64 // times that packets were lost to a full buffer

	mu      sync.Mutex
	socket  *packetLog
	stopped bool
	done    chan struct{}
	wake    chan struct{}

	links   map[int]linkOwner
	emptied time.Time
}

type linkOwner struct {
	id sandbox.ID
	ok bool
}

// startAuditor reads until stop. Where the groups cannot be bound, because an
// earlier daemon is still ending or the kernel has no packet log, it tries
// again now and then: sandboxes are guarded all the same.
func startAuditor(log *slog.Logger, tell func(sandbox.NetworkNews), name func(int) (string, error), why func(sandbox.ID, loggedPacket) string) *auditor {
	a := &auditor{log: log, tell: tell, name: name, why: why, done: make(chan struct{}), wake: make(chan struct{}), links: map[int]linkOwner{}}
	socket, err := openPacketLog(logGranted, logRefused)
	if err == nil {
		a.socket = socket // bound before the first sandbox sends anything
	}
	go a.run(err)
	return a
}

func (a *auditor) run(err error) {
	defer close(a.done)
	for told := false; ; {
		if err == nil {
			err = a.read()
		}
		if a.isStopped() {
			return
		}
		if !told {
			a.log.Warn("reading the packet log: flows are not told until it works; rules and counters are not concerned", "err", err)
			told = true
		}
		select {
		case <-a.wake:
			return
		case <-time.After(auditRetry):
		}
		var socket *packetLog
		if socket, err = openPacketLog(logGranted, logRefused); err == nil {
			if !a.use(socket) {
				return
			}
			told = false
		}
	}
}

// use makes socket the one stop closes; false if there will be no reading.
func (a *auditor) use(socket *packetLog) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.stopped {
		_ = socket.close() // nothing was read
		return false
	}
	a.socket = socket
	return true
}

func (a *auditor) isStopped() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.stopped
}

// read reads until the socket breaks or is closed.
func (a *auditor) read() error {
	a.mu.Lock()
	socket := a.socket
	a.mu.Unlock()
	for {
		err := socket.read(a.packet)
		switch {
		case err == nil:
		case errors.Is(err, unix.ENOBUFS):
			a.lost.Add(1)
		case errors.Is(err, os.ErrClosed):
			return err
		default:
			return errors.Join(err, socket.close())
		}
	}
}

// packet tells of one packet.
func (a *auditor) packet(l loggedPacket) {
	n := sandbox.NetworkNews{Type: sandbox.EventNetDenied, Protocol: protocolName(l.version, l.protocol), Count: 1}
	if l.group == logGranted {
		n.Type = sandbox.EventNetAllowed
	}
	from, to := a.owner(l.in), a.owner(l.out)
	switch {
	case from.ok:
		n.Sandbox, n.Dest, n.Port = from.id, l.dst.String(), l.dstPort
		if l.group == logRefused {
			n.Why = a.why(from.id, l)
		}
	case to.ok:
		// What came in is told by the port it came for.
		n.Sandbox, n.Dest, n.Port, n.Inbound = to.id, l.src.String(), l.dstPort, true
		n.Why = whyUnasked
	default:
		return // the link went meanwhile, or the packet was never a sandbox's
	}
	a.tell(n)
}

// owner finds the sandbox of a link. Indices are not used twice for long.
func (a *auditor) owner(index int) linkOwner {
	if index == 0 {
		return linkOwner{}
	}
	if now := time.Now(); len(a.links) > auditLinks || now.Sub(a.emptied) > auditLinkKeep {
		clear(a.links)
		a.emptied = now
	}
	o, known := a.links[index]
	if !known {
		if name, err := a.name(index); err == nil {
			o.id, o.ok = linkID(name)
		}
		a.links[index] = o
	}
	return o
}

// stop ends the reading. Repeating it does nothing.
func (a *auditor) stop() {
	a.mu.Lock()
	first := !a.stopped
	a.stopped = true
	socket := a.socket
	a.mu.Unlock()
	if !first {
		return
	}
	close(a.wake)
	if socket != nil {
		_ = socket.close() // reading only
	}
	<-a.done
}

// AuditLost is how many times packets of the log were lost because they came
// faster than they were read. Counters count them all the same.
func (h *Host) AuditLost() uint64 {
	if h.audit == nil {
		return 0
	}
	return h.audit.lost.Load()
}
