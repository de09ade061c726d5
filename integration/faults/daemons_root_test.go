//go:build root

package faults

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestSecondDaemonRefuses: what only one daemon may have is refused to a
// second, which says whose it is and which flag to change; the first's
// sandboxes live.
func TestSecondDaemonRefuses(t *testing.T) {
	d := harness.Install(t, "")
	d.New(t, sandbox.Spec{Name: "first"})
	before := d.Sh(t, "first", "readlink /proc/self/ns/pid")
	for _, pair := range []struct {
		name                       string
		state, run, cgroup, socket bool // shared
		ownNet                     bool
		want                       string
	}{
		{"everything", true, true, true, true, false, "--state-dir"},
		{"state", true, false, false, false, true, "--state-dir"},
		{"run", false, true, false, false, true, "--run-dir"},
		{"cgroup", false, false, true, false, true, "--cgroup-parent"},
		{"socket", false, false, false, true, true, "--socket"},
		{"network", false, false, false, false, false, "network namespace"},
		{"cgroup and network", false, false, true, false, false, "--cgroup-parent"},
		{"run and cgroup", false, true, true, false, true, "--run-dir"},
		{"state and network", true, false, false, false, false, "--state-dir"},
		{"run and socket", false, true, false, true, false, "--run-dir"},
		{"all but the network", true, true, true, true, true, "--state-dir"},
		{"nothing", false, false, false, false, true, ""},
	} {
		t.Run(pair.name, func(t *testing.T) {
			dir := filepath.Join(d.Dir, "second")
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			need(t, os.MkdirAll(dir, 0o711))
			pick := func(shared bool, ours, theirs string) string {
				if shared {
					return theirs
				}
				return ours
			}
			parent := pick(pair.cgroup, d.Parent+"-second", d.Parent)
			args := []string{
				"--config", filepath.Join(d.Dir, "config.yaml"), "--cgroup", harness.CgroupMode(), "--cgroup-parent", parent,
				"--state-dir", pick(pair.state, dir+"/state", d.Dir+"/state"), "--run-dir", pick(pair.run, dir+"/run", d.Dir+"/run"),
				"--socket", pick(pair.socket, dir+"/run/s.sock", d.Dir+"/run/sandboxd.sock"),
			}
			program := harness.Program(t, "sandboxd")
			cmd := exec.Command(program, args...)
			if pair.ownNet {
				cmd = exec.Command("unshare", append([]string{"--net", "sh", "-c", `ip link set lo up && exec "$@"`, "sh", program}, args...)...)
			}
			var said harness.Log
			cmd.Stdout, cmd.Stderr = &said, &said
			need(t, cmd.Start())
			ended := make(chan struct{})
			go func() { _ = cmd.Wait(); close(ended) }()
			for started := false; !started; {
				select {
				case <-ended:
					started = true
				case <-time.After(50 * time.Millisecond):
					started = strings.Contains(said.String(), "msg=ready")
				}
			}
			_ = cmd.Process.Signal(os.Interrupt)
			<-ended
			if pair.want == "" {
				if !strings.Contains(said.String(), "msg=ready") { // the control
					t.Errorf("a daemon that shares nothing does not start:\n%s", harness.Quiet(said.String()))
				}
				removeCgroups(t, harness.CgroupRoot()+parent)
				return
			}
			if !strings.Contains(said.String(), "is in use by process") || !strings.Contains(said.String(), pair.want) {
				t.Errorf("the second said, want %q:\n%s", pair.want, harness.Quiet(said.String()))
			}
			_ = os.Remove(harness.CgroupRoot() + parent)
		})
	}
	if now := d.Sh(t, "first", "readlink /proc/self/ns/pid"); now != before {
		t.Errorf("the first daemon's sandbox is another: %s, was %s", now, before)
	}
}

// removeCgroups takes away what an ended daemon's pool had.
func removeCgroups(t *testing.T, dir string) {
	t.Helper()
	_ = os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0o200)
	testenv.Within(5*time.Second, func() bool {
		out, _ := exec.Command("find", dir, "-depth", "-type", "d", "-exec", "rmdir", "{}", ";").CombinedOutput()
		return len(out) == 0
	})
}

// TestBackupAndRestore: a backup is made on time, one command puts it back, and
// what is newer than it is listed, and adopted.
func TestBackupAndRestore(t *testing.T) {
	h := &house{Daemon: harness.Install(t, "backup: {every: 1s, keep: 2}\n")}
	if _, err := os.Stat(h.path("volume.img")); err == nil {
		t.Skip("the volume is an image here")
	}
	old := h.New(t, sandbox.Spec{Name: "old"})
	h.Sh(t, "old", "echo old > /root/old")
	pid := h.Sh(t, "old", "readlink /proc/self/ns/pid")
	need(t, within(20*time.Second, func() bool { return len(h.backups(t)) == 2 }))
	first := h.backups(t)[0]
	need(t, within(20*time.Second, func() bool { return h.backups(t)[0] != first })) // kept: two
	h.Crash()
	newest := h.backups(t)[len(h.backups(t))-1]
	h.Up()
	late := h.New(t, sandbox.Spec{Name: "late"})
	h.Sh(t, "late", "echo late > /root/late")
	if out, err := h.offline(t, "restore", newest); err == nil {
		t.Errorf("restore beside a daemon that runs: %s", out)
	}
	h.Crash()
	need(t, os.WriteFile(h.path("sandboxd.db"), []byte("scribbled over"), 0o600))
	if err := h.TryUp(); err == nil || !strings.Contains(err.Error(), "sandboxd restore") {
		t.Fatalf("a start on a damaged database: %v", err)
	}
	if out, err := h.offline(t, "restore", newest); err != nil {
		t.Fatalf("restore: %v\n%s", err, out)
	}
	h.Up()
	if _, err := h.Create(t.Context(), sandbox.Spec{}, ""); sandbox.CodeOf(err) != "quarantine" {
		t.Errorf("create after a restore: %v, want code quarantine", err)
	}
	if now := h.Sh(t, "old", "readlink /proc/self/ns/pid; cat /root/old"); now != pid+"\nold" {
		t.Errorf("the sandbox of the backup: %q", now)
	}
	h.Crash()
	out, err := h.offline(t, "recover")
	if err != nil || !strings.Contains(out, string(late.ID)) || strings.Contains(out, string(old.ID)) {
		t.Fatalf("recover: %v\n%s", err, out)
	}
	if out, err = h.offline(t, "recover", "--adopt", "all"); err != nil || !strings.Contains(out, "recovered-"+string(late.ID)) {
		t.Fatalf("recover --adopt all: %v\n%s", err, out)
	}
	h.Up()
	if now := h.Sh(t, "old", "readlink /proc/self/ns/pid; cat /root/old"); now != pid+"\nold" {
		t.Errorf("the sandbox of the backup, at the end: %q", now)
	}
	if _, err := h.Create(t.Context(), sandbox.Spec{Name: "again"}, ""); err != nil {
		t.Errorf("create after recover: %v", err)
	}
	found := false
	images, err := h.Images(t.Context())
	need(t, err)
	for _, img := range images {
		if img.Name == "recovered-"+string(late.ID) {
			b, err := os.ReadFile(filepath.Join(h.path("volume/layers"), strings.Replace(img.Layers[0], ":", "-", 1), "upper/root/late"))
			found = err == nil && string(b) == "late\n"
		}
	}
	if !found {
		t.Errorf("no image holds what the late sandbox wrote")
	}
}

func (h *house) backups(t *testing.T) []string {
	t.Helper()
	all, err := filepath.Glob(h.path("backups/sandboxd-*.db"))
	need(t, err)
	return all
}

// offline runs a command of the daemon's program that needs none to run.
func (h *house) offline(t *testing.T, args ...string) (string, error) {
	t.Helper()
	out, err := exec.Command(harness.Program(t, "sandboxd"), append(args, h.Extra...)...).CombinedOutput()
	return string(out), err
}

func within(limit time.Duration, ok func() bool) error {
	if !testenv.Within(limit, ok) {
		return os.ErrDeadlineExceeded
	}
	return nil
}
