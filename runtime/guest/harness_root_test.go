//go:build root

package guest_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/seccomp"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/runtime/guest"
	"github.com/sandboxd/sandboxd/sandbox"
)

// The harness stands in for the launcher: the test binary starts itself in
// new namespaces, builds a skeleton root there, and becomes the real
// sandbox-init.
const stageEnv = "SANDBOXD_GUEST_TEST_STAGE"

const (
	testIDBase = 0x2fff0000
	goFD       = 4 // read: the parent has done its part
	readyFD    = 5 // write: the cgroup namespace is made
)

func TestMain(m *testing.M) {
	if os.Getenv(stageEnv) != "" {
		fmt.Fprintln(os.Stderr, "stage:", stage(os.Getenv(stageEnv)))
		os.Exit(1)
	}
	code := 1
	var err error
	if scratch, err = os.MkdirTemp("", "guest-test-*"); err == nil && os.Chmod(scratch, 0o755) == nil {
		code = m.Run()
	}
	_ = os.RemoveAll(scratch)
	os.Exit(code)
}

// scratch holds the one copy of sandbox-init all boxes share, where the
// mapped ids may reach it.
var scratch string

// stage runs inside the namespaces and returns only with an error.
func stage(binary string) error {
	runtime.LockOSThread()
	// Here the ids are mapped, and so the namespaces' entries in /proc/net and
	// /dev/mqueue are of the sandbox's root, as with the launcher.
	if err := unix.Unshare(unix.CLONE_NEWCGROUP | unix.CLONE_NEWNET | unix.CLONE_NEWIPC); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	_, _ = unix.Write(readyFD, []byte("r"))
	var b [1]byte
	if n, err := unix.Read(goFD, b[:]); n != 1 {
		return fmt.Errorf("waiting for the parent: %w", err)
	}
	_ = unix.Close(goFD)
	_ = unix.Close(readyFD)
	dir := os.Getenv(stageEnv + "_DIR")
	steps := []func() error{
		func() error { return unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "") },
		func() error { return unix.Mount("skel", dir, "tmpfs", 0, "mode=755") },
		func() error { return unix.Chdir(dir) },
		func() error { return mkdirs("proc", "sys", "dev", "dev/pts", "dev/shm") },
		func() error {
			return unix.Mount("proc", "proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
		},
		func() error { return unix.Mount("sysfs", "sys", "sysfs", unix.MS_RDONLY, "") },
		func() error { return unix.Mount("dev", "dev", "tmpfs", unix.MS_NOSUID, "mode=755") },
		func() error { return mkdirs("dev/pts", "dev/shm", "dev/mqueue") }, // PID 1 mounts on them
		func() error { return bindDevices("null", "zero", "full", "random", "urandom", "tty") },
		func() error { return os.Symlink("pts/ptmx", "dev/ptmx") },
		func() error { return bindFile(binary, "sandbox-init") },
		func() error { return unix.PivotRoot(".", ".") },
		func() error { return unix.Unmount(".", unix.MNT_DETACH) },
		func() error { return unix.Chdir("/") },
		// As the launcher does: /proc/sys is read-only for everybody.
		func() error { return unix.Mount("/proc/sys", "/proc/sys", "", unix.MS_BIND, "") },
		func() error {
			return unix.Mount("", "/proc/sys", "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
		},
	}
	for i, step := range steps {
		if err := step(); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
	}
	return unix.Exec("/sandbox-init", []string{"sandbox-init"}, []string{"GODEBUG=" + os.Getenv("GODEBUG")})
}

func mkdirs(names ...string) error {
	for _, n := range names {
		if err := os.MkdirAll(n, 0o755); err != nil {
			return err
		}
	}
	return nil
}

func bindDevices(names ...string) error {
	for _, n := range names {
		if err := bindFile("/dev/"+n, "dev/"+n); err != nil {
			return err
		}
	}
	return nil
}

func bindFile(from, to string) error {
	f, err := os.Create(to)
	if err != nil {
		return err
	}
	_ = f.Close()
	return unix.Mount(from, to, "", unix.MS_BIND, "")
}

func copyFile(from, to string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, b, 0o755)
}

// box is one running PID 1.
type box struct {
	*guest.Guest
	t      testing.TB
	dir    string
	cmd    *exec.Cmd
	userns *os.File
	cgroup string // empty without cgroup2
	roots  int
}

// filter is the product's own, compiled once.
var filter = sync.OnceValues(seccomp.Compile)

// newBox starts a PID 1 without a root.
func newBox(t testing.TB) *box {
	testenv.Need(t, testenv.Root, testenv.Userns)
	b := &box{t: t, dir: t.TempDir()}
	if err := os.Chmod(b.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for d := b.dir; d != "/" && d != "/tmp"; d = filepath.Dir(d) {
		_ = os.Chmod(d, 0o755)
	}
	b.makeCgroup()
	sock := filepath.Join(b.dir, "init.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: sock})
	if err != nil {
		t.Fatal(err)
	}
	lf, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	_ = l.Close()
	b.start(lf)
	_ = lf.Close()
	b.Guest = guest.New(sock)
	return b
}

func (b *box) makeCgroup() {
	root, err := testenv.CgroupRoot()
	if err != nil {
		b.t.Logf("without cgroups: %v", err)
		return
	}
	b.cgroup = filepath.Join(root, fmt.Sprintf("guesttest-%d-%d", os.Getpid(), time.Now().UnixNano()))
	for _, d := range []string{"", "init", "work"} {
		if err := os.Mkdir(filepath.Join(b.cgroup, d), 0o755); err != nil {
			b.t.Fatal(err)
		}
	}
	b.t.Cleanup(b.removeCgroup)
	for _, p := range []string{"cgroup.procs", "work", "work/cgroup.procs"} {
		if err := os.Chown(filepath.Join(b.cgroup, p), testIDBase, testIDBase); err != nil {
			b.t.Fatal(err)
		}
	}
}

func (b *box) removeCgroup() {
	_ = os.WriteFile(filepath.Join(b.cgroup, "cgroup.kill"), []byte("1"), 0)
	testenv.Eventually(b.t, 5*time.Second, "the test's cgroups to go", func() bool {
		var dirs []string
		_ = filepath.WalkDir(b.cgroup, func(p string, d os.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, p)
			}
			return nil
		})
		for _, dir := range slices.Backward(dirs) {
			_ = os.Remove(dir)
		}
		_, err := os.Stat(b.cgroup)
		return errors.Is(err, os.ErrNotExist)
	})
}

func (b *box) start(listener *os.File) {
	t := b.t
	skel := filepath.Join(b.dir, "skel")
	if err := os.Mkdir(skel, 0o755); err != nil {
		t.Fatal(err)
	}
	goR, goW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	readyR, readyW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer goR.Close()
	defer goW.Close()
	defer readyR.Close()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	copied := filepath.Join(b.dir, "stage")
	if err := copyFile(self, copied); err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(scratch, "sandbox-init")
	if _, err := os.Stat(bin); err != nil {
		if err := copyFile(testenv.Binary(t, "sandbox-init"), bin); err != nil {
			t.Fatal(err)
		}
	}
	b.cmd = exec.Command(copied)
	b.cmd.Env = append(os.Environ(), stageEnv+"="+bin, stageEnv+"_DIR="+skel)
	b.cmd.Stderr = os.Stderr
	b.cmd.ExtraFiles = []*os.File{listener, goR, readyW}
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: testIDBase, Size: 65536}}
	b.cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWUTS,
		UidMappings: ids, GidMappings: ids, GidMappingsEnableSetgroups: true,
		Credential: &syscall.Credential{}, Setsid: true,
	}
	if b.cgroup != "" {
		f, err := os.Open(b.cgroup)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		b.cmd.SysProcAttr.UseCgroupFD, b.cmd.SysProcAttr.CgroupFD = true, int(f.Fd())
	}
	if err := b.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = readyW.Close()
	t.Cleanup(func() {
		_ = b.cmd.Process.Kill()
		_ = b.cmd.Wait()
	})
	if n, _ := readyR.Read(make([]byte, 1)); n != 1 {
		t.Fatal("the stage did not get ready")
	}
	if b.cgroup != "" {
		pid := strconv.Itoa(b.cmd.Process.Pid)
		if err := os.WriteFile(filepath.Join(b.cgroup, "init/cgroup.procs"), []byte(pid), 0); err != nil {
			t.Fatal(err)
		}
	}
	if b.userns, err = os.Open(fmt.Sprintf("/proc/%d/ns/user", b.cmd.Process.Pid)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.userns.Close() })
	_, _ = goW.Write([]byte("g"))
}

const testPasswd = "root:x:0:0:root:/root:/bin/sh\nalice:x:1000:1000:Alice:/home/alice:/bin/sh\n"

// newRoot makes a directory tree, and of it a detached mount with ids mapped
// into the sandbox; the host's /usr is mounted beneath, read-only.
func (b *box) newRoot() (*guest.RootMount, string) {
	t := b.t
	b.roots++
	dir := filepath.Join(b.dir, fmt.Sprintf("root%d", b.roots))
	for _, d := range []string{"", "etc", "root", "home", "home/alice", "tmp", "usr", "var"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, l := range []string{"bin", "lib", "lib64", "sbin"} {
		if err := os.Symlink("usr/"+l, filepath.Join(dir, l)); err != nil {
			t.Fatal(err)
		}
	}
	_ = os.Chmod(filepath.Join(dir, "tmp"), 0o1777)
	_ = os.Chown(filepath.Join(dir, "home/alice"), 1000, 1000)
	write := map[string]string{"etc/passwd": testPasswd, "etc/group": "root:x:0:\nalice:x:1000:\nvideo:x:44:alice\n", "etc/marker": strconv.Itoa(b.roots)}
	// Without it the loader of every program looks through a dozen directories.
	if cache, err := os.ReadFile("/etc/ld.so.cache"); err == nil {
		write["etc/ld.so.cache"] = string(cache)
	}
	for name, content := range write {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	root := detached(t, dir, false)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(b.userns.Fd())}
	if err := unix.MountSetattr(int(root.Fd()), "", unix.AT_EMPTY_PATH, &attr); err != nil {
		t.Fatalf("idmapping the root: %v", err)
	}
	usr := detached(t, "/usr", true)
	ro := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
	if err := unix.MountSetattr(int(usr.Fd()), "", unix.AT_EMPTY_PATH, &ro); err != nil {
		t.Fatal(err)
	}
	return &guest.RootMount{Root: root, Extra: []guest.ExtraMount{{File: usr, Path: "/usr"}}}, dir
}

func detached(t testing.TB, path string, recursive bool) *os.File {
	flags := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC)
	if recursive {
		flags |= unix.AT_RECURSIVE
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, flags)
	if err != nil {
		t.Fatalf("open_tree %s: %v", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func (b *box) config() guest.Config {
	prog, err := filter()
	if err != nil {
		b.t.Fatal(err)
	}
	return guest.Config{
		Hostname: "box", Address: "10.1.2.3", Capabilities: sandbox.CapabilitiesRoot, Seccomp: prog,
		Work: b.cgroup != "", ResolvConf: "nameserver 192.0.2.1\n",
	}
}

// newRooted starts a PID 1 with a root, and returns the root's directory on
// the host.
func newRooted(t testing.TB, change ...func(*guest.Config)) (*box, string) {
	b := newBox(t)
	cfg := b.config()
	var dir string
	cfg.Root, dir = b.newRoot()
	for _, f := range change {
		f(&cfg)
	}
	if err := b.Configure(ctx(t), cfg); err != nil {
		t.Fatal(err)
	}
	return b, dir
}

func ctx(t testing.TB) context.Context {
	c, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return c
}

// result is what a command that ran to its end left.
type result struct {
	out, err string
	exit     sandbox.ExitStatus
	proc     sandbox.Process
}

func (b *box) run(spec sandbox.ProcessSpec) (result, error) {
	io, err := b.Exec(ctx(b.t), spec)
	if err != nil {
		return result{}, err
	}
	return drain(b.t, io), nil
}

func drain(t testing.TB, s *guest.IO) result {
	t.Helper()
	var out, errs strings.Builder
	for {
		o, err := s.Next()
		if err != nil {
			exit, ok := s.Exit()
			if !ok {
				t.Fatalf("stream ended without an exit: %v", err)
			}
			return result{out: out.String(), err: errs.String(), exit: exit, proc: s.Process()}
		}
		if o.Stream == sandbox.Stderr {
			errs.Write(o.Data)
		} else {
			out.Write(o.Data)
		}
	}
}

// sh runs a shell script as root and expects it to end well.
func (b *box) sh(script string) string {
	b.t.Helper()
	r, err := b.run(sandbox.ProcessSpec{Argv: []string{"sh", "-c", script}})
	if err != nil {
		b.t.Fatalf("%s: %v", script, err)
	}
	if r.exit.Code != 0 {
		b.t.Fatalf("%s: exit %d\n%s%s", script, r.exit.Code, r.out, r.err)
	}
	return strings.TrimSpace(r.out)
}
