//go:build root

package rootfs

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
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

// TestLayerDiskFull imports into a volume that is too small, by bytes and by
// files: nothing is left, and what fits is taken.
func TestLayerDiskFull(t *testing.T) {
	for name, c := range map[string]struct {
		opts    string
		entries []tarEntry
	}{
		"bytes": {"size=8m", []tarEntry{{name: "x", data: strings.Repeat("x", 9<<20)}}},
		"files": {"size=64m,nr_inodes=200", slices.Repeat([]tarEntry{{name: strings.Repeat("d/", 250) + "x"}}, 1)},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := unix.Mount("tmpfs", dir, "tmpfs", 0, c.opts); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
			if err := os.MkdirAll(filepath.Join(dir, "volume", layersDir), 0o700); err != nil {
				t.Fatal(err)
			}
			s := openIn(t, Config{Dir: dir, BestEffort: true})
			b := tarBytes(t, c.entries...)
			_, err := s.ImportLayer(t.Context(), diffIDOf(b), bytes.NewReader(b))
			wantCode(t, err, "volume_full")
			if !errors.Is(err, sandbox.ErrExhausted) || s.HasLayer(diffIDOf(b)) {
				t.Errorf("%v; there: %v", err, s.HasLayer(diffIDOf(b)))
			}
			testenv.Eventually(t, 30*time.Second, "nothing left of it", func() bool { return trashEmpty(t, s) })
			layerTest(t, s, tarEntry{name: "x", data: "fits"})
		})
	}
}

// askedContext ends when it was asked so many times whether it has; 0: never.
type askedContext struct {
	context.Context //nolint:containedctx // it is one
	asked, end      int
}

func (c *askedContext) Err() error {
	if c.asked++; c.end > 0 && c.asked >= c.end {
		return context.Canceled
	}
	return nil
}

// TestLayerCancelled: an import can be told to end also where nothing more is
// read: in a hole.
func TestLayerCancelled(t *testing.T) {
	s := openTest(t)
	const size = 256 << 20
	var b bytes.Buffer
	if err := writeSparse(&b, size); err != nil {
		t.Fatal(err)
	}
	id := diffIDOf(b.Bytes())
	whole := &askedContext{Context: t.Context()}
	if _, err := s.ImportLayer(whole, id, bytes.NewReader(b.Bytes())); err != nil {
		t.Fatal(err)
	}
	if whole.asked < size/sparseBlock {
		t.Errorf("asked %d times in %d pieces of a hole", whole.asked, size/sparseBlock)
	}
	if err := s.RemoveLayer(id); err != nil {
		t.Fatal(err)
	}
	half := &askedContext{Context: t.Context(), end: whole.asked / 2}
	if _, err := s.ImportLayer(half, id, bytes.NewReader(b.Bytes())); !errors.Is(err, context.Canceled) || s.HasLayer(id) {
		t.Errorf("told to end half way: %v", err)
	}
}

// TestLayersAtOnce imports the same layer and others at the same time.
func TestLayersAtOnce(t *testing.T) {
	s := openTest(t)
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			b := tarBytes(t, tarEntry{name: fmt.Sprint("x", i%3), data: strings.Repeat("x", 100_000)})
			if _, err := s.ImportLayer(t.Context(), diffIDOf(b), bytes.NewReader(b)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if all, err := s.Layers(); err != nil || len(all) != 3 {
		t.Errorf("%d layers, %v; want 3", len(all), err)
	}
	testenv.Eventually(t, 30*time.Second, "nothing left over", func() bool { return trashEmpty(t, s) })
}

// TestLayersAreHeldFirst: who brings a layer in holds it before it is there, also
// one whose name its content tells, and one that was there already.
func TestLayersAreHeldFirst(t *testing.T) {
	s := openTest(t)
	b := tarBytes(t, tarEntry{name: "f", data: "x"})
	var held []string
	there := false
	ctx := sandbox.WithHold(t.Context(), func(layers []string) {
		for _, l := range layers {
			if held = append(held, l); s.HasLayer(l) != there {
				t.Errorf("when layer %s was held, it was there: %v", l, !there)
			}
		}
	})
	for range 2 {
		held = nil
		img, err := s.ImportTar(ctx, "x", bytes.NewReader(b))
		if err != nil || !slices.Equal(held, img.Layers) {
			t.Errorf("held %v of %v, %v", held, img.Layers, err)
		}
		held = nil
		if info, err := s.ImportLayer(ctx, diffIDOf(b), bytes.NewReader(b)); err != nil || !slices.Contains(held, info.Digest) {
			t.Errorf("held %v of %s, %v", held, info.Digest, err)
		}
		there = true
	}
}

// TestExportRefusals: what an image cannot say is refused by name, next to
// what it can.
func TestExportRefusals(t *testing.T) {
	s := openTest(t)
	base := layerTest(t, s, tarEntry{name: "f", data: "x"})
	out := io.Writer(io.Discard)
	export := func(build func(upper string) error) error {
		t.Helper()
		id := create(t, s)
		if err := build(s.vol.path(sandboxesDir, string(id), "upper")); err != nil {
			t.Fatal(err)
		}
		_, err := s.ExportUpper(t.Context(), id, []string{base}, out)
		return err
	}
	file := func(names ...string) func(string) error {
		return func(upper string) error {
			for _, n := range names {
				if err := os.MkdirAll(filepath.Dir(filepath.Join(upper, n)), 0o755); err != nil {
					return err
				}
				if err := os.WriteFile(filepath.Join(upper, n), nil, 0o644); err != nil {
					return err
				}
			}
			return nil
		}
	}
	if err := export(file("a/.wh", "a/x.wh.y", strings.Repeat("d/", 255)+"x")); err != nil {
		t.Errorf("the control: %v", err)
	}
	if err := export(file("a/.wh.x")); sandbox.CodeOf(err) != "layer_bad_name" || !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("a name that means a deletion: %v", err)
	}
	// With a nil writer nothing is written, and the same is refused.
	out = nil
	if err := export(file("a/.wh.x")); sandbox.CodeOf(err) != "layer_bad_name" {
		t.Errorf("looked at alone: %v", err)
	}
	if err := export(file("a/x")); err != nil {
		t.Errorf("the control, looked at alone: %v", err)
	}
	out = io.Discard
	if err := export(file(strings.Repeat("d/", 300) + "x")); sandbox.CodeOf(err) != "export_too_large" || !errors.Is(err, sandbox.ErrTooLarge) {
		t.Errorf("too deep: %v", err)
	}
	if err := export(func(upper string) error { return unix.Mknod(filepath.Join(upper, "sock"), unix.S_IFSOCK|0o600, 0) }); err != nil {
		t.Errorf("a socket: %v", err)
	}
	for _, i := range []int{-1, 1} {
		if _, err := s.ExportLayer(t.Context(), []string{base}, i, io.Discard); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("layer %d of 1: %v", i, err)
		}
	}
	if _, err := s.ExportLayer(t.Context(), []string{digestN(7)}, 0, io.Discard); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("a layer that is not there: %v", err)
	}
	if err := s.ExportTree(t.Context(), []string{base, digestN(7)}, io.Discard); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("a tree with a layer that is not there: %v", err)
	}
	if _, err := s.ExportUpper(t.Context(), sandbox.NewID(), []string{base}, io.Discard); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("an upper that is not there: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.ExportLayer(ctx, []string{base}, 0, io.Discard); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// TestExportNames reads directories in pieces of any size.
func TestExportNames(t *testing.T) {
	dir := t.TempDir()
	var want []string
	for i := range 1000 {
		want = append(want, fmt.Sprint("n", i))
		write(t, filepath.Join(dir, want[i]), nil)
	}
	slices.Sort(want)
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, limit := range []int{1, 7, 500, 999, 1000, 1001, 5000} {
		var e exporter
		var got []string
		for last, more := "", true; more; {
			var names []string
			if names, more, err = e.names(int(f.Fd()), last, limit); err != nil {
				t.Fatal(err)
			}
			got = append(got, names...)
			last = got[len(got)-1]
			if limit == 1 && len(got) > 20 {
				got = append(got, want[len(got):]...) // seen enough
				break
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("pieces of %d: %d names", limit, len(got))
		}
	}
}

// TestViewModes: views show the same in every way this kernel mounts, alone,
// with deletions and with mates.
func TestViewModes(t *testing.T) {
	s := openTest(t)
	first, second := layerTest(t, s, oddLayers()[0]...), layerTest(t, s, oddLayers()[1]...)
	lone := layerTest(t, s, tarEntry{name: "n/.wh.x"}, tarEntry{name: "n/y", data: "y"})
	for _, stack := range [][]string{{first}, {first, second}, {first, lone, second}, {lone}} {
		var want map[string]string
		for _, mode := range modes(t, s) {
			s.mode = mode
			got := treeOf(t, view(t, s, stack...))
			if want == nil {
				want = got
			}
			if d := cmp.Diff(want, got); d != "" || len(got) < 3 {
				t.Errorf("%v, %d layers, %d files:\n%s", mode, len(stack), len(got), d)
			}
		}
	}
}
