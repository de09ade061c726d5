package cost

import (
	"math/big"
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
}

// StatementLine is what those with one key spent and earned together.
type StatementLine struct {
	Key       string         `json:"key,omitempty" doc:"Empty for those without, as without the label."`
	Sandboxes int64          `json:"sandboxes" doc:"Those that existed in the span."`
	Meters    sandbox.Meters `json:"meters"`
	Charges   []Charge       `json:"charges" doc:"What was used, by price book and meter."`
	Usage     Nano           `json:"usage" doc:"The charges of what the daemon counted."`
	Outside   Nano           `json:"outside" doc:"Costs entered, custom meters among them."`
	Cost      Nano           `json:"cost" doc:"Usage and outside."`
	Revenue   Nano           `json:"revenue"`
	Profit    Nano           `json:"profit" doc:"Revenue less cost."`
	ROI       *int64         `json:"roi_bp,omitempty" doc:"Profit by cost, in hundredths of a percent, rounded down; absent without cost."`
}

// Finish works out what follows from usage, outside and revenue. Class
// ErrTooLarge.
func (l *StatementLine) Finish() (err error) {
	if l.Cost, err = l.Usage.Add(l.Outside); err != nil {
		return err
	}
	if l.Profit, err = l.Revenue.Sub(l.Cost); err != nil {
		return err
	}
	l.ROI = ROI(l.Profit, l.Cost)
	return nil
}

// ROI returns profit by cost in hundredths of a percent, rounded down: 10,000
// where every unit spent earned itself and another. Nil without cost, or where
// it does not fit.
func ROI(profit, cost Nano) *int64 {
	if cost <= 0 {
		return nil
	}
	n := new(big.Int).Mul(big.NewInt(int64(profit)), big.NewInt(10_000))
	n.Div(n, big.NewInt(int64(cost))) // Euclidean: rounded down, as cost is above 0
	if !n.IsInt64() {
		return nil
	}
	v := n.Int64()
	return &v
}
