package project

import (
	"encoding/json"
	"errors"
	"math"
	"math/big"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

func TestROI(t *testing.T) {
	for _, c := range []struct {
		cost, revenue cost.Nano
		want          int64
	}{
		{1e9, 1e9, 0},
		{1e9, 4e9, 30_000},
		{1e9, 4e9 + 1, 30_000},
		{1e9, 0, -10_000},
		{3, 4, 3333},
		{3, 2, -3334}, // down, not towards nothing
		{0, 0, 0},
		{0, 1, MaxROI},
		{0, -1, MinROI},
		{-5, 1, MaxROI},
		{-5, -5, 0},
		{1, cost.MaxNano, MaxROI},
		{1, cost.MinNano, MinROI},
		{cost.MaxNano, cost.MinNano, -20_001}, // a profit beyond one amount
	} {
		if got := ROI(Money{cost.SumOf(c.cost), cost.SumOf(c.revenue)}); got != c.want {
			t.Errorf("cost %d, revenue %d: %d, want %d", c.cost, c.revenue, got, c.want)
		}
	}
}

// TestROIAgainstBig computes the same with numbers of any size.
func TestROIAgainstBig(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	for range 20_000 {
		shift := r.UintN(62)
		spent, earned := max(r.Int64()>>shift, 1), int64(r.Uint64())>>r.UintN(62)
		m := Money{cost.SumOf(cost.Nano(spent)), cost.SumOf(cost.Nano(earned))}
		profit := new(big.Int).Sub(big.NewInt(earned), big.NewInt(spent))
		q := new(big.Int).Mul(profit, big.NewInt(10_000))
		q.Div(q, big.NewInt(spent)) // Euclidean: down for a positive divisor
		want := int64(math.MaxInt64)
		if q.IsInt64() {
			want = q.Int64()
		} else if q.Sign() < 0 {
			want = math.MinInt64
		}
		if got := ROI(m); got != want {
			t.Fatalf("seed %d: %+v: %d, want %d", seed, m, got, want)
		}
	}
}

// TestROIIsAbsentWhereItCannotBeSaid: in JSON, as in a report; what judges has
// a number all the same.
func TestROIIsAbsentWhereItCannotBeSaid(t *testing.T) {
	for _, c := range []struct {
		cost, revenue cost.Nano
		json          string
		rate          int64
	}{
		{10, 15, `"roi_bp":5000`, 5000},
		{0, 15, ``, MaxROI},
		{0, 0, ``, 0},
		{1, cost.MaxNano, ``, MaxROI},
	} {
		m := MetricsOf(Money{cost.SumOf(c.cost), cost.SumOf(c.revenue)})
		data, err := json.Marshal(m)
		if err != nil || strings.Contains(string(data), "roi_bp") != (c.json != "") || !strings.Contains(string(data), c.json) || m.Rate() != c.rate {
			t.Errorf("cost %s, revenue %s: %s, %d, %v", c.cost, c.revenue, data, m.Rate(), err)
		}
	}
}

func TestPercent(t *testing.T) {
	for bp, want := range map[int64]string{0: "0.00 %", 5: "0.05 %", 30_001: "300.01 %", -3334: "-33.34 %", -5: "-0.05 %", MaxROI: "∞", MinROI: "-∞"} {
		if got := Percent(bp); got != want {
			t.Errorf("%d: %q, want %q", bp, got, want)
		}
	}
}

// inputs are those of a project that passes every built-in criterion.
func inputs(spent, earned cost.Nano) Inputs {
	m := MetricsOf(Money{cost.SumOf(spent), cost.SumOf(earned)})
	return Inputs{
		Age: 7200, Total: m, Experiments: Experiments{Completed: 1},
		Agents: []AgentMetrics{{Agent: "a", Status: AgentActive, Metrics: m}},
	}
}

func TestJudge(t *testing.T) {
	no := func(string, Inputs) (bool, error) { return false, nil }
	yes := func(string, Inputs) (bool, error) { return true, nil }
	broken := func(string, Inputs) (bool, error) { return true, errors.New("no such thing") }
	custom := Criteria{Custom: []Rule{{"mine", "x"}}}
	for _, c := range []struct {
		name   string
		k      Criteria
		in     Inputs
		change func(*Inputs)
		holds  func(string, Inputs) (bool, error)
		want   Recommendation
		fails  []string
	}{
		{name: "300 % is not above", in: inputs(100, 400), want: Recommend},
		{name: "above 300 %", in: inputs(100, 402), want: StronglyRecommend},
		{name: "no profit", in: inputs(100, 100), want: NotReady, fails: []string{CriterionROI, CriterionProfit}},
		{name: "a loss", in: inputs(100, 99), want: NotReady, fails: []string{CriterionROI, CriterionProfit}},
		{name: "too little profit", k: Criteria{MinProfit: 300}, in: inputs(100, 400), want: Consider, fails: []string{CriterionProfit}},
		{name: "nobody active", in: inputs(100, 400), change: func(in *Inputs) { in.Agents[0].Status = AgentFailed }, want: Consider, fails: []string{CriterionActive}},
		{name: "too young", in: inputs(100, 500), change: func(in *Inputs) { in.Age = 3599 }, want: Consider, fails: []string{CriterionData}},
		{name: "no matter how young", k: Criteria{MinAge: -1}, in: inputs(100, 500), change: func(in *Inputs) { in.Age = 0 }, want: StronglyRecommend},
		{name: "no experiment", in: inputs(100, 500), change: func(in *Inputs) { in.Experiments.Completed = 0 }, want: Consider, fails: []string{CriterionData}},
		{name: "no experiment needed", k: Criteria{MinExperiments: -1}, in: inputs(100, 500), change: func(in *Inputs) { in.Experiments.Completed = 0 }, want: StronglyRecommend},
		{name: "no agent", in: inputs(0, 0), change: func(in *Inputs) { in.Agents = nil }, want: NotReady, fails: []string{CriterionROI, CriterionProfit, CriterionActive, CriterionData}},
		{name: "one of its own holds", k: custom, in: inputs(100, 500), holds: yes, want: StronglyRecommend},
		{name: "one of its own does not", k: custom, in: inputs(100, 500), holds: no, want: Consider, fails: []string{"mine"}},
		{name: "one of its own breaks", k: custom, in: inputs(100, 500), holds: broken, want: Consider, fails: []string{"mine"}},
	} {
		if c.change != nil {
			c.change(&c.in)
		}
		verdicts, got := Judge(c.k, c.in, c.holds)
		var fails []string
		for _, v := range verdicts {
			if !v.Pass {
				fails = append(fails, v.Name)
			}
			if v.Detail == "" {
				t.Errorf("%s: %s says nothing", c.name, v.Name)
			}
		}
		if got != c.want || !slices.Equal(fails, c.fails) {
			t.Errorf("%s: %s, failed %v; want %s, %v", c.name, got, fails, c.want, c.fails)
		}
	}
}

func TestPlan(t *testing.T) {
	p := NewID()
	agent := func(kind string, s AgentStatus) Agent {
		return Agent{ID: NewAgentID(p, kind), Type: kind, Status: s, Spec: AgentSpec{Command: []string{"x"}, Config: map[string]any{"k": "v"}}.Sandboxed(p)}
	}
	all := []Agent{
		agent("earns", AgentActive), agent("even", AgentActive), agent("rests", AgentPaused), agent("loses", AgentActive),
		agent("failed", AgentFailed), agent("stopped", AgentStopped), agent("pending", AgentPending), agent("gone", AgentActive),
	}
	all[7].PromotedTo = "gone_x"
	roi := map[AgentID]int64{all[0].ID: 5, all[1].ID: 0, all[2].ID: MaxROI, all[3].ID: -1, all[4].ID: 9}
	moves, left, err := Plan(all, roi)
	if err != nil {
		t.Fatal(err)
	}
	var kinds []string
	for _, m := range moves {
		kinds = append(kinds, m.Type)
		if want := map[string]any{"k": "v"}; !reflect.DeepEqual(m.Spec.Config, want) {
			t.Errorf("%s: config %v, want %v", m.Type, m.Spec.Config, want)
		}
		if want := m.Type + "_" + string(m.From[len(m.From)-8:]); string(m.To) != want {
			t.Errorf("%s becomes %s, want %s", m.From, m.To, want)
		}
	}
	if want := []string{"earns", "even", "rests"}; !slices.Equal(kinds, want) || len(left) != 5 {
		t.Errorf("moves %v and leaves %v, want %v to move", kinds, left, want)
	}
	if _, left, err = Plan(all[3:], roi); sandbox.CodeOf(err) != "nothing_to_promote" || len(left) != 5 {
		t.Errorf("with nobody to move: %v, left %v", err, left)
	}
	if all[0].Spec.Config[KeySandboxMode] != true {
		t.Error("the plan changed the agent's own config")
	}
}

func TestRestarts(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	a := Agent{Status: AgentActive, StartedAt: now, Process: "p1", Spec: AgentSpec{Restart: RestartPolicy{Max: 3, BackoffMS: 1000}}}
	var waits []time.Duration
	for a.Status != AgentFailed {
		a = a.After(now, false, "why")
		if a.Status == AgentPending {
			waits = append(waits, a.Next.Sub(now))
		}
		if a.Process != "" || a.Detail != "why" || len(waits) > 9 {
			t.Fatalf("%+v", a)
		}
	}
	if want := []time.Duration{time.Second, 2 * time.Second, 4 * time.Second}; !slices.Equal(waits, want) || a.Restarts != 3 {
		t.Errorf("waits %v, want %v", waits, want)
	}
	// One that ran long enough counts anew.
	a = Agent{Status: AgentActive, StartedAt: now.Add(-time.Hour), Failures: 3, Spec: a.Spec}
	if a = a.After(now, true, ""); a.Status != AgentPending || a.Failures != 1 || a.Next.Sub(now) != time.Second {
		t.Errorf("after an hour: %+v", a)
	}
	for _, c := range []struct {
		when string
		ok   bool
		want AgentStatus
	}{
		{"", true, AgentPending},
		{RestartAlways, true, AgentPending},
		{RestartOnFailure, true, AgentStopped},
		{RestartOnFailure, false, AgentPending},
		{RestartNever, true, AgentStopped},
		{RestartNever, false, AgentFailed},
	} {
		a := Agent{Status: AgentActive, StartedAt: now, Spec: AgentSpec{Restart: RestartPolicy{When: c.when}}}
		if got := a.After(now, c.ok, "").Status; got != c.want {
			t.Errorf("restart %q, ended well %v: %s, want %s", c.when, c.ok, got, c.want)
		}
	}
	most := RestartPolicy{BackoffMS: 3600_000}
	for n := range 100 {
		if d := (RestartPolicy{}).backoff(n); d < time.Second || d > maxBackoff {
			t.Errorf("backoff after %d: %s", n, d)
		}
		if d := most.backoff(n); d != time.Hour {
			t.Errorf("a backoff of an hour after %d: %s", n, d)
		}
	}
}

// TestMoves names every permitted move once more.
func TestMoves(t *testing.T) {
	check := func(what string, n int, can func(i, j int) bool, name func(int) string, want ...string) {
		t.Helper()
		var got []string
		for i := range n {
			for j := range n {
				if can(i, j) {
					got = append(got, name(i)+">"+name(j))
				}
			}
		}
		slices.Sort(want)
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	p, a, m := Statuses(), AgentStatuses(), PromotionStatuses()
	check("project", len(p), func(i, j int) bool { return p[i].CanMove(p[j]) }, func(i int) string { return string(p[i]) },
		"active>promoting", "active>killed", "promoting>active", "promoting>promoted", "promoted>killed")
	check("agent", len(a), func(i, j int) bool { return a[i].CanMove(a[j]) }, func(i int) string { return string(a[i]) },
		"pending>active", "pending>failed", "pending>stopped", "active>pending", "active>paused", "active>failed", "active>stopped",
		"paused>active", "paused>pending", "paused>failed", "paused>stopped", "failed>pending", "failed>stopped", "stopped>pending", "stopped>paused")
	check("promotion", len(m), func(i, j int) bool { return m[i].CanMove(m[j]) }, func(i int) string { return string(m[i]) },
		"moving>watching", "moving>rolling_back", "watching>finishing", "watching>rolling_back", "finishing>done", "rolling_back>rolled_back")
	for _, s := range m {
		if s.Final() != (len(promotionMoves[s]) == 0) {
			t.Errorf("%s is final: %v", s, s.Final())
		}
	}
}

func TestIDs(t *testing.T) {
	p := NewID()
	if got, err := ParseID(string(p)); err != nil || got != p {
		t.Errorf("%s: %s, %v", p, got, err)
	}
	for _, s := range []string{"", "prj_", "prj_short", "PRJ_aaaaaaaaaaaa", "prj_aaaaaaaaaaa1", "prj_aaaaaaaaaaaaa", "sbaaaaaaaaaaaa"} {
		if _, err := ParseID(s); sandbox.CodeOf(err) != "invalid_project_id" {
			t.Errorf("%q: %v", s, err)
		}
	}
	longest := strings.Repeat("x", maxType)
	for _, kind := range []string{"a", "a-b", "9", longest} {
		if err := ValidateType(kind); err != nil {
			t.Error(err)
		}
		id := NewAgentID(p, kind)
		if err := sandbox.ValidateName(string(id)); err != nil {
			t.Errorf("an agent's id is no name: %v", err)
		}
		if got := string(id.Promoted()); !strings.HasPrefix(got, kind+"_") || len(got) != len(kind)+9 || sandbox.ValidateName(got) != nil || id.Promoted().Promoted() != id.Promoted() {
			t.Errorf("%s becomes %s", id, got)
		}
	}
	for _, kind := range []string{"", "a_b", "A", "-a", "a.b", "sandbox", longest + "x"} {
		if ValidateType(kind) == nil {
			t.Errorf("type %q is taken", kind)
		}
	}
}

func TestAgentSpecValidate(t *testing.T) {
	good := AgentSpec{Command: []string{"x"}}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*AgentSpec){
		"no command":       func(s *AgentSpec) { s.Command = nil },
		"reserved key":     func(s *AgentSpec) { s.Config = map[string]any{KeySandboxMode: false} },
		"reserved env":     func(s *AgentSpec) { s.Env = map[string]string{"SANDBOX_MODE": "false"} },
		"large config":     func(s *AgentSpec) { s.Config = map[string]any{"x": strings.Repeat("x", maxConfig)} },
		"unknown restart":  func(s *AgentSpec) { s.Restart.When = "sometimes" },
		"negative restart": func(s *AgentSpec) { s.Restart.Max = -1 },
		"empty check":      func(s *AgentSpec) { s.Health = &HealthCheck{} },
		"negative check":   func(s *AgentSpec) { s.Health = &HealthCheck{Command: []string{"x"}, Interval: -1} },
		"bad limits":       func(s *AgentSpec) { s.Limits.MemoryBytes = 1 },
		"bad network":      func(s *AgentSpec) { s.Network.Mode = "wide" },
	} {
		s := good
		change(&s)
		if err := s.Validate(); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestCleanedUndoesSandboxed(t *testing.T) {
	for _, config := range []map[string]any{nil, {"a": "b"}, {"list": []any{"x"}}} {
		s := AgentSpec{Command: []string{"x"}, Config: config}
		in := s.Sandboxed("prj_x")
		if in.Config[KeySandboxMode] != true || in.Config[KeyDepartment] != Department || in.Config[KeyProject] != "prj_x" {
			t.Errorf("in the lab: %v", in.Config)
		}
		if got := in.Cleaned(); !reflect.DeepEqual(got, s) {
			t.Errorf("cleaned: %+v, want %+v", got, s)
		}
	}
	a := Agent{ID: "bot_x", Type: "bot", Spec: AgentSpec{Config: map[string]any{"a": 1}}}
	b, err := a.File()
	var m map[string]any
	if err == nil {
		err = json.Unmarshal(b, &m)
	}
	if err != nil || m["a"] != 1.0 || m[KeyAgent] != "bot_x" || m[KeySandboxMode] != nil || len(a.Spec.Config) != 1 {
		t.Errorf("the file of an agent in production: %s, %v", b, err)
	}
	if env := a.Environment(); env["SANDBOX_MODE"] != "" || env["AGENT_CONFIG"] != ConfigPath {
		t.Errorf("its environment: %v", env)
	}
}

func TestExperiments(t *testing.T) {
	all := Templates()
	r, err := ExperimentRequest{Template: "ab", Config: map[string]any{"more": 1}}.Fill(all)
	if err != nil || r.Hypothesis == "" || r.Seconds == 0 || r.Config["variants"] == nil || r.Config["more"] != 1 {
		t.Errorf("filled: %+v, %v", r, err)
	}
	if all[1].Config["more"] != nil {
		t.Error("filling changed the template")
	}
	if _, err := (ExperimentRequest{}).Fill(all); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("without a hypothesis: %v", err)
	}
	if _, err := (ExperimentRequest{Template: "nope"}).Fill(all); sandbox.CodeOf(err) != "template_not_found" {
		t.Errorf("without a template: %v", err)
	}
	now := time.Now()
	e := Experiment{Status: ExperimentRunning, Deadline: now}
	if !e.Overdue(now) || e.Overdue(now.Add(-1)) || (Experiment{Status: ExperimentRunning}).Overdue(now) {
		t.Error("overdue at the wrong time")
	}
	e, err = e.Complete(now, Outcome{Success: true})
	if err != nil || e.Status != ExperimentCompleted || e.Overdue(now) {
		t.Errorf("completed: %+v, %v", e, err)
	}
	if _, err := e.Complete(now, Outcome{}); sandbox.CodeOf(err) != "experiment_ended" {
		t.Errorf("completed twice: %v", err)
	}
	if n := CountExperiments([]Experiment{e, {Status: ExperimentExpired}, {Status: ExperimentRunning}}); n != (Experiments{Running: 1, Completed: 1, Succeeded: 1, Expired: 1}) {
		t.Errorf("counted %+v", n)
	}
}

func TestSettings(t *testing.T) {
	for name, s := range map[string]Settings{
		"webhook":          {Webhooks: []Hook{{URL: "ftp://x"}}},
		"alerts of a name": {Alerts: []Rule{{"a", "true"}, {"a", "false"}}},
		"criteria":         {Criteria: Criteria{Custom: []Rule{{"a", "true"}, {"a", "false"}}}},
		"built-in name":    {Criteria: Criteria{Custom: []Rule{{CriterionROI, "true"}}}},
		"negative":         {Criteria: Criteria{MinActive: -1}},
		"goal":             {Goal: "\xff"},
	} {
		if err := s.Validate(); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	p := Project{Settings: Settings{Webhooks: []Hook{{URL: "http://x", Secret: "s"}}}}
	if p.Shown().Webhooks[0].Secret != "" || p.Webhooks[0].Secret != "s" {
		t.Error("a secret is shown, or lost")
	}
	goal := "new"
	if got := (Change{Goal: &goal}).Apply(Settings{Goal: "old", Cron: "@daily"}); got.Goal != "new" || got.Cron != "@daily" {
		t.Errorf("changed: %+v", got)
	}
}
