package initd

import (
	"errors"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Every name a user gives is resolved here: working directories, homes,
// programs, files, mount points. A test (internal/archtest) keeps calls that
// take a path out of the other files.
//
// The rules are those of resolveIn: nothing above the root is reached, and no
// magic link of /proc is followed, which leads to a descriptor of PID 1's or
// past the root. The rights are the calling thread's: it becomes the user first
// (asUser, worker.as).

// resolveIn opens a name beneath the directory root as if that were "/". A
// relative name counts from there, too.
func resolveIn(root int, name string, flags int, mode uint32, also uint64) (int, error) {
	if flags&unix.O_PATH == 0 { // openat2 refuses these with O_PATH, which opens nothing
		flags |= unix.O_NONBLOCK | unix.O_NOCTTY
	}
	return linux.OpenBeneath(root, name, flags, mode, unix.RESOLVE_IN_ROOT|unix.RESOLVE_NO_MAGICLINKS|also)
}

// open is resolveIn for the root of the sandbox.
func open(name string, flags int) (int, error) {
	root, err := openRoot()
	if err != nil {
		return -1, err
	}
	defer unix.Close(root)
	return resolveIn(root, name, flags, 0, 0)
}

// entry opens what a directory has under a name, or what links beneath the
// directory lead to: nothing above it.
func entry(dir int, name string, flags int, mode uint32, also uint64) (int, error) {
	return linux.OpenBeneath(dir, name, flags, mode, unix.RESOLVE_BENEATH|unix.RESOLVE_NO_MAGICLINKS|also)
}

func openRoot() (int, error) {
	return unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
}

// enterDir makes a directory of the user's the working directory of all PID 1,
// for a child to inherit, and returns its name without links. The thread must
// have become the user. leaveDir goes back.
//
// The kernel names a directory that the root does not lead to "(unreachable)",
// and Getcwd then fails: so what was entered is seen from the root, on a mount
// of the sandbox's own. PID 1's directories in /proc are nobody's: with one of
// them a child's relative names would be judged before its execve.
func enterDir(root int, name string) (string, error) {
	dir, err := resolveIn(root, name, unix.O_PATH|unix.O_DIRECTORY, 0, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(dir)
	if err := unix.Fchdir(dir); err != nil {
		return "", err
	}
	buf := make([]byte, unix.PathMax)
	n, err := unix.Getcwd(buf)
	if err != nil {
		leaveDir()
		return "", err
	}
	cwd := string(buf[:n-1])
	if isOwn(cwd) {
		leaveDir()
		return "", unix.EACCES
	}
	return cwd, nil
}

func leaveDir() { _ = unix.Chdir("/") }

// isOwn reports whether a path is of PID 1 in /proc, or of one of its threads,
// which have directories there that no listing shows.
func isOwn(name string) bool {
	rest, ok := strings.CutPrefix(name, "/proc/")
	number, _, _ := strings.Cut(rest, "/")
	_, err := strconv.Atoi(number)
	return ok && err == nil && unix.Access("/proc/self/task/"+number, unix.F_OK) == nil
}

// found reports how a look-up of a program ends for the user.
func found(root int, name string) error {
	fd, err := resolveIn(root, name, unix.O_PATH, 0, 0)
	if err == nil {
		_ = unix.Close(fd)
	}
	return err
}

// statFile describes what a name leads to.
func statFile(name string) (st unix.Stat_t, err error) {
	fd, err := open(name, unix.O_PATH)
	if err != nil {
		return st, err
	}
	defer unix.Close(fd)
	return st, unix.Fstat(fd, &st)
}

// What follows works on a file that is open, also with O_PATH. The kernel has
// no calls for that but by the descriptor's name in PID 1's own /proc.

func fdPath(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

func nameOf(fd int) (string, error) { return os.Readlink(fdPath(fd)) }

func chmodFile(fd int, mode uint32) error { return unix.Chmod(fdPath(fd), mode) }

func reopen(fd, flags int) (int, error) {
	return unix.Open(fdPath(fd), flags|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
}

// linkFile gives an open file a name in a directory.
func linkFile(fd, dir int, name string) error {
	return unix.Linkat(unix.AT_FDCWD, fdPath(fd), dir, name, unix.AT_SYMLINK_FOLLOW)
}

func setFileTimes(fd int, ts []unix.Timespec) error {
	return unix.UtimesNanoAt(unix.AT_FDCWD, fdPath(fd), ts, 0)
}

func watchFile(inotify, fd int, mask uint32) (int, error) {
	return unix.InotifyAddWatch(inotify, fdPath(fd), mask)
}

func listAttrs(fd int, list []byte) (int, error) { return unix.Listxattr(fdPath(fd), list) }
func getAttr(fd int, attr string, value []byte) (int, error) {
	return unix.Getxattr(fdPath(fd), attr, value)
}

func setAttr(fd int, attr, value string) error {
	return unix.Setxattr(fdPath(fd), attr, []byte(value), 0)
}
func removeAttr(fd int, attr string) error { return unix.Removexattr(fdPath(fd), attr) }

// removeTree removes an entry of a directory with all beneath it. It follows no
// link and crosses no mount: where it finds one at once, nothing is removed. One that
// is renamed into the tree meanwhile ends it there, with EXDEV.
func removeTree(dir int, name string, stopped func() error) error {
	at, err := nameOf(dir)
	if err != nil {
		return err
	}
	if err := refuseMounts(path.Join(at, name), false); err != nil {
		return err
	}
	return linux.RemoveTree(dir, name, stopped)
}

// refuseMounts refuses a path without links that is a mount or has one in it;
// with below, also one that lies in a mount other than the root.
func refuseMounts(name string, below bool) error {
	list, err := os.ReadFile("/proc/self/mountinfo") // proc_pid_mountinfo(5)
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(list)) {
		f := strings.Fields(line)
		if len(f) < 5 || f[4] == "/" {
			continue
		}
		at := unescapeMount.Replace(f[4])
		if at == name || strings.HasPrefix(at, name+"/") || below && strings.HasPrefix(name, at+"/") {
			return sandbox.Errorf(sandbox.ErrConflict, "crosses_mounts", "%.300q and the mount (a volume, a directory of the host, or the kernel's) on %.300q: "+
				"nothing was removed; name what lies beside the mount, and empty a volume by a command", name, at)
		}
	}
	return nil
}

var unescapeMount = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// ownDir opens a directory that neither a link nor a mount is on the way to;
// with make, what is missing of it is made.
func ownDir(name string, make bool) (int, error) {
	dir, err := openRoot()
	at := ""
	for part := range strings.FieldsFuncSeq(name, func(r rune) bool { return r == '/' }) {
		if err != nil {
			break
		}
		at += "/" + part
		open := func() (int, error) {
			return resolveIn(dir, part, unix.O_PATH|unix.O_DIRECTORY, 0, unix.RESOLVE_NO_SYMLINKS|unix.RESOLVE_NO_XDEV)
		}
		var next int
		if next, err = open(); make && errors.Is(err, unix.ENOENT) {
			if err = unix.Mkdirat(dir, part, 0o755); err == nil || errors.Is(err, unix.EEXIST) {
				next, err = open()
			}
		}
		_ = unix.Close(dir)
		if errors.Is(err, unix.ELOOP) {
			err = sandbox.Errorf(sandbox.ErrConflict, "crosses_link", "%.300q is a symbolic link in the sandbox: nothing was removed; name the place it leads to", at)
		}
		dir = next
	}
	return dir, err
}
