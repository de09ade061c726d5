package lab

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

func TestAgentsComeBack(t *testing.T) {
	h := newHost(t)
	p := h.project("shop", easy)
	a := h.deploy(p, "bot", project.AgentSpec{Config: map[string]any{"k": "v"}, Restart: project.RestartPolicy{BackoffMS: 1, Max: 100}})
	first := h.becomes(a.ID, project.AgentActive)
	s, files := h.lab.look(t, string(a.ID))
	var config map[string]any
	if err := json.Unmarshal([]byte(files[project.ConfigPath]), &config); err != nil || config["k"] != "v" || config[project.KeySandboxMode] != true || config[project.KeyAgent] != string(a.ID) {
		t.Errorf("its config: %v, %v", config, err)
	}
	if s.Project != string(p.ID) || s.Labels[project.LabelAgent] != string(a.ID) || s.Env["SANDBOX_MODE"] != "true" || s.Volumes[0].Volume != p.Workspace {
		t.Errorf("its sandbox: %+v", s)
	}

	// Its process ends.
	h.lab.kill(t, string(a.ID), 1)
	until(t, "it is started again", func() bool { n := h.agent(a.ID); return n.Status == project.AgentActive && n.Process != first.Process })
	if n := h.agent(a.ID); n.Sandbox != first.Sandbox || n.Restarts != 1 || n.Account != first.Sandbox {
		t.Errorf("after its process ended: %+v", n)
	}
	// Its sandbox ends.
	if _, err := h.lab.Remove(t.Context(), string(a.ID), ""); err != nil {
		t.Fatal(err)
	}
	until(t, "it is in another sandbox", func() bool { n := h.agent(a.ID); return n.Status == project.AgentActive && n.Sandbox != first.Sandbox })
	if n := h.agent(a.ID); n.Account != first.Sandbox {
		t.Errorf("its money is booked on %s, was on %s", n.Account, first.Sandbox)
	}
	// The daemon ends and comes back: the agent is taken over as it is.
	before := h.agent(a.ID)
	h.stop()
	h.start()
	if n := h.becomes(a.ID, project.AgentActive); n.Process != before.Process || n.Restarts != before.Restarts {
		t.Errorf("after a restart: %+v, was %+v", n, before)
	}
	// It ends while no daemon runs.
	h.stop()
	h.lab.kill(t, string(a.ID), 0)
	h.start()
	until(t, "it is started again", func() bool { n := h.agent(a.ID); return n.Status == project.AgentActive && n.Process != before.Process })
}

// TestLostSandboxIsFoundAgain: one made just before a crash, of which no row
// tells, is the agent's.
func TestLostSandboxIsFoundAgain(t *testing.T) {
	h := newHost(t)
	p := h.project("shop", easy)
	a := h.deploy(p, "bot", project.AgentSpec{})
	n := h.becomes(a.ID, project.AgentActive)
	h.stop()
	db := h.open("sandboxd.db")
	err := db.UpdateLab(t.Context(), func(tx project.Tx) error {
		n.Status, n.Sandbox, n.Process = project.AgentPending, "", ""
		return tx.PutAgent(n)
	})
	if err = errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
	h.dbs = nil
	h.start()
	h.becomes(a.ID, project.AgentActive)
	if all := h.lab.living(); len(all) != 1 || len(h.lab.running()) != 1 {
		t.Errorf("sandboxes %v", all)
	}
}

func TestAgentVerbs(t *testing.T) {
	h := newHost(t)
	p := h.project("shop", easy)
	a := h.deploy(p, "bot", project.AgentSpec{})
	do := func(verb string, want project.AgentStatus, status sandbox.Status) {
		t.Helper()
		got, err := h.SetAgent(t.Context(), a.ID, verb, "uid:0")
		if err != nil || got.Status != want {
			t.Fatalf("%s: %s, %v, want %s", verb, got.Status, err, want)
		}
		sb, err := h.lab.Sandbox(t.Context(), string(a.ID))
		if err != nil || sb.Status != status {
			t.Errorf("%s: its sandbox is %s, %v, want %s", verb, sb.Status, err, status)
		}
	}
	h.becomes(a.ID, project.AgentActive)
	do("pause", project.AgentPaused, sandbox.StatusPaused)
	do("resume", project.AgentActive, sandbox.StatusRunning)
	do("start", project.AgentActive, sandbox.StatusRunning) // it does already
	do("pause", project.AgentPaused, sandbox.StatusPaused)
	do("stop", project.AgentStopped, sandbox.StatusStopped)
	do("stop", project.AgentStopped, sandbox.StatusStopped)
	_, err := h.SetAgent(t.Context(), a.ID, "pause", "")
	if sandbox.CodeOf(err) != "wrong_state" {
		t.Errorf("pause a stopped one: %v", err)
	}
	do("start", project.AgentActive, sandbox.StatusRunning)
	_, err = h.SetAgent(t.Context(), "nobody", "stop", "")
	if !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("stop nobody: %v", err)
	}
}

func TestAgentThatCannotStartFails(t *testing.T) {
	h := newHost(t)
	p := h.project("shop", easy)
	h.lab.refusing(func(verb, _ string) error {
		if verb == "create" {
			return sandbox.Errorf(sandbox.ErrExhausted, "slots_exhausted", "no room")
		}
		return nil
	})
	a := h.deploy(p, "bot", project.AgentSpec{Restart: project.RestartPolicy{Max: 3, BackoffMS: 1}})
	if n := h.becomes(a.ID, project.AgentFailed); !strings.Contains(n.Detail, "no room") || n.Restarts != 3 {
		t.Errorf("%+v", n)
	}
	h.lab.refusing(nil)
	if n, err := h.SetAgent(t.Context(), a.ID, "start", ""); err != nil || n.Status != project.AgentActive || n.Restarts != 0 {
		t.Errorf("started: %+v, %v", n, err)
	}
}

// TestAgentWaitsForItsBudget: one that a budget refuses has not failed.
func TestAgentWaitsForItsBudget(t *testing.T) {
	h := newHost(t)
	p := h.project("shop", easy)
	a := h.deploy(p, "bot", project.AgentSpec{Restart: project.RestartPolicy{Max: 1, BackoffMS: 1}})
	h.becomes(a.ID, project.AgentActive)
	h.lab.refusing(func(verb, _ string) error {
		if verb == "start" {
			return sandbox.Errorf(sandbox.ErrExhausted, "budget_exhausted", "no money")
		}
		return nil
	})
	if _, err := h.lab.Stop(t.Context(), string(a.ID), "budget"); err != nil {
		t.Fatal(err)
	}
	until(t, "it waits", func() bool { return strings.Contains(h.agent(a.ID).Detail, "waits for its budget") })
	if n := h.agent(a.ID); n.Status != project.AgentPending || n.Restarts != 1 {
		t.Errorf("%+v", n)
	}
	h.lab.refusing(nil)
	if n, err := h.SetAgent(t.Context(), a.ID, "start", ""); err != nil || n.Status != project.AgentActive {
		t.Errorf("with a budget: %+v, %v", n, err)
	}
}

func TestUnhealthyAgentIsRestarted(t *testing.T) {
	h := newHost(t)
	p := h.project("shop", easy)
	ill := h.deploy(p, "ill", project.AgentSpec{Health: &project.HealthCheck{Command: []string{"ill"}, Interval: 1, Retries: 2}, Restart: project.RestartPolicy{Max: 2, BackoffMS: 1}})
	well := h.deploy(p, "well", project.AgentSpec{Health: &project.HealthCheck{Command: []string{"healthy"}, Interval: 1}})
	if n := h.becomes(ill.ID, project.AgentFailed); !strings.Contains(n.Detail, "health") {
		t.Errorf("%+v", n)
	}
	until(t, "the other was asked, too", func() bool { return !h.agent(well.ID).HealthyAt.IsZero() })
	if n := h.agent(well.ID); n.Status != project.AgentActive || n.Restarts != 0 || n.HealthyAt.IsZero() {
		t.Errorf("%+v", n)
	}
	if got := h.lab.running(); !slices.Equal(got, []string{string(well.ID)}) {
		t.Errorf("running: %v", got)
	}
}

func TestExperimentExpiresWithItsAgents(t *testing.T) {
	h := newHost(t)
	p := h.project("shop", easy)
	mine, other := h.deploy(p, "mine", project.AgentSpec{}), h.deploy(p, "other", project.AgentSpec{})
	e, err := h.StartExperiment(t.Context(), "shop", project.ExperimentRequest{Hypothesis: "h", Seconds: 1, Agents: []project.AgentID{mine.ID}})
	if err != nil {
		t.Fatal(err)
	}
	h.stop() // its time ends while no daemon runs, or soon after
	h.start()
	h.becomes(mine.ID, project.AgentStopped)
	until(t, "its process ends", func() bool { return slices.Equal(h.lab.running(), []string{string(other.ID)}) })
	if all, err := h.Experiments(t.Context(), "shop"); err != nil || len(all) != 1 || all[0].ID != e.ID || all[0].Status != project.ExperimentExpired {
		t.Errorf("%+v, %v", all, err)
	}
	_, err = h.StartExperiment(t.Context(), "shop", project.ExperimentRequest{Hypothesis: "h", Agents: []project.AgentID{"nobody"}})
	if sandbox.CodeOf(err) != "agent_not_found" {
		t.Errorf("of nobody: %v", err)
	}
}

func TestConditions(t *testing.T) {
	r := newRules()
	m := project.MetricsOf(project.Money{Cost: cost.SumOf(2e9), Revenue: cost.SumOf(5e9)})
	in := project.Inputs{Age: 100, Total: m, Agents: []project.AgentMetrics{{Status: project.AgentActive}}, Experiments: project.Experiments{Completed: 3, Succeeded: 2}}
	for expression, want := range map[string]bool{
		"profit == 3 * unit && cost == 2 * unit && revenue == 5 * unit": true,
		"roi_bp == 15000":    true,
		"roi_bp > 15000":     false,
		"age_seconds >= 100": true,
		"agents['active'] == 1 && agents['total'] == 1":           true,
		"agents['failed'] > 0":                                    false,
		"experiments['succeeded'] * 2 > experiments['completed']": true,
	} {
		if got, err := r.holds(expression, in); err != nil || got != want {
			t.Errorf("%s: %v, %v", expression, got, err)
		}
	}
	for _, expression := range []string{"", "1", "cost", "nothing > 1", "cost > 0.5", "cost >", "'a' == 1"} {
		if err := r.check(expression); sandbox.CodeOf(err) != "invalid_rule" {
			t.Errorf("%q: %v", expression, err)
		}
	}
	// What cannot be computed, or takes too long, is an error and not true.
	list := "[" + strings.Repeat("1,", 200) + "1]"
	for _, expression := range []string{"agents['none'] == 0", "cost / (revenue - revenue) == 1", list + ".all(a, " + list + ".all(b, a + b == 2))"} {
		if err := r.check(expression); err != nil {
			t.Errorf("%.40q does not compile: %v", expression, err)
		}
		if got, err := r.holds(expression, in); err == nil || got {
			t.Errorf("%.40q: %v, %v", expression, got, err)
		}
	}
	h := newHost(t)
	_, err := h.CreateProject(t.Context(), project.Request{Name: "x", Settings: project.Settings{Alerts: []project.Rule{{Name: "a", When: "nonsense"}}}})
	if sandbox.CodeOf(err) != "invalid_rule" {
		t.Errorf("a project with nonsense: %v", err)
	}
}

func TestAlertsAreToldOnce(t *testing.T) {
	h := newHost(t)
	s := easy
	s.Alerts = []project.Rule{{Name: "rich", When: "revenue >= 5 * unit"}}
	p := h.project("shop", s)
	a := h.deploy(p, "bot", project.AgentSpec{})
	told := func() (n int) {
		for _, e := range h.events() {
			if e.Type == eventAlert && e.Data["alert"] == "rich" {
				n++
			}
		}
		return n
	}
	for round := 1; round <= 2; round++ {
		h.books.set(a.ID, 1, 5e9)
		until(t, "the alert is told", func() bool { return told() == round })
		h.stop() // what was told stays told
		h.start()
		h.books.set(a.ID, 1, 1)
		until(t, "it can be told again", func() bool { return len(h.view(p).Fired) == 0 })
		if told() != round {
			t.Errorf("told %d times in round %d", told(), round)
		}
	}
}

// events are those of the lab's database.
func (h *host) events() []sandbox.Event {
	h.t.Helper()
	all, err := h.dbs[0].Events(context.Background(), 0, "", 1000)
	if err != nil {
		h.t.Fatal(err)
	}
	return all
}

func TestScheduledEvaluations(t *testing.T) {
	h := newHost(t)
	s := easy
	s.Cron = "50ms"
	p := h.project("shop", s)
	until(t, "three evaluations", func() bool {
		all, err := h.Evaluations(t.Context(), string(p.ID), 0)
		return err == nil && len(all) >= 3 && all[0].Actor == "schedule"
	})
	off := ""
	if _, err := h.ChangeProject(t.Context(), "shop", project.Change{Cron: &off}); err != nil {
		t.Fatal(err)
	}
	if v := h.view(p); !v.NextEvaluation.IsZero() {
		t.Errorf("the next is planned for %s", v.NextEvaluation)
	}
	bad := "never"
	if _, err := h.ChangeProject(t.Context(), "shop", project.Change{Cron: &bad}); err == nil || h.view(p).Cron != "" {
		t.Errorf("a bad expression: %v", err)
	}
}

// TestWebhooksOfAProject: they are rows of their own, which events of the
// project reach by its id.
func TestWebhooksOfAProject(t *testing.T) {
	h := newHost(t)
	s := easy
	s.Webhooks = []project.Hook{{URL: "http://one", Secret: "key", Events: []string{eventEvaluated}}, {URL: "http://two"}}
	p := h.project("shop", s)
	hooks := func() map[string]sandbox.Webhook {
		all, err := h.dbs[0].Webhooks(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		by := map[string]sandbox.Webhook{}
		for _, w := range all {
			by[w.URL] = w
		}
		return by
	}
	before := hooks()
	one := before["http://one"]
	if len(before) != 2 || one.Project != string(p.ID) || one.Secret != "key" || one.Filter.Events[0] != eventEvaluated {
		t.Fatalf("webhooks %+v", before)
	}
	told, err := h.dbs[0].Events(t.Context(), one.Cursor, "", 10)
	if err != nil || len(told) == 0 || told[0].Type != eventCreated || told[0].Data[project.EventProject] != string(p.ID) || told[0].Data["project_name"] != "shop" {
		t.Errorf("after the cursor: %+v, %v", told, err)
	}
	changed := []project.Hook{s.Webhooks[0], {URL: "http://three"}}
	if _, err := h.ChangeProject(t.Context(), "shop", project.Change{Webhooks: &changed}); err != nil {
		t.Fatal(err)
	}
	after := hooks()
	if len(after) != 2 || after["http://one"].ID != one.ID || after["http://one"].Cursor != one.Cursor || after["http://three"].ID == "" {
		t.Errorf("after a change: %+v", after)
	}
	if _, err := h.KillProject(t.Context(), "shop", true, ""); err != nil {
		t.Fatal(err)
	}
	if err := h.RemoveProject(t.Context(), "shop", ""); err != nil {
		t.Fatal(err)
	}
	if left := hooks(); len(left) != 0 {
		t.Errorf("of a removed project: %+v", left)
	}
}

// TestRefusedProjectIsNotTold: where the workspace is refused, as in a
// quarantine, nothing says that there is a project; the control is one that is
// made.
func TestRefusedProjectIsNotTold(t *testing.T) {
	h := newHost(t)
	h.lab.refusing(func(verb, _ string) error {
		if verb == "volume" {
			return sandbox.Errorf(sandbox.ErrConflict, "quarantine", "nothing is made")
		}
		return nil
	})
	if _, err := h.CreateProject(t.Context(), project.Request{Name: "pq"}); sandbox.CodeOf(err) != "quarantine" {
		t.Fatalf("%v, want quarantine", err)
	}
	h.lab.refusing(nil)
	h.project("made", easy)
	events, err := h.dbs[0].Events(t.Context(), 0, "", 1000)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range events {
		if e.Type == eventCreated {
			names = append(names, e.Data["name"])
		}
	}
	if !slices.Equal(names, []string{"made"}) {
		t.Errorf("created, as events say: %q", names)
	}
}

// TestKillIsFinished: a daemon that ends after the row is followed by one that
// does the rest.
func TestKillIsFinished(t *testing.T) {
	h := newHost(t)
	p := h.project("shop", easy)
	h.deploy(p, "bot", project.AgentSpec{})
	e, err := h.StartExperiment(t.Context(), "shop", project.ExperimentRequest{Hypothesis: "h"})
	if err != nil {
		t.Fatal(err)
	}
	h.lab.refusing(func(verb, _ string) error {
		if verb == "remove" {
			return sandbox.Errorf(sandbox.ErrUnavailable, "busy", "later")
		}
		return nil
	})
	_, err = h.KillProject(t.Context(), "shop", true, "")
	if sandbox.CodeOf(err) != "kill_incomplete" || h.view(p).Status != project.StatusKilled {
		t.Fatalf("killed: %v", err)
	}
	h.stop()
	h.lab.refusing(nil)
	h.start()
	until(t, "nothing is left", func() bool {
		v := h.view(p)
		return !v.Ending && v.Workspace == "" && len(h.lab.living()) == 0 && len(h.lab.volumes()) == 0
	})
	if all, err := h.Experiments(t.Context(), string(p.ID)); err != nil || all[0].ID != e.ID || all[0].Status != project.ExperimentCancelled {
		t.Errorf("experiments %+v, %v", all, err)
	}
	for what, err := range map[string]error{
		"deploy":   second(h.Deploy(t.Context(), string(p.ID), "bot", project.AgentSpec{Command: []string{"run"}}, "")),
		"evaluate": second(h.Evaluate(t.Context(), string(p.ID), "")),
		"promote":  second(h.Promote(t.Context(), string(p.ID), project.PromotionRequest{})),
	} {
		if sandbox.CodeOf(err) != "project_not_active" {
			t.Errorf("%s of a killed project: %v", what, err)
		}
	}
	if slices.Contains(h.lab.volumes(), p.Workspace) {
		t.Error("its workspace came back")
	}
	if err := h.RemoveProject(t.Context(), string(p.ID), ""); err != nil {
		t.Fatal(err)
	}
	if _, err := h.View(t.Context(), string(p.ID)); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("a project that was forgotten: %v", err)
	}
}

func second[T any](_ T, err error) error { return err }

func TestMoneyIsForAgentsThatRan(t *testing.T) {
	h := newHost(t)
	p := h.project("shop", easy)
	q := h.project("market", easy)
	a := h.deploy(p, "bot", project.AgentSpec{})
	h.becomes(a.ID, project.AgentActive)
	e := project.Entry{Key: "k", Kind: "revenue", Agent: a.ID, Amount: 5}
	if _, err := h.Enter(t.Context(), string(p.ID), e, ""); err != nil {
		t.Error(err)
	}
	if _, err := h.Enter(t.Context(), string(q.ID), e, ""); sandbox.CodeOf(err) != "agent_not_found" {
		t.Errorf("for another project's agent: %v", err)
	}
	e.Amount = 0
	if _, err := h.Enter(t.Context(), string(p.ID), e, ""); sandbox.CodeOf(err) != "invalid_entry" {
		t.Errorf("of nothing: %v", err)
	}
	s, err := h.Summary(t.Context(), project.StatusActive)
	if err != nil || len(s.Projects) != 2 || s.Count[project.StatusActive] != 2 {
		t.Errorf("summary %+v, %v", s, err)
	}
	if _, err := h.Summary(t.Context(), "odd"); sandbox.CodeOf(err) != "invalid_status" {
		t.Errorf("of an odd status: %v", err)
	}
}
