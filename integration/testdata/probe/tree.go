package main

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// treeOp is one change of a tree. Names are bytes: not all are UTF-8.
type treeOp struct {
	Do   string `json:"do"`
	Path []byte `json:"path"`
	To   []byte `json:"to,omitempty"`
	Size int64  `json:"size,omitempty"`
	Seed uint64 `json:"seed,omitempty"`
	Mode uint32 `json:"mode,omitempty"`
	UID  int    `json:"uid,omitempty"`
	GID  int    `json:"gid,omitempty"`
	Name string `json:"name,omitempty"`
	Time int64  `json:"time"` // given to what the change touched
}

// tree does what op says beneath root, if it says anything, and writes the
// outcome and then a line for each file.
func tree(root, op string) error {
	unix.Umask(0)
	if err := os.Chdir(root); err != nil {
		return err
	}
	w := bufio.NewWriter(os.Stdout)
	defer w.Flush()
	if op != "" {
		var o treeOp
		if err := json.Unmarshal([]byte(op), &o); err != nil {
			return err
		}
		outcome := "ok"
		if err := o.run(); err != nil {
			var errno unix.Errno
			if outcome = err.Error(); errors.As(err, &errno) {
				outcome = unix.ErrnoName(errno)
			}
		}
		fmt.Fprintln(w, outcome)
	}
	return listTree(w)
}

func (o treeOp) run() error {
	path, to := string(o.Path), string(o.To)
	touched := []string{path, filepath.Dir(path)}
	var err error
	switch o.Do {
	case "touch":
	case "write", "append", "patch":
		err = o.write(path)
	case "replace":
		err = o.replace(path)
	case "truncate":
		err = unix.Truncate(path, o.Size)
	case "mkdir":
		err = unix.Mkdir(path, o.Mode)
	case "fifo":
		err = unix.Mkfifo(path, o.Mode)
	case "symlink":
		err = unix.Symlink(to, path)
	case "link":
		err = unix.Link(path, to)
		touched = []string{filepath.Dir(to)}
	case "rename":
		err = unix.Rename(path, to)
		touched = []string{filepath.Dir(path), filepath.Dir(to)}
		// An overlay that finds a whiteout in the new place exchanges it with
		// what moves; XFS then gives a directory that has another parent a
		// new time, as it does in no other rename.
		var st unix.Stat_t
		if err == nil && unix.Lstat(to, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
			touched = append(touched, to)
		}
	case "unlink":
		err = unix.Unlink(path)
	case "rmdir":
		err = unix.Rmdir(path)
	case "removeall":
		err = os.RemoveAll(path)
	case "chmod":
		err = unix.Fchmodat(unix.AT_FDCWD, path, o.Mode, 0)
	case "chown":
		err = unix.Lchown(path, o.UID, o.GID)
	case "setxattr":
		value := bytes.Repeat([]byte{byte(o.Seed)}, int(o.Size))
		err = unix.Lsetxattr(path, o.Name, value, 0)
	case "removexattr":
		err = unix.Lremovexattr(path, o.Name)
	default:
		err = errors.New("no such operation: " + o.Do)
	}
	if o.Do == "rename" && (errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST)) {
		// Beneath an overlay the rename that is refused was to leave a
		// whiteout; ext4 then gives the old parent a new time all the same
		// (fs/ext4/namei.c, ext4_resetent).
		return errors.Join(err, o.touch(filepath.Dir(path)))
	}
	if err != nil {
		return err
	}
	if err := dropSetID(o.Do, path); err != nil {
		return err
	}
	return o.touch(touched...)
}

// touch gives files the time of the operation.
func (o treeOp) touch(paths ...string) error {
	at := unix.NsecToTimespec(o.Time)
	for _, p := range paths {
		err := unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{at, at}, unix.AT_SYMLINK_NOFOLLOW)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	return nil
}

// dropSetID takes the set-id bits from what was written to: a writer with
// CAP_FSETID keeps them outside, but not through an overlay.
func dropSetID(do, path string) error {
	switch do {
	case "write", "append", "patch", "truncate", "replace":
	default:
		return nil
	}
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil || st.Mode&0o6000 == 0 {
		return err
	}
	return unix.Fchmodat(unix.AT_FDCWD, path, st.Mode&0o1777, 0)
}

func (o treeOp) content() []byte {
	b := make([]byte, o.Size)
	r := rand.New(rand.NewPCG(o.Seed, 1))
	for i := range b {
		b[i] = byte(r.UintN(256))
	}
	return b
}

// write writes whole files, at their end, or in their middle.
func (o treeOp) write(path string) error {
	flags := map[string]int{"write": unix.O_CREAT | unix.O_TRUNC, "append": unix.O_APPEND, "patch": 0}[o.Do]
	fd, err := unix.Open(path, flags|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, o.Mode)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	if o.Do == "patch" {
		_, err = f.WriteAt(o.content(), int64(o.Seed%5000))
		return err
	}
	_, err = f.Write(o.content())
	return err
}

// replace puts a new file in the place of whatever file has the name.
func (o treeOp) replace(path string) error {
	next := path + ".next"
	if err := os.WriteFile(next, o.content(), 0o600); err != nil {
		return err
	}
	return errors.Join(os.Chmod(next, fs.FileMode(o.Mode)), os.Rename(next, path))
}

// listTree writes what can be known of every file, in the order of the paths.
func listTree(w *bufio.Writer) error {
	type inode struct{ dev, ino uint64 }
	first := map[inode]string{}
	return filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return &os.PathError{Op: "lstat", Path: path, Err: err}
		}
		line := fmt.Sprintf("%q mode %o ids %d:%d", path, st.Mode, st.Uid, st.Gid)
		kind := st.Mode & unix.S_IFMT
		switch kind {
		case unix.S_IFREG:
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			if int64(len(b)) != st.Size {
				return fmt.Errorf("%q has %d bytes and says %d", path, len(b), st.Size)
			}
			line += fmt.Sprintf(" size %d sha256 %x", st.Size, sha256.Sum256(b))
		case unix.S_IFLNK:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" to %q", target)
		}
		attrs, err := userAttrs(path)
		if err != nil {
			return err
		}
		line += attrs + fmt.Sprintf(" mtime %d", time.Unix(st.Mtim.Unix()).UnixNano())
		if kind != unix.S_IFDIR {
			node := inode{st.Dev, st.Ino}
			if first[node] == "" {
				first[node] = path
			} else {
				line += fmt.Sprintf(" linked to %q", first[node])
			}
		}
		_, err = fmt.Fprintln(w, line)
		return err
	})
}

func userAttrs(path string) (string, error) {
	buf := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, buf)
	if err != nil {
		return "", &os.PathError{Op: "listxattr", Path: path, Err: err}
	}
	var out []string
	for name := range strings.SplitSeq(string(buf[:n]), "\x00") {
		if !strings.HasPrefix(name, "user.") {
			continue
		}
		value := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(path, name, value)
		if err != nil {
			return "", &os.PathError{Op: "getxattr " + name, Path: path, Err: err}
		}
		out = append(out, fmt.Sprintf(" %s=%x", name, value[:n]))
	}
	slices.Sort(out)
	return strings.Join(out, ""), nil
}
