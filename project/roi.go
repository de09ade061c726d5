package project

import (
	"math"

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
	profit := m.Revenue.Sub(m.Cost)
	if n := cost.ROI(profit, m.Cost); n != nil {
		return *n
	}
	switch {
	case profit.Sign() > 0:
		return MaxROI
	case profit.Sign() < 0:
		return MinROI
	}
	return 0
}
