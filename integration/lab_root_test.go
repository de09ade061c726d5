//go:build root

package integration

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
	_ "github.com/sandboxd/sandboxd/state" // for its driver: the files are looked into
)

// labConfig has a window short enough to wait for.
const labConfig = `
webhooks: {allow_private: [127.0.0.0/8]}
volume: {size: 640m}
lab: {promotion_window: 4s}
cost:
  books: [{version: lab, currency: EUR, from: 2026-01-01T00:00:00Z, prices: {starts: {price: 0.01, unit: start}}}]
production:
  volume_size: 640m
  default_limits: {cpus: 1, memory: 333m, pids: 100, open_files: 1024, disk: 100m, inodes: 5000}
  cost:
    books: [{version: production, currency: EUR, from: 2026-01-01T00:00:00Z, prices: {starts: {price: 0.5, unit: start}}}]
`

// laboratory is a daemon with a project.
type laboratory struct {
	*daemon
	t testing.TB
	project.Project
}

// newLab installs a daemon with a lab, whose projects and production end with
// the test.
func newLab(t testing.TB, s project.Settings) *laboratory {
	t.Helper()
	d := install(t, labConfig)
	p, err := d.CreateProject(t.Context(), project.Request{Name: "shop", Settings: s})
	if err != nil {
		t.Fatal(err)
	}
	l := &laboratory{d, t, p}
	t.Cleanup(l.dismantle)
	return l
}

func (l *laboratory) dismantle() {
	if !l.Alive() {
		l.start()
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	l.ended(ctx)
	agents, err := l.ProductionAgents(ctx)
	for _, a := range agents {
		err = errors.Join(err, l.RemoveAgent(ctx, a.ID))
	}
	_, kill := l.KillProject(ctx, string(l.ID), true)
	if err = errors.Join(err, kill); err != nil {
		l.t.Error(err)
	}
	testenv.Eventually(l.t, 10*time.Second, "the cgroup of production is empty", func() bool {
		err := os.Remove(filepath.Join(cgroupRoot(), l.Parent, "production"))
		return err == nil || errors.Is(err, os.ErrNotExist)
	})
}

// ended waits until no promotion is under way.
func (l *laboratory) ended(ctx context.Context) (last project.Promotion) {
	l.t.Helper()
	testenv.Eventually(l.t, time.Minute, "the promotion ends", func() bool {
		all, err := l.Promotions(ctx, string(l.ID))
		last = append(all, project.Promotion{})[0]
		return err == nil && (len(all) == 0 || last.Status.Final())
	})
	return last
}

// stays is an agent that says hello and runs on.
var stays = []string{"sh", "-c", "echo up $AGENT_ID; echo $AGENT_ID >/workspace/$AGENT_ID; exec sleep 10000"}

func (l *laboratory) deploy(kind string, spec project.AgentSpec) project.Agent {
	l.t.Helper()
	if spec.Command == nil {
		spec.Command = stays
	}
	a, err := l.Deploy(l.t.Context(), string(l.ID), kind, spec)
	if err != nil {
		l.t.Fatal(err)
	}
	return a
}

func (l *laboratory) view() project.View {
	l.t.Helper()
	v, err := l.daemon.Project(context.Background(), string(l.ID))
	if err != nil {
		l.t.Fatal(err)
	}
	return v
}

func (l *laboratory) agent(id project.AgentID) project.AgentView {
	l.t.Helper()
	v := l.view()
	i := slices.IndexFunc(v.Agents, func(a project.AgentView) bool { return a.ID == id })
	if i < 0 {
		l.t.Fatalf("no agent %s", id)
	}
	return v.Agents[i]
}

// becomes waits until an agent is as wanted.
func (l *laboratory) becomes(id project.AgentID, what string, ok func(project.AgentView) bool) (a project.AgentView) {
	l.t.Helper()
	testenv.Eventually(l.t, 30*time.Second, string(id)+" is "+what, func() bool {
		a = l.agent(id)
		return ok(a)
	})
	return a
}

func (l *laboratory) active(id project.AgentID) project.AgentView {
	l.t.Helper()
	return l.becomes(id, "active", func(a project.AgentView) bool { return a.Status == project.AgentActive })
}

func (l *laboratory) enter(id project.AgentID, kind cost.Kind, amount cost.Nano) {
	l.t.Helper()
	e := project.Entry{Key: fmt.Sprintf("%s-%d", kind, rand.Int64()), Kind: kind, Agent: id, Amount: amount}
	for range 2 { // the second is the same
		if _, err := l.EnterMoney(l.t.Context(), string(l.ID), e); err != nil {
			l.t.Fatal(err)
		}
	}
}

func (l *laboratory) evaluates(want project.Recommendation) {
	l.t.Helper()
	e, err := l.Evaluate(l.t.Context(), string(l.ID))
	if err != nil || e.Recommendation != want {
		l.t.Errorf("evaluated %s, want %s: %+v %+v, %v", e.Recommendation, want, e.Verdicts, e.Inputs.Total, err)
	}
}

// cli runs the command line.
func (l *laboratory) cli(args ...string) (string, error) {
	cmd := exec.Command(program(l.t, "sandbox"), append([]string{"--host", l.host()}, args...)...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// TestLabFromEmptyToPromoted goes the whole way: three agents, experiments,
// each recommendation from data, a promotion that is rolled back, one that
// stays, and the end of the project.
func TestLabFromEmptyToPromoted(t *testing.T) {
	hook := newHook(t)
	l := newLab(t, project.Settings{
		Criteria: project.Criteria{MinAge: -1, MinExperiments: 1, Custom: []project.Rule{{Name: "lean", When: "cost < 100 * unit && agents['active'] >= 2"}}},
		Webhooks: []project.Hook{{URL: hook.URL, Secret: "s3cret-s3cret", Events: []string{"project.promoted", "project.rolled_back", "experiment.expired", "project.alert"}}},
		Alerts:   []project.Rule{{Name: "rich", When: "revenue >= 8 * unit"}},
	})
	l.evaluates(project.NotReady)

	// Healthy only where the lab's mark is: unwell in production.
	homesick := &project.HealthCheck{Command: []string{"sh", "-c", `test "$SANDBOX_MODE" = true`}, Interval: 100, Retries: 2}
	earner := l.deploy("earner", project.AgentSpec{Health: homesick, Config: map[string]any{"pair": "EUR"}})
	loser := l.deploy("loser", project.AgentSpec{})
	failed := l.deploy("failing", project.AgentSpec{Command: []string{"sh", "-c", "exit 3"}, Restart: project.RestartPolicy{Max: 2, BackoffMS: 20}})
	l.active(earner.ID)
	l.active(loser.ID)
	l.becomes(failed.ID, "failed", func(a project.AgentView) bool { return a.Status == project.AgentFailed && a.Restarts == 2 })
	l.agentFinds(earner)
	l.restarts(loser)
	l.experiments()

	// Each recommendation, from data.
	l.enter(earner.ID, cost.KindCost, cost.Unit)
	l.enter(loser.ID, cost.KindCost, cost.Unit)
	l.evaluates(project.NotReady)
	l.enter(earner.ID, cost.KindRevenue, 3*cost.Unit)
	l.evaluates(project.Consider) // no experiment was completed
	e, err := l.StartExperiment(t.Context(), string(l.ID), project.ExperimentRequest{Template: "smoke"})
	if err == nil {
		_, err = l.CompleteExperiment(t.Context(), string(l.ID), e.ID, project.Outcome{Success: true, Results: map[string]any{"n": 1}})
	}
	if err != nil {
		t.Fatal(err)
	}
	l.evaluates(project.Recommend)
	l.enter(earner.ID, cost.KindRevenue, 6*cost.Unit)
	l.evaluates(project.StronglyRecommend)
	hook.wants(t, "project.alert")

	// It is not well there: all is as it was.
	if out, err := l.cli("project", "promote", "shop", "--yes"); err == nil || !strings.Contains(out, "rolled_back") {
		t.Errorf("promoting an agent that fails its check there: %v\n%s", err, out)
	}
	hook.wants(t, "project.rolled_back")
	if v := l.view(); v.Status != project.StatusActive || v.Promotion.Status != project.PromotionRolledBack || !strings.Contains(v.Promotion.Detail, "health") {
		t.Errorf("after a rollback: %s, %+v", v.Status, v.Promotion)
	}
	l.active(earner.ID)
	if left, err := l.ProductionAgents(t.Context()); err != nil || len(left) != 0 {
		t.Errorf("after a rollback production has %+v, %v", left, err)
	}

	// Another one is.
	if _, err := l.SetAgent(t.Context(), earner.ID, "stop"); err != nil {
		t.Fatal(err)
	}
	second := l.deploy("keeper", project.AgentSpec{
		Image: smallImage(t, l.daemon, "bots"), User: "65534", Health: &project.HealthCheck{Command: []string{"cat", "/run/agent/config.json"}, Interval: 100},
	})
	l.enter(second.ID, cost.KindRevenue, cost.Unit)
	l.active(second.ID)
	testenv.Eventually(t, 10*time.Second, "an agent that is not root writes to the workspace", func() bool {
		return l.exec(t, string(second.ID), "grep", "-q", string(second.ID), "/workspace/"+string(second.ID)).exit.Code == 0
	})
	if out, err := l.cli("project", "promote", "shop", "--yes"); err != nil {
		t.Fatalf("promote: %v\n%s\n%s", err, out, lastLines(l.Log.String(), 30))
	}
	hook.wants(t, "project.promoted")
	l.promoted(second, loser, failed, earner)

	// Production does not notice the end of the project.
	far := l.InProduction()
	before, err := far.Processes(t.Context(), string(second.ID.Promoted()))
	if err != nil {
		t.Fatal(err)
	}
	if out, err := l.cli("project", "kill", "shop", "--yes", "--delete-workspace"); err != nil {
		t.Fatalf("kill: %v\n%s", err, out)
	}
	after, err := far.Processes(t.Context(), string(second.ID.Promoted()))
	if err != nil || len(after) == 0 || after[0].PID != before[0].PID || after[0].Exit != nil {
		t.Errorf("after the kill production has %+v, %v", after, err)
	}
	if page, err := l.List(t.Context(), sandbox.Filter{}); err != nil || len(page.Items) != 0 {
		t.Errorf("after the kill the lab has %+v, %v", page.Items, err)
	}
	if v, err := l.Volumes(t.Context()); err != nil || len(v) != 0 {
		t.Errorf("after the kill the lab has volumes %+v, %v", v, err)
	}
	if v := l.view(); v.Status != project.StatusKilled || v.Metrics.Revenue != cost.SumOf(10*cost.Unit) {
		t.Errorf("its record: %s, %+v", v.Status, v.Metrics)
	}
	l.stop()
	l.nothingInCommon(t)
	l.start()
}

// agentFinds looks at what the lab gives an agent.
func (l *laboratory) agentFinds(a project.Agent) {
	l.t.Helper()
	var config map[string]any
	if err := json.Unmarshal([]byte(l.sh(l.t, string(a.ID), `cat "$AGENT_CONFIG"`)), &config); err != nil {
		l.t.Fatal(err)
	}
	if config["sandbox_mode"] != true || config["department"] != "sandbox" || config["pair"] != "EUR" || config["agent"] != string(a.ID) || config["project"] != string(l.ID) {
		l.t.Errorf("its config: %v", config)
	}
	if got := l.sh(l.t, string(a.ID), `echo $SANDBOX_MODE $AGENT_DEPARTMENT $AGENT_TYPE; pwd`); !strings.HasPrefix(got, "true sandbox earner") {
		l.t.Errorf("its environment: %q", got)
	}
	if out, err := l.cli("logs", string(a.ID), string(l.agent(a.ID).Process)); err != nil || !strings.Contains(out, "up "+string(a.ID)) {
		l.t.Errorf("its output: %q, %v", out, err)
	}
}

// restarts kills an agent, and the daemon, and looks that it comes back and
// that it is taken over.
func (l *laboratory) restarts(a project.Agent) {
	l.t.Helper()
	first := l.agent(a.ID)
	l.sh(l.t, string(a.ID), "pkill -KILL sleep || kill -9 $(pidof sleep)")
	second := l.becomes(a.ID, "restarted", func(v project.AgentView) bool { return v.Status == project.AgentActive && v.Restarts == 1 })
	if second.Process == first.Process || second.Sandbox != first.Sandbox {
		l.t.Errorf("restarted as %s in %s, was %s in %s", second.Process, second.Sandbox, first.Process, first.Sandbox)
	}
	l.kill()
	l.start()
	if v := l.active(a.ID); v.Process != second.Process || v.Restarts != 1 {
		l.t.Errorf("after a crash of the daemon: %+v, want process %s", v.Agent, second.Process)
	}
	// Its end while no daemon runs is found by the next one.
	pid := l.hostSleep(a.ID)
	l.kill()
	if err := exec.Command("kill", "-9", pid).Run(); err != nil {
		l.t.Fatal(err)
	}
	l.start()
	l.becomes(a.ID, "restarted once more", func(v project.AgentView) bool { return v.Status == project.AgentActive && v.Restarts == 2 })
	// Its sandbox goes: it gets another.
	if _, err := l.Remove(l.t.Context(), string(a.ID)); err != nil {
		l.t.Fatal(err)
	}
	v := l.becomes(a.ID, "in another sandbox", func(v project.AgentView) bool { return v.Status == project.AgentActive && v.Restarts == 3 })
	if v.Sandbox == second.Sandbox {
		l.t.Errorf("it is in the sandbox that was removed")
	}
}

// hostSleep is the host's pid of an agent's command.
func (l *laboratory) hostSleep(id project.AgentID) string {
	l.t.Helper()
	sb, err := l.Sandbox(l.t.Context(), string(id))
	if err != nil {
		l.t.Fatal(err)
	}
	kids, err := exec.Command("pgrep", "-P", fmt.Sprint(sb.InitPID), "sleep").Output()
	if err != nil || len(strings.Fields(string(kids))) != 1 {
		l.t.Fatalf("children of PID 1: %q, %v", kids, err)
	}
	return strings.TrimSpace(string(kids))
}

// experiments ends one whose time is over, with its agent.
func (l *laboratory) experiments() {
	l.t.Helper()
	a := l.deploy("subject", project.AgentSpec{})
	l.active(a.ID)
	e, err := l.StartExperiment(l.t.Context(), string(l.ID), project.ExperimentRequest{Hypothesis: "it lasts", Seconds: 1, Agents: []project.AgentID{a.ID}})
	if err != nil {
		l.t.Fatal(err)
	}
	got := l.becomes(a.ID, "stopped", func(v project.AgentView) bool { return v.Status == project.AgentStopped })
	if !strings.Contains(got.Detail, string(e.ID)) {
		l.t.Errorf("stopped for %q", got.Detail)
	}
	all, err := l.Experiments(l.t.Context(), string(l.ID))
	if err != nil || len(all) != 1 || all[0].Status != project.ExperimentExpired || all[0].Success == nil || *all[0].Success {
		l.t.Errorf("experiments %+v, %v", all, err)
	}
	_, err = l.CompleteExperiment(l.t.Context(), string(l.ID), e.ID, project.Outcome{Success: true})
	wantCode(l.t, "complete an expired experiment", err, "experiment_ended")
}

// promoted looks at both worlds after a promotion of one agent.
func (l *laboratory) promoted(moved project.Agent, stayed ...project.Agent) {
	l.t.Helper()
	far := l.InProduction()
	agents, err := l.ProductionAgents(l.t.Context())
	if err != nil || len(agents) != 1 || agents[0].ID != moved.ID.Promoted() || agents[0].Status != project.AgentActive || agents[0].Project != "" {
		l.t.Fatalf("in production: %+v, %v", agents, err)
	}
	if v := l.agent(moved.ID); v.PromotedTo != agents[0].ID || v.Status != project.AgentStopped || v.Metrics.Revenue != cost.SumOf(cost.Unit) {
		l.t.Errorf("what stayed of it: %+v", v)
	}
	for _, a := range stayed {
		if v := l.agent(a.ID); v.PromotedTo != "" {
			l.t.Errorf("agent %s was promoted", a.ID)
		}
	}
	sb, err := far.Sandbox(l.t.Context(), string(agents[0].ID))
	if err != nil || sb.Status != sandbox.StatusRunning || sb.Spec.Limits.MemoryBytes != 333<<20 || sb.Spec.Labels["project"] != "" || !strings.HasPrefix(sb.Spec.Image, "promoted-") {
		l.t.Fatalf("its sandbox: %+v, %v", sb, err)
	}
	if _, err := os.Stat(filepath.Join(cgroupRoot(), l.Parent, "production", string(sb.ID))); err != nil {
		l.t.Errorf("its cgroup: %v", err)
	}
	// Each world has prices of its own.
	for what, c := range map[string]struct {
		*client.Client
		book string
		want cost.Nano
	}{"production": {far, "production", cost.Unit / 2}, "the lab": {l.Client, "lab", cost.Unit / 100}} {
		id := agents[0].ID
		if c.book == "lab" {
			id = moved.ID
		}
		st, err := c.Statement(l.t.Context(), cost.StatementQuery{By: "label:agent"})
		i := slices.IndexFunc(st.Lines, func(x cost.StatementLine) bool { return x.Key == string(id) })
		if err != nil || i < 0 || st.Lines[i].Usage != cost.SumOf(c.want) || st.Lines[i].Charges[0].Book != c.book {
			l.t.Errorf("what %s charges: %+v, %v", what, st.Lines, err)
		}
	}
	_, err = l.Sandbox(l.t.Context(), string(sb.ID))
	wantCode(l.t, "look for it in the lab", err, "sandbox_not_found")
	for _, args := range [][]string{{"ls"}, {"stats"}, {"logs", string(agents[0].ID), string(agents[0].Process)}} {
		out, err := l.cli(append(args, "--world", "production")...)
		if want := string(agents[0].ID); err != nil || !strings.Contains(out, want) {
			l.t.Errorf("%v --world production: %v\n%s", args, err, out)
		}
	}
	_, err = far.Create(l.t.Context(), sandbox.Spec{}, "")
	wantCode(l.t, "create in production", err, "production_read_only")
	_, err = l.daemon.Project(l.t.Context(), "nope")
	wantCode(l.t, "a project that is not there", err, "project_not_found")
	_, err = l.Promote(l.t.Context(), string(l.ID), project.PromotionRequest{Force: true})
	wantCode(l.t, "promote it again", err, "project_not_active")
}

// nothingInCommon compares the two databases of a daemon that does not run:
// no row is in both, nor an id of the one's in the other's rows.
func (l *laboratory) nothingInCommon(t testing.TB) {
	t.Helper()
	near, far := dump(t, filepath.Join(l.Dir, "state", "sandboxd.db")), dump(t, filepath.Join(l.Dir, "state", "production.db"))
	if len(near["sandboxes"]) < 3 || len(near["agents"]) < 4 || len(far["sandboxes"]) < 1 || len(far["agents"]) != 1 || len(far["projects"]) != 0 {
		t.Fatalf("the databases hold less than this test needs: %d %d %d %d", len(near["sandboxes"]), len(near["agents"]), len(far["sandboxes"]), len(far["agents"]))
	}
	for table, rows := range near {
		switch table {
		case "schema_version", "sqlite_sequence", "slots", "images", "events_pruned", "audit_base": // of the world itself, not of anything in it
			continue
		}
		for row := range rows {
			if far[table][row] {
				t.Errorf("in %s of both: %s", table, row)
			}
		}
	}
	for what, pair := range map[string][2]map[string]map[string]bool{"lab": {near, far}, "production": {far, near}} {
		for _, table := range []string{"sandboxes", "agents", "projects"} {
			for row := range pair[0][table] {
				id, _, _ := strings.Cut(row, "|")
				if table == "agents" && what == "production" {
					continue // the lab says where an agent went
				}
				for other, rows := range pair[1] {
					for text := range rows {
						if strings.Contains(text, id) {
							t.Errorf("%s %s of %s is in %s of the other: %s", table, id, what, other, text)
						}
					}
				}
			}
		}
	}
}

// dump reads every row of a database as text, the first column first.
func dump(t testing.TB, path string) map[string]map[string]bool {
	t.Helper()
	db, err := sql.Open("sqlite3", "file:"+path+"?mode=ro")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	tables, err := db.Query(`SELECT name FROM sqlite_master WHERE type = 'table'`)
	if err != nil {
		t.Fatal(err)
	}
	defer tables.Close()
	all := map[string]map[string]bool{}
	for tables.Next() {
		var name string
		if err := tables.Scan(&name); err != nil {
			t.Fatal(err)
		}
		all[name] = map[string]bool{}
	}
	if err := tables.Err(); err != nil {
		t.Fatal(err)
	}
	for name := range all {
		rows, err := db.Query(`SELECT * FROM "` + name + `"`)
		if err != nil {
			t.Fatal(err)
		}
		columns, err := rows.Columns()
		if err != nil {
			t.Fatal(err)
		}
		for rows.Next() {
			values := make([]any, len(columns))
			for i := range values {
				values[i] = new(any)
			}
			if err := rows.Scan(values...); err != nil {
				t.Fatal(err)
			}
			var text []string
			for _, v := range values {
				switch v := (*v.(*any)).(type) {
				case []byte:
					text = append(text, string(v))
				default:
					text = append(text, fmt.Sprint(v))
				}
			}
			all[name][strings.Join(text, "|")] = true
		}
		if err := errors.Join(rows.Err(), rows.Close()); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// hook is a webhook that fails the first delivery of each event.
type hook struct {
	*httptest.Server
	mu   sync.Mutex
	got  map[string]int // by type of event: deliveries taken
	seen map[string]bool
}

func newHook(t testing.TB) *hook {
	h := &hook{got: map[string]int{}, seen: map[string]bool{}}
	h.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		h.mu.Lock()
		defer h.mu.Unlock()
		if err := sandbox.VerifyWebhook("s3cret-s3cret", r.Header.Get(sandbox.WebhookSignatureHeader), body, time.Now(), time.Minute); err != nil {
			t.Errorf("%s: %v", body, err)
		}
		id := r.Header.Get(sandbox.WebhookIDHeader)
		if !h.seen[id] {
			h.seen[id] = true
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		h.got[r.Header.Get(sandbox.WebhookTypeHeader)]++
	}))
	t.Cleanup(h.Close)
	return h
}

// wants waits for a delivery of a type, which was tried twice.
func (h *hook) wants(t testing.TB, kind string) {
	t.Helper()
	testenv.Eventually(t, 30*time.Second, "a notice of "+kind, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.got[kind] > 0
	})
}

// TestPromotionSurvivesKills kills the daemon at random moments of promotions,
// of an agent that is well and of one that is not, until they end.
func TestPromotionSurvivesKills(t *testing.T) {
	l := newLab(t, project.Settings{Criteria: project.Criteria{MinAge: -1, MinExperiments: -1}})
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	sick := &project.HealthCheck{Command: []string{"sh", "-c", `test "$SANDBOX_MODE" = true`}, Interval: 50, Retries: 2}
	a := l.deploy("traveller", project.AgentSpec{Health: sick})
	l.enter(a.ID, cost.KindRevenue, cost.Unit)
	rounds := 3
	if os.Getenv("SANDBOXD_SOAK") != "" {
		rounds = 60
	}
	for range rounds {
		l.active(a.ID)
		p := l.promoteKilling(r)
		if p.Status != project.PromotionRolledBack {
			t.Fatalf("of an unwell agent: %s: %s", p.Status, p.Detail)
		}
		l.onlyIn(a, false)
	}
	if _, err := l.SetAgent(t.Context(), a.ID, "stop"); err != nil {
		t.Fatal(err)
	}
	b := l.deploy("settler", project.AgentSpec{})
	l.active(b.ID)
	l.enter(b.ID, cost.KindRevenue, cost.Unit)
	if p := l.promoteKilling(r); p.Status != project.PromotionDone {
		t.Fatalf("of a well agent: %s: %s", p.Status, p.Detail)
	}
	l.onlyIn(b, true)
}

// TestAgentsHeedBudgets: an agent whose budget is spent is stopped, waits and
// has not failed; with more it goes on.
func TestAgentsHeedBudgets(t *testing.T) {
	l := newLab(t, project.Settings{})
	a := l.deploy("spender", project.AgentSpec{})
	l.active(a.ID)
	budget := cost.BudgetRequest{Project: string(l.ID), Meter: cost.MeterMoney, Limit: "5"}
	if _, err := l.SetBudget(t.Context(), budget); err != nil {
		t.Fatal(err)
	}
	l.enter(a.ID, cost.KindCost, 6*cost.Unit)
	waits := l.becomes(a.ID, "waiting", func(v project.AgentView) bool { return strings.Contains(v.Detail, "budget") })
	if waits.Status != project.AgentPending || waits.Restarts != 0 {
		t.Errorf("waiting: %+v", waits.Agent)
	}
	if sb, err := l.Sandbox(t.Context(), string(a.ID)); err != nil || sb.Status != sandbox.StatusStopped || sb.Reason != sandbox.ReasonBudget {
		t.Errorf("its sandbox is %s for %q, %v", sb.Status, sb.Reason, err)
	}
	if got, err := l.SetAgent(t.Context(), a.ID, "start"); err != nil || got.Status != project.AgentPending {
		t.Errorf("started without a budget: %s, %v", got.Status, err)
	}
	budget.Limit = "50"
	if _, err := l.SetBudget(t.Context(), budget); err != nil {
		t.Fatal(err)
	}
	if got, err := l.SetAgent(t.Context(), a.ID, "start"); err != nil || got.Status != project.AgentActive {
		t.Errorf("started with a budget: %s, %v: %s", got.Status, err, got.Detail)
	}
}

// TestWorldsShareTheNetwork: sandboxes of both worlds have links and addresses
// of their own, and keep them and their flows when the daemon is killed.
func TestWorldsShareTheNetwork(t *testing.T) {
	l := newLab(t, project.Settings{Criteria: project.Criteria{MinAge: -1, MinExperiments: -1}})
	open := sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen, Group: "team"}
	// It asks the gateway for a name, again and again: what it sends is counted.
	asks := []string{"sh", "-c", "while :; do getent hosts example.invalid; sleep 0.2; done"}
	a := l.deploy("speaker", project.AgentSpec{Command: asks, Network: open})
	l.active(a.ID)
	l.enter(a.ID, cost.KindRevenue, cost.Unit)
	if _, err := l.Promote(t.Context(), string(l.ID), project.PromotionRequest{Force: true, Window: 100}); err != nil {
		t.Fatal(err)
	}
	if p := l.ended(t.Context()); p.Status != project.PromotionDone {
		t.Fatalf("%s: %s", p.Status, p.Detail)
	}
	far := l.InProduction()
	here := l.create(t, sandbox.Spec{Name: "here", Network: open})
	there, err := far.Sandbox(t.Context(), string(a.ID.Promoted()))
	if err != nil || there.Slot != 0 || there.Address == here.Address || there.Address.String() != "10.213.222.170" || there.UIDBase == here.UIDBase {
		t.Fatalf("in production slot %d, %s, ids from %#x, %v; in the lab %s, ids from %#x", there.Slot, there.Address, there.UIDBase, err, here.Address, here.UIDBase)
	}
	linked := func(when string) {
		t.Helper()
		for _, id := range []sandbox.ID{here.ID, there.ID} {
			if err := run("ip", "link", "show", "dev", "v"+string(id)); err != nil {
				t.Errorf("%s: %v", when, err)
			}
		}
		sent := func() uint64 {
			u, err := far.Usage(t.Context(), string(there.ID))
			if err != nil {
				t.Fatal(err)
			}
			return u.NetTxPackets
		}
		before := sent()
		testenv.Eventually(t, 20*time.Second, when+": the agent in production sends", func() bool { return sent() > before })
	}
	linked("at first")
	// They name the same group, and are not in one: neither is a name to the other.
	if r := l.exec(t, "here", "getent", "hosts", string(a.ID.Promoted())); r.exit.Code == 0 {
		t.Errorf("the lab finds a fellow in production: %s", r.stdout)
	}
	l.create(t, sandbox.Spec{Name: "mate", Network: open})
	if r := l.exec(t, "here", "getent", "hosts", "mate"); r.exit.Code != 0 {
		t.Errorf("the control: it does not find a fellow of the lab: %+v", r)
	}
	l.kill()
	l.start()
	linked("after a kill")
	if _, err := l.Remove(t.Context(), "here"); err != nil {
		t.Fatal(err)
	}
	l.kill()
	l.start()
	if now, err := far.Sandbox(t.Context(), string(there.ID)); err != nil || now.Status != sandbox.StatusRunning || now.InitPID != there.InitPID {
		t.Errorf("in production: %+v, %v", now, err)
	}
}

// promoteKilling promotes, killing the daemon again and again.
func (l *laboratory) promoteKilling(r *rand.Rand) project.Promotion {
	l.t.Helper()
	if _, err := l.Promote(l.t.Context(), string(l.ID), project.PromotionRequest{Force: true, Window: 1000}); err != nil {
		l.t.Fatal(err)
	}
	for range 4 {
		time.Sleep(time.Duration(r.IntN(600)) * time.Millisecond) //nolint:forbidigo // a moment by chance
		l.kill()
		l.start()
	}
	return l.ended(context.Background())
}

// onlyIn looks that an agent runs in one world, once, and not in the other.
func (l *laboratory) onlyIn(a project.Agent, production bool) {
	l.t.Helper()
	home, away, name, other := l.Client, l.InProduction(), string(a.ID), string(a.ID.Promoted())
	if production {
		home, away, name, other = away, home, other, name
	}
	testenv.Eventually(l.t, 20*time.Second, "agent "+name+" runs where it belongs, once", func() bool {
		procs, err := home.Processes(l.t.Context(), name)
		live := 0
		for _, p := range procs {
			if p.Tag == project.AgentTag && p.Exit == nil {
				live++
			}
		}
		return err == nil && live == 1
	})
	page, err := away.List(l.t.Context(), sandbox.Filter{Name: other})
	if err != nil && sandbox.CodeOf(err) != "no_production" {
		l.t.Error(err)
	}
	if len(page.Items) != 0 {
		l.t.Errorf("agent %s is in the other world too: %+v", other, page.Items[0])
	}
	agents, err := l.ProductionAgents(l.t.Context())
	if want := 0; err != nil || production && len(agents) != 1 || !production && len(agents) != want {
		l.t.Errorf("production has agents %+v, %v", agents, err)
	}
}
