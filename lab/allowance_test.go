package lab

import (
	"testing"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestAgentsBeginWithABudget: each agent once; what was set or removed by hand
// stays so over restarts.
func TestAgentsBeginWithABudget(t *testing.T) {
	h := newHost(t)
	p := h.project("shop", easy)
	// Nothing of it runs before it has one.
	h.lab.refusing(func(verb, _ string) error {
		if verb == "budget" {
			return sandbox.Errorf(sandbox.ErrUnavailable, "busy", "not now")
		}
		return nil
	})
	a := h.deploy(p, "bot", project.AgentSpec{Restart: project.RestartPolicy{BackoffMS: 1, Max: 100}})
	if got := h.agent(a.ID); got.Status != project.AgentPending || len(h.lab.living()) != 0 {
		t.Errorf("without a budget it is %s, sandboxes %v", got.Status, h.lab.living())
	}
	h.lab.refusing(nil)
	first := h.becomes(a.ID, project.AgentActive)
	v := h.view(p)
	if len(v.Budgets) != 1 || v.Budgets[0].Key != first.Budget || v.Budgets[0].Limit != "1000" || v.Budgets[0].ID != string(a.ID) {
		t.Fatalf("it begins with %+v; the agent: %+v", v.Budgets, first)
	}
	again := func() {
		t.Helper()
		was := h.agent(a.ID)
		h.lab.kill(t, string(a.ID), 1)
		until(t, "it is started again", func() bool { n := h.agent(a.ID); return n.Status == project.AgentActive && n.Process != was.Process })
	}
	if _, err := h.lab.SetBudget(t.Context(), cost.BudgetRequest{Agent: string(a.ID), Meter: "tokens", Limit: "7", Period: cost.Day}); err != nil {
		t.Fatal(err)
	}
	again()
	if all, _ := h.lab.Budgets(t.Context()); len(all) != 1 || all[0].Limit != "7" {
		t.Errorf("set by hand, after a restart: %+v", all)
	}
	if err := h.lab.RemoveBudget(t.Context(), first.Budget, ""); err != nil {
		t.Fatal(err)
	}
	again()
	if all, _ := h.lab.Budgets(t.Context()); len(all) != 0 {
		t.Errorf("removed by hand, after a restart: %+v", all)
	}
	// A project's end takes those of its agents along, and no other.
	b := h.deploy(p, "bot", project.AgentSpec{})
	h.becomes(b.ID, project.AgentActive)
	if _, err := h.lab.SetBudget(t.Context(), cost.BudgetRequest{Owner: "uid:0", Meter: "tokens", Limit: "7"}); err != nil {
		t.Fatal(err)
	}
	if _, err := h.KillProject(t.Context(), string(p.ID), true, "uid:0"); err != nil {
		t.Fatal(err)
	}
	if err := h.RemoveProject(t.Context(), string(p.ID), "uid:0"); err != nil {
		t.Fatal(err)
	}
	if all, _ := h.lab.Budgets(t.Context()); len(all) != 1 || all[0].Scope != cost.ScopeOwner {
		t.Errorf("after the project's end: %+v", all)
	}
}

func TestAllowance(t *testing.T) {
	good := Allowance{Meter: "tokens", Limit: 1_000_000, Factor: 10, Period: cost.Day}
	for name, c := range map[string]struct {
		change func(*Allowance)
		ok     bool
	}{
		"good":         {func(*Allowance) {}, true},
		"none":         {func(w *Allowance) { *w = Allowance{} }, true},
		"for ever":     {func(w *Allowance) { w.Period = cost.Total }, true},
		"no factor":    {func(w *Allowance) { w.Factor = 0 }, false},
		"too much":     {func(w *Allowance) { w.Limit, w.Factor = 1<<63, 2 }, false},
		"no custom":    {func(w *Allowance) { w.Meter = cost.MeterCPU }, false},
		"no meter":     {func(w *Allowance) { w.Meter = "" }, false},
		"weird period": {func(w *Allowance) { w.Period = "week" }, false},
	} {
		w := good
		c.change(&w)
		if err := w.Validate(); (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}
