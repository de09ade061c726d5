package client

import (
	"context"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/cost"
)

// SetBudget sets the budget of a sandbox, agent, project or owner, in place of the one
// it has for the same meter and period.
func (c *Client) SetBudget(ctx context.Context, req cost.BudgetRequest) (cost.BudgetState, error) {
	return post[cost.BudgetState](ctx, c, path("budgets"), req, nil)
}

// Budgets lists the budgets and what they have spent now, by target.
func (c *Client) Budgets(ctx context.Context) ([]cost.BudgetState, error) {
	l, err := get[api.BudgetList](ctx, c, path("budgets"), nil)
	return l.Items, err
}

// Budget tells how a budget stands now.
func (c *Client) Budget(ctx context.Context, key string) (cost.BudgetState, error) {
	return get[cost.BudgetState](ctx, c, path("budgets", key), nil)
}

// RemoveBudget removes a budget; what it has paused goes on.
func (c *Client) RemoveBudget(ctx context.Context, key string) error {
	_, err := ask[none](ctx, c, call{method: http.MethodDelete, path: path("budgets", key)})
	return err
}
