//go:build root

package integration

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

func (d *daemon) snapshot(t testing.TB, ref, name string) sandbox.Snapshot {
	t.Helper()
	s, err := d.Snapshot(t.Context(), ref, sandbox.SnapshotRequest{Name: name})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestSnapshotRollbackFork goes the whole way: freeze, change, go back, go on
// elsewhere, and all of it after a kill of the daemon too.
func TestSnapshotRollbackFork(t *testing.T) {
	d := install(t, "")
	sb := d.create(t, sandbox.Spec{Name: "dev", Env: map[string]string{"COLOR": "red"}})
	d.sh(t, "dev", "echo one >/root/f; mkdir -p /srv/d; echo x >/srv/d/x; mv /srv/d /srv/e; ln /srv/e/x /srv/e/y; rm /etc/motd 2>/dev/null; true")
	one := d.snapshot(t, "dev", "one")
	if one.Live || one.Sandbox != sb.ID || one.Spec.Name != "dev" {
		t.Errorf("snapshot of an idle sandbox: %+v", one)
	}
	const look = "cat /root/f; ls -A /srv /srv/e 2>/dev/null; echo $COLOR"
	before := d.sh(t, "dev", look)
	d.sh(t, "dev", "echo two >/root/f; rm -r /srv/e; echo z >/srv/z")
	two := d.snapshot(t, "dev", "two")
	if two.Parent != one.ID {
		t.Errorf("the parent of the second is %s, not %s", two.Parent, one.ID)
	}
	d.sh(t, "dev", "echo three >/root/f")
	for _, restart := range []bool{false, true} {
		if restart {
			d.kill()
			d.start()
		}
		after, err := d.Rollback(t.Context(), "dev", "one")
		if err != nil {
			t.Fatal(err)
		}
		if got := d.sh(t, "dev", look); got != before {
			t.Errorf("rolled back to one: %q, want %q", got, before)
		}
		if after.ID != sb.ID || after.Address != sb.Address || after.InitPID != sb.InitPID {
			t.Errorf("it was %+v and is %+v", sb, after)
		}
		made, err := d.Fork(t.Context(), "two", sandbox.ForkRequest{Count: 3, Name: fmt.Sprint("f", restart)})
		if err != nil || len(made) != 3 {
			t.Fatalf("fork: %v, %v", made, err)
		}
		for i, f := range made {
			name := fmt.Sprintf("f%v-%d", restart, i+1)
			if got := d.sh(t, name, "cat /root/f /srv/z; ls /srv; hostname; cat /etc/hostname; echo $COLOR"); got != "two\nz\nz\n"+name+"\n"+name+"\nred" {
				t.Errorf("fork %s: %q", f.Sandbox.ID, got)
			}
			d.sh(t, name, "echo own >/root/f")
		}
		if _, err := d.Rollback(t.Context(), "dev", "two"); err != nil {
			t.Fatal(err)
		}
		if got := d.sh(t, "dev", "cat /root/f"); got != "two" {
			t.Errorf("after forks wrote: %q", got)
		}
	}
	if _, err := d.Reset(t.Context(), "ftrue-1"); err != nil {
		t.Fatal(err)
	}
	if got := d.sh(t, "ftrue-1", "cat /root/f"); got != "two" {
		t.Errorf("a fork reset: %q, want what it began with", got)
	}
	d.agree(t)
	d.RemoveAll(t.Context())
	if got := d.snapshots(t, ""); len(got) != 2 {
		t.Errorf("the snapshots outlive their sandbox: %v", got)
	}
	for _, n := range []string{"one", "two"} {
		if _, err := d.RemoveSnapshot(t.Context(), n); err != nil {
			t.Fatal(err)
		}
	}
	d.noUpperLayers(t)
}

func (d *daemon) snapshots(t testing.TB, ref string) (names []string) {
	t.Helper()
	all, err := d.Snapshots(t.Context(), ref)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		names = append(names, string(s.ID)+" "+s.Name)
	}
	return names
}

// noUpperLayers waits until no layer of a snapshot is left on the volume.
func (d *daemon) noUpperLayers(t testing.TB) {
	t.Helper()
	testenv.Eventually(t, 20*time.Second, "the layers of snapshots are gone", func() bool {
		for _, l := range d.layers(t) {
			if strings.HasPrefix(l, "upper-") {
				return false
			}
		}
		return true
	})
}

// TestSnapshotKeepsWhatGoesOn: a snapshot of an idle sandbox takes nothing
// from it: records of its commands, shared memory, its clock.
func TestSnapshotKeepsWhatGoesOn(t *testing.T) {
	d := install(t, "")
	sb := d.create(t, sandbox.Spec{Name: "dev"})
	p, err := d.StartProcess(t.Context(), "dev", sandbox.ProcessSpec{Argv: []string{"echo", "kept"}})
	if err != nil {
		t.Fatal(err)
	}
	d.sh(t, "dev", "echo shared >/dev/shm/x; echo f >/root/f")
	d.snapshot(t, "dev", "")
	if got := d.sh(t, "dev", "cat /dev/shm/x /root/f"); got != "shared\nf" {
		t.Errorf("after a snapshot: %q", got)
	}
	procs, err := d.Processes(t.Context(), "dev")
	if err != nil || len(procs) < 2 || procs[0].ID != p.ID {
		t.Errorf("processes %+v, %v", procs, err)
	}
	now, err := d.Sandbox(t.Context(), "dev")
	if err != nil || now.InitPID != sb.InitPID || now.Status != sandbox.StatusRunning {
		t.Errorf("now %+v, %v", now, err)
	}
}

// TestSnapshotOfWhatDoesNotRun: paused and stopped sandboxes have files too.
func TestSnapshotOfWhatDoesNotRun(t *testing.T) {
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "dev"})
	d.sh(t, "dev", "echo 1 >/root/f")
	if _, err := d.Pause(t.Context(), "dev"); err != nil {
		t.Fatal(err)
	}
	d.snapshot(t, "dev", "paused")
	if _, err := d.Resume(t.Context(), "dev"); err != nil {
		t.Fatal(err)
	}
	d.sh(t, "dev", "echo 2 >/root/f")
	if _, err := d.Stop(t.Context(), "dev"); err != nil {
		t.Fatal(err)
	}
	if s := d.snapshot(t, "dev", "stopped"); !s.Durable {
		t.Error("a snapshot of a stopped sandbox is on disk at once")
	}
	d.kill()
	d.start()
	if _, err := d.Start(t.Context(), "dev"); err != nil {
		t.Fatal(err)
	}
	if got := d.sh(t, "dev", "cat /root/f"); got != "2" {
		t.Errorf("after stop, snapshot, start: %q", got)
	}
	if _, err := d.Stop(t.Context(), "dev"); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Rollback(t.Context(), "dev", "paused"); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Start(t.Context(), "dev"); err != nil {
		t.Fatal(err)
	}
	if got := d.sh(t, "dev", "cat /root/f"); got != "1" {
		t.Errorf("rolled back while stopped: %q", got)
	}
	d.agree(t)
}

// TestUndo walks back through automatic restore points.
func TestUndo(t *testing.T) {
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "dev", AutoSnapshot: true})
	for i := range 4 {
		d.sh(t, "dev", fmt.Sprintf("echo %d >>/root/f", i))
		d.sh(t, "dev", "cat /root/f >/dev/null") // changes nothing
	}
	h, err := d.History(t.Context(), "dev")
	if err != nil || len(h.Points) != 4 || h.Changed {
		t.Fatalf("history %+v, %v", h, err)
	}
	if !strings.Contains(h.Points[0].Comment, "echo 3") || h.Points[0].Kind != sandbox.SnapshotAuto {
		t.Errorf("newest point %+v", h.Points[0])
	}
	undo := func(steps int, want string) {
		t.Helper()
		if _, err := d.Undo(t.Context(), "dev", steps); err != nil {
			t.Fatal(err)
		}
		if got := d.sh(t, "dev", "cat /root/f 2>/dev/null; true"); got != want {
			t.Errorf("undo %d: %q, want %q", steps, got, want)
		}
	}
	undo(1, "0\n1\n2")
	undo(2, "0")
	if _, err := d.Fork(t.Context(), string(h.Points[1].ID), sandbox.ForkRequest{Name: "aside"}); err != nil {
		t.Fatal(err)
	}
	if got := d.sh(t, "aside", "cat /root/f"); got != "0\n1\n2" {
		t.Errorf("branch: %q", got)
	}
	d.sh(t, "dev", "echo other >>/root/f")
	undo(1, "0")
	undo(1, "")
	if _, err := d.Undo(t.Context(), "dev", 1); sandbox.CodeOf(err) != "nothing_to_undo" {
		t.Errorf("undo of nothing: %v", err)
	}
	d.agree(t)
}

// layers lists the directories of layers on the daemon's volume.
func (d *daemon) layers(t testing.TB) []string {
	t.Helper()
	return entries(t, filepath.Join(fmt.Sprintf("/proc/%d/root", d.PID()), d.Dir, "state/volume/layers"))
}

// TestResetPaths resets some paths while a process goes on.
func TestResetPaths(t *testing.T) {
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "base"})
	d.sh(t, "base", "mkdir -p /srv/a/b; echo 1 >/srv/a/b/f; ln -s f /srv/a/b/l; chmod 0640 /srv/a/b/f; chown 7:8 /srv/a/b/f; echo keep >/srv/keep; useradd -m bob 2>/dev/null; true")
	d.snapshot(t, "base", "start")
	if _, err := d.Fork(t.Context(), "start", sandbox.ForkRequest{Name: "dev"}); err != nil {
		t.Fatal(err)
	}
	p, err := d.StartProcess(t.Context(), "dev", sandbox.ProcessSpec{Argv: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	const look = "cd /srv; find . -printf '%p %y %m %U:%G %l\n' | sort; cat a/b/f keep new 2>/dev/null; true"
	first := d.sh(t, "dev", look)
	d.sh(t, "dev", "cd /srv; rm -r a/b; mkdir a/b; echo other >a/b/x; echo changed >keep; echo new >new")
	changed := d.sh(t, "dev", look)
	if _, err := d.ResetPaths(t.Context(), "dev", "/srv/a", "/srv/new", "/srv/never/was"); err != nil {
		t.Fatal(err)
	}
	got := d.sh(t, "dev", look)
	if !strings.Contains(got, "changed") || strings.Contains(got, "new") || strings.Contains(got, "other") {
		t.Errorf("after the reset of two paths: %q, before it %q", got, changed)
	}
	if _, err := d.ResetPaths(t.Context(), "dev", "/srv/keep"); err != nil {
		t.Fatal(err)
	}
	if got := d.sh(t, "dev", look); got != first {
		t.Errorf("after the reset of all of them: %q, want %q", got, first)
	}
	if q, err := d.Process(t.Context(), "dev", p.ID); err != nil || q.Exit != nil {
		t.Errorf("a process did not go on: %+v, %v", q, err)
	}
	for _, bad := range []string{"/", "srv", "/srv/.."} {
		if _, err := d.ResetPaths(t.Context(), "dev", bad); sandbox.CodeOf(err) != "invalid_path" {
			t.Errorf("reset of %q: %v", bad, err)
		}
	}
	d.agree(t)
}

// TestSnapshotCarried takes a snapshot from one installation to another.
func TestSnapshotCarried(t *testing.T) {
	from, to := install(t, ""), &daemon{harness.InstallApart(t, "")}
	img := smallImage(t, from, "small")
	from.create(t, sandbox.Spec{Name: "dev", Image: img, Env: map[string]string{"A": "b"}})
	from.sh(t, "dev", "mkdir /srv/d && echo x >/srv/d/f && ln /srv/d/f /srv/d/g && chmod 4755 /srv/d/f")
	one := from.snapshot(t, "dev", "one")
	from.sh(t, "dev", "mv /srv/d /srv/e; echo y >/srv/y")
	from.snapshot(t, "dev", "two")
	for _, name := range []string{"one", "two"} {
		r, err := from.ExportSnapshot(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		s, err := to.ImportSnapshot(t.Context(), "", r)
		if cerr := r.Close(); err != nil || cerr != nil {
			t.Fatal(err, cerr)
		}
		if s.Name != name || s.ID == one.ID || !s.Durable {
			t.Errorf("imported %+v", s)
		}
		const look = "cd /srv; find . | sort | xargs stat -c '%n %F %a %u:%g'; cat */f; [ */f -ef */g ] && echo linked; echo $A"
		for _, d := range []*daemon{from, to} {
			if _, err := d.Fork(t.Context(), name, sandbox.ForkRequest{Name: "f" + name}); err != nil {
				t.Fatal(err)
			}
		}
		if got, want := to.sh(t, "f"+name, look), from.sh(t, "f"+name, look); got != want {
			t.Errorf("%s there: %q, here: %q", name, got, want)
		}
	}
	r, err := from.ExportSnapshot(t.Context(), "two")
	if err != nil {
		t.Fatal(err)
	}
	archive, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	for what, bad := range map[string][]byte{"cut short": archive[:len(archive)/2], "empty": nil, "no archive": []byte("hello"), "another layer": bytes.Replace(archive, []byte("-sha256:"), []byte("-sha256:0"), 1)} {
		if _, err := to.ImportSnapshot(t.Context(), "bad", bytes.NewReader(bad)); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := to.ImportSnapshot(t.Context(), "", bytes.NewReader(archive)); sandbox.CodeOf(err) != "snapshot_name_taken" {
		t.Errorf("a name that is taken: %v", err)
	}
	if _, err := to.ImportSnapshot(t.Context(), "again", bytes.NewReader(archive)); err != nil {
		t.Error(err)
	}
}

// TestSlowImportAndBuildKeepTheirOwn: while a snapshot arrives slowly and a build
// runs, the layer of an image that is removed goes, and theirs stay.
func TestSlowImportAndBuildKeepTheirOwn(t *testing.T) {
	d := install(t, "")
	img := smallImage(t, d, "small")
	d.create(t, sandbox.Spec{Name: "dev", Image: img})
	d.sh(t, "dev", "echo x >/srv/f")
	d.snapshot(t, "dev", "one")
	r, err := d.ExportSnapshot(t.Context(), "one")
	if err != nil {
		t.Fatal(err)
	}
	archive, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	was := len(d.layers(t))

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	builds, imports := make(chan built, 1), make(chan error, 1)
	go func() {
		builds <- d.build(ctx, sandbox.BuildRequest{Dockerfile: "FROM small\nRUN echo y >/srv/y\nRUN sleep 1000\n"}, nil)
	}()
	in, out := io.Pipe()
	go func() {
		_, err := d.ImportSnapshot(t.Context(), "two", in)
		imports <- errors.Join(err, in.Close())
	}()
	record := bytes.LastIndex(archive, []byte("snapshot.json")) // the layers are before it
	if _, err := out.Write(archive[:record]); err != nil {
		t.Fatal(err)
	}
	d.layersAre(t, was+3) // a step's, and the two of the archive
	var other bytes.Buffer
	w := tar.NewWriter(&other)
	if err := errors.Join(w.WriteHeader(&tar.Header{Name: "srv/", Typeflag: tar.TypeDir, Mode: 0o755}), w.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := d.ImportImage(t.Context(), "other", &other); err != nil {
		t.Fatal(err)
	}
	d.layersAre(t, was+4)
	if err := d.RemoveImage(t.Context(), "other"); err != nil {
		t.Fatal(err)
	}
	d.layersAre(t, was+3)

	_, err = out.Write(archive[record:])
	if err := errors.Join(err, out.Close(), <-imports); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Fork(t.Context(), "two", sandbox.ForkRequest{Name: "of-two"}); err != nil {
		t.Fatal(err)
	}
	if got := d.sh(t, "of-two", "cat /srv/f"); got != "x" {
		t.Errorf("the snapshot that came slowly holds %q", got)
	}
	cancel()
	if b := <-builds; !errors.Is(b.err, context.Canceled) {
		t.Errorf("the build: %v", b.err)
	}
}

// smallImage imports an image of busybox alone and returns its name.
func smallImage(t testing.TB, d *daemon, name string) string {
	t.Helper()
	program, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Fatalf("%v: install busybox-static", err)
	}
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	put := func(h tar.Header, data []byte) {
		h.Size = int64(len(data))
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
	}
	put(tar.Header{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755}, program)
	for applet := range strings.FieldsSeq("sh cat ls find sort xargs stat mkdir ln mv rm chmod echo sleep true hostname grep") {
		put(tar.Header{Name: "bin/" + applet, Typeflag: tar.TypeSymlink, Linkname: "busybox", Mode: 0o777}, nil)
	}
	put(tar.Header{Name: "srv/", Typeflag: tar.TypeDir, Mode: 0o755}, nil)
	put(tar.Header{Name: "etc/passwd", Typeflag: tar.TypeReg, Mode: 0o644}, []byte("root:*:0:0:root:/:/bin/sh\n"))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := d.ImportImage(t.Context(), name, &archive); err != nil {
		t.Fatal(err)
	}
	return name
}
