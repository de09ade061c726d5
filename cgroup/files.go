package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// write puts content into one control file with a single write(2), as the
// kernel demands. It never creates: a missing file is fs.ErrNotExist.
func write(dir, file, content string) error {
	f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteString(content)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return fmt.Errorf("writing %q to %s of cgroup %s: %w", strings.TrimSpace(content), file, dir, err)
	}
	return nil
}

func read(dir, file string) (string, error) {
	b, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return "", fmt.Errorf("reading %s of cgroup %s: %w", file, dir, err)
	}
	return strings.TrimSpace(string(b)), nil
}

// readUint reads a file of one number; "max" counts as the largest.
func readUint(dir, file string) (uint64, error) {
	s, err := read(dir, file)
	if err != nil {
		return 0, err
	}
	if s == "max" {
		return ^uint64(0), nil
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("reading %s of cgroup %s: %w", file, dir, err)
	}
	return n, nil
}

// readFlat reads one key of a "flat keyed" file; a missing key is 0.
func readFlat(dir, file, key string) (uint64, error) {
	s, err := read(dir, file)
	if err != nil {
		return 0, err
	}
	return flatKey(s, key), nil
}

// flatKey returns the value of key in lines of "key value", or 0.
func flatKey(content, key string) uint64 {
	for line := range strings.Lines(content) {
		k, v, ok := strings.Cut(strings.TrimSpace(line), " ")
		if ok && k == key {
			n, err := strconv.ParseUint(v, 10, 64)
			if err == nil {
				return n
			}
		}
	}
	return 0
}

// gone reports whether err means that the cgroup does not exist any more: its
// files are ENOENT to open and ENODEV to a descriptor that was open before.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV)
}

// subdirs returns the names of dir's child cgroups; none if dir is gone.
func subdirs(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		if gone(err) {
			return nil, nil
		}
		return nil, fmt.Errorf("listing cgroup %s: %w", dir, err)
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// procs returns the pids in dir itself; none if dir is gone.
func procs(dir string) ([]int, error) {
	s, err := read(dir, "cgroup.procs")
	if err != nil {
		if gone(err) {
			return nil, nil
		}
		return nil, err
	}
	return parsePIDs(s)
}

func parsePIDs(s string) ([]int, error) {
	var pids []int
	for f := range strings.FieldsSeq(s) {
		n, err := strconv.Atoi(f)
		if err != nil || n < 0 {
			return nil, fmt.Errorf("parsing pid %.20q", f)
		}
		// 0 stands for a process outside this pid namespace.
		if n > 0 {
			pids = append(pids, n)
		}
	}
	return pids, nil
}

// parseCPUList parses the kernel's list form, "0-2,5".
func parseCPUList(s string) ([]int, error) {
	var cpus []int
	for part := range strings.SplitSeq(strings.TrimSpace(s), ",") {
		if part == "" {
			continue
		}
		first, last, isRange := strings.Cut(part, "-")
		a, err := strconv.Atoi(first)
		b := a
		if err == nil && isRange {
			b, err = strconv.Atoi(last)
		}
		if err != nil || a < 0 || b < a || b > maxCPU {
			return nil, fmt.Errorf("parsing cpu list %.80q", s)
		}
		for c := a; c <= b; c++ {
			cpus = append(cpus, c)
		}
	}
	slices.Sort(cpus)
	return slices.Compact(cpus), nil
}

// maxCPU bounds what parseCPUList expands; the kernel's NR_CPUS is at most 8192.
const maxCPU = 1 << 16

// formatCPUList is the reverse of parseCPUList, without ranges.
func formatCPUList(cpus []int) string {
	parts := make([]string, len(cpus))
	for i, c := range cpus {
		parts[i] = strconv.Itoa(c)
	}
	return strings.Join(parts, ",")
}

// parseOwnCgroup returns the v2 path in a /proc/PID/cgroup file: the line
// "0::PATH" (cgroups(7)).
func parseOwnCgroup(content string) (string, error) {
	for line := range strings.Lines(content) {
		if p, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); ok && strings.HasPrefix(p, "/") {
			return p, nil
		}
	}
	return "", fmt.Errorf("no cgroup v2 line in %.200q", content)
}

// missing returns which of want is missing from content.
func missing(content string, want []string) []string {
	have := strings.Fields(content)
	var out []string
	for _, w := range want {
		if !slices.Contains(have, w) {
			out = append(out, w)
		}
	}
	return out
}
