package main

import (
	"archive/tar"
	"bytes"
	"encoding/base64"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

// TestDaemonEndsInAnUpload: a connection that breaks in the middle of an upload is
// told, and is not taken for a reader of our output that went.
func TestDaemonEndsInAnUpload(t *testing.T) {
	for _, line := range []string{"files put dev /x", "cp - dev:/x", "image import x -", "snapshot import -"} {
		sock := filepath.Join(t.TempDir(), "s")
		l, err := net.Listen("unix", sock)
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = io.ReadFull(c, make([]byte, 1<<20)) // the rest is never read
				_ = c.Close()
			}
		}()
		var out, errs bytes.Buffer
		c := &cli{name: "sandbox", in: endless{}, out: &out, err: &errs, getenv: func(string) string { return "" }}
		code := c.main(t.Context(), append([]string{"--host", "unix://" + sock}, strings.Fields(line)...))
		if code != exitTrouble || !strings.Contains(errs.String(), "(daemon_unreachable)") {
			t.Errorf("%s: exit %d, %q", line, code, &errs)
		}
		_ = l.Close()
	}
}

// TestLocalErrorsAreNotTheDaemons: what cannot be read on this machine is told as that.
func TestLocalErrorsAreNotTheDaemons(t *testing.T) {
	w := newWorld(t)
	w.ok("create", "--name", "dev")
	dir := t.TempDir()
	for _, line := range []string{"files put dev /x " + dir, "snapshot import " + dir} {
		code, _, errs := w.run("", strings.Fields(line)...)
		if code != exitTrouble || !strings.Contains(errs, "is a directory") || !strings.Contains(errs, "(local_file)") || strings.Contains(errs, "daemon") {
			t.Errorf("%s: exit %d, %q", line, code, errs)
		}
	}
}

// TestCopyTellsWhatItDoesNotCopy: nothing is left out, or comes out empty, in silence.
func TestCopyTellsWhatItDoesNotCopy(t *testing.T) {
	w := newWorld(t)
	w.ok("create", "--name", "dev")
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	if err := errors.Join(os.Mkdir(at("real"), 0o755), os.WriteFile(at("real/f"), []byte("content"), 0o644), os.Symlink("real", at("link")),
		syscall.Mkfifo(at("real/fifo"), 0o644), os.WriteFile(at("we:ird"), nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	cat := func(p string) string { return w.ok("files", "cat", "dev", p) }
	code, _, errs := w.run("", "cp", at("link"), "dev:/tmp/A") // what a link leads to
	if code != 0 || cat("/tmp/A/f") != "content" || strings.Count(errs, "left out 1 ") != 1 || !strings.Contains(errs, "real/fifo") {
		t.Errorf("a link to a directory with a FIFO: exit %d, %s", code, errs)
	}
	w.ok("cp", "/proc/self/status", "dev:/tmp/C")
	if out := cat("/tmp/C"); !strings.HasPrefix(out, "Name:") {
		t.Errorf("a file of /proc: %q", out)
	}
	w.ok("cp", at("we:ird"), "dev:/tmp/w") // the control: it has a slash before
	for line, want := range map[string]string{
		"cp " + at("real/fifo") + " dev:/tmp/F": "(not_a_file)",
		"cp /dev/null dev:/tmp/n":               "(not_a_file)",
		"cp /proc/self/mem dev:/tmp/m":          "(local_file)",
		"cp " + at("real/f") + " nosuch:/tmp/":  "(sandbox_not_found)",
		"cp we:ird dev:/tmp":                    "./we:ird",
	} {
		if code, _, errs := w.run("", strings.Fields(line)...); code != exitTrouble || !strings.Contains(errs, want) || strings.Contains(errs, "does not answer") {
			t.Errorf("%s: exit %d, %s; want %s", line, code, errs, want)
		}
	}
}

// TestCutCopyKeepsTheOldFile: an archive that breaks off leaves what was there.
func TestCutCopyKeepsTheOldFile(t *testing.T) {
	dir := t.TempDir()
	var buf bytes.Buffer
	tw := tar.NewWriter(&buf)
	if err := tw.WriteHeader(&tar.Header{Name: "f", Typeflag: tar.TypeReg, Mode: 0o644, Size: 7}); err != nil {
		t.Fatal(err)
	}
	if _, err := tw.Write([]byte("new one")); err != nil {
		t.Fatal(err)
	}
	half := buf.Len() - 1
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(dir, "f")
	if err := os.WriteFile(name, []byte("old"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		n    int
		want string
	}{{half, "old"}, {buf.Len(), "new one"}} {
		err := readTar(bytes.NewReader(buf.Bytes()[:tc.n]), dir, "f", "f", &leftOut{})
		b, rerr := os.ReadFile(name)
		if got, _ := os.ReadDir(dir); string(b) != tc.want || rerr != nil || len(got) != 1 || (err == nil) != (tc.want != "old") {
			t.Errorf("%d bytes: %q, %v, %v, %d files", tc.n, b, rerr, err, len(got))
		}
	}
}

// TestDownloadBreaksOff: a body cut short says what that may mean.
func TestDownloadBreaksOff(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-File-Info", base64.StdEncoding.EncodeToString([]byte(`{}`)))
		w.Header().Set("Content-Length", "100")
		_, _ = w.Write([]byte("half"))
	}))
	defer s.Close()
	for _, line := range []string{"files cat dev /x", "cp dev:/x -", "snapshot export dev", "image export dev"} {
		var out, errs bytes.Buffer
		c := &cli{name: "sandbox", in: strings.NewReader(""), out: &out, err: &errs, getenv: func(string) string { return "" }}
		code := c.main(t.Context(), append([]string{"--host", s.URL}, strings.Fields(line)...))
		if code != exitTrouble || !strings.Contains(errs.String(), "changed while it was read") || !strings.Contains(errs.String(), "(download_broken)") || out.String() != "half" {
			t.Errorf("%s: exit %d, %q %q", line, code, &out, &errs)
		}
	}
}

// TestLinksKeepTheOldFile: a link that cannot be made leaves what is in its
// place, also a file that is said to be a link to itself. The controls replace it.
func TestLinksKeepTheOldFile(t *testing.T) {
	for name, tc := range map[string]struct {
		h    tar.Header
		want string
	}{
		"to what is missing": {tar.Header{Name: "d/f", Typeflag: tar.TypeLink, Linkname: "d/gone"}, "old"},
		"to itself":          {tar.Header{Name: "d/f", Typeflag: tar.TypeLink, Linkname: "d/f"}, "old"},
		"control: hard":      {tar.Header{Name: "d/f", Typeflag: tar.TypeLink, Linkname: "d/g"}, "other"},
		"control: symbolic":  {tar.Header{Name: "d/f", Typeflag: tar.TypeSymlink, Linkname: "g"}, "other"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for f, text := range map[string]string{"f": "old", "g": "other"} {
				if err := os.WriteFile(filepath.Join(dir, f), []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			var buf bytes.Buffer
			tw := tar.NewWriter(&buf)
			if err := errors.Join(tw.WriteHeader(&tc.h), tw.Close()); err != nil {
				t.Fatal(err)
			}
			err := readTar(&buf, dir, "d", "", &leftOut{})
			b, rerr := os.ReadFile(filepath.Join(dir, "f"))
			if left, _ := os.ReadDir(dir); string(b) != tc.want || len(left) != 2 || rerr != nil || (err != nil) != (name == "to what is missing") {
				t.Errorf("%v: %q, %v, %d files", err, b, rerr, len(left))
			}
		})
	}
}
