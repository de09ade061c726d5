package cost

import (
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// nov is when the books of tests come in force.
var nov = time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)

func price(s string, per int64, unit string) Price {
	n, err := ParseNano(s)
	if err != nil {
		panic(err)
	}
	return Price{n, per, unit}
}

func testBook() Book {
	return Book{Version: "2026-11", Currency: "EUR", From: nov, Prices: map[Meter]Price{
		MeterCPU: price("0.000011", 0, "cpu-second"), MeterMemory: price("0.0000012", 1, "gib-second"), MeterStorage: price("0.0001", 1, "gib-hour"),
		MeterNetOut: price("0.05", 1, "gib"), MeterStarts: price("0.0001", 1, "start"), MeterPaused: price("0.01", 24, "hour"),
		"model.tokens": price("0.15", 1_000_000, "token"),
	}}
}

func shelf(t *testing.T, books ...Book) Shelf {
	t.Helper()
	s, err := NewShelf(books)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestRate has amounts worked out by hand.
func TestRate(t *testing.T) {
	b := testBook()
	for _, c := range []struct {
		meter Meter
		q     Quantity
		want  Nano
	}{
		{MeterCPU, Count(0), 0},
		{MeterCPU, Count(1e9), 11_000},
		{MeterCPU, Count(90_909), 0}, // 0.999999 nano
		{MeterCPU, Count(90_910), 1},
		{MeterMemory, Product(512<<20, 3600e3), 2_160_000}, // half a GiB for an hour
		{MeterMemory, Product(1<<42, 100*365*86400e3), 4096 * 100 * 365 * 86400 * 1200},
		{MeterStorage, Product(10<<30, 24*3600e3), 24_000_000},
		{MeterNetOut, Count(3 << 29), 75_000_000},
		{MeterNetOut, Count(1), 0}, // 0.0466 nano
		{MeterStarts, Count(7), 700_000},
		{MeterPaused, Count(36 * 3600e3), 15_000_000},
		{"model.tokens", Count(1_234_567), 185_185_050},
		{MeterNetIn, MaxQuantity, 0}, // no price
	} {
		if got, err := b.Rate(c.meter, c.q); err != nil || got != SumOf(c.want) {
			t.Errorf("%s of %s costs %s, %v; want %d", c.q, c.meter, got, err, c.want)
		}
	}
	if n, err := b.Rate(MeterStarts, MaxQuantity); !is(err, sandbox.ErrTooLarge, "amount_too_large") {
		t.Errorf("all there is costs %d, %v", n, err)
	}
}

// TestAmountsEnd goes to the last sum there is, and over it.
func TestAmountsEnd(t *testing.T) {
	b := Book{Version: "v", Prices: map[Meter]Price{MeterStarts: {Price: 1, Unit: "start"}, MeterRunning: {Price: 2, Per: 1, Unit: "second"}, "x": {Price: 1 << 62, Unit: "x"}}}
	if n, err := b.Rate(MeterStarts, MaxSum.Spent()); err != nil || n != MaxSum {
		t.Errorf("the last sum: %s, %v", n, err)
	}
	for _, c := range []struct {
		meter Meter
		q     Quantity
	}{{MeterStarts, Quantity{hi: 1 << 63}}, {"x", Quantity{hi: 2}}, {"x", Quantity{hi: 4}}, {"x", Quantity{hi: 1 << 63}}} {
		if n, err := b.Rate(c.meter, c.q); !is(err, sandbox.ErrTooLarge, "amount_too_large") {
			t.Errorf("%s of %s costs %s, %v", c.q, c.meter, n, err)
		}
	}
	if n, err := b.Charge(MeterStarts, Count(9), Count(5)); err != nil || n != (Sum{}) {
		t.Errorf("backwards: %s, %v", n, err)
	}
	if n, err := b.Most(Usage{MeterStarts: MaxSum.Spent(), MeterRunning: Count(1)}); err != nil || n != MaxSum {
		t.Errorf("two that do not fit stay at the bound: %s, %v", n, err)
	}
}

// anyPrice is from free to the highest there can be.
func anyPrice(r *rand.Rand, m Meter) Price {
	p := Price{Price: Nano(r.Uint64() >> (1 + r.IntN(64))), Per: int64(1 + r.Uint64N(maxPer)>>r.IntN(50)), Unit: "token"}
	if !m.Custom() {
		names := unitNames(m.dimension())
		p.Unit = names[r.IntN(len(names))]
	}
	return p
}

var pricedMeters = []Meter{MeterCPU, MeterMemory, MeterStorage, MeterNetOut, MeterNetIn, MeterStarts, MeterRunning, MeterPaused, MeterStopped, "tokens"}

// TestRateAgainstBig compares any price of any quantity with big integers.
func TestRateAgainstBig(t *testing.T) {
	r := random(t)
	refused := 0
	for range 20000 {
		m := pricedMeters[r.IntN(len(pricedMeters))]
		p := anyPrice(r, m)
		b := Book{Version: "v", Currency: "EUR", From: nov, Prices: map[Meter]Price{m: p}}
		if err := b.Validate(); err != nil {
			t.Fatal(err)
		}
		q := anyQuantity(r, 128)
		num := new(big.Int).Mul(q.big(), big.NewInt(int64(p.Price)))
		den := new(big.Int).Mul(new(big.Int).SetUint64(p.base()), big.NewInt(p.Per))
		want, rem := new(big.Int).QuoRem(num, den, new(big.Int))
		got, err := b.Rate(m, q)
		if want.BitLen() > 127 {
			refused++
			if sandbox.CodeOf(err) != "amount_too_large" {
				t.Fatalf("%s of %s at %+v = %d, %v; want an error", q, m, p, got, err)
			}
			continue
		}
		if err != nil || got.big().Cmp(want) != 0 {
			t.Fatalf("%s of %s at %+v = %d, %v; want %s", q, m, p, got, err, want)
		}
		if rem.Sign() != 0 {
			want.Add(want, big.NewInt(1))
		}
		if most, err := b.Most(Usage{m: q}); want.BitLen() <= 127 && (err != nil || most.big().Cmp(want) != 0) {
			t.Fatalf("%s of %s at %+v is at most %d, %v; want %s", q, m, p, most, err, want)
		}
	}
	if refused == 0 {
		t.Error("no amount was too large")
	}
}

// cuts returns n readings between from and to, both included, in order.
func cuts(r *rand.Rand, from, to Quantity, n int) []Quantity {
	out := []Quantity{from, to}
	for range n {
		cut := from
		if d := to.Less(from); !d.IsZero() {
			off := new(big.Int).Mod(Quantity{r.Uint64(), r.Uint64()}.big(), d.big())
			o, err := ParseQuantity(off.String())
			if err != nil {
				panic(err)
			}
			cut, _ = from.plus(o)
		}
		out = append(out, cut)
	}
	slices.SortFunc(out, Quantity.Cmp)
	return out
}

// TestPiecesAddUp: however an interval is cut, its pieces cost what it costs.
func TestPiecesAddUp(t *testing.T) {
	r := random(t)
	lossy := 0
	for range 2000 {
		m := pricedMeters[r.IntN(len(pricedMeters))]
		b := Book{Version: "v", Prices: map[Meter]Price{m: anyPrice(r, m)}}
		from, to := anyQuantity(r, 100), anyQuantity(r, 100)
		if from.Cmp(to) > 0 {
			from, to = to, from
		}
		whole, err := b.Charge(m, from, to)
		if err != nil {
			continue // too much money: TestRateAgainstBig
		}
		at := cuts(r, from, to, r.IntN(20))
		pieces := make([]Sum, 0, len(at))
		var alone, sum Sum // what pieces rated for themselves would come to
		for i := 1; i < len(at); i++ {
			n, err := b.Charge(m, at[i-1], at[i])
			if err != nil || n.Sign() < 0 {
				t.Fatalf("piece %s to %s: %d, %v", at[i-1], at[i], n, err)
			}
			pieces = append(pieces, n)
			single, _ := b.Rate(m, at[i].Less(at[i-1]))
			alone = alone.Add(single)
		}
		r.Shuffle(len(pieces), func(i, j int) { pieces[i], pieces[j] = pieces[j], pieces[i] })
		for _, n := range pieces {
			sum = sum.Add(n)
		}
		if sum != whole {
			t.Fatalf("%s from %s to %s costs %s, its pieces %s", m, from, to, whole, sum)
		}
		if alone != whole {
			lossy++
		}
	}
	if lossy == 0 { // the control: rounding was there to be lost
		t.Error("no partition would have lost anything when rounded by the piece")
	}
}

func BenchmarkCharge(b *testing.B) {
	book := testBook()
	from, to := Product(1<<32, 86400e3), Product(1<<32, 86401e3)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := book.Charge(MeterMemory, from, to); err != nil {
			b.Fatal(err)
		}
	}
}
