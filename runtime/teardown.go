package runtime

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/runtime/launch"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// ending says why a sandbox ends.
type ending struct {
	reason   sandbox.Reason
	detail   string
	exitCode *int
	actor    string
	// shell, if set, is the one whose end or idleness this is. Once that was
	// stopped, the reason is gone with it.
	shell *launch.Shell
}

// Bounds of what is kept of a sandbox that is gone.
const (
	tailBytes   = 64 << 10
	tailTimeout = time.Second
	keptOutputs = 16
)

// move changes a sandbox's status by compare-and-set.
func (m *Manager) move(ctx context.Context, id sandbox.ID, to sandbox.Status, ch state.Change, from ...sandbox.Status) (sandbox.Sandbox, error) {
	return m.state.Move(ctx, id, from, to, ch)
}

// end ends a living sandbox: the one teardown, for every reason. It returns
// when the kernel holds nothing of it any more, or, where that fails, with
// the error; then the sandbox stays visible and is tried again until nothing
// is left. Repeating it is safe. With code sandbox_busy it was not begun.
func (m *Manager) end(ctx context.Context, b *box, e ending) error {
	if err := b.lock(ctx); err != nil {
		return err
	}
	defer b.unlock()
	if m.box(b.id) != b {
		return nil // somebody else ended it while we waited
	}
	return m.endLocked(ctx, b, e)
}

// endLocked is end for a caller that holds the box.
func (m *Manager) endLocked(ctx context.Context, b *box, e ending) error {
	err := m.tryEnd(ctx, b, e)
	if err != nil {
		m.log.Error("end sandbox: tried again later", "sandbox", b.id, "reason", e.reason, "err", err)
		m.later(func() { m.endInTime(b, e) })
	}
	return err
}

func (m *Manager) tryEnd(ctx context.Context, b *box, e ending) error {
	row, err := m.state.Sandbox(ctx, b.id)
	if err != nil {
		return err
	}
	if row.Status.Terminal() { // written by a try that did not hear of it
		m.dropBox(b.id)
		return nil
	}
	if row.Status != sandbox.StatusCompleting {
		if e.shell != nil && e.shell != b.present() {
			return nil
		}
		ch := state.Change{Reason: &e.reason, Detail: &e.detail, ExitCode: e.exitCode, Actor: e.actor}
		if row.Status == sandbox.StatusRunning || row.Status == sandbox.StatusPaused {
			m.keepOutput(ctx, b, &ch)
		}
		row, err = m.move(ctx, b.id, sandbox.StatusCompleting, ch, row.Status)
		if err != nil {
			return err
		}
	}
	b.quiet()
	return m.takeDown(ctx, b, row)
}

// takeDown removes every kernel object of a completing sandbox and makes its
// row terminal. The row and its leases go last: while they stand, nobody
// else gets the address or the ids.
func (m *Manager) takeDown(ctx context.Context, b *box, row sandbox.Sandbox) error {
	if err := m.dropShell(ctx, b, row); err != nil {
		return err
	}
	if err := m.roots.Discard(b.id, row.Slot); err != nil {
		return err
	}
	to := sandbox.StatusCompleted
	if row.Reason.Failed() {
		to = sandbox.StatusFailed
	}
	now := time.Now().UTC()
	if _, err := m.move(ctx, b.id, to, state.Change{EndedAt: &now, Actor: "daemon"}, sandbox.StatusCompleting); err != nil {
		return err
	}
	m.dropBox(b.id)
	return nil
}

// dropShell kills everything of a sandbox and removes its shell: cgroup,
// network, sockets. The filesystem stays; the counters go to the row.
func (m *Manager) dropShell(ctx context.Context, b *box, row sandbox.Sandbox) error {
	shell := b.letGo()
	if err := m.cgroup.Kill(ctx, b.id); err != nil {
		return err
	}
	if shell != nil {
		// Outside any cgroup of ours it may still be: between libcontainer's
		// clone and its move. The pid is sure, because the descriptor is.
		if err := errors.Join(shell.Kill(), shell.Wait(ctx), shell.Close()); err != nil {
			return err
		}
	}
	if err := m.count(ctx, b, row); err != nil {
		return err
	}
	if err := m.net.Detach(ctx, b.id, row.Slot); err != nil {
		return err
	}
	if err := m.cgroup.Remove(ctx, b.id); err != nil {
		return err
	}
	return m.shells.Remove(b.id)
}

// count writes the final counters of a dead shell down, once, before what
// holds them is removed. The same write takes PID 1's start time out of the
// row: by that recovery knows not to count the shell again.
func (m *Manager) count(ctx context.Context, b *box, row sandbox.Sandbox) error {
	if _, counted := b.counters(); counted {
		return nil
	}
	usage := m.readUsage(b, row)
	if err := m.state.Update(ctx, b.id, state.Change{Usage: usage, InitPID: new(int), InitStart: new(uint64)}); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.counted = true
	if usage != nil {
		b.earlier = *usage
	}
	return nil
}

// later runs f after a while, unless the daemon ends before.
func (m *Manager) later(f func()) {
	m.spawn(func() {
		select {
		case <-time.After(m.retry):
			f()
		case <-m.life.Done():
		}
	})
}

// endSoon ends a sandbox in the background.
func (m *Manager) endSoon(b *box, e ending) { m.spawn(func() { m.endInTime(b, e) }) }

// endInTime is end without a caller who would repeat it.
func (m *Manager) endInTime(b *box, e ending) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(m.life), teardownTimeout)
	defer cancel()
	if err := m.end(ctx, b, e); sandbox.CodeOf(err) == codeBusy {
		m.later(func() { m.endInTime(b, e) })
	}
}

// keepOutput saves how the sandbox's processes ended and the end of their
// output, which die with PID 1. A PID 1 that does not answer costs a second.
func (m *Manager) keepOutput(ctx context.Context, b *box, ch *state.Change) {
	ctx, cancel := context.WithTimeout(ctx, tailTimeout)
	defer cancel()
	procs, err := b.guest.Processes(ctx)
	if err != nil {
		m.log.Info("last output is lost: PID 1 does not answer", "sandbox", b.id, "err", err)
		return
	}
	if len(procs) > keptOutputs {
		procs = procs[len(procs)-keptOutputs:]
	}
	for _, p := range slices.Backward(procs) {
		tail := m.tail(ctx, b, p)
		if len(ch.LastOutput) == 0 || p.Main {
			if len(tail) > 0 {
				ch.LastOutput = tail
			}
		}
		if err := m.state.PutProcess(ctx, b.id, p, tail); err != nil {
			m.log.Warn("keep the record of a process", "sandbox", b.id, "process", p.ID, "err", err)
		}
	}
}

// tail reads the last bytes of a process's output.
func (m *Manager) tail(ctx context.Context, b *box, p sandbox.Process) []byte {
	if p.Output.End == p.Output.Start {
		return nil
	}
	io, err := b.guest.Attach(ctx, p.ID, max(p.Output.Start, p.Output.End-tailBytes))
	if err != nil {
		return nil
	}
	defer io.Close()
	var tail []byte
	for {
		out, err := io.Next()
		if err != nil {
			return tail
		}
		tail = append(tail, out.Data...)
		tail = tail[max(0, len(tail)-tailBytes):] // PID 1 may send without end
		// A process that still runs has no last byte: what was there when we
		// began is enough.
		if out.Offset+int64(len(out.Data)) >= p.Output.End {
			return tail
		}
	}
}
