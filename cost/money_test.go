package cost

import (
	"database/sql/driver"
	"encoding/json"
	"errors"
	"math/big"
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
