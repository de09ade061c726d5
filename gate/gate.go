package gate

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Tenant is a sandbox as the gate knows it.
type Tenant struct {
	ID     sandbox.ID
	Name   string
	Policy sandbox.NetworkPolicy
}

// Sandboxes tells who has an address.
type Sandboxes interface {
	Tenant(addr netip.Addr) (Tenant, bool)
}

// Names looks names up as the sandbox itself may. An error of class
// ErrForbidden means that it may not ask.
type Names interface {
	Lookup(ctx context.Context, t Tenant, name string) ([]netip.Addr, error)
}

// Secrets returns a secret and its value. ErrNotFound.
type Secrets interface {
	SecretValue(ctx context.Context, name string) (sandbox.Secret, string, error)
}

// Event is one connection or request that was judged. It never holds the value
// of a secret; Host, Method and Path are the sandbox's own words, bounded.
type Event struct {
	Sandbox   sandbox.ID
	Kind      string // http, tls or connect
	Permitted bool
	Host      string // empty where the sandbox named none that can be read
	Port      uint16
	Method    string // of HTTP
	Path      string // of HTTP, without its query
	Origin    netip.AddrPort
	Rule      string   // that decided; empty where none did
	Code      string   // of a refusal
	Detail    string   // of a refusal, for people
	Secrets   []string // names of those sent along
}

// The kinds of events.
const (
	KindHTTP    = "http"
	KindTLS     = "tls"
	KindConnect = "connect"
)

// Config is what a Server is made of.
type Config struct {
	// Listen is the gateway's address as sandboxes see it; port 0 takes any.
	Listen    netip.AddrPort
	Sandboxes Sandboxes
	Names     Names
	Secrets   Secrets
	// Pool is where sandboxes have their addresses: nothing there is dialed.
	Pool netip.Prefix
	// Admit opens private ranges to policies that name them, Deny closes
	// ranges to all. Both are the operator's.
	Admit, Deny []netip.Prefix
	// Roots are the authorities believed where the gate speaks TLS itself;
	// nil means the host's.
	Roots *x509.CertPool
	// Tell hears of each judgement and must not wait; it may be nil.
	Tell func(Event)
	Log  *slog.Logger
}

// Bounds of what sandboxes can have the gate hold.
const (
	maxConnsSandbox = 256
	maxConns        = 4096 // of all sandboxes; beyond, a sandbox still has a few,
	maxConnsFew     = 8    // so that those who hold many do not shut out the others,
	maxConnsHard    = 8192 // up to here
	maxHeader       = 64 << 10
	maxAnswerHeader = 256 << 10
	maxHello        = 16 << 10
	helloTimeout    = 5 * time.Second
	headerTimeout   = 10 * time.Second
	idleTimeout     = 75 * time.Second // between the requests of a connection
	quietTimeout    = 30 * time.Minute // without a byte either way, of a tunnel
	answerTimeout   = 10 * time.Minute // from a request to the head of its answer
	sweepEvery      = 50 * time.Millisecond
)

// Stats counts since the start.
type Stats struct {
	Connections int    // open now
	Permitted   uint64 // requests and TLS connections
	Refused     uint64
	Failed      uint64 // permitted, but the other side did not answer
	Crowded     uint64 // connections over a bound
}

// Server is the gate. Its methods may be called by many goroutines.
type Server struct {
	cfg   Config
	log   *slog.Logger
	ln    *net.TCPListener
	web   *http.Server
	conns chan net.Conn // to web
	reach reach

	// What tests put in place of the kernel's answers.
	origin func(*net.TCPConn) (netip.AddrPort, error)
	dial   dialer

	life   context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	permitted, refused, failed, crowded atomic.Uint64

	mu       sync.Mutex
	open     map[*conn]bool
	count    map[sandbox.ID]int
	policies map[sandbox.ID]*policy // of sandboxes with connections
	paces    map[sandbox.ID]*rate.Limiter
	sweeping bool
	closed   bool
}

// Open listens and serves until Close. Its errors have no class: the daemon
// cannot run with a gate that was asked for and is not there.
func Open(cfg Config) (*Server, error) {
	s := newServer(cfg)
	s.origin, s.dial = originalDst, s.reach.dialTCP
	return s, s.start()
}

func newServer(cfg Config) *Server {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{
		cfg: cfg, log: cfg.Log, conns: make(chan net.Conn),
		reach: reach{pool: cfg.Pool, admit: cfg.Admit, deny: cfg.Deny, foreign: linux.Foreign},
		open:  map[*conn]bool{}, count: map[sandbox.ID]int{}, policies: map[sandbox.ID]*policy{}, paces: map[sandbox.ID]*rate.Limiter{},
	}
	s.life, s.cancel = context.WithCancel(context.Background())
	return s
}

func (s *Server) start() error {
	ln, err := net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(s.cfg.Listen))
	if err != nil {
		return fmt.Errorf("open the web gate on %s: %w", s.cfg.Listen, err)
	}
	s.ln = ln
	s.web = s.webServer()
	s.tasks.Go(func() {
		if err := s.web.Serve(handoff{s}); !errors.Is(err, http.ErrServerClosed) {
			s.log.Error("gate: serve", "err", err)
		}
	})
	s.tasks.Go(s.accept)
	return nil
}

// Port returns the port listened on.
func (s *Server) Port() uint16 {
	a, _ := s.ln.Addr().(*net.TCPAddr)
	return a.AddrPort().Port()
}

// Stats returns the counts of now.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	n := len(s.open)
	s.mu.Unlock()
	return Stats{
		Connections: n, Permitted: s.permitted.Load(), Refused: s.refused.Load(),
		Failed: s.failed.Load(), Crowded: s.crowded.Load(),
	}
}

// Close ends the gate and breaks what goes through it. Repeating it is safe.
func (s *Server) Close() error {
	s.mu.Lock()
	again := s.closed
	s.closed = true
	open := make([]*conn, 0, len(s.open))
	for c := range s.open {
		open = append(open, c)
	}
	s.mu.Unlock()
	if again {
		return nil
	}
	s.cancel()
	err := s.ln.Close()
	for _, c := range open {
		c.abort()
	}
	err = errors.Join(err, s.web.Close())
	s.tasks.Wait()
	return err
}

// accept takes connections until the listener closes.
func (s *Server) accept() {
	for {
		tcp, err := s.ln.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // no descriptors left, usually: those in use must end first
			s.log.Warn("gate: accept", "err", err)
			select {
			case <-time.After(100 * time.Millisecond):
			case <-s.life.Done():
				return
			}
			continue
		}
		s.admit(tcp)
	}
}

// admit finds out whose connection it is and gives it to who serves its port.
func (s *Server) admit(tcp *net.TCPConn) {
	client, _ := tcp.RemoteAddr().(*net.TCPAddr)
	from := client.AddrPort().Addr().Unmap()
	t, known := s.cfg.Sandboxes.Tenant(from)
	origin, err := s.origin(tcp)
	if !known || err != nil || t.Policy.HTTP == nil || origin == s.local() {
		s.log.Debug("gate: a connection that nothing led here", "from", from, "origin", origin, "err", err)
		refuseTCP(tcp)
		return
	}
	c := &conn{TCPConn: tcp, server: s, id: t.ID, from: from, origin: origin}
	if why := s.enter(c); why != "" {
		s.crowded.Add(1)
		s.tell(Event{Sandbox: t.ID, Kind: kindOf(origin.Port()), Port: origin.Port(), Origin: origin, Code: "gate_crowded", Detail: why})
		refuseTCP(tcp)
		return
	}
	if origin.Port() == portTLS {
		s.tasks.Go(func() { s.serveTLS(c) })
		return
	}
	s.tasks.Go(func() {
		select {
		case s.conns <- c:
		case <-s.life.Done():
			_ = c.Close() // the gate ends
		}
	})
}

func kindOf(port uint16) string {
	if port == portTLS {
		return KindTLS
	}
	return KindHTTP
}

func (s *Server) local() netip.AddrPort {
	a, _ := s.ln.Addr().(*net.TCPAddr)
	return netip.AddrPortFrom(a.AddrPort().Addr().Unmap(), a.AddrPort().Port())
}

// refuseTCP closes with a reset, which leaves no state behind.
func refuseTCP(tcp *net.TCPConn) {
	_ = tcp.SetLinger(0) // then it is closed in the usual way
	_ = tcp.Close()      // nothing was sent
}

// policyOf returns the policy in force for a connection, and whether it still
// belongs to the same sandbox.
func (s *Server) policyOf(c *conn) (Tenant, *policy, bool) {
	t, known := s.cfg.Sandboxes.Tenant(c.from)
	if !known || t.ID != c.id {
		return t, nil, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.policies[t.ID]
	if p == nil || !p.same(t.Policy) {
		p = compile(t.Policy, s.reach)
		if s.count[t.ID] > 0 {
			s.policies[t.ID] = p
		}
	}
	return t, p, true
}

func (s *Server) tell(e Event) {
	if e.Permitted {
		s.permitted.Add(1)
	} else {
		s.refused.Add(1)
	}
	if s.cfg.Tell != nil {
		s.cfg.Tell(e)
	}
}
