package rootfs

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// ExportLayer writes layer i of a stack, given lowest first, as a layer of an
// OCI image: a plain tar stream in pax format, sorted by name. It returns the
// stream's digest, which is the layer's diffID. The same layer gives the same
// bytes, but not the bytes it was imported from.
//
// A directory that a sandbox renamed is written with all it shows in the
// stack, for an image cannot say "as over there". The files of /etc that every
// root gets its own of are left out of layers made of an upper. Sockets and
// device nodes have no place in an image. With a nil w it writes nothing and
// reads no contents: it says whether the layer can be exported.
//
// Classes: ErrInvalid for an i or a layer that is none, and for names that
// mean something else in an image (layer_bad_name); ErrNotFound for a layer
// that is gone; ErrTooLarge for trees too deep to be unpacked anywhere and for
// too many hard links.
func (s *Store) ExportLayer(ctx context.Context, stack []string, i int, w io.Writer) (diffID string, err error) {
	if i < 0 || i >= len(stack) {
		return "", sandbox.Errorf(sandbox.ErrInvalid, "image_layers", "layer %d of a stack of %d", i, len(stack))
	}
	tree, err := layerTree(stack[i])
	if err != nil {
		return "", err
	}
	if !s.HasLayer(stack[i]) {
		return "", sandbox.Errorf(sandbox.ErrNotFound, "no_layer", "layer %s is not there", stack[i])
	}
	e := exporter{ctx: ctx, layer: true, noIdentity: isUpperLayer(stack[i])}
	e.view = func() (*os.File, error) { return s.openView(stack[:i+1]) }
	diffID, err = e.export(w, func() (*os.File, error) { return os.Open(s.vol.path(tree)) })
	if err != nil {
		return "", fmt.Errorf("rootfs: export layer %s: %w", stack[i], err)
	}
	return diffID, nil
}

// ExportUpper is ExportLayer for the present upper of a sandbox that lies over
// the stack. The caller keeps the sandbox from writing meanwhile; if it does
// not, the export may fail with class ErrConflict, or mix two states.
func (s *Store) ExportUpper(ctx context.Context, id sandbox.ID, stack []string, w io.Writer) (diffID string, err error) {
	if _, err := s.sandboxDir(id); err != nil {
		return "", err
	}
	upper := filepath.Join(sandboxesDir, string(id), "upper")
	if _, err := os.Lstat(s.vol.path(upper)); errors.Is(err, os.ErrNotExist) {
		return "", sandbox.Errorf(sandbox.ErrNotFound, "no_upper", "sandbox %s has no files: %w", id, err)
	}
	e := exporter{ctx: ctx, layer: true, noIdentity: true}
	e.view = func() (*os.File, error) { return s.openView(stack, upper) }
	diffID, err = e.export(w, func() (*os.File, error) { return os.Open(s.vol.path(upper)) })
	if err != nil {
		return "", fmt.Errorf("rootfs: export the files of %s: %w", id, err)
	}
	return diffID, nil
}

// ExportTree writes what a stack, given lowest first, shows as a whole: one
// tar of a root file system, as ImportTar takes it. Where the stack holds an
// upper, the files of /etc that every root gets its own of are left out. A nil
// w is as in ExportLayer.
func (s *Store) ExportTree(ctx context.Context, stack []string, w io.Writer) error {
	e := exporter{ctx: ctx, noIdentity: slices.ContainsFunc(stack, isUpperLayer)}
	if _, err := e.export(w, func() (*os.File, error) { return s.openView(stack) }); err != nil {
		return fmt.Errorf("rootfs: export a tree of %d layers: %w", len(stack), err)
	}
	return nil
}

// openView opens the root of a read-only view of a stack, with directories
// over it. Nothing else holds the view.
func (s *Store) openView(stack []string, above ...string) (*os.File, error) {
	p, err := s.planView(stack, above...)
	if err != nil {
		return nil, err
	}
	mount, err := s.mountView(p)
	if err != nil {
		return nil, err
	}
	defer mount.Close() // the descriptor below keeps it
	fd, err := unix.Openat(int(mount.Fd()), ".", openDirFlags, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: "a view of layers", Err: err}
	}
	return os.NewFile(uintptr(fd), "view"), nil
}

// exporter writes one tree as a tar stream.
type exporter struct {
	ctx        context.Context //nolint:containedctx // lives as long as one export
	layer      bool            // deletions are written as marks
	dry        bool            // contents are not read
	noIdentity bool
	view       func() (*os.File, error) // opens what the stack shows, for redirects

	tw     *tar.Writer
	shown  *os.File // opened by view
	links  map[uint64]linked
	linkSz int // bytes of the names in links
	buf    []byte
	dirs   dirReader
	left   int64 // sockets and device nodes
}

// linked is the first name of a file that has several.
type linked struct {
	path  string
	size  int64
	mtime unix.Timespec
	more  uint64 // names not yet seen
}

const (
	maxLinkNames = 64 << 20 // bytes of names remembered for hard links
	exportNames  = 64 << 10 // names read ahead, at most, in the root
	exportBuf    = 128 << 10
)

// export writes all of the tree that open opens.
func (e *exporter) export(w io.Writer, open func() (*os.File, error)) (string, error) {
	return e.exportWith(w, open, func(root *os.File) error { return e.dir(int(root.Fd()), "", 0, !e.layer) })
}

// exportWith writes what content does of it.
func (e *exporter) exportWith(w io.Writer, open func() (*os.File, error), content func(root *os.File) error) (string, error) {
	if w == nil {
		e.dry, w = true, io.Discard
	}
	sum := sha256.New()
	e.tw = tar.NewWriter(io.MultiWriter(w, sum))
	e.links = map[uint64]linked{}
	e.buf = make([]byte, exportBuf)
	root, err := open()
	if err != nil {
		return "", err
	}
	defer root.Close()
	defer func() {
		if e.shown != nil {
			_ = e.shown.Close() // read only
		}
	}()
	if err := content(root); err != nil {
		return "", exportError(err)
	}
	if err := e.tw.Close(); err != nil {
		return "", err
	}
	if e.left > 0 {
		slog.Info("export left out sockets and device nodes", "files", e.left)
	}
	return digestPrefix + hex.EncodeToString(sum.Sum(nil)), nil
}

// exportError gives what a sandbox can cause its class.
func exportError(err error) error {
	switch {
	case errors.Is(err, tar.ErrFieldTooLong):
		return sandbox.Errorf(sandbox.ErrTooLarge, "export_too_large", "a file has more extended attributes than an archive can say: %w", err)
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		return errChanged(err)
	}
	return err
}

func errChanged(err error) error {
	return sandbox.Errorf(sandbox.ErrConflict, "export_changed", "files changed while they were read: pause or stop the sandbox first: %w", err)
}

// dir writes a directory and what is in it. plain: what is in it is what it
// shows, as in a view; else it is a layer's, with marks.
func (e *exporter) dir(fd int, path string, depth int, plain bool) error {
	if depth > maxDepth || len(path) > maxPath {
		return sandbox.Errorf(sandbox.ErrTooLarge, "export_too_large", "%.80q…: directories over %d deep, or names over %d bytes long, can be unpacked nowhere: remove them", path, maxDepth, maxPath)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &os.PathError{Op: "stat", Path: path, Err: err}
	}
	hdr := header(path+"/", tar.TypeDir, &st)
	if path == "" {
		hdr.Name = "./"
	}
	if err := e.write(hdr, fd); err != nil {
		return err
	}
	if !plain {
		redirect, err := getXattr(fd, "trusted.overlay.redirect")
		if err != nil {
			return err
		}
		opaque, err := getXattr(fd, overlayOpaque)
		if err != nil {
			return err
		}
		if string(opaque) == "y" || len(redirect) > 0 {
			if err := e.mark(join(path, opaqueName)); err != nil {
				return err
			}
		}
		if len(redirect) > 0 {
			shown, err := e.openShown(path)
			if err != nil {
				return err
			}
			defer unix.Close(shown)
			fd, plain = shown, true
		}
	}
	return e.entries(fd, path, depth, plain)
}

func (e *exporter) entries(fd int, path string, depth int, plain bool) error {
	last, more := "", true
	for more {
		var names []string
		var err error
		if names, more, err = e.names(fd, last, exportNames/(depth+1)); err != nil {
			return &os.PathError{Op: "read directory", Path: path, Err: err}
		}
		for _, n := range names {
			if err := e.ctx.Err(); err != nil {
				return err
			}
			if err := e.entry(fd, n, join(path, n), depth, plain); err != nil {
				return err
			}
			last = n
		}
	}
	return nil
}

// names returns the next names of a directory in order of their bytes, about
// limit of them; more tells that others follow. So a directory of a million
// names is read a few times over rather than held in memory.
func (e *exporter) names(fd int, after string, limit int) (names []string, more bool, err error) {
	if _, err := unix.Seek(fd, 0, io.SeekStart); err != nil {
		return nil, false, err
	}
	cut := func() {
		slices.Sort(names)
		if len(names) > limit {
			clear(names[limit:])
			names, more = names[:limit], true
		}
	}
	err = e.dirs.each(fd, func(d dirent) error {
		if after != "" && d.name <= after {
			return nil
		}
		if names = append(names, d.name); len(names) >= 2*limit {
			cut()
		}
		return nil
	})
	cut()
	return names, more, err
}

func join(dir, name string) string {
	if dir == "" {
		return name
	}
	return dir + "/" + name
}

// openShown opens what a directory of a layer shows in its stack.
func (e *exporter) openShown(path string) (int, error) {
	if e.shown == nil {
		shown, err := e.view()
		if err != nil {
			return -1, err
		}
		e.shown = shown
	}
	fd, err := linux.OpenBeneath(int(e.shown.Fd()), path, openDirFlags, 0, unix.RESOLVE_BENEATH|unix.RESOLVE_NO_SYMLINKS)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return fd, nil
}

func (e *exporter) entry(dir int, name, path string, depth int, plain bool) error {
	if e.noIdentity && filepath.Dir(path) == "etc" && identityFiles[name] {
		return nil
	}
	var st unix.Stat_t
	err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if plain && errors.Is(err, unix.ENOENT) {
		// A whiteout in a directory that only one layer has: an overlay
		// shows its name.
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if !plain && isWhiteout(&st) {
		return e.mark(strings.TrimSuffix(path, name) + whiteoutName + name)
	}
	if e.layer && strings.HasPrefix(name, whiteoutName) {
		return sandbox.Errorf(sandbox.ErrInvalid, "layer_bad_name", "file %.200q: in a layer of an image, names that begin with %s mean deletions: rename it first", path, whiteoutName)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		sub, err := unix.Openat(dir, name, openDirFlags, 0)
		if err != nil {
			return &os.PathError{Op: "open", Path: path, Err: err}
		}
		defer unix.Close(sub)
		return e.dir(sub, path, depth+1, plain)
	case unix.S_IFREG:
		return e.file(dir, name, path)
	case unix.S_IFLNK:
		return e.symlink(dir, name, path, &st)
	case unix.S_IFIFO:
		if done, err := e.link(path, &st); done || err != nil {
			return err
		}
		return e.tw.WriteHeader(header(path, tar.TypeFifo, &st))
	}
	e.left++
	return nil
}

func header(path string, kind byte, st *unix.Stat_t) *tar.Header {
	return &tar.Header{
		Typeflag: kind, Name: path, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid),
		ModTime: time.Unix(st.Mtim.Sec, st.Mtim.Nsec), Format: tar.FormatPAX,
	}
}

// mark writes a deletion mark.
func (e *exporter) mark(path string) error {
	return e.tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: path, Mode: 0o600, ModTime: time.Unix(0, 0), Format: tar.FormatPAX})
}

// write writes a header with the attributes of the open file.
func (e *exporter) write(hdr *tar.Header, fd int) error {
	names, err := listXattrs(func(buf []byte) (int, error) { return unix.Flistxattr(fd, buf) })
	if err != nil {
		return &os.PathError{Op: "listxattr", Path: hdr.Name, Err: err}
	}
	for _, n := range names {
		if !keepsXattr(n) {
			continue
		}
		value, err := getXattr(fd, n)
		if err != nil {
			return &os.PathError{Op: "getxattr", Path: hdr.Name, Err: err}
		}
		if value == nil {
			continue // gone meanwhile
		}
		if strings.Contains(n, "=") {
			return sandbox.Errorf(sandbox.ErrInvalid, "layer_bad_name", "file %.200q: an archive cannot hold the extended attribute %.80q: rename it first", hdr.Name, n)
		}
		if hdr.PAXRecords == nil {
			hdr.PAXRecords = map[string]string{}
		}
		hdr.PAXRecords[xattrRecord+n] = string(value)
	}
	return e.tw.WriteHeader(hdr)
}

// link writes a further name of a file that was written; done tells that.
func (e *exporter) link(path string, st *unix.Stat_t) (done bool, err error) {
	if st.Nlink < 2 {
		return false, nil
	}
	first, ok := e.links[st.Ino]
	if !ok {
		if e.linkSz += len(path); e.linkSz > maxLinkNames {
			return false, sandbox.Errorf(sandbox.ErrTooLarge, "export_too_large", "more hard links than can be kept in mind (%d bytes of names)", maxLinkNames)
		}
		e.links[st.Ino] = linked{path: path, size: st.Size, mtime: st.Mtim, more: uint64(st.Nlink) - 1}
		return false, nil
	}
	if first.size != st.Size || first.mtime != st.Mtim {
		return false, nil // a number that two files of a view have
	}
	if first.more--; first.more == 0 {
		delete(e.links, st.Ino)
		e.linkSz -= len(first.path)
	} else {
		e.links[st.Ino] = first
	}
	hdr := header(path, tar.TypeLink, st)
	hdr.Linkname = first.path
	return true, e.tw.WriteHeader(hdr)
}

func (e *exporter) symlink(dir int, name, path string, st *unix.Stat_t) error {
	if done, err := e.link(path, st); done || err != nil {
		return err
	}
	n, err := unix.Readlinkat(dir, name, e.buf[:maxPath+1])
	if err != nil {
		return &os.PathError{Op: "readlink", Path: path, Err: err}
	}
	hdr := header(path, tar.TypeSymlink, st)
	hdr.Linkname = string(e.buf[:n])
	return e.tw.WriteHeader(hdr)
}

func (e *exporter) file(dir int, name, path string) error {
	// Should it be exchanged for a pipe just now, opening must not wait.
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return errChanged(fmt.Errorf("%.200q is no file any more", path))
	}
	if done, err := e.link(path, &st); done || err != nil {
		return err
	}
	hdr := header(path, tar.TypeReg, &st)
	if !e.dry {
		hdr.Size = st.Size
	}
	if err := e.write(hdr, fd); err != nil || e.dry {
		return err
	}
	content := &countReader{ctx: e.ctx, r: io.LimitReader(f, st.Size), max: 1<<63 - 1}
	n, err := io.CopyBuffer(onlyWriter{e.tw}, content, e.buf)
	if err != nil {
		return err
	}
	if n < st.Size {
		return errChanged(fmt.Errorf("%.200q shrank: %w", path, io.ErrUnexpectedEOF))
	}
	return nil
}

// onlyWriter keeps io.Copy to the buffer it was given.
type onlyWriter struct{ io.Writer }
