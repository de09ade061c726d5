package initd

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// netDir shows the network namespace, and belongs to it: its entries are of
// the sandbox's root, and a mode or owner that root gives one stays with the
// namespace.
const netDir = "/proc/self/net"

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
	return walkNet(func(path string, dir int, name string, st *unix.Stat_t) error {
		was, ok := m[path]
		if !ok {
			was = usualMode(st)
		}
		return restoreMode(dir, name, was, modeOf(st))
	})
}

// walkNet calls f for each entry beneath netDir, a directory before what is in it.
func walkNet(f func(path string, dir int, name string, st *unix.Stat_t) error) error {
	top, err := unix.Open(netDir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "open", Path: netDir, Err: err}
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
