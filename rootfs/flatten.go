package rootfs

import (
	"context"
	"fmt"
	"os"
	"path"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Flatten merges layers of the upper form, lowest first, that lie on each
// other in a stack, into one new layer: put in their place, over whatever
// lies below them, it shows the same files. It shares the blocks of its files
// with them. The layers stay. Like CopyUpper, it writes nothing to disk and
// leaves a whole layer or none.
//
// Classes: ErrInvalid for a layer of the other form, ErrNotFound for one that
// is not there, ErrExhausted for a full volume.
func (s *Store) Flatten(ctx context.Context, layers []string) (layer string, err error) {
	if len(layers) == 0 {
		return "", sandbox.Errorf(sandbox.ErrInvalid, "invalid_layer", "no layers to flatten")
	}
	trees := make([]string, len(layers))
	for i, l := range layers {
		if _, err := s.upperLayerDir(l); err != nil {
			return "", err
		}
		if !s.HasLayer(l) {
			return "", sandbox.Errorf(sandbox.ErrNotFound, "no_layer", "there is no layer %s to flatten", l)
		}
		tree, err := layerTree(l)
		if err != nil {
			return "", err
		}
		trees[len(layers)-1-i] = s.vol.path(tree)
	}
	layer = NewUpperLayer()
	err = s.buildUpperLayer(layer, func(tree string) (upperInfo, error) {
		return s.flattenTrees(ctx, trees, tree)
	})
	if err != nil {
		return "", spaceError(fmt.Sprintf("flatten %d layers", len(layers)), err)
	}
	return layer, nil
}

// flattenTrees merges trees, topmost first, into an empty directory.
func (s *Store) flattenTrees(ctx context.Context, trees []string, to string) (upperInfo, error) {
	m, err := newMerger(s.vol.root, trees)
	if err != nil {
		return upperInfo{}, err
	}
	defer m.close()
	f := &flattener{merger: m, w: &copyWorker{copier: newCopier(ctx, s.vol.root)}}
	f.w.drop = f.drop
	err = onCopyThread(func() error { return f.run(to) })
	return upperInfo{Bytes: f.w.bytes.Load(), Files: f.w.files.Load()}, err
}

// flattener copies what a stack of layers shows, with the marks that what
// lies below the stack still needs to see.
type flattener struct {
	*merger
	w    *copyWorker
	todo []flatDir
	odd  string // an attribute that says the file's content is elsewhere
}

// flatDir is a directory to fill, made already.
type flatDir struct {
	mergedDir
	to       handle
	opaque   bool   // nothing below merges with it
	redirect string // what does is not what its name says
}

func (f *flattener) run(to string) error {
	root, err := f.root()
	if err != nil {
		return err
	}
	at, err := handleAt(unix.AT_FDCWD, to)
	if err != nil {
		return err
	}
	f.todo = []flatDir{{mergedDir: root, to: at, opaque: !root.more}}
	for len(f.todo) > 0 {
		d := f.todo[len(f.todo)-1]
		f.todo = f.todo[:len(f.todo)-1]
		if err := f.fill(d); err != nil {
			return err
		}
	}
	return nil
}

func (f *flattener) fill(d flatDir) error {
	o, err := f.open(d.mergedDir)
	if err != nil {
		return err
	}
	defer o.close()
	to, err := d.to.open(f.vol, openDirFlags)
	if err != nil {
		return err
	}
	defer unix.Close(to)
	names := map[string]bool{}
	if err := f.names(o, names); err != nil {
		return err
	}
	for _, n := range sortedNames(names) {
		if err := f.w.ctx.Err(); err != nil {
			return err
		}
		if err := f.entry(o, to, n); err != nil {
			return err
		}
	}
	for name, value := range map[string]string{"opaque": mark(d.opaque), "redirect": d.redirect} {
		if value == "" {
			continue
		}
		if err := unix.Fsetxattr(to, overlayXattr+name, []byte(value), 0); err != nil {
			return &os.PathError{Op: "set " + overlayXattr + name, Path: d.below, Err: err}
		}
	}
	return f.w.dirAttrs(o.fds[0], to)
}

func mark(set bool) string {
	if set {
		return "y"
	}
	return ""
}

func (f *flattener) entry(o *openDir, to int, name string) error {
	e, err := f.lookup(o, name)
	switch {
	case err != nil:
		return err
	case e.dir != nil:
		return f.sub(o, e.dir, to, name)
	case e.found:
		err := f.w.entry(e.tree, e.parent, to, dirent{name: name, kind: unix.DT_UNKNOWN})
		if err == nil && f.odd != "" {
			err = fmt.Errorf("%q has the attribute %s: its content lies in another layer", name, f.odd)
		}
		return err
	case e.hidden && o.more:
		// All names of one node, as an overlay makes them.
		st := unix.Stat_t{Mode: unix.S_IFCHR, Nlink: 1 << 62}
		return f.w.once(linkKey{tree: -1}, &st, to, name, func() error {
			if err := unix.Mknodat(to, name, unix.S_IFCHR, 0); err != nil {
				return &os.PathError{Op: "mknod", Path: name, Err: err}
			}
			return nil
		})
	}
	return nil
}

// sub makes a directory. Left alone, it would go on below as what its name
// says there, if its parent goes on at all.
func (f *flattener) sub(o *openDir, dir *mergedDir, to int, name string) error {
	if err := unix.Mkdirat(to, name, 0o700); err != nil {
		return &os.PathError{Op: "mkdir", Path: name, Err: err}
	}
	at, err := handleAt(to, name)
	if err != nil {
		return err
	}
	d := flatDir{mergedDir: *dir, to: at, opaque: o.more && !dir.more}
	if dir.more && (!o.more || dir.below != path.Join(o.below, name)) {
		d.redirect = "/" + dir.below
		if o.more && path.Dir("/"+dir.below) == path.Clean("/"+o.below) {
			d.redirect = path.Base(dir.below)
		}
	}
	f.todo = append(f.todo, d)
	return nil
}

// drop leaves out what an overlay noted for itself or for the layers below:
// the latter was set anew. An attribute that says the content is elsewhere is
// none that our overlays make (metacopy=off).
func (f *flattener) drop(name string) bool {
	if name == overlayXattr+"metacopy" {
		f.odd = name
	}
	return isOverlayMark(name)
}
