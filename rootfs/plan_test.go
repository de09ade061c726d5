package rootfs

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

const testID = sandbox.ID("sbaaaaaaaaaaaa")

func digestN(n int) string { return fmt.Sprintf("%s%064x", digestPrefix, n) }

func layersN(n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = digestN(i)
	}
	return out
}

func TestPlanOverlay(t *testing.T) {
	p, err := planOverlay(testID, layersN(2))
	if err != nil {
		t.Fatal(err)
	}
	want := []linux.MountParam{
		{Key: "lowerdir+", Value: "/b/layers/" + fmt.Sprintf("%064x", 1) + "/root"},
		{Key: "lowerdir+", Value: "/b/layers/" + fmt.Sprintf("%064x", 0) + "/root"},
		{Key: "upperdir", Value: "/b/sandboxes/sbaaaaaaaaaaaa/upper"},
		{Key: "workdir", Value: "/b/sandboxes/sbaaaaaaaaaaaa/work"},
		{Key: "redirect_dir", Value: "on"},
		{Key: "metacopy", Value: "off"},
		{Key: "index", Value: "off"},
		{Key: "xino", Value: "off"},
		{Key: "volatile"},
	}
	if d := cmp.Diff(want, p.params("/b")); d != "" {
		t.Error(d)
	}
	for _, par := range p.params("/proc/self/fd/123456") {
		if len(par.Value) > 255 { // what fsconfig takes
			t.Errorf("%s is %d bytes long", par.Key, len(par.Value))
		}
	}
	data, err := p.data("/b", []int{8, 9})
	if err != nil {
		t.Fatal(err)
	}
	if want := "lowerdir=8:9,upperdir=/b/sandboxes/sbaaaaaaaaaaaa/upper,workdir=/b/sandboxes/sbaaaaaaaaaaaa/work,redirect_dir=on,metacopy=off,index=off,xino=off,volatile"; data != want {
		t.Errorf("data\n%s, want\n%s", data, want)
	}
}

func TestPlanOverlayBounds(t *testing.T) {
	for _, n := range []int{0, 501} {
		if _, err := planOverlay(testID, layersN(n)); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%d layers: %v, want ErrInvalid", n, err)
		}
	}
	for _, bad := range []string{"", "sha256:", "sha256:../..", "../x", digestN(1) + "0", strings.ToUpper(digestN(10)), "sha512:" + digestN(1)[7:], digestN(1)[7:]} {
		if _, err := planOverlay(testID, []string{bad}); sandbox.CodeOf(err) != "invalid_digest" {
			t.Errorf("digest %q: %v", bad, err)
		}
	}
	for _, bad := range []string{"upper:", "upper:../..", "upper:" + strings.Repeat("A", 26), "upper:" + strings.Repeat("a", 25), "upper:" + strings.Repeat("a", 27), "upper:" + strings.Repeat("1", 26), "upper-" + strings.Repeat("a", 26)} {
		if _, err := planOverlay(testID, []string{bad}); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("layer %q: %v", bad, err)
		}
	}
	p, err := planOverlay(testID, layersN(500))
	if err != nil {
		t.Fatal(err)
	}
	fds := make([]int, 500)
	for i := range fds {
		fds[i] = 99000 + i // a daemon with many descriptors open
	}
	if _, err := p.data("/proc/self/fd/98999", fds); err != nil {
		t.Errorf("500 layers do not fit: %v", err)
	}
	for i := range fds {
		fds[i] = 99000000 + i
	}
	if _, err := p.data("/proc/self/fd/98999", fds); !errors.Is(err, sandbox.ErrUnsupported) {
		t.Errorf("an overlong string passed: %v", err)
	}
}

// TestLayerNames: both forms have a directory of their own, and it tells the
// name again.
func TestLayerNames(t *testing.T) {
	seen := map[string]bool{}
	for _, name := range []string{digestN(5), NewUpperLayer(), NewUpperLayer()} {
		dir, err := parseLayer(name)
		if err != nil || seen[dir] {
			t.Fatalf("%s lies in %q, %v", name, dir, err)
		}
		seen[dir] = true
		if back, ok := layerName(dir); !ok || back != name {
			t.Errorf("%s tells %q", dir, back)
		}
	}
	for _, dir := range []string{"", "upper-", "upper-x", "root", "layer.json"} {
		if name, ok := layerName(dir); ok {
			t.Errorf("%q is taken for %s", dir, name)
		}
	}
	mixed := "upper:" + strings.Repeat("a", 26)
	p, err := planOverlay(testID, []string{digestN(1), mixed})
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"layers/upper-" + strings.Repeat("a", 26) + "/upper", "layers/" + fmt.Sprintf("%064x", 1) + "/root"}, p.lowers); d != "" {
		t.Error(d)
	}
}

func TestVolumeSize(t *testing.T) {
	const g = 1 << 30
	for _, c := range []struct {
		asked, free, want int64
		class             error
	}{
		{0, 100 * g, 20 * g, nil},
		{0, 10 * g, 5 * g, nil},
		{0, 40*g + 5, 20 * g, nil},
		{0, g, 0, sandbox.ErrExhausted},
		{0, 0, 0, sandbox.ErrExhausted},
		{5 * g, 6 * g, 5 * g, nil},
		{5*g + 1, 6*g + 1, 5 * g, nil},
		{6 * g, 6 * g, 0, sandbox.ErrExhausted},
		{1 << 20, 6 * g, 0, sandbox.ErrInvalid},
		{-1, 6 * g, 0, sandbox.ErrInvalid},
	} {
		got, err := volumeSize(c.asked, c.free)
		if got != c.want || !errors.Is(err, c.class) {
			t.Errorf("volumeSize(%d, %d) = %d, %v; want %d, %v", c.asked, c.free, got, err, c.want, c.class)
		}
	}
}

// TestProjectIDs: ids in use, and ids that still count something, are never
// handed out; freed ones are used again.
func TestProjectIDs(t *testing.T) {
	counted := map[uint32]uint64{firstProject + 1: 1}
	p := &projectIDs{used: map[uint32]bool{firstProject: true}, usage: func(id uint32) (uint64, uint64, error) { return 0, counted[id], nil }}
	take := func(want uint32) {
		t.Helper()
		if got, err := p.take(); err != nil || got != want {
			t.Errorf("took %#x, %v; want %#x", got, err, want)
		}
	}
	take(firstProject + 2)
	take(firstProject + 3)
	p.free(firstProject + 2)
	take(firstProject + 2)
	delete(counted, firstProject+1)
	take(firstProject + 1)
	// A second store on the same filesystem never takes the same.
	other := &projectIDs{first: firstProject + maxProjects, used: map[uint32]bool{}, usage: p.usage}
	if got, err := other.take(); err != nil || got != firstProject+maxProjects {
		t.Errorf("a second store took %#x, %v", got, err)
	}
	p.usage = func(uint32) (uint64, uint64, error) { return 1, 0, nil }
	if _, err := p.take(); !errors.Is(err, sandbox.ErrExhausted) {
		t.Errorf("took an id where all count something: %v", err)
	}
}

// fakeHost is the root of a host that shows some things and hides others.
func fakeHost(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	write := func(name string, mode os.FileMode, text string) {
		t.Helper()
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	link := func(target, name string) {
		t.Helper()
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(target, path); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{"bin", "sbin", "lib", "lib64"} {
		link("usr/"+d, d)
	}
	write("etc/shadow", 0o640, "SECRET")
	write("etc/passwd", 0o644, "SECRET:x:0:0::/:/bin/sh")
	write("etc/machine-id", 0o444, "SECRET")
	write("etc/resolv.conf", 0o644, "nameserver SECRET")
	write("etc/hosts", 0o644, "10.0.0.1 SECRET")
	write("etc/ssh/ssh_host_rsa_key", 0o600, "SECRET")
	write("etc/ssh/ssh_config", 0o644, "SECRET")
	write("etc/ssl/private/key.pem", 0o600, "SECRET")
	write("etc/ssl/certs/private.pem", 0o600, "SECRET")
	write("etc/ssl/certs/ca-certificates.crt", 0o644, "PUBLIC")
	write("etc/systemd/system/x.service", 0o644, "SECRET")
	write("etc/cron.d/job", 0o644, "SECRET")
	write("etc/app/config", 0o644, "SECRET")
	write("etc/java-17-openjdk/jmxremote.password", 0o600, "SECRET")
	write("etc/java-17-openjdk/security/java.security", 0o644, "PUBLIC")
	write("etc/python3.11/closed/x.py", 0o644, "SECRET")
	if err := os.Chmod(filepath.Join(root, "etc/python3.11/closed"), 0o750); err != nil {
		t.Fatal(err)
	}
	write("etc/python3.11/sitecustomize.py", 0o644, "PUBLIC")
	write("etc/ld.so.cache", 0o644, "PUBLIC")
	write("etc/services", 0o644, "PUBLIC")
	write("etc/magic", 0o640, "SECRET")
	write("root/.ssh/id_rsa", 0o600, "SECRET")
	write("home/op/notes", 0o644, "SECRET")
	write("var/lib/app/db", 0o644, "SECRET")
	// Links are copied as links: what they name on the host is not read.
	link("/home/op/notes", "etc/protocols")
	link("/usr/bin/vim.basic", "etc/alternatives/vim")
	link("/root/.ssh/id_rsa", "etc/ssl/certs/link.pem")
	return root
}

func TestPlanHost(t *testing.T) {
	p, err := planHost(fakeHost(t))
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]hostEntry{}
	public := 0
	for _, e := range p.entries {
		name := strings.TrimSuffix(e.hdr.Name, "/")
		if _, twice := got[name]; twice {
			t.Errorf("%s twice", name)
		}
		got[name] = e
		if strings.Contains(string(e.data), "SECRET") {
			t.Errorf("%s carries a secret: %q", name, e.data)
		}
		if string(e.data) == "PUBLIC" {
			public++
		}
	}
	if public != 5 {
		t.Errorf("%d public files were copied, want 5", public)
	}
	for name, kind := range map[string]byte{
		"bin": tar.TypeSymlink, "lib64": tar.TypeSymlink, "etc/alternatives/vim": tar.TypeSymlink,
		"etc/protocols": tar.TypeSymlink, "usr": tar.TypeDir, "tmp": tar.TypeDir, "home/user": tar.TypeDir,
		"etc/passwd": tar.TypeReg, "etc/resolv.conf": tar.TypeReg, "etc/services": tar.TypeReg,
	} {
		if e, ok := got[name]; !ok || e.hdr.Typeflag != kind {
			t.Errorf("%s: there %v, kind %q; want kind %q", name, ok, e.hdr.Typeflag, kind)
		}
	}
	for _, name := range []string{"etc/shadow", "etc/ssh", "etc/ssh/ssh_config", "etc/ssl/private", "etc/app", "etc/systemd", "root/.ssh", "home/op", "lib32", "etc/magic", "etc/python3.11/closed"} {
		if _, ok := got[name]; ok {
			t.Errorf("%s is in the plan", name)
		}
	}
	if got["tmp"].hdr.Mode != 0o1777 || got["home/user"].hdr.Uid != 1000 {
		t.Errorf("tmp %o, home/user of %d", got["tmp"].hdr.Mode, got["home/user"].hdr.Uid)
	}
	// The control: what the filter removes is really there to be copied.
	if err := os.Chmod(filepath.Join(p.root, "etc/magic"), 0o644); err != nil {
		t.Fatal(err)
	}
	if p, err = planHost(p.root); err != nil || !p.taken["etc/magic"] {
		t.Errorf("etc/magic, open to everybody, is not copied (%v)", err)
	}
}

func TestPlanHostUnpacks(t *testing.T) {
	p, err := planHost(fakeHost(t))
	if err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() != 0 {
		t.Skip("sets owners of files: run as root (make test-root)")
	}
	var digests []string
	for range 2 {
		var buf bytes.Buffer
		if err := p.writeTar(&buf); err != nil {
			t.Fatal(err)
		}
		_, info, err := unpackTo(t, &buf, importLimits{bytes: 1 << 20, files: 1000})
		if err != nil {
			t.Fatal(err)
		}
		digests = append(digests, info.Digest)
	}
	if digests[0] != digests[1] {
		t.Error("the same host gave two digests")
	}
}

func TestPlanHostUnmerged(t *testing.T) {
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := planHost(root); sandbox.CodeOf(err) != "host_not_merged" {
		t.Errorf("bin a directory: %v", err)
	}
	if err := os.Remove(filepath.Join(root, "bin")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("opt/bin", filepath.Join(root, "bin")); err != nil {
		t.Fatal(err)
	}
	if _, err := planHost(root); sandbox.CodeOf(err) != "host_not_merged" {
		t.Errorf("bin elsewhere: %v", err)
	}
}

func TestBindRoot(t *testing.T) {
	roots := []string{"/srv/data", "/home"}
	for path, want := range map[string]string{
		"/srv/data": "/srv/data .", "/srv/data/a/b": "/srv/data a/b", "/home/x": "/home x",
		"/srv": "", "/srv/database": "", "/": "", "/etc": "", "/homes/x": "",
	} {
		got := ""
		if root, rest, ok := bindRoot(roots, path); ok {
			got = root + " " + rest
		}
		if got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
	if _, _, ok := bindRoot(nil, "/srv"); ok {
		t.Error("a path beneath none")
	}
}
