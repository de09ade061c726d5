//go:build root

package escape

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestDescriptorsOfPID1: a child may reach whatever its parent has open until
// it has called execve. So no directory that PID 1 has open may lead anywhere:
// climbing from it ends in the sandbox's own root or on the mount it lies on,
// and that mount is neither the host's nor the daemon's.
func TestDescriptorsOfPID1(t *testing.T) {
	d := harness.Install(t, "")
	foreign := mountIDs(t, os.Getpid())
	for id := range mountIDs(t, d.PID()) {
		foreign[id] = true
	}
	sb := d.New(t, sandbox.Spec{Image: "host"})
	look := func(when string) {
		pid := pid1(t, d, string(sb.ID))
		own := identify(t, fmt.Sprintf("/proc/%d/root", pid))
		leaks, open := outsideDescriptors(t, pid, own, foreign)
		t.Logf("%s: %s", when, strings.Join(open, ", "))
		for _, leak := range leaks {
			t.Errorf("%s: PID 1 holds %s", when, leak)
		}
	}
	look("new")
	d.Sh(t, string(sb.ID), "sleep 60 >/dev/null 2>&1 & echo begun")
	look("a process runs")
	if _, err := d.Reset(t.Context(), string(sb.ID)); err != nil {
		t.Fatal(err)
	}
	look("reset")

	t.Run("control", func(t *testing.T) {
		cgroup, err := os.Open(harness.CgroupRoot())
		if err != nil {
			t.Fatal(err)
		}
		defer cgroup.Close()
		own := identify(t, fmt.Sprintf("/proc/%d/root", pid1(t, d, string(sb.ID))))
		leaks, _ := outsideDescriptors(t, os.Getpid(), own, foreign)
		if !slices.ContainsFunc(leaks, func(l string) bool { return strings.Contains(l, harness.CgroupRoot()) }) {
			t.Errorf("a descriptor of the host's cgroup2 mount was not told: %v", leaks)
		}
	})
}

// place names a directory, by the mount it is seen on.
type place struct {
	mount, ino uint64
	dev        [2]uint32
}

func identify(t *testing.T, path string) place {
	t.Helper()
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_INO|unix.STATX_MNT_ID, &st); err != nil {
		t.Fatalf("statx %s: %v", path, err)
	}
	return place{st.Mnt_id, st.Ino, [2]uint32{st.Dev_major, st.Dev_minor}}
}

// outsideDescriptors tells the directories among a process's descriptors, and
// those of them that lead out of own.
func outsideDescriptors(t *testing.T, pid int, own place, foreign map[uint64]bool) (leaks, dirs []string) {
	t.Helper()
	fds := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(fds)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) < 4 {
		t.Fatalf("only %d descriptors in %s", len(entries), fds)
	}
	for _, e := range entries {
		fd, at := e.Name(), filepath.Join(fds, e.Name())
		name, err := os.Readlink(at)
		info, serr := os.Stat(at)
		if err != nil || serr != nil {
			continue // closed since
		}
		if strings.HasPrefix(name, "/") && !info.IsDir() {
			// A file leads nowhere, but it must not be one of the host's either.
			if on := identify(t, at).mount; foreign[on] && name != "/dev/null" {
				leaks = append(leaks, fmt.Sprintf("descriptor %s, the file %s of a foreign mount", fd, name))
			}
			continue
		}
		if !info.IsDir() {
			continue
		}
		begin := identify(t, at)
		top := identify(t, at+strings.Repeat("/..", 64))
		dirs = append(dirs, fmt.Sprintf("%s → %s", fd, name))
		switch {
		case top == own:
		case foreign[begin.mount]:
			leaks = append(leaks, fmt.Sprintf("descriptor %s, the directory %s of a foreign mount", fd, name))
		case top.mount != begin.mount:
			leaks = append(leaks, fmt.Sprintf("descriptor %s, the directory %s: from it one climbs to another mount", fd, name))
		}
	}
	return leaks, dirs
}

// mountIDs are the mounts of a process's mount namespace (proc(5), mountinfo).
func mountIDs(t *testing.T, pid int) map[uint64]bool {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		t.Fatal(err)
	}
	ids := map[uint64]bool{}
	for line := range strings.Lines(string(b)) {
		id, err := strconv.ParseUint(strings.Fields(line)[0], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		ids[id] = true
	}
	return ids
}

// pid1 is the host's number of a sandbox's PID 1: the only process in its
// cgroup init.
func pid1(t *testing.T, d *harness.Daemon, id string) int {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(harness.CgroupRoot(), d.Parent, "*", id, "init", "cgroup.procs"))
	if err != nil || len(found) == 0 {
		found, err = filepath.Glob(filepath.Join(harness.CgroupRoot(), d.Parent, id, "init", "cgroup.procs"))
	}
	if err != nil || len(found) != 1 {
		t.Fatalf("the cgroup of %s: %v %v", id, found, err)
	}
	b, err := os.ReadFile(found[0])
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		t.Fatalf("PID 1 of %s: %q", id, b)
	}
	return pid
}
