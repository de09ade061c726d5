//go:build root

package escape

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// entry is one member of a hostile layer.
type entry struct {
	tar.Header
	data string
}

func dir(name string) entry {
	return entry{Header: tar.Header{Name: name + "/", Typeflag: tar.TypeDir, Mode: 0o755}}
}

func link(name, to string) entry {
	return entry{Header: tar.Header{Name: name, Linkname: to, Typeflag: tar.TypeSymlink, Mode: 0o777}}
}

func file(name, data string) entry {
	return entry{Header: tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(data))}, data: data}
}

func pack(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		if err := w.WriteHeader(&e.Header); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(e.data)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// imageConfig is what an image says of the commands run in it.
type imageConfig struct {
	User, WorkingDir string
	Env, Cmd         []string
	Volumes          map[string]struct{} `json:",omitempty"`
	Labels           map[string]string   `json:",omitempty"`
}

// ociImage imports an image of one layer by way of an OCI layout, so that the
// image's own configuration counts. Busybox and its shell are added.
func ociImage(t testing.TB, d *harness.Daemon, name string, config imageConfig, entries ...entry) error {
	t.Helper()
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Fatal("no /bin/busybox: apt-get install busybox-static")
	}
	layer := pack(t, append([]entry{
		dir("bin"), file("bin/busybox", string(busybox)), link("bin/sh", "busybox"), link("bin/cat", "busybox"),
	}, entries...)...)
	blobs := map[string][]byte{}
	put := func(b []byte) map[string]any {
		sum := sha256.Sum256(b)
		digest := hex.EncodeToString(sum[:])
		blobs["blobs/sha256/"+digest] = b
		return map[string]any{"digest": "sha256:" + digest, "size": len(b)}
	}
	marshal := func(v any) []byte {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	l := put(layer)
	l["mediaType"] = "application/vnd.oci.image.layer.v1.tar"
	c := put(marshal(map[string]any{
		"architecture": "amd64", "os": "linux", "config": config,
		"rootfs": map[string]any{"type": "layers", "diff_ids": []any{l["digest"]}},
	}))
	c["mediaType"] = "application/vnd.oci.image.config.v1+json"
	m := put(marshal(map[string]any{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": c, "layers": []any{l},
	}))
	m["mediaType"] = "application/vnd.oci.image.manifest.v1+json"
	blobs["index.json"] = marshal(map[string]any{"schemaVersion": 2, "manifests": []any{m}})
	blobs["oci-layout"] = []byte(`{"imageLayoutVersion":"1.0.0"}`)
	var archive []entry
	for name, b := range blobs {
		archive = append(archive, file(name, string(b)))
	}
	_, err = d.ImportImage(t.Context(), name, bytes.NewReader(pack(t, archive...)))
	return err
}

// secret makes a file of the host's that no sandbox may read, and returns its
// path and content.
func secret(t testing.TB) (path, text string) {
	t.Helper()
	text = "canary of the host " + strconv.Itoa(os.Getpid())
	dir, err := os.MkdirTemp("/var/tmp", "sandboxd-canary-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path = filepath.Join(dir, "canary")
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
		t.Fatal(err)
	}
	return path, text
}

// TestImageWithLinkedDevices starts images whose /dev, /proc and /sys hold
// links to what a runtime masks or writes (CVE-2025-31133, CVE-2025-52565,
// CVE-2025-52881, CVE-2023-27561). The control is an image without the links:
// what is masked and read-only there is so here.
func TestImageWithLinkedDevices(t *testing.T) {
	d := harness.Install(t, "")
	const look = `
stat() { busybox stat -c '%n %F %t:%T' "$1"; }
for f in /dev/null /dev/zero /dev/full /dev/tty /dev/ptmx /dev/pts/ptmx; do stat $f; done
busybox readlink /dev/console; for d in /dev /dev/pts /proc /sys; do busybox stat -f -c "$d %T" $d; done
busybox readlink -f /proc; busybox readlink -f /sys
for f in /proc/sys/kernel/core_pattern /proc/sysrq-trigger /proc/sys/kernel/hostname /proc/sys/vm/drop_caches /sys/kernel/uevent_helper; do
  (echo probe > $f) 2>/dev/null && echo "wrote $f" || echo "refused $f"
done
for f in /proc/kcore /proc/keys /proc/timer_list /proc/sched_debug /proc/scsi; do
  busybox test -e $f && busybox head -c 64 $f 2>/dev/null | busybox wc -c; done
busybox sed 's/^Name:.*/status/;q' /proc/self/status`
	images := map[string][]entry{
		"plain":         nil,
		"null-to-core":  {dir("dev"), link("dev/null", "/proc/sys/kernel/core_pattern")},
		"null-to-sysrq": {dir("dev"), link("dev/null", "../proc/sysrq-trigger"), link("dev/zero", "/proc/sys/kernel/core_pattern")},
		"console":       {dir("dev"), link("dev/console", "/proc/sys/kernel/core_pattern"), link("dev/ptmx", "/proc/sysrq-trigger"), link("dev/tty", "/etc/x")},
		"pts-directory": {dir("dev"), link("dev/pts", "/proc/sys/kernel"), link("dev/shm", "/proc/sys"), link("dev/mqueue", "/sys"), link("dev/fd", "/")},
		"files-in-proc": {dir("proc"), dir("proc/self"), file("proc/self/status", "Name:\tforged\n"), dir("proc/sys"), link("proc/sys/kernel", "/etc"), dir("sys"), link("sys/kernel", "/etc")},
	}
	want := ""
	before, err := os.ReadFile("/proc/sys/kernel/core_pattern")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"plain", "null-to-core", "null-to-sysrq", "console", "pts-directory", "files-in-proc"} {
		if err := ociImage(t, d, name, imageConfig{}, images[name]...); err != nil {
			t.Fatalf("import %s: %v", name, err)
		}
		sb := d.New(t, sandbox.Spec{Name: name, Image: name, Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkOff}})
		got := d.Sh(t, string(sb.ID), look)
		if name == "plain" {
			want = got
			for _, line := range []string{"/dev/null character special file 1:3", "refused /proc/sys/kernel/core_pattern", "refused /proc/sysrq-trigger", "/proc proc"} {
				if !strings.Contains(got, line) {
					t.Errorf("the control has no line %q:\n%s", line, got)
				}
			}
		} else if got != want {
			t.Errorf("image %s:\n%s\nwant, as in an image without links:\n%s", name, got, want)
		}
	}
	if after, err := os.ReadFile("/proc/sys/kernel/core_pattern"); err != nil || !bytes.Equal(before, after) {
		t.Errorf("the host's core_pattern was %q, is %q, %v", before, after, err)
	}
}

// TestImageWhoseRootIsLinks starts images in which a directory that is mounted
// on is itself a link (CVE-2019-19921, CVE-2023-27561): each is refused.
func TestImageWhoseRootIsLinks(t *testing.T) {
	d := harness.Install(t, "")
	for _, name := range []string{"proc", "sys", "dev", "etc", "tmp"} {
		for _, to := range []string{"/", "bin", "../../../..", "/bin/../.."} {
			image := fmt.Sprintf("%s-%x", name, to)
			err := ociImage(t, d, image, imageConfig{}, link(name, to))
			if err == nil {
				_, err = d.Create(t.Context(), sandbox.Spec{Image: image}, "")
			}
			if code := codeOf(err); code != "image_bad_path" {
				t.Errorf("/%s -> %s: %v; want image_bad_path", name, to, err)
			}
		}
		image := name + "-sound"
		if err := ociImage(t, d, image, imageConfig{}, dir(name)); err != nil {
			t.Fatal(err)
		}
		d.New(t, sandbox.Spec{Image: image}) // the control
	}
}

func codeOf(err error) string {
	if e, ok := errors.AsType[*sandbox.Error](err); ok {
		return e.Code
	}
	return ""
}

// TestImageVolumesNameHostPaths starts images whose VOLUME entries climb out
// of the root (CVE-2022-23648): nothing of the host's appears inside.
func TestImageVolumesNameHostPaths(t *testing.T) {
	d := harness.Install(t, "")
	canary, text := secret(t)
	volumes := map[string]struct{}{}
	for _, v := range []string{filepath.Dir(canary), "/../../../../../.." + filepath.Dir(canary), "/data/../../../../.." + filepath.Dir(canary), "/jump"} {
		volumes[v] = struct{}{}
	}
	err := ociImage(t, d, "volumes", imageConfig{Volumes: volumes}, link("jump", filepath.Dir(canary)))
	if err != nil {
		t.Fatal(err)
	}
	d.New(t, sandbox.Spec{Name: "s", Image: "volumes"})
	if got := d.Sh(t, "s", "busybox find / -xdev -name canary -type f 2>/dev/null; cat "+canary+" /jump/canary 2>/dev/null || :"); strings.Contains(got, text) || got != "" {
		t.Errorf("inside: %q", got)
	}
	// Controls: the probe finds a file of that name inside, and the host has the canary.
	if got := d.Sh(t, "s", "mkdir -p /w 2>/dev/null || busybox mkdir -p /w; echo in >/w/canary; busybox find / -xdev -name canary -type f"); got != "/w/canary" {
		t.Errorf("the probe finds %q, want /w/canary", got)
	}
	if b, err := os.ReadFile(canary); err != nil || string(b) != text {
		t.Fatalf("the canary: %q, %v", b, err)
	}
}

// TestUsersOutOfRange runs commands as users that wrap, are negative or junk
// (CVE-2024-40635): each is refused, none becomes root. The control is a uid
// in range.
func TestUsersOutOfRange(t *testing.T) {
	d := harness.Install(t, "")
	bad := []string{
		"4294967296", "4294967295", "-1", "2147483648", "65536", "65537", "0x0", "1e3", "+0", "4294967296:0", "1000:4294967296",
		"1000:-1", "18446744073709551616", "99999999999999999999", "nobody:", "1000:junk", "no-such-user", "\u0660", "0\t", "root\r",
	}
	d.New(t, sandbox.Spec{Name: "s"})
	uid := func(ref, user string) (string, error) {
		r, err := d.Try(t.Context(), ref, sandbox.ProcessSpec{Argv: []string{"sh", "-c", `sed -n 's/^Uid:\t\([0-9]*\).*/\1/p' /proc/self/status`}, User: user})
		if err == nil && r.Exit.Code != 0 {
			err = fmt.Errorf("exit %d: %s", r.Exit.Code, r.Stderr)
		}
		return strings.TrimSpace(r.Stdout), err
	}
	if got, err := uid("s", "1000"); err != nil || got != "1000" {
		t.Fatalf("the control, uid 1000: %q, %v", got, err)
	}
	for _, user := range bad {
		if got, err := uid("s", user); err == nil {
			t.Errorf("user %q ran as %q", user, got)
		}
		image := "user-" + hex.EncodeToString([]byte(user))
		if len(image) > 60 {
			image = image[:60]
		}
		if err := ociImage(t, d, image, imageConfig{User: user, Cmd: []string{"/bin/sh"}}); err != nil {
			continue
		}
		sb, err := d.Create(t.Context(), sandbox.Spec{Image: image}, "")
		if err != nil {
			continue
		}
		r, err := d.Try(t.Context(), string(sb.ID), sandbox.ProcessSpec{Argv: []string{"/bin/busybox", "id", "-u"}})
		if err == nil && r.Exit.Code == 0 {
			t.Errorf("an image's user %q ran as %q", user, strings.TrimSpace(r.Stdout))
		}
		if _, err := d.Remove(context.WithoutCancel(t.Context()), string(sb.ID)); err != nil {
			t.Error(err)
		}
	}
}
