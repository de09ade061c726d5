package build

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/tarfile"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Tree is an archive with an index: the files of a build's context, or of
// those a stage gives to another. The contents lie one after the other in a
// file without a name; nothing of the archive ever becomes a path of the
// host's. It is read-only once it is filled.
type Tree struct {
	spool   *os.File
	end     int64
	entries map[string]*entry   // by clean relative name; "" is the top
	inside  map[string][]string // names in a directory, sorted by seal
	bound   bounds
	names   int // bytes of all names
}

// bounds limit what an archive may hold.
type bounds struct {
	bytes   int64 // of all contents
	entries int
}

// entry is one file.
type entry struct {
	name     string
	kind     kind
	mode     uint32
	uid, gid int
	link     string // of a symbolic link
	size     int64
	offset   int64
	sum      [sha256.Size]byte
	modified time.Time
	implied  bool // a directory nobody described
	inline   bool // its content is data, and not in the spool
	data     string
}

type kind byte

const (
	file    kind = 'f'
	dir     kind = 'd'
	symlink kind = 'l'
)

const (
	maxName  = 4096     // the longest path, as PATH_MAX
	maxNames = 64 << 20 // bytes of all names: they are held in memory
)

// newTree makes an empty tree whose contents go to a file in dir that has no
// name: whatever becomes of the daemon, the kernel frees it.
func newTree(spoolDir string, b bounds) (*Tree, error) {
	f, err := os.CreateTemp(spoolDir, "context-*")
	if err != nil {
		return nil, fmt.Errorf("make a file for the build's context: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(fmt.Errorf("unlink the build's context: %w", err), f.Close())
	}
	t := &Tree{spool: f, entries: map[string]*entry{}, inside: map[string][]string{}, bound: b}
	t.entries[""] = &entry{kind: dir, mode: 0o755, implied: true}
	return t, nil
}

// Close frees the contents.
func (t *Tree) Close() error { return t.spool.Close() }

// fill reads an archive. place says where an entry goes, false for nowhere;
// owned keeps the archive's owners, which are 0 else. Names cannot leave the
// tree. ErrInvalid with code bad_context, ErrTooLarge with code
// context_too_large, ErrExhausted with code volume_full.
func (t *Tree) fill(ctx context.Context, r io.Reader, owned bool, place func(name string) (string, bool)) error {
	tr := tarfile.NewReader(r)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return broken(err)
		}
		name, ok := place(clean(h.Name))
		if !ok {
			continue
		}
		if err := t.add(name, h, tr, owned, place); err != nil {
			return err
		}
	}
}

// broken is an error of reading an archive.
func broken(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*sandbox.Error](err); ok || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return sandbox.Errorf(sandbox.ErrInvalid, "bad_context", "reading the archive of the build's files: %w", err)
}

// clean makes an archive's name one without leading slash or "..".
func clean(name string) string { return strings.TrimPrefix(path.Clean("/"+name), "/") }

// everything places each entry under its own name.
func everything(name string) (string, bool) { return name, true }

func (t *Tree) add(name string, h *tar.Header, r io.Reader, owned bool, place func(string) (string, bool)) error {
	if len(name) > maxName || strings.ContainsRune(name, 0) {
		return sandbox.Errorf(sandbox.ErrInvalid, "bad_context", "a name of %d bytes in the archive of the build's files: at most %d", len(name), maxName)
	}
	e := &entry{name: name, mode: uint32(h.Mode) & 0o7777, modified: h.ModTime}
	if owned {
		e.uid, e.gid = h.Uid, h.Gid
	}
	switch h.Typeflag {
	case tar.TypeDir:
		e.kind = dir
	case tar.TypeReg, tar.TypeRegA: //nolint:staticcheck // old archives have it
		e.kind = file
		if err := t.store(e, h, r); err != nil {
			return err
		}
	case tar.TypeSymlink:
		if len(h.Linkname) > maxName || strings.ContainsRune(h.Linkname, 0) || h.Linkname == "" {
			return sandbox.Errorf(sandbox.ErrInvalid, "bad_context", "the link %.200q in the archive of the build's files leads nowhere", name)
		}
		e.kind, e.link, e.mode = symlink, h.Linkname, 0o777
	case tar.TypeLink: // a second name: the same content again
		target, _ := place(clean(h.Linkname))
		first := t.entries[target]
		if first == nil || first.kind == dir {
			return sandbox.Errorf(sandbox.ErrInvalid, "bad_context", "%.200q in the archive of the build's files is a second name of %.200q, which is no file before it", name, h.Linkname)
		}
		same := *first
		same.name, e = name, &same
	default: // devices, FIFOs: nothing that could be copied
		return nil
	}
	return t.put(e)
}

// store writes a file's content away.
func (t *Tree) store(e *entry, h *tar.Header, r io.Reader) error {
	if h.Size > t.bound.bytes-t.end {
		return t.tooLarge()
	}
	sum := sha256.New()
	e.offset = t.end
	n, err := io.Copy(io.MultiWriter(&offsetWriter{t}, sum), r)
	if err != nil {
		var perr *os.PathError
		switch {
		case errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT):
			return sandbox.Errorf(sandbox.ErrExhausted, "volume_full", "no space left on the daemon's disk for the build's files: free some: %w", err)
		case errors.As(err, &perr):
			return fmt.Errorf("keep the build's files: %w", err)
		}
		return broken(err)
	}
	e.size = n
	sum.Sum(e.sum[:0])
	return nil
}

type offsetWriter struct{ t *Tree }

func (w *offsetWriter) Write(p []byte) (int, error) {
	if int64(len(p)) > w.t.bound.bytes-w.t.end {
		return 0, w.t.tooLarge()
	}
	n, err := w.t.spool.WriteAt(p, w.t.end)
	w.t.end += int64(n)
	return n, err
}

func (t *Tree) tooLarge() error {
	return sandbox.Errorf(sandbox.ErrTooLarge, "context_too_large", "the build's files are more than %d bytes or %d entries: leave some out with .dockerignore", t.bound.bytes, t.bound.entries)
}

// put enters a file, and the directories above it that nobody described. A
// later entry of a name replaces an earlier one, but no directory.
func (t *Tree) put(e *entry) error {
	old := t.entries[e.name]
	if old != nil && (old.kind == dir) != (e.kind == dir) {
		return sandbox.Errorf(sandbox.ErrInvalid, "bad_context", "%.200q is a directory and something else in the archive of the build's files", e.name)
	}
	if old == nil {
		up := parent(e.name)
		switch above := t.entries[up]; {
		case above == nil:
			if err := t.put(&entry{name: up, kind: dir, mode: 0o755, implied: true}); err != nil {
				return err
			}
		case above.kind != dir:
			return sandbox.Errorf(sandbox.ErrInvalid, "bad_context", "%.200q in the archive of the build's files lies in %.200q, which is no directory", e.name, up)
		}
		if t.names += len(e.name) + len(e.link); len(t.entries) >= t.bound.entries || t.names > maxNames {
			return t.tooLarge()
		}
		t.inside[up] = append(t.inside[up], path.Base(e.name))
	}
	t.entries[e.name] = e
	return nil
}

// parent is the directory of a relative name; "" is the top.
func parent(name string) string {
	if d := path.Dir(name); d != "." {
		return d
	}
	return ""
}

// seal sorts the index, once everything is in.
func (t *Tree) seal() {
	for _, names := range t.inside {
		slices.Sort(names)
	}
}

// content is a file's content.
func (t *Tree) content(e *entry) io.Reader {
	if e.inline {
		return strings.NewReader(e.data)
	}
	return io.NewSectionReader(t.spool, e.offset, e.size)
}

// find follows links, which cannot lead out of the tree. It returns nil where
// there is nothing.
func (t *Tree) find(name string) *entry { return t.follow(name, 0) }

const maxLinks = 40

func (t *Tree) follow(name string, links int) *entry {
	at := t.entries[""]
	for rest := clean(name); rest != ""; {
		first, more, _ := strings.Cut(rest, "/")
		if at.kind != dir {
			return nil
		}
		next := t.entries[path.Join(at.name, first)]
		if next == nil {
			return nil
		}
		if next.kind == symlink {
			if links++; links > maxLinks {
				return nil
			}
			target := next.link
			if !path.IsAbs(target) {
				target = path.Join(at.name, target)
				if strings.HasPrefix(target, "../") { // path.Join cleans; the top has no parent
					target = clean(target)
				}
			}
			return t.follow(path.Join(clean(target), more), links)
		}
		at, rest = next, more
	}
	return at
}

// walk calls f for what is beneath a directory, each directory before what is
// in it, with names relative to it. f returns false to stay out of one.
func (t *Tree) walk(top *entry, f func(rel string, e *entry) (bool, error)) error {
	return t.walkFrom(top.name, "", f)
}

func (t *Tree) walkFrom(at, rel string, f func(string, *entry) (bool, error)) error {
	for _, n := range t.inside[at] {
		e := t.entries[path.Join(at, n)]
		in, err := f(path.Join(rel, n), e)
		if err != nil {
			return err
		}
		if e.kind == dir && in {
			if err := t.walkFrom(e.name, path.Join(rel, n), f); err != nil {
				return err
			}
		}
	}
	return nil
}

// hasPattern tells whether a source names more than one file.
func hasPattern(s string) bool {
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case '*', '?', '[':
			return true
		case '\\':
			i++
		}
	}
	return false
}

// glob returns the names a pattern matches, in order; a name without one
// stands for itself.
func (t *Tree) glob(pattern string) ([]string, error) {
	if !hasPattern(pattern) {
		return []string{pattern}, nil
	}
	names := []string{""}
	for part := range strings.SplitSeq(pattern, "/") {
		var next []string
		for _, n := range names {
			if !hasPattern(part) {
				if e := t.find(path.Join(n, part)); e != nil {
					next = append(next, path.Join(n, part))
				}
				continue
			}
			at := t.find(n)
			if at == nil || at.kind != dir {
				continue
			}
			for _, child := range t.inside[at.name] {
				ok, err := path.Match(part, child)
				if err != nil {
					return nil, fmt.Errorf("the pattern %.80q: %w", pattern, err)
				}
				if ok {
					next = append(next, path.Join(n, child))
				}
			}
		}
		names = next
	}
	return names, nil
}
