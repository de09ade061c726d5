//go:build root

package cgroup

import (
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// limited makes a settled sandbox with limits on a host that enforces them.
func limited(t *testing.T, l sandbox.Limits) (*Tree, sandbox.ID, *process, string) {
	t.Helper()
	testenv.Need(t, testenv.CgroupControllers)
	tree := newTree(t)
	id, init := settled(t, tree)
	if err := tree.SetLimits(id, l); err != nil {
		t.Fatal(err)
	}
	return tree, id, init, dirOf(t, tree, id, partWork)
}

func TestOOMTakesTheWorkloadAndLeavesPID1(t *testing.T) {
	tree, id, init, work := limited(t, sandbox.Limits{MemoryBytes: 48 << 20})
	w, err := tree.Watch(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Add(id); err != nil {
		t.Fatal(err)
	}
	sub := filepath.Join(work, "p1")
	if err := makeCgroup(sub); err != nil {
		t.Fatal(err)
	}
	bystander := start(t, sub, "wait", "")
	eater := start(t, work, "eat", strconv.Itoa(128<<20))
	for _, p := range []*process{eater, bystander} {
		if st := p.ended(t); st.Signal() != syscall.SIGKILL {
			t.Errorf("a process of the workload ended by %v, want KILL", st)
		}
	}
	e := next(t, w)
	if e.ID != id || e.Kind != EventOOM || e.Count == 0 {
		t.Errorf("event %+v, want an OOM before any end", e)
	}
	u, err := tree.Usage(id)
	if err != nil || u.OOMKills < e.Count || u.MemoryPeakBytes == 0 || u.MemoryPeakBytes > 49<<20 { // charges overlap the limit by some pages
		t.Errorf("usage %+v, %v", u, err)
	}
	select {
	case <-init.done:
		t.Error("PID 1 died of the workload's limit")
	default:
	}
	// The control: without the limit the same process lives.
	if err := tree.SetLimits(id, sandbox.Limits{}); err != nil {
		t.Fatal(err)
	}
	if line := start(t, work, "eat", strconv.Itoa(128<<20)).line(t); line != "ate" {
		t.Errorf("without a limit: %q", line)
	}
	if u, err := tree.Usage(id); err != nil || u.MemoryBytes < 128<<20 {
		t.Errorf("usage %+v, %v", u, err)
	}
}

func TestPIDsLimit(t *testing.T) {
	tree, id, _, work := limited(t, sandbox.Limits{PIDs: 30})
	forks := func() int {
		t.Helper()
		p := start(t, work, "fork", "40")
		n, err := strconv.Atoi(p.line(t))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if n := forks(); n >= 30 {
		t.Errorf("%d processes under a limit of 30 tasks", n)
	}
	u, err := tree.Usage(id)
	if err != nil || u.PIDsDenied == 0 || u.PIDs > 30 || u.PIDsPeak < u.PIDs {
		t.Errorf("usage %+v, %v", u, err)
	}
	if err := tree.KillWork(soon(t), id); err != nil {
		t.Fatal(err)
	}
	if err := tree.SetLimits(id, sandbox.Limits{}); err != nil {
		t.Fatal(err)
	}
	if n := forks(); n != 40 {
		t.Errorf("%d of 40 processes without a limit", n)
	}
}

func TestCPULimitThrottlesAndPins(t *testing.T) {
	tree, id, _, work := limited(t, sandbox.Limits{})
	cpus := func() string { t.Helper(); return start(t, work, "cpus", "").line(t) }
	if n := cpus(); n != strconv.Itoa(runtime.NumCPU()) {
		t.Errorf("without a limit %s cpus, the host has %d", n, runtime.NumCPU())
	}
	start(t, work, "burn", "")
	burned := func(seconds float64) sandbox.Usage {
		t.Helper()
		from, err := tree.Usage(id)
		if err != nil {
			t.Fatal(err)
		}
		now := from
		testenv.Eventually(t, time.Minute, "cpu time is used", func() bool {
			now, err = tree.Usage(id)
			return err == nil && now.CPUSeconds > from.CPUSeconds+seconds
		})
		now.CPUThrottled -= from.CPUThrottled
		return now
	}
	if u := burned(0.5); u.CPUThrottled != 0 {
		t.Errorf("throttled %d times without a limit", u.CPUThrottled)
	}
	if err := tree.SetLimits(id, sandbox.Limits{CPUs: 0.2}); err != nil {
		t.Fatal(err)
	}
	if u := burned(0.3); u.CPUThrottled == 0 {
		t.Error("never throttled at 0.2 cpus")
	}
	if runtime.NumCPU() > 1 {
		if n := cpus(); n != "1" {
			t.Errorf("at 0.2 cpus a program sees %s, want 1", n)
		}
	}
	if err := tree.SetLimits(id, sandbox.Limits{}); err != nil {
		t.Fatal(err)
	}
	if n := cpus(); n != strconv.Itoa(runtime.NumCPU()) {
		t.Errorf("with the limit taken back %s cpus, the host has %d", n, runtime.NumCPU())
	}
}

func TestPinnedSandboxesSpread(t *testing.T) {
	tree, first, _, _ := limited(t, sandbox.Limits{CPUs: 1})
	if runtime.NumCPU() < 2 {
		t.Skip("one cpu leaves nothing to spread over")
	}
	second, _ := settled(t, tree)
	for range 2 { // stays where it is when said again
		if err := tree.SetLimits(second, sandbox.Limits{CPUs: 1}); err != nil {
			t.Fatal(err)
		}
	}
	a, err := read(dirOf(t, tree, first, partWork), "cpuset.cpus")
	if err != nil {
		t.Fatal(err)
	}
	if b, err := read(dirOf(t, tree, second, partWork), "cpuset.cpus"); err != nil || a == b || b == "" {
		t.Errorf("pinned to %q and %q, %v; want different cpus", a, b, err)
	}
}

func TestLimitsAreTakenBack(t *testing.T) {
	devices := wholeDisk(t)
	tree, id, _, work := limited(t, sandbox.Limits{})
	tree.ioDevices = func() []string { return devices }
	full := sandbox.Limits{CPUs: 0.5, CPUWeight: 300, MemoryBytes: 64 << 20, PIDs: 9, IOReadBPS: 1 << 20, IOWriteIOPS: 50}
	for _, c := range []struct {
		limits sandbox.Limits
		want   map[string]string
	}{
		{full, map[string]string{
			"cpu.max": "50000 100000", "../cpu.max": "52500 100000", "../cpu.weight": "300", "memory.max": "67108864", "pids.max": "9",
			"../io.max": devices[0] + " rbps=1048576 wbps=max riops=max wiops=50",
		}},
		{sandbox.Limits{}, map[string]string{
			"cpu.max": "max 100000", "../cpu.weight": "100", "memory.max": "max", "pids.max": "max", "../io.max": "", "../cpu.max": "max 100000",
		}},
	} {
		for range 2 {
			if err := tree.SetLimits(id, c.limits); err != nil {
				t.Fatal(err)
			}
		}
		for file, want := range c.want {
			if got, err := read(work, file); err != nil || got != want {
				t.Errorf("%s is %q, %v; want %q", file, got, err, want)
			}
		}
	}
	for _, e := range tree.Enforcement(full) {
		if !e.Enforced {
			t.Errorf("%+v", e)
		}
	}
	for file, want := range map[string]string{"memory.oom.group": "1", "../init/memory.oom.group": "0", "../init/pids.max": "256"} {
		if got, err := read(work, file); err != nil || got != want {
			t.Errorf("%s is %q, %v; want %q", file, got, err, want)
		}
	}
	tree.ioDevices = func() []string { return []string{"0:999"} }
	if err := tree.SetLimits(id, full); sandbox.CodeOf(err) != "io_device" {
		t.Errorf("a disk that does not exist: %v", err)
	}
}

// wholeDisk returns the first disk of the machine.
func wholeDisk(t *testing.T) []string {
	t.Helper()
	testenv.Need(t, testenv.CgroupControllers)
	found, err := filepath.Glob("/sys/block/*/dev")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range found {
		name := filepath.Base(filepath.Dir(f))
		if b, err := os.ReadFile(f); err == nil && !strings.HasPrefix(name, "sr") {
			return []string{strings.TrimSpace(string(b))}
		}
	}
	t.Fatal("no block device")
	return nil
}

func TestProtectionFollowsTheNumberOfSandboxes(t *testing.T) {
	tree, id, _, _ := limited(t, sandbox.Limits{})
	second, _ := settled(t, tree)
	for _, want := range []string{strconv.Itoa(2 * initMemoryLow), strconv.Itoa(initMemoryLow), "0"} {
		if got, err := read(tree.dir, "memory.low"); err != nil || got != want {
			t.Fatalf("memory.low of the parent is %q, %v; want %s", got, err, want)
		}
		victim := second
		if want == strconv.Itoa(initMemoryLow) {
			victim = id
		}
		if err := tree.Remove(soon(t), victim); err != nil {
			t.Fatal(err)
		}
	}
}
