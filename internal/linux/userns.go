package linux

import (
	"fmt"
	"os"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// CloneFile is CloneTree of an open directory, without what is mounted
// beneath it: whatever has become of its name, it is that directory.
func CloneFile(dir *os.File) (*os.File, error) {
	fd, err := unix.OpenTree(int(dir.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return nil, &os.PathError{Op: "open_tree", Path: dir.Name(), Err: err}
	}
	return os.NewFile(uintptr(fd), dir.Name()), nil
}

// OneIDUserNS returns a user namespace that maps one user id and one group
// id, for MapTree: on a mount mapped through it, files of uid and gid on disk
// are those of the host ids toUID and toGID, and every other file is nobody's.
//
// A user namespace is born with a process. Ours is this program again, traced:
// it stops at its execve, before its first instruction, and is killed there.
// See user_namespaces(7), ptrace(2) under PTRACE_TRACEME.
func OneIDUserNS(uid, gid, toUID, toGID uint32) (*os.File, error) {
	runtime.LockOSThread() // the tracer is a thread, and the child dies with it
	defer runtime.UnlockOSThread()
	child, err := os.StartProcess("/proc/self/exe", []string{"user-namespace"}, &os.ProcAttr{
		Env: []string{},
		Sys: &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: int(uid), HostID: int(toUID), Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: int(gid), HostID: int(toGID), Size: 1}},
			Ptrace:      true,
			Pdeathsig:   syscall.SIGKILL,
		},
	})
	if err != nil {
		return nil, fmt.Errorf("making a user namespace: %w", err)
	}
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", child.Pid))
	_ = child.Kill() // it may only be dead already
	if _, werr := child.Wait(); err == nil && werr != nil {
		_ = ns.Close() // the first error counts
		return nil, fmt.Errorf("making a user namespace: %w", werr)
	}
	return ns, err
}
