package rootfs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// same compares two files that are there. One that goes away meanwhile is
// another.
func (d *differ) same(name string, a, b *diffEntry) (bool, error) {
	if a.st.Dev == b.st.Dev && a.st.Ino == b.st.Ino {
		return true, nil
	}
	if a.st.Mode != b.st.Mode || a.st.Uid != b.st.Uid || a.st.Gid != b.st.Gid || a.st.Rdev != b.st.Rdev {
		return false, nil
	}
	isDir := a.dir != nil
	if !isDir && (a.st.Mtim != b.st.Mtim || a.st.Size != b.st.Size) {
		return false, nil
	}
	same, err := sameAttrs(a.parent, b.parent, name)
	if err != nil || !same || isDir {
		return same, notGone(err)
	}
	switch a.st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		same, err = d.sameContent(a.parent, b.parent, name)
	case unix.S_IFLNK:
		same, err = sameTarget(a.parent, b.parent, name)
	}
	return same && err == nil, notGone(err)
}

func sameTarget(a, b int, name string) (bool, error) {
	var targets [2][maxPath + 1]byte
	var n [2]int
	for i, dir := range []int{a, b} {
		var err error
		if n[i], err = unix.Readlinkat(dir, name, targets[i][:]); err != nil {
			return false, &os.PathError{Op: "readlink", Path: name, Err: err}
		}
	}
	return bytes.Equal(targets[0][:n[0]], targets[1][:n[1]]), nil
}

func (d *differ) sameContent(a, b int, name string) (bool, error) {
	var files [2]*os.File
	for i, dir := range []int{a, b} {
		fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != nil {
			return false, &os.PathError{Op: "open", Path: name, Err: err}
		}
		files[i] = os.NewFile(uintptr(fd), name)
		defer files[i].Close()
		if d.bufs[i] == nil {
			d.bufs[i] = make([]byte, 128<<10)
		}
	}
	for {
		if err := d.ctx.Err(); err != nil {
			return false, err
		}
		n, err := io.ReadFull(files[0], d.bufs[0])
		k, kerr := io.ReadFull(files[1], d.bufs[1])
		for _, err := range []error{err, kerr} {
			if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
				return false, err
			}
		}
		if !bytes.Equal(d.bufs[0][:n], d.bufs[1][:k]) {
			return false, nil
		}
		if err != nil {
			return true, nil // both ended
		}
	}
}

// sameAttrs compares the attributes that a sandbox can see and set.
func sameAttrs(a, b int, name string) (bool, error) {
	var seen [2]string
	for i, dir := range []int{a, b} {
		at := fmt.Sprintf("/proc/self/fd/%d/%s", dir, name)
		names, err := listXattrs(func(buf []byte) (int, error) { return unix.Llistxattr(at, buf) })
		if err != nil {
			return false, &os.PathError{Op: "listxattr", Path: name, Err: err}
		}
		slices.Sort(names)
		for _, n := range names {
			if !isVisibleXattr(n) {
				continue
			}
			value := make([]byte, 64<<10)
			k, err := unix.Lgetxattr(at, n, value)
			if err != nil {
				return false, &os.PathError{Op: "getxattr " + n, Path: name, Err: err}
			}
			seen[i] += fmt.Sprintf("%q=%q ", n, value[:k])
		}
	}
	return seen[0] == seen[1], nil
}
