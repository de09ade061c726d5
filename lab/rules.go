package lab

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/google/cel-go/cel"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// rules compiles and computes conditions in CEL.
type rules struct {
	env func() (*cel.Env, error) // made when it is first needed: it is large
}

// Bounds of one condition.
const (
	ruleCost    = 10_000 // in CEL's own units: about one a step
	ruleTimeout = 100 * time.Millisecond
)

// newRules returns rules that were not needed yet.
func newRules() *rules { return &rules{sync.OnceValues(newEnv)} }

// newEnv declares the variables of conditions: whole numbers alone. Amounts
// are in nanos, of which unit is one of the currency's.
func newEnv() (*cel.Env, error) {
	counts := cel.MapType(cel.StringType, cel.IntType)
	env, err := cel.NewEnv(
		cel.Variable("cost", cel.IntType), cel.Variable("revenue", cel.IntType), cel.Variable("profit", cel.IntType),
		cel.Variable("roi_bp", cel.IntType), cel.Variable("age_seconds", cel.IntType), cel.Variable("unit", cel.IntType),
		cel.Variable("agents", counts), cel.Variable("experiments", counts),
	)
	if err != nil {
		return nil, fmt.Errorf("declare the variables of conditions: %w", err)
	}
	return env, nil
}

// check compiles a condition. Class ErrInvalid, code invalid_rule.
func (r *rules) check(expression string) error {
	_, err := r.program(expression)
	return err
}

func (r *rules) program(expression string) (cel.Program, error) {
	bad := func(err error) error {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_rule", "condition %.200q: %w", expression, err)
	}
	env, err := r.env()
	if err != nil {
		return nil, err
	}
	ast, issues := env.Compile(expression)
	if err := issues.Err(); err != nil {
		return nil, bad(err)
	}
	if !ast.OutputType().IsExactType(cel.BoolType) {
		return nil, bad(fmt.Errorf("it is a %s; it must be true or false", ast.OutputType()))
	}
	p, err := env.Program(ast, cel.CostLimit(ruleCost), cel.InterruptCheckFrequency(100))
	if err != nil {
		return nil, bad(err)
	}
	return p, nil
}

// checkAll compiles every condition of a project.
func (r *rules) checkAll(s project.Settings) error {
	var errs []error
	for _, rule := range s.Criteria.Custom {
		errs = append(errs, r.check(rule.When))
	}
	for _, rule := range s.Alerts {
		errs = append(errs, r.check(rule.When))
	}
	for _, err := range errs {
		if err != nil {
			return err // one, with its code
		}
	}
	return nil
}

// holds computes a condition.
func (r *rules) holds(expression string, in project.Inputs) (bool, error) {
	p, err := r.program(expression)
	if err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), ruleTimeout)
	defer cancel()
	agents := map[string]int64{"total": int64(len(in.Agents))}
	for _, s := range project.AgentStatuses() {
		agents[string(s)] = int64(in.Count(s))
	}
	e := in.Experiments
	var money [3]int64
	for i, sum := range []cost.Sum{in.Total.Cost, in.Total.Revenue, in.Total.Profit} {
		n, fits := sum.Nano()
		if !fits {
			return false, fmt.Errorf("conditions compute with amounts up to %s, and %s is beyond that: cancel the entry that is wrong", cost.MaxNano, sum)
		}
		money[i] = int64(n)
	}
	out, _, err := p.ContextEval(ctx, map[string]any{
		"cost": money[0], "revenue": money[1], "profit": money[2],
		"roi_bp": in.Total.Rate(), "age_seconds": in.Age, "unit": int64(cost.Unit), "agents": agents,
		"experiments": map[string]int64{
			"running": int64(e.Running), "completed": int64(e.Completed), "succeeded": int64(e.Succeeded), "expired": int64(e.Expired),
		},
	})
	if err != nil {
		return false, err
	}
	yes, ok := out.Value().(bool)
	if !ok {
		return false, errors.New("the condition is neither true nor false")
	}
	return yes, nil
}
