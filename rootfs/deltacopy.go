package rootfs

import (
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// delta fills the empty directory to with what a plan says, of the upper
// from. What is no more as the plan says is an error.
func (c *copier) delta(from, to string, plan *deltaDir) (upperInfo, error) {
	d := &deltaCopy{copier: c}
	err := d.makeDirs(from, to, plan)
	if err == nil {
		var done sync.WaitGroup
		for range min(copyWorkers(), len(d.parts)) {
			done.Go(func() { c.fail(onCopyThread(d.run)) })
		}
		done.Wait()
		err = c.err
	}
	return upperInfo{Bytes: c.bytes.Load(), Files: c.files.Load()}, err
}

type deltaCopy struct {
	*copier
	parts []deltaPart
	next  atomic.Int64
}

// deltaMade is a directory and its copy.
type deltaMade struct {
	plan     *deltaDir
	src, dst handle
	left     atomic.Int32 // parts
}

// deltaPart is some of the entries of a directory.
type deltaPart struct {
	dir   *deltaMade
	files []*seenFile
	gone  []string
}

// makeDirs makes all directories, and cuts the work into parts. Neither end of
// a way down is held open, however deep it goes.
func (d *deltaCopy) makeDirs(from, to string, plan *deltaDir) error {
	src, err := handleAt(unix.AT_FDCWD, from)
	if err != nil {
		return err
	}
	dst, err := handleAt(unix.AT_FDCWD, to)
	if err != nil {
		return err
	}
	todo := []*deltaMade{{plan: plan, src: src, dst: dst}}
	for len(todo) > 0 {
		m := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if err := d.ctx.Err(); err != nil {
			return err
		}
		d.cut(m)
		if len(m.plan.dirs) == 0 {
			continue
		}
		subs, err := d.makeSubs(m)
		if err != nil {
			return err
		}
		todo = append(todo, subs...)
	}
	return nil
}

// cut adds the parts of a directory, one at least, that gives it its
// attributes.
func (d *deltaCopy) cut(m *deltaMade) {
	files, gone := m.plan.files, m.plan.gone
	for first := true; first || len(files)+len(gone) > 0; first = false {
		n, k := min(copyPart, len(files)), min(copyPart, len(gone))
		m.left.Add(1)
		d.parts = append(d.parts, deltaPart{dir: m, files: files[:n], gone: gone[:k]})
		files, gone = files[n:], gone[k:]
	}
}

func (d *deltaCopy) openMade(m *deltaMade) (*copyPair, error) {
	return openPair(
		func() (int, error) { return m.src.open(d.vol, openDirFlags) },
		func() (int, error) { return m.dst.open(d.vol, openDirFlags) })
}

func (d *deltaCopy) makeSubs(m *deltaMade) ([]*deltaMade, error) {
	p, err := d.openMade(m)
	if err != nil {
		return nil, err
	}
	defer p.close()
	var subs []*deltaMade
	for _, sub := range m.plan.dirs {
		name := sub.of.name
		if err := unix.Mkdirat(p.dst, name, 0o700); err != nil {
			return nil, &os.PathError{Op: "mkdir", Path: name, Err: err}
		}
		made := &deltaMade{plan: sub}
		if made.src, err = handleAt(p.src, name); err == nil {
			made.dst, err = handleAt(p.dst, name)
		}
		if err != nil {
			return nil, err
		}
		subs = append(subs, made)
	}
	return subs, nil
}

// run copies parts until there are no more.
func (d *deltaCopy) run() error {
	w := &copyWorker{copier: d.copier}
	for !d.failed() {
		i := int(d.next.Add(1)) - 1
		if i >= len(d.parts) {
			return nil
		}
		if err := d.part(w, d.parts[i]); err != nil {
			return err
		}
	}
	return nil
}

func (d *deltaCopy) part(w *copyWorker, part deltaPart) error {
	p, err := d.openMade(part.dir)
	if err != nil {
		return err
	}
	defer p.close()
	for _, f := range part.files {
		if err := d.ctx.Err(); err != nil {
			return err
		}
		if err := w.entry(0, p.src, p.dst, dirent{name: f.name, kind: f.kind()}); err != nil {
			return err
		}
	}
	for _, name := range part.gone {
		if err := w.whiteout(p.dst, name); err != nil {
			return err
		}
	}
	if part.dir.left.Add(-1) > 0 {
		return nil
	}
	return w.deltaAttrs(p, part.dir.plan)
}

// deltaAttrs ends a directory: nothing changes its times any more.
func (w *copyWorker) deltaAttrs(p *copyPair, plan *deltaDir) error {
	w.drop = nil
	if plan.over {
		w.drop = isLowerMark
	}
	err := w.dirAttrs(p.src, p.dst)
	w.drop = nil
	if err == nil && plan.opaque {
		if err = unix.Fsetxattr(p.dst, overlayOpaque, []byte("y"), 0); err != nil {
			err = &os.PathError{Op: "set " + overlayOpaque, Path: plan.of.name, Err: err}
		}
	}
	return err
}

// isLowerMark reports whether an attribute says where a directory goes on
// below.
func isLowerMark(name string) bool {
	return name == overlayXattr+"opaque" || name == overlayXattr+"redirect"
}

// whiteout hides a name. All are names of one node, as an overlay makes them.
func (w *copyWorker) whiteout(dst int, name string) error {
	st := unix.Stat_t{Mode: unix.S_IFCHR, Nlink: 1 << 62}
	return w.once(linkKey{tree: -1}, &st, dst, name, func() error {
		if err := unix.Mknodat(dst, name, unix.S_IFCHR, 0); err != nil {
			return &os.PathError{Op: "mknod", Path: name, Err: err}
		}
		return nil
	})
}
