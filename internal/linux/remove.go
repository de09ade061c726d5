package linux

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Bounds of RemoveTree: directories held open at once, names read at once.
const (
	removeDepth = 32
	removeBatch = 1024
)

// RemoveTree deletes name in parent, whatever it is. It follows no symbolic
// link and enters nothing that is mounted: EXDEV. stopped is asked before each
// entry, and its error ends the work. Trees a sandbox made may be deeper than any path or than there are
// descriptors: a directory below removeDepth is first moved up to the top.
func RemoveTree(parent int, name string, stopped func() error) error {
	err := unix.Unlinkat(parent, name, 0)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) {
		return &os.PathError{Op: "unlinkat", Path: name, Err: err}
	}
	top, err := openDir(parent, name, err)
	if top == nil {
		return err
	}
	defer top.Close()
	r := remover{top: top, stopped: stopped}
	// What was moved up lies in top, so a pass may find new names there.
	for r.moved = true; r.moved; {
		r.moved = false
		if err := r.empty(top, 1); err != nil {
			return err
		}
	}
	if err := unix.Unlinkat(parent, name, unix.AT_REMOVEDIR); err != nil && !errors.Is(err, unix.ENOENT) {
		return &os.PathError{Op: "rmdir", Path: name, Err: err}
	}
	return nil
}

type remover struct {
	top     *os.File
	stopped func() error
	seq     int
	moved   bool
}

func (r *remover) empty(dir *os.File, depth int) error {
	for {
		// Deleting while reading may skip names: read again from the
		// start until there are none.
		if _, err := dir.Seek(0, io.SeekStart); err != nil {
			return err
		}
		names, err := dir.Readdirnames(removeBatch)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, n := range names {
			if err := r.stopped(); err != nil {
				return err
			}
			if err := r.remove(dir, n, depth); err != nil {
				return err
			}
		}
	}
}

func (r *remover) remove(dir *os.File, name string, depth int) error {
	err := unix.Unlinkat(int(dir.Fd()), name, 0)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) {
		return &os.PathError{Op: "unlinkat", Path: name, Err: err}
	}
	if depth >= removeDepth {
		return r.moveUp(dir, name)
	}
	sub, err := openDir(int(dir.Fd()), name, err)
	if sub == nil {
		return err
	}
	err = r.empty(sub, depth+1)
	_ = sub.Close() // read only
	if err != nil {
		return err
	}
	if err := unix.Unlinkat(int(dir.Fd()), name, unix.AT_REMOVEDIR); err != nil && !errors.Is(err, unix.ENOENT) {
		return &os.PathError{Op: "rmdir", Path: name, Err: err}
	}
	return nil
}

func (r *remover) moveUp(dir *os.File, name string) error {
	for {
		r.seq++
		err := unix.Renameat2(int(dir.Fd()), name, int(r.top.Fd()), fmt.Sprintf(".up%d", r.seq), unix.RENAME_NOREPLACE)
		if errors.Is(err, unix.EEXIST) {
			continue
		}
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		if err != nil {
			return &os.PathError{Op: "rename", Path: name, Err: err}
		}
		r.moved = true
		return nil
	}
}

// openDir opens a directory that unlink left with an error, which stands where
// it is none: EPERM has other reasons, too. It returns neither where the name is gone since.
func openDir(parent int, name string, unlink error) (*os.File, error) {
	fd, err := -1, error(nil)
	for range 4 { // EXDEV is also what openat2(2) says of one that is moved away meanwhile
		fd, err = OpenBeneath(parent, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0,
			unix.RESOLVE_BENEATH|unix.RESOLVE_NO_SYMLINKS|unix.RESOLVE_NO_XDEV)
		if !errors.Is(err, unix.EXDEV) {
			break
		}
	}
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		err = unlink
	}
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}
