//go:build root

package rootfs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// checks run inside a sandbox's root, as its root.
var checks = map[string]func(args []string) (string, error){
	"nothing": func([]string) (string, error) { return "", nil },
	// stat PATH: mode and ids as seen inside.
	"stat": func(args []string) (string, error) {
		var st unix.Stat_t
		if err := unix.Lstat(args[0], &st); err != nil {
			return "", err
		}
		return fmt.Sprintf("%o %d:%d", st.Mode&0o7777, st.Uid, st.Gid), nil
	},
	// read PATH: its content, or the errno.
	"read": func(args []string) (string, error) {
		b, err := os.ReadFile(args[0])
		if errno, ok := errors.AsType[syscall.Errno](err); ok {
			return "errno " + unix.ErrnoName(errno), nil
		}
		return string(b), err
	},
	// write PATH TEXT
	"write": func(args []string) (string, error) {
		err := os.WriteFile(args[0], []byte(args[1]), 0o644)
		if errno, ok := errors.AsType[syscall.Errno](err); ok {
			return "errno " + unix.ErrnoName(errno), nil
		}
		return "ok", err
	},
	"chown": func(args []string) (string, error) { return "ok", os.Chown(args[0], 7, 8) },
	"rename": func(args []string) (string, error) {
		return "ok", os.Rename(args[0], args[1])
	},
	"remove": func(args []string) (string, error) { return "ok", os.RemoveAll(args[0]) },
	"mknod": func(args []string) (string, error) {
		err := unix.Mknod(args[0], unix.S_IFCHR|0o666, 0x103)
		return fmt.Sprint(err), nil
	},
	// list PATH: the names in it.
	"list": func(args []string) (string, error) {
		ents, err := os.ReadDir(args[0])
		var names []string
		for _, e := range ents {
			names = append(names, e.Name())
		}
		sort.Strings(names)
		return strings.Join(names, " "), err
	},
	// run ARGV
	"run": func(args []string) (string, error) {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Env = []string{"PATH=" + hostPath, "HOME=/root"}
		cmd.Stdin = strings.NewReader("") // there is no /dev/null
		out, err := cmd.CombinedOutput()
		if err != nil {
			return "", fmt.Errorf("%w: %s", err, out)
		}
		return strings.TrimSpace(string(out)), nil
	},
	// grep TEXT: every file whose content or name shows it, anywhere
	// outside the given prefix.
	"grep": func(args []string) (string, error) {
		var found []string
		err := filepath.WalkDir(args[1], func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return nil //nolint:nilerr // what cannot be read shows nothing
			}
			if strings.Contains(d.Name(), args[0]) {
				found = append(found, path)
			}
			if d.Type().IsRegular() {
				if b, err := os.ReadFile(path); err == nil && strings.Contains(string(b), args[0]) {
					found = append(found, path)
				}
			}
			return nil
		})
		return strings.Join(found, " "), err
	},
	// fill PATH BYTES: writes until done or refused; says how far it came.
	"fill": fill,
	// files DIR N: makes files until done or refused.
	"files": func(args []string) (string, error) {
		var n int
		if _, err := fmt.Sscan(args[1], &n); err != nil {
			return "", err
		}
		if err := os.MkdirAll(args[0], 0o755); err != nil {
			return "", err
		}
		for i := range n {
			f, err := os.Create(fmt.Sprintf("%s/%d", args[0], i))
			if errno, ok := errors.AsType[syscall.Errno](err); ok {
				return fmt.Sprintf("%d %s", i, unix.ErrnoName(errno)), nil
			}
			if err != nil {
				return "", err
			}
			f.Close()
		}
		return fmt.Sprintf("%d ok", n), nil
	},
}

func fill(args []string) (string, error) {
	var want int64
	if _, err := fmt.Sscan(args[1], &want); err != nil {
		return "", err
	}
	f, err := os.Create(args[0])
	if err != nil {
		return "", err
	}
	defer f.Close()
	buf := make([]byte, 64<<10)
	for i := range buf {
		buf[i] = byte(i * 7)
	}
	for off := int64(0); off < want; off += int64(len(buf)) {
		_, err := f.Write(buf)
		if err == nil {
			err = f.Sync()
		}
		if errno, ok := errors.AsType[syscall.Errno](err); ok {
			return fmt.Sprintf("%d %s", off, unix.ErrnoName(errno)), nil
		}
		if err != nil {
			return "", err
		}
	}
	return fmt.Sprintf("%d ok", want), nil
}
