//go:build root

package faults

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestLostRunDirectory: a PID 1 that lives is not taken for dead because its
// socket, or the whole run directory, is lost. Its processes go on, a stop
// keeps the files, and a start makes what was lost. The control loses nothing.
func TestLostRunDirectory(t *testing.T) {
	for _, way := range []string{"nothing", "the socket", "the run directory"} {
		t.Run(way, func(t *testing.T) {
			d := harness.Install(t, "")
			sb := d.New(t, sandbox.Spec{Name: "s"})
			d.Sh(t, "s", "echo kept >/root/f")
			if _, err := d.StartProcess(t.Context(), "s", sandbox.ProcessSpec{Argv: []string{"sleep", "1000"}}); err != nil {
				t.Fatal(err)
			}
			d.Crash()
			run := filepath.Join(d.Dir, "run")
			var err error
			switch way {
			case "the socket":
				err = os.Remove(filepath.Join(run, "init", string(sb.ID)+".sock"))
			case "the run directory":
				err = os.Rename(run, run+"-lost")
			}
			if err != nil {
				t.Fatal(err)
			}
			d.Up()
			now, err := d.Sandbox(t.Context(), "s")
			if err != nil || now.Status != sandbox.StatusRunning || now.InitPID != sb.InitPID {
				t.Fatalf("after the start it is %s (%s %s), PID 1 %d, %v; want running, %d", now.Status, now.Reason, now.Detail, now.InitPID, err, sb.InitPID)
			}
			r, err := d.Try(t.Context(), "s", sandbox.ProcessSpec{Argv: []string{"cat", "/root/f"}})
			if way == "nothing" && (err != nil || r.Stdout != "kept\n") {
				t.Errorf("the control: %q, %v", r.Stdout, err)
			}
			if way != "nothing" && (err == nil || codeOf(err) == "") {
				t.Errorf("a command in it: %q, %v; want an error with a code", r.Stdout, err)
			}
			if _, err := d.Stop(t.Context(), "s"); err != nil {
				t.Fatal(err)
			}
			if _, err := d.Start(t.Context(), "s"); err != nil {
				t.Fatal(err)
			}
			if got := d.Sh(t, "s", "cat /root/f"); got != "kept" {
				t.Errorf("after stop and start: %q", got)
			}
			d.Agree(t)
		})
	}
}

// TestLostWhileRunning: the socket of the API and the run directory are made
// again, with their modes and locks, while the daemon runs; sandboxes go on, and others
// can be made. The control is the socket's life where nothing is removed.
func TestLostWhileRunning(t *testing.T) {
	for _, way := range []string{"nothing", "the API's socket", "all sockets", "the run directory", "the run directory, renamed"} {
		t.Run(way, func(t *testing.T) {
			d := harness.Install(t, "")
			sb := d.New(t, sandbox.Spec{Name: "s"})
			d.Sh(t, "s", "echo kept >/root/f")
			run := filepath.Join(d.Dir, "run")
			socket := filepath.Join(run, "sandboxd.sock")
			was, err := os.Stat(socket)
			need(t, err)
			dir, err := os.Stat(run)
			need(t, err)
			switch way {
			case "the API's socket":
				err = os.Remove(socket)
			case "all sockets":
				err = errors.Join(os.Remove(socket), os.RemoveAll(filepath.Join(run, "init")))
			case "the run directory":
				for err = os.RemoveAll(run); errors.Is(err, unix.ENOTEMPTY); err = os.RemoveAll(run) { // the daemon is quick
				}
			case "the run directory, renamed":
				err = os.Rename(run, run+"-lost")
			}
			need(t, err)
			<-time.After(2500 * time.Millisecond) // twice what the daemon takes to look
			fresh, err := client.New(d.Host())
			need(t, err)
			need(t, within(30*time.Second, func() bool { _, err := fresh.Version(t.Context()); return err == nil }))
			is, err := os.Stat(socket)
			need(t, err)
			if same := os.SameFile(was, is); same != (way == "nothing") || is.Mode() != was.Mode() {
				t.Errorf("the socket: the same %v, mode %v, was %v", same, is.Mode(), was.Mode())
			}
			if now, err := os.Stat(run); err != nil || now.Mode() != dir.Mode() {
				t.Errorf("the run directory: %v, %v", now.Mode(), err)
			}
			if now, err := fresh.Sandbox(t.Context(), "s"); err != nil || now.Status != sandbox.StatusRunning || now.InitPID != sb.InitPID {
				t.Fatalf("the sandbox is %s (%s), PID 1 %d, %v; want running, %d", now.Status, now.Detail, now.InitPID, err, sb.InitPID)
			}
			second := exec.Command("unshare", append([]string{"--net", harness.Program(t, "sandboxd")}, withState(d.Extra, d.Dir+"/second", d.Parent+"-second")...)...)
			if out, err := second.CombinedOutput(); err == nil || !strings.Contains(string(out), "--run-dir") {
				t.Errorf("a second daemon with this run directory: %v\n%s", err, out)
			}
			_ = os.Remove(harness.CgroupRoot() + d.Parent + "-second")
			if got := d.Sh(t, "s", "cat /root/f"); got != "kept" {
				t.Errorf("a command in the sandbox that ran: %q", got)
			}
			other := d.New(t, sandbox.Spec{Name: "other"})
			d.Sh(t, string(other.ID), "true")
			if _, err := d.Stop(t.Context(), "s"); err != nil {
				t.Fatal(err)
			}
			if _, err := d.Start(t.Context(), "s"); err != nil {
				t.Fatal(err)
			}
			if got := d.Sh(t, "s", "cat /root/f"); got != "kept" {
				t.Errorf("after stop and start: %q", got)
			}
		})
	}
}

// withState is a daemon's arguments with another state directory and cgroup.
func withState(args []string, dir, parent string) []string {
	args = slices.Clone(args)
	args[slices.Index(args, "--state-dir")+1] = dir
	args[slices.Index(args, "--cgroup-parent")+1] = parent
	return args
}

func codeOf(err error) string { return sandbox.CodeOf(err) }

// TestParentCgroupChanged: a daemon told another parent cgroup than the one its
// sandboxes run in refuses to start, and leaves them alone. The control is the
// start with the right one.
func TestParentCgroupChanged(t *testing.T) {
	d := harness.Install(t, "")
	sb := d.New(t, sandbox.Spec{Name: "s"})
	d.Crash()
	args := slices.Clone(d.Extra)
	args[slices.Index(args, "--cgroup-parent")+1] = d.Parent + "-other"
	t.Cleanup(func() { removeCgroups(t, harness.CgroupRoot()+d.Parent+"-other") })
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, harness.Program(t, "sandboxd"), args...).CombinedOutput()
	if err == nil || ctx.Err() != nil || !strings.Contains(string(out), "parent cgroup") {
		t.Fatalf("with another parent cgroup: %v\n%s", err, out)
	}
	d.Up()
	if now, err := d.Sandbox(t.Context(), "s"); err != nil || now.Status != sandbox.StatusRunning || now.InitPID != sb.InitPID {
		t.Errorf("with the right one it is %s, %v", now.Status, err)
	}
	d.Sh(t, "s", "true")
}
