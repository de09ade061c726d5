//go:build root

package integration

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/sandboxd/sandboxd/image/imagetest"
	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// registry is Debian's docker-registry on this namespace's loopback.
type registry struct {
	host string
	dir  string
	cmd  *exec.Cmd
	log  *harness.Log
}

// The user of a protected registry; the hash is bcrypt's of the password.
const (
	registryUser     = "somebody"
	registryPassword = "secret"
	registryHash     = "$2b$04$v6KBRgmo8U0KqUCZuxcDq.o0z482OecX0HRLGTaSwsSBMvx8l/eTW"
)

// startRegistry starts a registry that ends with the test.
func startRegistry(t testing.TB, protected bool) *registry {
	t.Helper()
	bin, err := exec.LookPath("docker-registry")
	if err != nil {
		t.Fatal("no docker-registry: apt-get install docker-registry")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := &registry{host: l.Addr().String(), dir: t.TempDir(), log: &harness.Log{}}
	l.Close() // nobody else takes ports in this namespace
	_, port, _ := net.SplitHostPort(g.host)
	config := "version: 0.1\nlog: {level: warn}\nhttp: {addr: '0.0.0.0:" + port + "', secret: test}\nstorage: {filesystem: {rootdirectory: '" + g.dir + "/data'}, delete: {enabled: true}}\n"
	if protected {
		if err := os.WriteFile(g.dir+"/htpasswd", []byte(registryUser+":"+registryHash+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		config += "auth: {htpasswd: {realm: test, path: '" + g.dir + "/htpasswd'}}\n"
	}
	if err := os.WriteFile(g.dir+"/config.yml", []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	g.cmd = exec.Command(bin, "serve", g.dir+"/config.yml")
	g.cmd.Stdout, g.cmd.Stderr = g.log, g.log
	g.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := g.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.stop)
	if !testenv.Within(60*time.Second, func() bool {
		resp, err := http.Get("http://" + g.host + "/v2/")
		if err == nil {
			resp.Body.Close()
		}
		return err == nil
	}) {
		t.Fatalf("the registry does not answer:\n%s", g.log)
	}
	return g
}

func (g *registry) stop() {
	if g.cmd.ProcessState == nil {
		_ = g.cmd.Process.Kill()
		_ = g.cmd.Wait()
	}
}

// skopeo runs an image tool that is not ours.
func skopeo(t testing.TB, args ...string) string {
	t.Helper()
	cmd := exec.Command("skopeo", append([]string{"--insecure-policy", "--tmpdir", t.TempDir()}, args...)...)
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("skopeo %s: %v\n%s%s", strings.Join(args, " "), err, out, errs.String())
	}
	return string(out)
}

// layout is an OCI image layout being made of installed Debian packages.
type layout struct {
	t       testing.TB
	dir     string
	layers  []imagetest.Descriptor
	diffIDs []string
	digest  string // of the manifest
	bytes   int64  // of files
}

// The packages of the lowest layer, enough for a shell and its tools, and of
// the second.
var (
	basePackages = []string{
		"base-files", "bash", "coreutils", "dash", "debianutils", "findutils", "grep", "hostname", "libacl1", "libattr1", "libc-bin", "libc6",
		"libgcc-s1", "libgmp10", "libpcre2-8-0", "libselinux1", "libtinfo6", "sed",
	}
	pythonPackages = []string{"python3-minimal", "python3.11-minimal", "libpython3.11-minimal", "libexpat1", "zlib1g"}
)

func newLayout(t testing.TB) *layout {
	t.Helper()
	l := &layout{t: t, dir: filepath.Join(t.TempDir(), "layout")}
	if err := os.MkdirAll(filepath.Join(l.dir, "blobs/sha256"), 0o755); err != nil {
		t.Fatal(err)
	}
	return l
}

// makeLayout makes an image of four layers, of which the largest holds bulk
// bytes or somewhat more, in a new layout.
func makeLayout(t testing.TB, bulk int64) *layout {
	t.Helper()
	l := newLayout(t)
	l.shared("base", "gzip", func(tw *tar.Writer) {
		for _, link := range []string{"bin", "sbin", "lib", "lib64"} {
			l.put(tw, &tar.Header{Typeflag: tar.TypeSymlink, Name: link, Linkname: "usr/" + link, Mode: 0o777}, "")
		}
		l.packages(tw, basePackages, 1<<40)
		l.put(tw, &tar.Header{Typeflag: tar.TypeDir, Name: "etc/", Mode: 0o755}, "")
		l.put(tw, &tar.Header{Typeflag: tar.TypeReg, Name: "etc/passwd", Mode: 0o644}, "root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000::/srv:/bin/sh\n")
		l.put(tw, &tar.Header{Typeflag: tar.TypeReg, Name: "etc/group", Mode: 0o644}, "root:x:0:\napp:x:1000:\n")
		l.put(tw, &tar.Header{Typeflag: tar.TypeReg, Name: "etc/removed-later", Mode: 0o644}, "x")
	})
	l.shared("python", "zstd", func(tw *tar.Writer) { l.packages(tw, pythonPackages, 1<<40) })
	l.layer("gzip", func(tw *tar.Writer) { l.packages(tw, l.others(), bulk) })
	l.app("")
	l.seal()
	return l
}

// tinyLayout makes an image of one layer that is there to be moved, not to be
// run.
func tinyLayout(t testing.TB) *layout {
	t.Helper()
	l := newLayout(t)
	l.app(string(imagetest.Noise(1, 4<<20)))
	l.seal()
	return l
}

// app writes the highest layer.
func (l *layout) app(more string) {
	l.layer("gzip", func(tw *tar.Writer) {
		l.put(tw, &tar.Header{Typeflag: tar.TypeReg, Name: "etc/.wh.removed-later"}, "")
		l.put(tw, &tar.Header{Typeflag: tar.TypeReg, Name: "etc/more", Mode: 0o644}, more)
		l.put(tw, &tar.Header{Typeflag: tar.TypeDir, Name: "srv/", Mode: 0o755, Uid: 1000, Gid: 1000}, "")
		l.put(tw, &tar.Header{Typeflag: tar.TypeReg, Name: "srv/app", Mode: 0o755, Uid: 1000, Gid: 1000},
			"#!/bin/sh\necho \"hello $* from $(id -un) in $(pwd) with $GREETING\"\n")
		l.put(tw, &tar.Header{Typeflag: tar.TypeLink, Name: "srv/app-again", Linkname: "srv/app"}, "")
	})
}

// layers made once for all layouts, by name.
var sharedLayers = map[string]struct {
	blob   []byte
	layer  imagetest.Descriptor
	diffID string
	bytes  int64
}{}

// shared is layer for one that many layouts have: it is made once.
func (l *layout) shared(name, how string, fill func(*tar.Writer)) {
	made, ok := sharedLayers[name]
	if ok {
		if err := os.WriteFile(filepath.Join(l.dir, blobFile(made.layer.Digest)), made.blob, 0o644); err != nil {
			l.t.Fatal(err)
		}
		l.layers, l.diffIDs, l.bytes = append(l.layers, made.layer), append(l.diffIDs, made.diffID), l.bytes+made.bytes
		return
	}
	before := l.bytes
	l.layer(how, fill)
	made.layer, made.diffID, made.bytes = l.layers[len(l.layers)-1], l.diffIDs[len(l.diffIDs)-1], l.bytes-before
	var err error
	if made.blob, err = os.ReadFile(filepath.Join(l.dir, blobFile(made.layer.Digest))); err != nil {
		l.t.Fatal(err)
	}
	sharedLayers[name] = made
}

func blobFile(digest string) string { return "blobs/sha256/" + strings.TrimPrefix(digest, "sha256:") }

// others names every other installed package, the largest first.
func (l *layout) others() []string {
	out, err := exec.Command("dpkg-query", "-W", "-f", "${Installed-Size} ${Package}\n").Output()
	if err != nil {
		l.t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	number := func(s string) int { n, _ := strconv.Atoi(strings.Fields(s)[0]); return n }
	slices.SortStableFunc(lines, func(a, b string) int { return number(b) - number(a) })
	var names []string
	for _, line := range lines {
		name := strings.Fields(line)[1]
		if !slices.Contains(basePackages, name) && !slices.Contains(pythonPackages, name) && number(line) < 80_000 {
			names = append(names, name)
		}
	}
	return names
}

// packages writes the files of packages as they are installed here, until
// there are most bytes.
func (l *layout) packages(tw *tar.Writer, names []string, most int64) {
	done := map[string]bool{}
	begin := l.bytes
	for _, name := range names {
		out, err := exec.Command("dpkg", "-L", name).Output()
		if err != nil {
			l.t.Logf("package %s is not installed: left out", name)
			continue
		}
		for file := range strings.Lines(string(out)) {
			file = strings.TrimSpace(file)
			for _, merged := range []string{"/bin/", "/sbin/", "/lib/", "/lib64/"} {
				if strings.HasPrefix(file, merged) {
					file = "/usr" + file
				}
			}
			if !strings.HasPrefix(file, "/usr/") || done[file] || strings.HasPrefix(file, "/usr/share/doc/") {
				continue
			}
			done[file] = true
			l.host(tw, file)
			if l.bytes-begin >= most {
				return
			}
		}
	}
}

// host writes a file of this machine.
func (l *layout) host(tw *tar.Writer, path string) {
	info, err := os.Lstat(path)
	if err != nil {
		return // left out at its installation
	}
	link := ""
	if info.Mode()&os.ModeSymlink != 0 {
		if link, err = os.Readlink(path); err != nil {
			l.t.Fatal(err)
		}
	}
	h, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return // a socket
	}
	h.Name, h.Format = strings.TrimPrefix(path, "/"), tar.FormatPAX
	h.AccessTime, h.ChangeTime, h.Uname, h.Gname = time.Time{}, time.Time{}, "", ""
	if info.IsDir() {
		h.Name += "/"
	}
	if h.Typeflag != tar.TypeReg && h.Typeflag != tar.TypeDir && h.Typeflag != tar.TypeSymlink {
		return
	}
	if err := tw.WriteHeader(h); err != nil {
		l.t.Fatal(err)
	}
	if h.Typeflag != tar.TypeReg {
		return
	}
	f, err := os.Open(path)
	if err != nil {
		l.t.Fatal(err)
	}
	defer f.Close()
	n, err := io.Copy(tw, f)
	if err != nil {
		l.t.Fatal(err)
	}
	l.bytes += n
}

// put writes an entry of the test's own.
func (l *layout) put(tw *tar.Writer, h *tar.Header, content string) {
	h.Size, h.Format, h.ModTime = int64(len(content)), tar.FormatPAX, time.Unix(1700000000, 123456789)
	err := tw.WriteHeader(h)
	if err == nil {
		_, err = io.WriteString(tw, content)
	}
	if err != nil {
		l.t.Fatal(err)
	}
}

// layer writes one layer.
func (l *layout) layer(how string, fill func(*tar.Writer)) {
	f, err := os.Create(filepath.Join(l.dir, "layer"))
	if err != nil {
		l.t.Fatal(err)
	}
	outer, inner := sha256.New(), sha256.New()
	var z io.WriteCloser
	if how == "zstd" {
		z, err = zstd.NewWriter(io.MultiWriter(f, outer), zstd.WithEncoderLevel(zstd.SpeedFastest))
	} else {
		z, err = gzip.NewWriterLevel(io.MultiWriter(f, outer), gzip.BestSpeed)
	}
	if err != nil {
		l.t.Fatal(err)
	}
	tw := tar.NewWriter(io.MultiWriter(z, inner))
	fill(tw)
	size, err := int64(0), errors.Join(tw.Close(), z.Close())
	if err == nil {
		size, err = f.Seek(0, io.SeekCurrent)
	}
	name := hex.EncodeToString(outer.Sum(nil))
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), filepath.Join(l.dir, "blobs/sha256", name))
	}
	if err != nil {
		l.t.Fatal(err)
	}
	l.layers = append(l.layers, imagetest.Descriptor{MediaType: imagetest.OCILayer + "+" + how, Digest: "sha256:" + name, Size: size})
	l.diffIDs = append(l.diffIDs, "sha256:"+hex.EncodeToString(inner.Sum(nil)))
}

// seal writes configuration, manifest and index.
func (l *layout) seal() {
	blob := func(b []byte) imagetest.Descriptor {
		d := imagetest.DigestOf(b)
		if err := os.WriteFile(filepath.Join(l.dir, "blobs/sha256", strings.TrimPrefix(d, "sha256:")), b, 0o644); err != nil {
			l.t.Fatal(err)
		}
		return imagetest.Descriptor{Digest: d, Size: int64(len(b))}
	}
	cfg := blob(imagetest.JSON(map[string]any{
		"architecture": arch(), "os": "linux", "rootfs": map[string]any{"type": "layers", "diff_ids": l.diffIDs},
		"config": map[string]any{
			"Env": []string{"PATH=/usr/bin:/bin", "GREETING=hi"}, "User": "app", "WorkingDir": "/srv", "Entrypoint": []string{"/srv/app"}, "Cmd": []string{"world"},
			"Labels": map[string]string{"made-by": "a test"}, "ExposedPorts": map[string]any{"8080/tcp": map[string]any{}}, "StopSignal": "SIGINT",
		},
	}))
	cfg.MediaType = imagetest.OCIConfig
	m := blob(imagetest.JSON(map[string]any{"schemaVersion": 2, "mediaType": imagetest.OCIManifest, "config": cfg, "layers": l.layers}))
	m.MediaType = imagetest.OCIManifest
	m.Annotations = map[string]string{"org.opencontainers.image.ref.name": "1"}
	l.digest = m.Digest
	index := imagetest.JSON(map[string]any{"schemaVersion": 2, "mediaType": imagetest.OCIIndex, "manifests": []imagetest.Descriptor{m}})
	for name, b := range map[string][]byte{"index.json": index, "oci-layout": []byte(`{"imageLayoutVersion":"1.0.0"}`)} {
		if err := os.WriteFile(filepath.Join(l.dir, name), b, 0o644); err != nil {
			l.t.Fatal(err)
		}
	}
}

func arch() string {
	out, err := exec.Command("dpkg", "--print-architecture").Output()
	if err != nil {
		return "amd64"
	}
	return strings.TrimSpace(string(out))
}

// push sends a layout to a registry by a tool that is not ours.
func (l *layout) push(g *registry, ref string, more ...string) {
	l.t.Helper()
	args := append([]string{"copy", "--dest-tls-verify=false"}, more...)
	skopeo(l.t, append(args, "oci:"+l.dir+":1", "docker://"+g.host+"/"+ref)...)
}

// names lists a directory of the daemon's state.
func (d *daemon) names(t testing.TB, parts ...string) []string {
	t.Helper()
	entries, err := os.ReadDir(d.stateOf(parts...))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// imageFiles lists everything of images beneath the state directory.
func (d *daemon) imageFiles(t testing.TB) []string {
	t.Helper()
	var all []string
	for _, dir := range [][]string{
		{"volume", "layers"}, {"volume", "staging"}, {"images", "manifests"}, {"images", "configs"}, {"images", "blobs"}, {"images", "partial"}, {"images", "spool"},
	} {
		for _, n := range d.names(t, dir...) {
			all = append(all, filepath.Join(append(dir[1:], n)...))
		}
	}
	return all
}

// imagesGone waits until there is nothing but what was there before.
func (d *daemon) imagesGone(t testing.TB, before []string) {
	t.Helper()
	var now []string
	if !testenv.Within(30*time.Second, func() bool { now = d.imageFiles(t); return slices.Equal(now, before) }) {
		t.Errorf("of images there is left\n%s\nwhere there was\n%s", strings.Join(now, "\n"), strings.Join(before, "\n"))
	}
}

// peakRSS is the most memory a daemon ever had, in bytes.
func (d *daemon) peakRSS(t testing.TB) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.PID()))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmHWM:" {
			n, err := strconv.ParseInt(f[1], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n << 10
		}
	}
	t.Fatal("no VmHWM in the daemon's status")
	return 0
}
