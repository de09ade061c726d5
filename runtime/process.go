package runtime

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/runtime/launch"
	"github.com/sandboxd/sandboxd/sandbox"
)

// StartProcess starts a command in the background.
func (m *Manager) StartProcess(ctx context.Context, ref string, spec sandbox.ProcessSpec) (p sandbox.Process, err error) {
	ctx, done := m.observe(ctx, WorkExec)
	defer func() { done(err) }()
	if err := spec.Validate(); err != nil {
		return sandbox.Process{}, err
	}
	b, err := m.running(ctx, ref)
	if err != nil {
		return sandbox.Process{}, err
	}
	if err := m.imageCommand(ctx, b, &spec); err != nil {
		return sandbox.Process{}, err
	}
	defer b.enter()()
	shell := b.present()
	p, err = b.guest.Start(ctx, spec)
	return p, m.fate(b, shell, err)
}

// Exec starts a command and connects to it in one step.
func (m *Manager) Exec(ctx context.Context, ref string, spec sandbox.ProcessSpec) (_ sandbox.ProcessIO, err error) {
	ctx, done := m.observe(ctx, WorkExec)
	defer func() { done(err) }()
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	b, err := m.running(ctx, ref)
	if err != nil {
		return nil, err
	}
	if err := m.imageCommand(ctx, b, &spec); err != nil {
		return nil, err
	}
	leave, heard, shell := b.enter(), m.hurry.begin(), b.present()
	p, err := b.guest.Exec(m.charged(ctx, b), spec)
	if err != nil {
		leave()
		heard()
		return nil, m.fate(b, shell, err)
	}
	a := m.attach(b, shell, leave, p)
	a.heard = heard
	return a, nil
}

// Run makes a sandbox and starts a command in it. A command that cannot
// start leaves no sandbox, nor does a caller who goes away before it could;
// one who goes away later only loses the connection. A sandbox that the
// idempotency key made before stays as it is: nothing is run again, and the
// error is of class ErrConflict.
func (m *Manager) Run(ctx context.Context, req sandbox.CreateRequest, spec sandbox.ProcessSpec) (sandbox.Sandbox, sandbox.ProcessIO, error) {
	if err := spec.Validate(); err != nil {
		return sandbox.Sandbox{}, nil, err
	}
	// Nobody else knows the new sandbox: it is for us to see it through.
	work := context.WithoutCancel(ctx)
	sb, existed, err := m.createOnce(work, req)
	switch {
	case err != nil:
		return sb, nil, err
	case existed:
		return sb, nil, sandbox.Errorf(sandbox.ErrConflict, "already_run", "the idempotency key made sandbox %s before: nothing is run again; an exec in it with the same key and command streams what was run", sb.ID)
	}
	var p sandbox.ProcessIO
	spec.IdempotencyKey = req.IdempotencyKey // so that an exec with it leads there
	if err = ctx.Err(); err == nil {
		p, err = m.Exec(work, string(sb.ID), spec)
	}
	if err != nil {
		_, rerr := m.Remove(work, string(sb.ID), req.Actor)
		return sb, nil, errors.Join(err, rerr)
	}
	return sb, p, nil
}

// Attach connects to a process from an output offset on; a negative one
// means the oldest byte kept.
func (m *Manager) Attach(ctx context.Context, ref string, id sandbox.ProcessID, offset int64) (sandbox.ProcessIO, error) {
	b, err := m.running(ctx, ref)
	if err != nil {
		return nil, err
	}
	leave, shell := b.enter(), b.present()
	p, err := b.guest.Attach(m.charged(ctx, b), id, offset)
	if err != nil {
		leave()
		return nil, m.fate(b, shell, err)
	}
	return m.attach(b, shell, leave, p), nil
}

// Processes lists a sandbox's processes: PID 1's own list while it runs, the
// records kept of it otherwise.
func (m *Manager) Processes(ctx context.Context, ref string) ([]sandbox.Process, error) {
	sb, err := m.Sandbox(ctx, ref)
	if err != nil {
		return nil, err
	}
	// What is frozen are the processes, not PID 1.
	if b := m.box(sb.ID); b != nil && (sb.Status == sandbox.StatusRunning || sb.Status == sandbox.StatusPaused) {
		procs, err := b.guest.Processes(m.charged(ctx, b))
		ends := make([]*sandbox.ExitStatus, len(procs))
		for i := range procs {
			ends[i] = procs[i].Exit
		}
		m.judge(b, ends...)
		return procs, err
	}
	kept, err := m.state.Processes(ctx, sb.ID)
	if err != nil {
		return nil, err
	}
	procs := make([]sandbox.Process, len(kept))
	for i, k := range kept {
		procs[i] = k.Process
	}
	return procs, nil
}

// Process returns one process's record.
func (m *Manager) Process(ctx context.Context, ref string, id sandbox.ProcessID) (sandbox.Process, error) {
	procs, err := m.Processes(ctx, ref)
	if err != nil {
		return sandbox.Process{}, err
	}
	for _, p := range procs {
		if p.ID == id {
			return p, nil
		}
	}
	return sandbox.Process{}, sandbox.Errorf(sandbox.ErrNotFound, "process_not_found", "no process %.40q in sandbox %s: 'sandbox ps %s' lists them", id, ref, ref)
}

// SignalProcess sends a signal to a process's whole tree.
func (m *Manager) SignalProcess(ctx context.Context, ref string, id sandbox.ProcessID, signal string) error {
	b, err := m.running(ctx, ref)
	if err != nil {
		return err
	}
	defer b.enter()()
	return m.fate(b, b.present(), b.guest.Signal(ctx, id, signal))
}

// KeptOutput returns the end of a process's output as kept when its sandbox
// stopped or ended; without an id, that of the last one.
func (m *Manager) KeptOutput(ctx context.Context, ref string, id sandbox.ProcessID) ([]byte, error) {
	sb, err := m.Sandbox(ctx, ref)
	if err != nil {
		return nil, err
	}
	if id == "" {
		return sb.LastOutput, nil
	}
	kept, err := m.state.Processes(ctx, sb.ID)
	if err != nil {
		return nil, err
	}
	for _, k := range kept {
		if k.ID == id {
			return k.Tail, nil
		}
	}
	return nil, sandbox.Errorf(sandbox.ErrNotFound, "process_not_found", "no output is kept of process %.40q of sandbox %s", id, ref)
}

// Files returns the file work of a running sandbox.
func (m *Manager) Files(ctx context.Context, ref string) (sandbox.Files, error) {
	b, err := m.running(ctx, ref)
	if err != nil {
		return nil, err
	}
	return &files{g: b.guest, m: m, b: b, shell: b.present(), resets: b.resets.Load(), over: func() bool { return m.memoryOver(ctx, b) }}, nil
}

// files counts each piece of file work as activity. Work that breaks off says
// what became of the sandbox.
type files struct {
	g      sandbox.Files
	m      *Manager
	b      *box
	shell  *launch.Shell // whose files they are
	resets int64         // of the sandbox before
	over   func() bool   // the sandbox has more memory than it may
}

// fate turns the end of file work into the error that says what became of the
// sandbox, where that ended it.
func (f *files) fate(err error) error {
	if f.b.resets.Load() != f.resets && (brokeOff(err) || errors.Is(err, io.EOF)) {
		return sandbox.Errorf(sandbox.ErrConflict, sandbox.CodeReset, "sandbox %s was put back on other files by a reset, rollback or undo, which ended the work on its files: begin it again", f.b.id)
	}
	return f.m.fate(f.b, f.shell, err)
}

// lentEvery is how often a sandbox is looked at that has files in memory which
// PID 1 wrote.
const lentEvery = 500 * time.Millisecond

// memoryOver reports whether a workload has, with the files in memory that PID 1
// wrote for it, more memory than it may. As long as there are such files, its
// own limit is lower by them.
func (m *Manager) memoryOver(ctx context.Context, b *box) bool {
	if m.cgroup.MemoryLent(b.id) == 0 {
		return false
	}
	sb, err := m.state.Sandbox(ctx, b.id)
	most := sb.Spec.Limits.MemoryBytes
	if err != nil || most == 0 {
		return false
	}
	_, over := m.cgroup.ShareMemory(b.id, most)
	if b.lent.CompareAndSwap(false, true) {
		m.spawn(func() {
			for m.life.Err() == nil && m.box(b.id) == b {
				if lent, _ := m.cgroup.ShareMemory(b.id, most); lent == 0 {
					b.lent.Store(false)
					// Who wrote just before left it to this one.
					if m.cgroup.MemoryLent(b.id) == 0 || !b.lent.CompareAndSwap(false, true) {
						return
					}
				}
				pause(m.life, lentEvery)
			}
		})
	}
	return over
}

// memoryEvery is after how many bytes of a file its sandbox's memory is looked
// at again.
const memoryEvery = 1 << 20

// inMemory is what a client writes to a sandbox. It breaks off where the
// sandbox has its memory full: a file may lie in /dev/shm, and PID 1, which
// writes it, is not bound by the workload's limit.
type inMemory struct {
	io.Reader
	over   func() bool
	unseen *atomic.Int64 // bytes until the next look, of all who write to the sandbox
}

func (r *inMemory) Read(p []byte) (int, error) {
	if r.unseen.Load() <= 0 {
		if r.over() {
			return 0, sandbox.Errorf(sandbox.ErrExhausted, "memory_full", "the sandbox has as much memory in use as it may, files in /dev/shm and other file systems in memory among it: remove some of those, or raise its limit")
		}
		r.unseen.Store(memoryEvery)
	}
	n, err := r.Reader.Read(p[:min(len(p), memoryEvery)])
	r.unseen.Add(-int64(n))
	return n, err
}

func (f *files) Stat(ctx context.Context, user, path string) (sandbox.FileInfo, error) {
	defer f.b.enter()()
	info, err := f.g.Stat(ctx, user, path)
	return info, f.fate(err)
}

func (f *files) List(ctx context.Context, user, path string, depth int) ([]sandbox.FileInfo, error) {
	defer f.b.enter()()
	all, err := f.g.List(f.m.charged(ctx, f.b), user, path, depth)
	return all, f.fate(err)
}

func (f *files) Each(ctx context.Context, user, path string, depth int, g func(sandbox.FileInfo) error) error {
	defer f.b.enter()()
	return f.fate(f.g.Each(f.m.charged(ctx, f.b), user, path, depth, g))
}

func (f *files) Read(ctx context.Context, user, path string, offset, limit int64) (sandbox.FileInfo, io.ReadCloser, error) {
	leave := f.b.enter()
	info, r, err := f.g.Read(ctx, user, path, offset, limit)
	if err != nil {
		leave()
		return info, nil, f.fate(err)
	}
	return info, &leaving{ReadCloser: r, f: f, leave: leave}, nil
}

func (f *files) Write(ctx context.Context, user, path string, mode uint32, r io.Reader) (sandbox.FileInfo, error) {
	defer f.b.enter()()
	info, err := f.g.Write(ctx, user, path, mode, &inMemory{Reader: r, over: f.over, unseen: &f.b.unseen})
	return info, f.fate(err)
}

func (f *files) Mkdir(ctx context.Context, user, path string, mode uint32) (sandbox.FileInfo, error) {
	defer f.b.enter()()
	info, err := f.g.Mkdir(ctx, user, path, mode)
	return info, f.fate(err)
}

func (f *files) Move(ctx context.Context, user, from, to string) error {
	defer f.b.enter()()
	return f.fate(f.g.Move(ctx, user, from, to))
}

func (f *files) Remove(ctx context.Context, user, path string, recursive bool) error {
	defer f.b.enter()()
	return f.fate(f.g.Remove(ctx, user, path, recursive))
}

func (f *files) Chmod(ctx context.Context, user, path string, mode uint32) error {
	defer f.b.enter()()
	return f.fate(f.g.Chmod(ctx, user, path, mode))
}

func (f *files) Watch(ctx context.Context, user, path string, recursive bool) (sandbox.FileWatch, error) {
	leave := f.b.enter()
	w, err := f.g.Watch(ctx, user, path, recursive)
	if err != nil {
		leave()
		return nil, f.fate(err)
	}
	return &leavingWatch{FileWatch: w, f: f, leave: leave}, nil
}

func (f *files) TarOut(ctx context.Context, user, path string) (io.ReadCloser, error) {
	leave := f.b.enter()
	r, err := f.g.TarOut(ctx, user, path)
	if err != nil {
		leave()
		return nil, f.fate(err)
	}
	return &leaving{ReadCloser: r, f: f, leave: leave}, nil
}

func (f *files) TarIn(ctx context.Context, user, path string, r io.Reader) error {
	defer f.b.enter()()
	return f.fate(f.g.TarIn(ctx, user, path, &inMemory{Reader: r, over: f.over, unseen: &f.b.unseen}))
}

// Agent returns the file work of an agent.
func (f *files) Agent(owner string) sandbox.AgentFiles {
	a := &agentFiles{files: *f}
	if g, ok := f.g.(sandbox.Agents); ok {
		a.agent = g.Agent(owner)
		a.g = a.agent
	}
	return a
}

// agentFiles is files for an agent.
type agentFiles struct {
	files
	agent sandbox.AgentFiles
}

// SetAttrs adds extended attributes to a file.
func (a *agentFiles) SetAttrs(ctx context.Context, path string, attrs map[string]string) error {
	if a.agent == nil {
		return sandbox.Errorf(sandbox.ErrUnsupported, "no_attributes", "this sandbox's init sets no attributes: start it anew")
	}
	defer a.b.enter()()
	return a.fate(a.agent.SetAttrs(ctx, path, attrs))
}

// leaving ends a call's activity with its stream.
type leaving struct {
	io.ReadCloser
	f      *files
	leave  func()
	closed atomic.Bool // by the client
}

func (l *leaving) Read(p []byte) (int, error) {
	n, err := l.ReadCloser.Read(p)
	if err != nil && err != io.EOF && !l.closed.Load() { //nolint:errorlint // as io.Reader has it: the whole was read
		err = l.f.fate(err)
	}
	return n, err
}

// WriteTo keeps the stream's own fast path.
func (l *leaving) WriteTo(w io.Writer) (int64, error) {
	n, err := io.Copy(w, l.ReadCloser)
	if err != nil && !l.closed.Load() {
		err = l.f.fate(err)
	}
	return n, err
}

func (l *leaving) Close() error { l.closed.Store(true); l.leave(); return l.ReadCloser.Close() }

type leavingWatch struct {
	sandbox.FileWatch
	f      *files
	leave  func()
	closed atomic.Bool // by the client
}

func (l *leavingWatch) Next() (sandbox.FileEvent, error) {
	e, err := l.FileWatch.Next()
	if err != nil && !l.closed.Load() {
		err = l.f.fate(err)
	}
	return e, err
}

func (l *leavingWatch) Close() error { l.closed.Store(true); l.leave(); return l.FileWatch.Close() }

// clip shortens s to at most n bytes of its own.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}
