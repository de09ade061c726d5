package build

import (
	"archive/tar"
	"bufio"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/build/ignore"
)

// selection is what one source of a COPY or ADD comes to.
type selection struct {
	base string // its name, as written or matched: a file copied into a directory gets it
	top  *entry // links followed
	all  []picked
}

// picked is one file of a selection: the top itself, or, of a directory, what
// is in it.
type picked struct {
	rel   string // beneath the top; empty: the top, a file
	entry *entry
}

// errNoSource is wrapped by the error for a source that is not there.
var errNoSource = errors.New("no such file")

// choose finds an operation's sources in a tree. A pattern may match nothing,
// a name must be there.
func (t *Tree) choose(o *copyOp) ([]selection, error) {
	var all []selection
	for _, src := range o.sources {
		names, err := t.glob(src)
		if err != nil {
			return nil, err
		}
		for _, n := range names {
			top := t.find(n)
			if top == nil {
				return nil, fmt.Errorf("source %q: %w", clip(n, 200), errNoSource)
			}
			s, err := t.selection(n, top, o.exclude)
			if err != nil {
				return nil, err
			}
			if s != nil {
				all = append(all, *s)
			}
		}
	}
	for _, in := range o.inlines {
		e := &entry{name: in.name, kind: file, mode: 0o644, size: int64(len(in.data)), inline: true, data: in.data, modified: time.Unix(0, 0)}
		all = append(all, selection{base: in.name, top: e, all: []picked{{"", e}}})
	}
	return all, nil
}

// selection is a source without what the patterns exclude; nil where that is
// the source itself.
func (t *Tree) selection(name string, top *entry, exclude []string) (*selection, error) {
	rules, err := ignore.New(exclude)
	if err != nil {
		return nil, err
	}
	s := &selection{base: path.Base("/" + name), top: top}
	if top.kind != dir {
		out, err := rules.Excludes(s.base, false)
		if err != nil || out {
			return nil, err
		}
		s.all = []picked{{"", top}}
		return s, nil
	}
	err = t.walk(top, func(rel string, e *entry) (bool, error) {
		out, err := rules.Excludes(rel, e.kind == dir)
		if err != nil {
			return false, err
		}
		if out {
			return !rules.Skips(rel), nil
		}
		s.all = append(s.all, picked{rel, e})
		return true, nil
	})
	return s, err
}

// placed is one entry of the archive that a copy sends into the sandbox.
type placed struct {
	to    string // absolute
	entry *entry
	made  bool // a directory that only has to be there
}

// plan says where each file goes, by Docker's rules: a directory's content
// goes into the destination; a file goes into it where it is a directory or
// was written as one, and else becomes it. isDir tells what the destination
// is now. Archives that are to be unpacked are not in it.
func (o *copyOp) plan(chosen []selection, isDir bool) ([]placed, error) {
	if len(chosen) == 0 {
		return nil, nil
	}
	dest := path.Clean(o.dest)
	into := isDir || strings.HasSuffix(o.dest, "/")
	if err := o.check(chosen, isDir); err != nil {
		return nil, err
	}
	var out []placed
	if into && dest != "/" {
		out = append(out, placed{to: dest, made: true, entry: &entry{kind: dir, mode: 0o755}})
	}
	for _, s := range chosen {
		if s.top.kind == dir {
			if !into && dest != "/" {
				out = append(out, placed{to: dest, made: true, entry: &entry{kind: dir, mode: 0o755}})
			}
			for _, p := range s.all {
				out = append(out, placed{to: path.Join(dest, p.rel), entry: p.entry})
			}
			continue
		}
		to := dest
		if into {
			to = path.Join(dest, s.base)
		}
		if to == "/" {
			return nil, fmt.Errorf("a file cannot be copied to /: name a directory with / at the end, or a file")
		}
		out = append(out, placed{to: to, entry: s.top})
	}
	return out, nil
}

// check refuses several files for one name.
func (o *copyOp) check(chosen []selection, isDir bool) error {
	files := 0
	for _, s := range chosen {
		if s.top.kind != dir {
			files++
		}
	}
	if files > 1 && !isDir && !strings.HasSuffix(o.dest, "/") {
		return fmt.Errorf("%d files match: the destination must be a directory and end with /", files)
	}
	return nil
}

// owner is who gets what is copied.
type owner struct{ uid, gid int }

// archiver writes the archive of a plan, with names beneath anchor, a
// directory that exists.
type archiver struct {
	tree   *Tree
	op     *copyOp
	anchor string
	as     *owner // nil: as the entries say
	tw     *tar.Writer
	done   map[string]bool // directories that are there, or in the archive
}

// write makes the archive. Directories between the anchor and a file that are
// missing are in it; those that only have to be there and are, are not.
func (a *archiver) write(w io.Writer, plan []placed) error {
	buffered := bufio.NewWriterSize(w, 256<<10)
	a.tw, a.done = tar.NewWriter(buffered), map[string]bool{a.anchor: true, "/": true}
	for _, p := range plan {
		if p.to == a.anchor || p.made && a.done[p.to] || p.entry.kind == dir && mountPoint(p.to) {
			continue
		}
		if err := a.above(path.Dir(p.to)); err != nil {
			return err
		}
		if err := a.entry(p); err != nil {
			return err
		}
	}
	return errors.Join(a.tw.Close(), buffered.Flush())
}

// mountPoint tells of the directories on which a sandbox has file systems of
// the kernel's: they are there, and not the step's to change.
func mountPoint(name string) bool {
	return name == "/dev" || name == "/proc" || name == "/sys"
}

// above writes the directories above a file that nobody has written.
func (a *archiver) above(at string) error {
	if a.done[at] || mountPoint(at) {
		return nil
	}
	if err := a.above(path.Dir(at)); err != nil {
		return err
	}
	return a.entry(placed{to: at, made: true, entry: &entry{kind: dir, mode: 0o755}})
}

func (a *archiver) entry(p placed) error {
	e := p.entry
	name := strings.TrimPrefix(strings.TrimPrefix(p.to, a.anchor), "/")
	h := &tar.Header{Name: name, Mode: int64(e.mode), Uid: e.uid, Gid: e.gid, ModTime: e.modified, Format: tar.FormatPAX}
	if a.as != nil {
		h.Uid, h.Gid = a.as.uid, a.as.gid
	}
	if a.op.chmod != nil && e.kind != symlink && !p.made {
		h.Mode = int64(*a.op.chmod)
	}
	if h.ModTime.IsZero() {
		h.ModTime = time.Unix(0, 0)
	}
	var content io.Reader
	switch e.kind {
	case dir:
		h.Typeflag, h.Name = tar.TypeDir, name+"/"
		a.done[p.to] = true
	case symlink:
		h.Typeflag, h.Linkname = tar.TypeSymlink, e.link
	default:
		h.Typeflag, h.Size = tar.TypeReg, e.size
		content = a.tree.content(e)
	}
	if err := a.tw.WriteHeader(h); err != nil {
		return fmt.Errorf("archiving %.200q: %w", name, err)
	}
	if content != nil {
		if _, err := io.Copy(a.tw, content); err != nil {
			return fmt.Errorf("archiving %.200q: %w", name, err)
		}
	}
	return nil
}
