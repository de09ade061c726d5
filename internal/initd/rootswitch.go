package initd

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/sandbox"
)

// movedMounts go from each root to the next, with all that is mounted below
// them: they cannot be mounted afresh once the first root is gone.
var movedMounts = []string{"proc", "sys", "dev"}

// inNewRoot is for names in a root that a workload may have written: beside
// what resolveIn refuses, no link of it is followed.
const inNewRoot = unix.RESOLVE_NO_SYMLINKS

// switchRoot makes a detached mount the root of the mount namespace.
//
//	before        attached over "/"      moved            pivoted, old root detached
//	/ (old)       / (old)                / (old)          / (new)
//	├ proc          ├ proc                 └ / (new)      ├ proc
//	├ sys           ├ sys                      ├ proc     ├ sys
//	└ dev           ├ dev                      ├ sys      └ dev
//	                └ / (new)                  └ dev
//
// Attaching over "/" needs no directory of the old root, whose user could
// have put anything anywhere. PID 1 stays in the old root until pivot_root(2)
// moves it, so a failure before that leaves the old root in force.
//
// The first time the old root is the skeleton, read-only, with nothing but PID
// 1's program by then, and may stay below the new one, as rootfs stays below
// that of any host:
// chroot(2) will do (switch_root(8) does the same). pivot_root(2) looks at every
// thread of the host, and unmounting waits for RCU. What runs in the sandbox can
// not get beneath its root: that takes CAP_SYS_CHROOT, which none has.
func switchRoot(root *os.File, extra []*os.File, paths []string, first bool) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making mounts private: %w", err)
	}
	fd := int(root.Fd())
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, "/", unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attaching it over the old one: %w", err)
	}
	undo := func(err error) error { return errors.Join(err, takeBack(fd)) }
	// pivot_root(2) refuses a shared root, and it is shared if it was cloned
	// where mounts are, as in the first namespace under systemd.
	private := unix.MountAttr{Propagation: unix.MS_PRIVATE}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &private); err != nil {
		return undo(fmt.Errorf("making it private: %w", err))
	}
	for _, name := range movedMounts {
		if err := moveMount(fd, name); err != nil {
			return undo(fmt.Errorf("moving /%s: %w", name, err))
		}
	}
	for i, f := range extra {
		if err := attachExtra(fd, int(f.Fd()), paths[i]); err != nil {
			return undo(fmt.Errorf("mounting on %s: %w", paths[i], err))
		}
	}
	// The kernel frees the old filesystem with its last user, which can take
	// long after much was written: that is to be us, and later.
	old, err := openRoot()
	if err != nil {
		return undo(fmt.Errorf("holding on to the old root: %w", err))
	}
	defer func() { go func() { _ = unix.Close(old) }() }()
	if err := unix.Fchdir(fd); err != nil {
		return undo(fmt.Errorf("entering it: %w", err))
	}
	if first { // all threads of a Go program share their root
		if err := unix.Chroot("."); err != nil {
			_ = unix.Chdir("/")
			return undo(fmt.Errorf("changing the root: %w", err))
		}
		return nil
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		_ = unix.Chdir("/")
		return undo(fmt.Errorf("pivoting: %w", err))
	}
	// The old root now lies over "."; detaching it uncovers the new one.
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("detaching the old root: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return fmt.Errorf("entering /: %w", err)
	}
	return nil
}

// moveMount moves /name of the present root to the same place of the new one.
func moveMount(root int, name string) error {
	from, err := unix.OpenTree(unix.AT_FDCWD, "/"+name, unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return err
	}
	defer unix.Close(from)
	to, err := directoryIn(root, name)
	if err != nil {
		return err
	}
	defer unix.Close(to)
	return unix.MoveMount(from, "", to, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
}

// takeBack returns the moved mounts to the old root and detaches the new one.
func takeBack(root int) error {
	var errs []error
	for _, name := range movedMounts {
		from, err := resolveIn(root, name, unix.O_PATH|unix.O_DIRECTORY, 0, inNewRoot)
		if err != nil {
			continue
		}
		if err := unix.MoveMount(from, "", unix.AT_FDCWD, "/"+name, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil && !errors.Is(err, unix.EINVAL) {
			errs = append(errs, fmt.Errorf("returning /%s: %w", name, err))
		}
		_ = unix.Close(from)
	}
	if err := unix.Fchdir(root); err == nil {
		errs = append(errs, unix.Unmount(".", unix.MNT_DETACH))
		_ = unix.Chdir("/")
	}
	return errors.Join(errs...)
}

// directoryIn opens a directory of the new root, making it, and replacing
// what is there but is none (a link or a file put there by a workload).
func directoryIn(root int, name string) (int, error) {
	fd, err := resolveIn(root, name, unix.O_PATH|unix.O_DIRECTORY, 0, inNewRoot)
	if err == nil {
		return fd, nil
	}
	if !errors.Is(err, unix.ENOENT) {
		if uerr := unix.Unlinkat(root, name, 0); uerr != nil {
			return -1, errors.Join(err, uerr)
		}
	}
	if err := unix.Mkdirat(root, name, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
		return -1, err
	}
	return resolveIn(root, name, unix.O_PATH|unix.O_DIRECTORY, 0, inNewRoot)
}

// attachExtra mounts a further tree or file beneath the new root, at a place
// it makes where there is none. A link on the way is neither followed nor
// replaced: a workload, or the image, put it there.
func attachExtra(root, mount int, path string) error {
	var st unix.Stat_t
	if err := unix.Fstat(mount, &st); err != nil {
		return err
	}
	parts := strings.FieldsFunc(path, func(r rune) bool { return r == '/' })
	if len(parts) == 0 {
		return fmt.Errorf("a mount needs a place beneath the root: %w", unix.EINVAL)
	}
	dir, err := unix.Dup(root)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(dir) }()
	for i, part := range parts {
		if part == "." || part == ".." {
			return fmt.Errorf("%q in the path: %w", part, unix.EINVAL)
		}
		var next int
		if i == len(parts)-1 && st.Mode&unix.S_IFMT != unix.S_IFDIR {
			next, err = fileIn(dir, part)
		} else {
			next, err = placeIn(dir, part)
		}
		if err != nil {
			return placeError("/"+strings.Join(parts[:i+1], "/"), err)
		}
		_ = unix.Close(dir)
		dir = next
	}
	err = unix.MoveMount(mount, "", dir, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
	if errors.Is(err, unix.ENOENT) { // the place was removed since it was opened
		return placeError("/"+strings.Join(parts, "/"), err)
	}
	return err
}

// placeIn opens a directory, making it where there is nothing.
func placeIn(dir int, name string) (int, error) {
	fd, err := resolveIn(dir, name, unix.O_PATH|unix.O_DIRECTORY, 0, inNewRoot)
	if !errors.Is(err, unix.ENOENT) {
		return fd, err
	}
	if err := unix.Mkdirat(dir, name, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
		return -1, err
	}
	return resolveIn(dir, name, unix.O_PATH|unix.O_DIRECTORY, 0, inNewRoot)
}

// placeError says what is in the way of a mount, and what to do.
func placeError(at string, err error) error {
	bad := func(class error, format string) error {
		return sandbox.Errorf(class, "mount_point", format, at, err)
	}
	switch {
	case errors.Is(err, unix.ELOOP):
		return bad(sandbox.ErrConflict, "%s is a symbolic link in the sandbox: mount at the place it leads to: %w")
	case errors.Is(err, unix.ENOTDIR):
		return bad(sandbox.ErrConflict, "%s is no directory in the sandbox: mount elsewhere, or remove it: %w")
	case errors.Is(err, unix.ENOENT):
		return bad(sandbox.ErrConflict, "%s was removed by another sandbox of the volume while it was mounted on: try again once that one leaves it alone: %w")
	case errors.Is(err, unix.EROFS):
		return bad(sandbox.ErrConflict, "%s is missing and stands in something read-only: make it there first, or mount elsewhere: %w")
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM), errors.Is(err, unix.EOVERFLOW):
		return bad(sandbox.ErrConflict, "%s is missing and may not be made by the sandbox: make it there first, or mount elsewhere: %w")
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return bad(sandbox.ErrExhausted, "%s cannot be made, the disk limit is reached: raise it, or make room: %w")
	}
	return fmt.Errorf("making %s: %w", at, err)
}

func fileIn(dir int, name string) (int, error) {
	fd, err := resolveIn(dir, name, unix.O_RDONLY|unix.O_CREAT, 0o644, inNewRoot)
	if err != nil {
		return -1, err
	}
	_ = unix.Close(fd)
	return resolveIn(dir, name, unix.O_PATH, 0, inNewRoot)
}

// writeIdentity writes the files that tell a root its name and neighbours.
func writeIdentity(a initproto.Configure) error {
	root, err := openRoot()
	if err != nil {
		return err
	}
	defer unix.Close(root)
	etc, err := directoryIn(root, "etc")
	if err != nil {
		return fmt.Errorf("opening /etc: %w", err)
	}
	defer unix.Close(etc)
	files := []struct{ name, content string }{
		{"hostname", a.Hostname + "\n"}, {"hosts", hostsFile(a)}, {"resolv.conf", a.ResolvConf},
	}
	for _, f := range files {
		if strings.TrimSpace(f.content) == "" {
			continue
		}
		if err := replaceFile(etc, f.name, f.content); err != nil {
			return fmt.Errorf("writing /etc/%s: %w", f.name, err)
		}
	}
	return nil
}

// replaceFile writes a regular file; a link, as resolv.conf often is one, is
// replaced and not followed.
func replaceFile(dir int, name, content string) error {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		if err := unix.Unlinkat(dir, name, 0); err != nil {
			return err
		}
	}
	fd, err := resolveIn(dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC, 0o644, inNewRoot)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	_, err = f.WriteString(content)
	return errors.Join(err, f.Close())
}
