package rootfs

import (
	"testing"

	"golang.org/x/sys/unix"
)

func TestAmple(t *testing.T) {
	const block = 4096
	plenty := unix.Statfs_t{Bsize: block, Bavail: 2 * ampleBytes / block, Files: 1 << 20, Ffree: 2 * ampleInodes}
	for _, c := range []struct {
		name   string
		change func(*unix.Statfs_t)
		want   bool
	}{
		{"plenty", func(*unix.Statfs_t) {}, true},
		{"just enough", func(st *unix.Statfs_t) { st.Bavail, st.Ffree = ampleBytes/block, ampleInodes }, true},
		{"few bytes", func(st *unix.Statfs_t) { st.Bavail = ampleBytes/block - 1 }, false},
		{"few inodes", func(st *unix.Statfs_t) { st.Ffree = ampleInodes - 1 }, false},
		{"inodes not counted", func(st *unix.Statfs_t) { st.Files, st.Ffree = 0, 0 }, false},
	} {
		st := plenty
		c.change(&st)
		if got := ample(st); got != c.want {
			t.Errorf("%s: ample = %v, want %v", c.name, got, c.want)
		}
	}
}
