package rootfs

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// What a sandbox made may be deeper than any path or than there are
// descriptors. So directories that wait for their turn are not held open, and
// not named by path: they are remembered by file handle, which finds them at
// whatever depth (open_by_handle_at(2); XFS, ext4 and btrfs have handles).

// handle remembers a file of the volume.
type handle struct {
	kind int32
	data string
}

// handleAt returns the handle of name in dir, or of dir itself if name is
// empty. Links are not followed.
func handleAt(dir int, name string) (handle, error) {
	flags := 0
	if name == "" {
		flags = unix.AT_EMPTY_PATH
	}
	h, _, err := unix.NameToHandleAt(dir, name, flags)
	if err != nil {
		return handle{}, &os.PathError{Op: "name_to_handle_at", Path: name, Err: err}
	}
	return handle{kind: h.Type(), data: string(h.Bytes())}, nil
}

// open opens what the handle remembers; fs.ErrNotExist if that is gone. vol
// is any descriptor of its filesystem.
func (h handle) open(vol *os.File, flags int) (int, error) {
	fd, err := unix.OpenByHandleAt(int(vol.Fd()), unix.NewFileHandle(h.kind, []byte(h.data)), flags|unix.O_CLOEXEC)
	if errors.Is(err, unix.ESTALE) {
		err = unix.ENOENT
	}
	if err != nil {
		return -1, &os.PathError{Op: "open_by_handle_at", Path: "a directory", Err: err}
	}
	return fd, nil
}

const openDirFlags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC

// dirent is one entry as the directory itself tells.
type dirent struct {
	name string
	kind uint8 // unix.DT_*; DT_UNKNOWN where the filesystem does not say
}

// dirReader reads directories, a batch of entries at a time.
type dirReader struct{ buf [64 << 10]byte }

// each calls fn for every entry of an open directory but "." and "..".
func (r *dirReader) each(fd int, fn func(dirent) error) error {
	for {
		n, err := unix.Getdents(fd, r.buf[:])
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return os.NewSyscallError("getdents", err)
		}
		if n <= 0 {
			return nil
		}
		// struct linux_dirent64: inode 8, offset 8, length 2, type 1, name.
		for rest := r.buf[:n]; len(rest) > 19; {
			size := binary.NativeEndian.Uint16(rest[16:])
			name := rest[19:size]
			if i := bytes.IndexByte(name, 0); i >= 0 {
				name = name[:i]
			}
			e := dirent{kind: rest[18]}
			rest = rest[size:]
			if string(name) == "." || string(name) == ".." {
				continue
			}
			e.name = string(name)
			if err := fn(e); err != nil {
				return err
			}
		}
	}
}

// walkTree calls fn for the directory at path and everything beneath it,
// without order. What vanishes meanwhile is passed over.
func (s *Store) walkTree(ctx context.Context, path string, fn func(*unix.Stat_t)) error {
	fd, err := unix.Open(path, openDirFlags, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	w := treeWalk{ctx: ctx, vol: s.vol.root, fn: fn, readers: []*dirReader{new(dirReader)}}
	err = w.dir(fd, 0)
	for len(w.deep) > 0 && err == nil {
		last := len(w.deep) - 1
		h := w.deep[last]
		w.deep = w.deep[:last]
		if fd, err = h.open(w.vol, openDirFlags); err == nil {
			err = w.dir(fd, 0)
		} else if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	return err
}

// walkDepth is how many directories a walk holds open at once.
const walkDepth = 32

type treeWalk struct {
	ctx     context.Context //nolint:containedctx // lives as long as one walk
	vol     *os.File
	fn      func(*unix.Stat_t)
	readers []*dirReader // one a level
	deep    []handle     // directories left for later
}

// dir takes over the descriptor.
func (w *treeWalk) dir(fd, depth int) error {
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	w.fn(&st)
	if len(w.readers) == depth {
		w.readers = append(w.readers, new(dirReader))
	}
	return w.readers[depth].each(fd, func(e dirent) error {
		if err := w.ctx.Err(); err != nil {
			return err
		}
		if e.kind == unix.DT_DIR {
			return w.sub(fd, e.name, depth+1)
		}
		err := unix.Fstatat(fd, e.name, &st, unix.AT_SYMLINK_NOFOLLOW)
		switch {
		case errors.Is(err, unix.ENOENT):
			return nil
		case err != nil:
			return &os.PathError{Op: "stat", Path: e.name, Err: err}
		case st.Mode&unix.S_IFMT == unix.S_IFDIR: // an untold kind
			return w.sub(fd, e.name, depth+1)
		}
		w.fn(&st)
		return nil
	})
}

func (w *treeWalk) sub(parent int, name string, depth int) error {
	if depth >= walkDepth {
		h, err := handleAt(parent, name)
		if err == nil {
			w.deep = append(w.deep, h)
		}
		return ignoreGone(err)
	}
	fd, err := unix.Openat(parent, name, openDirFlags, 0)
	if err != nil {
		return ignoreGone(&os.PathError{Op: "open", Path: name, Err: err})
	}
	return w.dir(fd, depth)
}

func ignoreGone(err error) error {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	return err
}

// The attributes an overlay sets begin with this; those of an overlay inside
// an overlay, with it twice.
const overlayXattr = "trusted.overlay."

// isOverlayMark reports whether an attribute is an overlay's: what it keeps
// for itself, or what it tells the overlay that stacks the file.
func isOverlayMark(name string) bool {
	return strings.HasPrefix(name, overlayXattr) && !strings.HasPrefix(name, overlayXattr+"overlay.")
}

// isOverlayPrivate reports whether it is one with which an overlay keeps
// account for itself: it changes nothing of what the files say to others.
func isOverlayPrivate(name string) bool {
	switch strings.TrimPrefix(name, overlayXattr) {
	case "origin", "impure", "nlink", "uuid", "upper":
		return isOverlayMark(name)
	}
	return false
}

// isVisibleXattr reports whether a sandbox can see an attribute, and set it.
func isVisibleXattr(name string) bool {
	return strings.HasPrefix(name, "user.") || strings.HasPrefix(name, "system.posix_acl_") || name == "security.capability"
}

// listXattrs returns the names that a call of the listxattr(2) family gives,
// which is repeated if they do not fit.
func listXattrs(list func(buf []byte) (int, error)) ([]string, error) {
	var small [512]byte
	buf := small[:]
	for {
		n, err := list(buf)
		if errors.Is(err, unix.ERANGE) {
			buf = make([]byte, 64<<10) // XATTR_LIST_MAX
			if n > len(buf) {
				return nil, err
			}
			continue
		}
		if errors.Is(err, unix.EOPNOTSUPP) {
			return nil, nil
		}
		if err != nil || n == 0 {
			return nil, err
		}
		var names []string
		for name := range bytes.SplitSeq(bytes.TrimSuffix(buf[:n], []byte{0}), []byte{0}) {
			names = append(names, string(name))
		}
		return names, nil
	}
}
