package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/sandboxd/sandboxd/sandbox"
)

// detachTimeout bounds the last requests made on the way out.
const detachTimeout = 30 * time.Second

// errReaderGone means that nobody reads our output any more.
var errReaderGone = errors.New("standard output is closed")

// signalNames are those passed on to the command.
var signalNames = map[os.Signal]string{os.Interrupt: "SIGINT", syscall.SIGTERM: "SIGTERM", syscall.SIGHUP: "SIGHUP"}

// pump connects this terminal or pipe to a process until it ends. The first
// signal is passed on to the command; the second kills it and lets go.
func (c *cli) pump(p sandbox.ProcessIO, stdin, tty bool) (sandbox.ExitStatus, error) {
	defer func() { _ = p.Close() }() // the process may go on
	if tty {
		restore, err := c.rawTerminal(p)
		if err != nil {
			return sandbox.ExitStatus{}, err
		}
		defer restore()
	}
	var count atomic.Int32
	var sending sync.WaitGroup
	let := make(chan struct{})
	restore := c.signals(func(s os.Signal) {
		n := count.Add(1)
		name := signalNames[s]
		if n > 1 {
			name = "SIGKILL"
		}
		sending.Go(func() {
			if err := p.Signal(name); err != nil && n == 1 {
				c.complain(fmt.Errorf("passing %s on: %w", name, err))
			}
			if n == 1 {
				_ = p.Signal("SIGCONT") // one that is stopped would take it only then; timeout(1) does the same
			}
			if n == 2 {
				close(let)
				_ = p.Close() // wakes copyOutput
			}
		})
	})
	defer restore()
	if stdin {
		go c.copyStdin(p)
	}
	dropped, err := c.copyOutput(p)
	if dropped > 0 {
		c.warn("… %d bytes of output were dropped: it was written faster than it was read ('--keep-output' keeps more)", dropped)
	}
	exit, ended := p.Exit()
	if ended {
		return exit, nil
	}
	if err == nil {
		err = sandbox.Errorf(sandbox.ErrUnavailable, "stream_broken", "the output of process %s ended before the process did: 'sandbox ps' tells what became of it", p.Process().ID)
	}
	select {
	case <-let:
		sending.Wait()
		return sandbox.ExitStatus{Code: 137, Signal: "SIGKILL"}, nil
	default:
	}
	if errors.Is(err, errReaderGone) {
		_ = p.Signal("SIGPIPE") // as the shell does it; the command may have ended
		return sandbox.ExitStatus{Code: exitPipe, Signal: "SIGPIPE"}, nil
	}
	return exit, err
}

// copyOutput writes what the process writes, to its end.
func (c *cli) copyOutput(p sandbox.ProcessIO) (dropped int64, err error) {
	for {
		out, err := p.Next()
		if errors.Is(err, io.EOF) {
			return dropped, nil
		}
		if err != nil {
			return dropped, err
		}
		dropped += out.Dropped
		w := c.out
		if out.Stream == sandbox.Stderr {
			w = c.err
		}
		if _, err := w.Write(out.Data); err != nil {
			return dropped, errors.Join(errReaderGone, err)
		}
	}
}

// copyStdin passes standard input on until it or the process's end closes.
func (c *cli) copyStdin(p sandbox.ProcessIO) {
	buf := make([]byte, 64<<10)
	for {
		n, err := c.in.Read(buf)
		if n > 0 {
			if _, werr := p.WriteStdin(buf[:n]); werr != nil {
				return // the command takes no more
			}
		}
		if err != nil {
			_ = p.CloseStdin() // it may have ended
			return
		}
	}
}

// rawTerminal passes keys on as they are and keeps the sizes equal.
func (c *cli) rawTerminal(p sandbox.ProcessIO) (restore func(), err error) {
	f, ok := c.in.(*os.File)
	if !ok || !isTerminal(f) {
		return func() {}, nil // -t in a pipe: a terminal inside, none here
	}
	old, err := term.MakeRaw(int(f.Fd()))
	if err != nil {
		return nil, fmt.Errorf("setting the terminal to raw mode: %w", err)
	}
	winch := make(chan os.Signal, 1)
	signal.Notify(winch, syscall.SIGWINCH)
	done := make(chan struct{})
	go func() {
		for {
			select {
			case <-winch:
				_ = p.Resize(windowSize(f)) // it may have ended
			case <-done:
				return
			}
		}
	}()
	return func() {
		signal.Stop(winch)
		close(done)
		_ = term.Restore(int(f.Fd()), old) // the terminal may be gone
	}, nil
}

// isNull tells /dev/null, which has nothing for a command.
func isNull(v any) bool {
	f, ok := v.(*os.File)
	if !ok {
		return false
	}
	var st, null unix.Stat_t
	if unix.Fstat(int(f.Fd()), &st) != nil || unix.Stat(os.DevNull, &null) != nil {
		return false
	}
	return st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == null.Rdev
}

// windowSize returns a terminal's size, or the usual one.
func windowSize(v any) sandbox.WindowSize {
	if f, ok := v.(*os.File); ok {
		if cols, rows, err := term.GetSize(int(f.Fd())); err == nil && cols > 0 && rows > 0 {
			return sandbox.WindowSize{Cols: uint16(min(cols, 65535)), Rows: uint16(min(rows, 65535))}
		}
	}
	return sandbox.WindowSize{Cols: 80, Rows: 24}
}

// passExit makes the command's end ours, and says what its code does not.
func (c *cli) passExit(exit sandbox.ExitStatus) error {
	switch {
	case exit.OOM:
		c.warn("the kernel killed the command for memory: give it more with --memory")
	case exit.TimedOut:
		c.warn("the command ran over its time and was ended")
	}
	if exit.Code == 0 {
		return nil
	}
	return exitError(exit.Code)
}

// explainEnd adds to an error why the sandbox is gone, where it is.
func (c *cli) explainEnd(ctx context.Context, ref string, err error) error {
	if err == nil || errors.Is(err, sandbox.ErrUnavailable) && sandbox.CodeOf(err) == "daemon_unreachable" {
		return err
	}
	cl, cerr := c.client()
	if cerr != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	sb, serr := cl.Sandbox(ctx, ref)
	if serr != nil || !sb.Status.Terminal() {
		return err
	}
	return sandbox.Errorf(sandbox.ErrConflict, "sandbox_ended", "sandbox %s has ended (%s): %s", sb.ID, sb.Reason, dash(sb.Detail))
}
