package cost

import (
	"maps"
	"slices"
)

// Rate returns what a quantity of a meter costs, counted from nothing, rounded
// down to a nano; a meter without a price costs nothing. It is exact for every
// quantity; class ErrTooLarge where the amount is beyond MaxNano.
func (b *Book) Rate(m Meter, q Quantity) (Nano, error) {
	n, _, err := b.rate(m, q)
	return n, err
}

// rate also tells whether something was rounded off.
func (b *Book) rate(m Meter, q Quantity) (n Nano, left bool, err error) {
	p, ok := b.Prices[m]
	if !ok {
		return 0, false, nil
	}
	w := wide{q.lo, q.hi}.mul(uint64(max(p.Price, 0)))
	// Rounding down twice is rounding down once by the product.
	w, left1 := w.div(p.base())
	w, left2 := w.div(p.per())
	if w[2] != 0 || w[1] != 0 || w[0] > uint64(MaxNano) {
		return 0, false, tooLarge("price book %s: the charge for %s of %s", b.Version, m.Format(q), m)
	}
	return Nano(w[0]), left1 || left2, nil
}

// Charge returns what a piece of a counter costs: rate(to) - rate(from), and
// nothing where to is not beyond from. The pieces of an interval add up to the
// whole of it exactly. Class ErrTooLarge as Rate.
func (b *Book) Charge(m Meter, from, to Quantity) (Nano, error) {
	if to.Cmp(from) <= 0 {
		return 0, nil
	}
	end, err := b.Rate(m, to)
	if err != nil {
		return 0, err
	}
	begin, err := b.Rate(m, from)
	if err != nil {
		return 0, err
	}
	return end - begin, nil // both are from 0 on, and end is not less
}

// Most returns what the given usage costs at most, each meter rounded up: for
// a bound of money per second from bounds of usage per second. Class
// ErrTooLarge as Rate.
func (b *Book) Most(u Usage) (Nano, error) {
	var sum Nano
	for _, m := range slices.Sorted(maps.Keys(u)) {
		n, left, err := b.rate(m, u[m])
		if err != nil {
			return 0, err
		}
		if left {
			if n, err = n.Add(1); err != nil {
				return 0, err
			}
		}
		if sum, err = sum.Add(n); err != nil {
			return 0, err
		}
	}
	return sum, nil
}
