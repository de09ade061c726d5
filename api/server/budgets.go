package server

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/cost"
)

// Budgets is the part of Manager that limits what is spent.
type Budgets interface {
	// SetBudget replaces the budget of the same target, meter and period.
	SetBudget(ctx context.Context, req cost.BudgetRequest) (cost.BudgetState, error)
	// Budgets and Budget look at what was spent now.
	Budgets(ctx context.Context) ([]cost.BudgetState, error)
	Budget(ctx context.Context, key string) (cost.BudgetState, error)
	RemoveBudget(ctx context.Context, key, actor string) error
}

// BudgetTarget is the path of one budget.
type BudgetTarget struct {
	Key string `path:"budget" maxLength:"32" pattern:"^[a-z0-9]+$" patternDescription:"the id of a budget" doc:"Its id: bg…."`
}

type budgetInput struct{ Body cost.BudgetRequest }

func (s *server) budgetRoutes() {
	register(s, huma.Operation{
		OperationID: "set-budget", Method: http.MethodPost, Path: "/v1/budgets", DefaultStatus: http.StatusOK,
		Summary: "Set the budget of a sandbox, agent, project or owner, in place of the one for the same meter and period", Tags: []string{"costs"},
	}, func(ctx context.Context, in *budgetInput) (*result[cost.BudgetState], error) {
		req := in.Body
		req.Actor = actorOf(ctx)
		return wrap(s.m.SetBudget(ctx, req))
	})
	register(s, huma.Operation{
		OperationID: "list-budgets", Method: http.MethodGet, Path: "/v1/budgets",
		Summary: "List the budgets and what they have spent", Tags: []string{"costs"},
	}, func(ctx context.Context, _ *empty) (*result[api.BudgetList], error) {
		all, err := s.m.Budgets(ctx)
		return wrap(api.BudgetList{Items: orEmpty(all)}, err)
	})
	register(s, huma.Operation{
		OperationID: "get-budget", Method: http.MethodGet, Path: "/v1/budgets/{budget}",
		Summary: "One budget, what it has spent, and how long the rest lasts", Tags: []string{"costs"},
	}, func(ctx context.Context, in *BudgetTarget) (*result[cost.BudgetState], error) {
		return wrap(s.m.Budget(ctx, in.Key))
	})
	register(s, huma.Operation{
		OperationID: "remove-budget", Method: http.MethodDelete, Path: "/v1/budgets/{budget}", DefaultStatus: http.StatusNoContent,
		Summary: "Remove a budget; what it has paused goes on", Tags: []string{"costs"},
	}, func(ctx context.Context, in *BudgetTarget) (*empty, error) {
		return nil, s.m.RemoveBudget(ctx, in.Key, actorOf(ctx))
	})
}
