package rootfs

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// ImportLayer unpacks one layer of an OCI image: a tar stream, plain or
// compressed with gzip or zstd. diffID, "sha256:" and the SHA-256 of the plain
// stream, names the layer; a stream that is another one is refused (ErrInvalid,
// image_digest_mismatch). If the layer is there already, r is not read. Cut off
// at any point, by an error or a kill, it leaves no layer.
//
// The rules are those of the OCI image specification (layer.md): ".wh.NAME"
// deletes NAME of the layers below, ".wh..wh..opq" all of a directory, and what
// the layer itself holds stays, in whatever order it comes. They are kept as
// overlay reads them: a character device 0/0, and trusted.overlay.opaque.
//
// A layer is hostile input. Refused, as by ImportTar: what climbs out, leads
// through a symbolic link or links to what the layer does not hold
// (image_bad_path), ids over 65535 (image_bad_id), too much (image_too_large),
// what is cut short (image_truncated) or unsound (image_bad_format). Dropped,
// with a count in the log: device nodes, and extended attributes other than
// user.*, security.capability and POSIX ACLs. Absolute names mean names beneath
// the root. Memory stays bounded whatever the layer holds.
func (s *Store) ImportLayer(ctx context.Context, diffID string, r io.Reader) (LayerInfo, error) {
	hex, err := parseLayer(diffID)
	if err != nil {
		return LayerInfo{}, err
	}
	if isUpperLayer(diffID) {
		return LayerInfo{}, sandbox.Errorf(sandbox.ErrInvalid, "invalid_digest", "%.80q is no digest of a layer's archive: want sha256: and 64 hexadecimal digits", diffID)
	}
	sandbox.HoldLayers(ctx, diffID)
	if info, err := s.layer(hex); err == nil {
		return info, nil
	}
	return s.stageLayer(ctx, func(root *os.File) (LayerInfo, error) {
		// Another import of the same layer may have come first.
		if info, err := s.layer(hex); err == nil {
			return info, nil
		}
		return unpackLayer(ctx, root, diffID, r, s.importLimits())
	})
}

// unpackLayer unpacks a layer into the empty directory root.
func unpackLayer(ctx context.Context, root *os.File, diffID string, r io.Reader, lim importLimits) (LayerInfo, error) {
	stream, closeStream, err := openArchive(ctx, r, lim)
	if err != nil {
		return LayerInfo{}, err
	}
	defer closeStream()
	stream.sum = sha256.New()
	u := newUnpacker(root, lim)
	defer u.close()
	u.layer = &layerState{}
	if err := u.unpack(stream); err != nil {
		return LayerInfo{}, tarError(err)
	}
	if got := digestPrefix + hex.EncodeToString(stream.sum.Sum(nil)); got != diffID {
		return LayerInfo{}, sandbox.Errorf(sandbox.ErrInvalid, "image_digest_mismatch", "the layer is %s, not %s: it was damaged or exchanged on its way; fetch it again", got, diffID)
	}
	u.forgetParent()
	if err := u.finishLayer(ctx); err != nil {
		return LayerInfo{}, tarError(err)
	}
	if u.layer.devices > 0 || u.layer.dropped > 0 {
		slog.Info("layer import left things out", "layer", diffID, "device_nodes", u.layer.devices, "extended_attributes", u.layer.dropped)
	}
	return LayerInfo{Digest: diffID, Size: u.size, Files: u.kept, Created: time.Now().UTC(), Deletes: u.layer.deletes}, nil
}

// layerState is what an unpacker keeps of a layer: nothing that grows with
// the number or the length of names.
type layerState struct {
	times   dirTimes
	acl     bool  // some directory hands an ACL down to what is made in it
	devices int64 // left out
	dropped int64 // extended attributes left out

	deletes   []string // directories with whiteouts, up to a bound
	deletesSz int
}

// Bounds of what is remembered of directories with whiteouts.
const (
	maxDeletes    = 64 << 10 // bytes of names together
	maxDeletePath = 1 << 10
)

// Marks that the name of an entry can be, with what they begin.
const (
	opaqueName = ".wh..wh..opq"
	aufsPrefix = ".wh..wh." // what aufs kept for itself
)

type entryMark int

const (
	markNone     entryMark = iota
	markWhiteout           // parts name what is deleted
	markOpaque             // parts name the directory
	markIgnore
)

// splitLayerPath is splitPath for layers. Names that begin with a slash are
// beneath the root, as for everybody who unpacks layers.
func splitLayerPath(name string) ([]string, entryMark, error) {
	parts, err := splitName(name)
	if err != nil {
		return nil, markNone, err
	}
	for i, p := range parts {
		deleted, marked := strings.CutPrefix(p, whiteoutName)
		last := i == len(parts)-1
		switch {
		case !marked:
			continue
		case last && p == opaqueName:
			return parts[:i], markOpaque, nil
		case strings.HasPrefix(p, aufsPrefix):
			return nil, markIgnore, nil
		case !last:
			return nil, markNone, badPath("%.200q: it lies beneath a deletion mark", name)
		case deleted == "" || deleted == "." || deleted == "..":
			return nil, markNone, badPath("%.200q: a deletion mark that names no file", name)
		}
		return append(parts[:i:i], deleted), markWhiteout, nil
	}
	return parts, markNone, nil
}

// splitTarget splits the target of a hard link.
func (u *unpacker) splitTarget(name string) ([]string, error) {
	if u.layer == nil {
		return splitPath(name)
	}
	parts, mark, err := splitLayerPath(name)
	if err == nil && mark != markNone {
		err = badPath("a link to the deletion mark %.200q", name)
	}
	return parts, err
}

// layerEntry is entry for layers.
func (u *unpacker) layerEntry(hdr *tar.Header, content io.Reader) error {
	parts, mark, err := splitLayerPath(hdr.Name)
	if err != nil {
		return err
	}
	switch mark {
	case markIgnore:
		return nil
	case markWhiteout:
		dir, base, err := u.openParent(hdr.Name, parts)
		if err != nil {
			return err
		}
		return u.whiteout(dir, base, hdr.Name)
	case markOpaque:
		dir, _, err := u.openParent(hdr.Name, append(parts, opaqueName))
		if err != nil {
			return err
		}
		return setOpaque(dir, ".", hdr.Name)
	}
	switch hdr.Typeflag {
	case tar.TypeChar, tar.TypeBlock:
		u.layer.devices++ // sandboxes bring their own /dev
		return nil
	case tar.TypeReg, tar.TypeDir, tar.TypeSymlink, tar.TypeLink, tar.TypeGNUSparse, tar.TypeFifo:
		return u.write(parts, hdr, content)
	}
	return sandbox.Errorf(sandbox.ErrInvalid, "image_bad_format", "archive entry %.200q is of the unknown kind %q", hdr.Name, hdr.Typeflag)
}

// isWhiteout tells the mark that hides a name of the layers below
// (Documentation/filesystems/overlayfs.rst).
func isWhiteout(st *unix.Stat_t) bool {
	return st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0
}

// whiteout deletes a name of the layers below. It does not touch what this
// layer has under that name, but for a directory: that must not be joined
// with the one below.
func (u *unpacker) whiteout(dir int, base, name string) error {
	var st unix.Stat_t
	err := unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case errors.Is(err, unix.ENOENT):
		if err := unix.Mknodat(dir, base, unix.S_IFCHR, 0); err != nil {
			return &os.PathError{Op: "mknod", Path: name, Err: err}
		}
		u.count(0)
		return nil
	case err != nil:
		return &os.PathError{Op: "stat", Path: name, Err: err}
	case st.Mode&unix.S_IFMT == unix.S_IFDIR:
		return setOpaque(dir, base, name)
	}
	return nil
}

const overlayOpaque = "trusted.overlay.opaque"

// setOpaque hides what layers below have in a directory.
func setOpaque(dir int, base, name string) error {
	fd, err := unix.Openat(dir, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: name, Err: err}
	}
	defer unix.Close(fd)
	return markOpaqueDir(fd, name)
}

func markOpaqueDir(fd int, name string) error {
	if err := unix.Fsetxattr(fd, overlayOpaque, []byte("y"), 0); err != nil {
		return &os.PathError{Op: "mark opaque", Path: name, Err: err}
	}
	return nil
}

// count adds a new file of so many bytes to what the layer holds.
func (u *unpacker) count(bytes int64) { u.kept++; u.size += bytes }

// countOff takes what is about to be removed off the count; gone: there is
// nothing to remove.
func (u *unpacker) countOff(dir int, base, name string) (gone bool, err error) {
	var st unix.Stat_t
	err = unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return true, nil
	}
	if err != nil {
		return false, &os.PathError{Op: "stat", Path: name, Err: err}
	}
	u.kept--
	if st.Mode&unix.S_IFMT == unix.S_IFREG && st.Nlink == 1 {
		u.size -= st.Size
	}
	return false, nil
}

// clearWhiteout removes a whiteout that is in the way of a directory. It
// reports false for anything else.
func (u *unpacker) clearWhiteout(dir int, base, name string) (bool, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return false, &os.PathError{Op: "stat", Path: name, Err: err}
	}
	if !isWhiteout(&st) {
		return false, nil
	}
	return true, u.clear(dir, base, name)
}

// impliedInLayer completes a directory that mkdirImplied made in place of a
// whiteout or of nothing.
func (u *unpacker) impliedInLayer(dir int, base string, hides bool) error {
	fd, err := unix.Openat(dir, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	u.count(0)
	u.layer.times.add(st.Ino, unix.Timespec{}) // the number may have been another's
	if err := u.forgetACL(fd, true, base); err != nil || !hides {
		return err
	}
	return markOpaqueDir(fd, base)
}

// dirInLayer completes a directory that mkdir made or found; was is the kind
// of what had the name before.
func (u *unpacker) dirInLayer(fd int, was uint32, hdr *tar.Header) error {
	switch was {
	case unix.S_IFDIR: // named again: the last entry counts
		return forgetXattrs(fd, hdr.Name)
	case 0:
		u.count(0)
		return u.forgetACL(fd, true, hdr.Name)
	}
	// Whatever it was, it hid the directory of a layer below.
	u.count(0)
	return errors.Join(u.forgetACL(fd, true, hdr.Name), markOpaqueDir(fd, hdr.Name))
}

func (u *unpacker) fifo(dir int, base string, hdr *tar.Header) error {
	if err := u.clear(dir, base, hdr.Name); err != nil {
		return err
	}
	err := unix.Mknodat(dir, base, unix.S_IFIFO|0o600, 0)
	if err == nil {
		err = unix.Fchownat(dir, base, hdr.Uid, hdr.Gid, unix.AT_SYMLINK_NOFOLLOW)
	}
	if err == nil {
		err = unix.Fchmodat(dir, base, mode(hdr), 0)
	}
	if err == nil {
		ts := mtime(hdr.ModTime)
		err = unix.UtimesNanoAt(dir, base, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
	}
	if err != nil {
		return &os.PathError{Op: "mkfifo", Path: hdr.Name, Err: err}
	}
	u.count(0)
	u.layer.dropped += int64(len(entryXattrs(hdr)))
	return nil
}

// dirTimes collects the times of directories, which can be set only after
// the last change in each: 24 bytes a directory, in pieces, so that growing
// never copies.
type dirTimes struct{ pieces [][]dirTime }

type dirTime struct {
	ino  uint64
	sec  int64
	nsec int32
	seq  uint32 // the later record of a number counts
}

const (
	dirTimesPiece = 16 << 10
	timesBatch    = 256 // names in memory, for each directory on the way down
)

func (d *dirTimes) add(ino uint64, ts unix.Timespec) {
	n := len(d.pieces)
	if n == 0 || len(d.pieces[n-1]) == dirTimesPiece {
		d.pieces = append(d.pieces, make([]dirTime, 0, dirTimesPiece))
		n++
	}
	seq := uint32((n-1)*dirTimesPiece + len(d.pieces[n-1]))
	d.pieces[n-1] = append(d.pieces[n-1], dirTime{ino: ino, sec: ts.Sec, nsec: int32(ts.Nsec), seq: seq})
}

// sort puts the records of each piece in order of number, the latest first.
func (d *dirTimes) sort() {
	for _, p := range d.pieces {
		slices.SortFunc(p, func(a, b dirTime) int {
			switch {
			case a.ino != b.ino && a.ino < b.ino, a.ino == b.ino && a.seq > b.seq:
				return -1
			case a == b:
				return 0
			}
			return 1
		})
	}
}

// find returns the latest record of a number; sort must have come before.
func (d *dirTimes) find(ino uint64) (unix.Timespec, bool) {
	for _, p := range slices.Backward(d.pieces) { // the last piece is the latest
		i, _ := slices.BinarySearchFunc(p, ino, func(t dirTime, ino uint64) int {
			if t.ino < ino {
				return -1
			}
			return 1 // never equal: the first of several is wanted
		})
		if i < len(p) && p[i].ino == ino {
			return unix.Timespec{Sec: p[i].sec, Nsec: int64(p[i].nsec)}, true
		}
	}
	return unix.Timespec{}, false
}

// finishLayer sets the time of every directory: the one recorded, or zero for
// those the archive only implied. It also removes whiteouts beneath what is
// opaque: there is nothing to delete, and an overlay would show their names.
func (u *unpacker) finishLayer(ctx context.Context) error {
	u.layer.times.sort()
	top, err := openDirAt(u.root, ".")
	if err != nil {
		return err
	}
	defer top.Close()
	if err := u.finishDir(ctx, top, "", false); err != nil {
		return err
	}
	for _, d := range u.layer.deletes {
		if err := os.MkdirAll(filepath.Join(filepath.Dir(u.root.Name()), mateDir, d), 0o755); err != nil {
			return err
		}
	}
	return nil
}

func (u *unpacker) finishDir(ctx context.Context, dir *os.File, path string, opaque bool) error {
	deletes := false
	if !opaque {
		mark, err := getXattr(int(dir.Fd()), overlayOpaque)
		if err != nil {
			return err
		}
		opaque = mark != nil
	}
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		ents, err := dir.ReadDir(timesBatch)
		for _, e := range ents {
			// The only devices there are.
			deletes = deletes || e.Type()&os.ModeCharDevice != 0
			if err := u.finishEntry(ctx, dir, e, join(path, e.Name()), opaque); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	if deletes && !opaque && path != "" && len(path) <= maxDeletePath && u.layer.deletesSz+len(path) <= maxDeletes {
		u.layer.deletes = append(u.layer.deletes, path)
		u.layer.deletesSz += len(path)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return &os.PathError{Op: "stat", Path: dir.Name(), Err: err}
	}
	ts, _ := u.layer.times.find(st.Ino)
	if err := unix.UtimesNanoAt(int(dir.Fd()), ".", []unix.Timespec{ts, ts}, 0); err != nil {
		return &os.PathError{Op: "set time", Path: dir.Name(), Err: err}
	}
	return nil
}

func (u *unpacker) finishEntry(ctx context.Context, dir *os.File, e os.DirEntry, path string, opaque bool) error {
	switch {
	case e.IsDir():
		sub, err := openDirAt(dir, e.Name())
		if err != nil {
			return err
		}
		defer sub.Close()
		return u.finishDir(ctx, sub, path, opaque)
	case opaque && e.Type()&os.ModeCharDevice != 0:
		return u.clear(int(dir.Fd()), e.Name(), e.Name())
	}
	return nil
}
