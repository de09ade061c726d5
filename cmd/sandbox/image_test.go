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

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestImageCommands(t *testing.T) {
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	t.Setenv("HOME", t.TempDir())
	w := newWorld(t)
	out := w.ok("image", "pull", "registry.test/app:1")
	if !strings.HasPrefix(out, "registry.test/app:1  sha256:") {
		t.Errorf("pull: %q", out)
	}
	digest := strings.TrimSpace(w.ok("image", "pull", "-q", "--name", "app", "registry.test/app:1"))
	if !sandbox.ValidDigest(digest) || !strings.Contains(out, digest) {
		t.Errorf("pull -q: %q", digest)
	}
	code, _, errs := w.run("", "image", "pull", "registry.test/app:1")
	if code != 0 || !strings.Contains(errs, "resolved "+digest) || strings.Count(errs, "downloading") != 1 || !strings.Contains(errs, "done") {
		t.Errorf("progress: exit %d, %s", code, errs)
	}
	if out := w.ok("image", "tag", "app", "b:2"); out != "b:2  "+digest+"\n" {
		t.Errorf("tag: %q", out)
	}
	if out := w.ok("image", "push", "b:2", "registry.test/b:2"); !strings.Contains(out, "registry.test/b:2  "+digest) {
		t.Errorf("push: %q", out)
	}
	if out := w.ok("image", "export", "b:2"); out != digest {
		t.Errorf("export: %q", out)
	}
	file := filepath.Join(t.TempDir(), "x.tar")
	w.ok("image", "export", "-f", file, "b:2")
	if b, err := os.ReadFile(file); err != nil || string(b) != digest {
		t.Errorf("export -f: %q %v", b, err)
	}
	if out := w.ok("image", "prune"); !strings.Contains(out, "3 images removed, 2.93KiB freed") {
		t.Errorf("prune: %q", out)
	}
	for _, args := range [][]string{
		{"pull", "--user", "me", "a"},
		{"pull", "--password-stdin", "a"},
		{"pull", "A"},
		{"pull"},
		{"push", "a", "b", "c"},
		{"export", "--format", "zip", "host"},
		{"import", "x", "/nonexistent"},
		{"import", "x", t.TempDir()},
		{"tag", "a"},
		{"prune", "x"},
	} {
		if code, _, errs := w.run("", append([]string{"image"}, args...)...); code == 0 || errs == "" {
			t.Errorf("image %v: exit %d", args, code)
		}
	}
}

func TestPullPolicy(t *testing.T) {
	t.Setenv("HOME", t.TempDir())
	w := newWorld(t)
	pulls := 0
	w.m.Fail = func(method string) error {
		if method == "PullImage" {
			pulls++
		}
		return nil
	}
	for i, tc := range []struct {
		args  []string
		code  int
		pulls int
		errs  string
	}{
		{[]string{"--image", "app"}, exitTrouble, 0, "image_not_found"},
		{[]string{"--image", "registry.test/app:1", "--pull", "never"}, exitTrouble, 0, "image_not_found"},
		{[]string{"--image", "registry.test/app:1"}, 0, 1, ""},
		{[]string{"--image", "registry.test/app:1"}, 0, 0, ""}, // is here now
		{[]string{"--image", "registry.test/app:1", "--pull", "always"}, 0, 1, ""},
		{[]string{"--image", "registry.other/app:1"}, exitTrouble, 1, "registry_unreachable"},
		{[]string{"--image", "host", "--pull", "missing"}, 0, 0, ""},
		{[]string{"--pull", "always"}, 0, 0, ""}, // the daemon's default
		{[]string{"--pull", "perhaps"}, exitTrouble, 0, "use missing, always or never"},
	} {
		for _, verb := range []string{"run", "create"} {
			pulls = 0
			args := append([]string{verb}, tc.args...)
			if verb == "run" {
				args = append(args, "--rm", "--", "echo")
			} else if i == 2 {
				tc.pulls = 0 // run had it pulled
			}
			if code, _, errs := w.run("", args...); code != tc.code || pulls != tc.pulls || !strings.Contains(errs, tc.errs) {
				t.Errorf("%v: exit %d after %d pulls, %s; want %d after %d", args, code, pulls, errs, tc.code, tc.pulls)
			}
		}
	}
}

// TestImageCommand runs an image with entrypoint "echo" and cmd "hello".
func TestImageCommand(t *testing.T) {
	t.Setenv("HOME", t.TempDir())
	w := newWorld(t)
	w.ok("image", "pull", "-q", "--name", "app", "registry.test/app")
	for _, tc := range []struct {
		args []string
		want string
	}{
		{nil, "hello\n"},
		{[]string{"--", "other", "words"}, "other words\n"},
		{[]string{"--entrypoint", "echo", "--", "mine"}, "mine\n"},
		{[]string{"--entrypoint", "echo"}, "\n"},
		{[]string{"--entrypoint", "", "--", "echo", "bare"}, "bare\n"},
	} {
		if out := w.ok(append([]string{"run", "--rm", "--image", "app"}, tc.args...)...); out != tc.want {
			t.Errorf("%q: %q, want %q", tc.args, out, tc.want)
		}
	}
	if code, _, errs := w.run("", "run", "--rm", "--image", "app", "--entrypoint", ""); code != exitTrouble || !strings.Contains(errs, "argv is empty") {
		t.Errorf("nothing to run: exit %d, %s", code, errs)
	}
}

func TestDockerAuth(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("HOME", t.TempDir())
	t.Setenv("DOCKER_CONFIG", dir)
	ref, err := sandbox.ParseImageRef("registry.test:5000/app")
	if err != nil {
		t.Fatal(err)
	}
	var errs bytes.Buffer
	c := &cli{err: &errs, in: strings.NewReader("hush\n")}
	for config, user := range map[string]string{
		`{"auths":{"registry.test:5000":{"auth":"bWU6aHVzaA=="}}}`: "me", // me:hush
		`{"auths":{"registry.test":{"auth":"bWU6aHVzaA=="}}}`:      "",   // another one
		`{}`: "", `nonsense`: "",
	} {
		if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o600); err != nil {
			t.Fatal(err)
		}
		a, err := dockerAuth(c, ref)
		if err != nil || a.Empty() != (user == "") || a != nil && (a.Username != user || a.Password != "hush") {
			t.Errorf("%s: %v %v", config, a, err)
		}
	}
	if !strings.Contains(errs.String(), "going on without") {
		t.Errorf("a broken file is passed over in silence: %q", errs.String())
	}
	f := registryFlags{user: "you", passwordStdin: true, plain: []string{"registry.test:5000"}}
	if a, err := f.auth(c, ref); err != nil || a.Username != "you" || a.Password != "hush" || !f.plainWith(ref) {
		t.Errorf("%v %v", a, err)
	}
}

func TestPackLayout(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{"oci-layout": "{}", "index.json": "i", "blobs/sha256/a": "A", "other": "left out"} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755), os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, "blobs/sha256/b")); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := packLayout(dir, &b); err == nil {
		t.Error("a link that leads out was followed")
	}
	if err := os.Remove(filepath.Join(dir, "blobs/sha256/b")); err != nil {
		t.Fatal(err)
	}
	b.Reset()
	if err := packLayout(dir, &b); err != nil {
		t.Fatal(err)
	}
	var names []string
	for tr := tar.NewReader(&b); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name)
	}
	if !slices.Equal(names, []string{"oci-layout", "index.json", "blobs/sha256/a"}) {
		t.Error(names)
	}
}

func TestBars(t *testing.T) {
	var out bytes.Buffer
	p := (&cli{err: &out, getenv: os.Getenv}).progress(false)
	p.bars = true
	for n := int64(0); n <= 100; n += 50 {
		p.show(sandbox.ImageProgress{Status: sandbox.StepDownloading, Layer: "sha256:abcdefabcdefabcdef", Current: n, Total: 100})
	}
	p.show(sandbox.ImageProgress{Status: sandbox.StepDone, Layer: "sha256:abcdefabcdefabcdef", Current: 100, Total: 100})
	p.end()
	for _, want := range []string{"abcdefabcdef downloading [============            ]", "[========================]", "1 of 1 layers"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in %q", want, out.String())
		}
	}
}
