//go:build root

package faults

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/integration/harness"
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
