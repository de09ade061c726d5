package main

import (
	"bytes"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// background runs a command line whose signals the test sends.
type background struct {
	c    *cli
	out  bytes.Buffer
	errs bytes.Buffer
	code chan int
}

func (w *world) start(in io.Reader, args ...string) *background {
	b := &background{code: make(chan int, 1)}
	b.c = &cli{name: "sandbox", in: in, out: &b.out, err: &b.errs, getenv: func(k string) string {
		return map[string]string{"SANDBOX_HOST": w.host}[k]
	}}
	go func() { b.code <- b.c.main(w.t.Context(), args) }()
	return b
}

// signal delivers a signal as dispatch does.
func (b *background) signal(t *testing.T, s os.Signal) {
	t.Helper()
	if !b.c.deliver(s) {
		t.Error("nobody took the signal: it would have ended the program")
	}
}

func (b *background) wait(t *testing.T) int {
	t.Helper()
	select {
	case code := <-b.code:
		return code
	case <-time.After(20 * time.Second):
		t.Fatal("the command line does not end")
		return 0
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	testenv.Eventually(t, 10*time.Second, what, ok)
}

// runs reports whether a process has been started in any sandbox.
func (w *world) runs() bool {
	events, err := w.m.Events(w.t.Context(), 0, "", 1000)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, e := range events {
		if e.Type == "process.started" {
			return true
		}
	}
	return false
}

func TestSignalsReachTheCommand(t *testing.T) {
	for name, tc := range map[string]struct {
		sig  os.Signal
		code int
	}{"int": {os.Interrupt, 130}, "term": {syscall.SIGTERM, 143}, "hup": {syscall.SIGHUP, 129}} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			b := w.start(strings.NewReader(""), "run", "--rm", "--", "sleep")
			eventually(t, "the command runs", w.runs)
			b.signal(t, tc.sig)
			if code := b.wait(t); code != tc.code {
				t.Errorf("exit %d, want %d: %s", code, tc.code, &b.errs)
			}
			if n := w.living(); n != 0 {
				t.Errorf("%d sandboxes left", n)
			}
		})
	}
}

func TestSecondSignalKillsAndDetaches(t *testing.T) {
	w := newWorld(t)
	first := make(chan struct{})
	w.m.Fail = func(method string) error {
		if method == "SignalProcess" {
			select {
			case <-first:
			default:
				close(first)
				return sandbox.Errorf(sandbox.ErrConflict, "deaf", "the command heeds no SIGINT") // as one that ignores it
			}
		}
		return nil
	}
	b := w.start(strings.NewReader(""), "run", "--rm", "--", "sleep")
	eventually(t, "the command runs", w.runs)
	b.signal(t, os.Interrupt)
	<-first
	b.signal(t, os.Interrupt)
	if code := b.wait(t); code != 137 {
		t.Errorf("exit %d: %s", code, &b.errs)
	}
	if n := w.living(); n != 0 {
		t.Errorf("%d sandboxes left", n)
	}
}

// TestInterruptedCreate sends a signal, or two, while the sandbox is being
// made: the first is for the command, and either way nothing may be left,
// with --rm or without.
func TestInterruptedCreate(t *testing.T) {
	for name, tc := range map[string]struct {
		signals int
		args    []string
	}{
		"once": {1, []string{"--rm"}}, "twice": {2, []string{"--rm"}}, "once, kept": {1, nil}, "twice, kept": {2, nil}, "once, detached": {1, []string{"-d"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			begun, goOn := make(chan struct{}, 2), make(chan struct{})
			w.m.Fail = func(method string) error {
				if method == "Create" {
					begun <- struct{}{}
					<-goOn
				}
				return nil
			}
			args := append(append([]string{"run"}, tc.args...), "--", "sleep")
			b := w.start(strings.NewReader(""), args...)
			<-begun
			for range tc.signals {
				b.signal(t, os.Interrupt)
			}
			close(goOn)
			if code := b.wait(t); code != exitInterrupted {
				t.Errorf("exit %d: %s", code, &b.errs)
			}
			eventually(t, "no sandbox is left", func() bool { return w.living() == 0 })
		})
	}
}

// closedPipe is an output whose reader has gone.
type closedPipe struct{}

func (closedPipe) Write([]byte) (int, error) { return 0, syscall.EPIPE }

func TestReaderOfOutputGoes(t *testing.T) {
	w := newWorld(t)
	var errs bytes.Buffer
	c := &cli{name: "sandbox", in: strings.NewReader(""), out: closedPipe{}, err: &errs, getenv: func(string) string { return "" }}
	if code := c.main(t.Context(), []string{"--host", w.host, "run", "--rm", "--", "ticks", "100000"}); code != 141 {
		t.Errorf("exit %d: %s", code, &errs)
	}
	if n := w.living(); n != 0 {
		t.Errorf("%d sandboxes left", n)
	}
}
