//go:build root

package escape

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestCopyRacesALink copies files while a program inside swaps the directory
// for a link that climbs out (CVE-2018-15664): what comes back is the
// sandbox's, and what goes in stays inside. The control does the same with a
// plain read by name here, and gets the canary.
func TestCopyRacesALink(t *testing.T) {
	d := harness.Install(t, "")
	canary, text := secret(t)
	swap := `mkdir -p $1/real; echo inside >$1/real/canary
while :; do ln -sfn $2 $1/way; rm -rf $1/way; ln -sfn real $1/way; rm -rf $1/way; done`
	climb := "../../../../../../../.." + filepath.Dir(canary)

	here := t.TempDir()
	background(t, "sh", "-c", swap, "sh", here, filepath.Dir(canary))
	testenv.Eventually(t, 60e9, "a read by name leads out", func() bool {
		b, err := os.ReadFile(filepath.Join(here, "way/canary"))
		return err == nil && string(b) == text
	})

	d.New(t, sandbox.Spec{Name: "s"})
	if _, err := d.StartProcess(t.Context(), "s", sandbox.ProcessSpec{Argv: []string{"sh", "-c", swap, "sh", "/var/tmp/race", climb}}); err != nil {
		t.Fatal(err)
	}
	files, inside := d.Files("s"), 0
	for i := 0; i < harness.Soak(100, 20000) || inside == 0; i++ {
		if i > 20000 {
			t.Fatal("no read met the directory inside: the race was not run")
		}
		for _, path := range []string{"/var/tmp/race/way/canary", "/var/tmp/race/way"} {
			r, err := files.TarOut(t.Context(), "root", path)
			if err != nil {
				continue
			}
			b, _ := io.ReadAll(r)
			r.Close()
			if bytes.Contains(b, []byte(text)) {
				t.Fatalf("an archive of %s holds the canary", path)
			}
			if bytes.Contains(b, []byte("inside\n")) {
				inside++
			}
		}
		_, _ = files.Write(t.Context(), "root", "/var/tmp/race/way/planted", 0o644, strings.NewReader("planted"))
	}
	if entries, err := os.ReadDir(filepath.Dir(canary)); err != nil || len(entries) != 1 {
		t.Errorf("beside the canary: %v, %v", entries, err)
	}
	t.Logf("%d archives met the directory inside", inside)
}

// TestCopyKeepsHoles copies out a file that is a hole but for its middle: it takes
// no space of the host but for that. The control has as many bytes and no hole.
func TestCopyKeepsHoles(t *testing.T) {
	d := harness.Install(t, "")
	d.New(t, sandbox.Spec{Name: "s"})
	d.Sh(t, "s", `mkdir /tmp/d && cd /tmp/d && truncate -s 64M hole && echo middle | dd of=hole bs=1M seek=32 conv=notrunc && yes | head -c 64M >full`)
	to := filepath.Join(t.TempDir(), "d")
	if _, errs, code := d.CLI(t, nil, "", "cp", "s:/tmp/d", to); code != 0 {
		t.Fatalf("cp: %d %s", code, errs)
	}
	for name, sparse := range map[string]bool{"hole": true, "full": false} {
		var st syscall.Stat_t
		if err := syscall.Stat(filepath.Join(to, name), &st); err != nil {
			t.Fatal(err)
		}
		if st.Size != 64<<20 || (st.Blocks*512 < 1<<20) != sparse {
			t.Errorf("%s: %d bytes take %d", name, st.Size, st.Blocks*512)
		}
		sum := func(b []byte) string { return fmt.Sprintf("%x", sha256.Sum256(b)) }
		b, err := os.ReadFile(filepath.Join(to, name))
		if want := d.Sh(t, "s", "sha256sum </tmp/d/"+name); err != nil || !strings.HasPrefix(want, sum(b)) {
			t.Errorf("%s: %s there, %s here, %v", name, want, sum(b), err)
		}
	}
}

// TestHostLoadsNothingOfASandbox plants libraries, a name service switch and a
// loader configuration, then has the daemon do all its file work
// (CVE-2019-14271). No process of the daemon's, PID 1 among them, has mapped a
// file of the sandbox's. The control is a program inside: it has.
func TestHostLoadsNothingOfASandbox(t *testing.T) {
	d := harness.Install(t, "")
	sb := d.New(t, sandbox.Spec{Name: "s"})
	d.Sh(t, "s", `mkdir -p /etc/ld.so.conf.d; echo "passwd: planted" >/etc/nsswitch.conf; echo /planted >/etc/ld.so.conf
mkdir /planted; for l in libnss_planted.so.2 libnss_files.so.2 libc.so.6; do cp /usr/lib/x86_64-linux-gnu/libc.so.6 /planted/$l; done
cp /bin/sleep /planted/sleep; cp /usr/lib/x86_64-linux-gnu/libc.so.6 /etc/ld.so.preload`)
	p, err := d.StartProcess(t.Context(), "s", sandbox.ProcessSpec{Argv: []string{"/planted/sleep", "600"}})
	if err != nil {
		t.Fatal(err)
	}
	files := d.Files("s")
	if _, err := files.Write(t.Context(), "root", "/root/f", 0o644, strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	if r, err := files.TarOut(t.Context(), "root", "/planted"); err != nil {
		t.Fatal(err)
	} else if _, err := io.Copy(io.Discard, r); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Snapshot(t.Context(), "s", sandbox.SnapshotRequest{Name: "snap"}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Try(t.Context(), "s", sandbox.ProcessSpec{Argv: []string{"true"}, User: "nobody"}); err != nil {
		t.Fatal(err)
	}
	foreign := func(pid int) (mapped []string) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			if f := strings.Fields(line); len(f) == 6 && strings.HasPrefix(f[5], "/") && !strings.HasPrefix(f[5], "/memfd") {
				mapped = append(mapped, f[5])
			}
		}
		return mapped
	}
	for _, m := range foreign(d.PID()) {
		if !strings.HasSuffix(m, "/sandboxd") && !strings.Contains(m, "sandboxd.db") && !strings.Contains(m, "production.db") {
			t.Errorf("the daemon has mapped %s", m)
		}
	}
	for _, m := range foreign(sb.InitPID) {
		if !strings.Contains(m, "init") {
			t.Errorf("PID 1 has mapped %s", m)
		}
	}
	sleeper := hostPID(t, sb.InitPID, p.PID)
	if m := strings.Join(foreign(sleeper), " "); !strings.Contains(m, "/planted/sleep") {
		t.Errorf("the control, a program of the sandbox's: mapped %q", m)
	}
}

// hostPID is what the host calls the process that a sandbox calls inside.
func hostPID(t testing.TB, init, inside int) int {
	t.Helper()
	space, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", init))
	if err != nil {
		t.Fatal(err)
	}
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range dirs {
		if s, err := os.Readlink(dir + "/ns/pid"); err != nil || s != space {
			continue
		}
		b, err := os.ReadFile(dir + "/status")
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(b)) {
			if f := strings.Fields(line); len(f) > 2 && f[0] == "NSpid:" && f[len(f)-1] == strconv.Itoa(inside) {
				pid, _ := strconv.Atoi(filepath.Base(dir))
				return pid
			}
		}
	}
	t.Fatalf("no process %d in the sandbox of %d", inside, init)
	return 0
}

// TestRemovalFollowsNoLink removes sandboxes, snapshots and images whose files
// are links to the host's (CVE-2024-23652), also in place of directories that
// were mounted on. The control removes through such a link by name.
func TestRemovalFollowsNoLink(t *testing.T) {
	d := harness.Install(t, "")
	canary, text := secret(t)
	dir := filepath.Dir(canary)

	here, victim := t.TempDir(), t.TempDir()
	if err := errors.Join(os.WriteFile(filepath.Join(victim, "f"), nil, 0o600), os.Symlink(victim, filepath.Join(here, "l"))); err != nil {
		t.Fatal(err)
	}
	if err := harness.HostRun("sh", "-c", "rm -r "+here+"/l/*"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(victim, "f")); err == nil {
		t.Fatal("the control removed nothing through the link")
	}

	if _, err := d.CreateVolume(t.Context(), sandbox.VolumeRequest{Name: "v"}); err != nil {
		t.Fatal(err)
	}
	d.New(t, sandbox.Spec{Name: "s", Volumes: []sandbox.VolumeMount{{Volume: "v", Path: "/made/by/mount"}}})
	d.Sh(t, "s", fmt.Sprintf(`ln -s %[1]s /abs; ln -s ../../../../../../../..%[1]s /rel; ln -s %[1]s /made/by/mount/v
mv /made /aside; mkdir -p /made/by; ln -s %[1]s /made/by/mount; mkdir /deep; cd /deep; for i in $(seq 200); do mkdir d; cd d; done; ln -s %[1]s out
rm -rf /root; ln -s %[1]s /root; rm -rf /tmp 2>/dev/null; ln -sfn %[1]s /var/tmp/x`, dir))
	if _, err := d.Snapshot(t.Context(), "s", sandbox.SnapshotRequest{Name: "snap"}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Stop(t.Context(), "s"); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Remove(t.Context(), "s"); err != nil {
		t.Fatal(err)
	}
	if _, err := d.RemoveSnapshot(t.Context(), "snap"); err != nil {
		t.Fatal(err)
	}
	if err := d.RemoveVolume(t.Context(), "v"); err != nil {
		t.Fatal(err)
	}
	if err := ociImage(t, d, "links", imageConfig{}, link("abs", dir), link("rel", "../../../.."+dir)); err != nil {
		t.Fatal(err)
	}
	if err := d.RemoveImage(t.Context(), "links"); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 60e9, "what was removed is gone", func() bool {
		for _, place := range []string{"sandboxes", "trash", "volumes"} {
			entries, err := os.ReadDir(d.State("volume", place))
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				t.Fatal(err)
			}
			for _, e := range entries {
				if id, err := sandbox.ParseID(e.Name()); err == nil && place == "trash" || e.Name() == "v" {
					t.Log(place, id, e.Name())
					return false
				}
			}
		}
		return true
	})
	if b, err := os.ReadFile(canary); err != nil || string(b) != text {
		t.Fatalf("the canary: %q, %v", b, err)
	}
}

// TestOversizedFields creates sandboxes whose fields are longer than what a
// 16-bit length holds (CVE-2021-43784): refused, or a sandbox with the maps,
// rights and limits of any other.
func TestOversizedFields(t *testing.T) {
	d := harness.Install(t, "")
	big := func(n int) string { return strings.Repeat("A", n) }
	const look = `awk '{print $1, $3}' /proc/self/uid_map /proc/self/gid_map; grep -E 'Cap|NoNewPrivs|Seccomp:' /proc/self/status; readlink /proc/self/ns/user | cut -c1-5; cat /proc/sys/user/max_user_namespaces`
	want := d.Sh(t, string(d.New(t, sandbox.Spec{}).ID), look)
	if !strings.Contains(want, "NoNewPrivs:\t1") || !strings.Contains(want, "0 65536") {
		t.Fatalf("the control: %s", want)
	}
	specs := map[string]sandbox.Spec{}
	sizes := []int{4096, 65536, 262143, 4095, 65535, 65537, 131072}
	for _, n := range sizes[:harness.Soak(3, len(sizes))] {
		k := strconv.Itoa(n)
		specs["env "+k] = sandbox.Spec{Env: map[string]string{"A": big(n)}}
		specs["env name "+k] = sandbox.Spec{Env: map[string]string{big(n): "A"}}
		specs["workdir "+k] = sandbox.Spec{WorkDir: "/" + big(n)}
		specs["hostname "+k] = sandbox.Spec{Hostname: big(n)}
		specs["name "+k] = sandbox.Spec{Name: big(n)}
		specs["label "+k] = sandbox.Spec{Labels: map[string]string{"a": big(n)}}
		specs["user "+k] = sandbox.Spec{User: big(n)}
		specs["image "+k] = sandbox.Spec{Image: big(n)}
		specs["mount "+k] = sandbox.Spec{Volumes: []sandbox.VolumeMount{{Volume: "v", Path: "/" + big(n)}}}
	}
	made := 0
	for name, spec := range specs {
		sb, err := d.Create(t.Context(), spec, "")
		if err != nil {
			if codeOf(err) == "" || codeOf(err) == "internal" {
				t.Errorf("%s: %v: no code a caller can act on", name, err)
			}
			continue
		}
		made++
		r, err := d.Try(t.Context(), string(sb.ID), sandbox.ProcessSpec{Argv: []string{"sh", "-c", look}, Env: map[string]string{"A": "", "PATH": "/usr/bin:/bin"}, WorkDir: "/"})
		if err == nil && r.Exit.Code == 0 && strings.TrimSuffix(r.Stdout, "\n") != want {
			t.Errorf("%s:\n%s\nwant\n%s", name, r.Stdout, want)
		}
		if _, err := d.Remove(t.Context(), string(sb.ID)); err != nil {
			t.Error(err)
		}
	}
	if made == 0 || made == len(specs) {
		t.Errorf("%d of %d were made: want some refused and some made", made, len(specs))
	}
}
