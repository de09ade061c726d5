package runtime

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/sandboxd/sandboxd/runtime/launch"
	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	// deathTimeout is how long a PID 1 that hung up may take to be dead. One
	// that lives on broke the connection and nothing else.
	deathTimeout = 2 * time.Second
	// fateTimeout is how long a sandbox may take from the death of its
	// processes to a row that says why: a stop syncs the files first.
	fateTimeout = 30 * time.Second
	fatePoll    = 10 * time.Millisecond
)

// cut says what is ending the processes of a sandbox that lives on.
type cut int

const (
	cutNone  cut = iota
	cutStop      // a stop asked them to end, and kills them
	cutReset     // its root is being replaced, which kills them
)

// fate turns the error of a connection to PID 1 that broke off into the one
// that says what became of the sandbox. An error that has another cause is
// returned as it is.
func (m *Manager) fate(b *box, shell *launch.Shell, err error) error {
	if !errors.Is(err, sandbox.ErrUnavailable) || shell == nil || m.life.Err() != nil {
		return err
	}
	if !brokeOff(err) && b.goesOn(shell) {
		return err
	}
	ctx, cancel := context.WithTimeout(m.life, deathTimeout)
	_ = shell.Wait(ctx) // an error: the shell was let go of
	alive := ctx.Err() != nil
	cancel()
	if alive && b.present() == shell {
		return err
	}
	if why := m.verdict(b, shell); why != nil {
		return why
	}
	return err
}

// brokeOff tells an error of the connection to PID 1 from one that PID 1 told.
func brokeOff(err error) bool {
	code := sandbox.CodeOf(err)
	return code == "sandbox_unreachable" || code == "guest_protocol"
}

// goesOn tells whether nothing is ending a shell or what runs in it.
func (b *box) goesOn(shell *launch.Shell) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.shell == shell && b.cut == cutNone && (b.status == sandbox.StatusRunning || b.status == sandbox.StatusPaused)
}

// verdict waits for the end of a shell's sandbox, or its stop, and returns the
// error that says so; nil if neither came in time.
func (m *Manager) verdict(b *box, shell *launch.Shell) error {
	if m.open() != nil {
		return nil // nothing ends in quarantine
	}
	ctx, cancel := context.WithTimeout(m.life, fateTimeout)
	defer cancel()
	for {
		at, now := b.standing(), b.present()
		if at != sandbox.StatusRunning && at != sandbox.StatusPaused || now != nil && now != shell {
			break
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(fatePoll):
		}
	}
	sb, err := m.state.Sandbox(ctx, b.id)
	if err != nil {
		return nil
	}
	b.correct(&sb)
	if sb.Status == sandbox.StatusCompleting || sb.Status.Terminal() {
		return ended(sb)
	}
	return stopped(sb) // it may have been started again since
}

// killedWith returns why a process was killed that died of a signal: nil if it
// was not because of what became of its sandbox.
func (a *attached) killedWith() error {
	if exit, ok := a.ProcessIO.Exit(); !ok || exit.Signal == "" || exit.TimedOut {
		return nil
	}
	a.b.mu.Lock()
	by, at, same := a.b.cut, a.b.status, a.b.shell == a.shell
	if same && processNumber(a.Process().ID) <= a.b.before {
		by = cutReset
	}
	a.b.mu.Unlock()
	switch {
	case by == cutReset && same:
		return sandbox.Errorf(sandbox.ErrConflict, sandbox.CodeReset, "sandbox %s was put back on other files by a reset, rollback or undo, which killed process %s: run it again", a.b.id, a.Process().ID)
	case by == cutStop, !same, at != sandbox.StatusRunning && at != sandbox.StatusPaused:
		return a.m.verdict(a.b, a.shell)
	}
	return nil
}

// whole turns the end of a stream into an error where the process did not end
// by itself.
func (a *attached) whole(err error) error {
	switch {
	case a.closed.Load():
		return err
	case !errors.Is(err, io.EOF):
		return a.m.fate(a.b, a.shell, err)
	}
	if why := a.killedWith(); why != nil {
		return why
	}
	return err
}
