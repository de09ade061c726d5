package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/containerd/cgroups/v3/cgroup2"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Usage reads the cgroup's part of a sandbox's usage. CPU time and I/O are
// those of the whole sandbox, PID 1 included; memory and tasks those of the
// workload, as its limits count them. The counters begin with the cgroup.
// Groups this host cannot count are named in Unknown. ErrNotFound where the
// sandbox has no cgroup.
func (t *Tree) Usage(id sandbox.ID) (sandbox.Usage, error) {
	var u sandbox.Usage
	dir, err := t.at(id, partID)
	if err != nil {
		return u, err
	}
	work, err := t.at(id, partWork)
	if err != nil {
		return u, err
	}
	if err := t.wholeUsage(&u, id); err != nil {
		return u, fmt.Errorf("counting usage of %s: %w", id, notFound(id, err))
	}
	if _, err := read(work, "cgroup.events"); gone(err) {
		if _, err := read(dir, "cgroup.events"); gone(err) {
			return u, notFound(id, err)
		}
		return u, nil // not settled: no workload yet
	}
	if err := t.workUsage(&u, work); err != nil {
		return u, fmt.Errorf("counting usage of %s: %w", id, notFound(id, err))
	}
	return u, nil
}

// MemoryLent returns how many bytes PID 1 has written to file systems that live
// in memory. The kernel charges such a page to who wrote it, so the workload's
// limit does not see it. 0 for less than what PID 1 has so for itself, and where
// the host counts no memory.
func (t *Tree) MemoryLent(id sandbox.ID) uint64 {
	dir, err := t.at(id, partInit)
	if err != nil {
		return 0
	}
	lent, err := readFlat(dir, "memory.stat", "shmem")
	if err != nil || lent < memorySlack {
		return 0
	}
	return lent
}

// ShareMemory makes the workload's limit most without what MemoryLent says, but
// not less than it has: nothing is killed for it. It returns what is lent, and
// whether that and what the workload has are more than most.
func (t *Tree) ShareMemory(id sandbox.ID, most int64) (lent uint64, over bool) {
	lent = t.MemoryLent(id)
	work, err := t.at(id, partWork)
	if err != nil {
		return 0, false
	}
	stat, err := read(work, "memory.stat")
	if err != nil {
		return 0, false
	}
	now, err := readUint(work, "memory.current")
	if err != nil {
		return 0, false
	}
	cache := flatKey(stat, "active_file") + flatKey(stat, "inactive_file")
	fixed := int64(now-min(now, cache)) + memorySlack
	limit := orMax(min(most, max(most-int64(lent), fixed)))
	if text, err := read(work, "memory.max"); err == nil && text != limit {
		if err := write(work, "memory.max", limit); err != nil {
			t.log.Warn("share a sandbox's memory with its PID 1", "sandbox", id, "err", err)
		}
	}
	return lent, lent+flatKey(stat, "anon")+flatKey(stat, "shmem") > uint64(most)
}

// memorySlack is what a workload may have beside what it has, while PID 1 holds
// all the rest for it; and more than PID 1 has in memory for itself.
const memorySlack = 1 << 20

// wholeUsage fills in what is counted for the sandbox as a whole.
func (t *Tree) wholeUsage(u *sandbox.Usage, id sandbox.ID) error {
	group, err := cgroup2.Load(path.Join(t.parent, string(id)), cgroup2.WithMountpoint(t.mount))
	if err != nil {
		return err
	}
	// cpu.stat has the times even where the cpu controller is missing.
	mask := cgroup2.StatCPU
	if t.has(ctlIO) {
		mask |= cgroup2.StatIO
	}
	m, err := group.StatFiltered(mask)
	if err != nil {
		return err
	}
	u.CPUMicros = m.GetCPU().GetUsageUsec()
	u.CPUSeconds = float64(m.GetCPU().GetUsageUsec()) / 1e6
	u.CPUUserSeconds = float64(m.GetCPU().GetUserUsec()) / 1e6
	u.CPUSystemSeconds = float64(m.GetCPU().GetSystemUsec()) / 1e6
	for _, e := range m.GetIo().GetUsage() {
		if stacked("/sys", e.GetMajor(), e.GetMinor()) {
			continue
		}
		u.IOReadBytes += e.GetRbytes()
		u.IOWriteBytes += e.GetWbytes()
	}
	for _, c := range []string{ctlMemory, ctlPIDs, ctlIO} {
		if !t.has(c) {
			u.Unknown = append(u.Unknown, c)
		}
	}
	return nil
}

// workUsage fills in what is counted where the limits stand.
func (t *Tree) workUsage(u *sandbox.Usage, work string) error {
	type counter struct {
		controller string
		file, key  string // key of a flat keyed file, else ""
		into       *uint64
		optional   bool // younger than the oldest kernel supported
	}
	for _, c := range []counter{
		{controller: ctlCPU, file: "cpu.stat", key: "nr_throttled", into: &u.CPUThrottled},
		{controller: ctlMemory, file: "memory.current", into: &u.MemoryBytes},
		{controller: ctlMemory, file: "memory.peak", into: &u.MemoryPeakBytes, optional: true},
		{controller: ctlMemory, file: "memory.events", key: "oom_kill", into: &u.OOMKills},
		{controller: ctlPIDs, file: "pids.current", into: &u.PIDs},
		{controller: ctlPIDs, file: "pids.peak", into: &u.PIDsPeak, optional: true},
		{controller: ctlPIDs, file: "pids.events", key: "max", into: &u.PIDsDenied},
	} {
		if !t.has(c.controller) {
			continue
		}
		var err error
		if c.key != "" {
			*c.into, err = readFlat(work, c.file, c.key)
		} else {
			*c.into, err = readUint(work, c.file)
		}
		if err != nil && !(c.optional && errors.Is(err, fs.ErrNotExist)) {
			return err
		}
	}
	// Where the kernel keeps no peak, it is at least what there is now.
	u.MemoryPeakBytes = max(u.MemoryPeakBytes, u.MemoryBytes)
	u.PIDsPeak = max(u.PIDsPeak, u.PIDs)
	return nil
}

func (t *Tree) has(controller string) bool { return slices.Contains(t.controllers, controller) }

// stacked tells whether a block device passes what it is asked for on to
// another one, in the name of the cgroup that asked: the kernel counts such a
// request on both. Those are mapped and RAID devices, and a loop device that
// reads and writes its file directly; through the page cache it does so in
// nobody's name, and counts alone.
func stacked(sysfs string, major, minor uint64) bool {
	dir := fmt.Sprintf("%s/dev/block/%d:%d", sysfs, major, minor)
	if below, err := os.ReadDir(dir + "/slaves"); err == nil && len(below) > 0 {
		return true
	}
	direct, err := os.ReadFile(dir + "/loop/dio")
	return err == nil && strings.TrimSpace(string(direct)) == "1"
}
