package rootfs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// FreezeUpper makes the upper of a sandbox a layer, in the time of one
// rename: the sandbox's whole directory becomes the layer's. So a crash leaves
// one or the other, never a part, and the files keep the quota project they
// count against. The sandbox has no upper afterwards; CreateUpper makes a new
// one, with a project of its own.
//
// A root still mounted over the upper goes on writing to what is now the
// layer: its writers must be gone or frozen for good. Nothing is written to
// disk here. Until Sync has returned, a host crash may leave files of the
// layer empty.
//
// If the layer is there already, nothing happens. Classes: ErrInvalid for a
// name not of NewUpperLayer's form, ErrNotFound for a sandbox without upper.
func (s *Store) FreezeUpper(id sandbox.ID, layer string) error {
	dir, err := s.sandboxDir(id)
	if err != nil {
		return err
	}
	to, err := s.upperLayerDir(layer)
	if err != nil {
		return err
	}
	if s.HasLayer(layer) {
		return nil
	}
	// CreateUpper may have been cut short before there was an upper.
	if st, err := os.Lstat(filepath.Join(dir, "upper")); err != nil || !st.IsDir() {
		return sandbox.Errorf(sandbox.ErrNotFound, "no_upper", "sandbox %s has no files to freeze: %w", id, errors.Join(err, unix.ENOENT))
	}
	if err := unix.Renameat2(unix.AT_FDCWD, dir, unix.AT_FDCWD, s.vol.path(to), unix.RENAME_NOREPLACE); err != nil {
		return spaceError(fmt.Sprintf("freeze the upper of %s as %s", id, layer), err)
	}
	return nil
}

// upperLayerDir returns the directory of a layer of the upper form, relative
// to the volume.
func (s *Store) upperLayerDir(layer string) (string, error) {
	dir, err := parseLayer(layer)
	if err != nil {
		return "", err
	}
	if !isUpperLayer(layer) {
		return "", sandbox.Errorf(sandbox.ErrInvalid, "invalid_layer", "%.80q is no name for an upper made a layer: want upper: and %d characters", layer, upperRandom)
	}
	return filepath.Join(layersDir, dir), nil
}

// Sync writes all files of the volume to disk, those of layers that
// FreezeUpper, CopyUpper and Flatten made among them.
func (s *Store) Sync() error {
	if err := s.vol.sync(); err != nil {
		return fmt.Errorf("rootfs: write the volume to disk: %w", err)
	}
	return nil
}

// upperInfo is what layer.json says of a layer of the upper form, once its
// files were counted. It is a cache: a layer may be without.
type upperInfo struct {
	Layer string `json:"layer"`
	Bytes int64  `json:"disk_bytes"` // blocks taken, shared ones too
	Files int64  `json:"files"`      // inodes, directories too

	On []string `json:"on,omitempty"` // of a copy: the earlier ones it lies on
}

// upperInfo reads the record of a layer that has one.
func (s *Store) upperInfo(layer string) (info upperInfo, err error) {
	dir, err := s.upperLayerDir(layer)
	if err != nil {
		return info, err
	}
	b, err := os.ReadFile(s.vol.path(dir, "layer.json"))
	if err == nil {
		err = json.Unmarshal(b, &info)
	}
	if err != nil {
		err = fmt.Errorf("rootfs: record of layer %s: %w", layer, err)
	}
	return info, err
}

// LayerUsage returns the bytes a layer takes on disk, as if it shared none,
// and its files, directories among them. For a layer imported from an archive
// these are known. For a frozen upper the quota knows, where there is one;
// else its files are counted, once. Class ErrNotFound: no such layer.
func (s *Store) LayerUsage(ctx context.Context, layer string) (bytes, files int64, err error) {
	dir, err := parseLayer(layer)
	if err != nil {
		return 0, 0, err
	}
	if !s.HasLayer(layer) {
		return 0, 0, sandbox.Errorf(sandbox.ErrNotFound, "no_layer", "there is no layer %s", layer)
	}
	if !isUpperLayer(layer) {
		info, err := s.layer(dir)
		if err != nil {
			return 0, 0, fmt.Errorf("rootfs: usage of layer %s: %w", layer, err)
		}
		return info.Size, info.Files, nil
	}
	info := upperInfo{Layer: layer}
	record := s.vol.path(layersDir, dir, "layer.json")
	if b, err := os.ReadFile(record); err == nil && json.Unmarshal(b, &info) == nil && info.Files > 0 {
		return info.Bytes, info.Files, nil
	}
	if b, n, ok, err := s.projectUsage(s.vol.path(layersDir, dir)); ok || err != nil {
		return int64(b), int64(n), err
	}
	err = s.walkTree(ctx, s.vol.path(layersDir, dir, "upper"), func(st *unix.Stat_t) {
		info.Bytes += st.Blocks * 512
		info.Files++
	})
	if err == nil {
		err = writeRecord(record, info)
	}
	if err != nil {
		return 0, 0, fmt.Errorf("rootfs: usage of layer %s: %w", layer, err)
	}
	return info.Bytes, info.Files, nil
}

// projectUsage returns what the quota counts for a directory; false where
// nothing does.
func (s *Store) projectUsage(dir string) (bytes, inodes uint64, known bool, err error) {
	if !s.vol.quota {
		return 0, 0, false, nil
	}
	project, err := projectOf(dir)
	if err != nil || project == 0 {
		return 0, 0, false, err
	}
	if bytes, inodes, err = linux.ProjectUsage(s.vol.root, project); err != nil {
		return 0, 0, false, fmt.Errorf("rootfs: usage of %s: %w", filepath.Base(dir), err)
	}
	return bytes, inodes, true, nil
}

// writeRecord puts a record in its place whole. The temporary name lies
// beside it: XFS lets nothing be renamed into another quota project.
func writeRecord(path string, info upperInfo) error {
	b, err := json.Marshal(info)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".") // several may count at the same time
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		err = errors.Join(err, os.Remove(f.Name()))
	}
	return err
}

// discardHalfLayers throws away directories of layers without files: none are
// left by what this package does, but one would stand in the way of its name.
func (s *Store) discardHalfLayers() error {
	names, err := readNames(s.vol.path(layersDir))
	if err != nil {
		return fmt.Errorf("rootfs: layers: %w", err)
	}
	for _, n := range names {
		if name, ok := layerName(n); ok && isUpperLayer(name) && !s.HasLayer(name) {
			if err := s.trash.add(filepath.Join(layersDir, n)); err != nil {
				return err
			}
		}
	}
	return nil
}

// inheritRoot gives a new upper, one never mounted, the mode and owner of the
// topmost layer's root, if that was an upper itself. An overlay shows its
// upper's root as "/", so what a sandbox made of "/" would else be lost.
func (s *Store) inheritRoot(p overlayPlan, layers []string) error {
	if !isUpperLayer(layers[len(layers)-1]) {
		return nil
	}
	var was, is unix.Stat_t
	if unix.Lstat(s.vol.path(p.work, "work"), &is) == nil { // an overlay's first act
		return nil
	}
	for path, st := range map[string]*unix.Stat_t{p.lowers[0]: &was, p.upper: &is} {
		if err := unix.Lstat(s.vol.path(path), st); err != nil {
			return nil // the mount tells what is missing
		}
	}
	if was.Mode == is.Mode && was.Uid == is.Uid && was.Gid == is.Gid {
		return nil
	}
	err := unix.Lchown(s.vol.path(p.upper), int(was.Uid), int(was.Gid))
	if err == nil {
		err = unix.Chmod(s.vol.path(p.upper), was.Mode&0o7777)
	}
	if err != nil {
		return &os.PathError{Op: "set mode and owner", Path: p.upper, Err: err}
	}
	return nil
}

// identityFiles are those of /etc that every root gets its own of.
var identityFiles = map[string]bool{"hostname": true, "hosts": true, "resolv.conf": true}

// Unchanged reports whether an upper holds nothing but what every upper gets:
// an /etc as Furnish makes it, with some of the files every root gets its own
// of, whatever these say. It may report false for one that holds no more than
// that, when the image's /etc is an unusual one. Class ErrNotFound: no upper.
func (s *Store) Unchanged(id sandbox.ID) (bool, error) {
	dir, err := s.sandboxDir(id)
	if err != nil {
		return false, err
	}
	upper := filepath.Join(dir, "upper")
	names, err := readNames(upper)
	if errors.Is(err, os.ErrNotExist) {
		return false, sandbox.Errorf(sandbox.ErrNotFound, "no_upper", "sandbox %s has no files: %w", id, err)
	}
	if err != nil {
		return false, fmt.Errorf("rootfs: look for changes of %s: %w", id, err)
	}
	if len(names) > 1 || len(names) == 1 && names[0] != "etc" {
		return false, nil
	}
	for _, d := range append(names, ".") {
		plain, err := plainDir(filepath.Join(upper, d), isOverlayPrivate)
		if err != nil || !plain {
			return false, notGone(err)
		}
	}
	if len(names) == 0 {
		return true, nil
	}
	etc, err := os.ReadDir(filepath.Join(upper, "etc"))
	for _, e := range etc {
		if !identityFiles[e.Name()] || e.IsDir() {
			return false, nil
		}
	}
	return err == nil, notGone(err)
}

// notGone takes what vanished while it was looked at for a change, not for an
// error.
func notGone(err error) error {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	return err
}

// plainDir reports whether a directory is as Furnish and CreateUpper make
// them: 0755, root's, with no attribute that a sandbox sees and, of an
// overlay's, none but those that may is told of.
func plainDir(path string, may func(name string) bool) (bool, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return false, &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	if st.Mode != unix.S_IFDIR|0o755 || st.Uid != 0 || st.Gid != 0 {
		return false, nil
	}
	names, err := listXattrs(func(buf []byte) (int, error) { return unix.Llistxattr(path, buf) })
	if err != nil {
		return false, &os.PathError{Op: "listxattr", Path: path, Err: err}
	}
	for _, n := range names {
		if isVisibleXattr(n) || isOverlayMark(n) && !may(n) {
			return false, nil
		}
	}
	return true, nil
}
