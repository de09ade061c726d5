package runtime

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

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
	// main, if set, is the process whose end this is. Once the sandbox was
	// reset, the reason is gone with it.
	main sandbox.ProcessID
	// idleSince is, of an idle sandbox, the last change of its idle clock. Once
	// there was another, the reason is gone.
	idleSince int64
}

// promptDeath is how long a sandbox may take to die before its row says more
// than that it runs.
const promptDeath = 100 * time.Millisecond

// Bounds of what is kept of a sandbox that is gone.
const (
	tailBytes   = 64 << 10
	tailTimeout = time.Second
	keptOutputs = 16
)

// move changes a sandbox's status by compare-and-set.
func (m *Manager) move(ctx context.Context, id sandbox.ID, to sandbox.Status, ch state.Change, from ...sandbox.Status) (sandbox.Sandbox, error) {
	b := m.box(id)
	if b == nil {
		return m.state.Move(ctx, id, from, to, ch)
	}
	var sb sandbox.Sandbox
	err := m.turn(b, to, &ch, func() (err error) {
		sb, err = m.state.Move(ctx, id, from, to, ch)
		return err
	})
	if err == nil {
		b.setStatus(to, sb.Reason)
		if to == sandbox.StatusRunning {
			m.budgets.begun(b)
		}
	}
	return sb, err
}

// end ends a living sandbox: the one teardown, for every reason. It returns
// when nothing of it can run any more and its counters are written, or, where
// that fails, with the error; then the sandbox stays visible and is tried
// again. What the kernel holds of it otherwise goes in the background.
// Repeating it is safe. With code sandbox_busy it was not begun.
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
	if err := m.open(); err != nil {
		m.log.WarnContext(ctx, "a sandbox is left as it is, though it should end", "sandbox", b.id, "reason", e.reason, "detail", e.detail)
		return err
	}
	ctx, done := m.observe(ctx, WorkDestroy)
	err := m.tryEnd(ctx, b, e)
	done(err)
	if err != nil {
		m.log.ErrorContext(ctx, "end sandbox: tried again later", "sandbox", b.id, "reason", e.reason, "err", err)
		m.later(func() { m.endInTime(b, e) })
	}
	return err
}

func (m *Manager) tryEnd(ctx context.Context, b *box, e ending) error {
	var begun *state.Change // of one that was struck: its row has still to say that it ends
	if at := b.standing(); at == sandbox.StatusRunning || at == sandbox.StatusPaused {
		if b.outlived(e) || e.reason == sandbox.ReasonIdle && m.works(ctx, b, e) {
			return nil
		}
		ch := e.change()
		m.keepOutput(ctx, b, &ch)
		if b.outlived(e) { // somebody came while it answered
			return nil
		}
		if e.reason == sandbox.ReasonCancelled && m.strike(ctx, b, e) {
			begun = &ch
		} else {
			// Nobody but us changes it: the row need not be read to know it.
			row, err := m.move(ctx, b.id, sandbox.StatusCompleting, ch, at)
			if err == nil {
				return m.takeDown(ctx, b, row, nil)
			}
			if sandbox.CodeOf(err) != "wrong_state" {
				return err
			} // a try before this did not hear that it wrote
		}
	}
	row, err := m.state.Sandbox(ctx, b.id) // who was struck dies meanwhile
	if err != nil {
		return err
	}
	if row.Status.Terminal() { // written by a try that did not hear of it
		m.dropBox(b.id)
		m.leaving.Add(1)
		m.inBackground(func() { m.cleanUp(b.id, row.Slot) })
		return nil
	}
	switch {
	case row.Status == sandbox.StatusCompleting:
		begun = nil
	case begun != nil:
		row.Reason = e.reason
	default:
		if b.outlived(e) {
			return nil
		}
		ch := e.change()
		if row.Status == sandbox.StatusRunning || row.Status == sandbox.StatusPaused {
			m.keepOutput(ctx, b, &ch)
		}
		if row, err = m.move(ctx, b.id, sandbox.StatusCompleting, ch, row.Status); err != nil {
			return err
		}
	}
	return m.takeDown(ctx, b, row, begun)
}

// works asks PID 1 whether processes run: its events may not have been read yet. One
// that does not answer in time is believed to be busy, once.
func (m *Manager) works(ctx context.Context, b *box, e ending) bool {
	ctx, cancel := context.WithTimeout(ctx, tailTimeout)
	defer cancel()
	info, err := b.guest.Ping(ctx)
	silent := err != nil && ctx.Err() != nil
	b.mu.Lock()
	if b.idle.silent {
		silent = false
	}
	b.mu.Unlock()
	if info.Live <= 0 && !silent {
		return false
	}
	b.note(func(c *idleClock) {
		c.silent = silent
		if err == nil && c.changes == e.idleSince { // else its events say more
			c.live = info.Live
		}
	})
	return true
}

// change is what the row of a sandbox that begins to end must say.
func (e ending) change() state.Change {
	return state.Change{Reason: &e.reason, Detail: &e.detail, ExitCode: e.exitCode, Actor: e.actor}
}

// struck is the note at the cgroup of a sandbox that was struck.
type struck struct {
	Reason sandbox.Reason `json:"reason"`
	Detail string         `json:"detail"`
	Actor  string         `json:"actor"`
}

// strike begins to kill a sandbox whose row does not say yet that it ends: that
// is written once, with the end itself. The intent is noted at its cgroup, where
// the next daemon finds it if this one does not come to the row. False: without
// a note the kill has to wait.
func (m *Manager) strike(ctx context.Context, b *box, e ending) bool {
	m.meterNow(b)
	how, err := json.Marshal(struck{e.reason, e.detail, e.actor})
	if err == nil {
		err = m.cgroup.NoteEnd(b.id, how)
	}
	if err == nil {
		err = b.strike(e)
	}
	if err != nil {
		m.log.DebugContext(ctx, "kill before the row is written: done after it", "sandbox", b.id, "err", err)
	}
	return err == nil
}

// struck returns how a sandbox was to end that a daemon struck.
func (m *Manager) struck(id sandbox.ID) (e ending, ok bool) {
	var how struck
	if err := json.Unmarshal(m.cgroup.EndNote(id), &how); err != nil || how.Reason == sandbox.ReasonNone {
		return ending{}, false
	}
	return ending{reason: how.Reason, detail: how.Detail, actor: how.Actor}, true
}

// takeDown kills everything of a completing sandbox, writes its counters and
// its end down, and leaves the rest to the background. The lease goes last:
// while it stands, nobody else gets the address or the ids. begun, if set, is
// what the row has still to say of the way to completing.
func (m *Manager) takeDown(ctx context.Context, b *box, row sandbox.Sandbox, begun *state.Change) error {
	b.quiet()
	told := func(bool) bool { return false }
	if begun != nil {
		told = m.tellIfLate(ctx, b, row.Status, *begun)
	}
	release, err := m.killShell(ctx, b)
	if told(err != nil) {
		begun, row.Status = nil, sandbox.StatusCompleting
	}
	if err != nil {
		return err
	}
	now := time.Now().UTC()
	ch := state.Change{EndedAt: &now, Actor: "daemon", KeepSlot: true, Completing: begun}
	if _, counted := b.counters(); !counted {
		ch.Usage = m.readUsage(b, row)
	}
	to := sandbox.StatusCompleted
	if row.Reason.Failed() {
		to = sandbox.StatusFailed
	}
	m.leaving.Add(1)
	record, err := m.move(ctx, b.id, to, ch, row.Status)
	if err != nil {
		m.leaving.Add(-1)
		release()
		return err
	}
	m.sums.ended(record.Reason)
	b.setLastRecord(record)
	m.dropBox(b.id)
	m.inBackground(func() {
		release()
		m.cleanUp(b.id, row.Slot)
	})
	return nil
}

// tellIfLate writes that a sandbox is completing where its death takes long, so
// that it is seen. The returned function must be called when that is over. It
// has it written if it failed, and tells whether the row says it.
func (m *Manager) tellIfLate(ctx context.Context, b *box, from sandbox.Status, begun state.Change) func(failed bool) bool {
	var once sync.Once
	told := false
	tell := func() {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownTimeout)
		defer cancel()
		_, err := m.move(clean, b.id, sandbox.StatusCompleting, begun, from)
		if told = err == nil; !told {
			m.log.WarnContext(ctx, "write that a sandbox is completing", "sandbox", b.id, "err", err)
		}
	}
	late := time.AfterFunc(promptDeath, func() { once.Do(tell) })
	return func(failed bool) bool {
		late.Stop()
		once.Do(func() {
			if failed {
				tell()
			}
		})
		return told
	}
}

// inBackground runs a clean-up besides its request, if not too many do.
func (m *Manager) inBackground(f func()) {
	select {
	case m.cleaning <- struct{}{}:
		m.spawn(func() {
			defer func() { <-m.cleaning }()
			f()
		})
	default:
		f()
	}
}

// cleanUp removes what an ended sandbox left, again and again until nothing
// is left, and then frees its slot and what it held besides. The caller has counted it as leaving.
func (m *Manager) cleanUp(id sandbox.ID, slot int) {
	defer m.leaving.Add(-1)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(m.life), teardownTimeout)
	defer cancel()
	err := m.clear(ctx, id, slot)
	if err == nil {
		err = m.state.FreeEnded(ctx, id)
	}
	if err == nil {
		err = m.removeOwn(ctx, id)
	}
	if r, rerr := m.state.RootOf(ctx, id); rerr == nil && err == nil { // of snapshots that were removed before
		m.collectAfter(r.Stack, r.Image.Layers)
	}
	if err != nil {
		m.log.ErrorContext(ctx, "clean up after a sandbox: tried again later", "sandbox", id, "err", err)
		m.later(func() {
			m.leaving.Add(1)
			m.cleanUp(id, slot)
		})
	}
}

// killShell ends every process of a shell and returns when they are gone. Its
// namespaces go when release is called, which is due in any case but an error:
// to unmount all and to take the network apart is nothing to wait for.
func (m *Manager) killShell(ctx context.Context, b *box) (release func(), err error) {
	shell := b.letGo()
	defer b.guest.CloseIdle()
	defer b.reach.closeAll()
	release = func() {}
	if err := m.cgroup.LiftIO(b.id); err != nil { // all the same it ends, later
		m.log.WarnContext(ctx, "end a sandbox whose io is limited", "sandbox", b.id, "err", err)
	}
	if shell != nil {
		shell.HoldMounts()
		release = func() {
			if err := shell.Close(); err != nil {
				m.log.WarnContext(ctx, "let go of a dead shell", "sandbox", b.id, "err", err)
			}
		}
		// The death of a PID 1 is that of its whole namespace, and one that
		// libcontainer has not yet moved into its cgroup dies as well. The
		// pid is sure, because the descriptor is.
		if err := errors.Join(shell.Kill(), shell.Wait(ctx)); err != nil {
			return nil, errors.Join(err, shell.Close())
		}
	}
	if err := m.cgroup.Kill(ctx, b.id); err != nil {
		release()
		return nil, err
	}
	return release, nil
}

// clearShell removes what a dead shell leaves: network, cgroup, sockets.
func (m *Manager) clearShell(ctx context.Context, id sandbox.ID, slot int) error {
	if err := m.net.Detach(ctx, id, slot); err != nil {
		return err
	}
	if err := m.cgroup.Remove(ctx, id); err != nil {
		return err
	}
	return m.shells.Remove(id)
}

// clear is clearShell and the files.
func (m *Manager) clear(ctx context.Context, id sandbox.ID, slot int) error {
	return errors.Join(m.clearShell(ctx, id, slot), m.roots.Discard(id, slot))
}

// dropShell kills everything of a sandbox and removes its shell. The
// filesystem stays; the counters go to the row.
func (m *Manager) dropShell(ctx context.Context, b *box, row sandbox.Sandbox) error {
	release, err := m.killShell(ctx, b)
	if err != nil {
		return err
	}
	release()
	if err := m.count(ctx, b, row); err != nil {
		return err
	}
	return m.clearShell(ctx, b.id, row.Slot)
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
// output, which die with PID 1: where it died in a try before this, what it
// said then. A PID 1 that does not answer costs a second.
func (m *Manager) keepOutput(ctx context.Context, b *box, ch *state.Change) {
	ctx, cancel := context.WithTimeout(ctx, tailTimeout)
	defer cancel()
	procs, err := b.guest.Processes(ctx)
	if err != nil && b.words != nil {
		ch.LastOutput, ch.Processes = b.words.LastOutput, b.words.Processes
		return
	}
	if err != nil {
		m.log.InfoContext(ctx, "last output is lost: PID 1 does not answer", "sandbox", b.id, "err", err)
		return
	}
	if len(procs) > keptOutputs {
		procs = procs[len(procs)-keptOutputs:]
	}
	for _, p := range slices.Backward(procs) {
		tail := m.tail(ctx, b, p)
		if p.Exit == nil { // the kill that follows ends it, and nobody will hear of that
			p.Exit = &sandbox.ExitStatus{Code: 128 + int(unix.SIGKILL), Signal: "SIGKILL", At: time.Now().UTC()}
		}
		if len(ch.LastOutput) == 0 || p.Main {
			if len(tail) > 0 {
				ch.LastOutput = tail
			}
		}
		ch.Processes = append(ch.Processes, state.ProcessRecord{Process: p, Tail: tail})
	}
	b.words = &state.Change{LastOutput: ch.LastOutput, Processes: ch.Processes}
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
