//go:build root

package faults

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
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

// TestNetworkNameHeld: a user of the host who holds the name that daemons have in
// a network namespace keeps none from starting. The control is root's: a daemon is
// refused, also with a /proc of its own.
func TestNetworkNameHeld(t *testing.T) {
	hold := func(uid int, listen string) (release func()) {
		t.Helper()
		// The interpreter may lie where only root gets in.
		cmd := exec.Command("python3", "-c", `
import os, socket, sys
os.setgroups([]); os.setresgid(*3*[int(sys.argv[1])]); os.setresuid(*3*[int(sys.argv[1])])
s = socket.socket(socket.AF_UNIX); s.bind("\0sandboxd/network"); clients = []
if sys.argv[2]: s.listen(int(sys.argv[2]))
if sys.argv[2] == "0":
    for i in range(8):
        c = socket.socket(socket.AF_UNIX); c.setblocking(False); clients.append(c)
        try: c.connect("\0sandboxd/network")
        except OSError: pass
try: open("/proc/sys/net/ipv4/route/flush", "w"); print("open", flush=True)
except PermissionError: print("closed", flush=True)
sys.stdin.read()`, strconv.Itoa(uid), listen)
		in, err := cmd.StdinPipe()
		need(t, err)
		out, err := cmd.StdoutPipe()
		need(t, err)
		cmd.Stderr = os.Stderr
		need(t, cmd.Start())
		said := make([]byte, 16)
		n, err := out.Read(said)
		need(t, err)
		if want := map[bool]string{true: "open", false: "closed"}[uid == 0]; strings.TrimSpace(string(said[:n])) != want {
			t.Errorf("the lock's file is %q to uid %d, want %q", said[:n], uid, want)
		}
		return func() { _ = in.Close(); _ = cmd.Wait() }
	}
	d := harness.Install(t, "")
	for _, way := range []string{"", "16", "0"} { // not listening, listening, with too many clients
		d.Crash()
		release := hold(65534, way)
		err := d.TryUp()
		release()
		if err != nil {
			t.Fatalf("a user holds the name (%q): %v", way, err)
		}
	}
	d.Crash()
	release := hold(0, "16")
	err := d.TryUp()
	release()
	if err == nil || !strings.Contains(err.Error(), "network namespace") {
		t.Fatalf("root holds the name: %v", err)
	}
	d.Up()
	other := filepath.Join(d.Dir, "second")
	need(t, os.Mkdir(other, 0o711))
	out, err := exec.Command("unshare", "--mount", "sh", "-c", `mount -t proc proc /proc && exec "$@"`, "sh", harness.Program(t, "sandboxd"),
		"--config", filepath.Join(d.Dir, "config.yaml"), "--cgroup", harness.CgroupMode(), "--cgroup-parent", d.Parent+"-second",
		"--state-dir", other+"/state", "--run-dir", other+"/run").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "the network namespace (table inet sandboxd and its addresses) is in use by process") {
		t.Errorf("a second daemon with a /proc of its own: %v\n%s", err, out)
	}
	_ = os.Remove(harness.CgroupRoot() + d.Parent + "-second")
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
	kept, err := os.ReadFile(h.backups(t)[len(h.backups(t))-1])
	need(t, err)
	newest := filepath.Join(t.TempDir(), "sandboxd-kept.db") // the next daemon drops its own
	need(t, os.WriteFile(newest, kept, 0o600))
	halves := []string{h.path("sandboxd.db.restored"), h.path("sandboxd.db.restored-wal"), h.path("backups/sandboxd-20200101T000000Z.db.part")}
	for _, half := range halves { // of a restore and a backup that were killed
		need(t, os.WriteFile(half, []byte("half"), 0o600))
	}
	h.Up()
	for _, half := range halves {
		need(t, within(20*time.Second, func() bool { _, err := os.Stat(half); return errors.Is(err, fs.ErrNotExist) }))
	}
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
	whole, err := os.ReadFile(newest)
	need(t, err)
	for what, b := range map[string][]byte{"empty": nil, "text": []byte("root:x:0:0\n"), "half": whole[:len(whole)/2]} {
		bad := filepath.Join(t.TempDir(), what)
		need(t, os.WriteFile(bad, b, 0o600))
		out, err := h.offline(t, "restore", bad)
		now, _ := os.ReadFile(h.path("sandboxd.db"))
		if left, _ := filepath.Glob(h.path("sandboxd.db.*")); err == nil || !strings.Contains(out, "not a whole database") || string(now) != "scribbled over" || len(left) != 0 {
			t.Errorf("restore of a file that is %s: %v\n%s\n%q, %q", what, err, out, now, left)
		}
	}
	if out, err := h.offline(t, "restore", newest); err != nil {
		t.Fatalf("restore: %v\n%s", err, out)
	}
	h.Up()
	if _, err := h.Create(t.Context(), sandbox.Spec{}, ""); sandbox.CodeOf(err) != "quarantine" {
		t.Errorf("create after a restore: %v, want code quarantine", err)
	}
	if out, _, code := h.CLI(t, nil, "", "doctor"); code != 1 || !strings.Contains(out, "quarantine") || !strings.Contains(out, "sandboxd recover") {
		t.Errorf("doctor in quarantine: %d\n%s", code, out)
	}
	for _, refused := range []string{"undo old", "reset old", "reset old --only /root/old", "stop old", "rm old", "start old", "snapshot create old", "fork old", "volume create v", "schedule add old reset @hourly"} {
		if said, errs, code := h.CLI(t, nil, "", strings.Fields(refused)...); code == 0 || !strings.Contains(errs, "sandboxd recover") {
			t.Errorf("%s in quarantine: %d\n%s%s", refused, code, said, errs)
		}
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

// TestRecoverRemoves: what 'sandboxd recover' is to remove it first shows, and
// removes only with --yes; a single id is that and no other; rows stay.
func TestRecoverRemoves(t *testing.T) {
	h := newHouse(t)
	h.Shut()
	older := h.save(t, databaseFiles...)
	h.Up()
	var ids []string
	for _, name := range []string{"one", "two", "three"} {
		ids = append(ids, string(h.New(t, sandbox.Spec{Name: name}).ID))
		h.Sh(t, name, "echo "+name+" >/root/"+name)
	}
	layers := func() []string { return names(t, h.path("volume/layers")) }
	known := layers()
	_, err := h.Snapshot(t.Context(), "three", sandbox.SnapshotRequest{Name: "late"})
	need(t, err)
	h.Crash()
	h.load(t, older, databaseFiles...)
	h.Up()
	h.Crash()
	there := func() (left []string) {
		for _, id := range ids {
			if _, err := os.Stat(h.path("volume/sandboxes/" + id + "/upper")); err == nil {
				left = append(left, id)
			}
		}
		return left
	}
	recover := func(wantErr bool, args ...string) string {
		t.Helper()
		out, err := h.offline(t, append([]string{"recover"}, args...)...)
		if (err != nil) != wantErr {
			t.Fatalf("recover %q: %v\n%s", args, err, out)
		}
		return out
	}
	before := layers()
	for _, args := range [][]string{nil, {"--remove", "all"}, {"--remove", ids[0]}} {
		out := recover(false, args...)
		if !slices.Equal(there(), ids) || !slices.Equal(layers(), before) {
			t.Fatalf("recover %q removed something:\n%s", args, out)
		}
		if strings.Contains(out, "removed for good with --yes") != (args != nil) || !strings.Contains(out, ids[0]) || strings.Contains(out, string(h.stopped.ID)) {
			t.Errorf("recover %q says:\n%s", args, out)
		}
	}
	recover(true, "--remove", "sbnobodyatall1", "--yes")
	recover(true, "--remove", ids[0], "--adopt", ids[0], "--yes")
	if !slices.Equal(there(), ids) {
		t.Fatalf("what was refused removed something: %v of %v are left", there(), ids)
	}
	out := recover(false, "--remove", ids[0], "--yes")
	if !slices.Equal(there(), ids[1:]) || !slices.Equal(layers(), before) || !strings.Contains(out, "removing "+ids[0]) {
		t.Fatalf("recover --remove of one: %v of %v are left\n%s", there(), ids, out)
	}
	if got := procs(t, h.Parent, ids[0]); len(got) > 0 {
		t.Errorf("its processes live: %v", got)
	}
	if got := procs(t, h.Parent, ids[1]); len(got) == 0 {
		t.Error("those of its neighbour do not")
	}
	out = recover(false, "--remove", "all", "--yes")
	if len(there()) > 0 || len(layers()) >= len(before) || !strings.Contains(out, "agree again") {
		t.Fatalf("recover --remove all: %v are left, of %d layers %d\n%s", there(), len(before), len(layers()), out)
	}
	for _, l := range known {
		if !slices.Contains(layers(), l) {
			t.Errorf("layer %s of a snapshot that the database knows is gone", l)
		}
	}
	start(t, h, "")
	if now := h.Sh(t, "runs", "cat /root/one"); now != "one" {
		t.Errorf("the running sandbox that the database knows: %q", now)
	}
	_, err = h.Start(t.Context(), "stopped")
	need(t, err)
	if now := h.Sh(t, "stopped", "cat /root/two /root/three"); now != "two\nthree" {
		t.Errorf("the stopped one: %q", now)
	}
}

func names(t *testing.T, dir string) (all []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	need(t, err)
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

func procs(t *testing.T, parent, id string) []string {
	t.Helper()
	b, _ := os.ReadFile(filepath.Join(harness.CgroupRoot(), parent, id, "init/cgroup.procs")) // it may be gone
	return strings.Fields(string(b))
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
