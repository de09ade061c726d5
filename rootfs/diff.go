package rootfs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Change is one file that differs between two stacks.
type Change = sandbox.FileChange

// Diff calls emit for every file that differs between two stacks of layers,
// each lowest first, ordered by path. With upper, that sandbox's upper as it
// is now lies on top of to. An error of emit ends the comparison and is
// returned.
//
// Files are the same if type, mode, ids, content, modification time and
// attributes are (user.*, ACLs, file capabilities); of directories the times
// do not count. The root itself and the files of /etc that every root gets
// its own of are left out. Directories whose path would be longer than a path
// can be count as changed, and what is in them is not listed.
//
// Layers common to the beginning of both stacks are not searched, only asked
// for names that the others have. So the effort goes with what changed; the
// memory with the largest directory. Other changes to the upper meanwhile may
// or may not be seen. Classes: ErrNotFound for a missing layer or upper.
func (s *Store) Diff(ctx context.Context, from, to []string, upper sandbox.ID, emit func(Change) error) error {
	common := 0
	for common < min(len(from), len(to)) && from[common] == to[common] {
		common++
	}
	d := &differ{ctx: ctx, emit: emit, base: -1}
	defer d.close()
	var err error
	if d.a, err = s.mergerOf(from[common:], ""); err != nil {
		return err
	}
	if d.b, err = s.mergerOf(to[common:], upper); err != nil {
		return err
	}
	if common > 0 {
		if err := d.mountBase(s, from[:common]); err != nil {
			return err
		}
	}
	a, err := d.a.root()
	if err != nil {
		return fmt.Errorf("rootfs: compare: %w", err)
	}
	b, err := d.b.root()
	if err != nil {
		return fmt.Errorf("rootfs: compare: %w", err)
	}
	err = d.dir("", &a, &b)
	if err != nil && !errors.Is(err, d.stop) {
		err = fmt.Errorf("rootfs: compare: %w", err)
	}
	return err
}

// mergerOf opens layers, lowest first, and maybe an upper on top.
func (s *Store) mergerOf(layers []string, upper sandbox.ID) (*merger, error) {
	var trees []string
	if upper != "" {
		dir, err := s.sandboxDir(upper)
		if err != nil {
			return nil, err
		}
		trees = append(trees, path.Join(dir, "upper"))
		if _, err := os.Lstat(trees[0]); errors.Is(err, os.ErrNotExist) {
			return nil, sandbox.Errorf(sandbox.ErrNotFound, "no_upper", "sandbox %s has no files: %w", upper, err)
		}
	}
	for _, l := range slices.Backward(layers) {
		tree, err := layerTree(l)
		if err != nil {
			return nil, err
		}
		if !s.HasLayer(l) {
			return nil, sandbox.Errorf(sandbox.ErrNotFound, "no_layer", "there is no layer %s to compare", l)
		}
		trees = append(trees, s.vol.path(tree))
	}
	m, err := newMerger(s.vol.root, trees)
	if err != nil {
		return nil, fmt.Errorf("rootfs: compare: %w", err)
	}
	return m, nil
}

// differ compares two stacks, a and b, over a common base, which it sees
// through a mount.
type differ struct {
	ctx  context.Context //nolint:containedctx // lives as long as one comparison
	emit func(Change) error
	stop error // what emit returned
	a, b *merger
	view *os.File // the mount of the common part
	base int      // its root; -1: there is none
	open int      // descriptors of directories

	bufs [2][]byte
}

func (d *differ) close() {
	for _, m := range []*merger{d.a, d.b} {
		if m != nil {
			m.close()
		}
	}
	if d.base >= 0 {
		_ = unix.Close(d.base)
	}
	if d.view != nil {
		_ = d.view.Close() // a mount attached nowhere goes with it
	}
}

func (d *differ) mountBase(s *Store, common []string) error {
	plan, err := s.planView(common)
	if err != nil {
		return err
	}
	if d.view, err = s.mountView(plan); err != nil {
		return err
	}
	if d.base, err = unix.Openat(int(d.view.Fd()), ".", openDirFlags, 0); err != nil {
		d.base = -1
		return &os.PathError{Op: "open", Path: "a view of the common layers", Err: err}
	}
	return nil
}

// diffFrame is one directory being compared: on either side what is merged
// from the layers, and where it goes on in the base.
type diffFrame struct {
	d     *differ
	path  string
	sides [2]*diffSide
	fds   int // held open; 0: closed for now
}

type diffSide struct {
	m    *merger
	dir  *mergedDir // nil: this side has no such directory
	open *openDir
	base int // the directory in the base; -1: none
}

// diffEntry is what a name is on one side.
type diffEntry struct {
	there  bool
	st     unix.Stat_t
	parent int
	dir    *mergedDir
}

// diffOpen is how many descriptors frames may hold while others are entered.
const diffOpen = 512

func (d *differ) dir(p string, a, b *mergedDir) error {
	f := &diffFrame{d: d, path: p, sides: [2]*diffSide{{m: d.a, dir: a, base: -1}, {m: d.b, dir: b, base: -1}}}
	defer f.close()
	if err := f.reopen(); err != nil {
		return err
	}
	names, err := f.names()
	if err != nil {
		return err
	}
	var later []diffLater
	for _, n := range names {
		if err := d.ctx.Err(); err != nil {
			return err
		}
		if p == "/etc" && identityFiles[n] {
			continue
		}
		if later, err = f.enter(later, n, false); err != nil {
			return err
		}
		if err := f.reopen(); err != nil {
			return err
		}
		sub, err := f.compare(n)
		if err != nil {
			return err
		}
		if sub != nil {
			later = append(later, *sub)
		}
	}
	_, err = f.enter(later, "", true)
	return err
}

// diffLater is a directory whose content comes after the names that sort
// before it: /a.x stands between /a and /a/b.
type diffLater struct {
	name string
	a, b *mergedDir
}

// enter compares those directories of later whose content comes before name
// in its parent, or all, and returns the others.
func (f *diffFrame) enter(later []diffLater, name string, all bool) ([]diffLater, error) {
	for len(later) > 0 {
		first := 0
		for i := range later {
			if later[i].name+"/" < later[first].name+"/" {
				first = i
			}
		}
		l := later[first]
		if !all && l.name+"/" > name {
			return later, nil
		}
		later = slices.Delete(later, first, first+1)
		if f.d.open > diffOpen {
			f.close()
		}
		if err := f.d.dir(f.path+"/"+l.name, l.a, l.b); err != nil {
			return nil, err
		}
	}
	return later, nil
}

func (f *diffFrame) reopen() (err error) {
	if f.fds > 0 {
		return nil
	}
	f.fds = 1
	for _, s := range f.sides {
		if s.dir == nil {
			continue
		}
		if s.open, err = s.m.open(*s.dir); err != nil {
			return err
		}
		f.fds += len(s.open.fds)
		if s.dir.more && f.d.base >= 0 {
			if s.base, err = openBelow(f.d.base, s.dir.below); err != nil {
				return err
			}
			f.fds++
		}
	}
	f.d.open += f.fds
	return nil
}

func (f *diffFrame) close() {
	f.d.open -= f.fds
	f.fds = 0
	for _, s := range f.sides {
		if s.open != nil {
			s.open.close()
			s.open = nil
		}
		if s.base >= 0 {
			_ = unix.Close(s.base)
			s.base = -1
		}
	}
}

// openBelow opens a directory beneath root; -1 if there is none. The path may
// be longer than the kernel takes at once.
func openBelow(root int, p string) (int, error) {
	const atOnce = 2048
	dir := root
	for rest := p; ; {
		part := rest
		if len(part) > atOnce {
			part = part[:atOnce+strings.IndexByte(part[atOnce:]+"/", '/')]
		}
		rest = strings.TrimPrefix(rest[len(part):], "/")
		if part == "" {
			part = "."
		}
		fd, err := linux.OpenBeneath(dir, part, openDirFlags, 0, unix.RESOLVE_BENEATH|unix.RESOLVE_NO_SYMLINKS|unix.RESOLVE_NO_MAGICLINKS)
		if dir != root {
			_ = unix.Close(dir)
		}
		if err != nil {
			if ignoreGone(err) == nil {
				return -1, nil
			}
			return -1, &os.PathError{Op: "open", Path: p, Err: err}
		}
		if rest == "" {
			return fd, nil
		}
		dir = fd
	}
}

// sameBase reports whether both sides go on at the same place of the base:
// then what no layer names is the same on both.
func sameBase(a, b *mergedDir) bool {
	return a != nil && b != nil && a.more == b.more && (!a.more || a.below == b.below)
}

// names returns, sorted, every name that may differ.
func (f *diffFrame) names() ([]string, error) {
	set := map[string]bool{}
	same := sameBase(f.sides[0].dir, f.sides[1].dir)
	for _, s := range f.sides {
		if s.open == nil {
			continue
		}
		if err := s.m.names(s.open, set); err != nil {
			return nil, err
		}
		if s.base >= 0 && !same {
			err := s.m.reader.each(s.base, func(e dirent) error { set[e.name] = true; return nil })
			if err != nil {
				return nil, err
			}
		}
	}
	return sortedNames(set), nil
}

// entry finds out what a name is on one side.
func (s *diffSide) entry(name string) (diffEntry, error) {
	if s.dir == nil {
		return diffEntry{}, nil
	}
	e, err := s.m.lookup(s.open, name)
	if err != nil && errors.Is(err, fs.ErrNotExist) {
		return diffEntry{}, nil // it goes away as we look
	}
	if err != nil || e.hidden || e.found {
		return diffEntry{there: e.found, st: e.st, parent: e.parent, dir: e.dir}, err
	}
	var b diffEntry
	if s.base < 0 {
		return b, nil
	}
	err = unix.Fstatat(s.base, name, &b.st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return b, nil
	}
	if err != nil {
		return b, &os.PathError{Op: "stat", Path: name, Err: err}
	}
	b.there, b.parent = true, s.base
	if b.st.Mode&unix.S_IFMT == unix.S_IFDIR {
		b.dir = &mergedDir{more: true, below: path.Join(s.dir.below, name)}
	}
	return b, nil
}

// compare reports a name if it differs, and returns what to compare in it.
func (f *diffFrame) compare(name string) (*diffLater, error) {
	a, err := f.sides[0].entry(name)
	if err != nil {
		return nil, err
	}
	b, err := f.sides[1].entry(name)
	if err != nil {
		return nil, err
	}
	kind := sandbox.FileChanged
	show := &b.st
	switch {
	case !a.there && !b.there:
		return nil, nil
	case !a.there:
		kind = sandbox.FileAdded
	case !b.there:
		kind, show = sandbox.FileRemoved, &a.st
	default:
		same, err := f.d.same(name, &a, &b)
		if err != nil {
			return nil, fmt.Errorf("%s/%s: %w", f.path, name, err)
		}
		if same {
			kind = ""
		}
	}
	p := f.path + "/" + name
	sub := a.dir != nil || b.dir != nil
	if a.dir != nil && b.dir != nil && len(a.dir.srcs)+len(b.dir.srcs) == 0 && sameBase(a.dir, b.dir) {
		sub = false
	}
	if sub && len(p)+2 > maxPath { // nothing in it has a path
		sub = false
		if kind == "" {
			kind = sandbox.FileChanged
		}
	}
	if kind != "" {
		if err := f.d.report(p, kind, show); err != nil {
			return nil, err
		}
	}
	if !sub {
		return nil, nil
	}
	return &diffLater{name: name, a: a.dir, b: b.dir}, nil
}

func (d *differ) report(p string, kind sandbox.ChangeKind, st *unix.Stat_t) error {
	c := Change{Path: p, Kind: kind, Type: string(sandbox.FileOther), Mode: st.Mode & 0o7777}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		c.Type, c.Size = string(sandbox.FileRegular), st.Size
	case unix.S_IFDIR:
		c.Type = string(sandbox.FileDir)
	case unix.S_IFLNK:
		c.Type = string(sandbox.FileSymlink)
	}
	d.stop = d.emit(c)
	return d.stop
}
