package main

import (
	"errors"
	"fmt"
	"log/slog"
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
func lockAll(c config, log *slog.Logger) (unlock func(), err error) {
	var held closers
	defer func() {
		if err != nil {
			err = errors.Join(err, held.close())
		}
	}()
	take := func(path string, flags int, how int, what, flag string) error {
		f, err := lock(path, flags, how, what, flag)
		if err == nil {
			held.add(f.Close)
		}
		return err
	}
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
	if err := take(networkFile, os.O_WRONLY, unix.LOCK_EX, "network namespace", ""); err != nil {
		return nil, err
	}
	release, err := announce(log)
	if err != nil {
		return nil, err
	}
	held.add(release)
	return func() { _ = held.close() }, nil
}

const file = os.O_CREATE | os.O_RDWR

func lock(path string, flags int, how int, what, flag string) (*os.File, error) {
	f, err := os.OpenFile(path, flags|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the %s %s: %w", what, path, err)
	}
	if err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB); err != nil {
		held := holder(f)
		f.Close()
		return nil, inUse(what, path, held, flag, err)
	}
	return f, nil
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

const (
	// networkFile is a file that every network namespace has one of, and that
	// only root can open: nobody else can hold its lock. Nothing is written to it.
	networkFile = "/proc/sys/net/ipv4/route/flush"
	// networkName is a name in the network namespace. It tells of a daemon with
	// another /proc, as in a container, which has files of its own there.
	networkName = "@sandboxd/network"
)

// announce keeps a second daemon with another /proc out of the network
// namespace, which has one table of rules and one pool of addresses. Any user
// can take the name; root alone is believed.
func announce(log *slog.Logger) (release func() error, err error) {
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: networkName, Net: "unix"})
	if err == nil {
		go func() { // connections that waited would hide who we are
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				_ = c.Close()
			}
		}()
		return ln.Close, nil
	}
	if !errors.Is(err, unix.EADDRINUSE) {
		return nil, fmt.Errorf("lock the network namespace: %w", err)
	}
	who, cerr := nameHolder()
	if cerr != nil || who.Uid != 0 {
		log.Warn("a program that is not root's holds the name that keeps daemons with another /proc out of this network namespace: end it",
			"name", networkName, "pid", who.Pid, "uid", who.Uid, "err", cerr)
		return func() error { return nil }, nil
	}
	return nil, inUse("network namespace", networkFile, int(who.Pid), "", err)
}

// nameHolder is whoever listened under the name, as the kernel noted it then. A
// daemon can be asked at any time.
func nameHolder() (unix.Ucred, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return unix.Ucred{}, err
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: networkName}); err != nil {
		return unix.Ucred{}, err
	}
	who, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return unix.Ucred{}, err
	}
	return *who, nil
}

// inUse says who has what, and what to do about it.
func inUse(what, which string, pid int, flag string, err error) error {
	if which == networkFile {
		which = "(table inet sandboxd and its addresses)"
	}
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
