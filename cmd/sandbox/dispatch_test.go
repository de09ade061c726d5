package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// TestSignalsAfterTheFirst: one that nobody wanted ended the context; those
// after it still reach who wants them, until the program is done.
func TestSignalsAfterTheFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &cli{}
		ctx, cancel := context.WithCancel(t.Context())
		done, sigs := make(chan struct{}), make(chan os.Signal)
		go c.dispatch(ctx, done, sigs, cancel)
		sigs <- os.Interrupt
		synctest.Wait()
		if ctx.Err() == nil {
			t.Fatal("the first signal does not end the context")
		}
		var got []os.Signal
		defer c.signals(func(s os.Signal) { got = append(got, s) })()
		for _, s := range []os.Signal{syscall.SIGTERM, syscall.SIGHUP} {
			select {
			case sigs <- s:
			default:
				t.Fatalf("nobody reads %v", s)
			}
			synctest.Wait()
		}
		if len(got) != 2 {
			t.Errorf("passed on: %v", got)
		}
		close(done) // the bubble waits for its end
	})
}

// terminal is a new one, and what is at its other end.
func terminal(t *testing.T) (other, tty *os.File) {
	t.Helper()
	other, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { other.Close() })
	n, err := unix.IoctlGetInt(int(other.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(other.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		tty, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tty.Close() })
	return other, tty
}

// TestSignalsAtATerminal: the first ends the program at a prompt, the second
// also where it reads and heeds nothing.
func TestSignalsAtATerminal(t *testing.T) {
	for name, tc := range map[string]struct {
		args    []string
		asks    string
		answer  string // in place of signals
		signals []syscall.Signal
		codes   []int
	}{
		"a prompt":          {[]string{"project", "kill", "shop"}, "[y/N] ", "", []syscall.Signal{unix.SIGINT}, []int{exitInterrupted}},
		"the control":       {[]string{"project", "kill", "shop"}, "[y/N] ", "n\n", nil, []int{exitTrouble}},
		"a secret is typed": {[]string{"secret", "set", "key", "--to", "example.com"}, "screen", "", []syscall.Signal{unix.SIGINT, unix.SIGTERM}, []int{exitInterrupted, 128 + int(unix.SIGTERM)}},
	} {
		t.Run(name, func(t *testing.T) {
			other, tty := terminal(t)
			cmd := exec.Command(os.Args[0], tc.args...)
			cmd.Env, cmd.Stdin = append(os.Environ(), asProgram+"=1"), tty
			errs, err := cmd.StderrPipe()
			if err == nil {
				err = cmd.Start()
			}
			if err != nil {
				t.Fatal(err)
			}
			timer := time.AfterFunc(20*time.Second, func() { _ = cmd.Process.Kill() })
			defer timer.Stop()
			r := bufio.NewReader(errs)
			for said := ""; !strings.Contains(said, tc.asks); {
				b, err := r.ReadByte()
				if err != nil {
					t.Fatalf("it ended with %q", said)
				}
				said += string(b)
			}
			for i, s := range tc.signals {
				if i > 0 {
					<-time.After(2 * oneWish)
				}
				if err := cmd.Process.Signal(s); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := other.WriteString(tc.answer); err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, r)
			exit, _ := errors.AsType[*exec.ExitError](cmd.Wait())
			if exit == nil || !slices.Contains(tc.codes, exit.ExitCode()) { // of two signals either may be taken first
				t.Errorf("%v, want exit %v by itself", exit, tc.codes)
			}
		})
	}
}

// TestSignalBeforeAttached: it is for the command; the second does not wait.
func TestSignalBeforeAttached(t *testing.T) {
	for name, tc := range map[string]struct {
		signals int
		ends    bool // the command
	}{"once": {1, true}, "twice": {2, false}} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			sb, err := w.m.Create(t.Context(), sandbox.CreateRequest{})
			if err != nil {
				t.Fatal(err)
			}
			p, err := w.m.StartProcess(t.Context(), string(sb.ID), sandbox.ProcessSpec{Argv: []string{"sleep"}})
			if err != nil {
				t.Fatal(err)
			}
			begun, goOn := make(chan struct{}, 1), make(chan struct{})
			w.m.Fail = func(method string) error {
				if method == "Attach" {
					begun <- struct{}{}
					<-goOn
				}
				return nil
			}
			b := w.start(strings.NewReader(""), "attach", string(sb.ID), string(p.ID))
			<-begun
			for range tc.signals {
				b.signal(t, os.Interrupt)
			}
			if tc.ends {
				close(goOn)
			} else {
				defer close(goOn)
			}
			if code := b.wait(t); code != exitInterrupted {
				t.Errorf("exit %d: %s", code, &b.errs)
			}
			if p, err = w.m.Process(t.Context(), string(sb.ID), p.ID); err != nil || (p.Exit != nil) != tc.ends {
				t.Errorf("the command: %+v, %v", p.Exit, err)
			}
		})
	}
}
