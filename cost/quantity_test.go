package cost

import (
	"encoding/json"
	"math/big"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// random returns a source whose seed is told where the test fails;
// SANDBOXD_SEED repeats a run.
func random(t *testing.T) *rand.Rand {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("SANDBOXD_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatalf("SANDBOXD_SEED: %v", err)
		}
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("repeat with SANDBOXD_SEED=%d", seed)
		}
	})
	return rand.New(rand.NewPCG(seed, 1))
}

// anyQuantity is as likely small as large, and often an edge.
func anyQuantity(r *rand.Rand, bits int) Quantity {
	q := Quantity{r.Uint64(), r.Uint64()}
	if r.IntN(8) == 0 {
		q = MaxQuantity
	}
	return shift(q, 128-r.IntN(bits+1))
}

func shift(q Quantity, by int) Quantity {
	switch {
	case by >= 128:
		return Quantity{}
	case by >= 64:
		return Quantity{lo: q.hi >> (by - 64)}
	case by == 0:
		return q
	}
	return Quantity{q.hi >> by, q.lo>>by | q.hi<<(64-by)}
}

func TestQuantityAgainstBig(t *testing.T) {
	r := random(t)
	most := MaxQuantity.big()
	overflows := 0
	for range 20000 {
		p, q := anyQuantity(r, 128), anyQuantity(r, 128)
		bp, bq := p.big(), q.big()
		if p.String() != bp.String() {
			t.Fatalf("%x prints as %s, want %s", bp, p, bp)
		}
		if back, err := ParseQuantity(p.String()); err != nil || back != p {
			t.Fatalf("%s reads as %s, %v", p, back, err)
		}
		if p.Cmp(q) != bp.Cmp(bq) {
			t.Fatalf("%s against %s: %d", p, q, p.Cmp(q))
		}
		sum, err := p.Add(q)
		if want := new(big.Int).Add(bp, bq); want.Cmp(most) > 0 {
			overflows++
			if sandbox.CodeOf(err) != "quantity_too_large" {
				t.Fatalf("%s + %s = %s, %v; want an error", p, q, sum, err)
			}
		} else if err != nil || sum.big().Cmp(want) != 0 {
			t.Fatalf("%s + %s = %s, %v", p, q, sum, err)
		}
		want := new(big.Int).Sub(bp, bq)
		if want.Sign() < 0 {
			want.SetInt64(0)
		}
		if got := p.Less(q); got.big().Cmp(want) != 0 {
			t.Fatalf("%s less %s = %s", p, q, got)
		}
		if got := Product(p.lo, q.lo).big(); got.Cmp(new(big.Int).Mul(Count(p.lo).big(), Count(q.lo).big())) != 0 {
			t.Fatalf("%d × %d = %s", p.lo, q.lo, got)
		}
		mul, div := r.Uint64()>>r.IntN(64), r.Uint64()>>r.IntN(64)|1
		w, left := wide{p.lo, p.hi}.mul(mul).div(div)
		quo, rem := new(big.Int).QuoRem(new(big.Int).Mul(bp, new(big.Int).SetUint64(mul)), new(big.Int).SetUint64(div), new(big.Int))
		got := new(big.Int).Add(new(big.Int).Lsh(new(big.Int).SetUint64(w[2]), 128), w.quantity().big())
		if got.Cmp(quo) != 0 || left != (rem.Sign() != 0) {
			t.Fatalf("%s × %d / %d = %s, rest %v; want %s", p, mul, div, got, left, quo)
		}
	}
	if overflows == 0 {
		t.Error("no sum overflowed")
	}
}

func TestParseQuantityRefuses(t *testing.T) {
	for _, s := range []string{"", "-1", "+1", "01", "1.5", "1e3", " 1", "340282366920938463463374607431768211456", "999999999999999999999999999999999999999", "1000000000000000000000000000000000000000"} {
		if q, err := ParseQuantity(s); sandbox.CodeOf(err) != "invalid_quantity" {
			t.Errorf("ParseQuantity(%q) = %s, %v", s, q, err)
		}
	}
	if q, err := ParseQuantity("340282366920938463463374607431768211455"); err != nil || q != MaxQuantity {
		t.Errorf("the largest: %s, %v", q, err)
	}
	var q Quantity
	if b, err := json.Marshal(Product(1<<40, 1<<30)); err != nil || string(b) != `"1180591620717411303424"` {
		t.Errorf("JSON: %s, %v", b, err)
	} else if err := json.Unmarshal(b, &q); err != nil || q != Product(1<<40, 1<<30) {
		t.Errorf("read back: %s, %v", q, err)
	}
}

func TestLimits(t *testing.T) {
	for _, c := range []struct {
		meter       Meter
		text, shown string
		want        Quantity
	}{
		{MeterMoney, "25", "25", Count(25e9)},
		{MeterMoney, "0.5", "0.5", Count(5e8)},
		{MeterCPU, "90m", "5400 cpu-second", Count(5400e9)},
		{MeterCPU, "2.5 cpu-hour", "9000 cpu-second", Count(9000e9)},
		{MeterMemory, "1.5gib-hour", "1.5 gib-hour", Product(3<<29, 3600e3)},
		{MeterStorage, "3600 gib-second", "1 gib-hour", Product(1<<30, 3600e3)},
		{MeterNet, "20 gib", "20 gib", Count(20 << 30)},
		{MeterNetOut, "0.5gib", "0.5 gib", Count(1 << 29)},
		{MeterWall, "24h", "86400 second", Count(86400e3)},
		{MeterRunning, "1.5 hour", "5400 second", Count(5400e3)},
		{MeterStarts, "10", "10 start", Count(10)},
		{MeterStarts, "10 start", "10 start", Count(10)},
		{"model.tokens", "1000000", "1000000", Count(1e6)},
	} {
		q, err := c.meter.ParseLimit(c.text)
		if err != nil || q != c.want {
			t.Errorf("%s: %q reads as %s, %v; want %s", c.meter, c.text, q, err, c.want)
		}
		if got := c.meter.Format(q); got != c.shown {
			t.Errorf("%s: %s prints as %q, want %q", c.meter, q, got, c.shown)
		} else if again, err := c.meter.ParseLimit(got); err != nil || again != q {
			t.Errorf("%s: %q reads as %s, %v", c.meter, got, again, err)
		}
	}
	for _, c := range []struct {
		meter Meter
		text  string
	}{
		{MeterMoney, "0"},
		{MeterMoney, "-5"},
		{MeterMoney, "5 EUR"},
		{MeterMoney, "1h"},
		{MeterCPU, "5"},
		{MeterCPU, "5 gib"},
		{MeterCPU, "-5m"},
		{MeterCPU, "5 second"},
		{MeterMemory, "1h"},
		{MeterMemory, "1 gib"},
		{MeterNet, ""},
		{MeterNet, "gib"},
		{MeterNet, "0.0000000001 gib"},
		{MeterNet, "-1 gib"},
		{MeterWall, "soon"},
		{MeterWall, "1us"},
		{MeterStarts, "0"},
		{"tokens", "1.5"},
		{"tokens", "5 token"},
		{"Tokens", "5"},
		{"", "5"},
	} {
		if q, err := c.meter.ParseLimit(c.text); err == nil {
			t.Errorf("%s: %q was read as %s", c.meter, c.text, q)
		}
	}
	if got := MeterNet.Format(MaxQuantity); got != "316912650057057350374175801343 gib" {
		t.Errorf("the largest quantity prints as %s", got)
	}
}

// TestLimitsReadBack writes limits of all meters and units, as budgets answer
// them, and reads them as requests.
func TestLimitsReadBack(t *testing.T) {
	r := random(t)
	for m, d := range builtin {
		forms := append(unitNames(d), "")
		for range 2000 {
			n := r.Uint64() >> r.UintN(64)
			number := formatDecimal(Count(n))
			if d == started && r.IntN(2) == 0 {
				number = anyQuantity(r, 110).String()
			}
			for _, unit := range forms {
				text := strings.TrimSpace(number + " " + unit)
				q, err := m.ParseLimit(text)
				if err != nil {
					continue
				}
				shown := m.FormatLimit(q)
				if again, err := m.ParseLimit(shown); err != nil || again != q {
					t.Fatalf("%s: %q reads as %s, is answered as %q, which reads as %s, %v", m, text, q, shown, again, err)
				}
			}
		}
	}
}

func FuzzLimit(f *testing.F) {
	for _, s := range []string{"25", "1.5gib-hour", "90m", "10 start", "-1", "gib"} {
		for _, m := range []string{"money", "cpu", "memory", "net", "wall", "starts", "tokens"} {
			f.Add(m, s)
		}
	}
	f.Fuzz(func(t *testing.T, meter, s string) {
		m := Meter(meter)
		q, err := m.ParseLimit(s)
		if err != nil {
			return
		}
		again, err := m.ParseLimit(m.FormatLimit(q))
		if q.IsZero() || err != nil || again != q {
			t.Fatalf("%s: %q reads as %s, printed %q, read as %s, %v", m, s, q, m.FormatLimit(q), again, err)
		}
	})
}

func TestSpent(t *testing.T) {
	u := Usage{MeterNetOut: Count(5), MeterNetIn: Count(7), MeterRunning: Count(100), MeterPaused: Count(20), MeterStopped: Count(1000), MeterCPU: Count(3)}
	for m, want := range map[Meter]uint64{MeterNet: 12, MeterNetOut: 5, MeterWall: 120, MeterStopped: 1000, MeterCPU: 3, MeterMemory: 0, MeterMoney: 42} {
		if q, err := m.Spent(u, SumOf(42)); err != nil || q != Count(want) {
			t.Errorf("%s: %s, %v; want %d", m, q, err, want)
		}
	}
	if q, err := MeterMoney.Spent(nil, SumOf(-42)); err != nil || !q.IsZero() {
		t.Errorf("a credit counts as %s spent, %v", q, err)
	}
	if _, err := MeterNet.Spent(Usage{MeterNetOut: MaxQuantity, MeterNetIn: Count(1)}, Sum{}); sandbox.CodeOf(err) != "quantity_too_large" {
		t.Errorf("a sum that does not fit: %v", err)
	}
}
