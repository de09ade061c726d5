package linux

import (
	"os"

	"golang.org/x/sys/unix"
)

// topDir is FS_TOPDIR_FL of <linux/fs.h>, the T of chattr(1).
const topDir = 0x00020000

// SpreadBelow tells ext4 that the directories which will be made in dir have
// nothing to do with each other, so that it takes the inodes of each from
// another part of the disk. It is a hint; other filesystems refuse it.
func SpreadBelow(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	flags, err := unix.IoctlGetUint32(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if err == nil && flags&topDir == 0 {
		err = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, int(flags|topDir))
	}
	if err != nil {
		return &os.PathError{Op: "set flags of", Path: dir, Err: err}
	}
	return nil
}
