//go:build root

package faults

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestCopyUsedElsewhere: the state directory is copied, a second daemon removes
// a sandbox in the copy, and its database is put in the place of the first's.
// The first starts in quarantine, with the files of its sandbox.
func TestCopyUsedElsewhere(t *testing.T) {
	h := &house{Daemon: harness.Install(t, "")}
	if _, err := os.Stat(h.path("volume.img")); err == nil {
		t.Skip("the volume is an image here, mounted where only the daemon sees it")
	}
	h.stopped = h.New(t, sandbox.Spec{Name: "stopped"})
	h.run = h.stopped // there is no other
	h.Sh(t, "stopped", "echo two > /root/two")
	_, err := h.Stop(t.Context(), "stopped")
	need(t, err)
	h.Shut()
	h.tree = h.precious(t)

	o := &house{Daemon: harness.InstallApart(t, "")}
	o.Shut()
	need(t, os.RemoveAll(o.path("")))
	if out, err := exec.Command("cp", "-a", h.path(""), o.path("")).CombinedOutput(); err != nil {
		t.Fatalf("copy the state directory: %v: %s", err, out)
	}
	if out, err := o.offline(t, "recover", "--moved"); err != nil { // which is not so
		t.Fatalf("recover --moved: %v\n%s", err, out)
	}
	start(t, o, "")
	_, err = o.Remove(t.Context(), "stopped")
	need(t, err)
	<-time.After(300 * time.Millisecond)
	o.Crash()
	theirs := o.save(t, databaseFiles...)

	// The first has stood still since: theirs is one generation ahead. And then
	// it has gone on too: both are as far.
	for _, name := range []string{"one ahead", "as far"} {
		mine := h.save(t, databaseFiles...)
		h.load(t, theirs, databaseFiles...)
		t.Logf("%s: %s", name, why(start(t, h, "QUARANTINE")))
		<-time.After(400 * time.Millisecond) // the trash would be emptied
		h.Crash()
		if now := h.precious(t); missing(h.tree, now) != "" {
			t.Fatalf("%s: deleted: %s", name, missing(h.tree, now))
		}
		h.load(t, mine, databaseFiles...)
		start(t, h, "")
		if sb, err := h.Sandbox(t.Context(), "stopped"); err != nil || sb.Status != sandbox.StatusStopped {
			t.Fatalf("%s: the stopped sandbox with its own database: %v, %v", name, sb.Status, err)
		}
		h.Crash()
	}
}

// start starts a daemon in quarantine, or not in one.
func start(t *testing.T, h *house, want string) string {
	t.Helper()
	said := len(h.Log.String())
	h.Up()
	log := h.Log.String()[said:]
	if strings.Contains(log, "QUARANTINE") != (want != "") {
		t.Errorf("the start was not as it should be (want %q):\n%s", want, harness.Quiet(harness.LastLines(log, 20)))
	}
	return log
}

// TestCopyOfWhatRuns: in a copy of a state directory, whose budgets have been
// raised since in the original, a budget runs out; the original's sandbox goes
// on with its files. The control is that the copy says it is spent.
func TestCopyOfWhatRuns(t *testing.T) {
	h := &house{Daemon: harness.Install(t, "")}
	if _, err := os.Stat(h.path("volume.img")); err == nil {
		t.Skip("the volume is an image here, which a plain copy takes minutes for")
	}
	sb := h.New(t, sandbox.Spec{Name: "runs"})
	h.Sh(t, "runs", "echo one > /root/one")
	budget := cost.BudgetRequest{Sandbox: "runs", Meter: cost.MeterWall, Limit: "1s"}
	h.Shut()
	o := &house{Daemon: harness.InstallApart(t, "")}
	o.Shut()
	need(t, os.RemoveAll(o.path("")))
	if out, err := exec.Command("cp", "-a", h.path(""), o.path("")).CombinedOutput(); err != nil {
		t.Fatalf("copy the state directory: %v: %s", err, out)
	}
	start(t, h, "")
	start(t, o, "QUARANTINE")
	set, err := o.SetBudget(t.Context(), budget)
	need(t, err)
	testenv.Eventually(t, time.Minute, "the copy's budget is spent", func() bool {
		b, err := o.Budget(t.Context(), set.Key)
		return err == nil && b.Percent >= 100
	})
	<-time.After(1500 * time.Millisecond)
	if got, err := o.Sandbox(t.Context(), "runs"); err != nil || got.Status != sandbox.StatusRunning {
		t.Errorf("in the copy: %s (%s), %v", got.Status, got.Reason, err)
	}
	if got, err := h.Sandbox(t.Context(), "runs"); err != nil || got.Status != sandbox.StatusRunning || got.InitPID != sb.InitPID {
		t.Errorf("in the original: %s (%s: %s), %v", got.Status, got.Reason, got.Detail, err)
	}
	if got := h.Sh(t, "runs", "cat /root/one"); got != "one" {
		t.Errorf("the file holds %q", got)
	}
	h.RemoveAll(t.Context())
	h.Shut()
	o.Crash()
	if out, err := o.offline(t, "recover", "--copied"); err != nil {
		t.Fatalf("recover --copied: %v\n%s", err, out)
	}
	start(t, o, "") // where it does not run
}

// TestClonedState: a copy of a state directory is known as one, makes and
// removes nothing, and says what to do; so does one of another machine. The
// original goes on, and so does one that was renamed or is reached by a bind mount.
func TestClonedState(t *testing.T) {
	h := &house{Daemon: harness.Install(t, "")}
	if _, err := os.Stat(h.path("volume.img")); err == nil {
		t.Skip("the volume is an image here, which a plain copy takes minutes for")
	}
	h.stopped = h.New(t, sandbox.Spec{Name: "stopped"})
	h.Sh(t, "stopped", "echo two > /root/two")
	_, err := h.Stop(t.Context(), "stopped")
	need(t, err)
	h.Shut()

	o := &house{Daemon: harness.InstallApart(t, "")}
	o.Shut()
	need(t, os.RemoveAll(o.path("")))
	if out, err := exec.Command("cp", "-a", h.path(""), o.path("")).CombinedOutput(); err != nil {
		t.Fatalf("copy the state directory: %v: %s", err, out)
	}
	for _, flag := range []string{"--moved", "--copied"} {
		log := start(t, o, "QUARANTINE")
		if !strings.Contains(log, "is a copy") || !strings.Contains(log, "recover --moved") || !strings.Contains(log, "--copied") {
			t.Errorf("the start does not say what it found and what to do: %s", why(log))
		}
		if _, err := o.Start(t.Context(), "stopped"); sandbox.CodeOf(err) != "quarantine" {
			t.Errorf("start in the copy: %v; want code quarantine", err)
		}
		if _, err := o.Remove(t.Context(), "stopped"); sandbox.CodeOf(err) != "quarantine" {
			t.Errorf("rm in the copy: %v; want code quarantine", err)
		}
		o.Crash()
		for _, args := range [][]string{{"recover"}, {"recover", "--adopt", "all"}} {
			if out, err := o.offline(t, args...); err != nil || !strings.Contains(out, "Nothing was changed") {
				t.Errorf("%q in the copy: %v\n%s", args, err, out)
			}
		}
		if flag == "--copied" {
			break
		}
		if out, err := o.offline(t, "recover", flag); err != nil {
			t.Fatalf("recover %s: %v\n%s", flag, err, out)
		}
		start(t, o, "") // it lives here now
		o.Shut()
		again := o.path("") + "-again"
		if out, err := exec.Command("cp", "-a", o.path(""), again).CombinedOutput(); err != nil {
			t.Fatalf("copy the state directory: %v: %s", err, out)
		}
		need(t, os.RemoveAll(o.path("")))
		need(t, os.Rename(again, o.path("")))
	}
	before, err := os.ReadFile(o.path("volume/installation"))
	need(t, err)
	if out, err := o.offline(t, "recover", "--copied"); err != nil {
		t.Fatalf("recover --copied: %v\n%s", err, out)
	}
	start(t, o, "")
	_, err = o.Start(t.Context(), "stopped")
	need(t, err)
	if got := o.Sh(t, "stopped", "cat /root/two"); got != "two" {
		t.Errorf("in the copy the file holds %q", got)
	}
	after, err := os.ReadFile(o.path("volume/installation"))
	need(t, err)
	if string(before[:32]) == string(after[:32]) {
		t.Errorf("the copy has the original's id: %s", after[:32])
	}

	// The controls: the original, renamed, and by a bind mount.
	start(t, h, "")
	h.Shut()
	need(t, os.Rename(h.path(""), h.path("")+"-renamed"))
	at := slices.Index(h.Extra, "--state-dir") + 1
	was := h.Extra[at]
	h.Extra[at] += "-renamed"
	start(t, h, "")
	h.Shut()
	need(t, os.Mkdir(was, 0o700))
	need(t, unix.Mount(h.Extra[at], was, "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = unix.Unmount(was, unix.MNT_DETACH) })
	h.Extra[at] = was
	start(t, h, "")
	h.Shut()
	need(t, unix.Unmount(was, 0))
	need(t, os.Remove(was))
	need(t, os.Rename(was+"-renamed", was))

	// The same disk in another machine.
	id := filepath.Join(h.Dir, "machine-id")
	need(t, os.WriteFile(id, []byte("0123456789abcdef0123456789abcdef\n"), 0o644))
	if err := unix.Mount(id, "/etc/machine-id", "", unix.MS_BIND, ""); err != nil {
		t.Skipf("no machine id here: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount("/etc/machine-id", unix.MNT_DETACH) })
	if log := start(t, h, "QUARANTINE"); !strings.Contains(log, "another machine") {
		t.Errorf("in another machine: %s", why(log))
	}
	h.Crash()
	if out, err := h.offline(t, "recover", "--moved"); err != nil {
		t.Fatalf("recover --moved: %v\n%s", err, out)
	}
	start(t, h, "")
	_, err = h.Start(t.Context(), "stopped")
	need(t, err)
}
