package linux

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// CloneTree returns a detached copy of the mount at path, with everything
// mounted beneath it if recursive. The copy lives as long as the file.
// See open_tree(2).
func CloneTree(path string, recursive bool) (*os.File, error) {
	flags := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC)
	if recursive {
		flags |= unix.AT_RECURSIVE
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, flags)
	if err != nil {
		return nil, &os.PathError{Op: "open_tree", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// SetTree sets mount attributes (unix.MOUNT_ATTR_*) of a tree and makes its
// propagation private. See mount_setattr(2).
func SetTree(tree *os.File, attrs uint64, recursive bool) error {
	flags := uint(unix.AT_EMPTY_PATH)
	if recursive {
		flags |= unix.AT_RECURSIVE
	}
	attr := unix.MountAttr{Attr_set: attrs, Propagation: unix.MS_PRIVATE}
	if err := unix.MountSetattr(int(tree.Fd()), "", flags, &attr); err != nil {
		return &os.PathError{Op: "mount_setattr", Path: tree.Name(), Err: err}
	}
	return nil
}

// MapTree maps the ids of a detached mount through a user namespace: id n on
// disk appears as the host id that the namespace gives its own id n.
func MapTree(tree, userns *os.File, attrs uint64) error {
	attr := unix.MountAttr{
		Attr_set:    attrs | unix.MOUNT_ATTR_IDMAP,
		Propagation: unix.MS_PRIVATE,
		Userns_fd:   uint64(userns.Fd()),
	}
	if err := unix.MountSetattr(int(tree.Fd()), "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return &os.PathError{Op: "mount_setattr idmap", Path: tree.Name(), Err: err}
	}
	return nil
}

// AttachTree puts a detached mount at path. See move_mount(2).
func AttachTree(tree *os.File, path string) error {
	if err := unix.MoveMount(int(tree.Fd()), "", unix.AT_FDCWD, path, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return &os.PathError{Op: "move_mount", Path: path, Err: err}
	}
	return nil
}

// DetachTree takes whatever is mounted at path off, however often something
// is mounted there and however busy it is; nothing mounted there is no error.
func DetachTree(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		switch {
		case err == nil:
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
			return nil
		default:
			return &os.PathError{Op: "umount", Path: path, Err: err}
		}
	}
}

// IsMountRoot reports whether path is the root of a mount. See statx(2).
func IsMountRoot(path string) (bool, error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW, 0, &st); err != nil {
		return false, &os.PathError{Op: "statx", Path: path, Err: err}
	}
	return st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}

// MountParam is one fsconfig parameter; an empty Value makes it a flag.
type MountParam struct{ Key, Value string }

// NewMount makes a filesystem instance and returns it as a detached mount
// with the given attributes (unix.MOUNT_ATTR_*). The kernel's own explanation
// becomes part of the error. See fsopen(2), fsconfig(2), fsmount(2).
func NewMount(fstype string, params []MountParam, attrs int) (*os.File, error) {
	fs, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, &os.PathError{Op: "fsopen", Path: fstype, Err: err}
	}
	defer unix.Close(fs)
	for _, p := range params {
		if p.Value == "" {
			err = unix.FsconfigSetFlag(fs, p.Key)
		} else {
			err = unix.FsconfigSetString(fs, p.Key, p.Value)
		}
		if err != nil {
			return nil, mountError(fs, fstype, "option "+p.Key, err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, mountError(fs, fstype, "create", err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attrs)
	if err != nil {
		return nil, mountError(fs, fstype, "fsmount", err)
	}
	return os.NewFile(uintptr(fd), fstype), nil
}

// mountError adds the messages of the filesystem context, one a read.
func mountError(fs int, fstype, step string, err error) error {
	var said []string
	buf := make([]byte, 4096)
	for len(said) < 16 {
		n, rerr := unix.Read(fs, buf)
		if rerr != nil || n == 0 {
			break
		}
		said = append(said, strings.TrimSpace(string(buf[:n])))
	}
	if len(said) == 0 {
		return fmt.Errorf("%s mount: %s: %w", fstype, step, err)
	}
	return fmt.Errorf("%s mount: %s: %w (%s)", fstype, step, err, strings.Join(said, "; "))
}
