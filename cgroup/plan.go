package cgroup

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/cgroups/v3/cgroup2"
	"github.com/docker/go-units"

	"github.com/sandboxd/sandboxd/sandbox"
)

// The parts of a sandbox's tree.
const (
	partID   = ""
	partInit = "init"
	partWork = "work"
)

// The controllers used, in the order in which they are reported.
const (
	ctlCPU    = "cpu"
	ctlCPUSet = "cpuset"
	ctlMemory = "memory"
	ctlPIDs   = "pids"
	ctlIO     = "io"
	ctlNone   = "" // files every cgroup has
)

func allControllers() []string { return []string{ctlCPU, ctlCPUSet, ctlMemory, ctlPIDs, ctlIO} }

// Bounds that do not come from a caller.
const (
	cpuPeriod     = 100_000 // µs; the kernel's default period (cgroup-v2.rst, cpu.max)
	cpuMinQuota   = 1_000   // µs; the kernel refuses less
	defaultWeight = 100     // the kernel's default cpu.weight
	initWeight    = 1_000   // PID 1 against its own workload: it must answer under load

	// PID 1 does file work and keeps output rings of up to 64 MiB a process,
	// so its bound is far above what it needs idle (about 1 MiB): it is there
	// to keep a taken-over PID 1 from eating the host.
	initMemoryMax = 512 << 20
	initMemoryLow = 4 << 20 // kept from reclaim while the host is short
	initPIDsMax   = 256     // threads of the Go runtime blocked in file work

	// PID 1 makes one cgroup per command directly under work. A kernel object
	// of several KiB each: bounded, or a taken-over PID 1 could exhaust the host.
	workDescendants = 4096
	workDepth       = 1
)

// setting is one file to write: what a plan is made of.
type setting struct {
	part       string // partID, partInit or partWork
	file       string
	content    string
	controller string // whose file it is; skipped where that is missing
	optional   bool   // the kernel may lack the file (no swap configured)
	reset      bool   // takes back a limit: skipped where none was ever set, the file being empty
}

// planFixed lists what every sandbox gets once, whatever its limits.
func planFixed(have []string) []setting {
	return only(have, []setting{
		{part: partWork, file: "cgroup.max.descendants", content: strconv.Itoa(workDescendants)},
		{part: partWork, file: "cgroup.max.depth", content: strconv.Itoa(workDepth)},
		// An OOM kill takes the workload as a whole: half a process tree
		// after a kill in the middle is worse to reason about than none.
		{part: partWork, file: "memory.oom.group", content: "1", controller: ctlMemory},
		{part: partWork, file: "memory.swap.max", content: "0", controller: ctlMemory, optional: true},
		{part: partInit, file: "memory.swap.max", content: "0", controller: ctlMemory, optional: true},
		{part: partInit, file: "memory.max", content: strconv.Itoa(initMemoryMax), controller: ctlMemory},
		// Protection reaches only as far as each ancestor grants it.
		{part: partID, file: "memory.low", content: strconv.Itoa(initMemoryLow), controller: ctlMemory},
		{part: partInit, file: "memory.low", content: strconv.Itoa(initMemoryLow), controller: ctlMemory},
		{part: partInit, file: "pids.max", content: strconv.Itoa(initPIDsMax), controller: ctlPIDs},
		{part: partInit, file: "cpu.weight", content: strconv.Itoa(initWeight), controller: ctlCPU},
	})
}

// planLimits lists what makes l true. cpus is the set to pin to, all of the
// host's where pinned is false; devices are the "MAJ:MIN" of the volume's disks.
func planLimits(l sandbox.Limits, cpus []int, pinned bool, devices, have []string) []setting {
	weight := l.CPUWeight
	if weight == 0 {
		weight = defaultWeight
	}
	plan := []setting{
		// The weight counts among siblings, and a sandbox's siblings are the
		// other sandboxes: so on ID. Inside, work competes only with init.
		{part: partID, file: "cpu.weight", content: strconv.FormatUint(weight, 10), controller: ctlCPU},
		{part: partWork, file: "cpu.max", content: cpuMax(l.CPUs), controller: ctlCPU},
		// What PID 1 does for the workload counts, too. It keeps a little that
		// a busy workload cannot take from it: it must answer.
		{part: partID, file: "cpu.max", content: cpuMax(withInit(l.CPUs)), controller: ctlCPU},
		// The kernel refuses to empty the set of a cgroup with processes (ENOSPC),
		// so "no longer pinned" is the list of all cpus.
		{part: partWork, file: "cpuset.cpus", content: formatCPUList(cpus), controller: ctlCPUSet, reset: !pinned},
		{part: partWork, file: "memory.max", content: orMax(l.MemoryBytes), controller: ctlMemory},
		{part: partWork, file: "pids.max", content: orMax(l.PIDs), controller: ctlPIDs},
	}
	return only(have, append(plan, planIO(l, devices)...))
}

// planIO lists what bounds the io of all of a sandbox: PID 1 writes the files of the API.
func planIO(l sandbox.Limits, devices []string) (plan []setting) {
	for _, dev := range devices {
		plan = append(plan, setting{
			part: partID, file: "io.max", content: dev + " " + ioMax(l), controller: ctlIO, reset: !limitsIO(l),
		})
	}
	return plan
}

// initShare is the part of a sandbox's cpus that PID 1 has beside its workload,
// and initShareMin its least.
const (
	initShare    = 0.05
	initShareMin = 0.005
)

// withInit is what a sandbox may use whose workload may use so many cpus.
func withInit(cpus float64) float64 {
	if cpus <= 0 {
		return 0
	}
	return cpus + max(cpus*initShare, initShareMin)
}

// planReads lists what bounds the reads of l on further devices.
func planReads(l sandbox.Limits, devices, have []string) []setting {
	return only(have, planIO(sandbox.Limits{IOReadBPS: l.IOReadBPS, IOReadIOPS: l.IOReadIOPS}, devices))
}

// only drops the settings whose controller is not in have.
func only(have []string, plan []setting) []setting {
	return slices.DeleteFunc(plan, func(s setting) bool {
		return s.controller != ctlNone && !slices.Contains(have, s.controller)
	})
}

// cpuMax renders cpu.max for a number of cores, 0 meaning no limit.
func cpuMax(cpus float64) string {
	period := uint64(cpuPeriod)
	if cpus <= 0 {
		return string(cgroup2.NewCPUMax(nil, &period))
	}
	quota := max(int64(math.Round(cpus*cpuPeriod)), cpuMinQuota)
	return string(cgroup2.NewCPUMax(&quota, &period))
}

func orMax(n int64) string {
	if n <= 0 {
		return "max"
	}
	return strconv.FormatInt(n, 10)
}

// ioMax renders the four keys of io.max; all four, so that a limit taken back
// is reset.
func ioMax(l sandbox.Limits) string {
	parts := make([]string, 0, 4)
	for _, k := range []struct {
		key  cgroup2.IOType
		rate uint64
	}{
		{cgroup2.ReadBPS, l.IOReadBPS},
		{cgroup2.WriteBPS, l.IOWriteBPS},
		{cgroup2.ReadIOPS, l.IOReadIOPS},
		{cgroup2.WriteIOPS, l.IOWriteIOPS},
	} {
		rate := "max"
		if k.rate > 0 {
			rate = strconv.FormatUint(k.rate, 10)
		}
		parts = append(parts, string(k.key)+"="+rate)
	}
	return strings.Join(parts, " ")
}

func limitsIO(l sandbox.Limits) bool {
	return l.IOReadBPS|l.IOWriteBPS|l.IOReadIOPS|l.IOWriteIOPS != 0
}

// cpusWanted returns how many cpus l pins to: the next whole number, so that
// what a program reads from its affinity is never less than it may use; 0
// means all of the allowed ones.
func cpusWanted(l sandbox.Limits, allowed int) int {
	n := int(math.Ceil(l.CPUs))
	if l.CPUs <= 0 || n >= allowed {
		return 0
	}
	return n
}

// pickCPUs chooses the n least loaded cpus, the lowest first among equals,
// and returns them in ascending order. n must not exceed len(allowed).
func pickCPUs(allowed []int, load map[int]float64, n int) []int {
	order := slices.Clone(allowed)
	slices.SortStableFunc(order, func(a, b int) int {
		switch {
		case load[a] < load[b]:
			return -1
		case load[a] > load[b]:
			return 1
		}
		return a - b
	})
	picked := order[:n]
	slices.Sort(picked)
	return picked
}

// planEnforcement says of each limit kept here what becomes of it.
func planEnforcement(l sandbox.Limits, have, devices []string) []sandbox.Enforcement {
	row := func(limit, asked string, needs ...string) sandbox.Enforcement {
		e := sandbox.Enforcement{Limit: limit, Asked: asked, Enforced: true}
		if lack := missing(strings.Join(have, " "), needs); len(lack) > 0 {
			e.Enforced = false
			e.Why = fmt.Sprintf("this host's cgroup v2 tree has no %s controller: %s", strings.Join(lack, " or "), mend)
		}
		return e
	}
	cpu := row("cpu", askedCPU(l), ctlCPU)
	if cpu.Enforced && !slices.Contains(have, ctlCPUSet) {
		cpu.Why = "time is bounded, but without the cpuset controller programs inside see every cpu of the host"
	}
	io := row("io", askedIO(l), ctlIO)
	if io.Enforced && len(devices) == 0 {
		io.Enforced = false
		io.Why = "the disk beneath the volume is not a block device that takes io.max"
	}
	return []sandbox.Enforcement{
		cpu,
		row("memory", askedBytes(l.MemoryBytes), ctlMemory),
		row("pids", askedCount(l.PIDs), ctlPIDs),
		io,
	}
}

const (
	none = "none"
	mend = "boot with systemd.unified_cgroup_hierarchy=1 (cgroup v2 alone) to have it"
)

func askedCPU(l sandbox.Limits) string {
	var parts []string
	if l.CPUs > 0 {
		parts = append(parts, strconv.FormatFloat(l.CPUs, 'g', -1, 64)+" cpus")
	}
	if l.CPUWeight > 0 {
		parts = append(parts, fmt.Sprintf("weight %d", l.CPUWeight))
	}
	if len(parts) == 0 {
		return none
	}
	return strings.Join(parts, ", ")
}

func askedIO(l sandbox.Limits) string {
	if !limitsIO(l) {
		return none
	}
	return ioMax(l)
}

func askedBytes(n int64) string {
	if n <= 0 {
		return none
	}
	return units.BytesSize(float64(n))
}

func askedCount(n int64) string {
	if n <= 0 {
		return none
	}
	return strconv.FormatInt(n, 10)
}
