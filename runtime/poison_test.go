package runtime

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestSumsPastOneAmount: entries that are each within bounds come to more than
// one amount of 64 bits has room for. The poisoner's budget stops what is
// theirs, also after a restart, and nobody else notices.
func TestSumsPastOneAmount(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := openWith(t, k, dir, perSecond())
	sb, other := owned(t, h, "uid:1", "prj_a"), owned(t, h, "uid:2", "prj_b")
	for _, owner := range []string{"uid:1", "uid:2"} {
		setBudget(t, h, cost.BudgetRequest{Owner: owner, Meter: cost.MeterMoney, Limit: "9000000000"})
	}
	enter := func(kind cost.Kind, amount cost.Nano) error {
		_, err := h.PostEntry(t.Context(), cost.EntryRequest{Sandbox: string(sb.ID), Kind: kind, Amount: amount})
		return err
	}
	if err := enter(cost.KindCost, 9_223_372_036*cost.Unit); sandbox.CodeOf(err) != "entry_too_large" {
		t.Fatalf("an entry of all there is: %v", err)
	}
	began := time.Now()
	for range 10 {
		for _, kind := range []cost.Kind{cost.KindCost, cost.KindRevenue} {
			if err := enter(kind, cost.MaxEntry); err != nil {
				t.Fatal(err)
			}
		}
	}
	check := func() {
		t.Helper()
		got := until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status == sandbox.StatusStopped })
		if got.Reason != sandbox.ReasonBudget {
			t.Errorf("stopped for %s: %s", got.Reason, got.Detail)
		}
		if s := spent(t, h, cost.StatementQuery{By: "owner"}); s.Total.Revenue.String() != "10000000000" || s.Lines[0].Outside.String() != "10000000000" {
			t.Errorf("%+v", s)
		}
		all, err := h.Budgets(t.Context())
		if err != nil || len(all) != 2 || all[0].Unknown != "" || all[0].Holds != cost.ActionStop || !strings.HasPrefix(all[0].Spent, "1000000000") || all[1].Holds != cost.ActionNone {
			t.Errorf("%+v, %v", all, err)
		}
		if _, err := h.Start(t.Context(), string(sb.ID), ""); !isSpent(err) {
			t.Errorf("a start of the poisoner's: %v", err)
		}
		owned(t, h, "uid:2", "")
		if s := h.get(t, other.ID); s.Status != sandbox.StatusRunning {
			t.Errorf("the other's is %s", s.Status)
		}
	}
	check()
	t.Logf("stopped and all looked at within %s", time.Since(began))
	h.crash()
	h = openWith(t, k, dir, perSecond())
	check()
}

// TestQuarantineCloses: entries of before there were bounds are in no sum, and
// the budgets they are of hold and say why, until they are cancelled.
func TestQuarantineCloses(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := openWith(t, k, dir, perSecond())
	sb, other := owned(t, h, "uid:1", ""), owned(t, h, "uid:2", "")
	b := setBudget(t, h, cost.BudgetRequest{Owner: "uid:1", Meter: cost.MeterMoney, Limit: "100"})
	setBudget(t, h, cost.BudgetRequest{Owner: "uid:1", Meter: cost.MeterCPU, Limit: "100h"})
	warns := setBudget(t, h, cost.BudgetRequest{Owner: "uid:2", Meter: cost.MeterMoney, Limit: "100", At: []cost.Threshold{{Percent: 80, Action: cost.ActionPause}}})
	h.crash()
	sqlDo(t, dir, `INSERT INTO entries (number, scope, target, key, kind, at, amount, meter, quantity, book, note, actor, owner, project, upto) VALUES
		(101, 'owner', 'uid:1', 'a', 'cost', 1790000007000, 9223372036000000000, '', 0, '', '', '', 'uid:1', '', 0),
		(102, 'owner', 'uid:1', 'b', 'cost', 1790000007000, 9223372036000000000, '', 0, '', '', '', 'uid:1', '', 0)`)
	h = openWith(t, k, dir, perSecond())
	if _, err := h.Create(t.Context(), sandbox.CreateRequest{Actor: "uid:1"}); sandbox.CodeOf(err) != "budget_unknown" || !strings.Contains(err.Error(), "entry 101") {
		t.Errorf("the first request: %v", err)
	}
	got := until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status == sandbox.StatusStopped })
	if got.Reason != sandbox.ReasonBudget || !strings.Contains(got.Detail, "entry 101") {
		t.Errorf("stopped for %s: %s", got.Reason, got.Detail)
	}
	s := spent(t, h, cost.StatementQuery{})
	if !slices.Equal(s.Quarantined, []int64{101, 102}) || s.Total.Outside.Sign() != 0 {
		t.Errorf("%+v", s)
	}
	all, err := h.Budgets(t.Context())
	if err != nil || len(all) != 3 {
		t.Fatalf("%+v, %v", all, err)
	}
	for _, x := range all {
		if (x.Key == b.Key) != (x.Unknown != "") || (x.Key == b.Key) != (x.Holds == cost.ActionStop) {
			t.Errorf("%+v", x)
		}
	}
	if x := h.get(t, other.ID); x.Status != sandbox.StatusRunning || warns.Holds != cost.ActionNone {
		t.Errorf("the other's is %s", x.Status)
	}
	if events := told(t, h); !slices.Contains(events, "budget.unknown") {
		t.Errorf("events %v", events)
	}
	for _, n := range s.Quarantined {
		for range 2 {
			if _, err := h.CancelEntry(t.Context(), n, "poison", "uid:0"); err != nil {
				t.Fatal(err)
			}
		}
	}
	if x, err := h.Budget(t.Context(), b.Key); err != nil || x.Unknown != "" || x.Holds != cost.ActionNone {
		t.Errorf("%+v, %v", x, err)
	}
	if _, err := h.Start(t.Context(), string(sb.ID), ""); err != nil {
		t.Errorf("after they were cancelled: %v", err)
	}
	if events := told(t, h); !slices.Contains(events, "budget.known") {
		t.Errorf("events %v", events)
	}
	if n := h.eventsOf(t, "cost.cancelled"); n != 2 {
		t.Errorf("%d events of cancellations", n)
	}
}

// TestDamagedBudgetCloses: a budget whose row cannot be read holds, and another
// owner's does not.
func TestDamagedBudgetCloses(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := openWith(t, k, dir, perSecond())
	sb := owned(t, h, "uid:1", "")
	b := setBudget(t, h, cost.BudgetRequest{Owner: "uid:1", Meter: cost.MeterMoney, Limit: "100", At: []cost.Threshold{{Percent: 100, Action: cost.ActionPause}}})
	setBudget(t, h, cost.BudgetRequest{Owner: "uid:2", Meter: cost.MeterMoney, Limit: "100"})
	h.crash()
	sqlDo(t, dir, `UPDATE budgets SET record = '{"limit":"NaN"}' WHERE target = 'uid:1'`)
	h = openWith(t, k, dir, perSecond())
	until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status == sandbox.StatusStopped })
	if x, err := h.Budget(t.Context(), b.Key); err != nil || !strings.Contains(x.Unknown, "damaged") || x.Holds != cost.ActionStop {
		t.Errorf("%+v, %v", x, err)
	}
	owned(t, h, "uid:2", "")
	if x := setBudget(t, h, cost.BudgetRequest{Owner: "uid:1", Meter: cost.MeterMoney, Limit: "100"}); x.Key != b.Key || x.Unknown != "" || x.Holds != cost.ActionNone {
		t.Errorf("set anew: %+v", x)
	}
	if _, err := h.Start(t.Context(), string(sb.ID), ""); err != nil {
		t.Error(err)
	}
}

// TestCancelGivesBack: a cancelled cost arms a budget again, in the period the
// cost was of alone.
func TestCancelGivesBack(t *testing.T) {
	h := openWith(t, newKernel(t), t.TempDir(), perSecond())
	owned(t, h, "uid:1", "")
	b := setBudget(t, h, cost.BudgetRequest{Owner: "uid:1", Meter: cost.MeterMoney, Limit: "10", Period: cost.Month})
	p, err := h.PostEntry(t.Context(), cost.EntryRequest{Owner: "uid:1", Kind: cost.KindCost, Amount: 11 * cost.Unit})
	if err != nil {
		t.Fatal(err)
	}
	if x, err := h.Budget(t.Context(), b.Key); err != nil || x.Holds != cost.ActionStop {
		t.Fatalf("%+v, %v", x, err)
	}
	if _, err := h.CancelEntry(t.Context(), p.Number, "twice", "uid:0"); err != nil {
		t.Fatal(err)
	}
	if x, err := h.Budget(t.Context(), b.Key); err != nil || x.Holds != cost.ActionNone || x.Percent > 5 {
		t.Errorf("%+v, %v", x, err)
	}
	if s := spent(t, h, cost.StatementQuery{Owner: "uid:1"}); s.Total.Outside.Sign() != 0 {
		t.Errorf("%+v", s.Total)
	}
}
