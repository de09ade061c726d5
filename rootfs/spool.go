package rootfs

import (
	"os"

	"golang.org/x/sys/unix"
)

// Spool opens a file of the volume that has no name: it goes with its last
// descriptor, also in a crash.
func (s *Store) Spool() (*os.File, error) {
	fd, err := unix.Open(s.vol.path(stagingDir), unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, spaceError("make a temporary file", err)
	}
	return os.NewFile(uintptr(fd), "spool"), nil
}
