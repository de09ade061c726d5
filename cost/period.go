package cost

import (
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Period is how long a budget lasts before it begins anew, in UTC: no change
// to summer time makes a day shorter. A day has 24 hours (a leap second is in
// none of them, as in Unix time), a month those of its days.
type Period string

// The periods.
const (
	Total Period = "total" // for ever
	Day   Period = "day"
	Month Period = "month"
)

// Span is a stretch of time: Start belongs to it, End does not. Those of
// Total are both zero.
type Span struct{ Start, End time.Time }

// Span returns the period that t lies in.
func (p Period) Span(t time.Time) Span {
	y, m, d := t.UTC().Date()
	switch p {
	case Day:
		start := time.Date(y, m, d, 0, 0, 0, 0, time.UTC)
		return Span{start, start.AddDate(0, 0, 1)}
	case Month:
		start := time.Date(y, m, 1, 0, 0, 0, 0, time.UTC)
		return Span{start, start.AddDate(0, 1, 0)}
	}
	return Span{}
}

// Contains reports whether t lies in s.
func (s Span) Contains(t time.Time) bool {
	return s.Start.IsZero() || !t.Before(s.Start) && t.Before(s.End)
}

func (p Period) validate() error {
	if p != Total && p != Day && p != Month {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_budget", "period %.40q: use %s, %s or %s", string(p), Total, Day, Month)
	}
	return nil
}
