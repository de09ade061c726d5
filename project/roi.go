package project

import (
	"math"
	"math/bits"

	"github.com/sandboxd/sandboxd/cost"
)

// The ROI of what cost nothing: without bound where there is a profit or a
// loss. Others are held between them.
const (
	MaxROI = math.MaxInt64
	MinROI = math.MinInt64
)

// ROI returns profit by cost in basis points (10,000 are 100 %), rounded down.
// Without a cost it is MaxROI, MinROI or 0 by the sign of the profit. A cost
// below zero, of credits, counts as none.
func ROI(m Money) int64 {
	profit, err := m.Revenue.Sub(m.Cost)
	if err != nil { // beyond the bounds of money, and so of what is told
		if m.Revenue > m.Cost {
			profit = cost.MaxNano
		} else {
			profit = cost.MinNano
		}
	}
	if m.Cost <= 0 {
		switch {
		case profit > 0:
			return MaxROI
		case profit < 0:
			return MinROI
		}
		return 0
	}
	abs := uint64(profit)
	if profit < 0 {
		abs = -abs
	}
	hi, lo := bits.Mul64(abs, 10_000)
	if hi >= uint64(m.Cost) {
		return bounded(profit < 0)
	}
	q, rest := bits.Div64(hi, lo, uint64(m.Cost))
	if profit < 0 && rest != 0 {
		q++
	}
	if q > math.MaxInt64 {
		return bounded(profit < 0)
	}
	if profit < 0 {
		return -int64(q)
	}
	return int64(q)
}

func bounded(negative bool) int64 {
	if negative {
		return MinROI
	}
	return MaxROI
}
