package project

import (
	"time"

	"github.com/sandboxd/sandboxd/cost"
)

// Metrics is what a project or an agent has come to.
type Metrics struct {
	Cost    cost.Sum `json:"cost"`
	Revenue cost.Sum `json:"revenue"`
	Profit  cost.Sum `json:"profit"`
	ROI     *int64   `json:"roi_bp,omitempty" doc:"Profit by cost in basis points, rounded down: 10000 are 100 %. Absent without cost, and where it does not fit."`
}

// MetricsOf computes the metrics of an amount spent and earned.
func MetricsOf(m Money) Metrics {
	profit := m.Revenue.Sub(m.Cost)
	return Metrics{Cost: m.Cost, Revenue: m.Revenue, Profit: profit, ROI: cost.ROI(profit, m.Cost)}
}

// Rate is the ROI to judge by, which is always a number: see ROI.
func (m Metrics) Rate() int64 { return ROI(Money{m.Cost, m.Revenue}) }

// AgentMetrics is an agent with what it has come to.
type AgentMetrics struct {
	Agent  AgentID     `json:"agent"`
	Type   string      `json:"type"`
	Status AgentStatus `json:"status"`
	Metrics
}

// Inputs is everything an evaluation looks at.
type Inputs struct {
	At          time.Time      `json:"at"`
	Age         int64          `json:"age_seconds" doc:"Since the first agent was deployed; 0 without one."`
	Total       Metrics        `json:"total"`
	Agents      []AgentMetrics `json:"agents"`
	Experiments Experiments    `json:"experiments"`
}

// Experiments counts a project's experiments.
type Experiments struct {
	Running   int `json:"running"`
	Completed int `json:"completed"`
	Succeeded int `json:"succeeded"`
	Expired   int `json:"expired"`
}

// Count returns how many agents have a status.
func (in Inputs) Count(s AgentStatus) int {
	n := 0
	for _, a := range in.Agents {
		if a.Status == s {
			n++
		}
	}
	return n
}

// Total adds up what every agent came to, and what belongs to the project as
// a whole.
func Total(own Money, agents map[AgentID]Money) Metrics {
	for _, m := range agents {
		own = own.Add(m)
	}
	return MetricsOf(own)
}

// View is a project with all there is to see of it.
type View struct {
	Project
	Metrics     Metrics            `json:"metrics"`
	Agents      []AgentView        `json:"agents"`
	Experiments []Experiment       `json:"experiments"`
	Budgets     []cost.BudgetState `json:"budgets,omitempty" doc:"Of the project, and of its agents."`
	Evaluation  *Evaluation        `json:"evaluation,omitempty" doc:"The last."`
	Promotion   *Promotion         `json:"promotion,omitempty" doc:"The last."`
}

// AgentView is an agent with what it came to.
type AgentView struct {
	Agent
	Metrics Metrics `json:"metrics"`
}

// Line is a project in a summary.
type Line struct {
	ID      ID      `json:"id"`
	Name    string  `json:"name"`
	Status  Status  `json:"status"`
	Agents  int     `json:"agents"`
	Active  int     `json:"active"`
	Metrics Metrics `json:"metrics"`
}

// Summary is a list of projects and their sum.
type Summary struct {
	Projects []Line         `json:"projects"`
	Count    map[Status]int `json:"count"`
	Total    Metrics        `json:"total"`
}
