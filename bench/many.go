package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/bench/report"
	"github.com/sandboxd/sandboxd/sandbox"
)

// burst asks for many sandboxes at once; the sample is when the last of them
// has said its first byte.
func burst(ctx context.Context, b *bench) error {
	d, err := b.ours(ctx, b.plan.pool)
	if err != nil {
		return err
	}
	numbers := make([]int, b.plan.burst)
	for i := range numbers {
		numbers[i] = i
	}
	cs := []contestant{{report.Us, func(ctx context.Context) (float64, error) {
		lives, firsts := make([]live, len(numbers)), make([]float64, len(numbers))
		start := time.Now()
		err := each(len(numbers), numbers, func(i int) (err error) {
			lives[i], err = d.firstByte(ctx, spec())
			firsts[i] = millis(start)
			return err
		})
		if err != nil {
			return 0, errors.Join(err, d.removeAll(ctx))
		}
		return latest(firsts), each(4, lives, func(l live) error { return d.remove(ctx, l) })
	}}}
	for _, p := range b.peers() {
		for _, i := range numbers {
			if err := p.Prepare("burst"+strconv.Itoa(i), hello...); err != nil {
				return err
			}
		}
		cs = append(cs, contestant{p.Name(), func(ctx context.Context) (float64, error) {
			firsts := make([]float64, len(numbers))
			start := time.Now()
			err := each(len(numbers), numbers, func(i int) error {
				cmd, err := p.Run(ctx, "burst"+strconv.Itoa(i))
				if err != nil {
					return err
				}
				firsts[i], err = b.output(cmd, start)
				return err
			})
			return latest(firsts), err
		}})
	}
	return b.rounds(ctx, setting{
		name: "burst", title: fmt.Sprintf("burst of %d, last first byte", b.plan.burst), unit: "s",
		note: fmt.Sprintf("all asked for at once; sandboxd has %d shells ready", b.plan.pool),
	}, b.plan.bursts, 0, b.settled, cs...)
}

// latest returns the highest of some milliseconds, in seconds.
func latest(ms []float64) float64 {
	var high float64
	for _, v := range ms {
		high = max(high, v)
	}
	return high / 1000
}

// churn lets clients create, use and remove sandboxes one after another.
func churn(ctx context.Context, b *bench) error {
	d, err := b.ours(ctx, b.plan.pool)
	if err != nil {
		return err
	}
	for _, clients := range b.plan.clients {
		cs := []contestant{{report.Us, func(ctx context.Context) (float64, error) {
			return b.lives(ctx, clients, b.plan.lead, func(int) error {
				l, err := d.firstByte(ctx, spec())
				if err != nil {
					return err
				}
				return d.remove(ctx, l)
			})
		}}}
		for _, p := range b.peers() {
			for i := range clients {
				if err := p.Prepare("churn"+strconv.Itoa(i), hello...); err != nil {
					return err
				}
			}
			cs = append(cs, contestant{p.Name(), func(ctx context.Context) (float64, error) {
				return b.lives(ctx, clients, 0, func(client int) error {
					cmd, err := p.Run(ctx, "churn"+strconv.Itoa(client))
					if err != nil {
						return err
					}
					_, err = b.output(cmd, time.Now())
					return err
				})
			}})
		}
		err := b.rounds(ctx, setting{
			name: fmt.Sprintf("churn-%d", clients), title: fmt.Sprintf("whole lives a second, %d clients", clients), unit: "/s", more: true,
			note: fmt.Sprintf("create, echo, remove, again; sandboxd has done so for %v before it counts, so that it lives on shells it makes meanwhile", b.plan.lead),
		}, b.plan.slices, 0, b.settled, cs...)
		if err != nil {
			return err
		}
	}
	return nil
}

// lives repeats f in some clients for a slice of time after lead and returns
// how often it ended in that slice, a second.
func (b *bench) lives(ctx context.Context, clients int, lead time.Duration, f func(client int) error) (float64, error) {
	var wg sync.WaitGroup
	var done atomic.Int64
	errs := make([]error, clients)
	start := time.Now().Add(lead)
	for c := range clients {
		wg.Go(func() {
			for time.Since(start) < b.plan.slice && errs[c] == nil && ctx.Err() == nil {
				errs[c] = f(c)
				if time.Since(start) > 0 {
					done.Add(1)
				}
			}
		})
	}
	wg.Wait()
	return float64(done.Load()) / time.Since(start).Seconds(), errors.Join(errs...)
}

// density fills the host with idle sandboxes, in levels, and measures at each
// what they cost and what a further one takes.
func density(ctx context.Context, b *bench) error {
	d, err := b.restart(ctx, b.plan.pool) // its memory tells of this scenario alone
	if err != nil {
		return err
	}
	b.rep.Scene("density-latency", "new sandbox → first byte beside idle ones", "")
	b.rep.Scene("density-memory", "memory of each idle sandbox", "by MemAvailable: kernel, PID 1 and daemon together, and whatever others take or free meanwhile")
	b.rep.Scene("density-counted", "the same, counted", "PSS of every PID 1, growth of the daemon's RSS and of the kernel's slab, stacks, page tables and per-cpu memory")
	b.rep.Scene("density-init", "of it, PID 1", "PSS")
	b.rep.Scene("density-rss", "resident memory of the daemon", "")
	b.rep.Scene("density-cpu", "cpu of daemon and idle sandboxes, share of one core", "")
	var have int
	var empty memory
	for _, level := range b.plan.levels {
		if err := each(4, make([]struct{}, level-have), func(struct{}) error {
			_, err := d.Create(ctx, spec(), "")
			return err
		}); err != nil {
			return fmt.Errorf("at %d idle: %w", level, err)
		}
		have = level
		// What demand has added to the pool is no sandbox's memory.
		calm := func(p sandbox.PoolStats) bool { return p.Target == p.Size && p.Ready == p.Size }
		if err := errors.Join(b.tidy(ctx, calm), b.quiet(ctx, 200*time.Millisecond, time.Minute)); err != nil {
			return err
		}
		if err := b.idleCost(ctx, d, level, &empty); err != nil {
			return err
		}
		for i := range b.plan.densityRounds + b.plan.warmUp {
			if err := b.settled(ctx); err != nil {
				return err
			}
			took, err := d.create(ctx)
			b.owes = true
			if err != nil {
				return fmt.Errorf("at %d idle: %w", level, err)
			}
			if i >= b.plan.warmUp {
				b.rep.Add("density-latency", at(level), "ms", false, took)
			}
		}
	}
	// All of them must be alive still, or their price was not theirs.
	return b.allRun(ctx, d, have)
}

func at(level int) string { return fmt.Sprintf("%s at %d", report.Us, level) }

// memory is what a level is compared with: bytes.
type memory struct {
	free   float64 // as the kernel reckons; everybody's doing
	kernel float64 // the kernel's own
	daemon float64 // resident
}

// steadyMemory reads the memory once the kernel's own stays as it is: what the
// scenario before had is given back late.
func (b *bench) steadyMemory(ctx context.Context, d *daemon) (memory, error) {
	const (
		tries = 20 // of a second and a half
		still = 1 << 20
	)
	last, err := b.memoryNow(ctx, d)
	for range tries {
		if err := errors.Join(err, pause(ctx, time.Second)); err != nil {
			return last, err
		}
		var now memory
		now, err = b.memoryNow(ctx, d)
		moved := math.Abs(now.kernel - last.kernel)
		if last = now; moved < still {
			break
		}
	}
	return last, err
}

func (b *bench) memoryNow(ctx context.Context, d *daemon) (m memory, err error) {
	if err := command(ctx, "sync"); err != nil {
		return m, err
	}
	const readings = 5 // a mean of some is steadier
	for range readings {
		m.free += float64(meminfo("MemAvailable:")) / readings
		for _, key := range []string{"Slab:", "KernelStack:", "PageTables:", "Percpu:"} {
			m.kernel += float64(meminfo(key)) / readings
		}
		if err := pause(ctx, 100*time.Millisecond); err != nil {
			return m, err
		}
	}
	m.daemon = float64(processMemory(d.cmd.Process.Pid, "status", "VmRSS:"))
	return m, nil
}

// processMemory reads one line of a process's status or smaps_rollup, in bytes.
func processMemory(pid int, file, key string) int64 {
	return kilobytes(field(filepath.Join("/proc", strconv.Itoa(pid), file), key))
}

// inits returns the proportional memory of every sandbox's PID 1.
func (d *daemon) inits(ctx context.Context) (float64, error) {
	var sum float64
	for sb, err := range d.All(ctx, sandbox.Filter{Statuses: []sandbox.Status{sandbox.StatusRunning}, Limit: sandbox.MaxPage}) {
		if err != nil {
			return 0, err
		}
		pss := processMemory(sb.InitPID, "smaps_rollup", "Pss:")
		if pss == 0 {
			return 0, fmt.Errorf("sandbox %s: process %d has no memory", sb.ID, sb.InitPID)
		}
		sum += float64(pss)
	}
	return sum, nil
}

// idleCost measures memory and cpu of a host with some idle sandboxes.
func (b *bench) idleCost(ctx context.Context, d *daemon, level int, empty *memory) error {
	now, err := b.steadyMemory(ctx, d)
	if err != nil {
		return err
	}
	if level == 0 {
		*empty = now
	} else {
		inits, err := d.inits(ctx)
		if err != nil {
			return err
		}
		const mib = 1 << 20
		each := func(bytes float64) float64 { return bytes / float64(level) / mib }
		b.rep.Add("density-memory", at(level), "MiB", false, each(empty.free-now.free))
		b.rep.Add("density-counted", at(level), "MiB", false, each(inits+now.kernel-empty.kernel+now.daemon-empty.daemon))
		b.rep.Add("density-init", at(level), "MiB", false, each(inits))
	}
	b.rep.Add("density-rss", at(level), "MiB", false, now.daemon/(1<<20))
	before, start := b.working(), time.Now()
	if err := pause(ctx, b.plan.idleFor); err != nil {
		return err
	}
	b.rep.Add("density-cpu", at(level), "%", false, 100*float64(b.working()-before)/float64(time.Since(start)))
	return nil
}

func (b *bench) allRun(ctx context.Context, d *daemon, want int) error {
	n := 0
	for sb, err := range d.All(ctx, sandbox.Filter{Statuses: []sandbox.Status{sandbox.StatusRunning}, Limit: sandbox.MaxPage}) {
		if err != nil {
			return err
		}
		if _, err := os.Stat(filepath.Join("/proc", strconv.Itoa(sb.InitPID))); err == nil && sb.InitPID > 0 {
			n++
		}
	}
	if n != want {
		return fmt.Errorf("%d of %d idle sandboxes run", n, want)
	}
	return d.removeAll(ctx)
}
