//go:build root

package guest_test

import (
	"errors"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/runtime/guest"
	"github.com/sandboxd/sandboxd/sandbox"
)

// switchRoot gives b one more root and returns what PID 1 said of it.
func (b *box) switchRoot(change ...func(*guest.Config)) guest.Timings {
	b.t.Helper()
	cfg := b.config()
	cfg.Root, _ = b.newRoot()
	var done guest.Timings
	cfg.Timings = &done
	for _, f := range change {
		f(&cfg)
	}
	if err := b.Configure(ctx(b.t), cfg); err != nil {
		b.t.Fatal(err)
	}
	return done
}

func number(t *testing.T, id sandbox.ProcessID) int64 {
	t.Helper()
	n, err := strconv.ParseInt(strings.TrimPrefix(string(id), "p"), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestSwitchDividesProcesses: starts race with switches, and of each process
// Before tells which side it is on.
func TestSwitchDividesProcesses(t *testing.T) {
	const rounds, starters, each = 25, 3, 4
	b, _ := newRooted(t, func(c *guest.Config) { c.KeepEnded = 4096 })
	if info, err := b.Ping(ctx(t)); err != nil || info.Before != 0 {
		t.Fatalf("with no process before the first root: %+v, %v", info, err)
	}
	var ended, living int
	for range rounds {
		var mu sync.Mutex
		var all []sandbox.Process
		var wg sync.WaitGroup
		begun := make(chan struct{}, starters*each)
		for range starters {
			wg.Go(func() {
				for range each {
					p, err := b.Start(ctx(t), argv("sh", "-c", "cat /etc/marker; exec sleep 1000"))
					if err != nil {
						t.Errorf("start: %v", err)
						return
					}
					mu.Lock()
					all = append(all, p)
					mu.Unlock()
					begun <- struct{}{}
				}
			})
		}
		<-begun
		done := b.switchRoot(func(c *guest.Config) { c.KeepEnded = 4096 })
		info, err := b.Ping(ctx(t))
		if err != nil || info.Before != done.Before || done.Before == 0 {
			t.Fatalf("configured: before %d; ping: %+v, %v", done.Before, info, err)
		}
		wg.Wait()
		for _, p := range all {
			if number(t, p.ID) <= done.Before {
				ended++
				b.checkEnded(p.ID)
				continue
			}
			living++
			b.checkLiving(p.ID)
		}
		if t.Failed() {
			return
		}
	}
	if ended == 0 || living == 0 {
		t.Errorf("no race: %d processes before a switch, %d after", ended, living)
	}
	t.Logf("%d processes before a switch, %d after", ended, living)
	if done := b.switchRoot(func(c *guest.Config) { c.LastProcess = 100_000 }); done.Before != 100_000 {
		t.Errorf("with numbers of an earlier PID 1: before %d", done.Before)
	}
	// Settings alone divide nothing.
	b.sh("true")
	var same guest.Timings
	cfg := b.config()
	cfg.Timings = &same
	if err := b.Configure(ctx(t), cfg); err != nil || same.Before != 100_000 {
		t.Errorf("without a root: %+v, %v", same, err)
	}
}

func (b *box) checkEnded(id sandbox.ProcessID) {
	b.t.Helper()
	p, err := b.Process(ctx(b.t), id)
	if errors.Is(sandbox.ClassOf(err), sandbox.ErrNotFound) {
		return
	}
	if err != nil || p.Exit == nil {
		b.t.Errorf("%s is of an earlier root and lives: %+v, %v", id, p, err)
	}
}

func (b *box) checkLiving(id sandbox.ProcessID) {
	b.t.Helper()
	s, err := b.Attach(ctx(b.t), id, 0)
	if err != nil {
		b.t.Fatal(err)
	}
	defer s.Close()
	o, err := s.Next()
	if got := strings.TrimSpace(string(o.Data)); err != nil || got != strconv.Itoa(b.roots) {
		b.t.Errorf("%s runs on root %q, want %d: %v", id, got, b.roots, err)
	}
	if p, err := b.Process(ctx(b.t), id); err != nil || p.Exit != nil {
		b.t.Errorf("%s is of the root in force and ended: %+v, %v", id, p, err)
	}
}
