package main

import (
	"bytes"
	"context"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

func TestPortCommands(t *testing.T) {
	w := newWorld(t)
	w.ok("create", "--name", "dev")
	if out := w.ok("port", "publish", "dev", "8080:80", "0.0.0.0:9090:90"); out != "127.0.0.1:8080\n0.0.0.0:9090\n" {
		t.Errorf("publish: %q", out)
	}
	if out := w.ok("port", "publish", "dev", "81", "--public"); !strings.HasPrefix(out, "127.0.0.1:") {
		t.Errorf("publish --public: %q", out)
	}
	list := w.ok("port", "ls", "dev")
	for _, want := range []string{"127.0.0.1:8080", "80/tcp", "yes"} {
		if !strings.Contains(list, want) {
			t.Errorf("ls: no %q in %s", want, list)
		}
	}
	id := strings.Fields(strings.Split(list, "\n")[1])[0]
	w.ok("port", "rm", id)
	if out := w.ok("port", "ls"); strings.Contains(out, id) {
		t.Errorf("ls after rm: %s", out)
	}
	for _, bad := range [][]string{{"port", "publish", "dev", "x"}, {"port", "publish", "nobody", "80"}, {"port", "rm", "po"}, {"port-forward", "dev", "53/udp"}, {"port-forward", "nobody", "80"}} {
		if code, _, errs := w.run("", bad...); code != 125 || errs == "" {
			t.Errorf("%q: exit %d, %s", bad, code, errs)
		}
	}
	if out := w.ok("port", "token", "dev"); out != "TOKEN\n" {
		t.Errorf("token: %q", out)
	}
	w.ok("port", "token", "--rm", "dev")
	if out := w.ok("port", "release", "shop"); out != "alice\n" {
		t.Errorf("release %q", out)
	}
}

// TestPublishFlag: -p publishes what create or run made, or leaves nothing.
func TestPublishFlag(t *testing.T) {
	w := newWorld(t)
	w.ok("create", "--name", "a", "-p", "8080:80", "--idempotency-key", "k")
	w.ok("create", "--name", "a", "-p", "8080:80", "--idempotency-key", "k") // there already
	w.ok("run", "-d", "--name", "b", "-p", "8081:80", "--", "cat")
	if n := strings.Count(w.ok("port", "ls"), "127.0.0.1:"); n != 2 {
		t.Errorf("%d ports, want 2", n)
	}
	for _, cmd := range [][]string{{"create", "-p", "8080:80"}, {"run", "-p", "8080:80", "--", "cat"}, {"create", "-p", "x"}} {
		if code, _, errs := w.run("", cmd...); code != 125 || !strings.Contains(errs, "port") {
			t.Errorf("%q: exit %d, %s", cmd, code, errs)
		}
		if n := w.living(); n != 2 {
			t.Errorf("%q: %d sandboxes, want 2", cmd, n)
		}
	}
}

// TestPortForward: connections here end up in the sandbox, both halves, until
// the command is interrupted.
func TestPortForward(t *testing.T) {
	w := newWorld(t)
	w.ok("create", "--name", "dev")
	r, pw := io.Pipe()
	var errs bytes.Buffer
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan int, 1)
	go func() {
		c := &cli{name: "sandbox", in: strings.NewReader(""), out: pw, err: &errs, getenv: func(k string) string {
			return map[string]string{"SANDBOX_HOST": w.host}[k]
		}}
		done <- c.main(ctx, []string{"port-forward", "dev", "0:7"})
		pw.Close()
	}()
	buf := make([]byte, 100)
	n, err := r.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	where, to, _ := strings.Cut(strings.TrimSpace(string(buf[:n])), " -> ")
	if to != "7" {
		t.Fatalf("it says %q", buf[:n])
	}
	for range 2 {
		c, err := net.Dial("tcp", where)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, "hello"); err != nil {
			t.Fatal(err)
		}
		if err := c.(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(c); err != nil || string(b) != "hello" {
			t.Errorf("%q, %v", b, err)
		}
	}
	cancel()
	select {
	case code := <-done:
		if code != exitInterrupted {
			t.Errorf("exit %d: %s", code, errs.String())
		}
	case <-time.After(20 * time.Second):
		t.Fatal("it does not end")
	}
	testenv.Eventually(t, 10*time.Second, "nobody listens any more", func() bool {
		c, err := net.Dial("tcp", where)
		if err == nil {
			c.Close()
		}
		return err != nil
	})
}
