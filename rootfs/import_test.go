package rootfs

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

var testLimits = importLimits{bytes: 1 << 20, files: 64}

// unpackTo unpacks into a fresh directory that has a neighbour, and returns
// the directory. With own, it needs no root.
func unpackTo(t testing.TB, r io.Reader, lim importLimits) (string, LayerInfo, error) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "stage", "root")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	root, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	info, err := unpackTar(t.Context(), root, r, lim)
	// Whatever was in the archive, nothing may lie outside the root.
	for dir, want := range map[string]string{filepath.Dir(dir): "root", filepath.Dir(filepath.Dir(dir)): "stage"} {
		ents, rerr := os.ReadDir(dir)
		if rerr != nil || len(ents) != 1 || ents[0].Name() != want {
			t.Fatalf("outside of the root, in %s: %v %v", dir, ents, rerr)
		}
	}
	return dir, info, err
}

// own gives root's files of a test archive to whoever runs the test, who may
// not be allowed to give files away.
func own(es []tarEntry) []tarEntry {
	if os.Geteuid() == 0 {
		return es
	}
	for i := range es {
		if es[i].uid == 0 && es[i].gid == 0 {
			es[i].uid, es[i].gid = os.Geteuid(), os.Getegid()
		}
	}
	return es
}

// hostile archives, each with the code it must be refused with.
var hostile = []struct {
	name, code string
	entries    []tarEntry
}{
	{"climbs out", "image_bad_path", []tarEntry{{name: "../x"}}},
	{"climbs out in the middle", "image_bad_path", []tarEntry{{name: "a/../../x"}}},
	{"climbs and comes back", "image_bad_path", []tarEntry{{name: "a/"}, {name: "a/../b"}}},
	{"ends in dotdot", "image_bad_path", []tarEntry{{name: "a/.."}}},
	{"absolute", "image_bad_path", []tarEntry{{name: "/etc/passwd"}}},
	{"absolute, twice", "image_bad_path", []tarEntry{{name: "//etc/passwd"}}},
	{"absolute directory", "image_bad_path", []tarEntry{{name: "/etc/"}}},
	{"through a link out", "image_bad_path", []tarEntry{{name: "l", link: "../.."}, {name: "l/x"}}},
	{"through an absolute link", "image_bad_path", []tarEntry{{name: "l", link: "/tmp"}, {name: "l/x"}}},
	{"through a link within", "image_bad_path", []tarEntry{{name: "d/"}, {name: "l", link: "d"}, {name: "l/x"}}},
	{"through a chain of links", "image_bad_path", []tarEntry{{name: "a", link: ".."}, {name: "b", link: "a"}, {name: "b/x"}}},
	{"through a deep link", "image_bad_path", []tarEntry{{name: "d/l", link: "../.."}, {name: "d/l/e/f"}}},
	{"directory through a link", "image_bad_path", []tarEntry{{name: "l", link: "/tmp"}, {name: "l/x/"}}},
	{"directory made a link, then through it", "image_bad_path", []tarEntry{{name: "d/"}, {name: "d", link: "/tmp"}, {name: "d/x"}}},
	{"link over a filled directory", "image_bad_path", []tarEntry{{name: "d/x"}, {name: "d", link: "/tmp"}}},
	{"file over a filled directory", "image_bad_path", []tarEntry{{name: "d/x"}, {name: "d"}}},
	{"through a file", "image_bad_path", []tarEntry{{name: "f"}, {name: "f/x"}}},
	{"through a file, deep", "image_bad_path", []tarEntry{{name: "f"}, {name: "f/x/y"}}},
	{"root is a file", "image_bad_path", []tarEntry{{name: "."}}},
	{"root is a link", "image_bad_path", []tarEntry{{name: "./", link: "/tmp", kind: tar.TypeSymlink}}},
	{"no name", "image_bad_path", []tarEntry{{name: ""}}},
	{"proc is a link", "image_bad_path", []tarEntry{{name: "proc", link: "/etc"}}},
	{"dev is a file", "image_bad_path", []tarEntry{{name: "dev"}}},
	{"etc is a link", "image_bad_path", []tarEntry{{name: "etc", link: "/proc/1/root/etc"}}},
	{"component too long", "image_bad_path", []tarEntry{{name: strings.Repeat("n", 256)}}},
	{"path too long", "image_bad_path", []tarEntry{{name: strings.Repeat("dddddddd/", 456) + "x"}}},
	{"too deep", "image_bad_path", []tarEntry{{name: strings.Repeat("d/", 256) + "x"}}},
	{"link target too long", "image_bad_path", []tarEntry{{name: "l", link: strings.Repeat("t", 4096)}}},
	{"hard link out", "image_bad_path", []tarEntry{{name: "h", link: "../../../../etc/passwd", kind: tar.TypeLink}}},
	{"hard link to an absolute name", "image_bad_path", []tarEntry{{name: "h", link: "/etc/passwd", kind: tar.TypeLink}}},
	{"hard link through a link", "image_bad_path", []tarEntry{{name: "l", link: "/etc"}, {name: "h", link: "l/passwd", kind: tar.TypeLink}}},
	{"hard link to nothing", "image_bad_path", []tarEntry{{name: "h", link: "gone", kind: tar.TypeLink}}},
	{"hard link to a directory", "image_bad_path", []tarEntry{{name: "d/"}, {name: "h", link: "d", kind: tar.TypeLink}}},
	{"hard link to the root", "image_bad_path", []tarEntry{{name: "h", link: ".", kind: tar.TypeLink}}},
	{"hard link under a link", "image_bad_path", []tarEntry{{name: "f"}, {name: "l", link: "/tmp"}, {name: "l/h", link: "f", kind: tar.TypeLink}}},
	{"whiteout", "image_bad_path", []tarEntry{{name: "d/.wh.x"}}},
	{"opaque whiteout", "image_bad_path", []tarEntry{{name: "d/.wh..wh..opq"}}},
	{"whiteout as a directory on the way", "image_bad_path", []tarEntry{{name: ".wh.d/x"}}},
	{"character device", "image_device_node", []tarEntry{{name: "null", kind: tar.TypeChar}}},
	{"block device", "image_device_node", []tarEntry{{name: "sda", kind: tar.TypeBlock}}},
	{"pipe", "image_device_node", []tarEntry{{name: "p", kind: tar.TypeFifo}}},
	{"device 0:0, an overlay's whiteout", "image_device_node", []tarEntry{{name: "etc", kind: tar.TypeChar, mode: 0o600}}},
	{"unknown kind", "image_bad_format", []tarEntry{{name: "x", kind: 'Z'}}},
	{"uid too high", "image_bad_id", []tarEntry{{name: "x", uid: 65536}}},
	{"gid too high", "image_bad_id", []tarEntry{{name: "x", gid: 1 << 30}}},
	{"uid below zero", "image_bad_id", []tarEntry{{name: "x", uid: -1}}},
	{"one file too large", "image_too_large", []tarEntry{{name: "x", data: strings.Repeat("x", 1<<20+1)}}},
	{"together too large", "image_too_large", []tarEntry{{name: "x", data: strings.Repeat("x", 1<<19)}, {name: "y", data: strings.Repeat("x", 1<<19+1)}}},
	{"the same file again and again", "image_too_large", []tarEntry{{name: "x", data: strings.Repeat("x", 1<<19)}, {name: "x", data: strings.Repeat("x", 1<<19)}, {name: "x", data: "x"}}},
	{"too many entries", "image_too_large", slices.Repeat([]tarEntry{{name: "x"}}, 65)},
	{"too many implied directories", "image_too_large", []tarEntry{{name: strings.Repeat("d/", 64) + "x"}}},
	{"docker save", "image_bad_format", []tarEntry{{name: "manifest.json"}, {name: "blobs/x"}}},
	{"docker-archive, manifest last", "image_bad_format", []tarEntry{{name: "config.json", data: "{}"}, {name: "layer.tar", data: "x"}, {name: "manifest.json", data: `[{"Config":"config.json","RepoTags":null,"Layers":["layer.tar"]}]`}}},
	{"OCI layout", "image_bad_format", []tarEntry{{name: "oci-layout"}}},
}

func TestHostileArchives(t *testing.T) {
	if len(hostile) < 40 {
		t.Fatal("the table shrank")
	}
	for _, c := range hostile {
		t.Run(c.name, func(t *testing.T) {
			_, _, err := unpackTo(t, tarOf(t, own(c.entries)...), testLimits)
			wantCode(t, err, c.code)
		})
	}
}

func wantCode(t testing.TB, err error, code string) {
	t.Helper()
	if err == nil {
		t.Fatalf("accepted, want %s", code)
	}
	if got := sandbox.CodeOf(err); got != code {
		t.Fatalf("code %s (%v), want %s", got, err, code)
	}
	if c := sandbox.ClassOf(err); c == nil {
		t.Fatalf("%v has no class", err)
	}
}

// TestHostileBounds is the positive control of the bounds in the table: what
// lies just within is taken.
func TestHostileBounds(t *testing.T) {
	for name, entries := range map[string][]tarEntry{
		"long component": {{name: strings.Repeat("n", 255)}},
		"deep":           {{name: strings.Repeat("d/", 60) + "x"}},
		"bytes":          {{name: "x", data: strings.Repeat("x", 1<<20)}},
		"entries":        slices.Repeat([]tarEntry{{name: "x"}}, 64),
		"long target":    {{name: "l", link: strings.Repeat("t", 1023)}}, // XFS takes no more
		"links anywhere": {{name: "a", link: "/etc/shadow"}, {name: "b", link: "../../.."}, {name: "c", link: "a"}},
		"link replaced":  {{name: "d", link: "/tmp"}, {name: "d/"}, {name: "d/x", data: "in"}},
		"link to itself": {{name: "x", data: "1"}, {name: "x", link: "x", kind: tar.TypeLink}},
		"wh inside":      {{name: "a.wh.b"}, {name: ".why"}},
		"link to a link": {{name: "l", link: "/etc/passwd"}, {name: "h", link: "l", kind: tar.TypeLink}},
		"manifest alone": {{name: "manifest.json"}},
		"other manifest": {{name: "manifest.json", data: `[{"name":"app","Config":"","Layers":[]}]`}},
		"manifest link":  {{name: "manifest.json", link: "app"}, {name: "app", data: `[{"Config":"c","Layers":["l"]}]`}},
	} {
		t.Run(name, func(t *testing.T) {
			if _, _, err := unpackTo(t, tarOf(t, own(entries)...), testLimits); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestHostileStreams covers what is wrong below the level of entries.
func TestHostileStreams(t *testing.T) {
	good := tarBytes(t, own([]tarEntry{{name: "d/"}, {name: "d/f", data: strings.Repeat("content ", 200)}})...)
	content := good[:len(good)-1024] // all blocks but the end mark
	gz := gzipped(t, good)
	flipped := bytes.Clone(gz)
	flipped[len(flipped)-6] ^= 1 // in the checksum
	for _, c := range []struct {
		name, code string
		data       []byte
	}{
		{"empty", "image_truncated", nil},
		{"no end mark", "image_truncated", content},
		{"cut in a header", "image_truncated", good[:700]},
		{"cut in content", "image_truncated", good[:1100]},
		{"cut between entries", "image_truncated", good[:512]},
		{"gzip cut", "image_truncated", gz[:len(gz)-20]},
		{"gzip cut in its head", "image_truncated", gz[:5]},
		{"gzip cut in its tail", "image_truncated", gz[:len(gz)-3]},
		{"gzip checksum", "image_bad_format", flipped},
		{"gzip of no tar", "image_bad_format", gzipped(t, bytes.Repeat([]byte("no tar "), 100))},
		{"zstd cut", "image_truncated", zstded(t, good)[:60]},
		{"zstd of nonsense", "image_bad_format", append([]byte("\x28\xb5\x2f\xfd"), bytes.Repeat([]byte{0xff}, 100)...)},
		{"text", "image_bad_format", bytes.Repeat([]byte("hello world\n"), 100)},
		{"xz", "image_bad_format", []byte("\xfd7zXZ\x00rest")},
		{"zip", "image_bad_format", []byte("PK\x03\x04rest")},
		{"header checksum", "image_bad_format", append(append([]byte{'x'}, good[1:]...), 0)},
		{"a second archive behind", "image_bad_format", append(bytes.Clone(good), good...)},
		{"text behind", "image_bad_format", append(bytes.Clone(good), "tail"...)},
		{"gzip bomb", "image_too_large", gzipped(t, make([]byte, 2<<20))},
		{"endless headers", "image_too_large", bytes.Repeat(good[:512], 100)},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.name == "gzip bomb" {
				// Zeroes are an end mark and padding: the bound on
				// the stream ends them.
				_, _, err := unpackTo(t, bytes.NewReader(c.data), importLimits{bytes: 1 << 20, files: 1})
				wantCode(t, err, c.code)
				return
			}
			_, _, err := unpackTo(t, bytes.NewReader(c.data), testLimits)
			wantCode(t, err, c.code)
		})
	}
	for name, data := range map[string][]byte{"plain": good, "gzip": gz, "zstd": zstded(t, good), "padded": append(bytes.Clone(good), make([]byte, 10240)...)} {
		if _, _, err := unpackTo(t, bytes.NewReader(data), testLimits); err != nil {
			t.Errorf("%s, sound: %v", name, err)
		}
		if _, _, err := unpackTo(t, iotest.OneByteReader(bytes.NewReader(data)), testLimits); err != nil {
			t.Errorf("%s, sound, in small pieces: %v", name, err)
		}
	}
}

// TestRatio feeds a stream that grows beyond every honest ratio.
func TestRatio(t *testing.T) {
	raw := &countReader{ctx: t.Context(), n: 1000}
	r := &countReader{ctx: t.Context(), r: zeroes{}, max: 1 << 40, in: raw}
	n, err := io.Copy(io.Discard, r)
	wantCode(t, err, "image_too_large")
	if n < ratioFrom || n > ratioFrom+1<<20 {
		t.Errorf("ended after %d bytes, want about %d", n, int64(ratioFrom))
	}
}

type zeroes struct{}

func (zeroes) Read(p []byte) (int, error) { return len(p), nil }

func gzipped(t testing.TB, b []byte) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := gzip.NewWriter(&buf)
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func zstded(t testing.TB, b []byte) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	return w.EncodeAll(b, nil)
}

// TestUnpackResult looks at what came of an archive with everything in it.
func TestUnpackResult(t *testing.T) {
	at := time.Unix(1.5e9, 123456789)
	xattrs := map[string]string{
		"SCHILY.xattr.security.capability":      "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
		"SCHILY.xattr.trusted.overlay.redirect": "/etc",
		"SCHILY.xattr.trusted.overlay.opaque":   "y",
		"SCHILY.xattr.user.overlay.opaque":      "y",
	}
	entries := own([]tarEntry{
		{name: "./", mode: 0o700},
		{name: "bin/su", mode: 0o4755, data: "su", mtime: at},
		{name: "bin/", mode: 0o2775, mtime: at},
		{name: "bin/xattr", pax: xattrs, data: "x"},
		{name: "tmp/", mode: 0o1777},
		{name: "./a//b/./c", data: "first"},
		{name: "a/b/c", data: "second"},
		{name: "twin", link: "a/b/c", kind: tar.TypeLink},
		{name: "l", link: "/etc/shadow"},
		{name: "hole", data: strings.Repeat("\x00", 1<<18) + "end"},
	})
	dir, info, err := unpackTo(t, tarOf(t, entries...), testLimits)
	if err != nil {
		t.Fatal(err)
	}
	for path, mode := range map[string]uint32{"bin/su": 0o4755, "bin": 0o2775, "tmp": 0o1777, "a": 0o755, "": 0o700, "proc": 0o755} {
		if st := statOf(t, filepath.Join(dir, path)); st.Mode&0o7777 != mode {
			t.Errorf("%s has mode %o, want %o", path, st.Mode&0o7777, mode)
		}
	}
	for _, path := range []string{"bin/su", "bin"} {
		if st := statOf(t, filepath.Join(dir, path)); st.Mtim.Sec != at.Unix() {
			t.Errorf("%s is of %d, want %d", path, st.Mtim.Sec, at.Unix())
		}
	}
	if n, err := unix.Llistxattr(filepath.Join(dir, "bin/xattr"), nil); err != nil || n != 0 {
		t.Errorf("%d bytes of extended attributes were kept (%v)", n, err)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "twin")); err != nil || string(b) != "second" {
		t.Errorf("twin = %q, %v", b, err)
	}
	if a, b := statOf(t, filepath.Join(dir, "twin")), statOf(t, filepath.Join(dir, "a/b/c")); a.Ino != b.Ino {
		t.Error("a hard link became a copy")
	}
	if l, err := os.Readlink(filepath.Join(dir, "l")); err != nil || l != "/etc/shadow" {
		t.Errorf("l -> %q, %v", l, err)
	}
	hole := statOf(t, filepath.Join(dir, "hole"))
	if hole.Size != 1<<18+3 || hole.Blocks*512 >= 1<<18 {
		t.Errorf("hole: %d bytes on %d blocks", hole.Size, hole.Blocks)
	}
	if want := int64(2 + 1 + 6 + 1<<18 + 3); info.Size != want {
		t.Errorf("size %d, want %d", info.Size, want)
	}
	var n int64
	_ = filepath.WalkDir(dir, func(string, fs.DirEntry, error) error { n++; return nil })
	if info.Files != n-1 {
		t.Errorf("files %d, want %d", info.Files, n-1)
	}
}

// TestDigest pins what the digest depends on, and what not.
func TestDigest(t *testing.T) {
	base := func() []tarEntry {
		return own([]tarEntry{{name: "d/"}, {name: "d/f", data: "x"}, {name: "g", data: "y"}, {name: "l", link: "g"}, {name: "h", link: "g", kind: tar.TypeLink}})
	}
	digest := func(es []tarEntry) string {
		t.Helper()
		_, info, err := unpackTo(t, tarOf(t, es...), testLimits)
		if err != nil {
			t.Fatal(err)
		}
		return info.Digest
	}
	want := digest(base())
	same := map[string]func([]tarEntry) []tarEntry{
		"order":       func(e []tarEntry) []tarEntry { return []tarEntry{e[2], e[4], e[3], e[1], e[0]} },
		"dot names":   func(e []tarEntry) []tarEntry { e[1].name = "./d//f"; return e },
		"replaced":    func(e []tarEntry) []tarEntry { return append(own([]tarEntry{{name: "d/f", data: "old"}}), e...) },
		"link turned": func(e []tarEntry) []tarEntry { e[2].name, e[4].name, e[4].link = "h", "g", "h"; return e },
		"dialect":     func(e []tarEntry) []tarEntry { e[1].pax = map[string]string{"comment": "x"}; return e },
	}
	for name, change := range same {
		if got := digest(change(base())); got != want {
			t.Errorf("%s changed the digest", name)
		}
	}
	seen := map[string]string{want: "nothing"}
	differ := map[string]func([]tarEntry) []tarEntry{
		"content":    func(e []tarEntry) []tarEntry { e[1].data = "z"; return e },
		"mode":       func(e []tarEntry) []tarEntry { e[1].mode = 0o600; return e },
		"name":       func(e []tarEntry) []tarEntry { e[1].name = "d/e"; return e },
		"time":       func(e []tarEntry) []tarEntry { e[1].mtime = time.Unix(5, 0); return e },
		"dir time":   func(e []tarEntry) []tarEntry { e[0].mtime = time.Unix(5, 0); return e },
		"target":     func(e []tarEntry) []tarEntry { e[3].link = "f"; return e },
		"link copy":  func(e []tarEntry) []tarEntry { e[4] = e[2]; e[4].name = "h"; return e },
		"empty file": func(e []tarEntry) []tarEntry { return append(e, own([]tarEntry{{name: "e"}})...) },
		"empty dir":  func(e []tarEntry) []tarEntry { return append(e, own([]tarEntry{{name: "e/"}})...) },
	}
	if os.Geteuid() == 0 {
		differ["owner"] = func(e []tarEntry) []tarEntry { e[1].uid = 5; return e }
	}
	for name, change := range differ {
		got := digest(change(base()))
		if other, ok := seen[got]; ok {
			t.Errorf("%s has the digest of %s", name, other)
		}
		seen[got] = name
	}
}

func TestUnpackCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	root, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	data := tarBytes(t, own([]tarEntry{{name: "f", data: strings.Repeat("x", 1<<19)}})...)
	r := io.MultiReader(bytes.NewReader(data[:1<<18]), readerFunc(func(p []byte) (int, error) { cancel(); return len(p), nil }))
	if _, err := unpackTar(ctx, root, r, testLimits); !errors.Is(err, context.Canceled) {
		t.Fatalf("%v, want context.Canceled", err)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// FuzzUnpack looks for archives that crash the import, leave the root, or
// unpack to what the listing refuses.
func FuzzUnpack(f *testing.F) {
	for _, c := range hostile {
		if len(c.entries) < 10 {
			f.Add(tarBytes(f, own(slices.Clone(c.entries))...))
		}
	}
	good := tarBytes(f, own([]tarEntry{{name: "d/"}, {name: "d/f", data: "x"}})...)
	f.Add(good)
	f.Add(gzipped(f, good))
	f.Add(zstded(f, good))
	sum := sha256.Sum256(good)
	f.Add(sum[:])
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 1<<18 {
			return
		}
		dir, info, err := unpackTo(t, bytes.NewReader(data), testLimits)
		if err != nil {
			if sandbox.ClassOf(err) == nil {
				t.Errorf("an error without a class: %v", err)
			}
			return
		}
		if _, err := parseLayer(info.Digest); err != nil {
			t.Error(err)
		}
		err = filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			st := statOf(t, path)
			kind := st.Mode & unix.S_IFMT
			if kind != unix.S_IFDIR && kind != unix.S_IFREG && kind != unix.S_IFLNK {
				return fmt.Errorf("%s has mode %o", path, st.Mode)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
}
