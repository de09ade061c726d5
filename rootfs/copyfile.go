package rootfs

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// copyWorker copies the entries of directories. It runs on a thread without
// umask (onCopyThread).
type copyWorker struct {
	*copier
	reader dirReader
	value  []byte                 // of an attribute
	drop   func(name string) bool // attributes to leave out; nil: none
}

// entry copies one that is no directory. tree tells apart the inodes of
// several trees merged into one.
func (w *copyWorker) entry(tree, src, dst int, e dirent) error {
	if e.kind == unix.DT_SOCK { // dead without the process that listens
		return nil
	}
	if e.kind == unix.DT_REG {
		return w.regular(tree, src, dst, e.name)
	}
	var st unix.Stat_t
	if err := unix.Fstatat(src, e.name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &os.PathError{Op: "stat", Path: e.name, Err: err}
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return w.regular(tree, src, dst, e.name)
	case unix.S_IFSOCK:
		return nil
	case unix.S_IFLNK, unix.S_IFIFO, unix.S_IFCHR, unix.S_IFBLK:
		return w.once(linkKey{tree, st.Ino}, &st, dst, e.name, func() error { return w.special(src, dst, e.name, &st) })
	}
	return fmt.Errorf("%q is a file of the unexpected mode %o", e.name, st.Mode)
}

// once makes a file with make, unless it is one with several names that was
// made before: then it gets another name.
func (w *copyWorker) once(key linkKey, st *unix.Stat_t, dst int, name string, create func() error) error {
	w.bytes.Add(st.Blocks * 512)
	if st.Nlink < 2 {
		w.files.Add(1)
		return create()
	}
	// Held while the file is made, or two workers would make it twice.
	w.links.Lock()
	defer w.links.Unlock()
	if l := w.links.made[key]; l != nil {
		err := w.link(l, dst, name)
		if err == nil {
			w.bytes.Add(-st.Blocks * 512)
			if l.left--; l.left == 0 {
				delete(w.links.made, key)
			}
			return nil
		}
		if !errors.Is(err, unix.EMLINK) { // ext4 has 65,000 at most
			return err
		}
	}
	w.files.Add(1)
	if err := create(); err != nil {
		return err
	}
	h, err := handleAt(dst, name)
	if err != nil {
		return err
	}
	w.links.made[key] = &copiedLink{at: h, left: st.Nlink - 1}
	return nil
}

func (w *copyWorker) link(l *copiedLink, dst int, name string) error {
	fd, err := l.at.open(w.vol, unix.O_PATH|unix.O_NOFOLLOW)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Linkat(fd, "", dst, name, unix.AT_EMPTY_PATH); err != nil {
		return &os.PathError{Op: "link", Path: name, Err: err}
	}
	return nil
}

var errReplaced = errors.New("it was replaced while it was copied")

// regular copies a regular file. A name that meanwhile is something else does
// no harm: nothing is followed, and opening a pipe does not wait.
func (w *copyWorker) regular(tree, src, dst int, name string) error {
	in, err := unix.Openat(src, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOATIME|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: name, Err: err}
	}
	defer unix.Close(in)
	var st unix.Stat_t
	if err := unix.Fstat(in, &st); err != nil {
		return &os.PathError{Op: "stat", Path: name, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return fmt.Errorf("%q: %w", name, errReplaced)
	}
	return w.once(linkKey{tree, st.Ino}, &st, dst, name, func() error { return w.file(in, dst, name, &st) })
}

func (w *copyWorker) file(in, dst int, name string, st *unix.Stat_t) error {
	out, err := unix.Openat(dst, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, st.Mode&0o7777)
	if err != nil {
		return &os.PathError{Op: "create", Path: name, Err: err}
	}
	defer unix.Close(out) // a clone has no data of its own; of a copy, Sync tells
	if st.Size > 0 {
		if err := w.content(in, out, st.Size); err != nil {
			return &os.PathError{Op: "copy", Path: name, Err: err}
		}
	}
	if err := w.fdAttrs(in, out, st); err != nil {
		return &os.PathError{Op: "set attributes", Path: name, Err: err}
	}
	return nil
}

// content gives out the content of in, sharing its blocks if possible.
func (w *copyWorker) content(in, out int, size int64) error {
	if !w.noClone.Load() {
		err := unix.IoctlFileClone(out, in)
		switch err {
		case nil:
			return nil
		case unix.EOPNOTSUPP, unix.ENOTTY, unix.ENOSYS, unix.EXDEV, unix.EINVAL:
			w.noClone.Store(true)
		default:
			return err
		}
	}
	return w.copyData(in, out, size)
}

// copyData copies what is no hole, a part at a time, for ctx.
func (w *copyWorker) copyData(in, out int, size int64) error {
	const part = 16 << 20
	if err := unix.Ftruncate(out, size); err != nil {
		return err
	}
	for off := int64(0); off < size; {
		begin, err := unix.Seek(in, off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // a hole to the end
		}
		if err != nil {
			return err
		}
		end, err := unix.Seek(in, begin, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		for off = begin; off < min(end, size); {
			if err := w.ctx.Err(); err != nil {
				return err
			}
			from, to := off, off
			n, err := unix.CopyFileRange(in, &from, out, &to, int(min(part, end-off, size-off)), 0)
			if err != nil {
				return err
			}
			if n == 0 {
				return io.ErrUnexpectedEOF
			}
			off += int64(n)
		}
	}
	return nil
}

// fdAttrs gives an open file or directory owner, attributes, mode and times,
// in an order in which none takes away another. A file was created with its
// mode, as root's.
func (w *copyWorker) fdAttrs(in, out int, st *unix.Stat_t) error {
	if st.Uid != 0 || st.Gid != 0 {
		if err := unix.Fchown(out, int(st.Uid), int(st.Gid)); err != nil {
			return err
		}
	}
	names, err := listXattrs(func(buf []byte) (int, error) { return unix.Flistxattr(in, buf) })
	if err != nil {
		return err
	}
	for _, n := range names {
		err := w.xattr(n,
			func(buf []byte) (int, error) { return unix.Fgetxattr(in, n, buf) },
			func(value []byte) error { return unix.Fsetxattr(out, n, value, 0) })
		if err != nil {
			return err
		}
	}
	// chown(2) takes the set-id bits of a file, an ACL may change the rest.
	if st.Mode&unix.S_IFMT == unix.S_IFDIR || st.Mode&0o6000 != 0 || len(names) > 0 {
		if err := unix.Fchmod(out, st.Mode&0o7777); err != nil {
			return err
		}
	}
	return unix.UtimesNanoAt(out, "", []unix.Timespec{st.Atim, st.Mtim}, unix.AT_EMPTY_PATH)
}

// xattr copies one attribute.
func (w *copyWorker) xattr(name string, get func([]byte) (int, error), set func([]byte) error) error {
	if w.drop != nil && w.drop(name) {
		return nil
	}
	if w.value == nil {
		w.value = make([]byte, 64<<10) // XATTR_SIZE_MAX
	}
	n, err := get(w.value)
	if errors.Is(err, unix.ENODATA) {
		return nil
	}
	if err == nil {
		err = set(w.value[:n])
	}
	if err != nil {
		return fmt.Errorf("attribute %q: %w", name, err)
	}
	return nil
}

func (w *copyWorker) dirAttrs(src, dst int) error {
	var st unix.Stat_t
	err := unix.Fstat(src, &st)
	if err == nil {
		w.files.Add(1)
		w.bytes.Add(st.Blocks * 512)
		err = w.fdAttrs(src, dst, &st)
	}
	if err != nil {
		return fmt.Errorf("attributes of a directory: %w", err)
	}
	return nil
}

// special copies a symbolic link, a pipe or a device node: a whiteout, which
// is one too, has nothing but its name.
func (w *copyWorker) special(src, dst int, name string, st *unix.Stat_t) error {
	var err error
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		target := make([]byte, maxPath+1)
		var n int
		if n, err = unix.Readlinkat(src, name, target); err == nil {
			err = unix.Symlinkat(string(target[:n]), dst, name)
		}
	} else {
		err = unix.Mknodat(dst, name, st.Mode, int(st.Rdev))
	}
	if err != nil {
		return &os.PathError{Op: "create", Path: name, Err: err}
	}
	if isWhiteout(st) {
		return nil
	}
	if err := w.nameAttrs(src, dst, name, st); err != nil {
		return &os.PathError{Op: "set attributes", Path: name, Err: err}
	}
	return nil
}

// nameAttrs is fdAttrs for what cannot be opened. There are no calls yet that
// take a directory and a name for attributes (6.13 has them): hence the path.
func (w *copyWorker) nameAttrs(src, dst int, name string, st *unix.Stat_t) error {
	if st.Uid != 0 || st.Gid != 0 {
		if err := unix.Fchownat(dst, name, int(st.Uid), int(st.Gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
	}
	in, out := fmt.Sprintf("/proc/self/fd/%d/%s", src, name), fmt.Sprintf("/proc/self/fd/%d/%s", dst, name)
	names, err := listXattrs(func(buf []byte) (int, error) { return unix.Llistxattr(in, buf) })
	if err != nil {
		return err
	}
	for _, n := range names {
		err := w.xattr(n,
			func(buf []byte) (int, error) { return unix.Lgetxattr(in, n, buf) },
			func(value []byte) error { return unix.Lsetxattr(out, n, value, 0) })
		if err != nil {
			return err
		}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFLNK && (st.Mode&0o6000 != 0 || len(names) > 0) {
		if err := unix.Fchmodat(dst, name, st.Mode&0o7777, 0); err != nil {
			return err
		}
	}
	return unix.UtimesNanoAt(dst, name, []unix.Timespec{st.Atim, st.Mtim}, unix.AT_SYMLINK_NOFOLLOW)
}
