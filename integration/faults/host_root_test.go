//go:build root

package faults

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// firsts are the PID 1s of an installation's shells, by their ids.
func firsts(t *testing.T, d *harness.Daemon) map[string]int {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(harness.CgroupRoot(), d.Parent, "sb*", "init", "cgroup.procs"))
	if err != nil {
		t.Fatal(err)
	}
	pids := map[string]int{}
	for _, f := range found {
		b, _ := os.ReadFile(f) // it may be gone
		if pid, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
			pids[filepath.Base(filepath.Dir(filepath.Dir(f)))] = pid
		}
	}
	return pids
}

// TestHungPoolShell stops PID 1 of every shell that is kept ready: the next
// sandbox is made of another. The control is a create before that, which takes
// one of them.
func TestHungPoolShell(t *testing.T) {
	d := harness.Install(t, "pool:\n  size: 2\n")
	full := func() map[string]int {
		var pids map[string]int
		testenv.Eventually(t, 60*time.Second, "a full pool", func() bool {
			pids = firsts(t, d)
			return len(pids) >= 2
		})
		return pids
	}
	ready := full()
	testenv.Eventually(t, 60*time.Second, "a sandbox of the pool", func() bool {
		sb := d.New(t, sandbox.Spec{})
		_, pooled := ready[string(sb.ID)]
		if _, err := d.Remove(t.Context(), string(sb.ID)); err != nil {
			t.Fatal(err)
		}
		ready = full()
		return pooled
	})
	ready = full()
	for id, pid := range ready {
		if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
			t.Fatalf("stop PID 1 of %s: %v", id, err)
		}
	}
	began := time.Now()
	sb := d.New(t, sandbox.Spec{})
	t.Logf("with every ready shell hung a create took %v", time.Since(began))
	if _, hung := ready[string(sb.ID)]; hung {
		t.Errorf("sandbox %s was made of a shell that hangs", sb.ID)
	}
	if got := d.Sh(t, string(sb.ID), "echo well"); got != "well" {
		t.Errorf("it says %q", got)
	}
}

// TestHungInit stops PID 1 of a running sandbox: what asks it says so soon, and
// the sandbox can be stopped, started and removed.
func TestHungInit(t *testing.T) {
	d := harness.Install(t, "pool:\n  size: 0\n")
	sb := d.New(t, sandbox.Spec{})
	id := string(sb.ID)
	d.Sh(t, id, "echo kept > /root/file")
	hang := func() {
		t.Helper()
		if err := unix.Kill(firsts(t, d)[id], unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	}
	timed := func(what string, f func() error) {
		t.Helper()
		began := time.Now()
		if err := f(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		t.Logf("%s took %v", what, time.Since(began))
	}
	hang()
	began := time.Now()
	if _, err := d.Snapshot(t.Context(), id, sandbox.SnapshotRequest{}); sandbox.CodeOf(err) != "deadline" {
		t.Errorf("snapshot: %v, want code deadline", err)
	}
	t.Logf("a snapshot was refused after %v", time.Since(began))
	timed("stop", func() error { _, err := d.Stop(t.Context(), id); return err })
	timed("start", func() error { _, err := d.Start(t.Context(), id); return err })
	if got := d.Sh(t, id, "cat /root/file"); got != "kept" {
		t.Errorf("the file holds %q", got)
	}
	hang()
	timed("rm", func() error { _, err := d.Remove(t.Context(), id); return err })
}

// TestFullStateDisk fills the disk with the database again and again, and kills
// the daemon on it: it starts, tells what runs, removes, and loses nothing. The
// control is a create on the full disk, which is refused.
func TestFullStateDisk(t *testing.T) {
	at, err := os.MkdirTemp("/var/tmp", "sandboxd-full-")
	if err == nil {
		err = unix.Mount("tmpfs", at, "tmpfs", 0, "size=128m,mode=0711")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(unix.Unmount(at, unix.MNT_DETACH), os.Remove(at)); err != nil {
			t.Error(err)
		}
	})
	t.Setenv("SANDBOXD_TEST_DIR", at)
	d := harness.Install(t, "pool:\n  size: 0\n")
	filler := filepath.Join(at, "filler")
	fill := func() {
		f, err := os.OpenFile(filler, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		for _, size := range []int{1 << 20, 4096, 1} {
			for err = nil; err == nil; {
				_, err = f.Write(make([]byte, size))
			}
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
	}
	kept := d.New(t, sandbox.Spec{Name: "kept"})
	d.Sh(t, "kept", "echo kept > /root/file")
	for i := range harness.Soak(3, 50) {
		var doomed []string
		for range 3 {
			doomed = append(doomed, string(d.New(t, sandbox.Spec{}).ID))
		}
		fill()
		if _, err := d.Remove(t.Context(), doomed[0]); err != nil {
			t.Fatalf("cycle %d: rm on a full disk: %v", i, err)
		}
		d.Crash()
		fill() // what a start may take of before
		d.Up()
		fill()
		if sb, err := d.Create(t.Context(), sandbox.Spec{}, ""); sandbox.CodeOf(err) != "disk_full" && sandbox.CodeOf(err) != "volume_full" {
			t.Errorf("cycle %d: create on a full disk: %s, %v; want it refused", i, sb.ID, err)
		}
		for _, id := range doomed[1:] {
			if _, err := d.Remove(t.Context(), id); err != nil {
				t.Fatalf("cycle %d: rm on a full disk after a kill: %v", i, err)
			}
		}
		if sb, err := d.Sandbox(t.Context(), "kept"); err != nil || sb.Status != sandbox.StatusRunning || sb.ID != kept.ID {
			t.Fatalf("cycle %d: the bystander is %s, %v", i, sb.Status, err)
		}
		if err := os.Remove(filler); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, 30*time.Second, "the reserve made again", func() bool {
			st, err := os.Stat(filepath.Join(d.Dir, "state", "ballast"))
			return err == nil && st.Size() == 8<<20
		})
		if got := d.Sh(t, "kept", "cat /root/file"); got != "kept" {
			t.Fatalf("cycle %d: the file holds %q", i, got)
		}
	}
	d.Agree(t)
}

// TestOperatorGetsIn has a user of the socket open as many connections as he
// can, and the daemon's limit of open files lowered below that: root still
// lists and removes. The control: some of the user's connections are closed.
func TestOperatorGetsIn(t *testing.T) {
	d := harness.Install(t, "socket_group: nogroup\n")
	sb := d.New(t, sandbox.Spec{})
	if err := unix.Prlimit(d.PID(), unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 400, Max: 400}, nil); err != nil {
		t.Fatal(err)
	}
	flood := exec.CommandContext(t.Context(), "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-c", `
import socket, sys, time
held = []
for i in range(600):
    s = socket.socket(socket.AF_UNIX); s.setblocking(False)
    try:
        s.connect(sys.argv[1]); s.send(b"GET /v1/sandboxes HTTP/1.1\r\n")
    except OSError: pass
    held.append(s)
    if i % 50 == 0: time.sleep(0.05)
time.sleep(1)
def closed(s):
    try: return s.recv(1) == b""
    except BlockingIOError: return False
    except OSError: return True
print(sum(map(closed, held)), flush=True); sys.stdin.read()`, filepath.Join(d.Dir, "run", "sandboxd.sock"))
	in, err := flood.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := flood.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	flood.Stderr = os.Stderr
	if err := flood.Start(); err != nil {
		t.Fatal(err)
	}
	said := make([]byte, 16)
	n, err := out.Read(said)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Second) // unfinished requests are cut off after 10
	defer cancel()
	operator, err := client.New(d.Host())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := operator.List(ctx, sandbox.Filter{}); err != nil {
		t.Errorf("list: %v", err)
	}
	if _, err := operator.Remove(ctx, string(sb.ID)); err != nil {
		t.Errorf("remove: %v", err)
	}
	if closed, err := strconv.Atoi(strings.TrimSpace(string(said[:n]))); err != nil || closed < 100 {
		t.Errorf("%d of the user's 600 connections were closed, %v: this shows nothing", closed, err)
	}
	_ = in.Close()
	_ = flood.Wait()
}

// TestWatchdog listens where systemd would: the daemon reports as long as it
// answers, not while its database does not, and then again.
func TestWatchdog(t *testing.T) {
	d := harness.Install(t, "")
	d.Shut()
	at := filepath.Join(t.TempDir(), "notify")
	ln, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: at, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	var fed atomic.Int64
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := ln.Read(buf)
			if err != nil {
				return
			}
			if strings.Contains(string(buf[:n]), "WATCHDOG=1") {
				fed.Add(1)
			}
		}
	}()
	t.Setenv("NOTIFY_SOCKET", at)
	t.Setenv("WATCHDOG_USEC", "4000000")
	d.Up()
	more := func(n int64) func() bool {
		from := fed.Load()
		return func() bool { return fed.Load() >= from+n }
	}
	testenv.Eventually(t, 30*time.Second, "reports", more(3))

	// Somebody holds the database's write lock.
	lock := writeLock(t, filepath.Join(d.Dir, "state", "sandboxd.db"))
	<-time.After(2 * time.Second) // one that was under way
	from := fed.Load()
	<-time.After(6 * time.Second) // six times as long as between two
	if got := fed.Load() - from; got != 0 {
		t.Errorf("%d reports while the database did not answer", got)
	}
	lock.Close()
	testenv.Eventually(t, 60*time.Second, "reports again", more(2))
}

// writeLock holds the write lock of a database in WAL mode, until it is closed:
// a POSIX lock on a byte of the file that its users share (walformat.html).
func writeLock(t *testing.T, db string) *os.File {
	t.Helper()
	f, err := os.OpenFile(db+"-shm", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	testenv.Eventually(t, 20*time.Second, "the database's write lock", func() bool {
		return unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: 120, Len: 1}) == nil
	})
	return f
}

// TestExitStatusOfBadConfig is what keeps the unit from starting the daemon
// again and again for nothing.
func TestExitStatusOfBadConfig(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(config, []byte("no_such_key: 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	err := exec.CommandContext(t.Context(), harness.Program(t, "sandboxd"), "--config", config).Run()
	if exit, ok := err.(*exec.ExitError); !ok || exit.Sys().(syscall.WaitStatus).ExitStatus() != 78 { //nolint:errcheck,errorlint // of Run, on Linux
		t.Errorf("%v, want exit status 78", err)
	}
}
