package linux

import (
	"errors"

	"golang.org/x/sys/unix"
)

// OpenBeneath opens path with the openat2(2) resolve flags given, repeating
// the call where the kernel asks for that (a rename raced with it: EAGAIN).
// The descriptor is close-on-exec.
func OpenBeneath(dirfd int, path string, flags int, mode uint32, resolve uint64) (int, error) {
	how := unix.OpenHow{Flags: uint64(flags | unix.O_CLOEXEC), Resolve: resolve}
	if flags&(unix.O_CREAT|unix.O_TMPFILE&^unix.O_DIRECTORY) != 0 {
		how.Mode = uint64(mode)
	}
	for try := 0; ; try++ {
		fd, err := unix.Openat2(dirfd, path, &how)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) && try < 64 {
			continue
		}
		return fd, err
	}
}
