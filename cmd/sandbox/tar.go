package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// writeTar writes a file or tree as an archive whose top is called name; an
// empty name leaves the top out.
func writeTar(w io.Writer, from, name string) error {
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
		if rel == "." { // a link given by name means what it leads to
			info, err = os.Stat(p)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil // deleted while we walk
		}
		if err != nil {
			return err
		}
		return addFile(tw, p, inner, info, links)
	})
	return errors.Join(err, tw.Close())
}

func addFile(tw *tar.Writer, p, inner string, info fs.FileInfo, links map[[2]uint64]string) error {
	if info.Mode()&(fs.ModeSocket|fs.ModeDevice|fs.ModeNamedPipe) != 0 {
		return nil // nothing that could be copied
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
	if st, ok := info.Sys().(*syscall.Stat_t); ok && info.Mode().IsRegular() && st.Nlink > 1 {
		key := [2]uint64{uint64(st.Dev), st.Ino}
		if first, seen := links[key]; seen {
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
		} else {
			links[key] = inner
		}
	}
	if err := tw.WriteHeader(h); err != nil {
		return fmt.Errorf("archiving %s: %w", p, err)
	}
	if h.Typeflag != tar.TypeReg {
		return nil
	}
	f, err := os.Open(p)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // read only
	n, err := io.Copy(tw, io.LimitReader(f, h.Size))
	if err == nil && n < h.Size { // truncated while we read: the archive needs what it was promised
		_, err = io.CopyN(tw, zeros{}, h.Size-n)
	}
	if err != nil {
		return fmt.Errorf("archiving %s: %w", p, err)
	}
	return nil
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// readTar unpacks an archive, whose top is called top, beneath dir, with the
// top renamed to name or, for an empty one, left out. The archive comes from
// a sandbox and is not trusted: every name is opened beneath a handle on dir,
// which follows no link out of it.
func readTar(r io.Reader, dir, top, name string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }() // a handle only
	var dirs []*tar.Header
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("reading the archive from the sandbox: %w", err)
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
		if err := extract(root, tr, h); err != nil {
			return fmt.Errorf("writing %s beneath %s: %w", plain(h.Name), dir, err)
		}
		if h.Typeflag == tar.TypeDir {
			dirs = append(dirs, h)
		}
	}
	// Modes and times of directories last, deepest first: a read-only
	// directory could not have been filled.
	for _, h := range slices.Backward(dirs) {
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
func extract(root *os.Root, tr *tar.Reader, h *tar.Header) error {
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
	if info, err := root.Lstat(h.Name); err == nil && !info.IsDir() {
		if err := root.Remove(h.Name); err != nil {
			return err
		}
	}
	switch h.Typeflag {
	case tar.TypeReg:
		f, err := root.OpenFile(h.Name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		if err := errors.Join(copyHoles(f, tr), f.Close()); err != nil {
			return err
		}
		return finishEntry(root, h)
	case tar.TypeSymlink:
		return root.Symlink(h.Linkname, h.Name)
	case tar.TypeLink:
		return root.Link(h.Linkname, h.Name)
	}
	return nil // devices and pipes stay inside
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
	return root.Chtimes(h.Name, h.ModTime, h.ModTime)
}
