package gate

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Addresses of the tests' internet. They are public, and mapped to servers on
// loopback by the dialer that stands in for the kernel's routes.
var (
	webAddr   = netip.MustParseAddr("93.184.216.34")
	otherAddr = netip.MustParseAddr("93.184.216.35")
)

// world is a gate between a sandbox on loopback and servers on loopback.
type world struct {
	t    *testing.T
	gate *Server

	mu      sync.Mutex
	tenant  Tenant
	gone    bool
	names   map[string][]netip.Addr
	asked   []string // of names
	secrets map[string]sandbox.Secret
	values  map[string]string
	routes  map[netip.AddrPort]string
	dials   []netip.AddrPort
	origin  netip.AddrPort
	events  []Event
}

func newWorld(t *testing.T, p sandbox.NetworkPolicy) *world {
	t.Helper()
	if p.HTTP == nil {
		p.HTTP = &sandbox.HTTPGate{}
	}
	if err := p.Validate(); err != nil {
		t.Fatal(err)
	}
	w := &world{
		t: t, tenant: Tenant{ID: "sbaaaaaaaaaaaa", Policy: p}, names: map[string][]netip.Addr{}, values: map[string]string{},
		secrets: map[string]sandbox.Secret{}, routes: map[netip.AddrPort]string{}, origin: netip.AddrPortFrom(webAddr, portHTTP),
	}
	s := newServer(Config{
		Listen: netip.MustParseAddrPort("127.0.0.1:0"), Sandboxes: w, Names: w, Secrets: w, Pool: netip.MustParsePrefix("10.213.0.0/16"),
		Admit: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")}, Tell: w.tell,
	})
	s.origin = func(*net.TCPConn) (netip.AddrPort, error) { w.mu.Lock(); defer w.mu.Unlock(); return w.origin, nil }
	s.dial = w.dial
	w.gate = s
	if err := s.start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

func (w *world) Tenant(netip.Addr) (Tenant, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.tenant, !w.gone
}

func (w *world) Lookup(_ context.Context, _ Tenant, name string) ([]netip.Addr, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked = append(w.asked, name)
	if a, ok := w.names[name]; ok {
		return a, nil
	}
	return nil, sandbox.Errorf(sandbox.ErrNotFound, "name_not_found", "no such name")
}

func (w *world) SecretValue(_ context.Context, name string) (sandbox.Secret, string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if v, ok := w.values[name]; ok {
		return w.secrets[name], v, nil
	}
	return sandbox.Secret{}, "", sandbox.Errorf(sandbox.ErrNotFound, "secret_not_found", "no secret")
}

func (w *world) tell(e Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, e)
}

func (w *world) dial(ctx context.Context, dest netip.AddrPort) (*net.TCPConn, error) {
	w.mu.Lock()
	to, ok := w.routes[dest]
	w.dials = append(w.dials, dest)
	w.mu.Unlock()
	if !ok {
		return nil, errors.New("no route in the tests' internet")
	}
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", to)
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// set changes what the gate is told.
func (w *world) set(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

func (w *world) policy(f func(*sandbox.NetworkPolicy)) {
	w.t.Helper()
	p := w.tenant.Policy.Clone()
	f(&p)
	if err := p.Validate(); err != nil {
		w.t.Fatal(err)
	}
	w.set(func() { w.tenant.Policy = p })
}

// serve puts a server at an address of the tests' internet under a name.
func (w *world) serve(name string, addr netip.Addr, port uint16, listener string) {
	w.set(func() {
		w.names[name] = []netip.Addr{addr}
		w.routes[netip.AddrPortFrom(addr, port)] = listener
	})
}

// dialed returns what the gate dialed so far.
func (w *world) dialed() []netip.AddrPort {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.dials)
}

// last returns the newest event.
func (w *world) last() Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.events) == 0 {
		return Event{}
	}
	return w.events[len(w.events)-1]
}

// connect is a connection of the sandbox's to origin.
func (w *world) connect(origin netip.AddrPort) *net.TCPConn {
	w.t.Helper()
	c, err := w.tryConnect(origin)
	if err != nil {
		w.t.Fatal(err)
	}
	return c
}

// tryConnect can meet the reset of a connection that nobody wants.
func (w *world) tryConnect(origin netip.AddrPort) (*net.TCPConn, error) {
	w.set(func() { w.origin = origin })
	c, err := net.Dial("tcp", w.gate.ln.Addr().String())
	if err != nil {
		return nil, err
	}
	w.t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	return c.(*net.TCPConn), nil
}

// raw sends bytes to port 80 of webAddr and returns the answers to them.
func (w *world) raw(request string) []answer { w.t.Helper(); return w.rawN(request, 1) }

// rawN ends its side after so many answers, without those that tell of another
// (100 Continue, which may come twice); net/http takes it for the end of everything.
func (w *world) rawN(request string, answers int) []answer {
	w.t.Helper()
	c := w.connect(netip.AddrPortFrom(webAddr, portHTTP))
	if _, err := io.WriteString(c, request); err != nil {
		w.t.Fatal(err)
	}
	var out []answer
	final := 0
	for r := bufio.NewReader(c); ; {
		if final >= answers {
			_ = c.CloseWrite()
		}
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			return out
		}
		b, _ := io.ReadAll(resp.Body)
		out = append(out, answer{resp, string(b)})
		if resp.StatusCode >= http.StatusOK {
			final++
		}
	}
}

type answer struct {
	*http.Response
	body string
}

// code returns the code of a refusal.
func (a answer) code() string {
	var p problem
	_ = json.Unmarshal([]byte(a.body), &p)
	return p.Code
}

// get sends one request without surprises.
func (w *world) get(host, path string) answer {
	w.t.Helper()
	got := w.raw("GET " + path + " HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n")
	if len(got) != 1 {
		w.t.Fatalf("%s%s: %d answers", host, path, len(got))
	}
	return got[0]
}

// seen is a server that remembers what it was sent, byte for byte.
type seen struct {
	*httptest.Server
	mu   sync.Mutex
	reqs []*http.Request
	body []string
	wire bytes.Buffer
}

func newSeen(t *testing.T, secure bool, h http.HandlerFunc) *seen {
	t.Helper()
	s := &seen{}
	s.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") == "" {
			b, _ := io.ReadAll(r.Body)
			s.mu.Lock()
			s.reqs, s.body = append(s.reqs, r), append(s.body, string(b))
			s.mu.Unlock()
		}
		h(w, r)
	}))
	if secure {
		s.StartTLS()
	} else {
		s.Listener = tapped{s.Listener, s}
		s.Start()
	}
	t.Cleanup(s.Close)
	return s
}

type tapped struct {
	net.Listener
	s *seen
}

func (l tapped) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return tap{c, l.s}, nil
}

type tap struct {
	net.Conn
	s *seen
}

func (c tap) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.s.wire.Write(b[:n])
	return n, err
}

func (s *seen) addr() string { return s.Listener.Addr().String() }

func (s *seen) requests() []*http.Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.reqs)
}

func hello200(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "hello %s", r.Host) }

// roots are the authorities of httptest's certificates (for example.com).
func roots(s *seen) *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(s.Certificate())
	return p
}

func allow(rules ...string) sandbox.NetworkPolicy {
	return sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Allow: rules}
}

// tlsDial is the sandbox's TLS client.
func (w *world) tlsDial(origin netip.AddrPort, name string, pool *x509.CertPool) (*tls.Conn, error) {
	w.t.Helper()
	c := tls.Client(w.connect(origin), &tls.Config{ServerName: name, RootCAs: pool, InsecureSkipVerify: name == ""})
	return c, c.Handshake()
}
