package cost

import (
	"math/big"
	"os"
	"testing"
	"time"
)

// TestSumAgainstBig adds a million amounts up, extremes among them, and takes
// every result of Sum from numbers of any size.
func TestSumAgainstBig(t *testing.T) {
	n := 50_000
	if os.Getenv("SANDBOXD_SOAK") == "1" {
		n = 1_000_000
	}
	r := random(t)
	edges := []Nano{MinNano, MinNano + 1, -1, 0, 1, MaxNano, MaxNano - 1, MaxEntry, -MaxEntry}
	lowest, highest := MinSum.big(), MaxSum.big()
	held := func(n *big.Int) *big.Int {
		switch {
		case n.Cmp(lowest) < 0:
			return lowest
		case n.Cmp(highest) > 0:
			return highest
		}
		return n
	}
	var sum, hi, lo Sum
	want := new(big.Int)
	halves := [2]int64{}
	for i := range n {
		x := Nano(int64(r.Uint64()) >> r.UintN(64))
		if r.IntN(3) == 0 {
			x = edges[r.IntN(len(edges))]
		}
		bx := big.NewInt(int64(x))
		sum, want = sum.Add(SumOf(x)), want.Add(want, bx)
		halves[0] += int64(x) >> 32
		halves[1] += int64(x) & (1<<32 - 1)
		a, b := Sum{int64(r.Uint64()) >> r.UintN(64), r.Uint64()}, Sum{int64(r.Uint64()) >> r.UintN(64), r.Uint64() >> r.UintN(64)}
		switch r.IntN(8) {
		case 0:
			a = MinSum
		case 1:
			b = MinSum
		case 2:
			a, b = MaxSum, SumOf(x)
		}
		for what, c := range map[string]struct {
			got  Sum
			want *big.Int
		}{
			"+": {a.Add(b), new(big.Int).Add(a.big(), b.big())}, "-": {a.Sub(b), new(big.Int).Sub(a.big(), b.big())}, "neg": {a.Neg(), new(big.Int).Neg(a.big())},
		} {
			if c.got.big().Cmp(held(c.want)) != 0 {
				t.Fatalf("%s %s %s = %s, want %s", a.big(), what, b.big(), c.got.big(), c.want)
			}
		}
		if a.Cmp(b) != a.big().Cmp(b.big()) || a.Sign() != a.big().Sign() {
			t.Fatalf("%s and %s: %d, %d", a.big(), b.big(), a.Cmp(b), a.Sign())
		}
		if again, err := ParseSum(a.String()); err != nil || again != a {
			t.Fatalf("%s reads as %s, %v", a, again, err)
		}
		if i%100 == 0 {
			if b.Sign() > 0 {
				got, ok := a.Ratio(b, 10_000)
				q := new(big.Int).Mul(a.big(), big.NewInt(10_000))
				if q.Div(q, b.big()); ok != q.IsInt64() || ok && got != q.Int64() {
					t.Fatalf("%s by %s: %d, %v, want %s", a, b, got, ok, q)
				}
			}
		}
	}
	hi, lo = SplitSum(halves[0], 0), SplitSum(0, halves[1])
	if sum.big().Cmp(want) != 0 || hi.Add(lo) != sum || SplitSum(halves[0], halves[1]) != sum {
		t.Errorf("%d amounts come to %s, by halves to %s, want %s", n, sum.big(), hi.Add(lo).big(), want)
	}
	for _, s := range []string{"", "-", "NaN", "Infinity", "1e9", "+1", "01", "1.", "1.0000000001", "0x1", "١", "170141183460469231731687303715884105728", "340282366920938463463374607431768211456"} {
		if got, err := ParseSum(s); err == nil {
			t.Errorf("%q reads as %s", s, got)
		}
		if got, err := ParseNano(s); err == nil {
			t.Errorf("%q reads as %s", s, got)
		}
	}
}

// TestPeriodEdges: every instant lies in one period, and periods meet, at the
// ends of days, months and years, at leap days and where local clocks change.
func TestPeriodEdges(t *testing.T) {
	var zones []*time.Location
	for _, name := range []string{"Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Pacific/Apia"} {
		if z, err := time.LoadLocation(name); err == nil {
			zones = append(zones, z)
		}
	}
	zones = append(zones, time.FixedZone("far east", 14*3600), time.FixedZone("far west", -12*3600), time.UTC)
	for _, at := range []time.Time{
		time.Date(2026, 3, 29, 1, 0, 0, 0, time.UTC), time.Date(2026, 10, 25, 1, 0, 0, 0, time.UTC), time.Date(2024, 2, 29, 0, 0, 0, 0, time.UTC),
		time.Date(2024, 3, 1, 0, 0, 0, 0, time.UTC), time.Date(2026, 12, 31, 0, 0, 0, 0, time.UTC), time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(1970, 1, 1, 0, 0, 0, 0, time.UTC),
	} {
		for _, off := range []time.Duration{-time.Millisecond, 0, time.Millisecond, -24 * time.Hour, 24 * time.Hour, time.Hour} {
			for _, z := range zones {
				for _, p := range []Period{Day, Month, Total} {
					x := at.Add(off).In(z)
					s := p.Span(x)
					if !s.Contains(x) || s != p.Span(x.UTC()) {
						t.Fatalf("%s of %s: %+v", p, x, s)
					}
					if p == Total {
						continue
					}
					if next := p.Span(s.End); next.Start != s.End || s.Contains(s.End) || p.Span(s.Start.Add(-1)).End != s.Start {
						t.Fatalf("%s of %s: %+v, then %+v", p, x, s, next)
					}
					if d := s.End.Sub(s.Start); p == Day && d != 24*time.Hour || d > 31*24*time.Hour {
						t.Fatalf("%s of %s lasts %s", p, x, d)
					}
				}
			}
		}
	}
	// A clock set back by up to a day begins no period again; by more it does.
	b := Budget{Period: Day}
	m := Mark{Period: Day, Start: time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)}
	if s := b.Span(m, m.Start.Add(-24*time.Hour)); !s.Start.Equal(m.Start) {
		t.Errorf("back by a day: %+v", s)
	}
	if s := b.Span(m, m.Start.Add(-24*time.Hour-1)); s.Start.Equal(m.Start) {
		t.Errorf("back by more: %+v", s)
	}
}
