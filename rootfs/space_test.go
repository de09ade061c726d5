package rootfs

import "testing"

func TestSpaceLevels(t *testing.T) {
	const total = 1200
	for _, c := range []struct {
		free      uint64
		was, want Level
	}{
		{1000, SpaceAmple, SpaceAmple},
		{120, SpaceAmple, SpaceAmple},
		{119, SpaceAmple, SpaceLow},
		{149, SpaceLow, SpaceLow}, // it rises with a quarter more
		{150, SpaceLow, SpaceAmple},
		{39, SpaceLow, SpaceFull},
		{49, SpaceFull, SpaceFull},
		{50, SpaceFull, SpaceLow},
		{1000, SpaceFull, SpaceAmple},
		{0, SpaceAmple, SpaceFull},
	} {
		if got := (Space{Free: c.free, Total: total}).Level(c.was); got != c.want {
			t.Errorf("%d of %d free after %s: %s, want %s", c.free, total, c.was, got, c.want)
		}
	}
	if got := (Space{Total: 1 << 50}).Low(); got != 2<<30 {
		t.Errorf("a large volume is low below %d bytes", got)
	}
}
