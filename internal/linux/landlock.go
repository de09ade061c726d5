package linux

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// LandlockABI returns the version of Landlock the kernel offers, 0 for none
// (landlock_create_ruleset(2)).
func LandlockABI() int {
	v, _, e := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if e != 0 {
		return 0
	}
	return int(v)
}

// EnterLandlockDomain puts the calling thread, and all it will start, into a
// Landlock domain that forbids as little as a domain can. What it is for is
// what every domain brings: no tracing of, and no access through /proc to,
// processes outside (PID 1). Handling REFER and granting it beneath the root
// keeps rename and link across directories working, which any ruleset would
// else refuse. From ABI 6 on, signals to processes outside are refused too.
//
// It needs no_new_privs and ABI 2; below that it returns EOPNOTSUPP.
func EnterLandlockDomain() error {
	abi := LandlockABI()
	if abi < 2 {
		return fmt.Errorf("entering a landlock domain: kernel offers ABI %d, 2 is needed: %w", abi, unix.EOPNOTSUPP)
	}
	attr := unix.LandlockRulesetAttr{Handled_access_fs: unix.LANDLOCK_ACCESS_FS_REFER}
	size := unsafe.Sizeof(attr.Handled_access_fs)
	if abi >= 6 {
		attr.Scoped = unix.LANDLOCK_SCOPE_SIGNAL
		size = unsafe.Offsetof(attr.Scoped) + unsafe.Sizeof(attr.Scoped)
	}
	fd, _, e := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)), size, 0)
	if e != 0 {
		return fmt.Errorf("making a landlock ruleset: %w", e)
	}
	defer unix.Close(int(fd))
	root, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("opening the root for landlock: %w", err)
	}
	defer unix.Close(root)
	// struct landlock_path_beneath_attr is packed: 8 bytes, then 4.
	var rule [12]byte
	*(*uint64)(unsafe.Pointer(&rule[0])) = unix.LANDLOCK_ACCESS_FS_REFER
	*(*int32)(unsafe.Pointer(&rule[8])) = int32(root)
	if _, _, e := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, fd, unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&rule[0])), 0, 0, 0); e != 0 {
		return fmt.Errorf("granting rename across directories in landlock: %w", e)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_LANDLOCK_RESTRICT_SELF, fd, 0, 0); e != 0 {
		return fmt.Errorf("entering the landlock domain: %w", e)
	}
	return nil
}
