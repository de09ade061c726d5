package cgroup

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/sandbox"
)

// render shows a plan as "part/file=content" lines.
func render(plan []setting) []string {
	var out []string
	for _, s := range plan {
		line := s.part + "/" + s.file + "=" + s.content
		if s.reset {
			line += " (reset)"
		}
		out = append(out, line)
	}
	return out
}

func TestPlanLimits(t *testing.T) {
	for _, c := range []struct {
		name    string
		limits  sandbox.Limits
		cpus    []int
		pinned  bool
		devices []string
		have    []string
		want    []string
	}{
		{
			name: "nothing asked resets everything",
			cpus: []int{0, 1}, have: allControllers(), devices: []string{"254:0"},
			want: []string{
				"/cpu.weight=100", "work/cpu.max=max 100000", "/cpu.max=max 100000", "work/cpuset.cpus=0,1 (reset)", "work/memory.max=max", "work/pids.max=max",
				"/io.max=254:0 rbps=max wbps=max riops=max wiops=max (reset)",
			},
		},
		{
			name: "everything asked, on two disks",
			limits: sandbox.Limits{
				CPUs: 1.5, CPUWeight: 250, MemoryBytes: 64 << 20, PIDs: 32,
				IOReadBPS: 1, IOWriteBPS: 2, IOReadIOPS: 3, IOWriteIOPS: 1 << 63,
			},
			cpus: []int{0, 2}, pinned: true, have: allControllers(), devices: []string{"254:0", "7:1"},
			want: []string{
				"/cpu.weight=250", "work/cpu.max=150000 100000", "/cpu.max=157500 100000", "work/cpuset.cpus=0,2", "work/memory.max=67108864", "work/pids.max=32",
				"/io.max=254:0 rbps=1 wbps=2 riops=3 wiops=9223372036854775808",
				"/io.max=7:1 rbps=1 wbps=2 riops=3 wiops=9223372036854775808",
			},
		},
		{
			name:   "only the controllers there are",
			limits: sandbox.Limits{CPUs: 2, MemoryBytes: 64 << 20, PIDs: 5},
			have:   []string{ctlPIDs}, devices: []string{"254:0"},
			want: []string{"work/pids.max=5"},
		},
		{
			name:   "the smallest quota the kernel takes",
			limits: sandbox.Limits{CPUs: 0.01},
			have:   []string{ctlCPU},
			want:   []string{"/cpu.weight=100", "work/cpu.max=1000 100000", "/cpu.max=1500 100000"},
		},
		{name: "no controllers", limits: sandbox.Limits{CPUs: 1, PIDs: 1}},
	} {
		got := render(planLimits(c.limits, c.cpus, c.pinned, c.devices, c.have))
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
	}
}

func TestPlanReads(t *testing.T) {
	l := sandbox.Limits{IOReadBPS: 5, IOWriteBPS: 6, IOReadIOPS: 7, IOWriteIOPS: 8}
	want := []string{"/io.max=254:0 rbps=5 wbps=max riops=7 wiops=max"}
	if diff := cmp.Diff(want, render(planReads(l, []string{"254:0"}, allControllers()))); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := planReads(l, []string{"254:0"}, []string{ctlCPU}); len(got) > 0 {
		t.Errorf("without the controller: %v", got)
	}
	if got := planReads(sandbox.Limits{IOWriteBPS: 6}, []string{"254:0"}, allControllers()); len(got) != 1 || !got[0].reset {
		t.Errorf("without a limit on reads: %+v, want one that takes limits back", got)
	}
}

func TestPlanFixedWithoutControllers(t *testing.T) {
	want := []string{"work/cgroup.max.descendants=4096", "work/cgroup.max.depth=1"}
	if diff := cmp.Diff(want, render(planFixed(nil))); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	all := render(planFixed(allControllers()))
	for _, line := range []string{"work/memory.oom.group=1", "work/memory.swap.max=0", "init/pids.max=256"} {
		if !slices.Contains(all, line) {
			t.Errorf("with controllers %v lacks %s", all, line)
		}
	}
}

func TestCPUsWanted(t *testing.T) {
	for _, c := range []struct {
		cpus    float64
		allowed int
		want    int
	}{{0, 4, 0}, {0.01, 4, 1}, {1, 4, 1}, {1.01, 4, 2}, {3, 4, 3}, {4, 4, 0}, {9, 4, 0}, {0.5, 1, 0}} {
		if got := cpusWanted(sandbox.Limits{CPUs: c.cpus}, c.allowed); got != c.want {
			t.Errorf("%v of %d: %d, want %d", c.cpus, c.allowed, got, c.want)
		}
	}
}

func TestPickCPUs(t *testing.T) {
	for _, c := range []struct {
		allowed []int
		load    map[int]float64
		n       int
		want    []int
	}{
		{[]int{0, 1, 2, 3}, nil, 2, []int{0, 1}},
		{[]int{0, 1, 2, 3}, map[int]float64{0: 1, 1: 0.5}, 2, []int{2, 3}},
		{[]int{0, 1, 2, 3}, map[int]float64{0: 1, 1: 0.5, 2: 2, 3: 2}, 2, []int{0, 1}},
		{[]int{4, 9}, map[int]float64{4: 1}, 1, []int{9}},
		{[]int{1, 0}, map[int]float64{0: 1, 1: 1}, 1, []int{0}},
	} {
		before := slices.Clone(c.allowed)
		got := pickCPUs(c.allowed, c.load, c.n)
		if diff := cmp.Diff(c.want, got); diff != "" || !slices.Equal(before, c.allowed) {
			t.Errorf("%d of %v with %v (-want +got):\n%s", c.n, c.allowed, c.load, diff)
		}
	}
}

func TestPlanEnforcement(t *testing.T) {
	limits := sandbox.Limits{CPUs: 2, CPUWeight: 50, MemoryBytes: 1024, PIDs: 7, IOWriteBPS: 9}
	for _, c := range []struct {
		name           string
		have, devices  []string
		enforced, lack []string // limits in each state
	}{
		{"all", allControllers(), []string{"8:0"}, []string{"cpu", "memory", "pids", "io"}, nil},
		{"none", nil, []string{"8:0"}, nil, []string{"cpu", "memory", "pids", "io"}},
		{"no disk", allControllers(), nil, []string{"cpu", "memory", "pids"}, []string{"io"}},
		{"no cpuset", []string{ctlCPU}, nil, []string{"cpu"}, []string{"memory", "pids", "io"}},
	} {
		var enforced, lack []string
		for _, e := range planEnforcement(limits, c.have, c.devices) {
			if e.Enforced {
				enforced = append(enforced, e.Limit)
				continue
			}
			lack = append(lack, e.Limit)
			if e.Why == "" {
				t.Errorf("%s: %s is not enforced and does not say why", c.name, e.Limit)
			}
		}
		if !slices.Equal(enforced, c.enforced) || !slices.Equal(lack, c.lack) {
			t.Errorf("%s: enforced %v, not %v; want %v, not %v", c.name, enforced, lack, c.enforced, c.lack)
		}
	}
	asked := map[string]string{}
	for _, e := range planEnforcement(limits, nil, nil) {
		asked[e.Limit] = e.Asked
	}
	want := map[string]string{
		"cpu": "2 cpus, weight 50", "memory": "1KiB", "pids": "7", "io": "rbps=max wbps=9 riops=max wiops=max",
	}
	if diff := cmp.Diff(want, asked); diff != "" {
		t.Errorf("asked (-want +got):\n%s", diff)
	}
	for _, e := range planEnforcement(sandbox.Limits{}, nil, nil) {
		if e.Asked != none {
			t.Errorf("%s asked %q, want %q", e.Limit, e.Asked, none)
		}
	}
}

func TestInTheWay(t *testing.T) {
	for _, c := range []struct {
		own, parent string
		want        bool
	}{
		{"/", "/sandboxd", true},
		{"/sandboxd", "/sandboxd", true},
		{"/a", "/a/b", true},
		{"/a", "/ab", false},
		{"/a/b", "/a", false},
		{"/system.slice/x.service", "/sandboxd", false},
	} {
		if got := inTheWay(c.own, c.parent); got != c.want {
			t.Errorf("%s and %s: %v, want %v", c.own, c.parent, got, c.want)
		}
	}
}

func TestAncestors(t *testing.T) {
	want := []string{"/m", "/m/a", "/m/a/b"}
	if diff := cmp.Diff(want, ancestors("/m", "/a/b")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestOpenRefusesParents(t *testing.T) {
	for _, parent := range []string{"", "/", "x", "/a/", "/a/../b", "/sys/fs/cgroup/x"} {
		_, err := Open(Config{Mount: "/proc", Parent: parent})
		if sandbox.CodeOf(err) != "invalid_cgroup_parent" {
			t.Errorf("parent %q: %v", parent, err)
		}
	}
	if _, err := Open(Config{Mount: "/proc", Parent: "/a"}); sandbox.CodeOf(err) != "no_cgroup2" {
		t.Errorf("a mount that is no cgroup2: %v", err)
	}
}

func TestIDsNeverBecomePaths(t *testing.T) {
	tree := &Tree{dir: t.TempDir()}
	for _, id := range []sandbox.ID{"", "..", "sb/../../x", "sbaaaaaaaaaaaa/work"} {
		if err := tree.Create(id); sandbox.CodeOf(err) != "invalid_id" {
			t.Errorf("Create(%q): %v", id, err)
		}
		if err := tree.Remove(t.Context(), id); sandbox.CodeOf(err) != "invalid_id" {
			t.Errorf("Remove(%q): %v", id, err)
		}
	}
}
