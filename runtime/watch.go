package runtime

import (
	"context"
	"errors"
	"io"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/runtime/launch"
	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	// drainTimeout is how long a sandbox outlives its main process for the
	// sake of clients that still take output.
	drainTimeout = 10 * time.Second
	// returnTimeout is how long clients of an earlier daemon have to come back to
	// a main process that ended meanwhile.
	returnTimeout = 5 * time.Second
	// oomWindow is how close to a counted OOM kill a SIGKILL must come to be
	// called one.
	oomWindow = 5 * time.Second
)

// watch starts everything that looks after a running sandbox: PID 1's end,
// its processes, its deadline and its idle clock. Ends of processes up to
// number recorded are in the event log already.
func (m *Manager) watch(b *box, row sandbox.Sandbox, shell *launch.Shell, recorded int64) {
	ctx, cancel := context.WithCancel(m.life)
	b.mu.Lock()
	b.unwatch, b.points, b.owner = cancel, row.Spec.AutoSnapshot, row.Owner
	b.mu.Unlock()
	m.armDeadline(b, row)
	b.note(func(c *idleClock) {
		c.after = time.Duration(row.Spec.IdleTimeoutSeconds) * time.Second
		c.paused = row.Status == sandbox.StatusPaused
		c.live = 0
		c.expired = func(since int64) {
			m.endSoon(b, ending{reason: sandbox.ReasonIdle, detail: "no process ran and nobody called for the idle timeout", actor: "daemon", shell: shell, idleSince: since})
		}
	})
	m.spawn(func() { m.watchShell(ctx, b, shell) })
	f := &follower{m: m, b: b, shell: shell, recorded: recorded, reading: newBucket(readRate, readBurst), recording: newBucket(recordRate, recordBurst), asking: newBucket(askRate, askBurst)}
	m.spawn(func() { f.run(ctx) })
}

// watchShell ends the sandbox when PID 1 dies unasked.
func (m *Manager) watchShell(ctx context.Context, b *box, shell *launch.Shell) {
	if err := shell.Wait(ctx); err != nil {
		if ctx.Err() == nil {
			m.log.ErrorContext(ctx, "watch PID 1: tried again", "sandbox", b.id, "err", err)
			m.later(func() { m.watchShell(ctx, b, shell) })
		}
		return
	}
	b.mu.Lock()
	expected := b.expected
	b.mu.Unlock()
	if !expected {
		m.endSoon(b, ending{reason: sandbox.ReasonCrashed, detail: "PID 1 ended on its own", actor: "daemon", shell: shell})
	}
}

// record appends an event; a log that cannot be written is told, not fatal.
func (m *Manager) record(ctx context.Context, e sandbox.Event) {
	e.Time = time.Now().UTC()
	if _, err := m.state.AppendEvent(ctx, e); err != nil {
		m.unrecorded(ctx, e, err)
	}
}

// recordSoon is record for what is told often and nobody waits for.
func (m *Manager) recordSoon(ctx context.Context, e sandbox.Event) {
	e.Time = time.Now().UTC()
	m.state.NoteEvent(e, func(err error) { m.unrecorded(ctx, e, err) })
}

func (m *Manager) unrecorded(ctx context.Context, e sandbox.Event, err error) {
	if ctx.Err() == nil {
		m.log.WarnContext(ctx, "write event", "type", e.Type, "sandbox", e.Sandbox, "err", err)
	}
}

// mainEnding is how a sandbox ends whose main process ended so.
func mainEnding(x sandbox.ExitStatus) ending {
	e := ending{reason: sandbox.ReasonExited, detail: "its main command ended", exitCode: &x.Code, actor: "daemon"}
	switch {
	case x.OOM:
		e.reason, e.detail = sandbox.ReasonOOM, "the kernel killed its workload for memory"
	case x.TimedOut:
		e.reason, e.detail = sandbox.ReasonTimeout, "its main command ran over its time"
	}
	return e
}

// mainEnded asks PID 1 whether the main process has ended already: a client
// that saw its end may ask for removal before the daemon heard of it.
func (m *Manager) mainEnded(ctx context.Context, b *box) (ending, bool) {
	b.mu.Lock()
	main := b.main
	b.mu.Unlock()
	if main == nil {
		return ending{}, false
	}
	ctx, cancel := context.WithTimeout(ctx, tailTimeout)
	defer cancel()
	p, err := b.guest.Process(ctx, main.id)
	if err != nil || p.Exit == nil {
		return ending{}, false
	}
	m.judge(b, p.Exit)
	e := mainEnding(*p.Exit)
	e.main = p.ID
	return e, true
}

// judge marks a SIGKILL as the kernel's when the sandbox's count of OOM
// kills rose just before. Of many ends it asks for the count once.
func (m *Manager) judge(b *box, ends ...*sandbox.ExitStatus) {
	asked := false
	for _, e := range ends {
		if e == nil || e.Signal != "SIGKILL" || e.TimedOut {
			continue
		}
		if !asked {
			m.lookForOOM(b)
			asked = true
		}
		b.mu.Lock()
		at := b.oomAt
		b.mu.Unlock()
		if !at.IsZero() && e.At.Sub(at).Abs() < oomWindow {
			e.OOM = true
		}
	}
}

// lookForOOM notes whether the kernel's count of OOM kills rose.
func (m *Manager) lookForOOM(b *box) {
	u, err := m.cgroup.Usage(b.id)
	if err != nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if u.OOMKills > b.oomKills {
		b.oomKills, b.oomAt = u.OOMKills, time.Now()
	}
}

// attached is a client's connection to a process: it counts as activity and
// holds the end of the sandbox back while it drains a main process.
type attached struct {
	sandbox.ProcessIO
	m      *Manager
	b      *box
	shell  *launch.Shell // whose process it is
	main   *mainProcess  // nil of any other process
	leave  func()
	heard  func()      // called with its first word, and later
	closed atomic.Bool // by the client
}

func (m *Manager) attach(b *box, shell *launch.Shell, leave func(), p sandbox.ProcessIO) *attached {
	a := &attached{ProcessIO: p, m: m, b: b, shell: shell, leave: leave, heard: func() {}}
	if proc := p.Process(); proc.Main {
		b.mu.Lock()
		a.main = b.mainOf(proc.ID)
		a.main.readers++
		b.mu.Unlock()
	}
	return a
}

// Next reads on. The end is told once what the command changed can be undone.
func (a *attached) Next() (sandbox.Output, error) {
	out, err := a.ProcessIO.Next()
	a.heard()
	if err == nil {
		return out, nil
	}
	if errors.Is(err, io.EOF) {
		a.m.restorePoint(a.b, a.Process())
	}
	return out, a.whole(err)
}

// OpenStdin implements sandbox.StdinSession.
func (a *attached) OpenStdin(id int64, taken func(total int64, closed bool)) error {
	s, ok := a.ProcessIO.(sandbox.StdinSession)
	if !ok {
		return sandbox.Errorf(sandbox.ErrUnsupported, "no_session", "this sandbox's init takes input as it comes only")
	}
	return s.OpenStdin(id, taken)
}

// Feed gives the process input.
func (a *attached) Feed(ctx context.Context, data []byte, end bool) error {
	f, ok := a.ProcessIO.(sandbox.Feeder)
	if !ok {
		return sandbox.Errorf(sandbox.ErrUnsupported, "no_feeding", "this sandbox's init takes input on a stream only")
	}
	return f.Feed(ctx, data, end)
}

// Exit tells how the process ended, with the cause only the host knows.
func (a *attached) Exit() (sandbox.ExitStatus, bool) {
	e, ok := a.ProcessIO.Exit()
	if ok {
		a.m.judge(a.b, &e)
	}
	return e, ok
}

// Close lets go; a second call does nothing, whoever makes it: who reads and
// who is told that nobody waits any more do so at once.
func (a *attached) Close() error {
	if a.closed.Swap(true) {
		return nil
	}
	a.leave()
	a.heard()
	if a.main != nil {
		a.b.mu.Lock()
		a.main.readers--
		if a.main.readers == 0 && a.main.drained != nil {
			close(a.main.drained)
			a.main.drained = nil
		}
		a.b.mu.Unlock()
	}
	return a.ProcessIO.Close()
}
