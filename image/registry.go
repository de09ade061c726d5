package image

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// endpoint is one registry as it is contacted.
type endpoint struct {
	host  string
	tries int // of a request whose faults may pass
	plain bool
	known bool // the operator's configuration names it
	ca    string
	auth  *sandbox.RegistryAuth
}

// endpoints lists where to look for what lies at host: the mirrors the
// operator named, then itself. Who asks proves himself to host only.
func (s *Store) endpoints(host string, plain bool, auth *sandbox.RegistryAuth) []endpoint {
	at := func(h string) endpoint {
		r, known := s.cfg.Registries[h]
		return endpoint{host: h, tries: mirrorAttempts, known: known, plain: r.PlainHTTP, ca: r.CAFile, auth: r.Auth}
	}
	var all []endpoint
	for _, m := range s.cfg.Registries[host].Mirrors {
		all = append(all, at(m))
	}
	own := at(host)
	own.tries = maxAttempts
	own.plain = own.plain || plain
	if !auth.Empty() {
		own.auth = auth
	}
	return append(all, own)
}

// Timeouts of one request, besides Config.Stall for its body.
const (
	dialTimeout   = 10 * time.Second
	headerTimeout = 30 * time.Second
	maxRedirects  = 5
	maxHeader     = 64 << 10
	maxCA         = 1 << 20 // of a file with certificates, in bytes
)

// repository is one repository of one registry, ready to be asked.
type repository struct {
	s      *Store
	at     endpoint
	path   string
	base   string
	plain  bool // without TLS, if it must be
	client *http.Client
}

func (r *repository) String() string { return r.at.host + "/" + r.path }

// open says hello to a registry and proves who asks. Its idle connections
// end with close.
func (s *Store) open(ctx context.Context, at endpoint, path string, scopes ...string) (*repository, func(), error) {
	opts := []name.Option{name.WeakValidation}
	if at.plain {
		opts = append(opts, name.Insecure)
	}
	host := at.host
	if host == sandbox.DefaultRegistry {
		host = name.DefaultRegistry
	}
	reg, err := name.NewRegistry(host, opts...)
	if err != nil {
		return nil, nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_image_name", "registry %.100q: %w", host, err)
	}
	wire, err := at.transport()
	if err != nil {
		return nil, nil, err
	}
	guarded := &guard{inner: wire, plain: at.plain || isLoopback(host)} // nobody listens in on this machine's own
	who := authn.Anonymous
	if !at.auth.Empty() {
		who = authn.FromConfig(authn.AuthConfig{
			Username: at.auth.Username, Password: at.auth.Password,
			IdentityToken: at.auth.IdentityToken, RegistryToken: at.auth.RegistryToken,
		})
	}
	r := &repository{s: s, at: at, path: path, base: "https://" + host + "/v2/", plain: guarded.plain}
	err = r.retry(ctx, "greet the registry", func(ctx context.Context) error {
		t, err := transport.NewWithContext(ctx, reg, who, transport.NewUserAgent(guarded, "sandboxd/"+s.cfg.Version), scopes)
		if err != nil {
			return r.wireError(err)
		}
		r.client = &http.Client{Transport: t, CheckRedirect: checkRedirect}
		return nil
	})
	if err != nil {
		wire.CloseIdleConnections()
		return nil, nil, err
	}
	return r, wire.CloseIdleConnections, nil
}

func (e endpoint) transport() (*http.Transport, error) {
	conf := &tls.Config{MinVersion: tls.VersionTLS12}
	if e.ca != "" {
		pem, err := linux.ReadRegular(e.ca, maxCA)
		if err != nil {
			return nil, sandbox.Errorf(sandbox.ErrUnavailable, "registry_untrusted", "read the certificates for registry %s: %w: see registries in the daemon's configuration", e.host, err)
		}
		if conf.RootCAs, err = x509.SystemCertPool(); err != nil {
			conf.RootCAs = x509.NewCertPool()
		}
		if !conf.RootCAs.AppendCertsFromPEM(pem) {
			return nil, sandbox.Errorf(sandbox.ErrUnavailable, "registry_untrusted", "%s holds no certificate: see registries in the daemon's configuration", e.ca)
		}
	}
	return &http.Transport{
		Proxy: http.ProxyFromEnvironment, DialContext: e.dial,
		TLSClientConfig: conf, TLSHandshakeTimeout: dialTimeout, ResponseHeaderTimeout: headerTimeout,
		MaxResponseHeaderBytes: maxHeader, DisableCompression: true, ForceAttemptHTTP2: true,
		MaxIdleConnsPerHost: parallelLayers, IdleConnTimeout: time.Minute,
	}, nil
}

// dial connects to a registry, or where it sends us. That this is an address
// of the host, and not its loopback, is for the operator to say: by naming the
// registry, or by a proxy. The address is judged after names were resolved.
func (e endpoint) dial(ctx context.Context, network, address string) (net.Conn, error) {
	d := &net.Dialer{Timeout: dialTimeout}
	if !e.known && !isProxy(address) {
		d.Control = func(_, address string, _ syscall.RawConn) error {
			to, err := netip.ParseAddrPort(address)
			if err != nil {
				return err
			}
			if to.Addr().Unmap().IsLoopback() {
				return nil
			}
			own, err := linux.OwnAddress(to.Addr())
			if err == nil && own {
				err = sandbox.Errorf(sandbox.ErrForbidden, "registry_own_address", "registry %s leads to %s, an address of the host itself: the operator can permit it by naming the registry in the daemon's configuration (registries)", e.host, to.Addr())
			}
			return err
		}
	}
	return d.DialContext(ctx, network, address)
}

// isProxy tells whether an address is that of a proxy of the environment.
func isProxy(address string) bool {
	for _, name := range []string{"HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"} {
		u, err := url.Parse(os.Getenv(name))
		if err == nil && u.Host != "" && (u.Host == address || u.Hostname()+":80" == address || u.Hostname()+":443" == address) {
			return true
		}
	}
	return false
}

// errPlain refuses plain HTTP where it was not asked for.
var errPlain = errors.New("plain HTTP is not allowed")

// guard refuses to speak plain HTTP unless that was asked for: neither by
// falling back nor by following a registry's redirection.
type guard struct {
	inner http.RoundTripper
	plain bool
}

func (g *guard) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme != "https" && !g.plain {
		return nil, errPlain
	}
	return g.inner.RoundTrip(r)
}

// isLoopback tells a registry on this machine, which needs no TLS.
func isLoopback(host string) bool {
	h, _, err := net.SplitHostPort(host)
	if err != nil {
		h = host
	}
	ip := net.ParseIP(h)
	return h == "localhost" || ip != nil && ip.IsLoopback()
}

var errRedirects = errors.New("the registry sends us round in circles")

func checkRedirect(_ *http.Request, via []*http.Request) error {
	if len(via) > maxRedirects {
		return errRedirects
	}
	return nil
}

// url is the address of something in the repository.
func (r *repository) url(kind, what string) string { return r.base + r.path + "/" + kind + "/" + what }

// passing wraps a fault that may be gone when the same is tried again.
type passing struct {
	err   error
	after time.Duration // the registry asked for this pause
}

func (p *passing) Error() string { return p.err.Error() }
func (p *passing) Unwrap() error { return p.err }

// Bounds of repetition.
const (
	maxAttempts = 5
	// mirrorAttempts is the same of a mirror: there is somebody else to ask.
	mirrorAttempts = 2
	maxPause       = 10 * time.Second
	maxWished      = 30 * time.Second // of a pause the registry asks for
)

// retry repeats f while its faults are of the passing kind.
func (r *repository) retry(ctx context.Context, doing string, f func(context.Context) error) error {
	for attempt := 1; ; attempt++ {
		err := f(ctx)
		if err == nil {
			return nil
		}
		p, again := errors.AsType[*passing](err)
		switch {
		case ctx.Err() != nil:
			return fmt.Errorf("image: %s: %w", doing, ctx.Err())
		case !again:
			return err
		case attempt >= r.at.tries:
			return p.err
		}
		if err := r.s.pause(ctx, attempt, p.after); err != nil {
			return fmt.Errorf("image: %s: %w", doing, err)
		}
	}
}

// pause waits before another attempt, with each twice as long, and a little
// more or less so that many do not come back at once.
func (s *Store) pause(ctx context.Context, attempt int, wished time.Duration) error {
	d := min(s.cfg.Backoff<<(attempt-1), maxPause)
	d = d*3/4 + rand.N(d/2+1)
	t := time.NewTimer(max(d, min(wished, maxWished)))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// send makes one request. What is wrong with the connection or the status
// comes back as an error with class and code; statuses in want are good.
func (r *repository) send(req *http.Request, what string, want ...int) (*http.Response, error) {
	resp, err := r.client.Do(req)
	if err != nil {
		return nil, r.wireError(err)
	}
	if slices.Contains(want, resp.StatusCode) {
		return resp, nil
	}
	defer resp.Body.Close()
	return nil, r.statusError(resp, what)
}

// statusError says what a registry's refusal means.
func (r *repository) statusError(resp *http.Response, what string) error {
	said := ""
	if resp.Request == nil || resp.Request.URL.Host == "" || strings.HasPrefix(r.base, "https://"+resp.Request.URL.Host+"/") {
		said = registryWords(resp) // not those of where a registry sends us
	}
	switch code := resp.StatusCode; {
	case code == http.StatusUnauthorized || code == http.StatusForbidden:
		return r.unauthorized(what, said)
	case code == http.StatusNotFound:
		return sandbox.Errorf(sandbox.ErrNotFound, "image_not_found", "%s has no %s%s: check the name and the tag; if it is private, give a user (--user, or 'docker login')", r.at.host, what, said)
	case code == http.StatusTooManyRequests:
		return &passing{sandbox.Errorf(sandbox.ErrUnavailable, "registry_busy", "registry %s asks for fewer requests (429)%s: try again later, give a user, or name a mirror in the daemon's configuration", r.at.host, said), retryAfter(resp)}
	case code >= 500 || code == http.StatusRequestTimeout:
		return &passing{sandbox.Errorf(sandbox.ErrUnavailable, "registry_unreachable", "registry %s is in trouble (%d) about %s%s: try again later", r.at.host, code, what, said), retryAfter(resp)}
	default:
		return sandbox.Errorf(sandbox.ErrUnavailable, "registry_refused", "registry %s answers %d about %s%s", r.at.host, code, what, said)
	}
}

func (r *repository) unauthorized(what, said string) error {
	next := "give a user (--user NAME --password-stdin, or 'docker login " + r.at.host + "')"
	if !r.at.auth.Empty() {
		next = "the user given may not: check name, password and rights"
	}
	return sandbox.Errorf(sandbox.ErrForbidden, "image_unauthorized", "registry %s refuses %s%s: it is private or not there; %s", r.at.host, what, said, next)
}

// registryWords quotes the reason in a registry's answer.
func registryWords(resp *http.Response) string {
	err := transport.CheckError(&http.Response{StatusCode: resp.StatusCode, Body: io.NopCloser(io.LimitReader(resp.Body, 16<<10))})
	te, ok := errors.AsType[*transport.Error](err)
	if !ok || len(te.Errors) == 0 {
		return ""
	}
	text := strings.Map(func(c rune) rune {
		if c < 0x20 || c >= 0x7f && c < 0xa0 {
			return ' '
		}
		return c
	}, te.Errors[0].Message)
	if text == "" {
		return ""
	}
	return " (“" + clip(text, 160) + "”)"
}

func retryAfter(resp *http.Response) time.Duration {
	v := resp.Header.Get("Retry-After")
	if n, err := strconv.Atoi(v); err == nil && n > 0 {
		return time.Duration(min(n, 3600)) * time.Second
	}
	if at, err := http.ParseTime(v); err == nil {
		return time.Until(at)
	}
	return 0
}

// wireError gives what went wrong on the way to a registry its class, code
// and next step.
func (r *repository) wireError(err error) error {
	if _, ok := errors.AsType[*sandbox.Error](err); ok {
		return err
	}
	cause := err
	if u, ok := errors.AsType[*url.Error](err); ok {
		cause = u.Err // without the address, which may hold a token
	}
	if untrusted(err) {
		return sandbox.Errorf(sandbox.ErrUnavailable, "registry_untrusted", "registry %s shows a certificate that nothing vouches for: name its CA in the daemon's configuration (registries): %w", r.at.host, cause)
	}
	if te, ok := errors.AsType[*transport.Error](err); ok { // of the greeting or the token server
		switch code := te.StatusCode; {
		case code == http.StatusUnauthorized || code == http.StatusForbidden:
			return r.unauthorized("repository "+r.path, "")
		case code == http.StatusNotFound:
			return sandbox.Errorf(sandbox.ErrUnavailable, "registry_refused", "%s is no registry: it does not know /v2/", r.at.host)
		case code >= 500 || code == http.StatusTooManyRequests:
			return &passing{err: sandbox.Errorf(sandbox.ErrUnavailable, "registry_unreachable", "registry %s is in trouble (%d): try again later", r.at.host, code)}
		default:
			return sandbox.Errorf(sandbox.ErrUnavailable, "registry_refused", "registry %s answers %d to a greeting", r.at.host, code)
		}
	}
	switch {
	case errors.Is(err, context.Canceled):
		return err
	case !r.plain && (errors.Is(err, errPlain) || strings.Contains(err.Error(), "server gave HTTP response to HTTPS client")):
		return sandbox.Errorf(sandbox.ErrUnavailable, "registry_unreachable", "registry %s does not speak TLS, or sends us to a place that does not: allow plain HTTP with it by --plain-http, or in the daemon's configuration", r.at.host)
	case errors.Is(err, errRedirects):
		return sandbox.Errorf(sandbox.ErrUnavailable, "registry_refused", "registry %s sends us round in circles: over %d redirections", r.at.host, maxRedirects)
	case strings.Contains(err.Error(), "realm"):
		return sandbox.Errorf(sandbox.ErrUnavailable, "registry_refused", "registry %s wants us to ask for a token where we will not: %w", r.at.host, cause)
	}
	if dns, ok := errors.AsType[*net.DNSError](err); ok && dns.IsNotFound {
		return sandbox.Errorf(sandbox.ErrUnavailable, "registry_unreachable", "there is no registry %s: check the name; the host's resolver does not know it", r.at.host)
	}
	return &passing{err: sandbox.Errorf(sandbox.ErrUnavailable, "registry_unreachable", "registry %s does not answer: is it up, and may this machine reach it? %w", r.at.host, cause)}
}

// untrusted tells whether a certificate was no good.
func untrusted(err error) bool {
	var unknown x509.UnknownAuthorityError
	var host x509.HostnameError
	var invalid x509.CertificateInvalidError
	return errors.As(err, &unknown) || errors.As(err, &host) || errors.As(err, &invalid)
}

// getManifest fetches the manifest or index that a tag or digest names.
func (r *repository) getManifest(ctx context.Context, ref string) (m *manifest, err error) {
	what := "manifest " + r.path + ":" + ref
	if sandbox.ValidDigest(ref) {
		what = "manifest " + r.path + "@" + ref
	}
	err = r.retry(ctx, "read "+what, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, headerTimeout+r.s.cfg.Stall)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.url("manifests", ref), http.NoBody)
		if err != nil {
			return err
		}
		for _, a := range accepted {
			req.Header.Add("Accept", a)
		}
		resp, err := r.send(req, what, http.StatusOK)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		b, err := readAll(resp, maxManifest, what)
		if err != nil {
			return r.wireError(err)
		}
		got := digestOf(b)
		if sandbox.ValidDigest(ref) && got != ref {
			return mismatch("registry %s sends %s in place of manifest %s: do not trust it", r.at.host, got, ref)
		}
		if told := resp.Header.Get("Docker-Content-Digest"); sandbox.ValidDigest(told) && told != got {
			return mismatch("registry %s says that %s is %s, and sends %s: do not trust it, or what stands between", r.at.host, what, told, got)
		}
		m, err = parseManifest(b, resp.Header.Get("Content-Type"))
		return err
	})
	return m, err
}

// readAll reads a small answer of at most limit bytes.
func readAll(resp *http.Response, limit int64, what string) ([]byte, error) {
	if resp.ContentLength > limit {
		return nil, tooLarge("%s has %d bytes: at most %d", what, resp.ContentLength, limit)
	}
	b, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	switch {
	case int64(len(b)) > limit:
		return nil, tooLarge("%s has over %d bytes", what, limit)
	case err != nil:
		return nil, err
	case resp.ContentLength >= 0 && int64(len(b)) != resp.ContentLength:
		return nil, io.ErrUnexpectedEOF
	}
	return b, nil
}
