//go:build root

package rootfs

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// history is a stack of layers made by random operations, each in an overlay
// of its own over those before it.
type history struct {
	s      *Store
	rnd    *rand.Rand
	layers []string
	done   int // operations that succeeded
}

// anyPath is one of few names, so that operations meet.
func (h *history) anyPath() string {
	p := ""
	for range 1 + h.rnd.IntN(4) {
		p += "/" + string(rune('a'+h.rnd.IntN(4)))
	}
	return p
}

// somePath is one that exists, most of the time.
func (h *history) somePath(root string) string {
	p := root
	for range 1 + h.rnd.IntN(4) {
		names, err := os.ReadDir(p)
		if err != nil || len(names) == 0 {
			break
		}
		p = filepath.Join(p, names[h.rnd.IntN(len(names))].Name())
	}
	if p == root || h.rnd.IntN(4) == 0 {
		return filepath.Join(root, h.anyPath())
	}
	return p
}

// operate does one random operation. Some are impossible; those do nothing.
func (h *history) operate(root string) {
	a, b := h.somePath(root), h.somePath(root)
	if h.rnd.IntN(2) == 0 { // a fresh name somewhere
		b = filepath.Join(filepath.Dir(b), string(rune('a'+h.rnd.IntN(4))))
	}
	text := []byte(fmt.Sprint("content ", h.rnd.IntN(1000)))
	var err error
	switch h.rnd.IntN(20) {
	case 0, 1, 2:
		err = os.WriteFile(a, text, 0o644)
	case 3:
		var f *os.File
		if f, err = os.OpenFile(a, os.O_APPEND|os.O_WRONLY, 0); err == nil {
			_, err = f.Write(text)
			f.Close()
		}
	case 4:
		err = unix.Unlink(a)
	case 5:
		err = os.RemoveAll(a)
	case 6, 7:
		err = os.MkdirAll(a, 0o755)
	case 8:
		err = unix.Rmdir(a)
	case 9, 10, 11, 12, 13:
		err = os.Rename(a, b)
	case 14: // another in its place
		if st, serr := os.Lstat(a); serr == nil && st.IsDir() {
			err = errors.Join(os.RemoveAll(a), os.WriteFile(a, text, 0o600))
		} else {
			err = errors.Join(os.RemoveAll(a), os.Mkdir(a, 0o700))
		}
	case 15:
		err = os.Link(a, b)
	case 16:
		err = os.Symlink(h.anyPath(), a)
	case 17:
		err = errors.Join(os.Chmod(a, os.FileMode(0o600+h.rnd.IntN(0o200))), os.Lchown(a, h.rnd.IntN(9), h.rnd.IntN(9)))
	case 18:
		err = unix.Lsetxattr(a, "user.x", text, 0)
	case 19:
		when := time.Unix(int64(h.rnd.IntN(1e9)), int64(h.rnd.IntN(1e9)))
		err = os.Chtimes(a, when, when)
	}
	if err == nil {
		h.done++
	}
}

// grow adds a layer, of a sandbox that did n operations.
func (h *history) grow(t testing.TB, n int) {
	t.Helper()
	id := create(t, h.s)
	plan, err := planOverlay(id, h.layers)
	if err != nil {
		t.Fatal(err)
	}
	dir, detach := attached(t, h.s, plan)
	for range n {
		h.operate(dir)
	}
	detach()
	h.layers = append(h.layers, freeze(t, h.s, id))
}

// newHistory begins with a layer that has something in it.
func newHistory(t testing.TB, s *Store, seed uint64, layers, each int) *history {
	t.Helper()
	h := &history{s: s, rnd: rand.New(rand.NewPCG(seed, 0))}
	id := create(t, s)
	upper := s.vol.path(sandboxesDir, string(id), "upper")
	for range 30 {
		p := filepath.Join(upper, h.anyPath())
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err == nil {
			_ = os.WriteFile(p, []byte(fmt.Sprint("base ", h.rnd.IntN(1000))), 0o644) // or it is a directory
		}
	}
	h.layers = []string{freeze(t, s, id)}
	for range layers {
		h.grow(t, each)
	}
	return h
}

// remove gives a history's layers up.
func (h *history) remove(t testing.TB, more ...string) {
	t.Helper()
	for _, l := range append(more, h.layers...) {
		if err := h.s.RemoveLayer(l); err != nil {
			t.Fatal(err)
		}
	}
}

// marked reports whether a layer has directories with an overlay's attribute.
func marked(t testing.TB, s *Store, layer, name string) bool {
	t.Helper()
	tree, err := layerTree(layer)
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range listTree(t, s.vol.path(tree), true) {
		if containsAttr(line, name) {
			return true
		}
	}
	return false
}

// TestFlattenIsTheStack: whatever was done to files and directories in a
// stack of sandboxes, any run of their layers merged into one, in its place,
// shows the same tree.
func TestFlattenIsTheStack(t *testing.T) {
	s := openTest(t)
	done, redirected, kept := 0, 0, 0
	for seed := range testenv.Cycles(t, 16, 5000) {
		h := newHistory(t, s, uint64(seed), 2+seed%4, 25)
		want := listStack(t, s, h.layers...)
		n := len(h.layers)
		var flats []string
		for _, run := range [][2]int{{1, n}, {1, n - 1}, {2, n}, {1, 2}} {
			flat, err := s.Flatten(t.Context(), h.layers[run[0]:run[1]])
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			flats = append(flats, flat)
			stack := slices.Concat(h.layers[:run[0]], []string{flat}, h.layers[run[1]:])
			if !sameTree(t, fmt.Sprintf("seed %d, layers %v of %d", seed, run, n), want, listStack(t, s, stack...)) {
				return
			}
			for _, private := range []string{"origin", "impure", "nlink", "uuid"} {
				if marked(t, s, flat, private) {
					t.Errorf("seed %d: the layer has %s%s", seed, overlayXattr, private)
				}
			}
		}
		if marked(t, s, flats[0], "redirect") {
			redirected++
		}
		if marked(t, s, flats[0], "opaque") {
			kept++
		}
		for _, l := range h.layers { // kernels that know this form must not begin to make it
			if marked(t, s, l, "whiteout") || marked(t, s, l, "metacopy") {
				t.Errorf("seed %d: an overlay of ours left %s with marks it should not make", seed, l)
			}
		}
		done += h.done
		h.remove(t, flats...)
	}
	t.Logf("%d operations; %d merged layers with redirects, %d with opaque directories", done, redirected, kept)
	if redirected == 0 || kept == 0 {
		t.Error("the operations never made what is hard to merge")
	}
}

func TestFlattenRefused(t *testing.T) {
	s := openTest(t)
	img := importTest(t, s, tarEntry{name: "f"})
	one := freeze(t, s, create(t, s))
	for name, c := range map[string]struct {
		layers []string
		class  error
	}{
		"none":          {nil, sandbox.ErrInvalid},
		"an image's":    {[]string{one, img.Layers[0]}, sandbox.ErrInvalid},
		"one not there": {[]string{one, NewUpperLayer()}, sandbox.ErrNotFound},
	} {
		if l, err := s.Flatten(t.Context(), c.layers); !errors.Is(err, c.class) || l != "" {
			t.Errorf("%s: %q, %v", name, l, err)
		}
	}
	if _, err := s.Flatten(t.Context(), []string{one}); err != nil {
		t.Errorf("one layer alone: %v", err)
	}
}

// TestFlattenMarks: whiteouts of the form that no overlay of ours makes become
// ordinary ones; without the mark on their directory they are empty files.
func TestFlattenMarks(t *testing.T) {
	s := openTest(t)
	layer := func(dirs []string, files ...string) string {
		id := create(t, s)
		upper := s.vol.path(sandboxesDir, string(id), "upper")
		for _, f := range append(dirs, files...) {
			p := filepath.Join(upper, f)
			if err := errors.Join(os.MkdirAll(filepath.Dir(p), 0o755), os.WriteFile(p, nil, 0o644)); err != nil {
				t.Fatal(err)
			}
		}
		for _, d := range dirs {
			p := filepath.Join(upper, d)
			if err := errors.Join(unix.Lsetxattr(filepath.Dir(p), overlayXattr+"opaque", []byte("x"), 0), unix.Lsetxattr(p, overlayXattr+"whiteout", nil, 0)); err != nil {
				t.Fatal(err)
			}
		}
		return freeze(t, s, id)
	}
	base := layer(nil, "d/gone", "d/kept", "e/kept")
	top := layer([]string{"d/gone"}, "d/new", "e/kept")
	tree, err := layerTree(top)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Lsetxattr(s.vol.path(tree, "e/kept"), overlayXattr+"whiteout", nil, 0); err != nil {
		t.Fatal(err)
	}
	flat, err := s.Flatten(t.Context(), []string{top})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, c := range diffOf(t, s, []string{base}, []string{base, flat}, "") {
		if c.Kind != sandbox.FileChanged {
			got = append(got, string(c.Kind)+" "+c.Path)
		}
	}
	if want := []string{"removed /d/gone", "added /d/new"}; !slices.Equal(got, want) {
		t.Errorf("flattened: %q, want %q", got, want)
	}
}
