//go:build root

package guest_test

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

func BenchmarkPing(b *testing.B) {
	x, _ := newRooted(b)
	for b.Loop() {
		if _, err := x.Ping(ctx(b)); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkExec runs /bin/true from request to exit status.
func BenchmarkExec(b *testing.B) {
	x, _ := newRooted(b)
	var took []time.Duration
	for b.Loop() {
		began := time.Now()
		s, err := x.Exec(b.Context(), sandbox.ProcessSpec{Argv: []string{"/bin/true"}})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := s.Next(); !errors.Is(err, io.EOF) {
			b.Fatal(err)
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[0].Microseconds()), "µs-min")
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "µs-median")
}

// BenchmarkForkExecOutside is the floor: the same program from this process.
func BenchmarkForkExecOutside(b *testing.B) {
	var took []time.Duration
	for b.Loop() {
		began := time.Now()
		if err := exec.Command("/bin/true").Run(); err != nil {
			b.Fatal(err)
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[0].Microseconds()), "µs-min")
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "µs-median")
}

func BenchmarkOutput(b *testing.B) {
	x, _ := newRooted(b)
	const total = 1 << 30
	b.SetBytes(total)
	for b.Loop() {
		s, err := x.Exec(b.Context(), sandbox.ProcessSpec{Argv: []string{"head", "-c", strconv.Itoa(total), "/dev/zero"}})
		if err != nil {
			b.Fatal(err)
		}
		n := 0
		for {
			o, err := s.Next()
			if err != nil {
				break
			}
			n += len(o.Data)
		}
		if n != total {
			b.Fatalf("%d bytes", n)
		}
	}
}

// BenchmarkRootSwitch takes a new root each time.
func BenchmarkRootSwitch(b *testing.B) {
	x, _ := newRooted(b)
	for b.Loop() {
		b.StopTimer()
		cfg := x.config()
		cfg.Root, _ = x.newRoot()
		b.StartTimer()
		if err := x.Configure(b.Context(), cfg); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkIdleMemory reports what one PID 1 with a root costs, several at once.
func BenchmarkIdleMemory(b *testing.B) {
	var boxes []*box
	for range 8 {
		x, _ := newRooted(b)
		x.sh("true")
		boxes = append(boxes, x)
	}
	for b.Loop() {
		if _, err := boxes[0].Ping(ctx(b)); err != nil {
			b.Fatal(err)
		}
	}
	b.StopTimer()
	// Memory is given back a second after the last operation.
	<-time.After(2 * time.Second)
	var pss, pte float64
	for _, x := range boxes {
		pss += field(b, x.cmd.Process.Pid, "smaps_rollup", "Pss:")
		pte += field(b, x.cmd.Process.Pid, "status", "VmPTE:")
	}
	b.ReportMetric(pss/8, "kB-pss/init")
	b.ReportMetric(pte/8, "kB-pte/init")
}

func field(b *testing.B, pid int, file, name string) float64 {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/" + file)
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == name {
			v, _ := strconv.ParseFloat(f[1], 64)
			return v
		}
	}
	b.Fatalf("no %s in %s", name, file)
	return 0
}
