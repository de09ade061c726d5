package rootfs

import (
	"context"
	"errors"
	"hash/maphash"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// seen is what one look at an upper found. A later look tells what changed:
// every change to a file gives it a new change time, which nobody can set.
//
// Two things could hide a change, and are ruled out. The clock that times are
// taken from ticks slowly: a file that changed within a tick of the look may
// change again without a new time, so the time of one that fresh is not kept.
// And a page of a shared mapping that is dirty can be written again without
// anybody noticing: only when it goes to disk is it protected anew. A clone
// (FICLONE) writes it there first; so what was copied in another way is not
// kept at all.
type seen struct {
	root  seenFile
	files int
	names uint64 // sum over all names, as nameSum counts them
	seed  maphash.Seed
}

// seenFile is one name in an upper.
type seenFile struct {
	name  string
	mode  uint32
	links bool // the inode has more names
	ino   uint64
	size  int64
	ctime int64 // in nanoseconds; 0: too fresh to tell from a later one
	dir   *seenDir
}

// seenDir is what a directory has besides.
type seenDir struct {
	opaque   bool
	redirect string
	files    []seenFile // by name, no sockets
}

func (f *seenFile) kind() uint8 { return uint8(f.mode & unix.S_IFMT >> 12) } // as struct dirent has it

// whiteout marks, in mode, a character device of number 0: no other is kept
// with that size.
const seenWhiteout = -1

func (f *seenFile) whiteout() bool { return f.size == seenWhiteout }

// same reports whether the file is, without doubt, as it was.
func (f *seenFile) same(was *seenFile) bool {
	return was.ctime != 0 && f.ctime == was.ctime && f.ino == was.ino && f.mode == was.mode && f.size == was.size && f.links == was.links
}

// What is larger or deeper is copied whole each time.
const (
	maxSeenFiles = 1 << 20
	maxSeenDepth = 2000
)

// errUnseen says that no account of an upper can be given.
var errUnseen = errors.New("too large, too deep or too odd to give account of")

// nameSum is what a name adds to the sum over all names of a tree.
func nameSum(seed maphash.Seed, dir uint64, name string, kind uint8) uint64 {
	return mix(maphash.String(seed, name) ^ mix(dir^mix(uint64(kind))))
}

// look gives account of the upper at path. now is what linux.FileClock said
// before: whatever is changed from then on will be seen to be.
func (s *Store) look(ctx context.Context, path string, now time.Time) (*seen, error) {
	l := &looker{
		treeQueue: newTreeQueue[lookDir](), ctx: ctx, vol: s.vol.root,
		before: now.Add(-coarseClock).UnixNano(), seed: maphash.MakeSeed(),
	}
	fd, err := openSub(unix.AT_FDCWD, path)()
	if err != nil {
		return nil, err
	}
	seen := &seen{seed: l.seed}
	l.open.Add(1)
	l.push(lookDir{of: &seen.root, fd: fd})
	var done sync.WaitGroup
	for range min(copyWorkers(), runtime.GOMAXPROCS(0)) {
		done.Go(func() {
			var reader dirReader
			l.each(func(d lookDir) error { return l.dir(d, &reader) })
		})
	}
	done.Wait()
	for _, d := range l.todo { // after an error
		if d.fd >= 0 {
			_ = unix.Close(d.fd)
		}
	}
	if l.err != nil {
		return nil, l.err
	}
	seen.files, seen.names = int(l.files.Load()), l.names.Load()
	return seen, nil
}

// looker looks into directories; several workers do. What they find, each
// notes in the directory it has.
type looker struct {
	*treeQueue[lookDir]

	ctx    context.Context //nolint:containedctx // lives as long as one look
	vol    *os.File
	before int64
	seed   maphash.Seed
	files  atomic.Int64
	names  atomic.Uint64
	open   atomic.Int32 // directories in the queue that are open
}

// lookDir is a directory still to be looked into: open, or, if there are very
// many, remembered.
type lookDir struct {
	of    *seenFile
	fd    int // -1: see at
	at    handle
	depth int
}

func (l *looker) dir(d lookDir, reader *dirReader) error {
	if d.fd < 0 {
		var err error
		if d.fd, err = d.at.open(l.vol, openDirFlags); err != nil {
			return err
		}
	} else {
		l.open.Add(-1)
	}
	defer unix.Close(d.fd)
	if err := l.ctx.Err(); err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(d.fd, &st); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	l.note(d.of, &st)
	d.of.size = 0
	d.of.dir = &seenDir{}
	if err := d.of.dir.marks(d.fd); err != nil {
		return err
	}
	if err := l.entries(d, reader); err != nil {
		return err
	}
	return l.below(d)
}

func (d *seenDir) marks(fd int) (err error) {
	opaque, err := overlayValue(fd, "opaque")
	if err != nil {
		return err
	}
	if opaque != "" && opaque != "y" { // a form that no overlay of ours makes
		return errUnseen
	}
	d.opaque = opaque == "y"
	d.redirect, err = overlayValue(fd, "redirect")
	return err
}

func (l *looker) note(f *seenFile, st *unix.Stat_t) {
	f.mode, f.ino, f.size, f.ctime = st.Mode, st.Ino, st.Size, st.Ctim.Nano()
	f.links = st.Nlink > 1 && st.Mode&unix.S_IFMT != unix.S_IFDIR
	if f.ctime >= l.before {
		f.ctime = 0
	}
	if isWhiteout(st) {
		f.size = seenWhiteout
	}
}

// entries notes what is in a directory; of directories, the names.
func (l *looker) entries(d lookDir, reader *dirReader) error {
	dir := d.of.dir
	var names uint64
	err := reader.each(d.fd, func(e dirent) error {
		if e.kind == unix.DT_SOCK {
			return nil
		}
		f := seenFile{name: e.name, mode: unix.S_IFDIR}
		if e.kind != unix.DT_DIR {
			var st unix.Stat_t
			if err := unix.Fstatat(d.fd, e.name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
				return &os.PathError{Op: "stat", Path: e.name, Err: err}
			}
			if st.Mode&unix.S_IFMT == unix.S_IFSOCK {
				return nil
			}
			l.note(&f, &st)
		}
		if l.files.Add(1) > maxSeenFiles {
			return errUnseen
		}
		names += nameSum(l.seed, d.of.ino, e.name, f.kind())
		dir.files = append(dir.files, f)
		return nil
	})
	l.names.Add(names)
	slices.SortFunc(dir.files, func(a, b seenFile) int { return strings.Compare(a.name, b.name) })
	return err
}

// below leaves the directories of one for later.
func (l *looker) below(d lookDir) error {
	for i := range d.of.dir.files {
		f := &d.of.dir.files[i]
		if f.kind() != unix.DT_DIR {
			continue
		}
		if d.depth >= maxSeenDepth {
			return errUnseen
		}
		sub := lookDir{of: f, fd: -1, depth: d.depth + 1}
		var err error
		if l.open.Load() < copyOpen {
			if sub.fd, err = openSub(d.fd, f.name)(); err == nil {
				l.open.Add(1)
			}
		} else {
			sub.at, err = handleAt(d.fd, f.name)
		}
		if err != nil {
			return err
		}
		l.push(sub)
	}
	return nil
}
