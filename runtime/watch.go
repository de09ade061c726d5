package runtime

import (
	"context"
	"time"

	"github.com/sandboxd/sandboxd/runtime/launch"
	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	// drainTimeout is how long a sandbox outlives its main process for the
	// sake of clients that still take output.
	drainTimeout = 10 * time.Second
	// reconnect is how long the daemon waits before it asks a PID 1 again
	// that broke the event stream off.
	reconnect = 200 * time.Millisecond
	// oomWindow is how close to a counted OOM kill a SIGKILL must come to be
	// called one.
	oomWindow = 5 * time.Second
)

// watch starts everything that looks after a running sandbox: PID 1's end,
// its processes, its deadline and its idle clock.
func (m *Manager) watch(b *box, row sandbox.Sandbox, shell *launch.Shell) {
	ctx, cancel := context.WithCancel(m.life)
	b.mu.Lock()
	b.unwatch = cancel
	b.mu.Unlock()
	m.armDeadline(b, row)
	b.note(func(c *idleClock) {
		c.after = time.Duration(row.Spec.IdleTimeoutSeconds) * time.Second
		c.paused = row.Status == sandbox.StatusPaused
		c.live = 0
		c.expired = func() {
			m.endSoon(b, ending{reason: sandbox.ReasonIdle, detail: "no process ran and nobody called for the idle timeout", actor: "daemon"})
		}
	})
	m.spawn(func() { m.watchShell(ctx, b, shell) })
	m.spawn(func() { m.watchProcesses(ctx, b) })
}

// armDeadline starts the timer of the sandbox's lifetime.
func (m *Manager) armDeadline(b *box, row sandbox.Sandbox) {
	if row.Deadline == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ttl != nil {
		b.ttl.Stop()
	}
	b.ttl = time.AfterFunc(time.Until(*row.Deadline), func() {
		m.endSoon(b, ending{reason: sandbox.ReasonTTL, detail: "its lifetime was over", actor: "daemon"})
	})
}

// watchShell ends the sandbox when PID 1 dies unasked.
func (m *Manager) watchShell(ctx context.Context, b *box, shell *launch.Shell) {
	if err := shell.Wait(ctx); err != nil {
		if ctx.Err() == nil {
			m.log.Error("watch PID 1", "sandbox", b.id, "err", err)
		}
		return
	}
	b.mu.Lock()
	expected := b.expected
	b.mu.Unlock()
	if !expected {
		m.endSoon(b, ending{reason: sandbox.ReasonCrashed, detail: "PID 1 ended on its own", actor: "daemon"})
	}
}

// watchProcesses follows PID 1's process events for the idle clock, the
// event log and the main process. A stream that breaks is opened again where
// it stopped.
func (m *Manager) watchProcesses(ctx context.Context, b *box) {
	var seq int64
	for ctx.Err() == nil {
		stream, err := b.guest.Events(ctx, seq)
		if err == nil {
			seq, err = m.follow(ctx, b, stream, seq)
		}
		if ctx.Err() != nil {
			return
		}
		m.log.Debug("process events broke off", "sandbox", b.id, "err", err)
		select {
		case <-ctx.Done():
		case <-time.After(reconnect):
		}
	}
}

// follow reads one event stream to its end and returns the last sequence
// number seen.
func (m *Manager) follow(ctx context.Context, b *box, stream ProcessEvents, seq int64) (int64, error) {
	stop := context.AfterFunc(ctx, func() { _ = stream.Close() })
	defer stop()
	defer stream.Close()
	for {
		e, err := stream.Next()
		if err != nil {
			return seq, err
		}
		seq = e.Seq
		b.note(func(c *idleClock) { c.live = max(0, e.Live) })
		if e.Type != processExited || e.Process.Exit == nil {
			continue
		}
		p := e.Process
		m.judge(b, p.Exit)
		m.record(ctx, sandbox.Event{Sandbox: b.id, Type: "process.exited", Actor: "daemon", Data: exitData(p)})
		if p.Main {
			m.spawn(func() { m.endWithMain(ctx, b, p) })
		}
	}
}

// record appends an event; a log that cannot be written is told, not fatal.
func (m *Manager) record(ctx context.Context, e sandbox.Event) {
	e.Time = time.Now().UTC()
	if _, err := m.state.AppendEvent(ctx, e); err != nil && ctx.Err() == nil {
		m.log.Warn("write event", "type", e.Type, "sandbox", e.Sandbox, "err", err)
	}
}

func exitData(p sandbox.Process) map[string]string {
	d := map[string]string{"process": string(p.ID), "command": clip(p.Argv[0], 200)}
	d["exit_code"] = itoa(p.Exit.Code)
	if p.Exit.Signal != "" {
		d["signal"] = p.Exit.Signal
	}
	if p.Exit.OOM {
		d["oom"] = "true"
	}
	if p.Exit.TimedOut {
		d["timed_out"] = "true"
	}
	return d
}

// endWithMain ends the sandbox after its main process, once clients have
// taken what it wrote.
func (m *Manager) endWithMain(ctx context.Context, b *box, p sandbox.Process) {
	b.mu.Lock()
	if b.main.id != p.ID {
		b.main = mainProcess{id: p.ID} // an earlier daemon started it
	}
	drained := make(chan struct{})
	if b.main.readers == 0 {
		close(drained)
	} else {
		b.main.drained = drained
	}
	b.mu.Unlock()
	select {
	case <-drained:
	case <-time.After(drainTimeout):
	case <-ctx.Done():
		return
	}
	m.endSoon(b, mainEnding(*p.Exit))
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
	id := b.main.id
	b.mu.Unlock()
	if id == "" {
		return ending{}, false
	}
	ctx, cancel := context.WithTimeout(ctx, tailTimeout)
	defer cancel()
	p, err := b.guest.Process(ctx, id)
	if err != nil || p.Exit == nil {
		return ending{}, false
	}
	m.judge(b, p.Exit)
	return mainEnding(*p.Exit), true
}

// judge marks a SIGKILL as the kernel's when the sandbox's count of OOM
// kills rose just before.
func (m *Manager) judge(b *box, e *sandbox.ExitStatus) {
	if e.Signal != "SIGKILL" || e.TimedOut {
		return
	}
	u, err := m.cgroup.Usage(b.id)
	if err != nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if u.OOMKills > b.oomKills {
		b.oomKills, b.oomAt = u.OOMKills, time.Now()
	}
	if !b.oomAt.IsZero() && e.At.Sub(b.oomAt).Abs() < oomWindow {
		e.OOM = true
	}
}

// attached is a client's connection to a process: it counts as activity and
// holds the end of the sandbox back while it drains a main process.
type attached struct {
	sandbox.ProcessIO
	m     *Manager
	b     *box
	leave func()
}

func (m *Manager) attach(b *box, leave func(), p sandbox.ProcessIO) *attached {
	proc := p.Process()
	if proc.Main {
		b.mu.Lock()
		if b.main.id != proc.ID {
			b.main = mainProcess{id: proc.ID}
		}
		b.main.readers++
		b.mu.Unlock()
	}
	return &attached{ProcessIO: p, m: m, b: b, leave: leave}
}

// Exit tells how the process ended, with the cause only the host knows.
func (a *attached) Exit() (sandbox.ExitStatus, bool) {
	e, ok := a.ProcessIO.Exit()
	if ok {
		a.m.judge(a.b, &e)
	}
	return e, ok
}

// Close lets go; a second call does nothing.
func (a *attached) Close() error {
	if a.leave == nil {
		return nil
	}
	a.leave()
	a.leave = nil
	proc := a.Process()
	if proc.Main {
		a.b.mu.Lock()
		a.b.main.readers--
		if a.b.main.readers == 0 && a.b.main.drained != nil {
			close(a.b.main.drained)
			a.b.main.drained = nil
		}
		a.b.mu.Unlock()
	}
	return a.ProcessIO.Close()
}
