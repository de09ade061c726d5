package initd

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/internal/linux"
)

// procGroup is a process's own cgroup beneath the work cgroup. It makes "the
// whole tree" exact: a child that left its session and its parents is still
// in it. A nil *procGroup is a process without one.
type procGroup struct {
	work *os.File // borrowed
	name string
	dir  int
	// killed is set once cgroup.kill was written: some kernels (6.18 is one)
	// then kill whatever is forked into the cgroup later, too.
	killed bool
}

// openWork opens the cgroup that processes go to. It lies on a mount that PID 1
// makes of its own cgroup namespace and attaches nowhere: ".." ends at the
// namespace's root, the sandbox's own cgroup. A child may reach any descriptor
// of PID 1 until it has called execve, so PID 1 must hold none from which a
// path leads to the host's files, as one of the host's own cgroup2 mount does.
func openWork() (*os.File, error) {
	mount, err := linux.NewMount("cgroup2", nil, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, err
	}
	// Letting go of a mount waits for RCU. What was opened on it stays good.
	defer func() { go mount.Close() }()
	fd, err := entry(int(mount.Fd()), initproto.WorkCgroup, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: initproto.WorkCgroup, Err: err}
	}
	return os.NewFile(uintptr(fd), initproto.WorkCgroup), nil
}

// newGroup makes the cgroup; one left by an earlier use of the name is taken over.
func newGroup(work *os.File, name string) (*procGroup, error) {
	wfd := int(work.Fd())
	if err := unix.Mkdirat(wfd, name, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, fmt.Errorf("making cgroup %s: %w", name, err)
	}
	fd, err := entry(wfd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0, 0)
	if err != nil {
		_ = unix.Unlinkat(wfd, name, unix.AT_REMOVEDIR)
		return nil, fmt.Errorf("opening cgroup %s: %w", name, err)
	}
	return &procGroup{work: work, name: name, dir: fd}, nil
}

// empty tells whether no process lives in the cgroup; of one that cannot be
// asked it says no.
func (g *procGroup) empty() bool {
	fd, err := entry(g.dir, "cgroup.events", unix.O_RDONLY, 0, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	var buf [128]byte
	n, err := unix.Read(fd, buf[:])
	return err == nil && bytes.Contains(buf[:n], []byte("populated 0\n"))
}

// remove takes the cgroup away if it is empty; false means it is not.
func (g *procGroup) remove() bool {
	err := unix.Unlinkat(int(g.work.Fd()), g.name, unix.AT_REMOVEDIR)
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, os.ErrClosed) && !errors.Is(err, unix.EBADF) {
		return false
	}
	_ = unix.Close(g.dir)
	return true
}

// kill ends every process in the cgroup at once (cgroup.kill, Linux 5.14),
// a frozen one too.
func (g *procGroup) kill() error {
	fd, err := entry(g.dir, "cgroup.kill", unix.O_WRONLY, 0, 0)
	if err != nil {
		return fmt.Errorf("opening cgroup.kill of %s: %w", g.name, err)
	}
	defer unix.Close(fd)
	g.killed = true
	if _, err := unix.Write(fd, []byte("1")); err != nil {
		return fmt.Errorf("writing cgroup.kill of %s: %w", g.name, err)
	}
	return nil
}

// pids lists the members, as this pid namespace numbers them.
func (g *procGroup) pids() ([]int, error) {
	fd, err := entry(g.dir, "cgroup.procs", unix.O_RDONLY, 0, 0)
	if err != nil {
		return nil, fmt.Errorf("opening cgroup.procs of %s: %w", g.name, err)
	}
	f := os.NewFile(uintptr(fd), "cgroup.procs")
	defer f.Close()
	b, err := io.ReadAll(f)
	if err != nil {
		return nil, fmt.Errorf("reading cgroup.procs of %s: %w", g.name, err)
	}
	var pids []int
	for w := range bytes.FieldsSeq(b) {
		if pid, err := strconv.Atoi(string(w)); err == nil && pid > 1 {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// signal sends sig to every member. A pid is pinned by a pidfd and then seen
// to be a member still before it is signalled, so no stranger that got a
// reused number is hit.
func (g *procGroup) signal(sig unix.Signal) error {
	if sig == unix.SIGKILL {
		if err := g.kill(); err == nil {
			return nil
		}
	}
	return signalPinned(sig, g.pids)
}

// signalPinned signals the processes list returns, in rounds while KILL finds
// new ones.
func signalPinned(sig unix.Signal, list func() ([]int, error)) error {
	const rounds = 32
	for range rounds {
		pids, err := list()
		if err != nil {
			return err
		}
		pinned := make(map[int]int, len(pids))
		for _, pid := range pids {
			if fd, err := unix.PidfdOpen(pid, 0); err == nil {
				pinned[pid] = fd
			}
		}
		still, err := list()
		hit := 0
		for _, pid := range still {
			if fd, ok := pinned[pid]; ok && unix.PidfdSendSignal(fd, sig, nil, 0) == nil {
				hit++
			}
		}
		for _, fd := range pinned {
			_ = unix.Close(fd)
		}
		if err != nil {
			return err
		}
		if sig != unix.SIGKILL || hit == 0 {
			return nil
		}
	}
	return nil
}

// descendants finds a process's tree where there is no cgroup: its session,
// its process group and every child of those. One that made its own session
// after its parent died is missed; that is what the cgroup is for.
func descendants(leader int) ([]int, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, fmt.Errorf("opening /proc: %w", err)
	}
	defer dir.Close()
	entries, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("reading /proc: %w", err)
	}
	parent := make(map[int]int)
	in := map[int]bool{leader: true}
	for _, name := range entries {
		pid, err := strconv.Atoi(name)
		if err != nil || pid <= 1 {
			continue
		}
		ppid, pgrp, sid, ok := readStat(pid)
		if !ok {
			continue
		}
		parent[pid] = ppid
		if pgrp == leader || sid == leader {
			in[pid] = true
		}
	}
	for grew := true; grew; {
		grew = false
		for pid, ppid := range parent {
			if !in[pid] && in[ppid] {
				in[pid], grew = true, true
			}
		}
	}
	var pids []int
	for pid := range in {
		if _, alive := parent[pid]; alive {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// readStat takes the parent, the process group and the session.
func readStat(pid int) (ppid, pgrp, sid int, ok bool) {
	f := statFields(pid)
	if len(f) < 4 || f[0] == "Z" || f[0] == "X" {
		return 0, 0, 0, false
	}
	ppid, _ = strconv.Atoi(f[1])
	pgrp, _ = strconv.Atoi(f[2])
	sid, _ = strconv.Atoi(f[3])
	return ppid, pgrp, sid, true
}

// forkNoExec is PF_FORKNOEXEC of include/linux/sched.h: no execve since the fork.
const forkNoExec = 0x40

// forkState is the state of a child, one letter, T for stopped (proc_pid_stat(5)), or
// empty where it cannot be told; and whether it came through an execve since its fork.
func forkState(pid int) (state string, executed bool) {
	f := statFields(pid)
	if len(f) < 7 {
		return "", false
	}
	flags, err := strconv.ParseUint(f[6], 10, 64)
	return f[0], err == nil && flags&forkNoExec == 0
}

// statFields are those after the command name, which may hold anything but ends
// at the last ')'.
func statFields(pid int) []string {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return nil
	}
	return strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
}
