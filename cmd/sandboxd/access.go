package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/certs"
	"github.com/sandboxd/sandboxd/state"
)

// The fits of packages that must not know each other.
var (
	_ access.Store      = (*state.DB)(nil)
	_ access.AuditStore = (*state.DB)(nil)
	_ server.Office     = (*access.Office)(nil)
	_ server.Audit      = (*access.Journal)(nil)
)

// tlsDir is where 'sandboxd tls init' puts its files, and where they are
// looked for.
const tlsDir = "/etc/sandboxd/tls"

// accessConfig is about who may do what.
type accessConfig struct {
	SocketRole access.Role `yaml:"socket_role"` // of users on the socket of whom nothing else was said
	PerAddress int         `yaml:"connections_per_address"`
	Most       int         `yaml:"max_connections"` // over TCP
}

func builtinAccess() accessConfig {
	return accessConfig{SocketRole: access.RoleDeveloper, PerAddress: 256, Most: 4096}
}

// checkAccess finds mistakes about who may do what, and from where.
func (c config) checkAccess() []error {
	var errs []error
	if !c.Access.SocketRole.Valid() {
		errs = append(errs, fmt.Errorf("access.socket_role %q: use admin, operator, developer or viewer", c.Access.SocketRole))
	}
	if a := c.Access; a.PerAddress < 1 || a.Most < a.PerAddress || a.Most > 1<<20 {
		errs = append(errs, errors.New("access: use 1 or more connections_per_address, and no fewer max_connections"))
	}
	for name, path := range map[string]string{"tls_cert": c.TLSCert, "tls_key": c.TLSKey} {
		if !filepath.IsAbs(path) {
			errs = append(errs, fmt.Errorf("%s %q: use an absolute path", name, path))
		}
	}
	if c.Listen != "" {
		if err := checkListen(c.Listen); err != nil {
			errs = append(errs, fmt.Errorf("listen %w", err))
		}
	}
	return errs
}

// checkListen judges an address to listen at.
func checkListen(at string) error {
	host, port, err := net.SplitHostPort(at)
	if err == nil && host != "" {
		_, err = netip.ParseAddr(host)
	}
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		return fmt.Errorf("%.80q: use an address and a port, as 0.0.0.0:7463 or [::]:7463", at)
	}
	return nil
}

// openAccess opens the office of keys and the audit, which is written to its
// end before the database is closed.
func openAccess(ctx context.Context, c config, db *state.DB, log *slog.Logger, opened *closers) (*access.Office, *access.Journal, error) {
	office, err := access.Open(ctx, access.Config{Store: db, SocketRole: c.Access.SocketRole, Self: uint32(os.Geteuid()), Log: log})
	if err != nil {
		return nil, nil, err
	}
	journal := access.OpenJournal(db, log)
	opened.add(journal.Close)
	opened.add(func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		return office.Close(ctx)
	})
	return office, journal, nil
}

// listenAll opens the unix socket and, where the configuration asks for it,
// the address for TLS.
func listenAll(c config, log *slog.Logger) ([]net.Listener, error) {
	ln, err := listenForGood(c, log)
	if err != nil {
		return nil, err
	}
	all := []net.Listener{server.BoundedUnix(ln, uint32(os.Geteuid()), c.Access.Most/4, c.Access.Most)}
	if c.Listen != "" {
		secure, err := listenTLS(c, c.Listen, log)
		if err != nil {
			return nil, errors.Join(err, ln.Close())
		}
		all = append(all, secure)
	}
	return all, nil
}

// checkCertificate finds what listenTLS would not find or could not read.
func (c config) checkCertificate() error {
	at := c.Listen
	if e, err := netip.ParseAddrPort(c.E2B.Listen); at == "" && err == nil && !e.Addr().IsLoopback() {
		at = c.E2B.Listen
	}
	if at == "" {
		return nil
	}
	_, err := openCertificate(c, at, slog.New(slog.DiscardHandler))
	return err
}

func openCertificate(c config, at string, log *slog.Logger) (*certs.Pair, error) {
	pair, err := certs.Open(c.TLSCert, c.TLSKey, log)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("listen at %s: %w; nothing is served over TCP without TLS: run 'sandboxd tls init --host NAME' to make a certificate, or name yours with tls_cert and tls_key", at, err)
	}
	return pair, err
}

// listenTLS listens at an address for connections with TLS, bounded.
func listenTLS(c config, at string, log *slog.Logger) (net.Listener, error) {
	pair, err := openCertificate(c, at, log)
	if err != nil {
		return nil, err
	}
	ln, err := net.Listen("tcp", at)
	if err != nil {
		return nil, fmt.Errorf("listen at %s: %w", at, err)
	}
	log.Info("listening with TLS", "address", ln.Addr().String(), "certificate", c.TLSCert)
	return tls.NewListener(server.Bounded(ln, c.Access.PerAddress, c.Access.Most), pair.TLS()), nil
}

// serveAll serves until ctx ends, or one of the listeners does.
func serveAll(ctx context.Context, h http.Handler, all []net.Listener) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, ln := range all {
		g.Go(func() error { return server.Serve(ctx, ln, h) })
	}
	return g.Wait()
}
