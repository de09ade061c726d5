package runtime

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

func setBudget(t *testing.T, h *house, req cost.BudgetRequest) cost.BudgetState {
	t.Helper()
	s, err := h.SetBudget(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// told lists the events of budgets, oldest first.
func told(t *testing.T, h *house) (out []string) {
	t.Helper()
	events, err := h.Events(t.Context(), 0, "", 1000)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range events {
		if strings.HasPrefix(e.Type, eventBudget) {
			out = append(out, strings.TrimSuffix(e.Type+" "+e.Data["percent"], " "))
		}
	}
	return out
}

// perSecond has a book in which a second of cpu costs one, and little else anything.
func perSecond() func(*Config) {
	b := priced("v", day(-3), cost.Unit)
	delete(b.Prices, cost.MeterStarts)
	return withPrices(b)
}

func owned(t *testing.T, h *house, owner, project string) sandbox.Sandbox {
	t.Helper()
	sb, err := h.Create(t.Context(), sandbox.CreateRequest{Spec: sandbox.Spec{Project: project}, Actor: owner})
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

func isSpent(err error) bool { return sandbox.CodeOf(err) == "budget_exhausted" }

// TestBudgetStops: nobody asks, and the sandbox of the spent budget is stopped
// with its files; nothing of it begins until the budget is raised.
func TestBudgetStops(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := openWith(t, k, dir, perSecond())
	sb, other := owned(t, h, "uid:1", ""), owned(t, h, "uid:2", "")
	b := setBudget(t, h, cost.BudgetRequest{Owner: "uid:1", Meter: cost.MeterMoney, Limit: "100"})
	if b.Holds != cost.ActionNone || b.Limit != "100" || b.Percent > 2 {
		t.Fatalf("%+v", b)
	}
	k.burn(sb.ID, 85_000_000)
	if b, err := h.Budget(t.Context(), b.Key); err != nil || b.Percent < 85 || b.Percent > 87 || len(b.Fired) != 1 {
		t.Errorf("%+v, %v", b, err)
	}
	ended := sandbox.ExitStatus{Code: 3}
	k.mu.Lock()
	k.procs[sb.ID] = []sandbox.Process{{ID: "p1", Exit: &ended}, {ID: "p2"}}
	k.mu.Unlock()
	k.burn(sb.ID, 20_000_000)
	got := until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status == sandbox.StatusStopped })
	procs, err := h.Processes(t.Context(), string(sb.ID))
	if err != nil || len(procs) != 2 || procs[0].Exit == nil || *procs[0].Exit != ended || procs[1].Exit == nil || procs[1].Exit.Signal != "SIGKILL" || procs[1].Exit.Code != 137 || procs[1].Exit.At.IsZero() {
		t.Errorf("records of its processes: %+v, %v", procs, err)
	}
	if got.Reason != sandbox.ReasonBudget || !strings.Contains(got.Detail, b.Key) {
		t.Errorf("stopped for %s: %s", got.Reason, got.Detail)
	}
	if s := h.get(t, other.ID); s.Status != sandbox.StatusRunning {
		t.Errorf("the other's is %s", s.Status)
	}
	if _, err := h.Start(t.Context(), string(sb.ID), ""); !isSpent(err) {
		t.Errorf("start: %v", err)
	}
	if _, err := h.Create(t.Context(), sandbox.CreateRequest{Actor: "uid:1"}); !isSpent(err) {
		t.Errorf("create: %v", err)
	}
	owned(t, h, "uid:2", "")
	if got, want := told(t, h), []string{"budget.set", "budget.warn 80", "budget.stop 100"}; !slices.Equal(got, want) {
		t.Errorf("events %v, want %v", got, want)
	}
	h.crash() // the next daemon finds the same before its first request
	h = openWith(t, k, dir, perSecond())
	if _, err := h.Start(t.Context(), string(sb.ID), ""); !isSpent(err) {
		t.Errorf("start after a crash: %v", err)
	}
	if again := setBudget(t, h, cost.BudgetRequest{Owner: "uid:1", Meter: cost.MeterMoney, Limit: "1000"}); again.Key != b.Key || again.Holds != cost.ActionNone {
		t.Errorf("raised: %+v", again)
	}
	if row, err := h.Start(t.Context(), string(sb.ID), ""); err != nil || row.Reason != sandbox.ReasonNone || row.Status != sandbox.StatusRunning {
		t.Errorf("start: %s %s, %v", row.Status, row.Reason, err)
	}
	if err := h.RemoveBudget(t.Context(), b.Key, ""); err != nil {
		t.Error(err)
	}
	if err := h.RemoveBudget(t.Context(), b.Key, ""); sandbox.CodeOf(err) != "budget_not_found" {
		t.Errorf("removed twice: %v", err)
	}
	if n := len(told(t, h)); n != 5 {
		t.Errorf("events %v", told(t, h))
	}
	h.agree(t)
}

// TestBudgetPauses: what a budget has paused goes on when it is raised, unless
// another one pauses it; what people paused stays so.
func TestBudgetPauses(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := openWith(t, k, dir, perSecond())
	sb, theirs := owned(t, h, "uid:1", "prj_a"), owned(t, h, "uid:1", "prj_a")
	if _, err := h.Pause(t.Context(), string(theirs.ID), "uid:1"); err != nil {
		t.Fatal(err)
	}
	pause := []cost.Threshold{{Percent: 100, Action: cost.ActionPause}}
	project := cost.BudgetRequest{Project: "prj_a", Meter: cost.MeterMoney, Limit: "10", At: pause}
	owner := cost.BudgetRequest{Owner: "uid:1", Meter: cost.MeterCPU, Limit: "12s", At: pause, Period: cost.Day}
	setBudget(t, h, project)
	setBudget(t, h, owner)
	k.burn(sb.ID, 14_000_000)
	status := func(s sandbox.Status) func(sandbox.Sandbox) bool {
		return func(sb sandbox.Sandbox) bool { return sb.Status == s }
	}
	if got := until(t, h, sb.ID, status(sandbox.StatusPaused)); got.Reason != sandbox.ReasonBudget || !k.isFrozen(sb.ID) {
		t.Fatalf("%s, frozen %v", got.Reason, k.isFrozen(sb.ID))
	}
	if _, err := h.Resume(t.Context(), string(sb.ID), ""); !isSpent(err) {
		t.Errorf("resume: %v", err)
	}
	h.crash()
	h = openWith(t, k, dir, perSecond())
	if s := h.get(t, sb.ID); s.Status != sandbox.StatusPaused || !k.isFrozen(sb.ID) {
		t.Errorf("after a crash %s", s.Status)
	}
	project.Limit = "100"
	setBudget(t, h, project) // the owner's still holds
	if _, err := h.Budgets(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s := h.get(t, sb.ID); s.Status != sandbox.StatusPaused {
		t.Errorf("with one of two budgets raised it is %s", s.Status)
	}
	owner.Limit = "120s"
	setBudget(t, h, owner)
	if got := until(t, h, sb.ID, status(sandbox.StatusRunning)); got.Reason != sandbox.ReasonNone || k.isFrozen(sb.ID) {
		t.Errorf("resumed: %s, frozen %v", got.Reason, k.isFrozen(sb.ID))
	}
	if s := h.get(t, theirs.ID); s.Status != sandbox.StatusPaused {
		t.Errorf("what they paused is %s", s.Status)
	}
	if got := told(t, h); !slices.Contains(got, "budget.resume") || !slices.Contains(got, "budget.pause 100") {
		t.Errorf("events %v", got)
	}
	h.agree(t)
}

// budgetSteps are the steps of a budget's stop at which the daemon may be killed.
var budgetSteps = []string{"cgroup.freeze", "cgroup.kill", "net.detach", "cgroup.remove", "shell.remove", "rootfs.clean"}

// TestCrashInBudgetStop: wherever the daemon is killed, the next one ends what
// it began, tells each threshold once, and spent is what was.
func TestCrashInBudgetStop(t *testing.T) {
	for _, step := range budgetSteps {
		for _, after := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/%v", step, after), func(t *testing.T) {
				k, dir := newKernel(t), t.TempDir()
				h := openWith(t, k, dir, perSecond())
				sb := owned(t, h, "uid:1", "")
				b := setBudget(t, h, cost.BudgetRequest{Owner: "uid:1", Meter: cost.MeterMoney, Limit: "10"})
				k.killAt(step, after)
				k.burn(sb.ID, 11_000_000)
				go func(h *house) { _, _ = h.Budget(t.Context(), b.Key) }(h)
				k.waitDead(t, step)
				h.crash()
				k.revive()
				h = openWith(t, k, dir, perSecond())
				got := until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status == sandbox.StatusStopped })
				if got.Status != sandbox.StatusStopped {
					t.Fatalf("%s for %s", got.Status, got.Reason)
				}
				if got, want := told(t, h), []string{"budget.set", "budget.warn 80", "budget.stop 100"}; !slices.Equal(got, want) {
					t.Errorf("events %v, want %v", got, want)
				}
				now, err := h.Budget(t.Context(), b.Key)
				if s := spent(t, h, cost.StatementQuery{Owner: "uid:1"}); err != nil || now.Meter.Format(s.Total.Cost.Spent()) != now.Spent {
					t.Errorf("spent %s, the statement says %s, %v", now.Spent, s.Total.Cost, err)
				}
				if _, err := h.Start(t.Context(), string(sb.ID), ""); !isSpent(err) {
					t.Errorf("start: %v", err)
				}
				h.agree(t)
			})
		}
	}
}

// TestBudgetsCount: over many lives, looks and crashes a budget has spent what
// the statement of its scope says, to the nano.
func TestBudgetsCount(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 9))
	k, dir := newKernel(t), t.TempDir()
	h := openWith(t, k, dir, perSecond())
	reqs := []cost.BudgetRequest{
		{Owner: "uid:1", Meter: cost.MeterMoney, Limit: "1000000"},
		{Project: "prj_a", Meter: cost.MeterMoney, Limit: "1000000", Period: cost.Month},
		{Project: "prj_b", Meter: "model.tokens", Limit: "1000000000", Period: cost.Day},
	}
	tokens := uint64(0)
	var living []sandbox.Sandbox
	for i := range 120 {
		if i == 30 {
			for _, r := range reqs {
				setBudget(t, h, r)
			}
		}
		switch rng.IntN(6) {
		case 0, 1:
			if len(living) < 6 {
				living = append(living, owned(t, h, []string{"uid:1", "uid:2"}[rng.IntN(2)], []string{"prj_a", "prj_b", ""}[rng.IntN(3)]))
			}
		case 2:
			if len(living) > 0 {
				n := rng.IntN(len(living))
				k.burn(living[n].ID, uint64(rng.IntN(1_000_000)))
				if _, err := h.Remove(t.Context(), string(living[n].ID), ""); err != nil {
					t.Fatal(err)
				}
				living = slices.Delete(living, n, n+1)
			}
		case 3:
			n := rng.Uint64N(1000) + 1
			req := cost.EntryRequest{Kind: cost.KindCost, Project: "prj_b", Meter: "model.tokens", Quantity: cost.Count(n)}
			if _, err := h.PostEntry(t.Context(), req); err != nil {
				t.Fatal(err)
			}
			tokens += n
		case 4:
			for _, sb := range living {
				k.burn(sb.ID, uint64(rng.IntN(300_000)))
			}
		case 5:
			if rng.IntN(3) == 0 {
				h.crash()
				h = openWith(t, k, dir, perSecond())
			}
		}
	}
	for _, sb := range living {
		if _, err := h.Remove(t.Context(), string(sb.ID), ""); err != nil {
			t.Fatal(err)
		}
	}
	check := func() {
		t.Helper()
		all, err := h.Budgets(t.Context())
		if err != nil || len(all) != 3 {
			t.Fatalf("%d, %v", len(all), err)
		}
		for _, b := range all {
			want := cost.Count(tokens)
			if b.Meter == cost.MeterMoney {
				q := cost.StatementQuery{Project: b.ID}
				if b.Scope == cost.ScopeOwner {
					q = cost.StatementQuery{Owner: b.ID}
				}
				want = spent(t, h, q).Total.Cost.Spent()
			}
			if b.Spent != b.Meter.Format(want) || want.IsZero() {
				t.Errorf("%s %s has spent %s, the statement says %s", b.Scope, b.ID, b.Spent, want)
			}
		}
	}
	check()
	h.crash()
	h = openWith(t, k, dir, perSecond())
	check()
}

// TestBudgetOfOwnerCountsProjects: what is entered for an owner's project, also
// after a restart, but not what is entered for another's.
func TestBudgetOfOwnerCountsProjects(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := openWith(t, k, dir, perSecond())
	p := project.Project{ID: project.NewID(), Name: "shop", Owner: "bob", Status: project.StatusActive, CreatedAt: time.Now()}
	if err := h.state.UpdateLab(t.Context(), func(tx project.Tx) error { return tx.PutProject(p) }); err != nil {
		t.Fatal(err)
	}
	for _, owner := range []string{"bob", "alice"} {
		setBudget(t, h, cost.BudgetRequest{Owner: owner, Meter: cost.MeterMoney, Limit: "10"})
	}
	if _, err := h.PostEntry(t.Context(), cost.EntryRequest{Kind: cost.KindCost, Project: string(p.ID), Amount: 11 * cost.Unit}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		all, err := h.Budgets(t.Context())
		if err != nil || len(all) != 2 || all[0].ID != "alice" || all[0].Holds != cost.ActionNone || all[1].Holds != cost.ActionStop || all[1].Spent != "11" {
			t.Errorf("%+v, %v", all, err)
		}
		h.crash()
		h = openWith(t, k, dir, perSecond())
	}
}

// TestBudgetOfTokens: entries alone spend it, and it acts when one comes.
func TestBudgetOfTokens(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := openWith(t, k, dir, perSecond())
	sb := owned(t, h, "uid:1", "prj_a")
	b := setBudget(t, h, cost.BudgetRequest{Sandbox: string(sb.ID), Meter: "model.tokens", Limit: "1000"})
	enter := func(n uint64) {
		t.Helper()
		if _, err := h.PostEntry(t.Context(), cost.EntryRequest{Kind: cost.KindCost, Sandbox: string(sb.ID), Meter: "model.tokens", Quantity: cost.Count(n)}); err != nil {
			t.Fatal(err)
		}
	}
	enter(999)
	if b, err := h.Budget(t.Context(), b.Key); err != nil || b.Percent != 99 || b.Holds != cost.ActionNone {
		t.Errorf("%+v, %v", b, err)
	}
	enter(1)
	until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status == sandbox.StatusStopped })
	for _, bad := range []cost.BudgetRequest{
		{Owner: "x", Meter: "money", Limit: "0"},
		{Owner: "x", Meter: "cpu", Limit: "5 gib"},
		{Meter: "cpu", Limit: "5s"},
		{Sandbox: "nobody", Meter: "cpu", Limit: "5s"},
		{Owner: "x", Meter: "cpu", Limit: "5s", Period: "week"},
		{Owner: "x", Meter: "cpu", Limit: "5s", At: []cost.Threshold{{Percent: 0, Action: cost.ActionWarn}}},
	} {
		if s, err := h.SetBudget(t.Context(), bad); err == nil {
			t.Errorf("%+v was set: %+v", bad, s)
		}
	}
}

// TestBudgetOfAgent: the sandboxes of one agent, one after another, spend one
// budget, also over a crash; those of another do not.
func TestBudgetOfAgent(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := openWith(t, k, dir, perSecond())
	born := func(agent string) (sandbox.Sandbox, error) {
		return h.Create(t.Context(), sandbox.CreateRequest{Actor: "uid:1", Spec: sandbox.Spec{Project: "prj_a", Labels: map[string]string{cost.AgentLabel: agent}}})
	}
	enter := func(id sandbox.ID, n uint64) {
		t.Helper()
		if _, err := h.PostEntry(t.Context(), cost.EntryRequest{Kind: cost.KindCost, Sandbox: string(id), Meter: "model.tokens", Quantity: cost.Count(n)}); err != nil {
			t.Fatal(err)
		}
	}
	b := setBudget(t, h, cost.BudgetRequest{Agent: "one", Meter: "model.tokens", Limit: "1000", Period: cost.Day})
	first, err := born("one")
	other, err2 := born("two")
	if err != nil || err2 != nil {
		t.Fatal(err, err2)
	}
	enter(first.ID, 600)
	enter(other.ID, 5000)
	if _, err := h.Remove(t.Context(), string(first.ID), ""); err != nil {
		t.Fatal(err)
	}
	spentOf := func(want uint64) {
		t.Helper()
		if s, err := h.Budget(t.Context(), b.Key); err != nil || s.Spent != s.Meter.Format(cost.Count(want)) {
			t.Errorf("%s spent, %v; want %d", s.Spent, err, want)
		}
	}
	spentOf(600)
	h.crash()
	h = openWith(t, k, dir, perSecond())
	spentOf(600)
	second, err := born("one")
	if err != nil {
		t.Fatal(err)
	}
	enter(second.ID, 400)
	spentOf(1000)
	until(t, h, second.ID, func(s sandbox.Sandbox) bool {
		return s.Status == sandbox.StatusStopped && s.Reason == sandbox.ReasonBudget
	})
	if _, err := born("one"); !isSpent(err) {
		t.Errorf("a third sandbox of the agent: %v", err)
	}
	if sb, err := h.Sandbox(t.Context(), string(other.ID)); err != nil || sb.Status != sandbox.StatusRunning {
		t.Errorf("the other agent's: %s, %v", sb.Status, err)
	}
	if _, err := born("two"); err != nil {
		t.Error(err)
	}
}

// TestStatementLooksAtItsScope: what is not asked about is not read.
func TestStatementLooksAtItsScope(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	prices := perSecond()
	h := openWith(t, k, dir, func(c *Config) { prices(c); c.Usage.Interval = time.Hour })
	mine, other := owned(t, h, "uid:1", "prj_a"), owned(t, h, "uid:2", "prj_b")
	for _, sb := range []sandbox.Sandbox{mine, other} {
		k.burn(sb.ID, 7_000_000)
	}
	cpu := func(id sandbox.ID) int64 {
		b := h.box(id)
		b.meter.mu.Lock()
		defer b.meter.mu.Unlock()
		return b.meter.now.Meters.CPU
	}
	if s := spent(t, h, cost.StatementQuery{Project: "prj_a"}); s.Total.Meters.CPU < 7_000_000 {
		t.Errorf("%+v", s.Total)
	}
	if cpu(mine.ID) < 7_000_000 || cpu(other.ID) >= 7_000_000 {
		t.Errorf("read: %d of what was asked about, %d of another", cpu(mine.ID), cpu(other.ID))
	}
	if s := spent(t, h, cost.StatementQuery{}); s.Total.Meters.CPU < 14_000_000 || cpu(other.ID) < 7_000_000 {
		t.Errorf("of all: %+v", s.Total)
	}
}

// TestBuildsArePaid: what builds use counts for who asked for them, and a spent
// budget lets none begin; a repeated request is answered all the same.
func TestBuildsArePaid(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := openWith(t, k, dir, perSecond())
	first, err := h.Create(t.Context(), sandbox.CreateRequest{Actor: "uid:1", IdempotencyKey: "k"})
	if err != nil {
		t.Fatal(err)
	}
	sb := owned(t, h, buildActor+"uid:1", "")
	k.burn(sb.ID, 11_000_000)
	if _, err := h.Remove(t.Context(), string(sb.ID), ""); err != nil {
		t.Fatal(err)
	}
	b := setBudget(t, h, cost.BudgetRequest{Owner: "uid:1", Meter: cost.MeterMoney, Limit: "10"})
	if want := spent(t, h, cost.StatementQuery{Owner: "uid:1"}).Total.Cost; b.Holds != cost.ActionStop || b.Spent != b.Meter.Format(want.Spent()) || want.Cmp(cost.SumOf(11*cost.Unit)) < 0 {
		t.Errorf("%+v, the statement says %s", b, want)
	}
	if _, err := h.Create(t.Context(), sandbox.CreateRequest{Actor: buildActor + "uid:1"}); !isSpent(err) {
		t.Errorf("a build: %v", err)
	}
	if again, err := h.Create(t.Context(), sandbox.CreateRequest{Actor: "uid:1", IdempotencyKey: "k"}); err != nil || again.ID != first.ID {
		t.Errorf("sent again: %s, %v", again.ID, err)
	}
}

// TestLooksAreFew: without anything that spends, nobody looks.
func TestLooksAreFew(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := openWith(t, k, dir, perSecond())
	b := setBudget(t, h, cost.BudgetRequest{Owner: "uid:1", Meter: cost.MeterMoney, Limit: "10"})
	next := func() time.Duration {
		h.budgets.mu.Lock()
		defer h.budgets.mu.Unlock()
		return time.Until(h.budgets.tallies[b.Key].next)
	}
	if d := next(); d < 30*time.Second {
		t.Errorf("nothing lives, and the next look is in %s", d)
	}
	owned(t, h, "uid:1", "")
	testenv.Eventually(t, 10*time.Second, "a new sandbox makes the next look come sooner", func() bool { return next() < 30*time.Second })
}

// acting reports whether a budget is about to do something to a sandbox.
func acting(h *house, id sandbox.ID) bool {
	b := h.box(id)
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.acted
}

// TestBudgetIsRemovedMeanwhile: what a budget would do is not done, or undone, where
// it is removed before; also what does not work at the first try. The control is
// removed after.
func TestBudgetIsRemovedMeanwhile(t *testing.T) {
	for _, action := range []cost.Action{cost.ActionPause, cost.ActionStop} {
		for _, when := range []string{"while it waits", "and resuming fails"} {
			t.Run(string(action)+" "+when, func(t *testing.T) {
				waits := when == "while it waits"
				if !waits && action == cost.ActionStop {
					t.Skip("nothing is resumed")
				}
				k := newKernel(t)
				h := openWith(t, k, t.TempDir(), perSecond())
				sb := owned(t, h, "uid:1", "")
				b := setBudget(t, h, cost.BudgetRequest{Owner: "uid:1", Meter: cost.MeterMoney, Limit: "10", At: []cost.Threshold{{Percent: 100, Action: action}}})
				x := h.box(sb.ID)
				if waits {
					if err := x.lock(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				k.burn(sb.ID, 14_000_000)
				if _, err := h.Budget(t.Context(), b.Key); err != nil {
					t.Fatal(err)
				}
				if waits {
					testenv.Eventually(t, 10*time.Second, "the budget acts", func() bool { return acting(h, sb.ID) })
				} else {
					until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status == sandbox.StatusPaused })
					k.setFail("cgroup.thaw", true)
				}
				if err := h.RemoveBudget(t.Context(), b.Key, ""); err != nil {
					t.Fatal(err)
				}
				if waits {
					x.unlock()
				} else {
					testenv.Eventually(t, 10*time.Second, "it is tried", func() bool { return !acting(h, sb.ID) })
					k.setFail("cgroup.thaw", false)
				}
				testenv.Eventually(t, 10*time.Second, "the budget acts no more", func() bool {
					return !acting(h, sb.ID) && h.get(t, sb.ID).Status == sandbox.StatusRunning
				})
				if k.isFrozen(sb.ID) {
					t.Error("it is frozen")
				}
				h.agree(t)
			})
		}
	}
}

// TestBudgetActsAsTheStrongest: what one budget would stop is not stopped where only
// another, which pauses, is left when its turn comes.
func TestBudgetActsAsTheStrongest(t *testing.T) {
	k := newKernel(t)
	h := openWith(t, k, t.TempDir(), perSecond())
	sb := owned(t, h, "uid:1", "")
	at := func(a cost.Action) []cost.Threshold { return []cost.Threshold{{Percent: 100, Action: a}} }
	stops := setBudget(t, h, cost.BudgetRequest{Owner: "uid:1", Meter: cost.MeterMoney, Limit: "10", At: at(cost.ActionStop)})
	x := h.box(sb.ID)
	if err := x.lock(t.Context()); err != nil {
		t.Fatal(err)
	}
	k.burn(sb.ID, 14_000_000)
	if _, err := h.Budget(t.Context(), stops.Key); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 10*time.Second, "the budget acts", func() bool { return acting(h, sb.ID) })
	setBudget(t, h, cost.BudgetRequest{Owner: "uid:1", Meter: cost.MeterCPU, Limit: "1s", At: at(cost.ActionPause)})
	if err := h.RemoveBudget(t.Context(), stops.Key, ""); err != nil {
		t.Fatal(err)
	}
	x.unlock()
	until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status == sandbox.StatusPaused })
	h.agree(t)
}

// TestBudgetGivesALifetimeBack: who goes on after a budget's pause, in which the
// lifetime was over, has the whole one again, as after any.
func TestBudgetGivesALifetimeBack(t *testing.T) {
	k := newKernel(t)
	h := openWith(t, k, t.TempDir(), perSecond())
	sb, err := h.Create(t.Context(), sandbox.CreateRequest{Spec: sandbox.Spec{TTLSeconds: 5, OnDeadline: sandbox.DeadlinePause}, Actor: "uid:1"})
	if err != nil {
		t.Fatal(err)
	}
	b := setBudget(t, h, cost.BudgetRequest{Owner: "uid:1", Meter: cost.MeterMoney, Limit: "10", At: []cost.Threshold{{Percent: 100, Action: cost.ActionPause}}})
	k.burn(sb.ID, 14_000_000)
	if _, err := h.Budget(t.Context(), b.Key); err != nil {
		t.Fatal(err)
	}
	if got := until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status == sandbox.StatusPaused && s.Deadline == nil }); got.Reason != sandbox.ReasonBudget {
		t.Fatalf("it is paused for %s", got.Reason)
	}
	if err := h.RemoveBudget(t.Context(), b.Key, ""); err != nil {
		t.Fatal(err)
	}
	if got := until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status == sandbox.StatusRunning }); got.Deadline == nil {
		t.Error("it goes on for good")
	}
	until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status == sandbox.StatusPaused && s.Reason == sandbox.ReasonTTL })
}
