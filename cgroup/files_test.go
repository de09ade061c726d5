package cgroup

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestFlatKey(t *testing.T) {
	events := "low 0\nhigh 1\nmax 22\noom 3\noom_kill 4\noom_group_kill 5\nbad x\n"
	for key, want := range map[string]uint64{"oom": 3, "oom_kill": 4, "max": 22, "absent": 0, "bad": 0, "": 0} {
		if got := flatKey(events, key); got != want {
			t.Errorf("%q: %d, want %d", key, got, want)
		}
	}
}

func TestParseOwnCgroup(t *testing.T) {
	for in, want := range map[string]string{
		"0::/\n": "/",
		"5:memory:/x\n0::/system.slice/sandboxd.service\n": "/system.slice/sandboxd.service",
		"0::/a:b\n": "/a:b",
	} {
		if got, err := parseOwnCgroup(in); err != nil || got != want {
			t.Errorf("%q: %q, error %v; want %q", in, got, err, want)
		}
	}
	for _, in := range []string{"", "1:cpu:/\n", "0::\n"} {
		if got, err := parseOwnCgroup(in); err == nil {
			t.Errorf("%q: %q, want an error", in, got)
		}
	}
}

func TestParsePIDs(t *testing.T) {
	got, err := parsePIDs("12\n0\n7\n")
	if diff := cmp.Diff([]int{12, 7}, got); diff != "" || err != nil {
		t.Errorf("error %v (-want +got):\n%s", err, diff)
	}
	if _, err := parsePIDs("1\nx\n"); err == nil {
		t.Error("a word passed for a pid")
	}
}

func TestMissing(t *testing.T) {
	got := missing("cpu memory", []string{"cpu", "cpuset", "io"})
	if diff := cmp.Diff([]string{"cpuset", "io"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func FuzzCPUList(f *testing.F) {
	for _, s := range []string{"", "0", "0-3", "0-2,5\n", "1,,2", "-1", "3-1", "0-99999999"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		cpus, err := parseCPUList(s)
		if err != nil {
			return
		}
		if !slices.IsSorted(cpus) {
			t.Fatalf("%q: %v is not sorted", s, cpus)
		}
		again, err := parseCPUList(formatCPUList(cpus))
		if err != nil || !slices.Equal(cpus, again) {
			t.Fatalf("%q: %v, again %v, error %v", s, cpus, again, err)
		}
	})
}

func TestParseCPUList(t *testing.T) {
	for in, want := range map[string][]int{"0-2,5\n": {0, 1, 2, 5}, "3": {3}, "2,0-1,1": {0, 1, 2}, "": nil} {
		if got, err := parseCPUList(in); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %v, error %v; want %v", in, got, err, want)
		}
	}
	for _, in := range []string{"a", "1-", "-1", "3-1", "0-70000"} {
		if got, err := parseCPUList(in); err == nil {
			t.Errorf("%q: %v, want an error", in, got)
		}
	}
}
