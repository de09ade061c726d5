package runtime

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// ending says why a sandbox ends.
type ending struct {
	reason   sandbox.Reason
	detail   string
	exitCode *int
	actor    string
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
// the error; then the sandbox stays "completing" and is tried again until
// nothing is left. Repeating it is safe.
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
	b.quiet()
	row, err := m.state.Sandbox(ctx, b.id)
	if err != nil {
		return err
	}
	if row.Status != sandbox.StatusCompleting {
		ch := state.Change{Reason: &e.reason, Detail: &e.detail, ExitCode: e.exitCode, Actor: e.actor}
		if row.Status == sandbox.StatusRunning {
			m.keepOutput(ctx, b, &ch)
		}
		row, err = m.move(ctx, b.id, sandbox.StatusCompleting, ch, row.Status)
		if err != nil {
			return err
		}
	}
	if err := m.takeDown(ctx, b, row); err != nil {
		m.log.Error("end sandbox: tried again later", "sandbox", b.id, "reason", row.Reason, "err", err)
		m.retryEnd(b, e)
		return err
	}
	return nil
}

// takeDown removes every kernel object of a completing sandbox and makes its
// row terminal. The row and its leases go last: while they stand, nobody
// else gets the address or the ids.
func (m *Manager) takeDown(ctx context.Context, b *box, row sandbox.Sandbox) error {
	usage, err := m.dropShell(ctx, b, row)
	if err != nil {
		return err
	}
	if err := m.roots.Discard(b.id, b.slot); err != nil {
		return err
	}
	to := sandbox.StatusCompleted
	if row.Reason.Failed() {
		to = sandbox.StatusFailed
	}
	now, pid := time.Now().UTC(), 0
	if _, err := m.move(ctx, b.id, to, state.Change{EndedAt: &now, Usage: usage, InitPID: &pid, Actor: "daemon"}, sandbox.StatusCompleting); err != nil {
		return err
	}
	m.dropBox(b.id)
	return nil
}

// dropShell kills everything of a sandbox and removes its shell: cgroup,
// network, sockets. The filesystem stays. It returns the final counters, or
// nil where the kernel had none any more.
func (m *Manager) dropShell(ctx context.Context, b *box, row sandbox.Sandbox) (*sandbox.Usage, error) {
	shell := b.letGo()
	if err := m.cgroup.Kill(ctx, b.id); err != nil {
		return nil, err
	}
	if shell != nil {
		// Outside any cgroup of ours it may still be: between libcontainer's
		// clone and its move. The pid is sure, because the descriptor is.
		if err := errors.Join(shell.Kill(), shell.Wait(ctx), shell.Close()); err != nil {
			return nil, err
		}
	}
	usage := m.readUsage(b, row)
	if err := m.net.Detach(ctx, b.id, b.slot); err != nil {
		return nil, err
	}
	if err := m.cgroup.Remove(ctx, b.id); err != nil {
		return nil, err
	}
	if err := m.shells.Remove(b.id); err != nil {
		return nil, err
	}
	return usage, nil
}

// retryEnd tries a teardown again until it works or the daemon ends.
func (m *Manager) retryEnd(b *box, e ending) {
	m.spawn(func() {
		select {
		case <-time.After(retryTeardown):
		case <-m.life.Done():
			return
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(m.life), teardownTimeout)
		defer cancel()
		_ = m.end(ctx, b, e) // logs, and comes back here
	})
}

// endSoon ends a sandbox in the background.
func (m *Manager) endSoon(b *box, e ending) {
	m.spawn(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(m.life), teardownTimeout)
		defer cancel()
		if err := m.end(ctx, b, e); err != nil {
			m.log.Warn("end sandbox", "sandbox", b.id, "reason", e.reason, "err", err)
		}
	})
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
		// A process that still runs has no last byte: what was there when we
		// began is enough.
		if out.Offset+int64(len(out.Data)) >= p.Output.End {
			return tail[max(0, len(tail)-tailBytes):]
		}
	}
}
