//go:build root

package faults

import (
	"database/sql"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
	_ "github.com/sandboxd/sandboxd/state" // has the driver of the database
)

// moneyTown is a daemon with a project that poisons the ledger and one that does
// not, each with a hard budget of money.
type moneyTown struct {
	*harness.Daemon
	poisoner, second, other sandbox.Sandbox
	budget                  cost.BudgetState
}

func newMoneyTown(t *testing.T) *moneyTown {
	t.Helper()
	d := &moneyTown{Daemon: harness.Install(t, `
cost:
  books:
    - {version: v1, currency: EUR, from: 2026-01-01T00:00:00Z, prices: {model.tokens: {price: 0, unit: token}}}
`)}
	d.poisoner = d.New(t, sandbox.Spec{Name: "poisoner", Project: "prj_poison", CostEntries: true})
	d.second = d.New(t, sandbox.Spec{Name: "second", Project: "prj_poison", CostEntries: true})
	d.other = d.New(t, sandbox.Spec{Name: "other", Project: "prj_other"})
	for _, p := range []string{"prj_other", "prj_poison"} {
		var err error
		d.budget, err = d.SetBudget(t.Context(), cost.BudgetRequest{Project: p, Meter: cost.MeterMoney, Limit: "10"})
		need(t, err)
	}
	_, err := d.SetBudget(t.Context(), cost.BudgetRequest{Project: "prj_other", Meter: "model.tokens", Limit: "10"})
	need(t, err)
	return d
}

// poison sends what no sum of 64 bits has room for, and reports whether any of
// it was taken in.
func (d *moneyTown) poison(t *testing.T) (taken bool) {
	t.Helper()
	for _, sb := range []sandbox.Sandbox{d.poisoner, d.second} {
		r := d.Command(t, string(sb.ID), "sbx", "cost", "add", "--meter", "model.tokens", "--qty", "9223372036854775807")
		taken = taken || r.Exit.Code == 0
	}
	for range 2 {
		_, err := d.PostEntry(t.Context(), cost.EntryRequest{Project: "prj_poison", Kind: cost.KindCost, Amount: 9_223_372_036 * cost.Unit})
		taken = taken || err == nil
		_, err = d.PostEntry(t.Context(), cost.EntryRequest{Project: "prj_poison", Kind: cost.KindRevenue, Amount: -9_223_372_036 * cost.Unit})
		taken = taken || err == nil
	}
	return taken
}

// others wants that nobody but the poisoner notices.
func (d *moneyTown) others(t *testing.T) {
	t.Helper()
	for _, by := range []string{"", "project", "owner", "sandbox"} {
		if _, err := d.Statement(t.Context(), cost.StatementQuery{By: by}); err != nil {
			t.Errorf("report by %q: %v", by, err)
		}
	}
	if all, err := d.Budgets(t.Context()); err != nil || len(all) != 3 {
		t.Errorf("budgets %+v, %v", all, err)
	}
	if sb, err := d.Sandbox(t.Context(), string(d.other.ID)); err != nil || sb.Status != sandbox.StatusRunning {
		t.Errorf("the other project's sandbox: %s for %s, %v", sb.Status, sb.Detail, err)
	}
	if _, err := d.Stop(t.Context(), string(d.other.ID)); err != nil {
		t.Error(err)
	}
	if _, err := d.Start(t.Context(), string(d.other.ID)); err != nil {
		t.Errorf("a start in the other project: %v", err)
	}
}

// closed wants the poisoner's sandboxes stopped, and kept so.
func (d *moneyTown) closed(t *testing.T, code string) {
	t.Helper()
	began := time.Now()
	for _, x := range []sandbox.Sandbox{d.poisoner, d.second} {
		sb, err := d.Sandbox(t.Context(), string(x.ID))
		t.Logf("%s is %s for %s: %s, %v", x.Spec.Name, sb.Status, sb.Reason, sb.Detail, err)
	}
	testenv.Eventually(t, time.Minute, "the poisoner is stopped", func() bool {
		for _, x := range []sandbox.Sandbox{d.poisoner, d.second} {
			if sb, err := d.Sandbox(t.Context(), string(x.ID)); err != nil || sb.Status != sandbox.StatusStopped {
				return false
			}
		}
		return true
	})
	t.Logf("stopped within %s", time.Since(began))
	if _, err := d.Start(t.Context(), string(d.poisoner.ID)); sandbox.CodeOf(err) != code {
		t.Errorf("a start in the poisoner's project: %v, want code %s", err, code)
	}
}

// TestMoneyPoison: entries that overflow every sum are refused, the hard budget
// of who sends them works, also after a crash, and other tenants see nothing.
func TestMoneyPoison(t *testing.T) {
	d := newMoneyTown(t)
	if d.poison(t) {
		t.Error("an entry beyond all bounds was taken in")
	}
	for range 11 { // each within bounds, together beyond 64 bits
		_, err := d.PostEntry(t.Context(), cost.EntryRequest{Sandbox: "poisoner", Kind: cost.KindCost, Amount: 1_000_000_000 * cost.Unit})
		if err != nil {
			t.Errorf("an entry of the largest amount: %v", err)
		}
	}
	d.closed(t, "budget_exhausted")
	d.others(t)
	d.Crash()
	d.Up()
	d.closed(t, "budget_exhausted")
	d.others(t)
	if b, err := d.Budget(t.Context(), d.budget.Key); err != nil || b.SpentText != "11000000000" || b.Unknown != "" {
		t.Errorf("%+v, %v", b, err)
	}
}

// TestMoneyPoisonOfBefore: the database that an older daemon took such entries
// into heals at the start of this one. SANDBOXD_BIN_BEFORE may name the
// directory of an older daemon's programs, which then poison it themselves.
func TestMoneyPoisonOfBefore(t *testing.T) {
	now := os.Getenv("SANDBOXD_BIN")
	before := os.Getenv("SANDBOXD_BIN_BEFORE")
	if before != "" {
		t.Setenv("SANDBOXD_BIN", before)
	}
	d := newMoneyTown(t)
	if before != "" {
		if !d.poison(t) {
			t.Fatal("the older daemon took nothing in")
		}
		_, err := d.Statement(t.Context(), cost.StatementQuery{})
		t.Logf("the older daemon's report: %v", err)
		t.Setenv("SANDBOXD_BIN", now)
	}
	d.Crash()
	if before == "" {
		db, err := sql.Open("sqlite3", filepath.Join(d.Dir, "state", "sandboxd.db"))
		need(t, err)
		_, err = db.ExecContext(t.Context(), `INSERT INTO entries (scope, target, key, kind, at, amount, meter, quantity, book, note, actor, owner, project, upto) VALUES
			('project', 'prj_poison', 'a', 'cost', 1790000007000, 9223372036000000000, '', 0, '', '', '', '', 'prj_poison', 0),
			('project', 'prj_poison', 'b', 'cost', 1790000007000, 9223372036000000000, '', 0, '', '', '', '', 'prj_poison', 0),
			('sandbox', ?1, 'c', 'cost', 1790000007000, 0, 'model.tokens', 9223372036854775807, 'v1', '', 'inside', 'uid:0', 'prj_poison', 9223372036854775807),
			('sandbox', ?2, 'c', 'cost', 1790000007000, 0, 'model.tokens', 9223372036854775807, 'v1', '', 'inside', 'uid:0', 'prj_poison', 9223372036854775807)`,
			string(d.poisoner.ID), string(d.second.ID))
		need(t, err)
		need(t, db.Close())
	}
	d.Up()
	d.closed(t, "budget_unknown")
	d.others(t)
	s, err := d.Statement(t.Context(), cost.StatementQuery{})
	need(t, err)
	if len(s.Quarantined) < 4 || s.Total.Outside.Sign() != 0 || !strings.Contains(d.Log.String(), "beyond the bounds") {
		t.Errorf("%+v", s)
	}
	if out, _, _ := d.CLI(t, nil, "", "budget", "ls"); !strings.Contains(out, "stop (spent unknown)") {
		t.Errorf("budget ls:\n%s", out)
	}
	for _, n := range s.Quarantined {
		for range 2 {
			if out, errs, code := d.CLI(t, nil, "", "cost", "cancel", strconv.FormatInt(n, 10), "--reason", "poison"); code != 0 {
				t.Fatalf("cancel %d: %d, %s%s", n, code, out, errs)
			}
		}
	}
	if _, err := d.Start(t.Context(), string(d.poisoner.ID)); err != nil {
		t.Errorf("after all was cancelled: %v", err)
	}
	if out, _, _ := d.CLI(t, nil, "", "cost", "ls"); !strings.Contains(out, "cancelled by") || !strings.Contains(out, "cancels ") {
		t.Errorf("cost ls:\n%s", out)
	}
}
