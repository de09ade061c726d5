package servertest

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Lab is a lab in memory: its agents only say that they run.
type Lab struct {
	mu       sync.Mutex
	views    []*project.View
	money    map[project.ID]map[project.AgentID]project.Money
	judged   map[project.ID][]project.Evaluation
	promoted map[project.ID][]project.Promotion
	far      []project.Agent
}

// NewLab returns a lab without projects.
func NewLab() *Lab {
	return &Lab{money: map[project.ID]map[project.AgentID]project.Money{}, judged: map[project.ID][]project.Evaluation{}, promoted: map[project.ID][]project.Promotion{}}
}

// find returns a project; l.mu is held.
func (l *Lab) find(ref string) (*project.View, error) {
	for _, v := range l.views {
		if string(v.ID) == ref || v.Name == ref {
			return v, nil
		}
	}
	return nil, sandbox.Errorf(sandbox.ErrNotFound, "project_not_found", "no project %.70q", ref)
}

// CreateProject makes a project.
func (l *Lab) CreateProject(_ context.Context, req project.Request) (project.Project, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := sandbox.ValidateName(req.Name); err != nil {
		return project.Project{}, err
	}
	if _, err := l.find(req.Name); err == nil {
		return project.Project{}, sandbox.Errorf(sandbox.ErrConflict, "project_exists", "there is a project %s already", req.Name)
	}
	p := project.Project{ID: project.NewID(), Name: req.Name, Owner: req.Actor, Status: project.StatusActive, CreatedAt: time.Now(), Settings: req.Settings}
	p.Workspace = "ws-" + string(p.ID)
	l.views, l.money[p.ID] = append(l.views, &project.View{Project: p}), map[project.AgentID]project.Money{}
	return p.Shown(), req.Validate()
}

// Projects lists the projects.
func (l *Lab) Projects(_ context.Context, status project.Status, all bool) ([]project.Project, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []project.Project
	for _, v := range l.views {
		if status != "" && v.Status == status || status == "" && (all || v.Status != project.StatusKilled) {
			out = append(out, v.Shown())
		}
	}
	return out, nil
}

// Summary sums them up.
func (l *Lab) Summary(ctx context.Context, status project.Status) (project.Summary, error) {
	s := project.Summary{Count: map[project.Status]int{}, Projects: []project.Line{}}
	list, err := l.Projects(ctx, status, true)
	var sum project.Money
	for _, p := range list {
		v, err := l.View(ctx, string(p.ID))
		if err != nil {
			return s, err
		}
		s.Count[p.Status]++
		s.Projects = append(s.Projects, project.Line{ID: p.ID, Name: p.Name, Status: p.Status, Agents: len(v.Agents), Metrics: v.Metrics})
		sum = sum.Add(project.Money{Cost: v.Metrics.Cost, Revenue: v.Metrics.Revenue})
	}
	s.Total = project.MetricsOf(sum)
	return s, err
}

// View shows a project.
func (l *Lab) View(_ context.Context, ref string) (project.View, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	v, err := l.find(ref)
	if err != nil {
		return project.View{}, err
	}
	out := *v
	out.Project, out.Agents = v.Shown(), slices.Clone(v.Agents)
	for i, a := range out.Agents {
		out.Agents[i].Metrics = project.MetricsOf(l.money[v.ID][a.ID])
	}
	out.Metrics = project.Total(project.Money{}, l.money[v.ID])
	return out, nil
}

// ChangeProject changes its settings.
func (l *Lab) ChangeProject(_ context.Context, ref string, ch project.Change) (project.Project, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	v, err := l.find(ref)
	if err != nil {
		return project.Project{}, err
	}
	v.Settings = ch.Apply(v.Settings)
	return v.Shown(), v.Validate()
}

// KillProject ends it.
func (l *Lab) KillProject(_ context.Context, ref string, dropWorkspace bool, _ string) (project.Project, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	v, err := l.find(ref)
	if err != nil {
		return project.Project{}, err
	}
	v.Status = project.StatusKilled
	for i := range v.Agents {
		v.Agents[i].Status = project.AgentStopped
	}
	if dropWorkspace {
		v.Workspace = ""
	}
	return v.Shown(), nil
}

// RemoveProject forgets it.
func (l *Lab) RemoveProject(_ context.Context, ref, _ string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	v, err := l.find(ref)
	if err != nil {
		return err
	}
	if v.Status != project.StatusKilled {
		return sandbox.Errorf(sandbox.ErrConflict, "project_not_killed", "project %s is %s", v.ID, v.Status)
	}
	l.views = slices.DeleteFunc(l.views, func(o *project.View) bool { return o == v })
	return nil
}

// Deploy adds an agent.
func (l *Lab) Deploy(_ context.Context, ref, kind string, spec project.AgentSpec, actor string) (project.Agent, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	v, err := l.find(ref)
	if err == nil {
		err = project.ValidateType(kind)
	}
	if err == nil {
		err = spec.Validate()
	}
	if err != nil {
		return project.Agent{}, err
	}
	a := project.Agent{ID: project.NewAgentID(v.ID, kind), Project: v.ID, Type: kind, Owner: actor, Status: project.AgentActive, CreatedAt: time.Now(), Spec: spec.Sandboxed(v.ID)}
	v.Agents = append(v.Agents, project.AgentView{Agent: a})
	return a, nil
}

// SetAgent changes an agent's status.
func (l *Lab) SetAgent(_ context.Context, id project.AgentID, verb, _ string) (project.Agent, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	to := map[string]project.AgentStatus{"pause": project.AgentPaused, "resume": project.AgentActive, "stop": project.AgentStopped, "start": project.AgentActive}[verb]
	for _, v := range l.views {
		for i, a := range v.Agents {
			if a.ID == id {
				v.Agents[i].Status = to
				return v.Agents[i].Agent, nil
			}
		}
	}
	return project.Agent{}, sandbox.Errorf(sandbox.ErrNotFound, "agent_not_found", "no agent %.70q", id)
}

// RemoveAgent ends an agent of production.
func (l *Lab) RemoveAgent(_ context.Context, id project.AgentID, _ string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(l.far)
	l.far = slices.DeleteFunc(l.far, func(a project.Agent) bool { return a.ID == id })
	if len(l.far) == n {
		return sandbox.Errorf(sandbox.ErrNotFound, "agent_not_found", "no agent %.70q", id)
	}
	return nil
}

// ProductionAgents lists those of production.
func (l *Lab) ProductionAgents(context.Context) ([]project.Agent, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.far), nil
}

// Enter takes money in, each time.
func (l *Lab) Enter(_ context.Context, ref string, e project.Entry, _ string) (project.Entry, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	v, err := l.find(ref)
	if err == nil {
		err = e.Validate()
	}
	if err != nil {
		return e, err
	}
	m := l.money[v.ID][e.Agent]
	if e.Kind == cost.KindRevenue {
		m.Revenue = m.Revenue.Add(cost.SumOf(e.Amount))
	} else {
		m.Cost = m.Cost.Add(cost.SumOf(e.Amount))
	}
	l.money[v.ID][e.Agent] = m
	return e, nil
}

// Templates lists the built-in ones.
func (l *Lab) Templates() []project.Template { return project.Templates() }

// StartExperiment begins one.
func (l *Lab) StartExperiment(_ context.Context, ref string, req project.ExperimentRequest) (project.Experiment, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var e project.Experiment
	v, err := l.find(ref)
	if err == nil {
		req, err = req.Fill(l.Templates())
	}
	if err != nil {
		return e, err
	}
	e = project.Experiment{
		ID: project.NewExperimentID(), Project: v.ID, Status: project.ExperimentRunning, Template: req.Template, Hypothesis: req.Hypothesis,
		Config: req.Config, Agents: req.Agents, StartedAt: time.Now(),
	}
	v.Experiments = append(v.Experiments, e)
	return e, nil
}

// CompleteExperiment writes its outcome.
func (l *Lab) CompleteExperiment(_ context.Context, ref string, id project.ExperimentID, o project.Outcome) (e project.Experiment, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	v, err := l.find(ref)
	if err != nil {
		return e, err
	}
	for i := range v.Experiments {
		if v.Experiments[i].ID == id {
			v.Experiments[i], err = v.Experiments[i].Complete(time.Now(), o)
			return v.Experiments[i], err
		}
	}
	return e, sandbox.Errorf(sandbox.ErrNotFound, "experiment_not_found", "no experiment %.40q", id)
}

// Experiments lists those of a project.
func (l *Lab) Experiments(ctx context.Context, ref string) ([]project.Experiment, error) {
	v, err := l.View(ctx, ref)
	return v.Experiments, err
}

// Evaluate judges a project; its data are always old enough.
func (l *Lab) Evaluate(ctx context.Context, ref, actor string) (e project.Evaluation, err error) {
	v, err := l.View(ctx, ref)
	if err != nil {
		return e, err
	}
	in := project.Inputs{At: time.Now(), Age: 1 << 20, Total: v.Metrics, Experiments: project.CountExperiments(v.Experiments)}
	for _, a := range v.Agents {
		in.Agents = append(in.Agents, project.AgentMetrics{Agent: a.ID, Type: a.Type, Status: a.Status, Metrics: a.Metrics})
	}
	e = project.Evaluation{ID: project.NewEvaluationID(), Project: v.ID, At: in.At, Actor: actor, Criteria: v.Criteria, Inputs: in}
	e.Verdicts, e.Recommendation = project.Judge(v.Criteria, in, func(string, project.Inputs) (bool, error) { return true, nil })
	l.mu.Lock()
	defer l.mu.Unlock()
	l.judged[v.ID] = append([]project.Evaluation{e}, l.judged[v.ID]...)
	return e, nil
}

// Evaluations lists the last.
func (l *Lab) Evaluations(_ context.Context, ref string, _ int) ([]project.Evaluation, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	v, err := l.find(ref)
	if err != nil {
		return nil, err
	}
	return l.judged[v.ID], nil
}

// Promote promotes at once.
func (l *Lab) Promote(ctx context.Context, ref string, req project.PromotionRequest) (p project.Promotion, err error) {
	e, err := l.Evaluate(ctx, ref, req.Actor)
	if err != nil {
		return p, err
	}
	if e.Recommendation == project.NotReady && !req.Force {
		return p, sandbox.Errorf(sandbox.ErrConflict, "not_ready", "project %s is NOT_READY", e.Project)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	v, err := l.find(ref)
	if err != nil {
		return p, err
	}
	roi := map[project.AgentID]int64{}
	var agents []project.Agent
	for _, a := range e.Inputs.Agents {
		roi[a.Agent] = a.Rate()
	}
	for _, a := range v.Agents {
		agents = append(agents, a.Agent)
	}
	p = project.Promotion{ID: project.NewPromotionID(), Project: v.ID, Status: project.PromotionDone, Evaluation: e.ID, StartedAt: time.Now()}
	if p.Moves, p.Left, err = project.Plan(agents, roi); err != nil {
		return p, err
	}
	for _, m := range p.Moves {
		l.far = append(l.far, m.Agent(p, v.Owner))
	}
	v.Status = project.StatusPromoted
	l.promoted[v.ID] = append([]project.Promotion{p}, l.promoted[v.ID]...)
	return p, nil
}

// Promotions lists those of a project.
func (l *Lab) Promotions(_ context.Context, ref string) ([]project.Promotion, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	v, err := l.find(ref)
	if err != nil {
		return nil, err
	}
	return l.promoted[v.ID], nil
}
