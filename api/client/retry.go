package client

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
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

// retryAfter is how long a server asks to wait (RFC 9110, section 10.2.3).
func retryAfter(h http.Header) time.Duration {
	n, err := strconv.Atoi(h.Get("Retry-After"))
	if err != nil || n < 0 {
		return 0
	}
	return time.Duration(min(n, 3600)) * time.Second
}
