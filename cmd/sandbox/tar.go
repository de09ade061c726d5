package main

import (
	"archive/tar"
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/internal/tarfile"
)

// special are the files whose content is nothing that could be copied.
const special = fs.ModeSocket | fs.ModeDevice | fs.ModeNamedPipe

// leftOut is what a copy leaves out.
type leftOut struct {
	count int
	names []string // of the first few
	said  string   // what the sandbox left out before, in its words
}

func (l *leftOut) add(name string) {
	const most = 10
	if l.count++; len(l.names) < most {
		l.names = append(l.names, name)
	}
}

// tell says it on standard error.
func (l *leftOut) tell(c *cli) {
	if l.count > 0 {
		c.warn("left out %d sockets, devices and FIFOs: %.200q", l.count, l.names)
	}
	if l.said != "" {
		c.warn("the sandbox %.3000s", plain(l.said))
	}
}

// writeTar writes a file or tree as an archive whose top is called name; an
// empty name leaves the top out. A link given by name means what it leads to.
func writeTar(w io.Writer, from, name string, left *leftOut) error {
	if info, err := os.Stat(from); err == nil && info.IsDir() {
		if from, err = filepath.EvalSymlinks(from); err != nil { // WalkDir enters no link
			return err
		}
	}
	tw := tar.NewWriter(w)
	links := map[[2]uint64]string{} // names of files with several
	err := filepath.WalkDir(from, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, p)
		if err != nil {
			return err
		}
		inner := path.Join(name, filepath.ToSlash(rel))
		if inner == "." {
			return nil
		}
		info, err := d.Info()
		if rel == "." {
			info, err = os.Stat(p)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil // deleted while we walk
		}
		if err != nil {
			return err
		}
		return addFile(tw, p, inner, info, links, left)
	})
	if err != nil {
		return err
	}
	return tw.Close()
}

func addFile(tw *tar.Writer, p, inner string, info fs.FileInfo, links map[[2]uint64]string, left *leftOut) error {
	if info.Mode()&special != 0 {
		left.add(p)
		return nil
	}
	target := ""
	if info.Mode()&fs.ModeSymlink != 0 {
		var err error
		if target, err = os.Readlink(p); err != nil {
			return err
		}
	}
	h, err := tar.FileInfoHeader(info, target)
	if err != nil {
		return fmt.Errorf("describing %s: %w", p, err)
	}
	// Owners of this machine mean nothing inside.
	h.Name, h.Uid, h.Gid, h.Uname, h.Gname, h.Format = inner, 0, 0, "", "", tar.FormatPAX
	if info.IsDir() {
		h.Name += "/"
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	several := ok && info.Mode().IsRegular() && st.Nlink > 1
	var key [2]uint64
	if several {
		key = [2]uint64{uint64(st.Dev), st.Ino}
		if first, seen := links[key]; seen {
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
		}
	}
	if h.Typeflag != tar.TypeReg {
		return tw.WriteHeader(h)
	}
	f, err := os.Open(p)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // deleted while we walk
	}
	if err != nil {
		return err
	}
	if several {
		links[key] = inner
	}
	defer func() { _ = f.Close() }() // read only
	if err := tarfile.Write(tw, h, f); err != nil {
		return fmt.Errorf("archiving %s: %w", p, err)
	}
	return nil
}

// readTar unpacks an archive, whose top is called top, beneath dir, with the
// top renamed to name or, for an empty one, left out. The archive comes from
// a sandbox and is not trusted: every name is opened beneath a handle on dir,
// which follows no link out of it.
func readTar(r io.Reader, dir, top, name string, left *leftOut) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }() // a handle only
	var dirs []*tar.Header
	tr := tarfile.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("reading the archive from the sandbox: %w", err)
		}
		if said := h.PAXRecords["comment"]; said != "" {
			left.said = said
		}
		if h.Typeflag == tar.TypeXGlobalHeader { // as of sandboxes that an earlier version started
			continue
		}
		if h.Name, err = rename(h.Name, top, name); err != nil {
			return err
		}
		if h.Name == "." {
			continue
		}
		if h.Typeflag == tar.TypeLink {
			if h.Linkname, err = rename(h.Linkname, top, name); err != nil {
				return err
			}
		}
		if err := extract(root, tr.Reader, h, left); err != nil {
			return fmt.Errorf("copying %s beneath %s: %w", plain(h.Name), dir, err)
		}
		if h.Typeflag == tar.TypeDir {
			dirs = append(dirs, h)
		}
	}
	// Modes and times of directories last, deepest first: a read-only
	// directory could not have been filled.
	slices.SortStableFunc(dirs, func(a, b *tar.Header) int { return len(b.Name) - len(a.Name) })
	for _, h := range dirs {
		if err := finishEntry(root, h); err != nil {
			return err
		}
	}
	return nil
}

// rename gives an entry its name here; an error for one outside the top.
func rename(entry, top, name string) (string, error) {
	clean := path.Clean(strings.TrimPrefix(entry, "./"))
	if top == "/" {
		clean = path.Join(top, clean)
	}
	rest, ok := strings.CutPrefix(clean, top)
	if !ok || (rest != "" && top != "/" && !strings.HasPrefix(rest, "/")) {
		return "", fmt.Errorf("the archive from the sandbox holds %s, which is not beneath %s: refused", plain(entry), plain(top))
	}
	out := path.Join(name, strings.TrimPrefix(rest, "/"))
	if out == "" {
		out = "."
	}
	if !filepath.IsLocal(out) {
		return "", fmt.Errorf("the archive from the sandbox holds %s, which leads outside: refused", plain(entry))
	}
	return out, nil
}

// extract writes one entry, replacing a file that is in its place.
func extract(root *os.Root, tr *tar.Reader, h *tar.Header, left *leftOut) error {
	if dir := path.Dir(h.Name); dir != "." {
		if err := root.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if h.Typeflag == tar.TypeDir {
		err := root.Mkdir(h.Name, 0o700)
		if errors.Is(err, fs.ErrExist) {
			if info, serr := root.Lstat(h.Name); serr == nil && info.IsDir() {
				return nil
			}
		}
		return err
	}
	switch h.Typeflag {
	case tar.TypeReg:
		return extractFile(root, tr, h)
	case tar.TypeSymlink:
		return extractLink(root, root.Symlink, h)
	case tar.TypeLink:
		return extractLink(root, root.Link, h)
	}
	left.add(h.Name)
	return nil
}

// extractLink makes a link. A file in its place stays until it is there.
func extractLink(root *os.Root, link func(to, name string) error, h *tar.Header) error {
	err := link(h.Linkname, h.Name)
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	beside := tempName(h.Name)
	if err = link(h.Linkname, beside); err != nil {
		return err
	}
	err = root.Rename(beside, h.Name)
	_ = root.Remove(beside) // left where it failed, and of two names of one file (rename(2))
	return err
}

// tempName returns a name beside another.
func tempName(name string) string { return path.Join(path.Dir(name), ".sbx-"+rand.Text()) }

// extractFile writes a file, beside one that is in its place, which stays until all
// of the new one is there.
func extractFile(root *os.Root, tr *tar.Reader, h *tar.Header) (err error) {
	const flags = os.O_WRONLY | os.O_CREATE | os.O_EXCL
	at := *h
	f, err := root.OpenFile(at.Name, flags, 0o600)
	if errors.Is(err, fs.ErrExist) {
		at.Name = tempName(h.Name)
		f, err = root.OpenFile(at.Name, flags, 0o600)
	}
	if err != nil {
		return err
	}
	if err = errors.Join(copyHoles(f, tr), f.Close()); err == nil {
		err = finishEntry(root, &at)
	}
	if err == nil && at.Name != h.Name {
		err = root.Rename(at.Name, h.Name)
	}
	if err != nil {
		_ = root.Remove(at.Name) // the error says more
	}
	return err
}

// copyHoles writes all of r to a new file, with holes for blocks of zeros: an
// archive has a sparse file's holes as zeros, which may be more than this disk.
func copyHoles(f *os.File, r io.Reader) error {
	const block = 4096
	var zero [block]byte
	var size, written int64
	buf := make([]byte, 16*block)
	for {
		n := 0
		var err error
		for n < len(buf) && err == nil { // not ReadFull, whose end could be a broken archive's
			var m int
			m, err = r.Read(buf[n:])
			n += m
		}
		for i := 0; i < n; {
			from := i
			for i < n && !bytes.Equal(buf[i:min(i+block, n)], zero[:min(block, n-i)]) {
				i = min(i+block, n)
			}
			if i == from {
				i = min(i+block, n)
				continue
			}
			if _, err := f.WriteAt(buf[from:i], size+int64(from)); err != nil {
				return err
			}
			written = size + int64(i)
		}
		size += int64(n)
		if errors.Is(err, io.EOF) && written < size {
			return f.Truncate(size)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// finishEntry sets mode and times. Set-id bits stay inside: here they would
// be this user's.
func finishEntry(root *os.Root, h *tar.Header) error {
	if err := root.Chmod(h.Name, fs.FileMode(h.Mode)&fs.ModePerm); err != nil {
		return err
	}
	// Chtimes takes times from 1677 to 2262, and makes of others any.
	at := h.ModTime
	if last := time.Unix(0, math.MaxInt64); at.After(last) {
		at = last
	} else if first := time.Unix(0, math.MinInt64); at.Before(first) {
		at = first
	}
	return root.Chtimes(h.Name, at, at)
}
