package lab

import (
	"context"
	"math/bits"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Allowance is the budget each agent begins with: of something its programs, or
// who runs it, enter, as the tokens of a model.
type Allowance struct {
	Meter  cost.Meter
	Limit  uint64 // of an agent in production; 0: agents begin without a budget
	Factor uint64 // an agent in the lab has so many times that
	Period cost.Period
}

// Validate checks what is configured. Class ErrInvalid.
func (w Allowance) Validate() error {
	if w.Limit == 0 {
		return nil
	}
	if high, _ := bits.Mul64(w.Limit, w.Factor); high != 0 || w.Factor == 0 || !w.Meter.Custom() {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_allowance", "budget of agents: use a custom meter, a factor of 1 or more, and a limit that times the factor is below 2^64")
	}
	for _, limit := range []uint64{w.Limit, w.Limit * w.Factor} {
		if _, err := w.request("agent", limit).Budget(); err != nil {
			return err
		}
	}
	return nil
}

func (w Allowance) request(id project.AgentID, limit uint64) cost.BudgetRequest {
	return cost.BudgetRequest{Agent: string(id), Meter: w.Meter, Limit: cost.Count(limit).String(), Period: w.Period, Actor: "lab"}
}

// allowance is what an agent of this world begins with.
func (s *supervisor) allowance(id project.AgentID) cost.BudgetRequest {
	w := s.l.cfg.Allowance
	if s == s.l.own {
		return w.request(id, w.Limit*w.Factor)
	}
	return w.request(id, w.Limit)
}

// budgetsOf lists the budgets of some agents, and of a project where one is
// named.
func (s *supervisor) budgetsOf(ctx context.Context, of project.ID, agents ...project.AgentID) ([]cost.BudgetState, error) {
	all, err := s.world.Sandboxes.Budgets(ctx)
	var out []cost.BudgetState
	for _, b := range all {
		mine := b.Scope == cost.ScopeProject && of != "" && b.ID == string(of)
		for _, id := range agents {
			mine = mine || b.Scope == cost.ScopeAgent && b.ID == string(id)
		}
		if mine {
			out = append(out, b)
		}
	}
	return out, err
}

// allot gives an agent that begins for the first time its budget, before it can
// spend any. One that was set by hand, or just before a crash, is left as it is;
// and one that was removed later does not come back.
func (k *keeper) allot(ctx context.Context, a project.Agent) (project.Agent, error) {
	if a.Budget != "" || k.s.l.cfg.Allowance.Limit == 0 {
		return a, nil
	}
	req := k.s.allowance(a.ID)
	present, err := k.s.budgetsOf(ctx, "", a.ID)
	if err != nil {
		return a, err
	}
	key := ""
	for _, b := range present {
		if b.Meter == req.Meter {
			key = b.Key
		}
	}
	if key == "" {
		b, err := k.s.world.Sandboxes.SetBudget(ctx, req)
		if err != nil {
			return a, err
		}
		key = b.Key
	}
	a.Budget = key
	return a, k.change(ctx, a, "", func(a *project.Agent) { a.Budget = key })
}

// dropBudgets removes the budgets of agents that are no more. Repeating it is
// safe.
func (s *supervisor) dropBudgets(ctx context.Context, actor string, agents ...project.AgentID) error {
	all, err := s.budgetsOf(ctx, "", agents...)
	for _, b := range all {
		if err == nil {
			err = s.world.Sandboxes.RemoveBudget(ctx, b.Key, actor)
		}
		if is(err, sandbox.ErrNotFound) {
			err = nil
		}
	}
	return err
}

// viewBudgets tells how the budgets of a project and its agents stand.
func (l *Lab) viewBudgets(ctx context.Context, id project.ID, agents []project.Agent) ([]cost.BudgetState, error) {
	ids := make([]project.AgentID, len(agents))
	for i, a := range agents {
		ids[i] = a.ID
	}
	return l.own.budgetsOf(ctx, id, ids...)
}
