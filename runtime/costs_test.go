package runtime

import (
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// day is the beginning of a day, so many from today.
func day(n int) time.Time { return time.Now().UTC().Truncate(24*time.Hour).AddDate(0, 0, n) }

func priced(version string, from time.Time, cpu cost.Nano) cost.Book {
	return cost.Book{Version: version, Currency: "EUR", From: from, Prices: map[cost.Meter]cost.Price{
		cost.MeterCPU: {Price: cpu, Unit: "cpu-second"}, cost.MeterStarts: {Price: 100_000, Unit: "start"},
		"model.tokens": {Price: cpu, Per: 1_000_000, Unit: "token"},
	}}
}

func withPrices(books ...cost.Book) func(*Config) {
	return func(c *Config) { c.Prices, c.Usage.Interval = books, time.Millisecond }
}

func (k *kernel) burn(id sandbox.ID, micros uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.cpu[id] += micros
}

func spent(t *testing.T, h *house, q cost.StatementQuery) cost.Statement {
	t.Helper()
	s, err := h.Statement(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestStatement: what a sandbox used is charged with the book in force, beside
// what comes from outside, also once it is gone, and after a restart; and anew
// with another book.
func TestStatement(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	now, next := priced("now", day(-3), 11_000), priced("next", day(+3), 2_000_000)
	h := openWith(t, k, dir, withPrices(now, next))
	sb, err := h.Create(t.Context(), sandbox.CreateRequest{Spec: sandbox.Spec{Project: "prj_a", Name: "dev"}, Actor: "uid:1"})
	if err != nil {
		t.Fatal(err)
	}
	k.burn(sb.ID, 2_000_000)
	for _, req := range []cost.EntryRequest{
		{Sandbox: "dev", Meter: "model.tokens", Quantity: cost.Count(500_000), Kind: cost.KindCost, Key: "t"},
		{Sandbox: "dev", Meter: "model.tokens", Quantity: cost.Count(500_000), Kind: cost.KindCost, Key: "t"}, // sent again
		{Project: "prj_a", Amount: 7, Kind: cost.KindCost},
		{Project: "prj_a", Amount: 7, Kind: cost.KindCost}, // without a key, another one
		{Sandbox: string(sb.ID), Amount: 1_000_000, Kind: cost.KindRevenue},
	} {
		if _, err := h.PostEntry(t.Context(), req); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := h.PostEntry(t.Context(), cost.EntryRequest{Sandbox: "nobody", Amount: 7, Kind: cost.KindCost}); sandbox.CodeOf(err) != "sandbox_not_found" {
		t.Errorf("an entry for nobody: %v", err)
	}
	if _, err := h.Remove(t.Context(), "dev", ""); err != nil {
		t.Fatal(err)
	}
	cpu := total(t, h).CPU
	usage := cost.Nano(cpu*11_000/1_000_000) + 100_000
	check := func(h *house) {
		t.Helper()
		s := spent(t, h, cost.StatementQuery{By: "project"})
		if len(s.Lines) != 1 || s.Currency != "EUR" {
			t.Fatalf("%+v", s)
		}
		l := s.Lines[0]
		if l.Key != "prj_a" || l.Usage != cost.SumOf(usage) || l.Outside != cost.SumOf(5_500+14) || l.Cost != cost.SumOf(usage+5_514) || l.Revenue != cost.SumOf(1_000_000) || l.Profit != l.Revenue.Sub(l.Cost) || l.Sandboxes != 1 || l.Meters.CPU != cpu {
			t.Errorf("%+v, want %s of usage", l, usage)
		}
		if anew := spent(t, h, cost.StatementQuery{Book: "next", Owner: "uid:1"}); anew.Total.Usage != cost.SumOf(cost.Nano(cpu*2)+100_000) || anew.Total.Outside != cost.SumOf(1_000_000) {
			t.Errorf("anew: %+v", anew.Total)
		}
	}
	check(h)
	h.crash()
	h = openWith(t, k, dir, withPrices(now, next))
	check(h)
	if _, err := h.Statement(t.Context(), cost.StatementQuery{Book: "other"}); sandbox.CodeOf(err) != "book_not_found" {
		t.Errorf("with a book nobody has: %v", err)
	}
	h.crash()
	// What was charged stays: the daemon does not start with another price, and
	// keeps a book that the configuration forgot.
	if _, err := tryOpen(t, k, dir, withPrices(priced("now", day(-3), 12_000))); sandbox.CodeOf(err) != "prices_changed" {
		t.Errorf("with changed prices: %v", err)
	}
	check(openWith(t, k, dir, withPrices(next)))
}

// TestChangeOfPrices: each day is charged with its own book, to the nano.
func TestChangeOfPrices(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	books := []cost.Book{priced("a", day(-10), 1_000_000), priced("b", day(-5), 3_000_000)}
	h := openWith(t, k, dir, withPrices(books...))
	sb := create(t, h, sandbox.Spec{})
	// As if it had been there for eight days, a second of cpu a day.
	sqlDo(t, dir, `UPDATE sandboxes SET created_at = created_at - 8 * 86400 * 1000000000`)
	h.crash()
	h = openWith(t, k, dir, withPrices(books...))
	var all []sandbox.Reading
	for d := -8; d <= 0; d++ {
		all = append(all, sandbox.Reading{Sandbox: sb.ID, At: day(d), Meters: sandbox.Meters{CPU: int64(d+8) * 1_000_000}, Status: sandbox.StatusRunning})
	}
	sqlDo(t, dir, `DELETE FROM readings; DELETE FROM ledger`)
	if err := h.db.PutReadings(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	s := spent(t, h, cost.StatementQuery{From: day(-8), To: day(0)})
	if s.Total.Usage != cost.SumOf(3*1_000_000+5*3_000_000) || len(s.Total.Charges) != 2 {
		t.Errorf("%+v", s.Total)
	}
	var sum cost.Sum
	for d := -8; d < 0; d++ {
		sum = sum.Add(spent(t, h, cost.StatementQuery{From: day(d), To: day(d + 1)}).Total.Usage)
	}
	if sum != s.Total.Usage {
		t.Errorf("the days come to %s, all of them to %s", sum, s.Total.Usage)
	}
}
