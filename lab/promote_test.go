package lab

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// easy are criteria that a young project can pass.
var easy = project.Settings{Criteria: project.Criteria{MinAge: -1, MinExperiments: -1}}

// crew is a project with an agent that earns, one that loses, one that is
// paused and one that failed.
type crew struct {
	project.Project
	earns, loses, rests, fails project.Agent
}

func (h *host) crew(earner project.AgentSpec) crew {
	h.t.Helper()
	c := crew{Project: h.project("crew", easy)}
	c.earns = h.deploy(c.Project, "earner", earner)
	c.loses = h.deploy(c.Project, "loser", project.AgentSpec{})
	c.rests = h.deploy(c.Project, "resting", project.AgentSpec{})
	c.fails = h.deploy(c.Project, "failing", project.AgentSpec{Command: []string{"exit", "3"}, Restart: project.RestartPolicy{When: project.RestartNever}})
	h.books.set(c.earns.ID, 1e9, 9e9)
	h.books.set(c.loses.ID, 2e9, 1e9)
	if _, err := h.SetAgent(h.t.Context(), c.rests.ID, "pause", "uid:0"); err != nil {
		h.t.Fatal(err)
	}
	h.becomes(c.earns.ID, project.AgentActive)
	h.becomes(c.loses.ID, project.AgentActive)
	h.becomes(c.fails.ID, project.AgentFailed)
	return c
}

// ends waits for the end of a project's promotion.
func (h *host) ends(c crew) project.Promotion {
	h.t.Helper()
	var p project.Promotion
	until(h.t, "the promotion ends", func() bool {
		v := h.view(c.Project)
		if v.Promotion == nil {
			return true
		}
		p = *v.Promotion
		return p.Status.Final()
	})
	return p
}

// settled fails the test unless a promotion that ended left everything as its
// end says.
func (h *host) settled(c crew, p project.Promotion) {
	h.t.Helper()
	to := []string{string(c.earns.ID.Promoted()), string(c.rests.ID.Promoted())}
	slices.Sort(to)
	inLab := []string{string(c.earns.ID), string(c.rests.ID)}
	v := h.view(c.Project)
	far, err := h.ProductionAgents(context.Background())
	if err != nil {
		h.t.Fatal(err)
	}
	var ids []string
	for _, a := range far {
		ids = append(ids, string(a.ID))
		if a.Project != "" || a.Spec.Config[project.KeySandboxMode] != nil || a.Spec.Config[project.KeyDepartment] != nil || a.Volume != string(a.ID) {
			h.t.Errorf("in production: %+v", a)
		}
	}
	slices.Sort(ids)
	switch p.Status {
	case project.PromotionDone:
		if v.Status != project.StatusPromoted || !slices.Equal(ids, to) {
			h.t.Errorf("promoted: project %s, agents in production %v, want %v", v.Status, ids, to)
		}
		until(h.t, "they run in production", func() bool { return slices.Equal(h.far.running(), to) })
		if living := h.lab.living(); slices.Contains(living, inLab[0]) || slices.Contains(living, inLab[1]) {
			h.t.Errorf("promoted, and still in the lab: %v", living)
		}
	case project.PromotionRolledBack:
		if v.Status != project.StatusActive || len(ids) != 0 || len(h.far.living()) != 0 || len(h.far.volumes()) != 0 {
			h.t.Errorf("rolled back: project %s, in production %v, sandboxes %v, volumes %v", v.Status, ids, h.far.living(), h.far.volumes())
		}
		until(h.t, "they run in the lab", func() bool { return slices.Contains(h.lab.running(), string(c.earns.ID)) })
		if got := h.agent(c.rests.ID); got.Status != project.AgentPaused {
			h.t.Errorf("the paused agent is %s after a rollback", got.Status)
		}
	}
	h.budgeted("the lab", h.lab, "1000", c.earns.ID, c.loses.ID, c.rests.ID, c.fails.ID)
	if p.Status == project.PromotionDone {
		until(h.t, "they have their budgets in production", func() bool { all, _ := h.far.Budgets(context.Background()); return len(all) == 2 })
		h.budgeted("production", h.far, "100", c.earns.ID.Promoted(), c.rests.ID.Promoted())
	} else {
		h.budgeted("production", h.far, "100")
	}
	for _, a := range v.Agents {
		if a.Held != "" {
			h.t.Errorf("agent %s is held by %s after the end", a.ID, a.Held)
		}
		if moved := a.ID == c.earns.ID || a.ID == c.rests.ID; (a.PromotedTo != "") != (moved && p.Status == project.PromotionDone) {
			h.t.Errorf("agent %s promoted to %q", a.ID, a.PromotedTo)
		}
	}
	if a := h.agent(c.loses.ID); a.Status != project.AgentActive {
		h.t.Errorf("the losing agent is %s", a.Status)
	}
	if a := h.agent(c.fails.ID); a.Status != project.AgentFailed {
		h.t.Errorf("the failed agent is %s", a.Status)
	}
}

// budgeted fails the test unless a world has a budget of tokens for each of
// these agents, and no other.
func (h *host) budgeted(where string, k *kernel, limit string, want ...project.AgentID) {
	h.t.Helper()
	all, _ := k.Budgets(context.Background())
	var got []project.AgentID
	for _, b := range all {
		got = append(got, project.AgentID(b.ID))
		if b.Scope != cost.ScopeAgent || b.Meter != "tokens" || b.Limit != limit || b.Period != cost.Day {
			h.t.Errorf("a budget in %s: %+v", where, b)
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		h.t.Errorf("budgets in %s of %v, want %v", where, got, want)
	}
}

// apart fails the test where an agent runs in both worlds.
func (h *host) apart(where string) {
	h.t.Helper()
	far := h.far.running()
	for _, name := range h.lab.running() {
		if slices.Contains(far, string(project.AgentID(name).Promoted())) {
			h.t.Errorf("%s: agent %s runs in both worlds", where, name)
		}
	}
}

func TestPromotionMovesTheRightAgents(t *testing.T) {
	h := newHost(t)
	h.lab.Images["bots"] = sandbox.Image{Name: "bots", Digest: "sha256:feedfacecafebeef0000", Kind: sandbox.ImageOCI}
	c := h.crew(project.AgentSpec{Image: "bots", Config: map[string]any{"rate": "slow"}, Health: &project.HealthCheck{Command: []string{"healthy"}, Interval: 10}})
	if got := h.agent(c.earns.ID).Spec.Config; got[project.KeySandboxMode] != true || got[project.KeyDepartment] != project.Department {
		t.Errorf("config in the lab: %v", got)
	}
	p, err := h.Promote(t.Context(), string(c.ID), project.PromotionRequest{Actor: "uid:0"})
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Moves) != 2 || len(p.Left) != 2 {
		t.Errorf("moves %+v, left %+v", p.Moves, p.Left)
	}
	_, err = h.Promote(t.Context(), string(c.ID), project.PromotionRequest{})
	if sandbox.CodeOf(err) != "project_not_active" {
		t.Errorf("promoted twice at once: %v", err)
	}
	if _, err := h.KillProject(t.Context(), string(c.ID), false, "x"); sandbox.CodeOf(err) != "promotion_running" {
		t.Errorf("killed while being promoted: %v", err)
	}
	p = h.ends(c)
	if p.Status != project.PromotionDone {
		t.Fatalf("ended %s: %s", p.Status, p.Detail)
	}
	h.settled(c, p)
	if a := h.agent(c.earns.ID.Promoted()); a.Spec.Config["rate"] != "slow" || a.Spec.Image != "promoted-feedfacecafebeef" {
		t.Errorf("in production: %+v", a.Spec)
	}
	if s, _ := h.far.look(t, string(c.earns.ID.Promoted())); s.ImageDigest != "sha256:feedfacecafebeef0000" || s.Project != "" || s.Labels[project.LabelDepartment] != "" {
		t.Errorf("its sandbox in production: %+v", s)
	}

	// Production does not notice the end of the project.
	if _, err := h.KillProject(t.Context(), string(c.ID), true, "uid:0"); err != nil {
		t.Fatal(err)
	}
	if living := h.lab.living(); len(living) != 0 || len(h.lab.volumes()) != 0 {
		t.Errorf("after the kill: sandboxes %v, volumes %v", living, h.lab.volumes())
	}
	if got := h.far.running(); len(got) != 2 {
		t.Errorf("after the kill production has %v", got)
	}
}

func TestPromotionOfAnUnwellAgentIsRolledBack(t *testing.T) {
	h := newHost(t)
	c := h.crew(project.AgentSpec{Health: &project.HealthCheck{Command: []string{"ill"}, Interval: 5, Retries: 2, Grace: 3600_000}})
	// In the lab nobody minds within the grace; in production it must pass.
	if _, err := h.Promote(t.Context(), string(c.ID), project.PromotionRequest{}); err != nil {
		t.Fatal(err)
	}
	p := h.ends(c)
	if p.Status != project.PromotionRolledBack || !strings.Contains(p.Detail, "health") {
		t.Fatalf("ended %s: %s", p.Status, p.Detail)
	}
	h.settled(c, p)
}

// TestPromotionAsksAtTheEndOfItsWindow: where the window ends while the agents
// are being asked, they are asked again before it is decided.
func TestPromotionAsksAtTheEndOfItsWindow(t *testing.T) {
	for check, want := range map[string]project.PromotionStatus{"ill": project.PromotionRolledBack, "healthy": project.PromotionDone} {
		h := newHost(t)
		h.far.rowsTake = 60 * time.Millisecond // two agents: longer than the window
		c := h.crew(project.AgentSpec{Health: &project.HealthCheck{Command: []string{check}, Interval: 5, Grace: 3600_000}})
		if _, err := h.Promote(t.Context(), string(c.ID), project.PromotionRequest{Window: 100}); err != nil {
			t.Fatal(err)
		}
		if p := h.ends(c); p.Status != want && (check == "ill" || !strings.Contains(p.Detail, "never")) {
			t.Errorf("%s: ended %s (%s), want %s", check, p.Status, p.Detail, want)
		}
	}
}

func TestPromotionOfACrashingAgentIsRolledBack(t *testing.T) {
	h := newHost(t)
	c := h.crew(project.AgentSpec{})
	h.step = func(s string) error {
		if s == "watch" {
			h.far.kill(t, string(c.earns.ID.Promoted()), 1)
		}
		return nil
	}
	if _, err := h.Promote(t.Context(), string(c.ID), project.PromotionRequest{}); err != nil {
		t.Fatal(err)
	}
	p := h.ends(c)
	if p.Status != project.PromotionRolledBack || !strings.Contains(p.Detail, "exited with 1") {
		t.Fatalf("ended %s: %s", p.Status, p.Detail)
	}
	h.settled(c, p)
}

// checks are those of the agent that earns, by what becomes of its promotion.
func checks() map[string]*project.HealthCheck {
	return map[string]*project.HealthCheck{
		"kept":        {Command: []string{"healthy"}, Interval: 10},
		"rolled back": {Command: []string{"ill"}, Interval: 5, Grace: 3600_000},
	}
}

// TestPromotionSurvivesKillsAnywhere kills a process with a lab at every step of
// a promotion, and of a rollback; another goes on from what it left on disk.
func TestPromotionSurvivesKillsAnywhere(t *testing.T) {
	for name, health := range checks() {
		t.Run(name, func(t *testing.T) {
			var steps []string
			h := newHost(t)
			h.step = func(s string) error { steps = append(steps, s); return nil }
			c := h.crew(project.AgentSpec{Health: health})
			if _, err := h.Promote(t.Context(), string(c.ID), project.PromotionRequest{}); err != nil {
				t.Fatal(err)
			}
			first := h.ends(c)
			h.stop()
			if len(steps) < 12 {
				t.Fatalf("only %d steps: %v", len(steps), steps)
			}
			for i, at := range steps {
				t.Run(fmt.Sprintf("%d %s", i, at), func(t *testing.T) { killedAt(t, name, i, first.Status) })
			}
		})
	}
}

// victim says, in the environment of TestVictim, where it is to die:
// DIRECTORY|CHECK|STEP.
const victim = "SANDBOXD_TEST_LAB_VICTIM"

// TestVictim is the process that is killed.
func TestVictim(t *testing.T) {
	asked := strings.Split(os.Getenv(victim), "|")
	if len(asked) != 3 {
		t.Skip("this is a part of TestPromotionSurvivesKillsAnywhere")
	}
	at, err := strconv.Atoi(asked[2])
	if err != nil {
		t.Fatal(err)
	}
	h := hostAt(t, asked[0])
	h.start()
	c := h.crew(project.AgentSpec{Health: checks()[asked[1]]})
	n := 0
	h.step = func(string) error {
		h.apart("before a step")
		if n == at && !t.Failed() {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
		n++
		return nil
	}
	if _, err := h.Promote(t.Context(), string(c.ID), project.PromotionRequest{}); err != nil {
		t.Fatal(err)
	}
	h.ends(c)
	t.Error("the promotion came to its end")
}

// killedAt runs a victim to its death and goes on in its place.
func killedAt(t *testing.T, check string, at int, want project.PromotionStatus) {
	t.Parallel()
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0], "-test.run", "^TestVictim$", "-test.timeout", "60s")
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s|%s|%d", victim, dir, check, at))
	out, err := cmd.CombinedOutput()
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !status.Signaled() || status.Signal() != syscall.SIGKILL {
		t.Fatalf("the victim was not killed: %v\n%s", err, out)
	}
	h := hostAt(t, dir)
	h.apart("after the kill")
	h.step = func(string) error { h.apart("before a step after the kill"); return nil }
	h.start()
	c := h.findCrew()
	if at == 0 { // before the plan was written: nothing was begun
		if v := h.view(c.Project); v.Status != project.StatusActive || v.Promotion != nil {
			t.Fatalf("killed before the plan: %s, %+v", v.Status, v.Promotion)
		}
		return
	}
	p := h.ends(c)
	if p.Status != want {
		t.Fatalf("ended %s (%s), want %s", p.Status, p.Detail, want)
	}
	h.settled(c, p)
}

// findCrew finds the crew of an earlier process.
func (h *host) findCrew() crew {
	h.t.Helper()
	v, err := h.View(context.Background(), "crew")
	if err != nil {
		h.t.Fatal(err)
	}
	c := crew{Project: v.Project}
	for _, a := range v.Agents {
		switch a.Type {
		case "earner":
			c.earns = a.Agent
		case "loser":
			c.loses = a.Agent
		case "resting":
			c.rests = a.Agent
		case "failing":
			c.fails = a.Agent
		}
	}
	return c
}
