package client

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"mime"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// DefaultHost is where the daemon listens unless told otherwise.
const DefaultHost = "unix:///run/sandboxd/sandboxd.sock"

// Client speaks to one daemon. Its methods may be called from several
// goroutines at once.
type Client struct {
	host string
	base string // of URLs, without a slash at the end
	http *http.Client
	unix *direct      // short requests on a unix socket; nil for other hosts
	ws   *http.Client // for streams, whose connections are used once: without large buffers
	// patience is how long a process stream tries to find the daemon again.
	patience time.Duration
	retries  int           // see WithRetries
	insist   time.Duration // see WithReconnect
	told     func(error, time.Duration)
	key      string // see WithKey
	trust    *x509.CertPool
}

// Option changes a Client.
type Option func(*Client)

// WithPatience sets how long a broken process stream tries to come back
// before it gives up; 0 means not at all. The default is a minute.
func WithPatience(d time.Duration) Option { return func(c *Client) { c.patience = d } }

// WithKey sends an API key with every request. Over http:// it would go in
// the clear: New refuses that but for loopback addresses.
func WithKey(key string) Option { return func(c *Client) { c.key = strings.TrimSpace(key) } }

// WithAuthority makes the client trust servers whose certificates the
// authorities of a PEM file signed, and no others ('sandboxd tls init').
func WithAuthority(pem []byte) Option {
	return func(c *Client) {
		c.trust = x509.NewCertPool()
		c.trust.AppendCertsFromPEM(pem)
	}
}

// New returns a client of the daemon at host: unix:///path/of.sock, or
// http://… or https://…. An empty host means DefaultHost. Nothing is
// connected yet. The error is of class ErrInvalid.
func New(host string, opts ...Option) (*Client, error) {
	if host == "" {
		host = DefaultHost
	}
	u, err := url.Parse(host)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_host", "host %.200q: %w", host, err)
	}
	dialer := &net.Dialer{Timeout: 10 * time.Second}
	tr := &http.Transport{
		DialContext: dialer.DialContext, Proxy: http.ProxyFromEnvironment, TLSHandshakeTimeout: 10 * time.Second,
		MaxIdleConnsPerHost: 256, IdleConnTimeout: time.Minute, DisableCompression: true,
		WriteBufferSize: 64 << 10, ReadBufferSize: 64 << 10,
	}
	c := &Client{host: host, http: &http.Client{Transport: tr}, patience: time.Minute}
	switch {
	case u.Scheme == "unix" && u.Host == "" && strings.HasPrefix(u.Path, "/"):
		c.base = "http://sandboxd" // only for the Host header
		tr.Proxy = nil
		dial := func(ctx context.Context) (net.Conn, error) { return dialer.DialContext(ctx, "unix", u.Path) }
		tr.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) }
		c.unix = &direct{dial: dial}
	case (u.Scheme == "http" || u.Scheme == "https") && u.Host != "":
		c.base = strings.TrimRight(host, "/")
	default:
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_host", "host %.200q: use unix:///path/of.sock, http://name:port or https://name:port", host)
	}
	for _, o := range opts {
		o(c)
	}
	if err := c.secure(u, tr); err != nil {
		return nil, err
	}
	small := tr.Clone()
	small.ReadBufferSize, small.WriteBufferSize, small.DisableKeepAlives = 4<<10, 4<<10, true
	c.ws = &http.Client{Transport: small}
	return c, nil
}

// secure sets up TLS, and refuses what would give the key away.
func (c *Client) secure(u *url.URL, tr *http.Transport) error {
	if c.trust != nil {
		if c.trust.Equal(x509.NewCertPool()) {
			return sandbox.Errorf(sandbox.ErrInvalid, "invalid_ca", "the file of authorities holds no certificate in PEM form: give the ca.pem of the daemon's 'sandboxd tls init'")
		}
		tr.TLSClientConfig = &tls.Config{RootCAs: c.trust, MinVersion: tls.VersionTLS12}
	}
	if c.key == "" || u.Scheme != "http" {
		return nil
	}
	if a, err := netip.ParseAddr(u.Hostname()); u.Hostname() == "localhost" || err == nil && a.IsLoopback() {
		return nil
	}
	return sandbox.Errorf(sandbox.ErrInvalid, "insecure_host", "host %.200q: the API key would go over the network in the clear: use https://", c.host)
}

// Host returns where the client connects.
func (c *Client) Host() string { return c.host }

// call is one request.
type call struct {
	method, path string
	query        url.Values
	header       http.Header
	body         io.Reader
	short        bool // the body, if any, is in memory, and little comes back at a time
}

// do sends a request and returns a good response, whose body the caller
// closes. A problem comes back as the error it was.
func (c *Client) do(ctx context.Context, in call) (*http.Response, error) {
	return c.retry(ctx, in)
}

// send sends a request once. With an error it tells how long the server asks
// to wait before the next.
func (c *Client) send(ctx context.Context, in call) (*http.Response, time.Duration, error) {
	if err := named(in.path); err != nil {
		return nil, 0, err
	}
	target := c.base + in.path
	if len(in.query) > 0 {
		target += "?" + in.query.Encode()
	}
	src := &source{}
	if _, ok := in.body.(*bytes.Reader); !ok && in.body != nil {
		src.r, in.body = in.body, src
	}
	req, err := http.NewRequestWithContext(ctx, in.method, target, in.body)
	if err != nil {
		return nil, 0, sandbox.Errorf(sandbox.ErrInvalid, "invalid_request", "request %s %.200s: %w", in.method, in.path, err)
	}
	maps.Copy(req.Header, in.header)
	c.sign(req.Header)
	roundTrip := c.http.Do
	if in.short && c.unix != nil {
		roundTrip = c.unix.roundTrip
	}
	resp, err := roundTrip(req)
	if own := src.broken.Load(); err != nil && own != nil && ctx.Err() == nil {
		return nil, 0, *own
	}
	if err != nil {
		return nil, 0, c.unreachable(ctx, err)
	}
	if resp.StatusCode >= 300 {
		defer resp.Body.Close()
		return nil, retryAfter(resp.Header), problem(resp)
	}
	return resp, 0, nil
}

// source is the body of a request. An error of reading it is the caller's, and
// says nothing of the daemon.
type source struct {
	r      io.Reader
	broken atomic.Pointer[error]
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		s.broken.Store(&err)
	}
	return n, err
}

// sign adds the key.
func (c *Client) sign(h http.Header) {
	if c.key != "" {
		h.Set("Authorization", "Bearer "+c.key)
	}
}

// unreachable says that the daemon does not answer, and what to do.
func (c *Client) unreachable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	next := "is it running? 'systemctl start sandboxd', or 'sandboxd' as root, starts it"
	if strings.Contains(err.Error(), "permission denied") {
		next = "may you use the socket? join its group, or be root"
	}
	if unknown := (x509.UnknownAuthorityError{}); errors.As(err, &unknown) {
		next = "give the ca.pem of the daemon's 'sandboxd tls init' with --ca or SANDBOX_CA"
	}
	return &sandbox.Error{
		Class: sandbox.ErrUnavailable, Code: "daemon_unreachable", Cause: err,
		Detail: fmt.Sprintf("the daemon at %s does not answer (%v): %s", c.host, rootCause(err), next),
	}
}

// rootCause leaves out the URL made up for the Host header.
func rootCause(err error) error {
	if u, ok := errors.AsType[*url.Error](err); ok {
		return u.Err
	}
	return err
}

// problem reads an error response.
func problem(resp *http.Response) error {
	p := api.Problem{Status: resp.StatusCode}
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if err == nil && kind == api.ProblemContentType && json.Unmarshal(body, &p) == nil {
		p.Status = resp.StatusCode
	}
	return p.Err()
}

// get reads a JSON answer.
func get[T any](ctx context.Context, c *Client, path string, query url.Values) (T, error) {
	return ask[T](ctx, c, call{method: http.MethodGet, path: path, query: query})
}

// post sends a JSON body, or none for nil, and reads a JSON answer.
func post[T any](ctx context.Context, c *Client, path string, body any, header http.Header) (T, error) {
	in := call{method: http.MethodPost, path: path, header: header}
	if body != nil {
		b, err := api.MarshalUTF8(body)
		if err != nil {
			var zero T
			return zero, err
		}
		in.body, in.short = bytes.NewReader(b), true
		in.header = header.Clone()
		if in.header == nil {
			in.header = http.Header{}
		}
		in.header.Set("Content-Type", "application/json")
	}
	return ask[T](ctx, c, in)
}

func ask[T any](ctx context.Context, c *Client, in call) (out T, err error) {
	in.short = in.short || in.body == nil
	err = c.persist(ctx, repeatable(in), func() error {
		if b, ok := in.body.(*bytes.Reader); ok {
			_, _ = b.Seek(0, 0) // never fails
		}
		out, err = askOnce[T](ctx, c, in)
		return err
	})
	return out, err
}

func askOnce[T any](ctx context.Context, c *Client, in call) (T, error) {
	var out T
	resp, err := c.do(ctx, in)
	if err != nil {
		return out, err
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusNoContent {
		return out, nil
	}
	b, err := io.ReadAll(resp.Body)
	if err == nil {
		err = json.Unmarshal(b, &out)
	}
	if err != nil {
		return out, sandbox.Errorf(sandbox.ErrUnavailable, "broken_answer", "reading the answer to %s %s: %w", in.method, in.path, err)
	}
	return out, nil
}

// none is the answer of calls that have no result.
type none = struct{}
