package initd

import (
	"maps"
	"slices"
	"testing"
)

// TestNetModes: what a daemon finds in its network namespace is what PID 1
// would find there, and PID 1 reads it back; a list it cannot read is refused.
func TestNetModes(t *testing.T) {
	list, err := NetModes()
	if err != nil {
		t.Fatal(err)
	}
	want, err := unusualNet(netDir)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := parseNetModes(list); err != nil || !maps.Equal(got, want) || list == "" {
		t.Errorf("%q reads as %v, %v; want %v", list, got, err, want)
	}
	one := netModes{"netfilter/nf_log": {1, 2, 0o440}}
	for _, c := range []struct {
		list string
		want netModes
		ok   bool
	}{
		{",", netModes{}, true},
		{",netfilter/nf_log:1:2:440", one, true},
		{"x", nil, false},
		{"x:0:0", nil, false},
		{":0:0:440", nil, false},
		{"x:0:0:9", nil, false},
		{"x:-1:0:440", nil, false},
	} {
		if got, err := parseNetModes(c.list); (err == nil) != c.ok || c.ok && !maps.Equal(got, c.want) {
			t.Errorf("%q: %v, %v", c.list, got, err)
		}
	}
}

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
