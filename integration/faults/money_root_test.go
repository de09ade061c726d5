//go:build root

package faults

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
	_ "github.com/sandboxd/sandboxd/state" // has the driver of the database
)

const moneyConfig = `
volume: {size: 640m}
lab: {promotion_window: 500ms}
cost:
  books:
    - {version: v1, currency: EUR, from: 2026-01-01T00:00:00Z, prices: {model.tokens: {price: 0, unit: token}}}
production:
  volume_size: 640m
  cost:
    books:
      - {version: p1, currency: EUR, from: 2026-01-01T00:00:00Z, prices: {model.tokens: {price: 0, unit: token}}}
`

// moneyTown is a daemon with a tenant who poisons the ledger and one who does
// not. Each has a project in the lab with an agent and a sandbox, an agent in
// production, and hard budgets.
type moneyTown struct {
	*harness.Daemon
	poisoner, other *moneyTenant
	second          sandbox.Sandbox // of the poisoner
	budget          cost.BudgetState
}

type moneyTenant struct {
	*client.Client
	key     string
	project string
	agent   project.AgentID
	far     project.AgentID // in production
	farBox  sandbox.ID
	sb      sandbox.Sandbox
}

// beyond sends from inside what no sum of 64 bits has room for.
const beyond = "/dev/sandbox/sbx cost add --wait 5 --meter model.tokens --qty 9223372036854775807"

func newMoneyTown(t *testing.T) *moneyTown {
	t.Helper()
	d := &moneyTown{Daemon: harness.Install(t, moneyConfig)}
	t.Cleanup(d.dismantle)
	d.other = d.tenant(t, "other", "true")
	d.poisoner = d.tenant(t, "poisoner", `[ ! -e /workspace/again ] || { `+beyond+`; `+beyond+`; }; touch /workspace/again`)
	d.second = d.sandbox(t, d.poisoner, "second")
	for _, x := range []*moneyTenant{d.other, d.poisoner} {
		for _, meter := range []cost.Meter{"model.tokens", cost.MeterMoney} {
			req := cost.BudgetRequest{Project: x.project, Meter: meter, Limit: "10"}
			var err error
			d.budget, err = d.SetBudget(t.Context(), req)
			need(t, err)
			req.Project, req.Agent = "", string(x.far)
			_, err = d.InProduction().SetBudget(t.Context(), req)
			need(t, err)
		}
	}
	return d
}

// tenant makes an owner with two projects, of which one is promoted. Their
// agents begin with a script.
func (d *moneyTown) tenant(t *testing.T, name, script string) *moneyTenant {
	t.Helper()
	n, cpus, bytes := 20, 50.0, int64(64<<30)
	_, err := d.SetOwner(t.Context(), name, api.OwnerChange{Role: access.RoleDeveloper, Quota: &api.QuotaChange{Sandboxes: &n, CPUs: &cpus, MemoryBytes: &bytes, DiskBytes: &bytes}})
	need(t, err)
	k, err := d.CreateKey(t.Context(), api.KeyRequest{Owner: name})
	need(t, err)
	x := &moneyTenant{key: k.Secret}
	x.Client, err = client.New(d.Host(), client.WithKey(k.Secret))
	need(t, err)
	for _, goes := range []bool{true, false} {
		p, err := x.CreateProject(t.Context(), project.Request{Name: fmt.Sprint(name, goes), Settings: project.Settings{Criteria: project.Criteria{MinAge: -1, MinExperiments: -1}}})
		need(t, err)
		a, err := x.Deploy(t.Context(), string(p.ID), "agent", project.AgentSpec{Command: []string{"sh", "-c", script + "; exec sleep 10000"}, Entries: true})
		need(t, err)
		x.project, x.agent = string(p.ID), a.ID
		x.runs(t)
		for kind, amount := range map[cost.Kind]cost.Nano{cost.KindCost: cost.Unit, cost.KindRevenue: 3 * cost.Unit} {
			_, err := x.EnterMoney(t.Context(), string(p.ID), project.Entry{Key: string(kind), Kind: kind, Agent: a.ID, Amount: amount})
			need(t, err)
		}
		if goes {
			_, err = d.Promote(t.Context(), string(p.ID), project.PromotionRequest{Force: true})
			need(t, err)
			testenv.Eventually(t, time.Minute, "the promotion of "+name+"'s is done", func() bool {
				all, err := d.Promotions(t.Context(), string(p.ID))
				return err == nil && len(all) > 0 && all[0].Status == project.PromotionDone
			})
			x.far = a.ID.Promoted()
		}
	}
	all, err := d.ProductionAgents(t.Context())
	need(t, err)
	for _, a := range all {
		if a.ID == x.far {
			x.farBox = a.Sandbox
		}
	}
	x.sb = d.sandbox(t, x, name)
	return x
}

func (d *moneyTown) sandbox(t *testing.T, x *moneyTenant, name string) sandbox.Sandbox {
	t.Helper()
	sb, err := x.Create(t.Context(), sandbox.Spec{Name: name, Project: x.project, CostEntries: true}, "")
	need(t, err)
	return sb
}

func (d *moneyTown) dismantle() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if !d.Alive() {
		d.Up()
	}
	agents, _ := d.ProductionAgents(ctx)
	for _, a := range agents {
		_ = d.RemoveAgent(ctx, a.ID)
	}
	projects, _ := d.Projects(ctx, "", false)
	for _, p := range projects {
		_, _ = d.KillProject(ctx, string(p.ID), true)
	}
}

// runs waits for a tenant's agent in the lab.
func (x *moneyTenant) runs(t *testing.T) {
	t.Helper()
	testenv.Eventually(t, time.Minute, "agent "+string(x.agent)+" is active", func() bool {
		v, err := x.Project(t.Context(), x.project)
		return err == nil && len(v.Agents) == 1 && v.Agents[0].Status == project.AgentActive
	})
}

// poison sends what no sum of 64 bits has room for, to both worlds, and reports
// whether any of it was taken in.
func (d *moneyTown) poison(t *testing.T) (taken bool) {
	t.Helper()
	p := d.poisoner
	for _, sb := range []sandbox.Sandbox{p.sb, d.second} {
		r, err := p.inside(t, sb, beyond)
		taken = taken || err == nil && r.Exit.Code == 0
	}
	for range 2 {
		for kind, amount := range map[cost.Kind]cost.Nano{cost.KindCost: 9_223_372_036 * cost.Unit, cost.KindRevenue: -9_223_372_036 * cost.Unit} {
			for who, req := range map[*client.Client]cost.EntryRequest{p.Client: {Project: p.project}, d.InProduction(): {Sandbox: string(p.farBox)}} {
				req.Kind, req.Amount = kind, amount
				_, err := who.PostEntry(t.Context(), req)
				taken = taken || err == nil
			}
		}
	}
	for _, verb := range []string{"stop", "start"} { // now its script poisons, too
		if _, err := d.SetAgent(t.Context(), p.far, verb); err != nil {
			t.Errorf("%s of the poisoner's agent: %v", verb, err)
		}
	}
	return taken
}

// inside runs a script in a sandbox of the tenant's.
func (x *moneyTenant) inside(t *testing.T, sb sandbox.Sandbox, script string) (harness.Result, error) {
	t.Helper()
	io, err := x.Exec(t.Context(), string(sb.ID), sandbox.ProcessSpec{Argv: []string{"sh", "-c", script}})
	if err != nil {
		return harness.Result{}, err
	}
	defer io.Close()
	return harness.Collect(io)
}

// others wants that nobody but the poisoner notices.
func (d *moneyTown) others(t *testing.T) {
	t.Helper()
	ctx, o, far := t.Context(), d.other, d.InProduction()
	fine := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	for who, c := range map[string]*client.Client{"the other tenant": o.Client, "root": d.Client, "root in production": far} {
		for _, by := range []string{"", "project", "owner", "sandbox", "label:agent"} {
			_, err := c.Statement(ctx, cost.StatementQuery{By: by})
			fine(who+": report by "+by, err)
		}
		_, err := c.UsageReport(ctx, "", sandbox.UsageQuery{By: "owner"})
		fine(who+": usage", err)
		for _, err := range c.Entries(ctx, cost.EntryQuery{}) {
			fine(who+": entries", err)
		}
		all, err := c.Budgets(ctx)
		fine(who+": budgets", err)
		for _, b := range all {
			if of := b.ID; (of == o.project || of == string(o.far) || of == string(o.agent)) && (b.Unknown != "" || b.Holds != cost.ActionNone) {
				t.Errorf("%s: the other tenant's budget: %+v", who, b)
			}
		}
	}
	v, err := o.Project(ctx, o.project)
	fine("project show", err)
	if v.Metrics.Revenue != cost.SumOf(3*cost.Unit) || v.Metrics.Cost != cost.SumOf(cost.Unit) {
		t.Errorf("the other tenant's project: %+v", v.Metrics)
	}
	_, err = o.ProjectSummary(ctx, "")
	fine("project summary", err)
	_, err = o.Evaluate(ctx, o.project)
	fine("project eval", err)
	_, err = d.Owner(ctx, "other")
	fine("quotas", err)
	_, err = o.Usage(ctx, string(o.sb.ID))
	fine("counters", err)
	for _, args := range [][]string{
		{"project", "show", o.project},
		{"project", "ls"},
		{"project", "summary"},
		{"budget", "ls"},
		{"usage"},
		{"cost", "report"},
		{"cost", "ls"},
	} {
		if out, errs, code := d.CLI(t, []string{"SANDBOX_KEY=" + o.key}, "", args...); code != 0 {
			t.Errorf("%q: %d, %s%s", args, code, out, errs)
		}
	}

	// What begins: a sandbox under the quota, a stopped one, an agent of each world.
	if sb, err := o.Create(ctx, sandbox.Spec{Project: o.project}, ""); err != nil {
		t.Errorf("a create: %v", err)
	} else {
		_, err = o.Remove(ctx, string(sb.ID))
		fine("rm", err)
	}
	if sb, err := o.Sandbox(ctx, string(o.sb.ID)); err != nil || sb.Status != sandbox.StatusRunning {
		t.Errorf("the other tenant's sandbox: %s for %s, %v", sb.Status, sb.Detail, err)
	}
	d.again(t)
	for _, verb := range []string{"stop", "start"} {
		_, err := o.SetAgent(ctx, o.agent, verb)
		fine(verb+" of an agent", err)
		_, err = d.SetAgent(ctx, o.far, verb)
		fine(verb+" of an agent in production", err)
	}
	o.runs(t)
	testenv.Eventually(t, time.Minute, "the other tenant's agent in production is active", func() bool { return d.farIs(t, o, project.AgentActive) })
	_, err = far.PostEntry(ctx, cost.EntryRequest{Sandbox: string(o.farBox), Kind: cost.KindCost, Amount: 1})
	fine("an entry in production", err)
}

// again stops the other tenant's sandbox and starts it.
func (d *moneyTown) again(t *testing.T) {
	t.Helper()
	if _, err := d.other.Stop(t.Context(), string(d.other.sb.ID)); err != nil {
		t.Errorf("a stop of the other tenant's: %v", err)
	}
	if _, err := d.other.Start(t.Context(), string(d.other.sb.ID)); err != nil {
		t.Errorf("a start of the other tenant's: %v", err)
	}
}

func (d *moneyTown) farIs(t *testing.T, x *moneyTenant, status project.AgentStatus) bool {
	all, err := d.ProductionAgents(t.Context())
	return err == nil && slices.ContainsFunc(all, func(a project.Agent) bool { return a.ID == x.far && a.Status == status })
}

// stopsFirst wants that goal is reached by what enter does, and that both of the
// poisoner's sandboxes are stopped for it before the other tenant, asking one
// thing after another from then on, has stopped and started five times.
func (d *moneyTown) stopsFirst(t *testing.T, goal string, enter func()) {
	t.Helper()
	began := time.Now()
	enter()
	for range 5 {
		d.again(t)
	}
	all, _, err := d.Events(t.Context(), client.EventQuery{Since: began, Limit: 1000})
	need(t, err)
	var reached, end time.Time
	left := map[sandbox.ID]bool{d.poisoner.sb.ID: true, d.second.ID: true}
	for _, e := range all {
		switch {
		case e.Type == "budget.stop" && e.Data["id"] == d.poisoner.project:
			reached = e.Time
		case e.Type == "sandbox.stopped" && left[e.Sandbox] && !reached.IsZero():
			delete(left, e.Sandbox)
			end = e.Time
		}
	}
	if reached.IsZero() || len(left) > 0 {
		t.Errorf("%s: of the poisoner's sandboxes %d are not stopped, the goal was reached at %s:\n%+v", goal, len(left), reached, all)
		return
	}
	t.Logf("%s: stopped %s after the goal was reached", goal, end.Sub(reached))
}

// closed wants the poisoner's sandboxes stopped, and kept so, in both worlds.
func (d *moneyTown) closed(t *testing.T, code string) {
	t.Helper()
	p := d.poisoner
	testenv.Eventually(t, time.Minute, "the poisoner is stopped", func() bool {
		for _, x := range []sandbox.Sandbox{p.sb, d.second} {
			if sb, err := d.Sandbox(t.Context(), string(x.ID)); err != nil || sb.Status != sandbox.StatusStopped {
				return false
			}
		}
		sb, err := d.InProduction().Sandbox(t.Context(), string(p.farBox))
		return err == nil && sb.Status == sandbox.StatusStopped
	})
	if _, err := p.Start(t.Context(), string(p.sb.ID)); sandbox.CodeOf(err) != code {
		t.Errorf("a start in the poisoner's project: %v, want code %s", err, code)
	}
}

// largest enters eleven of the largest entries: each within bounds, together
// beyond 64 bits.
func (d *moneyTown) largest(t *testing.T, c *client.Client, req cost.EntryRequest) {
	t.Helper()
	req.Kind, req.Amount = cost.KindCost, 1_000_000_000*cost.Unit
	for range 11 {
		if _, err := c.PostEntry(t.Context(), req); err != nil {
			t.Errorf("an entry of the largest amount: %v", err)
		}
	}
}

// TestMoneyPoison: entries that overflow every sum are refused, the hard budget
// of who sends them works, also over a crash, and other tenants see nothing: by
// the API, from inside, in both worlds.
func TestMoneyPoison(t *testing.T) {
	d := newMoneyTown(t)
	p := d.poisoner
	if d.poison(t) {
		t.Error("an entry beyond all bounds was taken in")
	}
	d.others(t)
	d.stopsFirst(t, "tokens from inside", func() {
		for range 3 { // stopped after the first
			_, _ = p.inside(t, d.second, "/dev/sandbox/sbx cost add --meter model.tokens --qty 1000000000000000")
		}
	})
	_, err := d.SetBudget(t.Context(), cost.BudgetRequest{Project: p.project, Meter: "model.tokens", Limit: "1000000000000000000"})
	if err != nil {
		t.Error(err)
	}
	for _, sb := range []sandbox.Sandbox{p.sb, d.second} {
		if _, err := p.Start(t.Context(), string(sb.ID)); err != nil {
			t.Errorf("with a larger budget: %v", err)
		}
	}
	d.stopsFirst(t, "money by the API", func() {
		d.largest(t, p.Client, cost.EntryRequest{Sandbox: "poisoner"})
	})
	d.largest(t, d.InProduction(), cost.EntryRequest{Sandbox: string(p.farBox)})
	d.closed(t, "budget_exhausted")
	d.others(t)

	// Reached, and killed before it acts: the next daemon does, before it answers.
	if err := d.RemoveBudget(t.Context(), d.budget.Key); err != nil {
		t.Error(err)
	}
	if _, err := p.Start(t.Context(), string(p.sb.ID)); err != nil {
		t.Errorf("without the budget: %v", err)
	}
	d.budget, err = d.SetBudget(t.Context(), cost.BudgetRequest{Project: p.project, Meter: cost.MeterMoney, Limit: "10"})
	if err != nil {
		t.Error(err)
	}
	d.Crash()
	d.Up()
	d.closed(t, "budget_exhausted")
	d.others(t)
	if b, err := d.Budget(t.Context(), d.budget.Key); err != nil || b.Spent != "11000000001" || b.Unknown != "" {
		t.Errorf("%+v, %v", b, err)
	}
}

// TestOperatorEndsTenantsAgents: what root does to another's project reaches its
// agents' sandboxes, in both worlds.
func TestOperatorEndsTenantsAgents(t *testing.T) {
	d := &moneyTown{Daemon: harness.Install(t, moneyConfig)}
	t.Cleanup(d.dismantle)
	x := d.tenant(t, "other", "true") // root promotes
	for what, end := range map[string]func() error{
		"project kill": func() error { _, err := d.KillProject(t.Context(), x.project, true); return err },
		"agent rm":     func() error { return d.RemoveAgent(t.Context(), x.far) },
	} {
		if err := end(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	for who, c := range map[string]*client.Client{"the lab": d.Client, "production": d.InProduction()} {
		for sb, err := range c.All(t.Context(), sandbox.Filter{}) {
			if err != nil || sb.ID != x.sb.ID {
				t.Errorf("%s has still %s, %s, %v", who, sb.Spec.Name, sb.Status, err)
			}
		}
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
			('project', ?3, 'a', 'cost', 1790000007000, 9223372036000000000, '', 0, '', '', '', '', ?3, 0),
			('project', ?3, 'b', 'cost', 1790000007000, 9223372036000000000, '', 0, '', '', '', '', ?3, 0),
			('sandbox', ?1, 'c', 'cost', 1790000007000, 0, 'model.tokens', 9223372036854775807, 'v1', '', 'inside', 'poisoner', ?3, 9223372036854775807),
			('sandbox', ?2, 'c', 'cost', 1790000007000, 0, 'model.tokens', 9223372036854775807, 'v1', '', 'inside', 'poisoner', ?3, 9223372036854775807)`,
			string(d.poisoner.sb.ID), string(d.second.ID), d.poisoner.project)
		need(t, err)
		need(t, db.Close())
		db, err = sql.Open("sqlite3", filepath.Join(d.Dir, "state", "production.db"))
		need(t, err)
		_, err = db.ExecContext(t.Context(), `INSERT INTO entries (scope, target, key, kind, at, amount, meter, quantity, book, note, actor, owner, project, upto)
			SELECT 'sandbox', sandbox, 'a', 'cost', 1790000007000, 9223372036000000000, '', 0, '', '', '', owner, project, 0 FROM ledger WHERE sandbox = ?1`, string(d.poisoner.farBox))
		need(t, err)
		need(t, db.Close())
	}
	d.Up()
	d.closed(t, "budget_unknown")
	d.others(t)
	s, err := d.Statement(t.Context(), cost.StatementQuery{})
	need(t, err)
	if len(s.Quarantined) < 4 || s.Total.Outside != cost.SumOf(4*cost.Unit) || !strings.Contains(d.Log.String(), "beyond the bounds") {
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
	if _, err := d.Start(t.Context(), string(d.poisoner.sb.ID)); err != nil {
		t.Errorf("after all was cancelled: %v", err)
	}
	if out, _, _ := d.CLI(t, nil, "", "cost", "ls"); !strings.Contains(out, "cancelled by") || !strings.Contains(out, "cancels ") {
		t.Errorf("cost ls:\n%s", out)
	}
}
