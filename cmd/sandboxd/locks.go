package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// A second daemon takes what it finds for its own, and what it does not know for
// nobody's. So whatever only one daemon may have is locked, before anything is
// touched; the locks go with the process, however that ends.

// lockAll keeps a second daemon off all that this configuration names.
func lockAll(c config) (unlock func(), err error) {
	var held closers
	defer func() {
		if err != nil {
			err = errors.Join(err, held.close())
		}
	}()
	take := func(path string, flags int, how int, what, flag string) error {
		f, err := os.OpenFile(path, flags|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return fmt.Errorf("lock the %s %s: %w", what, path, err)
		}
		if err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB); err != nil {
			held := holder(f)
			f.Close()
			return inUse(what, path, held, flag, err)
		}
		held.add(f.Close)
		return nil
	}
	const file = os.O_CREATE | os.O_RDWR
	for _, d := range []struct{ dir, what, flag string }{{c.StateDir, "state directory", "--state-dir"}, {c.RunDir, "run directory", "--run-dir"}} {
		mode := os.FileMode(0o700)
		if d.dir == c.RunDir {
			mode = 0o711
		}
		if err := os.MkdirAll(d.dir, mode); err != nil {
			return nil, fmt.Errorf("make the %s: %w", d.what, err)
		}
		if err := take(filepath.Join(d.dir, "lock"), file, unix.LOCK_EX, d.what, d.flag); err != nil {
			return nil, err
		}
	}
	if err := os.MkdirAll(filepath.Dir(c.socketPath()), 0o711); err != nil {
		return nil, fmt.Errorf("make the socket's directory: %w", err)
	}
	if err := take(c.socketPath()+".lock", file, unix.LOCK_EX, "socket", "--socket"); err != nil {
		return nil, err
	}
	if err := lockCgroups(c.CgroupRoot, take); err != nil {
		return nil, err
	}
	release, err := lockNetwork()
	if err != nil {
		return nil, err
	}
	held.add(release)
	return func() { _ = held.close() }, nil
}

// lockCgroups locks the parent cgroup alone, and those above it together with
// others: none of two daemons may stand beneath the other. The file is one that
// only root can open.
func lockCgroups(parent string, take func(path string, flags, how int, what, flag string) error) error {
	dir, how := filepath.Join("/sys/fs/cgroup", parent), unix.LOCK_EX
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the parent cgroup %s: %w", parent, err)
	}
	for ; dir != "/sys/fs/cgroup"; dir, how = filepath.Dir(dir), unix.LOCK_SH {
		err := take(filepath.Join(dir, "cgroup.kill"), os.O_WRONLY, how, "cgroup", "--cgroup-parent")
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// networkLock is a name in the network namespace itself: whoever is in it, in
// whatever mount namespace, has the same one.
const networkLock = "@sandboxd/network"

// lockNetwork keeps a second daemon out of the network namespace, which has one
// table of rules and one pool of addresses.
func lockNetwork() (release func() error, err error) {
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: networkLock, Net: "unix"})
	if err == nil {
		return ln.Close, nil
	}
	if !errors.Is(err, unix.EADDRINUSE) {
		return nil, fmt.Errorf("lock the network namespace: %w", err)
	}
	pid := 0
	if c, derr := net.DialUnix("unix", nil, &net.UnixAddr{Name: networkLock, Net: "unix"}); derr == nil {
		defer func() { _ = c.Close() }()
		if raw, rerr := c.SyscallConn(); rerr == nil {
			_ = raw.Control(func(fd uintptr) {
				if cred, cerr := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); cerr == nil {
					pid = int(cred.Pid)
				}
			})
		}
	}
	return nil, inUse("network namespace", "(table inet sandboxd and its addresses)", pid, "", err)
}

// inUse says who has what, and what to do about it.
func inUse(what, which string, pid int, flag string, err error) error {
	who := "another process"
	if pid > 0 {
		who = fmt.Sprintf("process %d", pid)
		if line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil {
			who += " (" + strconv.QuoteToASCII(strings.TrimRight(strings.ReplaceAll(string(line), "\x00", " "), " ")) + ")"
		}
	}
	do := "end it, or choose another " + flag
	if flag == "" {
		do = "end it, or start this one in a network namespace of its own (ip netns exec)"
	}
	return sandbox.Errorf(sandbox.ErrConflict, "daemon_running", "the %s %s is in use by %s: %s: %w", what, which, who, do, err)
}

// holder is the process that has a file locked, as /proc/locks tells; 0 where
// it does not.
func holder(f *os.File) int {
	var st unix.Stat_t
	if unix.Fstat(int(f.Fd()), &st) != nil {
		return 0
	}
	b, err := os.ReadFile("/proc/locks")
	if err != nil {
		return 0
	}
	file := fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	for line := range strings.Lines(string(b)) {
		if w := strings.Fields(line); len(w) > 5 && w[1] == "FLOCK" && w[5] == file {
			pid, _ := strconv.Atoi(w[4])
			return max(0, pid)
		}
	}
	return 0
}
