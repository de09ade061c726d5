package cgroup

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/cgroups/v3/cgroup2"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// daemonLeaf is where the daemon moves itself when it stands in the way.
const daemonLeaf = "daemon"

// openTimeout bounds the waiting for controllers while Open prepares the tree.
const openTimeout = 5 * time.Second

// Open prepares the parent cgroup: creates it and enables the controllers the
// host has for the sandboxes below. Repeating it, also after a crash, is
// safe; sandboxes that live there stay untouched.
//
// ErrUnsupported where the mount is no cgroup2, or lacks a controller and
// c.BestEffort is not set.
func Open(c Config) (*Tree, error) {
	if err := cgroup2.VerifyGroupPath(c.Parent); err != nil || c.Parent == "/" {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_cgroup_parent",
			"parent cgroup %q: give a clean absolute path below the root, such as /sandboxd", c.Parent)
	}
	if err := checkMount(c.Mount); err != nil {
		return nil, err
	}
	t := &Tree{
		mount: c.Mount, parent: c.Parent, dir: filepath.Join(c.Mount, c.Parent),
		ioDevices: c.IODevices, ioReadDevices: c.IOReadDevices, log: c.Log,
		pinned: map[sandbox.ID]pin{}, known: map[sandbox.ID]bool{}, meters: map[sandbox.ID]*meterFiles{},
	}
	if t.log == nil {
		t.log = slog.New(slog.DiscardHandler)
	}
	if err := os.MkdirAll(t.dir, 0o755); err != nil {
		return nil, fmt.Errorf("making the parent cgroup %s: %w", c.Parent, err)
	}
	if err := stepAside(c.Mount, c.Parent); err != nil {
		return nil, err
	}
	if err := t.enableDown(); err != nil {
		return nil, err
	}
	have, err := read(t.dir, "cgroup.subtree_control")
	if err != nil {
		return nil, err
	}
	lack := missing(have, allControllers())
	t.controllers = missing(strings.Join(lack, " "), allControllers())
	if len(lack) > 0 && !c.BestEffort {
		return nil, sandbox.Errorf(sandbox.ErrUnsupported, "cgroup_controllers_missing",
			"cgroup %s has no %s controller, so limits would not hold: boot with systemd.unified_cgroup_hierarchy=1 "+
				"(cgroup v2 alone), have the unit delegated (Delegate=yes), or accept it with --cgroup=best-effort",
			c.Parent, strings.Join(lack, ", "))
	}
	if len(lack) > 0 {
		t.log.Warn("limits of these cgroup controllers are NOT enforced on this host", "missing", lack, "mend", mend)
	}
	return t, t.recall()
}

func checkMount(mount string) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(mount, &fs); err != nil {
		return fmt.Errorf("looking at the cgroup mount %s: %w", mount, err)
	}
	if fs.Type != unix.CGROUP2_SUPER_MAGIC {
		return sandbox.Errorf(sandbox.ErrUnsupported, "no_cgroup2",
			"%s is not a cgroup2 file system: boot with systemd.unified_cgroup_hierarchy=1, or mount one there", mount)
	}
	return nil
}

// ancestors returns the directories from the mount down to the parent itself.
func ancestors(mount, parent string) []string {
	dirs := []string{mount}
	for name := range strings.SplitSeq(strings.Trim(parent, "/"), "/") {
		dirs = append(dirs, filepath.Join(dirs[len(dirs)-1], name))
	}
	return dirs
}

// enableDown enables what each level offers, from the top down. What cannot
// be enabled is found missing at the end; the reason is logged.
func (t *Tree) enableDown() error {
	ctx, cancel := context.WithTimeout(context.Background(), openTimeout)
	defer cancel()
	for _, dir := range ancestors(t.mount, t.parent) {
		offered, err := read(dir, "cgroup.controllers")
		if err != nil {
			return err
		}
		lack := missing(offered, allControllers())
		for _, c := range missing(strings.Join(lack, " "), allControllers()) {
			if err := enable(ctx, dir, []string{c}); err != nil {
				t.log.Warn("cannot enable a cgroup controller", "controller", c, "cgroup", dir, "error", err)
			}
		}
	}
	return nil
}

// stepAside moves the processes of the daemon's own cgroup into a leaf beside
// the sandboxes, if that cgroup is the parent or above it: no cgroup but the
// real root may hold processes and pass on controllers.
func stepAside(mount, parent string) error {
	own, err := ownCgroup()
	if err != nil {
		return err
	}
	if !inTheWay(own, parent) {
		return nil
	}
	dir := filepath.Join(mount, own)
	// Only the real root has no cgroup.type, and it alone is exempt.
	if _, err := os.Stat(filepath.Join(dir, "cgroup.type")); err != nil {
		return nil
	}
	leaf := filepath.Join(dir, daemonLeaf)
	if err := makeCgroup(leaf); err != nil {
		return err
	}
	pids, err := procs(dir)
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if err := write(leaf, "cgroup.procs", strconv.Itoa(pid)); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("making room in cgroup %s: %w", own, err)
		}
	}
	return nil
}

// ownCgroup is the daemon's own, relative to the root of its cgroup namespace.
func ownCgroup() (string, error) {
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", fmt.Errorf("finding the daemon's own cgroup: %w", err)
	}
	own, err := parseOwnCgroup(string(b))
	if err != nil {
		return "", fmt.Errorf("finding the daemon's own cgroup: %w", err)
	}
	return own, nil
}

// stay moves the daemon to the cgroup it is in.
func stay(mount string) error {
	own, err := ownCgroup()
	if err != nil {
		return err
	}
	// A mount of another cgroup namespace may mean another cgroup by that path.
	dir := filepath.Join(mount, own)
	pids, err := procs(dir)
	if err != nil {
		return err
	}
	if !slices.Contains(pids, os.Getpid()) {
		return fmt.Errorf("the daemon's own cgroup %s is not below %s", own, mount)
	}
	return write(dir, "cgroup.procs", "0") // 0: whoever writes (kernel/cgroup/cgroup.c)
}

// inTheWay reports whether own is parent or one of its ancestors.
func inTheWay(own, parent string) bool {
	return own == parent || strings.HasPrefix(parent, strings.TrimSuffix(path.Clean(own), "/")+"/")
}

// recall reads back from the kernel what a daemon before this one left.
func (t *Tree) recall() error {
	ids, err := t.List()
	if err != nil {
		return err
	}
	for _, id := range ids {
		t.known[id] = true
		work := filepath.Join(t.dir, string(id), partWork)
		set, err := read(work, "cpuset.cpus")
		if err != nil || set == "" {
			continue // without the controller, or not pinned
		}
		cpus, err := parseCPUList(set)
		if err != nil {
			return fmt.Errorf("reading the cpus of %s: %w", id, err)
		}
		t.pinned[id] = pin{cpus: cpus, load: 1}
	}
	return nil
}
