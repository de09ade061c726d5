package ingress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/duplex"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Bounds of the HTTP listener. A body, an answer and an upgraded connection
// may take as long as they like.
const (
	headerTimeout = 10 * time.Second
	clientIdle    = 2 * time.Minute
	maxHeader     = 64 << 10
	maxClients    = 8192
	innerIdle     = 10 * time.Second // an unused connection into a sandbox; it keeps the sandbox from being idle
	innerKept     = 16               // of them, for each port of a sandbox
	closeGrace    = 2 * time.Second
)

// router passes HTTP requests on by their host names.
type router struct {
	in        *Ingress
	transport *http.Transport
	proxy     *httputil.ReverseProxy

	mu      sync.Mutex
	servers []*http.Server // guarded by mu
	told    time.Time      // guarded by mu; when a refusal was logged last
}

func newRouter(in *Ingress) *router {
	r := &router{in: in}
	r.transport = &http.Transport{
		// The address is one we made: the whole id of a sandbox, and a port.
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			id, port, err := net.SplitHostPort(address)
			if err != nil {
				return nil, err
			}
			n, err := strconv.Atoi(port)
			if err != nil {
				return nil, err
			}
			return in.cfg.Sandboxes.DialPort(ctx, id, n)
		},
		DisableCompression: true, MaxIdleConnsPerHost: innerKept, IdleConnTimeout: innerIdle, MaxResponseHeaderBytes: 1 << 20,
		ExpectContinueTimeout: time.Second, Protocols: new(http.Protocols),
	}
	r.transport.Protocols.SetHTTP1(true)
	r.proxy = &httputil.ReverseProxy{
		Transport: r.transport, FlushInterval: -1, Rewrite: rewrite, ErrorHandler: r.innerError,
		ErrorLog: slog.NewLogLogger(in.log.Handler(), slog.LevelDebug), BufferPool: &buffers{},
	}
	return r
}

// buffers lends the proxy what it copies with.
type buffers struct{ pool sync.Pool }

func (b *buffers) Get() []byte {
	if p, ok := b.pool.Get().(*[]byte); ok {
		return *p
	}
	return make([]byte, 32<<10)
}

func (b *buffers) Put(p []byte) { b.pool.Put(&p) }

// passed is what ServeHTTP tells rewrite about a request.
type passed struct {
	to      string      // id and port
	headers http.Header // without tokens
	trusted bool        // the client is a proxy of ours
}

type passedKey struct{}

// rewrite makes the request to the sandbox of the client's. The Host stays.
func rewrite(p *httputil.ProxyRequest) {
	to, ok := p.In.Context().Value(passedKey{}).(passed)
	if !ok {
		return // cannot be: ServeHTTP sets it
	}
	p.Out.URL.Scheme, p.Out.URL.Host, p.Out.Host = "http", to.to, p.In.Host
	for _, h := range []string{"Authorization", "Cookie"} {
		p.Out.Header.Del(h)
		for _, v := range to.headers.Values(h) {
			p.Out.Header.Add(h, v)
		}
	}
	p.Out.Header.Del(tokenHeader)
	for name := range p.Out.Header { // many servers read an underscore as a dash
		if plain := strings.ReplaceAll(strings.ToLower(name), "_", "-"); strings.HasPrefix(plain, "x-forwarded-") && (!to.trusted || strings.Contains(name, "_")) {
			delete(p.Out.Header, name)
		}
	}
	p.SetXForwarded()
	if !to.trusted {
		return
	}
	// What the client says of those before it holds; it has no address itself.
	if before := p.In.Header.Values("X-Forwarded-For"); len(before) > 0 {
		p.Out.Header["X-Forwarded-For"] = before
	}
	if proto := p.In.Header.Get("X-Forwarded-Proto"); proto == "http" || proto == "https" {
		p.Out.Header.Set("X-Forwarded-Proto", proto)
	}
}

// Serve answers HTTP requests on ln until Close, each by the sandbox its host
// name means. A listener on a unix socket is taken for a proxy of ours, whose
// X-Forwarded-For and X-Forwarded-Proto are passed on; what others say there
// is replaced.
func (in *Ingress) Serve(ln net.Listener) error {
	_, isUnix := ln.(*net.UnixListener)
	srv := &http.Server{
		Handler:           http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { in.route.serve(w, r, isUnix) }),
		ReadHeaderTimeout: headerTimeout, IdleTimeout: clientIdle, MaxHeaderBytes: maxHeader,
		// Upgraded connections end with it.
		BaseContext: func(net.Listener) context.Context { return in.life },
		ErrorLog:    slog.NewLogLogger(in.log.Handler(), slog.LevelDebug),
		Protocols:   new(http.Protocols),
	}
	srv.Protocols.SetHTTP1(true)
	in.route.mu.Lock()
	in.route.servers = append(in.route.servers, srv)
	in.route.mu.Unlock()
	if in.life.Err() != nil {
		ln.Close()
		return nil
	}
	err := srv.Serve(&bounded{Listener: ln, left: make(chan struct{}, maxClients)})
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("serve host names on %s: %w", ln.Addr(), err)
}

// close ends the servers and what they hold open into sandboxes.
func (r *router) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), closeGrace)
	defer cancel()
	for _, s := range r.servers {
		if s.Shutdown(ctx) != nil {
			_ = s.Close() // nobody could be told more
		}
	}
	r.transport.CloseIdleConnections()
}

// bounded takes a bounded number of connections; the others are reset.
type bounded struct {
	net.Listener
	left chan struct{}
}

// Accept waits for a connection there is room for.
func (b *bounded) Accept() (net.Conn, error) {
	for {
		c, err := b.Listener.Accept()
		if err != nil {
			return nil, err
		}
		select {
		case b.left <- struct{}{}:
			return &freeing{Conn: c, free: sync.OnceFunc(func() { <-b.left })}, nil
		default:
			duplex.Reset(c)
		}
	}
}

type freeing struct {
	net.Conn
	free func()
}

// Close closes the connection and makes room; it may be repeated.
func (f *freeing) Close() error {
	f.free()
	return f.Conn.Close()
}

// CloseWrite passes an end on, where the connection can.
func (f *freeing) CloseWrite() error {
	if h, ok := f.Conn.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return f.Close()
}

// serve answers one request.
func (r *router) serve(w http.ResponseWriter, req *http.Request, trusted bool) {
	t, ok := parseHost(req.Host, r.in.cfg.Domain)
	if !ok {
		answer(w, req, problem(http.StatusNotFound, "unknown_host", fmt.Sprintf("%.100q names no port of a sandbox: ask for <port>-<sandbox>.%s", req.Host, r.in.cfg.Domain)))
		return
	}
	sb, err := r.in.cfg.Sandboxes.Sandbox(req.Context(), t.ref)
	if err == nil && string(sb.ID) != t.ref && sb.Spec.Name != t.ref { // the beginning of an id
		err = sandbox.Errorf(sandbox.ErrNotFound, "sandbox_not_found", "no sandbox %q", t.ref)
	}
	switch {
	case errors.Is(err, sandbox.ErrNotFound), err == nil && sb.Status.Terminal():
		r.refuse(w, req, sb.ID) // who brings no token is not told what there is
		return
	case err != nil:
		r.fail(w, req, err)
		return
	}
	headers := req.Header.Clone()
	stripOwn(headers)
	if !r.admit(w, req, sb, t.port, headers) {
		return
	}
	if sb.Status != sandbox.StatusRunning {
		answer(w, req, problem(http.StatusServiceUnavailable, "sandbox_"+string(sb.Status), fmt.Sprintf("sandbox %s is %s: try again once it runs", t.ref, sb.Status)))
		return
	}
	to := passed{to: net.JoinHostPort(string(sb.ID), strconv.Itoa(t.port)), headers: headers, trusted: trusted}
	r.proxy.ServeHTTP(w, req.WithContext(context.WithValue(req.Context(), passedKey{}, to)))
}

// admit checks the token, where one is needed, and answers where the request
// goes no further. It takes tokens out of headers, and out of the request's
// URL.
func (r *router) admit(w http.ResponseWriter, req *http.Request, sb sandbox.Sandbox, port int, headers http.Header) bool {
	hash, public := r.in.access(sb.ID, port)
	// A token that is right is taken out of requests to public ports, too.
	brought := allowed(req.Header, hash, headers)
	token, clean, inQuery := queryToken(req.URL)
	if inQuery {
		if !public && !matches(token, hash) {
			r.refuse(w, req, sb.ID)
			return false
		}
		req.URL = clean
		// An upgrade cannot be sent elsewhere: the next request of a browser's
		// page has the cookie, others bring the token each time.
		plain := req.Header.Get("Upgrade") == "" && (req.Method == http.MethodGet || req.Method == http.MethodHead)
		if plain && matches(token, hash) {
			enter(w, req, token)
			return false
		}
		return true
	}
	if !brought && !public {
		r.refuse(w, req, sb.ID)
		return false
	}
	return true
}

// access returns the hash of a sandbox's token, and whether a port is open
// without one.
func (in *Ingress) access(id sandbox.ID, port int) (hash []byte, public bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	for _, l := range in.ports {
		p := l.port
		if p.Sandbox == id && p.Public && p.Protocol == sandbox.ProtocolTCP && int(p.Port) == port {
			public = true
		}
	}
	return in.tokens[id], public
}

// refuse says that a token is needed, in the same words whatever was wrong.
func (r *router) refuse(w http.ResponseWriter, req *http.Request, id sandbox.ID) {
	r.mu.Lock()
	tell := time.Since(r.told) >= tellEvery
	if tell {
		r.told = time.Now()
	}
	r.mu.Unlock()
	if tell {
		r.in.log.Warn("requests without a sandbox's token are refused", "sandbox", id, "client", req.RemoteAddr)
	}
	w.Header().Set("WWW-Authenticate", `Bearer realm="sandbox"`)
	answer(w, req, problem(http.StatusUnauthorized, "token_required",
		"nothing opens here without the token of a living sandbox: send it as "+tokenHeader+" or as a bearer token, or open the page once with ?"+tokenQuery+"=TOKEN; check the id or name, too"))
}

// enter gives a browser the token as a cookie of this host name alone, and
// sends it on to the URL without it.
func enter(w http.ResponseWriter, req *http.Request, token string) {
	http.SetCookie(w, &http.Cookie{
		Name: tokenCookie, Value: token, Path: "/", HttpOnly: true, SameSite: http.SameSiteLaxMode,
		Secure: req.Header.Get("X-Forwarded-Proto") == "https",
	})
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Referrer-Policy", "no-referrer")
	to := *req.URL
	to.Scheme, to.Host, to.User = "", "", nil
	to.Path = "/" + strings.TrimLeft(to.Path, "/\\") // two slashes would name another host
	if to.RawPath != "" {
		to.RawPath = "/" + strings.TrimLeft(to.RawPath, "/\\")
	}
	w.Header().Set("Location", to.String())
	w.WriteHeader(http.StatusSeeOther)
}

// innerError answers where the sandbox did not.
func (r *router) innerError(w http.ResponseWriter, req *http.Request, err error) { r.fail(w, req, err) }

func (r *router) fail(w http.ResponseWriter, req *http.Request, err error) {
	if req.Context().Err() != nil { // the client is gone, or we are going
		answer(w, req, problem(http.StatusServiceUnavailable, "shutting_down", "the daemon is shutting down: try again in a moment"))
		return
	}
	r.in.log.Debug("a host name leads nowhere now", "host", req.Host, "err", err)
	switch code := sandbox.CodeOf(err); {
	case code == "port_closed":
		answer(w, req, problem(http.StatusBadGateway, code, err.Error()))
	case errors.Is(err, sandbox.ErrConflict):
		answer(w, req, problem(http.StatusServiceUnavailable, code, err.Error()))
	case errors.Is(err, sandbox.ErrUnavailable):
		answer(w, req, problem(http.StatusGatewayTimeout, code, err.Error()))
	default:
		answer(w, req, problem(http.StatusBadGateway, "bad_answer", "the server in the sandbox broke off, or did not speak HTTP"))
	}
}

// Admits judges what a request brings for a port of a sandbox as host names do:
// ok where it has the sandbox's token or the port is published for everybody.
// asks says whether the sandbox has a token. clean are the headers without what
// only this package reads.
func (in *Ingress) Admits(h http.Header, id sandbox.ID, port int) (clean http.Header, ok, asks bool) {
	hash, public := in.access(id, port)
	clean = h.Clone()
	stripOwn(clean)
	brought := allowed(h, hash, clean)
	clean.Del(tokenHeader)
	return clean, brought || public, hash != nil
}
