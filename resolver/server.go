package resolver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sync/singleflight"
	"golang.org/x/time/rate"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Sandboxes is what the resolver asks about sandboxes. All of it is safe for
// concurrent use.
type Sandboxes interface {
	// Tenant returns who has an address now.
	Tenant(addr netip.Addr) (Tenant, bool)
	// Peer returns the address of another member of a sandbox's group, by
	// name or id.
	Peer(id sandbox.ID, name string) (netip.Addr, bool)
	// Pin opens addresses to a sandbox for a time, with the ports of the
	// allow rules that mean the name; in force on return.
	Pin(ctx context.Context, id sandbox.ID, name string, addrs []netip.Addr, ttl time.Duration) error
}

// Tenant is a sandbox as the network knows it.
type Tenant struct {
	ID     sandbox.ID
	Name   string
	Policy sandbox.NetworkPolicy
}

// Config is what a Server works with.
type Config struct {
	// Listen is where to answer, by UDP and TCP on the same port; port 0
	// takes any.
	Listen netip.AddrPort
	// Upstreams are asked in this order. Empty means those of ResolvConf,
	// which is then followed.
	Upstreams []netip.AddrPort
	// ResolvConf is the host's, unless set.
	ResolvConf string
	// Pool is where sandboxes have their addresses.
	Pool netip.Prefix
	// Admit are the private ranges that allow rules may name, Deny the ranges
	// nobody reaches.
	Admit, Deny []netip.Prefix
	Sandboxes   Sandboxes
	// Tell is called for each name refused and, at a limited rate, for names
	// permitted; nil for nobody. It must not block.
	Tell func(NameEvent)
	Log  *slog.Logger
}

// Verdict is what became of a question.
type Verdict string

// The verdicts.
const (
	Allowed Verdict = "allowed"
	Denied  Verdict = "denied"
)

// NameEvent is one question of a sandbox and its answer, for the audit.
type NameEvent struct {
	Sandbox sandbox.ID
	Name    string // in lower case; of a malformed one, what it looked like
	Type    string // A, TXT, …
	Verdict Verdict
	Rule    string       // that decided; empty where none did
	Reason  string       // for people, of a refusal
	Addrs   []netip.Addr // in the answer
}

// Stats counts since Open.
type Stats struct {
	Queries        uint64 // that reached the resolver from a sandbox
	Denied         uint64 // refused by policy
	Limited        uint64 // refused or dropped for their rate
	CacheHits      uint64
	CacheMisses    uint64
	UpstreamErrors uint64 // tries that failed
	Strangers      uint64 // from addresses of no sandbox
}

type counters struct {
	queries, denied, limited, hits, misses, upstreamErrors, strangers atomic.Uint64
}

// Bounds of the whole server.
const (
	totalInFlight  = 4096 // questions put upstream, a socket each
	totalPinning   = 2    // changes of the rules
	totalConns     = 1024 // TCP connections
	strangerRate   = 50   // answers a second to nobody's addresses
	warnEvery      = 10 * time.Second
	warnBurst      = 10
	tcpQueries     = 128 // on one connection
	tcpIdle        = 10 * time.Second
	tcpFirst       = 5 * time.Second
	maxQuestion    = 4096 // bytes
	portTries      = 20
	acceptAfterErr = 100 * time.Millisecond
)

// closeTimeout bounds the wait for what is in flight; tests set it.
var closeTimeout = 2 * time.Second

// Server answers the questions of sandboxes. Its methods are safe for
// concurrent use.
type Server struct {
	cfg       Config
	ctx       context.Context // ends with Close: of questions put upstream
	cancel    context.CancelFunc
	now       func() time.Time
	reach     reach
	hostConf  *hostConf
	upstreams *upstreams
	cache     *cache
	flights   singleflight.Group
	clients   clients
	inFlight  chan struct{}
	pinning   chan struct{}
	strangers *rate.Limiter
	warnings  *rate.Limiter
	stats     counters
	port      uint16
	servers   []*dns.Server
}

// newServer makes a server that does not listen yet.
func newServer(cfg Config) *Server {
	if cfg.ResolvConf == "" {
		cfg.ResolvConf = ResolvConf
	}
	if cfg.Tell == nil {
		cfg.Tell = func(NameEvent) {}
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	own := &hostAddresses{}
	s := &Server{
		cfg: cfg, now: time.Now,
		reach:     reach{pool: cfg.Pool, admit: cfg.Admit, deny: cfg.Deny, own: own.get},
		hostConf:  &hostConf{path: cfg.ResolvConf},
		upstreams: &upstreams{health: map[netip.AddrPort]*health{}},
		cache:     newCache(cacheBytes),
		clients:   clients{byID: map[sandbox.ID]*client{}},
		inFlight:  make(chan struct{}, totalInFlight),
		pinning:   make(chan struct{}, totalPinning),
		strangers: rate.NewLimiter(strangerRate, strangerRate),
		warnings:  rate.NewLimiter(rate.Every(warnEvery), warnBurst),
	}
	s.upstreams.failed = func() { s.stats.upstreamErrors.Add(1) }
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// Open listens and answers until Close.
func Open(cfg Config) (*Server, error) {
	if cfg.Sandboxes == nil || !cfg.Listen.Addr().Is4() {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_resolver", "resolver at %s: it needs an IPv4 address to listen on and somebody to ask about sandboxes", cfg.Listen)
	}
	s := newServer(cfg)
	udp, tcp, err := listen(cfg.Listen)
	if err != nil {
		s.cancel()
		return nil, fmt.Errorf("open the resolver of sandboxes: %w", err)
	}
	s.port = uint16(tcp.Addr().(*net.TCPAddr).Port) //nolint:errcheck // a TCP listener's
	started := make(chan struct{}, 4)               // of each server its beginning and its end
	s.servers = []*dns.Server{s.transport(started), s.transport(started)}
	s.servers[0].PacketConn = udp
	s.servers[1].Listener = &limitedListener{TCPListener: tcp, s: s}
	for _, one := range s.servers {
		go func() {
			if err := one.ActivateAndServe(); err != nil && s.ctx.Err() == nil {
				cfg.Log.Error("the resolver of sandboxes ended: names are not answered until the daemon is restarted", "err", err)
			}
			started <- struct{}{}
		}()
	}
	for range s.servers {
		<-started
	}
	return s, nil
}

// transport is a server of the library's without its socket.
func (s *Server) transport(started chan<- struct{}) *dns.Server {
	return &dns.Server{
		Handler: s, MsgAcceptFunc: accept, UDPSize: maxQuestion, MaxTCPQueries: tcpQueries,
		ReadTimeout: tcpFirst, IdleTimeout: func() time.Duration { return tcpIdle },
		DecorateReader:    func(r dns.Reader) dns.Reader { return &guard{Reader: r, s: s} },
		NotifyStartedFunc: func() { started <- struct{}{} },
	}
}

// listen takes one port for both transports.
func listen(at netip.AddrPort) (udp *net.UDPConn, tcp *net.TCPListener, err error) {
	for range portTries {
		tcp, err = net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(at))
		if err != nil {
			return nil, nil, err
		}
		port := uint16(tcp.Addr().(*net.TCPAddr).Port) //nolint:errcheck // a TCP listener's
		udp, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(at.Addr(), port)))
		if err == nil {
			return udp, tcp, nil
		}
		err = errors.Join(err, tcp.Close())
		if at.Port() != 0 {
			break
		}
	}
	return nil, nil, err
}

// Port is where the server listens.
func (s *Server) Port() uint16 { return s.port }

// Stats returns the counters.
func (s *Server) Stats() Stats {
	c := &s.stats
	return Stats{
		Queries: c.queries.Load(), Denied: c.denied.Load(), Limited: c.limited.Load(),
		CacheHits: c.hits.Load(), CacheMisses: c.misses.Load(),
		UpstreamErrors: c.upstreamErrors.Load(), Strangers: c.strangers.Load(),
	}
}

// Close ends the server: what is being asked upstream is given up. Calling it
// again does nothing.
func (s *Server) Close() error {
	if s.ctx.Err() != nil {
		return nil
	}
	s.cancel()
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	var errs []error
	for _, one := range s.servers {
		if err := one.ShutdownContext(ctx); err != nil && !errors.Is(err, context.DeadlineExceeded) {
			errs = append(errs, fmt.Errorf("close the resolver of sandboxes: %w", err))
		}
	}
	return errors.Join(errs...)
}

// Upstreams returns whom the server asks now for sandboxes whose policy names
// nobody.
func (s *Server) Upstreams() []netip.AddrPort {
	if len(s.cfg.Upstreams) > 0 {
		return s.cfg.Upstreams
	}
	return s.hostConf.get()
}

// upstreamsFor returns whom to ask for a sandbox: those of its policy that may
// be asked, else the daemon's.
func (s *Server) upstreamsFor(p *policy) []netip.AddrPort {
	if len(p.source.DNS) == 0 {
		return s.Upstreams()
	}
	var out []netip.AddrPort
	for _, addr := range p.source.DNS {
		if own, ok := s.configured(addr); ok {
			out = append(out, own)
		} else if s.reach.permitsUpstream(addr) {
			out = append(out, netip.AddrPortFrom(addr, port))
		}
	}
	return out
}

// configured returns the operator's resolver with this address.
func (s *Server) configured(addr netip.Addr) (netip.AddrPort, bool) {
	for _, u := range s.cfg.Upstreams {
		if u.Addr() == addr {
			return u, true
		}
	}
	return netip.AddrPort{}, false
}
