package gate

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// netipNone stands for a destination that the client did not dial.
var netipNone netip.AddrPort

// passage is a request that is permitted, on its way.
type passage struct {
	server *Server
	conn   *conn
	tenant Tenant
	policy *policy
	ask    ask
	how    ruling
}

type passageKey struct{}

// credential is a header to add, with its value.
type credential struct{ header, value string }

// forward sends a request on and its answer back.
func (s *Server) forward(w http.ResponseWriter, r *http.Request, pass passage) {
	secrets, ref := s.credentials(r.Context(), pass)
	if ref != nil {
		s.refuseWeb(w, pass.conn, KindHTTP, pass.ask, ref)
		return
	}
	e := pass.event()
	e.Permitted = true
	s.tell(e)
	// The only other protocol that is known to begin with a request that was
	// judged. A server may overlook the wish to change (RFC 9110, 7.8).
	if !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		r.Header.Del("Upgrade")
	}
	for name := range r.Header {
		if strings.HasPrefix(strings.ToLower(strings.ReplaceAll(name, "_", "-")), "x-forwarded-") {
			delete(r.Header, name)
		}
	}
	proxy := httputil.ReverseProxy{
		Rewrite:        func(pr *httputil.ProxyRequest) { pass.rewrite(pr, secrets) },
		Transport:      pass.conn.transport(pass.policy),
		FlushInterval:  -1, // an event waits for no other
		BufferPool:     &buffers,
		ErrorLog:       s.web.ErrorLog,
		ModifyResponse: pass.comeBack,
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			s.failWeb(w, pass, KindHTTP, upstreamRefusal(pass.ask.target, err))
		},
	}
	proxy.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), passageKey{}, pass)))
}

func (pass passage) event() Event {
	a := pass.ask
	e := Event{
		Sandbox: pass.conn.id, Kind: KindHTTP, Host: a.target.host, Port: pass.how.port, Method: clip(a.method, 32), Path: clip(a.path, 256),
		Origin: pass.conn.origin, Rule: pass.how.rule,
	}
	for _, c := range pass.how.inject {
		e.Secrets = append(e.Secrets, c.Secret)
	}
	return e
}

// rewrite makes the request that goes out. Hop-by-hop headers are gone by
// now, and with them any header that Connection named.
func (pass passage) rewrite(pr *httputil.ProxyRequest, secrets []credential) {
	scheme, own := "http", uint16(portHTTP)
	if pass.how.tls {
		scheme, own = "https", portTLS
	}
	to := target{host: pass.ask.target.host, port: pass.how.port}
	pr.Out.URL = urlOf(pr.In.URL, scheme, to.String())
	pr.Out.Host = to.authority(own)
	pr.Out.Trailer = nil
	if len(secrets) == 0 { // a trailer could be taken for a header
		pr.Out.Trailer = pr.In.Trailer // the same map: it is filled in when the body has been read
	}
	for _, c := range secrets {
		for given := range pr.Out.Header {
			if strings.EqualFold(strings.ReplaceAll(given, "_", "-"), strings.ReplaceAll(c.header, "_", "-")) {
				delete(pr.Out.Header, given)
			}
		}
		pr.Out.Header.Set(c.header, c.value)
	}
}

// comeBack leads redirects to the same host back to the gate, where the
// sandbox's own TLS would go without the credentials.
func (pass passage) comeBack(resp *http.Response) error {
	if !pass.how.tls {
		return nil
	}
	for _, name := range []string{"Location", "Content-Location"} {
		u, err := url.Parse(resp.Header.Get(name))
		if err != nil || u.Scheme != "https" || u.User != nil {
			continue
		}
		if t, err := parseAuthority(u.Host, portTLS); err == nil && t.host == pass.ask.target.host && t.port == pass.how.port {
			u.Scheme, u.Host = "http", pass.ask.target.authority(portHTTP)
			resp.Header.Set(name, u.String())
		}
	}
	return nil
}

// credentials fetches the values of what is added. Where one is missing the
// request does not go out without it.
func (s *Server) credentials(ctx context.Context, pass passage) ([]credential, *refusal) {
	var out []credential
	for _, c := range pass.how.inject {
		bad := func(why string) ([]credential, *refusal) {
			return nil, &refusal{
				status: http.StatusBadGateway, code: codeSecret,
				detail: fmt.Sprintf("the secret %s for header %s cannot be sent to %s: %s", sandbox.Unmarked(c.Secret), c.Header, pass.ask.target.host, why),
			}
		}
		secret, value, err := s.cfg.Secrets.SecretValue(ctx, c.Secret)
		switch {
		case errors.Is(err, sandbox.ErrNotFound):
			return bad("there is no such secret; 'sandbox secret set " + c.Secret + "' makes it")
		case err != nil:
			s.log.ErrorContext(ctx, "gate: read a secret", "secret", c.Secret, "sandbox", pass.conn.id, "err", err)
			return bad("it could not be read")
		case !secret.For(pass.ask.target.host, pass.how.port):
			return bad(fmt.Sprintf("it was made for other hosts, or for other ports than %d: 'sandbox secret set --to HOST:PORT' names a port", pass.how.port))
		case strings.ContainsFunc(value, func(r rune) bool { return r < 0x20 && r != '\t' || r == 0x7f }):
			return bad("it holds what no header may")
		}
		out = append(out, credential{c.Header, value})
	}
	return out, nil
}

// upstreamRefusal says why no answer came, without a word of the error: it
// could hold what was sent.
func upstreamRefusal(to target, err error) *refusal {
	if ref, ok := errors.AsType[*refusal](err); ok {
		return ref
	}
	why := "the connection broke"
	var unknown *tls.CertificateVerificationError
	switch {
	case errors.As(err, &unknown):
		why = "its certificate is not to be trusted"
	case errors.Is(err, context.DeadlineExceeded):
		why = "no answer in time"
	}
	return &refusal{status: http.StatusBadGateway, code: codeUpstream, detail: fmt.Sprintf("%s does not answer: %s", to, why)}
}

// failWeb answers a request that was permitted and came to nothing.
func (s *Server) failWeb(w http.ResponseWriter, pass passage, kind string, ref *refusal) {
	e := pass.event()
	e.Kind, e.Code, e.Detail, e.Rule, e.Secrets = kind, ref.code, ref.detail, ref.rule, nil
	if ref.status == http.StatusBadGateway {
		s.failed.Add(1)
		if kind == KindHTTP { // told already, as permitted
			writeRefusal(w, ref)
			return
		}
		e.Permitted, e.Rule = true, pass.how.rule
	}
	s.tell(e)
	writeRefusal(w, ref)
}

// transport returns the upstream connections of one client connection under
// one policy. Another policy gets others: those of the first may lead where it
// does not.
func (c *conn) transport(p *policy) *http.Transport {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.upstream != nil && c.by == p {
		return c.upstream
	}
	if c.upstream != nil {
		c.upstream.CloseIdleConnections()
	}
	c.upstream, c.by = c.server.newTransport(), p
	return c.upstream
}

func (s *Server) newTransport() *http.Transport {
	var one http.Protocols
	one.SetHTTP1(true)
	return &http.Transport{
		Proxy: nil, Protocols: &one, DisableCompression: true,
		DialContext:     dialPassage,
		TLSClientConfig: &tls.Config{RootCAs: s.cfg.Roots, MinVersion: tls.VersionTLS12},
		// One client connection asks one thing at a time.
		MaxIdleConns: 2, MaxIdleConnsPerHost: 1, IdleConnTimeout: 30 * time.Second,
		TLSHandshakeTimeout: dialAll, ResponseHeaderTimeout: answerTimeout, ExpectContinueTimeout: 2 * time.Second,
		MaxResponseHeaderBytes: maxAnswerHeader,
	}
}

// dialPassage connects for the request in ctx.
func dialPassage(ctx context.Context, _, _ string) (net.Conn, error) {
	pass, ok := ctx.Value(passageKey{}).(passage)
	if !ok {
		return nil, errors.New("dial upstream: no request of the gate's")
	}
	to := target{host: pass.ask.target.host, port: pass.how.port}
	up, ref := pass.server.connect(ctx, pass.tenant, pass.policy, pass.how.grant, to, pass.conn.origin.Addr())
	if ref != nil {
		return nil, ref
	}
	return up, nil
}

// buffers are those of copies.
var buffers bufferPool

type bufferPool struct{ pool sync.Pool }

const bufferSize = 32 << 10

func (b *bufferPool) Get() []byte {
	if p, ok := b.pool.Get().(*[bufferSize]byte); ok {
		return p[:]
	}
	return make([]byte, bufferSize)
}

func (b *bufferPool) Put(buf []byte) {
	if len(buf) == bufferSize {
		b.pool.Put((*[bufferSize]byte)(buf))
	}
}
