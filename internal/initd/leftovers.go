package initd

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// What processes can leave that is neither theirs nor of their root: it hangs
// on the ipc namespace, or on a mount that goes along from root to root.
const (
	shmDir    = "/dev/shm"
	mqueueDir = "/dev/mqueue"
	ptsDir    = "/dev/pts"
	ptmxNode  = "/dev/pts/ptmx"
	// As sharedMounts has it.
	shmFlags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	shmData  = "mode=1777,size=64m"
)

// leftovers remembers each of sharedPlaces as no process had yet touched it.
// Every change of a directory's entries, owner, mode or times shows in its
// stat, so what is equal to that needs nothing done.
type leftovers struct {
	noted   bool
	places  [len(sharedPlaces)]place
	net     netModes
	sysctls sysctls
}

var sharedPlaces = [...]struct {
	path  string
	clear func(path string, was, now unix.Stat_t) error
}{{shmDir, renew}, {mqueueDir, empty}, {ptsDir, restore}, {ptmxNode, restore}}

// place is a file's state; the zero value means there is none.
type place struct {
	stat  unix.Stat_t
	attrs int // size of the list of extended attributes
}

func look(path string) (place, error) {
	var p place
	if err := unix.Lstat(path, &p.stat); err != nil {
		if errors.Is(err, unix.ENOENT) {
			return place{}, nil
		}
		return place{}, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	p.attrs, _ = unix.Llistxattr(path, nil) // a filesystem without them has none
	return p, nil
}

// note takes the state there is for the untouched one, the first time it is
// called: no process may have been by then.
func (l *leftovers) note() error {
	if l.noted {
		return nil
	}
	for i, p := range sharedPlaces {
		var err error
		if l.places[i], err = look(p.path); err != nil {
			return err
		}
	}
	var err error
	if told := os.Getenv(NetModesEnv); told != "" {
		l.net, err = parseNetModes(told)
	} else {
		l.net, err = unusualNet(netDir)
	}
	if err == nil {
		l.sysctls, err = newSysctls()
	}
	l.noted = err == nil
	return err
}

// clear removes all there is. No process but PID 1 may live. It can be
// repeated after an error.
func (l *leftovers) clear() error {
	for i, p := range sharedPlaces {
		now, err := look(p.path)
		if err != nil {
			return err
		}
		if now == l.places[i] {
			continue
		}
		if err := p.clear(p.path, l.places[i].stat, now.stat); err != nil {
			return fmt.Errorf("clearing %s: %w", p.path, err)
		}
		if l.places[i], err = look(p.path); err != nil {
			return err
		}
	}
	if err := l.net.restore(); err != nil {
		return fmt.Errorf("giving entries of %s their modes back: %w", netDir, err)
	}
	if err := removeSysV(); err != nil {
		return err
	}
	if err := l.sysctls.restore(); err != nil {
		return fmt.Errorf("giving settings below %s their values back: %w", sysctlDir, err)
	}
	return nil
}

// renew mounts an empty filesystem in place of the one there is: removing
// entry by entry would take as long as a workload wants.
func renew(path string, _, _ unix.Stat_t) error {
	// Who lets go last frees the memory: that is to be later, as with a root.
	old, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { go func() { _ = unix.Close(old) }() }()
	// EINVAL: nothing is mounted, as after a clearing that failed half-way.
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("detaching the old one: %w", err)
	}
	if err := unix.Mount("shm", path, "tmpfs", shmFlags, shmData); err != nil {
		return fmt.Errorf("mounting a new one: %w", err)
	}
	return nil
}

// empty removes all files of a directory, beside what restore does: first, for
// PID 1 has no rights past a mode, and again for the times. Message queues are
// few: the kernel allows 256 in a namespace (mq_overview(7)).
func empty(path string, was, now unix.Stat_t) error {
	if err := restore(path, was, now); err != nil {
		return err
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := unix.Unlink(path + "/" + e.Name()); err != nil && !errors.Is(err, unix.ENOENT) {
			return &os.PathError{Op: "unlink", Path: e.Name(), Err: err}
		}
	}
	return restore(path, was, now)
}

// restore gives a file its owner and mode back, and takes from it the times
// that were set.
func restore(path string, was, now unix.Stat_t) error {
	if err := restoreMode(unix.AT_FDCWD, path, modeOf(&was), modeOf(&now)); err != nil {
		return err
	}
	if err := unix.UtimesNanoAt(unix.AT_FDCWD, path, nil, unix.AT_SYMLINK_NOFOLLOW); err != nil && !notOurs(err) {
		return fmt.Errorf("setting the times: %w", err)
	}
	return nil
}

// mode is who may use a file.
type mode struct{ uid, gid, bits uint32 }

func modeOf(st *unix.Stat_t) mode { return mode{st.Uid, st.Gid, st.Mode & 0o7777} }

func restoreMode(dir int, name string, was, now mode) error {
	if now.uid != was.uid || now.gid != was.gid {
		if err := unix.Fchownat(dir, name, int(was.uid), int(was.gid), unix.AT_SYMLINK_NOFOLLOW); err != nil && !notOurs(err) {
			return &os.PathError{Op: "chown", Path: name, Err: err}
		}
	}
	if now.bits != was.bits {
		if err := unix.Fchmodat(dir, name, was.bits, 0); err != nil && !notOurs(err) {
			return &os.PathError{Op: "chmod", Path: name, Err: err}
		}
	}
	return nil
}

// notOurs tells that PID 1 may not change a file: then no workload could.
func notOurs(err error) bool {
	return errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EINVAL)
}

// removeSysV removes every System V object of the ipc namespace (sysvipc(7)).
// CAP_SYS_ADMIN over the namespace is enough for that, whoever made them.
func removeSysV() error {
	for _, kind := range []struct {
		name   string
		remove func(id int) error
	}{
		{"shm", func(id int) error {
			_, err := unix.SysvShmCtl(id, unix.IPC_RMID, nil)
			return err
		}},
		{"sem", func(id int) error { return ipcRemove(unix.SYS_SEMCTL, uintptr(id), 0, unix.IPC_RMID) }},
		{"msg", func(id int) error { return ipcRemove(unix.SYS_MSGCTL, uintptr(id), unix.IPC_RMID, 0) }},
	} {
		list, err := os.ReadFile("/proc/sysvipc/" + kind.name)
		if errors.Is(err, os.ErrNotExist) {
			continue // a kernel without them
		}
		if err != nil {
			return err
		}
		ids, err := sysvIDs(list)
		if err != nil {
			return fmt.Errorf("reading the list of System V %s: %w", kind.name, err)
		}
		for _, id := range ids {
			if err := kind.remove(id); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EIDRM) {
				return fmt.Errorf("removing System V %s %d: %w", kind.name, id, err)
			}
		}
	}
	return nil
}

func ipcRemove(call, id, a, b uintptr) error {
	if _, _, errno := unix.Syscall6(call, id, a, b, 0, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// sysvIDs returns the second column of a list in /proc/sysvipc: below one
// line of headings, there is one object a line.
func sysvIDs(list []byte) ([]int, error) {
	_, rows, _ := bytes.Cut(list, []byte("\n"))
	var ids []int
	for row := range bytes.Lines(rows) {
		fields := bytes.Fields(row)
		if len(fields) < 2 {
			return nil, fmt.Errorf("a line %.80q: %w", row, unix.EBADMSG)
		}
		id, err := strconv.Atoi(string(fields[1]))
		if err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, nil
}
