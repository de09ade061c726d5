//go:build root

package faults

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
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
	"github.com/sandboxd/sandboxd/internal/linux"
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

// hang stops a PID 1 and waits until none of its threads runs any more, for one
// of them may still answer what is asked at once.
func hang(t *testing.T, pid int) {
	t.Helper()
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 10*time.Second, "a PID 1 that is stopped", func() bool {
		for _, w := range linux.WaitsOf(pid) {
			if f := strings.Fields(w); f[0] == "thread" && f[2] != "T" {
				return false
			}
		}
		return true
	})
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
	for _, pid := range ready {
		hang(t, pid)
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
	timed := func(what string, f func() error) {
		t.Helper()
		began := time.Now()
		if err := f(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		t.Logf("%s took %v", what, time.Since(began))
	}
	hang(t, firsts(t, d)[id])
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
	hang(t, firsts(t, d)[id])
	timed("rm", func() error { _, err := d.Remove(t.Context(), id); return err })
}

// TestFullStateDisk fills the disk with the database again and again, and kills
// the daemon on it, also with little or nothing of the reserve left: it starts, tells
// what runs, removes and prunes, and loses nothing. The control is a create on the
// full disk, which is refused.
func TestFullStateDisk(t *testing.T) {
	for _, fs := range []string{"tmpfs", "ext4"} {
		t.Run(fs, func(t *testing.T) { fullStateDisk(t, fs) })
	}
}

// fullStateDisk needs a file system that root cannot write to either once it is
// full.
func fullStateDisk(t *testing.T, fs string) {
	at, err := os.MkdirTemp("/var/tmp", "sandboxd-full-")
	if err == nil {
		mount := exec.Command("mount", "-t", "tmpfs", "-o", "size=128m,mode=0711", "tmpfs", at)
		if fs == "ext4" {
			img := filepath.Join(t.TempDir(), "img")
			// Blocks as large as a page, as everywhere but on disks this small: where they are
			// smaller, SQLite reserves a part of a page of its shared memory alone.
			mount = exec.Command("sh", "-ec", `truncate -s 128m "$1"; mkfs.ext4 -q -m 0 -b 4096 "$1"; mount -o loop "$1" "$2"; chmod 711 "$2"`, "sh", img, at)
		}
		var out []byte
		if out, err = mount.CombinedOutput(); err != nil {
			t.Log(string(out))
		}
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
	var whole unix.Statfs_t
	need(t, unix.Statfs(at, &whole))
	full := int64(whole.Blocks) * whole.Bsize / 16 // the reserve
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
		var tarball bytes.Buffer
		w := tar.NewWriter(&tarball)
		need(t, w.WriteHeader(&tar.Header{Name: fmt.Sprint("f", i), Typeflag: tar.TypeReg, Mode: 0o644}))
		need(t, w.Close())
		_, err := d.ImportImage(t.Context(), fmt.Sprint("unused-", i), &tarball)
		need(t, err)
		fill()
		if _, err := d.Remove(t.Context(), doomed[0]); err != nil {
			t.Fatalf("cycle %d: rm on a full disk: %v", i, err)
		}
		ballast := filepath.Join(d.Dir, "state", "ballast")
		switch i % 3 {
		case 0: // a little of the reserve is left
			d.Crash()
			need(t, os.Truncate(ballast, 1<<20))
		case 1: // nothing
			d.Crash()
			need(t, os.Truncate(ballast, 0))
		case 2: // nothing, but what the daemon leaves at its end
			need(t, os.Truncate(ballast, 0))
			fill()
			d.Shut()
		}
		fill() // what a start may take of before
		d.Up()
		fill()
		pruned, err := d.PruneImages(t.Context(), sandbox.PruneRequest{All: true})
		if err != nil || len(pruned.Images) == 0 {
			t.Errorf("cycle %d: prune on a full disk removed %d images, %v", i, len(pruned.Images), err)
		}
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
			return err == nil && st.Size() == full
		})
		if got := d.Sh(t, "kept", "cat /root/file"); got != "kept" {
			t.Fatalf("cycle %d: the file holds %q", i, got)
		}
	}
	d.Agree(t)
}

// TestFilesHeedMemory writes to /dev/shm by the API, past PID 1's own bounds and
// the workload's: the whole stays within the sandbox's memory. The control is
// the same file on its disk.
func TestFilesHeedMemory(t *testing.T) {
	testenv.Need(t, testenv.CgroupControllers)
	const most = 32 << 20
	d := harness.Install(t, "pool:\n  size: 0\n")
	id := string(d.New(t, sandbox.Spec{Limits: sandbox.Limits{MemoryBytes: most}}).ID)
	files := d.Files(id)
	write := func(path string) error {
		_, err := files.Write(t.Context(), "0:0", path, 0o644, io.LimitReader(zeros{}, 2*most))
		return err
	}
	if err := write("/root/file"); err != nil {
		t.Errorf("on its disk: %v", err)
	}
	if err := write("/dev/shm/file"); sandbox.CodeOf(err) != "memory_full" {
		t.Errorf("in memory: %v, want code memory_full", err)
	}
	shared := func() (n uint64) {
		b, err := os.ReadFile(filepath.Join(harness.CgroupRoot(), d.Parent, id, "memory.stat"))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			if text, ok := strings.CutPrefix(line, "shmem "); ok {
				n, _ = strconv.ParseUint(strings.TrimSpace(text), 10, 64)
			}
		}
		return n
	}
	for i := range 8 { // many that would each fit
		_, _ = files.Write(t.Context(), "0:0", fmt.Sprint("/dev/shm/", i), 0o644, io.LimitReader(zeros{}, most/4))
	}
	if n := shared(); n > most*11/10 || n < most/2 {
		t.Errorf("%d MiB of files in memory under a limit of %d", n>>20, most>>20)
	}
}

// zeros never ends.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

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
def closed(s):
    try: return s.recv(1) == b""
    except BlockingIOError: return False
    except OSError: return True
gone, end = set(), time.time() + 4
while len(gone) < 100 and time.time() < end:
    time.sleep(0.2)
    gone |= {s for s in held if closed(s)}
print(len(gone), flush=True); sys.stdin.read()`, filepath.Join(d.Dir, "run", "sandboxd.sock"))
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

// TestCheckConfigFindsWhatStartRefuses gives --check-config and the start the
// same mistakes. The control is the same configuration without one.
func TestCheckConfigFindsWhatStartRefuses(t *testing.T) {
	dir := t.TempDir()
	plain, closed, long := filepath.Join(dir, "plain"), filepath.Join(dir, "closed"), filepath.Join(dir, strings.Repeat("x", 90))
	if err := errors.Join(os.Chmod(filepath.Dir(dir), 0o711), os.Chmod(dir, 0o711), os.WriteFile(plain, nil, 0o600), os.Mkdir(closed, 0o700)); err != nil {
		t.Fatal(err)
	}
	state := filepath.Join(dir, "state")
	withProduction := filepath.Join(dir, "worlds")
	if err := errors.Join(os.Mkdir(withProduction, 0o700), os.WriteFile(filepath.Join(withProduction, "production.db"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	run := func(extra string, args ...string) (string, error) {
		config := filepath.Join(dir, "config.yaml")
		if err := os.WriteFile(config, []byte(extra), 0o600); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		out, err := exec.CommandContext(ctx, harness.Program(t, "sandboxd"), append([]string{
			"--config", config, "--cgroup", harness.CgroupMode(), "--cgroup-parent", "/sandboxd-check-config",
		}, args...)...).CombinedOutput()
		if ctx.Err() != nil {
			err = nil // it runs
		}
		return string(out), err
	}
	base := fmt.Sprintf("state_dir: %s\nrun_dir: %s\npool: {size: 0}\n", state, filepath.Join(dir, "run"))
	if out, err := run(base, "--check-config"); err != nil {
		t.Fatalf("without a mistake: %v: %s", err, out)
	}
	for name, text := range map[string]string{
		"log level":              base + "log_level: loud\n",
		"run dir too long":       fmt.Sprintf("state_dir: %s\nrun_dir: %s\n", state, long),
		"run dir closed":         fmt.Sprintf("state_dir: %s\nrun_dir: %s/run\n", state, closed),
		"run dir a file":         fmt.Sprintf("state_dir: %s\nrun_dir: %s\n", state, plain),
		"state dir a file":       fmt.Sprintf("state_dir: %s\nrun_dir: %s/run\n", plain, dir),
		"socket path too long":   base + "socket: " + filepath.Join(dir, strings.Repeat("s", 120)) + "\n",
		"ingress at a file":      base + "network: {domain: a.example, ingress_listen: " + plain + "}\n",
		"ingress in no dir":      base + "network: {domain: a.example, ingress_listen: " + dir + "/none/s}\n",
		"not our address":        base + "metrics_listen: 127.0.0.1:0\nnetwork: {domain: a.example, ingress_listen: '192.0.2.77:8081'}\n",
		"tls without":            base + "listen: 127.0.0.1:0\ntls_cert: /nowhere\ntls_key: /nowhere\n",
		"e2b without tls":        base + "e2b: {listen: '0.0.0.0:7465', domain: a.example}\ntls_cert: /nowhere\ntls_key: /nowhere\n",
		"slots of production":    strings.Replace(base, state, withProduction, 1) + "max_sandboxes: 100\nnetwork: {pool: 10.9.0.0/24}\n",
		"a volume of no size":    base + "volume: {size: 1m}\n",
		"an unknown cgroup mode": base + "cgroup_parent: sandboxd\n",
	} {
		t.Run(name, func(t *testing.T) {
			args := []string{}
			if name == "an unknown cgroup mode" {
				text += "cgroup: maybe\n"
				args = []string{"--cgroup", "maybe"}
			}
			if out, err := run(text, append(args, "--check-config")...); err == nil {
				t.Errorf("--check-config: %s", out)
			}
			if out, err := run(text, args...); err == nil {
				t.Errorf("the start takes it: %s", out)
			}
		})
	}
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
	if exit, ok := err.(*exec.ExitError); !ok || exit.Sys().(syscall.WaitStatus).ExitStatus() != 78 { //nolint:errorlint // of Run, on Linux
		t.Errorf("%v, want exit status 78", err)
	}
}
