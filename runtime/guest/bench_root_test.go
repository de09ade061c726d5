//go:build root

package guest_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/runtime/guest"
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

// duel times two ways of doing the same by turns, so that a busy moment hits
// both. It reports the medians, and of each round's ratio the median.
type duel struct {
	ours, floor []time.Duration
	rest        time.Duration // before each turn
}

func (d *duel) round(b *testing.B, ours, floor func() error) {
	b.Helper()
	timed := func(f func() error) time.Duration {
		if d.rest > 0 {
			<-time.After(d.rest)
		}
		began := time.Now()
		if err := f(); err != nil {
			b.Fatal(err)
		}
		return time.Since(began)
	}
	if len(d.ours)%2 == 0 {
		d.floor = append(d.floor, timed(floor))
		d.ours = append(d.ours, timed(ours))
		return
	}
	d.ours = append(d.ours, timed(ours))
	d.floor = append(d.floor, timed(floor))
}

func (d *duel) report(b *testing.B) {
	ratios := make([]float64, len(d.ours))
	for i := range ratios {
		ratios[i] = float64(d.ours[i]) / float64(d.floor[i])
	}
	slices.Sort(ratios)
	slices.Sort(d.ours)
	slices.Sort(d.floor)
	mid := len(d.ours) / 2
	b.ReportMetric(float64(d.ours[0].Microseconds()), "µs-min")
	b.ReportMetric(float64(d.ours[mid].Microseconds()), "µs-median")
	b.ReportMetric(float64(d.floor[0].Microseconds()), "µs-host-min")
	b.ReportMetric(float64(d.floor[mid].Microseconds()), "µs-host-median")
	b.ReportMetric(ratios[mid], "x-host")
}

func hostRun(argv ...string) func() error {
	return func() error { return exec.Command(argv[0], argv[1:]...).Run() }
}

func (b *box) toEnd(argv ...string) func() error {
	return func() error {
		s, err := b.Exec(b.t.Context(), sandbox.ProcessSpec{Argv: argv})
		if err != nil {
			return err
		}
		for err == nil {
			_, err = s.Next()
		}
		if exit, ok := s.Exit(); !ok || exit.Code != 0 {
			return fmt.Errorf("exit %+v: %w", exit, err)
		}
		return nil
	}
}

// BenchmarkExec runs /bin/true from request to exit status, beside the same
// program started by this process.
func BenchmarkExec(b *testing.B) {
	x, _ := newRooted(b)
	var d duel
	for b.Loop() {
		d.round(b, x.toEnd("/bin/true"), hostRun("/bin/true"))
	}
	d.report(b)
}

// BenchmarkExecEcho has output to bring back, through a pipe on both sides.
func BenchmarkExecEcho(b *testing.B) {
	x, _ := newRooted(b)
	var d duel
	for b.Loop() {
		d.round(b, x.toEnd("/bin/echo", "hello"), func() error {
			_, err := exec.Command("/bin/echo", "hello").Output()
			return err
		})
	}
	d.report(b)
}

// BenchmarkExecIdle does it after rests, when processors and threads sleep.
func BenchmarkExecIdle(b *testing.B) {
	x, _ := newRooted(b)
	d := duel{rest: 20 * time.Millisecond}
	for b.Loop() {
		d.round(b, x.toEnd("/bin/true"), hostRun("/bin/true"))
	}
	d.report(b)
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

// BenchmarkRootSwitch takes a new root each time: one after another, as a
// claim does, and with a process and its files in between, as a reset.
func BenchmarkRootSwitch(b *testing.B) { benchmarkSwitch(b, "") }

func BenchmarkRootSwitchUsed(b *testing.B) { benchmarkSwitch(b, "echo x > /dev/shm/x") }

func benchmarkSwitch(b *testing.B, use string) {
	x, _ := newRooted(b)
	var took []time.Duration
	var sum guest.Timings
	for b.Loop() {
		b.StopTimer()
		if use != "" {
			x.sh(use)
		}
		cfg := x.config()
		var parts guest.Timings
		cfg.Root = x.imageRoot()
		cfg.Timings = &parts
		b.StartTimer()
		began := time.Now()
		if err := x.Configure(b.Context(), cfg); err != nil {
			b.Fatal(err)
		}
		took = append(took, time.Since(began))
		addParts(&sum, parts)
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[0].Microseconds()), "µs-min")
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "µs-median")
	reportParts(b, sum, len(took))
}

// imageRoot is a new root with the directories images have.
func (b *box) imageRoot() *guest.RootMount {
	root, dir := b.newRoot()
	for _, name := range movedIn {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			b.t.Fatal(err)
		}
	}
	return root
}

var movedIn = []string{"proc", "sys", "dev"}

func addParts(sum *guest.Timings, t guest.Timings) {
	sum.Kill += t.Kill
	sum.Clear += t.Clear
	sum.Switch += t.Switch
	sum.Files += t.Files
	sum.Workers += t.Workers
	sum.Total += t.Total
}

func reportParts(b *testing.B, sum guest.Timings, n int) {
	for name, d := range map[string]time.Duration{"kill": sum.Kill, "clear": sum.Clear, "switch": sum.Switch, "files": sum.Files, "workers": sum.Workers, "inside": sum.Total} {
		b.ReportMetric(float64(d.Microseconds())/float64(n), "µs-"+name)
	}
}

// BenchmarkClaim gives a new PID 1 its first root and command, as a create
// does with a shell of the pool: as it came, and prepared.
func BenchmarkClaim(b *testing.B) {
	for _, prepared := range []bool{false, true} {
		b.Run(map[bool]string{false: "plain", true: "prepared"}[prepared], func(b *testing.B) {
			var configure, exec []time.Duration
			var sum guest.Timings
			for b.Loop() {
				b.StopTimer()
				x := newBox(b)
				cfg := x.config()
				var parts guest.Timings
				cfg.Timings = &parts
				cfg.Root = x.imageRoot()
				if _, err := x.Ping(ctx(b)); err != nil { // it has started
					b.Fatal(err)
				}
				if prepared {
					if err := x.Prepare(ctx(b), guest.PrepareConfig{Seccomp: cfg.Seccomp, Work: cfg.Work}); err != nil {
						b.Fatal(err)
					}
					cfg.Seccomp, cfg.Work = nil, false
				} else {
					x.CloseIdle()
				}
				<-time.After(10 * time.Millisecond)
				b.StartTimer()
				began := time.Now()
				if err := x.Configure(b.Context(), cfg); err != nil {
					b.Fatal(err)
				}
				there := time.Now()
				if err := x.toEnd("/bin/echo", "x")(); err != nil {
					b.Fatal(err)
				}
				configure = append(configure, there.Sub(began))
				addParts(&sum, parts)
				exec = append(exec, time.Since(there))
			}
			slices.Sort(configure)
			slices.Sort(exec)
			b.ReportMetric(float64(configure[len(configure)/2].Microseconds()), "µs-configure")
			b.ReportMetric(float64(exec[len(exec)/2].Microseconds()), "µs-first-exec")
			reportParts(b, sum, len(exec))
		})
	}
}

// BenchmarkIdleMemory reports what one idle PID 1 costs, several at once: what
// is its own, its share with the others, page tables, threads.
func BenchmarkIdleMemory(b *testing.B) {
	use := func(times int) func() *box {
		return func() *box {
			x, _ := newRooted(b)
			for range times {
				x.sh("true")
			}
			return x
		}
	}
	for _, state := range []struct {
		name string
		make func() *box
	}{
		{"new", func() *box { return newBox(b) }},
		{"prepared", func() *box {
			x := newBox(b)
			cfg := x.config()
			if err := x.Prepare(ctx(b), guest.PrepareConfig{Seccomp: cfg.Seccomp, Work: cfg.Work}); err != nil {
				b.Fatal(err)
			}
			return x
		}},
		{"prepared and configured", func() *box {
			x := newBox(b)
			cfg := x.config()
			if err := x.Prepare(ctx(b), guest.PrepareConfig{Seccomp: cfg.Seccomp, Work: cfg.Work}); err != nil {
				b.Fatal(err)
			}
			cfg.Seccomp, cfg.Work = nil, false
			cfg.Root, _ = x.newRoot()
			if err := x.Configure(ctx(b), cfg); err != nil {
				b.Fatal(err)
			}
			return x
		}},
		{"configured", use(0)},
		{"used once", use(1)},
		{"used 50 times", use(50)},
		{"used 200 times", use(200)},
		{"used 500 times", use(500)},
		{"followed", func() *box {
			x := use(1)()
			ev, err := x.Events(b.Context(), 0)
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() { _ = ev.Close() })
			return x
		}},
	} {
		b.Run(state.name, func(b *testing.B) { idleMemory(b, state.make) })
	}
}

func idleMemory(b *testing.B, newBox func() *box) {
	const several = 6
	var boxes []*box
	for range several {
		boxes = append(boxes, newBox())
	}
	for b.Loop() {
		if _, err := boxes[0].Ping(ctx(b)); err != nil {
			b.Fatal(err)
		}
	}
	b.StopTimer()
	// Memory is given back a second after the last operation, connections later.
	<-time.After(5 * time.Second)
	for _, m := range []struct{ file, field, name string }{
		{"smaps_rollup", "Pss:", "kB-pss"},
		{"smaps_rollup", "Anonymous:", "kB-own"},
		{"status", "VmPTE:", "kB-pte"},
		{"status", "Threads:", "threads"},
	} {
		sum := 0.0
		for _, x := range boxes[1:] {
			sum += field(b, x.cmd.Process.Pid, m.file, m.field)
		}
		b.ReportMetric(sum/(several-1), m.name)
	}
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
