//go:build root

package escape

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// besideCommands starts commands in a sandbox again and again while f runs.
func besideCommands(t *testing.T, d *harness.Daemon, ref string, spec sandbox.ProcessSpec, f func()) (n int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	attack, ended := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for ; attack.Err() == nil; n++ {
			_, _ = d.Try(ctx, ref, spec) // what was stopped may end as it likes
		}
	})
	f()
	ended()
	wg.Wait()
	if ctx.Err() != nil {
		t.Error("a command beside it never ended")
	}
	return n
}

// TestEnteringProcess looks at processes between their fork and their execve,
// while all that PID 1 has open is theirs, too (CVE-2016-9962): nothing of
// theirs can be opened, and none be traced. The probe stops them there.
func TestEnteringProcess(t *testing.T) {
	d := harness.Install(t, "")
	length := time.Duration(harness.Soak(2, 60)) * time.Second
	for _, who := range inmates {
		t.Run(string(who.caps)+" "+who.user, func(t *testing.T) {
			sb := d.New(t, sandbox.Spec{Capabilities: who.caps})
			ref := string(sb.ID)
			probe := giveProbe(t, d, ref)
			var got outcomes
			for range 20 { // few commands begin on a busy machine
				n := besideCommands(t, d, ref, sandbox.ProcessSpec{Argv: []string{"true"}, User: who.user, TimeoutSeconds: 0.2}, func() {
					got = probeAs(t, d, ref, who.user, probe, "entering", length.String())
				})
				t.Logf("of %d commands: %v", n, got)
				if got["caught"]["ok"] > 0 {
					break
				}
			}
			if got["caught"]["ok"] == 0 {
				t.Error("no process was caught before its program began: the probe saw nothing")
			}
			delete(got, "caught")
			for what, counts := range got {
				if counts["ok"] > 0 {
					t.Errorf("%s: %v", what, counts)
				}
			}
			answers(t, d, sb)
		})
	}
	t.Run("control", func(t *testing.T) {
		sb := d.New(t, sandbox.Spec{})
		got := probeAs(t, d, string(sb.ID), "root", giveProbe(t, d, string(sb.ID)), "entering-control")
		for _, what := range []string{"open fd", "list fd", "open environ", "open maps", "open mem", "enter root", "enter cwd", "open exe"} {
			if got[what]["ok"] == 0 {
				t.Errorf("%s of an ordinary process: %v", what, got[what])
			}
		}
	})
}

// TestHostProgramIsNotWritten has PID 1's program executed by commands in every
// way there is a name for it, and tries to write it by way of /proc, as long as
// it runs and once it ended (CVE-2019-5736). The control is a program of the
// sandbox's own, beside them: it is overwritten.
func TestHostProgramIsNotWritten(t *testing.T) {
	d := harness.Install(t, "")
	before := programs(t, d)
	length := time.Duration(harness.Soak(2, 60)) * time.Second
	for _, who := range inmates {
		t.Run(string(who.caps)+" "+who.user, func(t *testing.T) {
			sb := d.New(t, sandbox.Spec{Capabilities: who.caps})
			ref := string(sb.ID)
			probe := giveProbe(t, d, ref)
			d.Sh(t, ref, "cp "+probe+" /opt/victim && chmod 777 /opt/victim && cd /opt && for e in self thread-self 1; do printf '#!/proc/'$e'/exe wait\n' >by-$e; ln -s /proc/$e/exe link-$e; printf '#!/opt/link-'$e'\n' >through-$e; done; chmod 755 by-* through-*; chmod 777 /opt")
			run := `for p in /opt/by-* /opt/link-* /opt/through-* /proc/1/exe; do timeout 0.05 /opt/victim wait; timeout 0.05 $p wait; done 2>/dev/null; true`
			var got outcomes
			names := []string{"/opt/by-self", "/opt/through-self", "/opt/by-thread-self", "/opt/through-1", "/opt/by-1", "/proc/self/exe", "/opt/link-self"}
			n := 0
			n += besideCommands(t, d, ref, sandbox.ProcessSpec{Argv: []string{"sh", "-c", run}, User: who.user}, func() {
				ctx, cancel := context.WithTimeout(t.Context(), length)
				defer cancel()
				var wg sync.WaitGroup
				wg.Go(func() {
					for i := 0; ctx.Err() == nil; i++ {
						_, _ = d.Try(t.Context(), ref, sandbox.ProcessSpec{Argv: []string{names[i%len(names)]}, User: who.user, TimeoutSeconds: 0.1})
					}
				})
				got = probeAs(t, d, ref, who.user, probe, "overwrite", length.String())
				wg.Wait()
			})
			t.Logf("beside %d rounds: %v", n, got)
			for what, counts := range got {
				if strings.HasSuffix(what, ", written") && what != "/opt/victim, written" && counts["ok"] > 0 {
					t.Errorf("%s: %v", what, counts)
				}
			}
			if got["/opt/victim, written"]["ok"] == 0 {
				t.Errorf("the control, a program of the sandbox's own, was not overwritten: %v", got)
			}
			if said := d.Sh(t, ref, "head -c 11 /opt/victim"); said != "overwritten" {
				t.Errorf("the control begins with %q", said)
			}
			// PID 1's program, once more: a command that may not mount.
			if r, err := d.Try(t.Context(), ref, sandbox.ProcessSpec{Argv: []string{"/opt/by-self"}, User: who.user}); err != nil || r.Exit.Code == 0 || !strings.Contains(r.Stderr, "operation not permitted") {
				t.Errorf("PID 1's program as a command: %+v, %v", r, err)
			}
			answers(t, d, sb)
		})
	}
	for path, sum := range programs(t, d) {
		if before[path] != sum {
			t.Errorf("%s was changed", path)
		}
	}
}

// programs are the sums of the host's programs that sandboxes run by.
func programs(t *testing.T, d *harness.Daemon) map[string][32]byte {
	t.Helper()
	sums := map[string][32]byte{}
	for _, root := range []string{filepath.Dir(harness.Program(t, "sandboxd")), d.State(), filepath.Join(d.Dir, "run")} {
		_ = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
			if err == nil && e.Type().IsRegular() && (strings.Contains(e.Name(), "sandbox-") || e.Name() == "sandboxd" || e.Name() == "init") {
				b, err := os.ReadFile(path)
				if err != nil {
					t.Error(err)
				}
				sums[path] = sha256.Sum256(b)
			}
			return nil
		})
	}
	exe, err := os.ReadFile(fmt.Sprintf("/proc/%d/exe", d.PID()))
	if err != nil || len(sums) == 0 {
		t.Fatalf("programs of the host: %d, %v", len(sums), err)
	}
	sums["the daemon's"] = sha256.Sum256(exe)
	return sums
}
