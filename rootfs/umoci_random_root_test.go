//go:build root

package rootfs

import (
	"archive/tar"
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// randomLayers makes layers as builders of images make them: sound, each name
// once, every directory named before what is in it. Apart from that, anything.
type randomLayers struct {
	rnd  *rand.Rand
	tree map[string]bool // what the layers so far show: directory or not
	at   int64

	entries []tarEntry
	late    []tarEntry // opaque marks may come after what they do not hide
	here    map[string]byte
	files   []string
}

func (g *randomLayers) layer() []tarEntry {
	g.entries, g.late, g.here, g.files = nil, nil, map[string]byte{}, nil
	g.dir(".")
	for range 3 + g.rnd.IntN(25) {
		g.step()
	}
	return append(g.entries, g.late...)
}

func (g *randomLayers) meta(e tarEntry) tarEntry {
	g.at++
	e.mtime = time.Unix(1_600_000_000+g.at, g.rnd.Int64N(1e9))
	e.uid, e.gid = g.rnd.IntN(3)*1000, g.rnd.IntN(2)*65535
	e.mode = int64(0o400 | g.rnd.IntN(0o10000))
	e.pax = map[string]string{}
	if e.link == "" && e.kind != tar.TypeFifo && g.rnd.IntN(4) == 0 {
		e.pax = xattrs(fmt.Sprint("user.", g.rnd.IntN(3)), fmt.Sprint(g.at))
	}
	return e
}

// add notes an entry of this layer, which takes the place of what was there.
func (g *randomLayers) add(name string, e tarEntry) {
	g.entries = append(g.entries, g.meta(e))
	g.here[name] = e.kind
	if e.kind != tar.TypeDir || !g.tree[name] {
		g.remove(name)
	}
	g.tree[name] = e.kind == tar.TypeDir
}

func (g *randomLayers) remove(name string) {
	maps.DeleteFunc(g.tree, func(n string, _ bool) bool { return n == name || strings.HasPrefix(n, name+"/") })
}

// dir names a directory and those above it, unless this layer has.
func (g *randomLayers) dir(name string) bool {
	if kind, ok := g.here[name]; ok {
		return kind == tar.TypeDir
	}
	if name != "." && !g.dir(path.Dir(name)) {
		return false
	}
	g.add(name, tarEntry{name: name + "/", kind: tar.TypeDir})
	if g.rnd.IntN(6) == 0 && name != "." {
		mark := tarEntry{name: path.Join(name, opaqueName)}
		if g.rnd.IntN(2) == 0 {
			g.entries = append(g.entries, mark)
		} else {
			g.late = append(g.late, mark)
		}
		g.remove(name)
		g.tree[name] = true
	}
	return true
}

func (g *randomLayers) step() {
	name := ""
	for range 1 + g.rnd.IntN(4) {
		name = path.Join(name, string(rune('a'+g.rnd.IntN(4))))
	}
	if _, ok := g.here[name]; ok || !g.dir(path.Dir(name)) {
		return
	}
	switch g.rnd.IntN(8) {
	case 0, 1:
		g.entries = append(g.entries, tarEntry{name: path.Join(path.Dir(name), whiteoutName+path.Base(name))})
		g.here[name] = 'w'
		g.remove(name)
	case 2:
		g.dir(name)
	case 3:
		g.add(name, tarEntry{name: name, kind: tar.TypeSymlink, link: path.Join(strings.Repeat("../", g.rnd.IntN(3)), "a/b")})
		g.files = append(g.files, name)
	case 4:
		if len(g.files) > 0 {
			g.add(name, tarEntry{name: name, kind: tar.TypeLink, link: g.files[g.rnd.IntN(len(g.files))]})
		}
	case 5:
		g.add(name, tarEntry{name: name, kind: tar.TypeFifo})
	default:
		g.add(name, tarEntry{name: name, kind: tar.TypeReg, data: strings.Repeat(name, g.rnd.IntN(3000))})
		g.files = append(g.files, name)
	}
}

// TestUmociRandom compares many small images with umoci, and with what their
// maker believes they show.
func TestUmociRandom(t *testing.T) {
	testenv.Need(t, testenv.Root)
	if _, err := exec.LookPath("umoci"); err != nil {
		t.Fatal("umoci is missing: make deps-test")
	}
	s, again := openTest(t), openTest(t)
	for seed := range testenv.Cycles(t, 25, 1000) {
		g := randomLayers{rnd: rand.New(rand.NewPCG(uint64(seed), 1)), tree: map[string]bool{}}
		var layers [][]byte
		for range 2 + g.rnd.IntN(5) {
			layers = append(layers, tarBytes(t, g.layer()...))
		}
		stack := importAll(t, s, layers)
		got := treeOf(t, view(t, s, stack...))
		if d := cmp.Diff(slices.Sorted(maps.Keys(g.tree)), slices.Sorted(maps.Keys(got))); d != "" {
			t.Errorf("seed %d (- asked, + there):\n%s", seed, d)
		}
		if d := cmp.Diff(forgiveTimes(treeOf(t, unpackByUmoci(t, layers)), got), got); d != "" {
			t.Errorf("seed %d (- umoci, + sandboxd):\n%s", seed, d)
		}
		exported := exportAll(t, s, stack)
		if d := cmp.Diff(got, treeOf(t, view(t, again, importAll(t, again, exported)...))); d != "" {
			t.Errorf("seed %d, exported and imported:\n%s", seed, d)
		}
		var tree bytes.Buffer
		if err := s.ExportTree(t.Context(), stack, &tree); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(got, treeOf(t, view(t, again, importAll(t, again, [][]byte{tree.Bytes()})...))); d != "" {
			t.Errorf("seed %d, as one tree:\n%s", seed, d)
		}
		if t.Failed() {
			for i, l := range layers {
				t.Logf("layer %d:\n%s", i, listTar(t, l))
			}
			return
		}
	}
}

// forgiveTimes takes our time for directories that umoci left with the present:
// it sets a directory's time before it deletes in it.
func forgiveTimes(umoci, ours map[string]string) map[string]string {
	for name, line := range umoci {
		f, o := strings.Fields(line), strings.Fields(ours[name])
		if len(f) > 2 && len(o) > 2 && strings.HasPrefix(f[0], "04") && !strings.HasPrefix(f[2], "16000") {
			umoci[name] = strings.Replace(line, f[2], o[2], 1)
		}
	}
	return umoci
}

func listTar(t testing.TB, b []byte) string {
	var out strings.Builder
	for r := tar.NewReader(bytes.NewReader(b)); ; {
		h, err := r.Next()
		if err != nil {
			return out.String()
		}
		fmt.Fprintf(&out, "%c %o %s -> %s\n", h.Typeflag, h.Mode, h.Name, h.Linkname)
	}
}
