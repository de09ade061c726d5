//go:build root

package integration

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// small installs a daemon with little disk: where there are quotas a small
// volume, else everything on a small tmpfs, the database too.
func small(t *testing.T) *daemon {
	t.Helper()
	if testenv.Quota.Missing() == nil {
		return install(t, smallVolume)
	}
	dir, err := os.MkdirTemp("/var/tmp", "sandboxd-full-")
	if err == nil {
		err = unix.Mount("tmpfs", dir, "tmpfs", 0, "size=96m,mode=0711")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(unix.Unmount(dir, unix.MNT_DETACH), os.Remove(dir)); err != nil {
			t.Error(err)
		}
	})
	t.Setenv("SANDBOXD_TEST_DIR", dir)
	return install(t, "")
}

// fullCase is something that takes room on the disk.
type fullCase struct {
	what  string
	needs bool // more room than a full disk can have
	do    func() error
	check func() // after it succeeded; takes it back
}

// TestFull fills the disk. Whatever needs room then either still works or says
// that there is none, leaves nothing half made and disturbs nobody; with room
// again it works.
func TestFull(t *testing.T) {
	d := small(t)
	for _, name := range []string{"dev", "busy", "filler"} {
		d.create(t, sandbox.Spec{Name: name})
		d.sh(t, name, "echo first >/root/f")
	}
	d.snapshot(t, "dev", "before")
	d.sh(t, "dev", "echo second >/root/f")
	sleep, err := d.StartProcess(t.Context(), "busy", sandbox.ProcessSpec{Argv: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	// What a copy of busy's files has to copy, where it cannot share.
	d.sh(t, "busy", "head -c 4000000 /dev/urandom >/root/data")
	cases := d.fullCases(t)
	d.calm(t)
	was := d.holdings(t)
	d.fill(t)
	running := func(when string) {
		t.Helper()
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", d.hostPID(t, sleep.PID))); err != nil {
			t.Errorf("%s: the process of a bystander is gone: %v", when, err)
		}
	}
	refused := map[string]bool{}
	for _, c := range cases {
		err := c.do()
		refused[c.what] = err != nil
		t.Logf("full: %s: %v", c.what, err)
		switch {
		case err == nil && c.needs:
			t.Errorf("%s succeeded on a full disk", c.what)
		case err == nil:
			c.check()
		case !errors.Is(err, sandbox.ErrExhausted) || sandbox.CodeOf(err) != "volume_full" && sandbox.CodeOf(err) != "disk_full":
			t.Errorf("%s on a full disk: %v (%s), want volume_full or disk_full", c.what, err, sandbox.CodeOf(err))
		}
		running(c.what)
		for _, name := range []string{"dev", "busy", "filler"} {
			if sb, err := d.Sandbox(t.Context(), name); err != nil || sb.Status != sandbox.StatusRunning {
				t.Errorf("after %s %s is %s (%s): %v", c.what, name, sb.Status, sb.Detail, err)
			}
		}
	}
	var now []string
	left := 0 // layers that dev stands on until it is rolled back
	if refused["a rollback"] {
		left = 1
	}
	if !testenv.Within(20*time.Second, func() bool {
		now = d.holdings(t)
		more := slices.DeleteFunc(slices.Clone(now), func(s string) bool { return slices.Contains(was, s) })
		return len(now) == len(was)+len(more) && (len(more) == 0 || len(more) == left && strings.HasPrefix(more[0], "volume/layers/upper-"))
	}) {
		t.Errorf("on a full disk there were\n%s\nand now are\n%s", strings.Join(was, "\n"), strings.Join(now, "\n"))
	}
	d.makeRoom(t)
	for _, c := range cases {
		testenv.Eventually(t, 20*time.Second, "with room again: "+c.what, func() bool {
			err := c.do()
			if err != nil {
				t.Logf("with room again: %s: %v", c.what, err)
			}
			return err == nil
		})
		c.check()
		running(c.what)
	}
	d.agree(t)
}

// hostPID is the pid here of the only process called sleep in busy.
func (d *daemon) hostPID(t testing.TB, inside int) int {
	t.Helper()
	found, err := filepath.Glob("/proc/[0-9]*/status")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range found {
		b, err := os.ReadFile(f)
		if err != nil || !strings.HasPrefix(string(b), "Name:\tsleep\n") {
			continue
		}
		for line := range strings.Lines(string(b)) {
			if words := strings.Fields(line); len(words) > 2 && words[0] == "NSpid:" && words[len(words)-1] == strconv.Itoa(inside) {
				pid, _ := strconv.Atoi(words[1])
				return pid
			}
		}
	}
	return 0
}

// fill leaves no room: not for large files, nor for small ones.
func (d *daemon) fill(t testing.TB) {
	t.Helper()
	r := d.exec(t, "filler", "sh", "-c", `mkdir /root/fill; cd /root/fill
		dd if=/dev/zero of=a bs=1M; dd if=/dev/zero of=b bs=64k; dd if=/dev/zero of=c bs=4k
		i=0; while echo x >s$i; do i=$((i+1)); [ $i -lt 20000 ] || break; done; dd if=/dev/zero of=d bs=512; sync; df . | tail -n 1`)
	t.Logf("filled: %s", r.stdout)
	if !strings.Contains(r.stderr, "No space left") {
		t.Fatalf("filling the disk: %+v", r)
	}
}

// makeRoom removes what fill made; the command may find no room for its record.
func (d *daemon) makeRoom(t testing.TB) {
	t.Helper()
	testenv.Eventually(t, time.Minute, "there is room again", func() bool {
		if err := d.Files("filler").Remove(t.Context(), "root", "/root/fill", true); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			t.Logf("make room: %v", err)
			return false
		}
		return true
	})
}

// holdings lists what the volume and the database hold.
func (d *daemon) holdings(t testing.TB) (out []string) {
	t.Helper()
	for sb, err := range d.All(t.Context(), sandbox.Filter{}) {
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, "sandbox "+string(sb.ID))
	}
	images, err := d.Images(t.Context())
	for _, i := range images {
		out = append(out, "image "+i.Name)
	}
	volumes, verr := d.Volumes(t.Context())
	for _, v := range volumes {
		out = append(out, "volume "+v.Name)
	}
	if err := errors.Join(err, verr); err != nil {
		t.Fatal(err)
	}
	for _, s := range d.snapshots(t, "") {
		out = append(out, "snapshot "+s)
	}
	seen := filepath.Join(fmt.Sprintf("/proc/%d/root", d.PID()), d.Dir, "state")
	for _, dir := range []string{"volume/layers", "volume/staging", "volume/volumes", "builds"} {
		entries, err := os.ReadDir(filepath.Join(seen, dir))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		for _, e := range entries {
			out = append(out, dir+"/"+e.Name())
		}
	}
	slices.Sort(out)
	return out
}

func (d *daemon) fullCases(t *testing.T) []fullCase {
	ctx := t.Context()
	noise := make([]byte, 8<<20)
	r := rand.NewChaCha8([32]byte{1})
	_, _ = r.Read(noise)
	archive := archiveOf(t, file{name: "usr/"}, file{name: "usr/noise", data: string(noise)})
	var snap sandbox.Snapshot
	var forks []sandbox.Fork
	drop := func(err error) {
		t.Helper()
		if err != nil {
			t.Error(err)
		}
	}
	dropSnap := func() { _, err := d.RemoveSnapshot(ctx, string(snap.ID)); drop(err) }
	says := func(ref, want string) {
		t.Helper()
		if got := d.sh(t, ref, "cat /root/f"); got != want {
			t.Errorf("%s says %q, want %q", ref, got, want)
		}
	}
	return []fullCase{
		{"a snapshot of an idle sandbox", false, func() (err error) {
			snap, err = d.Snapshot(ctx, "dev", sandbox.SnapshotRequest{Name: "idle"})
			return err
		}, func() { dropSnap(); says("dev", "second") }},
		{"a snapshot of a busy sandbox", false, func() (err error) {
			snap, err = d.Snapshot(ctx, "busy", sandbox.SnapshotRequest{Name: "live"})
			return err
		}, func() {
			if !snap.Live {
				t.Error("the snapshot was not taken live")
			}
			dropSnap()
		}},
		{"a fork", false, func() (err error) {
			forks, err = d.Fork(ctx, "before", sandbox.ForkRequest{Name: "fork"})
			return err
		}, func() {
			says("fork", "first")
			_, err := d.Remove(ctx, string(forks[0].Sandbox.ID))
			drop(err)
		}},
		{"the import of an image", true, func() error {
			_, err := d.ImportImage(ctx, "noise", bytes.NewReader(archive))
			return err
		}, func() { drop(d.RemoveImage(ctx, "noise")) }},
		{"a build", true, func() error {
			return d.build(ctx, sandbox.BuildRequest{Names: []string{"built"}, Dockerfile: "FROM host\nCOPY noise /noise\n", NoCache: true}, archiveOf(t, file{name: "noise", data: string(noise)})).err
		}, func() {
			_, err := d.PruneBuildCache(ctx, sandbox.BuildCachePrune{})
			drop(errors.Join(err, d.RemoveImage(ctx, "built")))
		}},
		{"a volume", false, func() error {
			_, err := d.CreateVolume(ctx, sandbox.VolumeRequest{Name: "volume"})
			return err
		}, func() { drop(d.RemoveVolume(ctx, "volume")) }},
		{"a rollback", false, func() error {
			_, err := d.Rollback(ctx, "dev", "before")
			return err
		}, func() {
			says("dev", "first")
			d.sh(t, "dev", "echo second >/root/f; true")
		}},
	}
}
