package servertest

import (
	"context"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// SetBudget implements server.Manager: half of every budget is spent.
func (m *Memory) SetBudget(_ context.Context, req cost.BudgetRequest) (cost.BudgetState, error) {
	if err := m.fail("SetBudget"); err != nil {
		return cost.BudgetState{}, err
	}
	b, err := req.Budget()
	if err != nil {
		return cost.BudgetState{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if b.Scope == cost.ScopeSandbox {
		x, err := m.find(b.ID)
		if err != nil {
			return cost.BudgetState{}, err
		}
		b.ID = string(x.sb.ID)
	}
	secs := int64(3 * 3600)
	s := cost.BudgetState{
		StoredBudget: cost.StoredBudget{Key: cost.NewBudgetKey(), Budget: b, CreatedAt: time.Now(), UpdatedAt: time.Now(), Actor: req.Actor},
		Limit:        b.Meter.FormatLimit(b.Limit), Percent: 50, ExhaustedIn: &secs,
	}
	for i, old := range m.budgets {
		if old.Scope == b.Scope && old.ID == b.ID && old.Meter == b.Meter && old.Period == b.Period {
			s.Key = old.Key
			m.budgets[i] = s
			return s, nil
		}
	}
	m.budgets = append(m.budgets, s)
	return s, nil
}

// Budgets implements server.Manager.
func (m *Memory) Budgets(context.Context) ([]cost.BudgetState, error) {
	if err := m.fail("Budgets"); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.budgets), nil
}

// Budget implements server.Manager.
func (m *Memory) Budget(_ context.Context, key string) (cost.BudgetState, error) {
	if err := m.fail("Budget"); err != nil {
		return cost.BudgetState{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	i, err := m.budget(key)
	if err != nil {
		return cost.BudgetState{}, err
	}
	return m.budgets[i], nil
}

// budget finds a budget; m.mu is held.
func (m *Memory) budget(key string) (int, error) {
	i := slices.IndexFunc(m.budgets, func(b cost.BudgetState) bool { return b.Key == key })
	if i < 0 {
		return i, sandbox.Errorf(sandbox.ErrNotFound, "budget_not_found", "no budget %.40q: 'sandbox budget ls' lists them", key)
	}
	return i, nil
}

// RemoveBudget implements server.Manager.
func (m *Memory) RemoveBudget(_ context.Context, key, _ string) error {
	if err := m.fail("RemoveBudget"); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	i, err := m.budget(key)
	if err == nil {
		m.budgets = slices.Delete(m.budgets, i, i+1)
	}
	return err
}
