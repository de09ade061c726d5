package cost

import (
	"bytes"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Nano is an amount of money in billionths of the currency's unit. As JSON,
// YAML and text it is a decimal number ("0.000011", "12.5", "-3"), in JSON as a
// string, since readers make floats of numbers. The whole of int64 is used: up
// to 9,223,372,036.854775807 units either way. A database keeps it as an integer.
type Nano int64

// Unit is one unit of a currency.
const Unit Nano = 1e9

// The bounds of a Nano.
const (
	MaxNano Nano = 1<<63 - 1
	MinNano Nano = -1 << 63
)

// decimals is how many digits of a Nano stand behind the point.
const decimals = 9

// ParseAmount reads a decimal number from least to most with up to nine digits
// behind the point: no exponent, no plus sign, no superfluous zero in front.
// Class ErrInvalid, code invalid_amount; the error calls the number field.
func ParseAmount(field, s string, least, most Nano) (Nano, error) {
	n, ok := parseNano(s)
	if !ok || n < least || n > most {
		return 0, badAmount(field, s, least, most)
	}
	return n, nil
}

func badAmount(field, s string, least, most Nano) error {
	return outOfRange("invalid_amount", field, s, "a decimal number with up to nine digits behind the point", least.String(), most.String(), "12.5")
}

// outOfRange is the error for a number that a person wrote: what it is of, what
// is allowed, and an example.
func outOfRange(code, field, s, kind, least, most, example string) error {
	return sandbox.Errorf(sandbox.ErrInvalid, code, "%s %.40q: use %s, from %s to %s, as %s", field, s, kind, least, most, example)
}

// ParseNano is ParseAmount for all that a Nano holds. Its error names the
// narrower bounds of an entry, which most amounts that are sent are of.
func ParseNano(s string) (Nano, error) {
	n, ok := parseNano(s)
	if !ok {
		return 0, badAmount("amount", s, -MaxEntry, MaxEntry)
	}
	return n, nil
}

func parseNano(s string) (Nano, bool) {
	digits, negative := cutMinus(s)
	q, ok := parseDecimal(digits)
	n, fits := q.Uint64()
	if !ok || !fits || n > 1<<63 || n == 1<<63 && !negative {
		return 0, false
	}
	if negative {
		return Nano(-n), true // two's complement: right for 1<<63 too
	}
	return Nano(n), true
}

func cutMinus(s string) (digits string, negative bool) { return strings.CutPrefix(s, "-") }

// parseDecimal returns a decimal number without a sign in billionths.
func parseDecimal(s string) (n Quantity, ok bool) {
	whole, part, point := strings.Cut(s, ".")
	if whole == "" || len(whole) > 1 && whole[0] == '0' || point && part == "" || len(part) > decimals || len(whole) > maxDigits {
		return Quantity{}, false
	}
	return parseDigits(whole + part + strings.Repeat("0", decimals-len(part)))
}

// String returns the shortest decimal number that ParseNano reads as n.
func (n Nano) String() string { return SumOf(n).String() }

// formatDecimal writes a number of billionths.
func formatDecimal(n Quantity) string {
	w, left := wide{n.lo, n.hi}.div(uint64(Unit))
	text := w.quantity().String()
	if left {
		part := n.lo - w[0]*uint64(Unit)                        // below 2^64, so the lower half says all
		behind := strconv.FormatUint(part+uint64(Unit), 10)[1:] // with the zeros in front
		text += "." + strings.TrimRight(behind, "0")
	}
	return text
}

// MarshalText writes n as String does.
func (n Nano) MarshalText() ([]byte, error) { return []byte(n.String()), nil }

// UnmarshalText reads what ParseNano reads.
func (n *Nano) UnmarshalText(b []byte) error {
	v, err := ParseNano(string(b))
	if err == nil {
		*n = v
	}
	return err
}

// UnmarshalYAML reads a number as it is written in the file, in quotes or not.
func (n *Nano) UnmarshalYAML(b []byte) error {
	return n.UnmarshalText([]byte(unquote(b)))
}

// unquote returns a number as it is written in YAML, in quotes or not.
func unquote(b []byte) string { return string(bytes.Trim(bytes.TrimSpace(b), `"'`)) }

func tooLarge(format string, args ...any) error {
	return sandbox.Errorf(sandbox.ErrTooLarge, "amount_too_large",
		format+" does not fit: sums end at 2^127 billionths of the currency: check the prices", args...)
}
