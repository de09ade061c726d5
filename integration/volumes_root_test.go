//go:build root

package integration

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// volume makes a volume or fails the test, and removes it at its end.
func (d *daemon) volume(t testing.TB, req sandbox.VolumeRequest) sandbox.Volume {
	t.Helper()
	v, err := d.CreateVolume(t.Context(), req)
	if err != nil {
		t.Fatalf("create volume: %v", err)
	}
	return v
}

// mounts is a spec with mounts, written as on the command line.
func mounts(all ...string) sandbox.Spec {
	var s sandbox.Spec
	for _, one := range all {
		parts := strings.Split(one, ":")
		m := sandbox.VolumeMount{Volume: parts[0], Path: parts[1], ReadOnly: len(parts) > 2 && parts[2] == "ro"}
		if strings.HasPrefix(parts[0], "/") {
			m.Volume, m.HostPath, m.Writable = "", parts[0], len(parts) > 2 && parts[2] == "rw"
		}
		s.Volumes = append(s.Volumes, m)
	}
	return s
}

// wantCode fails the test unless err has the code.
func wantCode(t testing.TB, what string, err error, code string) {
	t.Helper()
	if sandbox.CodeOf(err) != code {
		t.Errorf("%s: %v (%s), want code %s", what, err, sandbox.CodeOf(err), code)
	}
}

func TestVolumeOutlivesSandboxes(t *testing.T) {
	d := install(t, "")
	v := d.volume(t, sandbox.VolumeRequest{Name: "data", Labels: map[string]string{"k": "v"}})
	if v.Status != sandbox.VolumeReady || v.Labels["k"] != "v" || len(v.Enforcement) != 2 || v.SizeBytes == 0 {
		t.Errorf("made: %+v", v)
	}
	_, err := d.CreateVolume(t.Context(), sandbox.VolumeRequest{Name: "data"})
	wantCode(t, "the same name again", err, "volume_exists")
	_, err = d.Create(t.Context(), mounts("nope:/data"), "")
	wantCode(t, "a volume that is not there", err, "volume_not_found")
	if err == nil || !strings.Contains(err.Error(), "sandbox volume create nope") {
		t.Errorf("the error does not say what makes it: %v", err)
	}

	// Nested mounts, given in the wrong order; a place that must be made.
	one := d.create(t, mounts("data:/srv/deep/in", "data:/srv"))
	d.sh(t, string(one.ID), "echo hello >/srv/f && mkdir /srv/d && chown 1000:1000 /srv/d && chmod 4755 /srv/f && test -f /srv/deep/in/f")
	wantCode(t, "remove it while it is used", d.RemoveVolume(t.Context(), "data"), "volume_in_use")
	if v, err := d.Volume(t.Context(), "data"); err != nil || !slices.Equal(v.UsedBy, []sandbox.ID{one.ID}) {
		t.Errorf("used by %v, %v", v.UsedBy, err)
	}
	if _, err := d.Stop(t.Context(), string(one.ID)); err != nil {
		t.Fatal(err)
	}
	wantCode(t, "remove it while a stopped sandbox has it", d.RemoveVolume(t.Context(), "data"), "volume_in_use")
	if _, err := d.Start(t.Context(), string(one.ID)); err != nil {
		t.Fatal(err)
	}
	if got := d.sh(t, string(one.ID), "cat /srv/f /srv/deep/in/f"); got != "hello\nhello" {
		t.Errorf("after stop and start: %q", got)
	}
	if _, err := d.Reset(t.Context(), string(one.ID)); err != nil {
		t.Fatal(err)
	}
	if got := d.sh(t, string(one.ID), "cat /srv/f"); got != "hello" {
		t.Errorf("after a reset: %q", got)
	}
	if _, err := d.Remove(t.Context(), string(one.ID)); err != nil {
		t.Fatal(err)
	}

	// The next sees it, with the same owners; read-only refuses what
	// read-write allows.
	two := d.create(t, mounts("data:/a:ro", "data:/b"))
	if got := d.sh(t, string(two.ID), "cat /a/f; stat -c %u:%g /a/f /a/d"); got != "hello\n0:0\n1000:1000" {
		t.Errorf("in the next sandbox: %q", got)
	}
	if r := d.exec(t, string(two.ID), "sh", "-c", "echo x >/a/new"); r.exit.Code == 0 || !strings.Contains(r.stderr, "Read-only") {
		t.Errorf("writing where it is read-only: %+v", r)
	}
	d.sh(t, string(two.ID), "echo x >/b/new && rm /b/new")
	if got := d.sh(t, string(two.ID), `awk '$5=="/a"||$5=="/b" {print $5, $6}' /proc/self/mountinfo`); strings.Count(got, "nosuid,nodev") != 2 {
		t.Errorf("mount options: %s", got)
	}
	if _, err := d.Remove(t.Context(), string(two.ID)); err != nil {
		t.Fatal(err)
	}
	if err := d.RemoveVolume(t.Context(), "data"); err != nil {
		t.Error(err)
	}
	wantCode(t, "remove it again", d.RemoveVolume(t.Context(), "data"), "volume_not_found")
	d.volumesAgree(t)
}

// TestManyVolumes mounts as many as a sandbox may have, one below another.
func TestManyVolumes(t *testing.T) {
	d := install(t, "")
	d.volume(t, sandbox.VolumeRequest{Name: "v"})
	var all []string
	path := ""
	for i := range 32 {
		if path += fmt.Sprintf("/%d", i); i%8 == 0 {
			path = fmt.Sprintf("/m%d", i)
		}
		all = append(all, "v:"+path)
	}
	sb := d.create(t, mounts(all...))
	if got := d.sh(t, string(sb.ID), "grep -c ' /m' /proc/self/mountinfo && touch /m0/f && ls /m24/25/26/f"); got != "32\n/m24/25/26/f" {
		t.Errorf("mounted: %q", got)
	}
	if _, err := d.Reset(t.Context(), string(sb.ID)); err != nil {
		t.Fatal(err)
	}
	if got := d.sh(t, string(sb.ID), "grep -c ' /m' /proc/self/mountinfo"); got != "32" {
		t.Errorf("after a reset %s are mounted", got)
	}
}

// TestVolumeShared has two sandboxes use one volume at once: each sees what
// the other does, with the owners it gave.
func TestVolumeShared(t *testing.T) {
	d := install(t, "")
	d.volume(t, sandbox.VolumeRequest{Name: "pool"})
	one, two := d.create(t, mounts("pool:/pool")), d.create(t, mounts("pool:/elsewhere"))
	d.sh(t, string(one.ID), "echo 1 >/pool/root && chmod 600 /pool/root && echo 2 >/pool/user && chown 1000:2000 /pool/user && chmod 600 /pool/user")
	if got := d.sh(t, string(two.ID), "cd /elsewhere && stat -c '%n %u:%g %a' root user && cat root user"); got != "root 0:0 600\nuser 1000:2000 600\n1\n2" {
		t.Errorf("the other sandbox sees %q", got)
	}
	// The same user of another sandbox may write, another user may not.
	r, err := d.try(t.Context(), string(two.ID), sandbox.ProcessSpec{Argv: []string{"sh", "-c", "echo 3 >>/elsewhere/user"}, User: "1000:2000"})
	if err != nil || r.exit.Code != 0 {
		t.Errorf("as the owner: %+v, %v", r, err)
	}
	r, err = d.try(t.Context(), string(two.ID), sandbox.ProcessSpec{Argv: []string{"sh", "-c", "echo 4 >>/elsewhere/user"}, User: "1001:2001"})
	if err != nil || r.exit.Code == 0 {
		t.Errorf("as a stranger: %+v, %v", r, err)
	}
	if got := d.sh(t, string(one.ID), "cat /pool/user"); got != "2\n3" {
		t.Errorf("the first sandbox sees %q", got)
	}
}

// TestVolumeLimits fills a volume; the controls are the same writes under
// higher limits, set while the sandbox runs.
func TestVolumeLimits(t *testing.T) {
	testenv.Need(t, testenv.Quota)
	d := install(t, "volume: {size: 1g}\n")
	v := d.volume(t, sandbox.VolumeRequest{Name: "small", SizeBytes: 8 << 20, Inodes: 100})
	if v.UsedInodes != 0 || v.Uncounted || !v.Enforcement[0].Enforced {
		t.Errorf("fresh: %+v", v)
	}
	sb := d.create(t, mounts("small:/v"))
	fill := "dd if=/dev/zero of=/v/big bs=1M count=16 2>&1"
	if r := d.exec(t, string(sb.ID), "sh", "-c", fill); r.exit.Code == 0 || !strings.Contains(r.stdout, "No space left") && !strings.Contains(r.stdout, "quota") {
		t.Errorf("16 MiB into 8: %+v", r)
	}
	if v, err := d.Volume(t.Context(), "small"); err != nil || v.UsedBytes < 6<<20 || v.UsedBytes > 9<<20 || v.UsedInodes != 1 {
		t.Errorf("usage %+v, %v", v, err)
	}
	if u, err := d.Usage(t.Context(), string(sb.ID)); err != nil || u.DiskBytes > 1<<20 {
		t.Errorf("the sandbox's own disk counts %d bytes, %v", u.DiskBytes, err)
	}
	many := "i=0; while [ $i -lt 150 ]; do : >/v/f$i || exit 1; i=$((i+1)); done"
	d.sh(t, string(sb.ID), "rm /v/big")
	if r := d.exec(t, string(sb.ID), "sh", "-c", many); r.exit.Code == 0 {
		t.Error("150 files into 100")
	}
	if v, err := d.Volume(t.Context(), "small"); err != nil || v.UsedInodes != 100 {
		t.Errorf("usage %+v, %v; want the 100 files asked for", v, err)
	}
	more, files := int64(64<<20), int64(1000)
	if v, err := d.ChangeVolume(t.Context(), "small", sandbox.VolumeChange{SizeBytes: &more, Inodes: &files}); err != nil || v.SizeBytes != more || v.Inodes != files {
		t.Fatalf("%+v, %v", v, err)
	}
	d.sh(t, string(sb.ID), many+"; "+fill)
	// The workload cannot take files out of what is counted; the host's root,
	// as the control, can.
	d.sh(t, string(sb.ID), "mkdir /v/mine")
	for _, script := range []string{"chattr -p 0 /v/f0", "chattr -P /v", "chattr -P /v/mine"} {
		if r := d.exec(t, string(sb.ID), "sh", "-c", script); r.exit.Code == 0 {
			t.Errorf("%s worked", script)
		}
	}
	host := fmt.Sprintf("nsenter --mount=/proc/%d/ns/mnt sh -ec 'cd %s && chattr -P mine && chattr -p 0 f0'", d.PID(),
		filepath.Join(d.Dir, "state", "volume", "volumes", "small", "data"))
	if out, err := exec.CommandContext(t.Context(), "sh", "-c", host).CombinedOutput(); err != nil {
		t.Errorf("the same as the host's root: %v: %s", err, out)
	}
	// The limits outlive the daemon, and a lower one keeps what is there.
	less := int64(4 << 20)
	if _, err := d.ChangeVolume(t.Context(), "small", sandbox.VolumeChange{SizeBytes: &less}); err != nil {
		t.Fatal(err)
	}
	d.kill()
	d.start()
	if v, err := d.Volume(t.Context(), "small"); err != nil || v.SizeBytes != less || v.UsedBytes < 16<<20 {
		t.Errorf("after a restart: %+v, %v", v, err)
	}
	if r := d.exec(t, string(sb.ID), "sh", "-c", "dd if=/dev/zero of=/v/more bs=1M count=1"); r.exit.Code == 0 {
		t.Error("a write beyond the lower limit")
	}
}

// TestVolumeMountPointIsALink puts links where volumes are to be mounted: in
// an image, and by the sandbox itself. The controls mount beside them.
func TestVolumeMountPointIsALink(t *testing.T) {
	d := install(t, "")
	d.volume(t, sandbox.VolumeRequest{Name: "v"})
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	for _, h := range []tar.Header{
		{Name: "etc/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "data", Typeflag: tar.TypeSymlink, Linkname: "/etc", Mode: 0o777},
		{Name: "up", Typeflag: tar.TypeSymlink, Linkname: "../../../..", Mode: 0o777},
		{Name: "file", Typeflag: tar.TypeReg, Mode: 0o644},
		{Name: "dir/", Typeflag: tar.TypeDir, Mode: 0o755},
	} {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := d.ImportImage(t.Context(), "links", &archive); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/data", "/data/x", "/up", "/up/x", "/file", "/file/x"} {
		s := mounts("v:" + path)
		s.Image = "links"
		_, err := d.Create(t.Context(), s, "")
		wantCode(t, "mount at "+path, err, "mount_point")
	}
	for _, path := range []string{"/dir", "/dir/x/y", "/new", "/etc/sub"} {
		s := mounts("v:" + path)
		s.Image = "links"
		d.create(t, s)
	}
	// One sandbox puts a link where another, which shares the volume, mounts
	// a second volume.
	d.volume(t, sandbox.VolumeRequest{Name: "w"})
	first := d.create(t, mounts("v:/v"))
	d.sh(t, string(first.ID), "ln -s /etc /v/sub && mkdir /v/dir")
	_, err := d.Create(t.Context(), mounts("v:/v", "w:/v/sub"), "")
	wantCode(t, "mount on another's link", err, "mount_point")
	d.create(t, mounts("v:/v", "w:/v/dir"))
	_, err = d.Create(t.Context(), mounts("v:/v:ro", "w:/v/none"), "")
	wantCode(t, "make a place in what is read-only", err, "mount_point")
	d.create(t, mounts("v:/v:ro", "w:/v/dir"))

	// A sandbox moves the way to its mount aside and puts a link there.
	sb := d.create(t, mounts("v:/way/to/v"))
	d.sh(t, string(sb.ID), "mv /way /away && ln -s /etc /way && mkdir -p /etc/to/v && test -d /away/to/v")
	if _, err := d.Stop(t.Context(), string(sb.ID)); err != nil {
		t.Fatal(err)
	}
	_, err = d.Start(t.Context(), string(sb.ID))
	wantCode(t, "start over a link", err, "mount_point")
	if sb, err := d.Sandbox(t.Context(), string(sb.ID)); err != nil || sb.Status != sandbox.StatusStopped {
		t.Errorf("it is %s, %v: its files must not be lost", sb.Status, err)
	}
	forks, err := d.Fork(t.Context(), string(sb.ID), sandbox.ForkRequest{Volumes: &[]sandbox.VolumeMount{}}) // as the manual says
	if err != nil || forks[0].Sandbox == nil {
		t.Fatalf("fork it without the volume: %+v, %v", forks, err)
	}
	d.sh(t, string(forks[0].Sandbox.ID), "test -L /way && test -d /away/to/v")
}

// TestVolumesAfterKill kills the daemon between and amid work on volumes.
func TestVolumesAfterKill(t *testing.T) {
	d := install(t, "")
	d.volume(t, sandbox.VolumeRequest{Name: "keep"})
	sb := d.create(t, mounts("keep:/keep"))
	d.sh(t, string(sb.ID), "echo before >/keep/f")
	for range soak(6, 60) {
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for worker := range 4 {
			wg.Go(func() {
				for n := 0; ctx.Err() == nil; n++ { // errors are expected: the daemon is being killed
					name := fmt.Sprintf("churn-%d-%d", worker, n%3)
					_, _ = d.CreateVolume(ctx, sandbox.VolumeRequest{Name: name})
					_ = d.RemoveVolume(ctx, name)
				}
			})
		}
		<-time.After(150 * time.Millisecond) // the kill comes at a random moment
		d.kill()
		stop()
		wg.Wait()
		d.start()
		d.volumesAgree(t)
		if got := d.sh(t, string(sb.ID), "cat /keep/f && echo again >/keep/g"); got != "before" {
			t.Errorf("the adopted sandbox reads %q", got)
		}
		wantCode(t, "remove the adopted sandbox's volume", d.RemoveVolume(t.Context(), "keep"), "volume_in_use")
	}
	for _, v := range d.volumes(t) {
		if v.Name != "keep" {
			if err := d.RemoveVolume(t.Context(), v.Name); err != nil {
				t.Error(err)
			}
		}
	}
	d.volumesAgree(t)
	// A volume whose row is lost is taken up with all it holds, once somebody
	// has decided about what else the database does not know.
	d.stop()
	if err := os.Rename(filepath.Join(d.Dir, "state", "sandboxd.db"), filepath.Join(d.Dir, "lost.db")); err != nil {
		t.Fatal(err)
	}
	d.start()
	_, err := d.Create(t.Context(), mounts("keep:/keep"), "")
	wantCode(t, "create with the database lost", err, "quarantine")
	d.stop()
	recover := exec.Command(program(t, "sandboxd"), append([]string{"recover", "--adopt", "all"}, d.Extra...)...)
	if out, err := recover.CombinedOutput(); err != nil {
		t.Fatalf("recover: %v\n%s", err, out)
	}
	d.start()
	if v, err := d.Volume(t.Context(), "keep"); err != nil || v.Status != sandbox.VolumeReady {
		t.Errorf("recovered: %+v, %v", v, err)
	}
	next := d.create(t, mounts("keep:/keep"))
	if got := d.sh(t, string(next.ID), "cat /keep/f /keep/g"); got != "before\nagain" {
		t.Errorf("what it holds: %q", got)
	}
}

func (d *daemon) volumes(t testing.TB) []sandbox.Volume {
	t.Helper()
	all, err := d.Volumes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// volumesAgree compares what the daemon lists with what is on disk.
func (d *daemon) volumesAgree(t testing.TB) {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/root%s", d.PID(), filepath.Join(d.Dir, "state", "volume", "volumes")))
	if err != nil {
		t.Fatal(err)
	}
	var disk, listed []string
	for _, e := range entries {
		disk = append(disk, e.Name())
	}
	for _, v := range d.volumes(t) {
		listed = append(listed, v.Name)
		if v.Status != sandbox.VolumeReady {
			t.Errorf("volume %s is left %s", v.Name, v.Status)
		}
	}
	if !slices.Equal(disk, listed) {
		t.Errorf("on disk %q, listed %q", disk, listed)
	}
}

// bindGround makes a directory for bind roots, with what a test needs in it.
func bindGround(t testing.TB) string {
	t.Helper()
	base := os.Getenv("SANDBOXD_TEST_DIR")
	if base == "" {
		base = "/var/tmp"
	}
	dir, err := os.MkdirTemp(base, "sandboxd-bind-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	script := `chmod 711 . && mkdir -m 755 root outside root/mine root/roots root/mine/sub && chown 1234:1234 root/mine root/mine/sub
		echo secret >outside/f && echo open >root/roots/open && echo closed >root/roots/closed && chmod 600 root/roots/closed
		echo private >root/mine/private && chown 1234:1234 root/mine/private && chmod 600 root/mine/private
		echo other >root/mine/other && chmod 600 root/mine/other && echo x >root/file
		ln -s ../outside root/link && ln -s mine root/inner && chown -h 1234 root/link`
	cmd := exec.Command("sh", "-ec", script)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return dir
}

// TestBindMounts hands directories of the host to sandboxes, and tries to get
// at others.
func TestBindMounts(t *testing.T) {
	ground := bindGround(t)
	root := filepath.Join(ground, "root")
	d := install(t, fmt.Sprintf("bind_roots: [%q]\n", root))
	for path, code := range map[string]string{
		filepath.Join(ground, "outside"): "bind_denied", ground: "bind_denied", root + "x": "bind_denied", "/etc": "bind_denied",
		root + "/link": "bind_denied", root + "/link/.": "invalid_volumes", root + "/inner": "bind_denied", root + "/inner/sub": "bind_denied",
		root + "/../outside": "invalid_volumes", root + "//mine": "invalid_volumes", root + "/mine/": "invalid_volumes",
		root + "/none": "bind_not_found", root + "/file": "bind_not_directory", root + "/roots:/b:rw": "bind_denied",
	} {
		if !strings.Contains(path, ":") {
			path += ":/b"
		}
		_, err := d.Create(t.Context(), mounts(path), "")
		wantCode(t, path, err, code)
	}

	sb := d.create(t, mounts(root+"/mine:/rw:rw", root+"/mine:/ro", root+"/roots:/roots", root+":/all"))
	id := string(sb.ID)
	// Its owner's rights, and nobody else's.
	if got := d.sh(t, id, "cat /rw/private && echo new >/rw/new && mkdir /rw/d && stat -c %u:%g /rw /rw/new"); got != "private\n0:0\n0:0" {
		t.Errorf("as the owner: %q", got)
	}
	if st, err := os.Stat(root + "/mine/new"); err != nil || st.Sys().(*syscall.Stat_t).Uid != 1234 || st.Sys().(*syscall.Stat_t).Gid != 1234 {
		t.Errorf("on the host the new file belongs to %+v, %v; want 1234", st, err)
	}
	for _, script := range []string{
		"cat /rw/other", "echo x >>/rw/other", "chown 0:0 /rw/other", "chown 1000 /rw/new", "chmod 777 /rw/other", // root's file in the owner's directory
		"echo x >/ro/x", "rm /ro/new", "chmod 777 /ro", // read-only without being asked
		"cat /roots/closed", "echo x >/roots/x", "chmod 777 /roots/closed", // a directory of root's
		"echo x >/all/x", "cat /all/link/f",
	} {
		if r := d.exec(t, id, "sh", "-c", script); r.exit.Code == 0 {
			t.Errorf("%s worked: %q", script, r.stdout)
		}
	}
	if got := d.sh(t, id, "cat /roots/open /all/roots/open /ro/new"); got != "open\nopen\nnew" {
		t.Errorf("what everybody may read: %q", got)
	}
	// The directory that was checked is the one that is mounted, and it is
	// looked for again at each start.
	if err := os.Rename(root+"/mine", root+"/was"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../outside", root+"/mine"); err != nil {
		t.Fatal(err)
	}
	if got := d.sh(t, id, "cat /rw/new; ls /rw/f 2>/dev/null || :"); got != "new" {
		t.Errorf("after its name was given to another: %q", got)
	}
	if _, err := d.Stop(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	_, err := d.Start(t.Context(), id)
	wantCode(t, "start with a link in the place", err, "bind_denied")
	if err := os.Remove(root + "/mine"); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(root+"/was", root+"/mine"); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Start(t.Context(), id); err != nil {
		t.Error(err)
	}
	if got := d.sh(t, id, "cat /rw/new"); got != "new" {
		t.Errorf("started again: %q", got)
	}
}

// TestBindIsForRoot asks for the same bind as root and as somebody who may
// use the socket.
func TestBindIsForRoot(t *testing.T) {
	ground := bindGround(t)
	d := install(t, fmt.Sprintf("bind_roots: [%q]\n", ground+"/root"))
	if err := os.Chmod(filepath.Join(d.Dir, "run", "sandboxd.sock"), 0o666); err != nil {
		t.Fatal(err)
	}
	cli := filepath.Join(d.Dir, "cli")
	if err := copyFile(program(t, "sandbox"), cli); err != nil {
		t.Fatal(err)
	}
	run := func(uid uint32, args ...string) (string, error) {
		cmd := exec.CommandContext(t.Context(), cli, append([]string{"--host", d.host()}, args...)...)
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	bind := ground + "/root/mine:/b"
	if out, err := run(1234, "run", "--rm", "-v", bind, "--", "true"); err == nil || !strings.Contains(out, "bind_denied") {
		t.Errorf("as another user: %v, %s", err, out)
	}
	for _, args := range [][]string{
		{"volume", "create", "theirs"},
		{"run", "--rm", "-v", "theirs:/v", "--", "touch", "/v/x"}, // may use the socket
	} {
		if out, err := run(1234, args...); err != nil {
			t.Errorf("as another user, %q: %v, %s", args, err, out)
		}
	}
	if out, err := run(0, "run", "--rm", "-v", bind, "--", "ls", "/b"); err != nil || !strings.Contains(out, "private") {
		t.Errorf("as root: %v, %s", err, out)
	}
	if out, err := run(0, "run", "--rm", "-v", bind, "--", "touch", "/b/x"); err == nil {
		t.Errorf("writing without :rw: %s", out)
	}
	if out, err := run(0, "run", "--rm", "-v", bind+":rw", "--", "touch", "/b/x"); err != nil {
		t.Errorf("writing with :rw: %v, %s", err, out)
	}
}

func copyFile(from, to string) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o755)
	if err != nil {
		return err
	}
	if _, err := io.Copy(dst, src); err != nil {
		return err
	}
	return dst.Close()
}

// TestVolumesAndSnapshots freezes, forks and rolls back a sandbox that writes
// to a volume all the while: what is in the volume stays, and is shared.
func TestVolumesAndSnapshots(t *testing.T) {
	d := install(t, "")
	d.volume(t, sandbox.VolumeRequest{Name: "data"})
	spec := mounts("data:/data")
	spec.Name = "one"
	d.create(t, spec)
	d.sh(t, "one", "echo 1 >/own && echo 1 >/data/f")
	counter, err := d.StartProcess(t.Context(), "one", sandbox.ProcessSpec{Argv: []string{"sh", "-c", "while :; do echo x >>/data/log || exit 1; sleep 0.01; done"}})
	if err != nil {
		t.Fatal(err)
	}
	snap, err := d.Snapshot(t.Context(), "one", sandbox.SnapshotRequest{Name: "before"})
	if err != nil {
		t.Fatal(err)
	}
	d.sh(t, "one", "echo 2 >/own && echo 2 >/data/f && n=$(wc -l </data/log) && while [ $(wc -l </data/log) = $n ]; do :; done")
	if p, err := d.Process(t.Context(), "one", counter.ID); err != nil || p.Exit != nil {
		t.Errorf("the writer after a live snapshot: %+v, %v", p.Exit, err)
	}
	forks, err := d.Fork(t.Context(), "before", sandbox.ForkRequest{Name: "fork"})
	if err != nil || len(forks) != 1 || forks[0].Sandbox == nil {
		t.Fatalf("fork: %+v, %v", forks, err)
	}
	if got := d.sh(t, "fork", "cat /own /data/f && echo 3 >/data/f"); got != "1\n2" {
		t.Errorf("the fork sees %q: its own files as of then, the volume's as of now", got)
	}
	if _, err := d.Rollback(t.Context(), "one", string(snap.ID)); err != nil {
		t.Fatal(err)
	}
	if got := d.sh(t, "one", "cat /own /data/f"); got != "1\n3" {
		t.Errorf("rolled back it sees %q", got)
	}
	d.volume(t, sandbox.VolumeRequest{Name: "other"})
	for want, volumes := range map[string][]sandbox.VolumeMount{"": {}, "other": {{Volume: "other", Path: "/data"}}} {
		forks, err := d.Fork(t.Context(), "before", sandbox.ForkRequest{Volumes: &volumes})
		if err != nil || len(forks) != 1 || forks[0].Sandbox == nil {
			t.Fatalf("fork with other volumes: %+v, %v", forks, err)
		}
		id := string(forks[0].Sandbox.ID)
		if got := d.sh(t, id, "cat /own; ls /data; grep -c ' /data ' /proc/self/mountinfo || :"); got != "1\n"+map[bool]string{true: "0", false: "1"}[want == ""] {
			t.Errorf("a fork with %q in place: %q", want, got)
		}
	}
	// A snapshot begun without the volume has none of its files.
	bare := d.create(t, sandbox.Spec{Snapshot: snap.ID})
	if got := d.sh(t, string(bare.ID), "cat /own; ls /data"); got != "1" {
		t.Errorf("without the volume: %q", got)
	}
	for _, ref := range []string{"one", "fork"} {
		wantCode(t, "remove it while "+ref+" has it", d.RemoveVolume(t.Context(), "data"), "volume_in_use")
		if _, err := d.Remove(t.Context(), ref); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.RemoveVolume(t.Context(), "data"); err != nil {
		t.Error(err)
	}
	// What is left of the snapshot needs it no more than its name.
	_, err = d.Fork(t.Context(), "before", sandbox.ForkRequest{})
	wantCode(t, "fork what names a volume that is gone", err, "volume_not_found")
}

// TestVolumeBackup saves a volume and puts it back the way the manual says.
func TestVolumeBackup(t *testing.T) {
	d := install(t, "")
	d.volume(t, sandbox.VolumeRequest{Name: "a"})
	d.volume(t, sandbox.VolumeRequest{Name: "b"})
	sb := d.create(t, mounts("a:/v"))
	d.sh(t, string(sb.ID), "mkdir /v/d && echo hello >/v/d/f && chown 1000:1000 /v/d/f && ln -s d/f /v/l")
	script := fmt.Sprintf("%s --host %s run --rm -v a:/v:ro -- tar c -C /v . | %[1]s --host %[2]s run --rm -v b:/v -- tar x -C /v", program(t, "sandbox"), d.host())
	if out, err := exec.CommandContext(t.Context(), "sh", "-c", script).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	next := d.create(t, mounts("b:/v"))
	if got := d.sh(t, string(next.ID), "cat /v/l && stat -c %u:%g /v/d/f"); got != "hello\n1000:1000" {
		t.Errorf("put back: %q", got)
	}
}
