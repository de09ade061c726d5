package cost

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Meter names something that is counted. Besides those below there are custom
// ones, as "tokens", which count whole things.
type Meter string

// The meters that are counted here, with their base units.
const (
	MeterCPU     Meter = "cpu"          // nanoseconds of one processor
	MeterMemory  Meter = "memory"       // bytes held × milliseconds
	MeterStorage Meter = "storage"      // bytes of files kept × milliseconds
	MeterNetOut  Meter = "net_out"      // bytes out of the sandbox
	MeterNetIn   Meter = "net_in"       // bytes into it
	MeterStarts  Meter = "starts"       // times it began to run
	MeterRunning Meter = "wall_running" // milliseconds
	MeterPaused  Meter = "wall_paused"  // milliseconds
	MeterStopped Meter = "wall_stopped" // milliseconds
)

// The meters that only budgets have.
const (
	MeterMoney Meter = "money" // billionths: charges and outside costs together
	MeterNet   Meter = "net"   // net_out and net_in
	MeterWall  Meter = "wall"  // wall_running and wall_paused
)

// Usage is how much was used of each meter, as totals since some beginning.
type Usage map[Meter]Quantity

// dimension is what meters and units have in common.
type dimension int

const (
	counted  dimension = iota // things
	cpuTime                   // nanoseconds
	byteTime                  // byte-milliseconds
	bytesMoved
	wallTime // milliseconds
	started
	moneySpent
)

const (
	gib       = 1 << 30
	secondMS  = 1000
	hourMS    = 3600 * secondMS
	secondNS  = 1_000_000_000
	maxPer    = 1_000_000_000_000_000 // of a price
	maxMeter  = 63                    // characters
	maxMeters = 64                    // in a book
)

// builtin lists the meters with their dimensions.
var builtin = map[Meter]dimension{
	MeterCPU: cpuTime, MeterMemory: byteTime, MeterStorage: byteTime, MeterNetOut: bytesMoved, MeterNetIn: bytesMoved,
	MeterStarts: started, MeterRunning: wallTime, MeterPaused: wallTime, MeterStopped: wallTime,
	MeterMoney: moneySpent, MeterNet: bytesMoved, MeterWall: wallTime,
}

// unitSize is a unit's dimension and its size in base units.
type unitSize struct {
	of   dimension
	base uint64
}

// units are those of the meters above.
var units = map[string]unitSize{
	"cpu-second": {cpuTime, secondNS},
	"cpu-hour":   {cpuTime, 3600 * secondNS},
	"gib-second": {byteTime, gib * secondMS},
	"gib-hour":   {byteTime, gib * hourMS},
	"gib":        {bytesMoved, gib},
	"second":     {wallTime, secondMS},
	"hour":       {wallTime, hourMS},
	"start":      {started, 1},
}

// shown is the unit in which people are told of a dimension.
var shown = map[dimension]string{cpuTime: "cpu-second", byteTime: "gib-hour", bytesMoved: "gib", wallTime: "second", started: "start"}

// Custom reports whether m is none of the meters counted here.
func (m Meter) Custom() bool { _, ok := builtin[m]; return !ok }

// priced reports whether a book may have a price for m.
func (m Meter) priced() bool { return m != MeterMoney && m != MeterNet && m != MeterWall }

func (m Meter) dimension() dimension { return builtin[m] } // counted for custom ones

// Validate checks the form of a meter's name. Class ErrInvalid.
func (m Meter) Validate() error {
	form := len(m) <= maxMeter && m != "" && m[0] >= 'a' && m[0] <= 'z'
	for _, c := range []byte(m) {
		form = form && (c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == '-')
	}
	if !form {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_meter", "meter %.70q: use 1 to %d of a-z, 0-9, '.', '_' and '-', beginning with a letter", string(m), maxMeter)
	}
	return nil
}

// unitNames lists the units of a dimension.
func unitNames(d dimension) []string {
	var names []string
	for _, name := range slices.Sorted(maps.Keys(units)) {
		if units[name].of == d {
			names = append(names, name)
		}
	}
	return names
}

// Spent returns what a budget of meter m looks at: one of u, the sum that m
// stands for, or the money, of which a credit counts as nothing spent.
// Class ErrTooLarge where a sum does not fit.
func (m Meter) Spent(u Usage, money Sum) (Quantity, error) {
	switch m {
	case MeterMoney:
		return money.Spent(), nil
	case MeterNet:
		return u[MeterNetOut].Add(u[MeterNetIn])
	case MeterWall:
		return u[MeterRunning].Add(u[MeterPaused])
	}
	return u[m], nil
}

// ParseLimit reads a limit of m for people: a decimal number of money ("25",
// "0.5") or with a unit ("90 cpu-second", "1.5gib-hour", "20 gib"), a duration
// of cpu or wall time ("90m"), or a count. Time and starts are whole in the
// base unit; of bytes a part of one is dropped. Class ErrInvalid.
func (m Meter) ParseLimit(s string) (Quantity, error) {
	if err := m.Validate(); err != nil {
		return Quantity{}, err
	}
	d := m.dimension()
	var q Quantity
	kind, least, most, example := "a number with "+strings.Join(unitNames(d), " or "), "0.000000001", "18446744073.709551615", ""
	switch d {
	case moneySpent:
		n, _ := parseNano(s)
		q = Count(uint64(max(n, 0)))
		kind, most, example = "a decimal number with up to nine digits behind the point", MaxNano.String(), "25 or 0.5"
	case counted:
		q, _ = ParseQuantity(s)
		kind, least, most, example = "a whole number", "1", maxLimit.String(), "1000000"
	case started:
		q = parseWithUnit(d, s)
		kind, least, most, example = "a whole number", "1", maxLimit.String(), "7 or '7 start'"
	case cpuTime, wallTime:
		q = parseWithUnit(d, s)
		kind, example = "a duration of up to 2562047h, or "+kind, "90m or '2 "+unitNames(d)[0]+"'" // what a time.Duration holds
		if d == wallTime {
			kind, least = kind+", in whole milliseconds", "0.001"
		}
	default:
		q = parseWithUnit(d, s)
		example = "'2 " + unitNames(d)[0] + "'"
	}
	if q.IsZero() || q.Cmp(maxLimit) > 0 {
		return Quantity{}, outOfRange("invalid_limit", "limit of "+string(m), s, kind, least, most, example)
	}
	return q, nil
}

// parseWithUnit returns nothing where s cannot be read, or is of time or starts
// and finer than their base unit.
func parseWithUnit(d dimension, s string) Quantity {
	end := strings.LastIndexAny(s, "0123456789") + 1
	unit, ok := units[strings.TrimSpace(s[end:])]
	if n, isNumber := parseDecimal(s[:end]); ok && unit.of == d && isNumber && n.hi == 0 {
		w, left := wide{n.lo}.mul(unit.base).div(uint64(Unit))
		if left && d != byteTime && d != bytesMoved {
			return Quantity{}
		}
		return w.quantity()
	}
	if d == started {
		n, _ := ParseQuantity(s)
		return n
	}
	took, err := time.ParseDuration(s)
	if err != nil || took < 0 || d != cpuTime && d != wallTime || d == wallTime && took%time.Millisecond != 0 {
		return Quantity{}
	}
	if d == wallTime {
		return Count(uint64(took.Milliseconds()))
	}
	return Count(uint64(took))
}

// Format writes a quantity of m for people, rounded down to a billionth of its
// unit; ParseLimit reads it.
func (m Meter) Format(q Quantity) string {
	d := m.dimension()
	name, ok := shown[d]
	switch {
	case d == moneySpent:
		return formatDecimal(q)
	case !ok:
		return q.String()
	}
	w, _ := wide{q.lo, q.hi}.mul(uint64(Unit)).div(units[name].base)
	if w[1] != 0 || w[2] != 0 { // whole units are fine enough for so many
		whole, _ := wide{q.lo, q.hi}.div(units[name].base)
		return whole.quantity().String() + " " + name
	}
	return formatDecimal(w.quantity()) + " " + name
}

// FormatLimit writes a limit as ParseLimit reads it: as the same limit.
func (m Meter) FormatLimit(q Quantity) string {
	d := m.dimension()
	for _, name := range append([]string{shown[d]}, unitNames(d)...) {
		base := units[name].base
		if base == 0 {
			continue // money and counts have no unit
		}
		w, left := wide{q.lo, q.hi}.mul(uint64(Unit)).div(base)
		n := w.quantity()
		if left { // reading drops what this adds
			n, _ = n.plus(Count(1))
		}
		text := formatDecimal(n) + " " + name
		if back, err := m.ParseLimit(text); err == nil && back == q {
			return text
		}
	}
	if d == started {
		return q.String()
	}
	return m.Format(q)
}
