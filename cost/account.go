package cost

import (
	"maps"
	"slices"
	"time"
)

// Counter makes one total of a kernel counter that begins anew with each start
// or boot: by generation, the highest value seen. Readings may come twice, late
// and in any order. The zero Counter is ready for use.
type Counter map[string]Quantity

// Observe takes in a reading and returns the counter with it.
func (c Counter) Observe(generation string, value Quantity) Counter {
	if c == nil {
		c = Counter{}
	}
	if value.Cmp(c[generation]) > 0 {
		c[generation] = value
	}
	return c
}

// Total returns the sum over all generations. Class ErrTooLarge.
func (c Counter) Total() (Quantity, error) {
	var sum Quantity
	for _, q := range c {
		var err error
		if sum, err = sum.Add(q); err != nil {
			return Quantity{}, err
		}
	}
	return sum, nil
}

// Gauge makes a total of a level, as of memory: bytes × milliseconds. Between
// two readings the level is the earlier one, so that nobody pays before. The
// zero Gauge begins with its first reading.
type Gauge struct {
	AtMS  int64    `json:"at_ms"` // of the last reading
	Bytes uint64   `json:"bytes"` // then
	Total Quantity `json:"total"`
}

// Read takes in a level. The time is milliseconds above 0 of a clock that does
// not step, as CLOCK_BOOTTIME; a reading from before the last one is ignored.
// After a reboot, begin with Restart. Class ErrTooLarge.
func (g Gauge) Read(atMS int64, bytes uint64) (Gauge, error) {
	if g.AtMS != 0 {
		if atMS < g.AtMS {
			return g, nil
		}
		total, err := g.Total.Add(ByteTime(g.Bytes, g.AtMS, atMS))
		if err != nil {
			return g, err
		}
		g.Total = total
	}
	g.AtMS, g.Bytes = atMS, bytes
	return g, nil
}

// Restart keeps the total and forgets clock and level.
func (g Gauge) Restart() Gauge { return Gauge{Total: g.Total} }

// Line is how far one meter of an account is charged.
type Line struct {
	Base Quantity `json:"base"` // the total when its book came in force
	Seen Quantity `json:"seen"` // the total up to which it is charged
}

// Account is how far the usage of one sandbox is charged, and with which book.
// It belongs into the same transaction as the charges, so that a crash neither
// loses one nor makes it twice.
type Account struct {
	Book  string         `json:"book"` // version, or NoBook; empty in a new one
	Lines map[Meter]Line `json:"lines"`
}

// Charge is what a piece of one meter costs.
type Charge struct {
	Book     string   `json:"book"` // version, or NoBook
	Meter    Meter    `json:"meter"`
	Quantity Quantity `json:"quantity"`
	Amount   Nano     `json:"amount"` // nothing, where the book has no price for it
}

// Advance charges what u has more than the account has seen, and returns the
// account as it is then; a itself does not change. Totals that are not beyond
// what was seen charge nothing, so that a replay is harmless.
//
// The piece is charged with the book that was in force at the reading before,
// or, where that one is no longer on the shelf or there was none before, with
// the one in force now. After that the book in force now begins with a base of
// its own: a price holds from the first reading after its time, so read at
// that time. Class ErrTooLarge; then nothing has changed.
func (a Account) Advance(s Shelf, now time.Time, u Usage) (Account, []Charge, error) {
	current, _ := s.At(now)
	with, onShelf := s.Book(a.Book)
	next := Account{Book: a.Book, Lines: maps.Clone(a.Lines)}
	if next.Lines == nil {
		next.Lines = map[Meter]Line{}
	}
	if !onShelf && a.Book != NoBook {
		with = current
		next.begin(current)
	}
	var charges []Charge
	for _, m := range slices.Sorted(maps.Keys(u)) {
		l := next.Lines[m]
		if u[m].Cmp(l.Seen) <= 0 {
			continue
		}
		c := Charge{Book: NoBook, Meter: m, Quantity: u[m].Less(l.Seen)}
		if with != nil {
			var err error
			if c.Amount, err = with.Charge(m, l.Seen.Less(l.Base), u[m].Less(l.Base)); err != nil {
				return a, nil, err
			}
			c.Book = with.Version
		}
		l.Seen = u[m]
		next.Lines[m] = l
		charges = append(charges, c)
	}
	if current != with {
		next.begin(current)
	}
	return next, charges, nil
}

// begin starts charging with a book, or with none.
func (a *Account) begin(b *Book) {
	a.Book = NoBook
	if b != nil {
		a.Book = b.Version
	}
	for m, l := range a.Lines {
		a.Lines[m] = Line{Base: l.Seen, Seen: l.Seen}
	}
}
