//go:build root

package harness

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
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// ownNet marks the test program's second life in its own network namespace.
const ownNet = "SANDBOXD_TEST_OWN_NETNS"

// Main moves the whole program, and so every daemon it starts, into a
// network namespace of its own: the machine's interfaces, routes and firewall
// are never touched.
func Main(m *testing.M) {
	if os.Getenv(ownNet) == "" {
		runtime.LockOSThread()
		if err := errors.Join(unix.Unshare(unix.CLONE_NEWNET), HostRun("ip", "link", "set", "lo", "up")); err != nil {
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

// HostRun runs a program of the host; its output is in the error.
func HostRun(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// Program returns the path of a built program.
func Program(t testing.TB, name string) string {
	t.Helper()
	dirs := []string{os.Getenv("SANDBOXD_BIN"), "../bin", "../../bin", "bin"}
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

// Daemon is one installation of sandboxd: directories, a cgroup, and now and
// then a process.
type Daemon struct {
	Dir    string
	Parent string // cgroup
	Extra  []string
	Log    *Log
	*client.Client

	cmd   *exec.Cmd
	done  chan struct{}
	t     testing.TB
	apart bool // in a network namespace of its own
}

// Log keeps what a daemon said, for failed tests.
type Log struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.b.Len() > 4<<20 {
		l.b.Reset()
	}
	return l.b.Write(p)
}

func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Install makes the directories of an installation and starts its daemon.
// At the end of the test every sandbox and the installation are gone.
//
// Unless the configuration says otherwise few shells are kept ready: making
// them takes an emulated machine seconds.
func Install(t testing.TB, config string, args ...string) *Daemon {
	t.Helper()
	return install(t, false, config, args...)
}

// InstallApart is Install in a network namespace of its own: one namespace has
// room for one daemon.
func InstallApart(t testing.TB, config string, args ...string) *Daemon {
	t.Helper()
	return install(t, true, config, args...)
}

func install(t testing.TB, apart bool, config string, args ...string) *Daemon {
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
	d := &Daemon{t: t, apart: apart, Dir: dir, Parent: "/" + filepath.Base(dir), Log: &Log{}}
	if err := os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	d.Extra = append([]string{
		"--config", filepath.Join(dir, "config.yaml"), "--state-dir", filepath.Join(dir, "state"), "--run-dir", filepath.Join(dir, "run"),
		"--cgroup-parent", d.Parent, "--cgroup", CgroupMode(),
	}, args...)
	d.Client, err = client.New(d.Host())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Uninstall)
	d.Up()
	return d
}

// CgroupMode asks for enforcement wherever the host can.
func CgroupMode() string {
	b, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers")
	if err == nil && strings.Contains(string(b), "memory") {
		return "enforce"
	}
	return "best-effort"
}

// Host is the address of the daemon's socket.
func (d *Daemon) Host() string { return "unix://" + filepath.Join(d.Dir, "run", "sandboxd.sock") }

// Up starts the daemon and waits until it answers.
func (d *Daemon) Up() {
	d.t.Helper()
	if err := d.TryUp(); err != nil {
		d.t.Fatal(err)
	}
}

// TryUp is Up for a daemon that may refuse to start: then the error holds all
// it said, and none runs.
func (d *Daemon) TryUp() error {
	d.t.Helper()
	argv := append([]string{Program(d.t, "sandboxd")}, d.Extra...)
	if d.apart {
		argv = append([]string{"unshare", "--net", "--", "sh", "-c", `ip link set lo up && exec "$@"`, "sh"}, argv...)
	}
	d.cmd = exec.Command(argv[0], argv[1:]...)
	d.cmd.Stdout, d.cmd.Stderr = d.Log, d.Log
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a Ctrl-C at the terminal is not the daemon's
	if err := d.cmd.Start(); err != nil {
		return err
	}
	d.done = make(chan struct{})
	go func(cmd *exec.Cmd, done chan struct{}) { _ = cmd.Wait(); close(done) }(d.cmd, d.done)
	for deadline := time.Now().Add(120 * time.Second); ; {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		_, err := d.Version(ctx)
		cancel()
		if err == nil {
			return nil
		}
		select {
		case <-d.done:
			d.cmd = nil
			return fmt.Errorf("the daemon ended while it started:\n%s", d.Log)
		case <-time.After(10 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the daemon does not answer: %w\n%s", err, d.Log)
		}
	}
}

// Crash ends the daemon as a crash would and waits for that.
func (d *Daemon) Crash() { d.End(syscall.SIGKILL) }

// Shut ends the daemon in good order and waits for that.
func (d *Daemon) Shut() { d.End(syscall.SIGTERM) }

// End sends the daemon a signal and waits for its end; it does nothing where
// none runs.
func (d *Daemon) End(sig syscall.Signal) {
	if d.cmd == nil {
		return
	}
	_ = d.cmd.Process.Signal(sig)
	select {
	case <-d.done:
	case <-time.After(60 * time.Second):
		d.t.Errorf("the daemon outlived %v by a minute: its threads wait in %q\n%s", sig, linux.WaitsOf(d.cmd.Process.Pid), d.Log)
		_ = d.cmd.Process.Kill()
		<-d.done
	}
	d.cmd = nil
}

// Alive reports whether a daemon was started and not ended by the test.
func (d *Daemon) Alive() bool { return d.cmd != nil }

// PID is the process id of the running daemon.
func (d *Daemon) PID() int { return d.cmd.Process.Pid }

// Uninstall removes every sandbox through the API, ends the daemon and
// removes what it had on disk.
func (d *Daemon) Uninstall() {
	if d.cmd == nil {
		d.Up()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	d.RemoveAll(ctx)
	d.Shut()
	if d.t.Failed() {
		d.t.Logf("the daemon said:\n%s", Quiet(LastLines(d.Log.String(), 80)))
	}
	if err := os.RemoveAll(d.Dir); err != nil {
		d.t.Logf("remove %s: %v", d.Dir, err)
	}
	d.removeCgroups()
}

// removeCgroups removes the daemon's own cgroups, in which nothing is left.
func (d *Daemon) removeCgroups() {
	top := CgroupRoot() + d.Parent
	var all []string
	_ = filepath.WalkDir(top, func(path string, e os.DirEntry, err error) error {
		if err == nil && e.IsDir() {
			all = append(all, path)
		}
		return nil
	})
	for _, dir := range slices.Backward(all) {
		if dir != top && dir != filepath.Join(top, "production") {
			procs, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
			d.t.Errorf("left after the end of every sandbox: %s with processes %q", dir, procs)
			_ = os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0)
		}
		_ = os.Remove(dir)
	}
}

// Quiet leaves out what every best-effort daemon says.
func Quiet(log string) string {
	var b strings.Builder
	for line := range strings.Lines(log) {
		if !strings.Contains(line, "NOT ENFORCED") {
			b.WriteString(line)
		}
	}
	return b.String()
}

// LastLines returns the last n lines of s.
func LastLines(s string, n int) string {
	lines := strings.Split(s, "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// CgroupRoot is where this machine mounts the cgroup2 tree.
func CgroupRoot() string {
	var st unix.Statfs_t
	if unix.Statfs("/sys/fs/cgroup", &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
		return "/sys/fs/cgroup"
	}
	return "/sys/fs/cgroup/unified"
}

// RemoveAll ends every living sandbox.
func (d *Daemon) RemoveAll(ctx context.Context) {
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

// New makes a sandbox or fails the test.
func (d *Daemon) New(t testing.TB, spec sandbox.Spec) sandbox.Sandbox {
	t.Helper()
	sb, err := d.Create(t.Context(), spec, "")
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	return sb
}

// Result is what a finished command left.
type Result struct {
	Stdout, Stderr string
	Dropped        int64 // bytes of output that were lost
	Exit           sandbox.ExitStatus
}

// Command runs a command to its end or fails the test.
func (d *Daemon) Command(t testing.TB, ref string, argv ...string) Result {
	t.Helper()
	r, err := d.Try(t.Context(), ref, sandbox.ProcessSpec{Argv: argv})
	if err != nil {
		t.Fatalf("exec %q: %v", argv, err)
	}
	return r
}

// Sh runs a shell script to its end and wants it to succeed.
func (d *Daemon) Sh(t testing.TB, ref, script string) string {
	t.Helper()
	r := d.Command(t, ref, "sh", "-c", script)
	if r.Exit.Code != 0 {
		t.Fatalf("sh -c %q: exit %d\n%s%s", script, r.Exit.Code, r.Stdout, r.Stderr)
	}
	return strings.TrimSuffix(r.Stdout, "\n")
}

// Try runs a command to its end.
func (d *Daemon) Try(ctx context.Context, ref string, spec sandbox.ProcessSpec) (Result, error) {
	io, err := d.Exec(ctx, ref, spec)
	if err != nil {
		return Result{}, err
	}
	defer io.Close()
	return Collect(io)
}

// Collect reads a process's output to its end.
func Collect(p sandbox.ProcessIO) (Result, error) {
	var r Result
	var out, errs strings.Builder
	for {
		o, err := p.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return r, err
		}
		r.Dropped += o.Dropped
		if o.Stream == sandbox.Stderr {
			errs.Write(o.Data)
		} else {
			out.Write(o.Data)
		}
	}
	r.Stdout, r.Stderr = out.String(), errs.String()
	exit, ok := p.Exit()
	if !ok {
		return r, errors.New("the output ended without an exit status")
	}
	r.Exit = exit
	return r, nil
}

// Probe is the path of the static probe outside.
func Probe(t testing.TB) string {
	t.Helper()
	path := filepath.Join(os.Getenv("SANDBOXD_BIN"), "test-probe") // built beforehand where there is no Go
	if _, err := os.Stat(path); err != nil {
		path = filepath.Join(t.TempDir(), "test-probe")
		cmd := exec.Command("go", "build", "-o", path, "../testdata/probe")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("build the probe: %v\n%s", err, out)
		}
	}
	return path
}

// GiveProbe puts the static probe into a sandbox and returns its path there.
func (d *Daemon) GiveProbe(t testing.TB, ref string) string {
	t.Helper()
	f, err := os.Open(Probe(t))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const inside = "/opt/probe"
	if _, err := d.Files(ref).Write(t.Context(), "root", inside, 0o755, f); err != nil {
		t.Fatal(err)
	}
	return inside
}
