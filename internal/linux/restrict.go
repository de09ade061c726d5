package linux

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The functions of this file change the calling OS thread only, unlike their
// namesakes in package syscall, which change the whole process. The caller
// must hold the thread with runtime.LockOSThread and never give it back: a
// goroutine that ends while locked takes its thread with it.

// LastCapability returns the highest capability number the kernel knows.
func LastCapability() int {
	for c := unix.CAP_LAST_CAP; c < 64; c++ {
		if v, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(c), 0, 0, 0); err != nil || v < 0 {
			return c - 1
		}
	}
	return 63
}

// SetNoNewPrivs makes exec ignore set-id bits and file capabilities from now
// on, for this thread and all it starts (prctl(2), PR_SET_NO_NEW_PRIVS).
func SetNoNewPrivs() error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("setting no_new_privs: %w", err)
	}
	return nil
}

// LimitBoundingSet drops every capability that keep (a bit set) does not hold
// from the thread's bounding set, and empties its ambient set. It needs
// CAP_SETPCAP.
func LimitBoundingSet(keep uint64) error {
	_ = unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
	for c := range LastCapability() + 1 {
		if keep&(1<<c) != 0 {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil {
			return fmt.Errorf("dropping capability %d from the bounding set: %w", c, err)
		}
	}
	return nil
}

// SetCapabilities makes caps the thread's effective and permitted set and
// empties its inheritable one (capset(2)).
func SetCapabilities(caps uint64) error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	data := [2]unix.CapUserData{
		{Effective: uint32(caps), Permitted: uint32(caps)},
		{Effective: uint32(caps >> 32), Permitted: uint32(caps >> 32)},
	}
	if err := unix.Capset(&hdr, &data[0]); err != nil {
		return fmt.Errorf("setting the thread's capabilities to %#x: %w", caps, err)
	}
	return nil
}

// SetThreadGroups sets the thread's supplementary groups.
func SetThreadGroups(gids []uint32) error {
	var p unsafe.Pointer
	if len(gids) > 0 {
		p = unsafe.Pointer(&gids[0])
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(gids)), uintptr(p), 0); e != 0 {
		return fmt.Errorf("setting supplementary groups: %w", e)
	}
	return nil
}

// SetFSIDs sets the user and group the thread's file accesses are judged by
// (setfsuid(2)); a user other than 0 loses the file capabilities too. The
// real ids stay, so that no workload of that user may signal or trace the
// thread.
func SetFSIDs(uid, gid uint32) error {
	if err := setfsid(unix.SYS_SETFSGID, gid); err != nil {
		return fmt.Errorf("setting the file system group to %d: %w", gid, err)
	}
	if err := setfsid(unix.SYS_SETFSUID, uid); err != nil {
		return fmt.Errorf("setting the file system user to %d: %w", uid, err)
	}
	return nil
}

// setfsid asks a second time with an id that cannot be set, which tells the
// one in force: setfsuid itself reports no error.
func setfsid(nr uintptr, id uint32) error {
	_, _, _ = unix.RawSyscall(nr, uintptr(id), 0, 0)
	now, _, _ := unix.RawSyscall(nr, ^uintptr(0), 0, 0)
	if uint32(now) != id {
		return unix.EPERM
	}
	return nil
}

// SetSeccomp installs a compiled filter, an array of struct sock_filter, on
// this thread alone (seccomp(2), no TSYNC). It needs no_new_privs.
func SetSeccomp(program []byte) error {
	const insn = 8
	n := len(program) / insn
	if n == 0 || len(program)%insn != 0 || n > unix.BPF_MAXINSNS {
		return fmt.Errorf("installing a seccomp filter of %d bytes: %w", len(program), unix.EINVAL)
	}
	filter := make([]unix.SockFilter, n)
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&filter[0])), n*insn), program)
	prog := unix.SockFprog{Len: uint16(n), Filter: &filter[0]}
	if _, _, e := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&prog))); e != 0 {
		return fmt.Errorf("installing the seccomp filter: %w", e)
	}
	return nil
}
