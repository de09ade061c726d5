//go:build root

package faults

import (
	"os"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestLostUpper: of a stopped sandbox whose files are gone the daemon says so,
// at its start and to whoever asks, and what would go on with an empty root is
// refused. With the files put back it starts. The control was stopped beside it.
func TestLostUpper(t *testing.T) {
	for name, part := range map[string]string{"the sandbox's directory": "", "the upper in it": "/upper"} {
		t.Run(name, func(t *testing.T) { loseUpper(t, part) })
	}
}

func loseUpper(t *testing.T, part string) {
	d := harness.Install(t, "")
	for _, name := range []string{"lost", "control"} {
		d.New(t, sandbox.Spec{Name: name})
		d.Sh(t, name, "echo kept >/root/f")
		if _, err := d.Stop(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	sb, err := d.Sandbox(t.Context(), "lost")
	need(t, err)
	files := d.State("volume", "sandboxes", string(sb.ID)) + part
	away := d.State("volume", "away") // on the same volume, also where that is an image
	check := func(when string) {
		t.Helper()
		calls := map[string]func() error{
			"start":    func() error { _, err := d.Start(t.Context(), "lost"); return err },
			"snapshot": func() error { _, err := d.Snapshot(t.Context(), "lost", sandbox.SnapshotRequest{}); return err },
			"fork":     func() error { _, err := d.Fork(t.Context(), "lost", sandbox.ForkRequest{}); return err },
		}
		for what, call := range calls {
			err := call()
			if codeOf(err) != "files_gone" || !strings.Contains(err.Error(), "sandboxes/"+string(sb.ID)) || !strings.Contains(err.Error(), "sandbox rm") && !strings.Contains(err.Error(), "remove it") {
				t.Errorf("%s, %s: %v; want code files_gone, what is missing and what to do", when, what, err)
			}
		}
		out, _, _ := d.CLI(t, nil, "", "ls", "-a")
		if !strings.Contains(out, "files_gone") {
			t.Errorf("%s: ls does not say so:\n%s", when, out)
		}
		now, err := d.Sandbox(t.Context(), "lost")
		if err != nil || now.Status != sandbox.StatusStopped || now.Reason != "files_gone" || !strings.Contains(now.Detail, "upper is missing") {
			t.Errorf("%s: inspect: %s %s %q, %v", when, now.Status, now.Reason, now.Detail, err)
		}
	}
	rename := func(from, to string) { t.Helper(); need(t, os.Rename(from, to)) }

	rename(files, away)
	check("lost while the daemon ran")
	d.Crash()
	d.Up()
	away, files = d.State("volume", "away"), d.State("volume", "sandboxes", string(sb.ID))+part
	check("after a restart")
	rename(away, files)
	if now, err := d.Sandbox(t.Context(), "lost"); err != nil || now.Reason != sandbox.ReasonNone {
		t.Errorf("with the files back: %s %q, %v", now.Reason, now.Detail, err)
	}
	d.Shut()
	d.Up()
	away, files = d.State("volume", "away"), d.State("volume", "sandboxes", string(sb.ID))+part
	rename(files, away)
	d.Crash()
	said := len(d.Log.String())
	d.Up()
	if log := d.Log.String()[said:]; !strings.Contains(log, string(sb.ID)) || !strings.Contains(log, "upper is missing") {
		t.Errorf("the start does not say so:\n%s", harness.Quiet(log))
	}
	kinds := map[string]int{}
	events, _, err := d.Events(t.Context(), client.EventQuery{Sandbox: string(sb.ID), Limit: 100})
	need(t, err)
	for _, e := range events {
		kinds[e.Type]++
	}
	if kinds["sandbox.files_gone"] != 2 || kinds["sandbox.files_back"] != 1 {
		t.Errorf("events: %v; want files_gone twice and files_back once", kinds)
	}
	rename(d.State("volume", "away"), d.State("volume", "sandboxes", string(sb.ID))+part)
	for _, name := range []string{"control", "lost"} {
		if _, err := d.Start(t.Context(), name); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got := d.Sh(t, name, "cat /root/f"); got != "kept" {
			t.Errorf("%s: the file holds %q", name, got)
		}
	}
	d.Agree(t)
}
