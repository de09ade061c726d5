package initd

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// sharedMounts are the filesystems that PID 1 mounts itself before it listens,
// on the /dev its launcher made: one system call each, where the launcher's
// library needs some seventy. They go along from root to root. The host has 3,072
// terminals for all sandboxes (kernel.pty.max less pty.reserve).
var sharedMounts = []struct {
	source, path, fstype string
	flags                uintptr
	data                 string
	optional             bool // kernels can be built without it
}{
	{"devpts", ptsDir, "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5,max=64", false},
	{"shm", shmDir, "tmpfs", shmFlags, shmData, false},
	{"mqueue", mqueueDir, "mqueue", shmFlags, "", true},
}

// Where programs find the one that enters costs and revenue: it is PID 1's own
// program by another name, in a directory of /dev that its launcher made. There
// it needs nothing of any image, and leaves nothing in anybody's files.
const (
	entriesDir     = "/dev/sandbox"
	entriesProgram = entriesDir + "/sbx"
	ownProgram     = "/sandbox-init" // on the first root alone
)

// mountEntries places it, before the first root goes. Again is no error.
func mountEntries() error {
	var own, there unix.Stat_t
	if err := errors.Join(unix.Stat(ownProgram, &own), unix.Stat(entriesProgram, &there)); err != nil {
		return err
	}
	if own.Dev == there.Dev && own.Ino == there.Ino {
		return nil
	}
	return unix.Mount(ownProgram, entriesProgram, "", unix.MS_BIND, "")
}

func mountShared() error {
	for _, m := range sharedMounts {
		err := unix.Mount(m.source, m.path, m.fstype, m.flags, m.data)
		if m.optional && errors.Is(err, unix.ENODEV) {
			continue
		}
		if err != nil {
			return fmt.Errorf("mounting %s: %w", m.path, err)
		}
	}
	return nil
}
