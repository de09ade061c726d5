//go:build root

package guest_test

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/runtime/guest"
	"github.com/sandboxd/sandboxd/sandbox"
)

func TestZZ(t *testing.T) {
	x, _ := newRooted(t)
	if os.Getenv("RUNONE") != "" {
		x.sh("true")
	}
	time.Sleep(2500 * time.Millisecond)
	out, _ := exec.Command("sh", "-c", fmt.Sprintf("cat /proc/%d/smaps_rollup; cat /proc/%d/smaps | awk '/^[0-9a-f]+-/{n=$1\" \"$2\" \"$6} /^Rss|^Pss:|Private_Dirty|AnonHuge/{a[n]=a[n]\" \"$1$2} END{for(k in a)print k,a[k]}' | sort; ls /proc/%d/task | wc -l", x.cmd.Process.Pid, x.cmd.Process.Pid, x.cmd.Process.Pid)).Output()
	fmt.Println(string(out))
}

func BenchmarkExecNoCgroup(b *testing.B) {
	x, _ := newRooted(b, func(c *guest.Config) { c.Work = nil })
	best, sum := time.Hour, time.Duration(0)
	n := 0
	for b.Loop() {
		began := time.Now()
		s, err := x.Exec(b.Context(), sandbox.ProcessSpec{Argv: []string{"/bin/true"}})
		if err != nil {
			b.Fatal(err)
		}
		s.Next()
		d := time.Since(began)
		best = min(best, d)
		sum += d
		n++
	}
	b.ReportMetric(float64(best.Microseconds()), "µs-min")
}
