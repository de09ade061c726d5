//go:build root

package rootfs

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

func diffIDOf(b []byte) string {
	sum := sha256.Sum256(b)
	return digestPrefix + hex.EncodeToString(sum[:])
}

// layerTest imports a layer of these entries and returns its name.
func layerTest(t testing.TB, s *Store, entries ...tarEntry) string {
	t.Helper()
	b := tarBytes(t, entries...)
	info, err := s.ImportLayer(t.Context(), diffIDOf(b), bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	if info.Digest != diffIDOf(b) {
		t.Fatalf("imported as %s", info.Digest)
	}
	return info.Digest
}

// view mounts a stack read-only and returns a path to it.
func view(t testing.TB, s *Store, stack ...string) string {
	t.Helper()
	p, err := s.planView(stack)
	if err != nil {
		t.Fatal(err)
	}
	root, err := s.mountView(p)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	return fdPath(root) + "/." // the directory, not the link to it
}

// names lists what is in a directory of a view.
func names(t testing.TB, dir string) string {
	t.Helper()
	ents, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range ents {
		out = append(out, e.Name())
	}
	return strings.Join(out, " ")
}

// TestLayerWhiteouts stacks layers that delete, in every order a layer may
// have its entries.
func TestLayerWhiteouts(t *testing.T) {
	s := openTest(t)
	base := layerTest(t, s,
		tarEntry{name: "d/a", data: "low"}, tarEntry{name: "d/sub/x", data: "low"},
		tarEntry{name: "f", data: "low"}, tarEntry{name: "g", data: "low"})
	for name, c := range map[string]struct {
		entries []tarEntry
		dir     string
		want    string
	}{
		"control":                   {[]tarEntry{{name: "d/n"}}, "d", "a n sub"},
		"file":                      {[]tarEntry{{name: ".wh.f"}}, ".", "d g"},
		"directory":                 {[]tarEntry{{name: ".wh.d"}}, ".", "f g"},
		"below":                     {[]tarEntry{{name: "d/.wh.a"}}, "d", "sub"},
		"nothing there":             {[]tarEntry{{name: ".wh.nope"}}, ".", "d f g"},
		"opaque first":              {[]tarEntry{{name: "d/.wh..wh..opq"}, {name: "d/n"}}, "d", "n"},
		"opaque last":               {[]tarEntry{{name: "d/n"}, {name: "d/.wh..wh..opq"}}, "d", "n"},
		"opaque, then named":        {[]tarEntry{{name: "d/.wh..wh..opq"}, {name: "d/"}, {name: "d/n"}}, "d", "n"},
		"opaque root":               {[]tarEntry{{name: ".wh..wh..opq"}, {name: "n"}}, ".", "n"},
		"opaque empty":              {[]tarEntry{{name: "d/"}, {name: "d/.wh..wh..opq"}}, "d", ""},
		"deleted, then again":       {[]tarEntry{{name: ".wh.d"}, {name: "d/"}, {name: "d/n"}}, "d", "n"},
		"deleted, then implied":     {[]tarEntry{{name: ".wh.d"}, {name: "d/n"}}, "d", "n"},
		"deleted, implied deep":     {[]tarEntry{{name: ".wh.d"}, {name: "d/sub/n"}}, "d", "sub"},
		"deleted, implied deep, in": {[]tarEntry{{name: ".wh.d"}, {name: "d/sub/n"}}, "d/sub", "n"},
		"again, then deleted":       {[]tarEntry{{name: "d/"}, {name: "d/n"}, {name: ".wh.d"}}, "d", "n"},
		"file deleted, then again":  {[]tarEntry{{name: ".wh.f"}, {name: "f", data: "new"}}, ".", "d f g"},
		"file again, then deleted":  {[]tarEntry{{name: "f", data: "new"}, {name: ".wh.f"}}, ".", "d f g"},
		"directory becomes a file":  {[]tarEntry{{name: "d", data: "x"}}, ".", "d f g"},
		"file, then directory":      {[]tarEntry{{name: "d", data: "x"}, {name: "d/"}, {name: "d/n"}}, "d", "n"},
		"file becomes a directory":  {[]tarEntry{{name: "f/n"}}, "f", "n"},
		"aufs":                      {[]tarEntry{{name: ".wh..wh.aufs"}, {name: ".wh..wh.orph/"}, {name: ".wh..wh.plnk/1.2", data: "x"}}, ".", "d f g"},
		"of a directory kind":       {[]tarEntry{{name: ".wh.d/", kind: tar.TypeDir}}, ".", "f g"},
	} {
		t.Run(name, func(t *testing.T) {
			top := layerTest(t, s, c.entries...)
			v := view(t, s, base, top)
			if got := names(t, filepath.Join(v, c.dir)); got != c.want {
				t.Errorf("%s shows %q, want %q", c.dir, got, c.want)
			}
			if b, err := os.ReadFile(filepath.Join(v, "f")); strings.HasPrefix(name, "file") && strings.HasSuffix(name, "again") && (err != nil || string(b) != "new") {
				t.Errorf("f is %q, %v", b, err)
			}
		})
	}
}

// TestImportLayer: the layer is the one named, once, and whole or not there.
func TestImportLayer(t *testing.T) {
	s := openTest(t)
	b := tarBytes(t, tarEntry{name: "a/b", data: "x"}, tarEntry{name: "a/.wh.c"})
	id := diffIDOf(b)
	never := readerFunc(func([]byte) (int, error) { return 0, errors.New("was read") })
	for name, data := range map[string][]byte{"cut": b[:len(b)-1024], "changed": bytes.Replace(b, []byte("x"), []byte("y"), 1), "more": append(bytes.Clone(b), make([]byte, 512)...)} {
		if _, err := s.ImportLayer(t.Context(), id, bytes.NewReader(data)); sandbox.CodeOf(err) != "image_digest_mismatch" || !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, bad := range []string{"", "sha256:", id[7:], strings.ToUpper(id), "upper:" + strings.Repeat("a", 26)} {
		if _, err := s.ImportLayer(t.Context(), bad, never); sandbox.CodeOf(err) != "invalid_digest" {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if _, err := s.ImportLayer(t.Context(), id, never); err == nil || !strings.Contains(err.Error(), "was read") {
		t.Errorf("an absent layer was not read: %v", err)
	}
	if _, err := s.Layer(id); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("after errors: %v", err)
	}
	if staged, err := readNames(s.vol.path(stagingDir)); err != nil || len(staged) != 0 {
		t.Errorf("left in staging: %v, %v", staged, err)
	}
	var infos []LayerInfo
	for _, r := range []io.Reader{bytes.NewReader(gzipped(t, b)), never, bytes.NewReader(b)} {
		info, err := s.ImportLayer(t.Context(), id, r)
		if err != nil {
			t.Fatal(err)
		}
		infos = append(infos, info)
	}
	if infos[0].Files != 3 || infos[0].Size != 1 || !infos[1].Created.Equal(infos[0].Created) || infos[2].Digest != id {
		t.Errorf("%+v", infos)
	}
	if info, err := s.Layer(id); err != nil || info.Digest != id {
		t.Errorf("%+v, %v", info, err)
	}
	if all, err := s.Layers(); err != nil || !slices.Equal(all, []string{id}) {
		t.Errorf("layers %v, %v", all, err)
	}
	if err := s.RemoveLayer(id); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Layer(id); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("removed: %v", err)
	}
}

// TestSkeleton mounts roots of layers that lack mount points, and refuses
// those that take them away.
func TestSkeleton(t *testing.T) {
	s := openTest(t)
	in := startInside(t, testBase)
	base := layerTest(t, s, tarEntry{name: "bin/x", data: "x"})
	full := importTest(t, s, tarEntry{name: "bin/y", data: "y"}).Layers[0]
	img := func(layers ...string) sandbox.Image {
		return sandbox.Image{Kind: sandbox.ImageTar, Layers: layers}
	}
	id := create(t, s)
	root := mountTest(t, s, in, id, img(base))
	if got := in.run(t, root, "list", "/"); got != "bin dev etc proc sys tmp" {
		t.Errorf("/ holds %q", got)
	}
	if got := in.run(t, mountTest(t, s, in, create(t, s), img(base)), "stat", "/tmp"); got != "1777 0:0" {
		t.Errorf("/tmp is %s", got)
	}
	for _, c := range []struct {
		name  string
		entry tarEntry
		point string
	}{
		{"link", tarEntry{name: "proc", link: "/etc"}, "/proc"},
		{"file", tarEntry{name: "dev"}, "/dev"},
		{"pipe", tarEntry{name: "sys", kind: tar.TypeFifo}, "/sys"},
		{"deleted", tarEntry{name: ".wh.tmp"}, "/tmp"},
		{"deleted etc", tarEntry{name: ".wh.etc"}, "/etc"},
	} {
		bad := layerTest(t, s, c.entry)
		for _, stack := range [][]string{{base, bad}, {full, bad}, {bad}, {bad, layerTest(t, s, tarEntry{name: "over"})}} {
			_, err := s.Mount(t.Context(), MountSpec{ID: create(t, s), Image: img(stack...), UserNS: in.userns, UIDBase: in.base})
			wantCode(t, err, "image_bad_path")
			if !strings.Contains(err.Error(), c.point) || !errors.Is(err, sandbox.ErrInvalid) {
				t.Errorf("%s: %v", c.name, err)
			}
		}
		// The control: a layer above puts the directory back.
		back := layerTest(t, s, tarEntry{name: c.point[1:] + "/"})
		if got := in.run(t, mountTest(t, s, in, create(t, s), img(base, bad, back)), "list", c.point); got != "" {
			t.Errorf("%s, put back, holds %q", c.name, got)
		}
	}
	opaque := layerTest(t, s, tarEntry{name: ".wh..wh..opq"}, tarEntry{name: "only"})
	if got := in.run(t, mountTest(t, s, in, create(t, s), img(full, opaque)), "list", "/"); got != "dev etc only proc sys tmp" {
		t.Errorf("over an opaque root: %q", got)
	}
	// The skeleton is no layer, and a directory lost to a crash is made again.
	if all, err := s.Layers(); err != nil || slices.Contains(all, skeletonDir) {
		t.Error(all, err)
	}
	dir := s.dir
	if err := errors.Join(s.Close(), os.Remove(filepath.Join(dir, "volume", skeletonRoot, "tmp"))); err != nil {
		t.Fatal(err)
	}
	openIn(t, Config{Dir: dir, BestEffort: true})
	if st := statOf(t, filepath.Join(dir, "volume", skeletonRoot, "tmp")); st.Mode != unix.S_IFDIR|0o1777 {
		t.Errorf("made again with mode %o", st.Mode)
	}
}
