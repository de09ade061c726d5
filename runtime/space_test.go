package runtime

import (
	"maps"
	"slices"
	"testing"

	"github.com/sandboxd/sandboxd/rootfs"
)

func TestOverShare(t *testing.T) {
	bounded := func(owner string) bool { return owner != "root" }
	for _, c := range []struct {
		name  string
		use   map[string]int64
		level rootfs.Level
		want  []string
	}{
		{"who holds most, however little", map[string]int64{"root": 80, "a": 1, "b": 2}, rootfs.SpaceLow, []string{"b"}},
		{"all above a share", map[string]int64{"a": 40, "b": 30, "c": 5}, rootfs.SpaceLow, []string{"a", "b"}},
		{"one alone", map[string]int64{"a": 90}, rootfs.SpaceLow, []string{"a"}},
		{"a full one: all but who has no bound", map[string]int64{"root": 10, "a": 80, "b": 0}, rootfs.SpaceFull, []string{"a", "b"}},
		{"none", nil, rootfs.SpaceFull, nil},
	} {
		over := overShare(c.use, 100, c.level, bounded)
		maps.DeleteFunc(over, func(_ string, held bool) bool { return !held })
		if got := slices.Sorted(maps.Keys(over)); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}
