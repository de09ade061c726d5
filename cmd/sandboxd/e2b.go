package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/api/e2b"
	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/guard"
	"github.com/sandboxd/sandboxd/ingress"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/sandbox"
)

var _ e2b.Manager = (*guard.Manager)(nil)

// e2bConfig is about clients of the E2B SDK.
type e2bConfig struct {
	Listen string `yaml:"listen"` // ADDRESS:PORT; empty: nowhere
	Domain string `yaml:"domain"` // ends the host names of sandboxes, with a port if clients need one
}

// check finds what cannot work.
func (c e2bConfig) check() (errs []error) {
	if c.Listen != "" {
		at, err := netip.ParseAddrPort(c.Listen)
		if err != nil || at.Port() == 0 {
			errs = append(errs, fmt.Errorf("e2b.listen %q: use ADDRESS:PORT, as 127.0.0.1:3000; other than loopback addresses need tls_cert and tls_key", c.Listen))
		}
	}
	if c.Domain == "" {
		return errs
	}
	name, port, hasPort := strings.Cut(c.Domain, ":")
	n, err := sandbox.NormalizeDomain(name)
	if err != nil || n != name || strings.Contains(name, "*") {
		errs = append(errs, fmt.Errorf("e2b.domain %.100q: use a name in lower case, with a port if clients need one, as sbx.example.com:3000", c.Domain))
	}
	if _, err := netip.ParseAddrPort("0.0.0.0:" + port); hasPort && err != nil {
		errs = append(errs, fmt.Errorf("e2b.domain %.100q: %q is no port", c.Domain, port))
	}
	return errs
}

// dialect serves clients of the E2B SDK.
type dialect struct{ srv *http.Server }

// Bounds of a connection. What a client sends and takes has none: it may be a
// file, or the output of a day.
const (
	e2bHeaders  = 30 * time.Second
	e2bIdle     = 3 * time.Minute
	e2bMaxHead  = 64 << 10
	e2bKeyFile  = "e2b.key"
	e2bRotated  = "e2b.rotated"
	e2bShutdown = 2 * time.Second
)

// openE2B listens, where that is configured.
func openE2B(ctx context.Context, c config, m *runtime.Manager, guarded e2b.Manager, in *ingress.Ingress, office *access.Office, audit notes, log *slog.Logger) (*dialect, error) {
	if c.E2B.Listen == "" {
		return &dialect{}, nil
	}
	secret, err := e2b.Secret(filepath.Join(c.StateDir, e2bKeyFile))
	if err != nil {
		return nil, err
	}
	rotated, err := e2b.OpenRotations(filepath.Join(c.StateDir, e2bRotated), m.IDs())
	if err != nil {
		return nil, err
	}
	ln, err := listenE2B(c, log)
	if err != nil {
		return nil, fmt.Errorf("e2b.listen: %w", err)
	}
	handler := e2b.New(e2b.Config{
		Manager: guarded, Callers: e2bCallers{office, audit}, Note: noteDeeds(audit, office),
		Find:   func(ctx context.Context, id sandbox.ID) (sandbox.Sandbox, error) { return m.Sandbox(ctx, string(id)) },
		Living: m.IDs, Secret: secret, Rotated: rotated, Admits: in.Admits, Domain: c.E2B.Domain, DefaultImage: c.Image, Log: log,
	})
	d := &dialect{&http.Server{
		Handler: server.Hasty(handler), ConnContext: server.ConnContext, ReadHeaderTimeout: e2bHeaders, IdleTimeout: e2bIdle, MaxHeaderBytes: e2bMaxHead,
		BaseContext: func(net.Listener) context.Context { return context.WithoutCancel(ctx) },
		ErrorLog:    slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}}
	log.InfoContext(ctx, "clients of the E2B SDK are served", "listen", ln.Addr().String(), "domain", c.E2B.Domain)
	go func() {
		if err := d.srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
			log.ErrorContext(ctx, "clients of the E2B SDK are served no more: restart the daemon", "err", err)
		}
	}()
	return d, nil
}

// listenE2B listens in plain HTTP on a loopback address, elsewhere with TLS:
// keys must not go over a wire in the clear.
func listenE2B(c config, log *slog.Logger) (net.Listener, error) {
	at, err := netip.ParseAddrPort(c.E2B.Listen)
	if err != nil {
		return nil, err
	}
	if !at.Addr().IsLoopback() {
		return listenTLS(c, c.E2B.Listen, log)
	}
	ln, err := net.Listen("tcp", c.E2B.Listen)
	if err != nil {
		return nil, err
	}
	return server.Bounded(ln, c.Access.PerAddress, c.Access.Most), nil
}

// close lets short requests end; streams are cut, their commands go on.
func (d *dialect) close(ctx context.Context) error {
	if d.srv == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), e2bShutdown)
	defer cancel()
	if err := d.srv.Shutdown(ctx); err != nil {
		return d.srv.Close()
	}
	return nil
}

// notes keeps who changed what.
type notes interface {
	Ready() error
	Note(e access.AuditRow)
}

// noteDeeds puts what clients of the dialect change into the audit.
func noteDeeds(audit notes, office *access.Office) func(context.Context, e2b.Deed) {
	return func(ctx context.Context, d e2b.Deed) {
		c, _ := access.Of(ctx)
		audit.Note(access.AuditRow{
			Time: time.Now().UTC(), Owner: c.Owner, Key: c.Key, Role: c.Role, From: c.From,
			Operation: d.Operation, Object: d.Object, Status: d.Status, Code: d.Code,
		})
		if d.Status >= http.StatusBadRequest {
			office.HoldBack(ctx, c)
		}
	}
}

// e2bCallers tells who calls: the holder of a key, or for the data of one
// sandbox its owner.
type e2bCallers struct {
	office *access.Office
	audit  notes
}

// Authenticate looks for a key, and counts a request of its owner.
func (c e2bCallers) Authenticate(r *http.Request) (context.Context, string, error) {
	key := r.Header.Get("X-Api-Key")
	if bearer, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer "); key == "" && ok {
		key = bearer
	}
	caller, err := c.office.ByKey(r.Context(), key, r.RemoteAddr)
	if err == nil {
		if err = c.office.Pace(caller); err != nil {
			c.office.HoldBack(r.Context(), caller)
		}
	}
	if err == nil {
		err = server.Admitted(r.Context(), caller.Owner)
	}
	if err == nil && r.Method != http.MethodGet {
		err = c.audit.Ready() // what cannot be noted is not done
	}
	if err != nil {
		return nil, "", err
	}
	return access.With(r.Context(), caller), caller.Owner, nil
}

// holderKey is under which a context has whose right let a request in, where
// that is not who it acts as.
type holderKey struct{}

// Acting lets who has a sandbox's token do with it what its owner may, as long
// as the key the token was given to may act there.
func (c e2bCallers) Acting(r *http.Request, box sandbox.Sandbox, key string) (context.Context, error) {
	holder, err := c.office.ByKeyID(key)
	switch {
	case err != nil:
		return nil, err
	case !holder.Sees(box.Owner) || !holder.MayChange():
		return nil, sandbox.Errorf(sandbox.ErrForbidden, "role_forbidden", "key %s may not act in sandbox %s", key, box.ID)
	}
	if err := c.office.Pace(holder); err != nil {
		c.office.HoldBack(r.Context(), holder)
		return nil, err
	}
	if err := server.Admitted(r.Context(), holder.Owner); err != nil {
		return nil, err
	}
	if err := c.audit.Ready(); err != nil {
		return nil, err
	}
	ctx := context.WithValue(r.Context(), holderKey{}, holder)
	return access.With(ctx, access.Caller{Owner: box.Owner, Role: access.RoleDeveloper, Key: key, From: "token of " + string(box.ID) + ", " + r.RemoteAddr}), nil
}

// Guest lets anybody at what a sandbox shows to anybody, as long as its owner
// may act.
func (c e2bCallers) Guest(r *http.Request, box sandbox.Sandbox) (context.Context, error) {
	owner, err := c.office.Standing(box.Owner)
	if err == nil && !owner.MayChange() {
		err = sandbox.Errorf(sandbox.ErrForbidden, "role_forbidden", "owner %s only looks", box.Owner)
	}
	if err == nil {
		err = server.Admitted(r.Context(), box.Owner)
	}
	if err != nil {
		return nil, err
	}
	ctx := context.WithValue(r.Context(), holderKey{}, owner)
	return access.With(ctx, access.Caller{Owner: box.Owner, Role: access.RoleDeveloper, From: "traffic of " + string(box.ID) + ", " + r.RemoteAddr}), nil
}

// ActingKeys lists the keys that may act on what an owner has.
func (c e2bCallers) ActingKeys(owner string) []string { return c.office.ActingKeys(owner) }

// Hold has cut called when what let a request in goes away.
func (c e2bCallers) Hold(ctx context.Context, cut func()) (release func()) {
	holder, ok := ctx.Value(holderKey{}).(access.Caller)
	if !ok {
		holder, _ = access.Of(ctx)
	}
	return c.office.Hold(holder, func(error) { cut() })
}

// Refused counts a request that brought nothing good.
func (c e2bCallers) Refused(r *http.Request) error { return c.office.Refused(r.RemoteAddr) }
