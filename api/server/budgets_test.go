package server_test

import (
	"testing"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestBudgets sets, shows, replaces and removes budgets.
func TestBudgets(t *testing.T) {
	c := start(t).client(t)
	req := cost.BudgetRequest{Project: "prj_a", Meter: cost.MeterMoney, Limit: "25.5", Period: cost.Month, At: []cost.Threshold{{Percent: 90, Action: cost.ActionPause}}}
	s, err := c.SetBudget(t.Context(), req)
	if err != nil || s.Limit != "25.5" || s.Scope != cost.ScopeProject || s.At[0].Percent != 90 || s.Actor == "" {
		t.Fatalf("%+v, %v", s, err)
	}
	req.Limit = "30"
	again, err := c.SetBudget(t.Context(), req)
	if err != nil || again.Key != s.Key || again.Limit != "30" {
		t.Errorf("%+v, %v", again, err)
	}
	if one, err := c.Budget(t.Context(), s.Key); err != nil || one.ExhaustedIn == nil || one.Percent != 50 {
		t.Errorf("%+v, %v", one, err)
	}
	if all, err := c.Budgets(t.Context()); err != nil || len(all) != 1 || all[0].Key != s.Key {
		t.Errorf("%+v, %v", all, err)
	}
	for meter, limit := range map[cost.Meter]string{cost.MeterCPU: "90m", cost.MeterNet: "0.123456789 gib", cost.MeterMemory: "1.1 gib-second", cost.MeterStarts: "7", "tokens": "5"} {
		set, err := c.SetBudget(t.Context(), cost.BudgetRequest{Owner: "uid:1", Meter: meter, Limit: limit})
		back, berr := c.SetBudget(t.Context(), cost.BudgetRequest{Owner: "uid:1", Meter: meter, Limit: set.Limit, Period: set.Period, At: set.At})
		if err != nil || berr != nil || back.Key != set.Key || back.Limit != set.Limit {
			t.Errorf("%s: posting %q back: %q, %v, %v", meter, set.Limit, back.Limit, err, berr)
		}
	}
	for code, bad := range map[string]cost.BudgetRequest{
		"invalid_limit": {Owner: "uid:1", Meter: cost.MeterCPU, Limit: "5 gib"}, "invalid_scope": {Meter: cost.MeterCPU, Limit: "5s"},
		"sandbox_not_found": {Sandbox: "nobody", Meter: cost.MeterCPU, Limit: "5s"},
		"invalid_budget":    {Owner: "uid:1", Meter: cost.MeterCPU, Limit: "5s", At: []cost.Threshold{{Percent: 5000, Action: cost.ActionWarn}}},
	} {
		if _, err := c.SetBudget(t.Context(), bad); sandbox.CodeOf(err) != code {
			t.Errorf("%+v: %v, want %s", bad, err, code)
		}
	}
	if err := c.RemoveBudget(t.Context(), s.Key); err != nil {
		t.Error(err)
	}
	for what, err := range map[string]error{"remove": c.RemoveBudget(t.Context(), s.Key), "show": func() error { _, err := c.Budget(t.Context(), s.Key); return err }()} {
		if sandbox.CodeOf(err) != "budget_not_found" {
			t.Errorf("%s once more: %v", what, err)
		}
	}
}
