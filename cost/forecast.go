package cost

import (
	"math/big"
	"time"
)

// Sample is what was spent at a moment.
type Sample struct {
	At    time.Time
	Spent Quantity
}

// Forecast returns how long after the last sample the limit is reached, if
// spending goes on as from the first sample to the last. Not ok: it is not
// growing, the period ends before, or nobody can tell yet. Samples stand in the
// order they were taken; what lies before spending fell (a new period, a
// credit) or the clock stepped back is left out.
func (b Budget) Forecast(samples []Sample) (exhausted time.Duration, ok bool) {
	if len(samples) == 0 {
		return 0, false
	}
	last := samples[len(samples)-1]
	if last.Spent.Cmp(b.Limit) >= 0 {
		return 0, true
	}
	first := last
	for i := len(samples) - 2; i >= 0; i-- {
		if s := samples[i]; s.Spent.Cmp(first.Spent) > 0 || s.At.After(first.At) {
			break
		}
		first = samples[i]
	}
	exhausted, ok = timeFor(b.Limit.Less(last.Spent), last.Spent.Less(first.Spent), last.At.Sub(first.At))
	if end := b.Period.Span(last.At).End; ok && !end.IsZero() && exhausted >= end.Sub(last.At) {
		return 0, false
	}
	return exhausted, ok
}

// How a budget is looked at.
const (
	// lookSlack is how far behind the earliest moment a threshold can be reached
	// a look is planned. It bounds the looks per second, and leaves the other
	// half of a second for looking and acting.
	lookSlack = 500 * time.Millisecond
	// MaxLook is the longest wait between two looks.
	MaxLook = time.Minute
)

// NextLook returns how long to wait until the budget is looked at again, if
// most is what can be spent in a second at most ([Book.Most] of the limits of
// all that runs). Then a threshold is overrun by at most a second of usage,
// provided that looking and acting take less than half a second. Ask again when
// most rises: a sandbox starts, a limit goes up. Entries from outside come at
// once, not by the second: decide when one is taken in.
func (b Budget) NextLook(m Mark, now time.Time, spent, most Quantity) time.Duration {
	wait := MaxLook
	for _, t := range b.At {
		at := b.at(t)
		if at.Cmp(spent) <= 0 {
			continue
		}
		if d, ok := timeFor(at.Less(spent), most, time.Second); ok && d < MaxLook-lookSlack {
			wait = min(wait, d+lookSlack)
		}
	}
	if end := b.Span(m, now).End; end.After(now) { // what was paused goes on then
		wait = min(wait, max(end.Sub(now), time.Millisecond))
	}
	return wait
}

// timeFor returns how long q lasts if per is spent in each while, rounded
// down. Not ok: for ever, or longer than a Duration.
func timeFor(q, per Quantity, while time.Duration) (time.Duration, bool) {
	if per.IsZero() || while <= 0 {
		return 0, false
	}
	n := new(big.Int).Mul(q.big(), big.NewInt(int64(while)))
	if n.Quo(n, per.big()); !n.IsInt64() {
		return 0, false
	}
	return time.Duration(n.Int64()), true
}
