package build

import (
	"archive/tar"
	"bytes"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// f is a file of a test's archive: a name that ends with / is a directory,
// one with " -> " a symbolic link, with " = " a second name.
type f struct {
	name, data string
	mode       int64
	uid        int
	at         time.Time
}

func archive(t testing.TB, files ...f) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		h := &tar.Header{Name: f.name, Mode: f.mode, Uid: f.uid, Gid: f.uid, ModTime: f.at, Typeflag: tar.TypeReg, Size: int64(len(f.data)), Format: tar.FormatPAX}
		if h.ModTime.IsZero() {
			h.ModTime = time.Unix(1, 0)
		}
		if name, to, ok := strings.Cut(f.name, " -> "); ok {
			h.Name, h.Linkname, h.Typeflag = name, to, tar.TypeSymlink
		} else if name, to, ok := strings.Cut(f.name, " = "); ok {
			h.Name, h.Linkname, h.Typeflag = name, to, tar.TypeLink
		} else if strings.HasSuffix(f.name, "/") {
			h.Typeflag = tar.TypeDir
			if h.Mode == 0 {
				h.Mode = 0o755
			}
		} else if h.Mode == 0 {
			h.Mode = 0o644
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, f.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

var roomy = bounds{bytes: 1 << 20, entries: 1000}

// tree makes a tree of an archive.
func tree(t testing.TB, b bounds, data []byte) (*Tree, error) {
	t.Helper()
	tr, err := newTree(t.TempDir(), b)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tr.Close() })
	err = tr.fill(t.Context(), bytes.NewReader(data), false, everything)
	tr.seal()
	return tr, err
}

func mustTree(t testing.TB, files ...f) *Tree {
	t.Helper()
	tr, err := tree(t, roomy, archive(t, files...))
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// base is an image the tests' Dockerfiles begin with.
var base = sandbox.Image{
	Name: "base", Kind: sandbox.ImageTar, Layers: []string{"sha256:base"},
	Config: sandbox.ImageConfig{Env: []string{"PATH=/bin", "FROMBASE=yes"}, Cmd: []string{"/bin/sh"}},
}

// evaluated parses a Dockerfile and evaluates the stages its target needs.
func evaluated(text string, args map[string]string, target string) (*dockerfile, []*stage, error) {
	d, err := parse(text)
	if err != nil {
		return nil, nil, err
	}
	p, err := d.resolve(environ(args), target, func(string, int) (sandbox.Image, error) { return base, nil })
	if err != nil {
		return d, nil, err
	}
	return d, p, nil
}
