package cost

import (
	"database/sql/driver"
	"encoding/json"
	"errors"
	"math/big"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

// is reports whether an error has a class and a code.
func is(err, class error, code string) bool {
	return errors.Is(err, class) && sandbox.CodeOf(err) == code
}

func TestParseNano(t *testing.T) {
	for text, want := range map[string]Nano{
		"0": 0, "-0": 0, "0.0": 0, "1": Unit, "-3": -3 * Unit, "12.5": 12_500_000_000, "0.000011": 11_000,
		"0.000000001": 1, "-0.000000001": -1, "9223372036.854775807": MaxNano, "-9223372036.854775808": MinNano,
	} {
		if n, err := ParseNano(text); err != nil || n != want {
			t.Errorf("ParseNano(%q) = %d, %v; want %d", text, n, err, want)
		}
	}
	for _, text := range []string{
		"", "-", ".", ".5", "5.", "+1", "--1", "1e3", "0x10", "1_000", "1,5", "01", "00.1", " 1", "1 ", "NaN", "Inf", "1.0.0",
		"0.0000000001", "9223372036.854775808", "-9223372036.854775809", "18446744073.709551617", "99999999999999999999", "٣", "1.-5",
	} {
		if n, err := ParseNano(text); err == nil || !is(err, sandbox.ErrInvalid, "invalid_amount") {
			t.Errorf("ParseNano(%q) = %d, %v; want invalid_amount", text, n, err)
		}
	}
}

// TestNumbersSayTheirBounds: who writes an amount that is refused is told of
// what, which are allowed, and an example that is one of them.
func TestNumbersSayTheirBounds(t *testing.T) {
	money := func(s string) error { _, err := MeterMoney.ParseLimit(s); return err }
	amount := func(s string) error { _, err := ParseAmount("--amount", s, -MaxEntry, MaxEntry); return err }
	quantity := func(s string) error { _, err := ParseEntryQuantity("--qty", s); return err }
	sent := func(s string) error { return new(Nano).UnmarshalText([]byte(s)) }
	limit := func(m Meter) func(string) error {
		return func(s string) error { _, err := m.ParseLimit(s); return err }
	}
	price := func(unit string) func(string) error {
		return func(s string) error {
			_, err := readBooks("books: [{prices: {model.tokens: {price: " + s + ", unit: " + unit + "}}}]")
			return err
		}
	}
	for field, c := range map[string]struct {
		parse func(string) error
		words []string // besides the field
		good  []string
		bad   []string
	}{
		"limit of money": {
			money,
			[]string{"from 0.000000001 to 9223372036.854775807", "as 25"},
			[]string{"25", "0.5", "0.000000001", "9223372036.854775807"},
			[]string{"1e30", "9223372036.9", "0", "-1", "NaN", "", "0.0000000001"},
		},
		"limit of model.tokens": {
			limit("model.tokens"),
			[]string{"from 1 to 1329227995784915872903807060280344576", "as 1000000"},
			[]string{"1000000", "1329227995784915872903807060280344576"},
			[]string{"0", "-5", "1e3", "340282366920938463463374607431768211456"},
		},
		"limit of cpu": {
			limit(MeterCPU),
			[]string{"a duration", "cpu-second", "to 18446744073.709551615", "as 90m or '2 cpu-hour'"},
			[]string{"90m", "2 cpu-hour", "18446744073.709551615 cpu-second"},
			[]string{"0", "-5m", "1e30", "18446744073.709551616 cpu-second"},
		},
		"--amount": {
			amount,
			[]string{"from -1000000000 to 1000000000", "as 12.5"},
			[]string{"12.5", "-1000000000", "1000000000"},
			[]string{"1e999", "NaN", "Inf", "1000000000.000000001", "9223372036.9"},
		},
		"amount": {sent, []string{"from -1000000000 to 1000000000", "as 12.5"}, []string{"12.5", "-1000000000"}, []string{"1e999", "NaN", "99999999999"}},
		"--qty":  {quantity, []string{"from 1 to 1000000000000000", "as 1200"}, []string{"1200", "1", "1000000000000000"}, []string{"-5", "0", "1.5", "1e3", "1000000000000001", ""}},
		"price": {
			price("cpu-hour"),
			[]string{"from 0 to 9223372036.854775807", "as 12.5"},
			[]string{"0", "12.5", "9223372036.854775807"},
			[]string{"1e30", "9223372036.9", "-1", "NaN"},
		},
		"of 1 \"token\"": {price("token"), []string{"from 0 to 1000000000 ", "as 0.15"}, []string{"0", "0.15", "1000000000"}, []string{"1000000001", "9223372036"}},
	} {
		for _, s := range c.good {
			if err := c.parse(s); err != nil {
				t.Errorf("%s %q: %v", field, s, err)
			}
		}
		for _, s := range c.bad {
			err := c.parse(s)
			if err == nil {
				t.Errorf("%s %q was taken", field, s)
				continue
			}
			for _, w := range append([]string{field}, c.words...) {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%s %q: %v; want %q", field, s, err, w)
				}
			}
		}
	}
}

func FuzzNano(f *testing.F) {
	for _, s := range []string{"0", "-0.5", "12.25", "9223372036.854775807", "-9223372036.854775808", "1e9", "00", "0.0000000001"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := ParseNano(s)
		if err != nil {
			return
		}
		want, ok := new(big.Rat).SetString(s)
		if got := big.NewRat(int64(n), int64(Unit)); !ok || got.Cmp(want) != 0 {
			t.Fatalf("ParseNano(%q) = %s", s, got)
		}
		again, err := ParseNano(n.String())
		if err != nil || again != n || len(n.String()) > max(len(s), 1) {
			t.Fatalf("%q prints as %q, which reads as %d, %v", s, n, again, err)
		}
	})
}

func TestNanoText(t *testing.T) {
	type doc struct {
		Price Nano `json:"price"`
	}
	b, err := json.Marshal(doc{-1_500_000_000})
	if err != nil || string(b) != `{"price":"-1.5"}` {
		t.Fatalf("JSON: %s, %v", b, err)
	}
	var d doc
	if err := json.Unmarshal(b, &d); err != nil || d.Price != -1_500_000_000 {
		t.Errorf("read back: %v, %v", d, err)
	}
	for _, bad := range []string{`{"price":0.5}`, `{"price":"1e9"}`, `{"price":true}`} {
		if err := json.Unmarshal([]byte(bad), &d); err == nil || d.Price != -1_500_000_000 {
			t.Errorf("%s: read as %s, %v", bad, d.Price, err)
		}
	}
	if v, err := driver.DefaultParameterConverter.ConvertValue(MaxNano); err != nil || v != int64(MaxNano) {
		t.Errorf("to a database: %v, %v", v, err)
	}
}

// TestNanoArithmetic compares every pair of edge values with big integers.
