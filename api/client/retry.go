package client

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Bounds of the waits between tries.
const (
	firstWait = 100 * time.Millisecond
	mostWait  = 2 * time.Second
	mostAfter = time.Minute // of what a server asks for
)

// WithRetries has requests that may be repeated (those that only look, put or
// delete, and those with an idempotency key) repeated up to n times while the
// daemon does not answer, is busy or has nothing left, with random waits and
// no sooner than it says. The default is not at all.
func WithRetries(n int) Option { return func(c *Client) { c.retries = n } }

// repeatable reports whether a request may be sent again, and can be.
func repeatable(in call) bool {
	if in.body != nil {
		b, ok := in.body.(*bytes.Reader)
		return ok && b.Size() > 0 && in.header.Get(api.HeaderIdempotencyKey) != ""
	}
	return in.method != http.MethodPost && in.method != http.MethodPatch || in.header.Get(api.HeaderIdempotencyKey) != ""
}

// retry sends a request, again where that is permitted and may help.
func (c *Client) retry(ctx context.Context, in call) (*http.Response, error) {
	for try := 0; ; try++ {
		resp, after, err := c.send(ctx, in)
		if err == nil || try >= c.retries || !repeatable(in) || !errors.Is(err, sandbox.ErrUnavailable) && !errors.Is(err, sandbox.ErrExhausted) {
			return resp, err
		}
		wait := time.Duration(rand.Int64N(int64(min(firstWait<<min(try, 10), mostWait)))) + min(after, mostAfter) //nolint:gosec // to spread clients, no secret
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, errors.Join(ctx.Err(), err)
		}
		if b, ok := in.body.(*bytes.Reader); ok {
			_, _ = b.Seek(0, 0) // never fails
		}
	}
}

// WithReconnect has requests that may be repeated sent again for up to d where
// the daemon cannot be reached or the connection breaks before the answer: over
// a restart of the daemon that comes to one effect. Where not even the first
// connection was made it is a third of that. Commands begin to count as such
// requests with an idempotency key; a Run whose key was used before goes on with
// what that made. told hears the first error of each request,
// and how long it will be tried.
func WithReconnect(d time.Duration, told func(err error, d time.Duration)) Option {
	return func(c *Client) { c.insist, c.told = d, told }
}

// persist does f, again where WithReconnect says so.
func (c *Client) persist(ctx context.Context, repeatable bool, f func() error) error {
	err := f()
	if c.insist == 0 || !repeatable || !lost(err) || ctx.Err() != nil {
		return err
	}
	b := backoff{patience: c.insist}
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
		b.patience /= 3
	}
	c.told(err, b.patience)
	for lost(err) && b.wait(ctx) {
		err = f()
	}
	return err
}

// lost tells the errors of a connection that another one may not have.
func lost(err error) bool {
	if errors.Is(err, fs.ErrPermission) || errors.As(err, new(*tls.CertificateVerificationError)) {
		return false
	}
	switch sandbox.CodeOf(err) {
	case "daemon_unreachable", "stream_broken", "broken_answer", "shutting_down":
		return true
	}
	return false
}

// retryAfter is how long a server asks to wait (RFC 9110, section 10.2.3).
func retryAfter(h http.Header) time.Duration {
	n, err := strconv.Atoi(h.Get("Retry-After"))
	if err != nil || n < 0 {
		return 0
	}
	return time.Duration(min(n, 3600)) * time.Second
}
