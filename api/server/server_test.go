package server_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/api/server/servertest"
	"github.com/sandboxd/sandboxd/sandbox"
)

// daemon is a server on a unix socket of its own.
type daemon struct {
	m    *servertest.Memory
	sock string
	stop func() error // shuts down and waits

	listen func(net.Listener) net.Listener // nil, or what comes between
}

func start(t *testing.T) *daemon {
	t.Helper()
	d := &daemon{m: servertest.New(), sock: filepath.Join(t.TempDir(), "s.sock")}
	d.serve(t)
	return d
}

// serve answers on the socket until stop or the end of the test.
func (d *daemon) serve(t *testing.T) {
	t.Helper()
	ln, err := net.Listen("unix", d.sock)
	if err != nil {
		t.Fatal(err)
	}
	if d.listen != nil {
		ln = d.listen(ln)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	h := server.New(server.Config{Manager: d.m, Version: "test", Log: slog.New(slog.DiscardHandler)})
	go func() { done <- server.Serve(ctx, ln, h) }()
	stopped := false
	d.stop = func() error {
		if stopped {
			return nil
		}
		stopped = true
		cancel()
		select {
		case err := <-done:
			return err
		case <-time.After(20 * time.Second):
			return errors.New("Serve did not return")
		}
	}
	stop := d.stop
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Errorf("shutdown: %v", err)
		}
	})
}

func (d *daemon) client(t *testing.T, opts ...client.Option) *client.Client {
	t.Helper()
	c, err := client.New("unix://"+d.sock, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func create(t *testing.T, c *client.Client, spec sandbox.Spec) sandbox.Sandbox {
	t.Helper()
	sb, err := c.Create(t.Context(), spec, "")
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

// output reads a stream to its end.
func output(t *testing.T, p sandbox.ProcessIO) (stdout, stderr string, exit sandbox.ExitStatus) {
	t.Helper()
	for {
		out, err := p.Next()
		if errors.Is(err, io.EOF) {
			exit, ok := p.Exit()
			if !ok {
				t.Fatal("no exit status after the end of output")
			}
			return stdout, stderr, exit
		}
		if err != nil {
			t.Fatal(err)
		}
		if out.Stream == sandbox.Stdout {
			stdout += string(out.Data)
		} else {
			stderr += string(out.Data)
		}
	}
}

func TestCreateExecRemove(t *testing.T) {
	c := start(t).client(t)
	sb := create(t, c, sandbox.Spec{Name: "web", Labels: map[string]string{"team": "a"}})
	if sb.Status != sandbox.StatusRunning || sb.Spec.Name != "web" {
		t.Fatalf("created %+v", sb)
	}
	p, err := c.Exec(t.Context(), "web", sandbox.ProcessSpec{Argv: []string{"echo", "hello", "there"}})
	if err != nil {
		t.Fatal(err)
	}
	if out, _, exit := output(t, p); out != "hello there\n" || exit.Code != 0 {
		t.Fatalf("echo gave %q and %+v", out, exit)
	}
	p, err = c.Exec(t.Context(), string(sb.ID[:8]), sandbox.ProcessSpec{Argv: []string{"err", "oh"}})
	if err != nil {
		t.Fatal(err)
	}
	if out, errs, _ := output(t, p); out != "" || errs != "oh\n" {
		t.Fatalf("err gave %q and %q", out, errs)
	}
	p, err = c.Exec(t.Context(), "web", sandbox.ProcessSpec{Argv: []string{"exit", "7"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, exit := output(t, p); exit.Code != 7 {
		t.Fatalf("exit 7 gave %+v", exit)
	}
	for range 2 { // removing twice is fine
		gone, err := c.Remove(t.Context(), string(sb.ID))
		if err != nil || gone.Status != sandbox.StatusCompleted || gone.Reason != sandbox.ReasonCancelled {
			t.Fatalf("removed: %+v, %v", gone, err)
		}
	}
	if _, err := c.Exec(t.Context(), string(sb.ID), sandbox.ProcessSpec{Argv: []string{"echo"}}); !errors.Is(err, sandbox.ErrConflict) {
		t.Fatalf("exec in a removed sandbox: %v", err)
	}
}
