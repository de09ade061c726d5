package runtime

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestMeterAddsUp: time goes to the status it was spent in, memory over time
// is what a far finer sampler finds, and nothing ever goes down.
func TestMeterAddsUp(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	wall := time.Date(2026, 5, 1, 0, 0, 0, 0, time.UTC)
	p := point{flat: true, Reading: sandbox.Reading{Sandbox: "sbaaaaaaaaaaaa", At: wall, Status: sandbox.StatusCreating, Clock: 1000}}
	memory := func(ms int64) int64 { return 1<<20 + ms*5 } // KiB, rising
	in := map[sandbox.Status]int64{}
	var fine, last int64
	clock := int64(1000)
	for range 2000 {
		ms := rng.Int64N(10000)
		in[p.Status] += ms
		for step := int64(0); step < ms; step += 10 {
			fine += memory(clock+step) * min(10, ms-step)
		}
		clock += ms
		wall = wall.Add(time.Duration(ms) * time.Millisecond)
		if rng.IntN(50) == 0 {
			wall = wall.Add(-time.Hour) // somebody sets the clock
		}
		to := []sandbox.Status{sandbox.StatusRunning, sandbox.StatusPaused, p.Status, p.Status}[rng.IntN(4)]
		c := counts{cpu: uint64(max(0, last+rng.Int64N(100)-20)), memory: memory(clock), storage: 1000}
		n := p.next(instant{wall, clock}, c, to)
		if !n.At.After(p.At) || n.Meters != n.Meters.AtLeast(p.Meters) {
			t.Fatalf("%+v after %+v", n, p)
		}
		p, last = n, n.Meters.CPU
	}
	m := p.Meters
	if m.Running != in[sandbox.StatusRunning] || m.Paused != in[sandbox.StatusPaused] || m.Other != in[sandbox.StatusCreating] || m.Stopped != 0 || m.Starts != 1 {
		t.Errorf("times %+v, want %v", m, in)
	}
	if d := m.Memory - fine/1000; d > fine/1e6 || d < -fine/1e6 {
		t.Errorf("memory %d, a finer sampler has %d", m.Memory, fine/1000)
	}
	if all := (clock - 1000) * 1000 / 1000; m.Storage < all-10000 || m.Storage > all {
		t.Errorf("storage %d KiB·s of 1000 KiB in %d ms", m.Storage, all)
	}
}

func total(t *testing.T, h *house) sandbox.Meters {
	t.Helper()
	r, err := h.UsageReport(t.Context(), "", sandbox.UsageQuery{})
	if err != nil {
		t.Fatal(err)
	}
	return r.Total.Meters
}

// TestLedgerOverKills lives many lives over a daemon that is killed anywhere,
// and counts again what the cgroups had in the end.
func TestLedgerOverKills(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 3))
	k, dir := newKernel(t), t.TempDir()
	quick := func(c *Config) { c.Usage.Interval = time.Millisecond }
	h := openWith(t, k, dir, quick)
	starts := int64(0)
	burn := func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		for id := range k.pids {
			k.cpu[id] += uint64(rng.IntN(30000))
		}
	}
	reopen := func() {
		h.crash()
		k.revive()
		h = openWith(t, k, dir, quick)
	}
	steps := []string{"cgroup.kill", "net.detach", "cgroup.remove", "shell.remove"}
	for range 60 {
		sb := create(t, h, sandbox.Spec{})
		starts++
		for range rng.IntN(4) {
			burn()
			switch rng.IntN(4) {
			case 0:
				reopen()
			case 1:
				if _, err := h.Stop(t.Context(), string(sb.ID), ""); err != nil {
					t.Fatal(err)
				}
				if _, err := h.Start(t.Context(), string(sb.ID), ""); err != nil {
					t.Fatal(err)
				}
				starts++
			case 2:
				if _, err := h.Pause(t.Context(), string(sb.ID), ""); err != nil {
					t.Fatal(err)
				}
				if _, err := h.Resume(t.Context(), string(sb.ID), ""); err != nil {
					t.Fatal(err)
				}
			}
		}
		burn()
		if rng.IntN(3) == 0 {
			step := steps[rng.IntN(len(steps))]
			k.killAt(step, rng.IntN(2) == 0)
			old := h
			go func() { _, _ = old.Remove(t.Context(), string(sb.ID), "") }()
			k.waitDead(t, step)
			reopen()
		} else if _, err := h.Remove(t.Context(), string(sb.ID), ""); err != nil {
			t.Fatal(err)
		}
		until(t, h, sb.ID, func(sb sandbox.Sandbox) bool { return sb.Status.Terminal() })
	}
	h.agree(t)
	k.mu.Lock()
	burnt := int64(k.burnt)
	k.mu.Unlock()
	m := total(t, h)
	if m.CPU != burnt || burnt == 0 || m.Starts != starts {
		t.Errorf("the ledger has %d µs and %d starts, the cgroups had %d and %d", m.CPU, m.Starts, burnt, starts)
	}
	for range 2 { // recovery again changes no sum
		reopen()
		if got := total(t, h); got != m {
			t.Errorf("after another start: %s", cmp.Diff(m, got))
		}
	}
}

// TestLedgerWritesLittle: of a sandbox that idles, one reading a day.
func TestLedgerWritesLittle(t *testing.T) {
	day := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	p := point{flat: true, Reading: sandbox.Reading{Sandbox: "sbaaaaaaaaaaaa", At: day, Status: sandbox.StatusRunning}}
	var m meter
	rows := map[string]int{}
	live := func(what string, c func(i int64) counts) {
		m, rows[what] = meter{now: p}, 0
		for i := range int64(24 * 720) {
			n := m.now.next(instant{day.Add(time.Duration(i+1) * 5 * time.Second), (i + 1) * 5000}, c(i), sandbox.StatusRunning)
			if m.worth(n.Reading) {
				rows[what] += len(m.due(n))
				m.wrote = n.Reading
			}
			m.now = n
		}
	}
	live("idle", func(int64) counts { return counts{cpu: 5, memory: 4096, storage: 100} })
	live("trickle", func(i int64) counts { return counts{cpu: uint64(i * 100), memory: 4096 + i%10, storage: 100} })
	live("busy", func(i int64) counts { return counts{cpu: uint64(i * 5e6), memory: 4096, storage: 100} })
	if rows["idle"] != 3 || rows["trickle"] > 2*288+3 || rows["busy"] < 24*720 {
		t.Errorf("readings of a day: %v", rows)
	}
}

// TestLedgerAfterHostCrash: what was read stays, and the time the host was off
// is none of running.
func TestLedgerAfterHostCrash(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	runs, stopped := create(t, h, sandbox.Spec{}), create(t, h, sandbox.Spec{})
	if _, err := h.Stop(t.Context(), string(stopped.ID), ""); err != nil {
		t.Fatal(err)
	}
	k.mu.Lock()
	k.cpu[runs.ID] = 12345
	k.mu.Unlock()
	if m := total(t, h); m.CPU != 12345 {
		t.Fatalf("before: %+v", m)
	}
	h.crash()
	k.mu.Lock()
	for id := range k.cgroups {
		delete(k.cgroups, id)
		delete(k.cpu, id)
	}
	k.mu.Unlock()
	sqlDo(t, dir, `DROP TRIGGER readings_stay; UPDATE readings SET at = at - 3600000; UPDATE ledger SET created_at = created_at - 3600000`)
	h = openWith(t, k, dir, func(c *Config) { c.BootID = "boot-2" })
	until(t, h, runs.ID, func(sb sandbox.Sandbox) bool { return sb.Status == sandbox.StatusStopped })
	of := func(id sandbox.ID) sandbox.Meters {
		r, err := h.UsageReport(t.Context(), string(id), sandbox.UsageQuery{})
		if err != nil {
			t.Fatal(err)
		}
		return r.Total.Meters
	}
	if m := of(runs.ID); m.CPU != 12345 || m.Other < 3600000 || m.Running >= 3600000 {
		t.Errorf("of the one that ran: %+v", m)
	}
	if m := of(stopped.ID); m.Stopped < 3600000 || m.Other >= 3600000 {
		t.Errorf("of the stopped one: %+v", m)
	}
}

// TestMeterHeld: what has no room in 64 bits stays at their bound: totals never
// go down, so that the ledger takes every reading.
func TestMeterHeld(t *testing.T) {
	wall := time.Date(2026, 5, 1, 0, 0, 0, 0, time.UTC)
	all := sandbox.MetersOf([sandbox.MeterCount]int64{})
	most := all.Values()
	for i := range most {
		most[i] = math.MaxInt64
	}
	for name, begin := range map[string]sandbox.Meters{"nothing": {}, "a little": {CPU: 1, Memory: 1, Storage: 1, NetRx: 1, Running: 1, Starts: 1}, "all": sandbox.MetersOf(most)} {
		for _, ms := range []int64{0, 1, 5000, 1 << 35, 1 << 43, math.MaxInt64 - 1000} {
			for _, kib := range []int64{-1, 0, 1 << 20, 1 << 40, math.MaxInt64 >> 10} {
				for _, counted := range []uint64{0, 1 << 63, math.MaxUint64} {
					p := point{Reading: sandbox.Reading{At: wall, Meters: begin, Status: sandbox.StatusStopped, Clock: 1000, MemoryKiB: max(kib, 0), StorageKiB: max(kib, 0)}, memory: 999, storage: 999}
					n := p.next(instant{wall, 1000 + ms}, counts{counted, counted, counted, counted, counted, kib, kib}, sandbox.StatusRunning)
					want := begin
					over := new(big.Int).Mul(big.NewInt(max(kib, 0)), big.NewInt(ms))
					over.Add(over, big.NewInt(999)).Div(over, big.NewInt(1000))
					for _, m := range []*int64{&want.Memory, &want.Storage} {
						if sum := new(big.Int).Add(over, big.NewInt(*m)); sum.IsInt64() {
							*m = sum.Int64()
						} else {
							*m = math.MaxInt64
						}
					}
					want.Stopped = sandbox.AddHeld(want.Stopped, ms)
					for _, m := range []*int64{&want.CPU, &want.NetRx, &want.NetTx, &want.IORead, &want.IOWrite} {
						*m = max(*m, int64(min(counted, math.MaxInt64)))
					}
					if n.Meters != want {
						t.Fatalf("%s, %d ms of %d KiB, counters %d: %+v, want %+v", name, ms, kib, counted, n.Meters, want)
					}
				}
			}
		}
	}
	p := point{Reading: sandbox.Reading{At: wall, Meters: sandbox.MetersOf(most), Status: sandbox.StatusCreating}}
	if n := p.next(instant{wall, 5}, counts{}, sandbox.StatusRunning); n.Meters != p.Meters {
		t.Errorf("a start more than there is room for: %+v", n.Meters)
	}
}

// TestLedgerOfTheVast: counters and totals near the bounds of 64 bits, of one
// sandbox, and a host's clock that jumps by decades, keep no other from being
// counted, reported, stopped and started.
func TestLedgerOfTheVast(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := openWith(t, k, dir, perSecond())
	vast, second, other := owned(t, h, "uid:1", ""), owned(t, h, "uid:1", ""), owned(t, h, "uid:2", "")
	k.burn(vast.ID, math.MaxInt64-10)
	k.burn(second.ID, math.MaxUint64)
	k.burn(other.ID, 7)
	total(t, h)
	check := func() {
		t.Helper()
		r, err := h.UsageReport(t.Context(), "", sandbox.UsageQuery{By: "owner"})
		if err != nil || len(r.Lines) != 2 || r.Lines[0].Meters.CPU != math.MaxInt64 || r.Lines[1].Meters.CPU != 7 || r.Total.Meters.CPU != math.MaxInt64 {
			t.Errorf("%+v, %v", r, err)
		}
		s := spent(t, h, cost.StatementQuery{By: "owner"})
		if len(s.Lines) != 2 || s.Lines[0].Meters.CPU != math.MaxInt64 || s.Lines[1].Meters.CPU != 7 || s.Total.Meters.CPU != math.MaxInt64 {
			t.Errorf("%+v", s)
		}
		want := new(big.Int).Mul(big.NewInt(math.MaxInt64), big.NewInt(2000))
		want.Sub(want, big.NewInt(10_000))
		var charged cost.Quantity
		for _, c := range s.Lines[0].Charges {
			if c.Meter == cost.MeterCPU {
				charged, _ = charged.Add(c.Quantity)
			}
		}
		if charged.String() != want.String() {
			t.Errorf("charged for %s, want %s", charged, want)
		}
		if used := h.Stats().Used; used.CPU < 0 {
			t.Errorf("counted since the start: %+v", used)
		}
		for _, sb := range []sandbox.Sandbox{vast, other} {
			if _, err := h.Stop(t.Context(), string(sb.ID), ""); err != nil {
				t.Error(err)
			}
			if _, err := h.Start(t.Context(), string(sb.ID), ""); err != nil {
				t.Error(err)
			}
		}
	}
	check()
	h.crash()
	// The host starts with another clock: 1970 is as long ago as makes the product
	// of 4 GiB and the time negative, in 64 bits.
	k.mu.Lock()
	clear(k.cgroups)
	clear(k.cpu)
	k.mu.Unlock()
	kib := 3 << 61 / time.Now().UnixMilli()
	sqlDo(t, dir, fmt.Sprintf(`DROP TRIGGER readings_stay; DELETE FROM readings WHERE ledger = 1 AND at < (SELECT max(at) FROM readings WHERE ledger = 1);
		UPDATE readings SET storage = 1000000000, storage_kib = %d, at = 1 WHERE ledger = 1; UPDATE ledger SET created_at = 0 WHERE number = 1`, kib))
	h = openWith(t, k, dir, func(c *Config) { perSecond()(c); c.BootID = "boot-2" })
	for _, sb := range []sandbox.Sandbox{vast, second, other} {
		until(t, h, sb.ID, func(sb sandbox.Sandbox) bool { return sb.Status == sandbox.StatusStopped })
		if _, err := h.Start(t.Context(), string(sb.ID), ""); err != nil {
			t.Error(err)
		}
	}
	r, err := h.UsageReport(t.Context(), string(vast.ID), sandbox.UsageQuery{})
	if err != nil || r.Total.Meters.Storage < kib*1e9 {
		t.Errorf("%+v, %v", r, err)
	}
	check()
}

// TestLooksOfBudgetsCount: what a budget was the first to see is in the sums
// since the daemon's start, once.
func TestLooksOfBudgetsCount(t *testing.T) {
	k := newKernel(t)
	h := openWith(t, k, t.TempDir(), perSecond())
	sb := owned(t, h, "uid:1", "")
	setBudget(t, h, cost.BudgetRequest{Owner: "uid:1", Meter: cost.MeterCPU, Limit: "100h"})
	for range 3 {
		k.burn(sb.ID, 1000)
		if _, err := h.Budgets(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	total(t, h)
	if used := h.Stats().Used; used.CPU != 3000 {
		t.Errorf("counted since the start: %+v", used)
	}
}
