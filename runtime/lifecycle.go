package runtime

import (
	"context"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// stopGrace is how long processes have between TERM and KILL at a stop.
const stopGrace = 5 * time.Second

// stopAnswer is how long PID 1 may take to list them: one that hangs is killed
// with all it has.
const stopAnswer = 2 * time.Second

// Remove ends a sandbox with reason cancelled and returns its last record.
// An ended one is returned as it is.
func (m *Manager) Remove(ctx context.Context, ref, actor string) (sandbox.Sandbox, error) {
	if err := m.open(); err != nil {
		return sandbox.Sandbox{}, err
	}
	b := m.box(sandbox.ID(ref)) // of an id that lives the database is not asked
	if b == nil {
		sb, err := m.Sandbox(ctx, ref)
		if err != nil || sb.Status.Terminal() {
			return sb, err
		}
		if b = m.box(sb.ID); b == nil { // it ended just now
			return m.state.Sandbox(ctx, sb.ID)
		}
	}
	work, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownTimeout)
	defer cancel()
	e := ending{reason: sandbox.ReasonCancelled, detail: "removed on request", actor: actor}
	if b.runs() {
		if main, ok := m.mainEnded(work, b); ok {
			e = main
		}
	}
	err := m.end(work, b, e)
	if sandbox.CodeOf(err) == codeBusy {
		return sandbox.Sandbox{ID: b.id}, err
	}
	if err != nil {
		return sandbox.Sandbox{ID: b.id}, sandbox.Errorf(sandbox.ErrUnavailable, "removal_incomplete", "sandbox %s is not all gone yet and is being tried again: %w", b.id, err)
	}
	if sb, ok := b.lastRecord(); ok {
		return sb, nil
	}
	return m.state.Sandbox(work, b.id)
}

// Pause freezes the workload; memory is kept.
func (m *Manager) Pause(ctx context.Context, ref, actor string) (sandbox.Sandbox, error) {
	return m.change(ctx, ref, func(ctx context.Context, b *box, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
		if sb.Status != sandbox.StatusRunning {
			return sb, wrongState(sb, "pause", sandbox.StatusRunning)
		}
		return m.setFrozen(ctx, b, sb, sandbox.StatusPaused, unreasoned(actor))
	})
}

// Resume lets a paused sandbox go on.
func (m *Manager) Resume(ctx context.Context, ref, actor string) (sandbox.Sandbox, error) {
	return m.change(ctx, ref, func(ctx context.Context, b *box, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
		if sb.Status != sandbox.StatusPaused {
			return sb, wrongState(sb, "resume", sandbox.StatusPaused)
		}
		if err := m.allow(payersOf(sb)); err != nil {
			return sb, err
		}
		return m.goOn(ctx, b, sb, actor)
	})
}

// goOn lets a paused sandbox go on, with a lifetime.
func (m *Manager) goOn(ctx context.Context, b *box, sb sandbox.Sandbox, actor string) (sandbox.Sandbox, error) {
	ch := unreasoned(actor)
	ch.Deadline = newDeadline(sb)
	row, err := m.setFrozen(ctx, b, sb, sandbox.StatusRunning, ch)
	if err == nil {
		m.armDeadline(b, row)
	}
	return row, err
}

// unreasoned is a change that takes away why a sandbox was paused or stopped.
func unreasoned(actor string) state.Change {
	return state.Change{Actor: actor, Reason: new(sandbox.Reason), Detail: new(string)}
}

// setFrozen makes a living sandbox paused or running. Where that fails the
// workload goes on as the row says; recovery does the same after a crash.
func (m *Manager) setFrozen(ctx context.Context, b *box, sb sandbox.Sandbox, to sandbox.Status, ch state.Change) (sandbox.Sandbox, error) {
	row := sb
	err := m.freezeAs(ctx, b.id, to)
	if err == nil {
		row, err = m.move(ctx, b.id, to, ch, sb.Status)
	}
	if err != nil {
		if back := m.freezeAs(ctx, b.id, sb.Status); back != nil {
			m.log.ErrorContext(ctx, "undo a change of status: the workload is not as its row says", "sandbox", b.id, "status", sb.Status, "err", back)
		}
		return sb, err
	}
	b.note(func(c *idleClock) { c.paused = to == sandbox.StatusPaused })
	return row, nil
}

// freezeAs freezes or thaws a workload as a status demands.
func (m *Manager) freezeAs(ctx context.Context, id sandbox.ID, s sandbox.Status) error {
	if s == sandbox.StatusPaused {
		return m.cgroup.Freeze(ctx, id)
	}
	return m.cgroup.Thaw(ctx, id)
}

// Stop ends every process and keeps the filesystem: TERM first, KILL after
// five seconds. Start goes on from there. Once begun it comes to its end,
// also after a crash.
func (m *Manager) Stop(ctx context.Context, ref, actor string) (sandbox.Sandbox, error) {
	return m.stop(ctx, ref, state.Change{Actor: actor})
}

func (m *Manager) stop(ctx context.Context, ref string, ch state.Change) (sandbox.Sandbox, error) {
	return m.changeAs(ctx, WorkStop, ref, func(ctx context.Context, b *box, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
		if sb.Status != sandbox.StatusRunning && sb.Status != sandbox.StatusPaused {
			return sb, wrongState(sb, "stop", sandbox.StatusRunning, sandbox.StatusPaused)
		}
		// The intent: a shell without a PID 1 to watch is one to be stopped.
		if err := m.state.Update(ctx, b.id, state.Change{InitPID: new(int)}); err != nil {
			return sb, err
		}
		if sb.Status == sandbox.StatusRunning {
			m.terminate(ctx, b)
		}
		return m.halt(ctx, b, sb, ch)
	})
}

// halting tells of a row whose way leads to stopped: a stop was begun, or a
// start of a stopped sandbox came to nothing.
func halting(sb sandbox.Sandbox) bool {
	switch sb.Status {
	case sandbox.StatusRunning, sandbox.StatusPaused:
		return sb.InitPID == 0
	case sandbox.StatusCreating:
		return sb.StartedAt != nil
	}
	return false
}

// halt takes down the shell of a halting sandbox, keeps its files and makes
// its row stopped. Where that fails it is tried again until it works.
func (m *Manager) halt(ctx context.Context, b *box, sb sandbox.Sandbox, ch state.Change) (sandbox.Sandbox, error) {
	if err := m.open(); err != nil {
		return sb, err
	}
	b.quiet()
	row, err := m.tryHalt(ctx, b, sb, &ch)
	if err != nil {
		m.log.ErrorContext(ctx, "stop sandbox: tried again later", "sandbox", b.id, "err", err)
		m.later(func() { m.haltAgain(b, ch) })
		return sb, sandbox.Errorf(sandbox.ErrUnavailable, "stop_incomplete", "sandbox %s is not all stopped yet and is being tried again: %w", b.id, err)
	}
	m.armDeadline(b, row)
	return row, nil
}

func (m *Manager) tryHalt(ctx context.Context, b *box, sb sandbox.Sandbox, ch *state.Change) (sandbox.Sandbox, error) {
	if sb.Status != sandbox.StatusCreating && ch.LastOutput == nil {
		m.keepOutput(ctx, b, ch)
	}
	if err := m.keepKeys(ctx, b, sb); err != nil {
		return sb, err
	}
	m.meterNow(b)
	if err := m.dropShell(ctx, b, sb); err != nil {
		return sb, err
	}
	if err := m.roots.Clean(b.id); err != nil {
		return sb, err
	}
	return m.move(ctx, b.id, sandbox.StatusStopped, *ch, sb.Status)
}

// keepKeys writes down what idempotency keys have started, before PID 1, which
// knows, is killed. One that does not answer takes them along.
func (m *Manager) keepKeys(ctx context.Context, b *box, sb sandbox.Sandbox) error {
	if sb.Status == sandbox.StatusCreating { // it started nothing, and may not have been given what there was
		return nil
	}
	ask, cancel := context.WithTimeout(ctx, stopAnswer)
	defer cancel()
	keys, err := b.guest.CloseKeys(ask)
	if err != nil {
		m.log.InfoContext(ctx, "idempotency keys of commands are lost: PID 1 does not answer", "sandbox", b.id, "err", err)
		return nil
	}
	if len(keys) == 0 {
		return nil
	}
	return m.state.PutCommandKeys(ctx, b.id, keys)
}

// haltAgain is halt for one that failed before, unless things went on since.
func (m *Manager) haltAgain(b *box, ch state.Change) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(m.life), teardownTimeout)
	defer cancel()
	if b.lock(ctx) != nil {
		m.later(func() { m.haltAgain(b, ch) })
		return
	}
	defer b.unlock()
	row, err := m.state.Sandbox(ctx, b.id)
	if err != nil {
		m.later(func() { m.haltAgain(b, ch) })
		return
	}
	switch {
	case m.box(b.id) != b:
	case halting(row):
		_, _ = m.halt(ctx, b, row, ch) // logs, and comes back here
	case row.Status == sandbox.StatusStopped: // by a try that did not hear of it
		m.armDeadline(b, row)
	}
}

// Start gives a stopped sandbox a new shell on its old filesystem.
func (m *Manager) Start(ctx context.Context, ref, actor string) (sandbox.Sandbox, error) {
	return m.changeAs(ctx, WorkStart, ref, func(ctx context.Context, b *box, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
		if sb.Status != sandbox.StatusStopped {
			return sb, wrongState(sb, "start", sandbox.StatusStopped)
		}
		if err := m.allow(payersOf(sb)); err != nil {
			return sb, err
		}
		r, err := m.wholeRoot(ctx, b.id, sb)
		if err == nil {
			err = m.filesOf(ctx, &sb)
		}
		if err != nil {
			return sb, err
		}
		b.mu.Lock()
		b.earlier, b.cut = sb.Usage, cutNone
		b.mu.Unlock()
		row, err := m.move(ctx, b.id, sandbox.StatusCreating, unreasoned(actor), sandbox.StatusStopped)
		if err != nil {
			m.later(func() { m.haltAgain(b, startFailed(err)) }) // it may have been written all the same
			return sb, err
		}
		up, err := m.bringUp(ctx, b, row, stacked(r), actor)
		if err != nil {
			clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownTimeout)
			defer cancel()
			_, _ = m.halt(clean, b, row, startFailed(err)) // logs, and tries again by itself
			return sb, err
		}
		return up, nil
	})
}

// startFailed is what a start that came to nothing leaves in the row: the
// filesystem must not be lost with it.
func startFailed(cause error) state.Change {
	detail := "start failed: " + explain(cause)
	return state.Change{Detail: &detail, Actor: "daemon"}
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

// changeAs is change, observed.
func (m *Manager) changeAs(ctx context.Context, w Work, ref string, f func(context.Context, *box, sandbox.Sandbox) (sandbox.Sandbox, error)) (sandbox.Sandbox, error) {
	if err := m.open(); err != nil {
		return sandbox.Sandbox{}, err
	}
	ctx, done := m.observe(ctx, w)
	sb, err := m.change(ctx, ref, f)
	done(err)
	return sb, err
}

func wrongState(sb sandbox.Sandbox, verb string, want ...sandbox.Status) error {
	return sandbox.Errorf(sandbox.ErrConflict, "wrong_state", "cannot %s sandbox %s: it is %s, not %v", verb, sb.ID, sb.Status, want[0])
}

// terminate asks every process to end and waits for that, up to stopGrace.
func (m *Manager) terminate(ctx context.Context, b *box) {
	b.setCut(cutStop)
	ctx, cancel := context.WithTimeout(ctx, stopGrace)
	defer cancel()
	for first := true; ; first = false {
		ask, enough := context.WithTimeout(ctx, stopAnswer)
		procs, err := b.guest.Processes(ask)
		enough()
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
