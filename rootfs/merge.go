package rootfs

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// merger looks names up in a stack of layers as the overlay filesystem does
// (Documentation/filesystems/overlayfs.rst, "Merge directories", "whiteouts
// and opaque directories", "redirect_dir"), and says of every directory where
// the look-up would go on in whatever lies below the stack.
type merger struct {
	vol    *os.File
	layers []int // their root directories, topmost first
	reader dirReader
}

// newMerger opens the trees at the given paths, topmost first.
func newMerger(vol *os.File, trees []string) (*merger, error) {
	m := &merger{vol: vol}
	for _, t := range trees {
		fd, err := unix.Open(t, openDirFlags, 0)
		if err != nil {
			m.close()
			return nil, &os.PathError{Op: "open", Path: t, Err: err}
		}
		m.layers = append(m.layers, fd)
	}
	return m, nil
}

func (m *merger) close() {
	for _, fd := range m.layers {
		_ = unix.Close(fd)
	}
}

// mergedDir is a directory as the stack shows it.
type mergedDir struct {
	srcs  []mergedSrc // what it is merged from, topmost first; may be none
	more  bool        // it goes on below the stack,
	below string      // there as this path, without a slash at its begin
}

// mergedSrc is a directory of one layer.
type mergedSrc struct {
	layer int
	at    handle
	marks bool // its whiteouts are files with an attribute (Linux 6.7)
}

// root returns the root of the stack. A root that is opaque ends the stack, as
// planRoot does it; the kernel does not look at a root.
func (m *merger) root() (mergedDir, error) {
	d := mergedDir{more: true}
	for i, fd := range m.layers {
		if !d.more {
			break
		}
		at, err := handleAt(fd, "")
		if err != nil {
			return d, err
		}
		opaque, err := overlayValue(fd, "opaque")
		if err != nil {
			return d, err
		}
		d.srcs = append(d.srcs, mergedSrc{layer: i, at: at, marks: opaque == "x"})
		d.more = opaque != "y"
	}
	for _, fd := range m.layers[len(d.srcs):] {
		_ = unix.Close(fd)
	}
	m.layers = m.layers[:len(d.srcs)]
	return d, nil
}

// openDir is a mergedDir with its sources open.
type openDir struct {
	mergedDir
	fds []int // as srcs; -1: it is gone
}

func (m *merger) open(d mergedDir) (*openDir, error) {
	o := &openDir{mergedDir: d}
	for _, s := range d.srcs {
		fd, err := s.at.open(m.vol, openDirFlags)
		if errors.Is(err, os.ErrNotExist) { // of an upper in use
			fd, err = -1, nil
		}
		if err != nil {
			o.close()
			return nil, err
		}
		o.fds = append(o.fds, fd)
	}
	return o, nil
}

func (o *openDir) close() {
	for _, fd := range o.fds {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
	o.fds = nil
}

// names adds the names in the sources, hidden ones too.
func (m *merger) names(o *openDir, to map[string]bool) error {
	for _, fd := range o.fds {
		if fd < 0 {
			continue
		}
		err := m.reader.each(fd, func(e dirent) error { to[e.name] = true; return nil })
		if err != nil {
			return err
		}
	}
	return nil
}

func sortedNames(set map[string]bool) []string {
	out := make([]string, 0, len(set))
	for n := range set {
		out = append(out, n)
	}
	slices.Sort(out)
	return out
}

// mergedEntry is what a name stands for in the stack.
type mergedEntry struct {
	found  bool        // in one of the layers
	hidden bool        // not found, and hidden from what lies below
	st     unix.Stat_t // of the topmost source
	tree   int         // of the topmost source: its layer,
	parent int         // and its directory there, a descriptor of the openDir
	dir    *mergedDir  // of a directory
}

// lookup finds a name in a directory of the stack.
func (m *merger) lookup(o *openDir, name string) (mergedEntry, error) {
	l := lookup{m: m, name: name}
	var e mergedEntry
	var dir mergedDir
	next := 0 // of o.srcs
	for layer := 0; layer < len(m.layers) && !l.stop; layer++ {
		var hit hit
		var err error
		if l.absolute {
			hit, err = l.fromRoot(m.layers[layer])
		} else {
			for next < len(o.srcs) && o.srcs[next].layer < layer {
				next++
			}
			if next == len(o.srcs) || o.srcs[next].layer != layer || o.fds[next] < 0 {
				continue
			}
			hit, err = l.step(o.fds[next], o.srcs[next].marks, "", l.name, "")
		}
		if err != nil {
			return e, err
		}
		if !hit.found {
			continue
		}
		if !e.found {
			// No redirect came before this: it lies where its parent does.
			e = mergedEntry{found: true, st: hit.st, tree: layer, parent: o.fds[next]}
		}
		if hit.fd < 0 { // a file: nothing merges with it
			return e, nil
		}
		at, err := handleAt(hit.fd, "")
		_ = unix.Close(hit.fd)
		if err != nil {
			return e, err
		}
		dir.srcs = append(dir.srcs, mergedSrc{layer: layer, at: at, marks: hit.marks})
	}
	if !e.found {
		e.hidden = l.stop
		return e, nil
	}
	dir.more = !l.stop && (o.more || l.absolute)
	if l.absolute {
		dir.below = l.name[1:]
	} else {
		dir.below = path.Join(o.below, l.name)
	}
	e.dir = &dir
	return e, nil
}

// lookup is one look-up on its way down the layers. It does what
// fs/overlayfs/namei.c does, in the same order.
type lookup struct {
	m        *merger
	name     string // to look for in the next layer: one name, or, absolute, a path
	absolute bool   // name is a path from the root, beginning with a slash
	isDir    bool   // a directory was found in a layer above
	stop     bool   // do not go down further
}

// hit is what one layer has.
type hit struct {
	found bool
	st    unix.Stat_t
	fd    int // of a directory, the caller's to close; -1: it is none
	marks bool
}

// fromRoot looks up a path from the root of a layer.
func (l *lookup) fromRoot(root int) (hit, error) {
	at, marks := root, false
	// Counted from the end: a redirect on the way changes what is before.
	for rest := len(l.name) - 1; ; {
		from := len(l.name) - rest
		elem, post := l.name[from:], ""
		if i := strings.IndexByte(elem, '/'); i >= 0 {
			elem, post = elem[:i], elem[i:]
		}
		h, err := l.step(at, marks, l.name[:from], elem, post)
		if at != root {
			_ = unix.Close(at)
		}
		if err != nil || !h.found || post == "" {
			return h, err
		}
		at, marks = h.fd, h.marks
		rest -= len(elem) + 1
	}
}

// step looks up one name in one directory. pre and post are what comes before
// and after it in l.name.
func (l *lookup) step(dir int, marks bool, pre, elem, post string) (hit, error) {
	h := hit{fd: -1}
	err := unix.Fstatat(dir, elem, &h.st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENAMETOOLONG) {
		return h, nil
	}
	if err != nil {
		return h, &os.PathError{Op: "stat", Path: elem, Err: err}
	}
	if isWhiteout(&h.st) || marks && isMarkedWhiteout(dir, elem, &h.st) {
		l.stop = true
		return h, nil
	}
	if h.st.Mode&unix.S_IFMT != unix.S_IFDIR {
		l.stop = true
		h.found = !l.isDir && post == ""
		return h, nil
	}
	if h.fd, err = unix.Openat(dir, elem, openDirFlags, 0); err != nil {
		h.fd = -1
		return h, notGone(&os.PathError{Op: "open", Path: elem, Err: err})
	}
	if err := l.enter(&h, pre, post); err != nil {
		_ = unix.Close(h.fd)
		return hit{fd: -1}, fmt.Errorf("directory %q: %w", elem, err)
	}
	return h, nil
}

// enter notes what a directory says about where to go on.
func (l *lookup) enter(h *hit, pre, post string) error {
	h.found = true
	l.isDir = l.isDir || post == ""
	opaque, err := overlayValue(h.fd, "opaque")
	if err != nil {
		return err
	}
	h.marks = opaque == "x"
	if opaque == "y" {
		l.stop = true
		return nil
	}
	to, err := overlayValue(h.fd, "redirect")
	if err != nil || to == "" {
		return err
	}
	if to[0] == '/' {
		if path.Clean(to) != to || to == "/" {
			return fmt.Errorf("it is redirected to %q, which is no path", to)
		}
		l.name, l.absolute, l.stop = to+post, true, false
		return nil
	}
	if strings.ContainsRune(to, '/') {
		return fmt.Errorf("it is redirected to %q, which is no name", to)
	}
	l.name = pre + to + post
	return nil
}

// overlayValue returns the value of an overlay's attribute, empty for none.
func overlayValue(fd int, name string) (string, error) {
	var buf [4096]byte
	n, err := unix.Fgetxattr(fd, overlayXattr+name, buf[:])
	if errors.Is(err, unix.ENODATA) || errors.Is(err, unix.EOPNOTSUPP) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("attribute %s%s: %w", overlayXattr, name, err)
	}
	return string(bytes.TrimRight(buf[:n], "\x00")), nil
}

// isMarkedWhiteout tells the other form of whiteout, an empty file.
func isMarkedWhiteout(dir int, name string, st *unix.Stat_t) bool {
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size != 0 {
		return false
	}
	_, err := unix.Lgetxattr(fmt.Sprintf("/proc/self/fd/%d/%s", dir, name), overlayXattr+"whiteout", nil)
	return err == nil
}
