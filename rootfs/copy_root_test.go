//go:build root

package rootfs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// oddTree fills a directory with one of everything.
func oddTree(t testing.TB, root string) {
	t.Helper()
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	p := func(n string) string { return filepath.Join(root, n) }
	write := func(n, data string, mode os.FileMode) {
		t.Helper()
		do(os.WriteFile(p(n), []byte(data), 0o600))
		do(os.Chmod(p(n), mode))
	}
	set := func(n, name, value string) {
		t.Helper()
		do(unix.Lsetxattr(p(n), name, []byte(value), 0))
	}
	do(os.MkdirAll(p("dir/sub/empty"), 0o755))
	write("dir/f", "content", 0o640)
	write("empty", "", 0o000)
	write("big", strings.Repeat("0123456789", 100_000), 0o644)
	write("setid", "x", 0o755)
	do(os.Lchown(p("setid"), 1000, 1001))
	do(unix.Chmod(p("setid"), 0o6755))
	write("caps", "x", 0o755)
	set("caps", "security.capability", "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00")
	write("attrs", "x", 0o644)
	set("attrs", "user.empty", "")
	set("attrs", "user.big", strings.Repeat("v", 2000))
	do(os.Lchown(p("attrs"), 65535, 65534))
	// An ACL: rw- for the owner, r-x for user 7, r-- for the group, r-x as mask, --- for others.
	const acl = "\x02\x00\x00\x00\x01\x00\x06\x00\xff\xff\xff\xff\x02\x00\x05\x00\x07\x00\x00\x00\x04\x00\x04\x00\xff\xff\xff\xff\x10\x00\x05\x00\xff\xff\xff\xff\x20\x00\x00\x00\xff\xff\xff\xff"
	set("attrs", "system.posix_acl_access", acl)
	do(os.Mkdir(p("acl"), 0o2770))
	set("acl", "system.posix_acl_default", acl)
	write("acl/inherits", "x", 0o666)
	do(os.Chown(p("acl"), 5, 6))
	do(unix.Chmod(p("acl"), 0o2750))
	do(os.Symlink("../../etc/passwd", p("link")))
	do(os.Symlink(strings.Repeat("x/", 500), p("dir/longlink")))
	do(os.Lchown(p("link"), 3, 4))
	set("link", "trusted.t", "on a link")
	do(os.Link(p("dir/f"), p("dir/sub/second")))
	do(os.Link(p("dir/f"), p("third")))
	do(os.Link(p("link"), p("link2")))
	do(unix.Mkfifo(p("pipe"), 0o640))
	do(unix.Mknod(p("null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	do(unix.Mknod(p("disk"), unix.S_IFBLK|0o600, int(unix.Mkdev(7, 200))))
	do(unix.Mknod(p("gone"), unix.S_IFCHR, 0))
	do(os.Link(p("gone"), p("dir/gone too")))
	do(os.Link(p("gone"), p(".wh.not")))
	set("dir", "trusted.overlay.opaque", "y")
	set("dir/sub", "trusted.overlay.redirect", "/else/where")
	set("dir/f", "trusted.overlay.origin", "\x00\x01")
	write("name \xff\n with bytes", "x", 0o644)
	write(strings.Repeat("n", 255), "x", 0o644)
	for n, at := range map[string]unix.Timespec{"dir/sub": {Sec: 1, Nsec: 999999999}, "big": {Sec: 1 << 31, Nsec: 1}, "link": {Sec: 5, Nsec: 6}, "pipe": {Sec: 7, Nsec: 8}, "dir": {Sec: 9, Nsec: 10}, ".": {Sec: 11, Nsec: 12}} {
		do(unix.UtimesNanoAt(unix.AT_FDCWD, p(n), []unix.Timespec{at, at}, unix.AT_SYMLINK_NOFOLLOW))
	}
}

// copyTo copies an upper and returns the copy's directory.
func copyTo(t testing.TB, s *Store, id sandbox.ID) string {
	t.Helper()
	layer := NewUpperLayer()
	for range 2 { // once more does nothing
		if _, err := s.CopyUpper(t.Context(), id, layer); err != nil {
			t.Fatal(err)
		}
	}
	tree, err := layerTree(layer)
	if err != nil {
		t.Fatal(err)
	}
	return s.vol.path(tree)
}

// TestCopyUpper: a copy has everything of the original, on a filesystem that
// shares blocks and on one that does not.
func TestCopyUpper(t *testing.T) {
	for name, open := range map[string]func(testing.TB) *Store{
		"plain": openTest,
		"xfs":   func(t testing.TB) *Store { return openXFS(t, 400<<20) },
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t)
			id := create(t, s)
			upper := s.vol.path(sandboxesDir, string(id), "upper")
			oddTree(t, upper)
			sock, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(sock)
			want := listTree(t, upper, true)
			if err := unix.Bind(sock, &unix.SockaddrUnix{Name: filepath.Join(upper, "dir/sub/empty/sock")}); err != nil {
				t.Fatal(err)
			}
			when := unix.Timespec{Sec: 77, Nsec: 78}
			for _, at := range []string{"dir/sub/empty"} {
				if err := unix.UtimesNanoAt(unix.AT_FDCWD, filepath.Join(upper, at), []unix.Timespec{when, when}, 0); err != nil {
					t.Fatal(err)
				}
			}
			want = slicesReplace(want, "/dir/sub/empty ", listTree(t, filepath.Join(upper, "dir/sub/empty"), true)[0])
			copied := copyTo(t, s, id)
			sameTree(t, "copy", want, listTree(t, copied, true))
			if names, err := readNames(s.vol.path(stagingDir)); err != nil || len(names) != 0 {
				t.Errorf("staged: %v, %v", names, err)
			}
			// The copy is one: what is written now does not reach it.
			if err := os.WriteFile(filepath.Join(upper, "big"), []byte("other"), 0o644); err != nil {
				t.Fatal(err)
			}
			sameTree(t, "copy, after a write", want, listTree(t, copied, true))
		})
	}
}

// slicesReplace replaces the line that begins with prefix by one of the list
// of another root.
func slicesReplace(lines []string, prefix, with string) []string {
	out := append([]string(nil), lines...)
	for i, l := range out {
		if strings.HasPrefix(l, prefix) {
			out[i] = prefix + strings.TrimPrefix(with, "/ ")
		}
	}
	return out
}

// TestCopyUpperLive copies the upper of a sandbox that goes on afterwards, with
// everything it wrote still in memory.
func TestCopyUpperLive(t *testing.T) {
	for name, open := range map[string]func(testing.TB) *Store{
		"plain": openTest,
		"xfs":   func(t testing.TB) *Store { return openXFS(t, 400<<20) },
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t)
			img := importTest(t, s, tarEntry{name: "d/old", data: "old"}, tarEntry{name: "dir/sub/f", data: "deep"}, tarEntry{name: "gone"})
			in := startInside(t, testBase)
			id := create(t, s)
			in.keep(t, mountTest(t, s, in, id, img))
			long := strings.Repeat("long", 5000)
			for _, c := range [][]string{{"write", "/d/old", long}, {"write", "/new", "1"}, {"rename", "/dir", "/moved"}, {"remove", "/gone"}} {
				if got := in.kept(t, c[0], c[1:]...); got != "ok" {
					t.Fatalf("%q: %s", c, got)
				}
			}
			layer := NewUpperLayer()
			if _, err := s.CopyUpper(t.Context(), id, layer); err != nil {
				t.Fatal(err)
			}
			for _, c := range [][]string{{"write", "/d/old", "later"}, {"remove", "/moved"}, {"write", "/gone", "again"}} {
				if got := in.kept(t, c[0], c[1:]...); got != "ok" {
					t.Fatalf("afterwards, %q: %s", c, got)
				}
			}
			fork := img
			fork.Layers = append(fork.Layers[:1:1], layer)
			forked := startInside(t, testBase+65536)
			forked.keep(t, mountTest(t, s, forked, create(t, s), fork))
			for path, want := range map[string]string{"/d/old": long, "/new": "1", "/moved/sub/f": "deep", "/gone": "errno ENOENT", "/dir/sub/f": "errno ENOENT"} {
				if got := forked.kept(t, "read", path); got != want {
					t.Errorf("the fork reads %s as %.20q, want %.20q", path, got, want)
				}
			}
			if got := in.kept(t, "read", "/d/old"); got != "later" {
				t.Errorf("the original reads %.20q", got)
			}
		})
	}
}

// TestCopyHoles: holes stay holes, wherever they lie.
func TestCopyHoles(t *testing.T) {
	for name, open := range map[string]func(testing.TB) *Store{
		"plain": openTest,
		"xfs":   func(t testing.TB) *Store { return openXFS(t, 400<<20) },
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t)
			id := create(t, s)
			upper := s.vol.path(sandboxesDir, string(id), "upper")
			for name, at := range map[string][]int64{"end": {0}, "begin": {2 << 20}, "both": {1 << 20}, "none": {}, "many": {256 << 10, 768 << 10, 1792 << 10}} {
				f, err := os.Create(filepath.Join(upper, name))
				if err != nil {
					t.Fatal(err)
				}
				for _, off := range at {
					if _, err := f.WriteAt([]byte(strings.Repeat("x", 10_000)), off); err != nil {
						t.Fatal(err)
					}
				}
				if err := errors.Join(f.Truncate(2304<<10), f.Close()); err != nil {
					t.Fatal(err)
				}
			}
			want := listTree(t, upper, true)
			copied := copyTo(t, s, id)
			sameTree(t, "copy", want, listTree(t, copied, true))
			for _, name := range []string{"end", "begin", "both", "none", "many"} {
				if st := statOf(t, filepath.Join(copied, name)); st.Blocks*512 > 512<<10 {
					t.Errorf("%s takes %d bytes", name, st.Blocks*512)
				}
			}
		})
	}
}

// TestCopyShares: a clone takes no space of its own.
func TestCopyShares(t *testing.T) {
	s := openXFS(t, 400<<20)
	id := create(t, s)
	fillUpper(t, s, id, 100, 1<<20)
	free := func() int64 {
		t.Helper()
		if err := s.Sync(); err != nil {
			t.Fatal(err)
		}
		var st unix.Statfs_t
		if err := unix.Statfs(s.vol.dir, &st); err != nil {
			t.Fatal(err)
		}
		return int64(st.Bavail) * st.Bsize
	}
	before := free()
	copyTo(t, s, id)
	if took := before - free(); took > 4<<20 {
		t.Errorf("a copy of 100 MiB took %d bytes", took)
	}
}

// deepUpper makes a tree deeper than any path can be, and very wide ones.
func deepUpper(t testing.TB, upper string, depth int) {
	t.Helper()
	fd, err := unix.Open(upper, openDirFlags, 0)
	if err != nil {
		t.Fatal(err)
	}
	for i := range depth {
		for _, n := range []string{"side", "down"} {
			if err := unix.Mkdirat(fd, n, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if err := unix.Symlinkat(fmt.Sprint(i), fd, "link"); err != nil {
			t.Fatal(err)
		}
		next, err := unix.Openat(fd, "down", openDirFlags, 0)
		unix.Close(fd)
		if err != nil {
			t.Fatal(err)
		}
		fd = next
	}
	unix.Close(fd)
	for i := range 3 * copyOpen {
		if err := os.MkdirAll(filepath.Join(upper, "wide", fmt.Sprint(i), "a", "b"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

// TestDeepTrees: neither depth nor width beyond what paths and descriptors
// allow stands in the way of a copy, a count or a merge.
func TestDeepTrees(t *testing.T) {
	s := openTest(t)
	id := create(t, s)
	const depth = 1500
	deepUpper(t, s.vol.path(sandboxesDir, string(id), "upper"), depth)
	copied := NewUpperLayer()
	if _, err := s.CopyUpper(t.Context(), id, copied); err != nil {
		t.Fatal(err)
	}
	frozen := freeze(t, s, id)
	flat, err := s.Flatten(t.Context(), []string{copied, frozen})
	if err != nil {
		t.Fatal(err)
	}
	const want = 3*depth + 1 + 1 + 3*3*copyOpen
	tree, err := layerTree(flat)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(s.vol.path(tree), "..", "layer.json")); err != nil { // count again
		t.Fatal(err)
	}
	for _, l := range []string{copied, frozen, flat} {
		if _, files, err := s.LayerUsage(t.Context(), l); err != nil || files != want {
			t.Errorf("%d files, %v, want %d", files, err, want)
		}
		if err := s.RemoveLayer(l); err != nil {
			t.Fatal(err)
		}
	}
	testenv.Eventually(t, 60*time.Second, "the trees deleted", func() bool { return trashEmpty(t, s) })
}

// TestCopyUpperFails: cancelled or out of space, a copy leaves nothing; the
// same copy with time and space is made.
func TestCopyUpperFails(t *testing.T) {
	s := openXFS(t, 400<<20)
	id := create(t, s)
	upper := fillUpper(t, s, id, 200, 1000)
	layer := NewUpperLayer()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.CopyUpper(ctx, id, layer); !errors.Is(err, context.Canceled) || s.HasLayer(layer) {
		t.Errorf("cancelled: %v", err)
	}
	more := create(t, s)
	fillUpper(t, s, more, 5000, 100)
	ctx, cancel = context.WithCancel(t.Context())
	defer cancel()
	copied := make(chan error, 1)
	go func() { _, err := s.CopyUpper(ctx, more, layer); copied <- err }()
	testenv.Eventually(t, 30*time.Second, "a copy under way", func() bool {
		staged, err := filepath.Glob(s.vol.path(stagingDir, "*", "upper", "d*", "f*"))
		return err != nil || len(staged) > 0
	})
	cancel()
	if err := <-copied; !errors.Is(err, context.Canceled) || s.HasLayer(layer) {
		t.Errorf("cancelled on its way: %v", err)
	}
	testenv.Eventually(t, 30*time.Second, "nothing left", func() bool { return trashEmpty(t, s) })
	if _, err := s.CopyUpper(t.Context(), sandbox.NewID(), layer); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("without an upper: %v", err)
	}
	if _, err := s.CopyUpper(t.Context(), id, digestN(1)); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("to a digest: %v", err)
	}
	// The volume is filled to the last block and inode.
	ballast := s.vol.path("ballast")
	f, err := os.Create(ballast)
	if err != nil {
		t.Fatal(err)
	}
	for size := int64(64 << 20); size >= 512; {
		st, err := f.Stat()
		if err == nil {
			err = unix.Fallocate(int(f.Fd()), 0, st.Size(), size)
		}
		if errors.Is(err, unix.ENOSPC) {
			size /= 2
		} else if err != nil {
			t.Fatal(err)
		}
	}
	// A write makes the kernel find more than an allocation did; of small
	// files it would be 20,000.
	_, err = f.Seek(0, io.SeekEnd)
	for err == nil {
		_, err = f.Write(make([]byte, 64<<10))
	}
	err = nil
	for i := 0; err == nil; i++ {
		err = os.WriteFile(filepath.Join(upper, fmt.Sprintf("more%d", i)), []byte(strings.Repeat("x", 100)), 0o600)
	}
	if _, err := s.CopyUpper(t.Context(), id, layer); sandbox.CodeOf(err) != "volume_full" || s.HasLayer(layer) {
		t.Errorf("on a full volume: %v", err)
	}
	if err := errors.Join(f.Close(), os.Remove(ballast)); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 30*time.Second, "nothing left", func() bool { return trashEmpty(t, s) })
	if _, err := s.CopyUpper(t.Context(), id, layer); err != nil || !s.HasLayer(layer) {
		t.Errorf("with space: %v", err)
	}
}
