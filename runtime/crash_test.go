package runtime

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// sqlDo changes the database behind the manager's back.
func sqlDo(t *testing.T, dir, query string) {
	t.Helper()
	db, err := sql.Open("sqlite3", filepath.Join(dir, "sandboxd.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.ExecContext(t.Context(), query); err != nil {
		t.Fatal(err)
	}
}

func (k *kernel) isFrozen(id sandbox.ID) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.frozen[id]
}

func (h *house) get(t *testing.T, id sandbox.ID) sandbox.Sandbox {
	t.Helper()
	sb, err := h.Inspect(t.Context(), string(id))
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

// TestCrashBetweenFreezeAndRow: after a restart the workload does what the
// row says, whichever of the two the crash forgot.
func TestCrashBetweenFreezeAndRow(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	running, paused := create(t, h, sandbox.Spec{}), create(t, h, sandbox.Spec{})
	if _, err := h.Pause(t.Context(), string(paused.ID), ""); err != nil {
		t.Fatal(err)
	}
	h.crash()
	k.mu.Lock()
	k.frozen = map[sandbox.ID]bool{running.ID: true} // frozen, not yet paused; thawed, not yet running
	k.mu.Unlock()
	open(t, k, dir)
	if k.isFrozen(running.ID) {
		t.Error("a running sandbox is left frozen")
	}
	if !k.isFrozen(paused.ID) {
		t.Error("a paused sandbox runs")
	}
}

// TestRefusedRow: where the database takes no row, the kernel goes back to
// what the row still says, and an end is tried until it is written.
func TestRefusedRow(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	h.retry = time.Millisecond
	sb := create(t, h, sandbox.Spec{})
	refuse := func(status string) {
		sqlDo(t, dir, `CREATE TRIGGER refuse BEFORE UPDATE ON sandboxes WHEN new.status = '`+status+`' AND old.status <> new.status
			BEGIN SELECT RAISE(ABORT, 'injected'); END`)
	}
	refuse("paused")
	if _, err := h.Pause(t.Context(), string(sb.ID), ""); err == nil || k.isFrozen(sb.ID) {
		t.Errorf("pause without a row: %v, frozen %v", err, k.isFrozen(sb.ID))
	}
	sqlDo(t, dir, `DROP TRIGGER refuse`)
	if _, err := h.Pause(t.Context(), string(sb.ID), ""); err != nil || !k.isFrozen(sb.ID) {
		t.Fatalf("pause: %v", err)
	}
	refuse("running")
	if _, err := h.Resume(t.Context(), string(sb.ID), ""); err == nil || !k.isFrozen(sb.ID) {
		t.Errorf("resume without a row: %v, frozen %v", err, k.isFrozen(sb.ID))
	}
	sqlDo(t, dir, `DROP TRIGGER refuse`)
	refuse("completing")
	k.mu.Lock()
	k.procs[sb.ID] = []sandbox.Process{{ID: "p1", Argv: []string{"last"}}}
	k.mu.Unlock()
	if _, err := h.Remove(t.Context(), string(sb.ID), ""); !errors.Is(err, sandbox.ErrUnavailable) {
		t.Errorf("remove without a row: %v", err)
	}
	k.setFail("guest.processes", true) // it is dead
	sqlDo(t, dir, `DROP TRIGGER refuse`)
	if got := until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status.Terminal() }); got.Reason != sandbox.ReasonCancelled {
		t.Errorf("ended %s", got.Reason)
	}
	if procs, err := h.Processes(t.Context(), string(sb.ID)); err != nil || len(procs) != 1 || procs[0].ID != "p1" {
		t.Errorf("what it said last: %+v, %v; want p1", procs, err)
	}
	h.agree(t)
}

// TestCrashAfterStrike: a sandbox that was killed on request ends as that,
// though the daemon died before the row could say so, and whether or not it
// came to the kill.
func TestCrashAfterStrike(t *testing.T) {
	for _, noted := range []bool{false, true} {
		t.Run(fmt.Sprintf("noted %v", noted), func(t *testing.T) {
			k, dir := newKernel(t), t.TempDir()
			h := open(t, k, dir)
			sb := create(t, h, sandbox.Spec{})
			k.killAt("cgroup.note", noted)
			go func() { _, _ = h.Remove(context.Background(), string(sb.ID), "uid:7") }()
			k.waitDead(t, "cgroup.note")
			h.crash()
			k.revive()
			h = open(t, k, dir)
			if !noted { // the control: nobody was told anything, and it lives
				if got := h.get(t, sb.ID); got.Status != sandbox.StatusRunning {
					t.Errorf("%s, want running", got.Status)
				}
				return
			}
			got := until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status.Terminal() })
			if got.Status != sandbox.StatusCompleted || got.Reason != sandbox.ReasonCancelled || got.Detail != "removed on request" {
				t.Errorf("%s %s %q, want completed, cancelled", got.Status, got.Reason, got.Detail)
			}
			h.agree(t)
		})
	}
	// After the kill.
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	sb := create(t, h, sandbox.Spec{})
	sqlDo(t, dir, `CREATE TRIGGER refuse BEFORE UPDATE ON sandboxes WHEN new.status = 'completing' BEGIN SELECT RAISE(ABORT, 'injected'); END`)
	if _, err := h.Remove(t.Context(), string(sb.ID), ""); err == nil {
		t.Fatal("removed without a row")
	}
	if h.box(sb.ID).present().Alive() {
		t.Error("it was not struck")
	}
	// Nobody is told that it runs, whatever its row says.
	if row, err := h.db.Sandbox(t.Context(), sb.ID); err != nil || row.Status != sandbox.StatusRunning {
		t.Errorf("its row: %s, %v", row.Status, err)
	}
	if got := h.get(t, sb.ID); got.Status != sandbox.StatusCompleting || got.Reason != sandbox.ReasonCancelled {
		t.Errorf("%s %s, want completing, cancelled", got.Status, got.Reason)
	}
	if _, err := h.Start(t.Context(), string(sb.ID), ""); err == nil {
		t.Error("started")
	}
	if _, err := h.Exec(t.Context(), string(sb.ID), sandbox.ProcessSpec{Argv: []string{"true"}}); sandbox.CodeOf(err) != sandbox.CodeEnded {
		t.Errorf("a command in it: %v", err)
	}
	h.crash()
	sqlDo(t, dir, `DROP TRIGGER refuse`)
	h = open(t, k, dir)
	if got := until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status.Terminal() }); got.Reason != sandbox.ReasonCancelled {
		t.Errorf("ended %s, want cancelled", got.Reason)
	}
	h.agree(t)
}

// TestSlowDeathIsSeen: a sandbox that takes long to die says so, once.
func TestSlowDeathIsSeen(t *testing.T) {
	k := newKernel(t)
	h := open(t, k, t.TempDir())
	for _, slow := range []bool{true, false} {
		sb := create(t, h, sandbox.Spec{})
		dead := make(chan struct{})
		if slow {
			k.mu.Lock()
			k.dying = dead
			k.mu.Unlock()
		}
		removed := make(chan error, 1)
		go func() { _, err := h.Remove(context.Background(), string(sb.ID), "uid:7"); removed <- err }()
		if slow {
			for deadline := time.Now().Add(time.Minute); ; <-time.After(time.Millisecond) {
				if row, err := h.db.Sandbox(t.Context(), sb.ID); err != nil || row.Status == sandbox.StatusCompleting {
					break
				}
				if time.Now().After(deadline) {
					t.Fatal("its row says that it runs")
				}
			}
			k.mu.Lock()
			k.dying = nil
			k.mu.Unlock()
			close(dead)
		}
		if err := <-removed; err != nil {
			t.Fatal(err)
		}
		events, err := h.Events(t.Context(), 0, string(sb.ID), 0)
		if err != nil {
			t.Fatal(err)
		}
		var said []string
		for _, e := range events {
			if e.Type == "sandbox.completing" || e.Type == "sandbox.completed" {
				said = append(said, e.Type+" "+e.Actor)
			}
		}
		if want := []string{"sandbox.completing uid:7", "sandbox.completed daemon"}; !slices.Equal(said, want) {
			t.Errorf("slow %v: %v, want %v", slow, said, want)
		}
		h.agree(t)
	}
}

// haltSteps are the steps of a stop that can fail or be cut off.
var haltSteps = []string{"cgroup.kill", "net.detach", "cgroup.remove", "shell.remove", "rootfs.clean"}

// TestCrashInStop: a stop that was begun ends in stopped, with files and
// counters, wherever it was cut off.
func TestCrashInStop(t *testing.T) {
	for _, step := range haltSteps {
		for _, crash := range []bool{true, false} {
			t.Run(step+map[bool]string{true: "/crash", false: "/retry"}[crash], func(t *testing.T) {
				k, dir := newKernel(t), t.TempDir()
				h := open(t, k, dir)
				h.retry = time.Millisecond
				sb := create(t, h, sandbox.Spec{TTLSeconds: 3600})
				k.setFail(step, true)
				if _, err := h.Stop(t.Context(), string(sb.ID), ""); !errors.Is(err, sandbox.ErrUnavailable) {
					t.Fatalf("stop with %s failing: %v", step, err)
				}
				if crash {
					h.crash()
					k.setFail(step, false)
					h = open(t, k, dir)
				}
				k.setFail(step, false)
				got := until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status == sandbox.StatusStopped || s.Status.Terminal() })
				if got.Status != sandbox.StatusStopped || got.Usage.CPUSeconds != 1 {
					t.Fatalf("%s %s with %v cpu seconds, want stopped with 1", got.Status, got.Reason, got.Usage.CPUSeconds)
				}
				h.agree(t)
				if !h.box(sb.ID).hasDeadline(t) {
					t.Error("its lifetime is no longer watched")
				}
				if _, err := h.Start(t.Context(), string(sb.ID), ""); err != nil {
					t.Fatal(err)
				}
				if got := h.get(t, sb.ID); got.Usage.CPUSeconds != 2 {
					t.Errorf("running again: %v cpu seconds, want 2", got.Usage.CPUSeconds)
				}
				h.agree(t)
			})
		}
	}
}

// hasDeadline waits for changes under way.
func (b *box) hasDeadline(t *testing.T) bool {
	t.Helper()
	if err := b.lock(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer b.unlock()
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.ttl != nil
}

// TestHostRestartInStop: files that may lack what was never written to disk
// are kept, and said to be so.
func TestHostRestartInStop(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	sb := create(t, h, sandbox.Spec{})
	k.setFail("rootfs.clean", true)
	if _, err := h.Stop(t.Context(), string(sb.ID), ""); err == nil {
		t.Fatal("stopped")
	}
	h.crash()
	k.setFail("rootfs.clean", false)
	sqlDo(t, dir, `UPDATE sandboxes SET boot_id = 'another'`)
	h = open(t, k, dir)
	if got := h.get(t, sb.ID); got.Status != sandbox.StatusStopped || got.Reason != sandbox.ReasonHostRestart || got.Detail != unclean {
		t.Errorf("%s %s %q, want stopped, host_restart, with the loss told", got.Status, got.Reason, got.Detail)
	}
	h.agree(t)
}

// TestHostRestartKeepsFiles: what ran when the host went down comes back
// stopped with its files, its restore points and its layers as far as they
// reached the disk, and can be started; what has no files ends.
func TestHostRestartKeepsFiles(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	running, paused, bare := create(t, h, sandbox.Spec{}), create(t, h, sandbox.Spec{}), create(t, h, sandbox.Spec{})
	if _, err := h.Pause(t.Context(), string(paused.ID), ""); err != nil {
		t.Fatal(err)
	}
	point, err := h.Snapshot(t.Context(), string(running.ID), sandbox.SnapshotRequest{Kind: sandbox.SnapshotAuto, Sync: true})
	if err != nil {
		t.Fatal(err)
	}
	torn, err := h.Snapshot(t.Context(), string(running.ID), sandbox.SnapshotRequest{Kind: sandbox.SnapshotAuto, Sync: true})
	if err != nil {
		t.Fatal(err)
	}
	h.crash()
	k.reboot(bare.ID, torn.Layers[len(torn.Layers)-1])
	sqlDo(t, dir, `UPDATE sandboxes SET boot_id = 'another'`)
	h = open(t, k, dir)
	for _, id := range []sandbox.ID{running.ID, paused.ID} {
		if got := h.get(t, id); got.Status != sandbox.StatusStopped || got.Reason != sandbox.ReasonHostRestart || got.Detail != unclean {
			t.Errorf("%s %s %q, want stopped, host_restart, with the loss told", got.Status, got.Reason, got.Detail)
		}
		if got, err := h.Start(t.Context(), string(id), ""); err != nil || got.Reason != sandbox.ReasonNone {
			t.Errorf("started: %s, %v", got.Reason, err)
		}
	}
	if got := h.get(t, bare.ID); got.Status != sandbox.StatusFailed || got.Reason != sandbox.ReasonHostRestart {
		t.Errorf("without files: %s %s, want failed, host_restart", got.Status, got.Reason)
	}
	if _, err := h.SnapshotOf(t.Context(), string(point.ID)); err != nil {
		t.Error(err)
	}
	r, err := h.state.RootOf(t.Context(), running.ID)
	if want := point.Layers; err != nil || !slices.Equal(r.Stack, want) {
		t.Errorf("it stands on %q, %v; want %q", r.Stack, err, want)
	}
	h.agree(t)
}

// TestLaunchHonoursItsDeadline: a shell that does not start in time costs that
// time, and what starts late is taken away.
func TestLaunchHonoursItsDeadline(t *testing.T) {
	k := newKernel(t)
	h := open(t, k, t.TempDir())
	create(t, h, sandbox.Spec{}) // the control
	k.launching, h.launchIn = make(chan struct{}), 10*time.Millisecond
	_, err := h.Create(t.Context(), sandbox.CreateRequest{})
	if sandbox.CodeOf(err) != "launch_timeout" {
		t.Fatalf("%v, want code launch_timeout", err)
	}
	close(k.launching)
	for deadline := time.Now().Add(10 * time.Second); ; <-time.After(time.Millisecond) {
		k.mu.Lock()
		live := 0
		for _, pid := range k.pids {
			if unix.Kill(pid, 0) == nil {
				live++
			}
		}
		sockets := len(k.sockets)
		k.mu.Unlock()
		if live <= 2 && sockets == 1 { // one is dead and not yet reaped
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d processes and %d sockets are left, want those of one sandbox", live, sockets)
		}
	}
}

// TestCountersOverTeardown: they never go back and never count twice, seen
// at any step of a teardown that is cut off there.
func TestCountersOverTeardown(t *testing.T) {
	for _, step := range releaseSteps {
		t.Run(step, func(t *testing.T) {
			k, dir := newKernel(t), t.TempDir()
			h := open(t, k, dir)
			sb := create(t, h, sandbox.Spec{})
			if _, err := h.Stop(t.Context(), string(sb.ID), ""); err != nil {
				t.Fatal(err)
			}
			if _, err := h.Start(t.Context(), string(sb.ID), ""); err != nil {
				t.Fatal(err)
			}
			want := func(when string) {
				t.Helper()
				if got := h.get(t, sb.ID).Usage.CPUSeconds; got != 2 {
					t.Errorf("%s: %v cpu seconds, want 2", when, got)
				}
			}
			want("running")
			k.setFail(step, true)
			if _, err := h.Remove(t.Context(), string(sb.ID), ""); (err != nil) != (step == "cgroup.kill") {
				t.Fatalf("remove: %v", err)
			}
			want("while it cannot be removed")
			h.crash()
			h = open(t, k, dir)
			want("after a restart that cannot remove it either")
			h.crash()
			k.setFail(step, false)
			h = open(t, k, dir)
			want("at the end")
			h.agree(t)
		})
	}
}

// TestFailedStartIsUndoneLater: a start whose undoing fails as well ends in
// stopped in the end.
func TestFailedStartIsUndoneLater(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	h.retry = time.Millisecond
	sb := create(t, h, sandbox.Spec{TTLSeconds: 3600})
	if _, err := h.Stop(t.Context(), string(sb.ID), ""); err != nil {
		t.Fatal(err)
	}
	h.k.setFail("guest.configure", true)
	h.k.setFail("net.detach", true)
	if _, err := h.Start(t.Context(), string(sb.ID), ""); !errors.Is(err, errInjected) {
		t.Fatalf("start: %v", err)
	}
	h.k.setFail("net.detach", false)
	got := until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status == sandbox.StatusStopped })
	if !h.box(sb.ID).hasDeadline(t) {
		t.Error("its lifetime is no longer watched")
	}
	h.agree(t)
	h.k.setFail("guest.configure", false)
	if got, err := h.Start(t.Context(), string(sb.ID), ""); err != nil || got.Detail != "" {
		t.Errorf("started with detail %q, %v", got.Detail, err)
	}
	if got.Detail == "" {
		t.Error("the record did not tell why the start failed")
	}
}

// TestEndOfAnEarlierShell: what a shell's end means is over with a stop. A
// stop makes processes end, the main one too; that is no end of the sandbox.
func TestEndOfAnEarlierShell(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	sb := create(t, h, sandbox.Spec{})
	b := h.box(sb.ID)
	old := b.present()
	late := mainEnding(sandbox.ExitStatus{Code: 1})
	late.shell = old
	if _, err := h.Stop(t.Context(), string(sb.ID), ""); err != nil {
		t.Fatal(err)
	}
	if err := h.end(t.Context(), b, late); err != nil || h.get(t, sb.ID).Status != sandbox.StatusStopped {
		t.Errorf("an end told after the stop: %v, %s", err, h.get(t, sb.ID).Status)
	}
	if _, err := h.Start(t.Context(), string(sb.ID), ""); err != nil {
		t.Fatal(err)
	}
	if err := h.end(t.Context(), b, late); err != nil || h.get(t, sb.ID).Status != sandbox.StatusRunning {
		t.Errorf("an end told after the next start: %v, %s", err, h.get(t, sb.ID).Status)
	}
	late.shell = b.present() // positive control
	if err := h.end(t.Context(), b, late); err != nil || h.get(t, sb.ID).Reason != sandbox.ReasonExited {
		t.Errorf("the present shell's end: %v, %+v", err, h.get(t, sb.ID))
	}
}

// TestMainProcessOfAnEarlierShell: the next shell's processes are others.
func TestMainProcessOfAnEarlierShell(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	sb := create(t, h, sandbox.Spec{})
	if _, err := h.Exec(t.Context(), string(sb.ID), sandbox.ProcessSpec{Argv: []string{"x"}, Main: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Stop(t.Context(), string(sb.ID), ""); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Start(t.Context(), string(sb.ID), ""); err != nil {
		t.Fatal(err)
	}
	h.k.mu.Lock()
	h.k.procs[sb.ID] = []sandbox.Process{{ID: "p1", Argv: []string{"other"}, Exit: &sandbox.ExitStatus{Code: 7}}}
	h.k.mu.Unlock()
	got, err := h.Remove(t.Context(), string(sb.ID), "uid:0")
	if err != nil || got.Reason != sandbox.ReasonCancelled || got.ExitCode != nil {
		t.Errorf("removed: %s %v, %v; want cancelled", got.Reason, got.ExitCode, err)
	}
}

// TestProcessNumbersGoOn: kept records of the shells before stay what they are.
func TestProcessNumbersGoOn(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	sb := create(t, h, sandbox.Spec{})
	h.k.mu.Lock()
	h.k.procs[sb.ID] = []sandbox.Process{{ID: "p41", Argv: []string{"x"}, Exit: &sandbox.ExitStatus{}}}
	h.k.mu.Unlock()
	if _, err := h.Stop(t.Context(), string(sb.ID), ""); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Start(t.Context(), string(sb.ID), ""); err != nil {
		t.Fatal(err)
	}
	h.k.mu.Lock()
	defer h.k.mu.Unlock()
	if got := h.k.configured[sb.ID].LastProcess; got != 41 {
		t.Errorf("the next shell counts on from %d, want 41", got)
	}
}

// TestSlowImport: a client that sends an archive forever holds up nobody.
func TestSlowImport(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	r, w := io.Pipe()
	imported := make(chan error, 1)
	go func() {
		_, err := h.ImportImage(context.WithoutCancel(t.Context()), sandbox.ImportRequest{Name: "slow"}, r)
		imported <- err
	}()
	if _, err := io.WriteString(w, "slow"); err != nil { // taken: the import is under way
		t.Fatal(err)
	}
	if _, err := h.ImportImage(t.Context(), sandbox.ImportRequest{Name: "quick"}, strings.NewReader("quick")); err != nil {
		t.Fatal(err)
	}
	if err := h.RemoveImage(t.Context(), "quick"); err != nil { // its layer is to be collected
		t.Fatal(err)
	}
	made := make(chan error, 1)
	go func() {
		_, err := h.Create(context.WithoutCancel(t.Context()), sandbox.CreateRequest{})
		made <- err
	}()
	select {
	case err := <-made:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("a create waits for another client's upload")
	}
	w.Close()
	if err := <-imported; err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); ; { // collected once the upload is over
		h.k.mu.Lock()
		left := maps.Clone(h.k.layers)
		h.k.mu.Unlock()
		if len(left) == 1 && left["slow"] {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("layers left: %v", left)
		}
		<-time.After(time.Millisecond)
	}
}

// TestRecoveryGoesOn: what cannot be mended now keeps no daemon from serving.
func TestRecoveryGoesOn(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	sb := func() sandbox.Sandbox {
		h := open(t, k, dir)
		defer h.crash()
		return create(t, h, sandbox.Spec{})
	}()
	orphan := sandbox.NewID()
	k.cgroups[orphan] = true
	for _, step := range []string{"cgroup.remove", "rootfs.hostimage", "rootfs.layer"} {
		k.setFail(step, true)
	}
	k.layers["unused"] = true
	h := open(t, k, dir) // fails the test where it fails
	if got := h.get(t, sb.ID); got.Status != sandbox.StatusRunning {
		t.Errorf("the sandbox is %s", got.Status)
	}
	create(t, h, sandbox.Spec{}) // of the host image as it was
}

// TestMutePID1IsAdopted: one that does not answer in time may be slow; its
// files are not thrown away for that.
func TestMutePID1IsAdopted(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	sb := create(t, h, sandbox.Spec{})
	h.crash()
	k.setMute(true)
	h = open(t, k, dir)
	if got := h.get(t, sb.ID); got.Status != sandbox.StatusRunning {
		t.Errorf("%s %s, want running", got.Status, got.Reason)
	}
	if got, err := h.Remove(t.Context(), string(sb.ID), ""); err != nil || !got.Status.Terminal() {
		t.Errorf("removed: %s, %v", got.Status, err)
	}
	h.agree(t)
}

// TestNewerProtocolKeepsTheFiles: a PID 1 this build cannot talk to is
// stopped, and can be started with the new one.
func TestNewerProtocolKeepsTheFiles(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	sb := create(t, h, sandbox.Spec{})
	h.crash()
	k.setFail("guest.version", true)
	h = open(t, k, dir)
	if got := h.get(t, sb.ID); got.Status != sandbox.StatusStopped {
		t.Fatalf("%s %s, want stopped", got.Status, got.Reason)
	}
	h.agree(t)
	k.setFail("guest.version", false)
	if _, err := h.Start(t.Context(), string(sb.ID), ""); err != nil {
		t.Error(err)
	}
}
