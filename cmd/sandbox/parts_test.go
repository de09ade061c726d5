package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

func TestSplitRef(t *testing.T) {
	for arg, want := range map[string]inside{
		"dev:/a": {"dev", "/a"}, "dev:a": {"dev", "/a"}, "dev:": {"dev", "/"}, "sbabc:/a:b": {"sbabc", "/a:b"},
		"./dev:/a": {}, "/dev:/a": {}, "dev": {}, ":/a": {}, "-": {}, "../x:y": {}, "a/b:c": {},
	} {
		got, ok := splitRef(arg)
		if got != want || ok != (want != inside{}) {
			t.Errorf("%q: %v %v, want %v", arg, got, ok, want)
		}
	}
}

func TestPlace(t *testing.T) {
	for _, tc := range []struct {
		to            string
		exists, isDir bool
		base          string
		tree          bool
		want          placing
		bad           bool
	}{
		{to: "/tmp", exists: true, isDir: true, base: "f", want: placing{"/tmp", "f"}},
		{to: "/tmp/", exists: true, isDir: true, base: "d", tree: true, want: placing{"/tmp", "d"}},
		{to: "/tmp", exists: true, isDir: true, base: ".", tree: true, want: placing{"/tmp", ""}},
		{to: "/tmp/f", exists: true, base: "g", want: placing{"/tmp", "f"}},
		{to: "/tmp/f", base: "g", want: placing{"/tmp", "f"}},
		{to: "/tmp/new", base: "d", tree: true, want: placing{"/tmp", "new"}},
		{to: "/tmp/new", base: ".", tree: true, want: placing{"/tmp", "new"}},
		{to: "/tmp/new/", base: "d", tree: true, want: placing{"/tmp", "new"}},
		{to: "/tmp/new/", base: "f", bad: true},
		{to: "/tmp/f", exists: true, base: "d", tree: true, bad: true},
		{to: "/tmp/f/", exists: true, base: "g", bad: true},
	} {
		got, err := place(tc.to, tc.exists, tc.isDir, tc.base, tc.tree)
		if got != tc.want || (err != nil) != tc.bad {
			t.Errorf("%+v: %v, %v", tc, got, err)
		}
	}
}

// TestHostileArchive unpacks what a sandbox would send to write elsewhere.
func TestHostileArchive(t *testing.T) {
	type entry struct {
		name, link string
		kind       byte
	}
	for name, entries := range map[string][]entry{
		"dots":             {{"top/../../evil", "", tar.TypeReg}},
		"absolute":         {{"/evil", "", tar.TypeReg}},
		"other top":        {{"topper/evil", "", tar.TypeReg}},
		"through a link":   {{"top/out", "../..", tar.TypeSymlink}, {"top/out/evil", "", tar.TypeReg}},
		"through a chain":  {{"top/a", "..", tar.TypeSymlink}, {"top/b", "a/..", tar.TypeSymlink}, {"top/b/evil", "", tar.TypeReg}},
		"absolute link":    {{"top/out", "%DIR%", tar.TypeSymlink}, {"top/out/evil", "", tar.TypeReg}},
		"hard link":        {{"top/out", "/etc/passwd", tar.TypeLink}},
		"hard link dots":   {{"top/out", "top/../../secret", tar.TypeLink}},
		"dir over a link":  {{"top/out", "../..", tar.TypeSymlink}, {"top/out", "", tar.TypeDir}, {"top/out/evil", "", tar.TypeReg}},
		"file over a link": {{"top/evil", "../../evil", tar.TypeSymlink}, {"top/evil", "", tar.TypeReg}},
	} {
		t.Run(name, func(t *testing.T) {
			base := t.TempDir()
			dir := filepath.Join(base, "in", "here")
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(base, "secret"), []byte("s"), 0o600); err != nil {
				t.Fatal(err)
			}
			var buf bytes.Buffer
			tw := tar.NewWriter(&buf)
			for _, e := range append([]entry{{"top/", "", tar.TypeDir}}, entries...) {
				h := &tar.Header{Name: e.name, Linkname: strings.ReplaceAll(e.link, "%DIR%", base), Typeflag: e.kind, Mode: 0o644}
				if e.kind == tar.TypeReg {
					h.Size = 4
				}
				if err := tw.WriteHeader(h); err != nil {
					t.Fatal(err)
				}
				if e.kind == tar.TypeReg {
					if _, err := tw.Write([]byte("evil")); err != nil {
						t.Fatal(err)
					}
				}
			}
			if err := tw.Close(); err != nil {
				t.Fatal(err)
			}
			err := readTar(&buf, dir, "top", "top", &leftOut{})
			if _, serr := os.Lstat(filepath.Join(base, "evil")); serr == nil {
				t.Error("it wrote outside")
			}
			if _, serr := os.Lstat(filepath.Join(base, "in", "evil")); serr == nil {
				t.Error("it wrote beside")
			}
			if name == "file over a link" { // the control: harmless, and done
				b, rerr := os.ReadFile(filepath.Join(dir, "top", "evil"))
				if err != nil || rerr != nil || string(b) != "evil" {
					t.Errorf("%v, %v, %q", err, rerr, b)
				}
			} else if err == nil {
				t.Error("nothing was said")
			}
		})
	}
}

// TestCopyHoles: what is written is what was read, whatever of it is zeros, and a
// stream that breaks off is an error.
func TestCopyHoles(t *testing.T) {
	const block = 4096
	data := func(n int) []byte { return bytes.Repeat([]byte{7}, n) }
	zero := func(n int) []byte { return make([]byte, n) }
	for name, parts := range map[string][][]byte{
		"nothing": {}, "a byte": {data(1)}, "a zero": {zero(1)}, "zeros": {zero(100*block + 5)}, "data": {data(100*block + 5)},
		"hole within": {data(3), zero(40 * block), data(5)}, "hole last": {data(block), zero(17*block - 1)},
		"in turns": {zero(block), data(block), zero(block), data(block), zero(15 * block), data(1), zero(block)},
	} {
		want := bytes.Join(parts, nil)
		for _, broken := range []bool{false, true} {
			f, err := os.Create(filepath.Join(t.TempDir(), "f"))
			if err != nil {
				t.Fatal(err)
			}
			r := iotest.HalfReader(bytes.NewReader(want))
			if broken {
				r = io.MultiReader(r, iotest.ErrReader(io.ErrUnexpectedEOF))
			}
			if err := copyHoles(f, r); broken != errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("%s, broken off: %t: %v", name, broken, err)
			}
			got, err := os.ReadFile(f.Name())
			if err = errors.Join(err, f.Close()); err != nil || !broken && !bytes.Equal(got, want) {
				t.Errorf("%s: %d bytes read, other ones written (%d), %v", name, len(want), len(got), err)
			}
		}
	}
}

func TestTarKeepsWhatItShould(t *testing.T) {
	src, dst := filepath.Join(t.TempDir(), "src"), t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(filepath.Join(src, "ro", "deep"), 0o755))
	must(os.WriteFile(filepath.Join(src, "ro", "f"), []byte("x"), 0o640))
	must(os.Link(filepath.Join(src, "ro", "f"), filepath.Join(src, "hard")))
	must(os.Symlink("ro/f", filepath.Join(src, "soft")))
	old := time.Date(2020, 1, 2, 3, 4, 5, 0, time.UTC)
	must(os.Chtimes(filepath.Join(src, "ro", "f"), old, old))
	must(os.Chmod(filepath.Join(src, "ro"), 0o555))
	var buf bytes.Buffer
	must(writeTar(&buf, src, "copy", &leftOut{}))
	must(readTar(&buf, dst, "copy", "new", &leftOut{}))
	t.Cleanup(func() {
		_ = os.Chmod(filepath.Join(src, "ro"), 0o755)        // so that it can be removed
		_ = os.Chmod(filepath.Join(dst, "new", "ro"), 0o755) // so that it can be removed
	})
	info, err := os.Stat(filepath.Join(dst, "new", "ro", "f"))
	must(err)
	if info.Mode().Perm() != 0o640 || !info.ModTime().Equal(old) {
		t.Errorf("%v %v", info.Mode(), info.ModTime())
	}
	hard, err := os.Stat(filepath.Join(dst, "new", "hard"))
	must(err)
	if !os.SameFile(info, hard) {
		t.Error("the hard link became a copy")
	}
	if l, err := os.Readlink(filepath.Join(dst, "new", "soft")); err != nil || l != "ro/f" {
		t.Errorf("%q %v", l, err)
	}
	if d, err := os.Stat(filepath.Join(dst, "new", "ro")); err != nil || d.Mode().Perm() != 0o555 {
		t.Errorf("%v %v", d, err)
	}
}

func FuzzRename(f *testing.F) {
	f.Add("top/a", "top", "x")
	f.Add("../a", "top", "")
	f.Fuzz(func(t *testing.T, entry, top, name string) {
		if strings.ContainsAny(name, "/") || name == ".." || name == "." {
			return // never asked for
		}
		out, err := rename(entry, top, name)
		if err == nil && !filepath.IsLocal(out) {
			t.Errorf("%q leads to %q", entry, out)
		}
	})
}

func TestHelpAndManPages(t *testing.T) {
	w := newWorld(t)
	dir := filepath.Join(t.TempDir(), "man")
	w.ok("man", dir)
	pages, err := filepath.Glob(filepath.Join(dir, "*.1"))
	if err != nil || len(pages) < 30 {
		t.Errorf("%d pages, %v", len(pages), err)
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if out := w.ok("completion", shell); !strings.Contains(out, "sandbox") {
			t.Errorf("completion %s: %.80q", shell, out)
		}
	}
	c := &cli{name: "sandbox", out: &bytes.Buffer{}, err: &bytes.Buffer{}, in: strings.NewReader(""), getenv: func(string) string { return "" }}
	root := c.root()
	for _, cmd := range root.Commands() {
		for _, one := range append(cmd.Commands(), cmd) {
			if one.Hidden || one.HasSubCommands() {
				continue
			}
			if one.Short == "" || one.Example == "" || one.RunE == nil {
				t.Errorf("%s: without a short help, an example or an action", one.CommandPath())
			}
		}
	}
	if code, _, errs := w.run("", "exec", "dev"); code != 125 || !strings.Contains(errs, "usage: sandbox exec") {
		t.Errorf("%d %s", code, errs)
	}
	for line, words := range map[string][]string{
		"nonsense": {"unknown command", "run 'sandbox --help'"}, "imagee": {"did you mean image?", "run 'sandbox --help'"},
		"image nonsense": {"unknown command", "run 'sandbox image --help'"}, "-o json project agent lss": {"did you mean ls?", "run 'sandbox project agent --help'"},
	} {
		code, out, errs := w.run("", strings.Fields(line)...)
		for _, word := range append(words, "(unknown_command)") {
			if code != 125 || out != "" || !strings.Contains(errs, word) {
				t.Errorf("%s: %d %s%s; want %q", line, code, out, errs, word)
			}
		}
	}
	for _, line := range []string{"image", "image --help", "help image", "--help"} { // the control
		w.ok(strings.Fields(line)...)
	}
	if out := w.ok("__complete", "image", "rm", ""); !strings.Contains(out, "host") {
		t.Errorf("completion of images: %q", out)
	}
}
