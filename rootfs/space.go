package rootfs

import (
	"os"

	"golang.org/x/sys/unix"
)

// Space is what the volume has.
type Space struct{ Free, Total uint64 } // bytes

// Level is how much of the volume is free.
type Level string

// The levels. While it is SpaceLow nothing is imported; what is free below
// SpaceFull is kept for those who make room.
const (
	SpaceAmple Level = "ample"
	SpaceLow   Level = "low"
	SpaceFull  Level = "full"
)

// Low is the number of free bytes below which the volume is low: a tenth, or
// 2 GiB where that is less. It is full below a third of that.
func (s Space) Low() uint64 { return min(s.Total/10, 2<<30) }

// Level is the level now, given that before: it rises only with some room more,
// lest it go back and forth.
func (s Space) Level(was Level) Level {
	low, full := s.Low(), s.Low()/3
	switch was {
	case SpaceFull:
		full += full / 4
		low += low / 4
	case SpaceLow:
		low += low / 4
	}
	switch {
	case s.Free < full:
		return SpaceFull
	case s.Free < low:
		return SpaceLow
	}
	return SpaceAmple
}

// Space returns what is free on the volume now.
func (s *Store) Space() (Space, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(s.vol.root.Fd()), &st); err != nil {
		return Space{}, os.NewSyscallError("fstatfs", err)
	}
	block := uint64(max(st.Bsize, 1))
	return Space{Free: st.Bavail * block, Total: st.Blocks * block}, nil
}
