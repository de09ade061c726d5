package cost

import (
	"math"
	"math/big"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// BudgetRequest sets the budget of one sandbox, agent, project or owner, in
// place of the one it has for the same meter and period.
type BudgetRequest struct {
	Sandbox string      `json:"sandbox,omitempty" maxLength:"63" doc:"Id, name or unique beginning of an id."`
	Agent   string      `json:"agent,omitempty" maxLength:"256" doc:"The id of an agent: all sandboxes it gets, one after another."`
	Project string      `json:"project,omitempty" maxLength:"63"`
	Owner   string      `json:"owner,omitempty" maxLength:"256" doc:"As records name it: uid:1000."`
	Meter   Meter       `json:"meter" maxLength:"63" doc:"money, cpu, memory, storage, net, net_in, net_out, starts, wall, or a custom meter."`
	Limit   string      `json:"limit" maxLength:"64" doc:"As 25 of money, 90m of cpu, 1.5 gib-hour of memory, 20 gib of net, 1000000 of tokens."`
	Period  Period      `json:"period,omitempty" enum:"total,day,month" doc:"In UTC; total if absent."`
	At      []Threshold `json:"at,omitempty" maxItems:"16" doc:"If absent, warn at 80 percent and stop at 100."`
	Actor   string      `json:"-"`
}

// Budget returns the budget asked for. Class ErrInvalid.
func (r BudgetRequest) Budget() (b Budget, err error) {
	b = Budget{Meter: r.Meter, Period: r.Period, At: r.At}
	if b.Scope, b.ID, err = r.target(); err != nil {
		return b, err
	}
	if b.Limit, err = r.Meter.ParseLimit(r.Limit); err != nil {
		return b, err
	}
	if b.Period == "" {
		b.Period = Total
	}
	if len(b.At) == 0 {
		b.At = DefaultThresholds()
	}
	return b, b.Validate()
}

func (r BudgetRequest) target() (Scope, string, error) {
	switch {
	case r.Agent == "":
		return OneTarget(r.Sandbox, r.Project, r.Owner)
	case r.Sandbox+r.Project+r.Owner != "":
		return "", "", sandbox.Errorf(sandbox.ErrInvalid, "invalid_scope", "name one sandbox, agent, project or owner: more are named")
	}
	if len(r.Agent) > maxTarget || sandbox.Plain(r.Agent) != r.Agent { // any value of a label that can be shown
		return "", "", sandbox.Errorf(sandbox.ErrInvalid, "invalid_name", "agent %.40q: use one line of at most %d bytes, as the label of its sandboxes has it", r.Agent, maxTarget)
	}
	return ScopeAgent, r.Agent, nil
}

// StoredBudget is a budget with its record.
type StoredBudget struct {
	Key string `json:"budget" doc:"Its own id."`
	Budget
	CreatedAt time.Time `json:"created_at"`
	UpdatedAt time.Time `json:"updated_at"`
	Actor     string    `json:"actor,omitempty" doc:"Who set it last."`
}

// budgetPrefix begins the id of every budget.
const budgetPrefix = "bg"

// NewBudgetKey returns a fresh id of a budget.
func NewBudgetKey() string { return budgetPrefix + string(sandbox.NewID())[2:] }

// BudgetState is a budget and how it stands.
type BudgetState struct {
	StoredBudget
	Limit       string      `json:"limit" doc:"As a request has it: 25 of money, 5400 cpu-second, 1.5 gib-hour, 20 gib, 1000000 of tokens."`
	Spent       string      `json:"spent" doc:"In this period, in the same form, rounded down."`
	Percent     int64       `json:"percent" doc:"Spent of the limit, rounded down."`
	Since       time.Time   `json:"since,omitzero" doc:"When this period began; absent of a total."`
	Until       time.Time   `json:"until,omitzero" doc:"When it ends."`
	Holds       Action      `json:"holds,omitempty" doc:"pause or stop: nothing of it may be created, started or resumed."`
	Unknown     string      `json:"unknown,omitempty" doc:"Why it cannot be told what was spent. Then it holds as if all were: spent is what was found last."`
	Fired       []Threshold `json:"fired,omitempty" doc:"Thresholds crossed in this period."`
	ExhaustedIn *int64      `json:"exhausted_in_seconds,omitempty" doc:"How long the rest lasts at the present rate, if within the period."`
}

// Percent returns what spent is of the limit, rounded down, or the largest
// number where it is more.
func (b Budget) Percent(spent Quantity) int64 {
	if b.Limit.IsZero() {
		return 0
	}
	n := new(big.Int).Mul(spent.big(), big.NewInt(100))
	if n.Div(n, b.Limit.big()); !n.IsInt64() {
		return math.MaxInt64
	}
	return n.Int64()
}
