package state

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// disk makes commits durable, many with one fsync. A commit is served by an
// fsync that began after it: until then the next to wait begins one, and
// those who come meanwhile wait for the one after.
//
// An fsync that failed is the last: Linux reports a failed write-back once and
// then takes the pages for clean, so that a second fsync would succeed and
// prove nothing (fsync(2), NOTES). From then on no durable write succeeds until
// the database was opened anew, which reads the log back and copies it into
// the database with an fsync of its own.
type disk struct {
	sync func() error  // writes the log's pages to disk
	last atomic.Uint64 // number of the newest commit
	soon atomic.Bool   // a flush is due

	mu      sync.Mutex
	ended   sync.Cond // an fsync ended
	syncing bool
	saved   uint64 // commits up to this one are on disk
	err     error  // of the fsync that failed
}

func newDisk(sync func() error) *disk {
	k := &disk{sync: sync}
	k.ended.L = &k.mu
	return k
}

// committed numbers a commit; the writer calls it in its turn, so that the
// numbers are in the order of the log.
func (k *disk) committed() uint64 { return k.last.Add(1) }

// flushWithin bounds what a power cut takes of the commits that wait for no
// fsync: that a sandbox was made must not be lost much later than its files.
const flushWithin = time.Second

// later has the commits there are then on disk within flushWithin. Its error
// is the one the next durable write meets.
func (k *disk) later() {
	if k.soon.CompareAndSwap(false, true) {
		time.AfterFunc(flushWithin, func() {
			k.soon.Store(false)
			_ = k.wait(k.last.Load())
		})
	}
}

// failed returns the error that keeps commits from becoming durable.
func (k *disk) failed() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.err
}

// wait returns when a commit is on disk.
func (k *disk) wait(commit uint64) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	for k.saved < commit && k.err == nil {
		if k.syncing {
			k.ended.Wait()
			continue
		}
		k.flush()
	}
	if k.saved >= commit {
		return nil
	}
	return k.err
}

// flush runs one fsync, with mu given up meanwhile.
func (k *disk) flush() {
	k.syncing = true
	upTo := k.last.Load() // before it begins: of a later commit it may miss pages
	k.mu.Unlock()
	err := k.sync()
	k.mu.Lock()
	k.syncing = false
	if err == nil {
		k.saved = upTo
	} else {
		k.err = sandbox.Errorf(sandbox.ErrUnavailable, "database_not_durable",
			"the disk with the database refused a write, so nothing can be promised to last: mend the disk, then restart the daemon: %w", err)
	}
	k.ended.Broadcast()
}

// The log is folded into the database every so many commits, in the
// background: in the writer's turn, where SQLite would do it, every hundredth
// create would take milliseconds. It goes on at its start again when all was
// folded, nobody reads it and somebody writes. Where that does not come to
// pass, or the background fails, SQLite folds it in a commit once it has
// maxLog pages.
const (
	checkpointEvery = 256
	maxLog          = 16000
	logRoom         = 2 << 20 // bytes, see keepRoom
)

// askCheckpoint is called in the writer's turn.
func (d *DB) askCheckpoint(commit uint64) {
	if commit%checkpointEvery != 0 {
		return
	}
	select {
	case d.full <- struct{}{}:
	default: // asked already
	}
}

// checkpoints folds the log whenever it was asked for. Its errors are those
// the next durable write or SQLite's own checkpoint meets.
func (d *DB) checkpoints() {
	for range d.full {
		_, _ = d.reader.ExecContext(context.Background(), `PRAGMA wal_checkpoint(PASSIVE)`)
	}
}

// openLog opens the write-ahead log for its fsync. SQLite has made it, keeps
// it while a connection is open and holds no POSIX lock on it, which closing
// a second descriptor would drop. What was done to the log and its directory
// until now is durable when it returns.
func openLog(path string) (*os.File, error) {
	f, err := os.OpenFile(path+"-wal", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("opening the log of the database: %w", err)
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("opening the database's directory: %w", err), f.Close())
	}
	defer dir.Close()
	if err := errors.Join(f.Sync(), dir.Sync()); err != nil {
		return nil, errors.Join(fmt.Errorf("writing the database's log to disk: %w", err), f.Close())
	}
	return f, nil
}

// keepRoom reserves room for the log, unless there is little: what is committed on
// a full disk goes there, and the next start, which empties the log, has it too.
func (d *DB) keepRoom() {
	var fs unix.Statfs_t
	var st unix.Stat_t
	fd := int(d.log.Fd())
	if errors.Join(unix.Fstatfs(fd, &fs), unix.Fstat(fd, &st)) == nil && st.Blocks*512 < logRoom && int64(fs.Bavail)*fs.Bsize > 4*logRoom {
		_ = unix.Fallocate(fd, unix.FALLOC_FL_KEEP_SIZE, 0, logRoom) // without it there is the ballast
	}
}

// fdatasync writes a file's content to disk, with what is needed to find it. It
// may run while the file is closed, as a flush that was put off does: its
// descriptor is then no other file's.
func fdatasync(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	err = syscall.EINTR
	for errors.Is(err, syscall.EINTR) {
		if raw.Control(func(fd uintptr) { err = syscall.Fdatasync(int(fd)) }) != nil {
			return os.ErrClosed // it fails for nothing else
		}
	}
	if err != nil {
		return &os.PathError{Op: "fdatasync", Path: f.Name(), Err: err}
	}
	return nil
}
