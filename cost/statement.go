package cost

import (
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// StatementQuery asks what was spent and earned in a span of time.
type StatementQuery struct {
	From, To time.Time // From is in, To is not; zero: the beginning, and now
	By       string    // sandbox, owner, project, image or label:KEY; empty: one line for all
	Book     string    // rate with this book in place of those in force
	Sandbox  string    // of this one only, if set
	Owner    string
	Project  string
}

// Statement is what was spent and earned in a span of time.
type Statement struct {
	From     time.Time       `json:"from"`
	To       time.Time       `json:"to"`
	By       string          `json:"by,omitempty"`
	Book     string          `json:"book,omitempty" doc:"All was rated with this one, whatever was in force."`
	Currency string          `json:"currency,omitempty"`
	Lines    []StatementLine `json:"lines"`
	Total    StatementLine   `json:"total"`

	Quarantined []int64 `json:"quarantined,omitempty" doc:"Entries of the span that no sum has, for they are beyond the bounds of an entry: cancel them. At most 100."`
}

// StatementLine is what those with one key spent and earned together.
type StatementLine struct {
	Key       string         `json:"key,omitempty" doc:"Empty for those without, as without the label."`
	Sandboxes int64          `json:"sandboxes" doc:"Those that existed in the span."`
	Meters    sandbox.Meters `json:"meters"`
	Charges   []Charge       `json:"charges" doc:"What was used, by price book and meter."`
	Usage     Sum            `json:"usage" doc:"The charges of what the daemon counted."`
	Outside   Sum            `json:"outside" doc:"Costs entered, custom meters among them."`
	Cost      Sum            `json:"cost" doc:"Usage and outside."`
	Revenue   Sum            `json:"revenue"`
	Profit    Sum            `json:"profit" doc:"Revenue less cost."`
	ROI       *int64         `json:"roi_bp,omitempty" doc:"Profit by cost, in hundredths of a percent, rounded down; absent without cost."`
}

// Finish works out what follows from usage, outside and revenue.
func (l *StatementLine) Finish() {
	l.Cost = l.Usage.Add(l.Outside)
	l.Profit = l.Revenue.Sub(l.Cost)
	l.ROI = ROI(l.Profit, l.Cost)
}

// ROI returns profit by cost in hundredths of a percent, rounded down: 10,000
// where every unit spent earned itself and another. Nil without cost, or where
// it does not fit.
func ROI(profit, cost Sum) *int64 {
	if cost.Sign() <= 0 {
		return nil
	}
	n, ok := profit.Ratio(cost, 10_000)
	if !ok {
		return nil
	}
	return &n
}
