package initd

import (
	"crypto/rand"
	"fmt"

	"golang.org/x/sys/unix"
)

// bootIDPath is where programs look whether the machine was started anew.
const bootIDPath = "/proc/sys/kernel/random/boot_id"

// coverBootID gives the sandbox a boot id of its own, new with each PID 1: to
// what runs inside, a start of the sandbox is a start of the machine, and the
// host's id is nobody's business. The mount that covers the kernel's file goes
// along with /proc from root to root. The filesystem beneath it is one of its
// own: with /dev/shm's, what a root leaves there could never be let go.
func coverBootID() error {
	const dir, name = shmDir, shmDir + "/boot_id"
	// For a moment, where /dev/shm will be mounted.
	if err := unix.Mount("bootid", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "size=4k,nr_inodes=4,mode=755"); err != nil {
		return fmt.Errorf("mounting what holds the boot id: %w", err)
	}
	defer func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }()
	fd, err := unix.Open(name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o444)
	if err != nil {
		return fmt.Errorf("making %s: %w", name, err)
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, []byte(newBootID()+"\n")); err != nil {
		return fmt.Errorf("writing %s: %w", name, err)
	}
	tree, err := unix.OpenTree(unix.AT_FDCWD, name, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("cloning %s: %w", name, err)
	}
	defer unix.Close(tree)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("making %s read-only: %w", name, err)
	}
	if err := unix.MoveMount(tree, "", unix.AT_FDCWD, bootIDPath, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("covering %s: %w", bootIDPath, err)
	}
	return nil
}

// newBootID returns a random UUID of version 4 (RFC 9562).
func newBootID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[0:4], b[4:6], b[6:8], b[8:10], b[10:])
}
