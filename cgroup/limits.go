package cgroup

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// SetLimits makes l the limits of the sandbox's workload, and those of cpu time
// and io, a little above, the limits of all of it; a kind that l leaves
// at zero is unlimited afterwards. Repeating it is safe, also while processes
// run; a memory limit below what is used makes the kernel reclaim and, where
// that is not enough, kill the workload. ErrNotFound before Settle.
//
// A limit whose controller the host lacks is skipped: see Enforcement.
func (t *Tree) SetLimits(id sandbox.ID, l sandbox.Limits) error {
	if err := l.Validate(); err != nil {
		return err
	}
	dir, err := t.at(id, partID)
	if err != nil {
		return err
	}
	cpus, pinned, err := t.pin(id, l)
	if err != nil {
		return err
	}
	plan := planLimits(l, cpus, pinned, t.devices(), t.controllers)
	if t.ioReadDevices != nil {
		plan = append(plan, planReads(l, t.ioReadDevices(), t.controllers)...)
	}
	if err := t.apply(dir, plan); err != nil {
		// ENODEV is also what a cgroup answers that is being removed.
		if _, alive := read(dir, "cgroup.events"); errors.Is(err, unix.ENODEV) && alive == nil {
			return sandbox.Errorf(sandbox.ErrUnsupported, "io_device", "limiting %s: %w: io.max takes whole disks only", id, err)
		}
		return fmt.Errorf("limiting %s: %w", id, notFound(id, err))
	}
	return nil
}

// LiftIO takes the limits of io back from a sandbox that is about to be killed: what
// waits for its turn would else hold up the whole file system, which is the
// others' too. Repeating it, or a sandbox without a cgroup, is no error.
func (t *Tree) LiftIO(id sandbox.ID) error {
	dir, err := t.at(id, partID)
	if err != nil {
		return err
	}
	plan := only(t.controllers, planIO(sandbox.Limits{}, t.devices()))
	if t.ioReadDevices != nil {
		plan = append(plan, planReads(sandbox.Limits{}, t.ioReadDevices(), t.controllers)...)
	}
	if err := t.apply(dir, plan); err != nil && !gone(err) {
		return fmt.Errorf("taking the limits of io back from %s: %w", id, err)
	}
	return nil
}

// Enforcement says of cpu, memory, pids and io which are kept on this host.
func (t *Tree) Enforcement(l sandbox.Limits) []sandbox.Enforcement {
	return planEnforcement(l, t.controllers, t.devices())
}

func (t *Tree) devices() []string {
	if t.ioDevices == nil {
		return nil
	}
	return t.ioDevices()
}

// pin chooses the cpus of a sandbox: those it has, if they are as many as it
// wants, else the least loaded. One that is not pinned has all.
func (t *Tree) pin(id sandbox.ID, l sandbox.Limits) (cpus []int, pinned bool, err error) {
	if !t.has(ctlCPUSet) {
		return nil, false, nil
	}
	set, err := read(t.dir, "cpuset.cpus.effective")
	if err != nil {
		return nil, false, err
	}
	allowed, err := parseCPUList(set)
	if err != nil {
		return nil, false, fmt.Errorf("reading the host's cpus: %w", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	n := cpusWanted(l, len(allowed))
	if n == 0 {
		delete(t.pinned, id)
		return allowed, false, nil
	}
	p := pin{cpus: t.pinned[id].cpus, load: l.CPUs / math.Ceil(l.CPUs)}
	offline := slices.ContainsFunc(p.cpus, func(c int) bool { return !slices.Contains(allowed, c) })
	if len(p.cpus) != n || offline {
		delete(t.pinned, id)
		load := map[int]float64{}
		for _, other := range t.pinned {
			for _, c := range other.cpus {
				load[c] += other.load
			}
		}
		p.cpus = pickCPUs(allowed, load, n)
	}
	t.pinned[id] = p
	return p.cpus, true, nil
}
