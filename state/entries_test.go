package state

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

func tokenBook(version string, price cost.Nano) *cost.Book {
	return &cost.Book{
		Version: version, Currency: "EUR", From: ledgerStart.Truncate(24 * time.Hour),
		Prices: map[cost.Meter]cost.Price{"model.tokens": {Price: price, Per: 1_000_000, Unit: "token"}},
	}
}

func entry(id sandbox.ID, key string) cost.Entry {
	return cost.Entry{Key: key, Kind: cost.KindCost, Scope: cost.ScopeSandbox, ID: string(id), At: ledgerStart.Add(time.Hour), Amount: 5}
}

func post(t *testing.T, d *DB, e cost.Entry, b *cost.Book) (cost.Posted, bool) {
	t.Helper()
	p, existed, err := d.PutEntry(t.Context(), e, b, "uid:0")
	if err != nil {
		t.Fatal(err)
	}
	return p, existed
}

// TestEntriesAreTakenOnce: by their key, for each target.
func TestEntriesAreTakenOnce(t *testing.T) {
	d := open(t)
	id, other := bornAt(t, d, ledgerStart, "uid:1", nil), bornAt(t, d, ledgerStart, "uid:2", nil)
	first, existed := post(t, d, entry(id, "k"), nil)
	if existed || first.Charged != 5 || first.Owner != "uid:1" || first.Actor != "uid:0" {
		t.Fatalf("%+v, %v", first, existed)
	}
	later := entry(id, "k")
	later.At = later.At.Add(time.Minute)
	if again, existed := post(t, d, later, nil); !existed || again != first {
		t.Errorf("sent again: %+v, %v; want %+v", again, existed, first)
	}
	if p, existed := post(t, d, entry(other, "k"), nil); existed || p.Number == first.Number {
		t.Errorf("the key of another: %+v, %v", p, existed)
	}
	changed := entry(id, "k")
	changed.Amount = 6
	_, _, err := d.PutEntry(t.Context(), changed, nil, "uid:0")
	want(t, err, sandbox.ErrConflict, "idempotency_mismatch")
	_, _, err = d.PutEntry(t.Context(), entry(sandbox.NewID(), "k"), nil, "")
	want(t, err, sandbox.ErrNotFound, "sandbox_not_found")
	// Nobody else's key takes an entry's place, before it or after.
	if p, existed, err := d.PutEntry(t.Context(), entry(id, "k"), nil, "alice"); err != nil || existed || p.Key != "k" || p.Number == first.Number {
		t.Errorf("the key of another sender: %+v, %v, %v", p, existed, err)
	}
	// Nor does one stand in the way of a cancellation.
	if _, _, err := d.PutEntry(t.Context(), entry(other, "cancel"), nil, "2"); err != nil {
		t.Fatal(err)
	}
	if p, _, err := d.CancelEntry(t.Context(), 2, "wrong", "uid:0", ledgerStart); err != nil || p.ID != string(other) {
		t.Errorf("cancel the entry of another target: %+v, %v", p, err)
	}
	if all, err := d.Entries(t.Context(), cost.EntryQuery{Limit: 10}); err != nil || len(all) != 5 || all[4] != first {
		t.Errorf("%+v, %v", all, err)
	}
	if _, err := d.writer.ExecContext(t.Context(), `UPDATE entries SET amount = 0`); err == nil {
		t.Error("an entry was changed")
	}
	// One of before senders were written with keys.
	if _, err := d.writer.ExecContext(t.Context(), `INSERT INTO entries SELECT 99, scope, target, 'old', kind, at, amount, meter, quantity, book, upto, note, actor, owner, project, NULL, NULL FROM entries WHERE number = ?`, first.Number); err != nil {
		t.Fatal(err)
	}
	if p, existed := post(t, d, entry(id, "old"), nil); !existed || p.Number != 99 || p.Key != "old" {
		t.Errorf("the key of an entry of before: %+v, %v", p, existed)
	}
}

// TestManySmallQuantities cost what one large one does, with each book.
func TestManySmallQuantities(t *testing.T) {
	d := open(t)
	rng := rand.New(rand.NewPCG(1, 2))
	id := bornAt(t, d, ledgerStart, "uid:1", nil)
	for _, b := range []*cost.Book{tokenBook("a", 7), tokenBook("b", 999_999)} {
		var sum cost.Nano
		var all uint64
		for range 200 {
			n := rng.Uint64N(100_000) + 1
			e := entry(id, string(sandbox.NewID()))
			e.Amount, e.Meter, e.Quantity = 0, "model.tokens", cost.Count(n)
			p, _ := post(t, d, e, b)
			if p.Book != b.Version {
				t.Fatalf("%+v", p)
			}
			sum += p.Charged
			all += n
		}
		if whole, err := b.Rate("model.tokens", cost.Count(all)); err != nil || cost.SumOf(sum) != whole || sum == 0 {
			t.Errorf("%d tokens in parts cost %s, in one %s, %v", all, sum, whole, err)
		}
	}
	e := entry(id, "unpriced")
	e.Amount, e.Meter, e.Quantity = 0, "pages", cost.Count(1)
	_, _, err := d.PutEntry(t.Context(), e, tokenBook("a", 7), "")
	want(t, err, sandbox.ErrInvalid, "unknown_meter")
	e.Meter, e.Quantity = "model.tokens", cost.Count(1<<63)
	_, _, err = d.PutEntry(t.Context(), e, tokenBook("a", 7), "")
	want(t, err, sandbox.ErrTooLarge, "entry_too_large")
}

// TestEntriesOfAProject: they are its owner's, also those from before entries
// of projects had one; the control is a project that nobody knows.
func TestEntriesOfAProject(t *testing.T) {
	d := open(t)
	p := aProject("shop")
	p.Owner = "bob"
	d.lab(t, func(tx project.Tx) error { return tx.PutProject(p) })
	for key, id := range map[string]string{"a": string(p.ID), "b": "prj_unknown"} {
		e := entry("", key)
		e.Scope, e.ID, e.Amount = cost.ScopeProject, id, 100
		got, _ := post(t, d, e, nil)
		if want := map[string]string{"a": "bob"}[key]; got.Owner != want {
			t.Errorf("an entry of %s is of %q, want %q", id, got.Owner, want)
		}
	}
	if err := d.write(t.Context(), func(tx *tx) error {
		_, err := tx.exec(`INSERT INTO entries (scope, target, key, kind, at, amount, meter, quantity, book, note, actor, owner, project, upto)
			SELECT scope, target, 'before', kind, at, 7, meter, quantity, book, note, actor, '', project, upto FROM entries WHERE target = ?`, string(p.ID))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	for owner, want := range map[string]int{"bob": 2, "alice": 0, "": 3} {
		all, err := d.Entries(t.Context(), cost.EntryQuery{Owner: owner, Limit: 10})
		if err != nil || len(all) != want {
			t.Errorf("entries of %q: %+v, %v, want %d", owner, all, err, want)
		}
		for _, e := range all {
			if owner != "" && e.Owner != owner {
				t.Errorf("an entry of %q says %q", owner, e.Owner)
			}
		}
	}
	sums, err := d.EntrySums(t.Context(), "owner", cost.EntryQuery{})
	if err != nil || len(sums) != 2 || sums[0].Key != "" || sums[0].Amount != cost.SumOf(100) || sums[1].Key != "bob" || sums[1].Amount != cost.SumOf(107) {
		t.Errorf("%+v, %v", sums, err)
	}
}

// TestEntrySums: entries count for their sandbox, its owner and its project, and
// go on to after the sandbox is pruned.
func TestEntrySums(t *testing.T) {
	d := open(t)
	p := params("")
	p.Sandbox.CreatedAt, p.Sandbox.Owner, p.Status = ledgerStart, "uid:1", sandbox.StatusRunning
	p.Sandbox.Spec.Project, p.Sandbox.Spec.Labels = "prj_a", map[string]string{"team": "red"}
	sb, _, err := d.CreateSandbox(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.PutReadings(t.Context(), []sandbox.Reading{{Sandbox: sb.ID, At: ledgerStart.Add(time.Second), Status: sandbox.StatusRunning}}); err != nil {
		t.Fatal(err)
	}
	tokens := entry(sb.ID, "tokens")
	tokens.Amount, tokens.Meter, tokens.Quantity = 0, "model.tokens", cost.Count(2_000_000)
	project, owner, earned := entry("", "p"), entry("", "o"), entry(sb.ID, "r")
	project.Scope, project.ID, project.Amount = cost.ScopeProject, "prj_a", 100
	owner.Scope, owner.ID, owner.Amount = cost.ScopeOwner, "uid:1", 1000
	earned.Kind, earned.Amount = cost.KindRevenue, 10_000
	late := entry(sb.ID, "late")
	late.At = ledgerStart.Add(50 * time.Hour)
	for _, e := range []cost.Entry{tokens, project, owner, earned, late} {
		post(t, d, e, tokenBook("a", 7))
	}
	q := cost.EntryQuery{From: ledgerStart, To: ledgerStart.Add(48 * time.Hour)}
	for by, want := range map[string]map[string]cost.Nano{
		"":           {"": 14 + 100 + 1000 + 10_000},
		"sandbox":    {string(sb.ID): 14 + 10_000, "": 1100},
		"owner":      {"uid:1": 14 + 1000 + 10_000, "": 100},
		"project":    {"prj_a": 14 + 100 + 10_000, "": 1000},
		"image":      {sb.Spec.Image: 14 + 10_000, "": 1100},
		"label:team": {"red": 14 + 10_000, "": 1100},
	} {
		sums, err := d.EntrySums(t.Context(), by, q)
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]cost.Nano{}
		for _, s := range sums {
			n, _ := s.Amount.Nano()
			got[s.Key] += n
		}
		for k, n := range want {
			if got[k] != n || len(got) > len(want) {
				t.Errorf("by %q: %v, want %v", by, got, want)
				break
			}
		}
	}
	again, err := d.MeteredEntries(t.Context(), "project", cost.EntryQuery{From: ledgerStart.Add(time.Hour), Project: "prj_a"})
	if err != nil || len(again) != 1 || again[0] != (Metered{"prj_a", "model.tokens", cost.Count(0), cost.Count(2_000_000)}) {
		t.Errorf("%+v, %v", again, err)
	}
	if o, p, err := d.OwnerOf(t.Context(), sb.ID); err != nil || o != "uid:1" || p != "prj_a" {
		t.Errorf("%s %s, %v", o, p, err)
	}
	_, _, err = d.OwnerOf(t.Context(), sandbox.NewID())
	want(t, err, sandbox.ErrNotFound, "sandbox_not_found")
}

// TestTotals says what reports say.
func TestTotals(t *testing.T) {
	d := open(t)
	rng := rand.New(rand.NewPCG(5, 5))
	ids := map[sandbox.ID][]sandbox.Reading{}
	for i := range 5 {
		id := bornAt(t, d, ledgerStart, []string{"uid:1", "uid:2"}[i%2], nil)
		ids[id] = walk(rng, id, ledgerStart, 50, time.Hour)
		if err := d.PutReadings(t.Context(), ids[id]); err != nil {
			t.Fatal(err)
		}
	}
	var times []time.Time
	for range 8 {
		times = append(times, ledgerStart.Add(time.Duration(rng.IntN(100_000_000))*time.Millisecond))
	}
	for _, owner := range []string{"", "uid:1"} {
		all, err := d.Totals(t.Context(), TotalsQuery{Times: times, By: "owner", Owner: owner})
		if err != nil || len(all) != map[string]int{"": 5, "uid:1": 3}[owner] {
			t.Fatalf("%d, %v", len(all), err)
		}
		for _, x := range all {
			for i, at := range times {
				if want := model(ledgerStart, ids[x.Sandbox], at); x.At[i] != want || x.Key == "" || !x.EndedAt.IsZero() {
					t.Fatalf("%s at %s: %+v, want %+v", x.Sandbox, at, x.At[i], want)
				}
			}
		}
	}
	if all, err := d.Totals(t.Context(), TotalsQuery{Times: times, To: ledgerStart}); err != nil || len(all) != 0 {
		t.Errorf("before any: %d, %v", len(all), err)
	}
}

func TestBooksAreKept(t *testing.T) {
	d := open(t)
	b := tokenBook("a", 7)
	for _, at := range []time.Time{ledgerStart.Add(time.Hour), ledgerStart} {
		if err := d.NoteBook(t.Context(), b, at); err != nil {
			t.Fatal(err)
		}
	}
	all, err := d.Books(t.Context())
	if err != nil || len(all) != 1 || all[0].Fingerprint != b.Fingerprint() || all[0].Book.Fingerprint() != b.Fingerprint() || !all[0].Until.Equal(ledgerStart.Add(time.Hour)) {
		t.Errorf("%+v, %v", all, err)
	}
}
