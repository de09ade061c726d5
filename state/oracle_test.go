package state

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// soak is the number at full length, or a small part of it.
func soak(full, short int) int {
	if os.Getenv("SANDBOXD_SOAK") == "1" {
		return full
	}
	return short
}

func anySeed(t *testing.T) *rand.Rand {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// edges are numbers at which sums, signs and bounds go wrong.
var edges = []int64{
	0, 1, -1, math.MaxInt64, math.MinInt64, math.MinInt64 + 1, 1 << 32, 1<<32 - 1, -1 << 32, int64(cost.MaxEntry), int64(cost.MaxEntry) + 1,
	-int64(cost.MaxEntry), -int64(cost.MaxEntry) - 1, int64(cost.MaxEntryQuantity), int64(cost.MaxEntryQuantity) + 1,
}

func anyAmount(r *rand.Rand) int64 {
	if r.IntN(4) == 0 {
		return edges[r.IntN(len(edges))]
	}
	return int64(r.Uint64()) >> r.UintN(64)
}

// TestSumsAgainstBig writes rows of any numbers below all checks, as a ledger of
// before there were bounds has them, and adds them up in numbers of any size.
func TestSumsAgainstBig(t *testing.T) {
	r, d, n := anySeed(t), open(t), soak(1_000_000, 30_000)
	type row struct {
		owner            int
		at, amount, many int64
		meter            string
	}
	rows := make([]row, n)
	err := d.write(t.Context(), func(tx *tx) error {
		for i := range rows {
			x := row{owner: r.IntN(5), at: r.Int64N(1000), amount: anyAmount(r)}
			if r.IntN(2) == 0 {
				x.meter, x.many = "model.tokens", max(anyAmount(r), 0)
			}
			rows[i] = x
			if _, err := tx.exec(`INSERT INTO entries (scope, target, key, kind, at, amount, meter, quantity, book, note, actor, owner, project, upto)
				VALUES ('owner', ?1, ?2, 'cost', ?3, ?4, ?5, ?6, '', '', '', ?1, '', 0)`, fmt.Sprint(x.owner), fmt.Sprint(i), x.at, x.amount, x.meter, x.many); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	overflowed := false
	for _, span := range [][2]int64{{0, 1000}, {r.Int64N(500), 500 + r.Int64N(500)}} {
		want, bad := map[string]*[2]big.Int{}, 0
		for _, x := range rows {
			if x.at < span[0] || x.at >= span[1] {
				continue
			}
			abs := new(big.Int).Abs(big.NewInt(x.amount))
			if abs.Cmp(big.NewInt(int64(cost.MaxEntry))) > 0 || x.many > int64(cost.MaxEntryQuantity) {
				bad++
				continue
			}
			k := fmt.Sprint(x.owner, x.meter)
			if want[k] == nil {
				want[k] = &[2]big.Int{}
			}
			want[k][0].Add(&want[k][0], big.NewInt(x.amount))
			want[k][1].Add(&want[k][1], big.NewInt(x.many))
		}
		sums, err := d.EntrySums(t.Context(), "owner", cost.EntryQuery{From: time.UnixMilli(span[0]), To: time.UnixMilli(span[1])})
		if err != nil || len(sums) != len(want) {
			t.Fatalf("%d sums, want %d, %v", len(sums), len(want), err)
		}
		for _, s := range sums {
			w := want[s.Key+string(s.Meter)]
			if got := s.Amount.String(); got != decimal(&w[0]) || s.Quantity.String() != w[1].String() {
				t.Errorf("owner %s %s: %s and %s, want %s and %s", s.Key, s.Meter, got, s.Quantity, decimal(&w[0]), &w[1])
			}
			overflowed = overflowed || !w[0].IsInt64()
		}
		aside, err := d.Quarantined(t.Context(), cost.EntryQuery{From: time.UnixMilli(span[0]), To: time.UnixMilli(span[1])})
		if err != nil || len(aside) != min(bad, maxQuarantined) {
			t.Errorf("%d in quarantine, want %d, %v", len(aside), bad, err)
		}
	}
	if !overflowed { // the control
		t.Error("no sum was beyond 64 bits")
	}
	// And the control for the way of adding: the database's own sum gives up.
	var sum int64
	if err := d.reader.QueryRowContext(t.Context(), `SELECT sum(amount) FROM entries WHERE NOT beyond AND amount > 0`).Scan(&sum); err == nil {
		t.Errorf("sum() of SQLite came to %d", sum)
	}
}

// decimal writes billionths as cost.Sum does, by another way.
func decimal(n *big.Int) string {
	q, rem := new(big.Int).QuoRem(new(big.Int).Abs(n), big.NewInt(1e9), new(big.Int))
	s := q.String()
	if rem.Sign() != 0 {
		frac := fmt.Sprintf("%09d", rem)
		for frac[len(frac)-1] == '0' {
			frac = frac[:len(frac)-1]
		}
		s += "." + frac
	}
	if n.Sign() < 0 {
		s = "-" + s
	}
	return s
}

// ofEntry is all that reports tell entries apart by.
type ofEntry struct {
	scope          cost.Scope
	id             string
	owner, project string
	kind           cost.Kind
	meter          cost.Meter
	book           string
	at             int64
}

// total is what bounds and prices count by.
func (o ofEntry) total() ofEntry { o.owner, o.project, o.at = "", "", 0; return o }

// oracle adds entries up in numbers of any size: amounts, and quantities.
type oracle map[ofEntry]*[2]big.Int

func (o oracle) of(k ofEntry) *[2]big.Int {
	if o[k] == nil {
		o[k] = &[2]big.Int{}
	}
	return o[k]
}

func (o oracle) add(k ofEntry, amount, quantity *big.Int) {
	for _, k := range []ofEntry{k, k.total()} { // a total has no time
		x := o.of(k)
		x[0].Add(&x[0], amount)
		x[1].Add(&x[1], quantity)
	}
}

var zero, maxCharge, maxMany = new(big.Int), big.NewInt(int64(cost.MaxEntry)), big.NewInt(int64(cost.MaxEntryQuantity))

// judge says what becomes of an entry: its charge, or the code of its refusal.
func (o oracle) judge(k ofEntry, amount, quantity *big.Int, book *cost.Book) (charged *big.Int, code string) {
	charged = amount
	switch {
	case k.meter == "" && amount.Sign() == 0, k.meter != "" && (!k.meter.Custom() || quantity.Sign() == 0 || k.kind == cost.KindRevenue):
		return nil, "invalid_entry"
	case k.meter != "" && quantity.Cmp(maxMany) > 0:
		return nil, "entry_too_large"
	}
	had := o.of(k.total())
	if k.meter != "" {
		price, ok := cost.Price{}, false
		if book != nil {
			price, ok = book.Prices[k.meter]
		}
		if !ok {
			return nil, "unknown_meter"
		}
		rate := func(n *big.Int) *big.Int {
			x := new(big.Int).Mul(n, big.NewInt(int64(price.Price)))
			return x.Quo(x, big.NewInt(max(price.Per, 1)))
		}
		charged = new(big.Int).Sub(rate(new(big.Int).Add(&had[1], quantity)), rate(&had[1]))
	}
	sum, many := new(big.Int).Add(&had[0], charged), new(big.Int).Add(&had[1], quantity)
	switch {
	case charged.CmpAbs(maxCharge) > 0:
		return nil, "entry_too_large"
	case sum.CmpAbs(new(big.Int).Mul(maxCharge, big.NewInt(1000))) > 0 || many.Cmp(new(big.Int).Mul(maxMany, big.NewInt(1000))) > 0:
		return nil, "entries_too_large"
	}
	return charged, ""
}

// noNumbers are texts that no amount and no quantity is read from.
var noNumbers = []string{"NaN", "nan", "Inf", "-Inf", "1e30", "1E999", "0x10", "+1", "--1", "1.0000000001", "٣", "", "1 "}

// ledgerTargets are of every scope, some of one owner and project.
func ledgerTargets(t *testing.T, d *DB) (all []ofEntry) {
	for i := range 4 {
		p := params("")
		p.Sandbox.Owner, p.Sandbox.Spec.Project = fmt.Sprint("uid:", i%2), fmt.Sprint("prj_", i/2)
		sb, _, err := d.CreateSandbox(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, ofEntry{scope: cost.ScopeSandbox, id: string(sb.ID), owner: sb.Owner, project: sb.Spec.Project})
	}
	for i := range 2 {
		owner, prj := fmt.Sprint("uid:", i), fmt.Sprint("prj_", i)
		all = append(all, ofEntry{scope: cost.ScopeOwner, id: owner, owner: owner}, ofEntry{scope: cost.ScopeProject, id: prj, project: prj})
	}
	return all
}

// TestEntriesAgainstBig sends entries of any numbers, at the edges of days and
// months, some of them again, and cancels some: what is taken in, what is
// refused and how, and what all come to in each scope, period and kind is as
// the oracle says.
func TestEntriesAgainstBig(t *testing.T) {
	r, n, dir := anySeed(t), soak(1_000_000, 1500), t.TempDir()
	if n == 1_000_000 { // without waiting for a disk
		var err error
		if dir, err = os.MkdirTemp("/dev/shm", "ledger"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(dir) })
	}
	d := openAt(t, filepath.Join(dir, "state.db"))
	dear := tokenBook("dear", cost.MaxEntry)
	dear.Prices["model.tokens"] = cost.Price{Price: cost.MaxEntry, Unit: "token"} // one token is the largest entry
	books := []*cost.Book{tokenBook("v", 7), tokenBook("w", 999_999), dear, nil}
	books[1].Prices["calls"] = cost.Price{Price: cost.MaxNano, Per: 1 << 40, Unit: "call"}
	dollars := *tokenBook("dollars", 7)
	dollars.Currency, dollars.From = "USD", dollars.From.AddDate(0, 0, 1)
	if _, err := cost.NewShelf([]cost.Book{*books[0], dollars}); sandbox.CodeOf(err) != "invalid_prices" {
		t.Errorf("a book of another currency: %v", err)
	}
	month := time.Date(2026, 10, 1, 0, 0, 0, 0, time.UTC)
	var times []time.Time
	for _, edge := range []time.Time{month, month.AddDate(0, 0, 1), month.AddDate(0, 1, 0)} {
		times = append(times, edge.Add(-time.Nanosecond), edge, edge.Add(time.Millisecond-1), edge.In(time.FixedZone("", 14*3600)))
	}
	targets, ledger, seen := ledgerTargets(t, d), oracle{}, map[string]int{}
	type kept struct {
		cost.Posted
		key  ofEntry
		book *cost.Book
	}
	var some []kept // of those taken in
	for i := range n {
		k := targets[r.IntN(len(targets))]
		book, at := books[r.IntN(len(books))], times[r.IntN(len(times))]
		e := cost.Entry{Key: fmt.Sprint(i), Kind: cost.KindCost, Scope: k.scope, ID: k.id, At: at}
		amount, quantity, err := zero, zero, error(nil)
		if r.IntN(3) == 0 {
			e.Kind = cost.KindRevenue
		}
		text := ""
		if r.IntN(2) == 0 {
			amount = big.NewInt(anyAmount(r))
			if r.IntN(50) == 0 {
				amount = new(big.Int).Mul(amount, big.NewInt(anyAmount(r)))
			}
			text = decimal(amount)
		} else {
			e.Meter = []cost.Meter{"model.tokens", "model.tokens", "model.tokens", "calls", "cpu"}[r.IntN(5)]
			if r.IntN(10) > 0 {
				e.Kind = cost.KindCost
			}
			quantity = new(big.Int).Mul(big.NewInt(max(anyAmount(r), 0)), big.NewInt(1+r.Int64N(3)))
			if book == dear && r.IntN(4) > 0 {
				quantity = big.NewInt(r.Int64N(3))
			}
			text = quantity.String()
		}
		junk := r.IntN(100) == 0
		if junk {
			text = noNumbers[r.IntN(len(noNumbers))]
		}
		if e.Meter == "" {
			junk = junk || !amount.IsInt64()
			err = e.Amount.UnmarshalText([]byte(text))
		} else {
			err = e.Quantity.UnmarshalText([]byte(text))
		}
		if junk != (err != nil) {
			t.Fatalf("%q is read as %+v, %v", text, e, err)
		}
		if junk {
			seen["no number"]++
			continue
		}
		k.kind, k.meter, k.at = e.Kind, e.Meter, at.UTC().Truncate(time.Millisecond).UnixMilli()
		if e.Meter != "" && book != nil {
			k.book = book.Version
		}
		charged, code := ledger.judge(k, amount, quantity, book)
		p, existed, err := d.PutEntry(t.Context(), e, book, "")
		if (err == nil) != (code == "") || err != nil && sandbox.CodeOf(err) != code || existed {
			t.Fatalf("entry %+v: %v, the oracle says %q", e, err, code)
		}
		seen[code]++
		if err != nil {
			continue
		}
		if int64(p.Charged) != charged.Int64() {
			t.Fatalf("entry %+v is charged %s, want %s", e, p.Charged, decimal(charged))
		}
		ledger.add(k, charged, quantity)
		if x := (kept{p, k, book}); len(some) < 10_000 {
			some = append(some, x)
		} else {
			some[r.IntN(len(some))] = x
		}
		at2 := r.IntN(len(some))
		switch c := some[at2]; r.IntN(20) {
		case 0: // sent again, at another time
			e := c.Entry
			e.At = month
			if x, existed, err := d.PutEntry(t.Context(), e, c.book, ""); err != nil || !existed || x.Number != c.Number {
				t.Fatalf("again: %+v, %v", x, err)
			}
			e.Note = "other"
			if _, _, err := d.PutEntry(t.Context(), e, c.book, ""); sandbox.CodeOf(err) != "idempotency_mismatch" {
				t.Fatalf("another with its key: %v", err)
			}
		case 1, 2:
			some = append(some[:at2], some[at2+1:]...)
			for _, existed := range []bool{false, true} { // again is the same
				if x, again, err := d.CancelEntry(t.Context(), c.Number, "wrong", "uid:0", ledgerStart); err != nil || x.Charged != -c.Charged || x.Cancels != c.Number || again != existed || x.At.UnixMilli() != c.key.at {
					t.Fatalf("%+v, %v", x, err)
				}
			}
			seen["cancelled"]++
			q, _ := new(big.Int).SetString(c.Quantity.String(), 10)
			ledger.add(c.key, big.NewInt(-int64(c.Charged)), q.Neg(q))
		}
	}
	t.Logf("%d entries: %v", n, seen)
	for _, what := range []string{"", "no number", "cancelled", "invalid_entry", "unknown_meter", "entry_too_large", "entries_too_large"} {
		if seen[what] == 0 && (what != "entries_too_large" || n > 100_000) {
			t.Errorf("none was %q", what)
		}
	}
	spans := []cost.Span{{}}
	for _, at := range times {
		for _, p := range []cost.Period{cost.Day, cost.Month} {
			if s := p.Span(at); !slices.Contains(spans, s) {
				spans = append(spans, s)
			}
		}
	}
	beyond := 0
	for _, span := range spans {
		for _, by := range []string{"", "owner", "project", "sandbox"} {
			beyond += ledger.check(t, d, by, span, "")
			ledger.checkMetered(t, d, by, span)
		}
		ledger.check(t, d, "", span, cost.KindCost)
		ledger.check(t, d, "", span, cost.KindRevenue)
	}
	if beyond == 0 { // the control
		t.Error("no sum was beyond 64 bits")
	}
}

// key is what a report by this has a row of entries under.
func (o ofEntry) key(by string) string {
	switch {
	case by == "owner":
		return o.owner
	case by == "project":
		return o.project
	case by == "sandbox" && o.scope == cost.ScopeSandbox:
		return o.id
	}
	return ""
}

func query(s cost.Span) cost.EntryQuery { return cost.EntryQuery{From: s.Start, To: s.End} }

// check compares a report with the oracle; beyond is how many of its sums 64
// bits have no room for.
func (o oracle) check(t *testing.T, d *DB, by string, span cost.Span, kind cost.Kind) (beyond int) {
	t.Helper()
	type of struct {
		key   string
		kind  cost.Kind
		book  string
		meter cost.Meter
	}
	want := map[of]*[2]big.Int{}
	for k, x := range o {
		if k.at == 0 || !span.Contains(time.UnixMilli(k.at)) || kind != "" && k.kind != kind {
			continue
		}
		at := of{k.key(by), k.kind, k.book, k.meter}
		if want[at] == nil {
			want[at] = &[2]big.Int{}
		}
		want[at][0].Add(&want[at][0], &x[0])
		want[at][1].Add(&want[at][1], &x[1])
	}
	q := query(span)
	q.Kind = kind
	sums, err := d.EntrySums(t.Context(), by, q)
	if err != nil || len(sums) != len(want) {
		t.Fatalf("by %q in %v: %d sums, want %d, %v", by, span, len(sums), len(want), err)
	}
	for _, s := range sums {
		w := want[of{s.Key, s.Kind, s.Book, s.Meter}]
		if w == nil || s.Amount.String() != decimal(&w[0]) || s.Quantity.String() != w[1].String() {
			t.Errorf("by %q in %v: %+v, want %v", by, span, s, w)
		} else if !w[0].IsInt64() {
			beyond++
		}
	}
	return beyond
}

// checkMetered does so with the quantities that are rated anew.
func (o oracle) checkMetered(t *testing.T, d *DB, by string, span cost.Span) {
	t.Helper()
	type of struct {
		key   string
		meter cost.Meter
	}
	want, got := map[of]*[2]big.Int{}, map[of]*[2]big.Int{}
	add := func(m map[of]*[2]big.Int, at of, before, upto *big.Int) {
		if m[at] == nil {
			m[at] = &[2]big.Int{}
		}
		m[at][0].Add(&m[at][0], before)
		m[at][1].Add(&m[at][1], upto)
	}
	for k, x := range o {
		at := time.UnixMilli(k.at)
		if k.at == 0 || k.meter == "" || !span.End.IsZero() && !at.Before(span.End) {
			continue
		}
		before := zero
		if at.Before(span.Start) {
			before = &x[1]
		}
		add(want, of{k.key(by), k.meter}, before, &x[1])
	}
	all, err := d.MeteredEntries(t.Context(), by, query(span))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		before, _ := new(big.Int).SetString(m.Before.String(), 10)
		upto, _ := new(big.Int).SetString(m.Upto.String(), 10)
		add(got, of{m.Key, m.Meter}, before, upto)
	}
	for at, w := range want {
		if g := got[at]; g == nil || g[0].Cmp(&w[0]) != 0 || g[1].Cmp(&w[1]) != 0 || len(got) != len(want) {
			t.Errorf("metered by %q in %v: %v is %v, want %v", by, span, at, g, w)
		}
	}
}

// TestUsageAgainstBig adds up counters up to the largest of 64 bits: what does
// not fit into a line of a report stays at the bound, and of no sandbox and no
// owner more or less is told than there is.
func TestUsageAgainstBig(t *testing.T) {
	r, d, each := anySeed(t), open(t), soak(5000, 20)
	type one struct {
		owner string
		all   []sandbox.Reading
	}
	boxes := map[sandbox.ID]one{}
	for i := range soak(200, 20) {
		b := one{owner: fmt.Sprint("uid:", i%3)}
		id := bornAt(t, d, ledgerStart, b.owner, nil)
		b.all = walk(r, id, ledgerStart, each, time.Minute)
		bound := r.IntN(each)
		for j := range b.all { // from bound on near the end
			v := b.all[j].Meters.Values()
			for k := range v {
				if k%3 == i%3 && j >= bound {
					v[k] = math.MaxInt64 - int64(each-j)*r.Int64N(2)
				}
				if j > 0 {
					v[k] = max(v[k], b.all[j-1].Meters.Values()[k])
				}
			}
			b.all[j].Meters = sandbox.MetersOf(v)
		}
		if err := d.PutReadings(t.Context(), b.all); err != nil {
			t.Fatal(err)
		}
		boxes[id] = b
	}
	held := func(sums *[sandbox.MeterCount]big.Int) sandbox.Meters {
		var v [sandbox.MeterCount]int64
		for i := range v {
			if v[i] = math.MaxInt64; sums[i].IsInt64() {
				v[i] = sums[i].Int64()
			}
		}
		return sandbox.MetersOf(v)
	}
	beyond, long := 0, time.Duration(each)*time.Minute
	for range 10 {
		from := ledgerStart.Add(time.Duration(r.Int64N(int64(long / 2))).Truncate(time.Millisecond))
		to := from.Add(time.Duration(r.Int64N(int64(long))).Truncate(time.Millisecond) + time.Millisecond)
		sums := map[string]*[sandbox.MeterCount]big.Int{}
		for _, b := range boxes {
			if sums[b.owner] == nil {
				sums[b.owner] = &[sandbox.MeterCount]big.Int{}
			}
			for i, n := range minus(model(ledgerStart, b.all, to), model(ledgerStart, b.all, from)).Values() {
				x := &sums[b.owner][i]
				if x.Add(x, big.NewInt(n)); !x.IsInt64() {
					beyond++
				}
			}
		}
		report, err := d.UsageReport(t.Context(), sandbox.UsageQuery{By: "owner", From: from, To: to})
		if err != nil || len(report.Lines) != len(sums) {
			t.Fatalf("%+v, %v", report, err)
		}
		var all sandbox.Meters
		for _, l := range report.Lines {
			w := held(sums[l.Key])
			if l.Meters != w {
				t.Errorf("%s from %s to %s: %+v, want %+v", l.Key, from, to, l.Meters, w)
			}
			all = all.Add(w)
		}
		if report.Total.Meters != all {
			t.Errorf("all: %+v, want %+v", report.Total.Meters, all)
		}
		totals, err := d.Totals(t.Context(), TotalsQuery{Times: []time.Time{from, to}})
		if err != nil || len(totals) != len(boxes) {
			t.Fatalf("%d totals, %v", len(totals), err)
		}
		for _, x := range totals {
			b := boxes[x.Sandbox]
			if x.At[0] != model(ledgerStart, b.all, from) || x.At[1] != model(ledgerStart, b.all, to) {
				t.Errorf("%s: %+v", x.Sandbox, x)
			}
		}
	}
	if beyond == 0 { // the control
		t.Error("no sum was beyond 64 bits")
	}
}

// TestHeldOfTheVast: what quotas bound adds up to no less than there is.
func TestHeldOfTheVast(t *testing.T) {
	d := open(t)
	for i := range 5 {
		p := params("")
		p.Sandbox.ID, p.Sandbox.Owner = sandbox.NewID(), "vast"
		p.Sandbox.Spec.Limits = sandbox.Limits{CPUs: 4096, MemoryBytes: 1 << 62, DiskBytes: math.MaxInt64}
		if _, _, err := d.CreateSandbox(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		if err := d.AddVolume(t.Context(), sandbox.Volume{Name: fmt.Sprint(i), Owner: "vast", SizeBytes: math.MaxInt64}); err != nil {
			t.Fatal(err)
		}
		h, err := d.Held(t.Context(), "vast")
		if err != nil || h.Sandboxes != i+1 || h.CPUs != 4096*float64(i+1) || h.MemoryBytes < 1<<62 || h.DiskBytes < 9e18 {
			t.Errorf("%+v, %v", h, err)
		}
		if h = h.Plus(h); h.MemoryBytes < 1<<62 || h.DiskBytes != math.MaxInt64 {
			t.Errorf("twice: %+v", h)
		}
	}
}

// TestCancelEntry: a cancelled entry counts in no span, also of the past, and
// makes room below the bounds.
func TestCancelEntry(t *testing.T) {
	d := open(t)
	e := cost.Entry{Key: "k", Kind: cost.KindCost, Scope: cost.ScopeOwner, ID: "uid:1", At: ledgerStart, Meter: "model.tokens", Quantity: cost.Count(cost.MaxEntryQuantity)}
	p, _ := post(t, d, e, tokenBook("v", 1))
	for i := range 999 {
		e.Key = fmt.Sprint("k", i)
		post(t, d, e, tokenBook("v", 1))
	}
	e.Key, e.Quantity = "one-more", cost.Count(1)
	_, _, err := d.PutEntry(t.Context(), e, tokenBook("v", 1), "")
	want(t, err, sandbox.ErrTooLarge, "entries_too_large")
	c, existed, err := d.CancelEntry(t.Context(), p.Number, "a mistake", "uid:0", ledgerStart.Add(24*time.Hour))
	if err != nil || existed || !c.At.Equal(p.At) || !c.MadeAt.Equal(ledgerStart.Add(24*time.Hour)) || c.Note != "a mistake" {
		t.Fatalf("%+v, %v", c, err)
	}
	post(t, d, e, tokenBook("v", 1))
	if p, err = d.Entry(t.Context(), p.Number); err != nil || p.CancelledBy != c.Number {
		t.Errorf("%+v, %v", p, err)
	}
	_, _, err = d.CancelEntry(t.Context(), c.Number, "no", "uid:0", ledgerStart)
	want(t, err, sandbox.ErrConflict, "entry_is_cancellation")
	_, _, err = d.CancelEntry(t.Context(), 1<<40, "no", "uid:0", ledgerStart)
	want(t, err, sandbox.ErrNotFound, "entry_not_found")
	_, _, err = d.CancelEntry(t.Context(), p.Number, "", "uid:0", ledgerStart)
	want(t, err, sandbox.ErrInvalid, "invalid_reason")
}

// TestPoisonFromBefore opens a database as the version before left it, with
// entries that no sum of 64 bits has room for.
func TestPoisonFromBefore(t *testing.T) {
	script, err := os.ReadFile("testdata/v0012.sql")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "state.db")
	db := bare(t, path)
	for _, s := range []string{string(script), `INSERT INTO entries VALUES
		(10, 'owner', 'uid:9', 'a', 'cost', 1790000007000, 9223372036000000000, '', 0, '', 0, '', 'uid:9', 'uid:9', ''),
		(11, 'owner', 'uid:9', 'b', 'revenue', 1790000007000, -9223372036854775808, '', 0, '', 0, '', 'uid:9', 'uid:9', ''),
		(12, 'sandbox', 'sbaaaaaaaaaaaa', 'c', 'cost', 1790000007000, 0, 'model.tokens', 9223372036854775807, '2026-09', 9223372036854775807, '', 'inside', 'uid:7', '')`} {
		if _, err := db.Exec(s); err != nil {
			t.Fatal(err)
		}
	}
	_ = db.Close()
	d := openAt(t, path)
	aside, err := d.Quarantined(t.Context(), cost.EntryQuery{})
	if err != nil || len(aside) != 3 || aside[0].Number != 10 || !aside[2].Quarantined {
		t.Fatalf("%+v, %v", aside, err)
	}
	sums, err := d.EntrySums(t.Context(), "owner", cost.EntryQuery{})
	if err != nil || len(sums) != 1 || sums[0].Key != "uid:7" || sums[0].Quantity != cost.Count(1200) {
		t.Errorf("%+v, %v", sums, err)
	}
	// The target goes on where it was without the entry in quarantine.
	e := cost.Entry{Key: "d", Kind: cost.KindCost, Scope: cost.ScopeSandbox, ID: "sbaaaaaaaaaaaa", At: ledgerStart, Meter: "model.tokens", Quantity: cost.Count(1)}
	post(t, d, e, tokenBook("2026-09", 150_000_000))
	for _, e := range aside {
		if c, _, err := d.CancelEntry(t.Context(), e.Number, "poison", "uid:0", ledgerStart); err != nil || c.Quantity != e.Quantity {
			t.Errorf("%+v, %v", c, err)
		}
	}
	if aside, err = d.Quarantined(t.Context(), cost.EntryQuery{}); err != nil || len(aside) != 0 {
		t.Errorf("after they were cancelled: %+v, %v", aside, err)
	}
	if sums, err = d.EntrySums(t.Context(), "owner", cost.EntryQuery{}); err != nil || len(sums) != 1 || sums[0].Quantity != cost.Count(1201) {
		t.Errorf("%+v, %v", sums, err)
	}
}

// TestDamagedBudgetIsToldOf: a row that cannot be read keeps no other from
// being read.
func TestDamagedBudgetIsToldOf(t *testing.T) {
	d := open(t)
	b := cost.StoredBudget{Key: cost.NewBudgetKey(), Budget: cost.Budget{Scope: cost.ScopeOwner, ID: "uid:1", Meter: cost.MeterMoney, Limit: cost.Count(7), Period: cost.Day, At: cost.DefaultThresholds()}}
	other := b
	other.Key, other.ID = cost.NewBudgetKey(), "uid:2"
	for _, x := range []cost.StoredBudget{b, other} {
		if _, err := d.PutBudget(t.Context(), x); err != nil {
			t.Fatal(err)
		}
	}
	for _, damage := range []string{`{"limit":"1e9"`, `{"limit":"NaN"}`, `{"limit":"-1"}`, `{}`} {
		if _, err := d.writer.ExecContext(t.Context(), `UPDATE budgets SET record = ? WHERE id = ?`, damage, b.Key); err != nil {
			t.Fatal(err)
		}
		all, err := d.Budgets(t.Context())
		if err != nil || len(all) != 2 {
			t.Fatalf("%s: %+v, %v", damage, all, err)
		}
		for _, x := range all {
			if (x.Key == b.Key) != (x.Err != nil) || x.Key == b.Key && (x.ID != "uid:1" || x.Strongest() != cost.ActionStop) {
				t.Errorf("%s: %+v", damage, x)
			}
		}
	}
	if row, err := d.PutBudget(t.Context(), b); err != nil || row.Err != nil || row.Key != b.Key {
		t.Errorf("set anew: %+v, %v", row, err)
	}
}
