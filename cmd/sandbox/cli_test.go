package main

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/api/server/servertest"
	"github.com/sandboxd/sandboxd/sandbox"
)

// world is a daemon in memory and a way to run command lines against it.
type world struct {
	t    *testing.T
	m    *servertest.Memory
	far  *servertest.Memory // the production world
	host string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, m: servertest.New(), far: servertest.New()}
	sock := filepath.Join(t.TempDir(), "s.sock")
	ln, err := net.Listen("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	w.host = "unix://" + sock
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	h := w.handler()
	go func() { done <- server.Serve(ctx, ln, h) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return w
}

// handler is the daemon's API.
func (w *world) handler() http.Handler {
	office, audit, _ := servertest.NewOffice(access.Config{Self: uint32(os.Geteuid())})
	w.t.Cleanup(func() { _ = audit.Close() })
	return server.New(server.Config{
		Office: office, Audit: audit, Manager: w.m, Version: "9.9", Log: slog.New(slog.DiscardHandler), Lab: servertest.NewLab(), Production: func() server.Manager { return w.far },
	})
}

// run runs one command line.
func (w *world) run(stdin string, args ...string) (code int, stdout, stderr string) {
	w.t.Helper()
	var out, errs bytes.Buffer
	c := &cli{name: "sandbox", in: strings.NewReader(stdin), out: &out, err: &errs, getenv: func(k string) string {
		return map[string]string{"SANDBOX_HOST": w.host, "PASSED": "on"}[k]
	}}
	code = c.main(w.t.Context(), args)
	return code, out.String(), errs.String()
}

// ok runs a command line that must succeed and returns its output.
func (w *world) ok(args ...string) string {
	w.t.Helper()
	code, out, errs := w.run("", args...)
	if code != 0 {
		w.t.Fatalf("sandbox %s: exit %d, %s", strings.Join(args, " "), code, errs)
	}
	return out
}

// living counts the sandboxes that have not ended.
func (w *world) living() int {
	page, err := w.m.List(w.t.Context(), sandbox.Filter{})
	if err != nil {
		w.t.Fatal(err)
	}
	return len(page.Items)
}

func TestRun(t *testing.T) {
	for name, tc := range map[string]struct {
		args   []string
		stdin  string
		code   int
		out    string
		errs   string // a part of stderr
		living int
	}{
		"output":         {args: []string{"run", "--rm", "--", "echo", "hi"}, out: "hi\n"},
		"without dashes": {args: []string{"run", "--rm", "echo", "-n", "--rm"}, out: "-n --rm\n"},
		"stderr":         {args: []string{"run", "--rm", "--", "err", "oh"}, errs: "oh\n"},
		"exit code":      {args: []string{"run", "--rm", "--", "exit", "42"}, code: 42},
		"stdin":          {args: []string{"run", "--rm", "--", "cat"}, stdin: "in and out", out: "in and out"},
		"not found":      {args: []string{"run", "--rm", "--", "nope"}, code: 127, errs: "(command_not_found)"},
		"no such image":  {args: []string{"run", "--rm", "--image", "nope", "--", "echo"}, code: 125, errs: "(image_not_found)"},
		"kept":           {args: []string{"run", "--", "exit", "3"}, code: 3, living: 1},
		"bad size":       {args: []string{"run", "--memory", "much", "--", "echo"}, code: 125, errs: "is not a size"},
		"bad limit":      {args: []string{"run", "--memory", "1k", "--", "echo"}, code: 125, errs: "(invalid_limits)"},
		"no command":     {args: []string{"run"}, code: 125, errs: "no command given"},
		"detached stdin": {args: []string{"run", "-d", "-i", "--", "cat"}, code: 125, errs: "--detach goes with"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			code, out, errs := w.run(tc.stdin, tc.args...)
			if code != tc.code || out != tc.out || !strings.Contains(errs, tc.errs) {
				t.Errorf("exit %d, out %q, err %q; want %d, %q, …%q…", code, out, errs, tc.code, tc.out, tc.errs)
			}
			if n := w.living(); n != tc.living {
				t.Errorf("%d sandboxes left, want %d", n, tc.living)
			}
		})
	}
}

func TestLifeOfASandbox(t *testing.T) {
	w := newWorld(t)
	id := strings.TrimSpace(w.ok("create", "--name", "dev", "--memory", "512m", "--cpu", "2", "--timeout", "30m", "-l", "a=b", "-e", "X=1", "-e", "PASSED"))
	if _, err := sandbox.ParseID(id); err != nil {
		t.Fatal(err)
	}
	if out := w.ok("inspect", "dev"); !strings.Contains(out, "memory_bytes: 536870912") || !strings.Contains(out, "ttl_seconds: 1800") || !strings.Contains(out, "PASSED: \"on\"") {
		t.Errorf("inspect: %s", out)
	}
	if out := w.ok("ls"); !strings.Contains(out, id) || !strings.Contains(out, "running") {
		t.Errorf("ls: %s", out)
	}
	if out := w.ok("ls", "-q", "-l", "a=c"); out != "" {
		t.Errorf("ls of another label: %q", out)
	}
	if out := w.ok("exec", "dev", "--", "echo", "one"); out != "one\n" {
		t.Errorf("exec: %q", out)
	}
	if out := w.ok("exec", "-d", "dev", "--", "echo", "two"); out != "p2\n" {
		t.Errorf("exec -d: %q", out)
	}
	if out := w.ok("logs", "-f", "dev", "p2"); out != "two\n" {
		t.Errorf("logs: %q", out)
	}
	if out := w.ok("ps", "dev"); !strings.Contains(out, "echo two") {
		t.Errorf("ps: %s", out)
	}
	if out := w.ok("stats", "dev"); !strings.Contains(out, "16MiB") || !strings.Contains(out, "?") {
		t.Errorf("stats: %s", out)
	}
	if out := w.ok("usage", "dev", "--by", "sandbox", "--from", "24h"); !strings.Contains(out, id) || !strings.Contains(out, "1.50s") {
		t.Errorf("usage: %s", out)
	}
	for _, step := range []struct{ verb, status string }{{"pause", "paused"}, {"resume", "running"}, {"stop", "stopped"}, {"start", "running"}, {"reset", "running"}} {
		w.ok(step.verb, "dev")
		if out := w.ok("ls"); !strings.Contains(out, step.status) {
			t.Errorf("after %s: %s", step.verb, out)
		}
	}
	if out := w.ok("rm", id[:10]); strings.TrimSpace(out) != id {
		t.Errorf("rm: %q", out)
	}
	if out := w.ok("ls"); strings.Contains(out, id) {
		t.Errorf("ls after rm: %s", out)
	}
	if out := w.ok("ls", "-a"); !strings.Contains(out, "cancelled") {
		t.Errorf("ls -a after rm: %s", out)
	}
	if out := w.ok("logs", id); out != "two\n" {
		t.Errorf("logs after the end: %q", out)
	}
	if out := w.ok("events", "--since", "1m"); !strings.Contains(out, "sandbox.created") || !strings.Contains(out, "uid:") {
		t.Errorf("events: %s", out)
	}
}

func TestFilesAndCopy(t *testing.T) {
	w := newWorld(t)
	w.ok("create", "--name", "dev")
	if code, _, errs := w.run("hello", "files", "put", "dev", "/tmp/a/greeting"); code != 0 {
		t.Fatal(errs)
	}
	if out := w.ok("files", "cat", "dev", "/tmp/a/greeting", "--offset", "1", "--limit", "3"); out != "ell" {
		t.Errorf("cat: %q", out)
	}
	if out := w.ok("files", "ls", "dev", "/tmp/a"); !strings.Contains(out, "-rw-r--r--") || !strings.Contains(out, "greeting") {
		t.Errorf("ls: %s", out)
	}
	w.ok("files", "chmod", "dev", "0600", "/tmp/a/greeting")
	w.ok("files", "mv", "dev", "/tmp/a/greeting", "/tmp/a/moved")
	if out := w.ok("files", "stat", "dev", "/tmp/a/moved"); !strings.Contains(out, "-rw-------") {
		t.Errorf("stat: %s", out)
	}
	dir := t.TempDir()
	tree := filepath.Join(dir, "src", "deep")
	if err := os.MkdirAll(tree, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(tree, "file"), []byte("content"), 0o640); err != nil {
		t.Fatal(err)
	}
	src := filepath.Join(dir, "src")
	w.ok("cp", src, "dev:/tmp/new")     // does not exist: gets the name
	w.ok("cp", src, "dev:/tmp")         // a directory: lands in it
	w.ok("cp", src+"/.", "dev:/tmp/a/") // content only
	for _, p := range []string{"/tmp/new/deep/file", "/tmp/src/deep/file", "/tmp/a/deep/file"} {
		if out := w.ok("files", "cat", "dev", p); out != "content" {
			t.Errorf("%s: %q", p, out)
		}
	}
	w.ok("cp", "dev:/tmp/new", filepath.Join(dir, "back"))
	if b, err := os.ReadFile(filepath.Join(dir, "back", "deep", "file")); err != nil || string(b) != "content" {
		t.Errorf("copied back: %q, %v", b, err)
	}
	w.ok("cp", "dev:/tmp/new/deep/file", filepath.Join(dir, "one"))
	if b, err := os.ReadFile(filepath.Join(dir, "one")); err != nil || string(b) != "content" {
		t.Errorf("copied back one: %q, %v", b, err)
	}
	w.ok("files", "rm", "-r", "dev", "/tmp/new")
	if code, _, errs := w.run("", "files", "stat", "dev", "/tmp/new"); code != 125 || !strings.Contains(errs, "(file_not_found)") {
		t.Errorf("stat of a removed file: %d %s", code, errs)
	}
}

func TestDaemonDown(t *testing.T) {
	var out, errs bytes.Buffer
	c := &cli{name: "sandbox", in: strings.NewReader(""), out: &out, err: &errs, getenv: func(string) string { return "" }}
	if code := c.main(t.Context(), []string{"--host", "unix:///nowhere/s.sock", "doctor"}); code != 1 || !strings.Contains(out.String(), "systemctl start sandboxd") {
		t.Errorf("doctor: %d %s %s", code, out.String(), errs.String())
	}
	if code := c.main(t.Context(), []string{"--host", "unix:///nowhere/s.sock", "ls"}); code != 125 || !strings.Contains(errs.String(), "(daemon_unreachable)") {
		t.Errorf("ls: %d %s", code, errs.String())
	}
}
