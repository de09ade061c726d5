package cost

import (
	"math/big"
	"math/bits"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Sum is a sum of amounts in billionths of the currency's unit, in 128 bits
// with a sign. A ledger has fewer than 2^63 rows of 64 bits each, so its sums
// fit. Where rated quantities go further, a Sum stays at its bound and never
// wraps: what is beyond every budget stays beyond it. Two are equal when == says
// so. As text and JSON it is written as a [Nano].
type Sum struct {
	hi int64
	lo uint64
}

// The bounds of a Sum.
var (
	MaxSum = Sum{1<<63 - 1, 1<<64 - 1}
	MinSum = Sum{-1 << 63, 0}
)

// SumOf returns an amount as a sum.
func SumOf(n Nano) Sum { return Sum{int64(n) >> 63, uint64(n)} }

// SplitSum returns hi × 2^32 + lo, as a database adds up the halves of 64-bit
// numbers: sum(n >> 32) and sum(n & 0xffffffff) overflow at no number of rows
// that a disk has room for.
func SplitSum(hi, lo int64) Sum {
	return Sum{hi >> 32, uint64(hi) << 32}.Add(SumOf(Nano(lo)))
}

// ParseSum reads what ParseNano reads, of any size that a Sum has.
func ParseSum(s string) (Sum, error) {
	digits, negative := cutMinus(s)
	q, ok := parseDecimal(digits)
	t := Sum{int64(q.hi), q.lo} // the magnitude 2^127 is MinSum already
	if !ok || t.hi < 0 && (!negative || t != MinSum) {
		return Sum{}, sandbox.Errorf(sandbox.ErrInvalid, "invalid_amount", "sum %.50q: write a decimal number as 12.5 or -3, with up to nine digits behind the point", s)
	}
	if negative && t != MinSum {
		t = t.Neg()
	}
	return t, nil
}

// Add returns t + o, held at the bounds.
func (t Sum) Add(o Sum) Sum {
	lo, carry := bits.Add64(t.lo, o.lo, 0)
	hi, _ := bits.Add64(uint64(t.hi), uint64(o.hi), carry)
	sum := Sum{int64(hi), lo}
	if t.hi < 0 == (o.hi < 0) && t.hi < 0 != (sum.hi < 0) {
		if t.hi < 0 {
			return MinSum
		}
		return MaxSum
	}
	return sum
}

// Neg returns -t, held at the bounds.
func (t Sum) Neg() Sum {
	if t == MinSum {
		return MaxSum
	}
	lo, borrow := bits.Sub64(0, t.lo, 0)
	hi, _ := bits.Sub64(0, uint64(t.hi), borrow)
	return Sum{int64(hi), lo}
}

// Sub returns t - o, held at the bounds.
func (t Sum) Sub(o Sum) Sum {
	if o == MinSum { // has no negative
		return t.Add(MaxSum).Add(Sum{lo: 1})
	}
	return t.Add(o.Neg())
}

// Cmp returns -1, 0 or 1 where t is less than, equal to or more than o.
func (t Sum) Cmp(o Sum) int {
	switch {
	case t == o:
		return 0
	case t.hi < o.hi || t.hi == o.hi && t.lo < o.lo:
		return -1
	}
	return 1
}

// Sign returns -1, 0 or 1.
func (t Sum) Sign() int { return t.Cmp(Sum{}) }

// Nano returns t as an amount, and whether it fits into one; else the bound
// that is nearest.
func (t Sum) Nano() (n Nano, fits bool) {
	switch {
	case t.Cmp(SumOf(MaxNano)) > 0:
		return MaxNano, false
	case t.Cmp(SumOf(MinNano)) < 0:
		return MinNano, false
	}
	return Nano(t.lo), true
}

// Spent returns what of a sum counts as spent: a credit is nothing.
func (t Sum) Spent() Quantity {
	if t.hi < 0 {
		return Quantity{}
	}
	return Quantity{uint64(t.hi), t.lo}
}

// String returns the shortest decimal number that ParseSum reads as t.
func (t Sum) String() string {
	if t.hi < 0 {
		lo, borrow := bits.Sub64(0, t.lo, 0)
		hi, _ := bits.Sub64(0, uint64(t.hi), borrow)
		return "-" + formatDecimal(Quantity{hi, lo}) // right for MinSum too
	}
	return formatDecimal(Quantity{uint64(t.hi), t.lo})
}

// MarshalText writes t as String does.
func (t Sum) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// UnmarshalText reads what ParseSum reads.
func (t *Sum) UnmarshalText(b []byte) error {
	v, err := ParseSum(string(b))
	if err == nil {
		*t = v
	}
	return err
}

// Ratio returns t by o times scale, rounded down, and whether it fits. o must
// not be 0.
func (t Sum) Ratio(o Sum, scale int64) (n int64, ok bool) {
	q := new(big.Int).Mul(t.big(), big.NewInt(scale))
	by := o.big()
	if by.Sign() < 0 { // big.Int divides Euclidean: down, for a divisor above 0
		q.Neg(q)
		by.Neg(by)
	}
	q.Div(q, by)
	return q.Int64(), q.IsInt64()
}

func (t Sum) big() *big.Int {
	b := new(big.Int).Lsh(big.NewInt(t.hi), 64)
	return b.Add(b, new(big.Int).SetUint64(t.lo))
}
