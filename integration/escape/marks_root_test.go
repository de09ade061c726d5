//go:build root

package escape

import (
	"archive/tar"
	"bytes"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestFilesNamedLikeMarks makes files whose names mean deletions in an image's
// layer. They are plain files in snapshots, archives and what is built of them;
// an image with them is not exported, for whoever unpacked it would lose
// others. The control exports what has none, and imports a layer with a mark:
// there it deletes.
func TestFilesNamedLikeMarks(t *testing.T) {
	d := harness.Install(t, "")
	const look = `cd /; ls -A etc/passwd .wh.etc .wh..wh..opq d; cat d/keep d/.wh.keep`
	d.New(t, sandbox.Spec{Name: "first"})
	want := d.Sh(t, "first", "echo marked >/.wh.etc; : >/.wh..wh..opq; mkdir /d; echo kept >/d/keep; echo mark >/d/.wh.keep; : >/d/.wh..wh..opq; : >/d/.wh..wh.plnk; "+look)
	if strings.Count(want, ".wh.") != 8 || !strings.HasSuffix(want, "kept\nmark") {
		t.Fatalf("the files as they were made: %s", want)
	}
	if _, err := d.Snapshot(t.Context(), "first", sandbox.SnapshotRequest{Name: "marks"}); err != nil {
		t.Fatal(err)
	}
	whole, err := d.ExportSnapshot(t.Context(), "marks")
	var archive []byte
	if err == nil {
		archive, err = io.ReadAll(whole)
		whole.Close()
	}
	if err != nil {
		if codeOf(err) != "layer_bad_name" {
			t.Errorf("a snapshot's export is refused otherwise: %v", err)
		}
		t.Logf("the snapshot's export: %v", err)
	} else if _, err := d.ImportSnapshot(t.Context(), "carried", bytes.NewReader(archive)); err != nil {
		t.Logf("the import of a snapshot's export: %v", err)
		if codeOf(err) == "" || codeOf(err) == "internal" {
			t.Errorf("it has no code: %v", err)
		}
	}
	for _, name := range []string{"marks", "carried"} {
		s, err := d.SnapshotOf(t.Context(), name)
		if err != nil {
			continue
		}
		sb := d.New(t, sandbox.Spec{Snapshot: s.ID})
		if got := d.Sh(t, string(sb.ID), look); got != want {
			t.Errorf("of snapshot %s:\n%s\nwant\n%s", name, got, want)
		}
	}
	out, err := d.Files("first").TarOut(t.Context(), "root", "/d")
	if err != nil {
		t.Fatal(err)
	}
	plain, err := io.ReadAll(out)
	out.Close()
	if err != nil {
		t.Fatal(err)
	}
	other := d.New(t, sandbox.Spec{})
	d.Sh(t, string(other.ID), "mkdir -p /in/d && echo stays >/in/d/stays")
	if err := d.Files(string(other.ID)).TarIn(t.Context(), "root", "/in", bytes.NewReader(plain)); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(strings.Fields(d.Sh(t, string(other.ID), "ls -A /in/d")), " "); got != ".wh..wh..opq .wh..wh.plnk .wh.keep keep stays" {
		t.Errorf("an archive brought %s", got)
	}
	// Images.
	if err := ociImage(t, d, "below", imageConfig{}, dir("d"), file("d/keep", "kept"), dir("etc"), file("etc/passwd", "root:*:0:0::/:/bin/sh\n")); err != nil {
		t.Fatal(err)
	}
	for name, step := range map[string]string{"sound": "echo x >/d/x", "marked": "echo x >/d/.wh.keep; echo y >/.wh.etc"} {
		if _, err := d.Build(t.Context(), sandbox.BuildRequest{Names: []string{name}, Dockerfile: "FROM below\nRUN " + step + "\n"}, nil, func(sandbox.BuildEvent) error { return nil }); err != nil {
			t.Fatal(err)
		}
		sb := d.New(t, sandbox.Spec{Image: name})
		if got := d.Sh(t, string(sb.ID), "cat /d/keep; busybox ls -A /etc/passwd"); got != "kept/etc/passwd" {
			t.Errorf("in image %s: %q", name, got)
		}
		r, err := d.ExportImage(t.Context(), sandbox.ExportRequest{Source: name})
		if err == nil {
			_, err = io.Copy(io.Discard, r)
			r.Close()
		}
		if name == "sound" && err != nil || name == "marked" && codeOf(err) != "layer_bad_name" {
			t.Errorf("the export of image %s: %v", name, err)
		}
	}
	if err := ociImage(t, d, "deleting", imageConfig{}, dir("d"), file("d/keep", "kept"), file("d/.wh.keep", "")); err != nil {
		t.Fatal(err)
	}
}

// TestForeignAttributes sets attributes that security modules and overlays of
// the host would heed: from inside they are refused, and of archives they are
// not taken over. The control sets them on the host, where the look sees them.
// One exception docs/SECURITY.md names: some kernels let owners set labels of
// modules that are not at work; exports leave them out.
func TestForeignAttributes(t *testing.T) {
	d := harness.Install(t, "")
	if _, err := d.CreateVolume(t.Context(), sandbox.VolumeRequest{Name: "v"}); err != nil {
		t.Fatal(err)
	}
	sb := d.New(t, sandbox.Spec{Volumes: []sandbox.VolumeMount{{Volume: "v", Path: "/v"}}})
	ref := string(sb.ID)
	attrs := []string{"security.selinux", "security.ima", "security.evm", "security.SMACK64", "security.apparmor", "security.capability", "trusted.overlay.opaque", "trusted.overlay.redirect", "trusted.x", "system.x"}
	said := d.Command(t, ref, append([]string{"python3", "-c", `import os,sys
for at in "/v/f","/root/f","/v","/dev/shm/f":
  if not os.path.exists(at): open(at,"w").close()
  for a in sys.argv[1:]:
    try: os.setxattr(at,a,b"\x01\x00\x00\x02"+b"\xff"*16); print("set",at,a)
    except OSError as e: pass
    if a in os.listxattr(at): print("has",at,a)
  if at[:4]!="/dev":
    os.setxattr(at,"user.control",b"x"); assert os.getxattr(at,"user.control")==b"x"
print("tried")`}, attrs...)...)
	for line := range strings.Lines(said.Stdout) {
		// A file capability is the sandbox's own: of its user namespace, and without force.
		switch {
		case line == "tried\n", strings.Contains(line, "security.capability"):
		case strings.Contains(line, "security.selinux") && !strings.Contains(mounts(t), "selinuxfs"):
		case strings.Contains(line, "security.SMACK64") && !strings.Contains(mounts(t), "smackfs"):
		case strings.Contains(line, "security.apparmor"): // no module's own; a profile can ask for it
		default:
			t.Errorf("inside: %s", line)
		}
	}
	if _, err := d.Snapshot(t.Context(), ref, sandbox.SnapshotRequest{Name: "snap"}); err != nil {
		t.Fatal(err)
	}
	r, err := d.ExportSnapshot(t.Context(), "snap")
	if err != nil {
		t.Fatal(err)
	}
	exported, err := io.ReadAll(r)
	r.Close()
	if err != nil || bytes.Contains(exported, []byte("security.selinux")) || bytes.Contains(exported, []byte("security.SMACK64")) || bytes.Contains(exported, []byte("security.apparmor")) || !bytes.Contains(exported, []byte("user.control")) {
		t.Errorf("the export has the label, or not the control's attribute: %v", err)
	}
	if !strings.HasSuffix(said.Stdout, "tried\n") {
		t.Fatalf("the probe: %+v", said)
	}
	records := map[string]string{"SCHILY.xattr.user.brought": "x"}
	for _, a := range attrs {
		if a != "security.capability" {
			records["SCHILY.xattr."+a] = "system_u:object_r:shadow_t:s0"
		}
	}
	brought := file("brought", "x")
	brought.PAXRecords, brought.Format = records, tar.FormatPAX
	if err := d.Files(ref).TarIn(t.Context(), "root", "/v", bytes.NewReader(pack(t, brought))); err != nil {
		t.Fatal(err)
	}
	if got := d.Sh(t, ref, "cat /v/brought"); got != "x" {
		t.Errorf("the archive's file holds %q", got)
	}
	if err := ociImage(t, d, "labelled", imageConfig{}, brought); err != nil {
		t.Fatal(err)
	}
	d.New(t, sandbox.Spec{Image: "labelled"})
	seen := 0
	find := func() (foreign []string) {
		_ = filepath.WalkDir(d.State("volume"), func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.Name() != "brought" {
				return nil
			}
			seen++
			buf := make([]byte, 4096)
			n, err := unix.Llistxattr(path, buf)
			if err != nil {
				t.Errorf("%s: %v", path, err)
				return nil
			}
			for name := range strings.SplitSeq(string(buf[:n]), "\x00") {
				if slices.Contains(attrs, name) && name != "security.capability" && !strings.HasPrefix(name, "trusted.overlay.") {
					foreign = append(foreign, path+" "+name)
				}
			}
			return nil
		})
		return foreign
	}
	if got := find(); len(got) > 0 || seen < 2 {
		t.Errorf("of %d files some have attributes of the host: %v", seen, got)
	}
	control := ""
	_ = filepath.WalkDir(d.State("volume"), func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Name() == "brought" {
			control = path
		}
		return nil
	})
	if err := unix.Lsetxattr(control, "security.selinux", []byte("u:o:r"), 0); err != nil {
		t.Fatal(err)
	}
	if len(find()) != 1 {
		t.Error("the control: an attribute was set, and the look does not see it")
	}
}

func mounts(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("/proc/mounts")
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
