package e2b

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	innerIdle = 10 * time.Second // an unused connection into a sandbox; it keeps the sandbox from being idle
	innerKept = 16               // of them, for each port of a sandbox
)

// target is where toPort sends a request.
type target struct {
	box  sandbox.ID
	port int
	host string          // which Host the server there sees; empty: the client's
	held context.Context //nolint:containedctx // of the request: what dials for it outlives that
}

type targetKey struct{}

// newProxy makes what passes HTTP on into sandboxes, upgraded connections too.
func (s *Server) newProxy() *httputil.ReverseProxy {
	t := &http.Transport{
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
			if to, ok := ctx.Value(targetKey{}).(target); ok && to.held.Err() != nil {
				return nil, context.Cause(to.held)
			}
			return awake{s.m, s}.DialPort(ctx, id, n)
		},
		DisableCompression: true, MaxIdleConnsPerHost: innerKept, IdleConnTimeout: innerIdle, MaxResponseHeaderBytes: 1 << 20,
		ExpectContinueTimeout: time.Second, Protocols: new(http.Protocols),
	}
	t.Protocols.SetHTTP1(true)
	return &httputil.ReverseProxy{
		Transport: t, FlushInterval: -1, Rewrite: rewrite, ErrorHandler: s.innerError,
		ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug), BufferPool: &buffers{},
	}
}

// buffers lends the proxy what it copies with.
type buffers struct{ pool sync.Pool }

// Get lends one.
func (b *buffers) Get() []byte {
	if p, ok := b.pool.Get().(*[]byte); ok {
		return *p
	}
	return make([]byte, 32<<10)
}

// Put takes it back.
func (b *buffers) Put(p []byte) { b.pool.Put(&p) }

// rewrite makes the request to the sandbox of the client's. The Host stays;
// what is only for us does not go on.
func rewrite(p *httputil.ProxyRequest) {
	to, ok := p.In.Context().Value(targetKey{}).(target)
	if !ok {
		return // cannot be: toPort sets it
	}
	p.Out.URL.Scheme, p.Out.URL.Host, p.Out.Host = "http", net.JoinHostPort(string(to.box), strconv.Itoa(to.port)), p.In.Host
	if to.host != "" {
		p.Out.Host = to.host
	}
	for _, name := range []string{sandboxHeader, portHeader, trafficHeader, tokenHeader, keyHeader} {
		p.Out.Header.Del(name)
	}
	p.SetXForwarded()
}

// toPort passes a request on to a server in a sandbox. Ports of sandboxes that
// were made by E2B's calls are open, unless they ask for a token; those of
// others are there for who may pass by their host names, too.
func (s *Server) toPort(w http.ResponseWriter, r *http.Request, id string, port int) {
	box, err := s.lookUp(r.Context(), id)
	if err != nil {
		s.refused(w, r, func() { noSandbox(w, id) })
		return
	}
	ours := box.Spec.Labels[noteLabel] != ""
	headers, admitted, asks := s.admits(r.Header, box.ID, port)
	private := noteOf(box.Spec.Labels).Private
	traffic := func() bool { return same(r.Header.Get(trafficHeader), s.trafficTokenOf(box.ID)) }
	wrong := func() {
		s.refused(w, r, func() {
			answer(w, http.StatusForbidden, map[string]any{
				"sandboxId": box.ID, "code": http.StatusForbidden,
				"message": "this sandbox asks for its traffic access token: send it as " + trafficHeader,
			})
		})
	}
	switch {
	case admitted, ours && private && traffic(), ours && !private && !asks:
	case ours && private:
		wrong()
		return
	default: // to who may not pass it does not exist
		s.refused(w, r, func() { noSandbox(w, id) })
		return
	}
	ctx, err := s.callers.Guest(r, box)
	if err != nil {
		s.refused(w, r, func() { noSandbox(w, id) })
		return
	}
	ctx, end := s.hold(ctx, w, box.ID)
	defer end()
	if !admitted && private && !traffic() { // changed before the hold was there to be cut
		wrong()
		return
	}
	box, ok := s.roused(ctx, w, box)
	if !ok {
		return
	}
	host := strings.ReplaceAll(noteOf(box.Spec.Labels).Host, "${PORT}", strconv.Itoa(port))
	ctx = context.WithValue(ctx, targetKey{}, target{box.ID, port, host, ctx})
	r = r.WithContext(ctx)
	r.Header = headers
	s.proxy.ServeHTTP(w, r)
}

// innerError answers where the sandbox did not.
func (s *Server) innerError(w http.ResponseWriter, r *http.Request, err error) {
	to, _ := r.Context().Value(targetKey{}).(target)
	message := "The sandbox does not answer"
	switch {
	case sandbox.CodeOf(err) == "port_closed":
		message = "The sandbox is running but port is not open"
	case errors.Is(err, sandbox.ErrConflict), errors.Is(err, sandbox.ErrNotFound):
		noSandbox(w, string(to.box))
		return
	}
	s.log.Debug("a port of a sandbox does not answer", "sandbox", to.box, "port", to.port, "err", err)
	answer(w, http.StatusBadGateway, map[string]any{"sandboxId": to.box, "message": message, "port": to.port, "code": http.StatusBadGateway})
}
