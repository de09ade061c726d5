package cost

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// life makes random totals that rise from day to day.
func life(r *rand.Rand, days int) map[time.Time]sandbox.Meters {
	all := map[time.Time]sandbox.Meters{}
	var v [sandbox.MeterCount]int64
	for d := range days {
		for i := range v {
			if r.IntN(3) > 0 {
				v[i] += r.Int64N(1 << (1 + r.IntN(40)))
			}
		}
		all[nov.AddDate(0, 0, d-days/2)] = sandbox.MetersOf(v)
	}
	return all
}

// TestStretchesAddUp: however a span with changes of prices in it is cut, the
// charges of the pieces add up to that of the whole, and quantities to what was
// used.
func TestStretchesAddUp(t *testing.T) {
	r := random(t)
	second, third := testBook(), testBook()
	second.Version, second.From = "second", nov.AddDate(0, 0, 5)
	second.Prices = map[Meter]Price{MeterCPU: price("0.000017", 3, "cpu-second"), MeterMemory: price("7", 11, "gib-hour")}
	third.Version, third.From = "third", nov.AddDate(0, 0, 9)
	s := shelf(t, testBook(), second, third)
	for range 100 {
		totals := life(r, 40)
		at := func(x time.Time) Usage {
			m, ok := totals[x]
			if !ok {
				t.Fatalf("asked for the totals at %s", x)
			}
			return UsageOf(m)
		}
		from, to := nov.AddDate(0, 0, -19+r.IntN(19)), nov.AddDate(0, 0, r.IntN(20))
		var whole, parts Bill
		add := func(b *Bill, from, to time.Time) {
			charges, err := ChargePieces(s.Stretches(from, to), at)
			if err == nil {
				err = b.Add(charges...)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		add(&whole, from, to)
		for a := from; a.Before(to); {
			b := a.AddDate(0, 0, 1+r.IntN(6))
			if b.After(to) {
				b = to
			}
			add(&parts, a, b)
			a = b
		}
		if whole.Total() != parts.Total() || !slices.Equal(whole.Charges(), parts.Charges()) {
			t.Fatalf("from %s to %s: the whole is %v, its parts are %v", from, to, whole.Charges(), parts.Charges())
		}
		used := Usage{}
		for _, c := range whole.Charges() {
			var err error
			if used, err = used.Plus(Usage{c.Meter: c.Quantity}); err != nil {
				t.Fatal(err)
			}
		}
		for m, q := range at(to).Since(at(from)) {
			if used[m] != q {
				t.Fatalf("%s of %s charged, %s used", used[m], m, q)
			}
		}
	}
}

// TestRerated: with one book all the time, the charge is that of the totals.
func TestRerated(t *testing.T) {
	b := testBook()
	totals := map[time.Time]sandbox.Meters{nov: {CPU: 3_000_001}, nov.AddDate(0, 0, 1): {CPU: 5_000_000, Starts: 2}}
	charges, err := ChargePieces(Rerated(&b, nov, nov.AddDate(0, 0, 1)), func(x time.Time) Usage { return UsageOf(totals[x]) })
	if err != nil || len(charges) != 2 {
		t.Fatalf("%v, %v", charges, err)
	}
	if c := charges[0]; c.Meter != MeterCPU || c.Quantity != Count(1_999_999_000) || c.Amount != SumOf(55_000-33_000) {
		t.Errorf("%+v", c)
	}
	if c := charges[1]; c.Amount != SumOf(200_000) || c.Book != "2026-11" {
		t.Errorf("%+v", c)
	}
	// Before any book what is used is free, and told.
	charges, err = ChargePieces(shelf(t, b).Stretches(time.Time{}, nov), func(time.Time) Usage { return Usage{MeterCPU: Count(7)} })
	if err != nil || len(charges) != 1 || charges[0] != (Charge{NoBook, MeterCPU, Count(7), Sum{}}) {
		t.Errorf("%v, %v", charges, err)
	}
}

func TestReopen(t *testing.T) {
	used := testBook()
	seen := nov.AddDate(0, 0, 20)
	kept := []Kept{{Book: used, Fingerprint: used.Fingerprint(), Until: seen}}
	later, early, dearer, noon := testBook(), testBook(), testBook(), testBook()
	later.Version, later.From = "later", nov.AddDate(0, 1, 0)
	early.Version, early.From = "early", nov.AddDate(0, 0, 3)
	dearer.Prices[MeterCPU] = price("1", 1, "cpu-second")
	noon.From = nov.Add(12 * time.Hour)
	for name, c := range map[string]struct {
		books []Book
		kept  []Kept
		code  string
		in    []string // the books there are then
	}{
		"first":          {[]Book{used}, nil, "", []string{"2026-11"}},
		"same":           {[]Book{used}, kept, "", []string{"2026-11"}},
		"new one later":  {[]Book{used, later}, kept, "", []string{"2026-11", "later"}},
		"gone":           {[]Book{later}, kept, "", []string{"2026-11", "later"}},
		"none":           {nil, kept, "", []string{"2026-11"}},
		"changed":        {[]Book{dearer}, kept, "prices_changed", nil},
		"changed unused": {[]Book{dearer}, nil, "", []string{"2026-11"}},
		"into the past":  {[]Book{used, early}, kept, "prices_changed", nil},
		"past, unused":   {[]Book{used, early}, nil, "", []string{"2026-11", "early"}},
		"at noon":        {[]Book{noon}, nil, "invalid_prices", nil},
	} {
		s, err := Reopen(c.books, c.kept)
		if (err == nil) != (c.code == "") || err != nil && sandbox.CodeOf(err) != c.code {
			t.Errorf("%s: %v, want code %q", name, err, c.code)
			continue
		}
		var in []string
		for _, b := range s.Books() {
			in = append(in, b.Version)
		}
		if !slices.Equal(in, c.in) {
			t.Errorf("%s: books %v, want %v", name, in, c.in)
		}
	}
	// A book comes back from its record as it was.
	text, err := json.Marshal(used)
	var again Book
	if err == nil {
		err = json.Unmarshal(text, &again)
	}
	if err != nil || again.Fingerprint() != used.Fingerprint() {
		t.Errorf("%v, %s", err, text)
	}
}

func TestROI(t *testing.T) {
	for _, c := range []struct {
		profit, cost Nano
		want         int64
	}{{3, 1, 30_000}, {-1, 3, -3334}, {1, 3, 3333}, {0, 5, 0}, {-5, 5, -10_000}, {MaxNano, MaxNano, 10_000}} {
		if got := ROI(SumOf(c.profit), SumOf(c.cost)); got == nil || *got != c.want {
			t.Errorf("%s by %s: %v, want %d", c.profit, c.cost, got, c.want)
		}
	}
	if ROI(SumOf(1), Sum{}) != nil || ROI(SumOf(1), SumOf(-1)) != nil || ROI(SumOf(MaxNano), SumOf(1)) != nil {
		t.Error("an ROI without cost, or one that does not fit")
	}
	l := StatementLine{Usage: SumOf(10), Outside: SumOf(-3), Revenue: SumOf(5)}
	if l.Finish(); l.Cost != SumOf(7) || l.Profit != SumOf(-2) || *l.ROI != -2858 {
		t.Errorf("%+v", l)
	}
	l = StatementLine{Usage: SumOf(MaxNano), Outside: SumOf(MaxNano)}
	if l.Finish(); l.Cost.String() != "18446744073.709551614" || l.Profit != l.Cost.Neg() || *l.ROI != -10_000 {
		t.Errorf("two of the largest amounts: %+v", l)
	}
}

// TestNamesOfTargets: of budgets and entries, as of who may have keys; the
// controls are names that owners and agents have.
func TestNamesOfTargets(t *testing.T) {
	for name, ok := range map[string]bool{
		"alice": true, "uid:1000": true, "a.b_c-1": true,
		"x\u202e\x1b[31m\n": false, "Alice": false, "uid:01": false, "uid:4294967296": false, "uid-1": false, "uid:": false, "a b": false,
	} {
		_, err := BudgetRequest{Owner: name, Meter: MeterMoney, Limit: "1"}.Budget()
		_, eerr := EntryRequest{Owner: name, Amount: 1}.Entry(time.Unix(0, 0))
		for _, err := range []error{err, eerr} {
			if ok && err != nil || !ok && sandbox.CodeOf(err) != "invalid_owner" {
				t.Errorf("owner %q: %v", name, err)
			}
		}
	}
	for name, code := range map[string]string{
		"sandbox_prj_abcdefghijkl_bot_abcdefgh": "", "Planner of the team": "", strings.Repeat("a", 256): "",
		"x\u202e\n": "invalid_name", "\x1b[31m": "invalid_name", strings.Repeat("a", 257): "invalid_name",
	} {
		if _, err := (BudgetRequest{Agent: name, Meter: MeterMoney, Limit: "1"}).Budget(); (err == nil) != (code == "") || err != nil && sandbox.CodeOf(err) != code {
			t.Errorf("agent %q: %v", name, err)
		}
	}
}

// TestLimitsAreKeptAsWritten: what is finer than is kept is refused, and the
// text names bounds that hold.
func TestLimitsAreKeptAsWritten(t *testing.T) {
	for _, c := range []struct {
		meter       Meter
		limit, tell string // empty: taken
	}{
		{MeterWall, "1.001s", ""},
		{MeterWall, "1.0005s", "in whole milliseconds, from 0.001 "},
		{MeterWall, "1.0005 second", "in whole milliseconds"},
		{MeterStarts, "2 start", ""},
		{MeterStarts, "1.5 start", "a whole number, from 1 "},
		{MeterCPU, "2562047h", ""},
		{MeterCPU, "2562048h", "a duration of up to 2562047h"},
		{MeterCPU, "18446744073 cpu-hour", ""},
		{"tokens", maxLimit.String(), ""},
		{"tokens", MaxQuantity.String(), "to " + maxLimit.String()},
	} {
		_, err := c.meter.ParseLimit(c.limit)
		if (err == nil) != (c.tell == "") || err != nil && !strings.Contains(err.Error(), c.tell) {
			t.Errorf("%s %s: %v, want %q", c.meter, c.limit, err, c.tell)
		}
	}
}

func TestOneTarget(t *testing.T) {
	for _, c := range []struct {
		sb, project, owner string
		scope              Scope
	}{{"dev", "", "", ScopeSandbox}, {"", "prj_a", "", ScopeProject}, {"", "", "uid:1", ScopeOwner}, {"", "", "", ""}, {"a", "prj_a", "", ""}, {"", "shop", "", ""}} {
		scope, id, err := OneTarget(c.sb, c.project, c.owner)
		if scope != c.scope || (err == nil) != (c.scope != "") || err == nil && id != c.sb+c.project+c.owner {
			t.Errorf("%+v: %s %s, %v", c, scope, id, err)
		}
	}
}
