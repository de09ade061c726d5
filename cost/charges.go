package cost

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// UsageOf returns what the ledger counted in base units; what is nothing is
// left out. Input and output of files has no price.
func UsageOf(m sandbox.Meters) Usage {
	const kibSecond = 1024 * secondMS // in byte-milliseconds
	u := Usage{}
	for _, c := range []struct {
		meter Meter
		n     int64
		unit  uint64
	}{
		{MeterCPU, m.CPU, 1000},
		{MeterMemory, m.Memory, kibSecond},
		{MeterStorage, m.Storage, kibSecond},
		{MeterNetOut, m.NetTx, 1},
		{MeterNetIn, m.NetRx, 1},
		{MeterStarts, m.Starts, 1},
		{MeterRunning, m.Running, 1},
		{MeterPaused, m.Paused, 1},
		{MeterStopped, m.Stopped, 1},
	} {
		if c.n > 0 {
			u[c.meter] = Product(uint64(c.n), c.unit)
		}
	}
	return u
}

// Since returns how much more u is than before, which is part of it.
func (u Usage) Since(before Usage) Usage {
	out := Usage{}
	for m, q := range u {
		if more := q.Less(before[m]); !more.IsZero() {
			out[m] = more
		}
	}
	return out
}

// Plus returns the sums of two. Class ErrTooLarge.
func (u Usage) Plus(o Usage) (Usage, error) {
	out := maps.Clone(u)
	if out == nil {
		out = Usage{}
	}
	for m, q := range o {
		sum, err := out[m].Add(q)
		if err != nil {
			return nil, err
		}
		out[m] = sum
	}
	return out, nil
}

// Stretch is a piece of time with one book in force, or none. What is used in
// it is charged as the difference of two totals that both count from Base on,
// when the book came in force; a zero Base is the beginning.
type Stretch struct {
	Book           *Book // nil: counted, and free
	Base, From, To time.Time
}

// Stretches cuts [from, to) where books come in force.
func (s Shelf) Stretches(from, to time.Time) []Stretch {
	var out []Stretch
	for from.Before(to) {
		end := to
		for _, b := range s.books {
			if b.From.After(from) && b.From.Before(end) {
				end = b.From
			}
		}
		piece := Stretch{From: from, To: end}
		if b, ok := s.At(from); ok {
			piece.Book, piece.Base = b, b.From
		}
		out = append(out, piece)
		from = end
	}
	return out
}

// Rerated is [from, to) as if one book had been in force from the beginning.
func Rerated(b *Book, from, to time.Time) []Stretch {
	return []Stretch{{Book: b, From: from, To: to}}
}

// Instants lists the times at which totals must be known to charge pieces, the
// earliest first. At the zero time nothing was used.
func Instants(pieces []Stretch) []time.Time {
	var all []time.Time
	for _, p := range pieces {
		for _, t := range []time.Time{p.Base, p.From, p.To} {
			if !t.IsZero() {
				all = append(all, t)
			}
		}
	}
	slices.SortFunc(all, time.Time.Compare)
	return slices.CompactFunc(all, time.Time.Equal)
}

// ChargePieces charges what one sandbox used in pieces of time. at tells its
// totals at each of their Instants. Spans that meet add up to the charges of
// both together, to the nano. Class ErrTooLarge.
func ChargePieces(pieces []Stretch, at func(time.Time) Usage) ([]Charge, error) {
	known := func(t time.Time) Usage {
		if t.IsZero() {
			return nil
		}
		return at(t)
	}
	var all []Charge
	for _, p := range pieces {
		base, begin, end := known(p.Base), known(p.From), known(p.To)
		for _, m := range slices.Sorted(maps.Keys(end)) {
			used := end[m].Less(begin[m])
			if used.IsZero() {
				continue
			}
			c := Charge{Book: NoBook, Meter: m, Quantity: used}
			if p.Book != nil {
				var err error
				c.Book = p.Book.Version
				if c.Amount, err = p.Book.Charge(m, begin[m].Less(base[m]), end[m].Less(base[m])); err != nil {
					return nil, err
				}
			}
			all = append(all, c)
		}
	}
	return all, nil
}

// Charge is what a piece of one meter costs.
type Charge struct {
	Book     string   `json:"book"` // version, or NoBook
	Meter    Meter    `json:"meter"`
	Quantity Quantity `json:"quantity"`
	Amount   Sum      `json:"amount"` // nothing, where the book has no price for it
}

// Bill adds charges up by book and meter. The zero Bill is empty.
type Bill struct {
	lines map[billKey]Charge
	total Sum
}

type billKey struct {
	book  string
	meter Meter
}

// Add takes charges in. Class ErrTooLarge; then some may be in and some not.
func (b *Bill) Add(charges ...Charge) error {
	if b.lines == nil {
		b.lines = map[billKey]Charge{}
	}
	for _, c := range charges {
		k := billKey{c.Book, c.Meter}
		sum := b.lines[k]
		q, err := sum.Quantity.Add(c.Quantity)
		if err != nil {
			return err
		}
		b.total = b.total.Add(c.Amount)
		b.lines[k] = Charge{c.Book, c.Meter, q, sum.Amount.Add(c.Amount)}
	}
	return nil
}

// Total returns the sum.
func (b *Bill) Total() Sum { return b.total }

// Charges lists the sums by book and meter.
func (b *Bill) Charges() []Charge {
	return slices.SortedFunc(maps.Values(b.lines), func(x, y Charge) int {
		return cmp.Or(cmp.Compare(x.Book, y.Book), cmp.Compare(x.Meter, y.Meter))
	})
}
