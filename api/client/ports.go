package client

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// PublishPort has the host listen for a port of a sandbox.
func (c *Client) PublishPort(ctx context.Context, ref string, req sandbox.PortRequest) (sandbox.Port, error) {
	return post[sandbox.Port](ctx, c, at(ref, "ports"), req, nil)
}

// Ports lists the published ports of one sandbox, or with an empty ref all.
func (c *Client) Ports(ctx context.Context, ref string) ([]sandbox.Port, error) {
	q := url.Values{}
	set(q, "sandbox", ref)
	list, err := get[api.PortList](ctx, c, path("ports"), q)
	return list.Items, err
}

// UnpublishPort stops listening for a port, by its id.
func (c *Client) UnpublishPort(ctx context.Context, id string) (sandbox.Port, error) {
	return ask[sandbox.Port](ctx, c, call{method: http.MethodDelete, path: path("ports", id)})
}

// ReleaseHostName frees the host name an owner holds, for other owners.
func (c *Client) ReleaseHostName(ctx context.Context, name string) (sandbox.HostName, error) {
	return ask[sandbox.HostName](ctx, c, call{method: http.MethodDelete, path: path("host-names", name)})
}

// NewPortToken makes or replaces the token that opens a sandbox's host names.
func (c *Client) NewPortToken(ctx context.Context, ref string) (string, error) {
	t, err := ask[api.PortToken](ctx, c, call{method: http.MethodPut, path: at(ref, "port-token")})
	return t.Token, err
}

// RemovePortToken takes that token away.
func (c *Client) RemovePortToken(ctx context.Context, ref string) error {
	_, err := ask[none](ctx, c, call{method: http.MethodDelete, path: at(ref, "port-token")})
	return err
}

// dialPortTimeout bounds the way to a port in a sandbox.
const dialPortTimeout = 15 * time.Second

// DialPort connects to a TCP port of a running sandbox, through the daemon.
// Each end may close its half. ErrUnavailable with code port_closed where
// nobody listens.
func (c *Client) DialPort(ctx context.Context, ref string, port int) (net.Conn, error) {
	if err := named(at(ref)); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, dialPortTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.base+at(ref, "ports", strconv.Itoa(port), "connect"), http.NoBody)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_request", "connecting to port %d of %.80q: %w", port, ref, err)
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", api.UpgradePort)
	c.sign(req.Header)
	conn, err := c.connect(ctx, req.URL)
	if err != nil {
		return nil, c.unreachable(ctx, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() }) // wakes whoever waits below
	up, err := upgrade(conn, req)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = conn.Close() // the error says more
		if _, known := errors.AsType[*sandbox.Error](err); known {
			return nil, err
		}
		return nil, c.unreachable(ctx, err)
	}
	return up, nil
}

// connect opens a connection of its own to the daemon.
func (c *Client) connect(ctx context.Context, u *url.URL) (net.Conn, error) {
	if c.unix != nil {
		return c.unix.dial(ctx)
	}
	address, d := u.Host, &net.Dialer{Timeout: 10 * time.Second}
	if u.Scheme != "https" {
		if u.Port() == "" {
			address = net.JoinHostPort(u.Hostname(), "80")
		}
		return d.DialContext(ctx, "tcp", address)
	}
	if u.Port() == "" {
		address = net.JoinHostPort(u.Hostname(), "443")
	}
	t := tls.Dialer{NetDialer: d, Config: &tls.Config{NextProtos: []string{"http/1.1"}, RootCAs: c.trust, MinVersion: tls.VersionTLS12}}
	return t.DialContext(ctx, "tcp", address)
}

// upgrade asks for the connection to be handed over.
func upgrade(conn net.Conn, req *http.Request) (net.Conn, error) {
	if err := req.Write(conn); err != nil {
		return nil, err
	}
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		defer resp.Body.Close()
		return nil, problem(resp)
	}
	return &handed{Conn: conn, r: r}, nil
}

// handed is a connection whose first bytes may have come with the answer.
type handed struct {
	net.Conn
	r *bufio.Reader
}

// Read reads what came early, then the connection.
func (h *handed) Read(p []byte) (int, error) {
	if h.r.Buffered() > 0 {
		return h.r.Read(p)
	}
	return h.Conn.Read(p)
}

// CloseWrite tells the other end that nothing more comes.
func (h *handed) CloseWrite() error {
	if w, ok := h.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return h.Close()
}
