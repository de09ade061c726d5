package server_test

import (
	"errors"
	"testing"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestCosts: entries by amount and by quantity, once for a key, listed by page
// and reported.
func TestCosts(t *testing.T) {
	d := start(t)
	c := d.client(t)
	sb, err := c.Create(t.Context(), sandbox.Spec{Name: "dev", Project: "prj_a"}, "")
	if err != nil {
		t.Fatal(err)
	}
	req := cost.EntryRequest{Kind: cost.KindCost, Sandbox: "dev", Meter: "model.tokens", Quantity: cost.Count(2_000_000), Key: "k"}
	first, err := c.PostEntry(t.Context(), req)
	if err != nil || first.Charged != 300_000_000 || first.ID != string(sb.ID) || first.Book == "" {
		t.Fatalf("%+v, %v", first, err)
	}
	if again, err := c.PostEntry(t.Context(), req); err != nil || again != first {
		t.Errorf("sent again: %+v, %v", again, err)
	}
	req.Quantity = cost.Count(1)
	if _, err := c.PostEntry(t.Context(), req); !errors.Is(err, sandbox.ErrConflict) || sandbox.CodeOf(err) != "idempotency_mismatch" {
		t.Errorf("another under its key: %v", err)
	}
	if p, err := c.PostEntry(t.Context(), cost.EntryRequest{Kind: cost.KindRevenue, Project: "prj_a", Amount: 1_500_000_000}); err != nil || p.Kind != cost.KindRevenue || p.Charged != 1_500_000_000 {
		t.Errorf("%+v, %v", p, err)
	}
	for name, bad := range map[string]cost.EntryRequest{
		"invalid_scope": {Kind: cost.KindCost, Amount: 1}, "invalid_entry": {Kind: cost.KindCost, Owner: "uid:1"},
		"sandbox_not_found": {Kind: cost.KindCost, Sandbox: "nobody", Amount: 1}, "unknown_meter": {Kind: cost.KindCost, Sandbox: "dev", Meter: "pages", Quantity: cost.Count(1)},
		"invalid_project": {Kind: cost.KindCost, Project: "shop", Amount: 1},
	} {
		if _, err := c.PostEntry(t.Context(), bad); sandbox.CodeOf(err) != name {
			t.Errorf("%+v: %v, want %s", bad, err, name)
		}
	}
	for range 250 {
		if _, err := c.PostEntry(t.Context(), cost.EntryRequest{Kind: cost.KindCost, Owner: "uid:1", Amount: 1}); err != nil {
			t.Fatal(err)
		}
	}
	for most, want := range map[int]int{0: 252, 5: 5, 150: 150} {
		n := 0
		last := int64(1 << 62)
		for e, err := range c.Entries(t.Context(), cost.EntryQuery{Limit: most}) {
			if err != nil || e.Number >= last {
				t.Fatalf("%+v, %v", e, err)
			}
			last = e.Number
			n++
		}
		if n != want {
			t.Errorf("%d entries of at most %d, want %d", n, most, want)
		}
	}
	if s, err := c.Statement(t.Context(), cost.StatementQuery{By: "project"}); err != nil || s.Total.Revenue != cost.SumOf(1_500_000_000) || s.Total.Cost != cost.SumOf(300_000_250) || s.Total.ROI == nil {
		t.Errorf("%+v, %v", s, err)
	}
	if books, err := c.Prices(t.Context()); err != nil || len(books) != 1 || books[0].Prices["model.tokens"].Per != 1_000_000 {
		t.Errorf("%+v, %v", books, err)
	}
}
