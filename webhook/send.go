package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// guard decides which addresses may be called: webhooks are named by people
// who may not look into the daemon's networks.
type guard struct{ allow []netip.Prefix }

// errPrivate is the error for an address that may not be called.
var errPrivate = errors.New("address not permitted")

// closed are ranges that are not public, besides those the standard library
// knows (IANA's registries of special-purpose addresses, RFC 6890).
var closed = prefixes(
	"0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4",
	"64:ff9b::/96", "64:ff9b:1::/48", "100::/64", "2001::/23", "2001:db8::/32", "2002::/16", "fec0::/10", "::/96",
)

func prefixes(all ...string) []netip.Prefix {
	out := make([]netip.Prefix, len(all))
	for i, s := range all {
		out[i] = netip.MustParsePrefix(s)
	}
	return out
}

// permits judges one address: public, and none of the host's own, which what
// listens there may take for a neighbour's.
func (g guard) permits(a netip.Addr) bool {
	a = a.Unmap().WithZone("")
	for _, p := range g.allow {
		if p.Contains(a) {
			return true
		}
	}
	if !a.IsValid() || a.IsLoopback() || a.IsPrivate() || a.IsUnspecified() || a.IsMulticast() || a.IsLinkLocalUnicast() {
		return false
	}
	for _, p := range closed {
		if p.Contains(a) {
			return false
		}
	}
	own, err := linux.OwnAddress(a)
	return err == nil && !own
}

// judge refuses a URL that names an address which may not be called. What a
// host name means is judged at each attempt. Class ErrForbidden.
func (g guard) judge(rawURL string) error {
	u, err := url.Parse(rawURL)
	if err != nil {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_webhook", "webhook %.80q: %w", rawURL, err)
	}
	a, err := netip.ParseAddr(u.Hostname())
	if err == nil && !g.permits(a) {
		return sandbox.Errorf(sandbox.ErrForbidden, "webhook_address", "webhooks may not call %s: it is no public address, or the host's own; the operator can permit it by webhooks.allow_private in the daemon's configuration", a)
	}
	return nil
}

// control is asked for each address that is about to be called, after names
// were resolved: there is nothing between this look and the connection.
func (g guard) control(_, address string, _ syscall.RawConn) error {
	to, err := netip.ParseAddrPort(address)
	if err != nil || !g.permits(to.Addr()) {
		return errPrivate
	}
	return nil
}

func newClient(g guard) *http.Client {
	dialer := &net.Dialer{Timeout: 5 * time.Second, KeepAlive: 30 * time.Second, Control: g.control}
	return &http.Client{
		Timeout:       attemptTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			Proxy:                  nil, // it would resolve the name once more
			DialContext:            dialer.DialContext,
			TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12},
			TLSHandshakeTimeout:    5 * time.Second,
			ForceAttemptHTTP2:      true,
			DisableCompression:     true,
			MaxIdleConnsPerHost:    atOnce,
			MaxIdleConns:           64,
			IdleConnTimeout:        30 * time.Second,
			MaxResponseHeaderBytes: 64 << 10,
		},
	}
}

// send is one attempt. It answers within attemptTimeout.
func (d *Desk) send(ctx context.Context, w sandbox.Webhook, m sandbox.WebhookMessage, attempt int) sandbox.Delivery {
	begin := time.Now()
	r := sandbox.Delivery{ID: m.ID, Type: m.Type, At: begin.UTC(), Attempts: attempt}
	status, err := d.post(ctx, w, m, attempt)
	r.Status, r.TookMS, r.OK = status, time.Since(begin).Milliseconds(), err == nil
	if err != nil {
		r.Error = inWords(err)
		d.log.DebugContext(ctx, "a webhook was not told", "webhook", w.ID, "event", m.ID, "err", err)
	}
	return r
}

// statusError is an answer that is no success.
type statusError int

func (e statusError) Error() string {
	return fmt.Sprintf("the receiver answered %d %s", int(e), http.StatusText(int(e)))
}

func (d *Desk) post(ctx context.Context, w sandbox.Webhook, m sandbox.WebhookMessage, attempt int) (status int, err error) {
	body, err := json.Marshal(m)
	if err != nil {
		return 0, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.URL, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "sandboxd-webhook/1")
	req.Header.Set(sandbox.WebhookHeader, w.ID)
	req.Header.Set(sandbox.WebhookIDHeader, m.ID)
	req.Header.Set(sandbox.WebhookTypeHeader, m.Type)
	req.Header.Set(sandbox.WebhookAttemptHeader, strconv.Itoa(attempt))
	if w.Secret != "" { // projects may do without
		req.Header.Set(sandbox.WebhookSignatureHeader, sandbox.SignWebhook(w.Secret, time.Now(), body))
	}
	resp, err := d.http.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	_, _ = io.CopyN(io.Discard, resp.Body, 64<<10) // so that the connection can be used again
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		return resp.StatusCode, statusError(resp.StatusCode)
	}
	return resp.StatusCode, nil
}

// inWords says what went wrong, but nothing of the daemon's networks: whose
// webhook it is may not know them.
func inWords(err error) string {
	status, ok := errors.AsType[statusError](err)
	switch {
	case ok:
		return status.Error()
	case errors.Is(err, errPrivate):
		return "its address is not public or is the host's own, and not permitted by webhooks.allow_private"
	case errors.Is(err, context.DeadlineExceeded), os.IsTimeout(err):
		return "no answer within " + attemptTimeout.String()
	case errors.Is(err, context.Canceled):
		return "interrupted"
	}
	if dns, ok := errors.AsType[*net.DNSError](err); ok && dns.IsNotFound {
		return "its host name does not exist"
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return "its certificate is not valid"
	}
	return "no connection, or it broke"
}
