//go:build root

package rootfs

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// The test binary runs itself again in a private mount namespace, as the
// daemon does, and a third time as the process inside a sandbox.
const (
	envPrivate = "ROOTFS_TEST_PRIVATE"
	envInside  = "ROOTFS_TEST_INSIDE"
	envKill    = "ROOTFS_TEST_KILL"
	envWeigh   = "ROOTFS_TEST_WEIGH"

	envKillTrees = "ROOTFS_TEST_KILL_TREES"
)

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(envInside) != "":
		os.Exit(insideMain(os.Getenv(envInside)))
	case os.Getenv(envKillTrees) != "":
		os.Exit(treesUntilKilled(os.Getenv(envKill), os.Getenv(envKillTrees)))
	case os.Getenv(envKill) != "":
		os.Exit(importUntilKilled(os.Getenv(envKill)))
	case os.Getenv(envWeigh) != "":
		os.Exit(weighImports(os.Getenv(envWeigh)))
	case os.Getenv(envPrivate) != "" || os.Geteuid() != 0:
		os.Exit(m.Run())
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), envPrivate+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Unshareflags: syscall.CLONE_NEWNS, // makes every mount private, too
		Pdeathsig:    syscall.SIGKILL,
	}
	if err := cmd.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "in a private mount namespace:", err)
		os.Exit(1)
	}
}

// inside is a process in its own user, mount and pid namespaces that waits
// for roots, as PID 1 of a sandbox does.
type inside struct {
	cmd    *exec.Cmd
	sock   *os.File
	userns *os.File
	base   uint32
}

func startInside(t testing.TB, base uint32) *inside {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "ours"), os.NewFile(uintptr(pair[1]), "theirs")
	maps := []syscall.SysProcIDMap{{ContainerID: 0, HostID: int(base), Size: 65536}}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{envInside + "=3"}
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC,
		UidMappings: maps, GidMappings: maps, GidMappingsEnableSetgroups: true,
		Credential: &syscall.Credential{}, // root inside
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	userns, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	in := &inside{cmd: cmd, sock: ours, userns: userns, base: base}
	t.Cleanup(in.stop)
	return in
}

func (in *inside) stop() {
	in.sock.Close()
	in.userns.Close()
	_ = in.cmd.Process.Kill()
	_ = in.cmd.Wait()
}

// run attaches a root inside, runs the check of that name in it, takes the
// root off again and returns what the check found.
func (in *inside) run(t testing.TB, root *Root, check string, args ...string) string {
	t.Helper()
	return in.ask(t, root, insideRequest{Check: check, Args: args})
}

// keep attaches a root and leaves it there for kept.
func (in *inside) keep(t testing.TB, root *Root) {
	t.Helper()
	in.ask(t, root, insideRequest{Check: "nothing", Keep: true})
}

// kept runs a check in the root that keep attached.
func (in *inside) kept(t testing.TB, check string, args ...string) string {
	t.Helper()
	return in.ask(t, nil, insideRequest{Check: check, Args: args, Keep: true})
}

func (in *inside) ask(t testing.TB, root *Root, req insideRequest) string {
	t.Helper()
	var fds []int
	if root != nil {
		fds = append(fds, int(root.Mount.Fd()))
		for _, e := range root.Extra {
			fds = append(fds, int(e.File.Fd()))
			req.Extra = append(req.Extra, e.Path)
		}
	}
	b, err := json.Marshal(req)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Sendmsg(int(in.sock.Fd()), b, unix.UnixRights(fds...), nil, 0); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 64<<10)
	n, err := unix.Read(int(in.sock.Fd()), buf)
	if err != nil || n == 0 {
		t.Fatalf("no answer from inside: %d %v", n, err)
	}
	var ans insideAnswer
	if err := json.Unmarshal(buf[:n], &ans); err != nil {
		t.Fatal(err)
	}
	if ans.Err != "" {
		t.Fatalf("inside, %s%q: %s", req.Check, req.Args, ans.Err)
	}
	return ans.Out
}

type insideRequest struct {
	Check string
	Args  []string
	Extra []string
	Keep  bool
}

type insideAnswer struct{ Out, Err string }

// insideMain serves requests on descriptor 3: each gets a fresh root.
func insideMain(string) int {
	die := func(what string, err error) int {
		fmt.Fprintln(os.Stderr, "inside:", what, err)
		return 1
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return die("private", err)
	}
	if err := unix.Mount("tmpfs", "/mnt", "tmpfs", 0, "mode=755"); err != nil {
		return die("tmpfs", err)
	}
	old, err := os.Open("/")
	if err != nil {
		return die("open /", err)
	}
	for i := 0; ; i++ {
		buf, oob := make([]byte, 64<<10), make([]byte, 4096)
		n, oobn, _, _, err := unix.Recvmsg(3, buf, oob, unix.MSG_CMSG_CLOEXEC)
		if err != nil || n == 0 {
			return 0
		}
		var ans insideAnswer
		if ans.Out, err = serveInside(buf[:n], oob[:oobn], i, old); err != nil {
			ans.Err = err.Error()
		}
		b, err := json.Marshal(ans)
		if err != nil {
			return die("answer", err)
		}
		if _, err := unix.Write(3, b); err != nil {
			return die("answer", err)
		}
	}
}

func serveInside(msg, oob []byte, i int, old *os.File) (_ string, err error) {
	var req insideRequest
	if err := json.Unmarshal(msg, &req); err != nil {
		return "", err
	}
	root := "/mnt/kept"
	if !req.Keep {
		root = fmt.Sprintf("/mnt/root%d", i)
	}
	if err := os.Mkdir(root, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return "", err
	}
	var fds []int
	cmsgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return "", err
	}
	if len(cmsgs) == 1 {
		if fds, err = unix.ParseUnixRights(&cmsgs[0]); err != nil {
			return "", err
		}
	}
	defer func() {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	}()
	for j, fd := range fds {
		at := root
		if j > 0 {
			at += req.Extra[j-1]
		}
		if err := unix.MoveMount(fd, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return "", fmt.Errorf("move_mount %s: %w", at, err)
		}
		if !req.Keep {
			defer func() { err = errors.Join(err, unix.Unmount(at, unix.MNT_DETACH)) }()
		}
	}
	if err := os.Chdir(root); err != nil {
		return "", err
	}
	if err := unix.Chroot("."); err != nil {
		return "", err
	}
	// Out again before anything is unmounted.
	defer func() { err = errors.Join(err, old.Chdir(), unix.Chroot(".")) }()
	check := checks[req.Check]
	if check == nil {
		return "", fmt.Errorf("no check %q", req.Check)
	}
	return check(req.Args)
}
