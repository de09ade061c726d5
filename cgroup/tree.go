package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Config says where the tree stands.
type Config struct {
	// Mount is where the cgroup2 file system is mounted, usually
	// /sys/fs/cgroup, as the daemon's mount namespace sees it.
	Mount string
	// Parent is the cgroup above all sandboxes, as in /proc/PID/cgroup:
	// "/sandboxd", or the path of the unit delegated to the daemon. It and
	// its ancestors are created where missing.
	Parent string
	// BestEffort goes on where controllers are missing.
	BestEffort bool
	// IODevices returns the "MAJ:MIN" of the whole disks that carry the
	// volume, for io.max. Nil or empty: no I/O limit can be kept.
	IODevices func() []string
	// IOReadDevices returns, likewise, further disks on which only reads are
	// bounded: those beneath the volume's own device. The sandbox's writes
	// have waited above already, and waiting twice would halve their rate.
	IOReadDevices func() []string
	Log           *slog.Logger // nil discards
}

// Tree is the cgroups of all sandboxes. Its methods may be called at the same
// time for different sandboxes, and Usage, Processes and Kill at any time.
type Tree struct {
	mount         string
	parent        string   // as in Config
	dir           string   // mount and parent
	controllers   []string // enabled in parent for the sandboxes
	ioDevices     func() []string
	ioReadDevices func() []string
	log           *slog.Logger

	mu     sync.Mutex
	pinned map[sandbox.ID]pin // which cpus each sandbox is pinned to
	known  map[sandbox.ID]bool

	metersMu sync.Mutex
	meters   map[sandbox.ID]*meterFiles // guarded by metersMu
	disks    disks
}

type pin struct {
	cpus []int
	load float64 // on each of them
}

// Path returns the sandbox's cgroup relative to the mount: what a container
// runtime wants as its cgroup path.
func (t *Tree) Path(id sandbox.ID) string { return path.Join(t.parent, string(id)) }

// Controllers returns the controllers the sandboxes have, of cpu, cpuset,
// memory, pids and io.
func (t *Tree) Controllers() []string { return slices.Clone(t.controllers) }

// at returns the directory of one part of a sandbox's tree. An id that is
// none is refused here, so that no caller's mistake becomes a path.
func (t *Tree) at(id sandbox.ID, part string) (string, error) {
	if _, err := sandbox.ParseID(string(id)); err != nil {
		return "", err
	}
	return filepath.Join(t.dir, string(id), part), nil
}

// Create makes the sandbox's cgroup, with nothing in it and nothing enabled
// below it. Repeating it does nothing. ErrExhausted where the host's bound on
// cgroups is reached.
func (t *Tree) Create(id sandbox.ID) error {
	dir, err := t.at(id, partID)
	if err != nil {
		return err
	}
	return makeCgroup(dir)
}

func makeCgroup(dir string) error {
	err := os.Mkdir(dir, 0o755)
	switch {
	case err == nil || errors.Is(err, fs.ErrExist):
		return nil
	case errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.ENOMEM):
		return sandbox.Errorf(sandbox.ErrExhausted, "cgroups_exhausted",
			"making cgroup %s: %w; see cgroup.max.descendants of its ancestors", dir, err)
	}
	return fmt.Errorf("making cgroup: %w", err)
}

// Hasten has the wait begin that is before the next move of a process into a
// cgroup: the kernel moves none before an RCU grace period is over, some
// milliseconds on an idle host, and those who move at about the same time share
// one (cgroup_threadgroup_rwsem; rcu_sync_enter in kernel/rcu/sync.c). It moves
// the daemon to where it stands, which changes nothing, and returns when that
// is done. Until then nobody can make, move or remove a cgroup; processes start
// and end as always. Repeating it is safe. Where it cannot be done, the next
// move takes as long as it does.
func (t *Tree) Hasten() {
	if err := stay(t.mount); err != nil {
		t.log.Debug("hasten the next move into a cgroup", "err", err)
	}
}

// Settle divides the cgroup of a sandbox whose PID 1 has already made its
// cgroup namespace in it: it moves pid (as the host sees it) into init,
// enables the controllers below, and gives uidBase, the host id of the
// sandbox's root, exactly what starting processes in work takes. Repeating it
// is safe.
//
// The order matters: a cgroup namespace is rooted where its maker stands, so
// PID 1 must be moved after it; controllers can only be enabled in a cgroup
// without processes (cgroup-v2.rst, "No Internal Process Constraint"), so it
// must be moved before them. Helpers of the start-up may still be exiting in
// ID; Settle waits for them until ctx ends (ErrDeadline).
func (t *Tree) Settle(ctx context.Context, id sandbox.ID, pid int, uidBase uint32) error {
	dir, err := t.at(id, partID)
	if err != nil {
		return err
	}
	if pid <= 1 || uidBase == 0 {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_settle", "settling cgroup of %s: pid %d or uid %d is the host's own", id, pid, uidBase)
	}
	initDir, workDir := filepath.Join(dir, partInit), filepath.Join(dir, partWork)
	for _, d := range []string{initDir, workDir} {
		if err := makeCgroup(d); err != nil {
			return err
		}
	}
	if err := enter(initDir, pid); err != nil {
		return fmt.Errorf("moving PID 1 of %s: %w", id, err)
	}
	if err := enable(ctx, dir, t.controllers); err != nil {
		return err
	}
	if err := t.apply(dir, planFixed(t.controllers)); err != nil {
		return err
	}
	for _, name := range []string{"cgroup.procs", partWork, partWork + "/cgroup.procs"} {
		if err := os.Chown(filepath.Join(dir, name), int(uidBase), int(uidBase)); err != nil {
			return fmt.Errorf("giving cgroup of %s to its root: %w", id, err)
		}
	}
	t.protect(func() { t.known[id] = true })
	return nil
}

// enter moves pid into dir unless it is there.
func enter(dir string, pid int) error {
	// A migration can cost a grace period of several ms; looking does not.
	if pids, err := procs(dir); err == nil && slices.Contains(pids, pid) {
		return nil
	}
	err := write(dir, "cgroup.procs", strconv.Itoa(pid))
	if errors.Is(err, unix.ESRCH) {
		return sandbox.Errorf(sandbox.ErrConflict, "process_gone", "process %d has ended: %w", pid, err)
	}
	return err
}

// enable turns on those of controllers that are not, for the children of dir.
// It retries while dir still holds processes.
func enable(ctx context.Context, dir string, controllers []string) error {
	have, err := read(dir, "cgroup.subtree_control")
	if err != nil {
		return err
	}
	for _, c := range missing(have, controllers) {
		err := poll(ctx, func() (bool, error) {
			err := write(dir, "cgroup.subtree_control", "+"+c)
			return !errors.Is(err, unix.EBUSY), err
		})
		if err != nil {
			return fmt.Errorf("enabling the %s controller: %w", c, err)
		}
	}
	return nil
}

// protect changes the set of known sandboxes and grants their PID 1s
// together the protection from reclaim each asks for: memory.low of a child
// counts only up to what its parent has. A convenience: errors are logged.
func (t *Tree) protect(change func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	before := len(t.known)
	change()
	if len(t.known) == before || !slices.Contains(t.controllers, ctlMemory) {
		return
	}
	if err := write(t.dir, "memory.low", strconv.Itoa(len(t.known)*initMemoryLow)); err != nil {
		t.log.Warn("cannot protect the sandboxes' PID 1 from reclaim", "error", err)
	}
}

// apply writes a plan beneath the sandbox's directory.
func (t *Tree) apply(dir string, plan []setting) error {
	for _, s := range plan {
		d := filepath.Join(dir, s.part)
		if s.reset {
			if now, err := read(d, s.file); err == nil && now == "" {
				continue
			}
		}
		err := write(d, s.file, s.content)
		if s.optional && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// notFound gives err class ErrNotFound where it means that the sandbox has no
// such cgroup.
func notFound(id sandbox.ID, err error) error {
	if gone(err) {
		return sandbox.Errorf(sandbox.ErrNotFound, "no_cgroup", "sandbox %s has no cgroup: %w", id, err)
	}
	return err
}

// List returns the sandboxes that have a cgroup.
func (t *Tree) List() ([]sandbox.ID, error) {
	names, err := subdirs(t.dir)
	if err != nil {
		return nil, err
	}
	var ids []sandbox.ID
	for _, n := range names {
		if id, err := sandbox.ParseID(n); err == nil {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// Processes returns the host pids of every process of the sandbox, PID 1
// included, and how many the workload has. A sandbox that is gone has none.
func (t *Tree) Processes(id sandbox.ID) (work int, pids []int, err error) {
	dir, err := t.at(id, partID)
	if err != nil {
		return 0, nil, err
	}
	err = walk(dir, func(d string) error {
		found, err := procs(d)
		if d != dir && d != filepath.Join(dir, partInit) {
			work += len(found)
		}
		pids = append(pids, found...)
		return err
	})
	slices.Sort(pids)
	return work, pids, err
}

// walk calls f for every cgroup beneath dir and for dir, children first.
func walk(dir string, f func(dir string) error) error {
	names, err := subdirs(dir)
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := walk(filepath.Join(dir, n), f); err != nil {
			return err
		}
	}
	return f(dir)
}

// Remove kills what is left in the sandbox's cgroup and removes it with
// everything beneath. Repeating it, or a sandbox without one, is no error.
// It does not wait for the kernel to let go of the memory of the cgroup,
// which it does in the background. ErrDeadline when ctx ends first.
func (t *Tree) Remove(ctx context.Context, id sandbox.ID) error {
	dir, err := t.at(id, partID)
	if err != nil {
		return err
	}
	err = poll(ctx, func() (bool, error) {
		err := removeAll(dir)
		if !errors.Is(err, unix.EBUSY) {
			return true, err
		}
		// Something lives, or was still exiting: kill, then try again.
		if err := t.kill(ctx, dir); err != nil {
			return true, err
		}
		err = removeAll(dir)
		return !errors.Is(err, unix.EBUSY), err
	})
	if err != nil {
		return fmt.Errorf("removing cgroup of %s: %w", id, err)
	}
	t.closeMeter(id)
	t.protect(func() {
		delete(t.known, id)
		delete(t.pinned, id)
	})
	return nil
}

func removeAll(dir string) error {
	return walk(dir, func(d string) error {
		if err := unix.Rmdir(d); err != nil && !gone(err) {
			return fmt.Errorf("rmdir %s: %w", d, err)
		}
		return nil
	})
}

// poll calls try until it reports done or ctx ends, soon at first and then
// every lastPoll. Where ctx ends, the error is ErrDeadline with try's last.
func poll(ctx context.Context, try func() (done bool, err error)) error {
	wait := firstPoll
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		done, err := try()
		if done {
			return err
		}
		timer.Reset(wait)
		select {
		case <-ctx.Done():
			if err == nil {
				err = ctx.Err()
			}
			return sandbox.Errorf(sandbox.ErrDeadline, "cgroup_deadline", "gave up waiting: %w", err)
		case <-timer.C:
		}
		wait = min(2*wait, lastPoll)
	}
}

const (
	firstPoll = 100 * time.Microsecond
	lastPoll  = 10 * time.Millisecond
)
