//go:build root

package escape

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestLeaseOnProgram: whoever executes a file with a lease on it waits for up to
// fs.lease-break-time. Inside nobody gets a lease; and where somebody else has
// one, as on a directory of the host, the one command fails and others go on.
func TestLeaseOnProgram(t *testing.T) {
	d := harness.Install(t, "")
	for _, who := range inmates {
		t.Run(string(who.caps)+" "+who.user, func(t *testing.T) {
			sb := d.New(t, sandbox.Spec{Capabilities: who.caps})
			ref := string(sb.ID)
			probe := giveProbe(t, d, ref)
			for _, dir := range []string{"/tmp", "/dev/shm"} {
				prog := dir + "/leased-" + who.user
				holder, err := d.Try(t.Context(), ref, sandbox.ProcessSpec{User: who.user, Argv: []string{
					"sh", "-c", "cp /bin/true " + prog + " && { " + probe + " lease " + prog + " >" + prog + ".told 2>/dev/null & } && until [ -s " + prog + ".told ]; do sleep 0.05; done",
				}})
				if err != nil || holder.Exit.Code != 0 {
					t.Fatal(err, holder.Stderr)
				}
				if told := d.Sh(t, ref, "cat "+prog+".told"); told != "invalid argument" {
					t.Errorf("a lease on %s: %s", prog, told)
				}
				besideLeased(t, d, ref, prog)
			}
			answers(t, d, sb)
		})
	}
	t.Run("of the host", func(t *testing.T) {
		signal.Ignore(unix.SIGIO)
		sb := d.New(t, sandbox.Spec{})
		ref := string(sb.ID)
		const prog = "/opt/leased"
		d.Sh(t, ref, "cp /bin/true "+prog+" && "+prog)
		f, err := os.OpenFile(fmt.Sprintf("/proc/%d/root%s", pid1(t, d, ref), prog), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
			t.Fatalf("control: outside: %v", err)
		}
		if code := besideLeased(t, d, ref, prog); code != "start_stalled" {
			t.Errorf("the command with the lease on it ended with %q", code)
		}
		if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_UNLCK); err != nil {
			t.Error(err)
		}
		_ = f.Close()
		d.Sh(t, ref, prog) // control: it was the lease
		answers(t, d, sb)
	})
}

// besideLeased starts a program that may have a lease on it, and beside it
// another, which must run. It returns how the first ended.
func besideLeased(t *testing.T, d *harness.Daemon, ref, prog string) string {
	t.Helper()
	first := make(chan error, 1)
	go func() {
		_, err := d.Try(t.Context(), ref, sandbox.ProcessSpec{Argv: []string{prog}})
		first <- err
	}()
	<-time.After(200 * time.Millisecond) // it is at its execve by then, or nearly
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	if r, err := d.Try(ctx, ref, sandbox.ProcessSpec{Argv: []string{"true"}}); err != nil || r.Exit.Code != 0 {
		t.Errorf("a command beside %s: %+v, %v", prog, r.Exit, err)
	}
	return sandbox.CodeOf(<-first)
}
