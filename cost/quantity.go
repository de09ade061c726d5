package cost

import (
	"math/big"
	"math/bits"
	"strconv"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Quantity is how much of something was used: a whole number of base units in
// 128 bits, never negative. Two are equal when == says so. As text and JSON it
// is the decimal number, in JSON as a string.
type Quantity struct{ hi, lo uint64 }

// MaxQuantity is the largest Quantity, 2^128-1.
var MaxQuantity = Quantity{1<<64 - 1, 1<<64 - 1}

// maxDigits is how many digits MaxQuantity has.
const maxDigits = 39

// Count returns n base units.
func Count(n uint64) Quantity { return Quantity{lo: n} }

// Product returns a × b base units, as of bytes and milliseconds.
func Product(a, b uint64) Quantity {
	hi, lo := bits.Mul64(a, b)
	return Quantity{hi, lo}
}

// ParseQuantity reads a decimal number of base units, of any size. Class
// ErrInvalid, code invalid_quantity; the error names the narrower bounds of an
// entry, which quantities that are sent are of.
func ParseQuantity(s string) (Quantity, error) {
	q, ok := parseDigits(s)
	if !ok || s == "" || len(s) > 1 && s[0] == '0' {
		return Quantity{}, badQuantity("quantity", s)
	}
	return q, nil
}

// ParseEntryQuantity reads the quantity of an entry; the error calls it field.
func ParseEntryQuantity(field, s string) (Quantity, error) {
	q, err := ParseQuantity(s)
	if err != nil || q.IsZero() || q.Cmp(Count(MaxEntryQuantity)) > 0 {
		return Quantity{}, badQuantity(field, s)
	}
	return q, nil
}

func badQuantity(field, s string) error {
	return outOfRange("invalid_quantity", field, s, "a whole number", "1", Count(MaxEntryQuantity).String(), "1200")
}

// parseDigits reads digits alone.
func parseDigits(s string) (q Quantity, ok bool) {
	for i := range len(s) {
		w := wide{q.lo, q.hi}.mul(10)
		if s[i] < '0' || s[i] > '9' || w[2] != 0 {
			return Quantity{}, false
		}
		if q, ok = w.quantity().plus(Count(uint64(s[i] - '0'))); !ok {
			return Quantity{}, false
		}
	}
	return q, true
}

// String returns the decimal number.
func (q Quantity) String() string {
	if q.hi == 0 {
		return strconv.FormatUint(q.lo, 10)
	}
	return q.big().String()
}

// MarshalText writes q as String does.
func (q Quantity) MarshalText() ([]byte, error) { return []byte(q.String()), nil }

// UnmarshalText reads what ParseQuantity reads.
func (q *Quantity) UnmarshalText(b []byte) error {
	v, err := ParseQuantity(string(b))
	if err == nil {
		*q = v
	}
	return err
}

// Uint64 returns q, and whether it fits.
func (q Quantity) Uint64() (n uint64, ok bool) { return q.lo, q.hi == 0 }

// IsZero reports whether q is nothing.
func (q Quantity) IsZero() bool { return q == Quantity{} }

// Cmp returns -1, 0 or 1 where q is less than, equal to or more than r.
func (q Quantity) Cmp(r Quantity) int {
	switch {
	case q == r:
		return 0
	case q.hi < r.hi || q.hi == r.hi && q.lo < r.lo:
		return -1
	}
	return 1
}

// Add returns q + r. Class ErrTooLarge from 2^128 on.
func (q Quantity) Add(r Quantity) (Quantity, error) {
	sum, ok := q.plus(r)
	if !ok {
		return Quantity{}, sandbox.Errorf(sandbox.ErrTooLarge, "quantity_too_large", "the sum of the quantities %s and %s does not fit into 128 bits: check the counters", q, r)
	}
	return sum, nil
}

// Less returns q - r, or nothing where r is more.
func (q Quantity) Less(r Quantity) Quantity {
	if q.Cmp(r) <= 0 {
		return Quantity{}
	}
	lo, borrow := bits.Sub64(q.lo, r.lo, 0)
	hi, _ := bits.Sub64(q.hi, r.hi, borrow)
	return Quantity{hi, lo}
}

func (q Quantity) plus(r Quantity) (Quantity, bool) {
	lo, carry := bits.Add64(q.lo, r.lo, 0)
	hi, carry := bits.Add64(q.hi, r.hi, carry)
	return Quantity{hi, lo}, carry == 0
}

func (q Quantity) big() *big.Int {
	b := new(big.Int).SetUint64(q.hi)
	return b.Or(b.Lsh(b, 64), new(big.Int).SetUint64(q.lo))
}

// wide is what a Quantity becomes by multiplying: 192 bits, the lowest first.
type wide [3]uint64

// mul multiplies a w below 2^128.
func (w wide) mul(by uint64) wide {
	h0, l0 := bits.Mul64(w[0], by)
	h1, l1 := bits.Mul64(w[1], by)
	mid, carry := bits.Add64(h0, l1, 0)
	return wide{l0, mid, h1 + carry}
}

// div divides, rounding down, and tells whether something was left.
func (w wide) div(by uint64) (out wide, left bool) {
	var rem uint64
	for i := len(w) - 1; i >= 0; i-- {
		out[i], rem = bits.Div64(rem, w[i], by)
	}
	return out, rem != 0
}

// quantity returns a w below 2^128.
func (w wide) quantity() Quantity { return Quantity{w[1], w[0]} }
