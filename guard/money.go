package guard

import (
	"context"
	"fmt"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// nobody is an owner that none has: what is asked of others comes out empty, as
// of owners that are none.
const nobody = "-"

// UsageReport adds up what the caller's sandboxes used.
func (g *Manager) UsageReport(ctx context.Context, ref string, q sandbox.UsageQuery) (sandbox.UsageReport, error) {
	a, err := g.ask(ctx, looks)
	if err == nil && a != nil {
		q.Owner = a.Owner
		if ref != "" {
			ref, err = g.rows.OwnInLedger(ctx, a.Owner, ref)
		}
	}
	if err != nil {
		return sandbox.UsageReport{}, err
	}
	return g.m.UsageReport(ctx, ref, q)
}

// Prices are everybody's to see.
func (g *Manager) Prices(ctx context.Context) ([]cost.Book, error) {
	if _, err := g.ask(ctx, looks); err != nil {
		return nil, err
	}
	return g.m.Prices(ctx)
}

// PostEntry enters a cost or a revenue of what the caller has. Credits are for
// those who see all: one could pay one's own budgets back with them.
func (g *Manager) PostEntry(ctx context.Context, req cost.EntryRequest) (cost.Posted, error) {
	a, err := g.ask(ctx, changes)
	if err == nil && a != nil {
		req.Actor = a.Owner
		switch {
		case req.Kind == cost.KindCost && req.Amount < 0:
			err = noCredit()
		case req.Owner != "" && req.Owner != a.Owner:
			err = forOperators("entries of other owners")
		}
		if err == nil && req.Sandbox != "" {
			req.Sandbox, err = g.rows.OwnInLedger(ctx, a.Owner, req.Sandbox)
		}
		if err == nil && req.Project != "" {
			err = g.ownProject(ctx, a, req.Project)
		}
	}
	if err != nil {
		return cost.Posted{}, err
	}
	return g.m.PostEntry(ctx, req)
}

// Entry returns an entry of what the caller has.
func (g *Manager) Entry(ctx context.Context, number int64) (cost.Posted, error) {
	a, err := g.ask(ctx, looks)
	if err != nil {
		return cost.Posted{}, err
	}
	e, err := g.m.Entry(ctx, number)
	if a != nil && err == nil && !g.seesEntry(ctx, a, e) {
		return cost.Posted{}, cost.EntryNotFound(number)
	}
	return e, err
}

func (g *Manager) seesEntry(ctx context.Context, a *asker, e cost.Posted) bool {
	return e.Owner == a.Owner || e.Project != "" && g.ownProject(ctx, a, e.Project) == nil
}

// CancelEntry cancels an entry that the caller has sent. One of somebody else,
// or from inside a sandbox, is for those who see all: to cancel a cost gives
// budgets back what was spent.
func (g *Manager) CancelEntry(ctx context.Context, number int64, reason, actor string) (cost.Posted, error) {
	a, err := g.ask(ctx, changes)
	if err == nil && a != nil {
		var e cost.Posted
		if e, err = g.Entry(ctx, number); err == nil && e.Actor != a.Owner {
			err = forOperators(fmt.Sprintf("entry %d was sent by another", number))
		}
	}
	if err != nil {
		return cost.Posted{}, err
	}
	return g.m.CancelEntry(ctx, number, reason, a.as(actor))
}

func noCredit() error {
	return sandbox.Errorf(sandbox.ErrForbidden, "credit_forbidden", "a cost below zero gives budgets back what was spent: this takes the role operator")
}

// ownProject checks an id of a project.
func (g *Manager) ownProject(ctx context.Context, a *asker, id string) error {
	if err := sandbox.ValidateProject(id); err != nil {
		return err
	}
	_, err := g.rows.OwnProject(ctx, a.Owner, id)
	return err
}

// mine narrows a question about money to what the caller has: of an own project
// all, else what is the caller's.
func (g *Manager) mine(ctx context.Context, a *asker, of string, owner *string) {
	if of != "" && *owner == "" && g.ownProject(ctx, a, of) == nil {
		return
	}
	if *owner == "" || *owner == a.Owner {
		*owner = a.Owner
		return
	}
	*owner = nobody
}

// Entries lists those of what the caller has.
func (g *Manager) Entries(ctx context.Context, q cost.EntryQuery) ([]cost.Posted, error) {
	a, err := g.ask(ctx, looks)
	if err == nil && a != nil {
		if q.Sandbox != "" {
			q.Sandbox, err = g.rows.OwnInLedger(ctx, a.Owner, q.Sandbox)
		}
		g.mine(ctx, a, q.Project, &q.Owner)
	}
	if err != nil {
		return nil, err
	}
	return g.m.Entries(ctx, q)
}

// Statement tells what the caller's sandboxes and projects came to.
func (g *Manager) Statement(ctx context.Context, q cost.StatementQuery) (cost.Statement, error) {
	a, err := g.ask(ctx, looks)
	if err == nil && a != nil {
		if q.Sandbox != "" {
			q.Sandbox, err = g.rows.OwnInLedger(ctx, a.Owner, q.Sandbox)
		}
		g.mine(ctx, a, q.Project, &q.Owner)
	}
	if err != nil {
		return cost.Statement{}, err
	}
	return g.m.Statement(ctx, q)
}

// SetBudget sets the budget of a sandbox, agent or project of the caller's.
// Those of owners, and those another has set, are not the caller's to change.
func (g *Manager) SetBudget(ctx context.Context, req cost.BudgetRequest) (cost.BudgetState, error) {
	a, err := g.ask(ctx, changes)
	if err != nil || a == nil {
		return orElse(err, func() (cost.BudgetState, error) { return g.m.SetBudget(ctx, req) })
	}
	req.Actor = a.Owner
	b, err := req.Budget()
	if err == nil && req.Sandbox != "" {
		var sb sandbox.Sandbox
		sb, err = g.rows.OwnByRef(ctx, a.Owner, req.Sandbox)
		req.Sandbox, b.ID = string(sb.ID), string(sb.ID)
	}
	if err == nil {
		err = g.budgetable(ctx, a, b)
	}
	if err != nil {
		return cost.BudgetState{}, err
	}
	all, err := g.m.Budgets(ctx)
	if err != nil {
		return cost.BudgetState{}, err
	}
	for _, had := range all {
		if had.Scope == b.Scope && had.ID == b.ID && had.Meter == b.Meter && had.Period == b.Period && had.Actor != a.Owner {
			return cost.BudgetState{}, notYours(had.Key)
		}
	}
	return g.m.SetBudget(ctx, req)
}

func notYours(key string) error {
	return forOperators("budget " + key + " was set by another")
}

// budgetable checks the target of a budget, but for sandboxes.
func (g *Manager) budgetable(ctx context.Context, a *asker, b cost.Budget) error {
	switch b.Scope {
	case cost.ScopeProject:
		return g.ownProject(ctx, a, b.ID)
	case cost.ScopeAgent:
		_, err := g.rows.OwnAgent(ctx, a.Owner, project.AgentID(b.ID))
		return err
	case cost.ScopeOwner:
		return forOperators("budgets of owners")
	}
	return nil
}

// seesBudget reports whether a budget's target is the caller's.
func (g *Manager) seesBudget(ctx context.Context, a *asker, b cost.Budget) bool {
	switch b.Scope {
	case cost.ScopeSandbox:
		_, err := g.rows.OwnInLedger(ctx, a.Owner, b.ID)
		return err == nil
	case cost.ScopeOwner:
		return b.ID == a.Owner
	}
	return g.budgetable(ctx, a, b) == nil
}

// Budgets lists those of what the caller has.
func (g *Manager) Budgets(ctx context.Context) ([]cost.BudgetState, error) {
	a, err := g.ask(ctx, looks)
	if err != nil {
		return nil, err
	}
	all, err := g.m.Budgets(ctx)
	if a != nil {
		all = only(all, func(b cost.BudgetState) bool { return g.seesBudget(ctx, a, b.Budget) })
	}
	return all, err
}

// Budget returns a budget of what the caller has.
func (g *Manager) Budget(ctx context.Context, key string) (cost.BudgetState, error) {
	a, err := g.ask(ctx, looks)
	if err != nil {
		return cost.BudgetState{}, err
	}
	b, err := g.m.Budget(ctx, key)
	if a != nil && err == nil && !g.seesBudget(ctx, a, b.Budget) {
		return cost.BudgetState{}, noBudget(key)
	}
	return b, err
}

func noBudget(key string) error {
	return sandbox.Errorf(sandbox.ErrNotFound, "budget_not_found", "no budget %.40q: 'sandbox budget ls' shows those there are", key)
}

// RemoveBudget removes a budget that the caller has set.
func (g *Manager) RemoveBudget(ctx context.Context, key, actor string) error {
	a, err := g.ask(ctx, changes)
	if err != nil {
		return err
	}
	if a != nil {
		b, err := g.Budget(ctx, key)
		if err != nil {
			return err
		}
		if b.Actor != a.Owner || b.Scope == cost.ScopeOwner {
			return notYours(key)
		}
	}
	return g.m.RemoveBudget(ctx, key, a.as(actor))
}
