package cost

import (
	"bytes"
	"math/bits"
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

// ParseNano reads a decimal number with up to nine digits behind the point:
// no exponent, no plus sign, no superfluous zero in front. Class ErrInvalid.
func ParseNano(s string) (Nano, error) {
	digits, negative := strings.CutPrefix(s, "-")
	n, ok := parseDecimal(digits)
	if !ok || n > 1<<63 || n == 1<<63 && !negative {
		return 0, sandbox.Errorf(sandbox.ErrInvalid, "invalid_amount",
			"amount %.40q: write a decimal number as 0.000011, 12.5 or -3, with up to nine digits behind the point and at most 9223372036", s)
	}
	if negative {
		return Nano(-n), nil // two's complement: right for 1<<63 too
	}
	return Nano(n), nil
}

// parseDecimal returns a decimal number without a sign in billionths.
func parseDecimal(s string) (n uint64, ok bool) {
	whole, part, point := strings.Cut(s, ".")
	if whole == "" || len(whole) > 1 && whole[0] == '0' || point && part == "" || len(part) > decimals {
		return 0, false
	}
	for _, c := range []byte(whole + part + strings.Repeat("0", decimals-len(part))) {
		hi, lo := bits.Mul64(n, 10)
		if c < '0' || c > '9' || hi != 0 {
			return 0, false
		}
		var carry uint64
		if n, carry = bits.Add64(lo, uint64(c-'0'), 0); carry != 0 {
			return 0, false
		}
	}
	return n, true
}

// String returns the shortest decimal number that ParseNano reads as n.
func (n Nano) String() string {
	abs, sign := uint64(n), ""
	if n < 0 {
		abs, sign = -abs, "-"
	}
	return sign + formatDecimal(abs)
}

// formatDecimal writes a number of billionths.
func formatDecimal(n uint64) string {
	text := strconv.FormatUint(n/uint64(Unit), 10)
	if part := n % uint64(Unit); part != 0 {
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
	return n.UnmarshalText(bytes.Trim(bytes.TrimSpace(b), `"'`))
}

// Add returns n + m. Class ErrTooLarge where that does not fit.
func (n Nano) Add(m Nano) (Nano, error) {
	sum := n + m
	if (sum > n) != (m > 0) && m != 0 {
		return 0, tooLarge("the sum of %s and %s", n, m)
	}
	return sum, nil
}

// Sub returns n - m. Class ErrTooLarge where that does not fit.
func (n Nano) Sub(m Nano) (Nano, error) {
	diff := n - m
	if (diff < n) != (m > 0) && m != 0 {
		return 0, tooLarge("the difference of %s and %s", n, m)
	}
	return diff, nil
}

// Sum adds amounts. Class ErrTooLarge where the sum does not fit on the way.
func Sum(amounts ...Nano) (Nano, error) {
	var sum Nano
	for _, n := range amounts {
		var err error
		if sum, err = sum.Add(n); err != nil {
			return 0, err
		}
	}
	return sum, nil
}

func tooLarge(format string, args ...any) error {
	return sandbox.Errorf(sandbox.ErrTooLarge, "amount_too_large",
		format+" does not fit: amounts end at 9223372036 units of the currency; take a larger unit as currency or check the prices", args...)
}
