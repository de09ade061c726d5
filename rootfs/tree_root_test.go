//go:build root

package rootfs

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
)

// lister writes a tree down, a line an entry, with everything a copy keeps.
type treeLister struct {
	t     testing.TB
	marks bool // overlay's attributes too
	first map[uint64]string
	lines []string
}

func listTree(t testing.TB, root string, marks bool) []string {
	t.Helper()
	fd, err := unix.Open(root, openDirFlags, 0)
	if err != nil {
		t.Fatal(err)
	}
	l := &treeLister{t: t, marks: marks, first: map[uint64]string{}}
	l.dir(fd, "")
	return l.lines
}

func (l *treeLister) check(err error, path string) {
	if err != nil {
		l.t.Helper()
		l.t.Fatalf("list %.100q: %v", path, err)
	}
}

func (l *treeLister) xattrs(path string, list func([]byte) (int, error), get func(string, []byte) (int, error)) string {
	names, err := listXattrs(list)
	l.check(err, path)
	sort.Strings(names)
	var out string
	for _, n := range names {
		if strings.HasPrefix(n, overlayXattr) && !l.marks {
			continue
		}
		value := make([]byte, 64<<10)
		k, err := get(n, value)
		l.check(err, path)
		out += fmt.Sprintf(" %s=%q", n, value[:k])
	}
	return out
}

func (l *treeLister) add(path string, st *unix.Stat_t, more string) {
	l.lines = append(l.lines, fmt.Sprintf("/%s %o %d:%d %d.%09d%s", path, st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec, more))
}

// dir takes over the descriptor. In a deep tree the way down is long: what is
// above is closed meanwhile, and paths are cut.
func (l *treeLister) dir(fd int, path string) {
	defer unix.Close(fd)
	var st unix.Stat_t
	l.check(unix.Fstat(fd, &st), path)
	l.add(path, &st, l.xattrs(path, func(b []byte) (int, error) { return unix.Flistxattr(fd, b) }, func(n string, b []byte) (int, error) { return unix.Fgetxattr(fd, n, b) }))
	names := map[string]bool{}
	l.check(new(dirReader).each(fd, func(e dirent) error { names[e.name] = true; return nil }), path)
	for _, n := range sortedNames(names) {
		p := filepath.Join(path, n)
		l.check(unix.Fstatat(fd, n, &st, unix.AT_SYMLINK_NOFOLLOW), p)
		if st.Mode&unix.S_IFMT == unix.S_IFDIR {
			sub, err := unix.Openat(fd, n, openDirFlags, 0)
			l.check(err, p)
			l.dir(sub, p)
			continue
		}
		l.file(fd, n, p, &st)
	}
}

func (l *treeLister) file(dir int, name, path string, st *unix.Stat_t) {
	more := ""
	if st.Nlink > 1 {
		// A name whose others are hidden is no link to see.
		if l.first[st.Ino] == "" {
			l.first[st.Ino] = path
		} else {
			more += " first=" + l.first[st.Ino]
		}
	}
	if isWhiteout(st) { // nothing else of it matters
		l.lines = append(l.lines, "/"+path+" whiteout")
		return
	}
	at := fmt.Sprintf("/proc/self/fd/%d/%s", dir, name)
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		b, err := os.ReadFile(at)
		l.check(err, path)
		more += fmt.Sprintf(" %d %x", len(b), sha256.Sum256(b))
	case unix.S_IFLNK:
		to, err := os.Readlink(at)
		l.check(err, path)
		more += fmt.Sprintf(" -> %q", to)
	default:
		more += fmt.Sprintf(" dev %x", st.Rdev)
	}
	more += l.xattrs(path, func(b []byte) (int, error) { return unix.Llistxattr(at, b) }, func(n string, b []byte) (int, error) { return unix.Lgetxattr(at, n, b) })
	l.add(path, st, more)
}

// sameTree reports the first lines in which two lists differ.
func sameTree(t testing.TB, what string, want, got []string) bool {
	t.Helper()
	if slices.Equal(want, got) {
		return true
	}
	cut := func(lines []string) map[string]bool {
		m := map[string]bool{}
		for _, l := range lines {
			m[l] = true
		}
		return m
	}
	shown := 0
	for sign, pair := range map[string][2]map[string]bool{"-": {cut(want), cut(got)}, "+": {cut(got), cut(want)}} {
		for _, line := range sortedNames(pair[0]) {
			if !pair[1][line] && shown < 12 {
				t.Errorf("%s: %s %.300s", what, sign, line)
				shown++
			}
		}
	}
	if shown == 0 {
		t.Errorf("%s: the same lines in another order", what)
	}
	return false
}

// attached is a view of a stack, read only or, with an id, over its upper.
func attached(t testing.TB, s *Store, plan overlayPlan) (dir string, detach func()) {
	t.Helper()
	root, err := s.mountOverlay(plan, nil, 0, s.mode)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if dir, err = os.MkdirTemp(s.scratch(), "t"); err == nil {
		err = linux.AttachTree(root, dir)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir, func() {
		t.Helper()
		if err := errors.Join(unix.Unmount(dir, 0), os.Remove(dir)); err != nil {
			t.Error(err)
		}
	}
}

// listStack lists what a stack of layers, and maybe an upper, shows.
func listStack(t testing.TB, s *Store, layers ...string) []string {
	t.Helper()
	plan, err := s.planView(layers)
	if err != nil {
		t.Fatal(err)
	}
	dir, detach := attached(t, s, plan)
	defer detach()
	return listTree(t, dir, false)
}

func containsAttr(line, name string) bool { return strings.Contains(line, " "+overlayXattr+name+"=") }
