package ingress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Sandboxes is what the runtime does for this package.
type Sandboxes interface {
	Sandbox(ctx context.Context, ref string) (sandbox.Sandbox, error)
	Living(ctx context.Context, ref string) (sandbox.Sandbox, error)
	DialPort(ctx context.Context, ref string, port int) (net.Conn, error)
	DialUDP(ctx context.Context, ref string, port int, inside bool) (net.Conn, error)
	PutPort(ctx context.Context, p sandbox.Port, actor string) error
	Ports(ctx context.Context, id sandbox.ID) ([]sandbox.Port, error)
	DeletePort(ctx context.Context, id, actor string) (sandbox.Port, error)
	SetPortToken(ctx context.Context, id sandbox.ID, hash []byte, actor string) error
	PortTokens(ctx context.Context) (map[sandbox.ID][]byte, error)
}

// Config configures an Ingress.
type Config struct {
	Sandboxes Sandboxes
	// PublishAddress is listened on where a request names none; 127.0.0.1
	// unless set.
	PublishAddress netip.Addr
	// Domain is what host names end with, without a dot in front; empty means
	// that no name leads to a sandbox.
	Domain string
	Log    *slog.Logger
}

// Bounds. What comes beyond them is refused, and told in the log.
const (
	maxPortsEach = 64   // published ports of one sandbox
	maxConnsEach = 1024 // connections of one published port, and peers of a UDP port
	maxConns     = 16384
	retryEvery   = 5 * time.Second // before a port somebody else has is tried again
)

// Ingress holds the listeners. It is safe for concurrent use.
type Ingress struct {
	cfg   Config
	log   *slog.Logger
	route *router

	life   context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	slots  chan struct{} // one for each connection through a published port

	tokenTurn sync.Mutex // before mu

	mu       sync.Mutex
	starting bool                  // guarded by mu; what was published is being read
	ports    map[string]*listener  // guarded by mu; by id of the port
	tokens   map[sandbox.ID][]byte // guarded by mu; SHA-256
	gone     map[sandbox.ID]bool   // guarded by mu; ended while something of theirs was being made or read
	making   map[sandbox.ID]int    // guarded by mu; how much is being made
}

// listener is one published port.
type listener struct {
	port sandbox.Port

	// close ends listening and every connection. Nil while the port could not
	// be had.
	close func()
	err   error // why it could not
}

// New returns an Ingress that listens for nothing yet.
func New(cfg Config) *Ingress {
	if !cfg.PublishAddress.IsValid() {
		cfg.PublishAddress = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	life, cancel := context.WithCancel(context.Background())
	in := &Ingress{
		cfg: cfg, log: cfg.Log, life: life, cancel: cancel, slots: make(chan struct{}, maxConns),
		ports: map[string]*listener{}, tokens: map[sandbox.ID][]byte{}, gone: map[sandbox.ID]bool{}, making: map[sandbox.ID]int{},
	}
	in.route = newRouter(in)
	return in
}

// Start listens again for every port that was published before. One that
// somebody else has by now is tried again until it is free; Ports tells so. It
// comes before all else but Ended.
func (in *Ingress) Start(ctx context.Context) error {
	in.mu.Lock()
	in.starting = true // from here on those that end are known, whatever is read of them
	in.mu.Unlock()
	tokens, err := in.cfg.Sandboxes.PortTokens(ctx)
	if err != nil {
		return fmt.Errorf("read the tokens of sandboxes: %w", err)
	}
	ports, err := in.cfg.Sandboxes.Ports(ctx, "")
	if err != nil {
		return fmt.Errorf("read the published ports: %w", err)
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	defer func() { in.starting, in.gone = false, map[sandbox.ID]bool{} }()
	in.tokens = tokens
	for id := range in.gone {
		delete(tokens, id)
	}
	for _, p := range ports {
		if in.gone[p.Sandbox] {
			continue
		}
		l := &listener{port: p}
		in.ports[p.ID] = l
		if in.listen(l); l.err != nil {
			in.log.ErrorContext(ctx, "listen again for a published port: tried again", "sandbox", p.Sandbox, "port", p.Port, "at", p.Where(), "err", l.err)
			in.later(func() { in.again(p.ID) })
		}
	}
	return nil
}

// Close ends listening and every connection through it, and waits for that.
func (in *Ingress) Close() {
	in.cancel()
	in.mu.Lock()
	for _, l := range in.ports {
		if l.close != nil {
			l.close()
		}
	}
	in.mu.Unlock()
	in.route.close()
	in.tasks.Wait()
}

// Publish listens on the host for a port of a living sandbox. The port is
// listened for until Unpublish or the sandbox's end, across restarts of the
// daemon, and refuses while the sandbox does not run. ErrConflict with code
// port_taken where the host's port is not free.
func (in *Ingress) Publish(ctx context.Context, ref string, req sandbox.PortRequest, actor string) (sandbox.Port, error) {
	if err := req.Validate(); err != nil {
		return sandbox.Port{}, err
	}
	sb, err := in.cfg.Sandboxes.Living(ctx, ref)
	if err != nil {
		return sandbox.Port{}, err
	}
	p := sandbox.Port{
		ID: sandbox.NewPortID(), Sandbox: sb.ID, Protocol: req.Protocol, Address: req.Address.Unmap(), HostPort: req.HostPort,
		Port: req.Port, Public: req.Public, CreatedAt: time.Now().UTC(),
	}
	if p.Protocol == "" {
		p.Protocol = sandbox.ProtocolTCP
	}
	if !req.Address.IsValid() {
		p.Address = in.cfg.PublishAddress
	}
	l, err := in.add(p)
	if err != nil {
		return p, err
	}
	p = l.port
	err = in.cfg.Sandboxes.PutPort(context.WithoutCancel(ctx), p, actor)
	if err != nil || in.made(p.Sandbox) {
		in.drop(p.ID)
		if err == nil {
			err = sandbox.Errorf(sandbox.ErrConflict, "sandbox_ended", "sandbox %s ended meanwhile", p.Sandbox)
		}
		return p, err
	}
	return p, nil
}

// add listens for a new port. Unless it returns an error, made must follow.
func (in *Ingress) add(p sandbox.Port) (*listener, error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.life.Err() != nil {
		return nil, sandbox.Errorf(sandbox.ErrUnavailable, "shutting_down", "the daemon is shutting down: try again in a moment")
	}
	n := 0
	for _, o := range in.ports {
		if o.port.Sandbox == p.Sandbox {
			n++
		}
	}
	if n >= maxPortsEach {
		return nil, sandbox.Errorf(sandbox.ErrExhausted, "too_many_ports", "sandbox %s has %d published ports already: remove one first", p.Sandbox, n)
	}
	l := &listener{port: p}
	if in.listen(l); l.err != nil {
		return nil, l.err
	}
	in.ports[p.ID] = l
	in.making[p.Sandbox]++
	return l, nil
}

// made ends what add began, and reports whether the sandbox has ended since.
func (in *Ingress) made(id sandbox.ID) (gone bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	gone = in.gone[id]
	if in.making[id]--; in.making[id] <= 0 {
		delete(in.making, id)
		delete(in.gone, id)
	}
	return gone
}

// listen opens the port, in.mu held. A host port of 0 becomes the one given.
func (in *Ingress) listen(l *listener) {
	at := l.port.Where()
	family := "4" // said, so that 0.0.0.0 does not mean :: as well
	if at.Addr().Is6() {
		family = "6"
	}
	if l.port.Protocol == sandbox.ProtocolUDP {
		c, err := net.ListenUDP("udp"+family, net.UDPAddrFromAddrPort(at))
		if err == nil && at.Addr().IsUnspecified() {
			if err = tellLocal(c); err != nil {
				_ = c.Close() // the error says more
			}
		}
		if err != nil {
			l.err = listenError(l.port, err)
			return
		}
		l.port.HostPort = addrOf(c.LocalAddr()).Port()
		u := newAssociations(in, l.port, c)
		in.tasks.Go(u.run)
		l.close, l.err = u.close, nil
		return
	}
	ln, err := net.ListenTCP("tcp"+family, net.TCPAddrFromAddrPort(at))
	if err != nil {
		l.err = listenError(l.port, err)
		return
	}
	l.port.HostPort = addrOf(ln.Addr()).Port()
	t := &acceptor{in: in, port: l.port, ln: ln, conns: map[net.Conn]bool{}}
	in.tasks.Go(t.run)
	l.close, l.err = t.close, nil
}

func addrOf(a net.Addr) netip.AddrPort {
	switch a := a.(type) {
	case *net.TCPAddr:
		return a.AddrPort()
	case *net.UDPAddr:
		return a.AddrPort()
	}
	return netip.AddrPort{}
}

// listenError says why a port cannot be listened for.
func listenError(p sandbox.Port, err error) error {
	at := p.Where()
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		return sandbox.Errorf(sandbox.ErrConflict, "port_taken", "%s port %s of the host is taken: choose another, or 0 for one that is free: %w", p.Protocol, at, err)
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return sandbox.Errorf(sandbox.ErrInvalid, "address_not_local", "address %s is not the host's: use one of its own, or 0.0.0.0 for all: %w", at.Addr(), err)
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		return sandbox.Errorf(sandbox.ErrExhausted, "files_exhausted", "the daemon has too many open files: %w", err)
	}
	return fmt.Errorf("listen on %s port %s: %w", p.Protocol, at, err)
}

// again tries to listen for a port that could not be had.
func (in *Ingress) again(id string) {
	in.mu.Lock()
	defer in.mu.Unlock()
	l := in.ports[id]
	if l == nil || l.close != nil || in.life.Err() != nil {
		return
	}
	if in.listen(l); l.err != nil {
		in.later(func() { in.again(id) })
		return
	}
	in.log.Info("a published port is listened for again", "sandbox", l.port.Sandbox, "at", l.port.Where())
}

func (in *Ingress) later(f func()) {
	in.tasks.Go(func() {
		t := time.NewTimer(retryEvery)
		defer t.Stop()
		select {
		case <-t.C:
			f()
		case <-in.life.Done():
		}
	})
}

// drop stops listening for a port.
func (in *Ingress) drop(id string) {
	in.mu.Lock()
	l := in.ports[id]
	delete(in.ports, id)
	in.mu.Unlock()
	if l != nil && l.close != nil {
		l.close()
	}
}

// Unpublish stops listening for a port and breaks its connections.
// ErrNotFound.
func (in *Ingress) Unpublish(ctx context.Context, id, actor string) (sandbox.Port, error) {
	p, err := in.cfg.Sandboxes.DeletePort(ctx, id, actor)
	if err != nil {
		return p, err
	}
	in.drop(id)
	return p, nil
}

// Ports lists the published ports of one sandbox or, without a ref, of all,
// in the order of sandboxes and times.
func (in *Ingress) Ports(ctx context.Context, ref string) ([]sandbox.Port, error) {
	var id sandbox.ID
	if ref != "" {
		sb, err := in.cfg.Sandboxes.Sandbox(ctx, ref)
		if err != nil {
			return nil, err
		}
		id = sb.ID
	}
	return in.list(id), nil
}

func (in *Ingress) list(id sandbox.ID) []sandbox.Port {
	in.mu.Lock()
	defer in.mu.Unlock()
	var all []sandbox.Port
	for _, l := range in.ports {
		if id != "" && l.port.Sandbox != id {
			continue
		}
		p := l.port
		if l.err != nil {
			p.Error = l.err.Error()
		}
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b sandbox.Port) int {
		if a.Sandbox != b.Sandbox {
			return strings.Compare(string(a.Sandbox), string(b.Sandbox))
		}
		return a.CreatedAt.Compare(b.CreatedAt)
	})
	return all
}

// Ended lets go of everything of a sandbox that has ended.
func (in *Ingress) Ended(id sandbox.ID) {
	var closes []func()
	in.mu.Lock()
	for key, l := range in.ports {
		if l.port.Sandbox != id {
			continue
		}
		delete(in.ports, key)
		if l.close != nil {
			closes = append(closes, l.close)
		}
	}
	delete(in.tokens, id)
	if in.making[id] > 0 || in.starting {
		in.gone[id] = true
	}
	in.mu.Unlock()
	for _, f := range closes {
		f()
	}
}
