package rootfs

import (
	"archive/tar"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Bounds of one archive entry.
const (
	maxName      = 255  // of one path component: NAME_MAX
	maxPath      = 4095 // of a path or link target: PATH_MAX less its zero
	maxDepth     = 256  // components
	maxID        = 65535
	maxMtime     = 1<<32 - 1 // seconds; every filesystem we use holds that
	sparseBlock  = 64 << 10  // runs of zeroes this long become holes
	whiteoutName = ".wh."
)

// unpacker writes archive entries beneath root, naming every parent through
// openat2(2) with RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS: the kernel refuses
// what climbs out, so no order of entries can lead it astray.
type unpacker struct {
	root  *os.File
	lim   importLimits
	files int64 // entries read
	bytes int64 // of content written
	buf   []byte

	sums map[uint64][sha256.Size]byte // content by inode
	dirs map[uint64]unix.Timespec     // mtime by inode, for finish

	layer *layerState // set: the archive is a layer of an image, see ImportLayer

	parent     int    // descriptor of the directory parentPath; -1: none
	parentPath string // most entries have the parent of the one before

	size, kept int64 // found by finish; counted, for a layer
}

func newUnpacker(root *os.File, lim importLimits) *unpacker {
	return &unpacker{
		root: root, lim: lim, buf: make([]byte, 2*sparseBlock), parent: -1,
		sums: map[uint64][sha256.Size]byte{}, dirs: map[uint64]unix.Timespec{},
	}
}

func (u *unpacker) close() { u.forgetParent() }

// forgetParent must come after any directory is removed.
func (u *unpacker) forgetParent() {
	if u.parent >= 0 {
		_ = unix.Close(u.parent) // O_PATH: nothing to lose
	}
	u.parent = -1
}

func badPath(format string, args ...any) error {
	return sandbox.Errorf(sandbox.ErrInvalid, "image_bad_path", "archive entry "+format, args...)
}

// splitPath checks the name of an entry and returns its components; none
// stand for the root itself.
func splitPath(name string) ([]string, error) {
	if strings.HasPrefix(name, "/") {
		return nil, badPath("%.200q: absolute names are refused; pack with relative ones (tar -C DIR .)", name)
	}
	parts, err := splitName(name)
	if err != nil {
		return nil, err
	}
	for _, p := range parts {
		if strings.HasPrefix(p, whiteoutName) {
			return nil, badPath("%.200q: this is a deletion mark of an image layer; import a whole file system (docker export), not a layer", name)
		}
	}
	return parts, nil
}

// splitName checks and splits what every name must fulfil.
func splitName(name string) ([]string, error) {
	switch {
	case name == "":
		return nil, badPath("without a name")
	case len(name) > maxPath:
		return nil, badPath("%.80q…: its name has %d bytes, at most %d can be used", name, len(name), maxPath)
	case strings.ContainsRune(name, 0):
		return nil, badPath("%.200q: a name must not hold a zero byte", name)
	}
	var parts []string
	for p := range strings.SplitSeq(name, "/") {
		switch {
		case p == "" || p == ".":
			continue
		case p == "..":
			return nil, badPath("%.200q: '..' is refused", name)
		case len(strings.TrimPrefix(p, whiteoutName)) > maxName:
			return nil, badPath("%.200q: a part of the name is over %d bytes", name, maxName)
		}
		parts = append(parts, p)
	}
	if len(parts) > maxDepth {
		return nil, badPath("%.80q…: %d directories deep, at most %d are taken", name, len(parts), maxDepth)
	}
	return parts, nil
}

// entry writes one entry. The order of the steps matters for entries that
// name something twice: look at the new one first, remove the old one, write.
func (u *unpacker) entry(hdr *tar.Header, content io.Reader) error {
	if u.files++; u.files > u.lim.files {
		return sandbox.Errorf(sandbox.ErrTooLarge, "image_too_large", "the archive has over %d entries", u.lim.files)
	}
	if hdr.Typeflag == tar.TypeXGlobalHeader {
		return nil // pax settings for what follows; archive/tar knows them
	}
	if u.layer != nil {
		return u.layerEntry(hdr, content)
	}
	switch hdr.Typeflag {
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		return sandbox.Errorf(sandbox.ErrInvalid, "image_device_node", "archive entry %.200q is a device node or pipe: pack without it (tar --exclude='./dev/*'); sandboxes bring their own /dev", hdr.Name)
	case tar.TypeReg, tar.TypeDir, tar.TypeSymlink, tar.TypeLink, tar.TypeGNUSparse:
	default:
		return sandbox.Errorf(sandbox.ErrInvalid, "image_bad_format", "archive entry %.200q is of the unknown kind %q", hdr.Name, hdr.Typeflag)
	}
	parts, err := splitPath(hdr.Name)
	if err != nil {
		return err
	}
	return u.write(parts, hdr, content)
}

// write makes what an entry describes at the place that parts name.
func (u *unpacker) write(parts []string, hdr *tar.Header, content io.Reader) error {
	if hdr.Uid < 0 || hdr.Uid > maxID || hdr.Gid < 0 || hdr.Gid > maxID {
		return sandbox.Errorf(sandbox.ErrInvalid, "image_bad_id", "archive entry %.200q belongs to %d:%d: a sandbox has ids 0 to %d", hdr.Name, hdr.Uid, hdr.Gid, maxID)
	}
	if len(parts) == 0 {
		if hdr.Typeflag != tar.TypeDir {
			return badPath("%.200q: the root must be a directory", hdr.Name)
		}
		return u.setDir(int(u.root.Fd()), hdr)
	}
	dir, base, err := u.openParent(hdr.Name, parts)
	if err != nil {
		return err
	}
	switch hdr.Typeflag {
	case tar.TypeDir:
		return u.mkdir(dir, base, hdr)
	case tar.TypeSymlink:
		return u.symlink(dir, base, hdr)
	case tar.TypeLink:
		return u.link(dir, base, hdr)
	case tar.TypeFifo:
		return u.fifo(dir, base, hdr)
	}
	return u.file(dir, base, hdr, content)
}

// openBeneath opens a directory of the tree, following nothing.
func (u *unpacker) openBeneath(path string) (int, error) {
	return linux.OpenBeneath(int(u.root.Fd()), path, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0,
		unix.RESOLVE_BENEATH|unix.RESOLVE_NO_SYMLINKS|unix.RESOLVE_NO_MAGICLINKS|unix.RESOLVE_NO_XDEV)
}

// openParent returns the directory that holds the last of parts. Directories
// an archive leaves out are made as root's, 0755. The descriptor stays the
// unpacker's.
func (u *unpacker) openParent(name string, parts []string) (int, string, error) {
	base := parts[len(parts)-1]
	path := strings.Join(parts[:len(parts)-1], "/")
	if path == "" {
		path = "."
	}
	if u.parent >= 0 && u.parentPath == path {
		return u.parent, base, nil
	}
	fd, err := u.openBeneath(path)
	if errors.Is(err, unix.ENOENT) || u.layer != nil && errors.Is(err, unix.ENOTDIR) {
		if err := u.mkdirs(name, parts[:len(parts)-1]); err != nil {
			return -1, "", err
		}
		fd, err = u.openBeneath(path)
	}
	switch {
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV):
		return -1, "", badPath("%.200q: a directory on its way is a symbolic link in this archive", name)
	case errors.Is(err, unix.ENOTDIR):
		return -1, "", badPath("%.200q: a directory on its way is a file in this archive", name)
	case err != nil:
		return -1, "", &os.PathError{Op: "open", Path: path, Err: err}
	}
	u.forgetParent()
	u.parent, u.parentPath = fd, path
	return fd, base, nil
}

func (u *unpacker) mkdirs(name string, parts []string) error {
	dir := int(u.root.Fd())
	var path string
	for i, p := range parts {
		path = strings.Join(parts[:i+1], "/")
		err := u.mkdirImplied(dir, p, path)
		var next int
		if err == nil {
			next, err = u.openBeneath(path)
		}
		if i > 0 {
			_ = unix.Close(dir) // O_PATH: nothing to lose
		}
		if err != nil {
			if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.EXDEV) {
				return badPath("%.200q: %.200q on its way is no directory in this archive", name, path)
			}
			if _, ok := errors.AsType[*sandbox.Error](err); ok {
				return err
			}
			return &os.PathError{Op: "make directory", Path: path, Err: err}
		}
		dir = next
	}
	if len(parts) > 0 {
		_ = unix.Close(dir) // O_PATH: nothing to lose
	}
	return nil
}

// mkdirImplied makes a directory the archive has not named, unless it is there.
func (u *unpacker) mkdirImplied(dir int, base, path string) error {
	err := unix.Mkdirat(dir, base, 0o755)
	hides := false
	if errors.Is(err, unix.EEXIST) {
		if u.layer == nil {
			return nil
		}
		if hides, err = u.clearWhiteout(dir, base, path); err != nil || !hides {
			return err
		}
		err = unix.Mkdirat(dir, base, 0o755)
	}
	if err != nil {
		return err
	}
	// The same count as for an entry: implied directories are inodes too.
	if u.files++; u.files > u.lim.files {
		return sandbox.Errorf(sandbox.ErrTooLarge, "image_too_large", "the archive has over %d entries", u.lim.files)
	}
	if err := unix.Fchmodat(dir, base, impliedMode(path), 0); err != nil || u.layer == nil {
		return err
	}
	return u.impliedInLayer(dir, base, hides)
}

// impliedMode is 0755, but for the mount points, which are there anyway.
func impliedMode(path string) uint32 {
	for _, m := range mountPoints {
		if m.name == path {
			return m.mode
		}
	}
	return 0o755
}

// clear makes room for an entry whose name is taken: the last one wins. A
// directory with something in it is never given up.
func (u *unpacker) clear(dir int, base, name string) error {
	if u.layer != nil {
		if gone, err := u.countOff(dir, base, name); err != nil || gone {
			return err
		}
	}
	err := unix.Unlinkat(dir, base, 0)
	if errors.Is(err, unix.EISDIR) || errors.Is(err, unix.EPERM) {
		var st unix.Stat_t
		if err := unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return &os.PathError{Op: "stat", Path: name, Err: err}
		}
		err = unix.Unlinkat(dir, base, unix.AT_REMOVEDIR)
		delete(u.dirs, st.Ino) // the number will be used again
		if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) {
			return badPath("%.200q: it would replace a directory that the archive filled before", name)
		}
		u.parentPath = "/" // matches no path: the descriptor may be of what is gone
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return &os.PathError{Op: "unlink", Path: name, Err: err}
	}
	return nil
}

func (u *unpacker) mkdir(dir int, base string, hdr *tar.Header) error {
	var was uint32 // the kind of what was there before
	err := unix.Mkdirat(dir, base, 0o700)
	if errors.Is(err, unix.EEXIST) {
		var st unix.Stat_t
		if err = unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW); err == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
			if err := u.clear(dir, base, hdr.Name); err != nil {
				return err
			}
			err = unix.Mkdirat(dir, base, 0o700)
		}
		was = st.Mode & unix.S_IFMT
	}
	if err != nil {
		return &os.PathError{Op: "mkdir", Path: hdr.Name, Err: err}
	}
	fd, err := unix.Openat(dir, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: hdr.Name, Err: err}
	}
	defer unix.Close(fd)
	if u.layer != nil {
		if err := u.dirInLayer(fd, was, hdr); err != nil {
			return err
		}
	}
	return u.setDir(fd, hdr)
}

// setDir gives a directory its owner and mode now and its time in finish,
// after the last change in it.
func (u *unpacker) setDir(fd int, hdr *tar.Header) error {
	var st unix.Stat_t
	err := unix.Fchown(fd, hdr.Uid, hdr.Gid)
	if err == nil {
		err = unix.Fchmod(fd, mode(hdr))
	}
	if err == nil {
		err = unix.Fstat(fd, &st)
	}
	if err != nil {
		return &os.PathError{Op: "set directory", Path: hdr.Name, Err: err}
	}
	if u.layer != nil {
		u.layer.times.add(st.Ino, mtime(hdr.ModTime))
		return u.setXattrs(fd, hdr)
	}
	u.dirs[st.Ino] = mtime(hdr.ModTime)
	return nil
}

// mode returns the permission bits to set. Set-id bits are among them: they
// do nothing, see the package's doc.
func mode(hdr *tar.Header) uint32 { return uint32(hdr.Mode) & 0o7777 }

func mtime(t time.Time) unix.Timespec {
	sec, nsec := t.Unix(), int64(t.Nanosecond())
	if sec < 0 {
		sec, nsec = 0, 0
	}
	if sec > maxMtime {
		sec, nsec = maxMtime, 0
	}
	return unix.Timespec{Sec: sec, Nsec: nsec}
}

func (u *unpacker) symlink(dir int, base string, hdr *tar.Header) error {
	if hdr.Linkname == "" || len(hdr.Linkname) > maxPath || strings.ContainsRune(hdr.Linkname, 0) {
		return badPath("%.200q: a symbolic link to a name of %d bytes", hdr.Name, len(hdr.Linkname))
	}
	if err := u.clear(dir, base, hdr.Name); err != nil {
		return err
	}
	err := unix.Symlinkat(hdr.Linkname, dir, base)
	if errors.Is(err, unix.ENAMETOOLONG) { // on XFS, over 1023 bytes
		return badPath("%.200q: a symbolic link to a name of %d bytes is more than the volume's filesystem takes", hdr.Name, len(hdr.Linkname))
	}
	if err == nil {
		err = unix.Fchownat(dir, base, hdr.Uid, hdr.Gid, unix.AT_SYMLINK_NOFOLLOW)
	}
	if err == nil {
		ts := mtime(hdr.ModTime)
		err = unix.UtimesNanoAt(dir, base, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
	}
	if err != nil {
		return &os.PathError{Op: "symlink", Path: hdr.Name, Err: err}
	}
	if u.layer != nil {
		u.count(0)
		u.layer.dropped += int64(len(entryXattrs(hdr)))
	}
	return nil
}

// link makes a hard link to an entry that came before, as tar demands.
func (u *unpacker) link(dir int, base string, hdr *tar.Header) error {
	parts, err := u.splitTarget(hdr.Linkname)
	if err != nil || len(parts) == 0 {
		return badPath("%.200q: a hard link to %.200q, which is no name of an entry", hdr.Name, hdr.Linkname)
	}
	path := strings.Join(parts[:len(parts)-1], "/")
	if path == "" {
		path = "."
	}
	from, err := u.openBeneath(path)
	if err != nil {
		return badPath("%.200q: a hard link to %.200q, which did not come before it", hdr.Name, hdr.Linkname)
	}
	defer unix.Close(from)
	var target, old unix.Stat_t
	fromBase := parts[len(parts)-1]
	if err := unix.Fstatat(from, fromBase, &target, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return badPath("%.200q: a hard link to %.200q, which did not come before it", hdr.Name, hdr.Linkname)
	}
	if kind := target.Mode & unix.S_IFMT; kind != unix.S_IFREG && kind != unix.S_IFLNK && kind != unix.S_IFIFO {
		return badPath("%.200q: a hard link to %.200q, which is no file", hdr.Name, hdr.Linkname)
	}
	if unix.Fstatat(dir, base, &old, unix.AT_SYMLINK_NOFOLLOW) == nil && old.Ino == target.Ino {
		return nil // linked already, or to itself
	}
	if err := u.clear(dir, base, hdr.Name); err != nil {
		return err
	}
	err = unix.Linkat(from, fromBase, dir, base, 0)
	if errors.Is(err, unix.EMLINK) {
		return sandbox.Errorf(sandbox.ErrTooLarge, "image_too_large", "archive entry %.200q: too many hard links to %.200q", hdr.Name, hdr.Linkname)
	}
	if err != nil {
		return &os.PathError{Op: "link", Path: hdr.Name, Err: err}
	}
	if u.layer != nil {
		u.count(0)
	}
	return nil
}
