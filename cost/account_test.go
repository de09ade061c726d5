package cost

import (
	"encoding/json"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// TestCounterTakesAnyOrder: generations, replays and order make no difference.
func TestCounterTakesAnyOrder(t *testing.T) {
	r := random(t)
	type reading struct {
		generation string
		value      Quantity
	}
	for range 200 {
		var readings []reading
		var want Quantity
		for _, g := range []string{"boot1/1", "boot1/2", "boot2/1"} {
			var last Quantity
			for _, q := range cuts(r, Quantity{}, anyQuantity(r, 100), r.IntN(8)) {
				readings = append(readings, reading{g, q})
				last = q
			}
			want, _ = want.plus(last)
		}
		readings = append(readings, readings...)
		r.Shuffle(len(readings), func(i, j int) { readings[i], readings[j] = readings[j], readings[i] })
		var c Counter
		for _, x := range readings {
			c = c.Observe(x.generation, x.value)
		}
		if got, err := c.Total(); err != nil || got != want {
			t.Fatalf("%d readings come to %s, %v; want %s", len(readings), got, err, want)
		}
	}
	if _, err := (Counter{"a": MaxQuantity, "b": Count(1)}).Total(); sandbox.CodeOf(err) != "quantity_too_large" {
		t.Errorf("an overflow: %v", err)
	}
}

func TestGauge(t *testing.T) {
	var g Gauge
	for _, x := range []struct {
		at    int64
		bytes uint64
		want  uint64
	}{
		{1000, 100, 0},   // the beginning
		{1010, 50, 1000}, // 10 ms of 100
		{1010, 70, 1000}, // at once
		{1005, 9e9, 1000},
		{1020, 0, 1700},
		{2000, 1, 1700},
	} {
		var err error
		if g, err = g.Read(x.at, x.bytes); err != nil || g.Total != Count(x.want) {
			t.Fatalf("%d bytes at %d ms: %s, %v; want %d", x.bytes, x.at, g.Total, err, x.want)
		}
	}
	if q := ByteTime(9, 10, 9); !q.IsZero() {
		t.Errorf("a millisecond back makes %s", q)
	}
	if q := ByteTime(1<<42, -1, 1<<62); q != (Quantity{1 << 40, 1 << 42}) {
		t.Errorf("4 TiB for ever make %s", q)
	}
	g = g.Restart()
	if g, _ = g.Read(5, 1000); g.Total != Count(1700) {
		t.Errorf("after a reboot: %s", g.Total)
	}
	if g, _ = g.Read(6, 1000); g.Total != Count(2700) {
		t.Errorf("and a millisecond: %s", g.Total)
	}
	g.Total = MaxQuantity
	if same, err := g.Read(7, 1); sandbox.CodeOf(err) != "quantity_too_large" || same != g {
		t.Errorf("an overflow: %+v, %v", same, err)
	}
}

// TestAccountAddsUp runs accounts through readings in any order, with replays
// and crashes, over changes of book, and compares each stretch between two
// changes with what rating it as a whole gives.
func TestAccountAddsUp(t *testing.T) {
	r := random(t)
	for range 150 {
		books := make([]Book, 3)
		for i := range books {
			books[i] = testBook()
			books[i].Version, books[i].From = string(rune('a'+i)), nov.Add(time.Duration(i)*time.Hour)
			for m, p := range books[i].Prices {
				p.Price = Nano(r.IntN(1e6)) // so that 2^40 starts are no fortune
				books[i].Prices[m] = p
			}
		}
		s := shelf(t, books...)
		var a Account
		reached := Usage{}
		for i, b := range s.Books() {
			stretch, charged := Usage{}, map[Meter]Nano{}
			begin := b.From
			if i == 0 {
				begin = nov.Add(time.Minute)
			}
			a = advance(t, r, a, s, begin, reached, nil) // the reading at the change
			seen := map[Meter][]Quantity{}
			for m := range b.Prices {
				end, _ := reached[m].plus(anyQuantity(r, 40))
				seen[m] = cuts(r, reached[m], end, 10)
				stretch[m] = end.Less(reached[m])
			}
			for n := range 12 {
				u := Usage{}
				for m := range b.Prices {
					u[m] = seen[m][n]
					if r.IntN(3) == 0 {
						u[m] = seen[m][r.IntN(n+1)] // an old one, late
					}
					if n == 11 {
						u[m] = seen[m][n]
						reached[m] = u[m]
					}
				}
				a = advance(t, r, a, s, begin.Add(time.Duration(n)*time.Minute), u, charged)
			}
			for m, q := range stretch {
				if want, err := b.Rate(m, q); err != nil || charged[m] != want {
					t.Fatalf("book %s: %s of %s charged %d, as a whole %d, %v", b.Version, q, m, charged[m], want, err)
				}
			}
			report, err := b.Rerate(stretch)
			if err != nil {
				t.Fatal(err)
			}
			var sum Nano
			for _, n := range charged {
				sum += n
			}
			if report.Total != sum {
				t.Fatalf("book %s: charged %d, rated again %d", b.Version, sum, report.Total)
			}
		}
	}
}

// advance goes through a crash before the commit, the commit, a replay after
// it and the account's way to the disk and back.
func advance(t *testing.T, r *rand.Rand, a Account, s Shelf, now time.Time, u Usage, charged map[Meter]Nano) Account {
	t.Helper()
	before, err := json.Marshal(a)
	if err != nil {
		t.Fatal(err)
	}
	if r.IntN(4) == 0 {
		if _, _, err := a.Advance(s, now, u); err != nil {
			t.Fatal(err)
		}
	}
	next, charges, err := a.Advance(s, now, u)
	if err != nil {
		t.Fatal(err)
	}
	if after, _ := json.Marshal(a); string(after) != string(before) {
		t.Fatalf("the account changed under way: %s, was %s", after, before)
	}
	b, _ := s.At(now)
	for _, c := range charges {
		if charged == nil || c.Amount < 0 || c.Quantity.IsZero() || c.Book != b.Version {
			t.Fatalf("at %s, book %s: charge %+v", now, b.Version, c)
		}
		charged[c.Meter] += c.Amount
	}
	if _, again, err := next.Advance(s, now, u); err != nil || len(again) != 0 {
		t.Fatalf("a replay charged %+v, %v", again, err)
	}
	var kept Account
	if text, err := json.Marshal(next); err != nil || json.Unmarshal(text, &kept) != nil || !reflect.DeepEqual(kept, next) {
		t.Fatalf("kept as %s, %v", text, err)
	}
	return kept
}

func TestAccountBooks(t *testing.T) {
	old, dear := testBook(), testBook()
	dear.Version, dear.From = "dear", nov.Add(time.Hour)
	dear.Prices[MeterCPU] = price("1", 0, "cpu-second")
	cpu := func(s uint64) Usage { return Usage{MeterCPU: Count(s * 1e9)} }
	step := func(a Account, s Shelf, now time.Time, u Usage, book string, amount Nano) Account {
		t.Helper()
		next, charges, err := a.Advance(s, now, u)
		if err != nil || len(charges) != 1 || charges[0].Book != book || charges[0].Amount != amount {
			t.Fatalf("at %s: %+v, %v; want %d with book %s", now, charges, err, amount, book)
		}
		return next
	}
	s := shelf(t, dear, old)
	var a Account
	a = step(a, s, nov.Add(-time.Minute), cpu(1), NoBook, 0) // before all books
	a = step(a, s, nov.Add(time.Minute), cpu(2), NoBook, 0)  // the piece began before
	a = step(a, s, nov.Add(2*time.Minute), cpu(3), "2026-11", 11_000)
	a = step(a, s, nov.Add(2*time.Hour), cpu(4), "2026-11", 11_000)
	a = step(a, s, nov.Add(3*time.Hour), cpu(5), "dear", Unit)
	// The book is taken off the shelf: the piece goes to the one in force.
	a = step(a, shelf(t, old), nov.Add(4*time.Hour), cpu(6), "2026-11", 11_000)
	a = step(a, Shelf{}, nov.Add(5*time.Hour), cpu(7), NoBook, 0)
	a = step(a, s, nov.Add(5*time.Hour), cpu(8), NoBook, 0)
	a = step(a, s, nov.Add(5*time.Hour), cpu(9), "dear", Unit)
	step(Account{}, s, nov.Add(5*time.Hour), cpu(1), "dear", Unit) // a new account pays at once

	if same, charges, err := a.Advance(s, nov.Add(6*time.Hour), Usage{MeterCPU: MaxQuantity}); sandbox.CodeOf(err) != "amount_too_large" || charges != nil || !reflect.DeepEqual(same, a) {
		t.Errorf("too much: %+v, %v", charges, err)
	}
	// A meter without a price is counted.
	step(a, s, nov.Add(6*time.Hour), Usage{MeterNetIn: Count(5)}, "dear", 0)
}

func TestEntry(t *testing.T) {
	ok := Entry{Key: "run-1/2", Kind: KindCost, Scope: ScopeProject, ID: "p1", Amount: 5}
	tokens := Entry{Key: "k", Kind: KindCost, Scope: ScopeSandbox, ID: "x", Meter: "model.tokens", Quantity: Count(10)}
	with := func(e Entry, change func(*Entry)) Entry { change(&e); return e }
	for _, e := range []Entry{ok, tokens, with(ok, func(e *Entry) { e.Kind, e.Amount = KindRevenue, -5 })} {
		if err := e.Validate(); err != nil {
			t.Errorf("%+v: %v", e, err)
		}
	}
	for what, e := range map[string]Entry{
		"no key":           with(ok, func(e *Entry) { e.Key = "" }),
		"key with a space": with(ok, func(e *Entry) { e.Key = "a b" }),
		"kind":             with(ok, func(e *Entry) { e.Kind = "gift" }),
		"scope":            with(ok, func(e *Entry) { e.Scope = "world" }),
		"nobody":           with(ok, func(e *Entry) { e.ID = "" }),
		"nothing":          with(ok, func(e *Entry) { e.Amount = 0 }),
		"both":             with(tokens, func(e *Entry) { e.Amount = 1 }),
		"no meter":         with(ok, func(e *Entry) { e.Quantity = Count(1) }),
		"no quantity":      with(tokens, func(e *Entry) { e.Quantity = Count(0) }),
		"own meter":        with(tokens, func(e *Entry) { e.Meter = MeterCPU }),
		"bad meter":        with(tokens, func(e *Entry) { e.Meter = "A" }),
		"revenue of token": with(tokens, func(e *Entry) { e.Kind = KindRevenue }),
		"note":             with(ok, func(e *Entry) { e.Note = "\xff" }),
	} {
		if err := e.Validate(); !is(err, sandbox.ErrInvalid, "invalid_entry") {
			t.Errorf("%s: %v", what, err)
		}
	}
	b := testBook()
	for _, c := range []struct {
		e    Entry
		b    *Book
		code string
	}{{ok, nil, ""}, {ok, &b, ""}, {tokens, &b, ""}, {tokens, nil, "unknown_meter"}, {with(tokens, func(e *Entry) { e.Meter = "gpu" }), &b, "unknown_meter"}} {
		if err := c.e.Check(c.b); (err != nil || c.code != "") && sandbox.CodeOf(err) != c.code {
			t.Errorf("%s: %v, want %q", c.e.Meter, err, c.code)
		}
	}
	again := with(ok, func(e *Entry) { e.At = nov })
	if err := again.Repeats(ok); err != nil {
		t.Errorf("the same again: %v", err)
	}
	again.Amount++
	if err := again.Repeats(ok); !is(err, sandbox.ErrConflict, "idempotency_mismatch") {
		t.Errorf("another one with the same key: %v", err)
	}
}
