package cgroup

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// When the host counts as short of memory: less than 1/20 of it available, or
// in the last ten seconds somebody waited for memory in more than this share
// of the time (PSI, Documentation/accounting/psi.rst).
const (
	leastAvailable = 20
	mostStalled    = 20.0
)

// MemoryShort reports whether the host has too little memory to keep some for
// later, and why it is thought so. What this kernel does not tell counts as
// enough.
func (t *Tree) MemoryShort() (why string, short bool) {
	info, _ := os.ReadFile("/proc/meminfo")
	pressure, _ := os.ReadFile("/proc/pressure/memory")
	return memoryShort(string(info), string(pressure))
}

func memoryShort(meminfo, pressure string) (why string, short bool) {
	total, available := memField(meminfo, "MemTotal:"), memField(meminfo, "MemAvailable:")
	if total > 0 && available < total/leastAvailable {
		return fmt.Sprintf("%d MiB of %d are available", available>>10, total>>10), true
	}
	if stalled := stalledShare(pressure); stalled > mostStalled {
		return fmt.Sprintf("programs waited for memory in %.0f %% of the last 10 s", stalled), true
	}
	return "", false
}

// memField returns a line of /proc/meminfo, in KiB.
func memField(meminfo, name string) uint64 {
	for line := range strings.Lines(meminfo) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			n, _ := strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
			return n
		}
	}
	return 0
}

// stalledShare returns "some avg10" of a pressure file, in percent.
func stalledShare(pressure string) float64 {
	for line := range strings.Lines(pressure) {
		rest, ok := strings.CutPrefix(line, "some avg10=")
		if !ok {
			continue
		}
		number, _, _ := strings.Cut(rest, " ")
		share, _ := strconv.ParseFloat(number, 64)
		return share
	}
	return 0
}
