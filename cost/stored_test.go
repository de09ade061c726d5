package cost

import (
	"math/big"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestPercent(t *testing.T) {
	r := random(t)
	for _, c := range []struct {
		limit, spent Quantity
		want         int64
	}{
		{Count(3), Count(2), 66},
		{Count(100), Count(0), 0},
		{Count(100), Count(250), 250},
		{Quantity{}, Count(5), 0},
		{Product(1<<63, 200), Product(1<<63, 199), 99},
		{Count(1), Quantity{hi: 1 << 50}, 1<<63 - 1},
	} {
		if got := (Budget{Limit: c.limit}).Percent(c.spent); got != c.want {
			t.Errorf("%s of %s are %d%%, want %d", c.spent, c.limit, got, c.want)
		}
	}
	for range 2000 {
		limit, spent := anyQuantity(r, 110), anyQuantity(r, 110)
		if limit.IsZero() {
			continue
		}
		exact := new(big.Int).Mul(spent.big(), big.NewInt(100))
		exact.Quo(exact, limit.big())
		got := (Budget{Limit: limit}).Percent(spent)
		if exact.IsInt64() && exact.Int64() < 1<<50 && (got < exact.Int64()-1 || got > exact.Int64()+1) {
			t.Fatalf("%s of %s are %d%%, want %s", spent, limit, got, exact)
		}
	}
}

func TestBudgetRequest(t *testing.T) {
	b, err := BudgetRequest{Owner: "uid:1", Meter: MeterMoney, Limit: "2.5"}.Budget()
	if err != nil || b.Period != Total || len(b.At) != 2 || b.Limit != Count(2_500_000_000) || b.Scope != ScopeOwner {
		t.Errorf("%+v, %v", b, err)
	}
	if b, err := (BudgetRequest{Agent: "scraper_1", Meter: "tokens", Limit: "100", Period: Day}).Budget(); err != nil || b.Scope != ScopeAgent || b.ID != "scraper_1" {
		t.Errorf("of an agent: %+v, %v", b, err)
	}
	if _, err := (BudgetRequest{Agent: "scraper_1", Owner: "uid:1", Meter: "tokens", Limit: "100"}).Budget(); sandbox.CodeOf(err) != "invalid_scope" {
		t.Errorf("of an agent and its owner: %v", err)
	}
	for code, bad := range map[string]BudgetRequest{
		"invalid_scope": {Meter: MeterMoney, Limit: "1"}, "invalid_limit": {Owner: "o", Meter: MeterMoney, Limit: "-1"}, "invalid_meter": {Owner: "o", Limit: "1"},
		"invalid_budget": {Owner: "o", Meter: MeterMoney, Limit: "1", Period: "week"},
	} {
		if _, err := bad.Budget(); sandbox.CodeOf(err) != code {
			t.Errorf("%+v: %v, want %s", bad, err, code)
		}
	}
	if k := NewBudgetKey(); len(k) != 14 || k[:2] != "bg" || k == NewBudgetKey() {
		t.Errorf("key %q", k)
	}
}
