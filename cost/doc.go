// Package cost turns what was used into money, and money into decisions: price
// books, the charges they give, outside costs and revenue, budgets and
// forecasts. It only computes. The daemon brings counters, books and the time,
// keeps what comes out in its ledger, and carries decisions out.
//
// It reads no clock, file or row, pauses nothing, converts no currencies and
// knows no taxes.
//
// # No floating point
//
// An amount is a [Nano], billionths of the currency's unit in 64 bits. What
// was used is a [Quantity], whole base units (nanoseconds of cpu, bytes times
// milliseconds, bytes, starts, milliseconds) in 128 bits: 512 MiB held for a
// year are 2^64 byte-milliseconds already, and coarser units would have to be
// rounded at each reading. A test refuses every float in this package. What
// does not fit is an error, never a wrap: an amount beyond 9,223,372,036 units
// of the currency, a quantity of 2^128 base units (4 TiB for 100 years of
// memory are 2^84).
//
// # Rounding
//
// A charge is a difference of two totals, each rounded down to a nano:
//
//	rate(q)          = floor(q × price / (unit × per))
//	charge(from, to) = rate(to) - rate(from)
//
// So however a life is cut into pieces, the charges of the pieces add up to
// the charge of the whole, to the nano; a reading that comes twice, or late,
// adds nothing. A change of book begins a new base, and each stretch between
// two changes is the whole of its own book ([Shelf.Stretches], [ChargePieces]).
//
// # Budgets
//
//	spent ─ Decide ─► thresholds crossed: one event each, once a period
//	               ─► pause, stop, or resume what this budget paused
//	      ─ Holds ──► what must be so as long as it is spent: for creates, starts
//	      ─ NextLook ► when to look again, so that a threshold is overrun by at
//	                   most a second of usage
//	      ─ Forecast ► how long the rest lasts at this rate
//
// [Budget.Decide] is pure: what it has done before stands in a [Mark], which
// the daemon keeps, so that a restart repeats nothing that was kept.
package cost
