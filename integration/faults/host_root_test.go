//go:build root

package faults

import (
	"context"
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
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	lock := exec.CommandContext(ctx, "python3", "-c", `
import sqlite3, sys
c = sqlite3.connect(sys.argv[1], isolation_level=None); c.execute("BEGIN IMMEDIATE")
print("held", flush=True); sys.stdin.read()`, filepath.Join(d.Dir, "state", "sandboxd.db"))
	in, err := lock.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := lock.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := lock.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 8)); err != nil {
		t.Fatal(err)
	}
	<-time.After(2 * time.Second) // one that was under way
	from := fed.Load()
	<-time.After(6 * time.Second) // six times as long as between two
	if got := fed.Load() - from; got != 0 {
		t.Errorf("%d reports while the database did not answer", got)
	}
	_ = in.Close()
	_ = lock.Wait()
	testenv.Eventually(t, 60*time.Second, "reports again", more(2))
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
