//go:build root

package rootfs

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// treeOf describes every file of a tree: kind, mode, ids, time, extended
// attributes, target or content, and which other name it shares its inode with.
func treeOf(t testing.TB, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	first := map[uint64]string{}
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		line := fmt.Sprintf("%06o %d:%d %d.%09d", st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec)
		kind := st.Mode & unix.S_IFMT
		if kind != unix.S_IFDIR && st.Nlink > 1 {
			if other, ok := first[st.Ino]; ok {
				line += " = " + other
			} else {
				first[st.Ino] = name
			}
		}
		switch kind {
		case unix.S_IFREG:
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			sum := sha256.Sum256(b)
			line += fmt.Sprintf(" %d %x", len(b), sum[:6])
		case unix.S_IFLNK:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			line += " -> " + target
		}
		attrs, err := listXattrs(func(buf []byte) (int, error) { return unix.Llistxattr(path, buf) })
		if err != nil {
			return err
		}
		sort.Strings(attrs)
		for _, a := range attrs {
			if !keepsXattr(a) {
				continue
			}
			buf := make([]byte, maxXattr)
			n, err := unix.Lgetxattr(path, a, buf)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %s=%x", a, buf[:n])
		}
		out[name] = line
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// capV2 is cap_net_raw as a program's file has it.
const capV2 = "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

// The ACL u::rwx,u:1000:r-x,g::r-x,m::r-x,o::---
const aclAccess = "\x02\x00\x00\x00" + "\x01\x00\x07\x00\xff\xff\xff\xff" + "\x02\x00\x05\x00\xe8\x03\x00\x00" +
	"\x04\x00\x05\x00\xff\xff\xff\xff" + "\x10\x00\x05\x00\xff\xff\xff\xff" + "\x20\x00\x00\x00\xff\xff\xff\xff"

func xattrs(kv ...string) map[string]string {
	out := map[string]string{}
	for i := 0; i < len(kv); i += 2 {
		out[xattrRecord+kv[i]] = kv[i+1]
	}
	return out
}

// oddLayers are three layers with everything that images have, each naming
// all its directories.
func oddLayers() [][]tarEntry {
	at := func(n int64) time.Time { return time.Unix(1_500_000_000+n, 123456789) }
	ns := map[string]string{} // forces pax, and so nanoseconds
	e := func(es ...tarEntry) []tarEntry {
		for i := range es {
			if es[i].mtime.IsZero() {
				es[i].mtime = at(int64(i))
			}
			if es[i].pax == nil {
				es[i].pax = ns
			}
		}
		return es
	}
	long := strings.Repeat("n", 255)
	return [][]tarEntry{
		e(
			tarEntry{name: "./", mode: 0o755},
			tarEntry{name: "bin/"},
			tarEntry{name: "bin/su", mode: 0o4755, data: "su"},
			tarEntry{name: "bin/wall", mode: 0o2755, gid: 5, data: "wall"},
			tarEntry{name: "bin/ping", mode: 0o755, data: "ping", pax: xattrs(xattrCapability, capV2)},
			tarEntry{name: "bin/both", mode: 0o6711, uid: 65535, gid: 65535, data: "both"},
			tarEntry{name: "tmp/", mode: 0o1777},
			tarEntry{name: "var/", mode: 0o2775, gid: 50},
			tarEntry{name: "var/attr", data: "a", pax: xattrs("user.one", "1", "user.bytes", "\xff\x00\x01")},
			tarEntry{name: "var/attrdir/", pax: xattrs("user.dir", "d")},
			tarEntry{name: "var/hard1", data: strings.Repeat("hard", 3000)},
			tarEntry{name: "var/hard2", link: "var/hard1", kind: tar.TypeLink},
			tarEntry{name: "hard3", link: "var/hard1", kind: tar.TypeLink},
			tarEntry{name: "l", link: "bin/su"},
			tarEntry{name: "labs", link: "/etc/shadow", uid: 7, gid: 8},
			tarEntry{name: "lout", link: "../../../.."},
			tarEntry{name: "ldir", link: "bin"},
			tarEntry{name: "pipe", kind: tar.TypeFifo, mode: 0o622, uid: 3},
			tarEntry{name: "hole", data: "begin" + strings.Repeat("\x00", 1<<20) + "end"},
			tarEntry{name: "empty"},
			tarEntry{name: "odd/"},
			tarEntry{name: "odd/new\nline", data: "1"},
			tarEntry{name: "odd/\xff\xfe bytes", data: "2"},
			tarEntry{name: "odd/ünïcode ", data: "3"},
			tarEntry{name: "odd/" + long, data: "4"},
			tarEntry{name: "odd/-rf", data: "5"},
			tarEntry{name: "odd/a.wh.b", data: "6"},
			tarEntry{name: "odd/old", data: "7", mtime: time.Unix(0, 0)},
			tarEntry{name: "gone/"}, tarEntry{name: "gone/x", data: "x"}, tarEntry{name: "gone/y/"},
			tarEntry{name: "opq/"}, tarEntry{name: "opq/low", data: "low"}, tarEntry{name: "opq/sub/"}, tarEntry{name: "opq/sub/low", data: "low"},
			tarEntry{name: "join/"}, tarEntry{name: "join/low", data: "low"}, tarEntry{name: "join/both", data: "low"},
			tarEntry{name: "dir2file/"}, tarEntry{name: "dir2file/x", data: "x"},
			tarEntry{name: "file2dir", data: "x"},
			tarEntry{name: "again/"}, tarEntry{name: "again/low", data: "low"},
		),
		e(
			tarEntry{name: "./", mode: 0o755, mtime: at(400)},
			tarEntry{name: ".wh.gone"},
			tarEntry{name: "opq/", mode: 0o700, mtime: at(500)}, tarEntry{name: "opq/.wh..wh..opq"}, tarEntry{name: "opq/mid", data: "mid"},
			tarEntry{name: "join/", mode: 0o711, uid: 9, mtime: at(501)}, tarEntry{name: "join/mid", data: "mid"}, tarEntry{name: "join/both", data: "mid"}, tarEntry{name: "join/.wh.low"},
			tarEntry{name: "dir2file", data: "now a file"},
			tarEntry{name: "file2dir/", mtime: at(502)}, tarEntry{name: "file2dir/in", data: "in"},
			tarEntry{name: ".wh.again"},
			tarEntry{name: "ldir/", mtime: at(503)}, tarEntry{name: "ldir/x", data: "the link became a directory"},
			tarEntry{name: "var/", mode: 0o755, gid: 51, mtime: at(504)},
			tarEntry{name: "var/attr", data: "b", pax: xattrs("user.two", "2")},
			tarEntry{name: "bin/", mtime: at(505)}, tarEntry{name: "bin/.wh.wall"}, tarEntry{name: "bin/ping", mode: 0o755, data: "no capability"},
		),
		e(
			tarEntry{name: "./", mode: 0o755, mtime: at(401)},
			tarEntry{name: "again/", mtime: at(600)}, tarEntry{name: "again/new", data: "new"},
			tarEntry{name: "opq/", mode: 0o750, mtime: at(601)}, tarEntry{name: "opq/.wh.mid"}, tarEntry{name: "opq/top", data: "top"},
			tarEntry{name: "gone", link: "bin"},
			tarEntry{name: "var/", mode: 0o755, mtime: at(602)}, tarEntry{name: "var/hard1", data: "no link any more"},
			tarEntry{name: "h1", data: "h"}, tarEntry{name: "h2", link: "h1", kind: tar.TypeLink},
			tarEntry{name: "hl", link: "/nowhere"}, tarEntry{name: "hl2", link: "hl", kind: tar.TypeLink},
			tarEntry{name: "dir2file/", mtime: at(603)}, tarEntry{name: "dir2file/again", data: "a directory again"},
			tarEntry{name: ".wh.labs"},
			tarEntry{name: "fresh/", mtime: at(604)}, tarEntry{name: "fresh/.wh..wh..opq"}, tarEntry{name: "fresh/x", data: "x"},
		),
	}
}

// unpackByUmoci lets umoci unpack an image of these layers and returns the
// tree.
func unpackByUmoci(t testing.TB, layers [][]byte) string {
	t.Helper()
	dir := t.TempDir()
	type obj = map[string]any
	blob := func(kind string, b []byte) obj {
		t.Helper()
		sum := sha256.Sum256(b)
		name := hex.EncodeToString(sum[:])
		write(t, filepath.Join(dir, "oci/blobs/sha256", name), b)
		return obj{"mediaType": kind, "digest": digestPrefix + name, "size": len(b)}
	}
	asJSON := func(v any) []byte {
		t.Helper()
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	var descs []obj
	var ids []string
	for _, l := range layers {
		descs = append(descs, blob("application/vnd.oci.image.layer.v1.tar+gzip", gzipped(t, l)))
		ids = append(ids, diffIDOf(l))
	}
	config := blob("application/vnd.oci.image.config.v1+json", asJSON(obj{
		"architecture": "amd64", "os": "linux", "config": obj{}, "rootfs": obj{"type": "layers", "diff_ids": ids},
	}))
	manifest := blob("application/vnd.oci.image.manifest.v1+json", asJSON(obj{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config, "layers": descs,
	}))
	manifest["annotations"] = obj{"org.opencontainers.image.ref.name": "t"}
	write(t, filepath.Join(dir, "oci/index.json"), asJSON(obj{"schemaVersion": 2, "manifests": []obj{manifest}}))
	write(t, filepath.Join(dir, "oci/oci-layout"), asJSON(obj{"imageLayoutVersion": "1.0.0"}))
	out, err := exec.Command("umoci", "unpack", "--image", filepath.Join(dir, "oci")+":t", filepath.Join(dir, "bundle")).CombinedOutput()
	if err != nil {
		t.Fatalf("umoci: %v: %s", err, out)
	}
	return filepath.Join(dir, "bundle/rootfs")
}

func write(t testing.TB, path string, b []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
}

// importAll imports layers and returns the stack.
func importAll(t testing.TB, s *Store, layers [][]byte) []string {
	t.Helper()
	var stack []string
	for _, b := range layers {
		info, err := s.ImportLayer(t.Context(), diffIDOf(b), bytes.NewReader(b))
		if err != nil {
			t.Fatal(err)
		}
		stack = append(stack, info.Digest)
	}
	return stack
}

// exportAll exports every layer of a stack, twice over.
func exportAll(t testing.TB, s *Store, stack []string) [][]byte {
	t.Helper()
	var out [][]byte
	for i := range stack {
		var once, twice bytes.Buffer
		for _, w := range []*bytes.Buffer{&once, &twice} {
			id, err := s.ExportLayer(t.Context(), stack, i, w)
			if err != nil {
				t.Fatal(err)
			}
			if id != diffIDOf(w.Bytes()) {
				t.Fatalf("layer %d has another digest than was said", i)
			}
		}
		if !bytes.Equal(once.Bytes(), twice.Bytes()) {
			t.Errorf("layer %d: two exports differ", i)
		}
		out = append(out, once.Bytes())
	}
	return out
}

// TestUmoci: an image unpacks to the same tree as with umoci, with any number
// of its layers; and so does what is exported of it.
func TestUmoci(t *testing.T) {
	testenv.Need(t, testenv.Root)
	if _, err := exec.LookPath("umoci"); err != nil {
		t.Fatal("umoci is missing: make deps-test")
	}
	s := openTest(t)
	var layers [][]byte
	for _, entries := range oddLayers() {
		layers = append(layers, tarBytes(t, entries...))
	}
	stack := importAll(t, s, layers)
	for n := 1; n <= len(stack); n++ {
		want, got := treeOf(t, unpackByUmoci(t, layers[:n])), treeOf(t, view(t, s, stack[:n]...))
		if len(want) < 30 {
			t.Fatalf("umoci unpacked %d files only", len(want))
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%d layers (- umoci, + sandboxd):\n%s", n, d)
		}
	}
	if hole := statOf(t, filepath.Join(view(t, s, stack...), "hole")); hole.Blocks*512 > hole.Size/2 {
		t.Errorf("a hole of %d bytes takes %d blocks", hole.Size, hole.Blocks)
	}
	want := treeOf(t, view(t, s, stack...))
	exported := exportAll(t, s, stack)
	if d := cmp.Diff(want, treeOf(t, unpackByUmoci(t, exported))); d != "" {
		t.Errorf("exported, then umoci (- ours, + umoci):\n%s", d)
	}
	again := openTest(t)
	back := importAll(t, again, exported)
	if d := cmp.Diff(want, treeOf(t, view(t, again, back...))); d != "" {
		t.Errorf("exported and imported again:\n%s", d)
	}
	for i, b := range exportAll(t, again, back) {
		if !bytes.Equal(b, exported[i]) {
			t.Errorf("layer %d, exported, imported and exported, differs", i)
		}
	}
	var tree bytes.Buffer
	if err := s.ExportTree(t.Context(), stack, &tree); err != nil {
		t.Fatal(err)
	}
	whole := importAll(t, again, [][]byte{tree.Bytes()})
	if d := cmp.Diff(want, treeOf(t, view(t, again, whole...))); d != "" {
		t.Errorf("the whole tree, imported:\n%s", d)
	}
}

// TestExportFrozen exports what sandboxes changed: deletions, renamed
// directories, links. With the layers below, it shows what the sandbox saw.
func TestExportFrozen(t *testing.T) {
	testenv.Need(t, testenv.Root)
	s := openTest(t)
	base := layerTest(t, s, oddLayers()[0]...)
	etc := layerTest(t, s, tarEntry{name: "etc/"}, tarEntry{name: "etc/hosts", data: "of the image"}, tarEntry{name: "big/a/b/f", data: "deep"}, tarEntry{name: "big/g", data: "g"})
	stack := []string{base, etc}
	in := startInside(t, testBase)
	sh := func(stack []string, steps ...[]string) string {
		t.Helper()
		id := create(t, s)
		root := mountTest(t, s, in, id, sandbox.Image{Kind: sandbox.ImageTar, Layers: stack})
		in.keep(t, root)
		for _, step := range steps {
			in.kept(t, step[0], step[1:]...)
		}
		var live bytes.Buffer
		liveID, err := s.ExportUpper(t.Context(), id, stack, &live)
		if err != nil {
			t.Fatal(err)
		}
		root.Close()
		layer := NewUpperLayer()
		if err := s.FreezeUpper(id, layer); err != nil {
			t.Fatal(err)
		}
		var frozen bytes.Buffer
		frozenID, err := s.ExportLayer(t.Context(), append(slices.Clone(stack), layer), len(stack), &frozen)
		if err != nil {
			t.Fatal(err)
		}
		if liveID != frozenID {
			t.Error("an upper, and the same upper frozen, are exported differently")
		}
		return layer
	}
	one := sh(stack,
		[]string{"rename", "/big", "/moved"}, []string{"write", "/moved/a/new", "in the moved"}, []string{"remove", "/moved/g"},
		[]string{"rename", "/opq", "/gone/y/opq"}, []string{"write", "/etc/hosts", "of the sandbox"}, []string{"write", "/etc/motd", "hi"},
		[]string{"remove", "/var"}, []string{"write", "/join/low", "changed"}, []string{"chown", "/bin/su"},
	)
	two := sh(append(slices.Clone(stack), one),
		[]string{"rename", "/moved/a", "/a"}, []string{"remove", "/a/b/f"}, []string{"write", "/a/b/h", "h"}, []string{"remove", "/moved"}, []string{"write", "/moved", "a file now"},
	)
	all := append(slices.Clone(stack), one, two)
	want := treeOf(t, view(t, s, all...))
	if _, ok := want["a/b/h"]; !ok || want["var"] != "" {
		t.Fatalf("the sandboxes did not do what they should: %v", want)
	}
	exported := exportAll(t, s, all)
	again := openTest(t)
	got := treeOf(t, view(t, again, importAll(t, again, exported)...))
	for _, identity := range []string{"etc/hosts"} {
		if want[identity] == got[identity] {
			t.Errorf("%s came along", identity)
		}
		delete(want, identity)
		delete(got, identity)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("imported (- sandbox, + imported):\n%s", d)
	}
	umoci := treeOf(t, unpackByUmoci(t, exported))
	delete(umoci, "etc/hosts")
	if d := cmp.Diff(want, umoci); d != "" {
		t.Errorf("umoci (- sandbox, + umoci):\n%s", d)
	}
	var tree bytes.Buffer
	if err := s.ExportTree(t.Context(), all, &tree); err != nil {
		t.Fatal(err)
	}
	whole := treeOf(t, view(t, again, importAll(t, again, [][]byte{tree.Bytes()})...))
	if d := cmp.Diff(want, whole); d != "" {
		t.Errorf("the whole tree (- sandbox, + tree):\n%s", d)
	}
}
