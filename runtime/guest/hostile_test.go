package guest

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/sandbox"
)

// impostor listens where PID 1 would and answers each connection by f.
func impostor(t *testing.T, f func(net.Conn)) *Guest {
	t.Helper()
	path := filepath.Join(t.TempDir(), "init.sock")
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				if _, err := initproto.ReadFrame(c, initproto.Daemon, nil); err == nil {
					f(c)
				}
			}()
		}
	}()
	return New(path)
}

func sendJSON(c net.Conn, kind initproto.FrameType, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	b, err = initproto.AppendFrame(nil, kind, b)
	if err != nil {
		return err
	}
	_, err = c.Write(b)
	return err
}

// calls are all operations that are no streams, and the first replies of
// those that are.
var calls = map[string]func(context.Context, *Guest) error{
	"ping":      func(ctx context.Context, g *Guest) error { _, err := g.Ping(ctx); return err },
	"configure": func(ctx context.Context, g *Guest) error { return g.Configure(ctx, Config{}) },
	"processes": func(ctx context.Context, g *Guest) error { _, err := g.Processes(ctx); return err },
	"process":   func(ctx context.Context, g *Guest) error { _, err := g.Process(ctx, "p1"); return err },
	"signal":    func(ctx context.Context, g *Guest) error { return g.Signal(ctx, "p1", "SIGTERM") },
	"start": func(ctx context.Context, g *Guest) error {
		_, err := g.Start(ctx, sandbox.ProcessSpec{Argv: []string{"x"}})
		return err
	},
	"exec": func(ctx context.Context, g *Guest) error {
		_, err := g.Exec(ctx, sandbox.ProcessSpec{Argv: []string{"x"}})
		return err
	},
	"attach": func(ctx context.Context, g *Guest) error { _, err := g.Attach(ctx, "p1", 0); return err },
	"events": func(ctx context.Context, g *Guest) error { _, err := g.Events(ctx, 0); return err },
	"stat":   func(ctx context.Context, g *Guest) error { _, err := g.Stat(ctx, "", "/"); return err },
	"list":   func(ctx context.Context, g *Guest) error { _, err := g.List(ctx, "", "/", 1); return err },
	"remove": func(ctx context.Context, g *Guest) error { return g.Remove(ctx, "", "/x", true) },
	"read":   func(ctx context.Context, g *Guest) error { _, _, err := g.Read(ctx, "", "/x", 0, 0); return err },
	"write": func(ctx context.Context, g *Guest) error {
		_, err := g.Write(ctx, "", "/x", 0, strings.NewReader("x"))
		return err
	},
	"tar in": func(ctx context.Context, g *Guest) error { return g.TarIn(ctx, "", "/x", strings.NewReader("x")) },
	"reset":  func(ctx context.Context, g *Guest) error { return g.Reset(ctx, "/x", strings.NewReader("x")) },
	"watch":  func(ctx context.Context, g *Guest) error { _, err := g.Watch(ctx, "", "/x", false); return err },
}

// TestSilence: a PID 1 that takes a request and says nothing holds up no
// caller for good.
func TestSilence(t *testing.T) {
	g := impostor(t, func(c net.Conn) { _, _ = c.Read(make([]byte, 1)) })
	g.hurry = 20 * time.Millisecond
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if err := call(t.Context(), g); !errors.Is(err, sandbox.ErrDeadline) {
				t.Errorf("%v, want class deadline", err)
			}
		})
	}
}

// TestHalfAnswers: the same for one that begins to answer.
func TestHalfAnswers(t *testing.T) {
	g := impostor(t, func(c net.Conn) {
		_ = sendJSON(c, initproto.FrameResponse, struct{}{})
		for {
			if _, err := c.Read(make([]byte, 1024)); err != nil {
				return
			}
		}
	})
	g.hurry = 20 * time.Millisecond
	for _, name := range []string{"processes", "list", "write", "tar in"} {
		if err := calls[name](t.Context(), g); !errors.Is(err, sandbox.ErrDeadline) {
			t.Errorf("%s: %v, want class deadline", name, err)
		}
	}
	// Positive control: a stream may be silent for longer than that.
	g.hurry = 2 * time.Second
	s, err := g.Events(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	next := make(chan error, 1)
	go func() { _, err := s.Next(); next <- err }()
	select {
	case err := <-next:
		t.Errorf("a quiet stream ended: %v", err)
	case <-time.After(g.hurry + time.Second):
	}
}

// TestEndlessList: a listing is bounded in bytes as well as in entries.
func TestEndlessList(t *testing.T) {
	big := sandbox.Process{ID: "p1", Argv: []string{strings.Repeat("x", 60<<10)}}
	g := impostor(t, func(c net.Conn) {
		_ = sendJSON(c, initproto.FrameResponse, struct{}{})
		for sendJSON(c, initproto.FrameItem, big) == nil {
		}
	})
	if _, err := g.Processes(t.Context()); !errors.Is(err, sandbox.ErrTooLarge) {
		t.Errorf("%v, want class too large", err)
	}
}

// TestRecords: what no honest PID 1 would say about a process is refused
// before anybody prints or stores it.
func TestRecords(t *testing.T) {
	for name, c := range map[string]struct {
		p  sandbox.Process
		ok bool
	}{
		"honest":     {sandbox.Process{ID: "p1", Argv: []string{"x"}, Exit: &sandbox.ExitStatus{Code: 137, Signal: "SIGKILL"}}, true},
		"no argv":    {sandbox.Process{ID: "p1"}, false},
		"no number":  {sandbox.Process{ID: "p", Argv: []string{"x"}}, false},
		"escapes":    {sandbox.Process{ID: "p1\x1b[2J", Argv: []string{"x"}}, false},
		"zero":       {sandbox.Process{ID: "p0", Argv: []string{"x"}}, false},
		"odd signal": {sandbox.Process{ID: "p1", Argv: []string{"x"}, Exit: &sandbox.ExitStatus{Signal: "\x1b[31mSIG"}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			one := impostor(t, func(conn net.Conn) { _ = sendJSON(conn, initproto.FrameResponse, c.p) })
			many := impostor(t, func(conn net.Conn) {
				_ = sendJSON(conn, initproto.FrameResponse, struct{}{})
				_ = sendJSON(conn, initproto.FrameItem, c.p)
				_ = sendJSON(conn, initproto.FrameItem, initproto.Event{Seq: 1, Type: initproto.EventExited, Process: &c.p})
				if b, err := initproto.AppendFrame(nil, initproto.FrameEnd, nil); err == nil {
					_, _ = conn.Write(b)
				}
			})
			check := func(what string, err error) {
				t.Helper()
				if (err == nil) != c.ok || err != nil && sandbox.CodeOf(err) != "guest_protocol" {
					t.Errorf("%s: %v; taken should be %v", what, err, c.ok)
				}
			}
			for _, name := range []string{"process", "signal", "start", "exec", "attach"} {
				check(name, calls[name](t.Context(), one))
			}
			if c.ok {
				return // the listing below has an event in it
			}
			_, err := many.Processes(t.Context())
			check("processes", err)
			s, err := many.Events(t.Context(), 0)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			_, _ = s.Next() // the bare record
			_, err = s.Next()
			check("events", err)
		})
	}
}
