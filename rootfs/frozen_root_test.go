//go:build root

package rootfs

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// openXFS opens a Store on an XFS of its own, made for this test: with quotas
// where the kernel has them.
func openXFS(t testing.TB, size int64) *Store {
	t.Helper()
	s, _ := openXFSOn(t, size)
	return s
}

// openXFSOn is openXFS that tells the file which is the disk.
func openXFSOn(t testing.TB, size int64) (s *Store, disk string) {
	t.Helper()
	testenv.Need(t, testenv.XFS)
	img, err := os.CreateTemp("/var/tmp", "rootfs-test-*.img")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(img.Name()) })
	defer img.Close()
	if err := img.Truncate(size); err != nil {
		t.Fatal(err)
	}
	opts := "loop,noatime"
	if testenv.Quota.Missing() == nil {
		opts += ",prjquota"
	}
	at := t.TempDir()
	for _, args := range [][]string{{"mkfs.xfs", "-q", "-m", "reflink=1", img.Name()}, {"mount", "-o", opts, img.Name(), at}} {
		if out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%q: %v: %s", args, err, out)
		}
	}
	t.Cleanup(func() {
		if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	dir := filepath.Join(at, "state")
	if err := os.MkdirAll(filepath.Join(dir, "volume", layersDir), 0o700); err != nil {
		t.Fatal(err)
	}
	return openIn(t, Config{Dir: dir, BestEffort: true}), img.Name()
}

// freeze freezes the upper of a sandbox under a fresh name.
func freeze(t testing.TB, s *Store, id sandbox.ID) string {
	t.Helper()
	layer := NewUpperLayer()
	if err := s.FreezeUpper(id, layer); err != nil {
		t.Fatal(err)
	}
	return layer
}

// TestFreezeUpper freezes what a sandbox wrote while its root is still
// mounted, and stacks it under new uppers, in every way of mounting.
func TestFreezeUpper(t *testing.T) {
	s := openTest(t)
	img := importTest(t, s, tarEntry{name: "d/old", data: "old"}, tarEntry{name: "gone", data: "x"}, tarEntry{name: "dir/sub/f", data: "deep"})
	all := modes(t, s)
	for _, mode := range all {
		t.Run(mode.String(), func(t *testing.T) {
			s.mode = mode
			in := startInside(t, testBase)
			id := create(t, s)
			in.keep(t, mountTest(t, s, in, id, img))
			for _, c := range [][]string{{"write", "/d/old", "new"}, {"remove", "/gone"}, {"rename", "/dir", "/moved"}} {
				if got := in.kept(t, c[0], c[1:]...); got != "ok" {
					t.Fatalf("%q: %s", c, got)
				}
			}
			layer := freeze(t, s, id)
			for range 2 { // and again after the sandbox has a new upper
				if err := s.FreezeUpper(id, layer); err != nil {
					t.Fatal(err)
				}
				if err := s.CreateUpper(id, 0, sandbox.Limits{}); err != nil {
					t.Fatal(err)
				}
			}
			if dirty, err := s.Dirty(id); dirty || err != nil {
				t.Errorf("the new upper is dirty: %v, %v", dirty, err)
			}
			stacked := img
			stacked.Layers = append(stacked.Layers[:1:1], layer)
			for _, who := range []sandbox.ID{id, create(t, s)} { // a second sandbox shares it
				in.keep(t, mountTest(t, s, in, who, stacked))
				for path, want := range map[string]string{"/d/old": "new", "/gone": "errno ENOENT", "/dir/sub/f": "errno ENOENT", "/moved/sub/f": "deep"} {
					if got := in.kept(t, "read", path); got != want {
						t.Errorf("%s reads %q, want %q", path, got, want)
					}
				}
			}
			bytes, files, err := s.LayerUsage(t.Context(), layer)
			if err != nil || bytes <= 0 || files < 4 || files > 20 {
				t.Errorf("usage %d, %d, %v", bytes, files, err)
			}
		})
	}
	if layers, err := s.Layers(); err != nil || len(layers) != 1+len(all) {
		t.Errorf("layers %v, %v", layers, err)
	}
}

// TestFreezeRootMode: what a sandbox made of "/" goes on over its layer, for
// as long as nobody makes something else of it.
func TestFreezeRootMode(t *testing.T) {
	s := openTest(t)
	img := importTest(t, s, tarEntry{name: "f"})
	in := startInside(t, testBase)
	id := create(t, s)
	in.keep(t, mountTest(t, s, in, id, img))
	if got := in.kept(t, "stat", "/"); got != "755 0:0" {
		t.Fatalf("/ is %s", got)
	}
	upper := s.vol.path(sandboxesDir, string(id), "upper")
	if err := errors.Join(os.Lchown(upper, 1000, 7), unix.Chmod(upper, 0o1711)); err != nil {
		t.Fatal(err)
	}
	layer := freeze(t, s, id)
	img.Layers = append(img.Layers, layer)
	again := create(t, s)
	in.keep(t, mountTest(t, s, in, again, img))
	if got := in.kept(t, "stat", "/"); got != "1711 1000:7" {
		t.Errorf("over the layer, / is %s", got)
	}
	if got := in.kept(t, "chown", "/"); got != "ok" {
		t.Fatal(got)
	}
	later := startInside(t, testBase)
	if err := s.Clean(again); err != nil {
		t.Fatal(err)
	}
	later.keep(t, mountTest(t, s, later, again, img))
	if got := later.kept(t, "stat", "/"); got != "1711 7:8" {
		t.Errorf("mounted again, / is %s", got)
	}
}

func TestFreezeUpperRefused(t *testing.T) {
	s := openTest(t)
	id := create(t, s)
	if err := s.FreezeUpper(id, digestN(1)); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("frozen under a digest: %v", err)
	}
	if err := s.FreezeUpper(sandbox.NewID(), NewUpperLayer()); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("frozen without an upper: %v", err)
	}
	half := sandbox.NewID() // as a creation that was cut short leaves it
	if err := os.Mkdir(s.vol.path(sandboxesDir, string(half)), 0o700); err != nil {
		t.Fatal(err)
	}
	layer := NewUpperLayer()
	if err := s.FreezeUpper(half, layer); !errors.Is(err, sandbox.ErrNotFound) || s.HasLayer(layer) {
		t.Errorf("frozen without an upper: %v", err)
	}
	if _, _, err := s.LayerUsage(t.Context(), layer); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("usage of no layer: %v", err)
	}
	freeze(t, s, id)
}

// TestFreezeQuota: files of a frozen upper go on counting where they did, a
// new upper counts anew, and the project comes back with the layer's removal.
func TestFreezeQuota(t *testing.T) {
	s, dir := openImage(t)
	id := create(t, s)
	limits := sandbox.Limits{DiskBytes: 8 << 20, DiskInodes: 100}
	if err := s.SetLimits(id, 0, limits); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.vol.path(sandboxesDir, string(id), "upper", "f"), make([]byte, 3<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	old, err := projectOf(s.vol.path(sandboxesDir, string(id)))
	if err != nil {
		t.Fatal(err)
	}
	layer := freeze(t, s, id)
	if err := s.CreateUpper(id, 0, limits); err != nil {
		t.Fatal(err)
	}
	fresh, err := projectOf(s.vol.path(sandboxesDir, string(id)))
	if err != nil || fresh == old || fresh == 0 {
		t.Fatalf("projects %#x, then %#x: %v", old, fresh, err)
	}
	if bytes, _, _, err := s.Usage(id, 0); err != nil || bytes > 1<<20 {
		t.Errorf("the new upper counts %d bytes, %v", bytes, err)
	}
	if bytes, files, err := s.LayerUsage(t.Context(), layer); err != nil || bytes < 3<<20 || files < 3 {
		t.Errorf("the layer counts %d bytes, %d files, %v", bytes, files, err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openIn(t, Config{Dir: dir})
	if !s.ids.used[old] || !s.ids.used[fresh] {
		t.Errorf("after a restart %v are in use, want %#x and %#x", s.ids.used, old, fresh)
	}
	if err := s.RemoveLayer(layer); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 30*time.Second, "the layer deleted", func() bool { return trashEmpty(t, s) })
	testenv.Eventually(t, 30*time.Second, "its project free", func() bool {
		s.ids.mu.Lock()
		defer s.ids.mu.Unlock()
		return !s.ids.used[old]
	})
}

// TestHalfLayer: a directory without files in the place of a layer goes at
// the next start; a whole one, and one of the other form, stay.
func TestHalfLayer(t *testing.T) {
	s := openTest(t)
	img := importTest(t, s, tarEntry{name: "f"})
	whole, half := freeze(t, s, create(t, s)), NewUpperLayer()
	rel, err := s.upperLayerDir(half)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(s.vol.path(rel, "work"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openIn(t, Config{Dir: s.dir, BestEffort: true})
	testenv.Eventually(t, 30*time.Second, "the trash emptied", func() bool { return trashEmpty(t, s) })
	if s.HasLayer(half) || !s.HasLayer(whole) || !s.HasLayer(img.Layers[0]) {
		t.Error("the wrong layers went")
	}
	if layers, err := s.Layers(); err != nil || len(layers) != 2 {
		t.Errorf("layers %v, %v", layers, err)
	}
}

// TestMixedStack stacks imported layers and frozen uppers in turn.
func TestMixedStack(t *testing.T) {
	s := openTest(t)
	for _, n := range []int{64, 128} {
		img := fakeLayers(t, s, n)
		for i := range n {
			if i%2 == 0 {
				continue
			}
			id := create(t, s)
			upper := s.vol.path(sandboxesDir, string(id), "upper")
			for _, f := range []string{fmt.Sprint(i), "top"} {
				if err := os.WriteFile(filepath.Join(upper, f), []byte(fmt.Sprint(i)), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			// Every frozen upper hides what the layer below it has.
			if err := unix.Mknod(filepath.Join(upper, fmt.Sprint(i-1)), unix.S_IFCHR, 0); err != nil {
				t.Fatal(err)
			}
			img.Layers[i] = freeze(t, s, id)
		}
		in := startInside(t, testBase)
		for _, mode := range modes(t, s) {
			s.mode = mode
			in.keep(t, mountTest(t, s, in, create(t, s), img))
			want := fmt.Sprint(n - 1)
			if got := in.kept(t, "read", "/top"); got != want {
				t.Errorf("%v, %d layers: the top one is %q, want %q", mode, n, got, want)
			}
			if got := len(strings.Fields(in.kept(t, "list", "/"))) - len(mountPoints); got != n/2+1 {
				t.Errorf("%v, %d layers: %d names, want %d", mode, n, got, n/2+1)
			}
		}
	}
}

// TestUnchanged: what every upper gets is no change, everything else is.
func TestUnchanged(t *testing.T) {
	s := openTest(t)
	img := importTest(t, s, tarEntry{name: "etc/", mode: 0o755}, tarEntry{name: "etc/passwd", data: "root"}, tarEntry{name: "d/f", data: "x"})
	in := startInside(t, testBase)
	fresh := func(t *testing.T) (sandbox.ID, string) {
		t.Helper()
		id := create(t, s)
		if ok, err := s.Furnish(id, img, Identity{}, Identity{Hostname: "h", Hosts: "127.0.0.1 h\n"}); !ok || err != nil {
			t.Fatalf("furnish: %v, %v", ok, err)
		}
		return id, s.vol.path(sandboxesDir, string(id), "upper")
	}
	for name, c := range map[string]struct {
		do   []string
		want bool
	}{
		"nothing":       {nil, true},
		"reading":       {[]string{"read", "/etc/passwd"}, true},
		"an /etc/hosts": {[]string{"write", "/etc/hosts", "x"}, true},
		"no /etc/hosts": {[]string{"remove", "/etc/hosts"}, true},
		"a file":        {[]string{"write", "/new", "x"}, false},
		"one in /etc":   {[]string{"write", "/etc/new", "x"}, false},
		"a removal":     {[]string{"remove", "/d/f"}, false},
		"no /etc":       {[]string{"remove", "/etc"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			id, _ := fresh(t)
			root := mountTest(t, s, in, id, img)
			if c.do != nil {
				in.run(t, root, c.do[0], c.do[1:]...)
			}
			root.Close()
			if got, err := s.Unchanged(id); got != c.want || err != nil {
				t.Errorf("unchanged: %v, %v; want %v", got, err, c.want)
			}
		})
	}
	for name, do := range map[string]func(upper string) error{
		"its mode":      func(u string) error { return os.Chmod(u, 0o700) },
		"the /etc mode": func(u string) error { return os.Chmod(filepath.Join(u, "etc"), 0o700) },
		"an attribute":  func(u string) error { return unix.Lsetxattr(filepath.Join(u, "etc"), "user.x", []byte("x"), 0) },
		"opaque": func(u string) error {
			return unix.Lsetxattr(filepath.Join(u, "etc"), "trusted.overlay.opaque", []byte("y"), 0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			id, upper := fresh(t)
			if err := do(upper); err != nil {
				t.Fatal(err)
			}
			if got, err := s.Unchanged(id); got || err != nil {
				t.Errorf("unchanged: %v, %v", got, err)
			}
		})
	}
	if _, err := s.Unchanged(sandbox.NewID()); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("of no upper: %v", err)
	}
}

// settled takes stamps until two agree: while files are fresh, none do.
func settled(t *testing.T, s *Store, id sandbox.ID) string {
	t.Helper()
	stamp := func() string {
		got, err := s.UpperStamp(id)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	var last string
	testenv.Eventually(t, 10*time.Second, "a stamp that stays", func() bool {
		before := last
		last = stamp()
		return before == last
	})
	return last
}

func TestUpperStamp(t *testing.T) {
	s := openTest(t)
	id := create(t, s)
	upper := s.vol.path(sandboxesDir, string(id), "upper")
	path := func(n string) string { return filepath.Join(upper, n) }
	past := time.Unix(1e9, 0)
	last := settled(t, s, id)
	for _, c := range []struct {
		name string
		do   func() error
	}{
		{"create", func() error { return os.WriteFile(path("f"), []byte("abc"), 0o644) }},
		{"overwrite", func() error { return os.WriteFile(path("f"), []byte("abd"), 0o644) }},
		{"with its old time", func() error {
			return errors.Join(os.WriteFile(path("f"), []byte("abe"), 0o644), os.Chtimes(path("f"), past, past))
		}},
		{"chmod", func() error { return os.Chmod(path("f"), 0o600) }},
		{"xattr", func() error { return unix.Lsetxattr(path("f"), "user.x", []byte("1"), 0) }},
		{"mkdir", func() error { return os.Mkdir(path("d"), 0o755) }},
		{"rename", func() error { return os.Rename(path("f"), path("d/f")) }},
		{"link", func() error { return os.Link(path("d/f"), path("g")) }},
		{"unlink", func() error { return os.Remove(path("g")) }},
		{"replace", func() error {
			return errors.Join(os.Remove(path("d/f")), os.WriteFile(path("d/f"), []byte("abe"), 0o600))
		}},
	} {
		if err := c.do(); err != nil {
			t.Fatal(err)
		}
		now := settled(t, s, id)
		if now == last {
			t.Errorf("%s left the stamp as it was", c.name)
		}
		last = now
	}
	if again := settled(t, s, id); again != last {
		t.Errorf("nothing happened, but %s became %s", last, again)
	}
	if _, err := s.UpperStamp(sandbox.NewID()); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("of no upper: %v", err)
	}
}
