package initd

import (
	"slices"
	"testing"
)

func TestSysVIDs(t *testing.T) {
	const head = "       key      shmid perms                  size  cpid\n"
	for _, c := range []struct {
		list string
		want []int
		ok   bool
	}{
		{"", nil, true},
		{head, nil, true},
		{head + "         0          0   600                  4096  1\n-123456789    2147483647   644  1 1\n", []int{0, 2147483647}, true},
		{head + "         0          7", []int{7}, true},
		{head + "\n", nil, false},
		{head + "1 x 600\n", nil, false},
	} {
		got, err := sysvIDs([]byte(c.list))
		if (err == nil) != c.ok || !slices.Equal(got, c.want) {
			t.Errorf("%q: %v, %v", c.list, got, err)
		}
	}
}
