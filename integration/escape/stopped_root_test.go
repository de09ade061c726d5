//go:build root

package escape

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestPID1StoppedChild stops all it may while commands are started: the child
// that PID 1 forked is stopped before its execve, and the thread that forks
// waits for it.
func TestPID1StoppedChild(t *testing.T) {
	d := harness.Install(t, "")
	length := time.Duration(harness.Soak(3, 60)) * time.Second
	for _, who := range inmates {
		t.Run(string(who.caps)+" "+who.user, func(t *testing.T) {
			sb := d.New(t, sandbox.Spec{Capabilities: who.caps})
			ref := string(sb.ID)
			probe := giveProbe(t, d, ref)
			d.Sh(t, ref, "true")
			ctx, stop := context.WithTimeout(t.Context(), length+30*time.Second)
			defer stop()
			var mu sync.Mutex
			ends := map[string]int{}
			attack, ended := context.WithCancel(ctx)
			var victims sync.WaitGroup
			for range 2 {
				victims.Go(func() {
					for attack.Err() == nil {
						// What was stopped once it ran is to end, too.
						_, err := d.Try(ctx, ref, sandbox.ProcessSpec{Argv: []string{"true"}, User: who.user, TimeoutSeconds: 0.2})
						what := ""
						if err != nil {
							what = sandbox.CodeOf(err)
						}
						mu.Lock()
						ends[what]++
						mu.Unlock()
					}
				})
			}
			stuck := time.AfterFunc(length+20*time.Second, func() {
				t.Error("nothing is started or ended any more")
				_, _ = d.Remove(t.Context(), ref)
			})
			got := probeAs(t, d, ref, who.user, probe, "stop-all", length.String())
			ended()
			victims.Wait()
			stuck.Stop()
			t.Logf("%v; the commands beside it ended with %v", got, ends)
			if got["kill all"]["ok"] == 0 {
				t.Errorf("nothing was stopped: %v", got)
			}
			delete(ends, "")
			delete(ends, "start_stopped")
			if len(ends) > 0 {
				t.Errorf("commands failed otherwise: %v", ends)
			}
			after, stop := context.WithTimeout(t.Context(), 30*time.Second)
			defer stop()
			if r, err := d.Try(after, ref, sandbox.ProcessSpec{Argv: []string{"echo", "answered"}}); err != nil || strings.TrimSpace(r.Stdout) != "answered" {
				t.Fatalf("a command afterwards: %q, %v", r.Stdout, err)
			}
			answers(t, d, sb)
		})
	}
	t.Run("control", func(t *testing.T) {
		sb := d.New(t, sandbox.Spec{})
		ref := string(sb.ID)
		probe := giveProbe(t, d, ref)
		pid := d.Sh(t, ref, "sleep 60 >/dev/null 2>&1 & echo $!")
		probeAs(t, d, ref, "root", probe, "stop-all", "200ms")
		if stat := strings.Fields(d.Sh(t, ref, "cat /proc/"+pid+"/stat")); len(stat) < 3 || stat[2] != "T" {
			t.Errorf("an ordinary process is not stopped: %v", stat)
		}
	})
}
