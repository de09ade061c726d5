package cost

import (
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Scope says what kind of object a budget or an entry is for.
type Scope string

// The scopes.
const (
	ScopeSandbox Scope = "sandbox"
	ScopeProject Scope = "project"
	ScopeOwner   Scope = "owner"
	// ScopeAgent is for budgets alone: all sandboxes, one after another, that
	// have the agent's id as their AgentLabel.
	ScopeAgent Scope = "agent"
)

// AgentLabel is the label by which an agent's sandboxes are known.
const AgentLabel = "agent"

// maxTarget is the length of the longest id of a target.
const maxTarget = 256

func (s Scope) validate(id string) error {
	if s != ScopeSandbox && s != ScopeProject && s != ScopeOwner {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_scope", "scope %.40q: use %s, %s or %s", string(s), ScopeSandbox, ScopeProject, ScopeOwner)
	}
	if id == "" || len(id) > maxTarget {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_scope", "name the %s, in at most %d bytes", s, maxTarget)
	}
	return nil
}

// Action is what a budget leads to.
type Action string

// The actions, the stronger ones last. Resume is the answer of a budget, not
// one of a threshold.
const (
	ActionNone   Action = ""
	ActionResume Action = "resume" // what this budget paused may go on
	ActionWarn   Action = "warn"   // an event
	ActionPause  Action = "pause"  // freeze; memory is kept, and goes on to be charged
	ActionStop   Action = "stop"   // end the processes; reason budget
)

var strength = map[Action]int{ActionNone: 0, ActionResume: 1, ActionWarn: 2, ActionPause: 3, ActionStop: 4}

// Strongest returns the action that wins where several budgets speak of one
// sandbox: one that pauses outweighs one that resumes.
func Strongest(actions ...Action) Action {
	var most Action
	for _, a := range actions {
		if strength[a] > strength[most] {
			most = a
		}
	}
	return most
}

// Threshold is an action at a share of the limit.
type Threshold struct {
	Percent int    `json:"percent"` // 1 to 1000: a stop may come some way behind a pause
	Action  Action `json:"action"`  // warn, pause or stop
}

// The bounds of thresholds.
const (
	maxThresholds = 16
	maxPercent    = 1000
)

// Budget limits what may be spent of one meter.
type Budget struct {
	Scope  Scope       `json:"scope"`
	ID     string      `json:"id"`
	Meter  Meter       `json:"meter"` // money, net, wall, or one that is counted
	Limit  Quantity    `json:"limit"` // base units of the meter; see ParseLimit
	Period Period      `json:"period"`
	At     []Threshold `json:"at"`
}

// DefaultThresholds are those of a budget that names none.
func DefaultThresholds() []Threshold {
	return []Threshold{{80, ActionWarn}, {100, ActionStop}}
}

// maxLimit leaves room for a thousand percent of it.
var maxLimit = Quantity{hi: 1 << 56}

// Validate checks a budget. Class ErrInvalid, code invalid_budget.
func (b Budget) Validate() error {
	bad := func(format string, args ...any) error {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_budget", "budget: "+format, args...)
	}
	if b.Scope != ScopeAgent || b.ID == "" || len(b.ID) > maxTarget {
		if err := b.Scope.validate(b.ID); err != nil {
			return bad("%w", err)
		}
	}
	if err := b.Meter.Validate(); err != nil {
		return bad("%w", err)
	}
	if err := b.Period.validate(); err != nil {
		return bad("%w", err)
	}
	switch {
	case b.Limit.IsZero():
		return bad("limit of %s: give more than nothing", b.Meter)
	case b.Limit.Cmp(maxLimit) > 0 || b.Meter == MeterMoney && b.Limit.Cmp(Count(uint64(MaxNano))) > 0:
		return bad("limit of %s: %s is more than can be counted", b.Meter, b.Limit)
	case len(b.At) == 0 || len(b.At) > maxThresholds:
		return bad("%d thresholds: give 1 to %d, as 80%% warn and 100%% stop", len(b.At), maxThresholds)
	}
	for i, t := range b.At {
		switch {
		case t.Percent < 1 || t.Percent > maxPercent:
			return bad("threshold %d%%: use 1 to %d", t.Percent, maxPercent)
		case t.Action != ActionWarn && t.Action != ActionPause && t.Action != ActionStop:
			return bad("threshold %d%%: action %.40q: use %s, %s or %s", t.Percent, string(t.Action), ActionWarn, ActionPause, ActionStop)
		case slices.Contains(b.At[:i], t):
			return bad("threshold %d%% %s is there twice: leave one out", t.Percent, t.Action)
		}
	}
	return nil
}

// at returns from which spending on a threshold is reached, rounded up.
func (b Budget) at(t Threshold) Quantity {
	w, left := wide{b.Limit.lo, b.Limit.hi}.mul(uint64(max(t.Percent, 0))).div(100)
	q := w.quantity()
	if left {
		q, _ = q.plus(Count(1))
	}
	return q
}

// reached lists the thresholds that spending has reached, the lowest first.
func (b Budget) reached(spent Quantity) []Threshold {
	var out []Threshold
	for _, t := range b.At {
		if spent.Cmp(b.at(t)) >= 0 {
			out = append(out, t)
		}
	}
	slices.SortStableFunc(out, func(x, y Threshold) int {
		if x.Percent != y.Percent {
			return x.Percent - y.Percent
		}
		return strength[x.Action] - strength[y.Action]
	})
	return out
}

// Mark is what a budget has done, kept beside it. The zero Mark is that of a
// new budget.
type Mark struct {
	Period Period      `json:"period,omitempty"`
	Start  time.Time   `json:"start,omitzero"` // of the period Fired is of
	Fired  []Threshold `json:"fired,omitempty"`
	Paused bool        `json:"paused,omitempty"` // and has not been resumed since
}

// maxStepBack is how far a clock may step back without giving a period anew.
const maxStepBack = 24 * time.Hour

// Span returns the period to look at: the one of now, or that of the mark,
// where the clock was stepped back across its beginning by up to a day.
// Spending is to be added up from its start on; the daemon writes charges with
// a time that is not before the mark's start.
func (b Budget) Span(m Mark, now time.Time) Span {
	if m.Period == b.Period && m.Start.After(now) && m.Start.Sub(now) <= maxStepBack {
		return b.Period.Span(m.Start)
	}
	return b.Period.Span(now)
}

// Decision is what to do about a budget.
type Decision struct {
	Mark  Mark        // to be kept
	Fired []Threshold // crossed now, the lowest first: an event each
	Do    Action      // none, resume, pause or stop
}

// Decide looks at what was spent in the period that Span returns. Each
// threshold fires once in a period, and again only when it was no longer
// reached in between: after a higher limit or a credit. What the budget has
// paused it resumes in a new period, with a higher limit or another threshold;
// what it has stopped stays so. Resume only what no other budget pauses.
//
// Act first and keep the mark afterwards, together with the events: acts are
// repeatable, and after a crash in between they are repeated, not lost. A
// sandbox that came while others were paused is caught by Holds.
func (b Budget) Decide(m Mark, now time.Time, spent Quantity) Decision {
	start := b.Span(m, now).Start
	fired := m.Fired
	if m.Period != b.Period || !m.Start.Equal(start) {
		fired = nil
	}
	reached := b.reached(spent)
	d := Decision{Mark: Mark{Period: b.Period, Start: start, Fired: reached, Paused: m.Paused}}
	acts := false
	for _, t := range reached {
		if !slices.Contains(fired, t) {
			d.Fired = append(d.Fired, t)
			acts = acts || t.Action != ActionWarn
		}
	}
	switch holds := b.Holds(spent); {
	case acts:
		d.Do, d.Mark.Paused = holds, holds == ActionPause
	case m.Paused && holds == ActionNone:
		d.Do, d.Mark.Paused = ActionResume, false
	}
	return d
}

// Holds returns what must be so of everything in the scope as long as this is
// spent: none, pause or stop.
func (b Budget) Holds(spent Quantity) Action {
	most := ActionNone
	for _, t := range b.reached(spent) {
		if t.Action != ActionWarn {
			most = Strongest(most, t.Action)
		}
	}
	return most
}

// Strongest returns the strongest action that the budget leads to: none where
// it only warns.
func (b Budget) Strongest() Action {
	most := ActionNone
	for _, t := range b.At {
		if t.Action != ActionWarn {
			most = Strongest(most, t.Action)
		}
	}
	return most
}

// Allow returns nil as long as something in the scope may be created, started
// or resumed. Else class ErrExhausted, code budget_exhausted.
func (b Budget) Allow(m Mark, now time.Time, spent Quantity) error {
	if b.Holds(spent) == ActionNone {
		return nil
	}
	next := "raise the budget"
	if end := b.Span(m, now).End; !end.IsZero() {
		next += ", or wait until " + end.Format(time.RFC3339)
	}
	return sandbox.Errorf(sandbox.ErrExhausted, "budget_exhausted", "%s %.70q has spent %s of %s %s (%s): %s",
		b.Scope, b.ID, b.Meter.Format(spent), b.Meter.FormatLimit(b.Limit), b.Meter, b.Period, next)
}
