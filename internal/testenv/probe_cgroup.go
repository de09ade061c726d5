package testenv

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// controllers are those that limits rest on.
var controllers = []string{"cpu", "cpuset", "memory", "pids", "io"}

// CgroupRoot returns where the cgroup v2 tree is mounted: /sys/fs/cgroup, or
// on a hybrid host /sys/fs/cgroup/unified.
func CgroupRoot() (string, error) {
	for _, dir := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
			return dir, nil
		}
	}
	return "", errors.New("no cgroup v2 tree at /sys/fs/cgroup or /sys/fs/cgroup/unified")
}

func probeCgroup2() error {
	return inProbeCgroup(func(dir string) error {
		if _, err := os.Stat(filepath.Join(dir, "cgroup.kill")); err != nil {
			return fmt.Errorf("cgroup.kill (Linux 5.14): %w", err)
		}
		return nil
	})
}

// probeControllers enables the controllers for the root's children, then
// sets a limit in a new child.
func probeControllers() error {
	if err := Root.Missing(); err != nil {
		return err
	}
	root, err := CgroupRoot()
	if err != nil {
		return err
	}
	data, err := os.ReadFile(filepath.Join(root, "cgroup.controllers"))
	if err != nil {
		return err
	}
	have := strings.Fields(string(data))
	for _, c := range controllers {
		if !slices.Contains(have, c) {
			return fmt.Errorf("the cgroup v2 tree has no %s controller, only %v", c, have)
		}
	}
	enable := "+" + strings.Join(controllers, " +")
	if err := os.WriteFile(filepath.Join(root, "cgroup.subtree_control"), []byte(enable), 0); err != nil {
		return fmt.Errorf("enable the controllers: %w", err)
	}
	return inProbeCgroup(func(dir string) error {
		limits := map[string]string{"cpu.max": "50000 100000", "memory.max": "16777216", "pids.max": "7", "cpuset.cpus": "0"}
		for file, value := range limits {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(value), 0); err != nil {
				return fmt.Errorf("set a limit: %w", err)
			}
			got, err := os.ReadFile(filepath.Join(dir, file))
			if err != nil {
				return err
			}
			if s := strings.TrimSpace(string(got)); s != value {
				return fmt.Errorf("%s reads %q after writing %q", file, s, value)
			}
		}
		_, err := os.Stat(filepath.Join(dir, "io.max"))
		return err
	})
}

// inProbeCgroup runs f with a new cgroup, which it removes.
func inProbeCgroup(f func(dir string) error) error {
	root, err := CgroupRoot()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(root, "testenv-")
	if err != nil {
		return fmt.Errorf("make a cgroup: %w", err)
	}
	defer func() { _ = os.Remove(dir) }()
	return f(dir)
}
