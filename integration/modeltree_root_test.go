//go:build root

package integration

import (
	"archive/tar"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// treeChange is what the probe does to a tree; see testdata/probe/tree.go.
type treeChange struct {
	Do   string `json:"do"`
	Path []byte `json:"path"`
	To   []byte `json:"to,omitempty"`
	Size int64  `json:"size,omitempty"`
	Seed uint64 `json:"seed,omitempty"`
	Mode uint32 `json:"mode,omitempty"`
	UID  int    `json:"uid,omitempty"`
	GID  int    `json:"gid,omitempty"`
	Name string `json:"name,omitempty"`
	Time int64  `json:"time"`
}

func (c treeChange) String() string {
	b, err := json.Marshal(c)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

func (c treeChange) brief() string {
	return fmt.Sprintf("%s %q %q mode %o size %d ids %d:%d %s", c.Do, c.Path, c.To, c.Mode, c.Size, c.UID, c.GID, c.Name)
}

// listing is what the probe tells of a tree: a line for each file.
type listing struct {
	text  string
	files []treeFile
}

type treeFile struct {
	path   string
	mode   uint32
	size   int64
	attrs  []string
	linked bool   // the same file as one before it
	line   string // what a comparison of two states goes by
}

func (f treeFile) kind() uint32 { return f.mode & unix.S_IFMT }

// parseListing reads what the probe wrote.
func parseListing(t testing.TB, text string) listing {
	t.Helper()
	l := listing{text: text}
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		quoted, err := strconv.QuotedPrefix(line)
		if err != nil {
			t.Fatalf("the probe listed %q", line)
		}
		path, _ := strconv.Unquote(quoted)
		f := treeFile{path: path}
		line, _, f.linked = strings.Cut(line, " linked to ")
		rest := strings.TrimPrefix(line, quoted)
		words := strings.Fields(rest)
		for i, w := range words {
			switch {
			case w == "mode":
				mode, _ := strconv.ParseUint(words[i+1], 8, 32)
				f.mode = uint32(mode)
			case w == "size":
				f.size, _ = strconv.ParseInt(words[i+1], 10, 64)
			case strings.HasPrefix(w, "user."):
				name, _, _ := strings.Cut(w, "=")
				f.attrs = append(f.attrs, name)
			}
		}
		f.line = rest
		if f.kind() == unix.S_IFDIR {
			f.line, _, _ = strings.Cut(rest, " mtime ")
		}
		l.files = append(l.files, f)
	}
	return l
}

// of returns the files of some types, the root apart.
func (l listing) of(kinds ...uint32) (out []treeFile) {
	for _, f := range l.files {
		if f.path != "." && slices.Contains(kinds, f.kind()) {
			out = append(out, f)
		}
	}
	return out
}

// differing returns what the comparison of two states should tell.
func differing(top string, a, b listing) []sandbox.FileChange {
	before, after := map[string]treeFile{}, map[string]treeFile{}
	for _, f := range a.files {
		before[f.path] = f
	}
	for _, f := range b.files {
		after[f.path] = f
	}
	out := []sandbox.FileChange{}
	add := func(f treeFile, kind sandbox.ChangeKind) {
		c := sandbox.FileChange{Path: filepath.Join(top, f.path), Kind: kind, Mode: f.mode & 0o7777, Type: string(sandbox.FileOther)}
		c.Path = string([]rune(c.Path)) // what is no UTF-8 comes back as U+FFFD
		switch f.kind() {
		case unix.S_IFREG:
			c.Type, c.Size = string(sandbox.FileRegular), f.size
		case unix.S_IFDIR:
			c.Type = string(sandbox.FileDir)
		case unix.S_IFLNK:
			c.Type = string(sandbox.FileSymlink)
		}
		out = append(out, c)
	}
	for path, f := range after {
		if old, ok := before[path]; !ok {
			add(f, sandbox.FileAdded)
		} else if old.line != f.line {
			add(f, sandbox.FileChanged)
		}
	}
	for path, f := range before {
		if _, ok := after[path]; !ok {
			add(f, sandbox.FileRemoved)
		}
	}
	slices.SortFunc(out, func(a, b sandbox.FileChange) int { return cmp.Compare(a.Path, b.Path) })
	return out
}

// lineDiff shows lines that only one of two texts has.
func lineDiff(want, got string) string {
	var b strings.Builder
	for _, side := range []struct{ sign, text, other string }{{"- ", want, got}, {"+ ", got, want}} {
		other := map[string]bool{}
		for line := range strings.Lines(side.other) {
			other[line] = true
		}
		for line := range strings.Lines(side.text) {
			if !other[line] {
				b.WriteString(side.sign + line)
			}
		}
	}
	return b.String()
}

// lowerMark is on files of the model with several names that a sandbox has in
// a layer below its upper: to change one there is to part it from the others.
const lowerMark = "trusted.lower"

// copyModel copies a tree with everything of it.
func copyModel(t testing.TB, from, to string) {
	t.Helper()
	if err := run("cp", "-a", from, to); err != nil {
		t.Fatal(err)
	}
}

// lower marks what now lies below the upper.
func lower(t testing.TB, dir string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil || st.Nlink < 2 {
			return err
		}
		return unix.Lsetxattr(path, lowerMark, []byte("y"), 0)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// part does to a file of the model what a change does to it in an overlay: it
// becomes one of its own, apart from the other names of the file below.
func part(t testing.TB, path, scratch string) {
	t.Helper()
	var st, parent unix.Stat_t
	if unix.Lstat(path, &st) != nil || st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return
	}
	if _, err := unix.Lgetxattr(path, lowerMark, nil); errors.Is(err, unix.ENODATA) {
		return
	}
	if st.Nlink == 1 { // the other names are gone
		if err := unix.Lremovexattr(path, lowerMark); err != nil {
			t.Fatal(err)
		}
		return
	}
	dir := filepath.Dir(path)
	own := filepath.Join(scratch, "parted")
	err := unix.Lstat(dir, &parent)
	if err == nil {
		err = run("cp", "-a", path, own)
	}
	if err == nil {
		if err = unix.Lremovexattr(own, lowerMark); errors.Is(err, unix.ENODATA) {
			err = nil
		}
	}
	if err == nil {
		err = os.Rename(own, path)
	}
	if err == nil {
		err = unix.UtimesNanoAt(unix.AT_FDCWD, dir, []unix.Timespec{parent.Atim, parent.Mtim}, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// modelImage is an archive of the probe and a tree to begin with.
func modelImage(t testing.TB, probe, work string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	program, err := os.ReadFile(probe)
	if err != nil {
		t.Fatal(err)
	}
	err = w.WriteHeader(&tar.Header{Name: "probe", Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(program))})
	if err == nil {
		_, err = w.Write(program)
	}
	for _, dir := range []string{"etc", "tmp", "dev", "proc", "sys"} {
		err = errors.Join(err, w.WriteHeader(&tar.Header{Name: dir + "/", Typeflag: tar.TypeDir, Mode: 0o755}))
	}
	if err := errors.Join(err, w.Flush()); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("tar", "-C", filepath.Dir(work), "--format=posix", "--xattrs", "--xattrs-include=user.*", "--numeric-owner", "-cf", "-", filepath.Base(work))
	cmd.Stdout, cmd.Stderr = &b, os.Stderr
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

var treeNames = []string{
	"a", "b", "c", "d", "e", "two words", "ü", "new\nline", "-f", ".hidden", ".wh.a", ".wh..wh..opq", "\xff\xfe", strings.Repeat("n", 200), "a.x", `q"uote\`,
}

// treeWriter chooses changes of a tree at random.
type treeWriter struct {
	*rand.Rand
	now   int64
	plain bool // nothing that an archive of an image may not hold
}

func pick[T any](r *rand.Rand, from []T) T { return from[r.IntN(len(from))] }

// name is one that may be there or not.
func (w *treeWriter) name(l listing) []byte {
	dirs := []string{"."}
	for _, d := range l.of(unix.S_IFDIR) {
		if strings.Count(d.path, "/") < 4 {
			dirs = append(dirs, d.path)
		}
	}
	name := pick(w.Rand, treeNames)
	for w.plain && strings.HasPrefix(name, ".wh.") {
		name = pick(w.Rand, treeNames)
	}
	return []byte(filepath.Join(pick(w.Rand, dirs), name))
}

// present is a file of some types, or a name nothing has if there is none.
func (w *treeWriter) present(l listing, kinds ...uint32) []byte {
	files := l.of(kinds...)
	if len(files) == 0 {
		return []byte("nothing")
	}
	return []byte(pick(w.Rand, files).path)
}

func (w *treeWriter) size() int64 {
	switch w.IntN(10) {
	case 0:
		return 0
	case 1:
		return int64(w.IntN(300 << 10))
	}
	return int64(w.IntN(8 << 10))
}

// next is a change of a tree that looks like l. It may be one that fails.
func (w *treeWriter) next(l listing) treeChange {
	const (
		file = unix.S_IFREG
		dir  = unix.S_IFDIR
		link = unix.S_IFLNK
		fifo = unix.S_IFIFO
	)
	w.now += 1_000_000_007
	c := treeChange{Seed: w.Uint64(), Size: w.size(), Time: w.now, Mode: pick(w.Rand, []uint32{0o644, 0o600, 0o755, 0, 0o4755, 0o2711, 0o1777})}
	roll := w.IntN(100)
	if len(l.files) > 120 && roll < 30 {
		roll = 60 + roll/6
	}
	switch {
	case roll < 14:
		c.Do, c.Path = "write", w.name(l)
	case roll < 19:
		c.Do, c.Path = "write", w.present(l, file)
	case roll < 23:
		c.Do, c.Path = "append", w.present(l, file)
	case roll < 27:
		c.Do, c.Path = "patch", w.present(l, file)
	case roll < 31:
		c.Do, c.Path = "truncate", w.present(l, file)
	case roll < 42:
		c.Do, c.Path = "mkdir", w.name(l)
	case roll < 46:
		c.Do, c.Path, c.To = "symlink", w.name(l), []byte(pick(w.Rand, []string{"a", "../b", "gone", "c/d", ".wh.a"}))
	case roll < 48 && !w.plain:
		c.Do, c.Path = "fifo", w.name(l)
	case roll < 56:
		c.Do, c.Path, c.To = "link", w.present(l, file, file, link, fifo), w.name(l)
	case roll < 63:
		c.Do, c.Path = "unlink", w.present(l, file, link, fifo)
	case roll < 66:
		c.Do, c.Path = "removeall", w.present(l, dir)
	case roll < 67:
		c.Do, c.Path = "rmdir", w.present(l, dir)
	case roll < 72:
		c.Do, c.Path, c.To = "rename", w.present(l, file, link, fifo), w.name(l)
	case roll < 75:
		c.Do, c.Path, c.To = "rename", w.present(l, file, link, fifo), w.present(l, file, link)
	case roll < 80:
		c.Do, c.Path, c.To = "rename", w.present(l, dir), w.name(l)
	case roll < 82:
		c.Do, c.Path, c.To = "rename", w.present(l, dir), w.present(l, dir)
	case roll < 87:
		c.Do, c.Path = "chmod", w.present(l, file, dir, fifo)
	case roll < 92:
		c.Do, c.Path, c.UID, c.GID = "chown", w.present(l, file, dir, link, fifo), pick(w.Rand, []int{0, 1, 1000, 65534}), pick(w.Rand, []int{0, 5, 65535})
	case roll < 97 && !w.plain: // the import of a plain archive drops attributes
		c.Do, c.Path, c.Name, c.Size = "setxattr", w.present(l, file, dir), pick(w.Rand, []string{"user.a", "user.b", "user.trusted.overlay.opaque"}), int64(w.IntN(300))
	default:
		c.Do, c.Path, c.Name = "removexattr", w.present(l, file, dir), "user.a"
		for _, f := range l.files {
			if f.path == string(c.Path) && !slices.Contains(f.attrs, c.Name) {
				c.Do, c.Mode = "touch", 0
			}
		}
	}
	if bytes.Equal(c.Path, c.To) {
		c.Do = "touch"
	}
	return c
}

// parts is the file, if any, that a change of a tree makes one of its own: of
// which the overlay, before it changes it, makes a copy in the upper.
func (c treeChange) parts(l listing) []byte {
	kind := func(path []byte) uint32 {
		for _, f := range l.files {
			if f.path == string(path) {
				return f.kind()
			}
		}
		return 0
	}
	switch c.Do {
	case "write", "append", "patch", "truncate":
		if kind(c.Path) != unix.S_IFREG {
			return nil
		}
	case "link":
		if kind(c.To) != 0 {
			return nil
		}
	case "rename":
		if kind(c.To) == unix.S_IFDIR {
			return nil
		}
	case "chmod", "chown", "setxattr", "removexattr", "touch":
	default:
		return nil
	}
	return c.Path
}

// movesDir reports whether a change gives a directory another name. An overlay
// writes down where such a directory lies in a layer, in 256 bytes at most; what
// is longer it leaves, with EXDEV, to programs that then copy, as mv does
// (fs/overlayfs/dir.c, ovl_get_redirect).
func (c treeChange) movesDir(l listing) bool {
	return c.Do == "rename" && slices.ContainsFunc(l.of(unix.S_IFDIR), func(f treeFile) bool { return f.path == string(c.Path) })
}

// refused reports whether the kernel refuses a change before the overlay has
// made a copy for it: opening with O_CREAT, which fs.protected_regular forbids
// even root where the file is another's, in a sticky directory of a third one
// (Documentation/admin-guide/sysctl/fs.rst).
func (c treeChange) refused(dir string) bool {
	if c.Do != "write" {
		return false
	}
	fd, err := unix.Open(filepath.Join(dir, string(c.Path)), unix.O_WRONLY|unix.O_CREAT|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == nil {
		_ = unix.Close(fd)
	}
	return errors.Is(err, unix.EACCES)
}
