package rootfs

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash"
	"io"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// mountPoints are the directories a sandbox's own mounts go to; every layer
// that can be the bottom of an image has them.
var mountPoints = []struct {
	name string
	mode uint32
}{{"dev", 0o755}, {"etc", 0o755}, {"proc", 0o755}, {"sys", 0o755}, {"tmp", 0o1777}}

// finish adds missing mount points, sets the times of directories, and
// digests the tree as it now lies on disk.
//
// The digest is the SHA-256 of a listing in the order of a walk that sorts
// each directory by byte value: for every entry its kind, path, mode, ids and
// time, and then a file's size and content digest, a symbolic link's target,
// or, for a second name of a file, the first one. So it depends on the content
// alone: not on the archive's order, compression or dialect.
func (u *unpacker) finish() (string, error) {
	u.forgetParent()
	for _, m := range mountPoints {
		if err := u.ensureDir(m.name, m.mode); err != nil {
			return "", err
		}
	}
	if err := u.checkForeign(); err != nil {
		return "", err
	}
	h := sha256.New()
	h.Write([]byte("sandboxd layer 1\n"))
	root, err := openDirAt(u.root, ".")
	if err != nil {
		return "", err
	}
	defer root.Close()
	l := lister{u: u, h: h, first: map[uint64]string{}}
	if err := l.dir(root, ""); err != nil {
		return "", err
	}
	return digestPrefix + hex.EncodeToString(h.Sum(nil)), nil
}

func (u *unpacker) ensureDir(name string, mode uint32) error {
	root := int(u.root.Fd())
	err := unix.Mkdirat(root, name, mode)
	switch err {
	case nil:
		err = unix.Fchmodat(root, name, mode, 0)
	case unix.EEXIST:
		var st unix.Stat_t
		if err = unix.Fstatat(root, name, &st, unix.AT_SYMLINK_NOFOLLOW); err == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return badPath("%q: it must be a directory, a sandbox mounts or writes there", name)
		}
	}
	if err != nil {
		return &os.PathError{Op: "mkdir", Path: name, Err: err}
	}
	return nil
}

// checkForeign tells archives of images from archives of file systems: the
// former unpack well and make a sandbox without a single program.
func (u *unpacker) checkForeign() error {
	is := func(name string) bool {
		var st unix.Stat_t
		return unix.Fstatat(int(u.root.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil
	}
	if is("oci-layout") || is("manifest.json") && (is("blobs") || is("repositories") || u.listsImages("manifest.json")) {
		return sandbox.Errorf(sandbox.ErrInvalid, "image_bad_format", "this is an archive of an image, not of a file system, and its first file is none by which it is known: write it anew, as by skopeo copy docker-archive:FILE oci-archive:NEW")
	}
	return nil
}

// listsImages tells the manifest.json of docker save from any other.
func (u *unpacker) listsImages(name string) bool {
	fd, err := unix.Openat(int(u.root.Fd()), name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	var all []struct {
		Config string
		Layers []string
	}
	return json.NewDecoder(io.LimitReader(f, 4<<20)).Decode(&all) == nil && len(all) > 0 && all[0].Config != "" && all[0].Layers != nil
}

// lister writes the listing of a tree into a hash.
type lister struct {
	u     *unpacker
	h     hash.Hash
	first map[uint64]string // of files with several names, by inode
	buf   []byte
}

func (l *lister) dir(d *os.File, path string) error {
	names, err := d.Readdirnames(-1)
	if err != nil {
		return err
	}
	slices.Sort(names)
	var st unix.Stat_t
	if err := unix.Fstat(int(d.Fd()), &st); err != nil {
		return &os.PathError{Op: "stat", Path: path, Err: err}
	}
	ts := l.u.dirs[st.Ino] // zero for directories the archive only implied
	st.Mtim = ts
	l.begin('d', path, &st)
	l.end()
	for _, n := range names {
		if err := l.entry(d, n, path+"/"+n); err != nil {
			return err
		}
	}
	if err := unix.UtimesNanoAt(int(d.Fd()), ".", []unix.Timespec{ts, ts}, 0); err != nil {
		return &os.PathError{Op: "set time", Path: path, Err: err}
	}
	return nil
}

func (l *lister) entry(d *os.File, name, path string) error {
	var st unix.Stat_t
	if err := unix.Fstatat(int(d.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &os.PathError{Op: "stat", Path: path, Err: err}
	}
	l.u.kept++
	switch kind := st.Mode & unix.S_IFMT; kind {
	case unix.S_IFDIR:
		sub, err := openDirAt(d, name)
		if err != nil {
			return err
		}
		defer sub.Close()
		return l.dir(sub, path)
	case unix.S_IFREG, unix.S_IFLNK:
		if first, ok := l.first[st.Ino]; ok {
			l.begin('h', path, &st)
			l.str(first)
			l.end()
			return nil
		}
		if st.Nlink > 1 {
			l.first[st.Ino] = path
		}
		if kind == unix.S_IFREG {
			sum := l.u.sums[st.Ino]
			l.u.size += st.Size
			l.begin('f', path, &st)
			l.num(uint64(st.Size))
			l.str(string(sum[:]))
			l.end()
			return nil
		}
		target := make([]byte, maxPath+1)
		n, err := unix.Readlinkat(int(d.Fd()), name, target)
		if err != nil {
			return &os.PathError{Op: "readlink", Path: path, Err: err}
		}
		l.begin('l', path, &st)
		l.str(string(target[:n]))
		l.end()
		return nil
	}
	return fmt.Errorf("rootfs: staged %s is of the unexpected mode %o", path, st.Mode)
}

func (l *lister) num(n uint64) { l.buf = binary.BigEndian.AppendUint64(l.buf, n) }
func (l *lister) str(s string) { l.num(uint64(len(s))); l.buf = append(l.buf, s...) }
func (l *lister) end()         { l.h.Write(l.buf) }
func (l *lister) begin(kind byte, path string, st *unix.Stat_t) {
	l.buf = append(l.buf[:0], kind)
	l.str(path)
	l.num(uint64(st.Mode & 0o7777))
	l.num(uint64(st.Uid))
	l.num(uint64(st.Gid))
	l.num(uint64(st.Mtim.Sec))
	l.num(uint64(st.Mtim.Nsec))
}
