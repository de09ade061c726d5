package state

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// ballast is a file of reserved space beside the database. Where the disk is
// full it is given up piece by piece, so that what makes room again can be
// written: removals, ends, the start of the daemon. What needs more room is
// refused until there is enough for the whole ballast again.
type ballast struct {
	path string
	size int64 // of the whole

	mu sync.Mutex
}

const (
	ballastMost   = 32 << 20
	ballastPart   = 16 // of the file system, at most
	ballastPieces = 16
	ballastTick   = 2 * time.Second
	closedSpare   = 64 << 10 // what file systems want for their own accounts
)

func ballastIn(dir string) (*ballast, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return nil, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	size := min(ballastMost, int64(st.Blocks)*st.Bsize/ballastPart)
	return &ballast{path: filepath.Join(dir, "ballast"), size: size}, nil
}

// free is the room there is besides the ballast; much where nobody can tell.
func (b *ballast) free() int64 {
	var st unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(b.path), &st); err != nil {
		return 1 << 62
	}
	return int64(st.Bavail) * st.Bsize
}

// held is how much of it is there.
func (b *ballast) held() int64 {
	st, err := os.Stat(b.path)
	if err != nil {
		return 0
	}
	return st.Size()
}

// release gives a piece of the space back; false where there is none to give.
func (b *ballast) release() bool {
	if b == nil { // none is kept
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	held := b.held()
	return held > 0 && os.Truncate(b.path, max(0, held-b.size/ballastPieces)) == nil
}

// take makes the ballast up to its size, of what is free beyond spare.
func (b *ballast) take(spare int64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	held := b.held()
	more := min(b.size-held, b.free()-spare)
	if more <= 0 {
		return nil
	}
	f, err := os.OpenFile(b.path, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	err = unix.Fallocate(int(f.Fd()), 0, held, more)
	if errors.Is(err, unix.EOPNOTSUPP) {
		_, err = f.WriteAt(make([]byte, more), held)
	}
	if err != nil {
		err = fmt.Errorf("reserve %d KiB in %s: %w", more>>10, b.path, errors.Join(err, f.Truncate(held)))
	}
	return errors.Join(err, f.Close())
}

// MakeRoom gives some of the ballast up where the disk of a state directory is
// full, so that the daemon can start. KeepBallast takes back what is left.
func MakeRoom(dir string) error {
	b, err := ballastIn(dir)
	for range ballastPieces / 4 {
		if err != nil || b.free() >= b.size/2 {
			break
		}
		b.release()
	}
	return err
}

// KeepBallast keeps space reserved beside the database from now on, which a
// full disk gives back. Databases of one directory share it.
func (d *DB) KeepBallast() error {
	b, err := ballastIn(filepath.Dir(d.path))
	if err == nil {
		err = b.take(b.size / ballastPieces)
	}
	d.ballast.Store(b)
	if b != nil {
		d.folded.Go(func() {
			tick := time.NewTicker(ballastTick)
			defer tick.Stop()
			for {
				select {
				case <-d.closing:
					return
				case <-tick.C:
					_ = b.take(b.size) // it is tried again
					d.keepRoom()
				}
			}
		})
	}
	return err
}

// room refuses what makes the database and the volume larger while the disk
// is full: what is left is for what makes them smaller.
func (d *DB) room() error {
	b := d.ballast.Load()
	if b == nil || b.held() >= b.size || b.free() >= b.size {
		return nil
	}
	return sandbox.Errorf(sandbox.ErrExhausted, "disk_full", "the disk with the database is full: only what makes room goes on: remove sandboxes, snapshots or images, or make the disk larger")
}
