package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/sandboxd/sandboxd/ingress"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/sandbox"
)

// The fit of two packages that must not know each other.
var _ ingress.Sandboxes = (*runtime.Manager)(nil)

// PublishPort listens on the host for a port of a sandbox.
func (s *service) PublishPort(ctx context.Context, ref string, req sandbox.PortRequest, actor string) (sandbox.Port, error) {
	return s.ingress.Publish(ctx, ref, req, actor)
}

// Ports lists published ports, with those that cannot be listened for now.
func (s *service) Ports(ctx context.Context, ref string) ([]sandbox.Port, error) {
	return s.ingress.Ports(ctx, ref)
}

// UnpublishPort stops listening for a port.
func (s *service) UnpublishPort(ctx context.Context, id, actor string) (sandbox.Port, error) {
	return s.ingress.Unpublish(ctx, id, actor)
}

// NewPortToken makes or replaces what opens a sandbox's host names.
func (s *service) NewPortToken(ctx context.Context, ref, actor string) (string, error) {
	return s.ingress.NewToken(ctx, ref, actor)
}

// RemovePortToken takes that away.
func (s *service) RemovePortToken(ctx context.Context, ref, actor string) error {
	return s.ingress.RemoveToken(ctx, ref, actor)
}

// newIngress makes what reaches into sandboxes. It listens once
// startIngress has been called.
func newIngress(c config, m *runtime.Manager, log *slog.Logger) *ingress.Ingress {
	in := ingress.New(ingress.Config{Sandboxes: m, PublishAddress: c.Network.PublishAddress, Domain: c.Network.Domain, Log: log})
	m.OnEnd(in.Ended)
	return in
}

// startIngress listens for published ports and, where that is configured, for
// host names.
func startIngress(ctx context.Context, c config, in *ingress.Ingress, log *slog.Logger) error {
	if err := in.Start(ctx); err != nil {
		return err
	}
	if c.Network.IngressListen == "" {
		return nil
	}
	ln, err := listenIngress(c.Network.IngressListen)
	if err != nil {
		return fmt.Errorf("network.ingress_listen: %w", err)
	}
	log.InfoContext(ctx, "host names lead to sandboxes", "listen", ln.Addr().String(), "domain", c.Network.Domain)
	go func() {
		if err := in.Serve(ln); err != nil {
			log.ErrorContext(ctx, "host names lead nowhere any more: restart the daemon", "err", err)
		}
	}()
	return nil
}

// listenIngress listens on an address or, given a path, on a unix socket that,
// like a port, everybody who gets there may use: its directory says who does.
func listenIngress(at string) (net.Listener, error) {
	if !strings.HasPrefix(at, "/") {
		return net.Listen("tcp", at)
	}
	// We hold the state lock; but a path of the operator's choice may be
	// anything.
	if info, err := os.Lstat(at); err == nil && info.Mode()&os.ModeSocket == 0 {
		return nil, fmt.Errorf("%s is there and is no socket: remove it, or choose another path", at)
	}
	if err := os.Remove(at); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove the old socket: %w", err)
	}
	ln, err := net.Listen("unix", at)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(at, 0o666); err != nil {
		ln.Close()
		return nil, err
	}
	return ln, nil
}

// checkIngress finds what cannot work in the part of the configuration that is
// about reaching in.
func (n networkConfig) checkIngress() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if a := n.PublishAddress; !a.IsValid() || a.IsMulticast() || a.Zone() != "" {
		bad("network.publish_address %s: use an address of this host, as 127.0.0.1", a)
	}
	if d := n.Domain; d != "" {
		if name, err := sandbox.NormalizeDomain(d); err != nil || name != d || strings.Contains(d, "*") {
			bad("network.domain %.100q: use a name in lower case without a dot at its ends, as sandbox.example.com", d)
		}
	}
	switch l := n.IngressListen; {
	case l == "":
	case n.Domain == "":
		bad("network.ingress_listen: needs network.domain, the end of every host name")
	case strings.HasPrefix(l, "/"):
		if filepath.Clean(l) != l {
			bad("network.ingress_listen %q: use a clean path", l)
		}
	default:
		if _, err := netip.ParseAddrPort(l); err != nil {
			bad("network.ingress_listen %q: use ADDRESS:PORT, as 127.0.0.1:8081, or the path of a unix socket", l)
		}
	}
	return errors.Join(errs...)
}
