package launch

import (
	"fmt"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

const subtreeControl = "cgroup.subtree_control"

// Shield keeps libcontainer, in this process, from passing on controllers again
// with every shell in the cgroup parent and all above it: a write for each, in
// which the kernel goes over all cgroups beneath, with its one lock held. They
// must have been passed on before. It is for a process with mounts of its own
// (EnterPrivateMounts); repeating it does nothing.
func Shield(parent string) error {
	dir := cgroupMount
	for name := range strings.SplitSeq(parent, "/") {
		dir = filepath.Join(dir, name)
		if err := shield(filepath.Join(dir, subtreeControl)); err != nil {
			return err
		}
	}
	return nil
}

// shield binds a file to itself. Who opens it without leaving the mount it
// begins in, as libcontainer does (openat2(2), RESOLVE_NO_XDEV), cannot, and goes
// on without; who opens it by its path can.
func shield(file string) error {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, file, unix.AT_SYMLINK_NOFOLLOW, 0, &st); err != nil {
		return fmt.Errorf("looking at %s: %w", file, err)
	}
	if st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 {
		return nil
	}
	if err := unix.Mount(file, file, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("binding %s to itself: %w", file, err)
	}
	return nil
}
