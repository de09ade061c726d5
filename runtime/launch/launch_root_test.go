//go:build root

package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

func TestMain(m *testing.M) {
	if err := EnterPrivateMounts(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// shellBinary is the program that the daemon carries for libcontainer's stages.
func shellBinary(t testing.TB) []byte {
	t.Helper()
	b, err := os.ReadFile(testenv.Binary(t, "sandbox-shell"))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func newLauncher(t testing.TB) *Launcher {
	t.Helper()
	return newLauncherWith(t, shellBinary(t))
}

func newLauncherWith(t testing.TB, shell []byte) *Launcher {
	t.Helper()
	bin := os.Getenv("SANDBOXD_TEST_PID1") // compiled beforehand where there is no Go
	if bin == "" {
		bin = filepath.Join(t.TempDir(), "pid1")
		cmd := exec.Command("go", "build", "-o", bin, "./testdata/pid1")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("build the stand-in for PID 1: %v\n%s", err, out)
		}
	}
	b, err := os.ReadFile(bin)
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("/tmp", "launch-test-")
	if err != nil {
		t.Fatal(err)
	}
	// Closed to others it is refused, with a way out.
	if _, err := New(Config{RunDir: filepath.Join(dir, "run"), InitBinary: b}); sandbox.CodeOf(err) != "run_dir_unreachable" {
		t.Fatalf("a run directory nobody can reach: %v", err)
	}
	if _, err := New(Config{RunDir: filepath.Join(dir, strings.Repeat("x", 90)), InitBinary: b}); sandbox.CodeOf(err) != "run_dir_too_long" {
		t.Fatalf("a run directory too long for sockets: %v", err)
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	l, err := New(Config{RunDir: dir, InitBinary: b, ShellBinary: shell})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		os.RemoveAll(dir)
	})
	return l
}

// testCgroup makes an empty cgroup for one shell and removes it at the end.
func testCgroup(t testing.TB, id sandbox.ID) string {
	t.Helper()
	path := fmt.Sprintf("/sandboxd-launch-%d/%s", os.Getpid(), id)
	if err := os.MkdirAll(cgroupMount+path, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = os.WriteFile(cgroupMount+path+"/cgroup.kill", []byte("1"), 0)
		for range 500 {
			if err := os.Remove(cgroupMount + path); err == nil || errors.Is(err, os.ErrNotExist) {
				break
			}
			<-time.After(2 * time.Millisecond)
		}
		_ = os.Remove(filepath.Dir(cgroupMount + path))
	})
	return path
}

func ask(t testing.TB, path string) map[string]string {
	t.Helper()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	b, err := io.ReadAll(c)
	if err != nil {
		t.Fatal(err)
	}
	m := map[string]string{}
	for line := range strings.Lines(string(b)) {
		k, v, _ := strings.Cut(strings.TrimSpace(line), "=")
		m[k] = v
	}
	return m
}

func TestShellIsIsolatedAndGone(t *testing.T) {
	l := newLauncher(t)
	id := sandbox.NewID()
	ctx := context.Background()
	sh, err := l.Start(ctx, ShellSpec{ID: id, CgroupPath: testCgroup(t, id), UIDBase: 0x20000000, InitID: 0x1fff0007})
	if err != nil {
		t.Fatal(err)
	}
	defer sh.Close()
	got := ask(t, l.SocketPath(id))
	_, got["v2cgroup"], _ = strings.Cut(got["cgroup"], "0::")
	for k, want := range map[string]string{
		"pid": "1", "uid": "65536", "uidmap": "0 536870912 65536 65536 536805383 1", "hostname": string(id), "v2cgroup": "/",
		"null": "<nil>", "pts": "<nil>", "pty": "<nil>", "userns": "<nil>", "links": "1",
	} {
		if got[k] != want {
			t.Errorf("%s = %q, want %q", k, got[k], want)
		}
	}
	for _, k := range []string{"readinit", "mkdir"} {
		if got[k] == "<nil>" {
			t.Errorf("%s worked inside the shell: want it refused", k)
		}
	}
	score, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", sh.PID))
	if own := strings.TrimSpace(string(score)); err != nil || own != fmt.Sprint(oomScoreAdj) {
		t.Errorf("oom_score_adj of PID 1 = %q, %v; want %d whatever the daemon's own", own, err, oomScoreAdj)
	}
	again, err := l.Open(id, sh.PID, sh.StartTime)
	if err != nil {
		t.Fatalf("open a living shell: %v", err)
	}
	again.Close()
	if _, err := l.Open(id, sh.PID, sh.StartTime+1); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("open with another start time: %v, want class not found", err)
	}

	short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	if err := sh.Wait(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("wait for a living PID 1: %v, want the context's error", err)
	}
	sh.HoldMounts()
	sh.HoldMounts() // holds once
	if err := sh.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := sh.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	if sh.mounts == nil {
		t.Error("the mounts of a living PID 1 were not held")
	}
	dead := &Shell{ID: id, PID: os.Getpid(), PIDFD: sh.PIDFD} // its number is another's now
	if dead.HoldMounts(); dead.mounts != nil {
		t.Error("the mounts of another process were held")
	}
	if _, err := os.Stat(fmt.Sprintf("/proc/%d", sh.PID)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("PID 1 left a zombie: %v", err)
	}
	for range 2 { // the second finds nothing and is content
		if err := l.Remove(id); err != nil {
			t.Fatal(err)
		}
	}
	if left, err := os.ReadDir(l.skeleton.devs()); err != nil || len(left) != 0 {
		t.Errorf("after removal these are left of /dev: %v, %v", left, err)
	}
	if ids, err := l.List(); err != nil || len(ids) != 0 {
		t.Errorf("after removal List = %v, %v", ids, err)
	}
}

// TestShield: who stays in the mount cannot open what passes controllers on,
// who names the file can; twice is as once.
func TestShield(t *testing.T) {
	path := testCgroup(t, sandbox.NewID())
	parent := filepath.Dir(path)
	top := cgroupMount + parent
	within := func(dir string) error {
		fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		file, err := unix.Openat2(fd, subtreeControl, &unix.OpenHow{Flags: unix.O_WRONLY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_XDEV})
		if err == nil {
			_ = unix.Close(file)
		}
		return err
	}
	if err := within(top); err != nil {
		t.Fatalf("opening it without a shield: %v", err)
	}
	t.Cleanup(func() {
		for _, dir := range []string{top, cgroupMount} {
			if err := unix.Unmount(filepath.Join(dir, subtreeControl), 0); err != nil {
				t.Error(err)
			}
			if err := within(dir); err != nil { // else there were two
				t.Errorf("opening it without its shield again: %v", err)
			}
		}
	})
	for range 2 {
		if err := Shield(parent); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{top, cgroupMount} {
		if err := within(dir); !errors.Is(err, unix.EXDEV) {
			t.Errorf("opening that of %s behind its shield: %v, want %v", dir, err, unix.EXDEV)
		}
	}
	f, err := os.OpenFile(filepath.Join(top, subtreeControl), os.O_WRONLY, 0)
	if err != nil {
		t.Fatalf("opening it by its path: %v", err)
	}
	_ = f.Close()
}

// TestStageProgram: the stages run the program that was given, and where none
// was this one. That the given one is run at all shows where it is no good.
func TestStageProgram(t *testing.T) {
	for _, c := range []struct {
		name    string
		program []byte
		fails   bool
	}{
		{"the small one", shellBinary(t), false},
		{"none", nil, false},
		{"one that ends at once", []byte("#!/bin/false\n"), true},
		{"no program", []byte("?"), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newLauncherWith(t, c.program)
			id := sandbox.NewID()
			sh, err := l.Start(context.Background(), ShellSpec{ID: id, CgroupPath: testCgroup(t, id), UIDBase: 0x20000000, InitID: 0x1fff0007})
			if c.fails != (err != nil) {
				t.Errorf("start: %v; want an error: %v", err, c.fails)
			}
			if sh != nil {
				err = errors.Join(sh.Kill(), sh.Wait(context.Background()), sh.Close())
			} else {
				err = nil
			}
			if err := errors.Join(err, l.Remove(id)); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestDevices: each shell's cgroup bounds devices, that of the first, which
// loaded the program, and of the next, which shares it.
func TestDevices(t *testing.T) {
	// opens reports whether a process in the cgroup may read the device.
	opens := func(path, device string) bool {
		return exec.CommandContext(t.Context(), "sh", "-c", `echo $$ > "$1/cgroup.procs" && : < "$2"`, "sh", cgroupMount+path, device).Run() == nil
	}
	l := newLauncher(t)
	bare := testCgroup(t, "bare")
	for _, shell := range []string{"first", "second", "third"} {
		id := sandbox.NewID()
		path := testCgroup(t, id)
		sh, err := l.Start(t.Context(), ShellSpec{ID: id, CgroupPath: path, UIDBase: 0x20000000, InitID: 0x1fff0007})
		if err != nil {
			t.Fatal(err)
		}
		defer sh.Close()
		for _, c := range []struct {
			cgroup, device string
			want           bool
		}{{bare, "/dev/kmsg", true}, {path, "/dev/kmsg", false}, {path, "/dev/null", true}} {
			if got := opens(c.cgroup, c.device); got != c.want {
				t.Errorf("%s shell: opening %s in cgroup %s: %v, want %v", shell, c.device, c.cgroup, got, c.want)
			}
		}
		if err := errors.Join(sh.Kill(), sh.Wait(t.Context()), l.Remove(id)); err != nil {
			t.Error(err)
		}
	}
	if shellDevices.program == 0 {
		t.Error("the device program is loaded for each shell: the kernel did not tell which one it is")
	}
}

func BenchmarkStart(b *testing.B) {
	l := newLauncher(b)
	for b.Loop() {
		id := sandbox.NewID()
		b.StopTimer()
		path := testCgroup(b, id)
		b.StartTimer()
		sh, err := l.Start(context.Background(), ShellSpec{ID: id, CgroupPath: path, UIDBase: 0x20000000, InitID: 0x1fff0007})
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := sh.Kill(); err != nil {
			b.Fatal(err)
		}
		_ = sh.Wait(context.Background())
		sh.Close()
		_ = l.Remove(id)
		b.StartTimer()
	}
}
