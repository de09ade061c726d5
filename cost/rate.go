package cost

import (
	"maps"
	"slices"
)

// Rate returns what a quantity of a meter costs, counted from nothing, rounded
// down to a nano; a meter without a price costs nothing. It is exact for every
// quantity; class ErrTooLarge where the amount is beyond
// MaxSum.
func (b *Book) Rate(m Meter, q Quantity) (Sum, error) {
	n, _, err := b.rate(m, q)
	return n, err
}

// rate also tells whether something was rounded off.
func (b *Book) rate(m Meter, q Quantity) (n Sum, left bool, err error) {
	p, ok := b.Prices[m]
	if !ok {
		return Sum{}, false, nil
	}
	w := wide{q.lo, q.hi}.mul(uint64(max(p.Price, 0)))
	// Rounding down twice is rounding down once by the product.
	w, left1 := w.div(p.base())
	w, left2 := w.div(p.per())
	if w[2] != 0 || w[1] > 1<<63-1 {
		return Sum{}, false, tooLarge("price book %s: the charge for %s of %s", b.Version, m.Format(q), m)
	}
	return Sum{int64(w[1]), w[0]}, left1 || left2, nil
}

// Charge returns what a piece of a counter costs: rate(to) - rate(from), and
// nothing where to is not beyond from. The pieces of an interval add up to the
// whole of it exactly. Class ErrTooLarge as Rate.
func (b *Book) Charge(m Meter, from, to Quantity) (Sum, error) {
	if to.Cmp(from) <= 0 {
		return Sum{}, nil
	}
	end, err := b.Rate(m, to)
	if err != nil {
		return Sum{}, err
	}
	begin, err := b.Rate(m, from)
	if err != nil {
		return Sum{}, err
	}
	return end.Sub(begin), nil // both are from 0 on, and end is not less
}

// Most returns what the given usage costs at most, each meter rounded up: for
// a bound of money per second from bounds of usage per second. Class
// ErrTooLarge as Rate.
func (b *Book) Most(u Usage) (Sum, error) {
	var sum Sum
	for _, m := range slices.Sorted(maps.Keys(u)) {
		n, left, err := b.rate(m, u[m])
		if err != nil {
			return Sum{}, err
		}
		if left {
			n = n.Add(Sum{lo: 1})
		}
		sum = sum.Add(n)
	}
	return sum, nil
}
