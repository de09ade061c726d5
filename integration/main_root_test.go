//go:build root

package integration

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/sandbox"
)

// ownNet marks the test program's second life in its own network namespace.
const ownNet = "SANDBOXD_TEST_OWN_NETNS"

// TestMain moves the whole program, and so every daemon it starts, into a
// network namespace of its own: the machine's interfaces, routes and firewall
// are never touched.
func TestMain(m *testing.M) {
	if os.Getenv(ownNet) == "" {
		runtime.LockOSThread()
		if err := errors.Join(unix.Unshare(unix.CLONE_NEWNET), run("ip", "link", "set", "lo", "up")); err != nil {
			fmt.Fprintln(os.Stderr, "make a network namespace for the tests:", err)
			os.Exit(1)
		}
		self, err := os.Executable()
		if err == nil {
			err = unix.Exec(self, os.Args, append(os.Environ(), ownNet+"=1"))
		}
		fmt.Fprintln(os.Stderr, "start again in the network namespace:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func run(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// program returns the path of a built program.
func program(t testing.TB, name string) string {
	t.Helper()
	dirs := []string{os.Getenv("SANDBOXD_BIN"), "../bin", "bin"}
	for _, d := range dirs {
		if d == "" {
			continue
		}
		if p, err := filepath.Abs(filepath.Join(d, name)); err == nil {
			if _, err := os.Stat(p); err == nil {
				return p
			}
		}
	}
	t.Fatalf("no program %s in %v: run 'make build', or name their directory in SANDBOXD_BIN", name, dirs)
	return ""
}

// daemon is one installation of sandboxd: directories, a cgroup, and now and
// then a process.
type daemon struct {
	t      testing.TB
	dir    string
	parent string // cgroup
	extra  []string
	*client.Client

	cmd  *exec.Cmd
	done chan struct{}
	log  *logBuffer
}

// logBuffer keeps what a daemon said, for failed tests.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.b.Len() > 4<<20 {
		l.b.Reset()
	}
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// install makes the directories of an installation and starts its daemon.
// At the end of the test every sandbox and the installation are gone.
//
// Unless the configuration says otherwise few shells are kept ready: making
// them takes an emulated machine seconds.
func install(t testing.TB, config string, args ...string) *daemon {
	t.Helper()
	if !strings.Contains(config, "pool:") {
		config += "pool:\n  size: 2\n"
	}
	base := os.Getenv("SANDBOXD_TEST_DIR")
	if base == "" {
		base = "/var/tmp"
	}
	dir, err := os.MkdirTemp(base, "sandboxd-it-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o711); err != nil { // sandboxes pass through to the run directory
		t.Fatal(err)
	}
	d := &daemon{t: t, dir: dir, parent: "/" + filepath.Base(dir), log: &logBuffer{}}
	if err := os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	d.extra = append([]string{
		"--config", filepath.Join(dir, "config.yaml"), "--state-dir", filepath.Join(dir, "state"), "--run-dir", filepath.Join(dir, "run"),
		"--cgroup-parent", d.parent, "--cgroup", cgroupMode(),
	}, args...)
	d.Client, err = client.New(d.host())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.uninstall)
	d.start()
	return d
}

// cgroupMode asks for enforcement wherever the host can.
func cgroupMode() string {
	b, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers")
	if err == nil && strings.Contains(string(b), "memory") {
		return "enforce"
	}
	return "best-effort"
}

func (d *daemon) host() string { return "unix://" + filepath.Join(d.dir, "run", "sandboxd.sock") }

// start starts the daemon and waits until it answers.
func (d *daemon) start() {
	d.t.Helper()
	d.cmd = exec.Command(program(d.t, "sandboxd"), d.extra...)
	d.cmd.Stdout, d.cmd.Stderr = d.log, d.log
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a Ctrl-C at the terminal is not the daemon's
	if err := d.cmd.Start(); err != nil {
		d.t.Fatal(err)
	}
	d.done = make(chan struct{})
	go func(cmd *exec.Cmd, done chan struct{}) { _ = cmd.Wait(); close(done) }(d.cmd, d.done)
	for deadline := time.Now().Add(120 * time.Second); ; {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		_, err := d.Version(ctx)
		cancel()
		if err == nil {
			return
		}
		select {
		case <-d.done:
			d.t.Fatalf("the daemon ended while it started:\n%s", d.log)
		case <-time.After(10 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			d.t.Fatalf("the daemon does not answer: %v\n%s", err, d.log)
		}
	}
}

// kill ends the daemon as a crash would and waits for that.
func (d *daemon) kill() { d.end(syscall.SIGKILL) }

// stop ends the daemon in good order and waits for that.
func (d *daemon) stop() { d.end(syscall.SIGTERM) }

func (d *daemon) end(sig syscall.Signal) {
	if d.cmd == nil {
		return
	}
	_ = d.cmd.Process.Signal(sig)
	select {
	case <-d.done:
	case <-time.After(60 * time.Second):
		d.t.Errorf("the daemon outlived %v by a minute:\n%s", sig, d.log)
		_ = d.cmd.Process.Kill()
		<-d.done
	}
	d.cmd = nil
}

// uninstall removes every sandbox through the API, ends the daemon and
// removes what it had on disk.
func (d *daemon) uninstall() {
	if d.cmd == nil {
		d.start()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	d.removeAll(ctx)
	d.stop()
	if d.t.Failed() {
		d.t.Logf("the daemon said:\n%s", quiet(lastLines(d.log.String(), 80)))
	}
	if err := os.RemoveAll(d.dir); err != nil {
		d.t.Logf("remove %s: %v", d.dir, err)
	}
	_ = os.Remove(cgroupRoot() + d.parent)
}

// quiet leaves out what every best-effort daemon says.
func quiet(log string) string {
	var b strings.Builder
	for line := range strings.Lines(log) {
		if !strings.Contains(line, "NOT ENFORCED") {
			b.WriteString(line)
		}
	}
	return b.String()
}

func lastLines(s string, n int) string {
	lines := strings.Split(s, "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// cgroupRoot is where this machine mounts the cgroup2 tree.
func cgroupRoot() string {
	var st unix.Statfs_t
	if unix.Statfs("/sys/fs/cgroup", &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
		return "/sys/fs/cgroup"
	}
	return "/sys/fs/cgroup/unified"
}

// removeAll ends every living sandbox.
func (d *daemon) removeAll(ctx context.Context) {
	var wg sync.WaitGroup
	slots := make(chan struct{}, 8)
	for sb, err := range d.All(ctx, sandbox.Filter{}) {
		if err != nil {
			d.t.Errorf("list sandboxes to remove: %v", err)
			break
		}
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			if _, err := d.Remove(ctx, string(sb.ID)); err != nil {
				d.t.Errorf("remove %s: %v", sb.ID, err)
			}
		})
	}
	wg.Wait()
}

// create makes a sandbox or fails the test.
func (d *daemon) create(t testing.TB, spec sandbox.Spec) sandbox.Sandbox {
	t.Helper()
	sb, err := d.Create(t.Context(), spec, "")
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	return sb
}

// result is what a finished command left.
type result struct {
	stdout, stderr string
	dropped        int64
	exit           sandbox.ExitStatus
}

// exec runs a command to its end or fails the test.
func (d *daemon) exec(t testing.TB, ref string, argv ...string) result {
	t.Helper()
	r, err := d.try(t.Context(), ref, sandbox.ProcessSpec{Argv: argv})
	if err != nil {
		t.Fatalf("exec %q: %v", argv, err)
	}
	return r
}

// sh runs a shell script to its end and wants it to succeed.
func (d *daemon) sh(t testing.TB, ref, script string) string {
	t.Helper()
	r := d.exec(t, ref, "sh", "-c", script)
	if r.exit.Code != 0 {
		t.Fatalf("sh -c %q: exit %d\n%s%s", script, r.exit.Code, r.stdout, r.stderr)
	}
	return strings.TrimSuffix(r.stdout, "\n")
}

// try runs a command to its end.
func (d *daemon) try(ctx context.Context, ref string, spec sandbox.ProcessSpec) (result, error) {
	io, err := d.Exec(ctx, ref, spec)
	if err != nil {
		return result{}, err
	}
	defer io.Close()
	return collect(io)
}

// collect reads a process's output to its end.
func collect(p sandbox.ProcessIO) (result, error) {
	var r result
	var out, errs strings.Builder
	for {
		o, err := p.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return r, err
		}
		r.dropped += o.Dropped
		if o.Stream == sandbox.Stderr {
			errs.Write(o.Data)
		} else {
			out.Write(o.Data)
		}
	}
	r.stdout, r.stderr = out.String(), errs.String()
	exit, ok := p.Exit()
	if !ok {
		return r, errors.New("the output ended without an exit status")
	}
	r.exit = exit
	return r, nil
}
