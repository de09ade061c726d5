package rootfs

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// UpperStamp returns a fingerprint of an upper. Two that are equal say that
// no name, content or attribute in it changed in between, with one exception:
// a process that writes through a shared mapping to a page it had written to
// before leaves no trace until the page goes to disk (mmap(2), NOTES).
//
// It reads inodes, not contents: each counts with its change time, which
// nobody can set. A change in the tick of the clock in which the stamp is
// taken would leave the time as it is; while the upper is that fresh, every
// stamp is another. Class ErrNotFound: no upper.
func (s *Store) UpperStamp(id sandbox.ID) (string, error) {
	dir, err := s.sandboxDir(id)
	if err != nil {
		return "", err
	}
	// Before the walk: what changes after a look at it has this time or a later one.
	now, err := linux.FileClock()
	if err != nil {
		return "", fmt.Errorf("rootfs: the clock of file times: %w", err)
	}
	var inodes, sum uint64
	var last int64
	err = s.walkTree(context.Background(), dir+"/upper", func(st *unix.Stat_t) {
		inodes++
		sum += mix(st.Ino ^ mix(uint64(st.Ctim.Sec)^mix(uint64(st.Ctim.Nsec))))
		last = max(last, st.Ctim.Nano())
	})
	if errors.Is(err, os.ErrNotExist) {
		return "", sandbox.Errorf(sandbox.ErrNotFound, "no_upper", "sandbox %s has no files: %w", id, err)
	}
	if err != nil {
		return "", fmt.Errorf("rootfs: stamp of %s: %w", id, err)
	}
	stamp := fmt.Sprintf("%d.%x.%016x", inodes, last, sum)
	if now.UnixNano()-last < coarseClock.Nanoseconds() {
		stamp += FreshStamp + rand.Text()
	}
	return stamp, nil
}

// coarseClock is more than a tick of the clock file times are taken from: 10
// ms at CONFIG_HZ=100, the slowest there is.
const coarseClock = 25 * time.Millisecond

// StampTick is how long after the last change a stamp is one of its own.
const StampTick = coarseClock

// FreshStamp is part of a stamp that was taken within StampTick of the last
// change: it equals no other, though nothing may change any more.
const FreshStamp = "+"

// mix is the finalizer of splitmix64: each bit of x changes half of the result.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
