//go:build root

package rootfs

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestFurnish(t *testing.T) {
	s := openTest(t)
	first := Identity{Hostname: "first", Hosts: "127.0.0.1 first\n", ResolvConf: "# none\n"}
	final := Identity{Hostname: "final", Hosts: "127.0.0.1 final\n", ResolvConf: "# none\n"}
	for name, c := range map[string]struct {
		entries []tarEntry
		plain   bool
	}{
		"an /etc as they all have":  {[]tarEntry{{name: "etc/", mode: 0o755}, {name: "etc/hosts", data: "old"}, {name: "etc/passwd", data: "root"}}, true},
		"none at all":               {[]tarEntry{{name: "x", data: "x"}}, true},
		"one closed to others":      {[]tarEntry{{name: "etc/", mode: 0o700}, {name: "etc/hosts", data: "old"}}, false},
		"one that somebody owns":    {[]tarEntry{{name: "etc/", mode: 0o755, uid: 5}, {name: "etc/hosts", data: "old"}}, false},
		"files that are none there": {[]tarEntry{{name: "etc/hosts/", mode: 0o755}, {name: "etc/resolv.conf", link: "../run/x"}, {name: "etc/passwd", data: "root"}}, true},
	} {
		t.Run(name, func(t *testing.T) {
			img := importTest(t, s, c.entries...)
			id := create(t, s)
			etc := filepath.Join(s.vol.path(sandboxesDir, string(id), "upper"), "etc")
			if ok, err := s.Furnish(id, sandbox.Image{}, Identity{}, first); !ok || err != nil {
				t.Fatalf("before the image is known: %v, %v", ok, err)
			}
			kept, err := os.Stat(filepath.Join(etc, "resolv.conf"))
			if err != nil {
				t.Fatal(err)
			}
			ok, err := s.Furnish(id, img, first, final)
			if ok != c.plain || err != nil {
				t.Fatalf("furnished: %v, %v; want %v", ok, err, c.plain)
			}
			in := startInside(t, testBase)
			read := func(path string) string { return in.run(t, mountTest(t, s, in, id, img), "read", path) }
			if !ok {
				if _, err := os.Lstat(etc); !os.IsNotExist(err) {
					t.Errorf("etc is left in the upper: %v", err)
				}
				return
			}
			after, err := os.Stat(filepath.Join(etc, "resolv.conf"))
			if err != nil || !after.ModTime().Equal(kept.ModTime()) {
				t.Errorf("a file that said so already was written again: %v", err)
			}
			for path, want := range map[string]string{"/etc/hostname": "final\n", "/etc/hosts": "127.0.0.1 final\n", "/etc/resolv.conf": "# none\n"} {
				if got := read(path); got != want {
					t.Errorf("%s reads %q, want %q", path, got, want)
				}
				if err := s.Clean(id); err != nil {
					t.Fatal(err)
				}
			}
			if got := in.run(t, mountTest(t, s, in, id, img), "stat", "/etc"); got != "755 0:0" {
				t.Errorf("/etc is %s", got)
			}
			if err := s.Clean(id); err != nil {
				t.Fatal(err)
			}
			if len(c.entries) == 3 { // the image's other files are still there
				if got := read("/etc/passwd"); got != "root" {
					t.Errorf("/etc/passwd reads %q", got)
				}
			}
		})
	}
}

// TestFurnishOverFrozen: what a snapshot's /etc says of itself is not lost by
// the one every upper gets.
func TestFurnishOverFrozen(t *testing.T) {
	s := openTest(t)
	img := importTest(t, s, tarEntry{name: "etc/", mode: 0o755}, tarEntry{name: "etc/passwd", data: "root"})
	for name, c := range map[string]struct {
		do    func(etc string) error
		plain bool
	}{
		"as it was":     {func(string) error { return nil }, true},
		"opaque":        {func(etc string) error { return unix.Lsetxattr(etc, "trusted.overlay.opaque", []byte("y"), 0) }, true},
		"with a mode":   {func(etc string) error { return os.Chmod(etc, 0o711) }, false},
		"an attribute":  {func(etc string) error { return unix.Lsetxattr(etc, "user.x", []byte("y"), 0) }, false},
		"a file there":  {func(etc string) error { return errors.Join(os.RemoveAll(etc), os.WriteFile(etc, nil, 0o644)) }, false},
		"deleted there": {func(etc string) error { return errors.Join(os.RemoveAll(etc), unix.Mknod(etc, unix.S_IFCHR, 0)) }, false},
	} {
		id := create(t, s)
		if ok, err := s.Furnish(id, img, Identity{}, Identity{Hostname: "h"}); !ok || err != nil {
			t.Fatal(ok, err)
		}
		if err := c.do(s.vol.path(sandboxesDir, string(id), "upper", "etc")); err != nil {
			t.Fatal(err)
		}
		stacked := img
		stacked.Layers = []string{img.Layers[0], freeze(t, s, id)}
		if ok, err := s.Furnish(create(t, s), stacked, Identity{}, Identity{Hostname: "h"}); ok != c.plain || err != nil {
			t.Errorf("%s: furnished %v, %v; want %v", name, ok, err, c.plain)
		}
	}
}
