package gate

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// handoff gives the web server the connections of port 80, as a listener.
type handoff struct{ s *Server }

func (h handoff) Accept() (net.Conn, error) {
	select {
	case c := <-h.s.conns:
		return c, nil
	case <-h.s.life.Done():
		return nil, http.ErrServerClosed
	}
}

func (h handoff) Close() error   { return nil }
func (h handoff) Addr() net.Addr { return h.s.ln.Addr() }

type connKey struct{}

func (s *Server) webServer() *http.Server {
	var one http.Protocols
	one.SetHTTP1(true)
	return &http.Server{
		Handler: http.HandlerFunc(s.handle), Protocols: &one,
		ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeader,
		DisableGeneralOptionsHandler: true,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, c)
		},
		ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
}

// handle judges one request and sends it on.
func (s *Server) handle(w http.ResponseWriter, r *http.Request) {
	c, ok := r.Context().Value(connKey{}).(*conn)
	if !ok {
		panic(http.ErrAbortHandler) // no connection of ours
	}
	t, p, ok := s.policyOf(c)
	if !ok {
		panic(http.ErrAbortHandler) // the sandbox is gone
	}
	if r.Method == http.MethodConnect {
		s.handleConnect(w, r, c, t, p)
		return
	}
	a, ref := readAsk(r)
	var how ruling
	if ref == nil {
		how, ref = p.judgeRequest(a, c.origin)
	}
	if ref != nil {
		s.refuseWeb(w, c, KindHTTP, a, ref)
		return
	}
	c.begin(p, func(p *policy) *refusal { _, ref := p.judgeRequest(a, c.origin); return ref })
	defer c.end()
	s.forward(w, r, passage{s, c, t, p, a, how})
}

// overrides are headers by which some servers and frameworks take another
// method or path than the request line's.
var overrides = []string{
	"X-Http-Method-Override", "X-Http-Method", "X-Method-Override", "X-Original-Url", "X-Rewrite-Url", "X-Original-Uri",
}

// readAsk takes a request apart. net/http has refused what is no HTTP, has
// two hosts or two lengths, or more than its bounds.
func readAsk(r *http.Request) (ask, *refusal) {
	a := ask{method: r.Method, target: target{port: portHTTP}}
	switch {
	case r.ProtoMajor != 1:
		return a, &refusal{status: http.StatusHTTPVersionNotSupported, code: codeAmbiguous, detail: "the gate speaks HTTP/1.0 and HTTP/1.1"}
	case r.URL.Opaque != "" || r.URL.User != nil || r.URL.Host != "" && r.URL.Scheme != "http":
		return a, ambiguous("the request's target must be a path, or an http:// address without a user")
	case r.URL.Path == "*" && r.Method != http.MethodOptions:
		return a, ambiguous("only OPTIONS has the target *")
	}
	// net/http has put the host of an absolute address in the place of the
	// Host header, as a proxy must (RFC 9112, 3.2.2).
	t, err := parseAuthority(r.Host, portHTTP)
	if err != nil {
		return a, ambiguous("the request cannot be judged: %s", err)
	}
	a.target = t
	escaped := r.URL.EscapedPath()
	if escaped == "" {
		escaped = "/"
	}
	a.path, a.pathErr = plainPath(escaped)
	for _, name := range overrides {
		for given := range r.Header {
			if strings.EqualFold(strings.ReplaceAll(given, "_", "-"), name) {
				a.override = given
			}
		}
	}
	return a, nil
}

// problem is the body of a refusal (RFC 9457), in the form of the daemon's
// own API.
type problem struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail"`
	Code   string `json:"code"`
}

// refuseWeb answers a request that does not pass.
func (s *Server) refuseWeb(w http.ResponseWriter, c *conn, kind string, a ask, ref *refusal) {
	s.tell(Event{
		Sandbox: c.id, Kind: kind, Host: a.target.host, Port: a.target.port, Method: clip(a.method, 32), Path: clip(a.path, 256),
		Origin: c.origin, Rule: ref.rule, Code: ref.code, Detail: ref.detail,
	})
	writeRefusal(w, ref)
}

func writeRefusal(w http.ResponseWriter, ref *refusal) {
	body, err := json.Marshal(problem{
		Type: "urn:sandboxd:problem:" + ref.code, Title: http.StatusText(ref.status), Status: ref.status,
		Detail: "web gate: " + ref.detail, Code: ref.code,
	})
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.Header().Set("Cache-Control", "no-store")
	if ref.status == http.StatusTooManyRequests {
		w.Header().Set("Retry-After", "1")
	}
	w.WriteHeader(ref.status)
	_, _ = w.Write(append(body, '\n')) // the client may be gone
}

// handleConnect serves CONNECT, with which programs ask a proxy for TLS. The
// gate is a proxy on port 80 of any address.
func (s *Server) handleConnect(w http.ResponseWriter, r *http.Request, c *conn, t Tenant, p *policy) {
	a := ask{method: r.Method}
	to, err := parseAuthority(r.Host, 0)
	switch {
	case err != nil:
		s.refuseWeb(w, c, KindConnect, a, ambiguous("the request cannot be judged: %s", err))
		return
	case to.port == 0 || to.port == portHTTP:
		s.refuseWeb(w, c, KindConnect, a, ambiguous("CONNECT takes a host and a port other than 80: send plain HTTP as it is"))
		return
	}
	a.target = to
	judge := func(p *policy) (grant, *refusal) { return p.judge(to, netipNone) }
	g, ref := judge(p)
	if ref != nil {
		s.refuseWeb(w, c, KindConnect, a, ref)
		return
	}
	c.begin(p, func(p *policy) *refusal { _, ref := judge(p); return ref })
	defer c.end()
	up, ref := s.connect(r.Context(), t, p, g, to, netipNone.Addr())
	if ref != nil {
		s.failWeb(w, passage{s, c, t, p, a, ruling{grant: g, port: to.port}}, KindConnect, ref)
		return
	}
	defer func() { _ = up.Close() }() // both sides are done
	raw, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler) // nothing to be told on it
	}
	defer func() { _ = raw.Close() }()                // as above
	_ = raw.SetDeadline(time.Now().Add(helloTimeout)) // a broken connection shows at the next use
	if _, err := raw.Write([]byte("HTTP/1.1 200 Connection established\r\n\r\n")); err != nil {
		return
	}
	var first []byte
	if to.port == portTLS {
		h, err := readHello(r.Context(), buffered)
		if first = h.raw; err != nil {
			ref = ambiguous("it is no TLS that can be judged: %s", err)
		} else if h.name != "" && h.name != to.host {
			ref = ambiguous("the hello names %s, and the proxy was asked for %s", h.name, to.host)
		} else {
			_, ref = p.judgeTLS(h, to, netipNone)
		}
		if ref != nil {
			s.refuseTLS(c, to, KindConnect, ref, len(first) > 0 && first[0] == 22)
			return
		}
	}
	rest, err := buffered.Peek(buffered.Reader.Buffered())
	if err != nil {
		return
	}
	_ = raw.SetDeadline(time.Time{}) // as above
	s.tell(Event{Sandbox: c.id, Kind: KindConnect, Permitted: true, Host: to.host, Port: to.port, Origin: c.origin, Rule: g.rule})
	if _, err := up.Write(append(first, rest...)); err == nil {
		splice(c.TCPConn, up)
	}
}

// urlOf returns where a permitted request is sent.
func urlOf(in *url.URL, scheme, host string) *url.URL {
	out := *in
	out.Scheme, out.Host, out.User, out.Fragment, out.RawFragment = scheme, host, nil, "", ""
	return &out
}
