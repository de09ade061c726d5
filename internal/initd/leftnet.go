package initd

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// netDir shows the network namespace, and belongs to it: its entries are of
// the sandbox's root, and a mode or owner that root gives one stays with the
// namespace.
const netDir = "/proc/self/net"

// NetModesEnv names the variable of PID 1's environment with what NetModes
// found in a new network namespace of the same kernel.
const NetModesEnv = "SANDBOX_NET_MODES"

// NetModes describes the entries of /proc/net whose modes are not as usual, of
// the calling thread's network namespace, which must be a new one that nobody
// has used. A daemon asks once and tells each PID 1: to look at each entry in
// every sandbox costs a quarter of a millisecond and, for as long as the
// sandbox lives, some 70 KiB of the kernel's memory.
func NetModes() (string, error) {
	found, err := unusualNet("/proc/thread-self/net")
	if err != nil {
		return "", fmt.Errorf("read the modes in /proc/net: %w", err)
	}
	list := make([]string, 0, len(found))
	for path, m := range found {
		list = append(list, fmt.Sprintf("%s:%d:%d:%o", path, m.uid, m.gid, m.bits))
	}
	return "," + strings.Join(list, ","), nil // never empty: that would say that nobody asked
}

// parseNetModes reads what NetModes returned.
func parseNetModes(list string) (netModes, error) {
	found := netModes{}
	for item := range strings.SplitSeq(list, ",") {
		if item == "" {
			continue
		}
		fields := strings.Split(item, ":")
		if len(fields) != 4 || fields[0] == "" {
			return nil, fmt.Errorf("%s: %.80q has not the four parts of an entry", NetModesEnv, item)
		}
		var n [3]uint32
		for i, base := range []int{10, 10, 8} {
			v, err := strconv.ParseUint(fields[i+1], base, 32)
			if err != nil {
				return nil, fmt.Errorf("%s: %.80q: %w", NetModesEnv, item, err)
			}
			n[i] = uint32(v)
		}
		found[fields[0]] = mode{uid: n[0], gid: n[1], bits: n[2]}
	}
	return found, nil
}

// unusualNet returns the entries beneath dir that are not as usualMode says.
func unusualNet(dir string) (netModes, error) {
	found := netModes{}
	err := walkNet(dir, func(path string, _ int, _ string, st *unix.Stat_t) error {
		if m := modeOf(st); m != usualMode(st) {
			found[path] = m
		}
		return nil
	})
	return found, err
}

// netModes holds the entries of netDir, by path below it, that are not as
// usualMode says.
type netModes map[string]mode

func usualMode(st *unix.Stat_t) mode {
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return mode{bits: 0o555}
	}
	return mode{bits: 0o444}
}

func (m netModes) restore() error {
	return walkNet(netDir, func(path string, dir int, name string, st *unix.Stat_t) error {
		was, ok := m[path]
		if !ok {
			was = usualMode(st)
		}
		return restoreMode(dir, name, was, modeOf(st))
	})
}

// walkNet calls f for each entry beneath dir, a directory before what is in it.
func walkNet(dir string, f func(path string, dir int, name string, st *unix.Stat_t) error) error {
	top, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "open", Path: dir, Err: err}
	}
	defer unix.Close(top)
	return walkProc(top, "", f)
}

func walkProc(dir int, prefix string, f func(path string, dir int, name string, st *unix.Stat_t) error) error {
	var buf [4096]byte
	for {
		n, err := unix.Getdents(dir, buf[:])
		if err != nil || n == 0 {
			return err
		}
		_, _, names := unix.ParseDirent(buf[:n], -1, nil)
		for _, name := range names {
			var st unix.Stat_t
			err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW)
			if errors.Is(err, unix.ENOENT) {
				continue // a network device's, and it went
			}
			if err == nil {
				err = f(prefix+name, dir, name, &st)
			}
			if err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
				err = walkProcIn(dir, name, prefix, f)
			}
			if err != nil {
				return err
			}
		}
	}
}

func walkProcIn(dir int, name, prefix string, f func(path string, dir int, name string, st *unix.Stat_t) error) error {
	sub, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "open", Path: prefix + name, Err: err}
	}
	defer unix.Close(sub)
	return walkProc(sub, prefix+name+"/", f)
}
