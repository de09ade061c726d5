//go:build root

package rootfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

func diffOf(t testing.TB, s *Store, from, to []string, upper sandbox.ID) []Change {
	t.Helper()
	var out []Change
	if err := s.Diff(t.Context(), from, to, upper, func(c Change) error { out = append(out, c); return nil }); err != nil {
		t.Fatal(err)
	}
	return out
}

// short writes changes down as "+ /path", "- /path" and "* /path".
func short(changes []Change) []string {
	sign := map[sandbox.ChangeKind]string{sandbox.FileAdded: "+", sandbox.FileRemoved: "-", sandbox.FileChanged: "*"}
	var out []string
	for _, c := range changes {
		out = append(out, sign[c.Kind]+" "+c.Path)
	}
	return out
}

var linkedTo = regexp.MustCompile(` first=\S+`)

// slowDiff compares two views by walking both to their ends.
func slowDiff(t testing.TB, s *Store, from, to overlayPlan) []Change {
	t.Helper()
	a, detach := attached(t, s, from)
	defer detach()
	b, detachB := attached(t, s, to)
	defer detachB()
	type file struct {
		st  *unix.Stat_t
		all string // what must be equal
	}
	read := func(root string) map[string]file {
		out := map[string]file{}
		lines := listTree(t, root, false)
		for _, line := range lines[1:] {
			p, rest, _ := strings.Cut(line, " ")
			var st unix.Stat_t
			if err := unix.Lstat(root+p, &st); err != nil {
				t.Fatal(err)
			}
			rest = linkedTo.ReplaceAllString(rest, "") // links are none of this
			if st.Mode&unix.S_IFMT != unix.S_IFDIR {
				b, err := os.ReadFile(root + p)
				if st.Mode&unix.S_IFMT == unix.S_IFREG && err != nil {
					t.Fatal(err)
				}
				if st.Mode&unix.S_IFMT == unix.S_IFREG {
					rest += string(b)
				}
			} else {
				f := strings.Fields(rest)
				rest = fmt.Sprint(f[:2], f[3:]) // without the time
			}
			out[p] = file{&st, rest}
		}
		return out
	}
	old, now := read(a), read(b)
	var out []Change
	paths := map[string]bool{}
	for p := range old {
		paths[p] = true
	}
	for p := range now {
		paths[p] = true
	}
	d := &differ{emit: func(c Change) error { out = append(out, c); return nil }}
	for _, p := range sortedNames(paths) {
		o, was := old[p]
		n, is := now[p]
		var err error
		switch {
		case !was:
			err = d.report(p, sandbox.FileAdded, n.st)
		case !is:
			err = d.report(p, sandbox.FileRemoved, o.st)
		case o.all != n.all:
			err = d.report(p, sandbox.FileChanged, n.st)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// TestDiffIsTheDifference: between any two stacks with a common beginning, and
// with an upper in use on top, the quick way finds what the slow way does.
func TestDiffIsTheDifference(t *testing.T) {
	s := openTest(t)
	found := 0
	for seed := range testenv.Cycles(t, 12, 3000) {
		h := newHistory(t, s, uint64(1000+seed), 3, 15)
		trunk := slices.Clone(h.layers)
		var branches [][]string
		for range 2 {
			h.layers = slices.Clone(trunk[:2+seed%3])
			h.grow(t, 12)
			h.grow(t, 6)
			branches = append(branches, h.layers)
		}
		id := create(t, s)
		plan, err := planOverlay(id, branches[1])
		if err != nil {
			t.Fatal(err)
		}
		dir, detach := attached(t, s, plan)
		for range 10 {
			h.operate(dir)
		}
		detach()
		for name, c := range map[string]struct {
			from, to []string
			upper    sandbox.ID
		}{
			"branches":   {branches[0], branches[1], ""},
			"back":       {branches[1], trunk, ""},
			"forth":      {trunk[:1], branches[0], ""},
			"an upper":   {branches[1], branches[1], id},
			"its branch": {branches[0], branches[1], id},
			"itself":     {trunk, trunk, ""},
			"no common":  {trunk[1:], branches[0], ""},
		} {
			from, err := s.planView(c.from)
			if err != nil {
				t.Fatal(err)
			}
			var above []string
			if c.upper != "" {
				above = []string{filepath.Join(sandboxesDir, string(c.upper), "upper")}
			}
			to, err := s.planView(c.to, above...)
			if err != nil {
				t.Fatal(err)
			}
			want := slowDiff(t, s, from, to)
			got := diffOf(t, s, c.from, c.to, c.upper)
			if d := cmp.Diff(want, got); d != "" {
				t.Fatalf("seed %d, %s: %s", seed, name, d)
			}
			found += len(got)
		}
		if err := s.Discard(id, 0); err != nil {
			t.Fatal(err)
		}
		h.remove(t, append(trunk, branches[0]...)...)
	}
	t.Logf("%d changes", found)
	if found == 0 {
		t.Error("nothing ever changed")
	}
}

// TestDiffOfSandbox shows what counts as a change and what does not.
func TestDiffOfSandbox(t *testing.T) {
	s := openTest(t)
	img := importTest(t, s, tarEntry{name: "etc/", mode: 0o755}, tarEntry{name: "etc/passwd", data: "root"}, tarEntry{name: "etc/hosts", data: "old"},
		tarEntry{name: "d/same", data: "same"}, tarEntry{name: "d/new", data: "old"}, tarEntry{name: "d/gone", data: "x"}, tarEntry{name: "d/mode", data: "x"},
		tarEntry{name: "tree/sub/f", data: "deep"}, tarEntry{name: "tree.x", data: "x"}, tarEntry{name: "file", data: "x"}, tarEntry{name: "touched", data: "x"})
	id := create(t, s)
	if ok, err := s.Furnish(id, img, Identity{}, Identity{Hostname: "h"}); !ok || err != nil {
		t.Fatalf("furnish: %v, %v", ok, err)
	}
	plan, err := planOverlay(id, img.Layers)
	if err != nil {
		t.Fatal(err)
	}
	dir, detach := attached(t, s, plan)
	p := func(n string) string { return filepath.Join(dir, n) }
	when := time.Unix(1e9, 0) // as the archive says
	for i, err := range []error{
		os.Chmod(p("d/same"), 0o600), os.Chmod(p("d/same"), 0o644), // copied up, and as it was
		os.WriteFile(p("etc/hosts"), []byte("mine"), 0o644), // its own
		os.WriteFile(p("d/new"), []byte("new"), 0o644), os.Chtimes(p("d/new"), when, when),
		os.Remove(p("d/gone")), os.Chmod(p("d/mode"), 0o755), os.Rename(p("tree"), p("moved")),
		os.Remove(p("file")), os.Mkdir(p("file"), 0o700), os.Chtimes(p("touched"), time.Time{}, time.Unix(5, 5)),
		os.WriteFile(p("etc/added"), []byte("12345"), 0o640), os.Symlink("x", p("link")),
	} {
		if err != nil {
			t.Fatalf("step %d: %v", i, err)
		}
	}
	detach()
	want := []string{
		"* /d/mode", "* /d/new", "- /d/gone", "+ /etc/added", "* /file", "+ /link",
		"+ /moved", "+ /moved/sub", "+ /moved/sub/f", "* /touched", "- /tree", "- /tree/sub", "- /tree/sub/f",
	}
	slices.SortFunc(want, func(a, b string) int { return strings.Compare(a[2:], b[2:]) })
	got := diffOf(t, s, img.Layers, img.Layers, id)
	if d := cmp.Diff(want, short(got)); d != "" {
		t.Error(d)
	}
	for _, c := range got {
		if c.Path == "/etc/added" && (c.Size != 5 || c.Mode != 0o640 || c.Type != "file") || c.Path == "/file" && (c.Type != "dir" || c.Mode != 0o700 || c.Size != 0) {
			t.Errorf("%+v", c)
		}
	}
	// The same, frozen, and seen from the other end.
	stacked := append(slices.Clone(img.Layers), freeze(t, s, id))
	if d := cmp.Diff(want, short(diffOf(t, s, img.Layers, stacked, ""))); d != "" {
		t.Error(d)
	}
	for i, line := range want {
		want[i] = strings.Map(func(r rune) rune {
			switch r {
			case '+':
				return '-'
			case '-':
				return '+'
			}
			return r
		}, line)
	}
	if d := cmp.Diff(want, short(diffOf(t, s, stacked, img.Layers, ""))); d != "" {
		t.Error(d)
	}
}

// TestDiffLeavesTheCommonAlone: a directory of the common layers that cannot
// even be looked up does not matter until a change leads there.
func TestDiffLeavesTheCommonAlone(t *testing.T) {
	s := openTest(t)
	var common []string
	for i := range 2 {
		id := create(t, s)
		bad := filepath.Join(s.vol.path(sandboxesDir, string(id), "upper"), "d", "bad")
		if err := os.MkdirAll(filepath.Join(bad, "f"), 0o755); err != nil {
			t.Fatal(err)
		}
		if i == 1 { // a redirect that is no name
			if err := unix.Lsetxattr(bad, overlayXattr+"redirect", []byte("a/b"), 0); err != nil {
				t.Fatal(err)
			}
		}
		common = append(common, freeze(t, s, id))
	}
	change := func(name string) string {
		id := create(t, s)
		if err := os.MkdirAll(filepath.Join(s.vol.path(sandboxesDir, string(id), "upper"), name), 0o755); err != nil {
			t.Fatal(err)
		}
		return freeze(t, s, id)
	}
	to := append(slices.Clone(common), change("d/good"))
	if d := cmp.Diff([]string{"+ /d/good"}, short(diffOf(t, s, common, to, ""))); d != "" {
		t.Error(d)
	}
	to = append(slices.Clone(common), change("d/bad/x"))
	if err := s.Diff(t.Context(), common, to, "", func(Change) error { return nil }); err == nil {
		t.Error("what cannot be looked up was looked up: this shows nothing")
	}
}

// TestDiffEnds: an error of emit comes back as it is, at once.
func TestDiffEnds(t *testing.T) {
	s := openTest(t)
	img := importTest(t, s, tarEntry{name: "f"})
	id := create(t, s)
	fillUpper(t, s, id, 300, 10)
	enough, n := errors.New("enough"), 0
	err := s.Diff(t.Context(), img.Layers, img.Layers, id, func(Change) error { n++; return enough })
	if err != enough || n != 1 { //nolint:errorlint // as it is
		t.Errorf("%v after %d", err, n)
	}
	for _, c := range [][2][]string{{img.Layers, {NewUpperLayer()}}, {{NewUpperLayer()}, img.Layers}} {
		if err := s.Diff(t.Context(), c[0], c[1], "", func(Change) error { return nil }); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("of no layer: %v", err)
		}
	}
	if err := s.Diff(t.Context(), img.Layers, img.Layers, sandbox.NewID(), func(Change) error { return nil }); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("of no upper: %v", err)
	}
	if got := len(diffOf(t, s, img.Layers, img.Layers, id)); got != 303 {
		t.Errorf("%d changes, want 300 files and 3 directories", got)
	}
}

// TestDiffDeep: what no path can name is told by what holds it.
func TestDiffDeep(t *testing.T) {
	s := openTest(t)
	img := importTest(t, s, tarEntry{name: "f"})
	id := create(t, s)
	deepUpper(t, s.vol.path(sandboxesDir, string(id), "upper"), 1500)
	got := diffOf(t, s, img.Layers, img.Layers, id)
	if len(got) < 3*3*copyOpen+2000 {
		t.Errorf("%d changes", len(got))
	}
	for _, c := range got {
		if len(c.Path) > maxPath {
			t.Fatalf("a path of %d bytes", len(c.Path))
		}
	}
	if err := s.Discard(id, 0); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 60*time.Second, "the tree deleted", func() bool { return trashEmpty(t, s) })
}
