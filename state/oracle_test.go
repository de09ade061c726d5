package state

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"os"
	"path/filepath"
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

// TestEntriesAgainstBig sends entries of any numbers and cancels some: what is
// taken in, what is refused, and what all come to is as the oracle says.
func TestEntriesAgainstBig(t *testing.T) {
	r, d, n := anySeed(t), open(t), soak(30_000, 1500)
	book := tokenBook("v", 7)
	sum, tokens, refused, cancelled := new(big.Int), new(big.Int), 0, 0
	var taken []cost.Posted
	limit, all := big.NewInt(int64(cost.MaxEntry)), new(big.Int).Mul(big.NewInt(1e12), big.NewInt(1e9))
	for i := range n {
		e := cost.Entry{Key: fmt.Sprint(i), Kind: cost.KindCost, Scope: cost.ScopeOwner, ID: "uid:1", At: ledgerStart, Amount: cost.Nano(anyAmount(r))}
		if r.IntN(2) == 0 {
			e.Amount, e.Meter, e.Quantity = 0, "model.tokens", cost.Product(uint64(max(anyAmount(r), 0)), 1+r.Uint64N(3))
		}
		p, _, err := d.PutEntry(t.Context(), e, book, "")
		amount := big.NewInt(int64(e.Amount))
		ok := e.Amount != 0 && amount.CmpAbs(limit) <= 0 && new(big.Int).Add(sum, amount).CmpAbs(all) <= 0
		if e.Meter != "" {
			q, _ := new(big.Int).SetString(e.Quantity.String(), 10)
			after := new(big.Int).Add(tokens, q)
			ok = q.Sign() > 0 && q.Cmp(big.NewInt(int64(cost.MaxEntryQuantity))) <= 0 && after.Cmp(big.NewInt(1e18)) <= 0
			if ok {
				tokens = after
			}
		} else if ok {
			sum.Add(sum, amount)
		}
		if ok != (err == nil) || err != nil && sandbox.ClassOf(err) == nil {
			t.Fatalf("entry %+v: %v, the oracle says %v", e, err, ok)
		}
		if !ok {
			refused++
			continue
		}
		taken = append(taken, p)
		if r.IntN(10) == 0 {
			i := r.IntN(len(taken))
			c := taken[i]
			taken = append(taken[:i], taken[i+1:]...)
			for _, existed := range []bool{false, true} { // again is the same
				if x, again, err := d.CancelEntry(t.Context(), c.Number, "wrong", "uid:0", ledgerStart.Add(time.Hour)); err != nil || x.Charged != -c.Charged || x.Cancels != c.Number || again != existed {
					t.Fatalf("%+v, %v", x, err)
				}
			}
			cancelled++
			if c.Meter == "" {
				sum.Sub(sum, big.NewInt(int64(c.Charged)))
			} else {
				q, _ := new(big.Int).SetString(c.Quantity.String(), 10)
				tokens.Sub(tokens, q)
			}
		}
	}
	got := map[cost.Meter]EntrySum{}
	sums, err := d.EntrySums(t.Context(), "", cost.EntryQuery{})
	for _, s := range sums {
		got[s.Meter] = s
	}
	if err != nil || got[""].Amount.String() != decimal(sum) || got["model.tokens"].Quantity.String() != tokens.String() {
		t.Errorf("%+v, %v, want %s and %s", sums, err, decimal(sum), tokens)
	}
	if refused == 0 || cancelled == 0 {
		t.Errorf("%d refused, %d cancelled", refused, cancelled)
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
