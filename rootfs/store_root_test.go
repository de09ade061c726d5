//go:build root

package rootfs

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

const testBase = 0x20000000

// openTest opens a Store that makes no loop image: its directory is plain
// unless the test machine's own filesystem has quotas.
func openTest(t testing.TB) *Store {
	t.Helper()
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "volume", layersDir), 0o700); err != nil {
		t.Fatal(err)
	}
	return openIn(t, Config{Dir: dir, BestEffort: true})
}

func openIn(t testing.TB, cfg Config) *Store {
	t.Helper()
	testenv.Need(t, testenv.Root, testenv.Userns, testenv.Overlay)
	s, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func importTest(t testing.TB, s *Store, entries ...tarEntry) sandbox.Image {
	t.Helper()
	img, err := s.ImportTar(t.Context(), "test", tarOf(t, entries...))
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func mountTest(t testing.TB, s *Store, in *inside, id sandbox.ID, img sandbox.Image) *Root {
	t.Helper()
	root, err := s.Mount(t.Context(), MountSpec{ID: id, Image: img, UserNS: in.userns, UIDBase: in.base})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	return root
}

func create(t testing.TB, s *Store) sandbox.ID {
	t.Helper()
	id := sandbox.NewID()
	if err := s.CreateUpper(id, 0, sandbox.Limits{}); err != nil {
		t.Fatal(err)
	}
	return id
}

func modes(t *testing.T, s *Store) []overlayMode {
	t.Helper()
	var out []overlayMode
	for m := s.mode; m <= modeString; m++ {
		out = append(out, m)
	}
	return out
}

// TestMountIDs proves in every way of mounting this kernel has that ids on
// disk stay small, appear as themselves inside, and that what the sandbox
// does lands in its upper with the ids it meant.
func TestMountIDs(t *testing.T) {
	s := openTest(t)
	t.Logf("mode %v", s.mode)
	img := importTest(t, s,
		tarEntry{name: "etc/", mode: 0o755},
		tarEntry{name: "etc/secret", mode: 0o600, data: "low"},
		tarEntry{name: "home/u/f", mode: 0o640, uid: 1000, gid: 1001, data: "mine"},
		tarEntry{name: "d/sub/x", data: "deep"},
	)
	for _, mode := range modes(t, s) {
		t.Run(mode.String(), func(t *testing.T) {
			s.mode = mode
			in := startInside(t, testBase)
			id := create(t, s)
			upper := s.vol.path(sandboxesDir, string(id), "upper")
			expect := func(want, check string, args ...string) {
				t.Helper()
				if got := in.run(t, mountTest(t, s, in, id, img), check, args...); got != want {
					t.Errorf("%s %q = %q, want %q", check, args, got, want)
				}
				if err := s.Clean(id); err != nil {
					t.Fatal(err)
				}
			}
			expect("600 0:0", "stat", "/etc/secret")
			expect("640 1000:1001", "stat", "/home/u/f")
			expect("low", "read", "/etc/secret")
			expect("ok", "write", "/etc/secret", "high")
			expect("high", "read", "/etc/secret") // remounted: the upper kept it
			expect("ok", "chown", "/home/u/f")
			expect("640 7:8", "stat", "/home/u/f")
			expect("ok", "rename", "/d/sub", "/d/moved")
			expect("deep", "read", "/d/moved/x")
			expect("ok", "remove", "/home/u")
			expect("", "list", "/home")
			expect("operation not permitted", "mknod", "/null")
			st := statOf(t, filepath.Join(upper, "home"))
			if st.Uid != 0 {
				t.Errorf("upper on disk belongs to %d, want 0", st.Uid)
			}
			low := s.vol.path(layersDir, strings.TrimPrefix(img.Layers[0], digestPrefix), "root", "etc/secret")
			if b, err := os.ReadFile(low); err != nil || string(b) != "low" {
				t.Errorf("the layer changed: %q, %v", b, err)
			}
		})
	}
}

// TestMountHost shows what a host sandbox sees of the host.
func TestMountHost(t *testing.T) {
	s := openTest(t)
	img, err := s.HostImage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	in := startInside(t, testBase)
	id := create(t, s)
	expect := func(want, check string, args ...string) {
		t.Helper()
		if got := in.run(t, mountTest(t, s, in, id, img), check, args...); got != want {
			t.Errorf("%s %q = %q, want %q", check, args, got, want)
		}
		if err := s.Clean(id); err != nil {
			t.Fatal(err)
		}
	}
	expect("0", "run", "/bin/bash", "-lc", "id -u")
	expect("root user", "run", "/bin/sh", "-c", "echo $(id -un) $(id -un 1000)")
	expect("755 1000:1000", "stat", "/home/user")
	expect("1777 0:0", "stat", "/tmp")
	expect("755 65534:65534", "stat", "/usr/bin")
	expect("errno EROFS", "write", "/usr/bin/x", "")
	expect("ok", "write", "/etc/x", "")
	expect("", "list", "/usr/lib/systemd/system")
	expect("", "list", "/usr/local/etc")
}
