package rootfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// CopyUpper makes a layer of an upper as it is now and leaves the upper as it
// is. The copy shares the blocks of its files where the filesystem can
// (FICLONE; XFS, btrfs); it has names, modes, ids, times, attributes, hard
// links, whiteouts, pipes and device nodes of the original, and no sockets.
// The caller has frozen whoever writes to the upper: else files may change,
// or vanish, which is an error, while they are copied.
//
// Nothing is written to disk that is not there; Sync does that. If the layer
// is there already, nothing happens. Cut off at any point, by an error, ctx
// or a kill, it leaves no layer. Classes: as FreezeUpper, and ErrExhausted
// for a full volume.
func (s *Store) CopyUpper(ctx context.Context, id sandbox.ID, layer string) error {
	dir, err := s.sandboxDir(id)
	if err != nil {
		return err
	}
	if _, err := s.upperLayerDir(layer); err != nil {
		return err
	}
	if s.HasLayer(layer) {
		return nil
	}
	upper := filepath.Join(dir, "upper")
	if _, err := os.Lstat(upper); errors.Is(err, os.ErrNotExist) {
		return sandbox.Errorf(sandbox.ErrNotFound, "no_upper", "sandbox %s has no files to copy: %w", id, err)
	}
	err = s.buildUpperLayer(layer, func(tree string) (upperInfo, error) {
		return s.copyTree(ctx, upper, tree)
	})
	if err != nil {
		return spaceError(fmt.Sprintf("copy the upper of %s to %s", id, layer), err)
	}
	return nil
}

// buildUpperLayer stages a layer, has fill fill the directory of its files,
// and puts it in its place.
func (s *Store) buildUpperLayer(layer string, fill func(tree string) (upperInfo, error)) (err error) {
	to, err := s.upperLayerDir(layer)
	if err != nil {
		return err
	}
	stage := filepath.Join(stagingDir, filepath.Base(to))
	if err := os.Mkdir(s.vol.path(stage), 0o700); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.trash.add(stage))
		}
	}()
	tree := s.vol.path(stage, "upper")
	if err := os.Mkdir(tree, 0o700); err != nil {
		return err
	}
	info, err := fill(tree)
	if err != nil {
		return err
	}
	info.Layer = layer
	if err := writeRecord(s.vol.path(stage, "layer.json"), info); err != nil {
		return err
	}
	return unix.Renameat2(unix.AT_FDCWD, s.vol.path(stage), unix.AT_FDCWD, s.vol.path(to), unix.RENAME_NOREPLACE)
}

// copyWorkers copy directories at the same time: more than there are
// processors, for a clone first waits until the file's data is on disk.
const copyWorkers = 4

// copyTree copies a tree into an empty directory of the same filesystem.
func (s *Store) copyTree(ctx context.Context, from, to string) (upperInfo, error) {
	src, err := unix.Open(from, openDirFlags, 0)
	if err != nil {
		return upperInfo{}, &os.PathError{Op: "open", Path: from, Err: err}
	}
	dst, err := unix.Open(to, openDirFlags, 0)
	if err != nil {
		return upperInfo{}, errors.Join(&os.PathError{Op: "open", Path: to, Err: err}, unix.Close(src))
	}
	c := newCopier(ctx, s.vol.root)
	c.open.Add(1)
	c.push(copyDir{src: src, dst: dst})
	var done sync.WaitGroup
	for range copyWorkers {
		done.Go(func() { c.fail(onCopyThread(c.work)) })
	}
	done.Wait()
	for _, d := range c.todo { // after an error
		d.close()
	}
	return upperInfo{Bytes: c.bytes.Load(), Files: c.files.Load()}, c.err
}

// onCopyThread runs fn on a thread of its own without umask, so that files
// get the mode they are created with.
func onCopyThread(fn func() error) error {
	return linux.OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return os.NewSyscallError("unshare fs", err)
		}
		unix.Umask(0)
		return fn()
	})
}

// copier copies trees of one filesystem. Directories wait in todo, the newest
// first, until a worker takes one: it copies what is in it and adds the
// directories in it to todo. So no more than a few are open at a time.
type copier struct {
	ctx     context.Context //nolint:containedctx // lives as long as one copy
	vol     *os.File
	bytes   atomic.Int64
	files   atomic.Int64
	open    atomic.Int32 // directories in todo that are open
	noClone atomic.Bool  // the filesystem cannot share blocks

	links struct {
		sync.Mutex
		made map[linkKey]*copiedLink
	}

	mu   sync.Mutex // guards the rest
	more *sync.Cond // todo, busy or err changed
	todo []copyDir
	busy int
	err  error
}

// linkKey names a file with several names: its inode and, where several trees
// are merged, which tree it is of.
type linkKey struct {
	tree int
	ino  uint64
}

// copiedLink is the copy of such a file.
type copiedLink struct {
	at   handle
	left uint64 // names still to come
}

// copyDir is a directory to copy, and the one, made already, to copy it to:
// both open, or, if there are very many, both remembered.
type copyDir struct {
	src, dst     int
	srcAt, dstAt handle
}

func (d copyDir) close() {
	if d.srcAt.data == "" {
		_ = unix.Close(d.src)
		_ = unix.Close(d.dst)
	}
}

// copyOpen is how many directories in todo may be open.
const copyOpen = 256

func newCopier(ctx context.Context, vol *os.File) *copier {
	c := &copier{ctx: ctx, vol: vol}
	c.more = sync.NewCond(&c.mu)
	c.links.made = map[linkKey]*copiedLink{}
	return c
}

func (c *copier) push(d copyDir) {
	c.mu.Lock()
	c.todo = append(c.todo, d)
	c.mu.Unlock()
	c.more.Signal()
}

// pop waits for a directory to copy; false when there will be none.
func (c *copier) pop() (copyDir, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.err == nil && len(c.todo) == 0 && c.busy > 0 {
		c.more.Wait()
	}
	if c.err != nil || len(c.todo) == 0 {
		return copyDir{}, false
	}
	last := len(c.todo) - 1
	d := c.todo[last]
	c.todo = c.todo[:last]
	c.busy++
	return d, true
}

func (c *copier) done() {
	c.mu.Lock()
	c.busy--
	c.mu.Unlock()
	c.more.Broadcast()
}

// fail keeps the first error, which ends the work of all.
func (c *copier) fail(err error) {
	if err == nil {
		return
	}
	c.mu.Lock()
	if c.err == nil {
		c.err = err
	}
	c.mu.Unlock()
	c.more.Broadcast()
}

func (c *copier) failed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err != nil
}

// work copies directories until there are no more.
func (c *copier) work() error {
	w := &copyWorker{copier: c}
	for {
		d, ok := c.pop()
		if !ok {
			return nil
		}
		err := w.take(d)
		c.fail(err)
		c.done()
	}
}

// take copies the entries of one directory and then gives it its attributes;
// the directories in it come later, which changes neither times nor entries.
func (w *copyWorker) take(d copyDir) (err error) {
	if d.srcAt.data == "" {
		w.open.Add(-1)
	} else {
		if d.src, err = d.srcAt.open(w.vol, openDirFlags); err != nil {
			return err
		}
		if d.dst, err = d.dstAt.open(w.vol, openDirFlags); err != nil {
			return errors.Join(err, unix.Close(d.src))
		}
		d.srcAt, d.dstAt = handle{}, handle{}
	}
	defer d.close()
	err = w.reader.each(d.src, func(e dirent) error {
		if err := w.ctx.Err(); err != nil {
			return err
		}
		if e.kind == unix.DT_DIR {
			return w.sub(d, e.name)
		}
		if e.kind == unix.DT_UNKNOWN {
			var st unix.Stat_t
			if err := unix.Fstatat(d.src, e.name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
				return &os.PathError{Op: "stat", Path: e.name, Err: err}
			}
			if st.Mode&unix.S_IFMT == unix.S_IFDIR {
				return w.sub(d, e.name)
			}
		}
		return w.entry(0, d.src, d.dst, e)
	})
	if err == nil && w.failed() {
		return nil // whoever did reports it
	}
	if err == nil {
		err = w.dirAttrs(d.src, d.dst)
	}
	return err
}

// sub makes a directory and leaves its content for later.
func (w *copyWorker) sub(d copyDir, name string) (err error) {
	if err := unix.Mkdirat(d.dst, name, 0o700); err != nil {
		return &os.PathError{Op: "mkdir", Path: name, Err: err}
	}
	var sub copyDir
	if w.open.Load() >= copyOpen {
		sub.srcAt, err = handleAt(d.src, name)
		if err == nil {
			sub.dstAt, err = handleAt(d.dst, name)
		}
		if err != nil {
			return err
		}
		w.push(sub)
		return nil
	}
	if sub.src, err = unix.Openat(d.src, name, openDirFlags, 0); err != nil {
		return &os.PathError{Op: "open", Path: name, Err: err}
	}
	if sub.dst, err = unix.Openat(d.dst, name, openDirFlags, 0); err != nil {
		return errors.Join(&os.PathError{Op: "open", Path: name, Err: err}, unix.Close(sub.src))
	}
	w.open.Add(1)
	w.push(sub)
	return nil
}
