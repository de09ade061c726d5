package initd

import (
	"errors"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	// drainGrace is how long output may still come after the main process
	// ended, from children that hold its pipes.
	drainGrace = 250 * time.Millisecond
	// maxRecordArgv bounds the copy of a command line kept in the record.
	maxRecordArgv = 8 << 10
)

// process is one command. Its record's fields, exit and group are guarded by
// the table's lock.
type process struct {
	rec     sandbox.Process
	exit    *sandbox.ExitStatus
	group   *procGroup // until it is empty after the end
	key     keyID      // the idempotency key that started it; zero: none
	timedAt bool
	exited  atomic.Bool  // for the pumps
	parts   atomic.Int32 // the main process and its pumps, as far as they have not ended
	timer   *time.Timer  // the timeout, then the grace
	out     *ring
	readers atomic.Int32
	outputs []*os.File // pipe ends or the terminal, read by the pumps

	writing  sync.Mutex // held, before inMu, by whoever writes to stdin
	inMu     sync.Mutex // guards what follows
	stdin    *os.File   // pipe end or the terminal; nil once closed
	deaf     bool       // the process has closed its end
	inBytes  int64      // given to it in all
	sessions []*session
	tty      *os.File // set once
}

func (p *process) recordLocked() sandbox.Process {
	rec := p.rec
	if p.exit != nil {
		e := *p.exit
		rec.Exit = &e
	}
	rec.Output, rec.StdinBytes = p.out.state(), p.stdinBytes()
	return rec
}

func (p *process) record(t *table) sandbox.Process {
	t.mu.Lock()
	defer t.mu.Unlock()
	return p.recordLocked()
}

// endedLocked notes how the main process ended.
func (p *process) endedLocked(ws unix.WaitStatus, at time.Time) {
	e := &sandbox.ExitStatus{Code: ws.ExitStatus(), TimedOut: p.timedAt, At: at}
	if ws.Signaled() {
		e.Code = 128 + int(ws.Signal())
		e.Signal = unix.SignalName(ws.Signal())
	}
	p.exit = e
	p.exited.Store(true)
}

// dropGroupLocked lets go of the cgroup if nothing lives in it any more. A
// timeout goes on for as long as something does.
func (p *process) dropGroupLocked(t *table) {
	if p.group != nil && t.retireLocked(p.group) {
		p.group = nil
	}
	if p.group == nil && p.timer != nil {
		p.timer.Stop()
	}
}

// afterExit lets the pumps end: what is in the pipes is read, and children
// that hold them open get a moment more. Who waits for the end is told first;
// cleaning up comes after.
func (p *process) afterExit(t *table) {
	if !p.partEnded(t) {
		until := time.Now().Add(drainGrace)
		for _, f := range p.outputs {
			_ = f.SetReadDeadline(until)
		}
	}
	t.mu.Lock()
	p.dropGroupLocked(t)
	t.mu.Unlock()
	t.trim()
	p.sweepLater(t, 5*time.Millisecond)
}

// partEnded notes that the main process or a pump has ended. With the last of
// them the output is complete, and true is returned.
func (p *process) partEnded(t *table) bool {
	if p.parts.Add(-1) > 0 {
		return false
	}
	p.out.close()
	runtime.Gosched() // readers of the output go first
	p.closeStdin()
	for _, f := range p.outputs {
		_ = f.Close()
	}
	t.trim()
	return true
}

// sweepLater tries to remove the cgroup again: the kernel may say busy for a
// moment after the last member was reaped, and a member may be a zombie of a
// stranger's. Each orphan reaped tries too, so this soon gives up.
func (p *process) sweepLater(t *table, after time.Duration) {
	const last = time.Second
	t.mu.Lock()
	busy := p.group != nil
	t.mu.Unlock()
	if !busy || after > last {
		return
	}
	time.AfterFunc(after, func() {
		t.mu.Lock()
		p.dropGroupLocked(t)
		t.mu.Unlock()
		p.sweepLater(t, 4*after)
	})
}

// signal sends sig to the whole tree. With nothing left of it, it returns an
// error of class ErrConflict.
func (p *process) signal(t *table, sig unix.Signal) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p.exit != nil {
		p.dropGroupLocked(t)
	}
	if p.group != nil {
		if err := p.group.signal(sig); err != nil {
			return sandbox.Errorf(sandbox.ErrUnavailable, "signal_failed", "signalling process %s: %w", p.rec.ID, err)
		}
		return nil
	}
	if p.exit != nil {
		return sandbox.Errorf(sandbox.ErrConflict, "process_ended", "process %s has ended: there is nothing to signal", p.rec.ID)
	}
	pid := p.rec.PID
	if err := signalPinned(sig, func() ([]int, error) { return descendants(pid) }); err != nil {
		// Without /proc the group is what is left. The pid is unreaped while t.mu is held.
		if kerr := unix.Kill(-pid, sig); kerr != nil && !errors.Is(kerr, unix.ESRCH) {
			return sandbox.Errorf(sandbox.ErrUnavailable, "signal_failed", "signalling process %s: %w", p.rec.ID, kerr)
		}
	}
	return nil
}

// armTimeout ends the tree after d: TERM, and KILL after the grace.
func (p *process) armTimeout(t *table, d time.Duration) {
	if d <= 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if p.exit != nil && p.group == nil {
		return
	}
	p.timer = time.AfterFunc(d, func() {
		t.mu.Lock()
		if p.exit == nil {
			p.timedAt = true
		}
		gone := p.exit != nil && p.group == nil
		if !gone {
			p.timer = time.AfterFunc(sandbox.TerminationGrace, func() { _ = p.signal(t, unix.SIGKILL) })
		}
		t.mu.Unlock()
		if !gone {
			_ = p.signal(t, unix.SIGTERM)
		}
	})
}

func (p *process) resize(size sandbox.WindowSize) error {
	if p.tty == nil {
		return sandbox.Errorf(sandbox.ErrConflict, "no_terminal", "process %s runs without a terminal", p.rec.ID)
	}
	if err := setWindow(p.tty, size); err != nil {
		return sandbox.Errorf(sandbox.ErrConflict, "process_ended", "setting the terminal size of process %s: %w", p.rec.ID, err)
	}
	return nil
}

// shortArgv returns argv cut to what a record keeps.
func shortArgv(argv []string) []string {
	left := maxRecordArgv
	out := make([]string, 0, min(len(argv), 64))
	for i, a := range argv {
		if len(a) > left || i >= 512 {
			return append(out, "…")
		}
		left -= len(a) + 1
		out = append(out, a)
	}
	return out
}
