package runtime

import (
	"context"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// stopGrace is how long processes have between TERM and KILL at a stop.
const stopGrace = 5 * time.Second

// Remove ends a sandbox with reason cancelled and returns its last record.
// An ended one is returned as it is.
func (m *Manager) Remove(ctx context.Context, ref, actor string) (sandbox.Sandbox, error) {
	sb, err := m.Sandbox(ctx, ref)
	if err != nil || sb.Status.Terminal() {
		return sb, err
	}
	b := m.box(sb.ID)
	if b == nil { // it ended just now
		return m.state.Sandbox(ctx, sb.ID)
	}
	work, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownTimeout)
	defer cancel()
	e := ending{reason: sandbox.ReasonCancelled, detail: "removed on request", actor: actor}
	if sb.Status == sandbox.StatusRunning {
		if main, ok := m.mainEnded(work, b); ok {
			e = main
		}
	}
	if err := m.end(work, b, e); err != nil {
		return sb, sandbox.Errorf(sandbox.ErrUnavailable, "removal_incomplete", "sandbox %s is not all gone yet and is being tried again: %w", sb.ID, err)
	}
	return m.state.Sandbox(work, sb.ID)
}

// Pause freezes the workload; memory is kept.
func (m *Manager) Pause(ctx context.Context, ref, actor string) (sandbox.Sandbox, error) {
	return m.change(ctx, ref, func(ctx context.Context, b *box, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
		if sb.Status != sandbox.StatusRunning {
			return sb, wrongState(sb, "pause", sandbox.StatusRunning)
		}
		if err := m.cgroup.Freeze(ctx, b.id); err != nil {
			return sb, err
		}
		row, err := m.move(ctx, b.id, sandbox.StatusPaused, state.Change{Actor: actor}, sandbox.StatusRunning)
		if err != nil {
			return sb, err
		}
		b.note(func(c *idleClock) { c.paused = true })
		return row, nil
	})
}

// Resume lets a paused sandbox go on.
func (m *Manager) Resume(ctx context.Context, ref, actor string) (sandbox.Sandbox, error) {
	return m.change(ctx, ref, func(ctx context.Context, b *box, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
		if sb.Status != sandbox.StatusPaused {
			return sb, wrongState(sb, "resume", sandbox.StatusPaused)
		}
		if err := m.cgroup.Thaw(ctx, b.id); err != nil {
			return sb, err
		}
		row, err := m.move(ctx, b.id, sandbox.StatusRunning, state.Change{Actor: actor}, sandbox.StatusPaused)
		if err != nil {
			return sb, err
		}
		b.note(func(c *idleClock) { c.paused = false })
		return row, nil
	})
}

// Stop ends every process and keeps the filesystem: TERM first, KILL after
// five seconds. Start goes on from there.
func (m *Manager) Stop(ctx context.Context, ref, actor string) (sandbox.Sandbox, error) {
	return m.change(ctx, ref, func(ctx context.Context, b *box, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
		if sb.Status != sandbox.StatusRunning && sb.Status != sandbox.StatusPaused {
			return sb, wrongState(sb, "stop", sandbox.StatusRunning, sandbox.StatusPaused)
		}
		b.quiet()
		ch := state.Change{Actor: actor}
		if sb.Status == sandbox.StatusRunning {
			m.terminate(ctx, b)
			m.keepOutput(ctx, b, &ch)
		}
		usage, err := m.dropShell(ctx, b, sb)
		if err != nil {
			return sb, err
		}
		if err := m.roots.Clean(b.id); err != nil {
			return sb, err
		}
		pid := 0
		ch.InitPID, ch.Usage = &pid, usage
		row, err := m.move(ctx, b.id, sandbox.StatusStopped, ch, sb.Status)
		if err != nil {
			return sb, err
		}
		m.armDeadline(b, row)
		return row, nil
	})
}

// Start gives a stopped sandbox a new shell on its old filesystem.
func (m *Manager) Start(ctx context.Context, ref, actor string) (sandbox.Sandbox, error) {
	return m.change(ctx, ref, func(ctx context.Context, b *box, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
		if sb.Status != sandbox.StatusStopped {
			return sb, wrongState(sb, "start", sandbox.StatusStopped)
		}
		image, err := m.state.ImageOf(ctx, b.id)
		if err != nil {
			return sb, err
		}
		b.mu.Lock()
		b.earlier = sb.Usage
		b.mu.Unlock()
		row, err := m.move(ctx, b.id, sandbox.StatusCreating, state.Change{Actor: actor}, sandbox.StatusStopped)
		if err != nil {
			return sb, err
		}
		up, err := m.bringUp(ctx, b, row, image, actor)
		if err != nil {
			return sb, m.backToStopped(ctx, b, row, err)
		}
		return up, nil
	})
}

// backToStopped undoes a start that failed: the filesystem must not be lost
// with it.
func (m *Manager) backToStopped(ctx context.Context, b *box, row sandbox.Sandbox, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownTimeout)
	defer cancel()
	if _, err := m.dropShell(ctx, b, row); err != nil {
		m.log.Error("start sandbox: its shell is not all gone", "sandbox", b.id, "err", err)
		return cause
	}
	if err := m.roots.Clean(b.id); err != nil {
		m.log.Error("start sandbox: prepare its files for the next start", "sandbox", b.id, "err", err)
	}
	detail, pid := "start failed: "+explain(cause), 0
	if _, err := m.move(ctx, b.id, sandbox.StatusStopped, state.Change{Detail: &detail, InitPID: &pid, Actor: "daemon"}, sandbox.StatusCreating); err != nil {
		m.log.Error("start sandbox: back to stopped", "sandbox", b.id, "err", err)
	}
	return cause
}

// change runs a status change under the box's lock, on a context that
// outlives the caller.
func (m *Manager) change(ctx context.Context, ref string, f func(context.Context, *box, sandbox.Sandbox) (sandbox.Sandbox, error)) (sandbox.Sandbox, error) {
	b, sb, err := m.find(ctx, ref)
	if err != nil {
		return sb, err
	}
	if err := b.lock(ctx); err != nil {
		return sb, err
	}
	defer b.unlock()
	work, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer cancel()
	if sb, err = m.state.Sandbox(work, b.id); err != nil {
		return sb, err
	}
	if m.box(b.id) != b {
		return sb, ended(sb)
	}
	return f(work, b, sb)
}

func wrongState(sb sandbox.Sandbox, verb string, want ...sandbox.Status) error {
	return sandbox.Errorf(sandbox.ErrConflict, "wrong_state", "cannot %s sandbox %s: it is %s, not %v", verb, sb.ID, sb.Status, want[0])
}

// terminate asks every process to end and waits for that, up to stopGrace.
func (m *Manager) terminate(ctx context.Context, b *box) {
	ctx, cancel := context.WithTimeout(ctx, stopGrace)
	defer cancel()
	for first := true; ; first = false {
		procs, err := b.guest.Processes(ctx)
		if err != nil {
			return
		}
		live := 0
		for _, p := range procs {
			if p.Exit != nil {
				continue
			}
			live++
			if first {
				_ = b.guest.Signal(ctx, p.ID, "SIGTERM") // one that ended meanwhile is fine
			}
		}
		if live == 0 {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(20 * time.Millisecond):
		}
	}
}
