package rootfs

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"os"
	"path/filepath"
	"runtime"
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
// A copy of an upper that was copied before may have what changed since only.
// It then lies on those that are returned, lowest first, earlier copies of the
// same upper, which must lie between it and what the upper lies on; the caller
// sees to it that none is removed meanwhile.
//
// Nothing is written to disk that is not there; Sync does that. If the layer
// is there already, nothing happens. Cut off at any point, by an error, ctx
// or a kill, it leaves no layer. Classes: as FreezeUpper, and ErrExhausted
// for a full volume.
func (s *Store) CopyUpper(ctx context.Context, id sandbox.ID, layer string) (on []string, err error) {
	dir, err := s.sandboxDir(id)
	if err != nil {
		return nil, err
	}
	if _, err := s.upperLayerDir(layer); err != nil {
		return nil, err
	}
	if s.HasLayer(layer) {
		info, err := s.upperInfo(layer)
		return info.On, err
	}
	u := upperCopy{s: s, id: id, upper: filepath.Join(dir, "upper"), layer: layer}
	if _, err := os.Lstat(u.upper); errors.Is(err, os.ErrNotExist) {
		return nil, sandbox.Errorf(sandbox.ErrNotFound, "no_upper", "sandbox %s has no files to copy: %w", id, err)
	}
	if err := u.run(ctx); err != nil {
		return nil, spaceError(fmt.Sprintf("copy the upper of %s to %s", id, layer), err)
	}
	return u.on, nil
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

// copyWorkers is how many copy directories at the same time: more than there
// are processors where these are few, for a clone first waits until the file's
// data is on disk.
func copyWorkers() int { return min(max(4, runtime.GOMAXPROCS(0)), 16) }

// copyTree copies a tree into an empty directory of the same filesystem.
func (s *Store) copyTree(ctx context.Context, from, to string) (upperInfo, error) {
	return newCopier(ctx, s.vol.root).tree(from, to)
}

func (c *copier) tree(from, to string) (upperInfo, error) {
	top, err := openPair(openSub(unix.AT_FDCWD, from), openSub(unix.AT_FDCWD, to))
	if err != nil {
		return upperInfo{}, err
	}
	c.open.Add(1)
	c.push(copyDir{open: top})
	var done sync.WaitGroup
	for range copyWorkers() {
		done.Go(func() { c.fail(onCopyThread(c.work)) })
	}
	done.Wait()
	for _, d := range c.todo { // after an error
		d.giveUp()
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

// copier copies trees of one filesystem. Directories wait in its queue until a
// worker takes one: it copies what is in it and leaves the directories in it
// to the queue.
type copier struct {
	*treeQueue[copyDir]

	ctx     context.Context //nolint:containedctx // lives as long as one copy
	vol     *os.File
	bytes   atomic.Int64
	files   atomic.Int64
	open    atomic.Int32 // directories in the queue that are open
	noClone atomic.Bool  // the filesystem cannot share blocks

	count   *maphash.Seed // add names up,
	names   atomic.Uint64 // as nameSum counts them;
	unknown atomic.Bool   // the filesystem did not tell the kind of some

	links struct {
		sync.Mutex
		made map[linkKey]*copiedLink
	}
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
// both open, or, if there are very many, both remembered. Or it is a part of
// one that another worker began.
type copyDir struct {
	open         *copyPair
	srcAt, dstAt handle
	part         []dirent
}

// copyPair is a directory and its copy, open until every part is done.
type copyPair struct {
	src, dst int
	ino      uint64 // of src, where names are counted
	parts    atomic.Int32
}

func (p *copyPair) close() {
	_ = unix.Close(p.src)
	_ = unix.Close(p.dst)
}

func (d copyDir) giveUp() {
	if d.open != nil && d.open.parts.Add(-1) == 0 {
		d.open.close()
	}
}

// openPair opens a directory and its copy.
func openPair(src, dst func() (int, error)) (*copyPair, error) {
	var p copyPair
	var err error
	p.parts.Store(1)
	if p.src, err = src(); err != nil {
		return nil, err
	}
	if p.dst, err = dst(); err != nil {
		return nil, errors.Join(err, unix.Close(p.src))
	}
	return &p, nil
}

func openSub(dir int, name string) func() (int, error) {
	return func() (int, error) {
		fd, err := unix.Openat(dir, name, openDirFlags, 0)
		if err != nil {
			return -1, &os.PathError{Op: "open", Path: name, Err: err}
		}
		return fd, nil
	}
}

// copyOpen is how many directories in a queue may be open.
const copyOpen = 256

func newCopier(ctx context.Context, vol *os.File) *copier {
	c := &copier{treeQueue: newTreeQueue[copyDir](), ctx: ctx, vol: vol}
	c.links.made = map[linkKey]*copiedLink{}
	return c
}

// work copies directories until there are no more.
func (c *copier) work() error {
	w := &copyWorker{copier: c}
	c.each(w.take)
	return nil
}

// copyPart is how many entries of a directory are a worker's at a time.
const copyPart = 128

// take copies the entries of one directory, or a part of them. Directories in
// it come later.
func (w *copyWorker) take(d copyDir) (err error) {
	if d.part != nil {
		return w.finish(d.open, w.entries(d.open, d.part))
	}
	p := d.open
	if p != nil {
		w.open.Add(-1)
	} else {
		p, err = openPair(
			func() (int, error) { return d.srcAt.open(w.vol, openDirFlags) },
			func() (int, error) { return d.dstAt.open(w.vol, openDirFlags) })
		if err != nil {
			return err
		}
	}
	if err := w.begin(p); err != nil {
		return w.finish(p, err)
	}
	var part []dirent
	err = w.reader.each(p.src, func(e dirent) error {
		w.counted(p, e)
		if e.kind == unix.DT_UNKNOWN {
			var st unix.Stat_t
			if err := unix.Fstatat(p.src, e.name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
				return &os.PathError{Op: "stat", Path: e.name, Err: err}
			}
			if st.Mode&unix.S_IFMT == unix.S_IFDIR {
				e.kind = unix.DT_DIR
			}
		}
		if e.kind == unix.DT_DIR {
			return w.sub(p, e.name)
		}
		if part = append(part, e); len(part) < copyPart {
			return nil
		}
		full := part
		if w.starved() {
			p.parts.Add(1)
			w.push(copyDir{open: p, part: full})
			part = nil
			return nil
		}
		part = part[:0]
		return w.entries(p, full)
	})
	if err == nil {
		err = w.entries(p, part)
	}
	return w.finish(p, err)
}

// begin prepares for the names of a directory to be counted.
func (w *copyWorker) begin(p *copyPair) error {
	if w.count == nil {
		return nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(p.src, &st); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	p.ino = st.Ino
	return nil
}

func (w *copyWorker) counted(p *copyPair, e dirent) {
	switch {
	case w.count == nil || e.kind == unix.DT_SOCK:
	case e.kind == unix.DT_UNKNOWN:
		w.unknown.Store(true)
	default:
		w.names.Add(nameSum(*w.count, p.ino, e.name, e.kind))
	}
}

func (w *copyWorker) entries(p *copyPair, part []dirent) error {
	for _, e := range part {
		if err := w.ctx.Err(); err != nil {
			return err
		}
		if err := w.entry(0, p.src, p.dst, e); err != nil {
			return err
		}
	}
	return nil
}

// finish ends a part. After the last, nothing changes the directory's times
// any more, and it gets its attributes; directories in it are there already.
func (w *copyWorker) finish(p *copyPair, err error) error {
	w.fail(err) // before others see that this part is done
	if p.parts.Add(-1) > 0 {
		return nil
	}
	defer p.close()
	if w.failed() {
		return nil
	}
	return w.dirAttrs(p.src, p.dst)
}

// sub makes a directory and leaves its content for later.
func (w *copyWorker) sub(p *copyPair, name string) (err error) {
	if err := unix.Mkdirat(p.dst, name, 0o700); err != nil {
		return &os.PathError{Op: "mkdir", Path: name, Err: err}
	}
	var sub copyDir
	if w.open.Load() < copyOpen {
		sub.open, err = openPair(openSub(p.src, name), openSub(p.dst, name))
		w.open.Add(1)
	} else if sub.srcAt, err = handleAt(p.src, name); err == nil {
		sub.dstAt, err = handleAt(p.dst, name)
	}
	if err != nil {
		return err
	}
	w.push(sub)
	return nil
}
