//go:build root

package integration

import (
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// burn keeps two processors busy in a sandbox; nobody stays connected.
func (d *daemon) burn(t testing.TB, id sandbox.ID) {
	t.Helper()
	for range 2 {
		if _, err := d.StartProcess(t.Context(), string(id), sandbox.ProcessSpec{Argv: []string{"/bin/sh", "-c", "while :; do :; done"}}); err != nil {
			t.Fatal(err)
		}
	}
}

// spentBy is what a budget has spent so far.
func (d *daemon) spentBy(t testing.TB, key string) cost.Quantity {
	t.Helper()
	s := d.budgetNow(t, key)
	q, _ := s.Meter.ParseLimit(s.Spent) // nothing is no limit
	return q
}

func (d *daemon) budgetNow(t testing.TB, key string) cost.BudgetState {
	t.Helper()
	s, err := d.Budget(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestBudgetStopsBurner: two busy processors are stopped at most a second of
// usage past the budget, also where the daemon was killed just before, or as
// soon as there is one again; what a budget has paused goes on when it is raised.
func TestBudgetStopsBurner(t *testing.T) {
	aSecond := cost.Nano(min(2, runtime.NumCPU())) * cost.Unit // of two burning ones
	for name, kill := range map[string]bool{"daemon lives": false, "daemon killed before": true} {
		t.Run(name, func(t *testing.T) {
			d := install(t, books())
			sb := d.create(t, sandbox.Spec{Project: "prj_burn"})
			limit := 6 * cost.Unit
			b, err := d.SetBudget(t.Context(), cost.BudgetRequest{Project: "prj_burn", Meter: cost.MeterMoney, Limit: limit.String()})
			if err != nil {
				t.Fatal(err)
			}
			d.burn(t, sb.ID)
			late := cost.Nano(0) // what was burnt too much before anybody could stop it
			if kill {
				before := cost.Count(uint64(limit - aSecond))
				testenv.Eventually(t, 60*time.Second, "a second of usage is left", func() bool { return d.spentBy(t, b.Key).Cmp(before) >= 0 })
				d.kill()
				d.start()
				s, err := d.Statement(t.Context(), cost.StatementQuery{Project: "prj_burn"})
				if err != nil {
					t.Fatal(err)
				}
				spent, _ := s.Total.Cost.Nano()
				late = max(0, spent-limit)
			}
			var got sandbox.Sandbox
			testenv.Eventually(t, 60*time.Second, "the sandbox is stopped", func() bool {
				var err error
				got, err = d.Sandbox(t.Context(), string(sb.ID))
				return err == nil && got.Status == sandbox.StatusStopped
			})
			s, err := d.Statement(t.Context(), cost.StatementQuery{Project: "prj_burn"})
			if err != nil {
				t.Fatal(err)
			}
			spent, _ := s.Total.Cost.Nano()
			over := spent - limit
			t.Logf("stopped %s past the budget of %s, %s when the daemon was there", over, limit, late)
			if over < 0 || over > late+aSecond || got.Reason != sandbox.ReasonBudget {
				t.Errorf("stopped %s past the budget of %s, for %s: want at most %s", over, limit, got.Reason, late+aSecond)
			}
			if now := d.budgetNow(t, b.Key); now.Spent != now.Meter.Format(s.Total.Cost.Spent()) || now.Holds != cost.ActionStop {
				t.Errorf("the budget has spent %s, the statement says %s", now.Spent, s.Total.Cost)
			}
			if _, err := d.Start(t.Context(), string(sb.ID)); sandbox.CodeOf(err) != "budget_exhausted" {
				t.Errorf("start: %v", err)
			}
			if _, err := d.Exec(t.Context(), string(sb.ID), sandbox.ProcessSpec{Argv: []string{"true"}}); err == nil || !strings.Contains(err.Error(), "budget ls") {
				t.Errorf("exec: %v; want what to do first", err)
			}
			if _, err := d.Create(t.Context(), sandbox.Spec{Project: "prj_burn"}, ""); sandbox.CodeOf(err) != "budget_exhausted" {
				t.Errorf("create: %v", err)
			}
		})
	}
	t.Run("pause and raise", func(t *testing.T) {
		d := install(t, books())
		sb := d.create(t, sandbox.Spec{Project: "prj_burn"})
		req := cost.BudgetRequest{Project: "prj_burn", Meter: cost.MeterCPU, Limit: "2s", At: []cost.Threshold{{Percent: 100, Action: cost.ActionPause}}}
		if _, err := d.SetBudget(t.Context(), req); err != nil {
			t.Fatal(err)
		}
		d.burn(t, sb.ID)
		status := func(want sandbox.Status) func() bool {
			return func() bool {
				got, err := d.Sandbox(t.Context(), string(sb.ID))
				return err == nil && got.Status == want
			}
		}
		testenv.Eventually(t, 60*time.Second, "the sandbox is paused", status(sandbox.StatusPaused))
		u := d.usage(t, string(sb.ID))
		if u.CPUMicros > 4_000_000 {
			t.Errorf("%d µs of cpu with a budget of two seconds", u.CPUMicros)
		}
		d.kill()
		d.start()
		if now := d.usage(t, string(sb.ID)); now.CPUMicros > u.CPUMicros+1_000_000 || !status(sandbox.StatusPaused)() {
			t.Errorf("%d µs of cpu after another start, %d before", now.CPUMicros, u.CPUMicros)
		}
		req.Limit = "1000s"
		if _, err := d.SetBudget(t.Context(), req); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, 60*time.Second, "the sandbox goes on", status(sandbox.StatusRunning))
		testenv.Eventually(t, 60*time.Second, "and works", func() bool { return d.usage(t, string(sb.ID)).CPUMicros > u.CPUMicros+1_000_000 })
	})
}

// TestBudgetStopOverKills: a daemon that is killed anywhere around the stop of a
// spent budget finishes it when it comes back: the sandbox is stopped once, its
// files are whole, each threshold is told once, and what was spent is what the
// ledger says.
func TestBudgetStopOverKills(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	d := install(t, books())
	for i := range soak(4, 8) {
		sb := d.create(t, sandbox.Spec{})
		d.sh(t, string(sb.ID), "echo kept > /root/kept")
		d.burn(t, sb.ID) // first: an emulated processor spends a second before long
		b, err := d.SetBudget(t.Context(), cost.BudgetRequest{Sandbox: string(sb.ID), Meter: cost.MeterCPU, Limit: "1s"})
		if err != nil {
			t.Fatal(err)
		}
		most := cost.Count(900_000_000)
		testenv.Eventually(t, 60*time.Second, "it is nearly spent", func() bool { return d.spentBy(t, b.Key).Cmp(most) >= 0 })
		for range 1 + rng.IntN(3) { // anywhere in the stop, and in its end by the next daemon
			<-time.After(time.Duration(rng.IntN(250)) * time.Millisecond)
			d.kill()
			d.start()
		}
		var got sandbox.Sandbox
		testenv.Eventually(t, 60*time.Second, "the sandbox is stopped", func() bool {
			var err error
			got, err = d.Sandbox(t.Context(), string(sb.ID))
			return err == nil && got.Status == sandbox.StatusStopped
		})
		if _, err := d.Start(t.Context(), string(sb.ID)); sandbox.CodeOf(err) != "budget_exhausted" {
			t.Errorf("round %d: start: %v", i, err)
		}
		told := map[string]int{}
		events, _, err := d.Events(t.Context(), client.EventQuery{Sandbox: string(sb.ID), Limit: 1000})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range events {
			told[e.Type]++
		}
		if told["budget.warn"] != 1 || told["budget.stop"] != 1 || told["sandbox.stopped"] != 1 {
			t.Errorf("round %d: told %v", i, told)
		}
		s, err := d.Statement(t.Context(), cost.StatementQuery{Sandbox: string(sb.ID)})
		if now := d.budgetNow(t, b.Key); err != nil || now.Spent != now.Meter.Format(cost.Product(uint64(s.Total.Meters.CPU), 1000)) {
			t.Errorf("round %d: spent %s, the ledger has %d µs, %v", i, now.Spent, s.Total.Meters.CPU, err)
		}
		if err := d.RemoveBudget(t.Context(), b.Key); err != nil {
			t.Fatal(err)
		}
		if _, err := d.Start(t.Context(), string(sb.ID)); err != nil {
			t.Fatal(err)
		}
		if out := d.sh(t, string(sb.ID), "cat /root/kept"); out != "kept" {
			t.Errorf("round %d: the file says %q", i, out)
		}
		if _, err := d.Remove(t.Context(), string(sb.ID)); err != nil {
			t.Fatal(err)
		}
	}
	d.calm(t)
	d.agree(t)
}
