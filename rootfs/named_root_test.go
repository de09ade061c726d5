//go:build root

package rootfs

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// inVolume starts a sandbox with an empty image's root and the mounts given.
func inVolume(t *testing.T, s *Store, img sandbox.Image, base uint32, mounts func(in *inside) []Extra) *inside {
	t.Helper()
	in := startInside(t, base)
	root := mountTest(t, s, in, create(t, s), img)
	root.Extra = append(root.Extra, mounts(in)...)
	in.keep(t, root)
	return in
}

func mountVolume(t *testing.T, s *Store, in *inside, name string, readOnly bool) *os.File {
	t.Helper()
	tree, err := s.MountVolume(name, in.userns, readOnly)
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

// TestNamedVolume shares one volume between two id ranges, and compares a
// read-only mount of it with a writable one.
func TestNamedVolume(t *testing.T) {
	s := openTest(t)
	for range 2 { // repeating it changes nothing
		if err := s.CreateVolume("data", VolumeLimits{Bytes: 1 << 30}); err != nil {
			t.Fatal(err)
		}
	}
	img := importTest(t, s, tarEntry{name: "v/"}, tarEntry{name: "ro/"})
	one := inVolume(t, s, img, testBase, func(in *inside) []Extra {
		return []Extra{{mountVolume(t, s, in, "data", false), "/v"}}
	})
	two := inVolume(t, s, img, testBase+65536, func(in *inside) []Extra {
		return []Extra{{mountVolume(t, s, in, "data", false), "/v"}, {mountVolume(t, s, in, "data", true), "/ro"}}
	})
	if got := one.kept(t, "stat", "/v"); got != "755 0:0" {
		t.Errorf("a fresh volume is %s", got)
	}
	one.kept(t, "write", "/v/root", "1")
	one.kept(t, "write", "/v/seven", "2")
	one.kept(t, "chown", "/v/seven") // to 7:8
	for path, want := range map[string]string{"/v/root": "644 0:0", "/v/seven": "644 7:8", "/ro/seven": "644 7:8"} {
		if got := two.kept(t, "stat", path); got != want {
			t.Errorf("%s in the other sandbox: %s, want %s", path, got, want)
		}
	}
	if got := two.kept(t, "write", "/ro/x", "x"); got != "errno EROFS" {
		t.Errorf("writing where it is read-only: %s", got)
	}
	if got := two.kept(t, "write", "/v/x", "x"); got != "ok" {
		t.Errorf("the control: %s", got)
	}
	if got := one.kept(t, "read", "/v/x"); got != "x" {
		t.Errorf("the first sandbox reads %q", got)
	}
	st := statOf(t, filepath.Join(s.vol.path(volumesDir), "data", dataDir, "seven"))
	if st.Uid != 7 || st.Gid != 8 {
		t.Errorf("on disk it belongs to %d:%d", st.Uid, st.Gid)
	}
	if names, err := s.NamedVolumes(); err != nil || !slices.Equal(names, []string{"data"}) {
		t.Errorf("%q, %v", names, err)
	}
	for range 2 {
		if err := s.DiscardVolume("data"); err != nil {
			t.Fatal(err)
		}
	}
	if names, err := s.NamedVolumes(); err != nil || len(names) != 0 {
		t.Errorf("%q, %v", names, err)
	}
	_, err := s.MountVolume("data", one.userns, false)
	wantCode(t, err, "volume_gone")
	wantCode(t, s.LimitVolume("data", VolumeLimits{}), "volume_gone")
	for _, name := range []string{"", "..", "../layers", "a/b", ".x", "A"} {
		wantCode(t, s.CreateVolume(name, VolumeLimits{}), "invalid_name")
		wantCode(t, s.DiscardVolume(name), "invalid_name")
	}
}

// TestNamedVolumeHalfMade finishes what a crash cut off.
func TestNamedVolumeHalfMade(t *testing.T) {
	s := openTest(t)
	if err := os.Mkdir(s.vol.path(volumesDir, "half"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := s.CreateVolume("half", VolumeLimits{}); err != nil {
		t.Fatal(err)
	}
	in := startInside(t, testBase)
	tree, err := s.MountVolume("half", in.userns, false)
	if err != nil {
		t.Fatal(err)
	}
	_ = tree.Close()
}

// TestNamedVolumeQuota fills a volume; the controls are the same writes under
// higher limits.
func TestNamedVolumeQuota(t *testing.T) {
	s, dir := openImage(t)
	small := VolumeLimits{Bytes: 8 << 20, Inodes: 100}
	for _, name := range []string{"one", "two"} {
		if err := s.CreateVolume(name, small); err != nil {
			t.Fatal(err)
		}
	}
	if bytes, inodes, known, err := s.VolumeUsage("one"); err != nil || !known || bytes > 64<<10 || inodes != 0 {
		t.Errorf("a fresh volume holds %d bytes, %d inodes, %v, %v", bytes, inodes, known, err)
	}
	img := importTest(t, s, tarEntry{name: "v/"})
	in := inVolume(t, s, img, testBase, func(in *inside) []Extra {
		return []Extra{{mountVolume(t, s, in, "one", false), "/v"}}
	})
	run := func(check string, args ...string) (n int64, result string) {
		t.Helper()
		if _, err := fmt.Sscan(in.kept(t, check, args...), &n, &result); err != nil {
			t.Fatal(err)
		}
		return n, result
	}
	const want = 16 << 20
	if n, result := run("fill", "/v/big", fmt.Sprint(want)); result == "ok" || n > 8<<20 || n < 4<<20 {
		t.Errorf("under 8 MiB, %d bytes were written, then %s", n, result)
	}
	if bytes, _, _, err := s.VolumeUsage("two"); err != nil || bytes > 64<<10 {
		t.Errorf("the other volume holds %d bytes, %v", bytes, err)
	}
	if err := s.LimitVolume("one", VolumeLimits{Bytes: 64 << 20, Inodes: 100}); err != nil {
		t.Fatal(err)
	}
	if n, result := run("fill", "/v/big", fmt.Sprint(want)); n != want || result != "ok" {
		t.Errorf("under 64 MiB: %d bytes, then %s", n, result)
	}
	in.kept(t, "remove", "/v/big")
	in.kept(t, "write", "/v/dir", "a file") // one of the hundred
	if n, result := run("files", "/v/many", "150"); result == "ok" || n > 99 || n < 90 {
		t.Errorf("under 100 files, %d were made besides one, then %s", n, result)
	}
	if l, err := s.LimitsOfVolume("one"); err != nil || l != (VolumeLimits{Bytes: 64 << 20, Inodes: 100}) {
		t.Errorf("limits read back: %+v, %v", l, err)
	}
	if err := s.LimitVolume("one", VolumeLimits{}); err != nil {
		t.Fatal(err)
	}
	if n, result := run("files", "/v/more", "150"); n != 150 || result != "ok" {
		t.Errorf("without limits: %d files, then %s", n, result)
	}
	in.stop()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	// A store opened anew gives no id of a volume to another.
	s = openIn(t, Config{Dir: dir, VolumeBytes: testVolume})
	if err := s.CreateVolume("three", small); err != nil {
		t.Fatal(err)
	}
	seen := map[uint32]bool{}
	for _, name := range []string{"one", "two", "three"} {
		id, err := projectOf(s.vol.path(volumesDir, name))
		if err != nil || id < firstProject || seen[id] {
			t.Errorf("volume %s has project %#x, %v", name, id, err)
		}
		seen[id] = true
	}
	if err := s.DiscardVolume("one"); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 60*time.Second, "volume deleted", func() bool { return trashEmpty(t, s) })
}

// TestNamedVolumeFullDisk makes volumes on a disk that one of them has filled;
// the control makes them once there is room again.
func TestNamedVolumeFullDisk(t *testing.T) {
	s := openXFS(t, testVolume)
	if err := s.CreateVolume("big", VolumeLimits{}); err != nil {
		t.Fatal(err)
	}
	img := importTest(t, s, tarEntry{name: "v/"})
	in := inVolume(t, s, img, testBase, func(in *inside) []Extra {
		return []Extra{{mountVolume(t, s, in, "big", false), "/v"}}
	})
	var n int64
	var result string
	if _, err := fmt.Sscan(in.kept(t, "fill", "/v/f", fmt.Sprint(2*testVolume)), &n, &result); err != nil || result == "ok" {
		t.Fatalf("%d bytes fit, then %s, %v", n, result, err)
	}
	var full error
	made := 0
	for ; full == nil && made < 2000; made++ {
		full = s.CreateVolume(fmt.Sprintf("v%d", made), VolumeLimits{Bytes: 1 << 20})
	}
	wantCode(t, full, "volume_full")
	in.kept(t, "remove", "/v/f")
	// XFS gives blocks back in the background.
	testenv.Eventually(t, 60*time.Second, "room for a volume", func() bool {
		return s.CreateVolume(fmt.Sprintf("v%d", made-1), VolumeLimits{Bytes: 1 << 20}) == nil
	})
	for i := range made {
		if err := s.DiscardVolume(fmt.Sprintf("v%d", i)); err != nil {
			t.Fatal(err)
		}
	}
	testenv.Eventually(t, 120*time.Second, "volumes deleted", func() bool { return trashEmpty(t, s) })
}

// TestBindIDs looks at a directory of the host through a bind: the owner's
// files as root's, everybody else's as a stranger's.
func TestBindIDs(t *testing.T) {
	roots := t.TempDir()
	for _, dir := range []string{"mine", "roots"} {
		if err := os.Mkdir(filepath.Join(roots, dir), 0o755); err != nil {
			t.Fatal(err)
		}
		for name, uid := range map[string]int{"owners": 1234, "hosts": 0, "others": 4321} {
			path := filepath.Join(roots, dir, name)
			if err := os.WriteFile(path, []byte(name), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chown(path, uid, uid); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := os.Chown(filepath.Join(roots, "mine"), 1234, 1234); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "volume", layersDir), 0o700); err != nil {
		t.Fatal(err)
	}
	s := openIn(t, Config{Dir: dir, BestEffort: true, BindRoots: []string{roots}})
	bind := func(in *inside, name string, writable bool) *os.File {
		tree, err := s.MountBind(BindSpec{HostPath: filepath.Join(roots, name), Writable: writable, UIDBase: in.base})
		if err != nil {
			t.Fatal(err)
		}
		return tree
	}
	img := importTest(t, s, tarEntry{name: "rw/"}, tarEntry{name: "ro/"}, tarEntry{name: "roots/"})
	in := inVolume(t, s, img, testBase, func(in *inside) []Extra {
		return []Extra{{bind(in, "mine", true), "/rw"}, {bind(in, "mine", false), "/ro"}, {bind(in, "roots", false), "/roots"}}
	})
	for _, tc := range []struct{ check, path, want string }{
		{"read", "/rw/owners", "owners"},
		{"read", "/rw/hosts", "errno EACCES"},
		{"read", "/rw/others", "errno EACCES"},
		{"read", "/ro/owners", "owners"},
		{"read", "/roots/owners", "errno EACCES"},
		{"read", "/roots/hosts", "errno EACCES"},
		{"stat", "/rw/owners", "600 0:0"},
		{"stat", "/rw/hosts", "600 65534:65534"},
		{"write", "/ro/new", "errno EROFS"},
		{"write", "/rw/hosts", "errno EACCES"},
		{"write", "/rw/new", "ok"},
	} {
		if got := in.kept(t, tc.check, tc.path, "text"); got != tc.want {
			t.Errorf("%s %s: %s, want %s", tc.check, tc.path, got, tc.want)
		}
	}
	if st := statOf(t, filepath.Join(roots, "mine", "new")); st.Uid != 1234 || st.Gid != 1234 {
		t.Errorf("what root inside made belongs to %d:%d", st.Uid, st.Gid)
	}
	wantCode(t, s.CheckBind(BindSpec{HostPath: filepath.Join(roots, "roots"), Writable: true}), "bind_denied")
	wantCode(t, s.CheckBind(BindSpec{HostPath: dir}), "bind_denied")
	if err := s.CheckBind(BindSpec{HostPath: roots}); err != nil { // the root itself
		t.Error(err)
	}
}
