package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/build/ignore"
)

// contextDir makes a directory of files; one whose name ends with / is one itself.
func contextDir(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, data := range files {
		p := filepath.Join(dir, name)
		in := filepath.Dir(p)
		if strings.HasSuffix(name, "/") {
			in = p
		}
		if err := os.MkdirAll(in, 0o750); err != nil {
			t.Fatal(err)
		}
		if in == p {
			continue
		}
		if err := os.WriteFile(p, []byte(data), 0o640); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestBuildCommand(t *testing.T) {
	w := newWorld(t)
	dir := contextDir(t, map[string]string{
		"Dockerfile": "FROM host\nCOPY a /\nRUN hello\n", "a": "A", "b": "B", ".dockerignore": "b\n",
		"other": "FROM host\nCOPY b /\n", "other.dockerignore": "a\n", "bad": "FROM host\nRUN fail\n",
	})
	code, out, errs := w.run("", "image", "build", "-t", "app", "-t", "app:2", dir)
	if code != 0 || !strings.Contains(out, "app  sha256:built") || !strings.Contains(out, "app:2  sha256:built") {
		t.Fatalf("%d %q %q", code, out, errs)
	}
	for _, s := range []string{"[0 1/3] FROM host", "[0 2/3] CACHED COPY a /", "hello\n"} {
		if !strings.Contains(errs, s) {
			t.Errorf("%q does not tell %q", errs, s)
		}
	}
	if out := w.ok("image", "build", "-q", dir); out != "sha256:built\n" {
		t.Errorf("quiet: %q", out)
	}
	if out := w.ok("image", "build", "-o", "json", dir); !strings.Contains(out, `"type":"image"`) || !strings.Contains(out, `"type":"step"`) {
		t.Errorf("JSON: %q", out)
	}
	for _, c := range []struct {
		args  []string
		stdin string
		tells string // empty: it works
	}{
		{args: []string{"-f", filepath.Join(dir, "other"), dir}}, // its own ignore file lets b in
		{args: []string{"-f", "-", dir}, stdin: "FROM host\nCOPY a /\n"},
		{args: []string{"-f", "-", dir}, stdin: "FROM host\nCOPY b /\n", tells: "build_step_failed"}, // left out
		{args: []string{"-f", filepath.Join(dir, "bad"), dir}, tells: "build_step_failed"},
		{args: []string{"-f", filepath.Join(dir, "none"), dir}, tells: "name the Dockerfile with -f"},
		{args: []string{t.TempDir()}, tells: "name the Dockerfile with -f"},
		{args: []string{filepath.Join(dir, "a")}, tells: "not a directory"},
		{args: []string{filepath.Join(dir, "nothing")}, tells: "no such file"},
		{args: []string{"-t", "Bad Name", dir}, tells: "invalid_image_name"},
		{args: []string{"--network", "host", dir}, tells: "invalid_network"},
		{args: []string{"--network", "open", "--dns", "9.9.9.9", "--memory", "1g", "--cpus", "2", "--build-arg", "A=b", "--timeout", "1m", dir}},
		{args: []string{"--dns", "x", dir}, tells: "--dns"},
		{args: []string{"--build-arg", "=b", dir}, tells: "--build-arg"},
		{args: []string{"--memory", "1", dir}, tells: "invalid_limits"},
		{args: nil, tells: "usage"},
	} {
		code, _, errs := w.run(c.stdin, append([]string{"image", "build"}, c.args...)...)
		if (code == 0) != (c.tells == "") || !strings.Contains(errs, c.tells) {
			t.Errorf("image build %q: %d %q, want %q", c.args, code, errs, c.tells)
		}
	}
	if out := w.ok("image", "build", "prune", "--keep", "3"); !strings.Contains(out, "steps forgotten") {
		t.Errorf("prune: %q", out)
	}
	if n, err := w.m.BuildCache(t.Context()); err != nil || n.Steps != 3 {
		t.Errorf("%d steps are left, %v", n.Steps, err)
	}
}

// TestContextArchive: what is left out is not sent, and directories that hold
// what is sent are, as they are.
func TestContextArchive(t *testing.T) {
	dir := contextDir(t, map[string]string{"a": "1", "d/x": "2", "d/y": "3", "d/deep/z": "4", "out/1": "5", "out/keep/me": "6", "empty/": "", ".git/config": "7"})
	if err := os.Symlink("a", filepath.Join(dir, "l")); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(filepath.Join(dir, "a"), filepath.Join(dir, "z-hard")); err != nil {
		t.Fatal(err)
	}
	for rules, want := range map[string][]string{
		"":                          {".git/", ".git/config", "a", "d/", "d/deep/", "d/deep/z", "d/x", "d/y", "empty/", "l -> a", "out/", "out/1", "out/keep/", "out/keep/me", "z-hard = a"},
		".git\nout\n!out/keep\nd/x": {"a", "d/", "d/deep/", "d/deep/z", "d/y", "empty/", "l -> a", "out/", "out/keep/", "out/keep/me", "z-hard = a"},
		"*\n!d/deep":                {"d/", "d/deep/", "d/deep/z"},
		"*":                         nil,
	} {
		r, err := ignore.Read(strings.NewReader(rules))
		if err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if err := writeContext(&b, dir, r); err != nil {
			t.Fatal(err)
		}
		var got []string
		for tr := tar.NewReader(&b); ; {
			h, err := tr.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			s := h.Name
			switch h.Typeflag {
			case tar.TypeSymlink:
				s += " -> " + h.Linkname
			case tar.TypeLink:
				s += " = " + h.Linkname
			case tar.TypeDir:
				if h.Mode != 0o750 {
					t.Errorf("%s has mode %o", h.Name, h.Mode)
				}
			}
			got = append(got, s)
		}
		slices.Sort(got)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("with %q (-want +got):\n%s", rules, diff)
		}
	}
}
