package guard

import (
	"context"
	"io"
	"net"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/sandbox"
)

// StartProcess runs a command in one of the caller's sandboxes.
func (g *Manager) StartProcess(ctx context.Context, ref string, spec sandbox.ProcessSpec) (sandbox.Process, error) {
	_, ref, err := g.box(ctx, ref, changes)
	if err != nil {
		return sandbox.Process{}, err
	}
	return g.m.StartProcess(ctx, ref, spec)
}

// Exec runs a command in one of the caller's sandboxes.
func (g *Manager) Exec(ctx context.Context, ref string, spec sandbox.ProcessSpec) (sandbox.ProcessIO, error) {
	_, ref, err := g.box(ctx, ref, changes)
	if err != nil {
		return nil, err
	}
	return g.m.Exec(ctx, ref, spec)
}

// Run makes a sandbox within the quota and runs a command in it.
func (g *Manager) Run(ctx context.Context, req sandbox.CreateRequest, spec sandbox.ProcessSpec) (sandbox.Sandbox, sandbox.ProcessIO, error) {
	a, err := g.ask(ctx, changes)
	if err != nil {
		return sandbox.Sandbox{}, nil, err
	}
	if a == nil {
		return g.m.Run(ctx, req, spec)
	}
	release, err := g.admit(ctx, a, &req)
	if err != nil {
		return sandbox.Sandbox{}, nil, err
	}
	defer release() // it returns when the sandbox is there or gone, whatever becomes of the caller
	sb, p, err := g.m.Run(ctx, req, spec)
	return a.sandbox(sb), p, a.plain(err)
}

// Attach connects to a process of one of the caller's sandboxes. A viewer only
// reads.
func (g *Manager) Attach(ctx context.Context, ref string, id sandbox.ProcessID, offset int64) (sandbox.ProcessIO, error) {
	a, ref, err := g.box(ctx, ref, looks)
	if err != nil {
		return nil, err
	}
	p, err := g.m.Attach(ctx, ref, id, offset)
	if err == nil && a != nil && !a.MayChange() {
		p = watched{p, a}
	}
	return p, err
}

// Processes lists those of one of the caller's sandboxes.
func (g *Manager) Processes(ctx context.Context, ref string) ([]sandbox.Process, error) {
	_, ref, err := g.box(ctx, ref, looks)
	if err != nil {
		return nil, err
	}
	return g.m.Processes(ctx, ref)
}

// Process returns one of one of the caller's sandboxes.
func (g *Manager) Process(ctx context.Context, ref string, id sandbox.ProcessID) (sandbox.Process, error) {
	_, ref, err := g.box(ctx, ref, looks)
	if err != nil {
		return sandbox.Process{}, err
	}
	return g.m.Process(ctx, ref, id)
}

// SignalProcess signals one of one of the caller's sandboxes.
func (g *Manager) SignalProcess(ctx context.Context, ref string, id sandbox.ProcessID, signal string) error {
	_, ref, err := g.box(ctx, ref, changes)
	if err != nil {
		return err
	}
	return g.m.SignalProcess(ctx, ref, id, signal)
}

// KeptOutput returns what was kept of one of the caller's sandboxes.
func (g *Manager) KeptOutput(ctx context.Context, ref string, id sandbox.ProcessID) ([]byte, error) {
	_, ref, err := g.box(ctx, ref, looks)
	if err != nil {
		return nil, err
	}
	return g.m.KeptOutput(ctx, ref, id)
}

// Files returns the file work of one of the caller's sandboxes; of a viewer
// the reading half.
func (g *Manager) Files(ctx context.Context, ref string) (sandbox.Files, error) {
	a, ref, err := g.box(ctx, ref, looks)
	if err != nil {
		return nil, err
	}
	f, err := g.m.Files(ctx, ref)
	if err == nil && a != nil && !a.MayChange() {
		f = readOnly{f, a}
	}
	return f, err
}

// PublishPort opens a port of one of the caller's sandboxes on the host. Where
// it is listened for is the operator's to say, as are the well-known ports.
func (g *Manager) PublishPort(ctx context.Context, ref string, req sandbox.PortRequest, actor string) (sandbox.Port, error) {
	a, ref, err := g.box(ctx, ref, changes)
	switch {
	case err != nil:
		return sandbox.Port{}, err
	case a != nil && req.Address.IsValid():
		return sandbox.Port{}, forOperators("an address to listen on: leave it out for the daemon's own")
	case a != nil && req.HostPort > 0 && req.HostPort < 1024:
		return sandbox.Port{}, forOperators("a port of the host below 1024")
	}
	return g.m.PublishPort(ctx, ref, req, a.as(actor))
}

// Ports lists the published ports of the caller's sandboxes, or of one.
func (g *Manager) Ports(ctx context.Context, ref string) ([]sandbox.Port, error) {
	a, err := g.ask(ctx, looks)
	switch {
	case err != nil:
		return nil, err
	case a == nil:
		return g.m.Ports(ctx, ref)
	case ref != "":
		sb, err := g.rows.OwnByRef(ctx, a.Owner, ref)
		if err != nil {
			return nil, err
		}
		return g.m.Ports(ctx, string(sb.ID))
	}
	rows, err := g.rows.OwnPorts(ctx, a.Owner)
	if err != nil || len(rows) == 0 {
		return nil, err
	}
	own := map[string]bool{}
	for _, p := range rows {
		own[p.ID] = true
	}
	all, err := g.m.Ports(ctx, "") // as they are, not as they are written down
	return only(all, func(p sandbox.Port) bool { return own[p.ID] }), err
}

// UnpublishPort closes a port of one of the caller's sandboxes.
func (g *Manager) UnpublishPort(ctx context.Context, id, actor string) (sandbox.Port, error) {
	a, err := g.ask(ctx, changes)
	if err == nil && a != nil {
		_, err = g.rows.OwnPort(ctx, a.Owner, id)
	}
	if err != nil {
		return sandbox.Port{}, err
	}
	return g.m.UnpublishPort(ctx, id, a.as(actor))
}

// ReleaseHostName is for those who see all.
func (g *Manager) ReleaseHostName(ctx context.Context, name, actor string) (sandbox.HostName, error) {
	if err := g.operators(ctx, "host names keep owners apart"); err != nil {
		return sandbox.HostName{}, err
	}
	return g.m.ReleaseHostName(ctx, name, actor)
}

// NewPortToken makes what opens the host names of one of the caller's
// sandboxes.
func (g *Manager) NewPortToken(ctx context.Context, ref, actor string) (string, error) {
	a, ref, err := g.box(ctx, ref, changes)
	if err != nil {
		return "", err
	}
	return g.m.NewPortToken(ctx, ref, a.as(actor))
}

// RemovePortToken takes it back.
func (g *Manager) RemovePortToken(ctx context.Context, ref, actor string) error {
	a, ref, err := g.box(ctx, ref, changes)
	if err != nil {
		return err
	}
	return g.m.RemovePortToken(ctx, ref, a.as(actor))
}

// DialPort connects to a port of one of the caller's sandboxes.
func (g *Manager) DialPort(ctx context.Context, ref string, port int) (net.Conn, error) {
	_, ref, err := g.box(ctx, ref, changes)
	if err != nil {
		return nil, err
	}
	return g.m.DialPort(ctx, ref, port)
}

// only returns the items that may be seen.
func only[T any](all []T, see func(T) bool) []T {
	var out []T
	for _, v := range all {
		if see(v) {
			out = append(out, v)
		}
	}
	return out
}

// onlyLooks is the error of what a viewer may not do.
func (a *asker) onlyLooks() error {
	return sandbox.Errorf(sandbox.ErrForbidden, "role_forbidden", "the role %s only looks: this takes the role %s", a.Role, access.RoleDeveloper)
}

// watched is a connection that only reads.
type watched struct {
	sandbox.ProcessIO
	a *asker
}

func (w watched) WriteStdin([]byte) (int, error)  { return 0, w.a.onlyLooks() }
func (w watched) CloseStdin() error               { return w.a.onlyLooks() }
func (w watched) Resize(sandbox.WindowSize) error { return w.a.onlyLooks() }
func (w watched) Signal(string) error             { return w.a.onlyLooks() }

// readOnly are files that are only read.
type readOnly struct {
	f sandbox.Files
	a *asker
}

func (r readOnly) Stat(ctx context.Context, user, path string) (sandbox.FileInfo, error) {
	return r.f.Stat(ctx, user, path)
}

func (r readOnly) List(ctx context.Context, user, path string, depth int) ([]sandbox.FileInfo, error) {
	return r.f.List(ctx, user, path, depth)
}

func (r readOnly) Each(ctx context.Context, user, path string, depth int, f func(sandbox.FileInfo) error) error {
	return r.f.Each(ctx, user, path, depth, f)
}

func (r readOnly) Read(ctx context.Context, user, path string, offset, limit int64) (sandbox.FileInfo, io.ReadCloser, error) {
	return r.f.Read(ctx, user, path, offset, limit)
}

func (r readOnly) Watch(ctx context.Context, user, path string, recursive bool) (sandbox.FileWatch, error) {
	return r.f.Watch(ctx, user, path, recursive)
}

func (r readOnly) TarOut(ctx context.Context, user, path string) (io.ReadCloser, error) {
	return r.f.TarOut(ctx, user, path)
}

func (r readOnly) Write(context.Context, string, string, uint32, io.Reader) (sandbox.FileInfo, error) {
	return sandbox.FileInfo{}, r.a.onlyLooks()
}

func (r readOnly) Mkdir(context.Context, string, string, uint32) (sandbox.FileInfo, error) {
	return sandbox.FileInfo{}, r.a.onlyLooks()
}

func (r readOnly) Move(context.Context, string, string, string) error { return r.a.onlyLooks() }

func (r readOnly) Remove(context.Context, string, string, bool) error { return r.a.onlyLooks() }

func (r readOnly) Chmod(context.Context, string, string, uint32) error { return r.a.onlyLooks() }

func (r readOnly) TarIn(context.Context, string, string, io.Reader) error { return r.a.onlyLooks() }
