package rootfs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// A bound directory of the host appears in a sandbox with the rights of its
// owner and no others: root inside is that owner, and every other id of the
// host is nobody's there. So a sandbox never acts on the host's files as
// root. A directory of root's, or of root's group, has no such owner: it is
// mounted without any mapping, where root inside is a stranger, and only for
// reading.

// inBindRoot resolves names below a bind root: users of the host may have
// write access there, and no link of theirs is followed.
const inBindRoot = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS

// BindSpec asks for a directory of the host.
type BindSpec struct {
	HostPath string
	Writable bool
	UIDBase  uint32 // the host id of root inside
}

// CheckBind reports whether MountBind would give a directory to a sandbox.
// Classes: ErrForbidden with code bind_denied for one outside of the bind
// roots, reached over a link, or not to be written; ErrNotFound; ErrInvalid
// for what is no directory.
func (s *Store) CheckBind(b BindSpec) error {
	dir, err := s.openBind(b)
	if err != nil {
		return err
	}
	return dir.Close()
}

// MountBind returns a directory of the host as a detached mount for a sandbox.
// It is opened once, and that directory is mounted, whatever its name has come
// to stand for since. Mounts beneath it stay outside. Errors as CheckBind;
// ErrUnsupported.
func (s *Store) MountBind(b BindSpec) (*os.File, error) {
	dir, err := s.openBind(b)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	var userns *os.File
	uid, gid, err := ownerOf(dir)
	if err == nil && plainOwner(uid, gid) {
		if userns, err = linux.OneIDUserNS(uid, gid, b.UIDBase, b.UIDBase); err == nil {
			defer userns.Close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("rootfs: bind %s: %w", b.HostPath, err)
	}
	tree, err := linux.CloneFile(dir)
	if err != nil {
		return nil, fmt.Errorf("rootfs: bind %s: %w", b.HostPath, err)
	}
	if err := mapMount(tree, userns, !b.Writable); err != nil {
		_ = tree.Close() // detached: it goes with it
		return nil, fmt.Errorf("rootfs: bind %s: %w", b.HostPath, err)
	}
	return tree, nil
}

// openBind opens a directory beneath a bind root and checks its owner.
func (s *Store) openBind(b BindSpec) (*os.File, error) {
	root, rest, ok := bindRoot(s.cfg.BindRoots, b.HostPath)
	if !ok {
		return nil, denied("host path %s lies beneath none of the bind_roots of the daemon's configuration", b.HostPath)
	}
	top, err := os.OpenFile(root, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, bindError(root, err)
	}
	defer top.Close()
	fd, err := linux.OpenBeneath(int(top.Fd()), rest, unix.O_PATH|unix.O_DIRECTORY, 0, inBindRoot)
	if err != nil {
		return nil, bindError(b.HostPath, err)
	}
	dir := os.NewFile(uintptr(fd), b.HostPath)
	uid, gid, err := ownerOf(dir)
	if err == nil && b.Writable && !plainOwner(uid, gid) {
		err = denied("host path %s belongs to root or root's group (%d:%d): give it to another owner, or leave it read-only", b.HostPath, uid, gid)
	}
	if err != nil {
		_ = dir.Close() // O_PATH: nothing to lose
		return nil, err
	}
	return dir, nil
}

// bindRoot finds the root a path lies beneath, and the rest of the path.
func bindRoot(roots []string, path string) (root, rest string, ok bool) {
	for _, r := range roots {
		if path == r {
			return r, ".", true
		}
		if rest, ok := strings.CutPrefix(path, r+"/"); ok {
			return r, rest, true
		}
	}
	return "", "", false
}

func ownerOf(dir *os.File) (uid, gid uint32, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return 0, 0, &os.PathError{Op: "fstat", Path: dir.Name(), Err: err}
	}
	return st.Uid, st.Gid, nil
}

// plainOwner reports whether a sandbox may act as the owner of a directory.
func plainOwner(uid, gid uint32) bool { return uid != 0 && gid != 0 }

func denied(format string, args ...any) error {
	return sandbox.Errorf(sandbox.ErrForbidden, "bind_denied", format, args...)
}

func bindError(path string, err error) error {
	switch {
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV):
		return denied("host path %s leads over a symbolic link or out of its bind root: name the directory itself: %w", path, err)
	case errors.Is(err, fs.ErrNotExist):
		return sandbox.Errorf(sandbox.ErrNotFound, "bind_not_found", "host path %s is not there: make the directory first: %w", path, err)
	case errors.Is(err, unix.ENOTDIR):
		return sandbox.Errorf(sandbox.ErrInvalid, "bind_not_directory", "host path %s is no directory: %w", path, err)
	}
	return fmt.Errorf("rootfs: host path %s: %w", path, err)
}
