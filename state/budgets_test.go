package state

import (
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

func TestBudgets(t *testing.T) {
	d := open(t)
	b := cost.StoredBudget{
		Key: cost.NewBudgetKey(), CreatedAt: ledgerStart, UpdatedAt: ledgerStart, Actor: "uid:0",
		Budget: cost.Budget{Scope: cost.ScopeProject, ID: "prj_a", Meter: cost.MeterMemory, Limit: cost.MaxQuantity, Period: cost.Day, At: cost.DefaultThresholds()},
	}
	first, err := d.PutBudget(t.Context(), b)
	if err != nil || first.Key != b.Key {
		t.Fatalf("%+v, %v", first, err)
	}
	mark := cost.Mark{Period: cost.Day, Start: ledgerStart, Fired: cost.DefaultThresholds()[:1], Paused: true}
	if err := d.KeepMark(t.Context(), b.Key, mark, sandbox.Event{Type: "budget.warn"}); err != nil {
		t.Fatal(err)
	}
	again := b
	again.Key, again.Limit, again.CreatedAt, again.UpdatedAt = cost.NewBudgetKey(), cost.Count(7), ledgerStart.Add(time.Hour), ledgerStart.Add(time.Hour)
	row, err := d.PutBudget(t.Context(), again)
	if err != nil || row.Key != b.Key || !row.CreatedAt.Equal(ledgerStart) || row.Limit != cost.Count(7) || !row.Mark.Paused {
		t.Errorf("set again: %+v, %v", row, err)
	}
	other := b
	other.Key, other.Period = cost.NewBudgetKey(), cost.Month
	if _, err := d.PutBudget(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	all, err := d.Budgets(t.Context())
	if err != nil || len(all) != 2 {
		t.Fatalf("%+v, %v", all, err)
	}
	for _, x := range all {
		if x.Key == b.Key && (x.Limit != cost.Count(7) || len(x.Mark.Fired) != 1 || !x.Mark.Start.Equal(ledgerStart)) || x.Key == other.Key && x.Limit != cost.MaxQuantity {
			t.Errorf("%+v", x)
		}
	}
	if events, err := d.Events(t.Context(), 0, "", 0); err != nil || len(events) != 1 {
		t.Errorf("events %+v, %v", events, err)
	}
	if err := d.DeleteBudget(t.Context(), b.Key); err != nil {
		t.Error(err)
	}
	want(t, d.DeleteBudget(t.Context(), b.Key), sandbox.ErrNotFound, "budget_not_found")
	// One that was removed tells nothing any more.
	if err := d.KeepMark(t.Context(), b.Key, mark, sandbox.Event{Type: "budget.stop"}); err != nil {
		t.Error(err)
	}
	if events, err := d.Events(t.Context(), 0, "", 0); err != nil || len(events) != 1 {
		t.Errorf("events of a removed budget: %+v, %v", events, err)
	}
}
