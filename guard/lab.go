package guard

import (
	"context"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Lab is the lab for the caller in the context: projects belong to owners,
// production to those who see all.
type Lab struct {
	l server.Lab
	g *Manager
}

var _ server.Lab = (*Lab)(nil)

// Lab wraps a lab that works on this manager's sandboxes.
func (g *Manager) Lab(l server.Lab) *Lab { return &Lab{l, g} }

// of returns who asks and the project they mean: as they said it to those who
// see all, the id of one of their own to others.
func (l *Lab) of(ctx context.Context, ref string, in intent) (*asker, string, error) {
	a, err := l.g.ask(ctx, in)
	if a == nil || err != nil {
		return a, ref, err
	}
	p, err := l.g.rows.OwnProject(ctx, a.Owner, ref)
	return a, string(p.ID), err
}

// CreateProject makes a project of the caller's, with a workspace within the
// quota.
func (l *Lab) CreateProject(ctx context.Context, req project.Request) (project.Project, error) {
	a, err := l.g.ask(ctx, changes)
	if err != nil || a == nil {
		return orElse(err, func() (project.Project, error) { return l.l.CreateProject(ctx, req) })
	}
	req.Actor = a.Owner
	release, err := l.g.roomForVolume(ctx, a, 0, first(req.WorkspaceBytes, l.g.cfg.Defaults.DiskBytes))
	if err != nil {
		return project.Project{}, err
	}
	defer release()
	return l.l.CreateProject(context.WithoutCancel(ctx), req)
}

// Projects lists the caller's projects.
func (l *Lab) Projects(ctx context.Context, status project.Status, all bool) ([]project.Project, error) {
	a, err := l.g.ask(ctx, looks)
	if err != nil {
		return nil, err
	}
	list, err := l.l.Projects(ctx, status, all)
	if a != nil {
		list = only(list, func(p project.Project) bool { return p.Owner == a.Owner })
	}
	return list, err
}

// Summary sums the caller's projects up.
func (l *Lab) Summary(ctx context.Context, status project.Status) (project.Summary, error) {
	a, err := l.g.ask(ctx, looks)
	if err != nil {
		return project.Summary{}, err
	}
	s, err := l.l.Summary(ctx, status)
	if a == nil || err != nil {
		return s, err
	}
	own, err := l.Projects(ctx, status, true)
	if err != nil {
		return project.Summary{}, err
	}
	mine := map[project.ID]bool{}
	for _, p := range own {
		mine[p.ID] = true
	}
	out := project.Summary{Projects: []project.Line{}, Count: map[project.Status]int{}}
	var sum project.Money
	for _, line := range s.Projects {
		if !mine[line.ID] {
			continue
		}
		sum = sum.Add(project.Money{Cost: line.Metrics.Cost, Revenue: line.Metrics.Revenue})
		out.Projects = append(out.Projects, line)
		out.Count[line.Status]++
	}
	out.Total = project.MetricsOf(sum)
	return out, nil
}

// View shows one of the caller's projects.
func (l *Lab) View(ctx context.Context, ref string) (project.View, error) {
	a, ref, err := l.of(ctx, ref, looks)
	if err != nil {
		return project.View{}, err
	}
	v, err := l.l.View(ctx, ref)
	for i := range v.Agents {
		v.Agents[i].Agent = a.agent(v.Agents[i].Agent)
	}
	return v, err
}

// ChangeProject changes one of the caller's projects.
func (l *Lab) ChangeProject(ctx context.Context, ref string, ch project.Change) (project.Project, error) {
	a, ref, err := l.of(ctx, ref, changes)
	if err != nil {
		return project.Project{}, err
	}
	ch.Actor = a.as(ch.Actor)
	return l.l.ChangeProject(ctx, ref, ch)
}

// KillProject ends one of the caller's projects.
func (l *Lab) KillProject(ctx context.Context, ref string, dropWorkspace bool, actor string) (project.Project, error) {
	a, ref, err := l.of(ctx, ref, changes)
	if err != nil {
		return project.Project{}, err
	}
	return l.l.KillProject(ctx, ref, dropWorkspace, a.as(actor))
}

// RemoveProject forgets one of the caller's projects.
func (l *Lab) RemoveProject(ctx context.Context, ref, actor string) error {
	a, ref, err := l.of(ctx, ref, changes)
	if err != nil {
		return err
	}
	return l.l.RemoveProject(ctx, ref, a.as(actor))
}

// Deploy adds an agent to one of the caller's projects, where the quota has
// room for its sandbox. Its sandbox lives as long as the agent is wanted.
func (l *Lab) Deploy(ctx context.Context, ref, kind string, spec project.AgentSpec, actor string) (project.Agent, error) {
	a, ref, err := l.of(ctx, ref, changes)
	if err != nil || a == nil {
		return orElse(err, func() (project.Agent, error) { return l.l.Deploy(ctx, ref, kind, spec, actor) })
	}
	if err := limitsAllowed(spec.Limits); err != nil {
		return project.Agent{}, err
	}
	if spec.Image != "" {
		img, err := l.g.image(ctx, a, spec.Image)
		if err != nil {
			return project.Agent{}, err
		}
		spec.Image = img.Name
	}
	if err := a.amendPolicy(&spec.Network); err != nil {
		return project.Agent{}, err
	}
	q, err := l.g.cfg.Quotas.Quota(ctx, a.Owner)
	if err != nil {
		return project.Agent{}, err
	}
	held, err := l.g.held(ctx, a.Owner)
	if err == nil {
		err = exceeds(q, held, l.g.needs(sandbox.Spec{Limits: spec.Limits}, 1))
	}
	if err != nil {
		return project.Agent{}, err
	}
	agent, err := l.l.Deploy(ctx, ref, kind, spec, a.Owner) // its keeper reserves: see Agents
	return a.agent(agent), a.plain(err)
}

// agentOf checks that an agent is of one of the caller's projects.
func (l *Lab) agentOf(ctx context.Context, id project.AgentID, in intent) (*asker, error) {
	a, err := l.g.ask(ctx, in)
	if a == nil || err != nil {
		return a, err
	}
	_, err = l.g.rows.OwnAgent(ctx, a.Owner, id)
	return a, err
}

// SetAgent pauses, resumes, stops or starts an agent of the caller's.
func (l *Lab) SetAgent(ctx context.Context, id project.AgentID, verb, actor string) (project.Agent, error) {
	a, err := l.agentOf(ctx, id, changes)
	if err != nil {
		return project.Agent{}, err
	}
	agent, err := l.l.SetAgent(ctx, id, verb, a.as(actor))
	return a.agent(agent), a.plain(err)
}

// RemoveAgent ends an agent of production, for those who see all.
func (l *Lab) RemoveAgent(ctx context.Context, id project.AgentID, actor string) error {
	if err := l.g.operators(ctx, "the production world"); err != nil {
		return err
	}
	return l.l.RemoveAgent(ctx, id, actor)
}

// ProductionAgents lists those of production, for those who see all.
func (l *Lab) ProductionAgents(ctx context.Context) ([]project.Agent, error) {
	if err := l.g.operators(ctx, "the production world"); err != nil {
		return nil, err
	}
	return l.l.ProductionAgents(ctx)
}

// Enter enters money of one of the caller's projects.
func (l *Lab) Enter(ctx context.Context, ref string, e project.Entry, actor string) (project.Entry, error) {
	a, ref, err := l.of(ctx, ref, changes)
	if err == nil && a != nil && e.Kind == cost.KindCost && e.Amount < 0 {
		err = noCredit()
	}
	if err != nil {
		return project.Entry{}, err
	}
	return l.l.Enter(ctx, ref, e, a.as(actor))
}

// Templates are everybody's to see.
func (l *Lab) Templates() []project.Template { return l.l.Templates() }

// StartExperiment begins one in one of the caller's projects.
func (l *Lab) StartExperiment(ctx context.Context, ref string, req project.ExperimentRequest) (project.Experiment, error) {
	a, ref, err := l.of(ctx, ref, changes)
	if err != nil {
		return project.Experiment{}, err
	}
	req.Actor = a.as(req.Actor)
	return l.l.StartExperiment(ctx, ref, req)
}

// CompleteExperiment ends one of one of the caller's projects.
func (l *Lab) CompleteExperiment(ctx context.Context, ref string, id project.ExperimentID, o project.Outcome) (project.Experiment, error) {
	a, ref, err := l.of(ctx, ref, changes)
	if err != nil {
		return project.Experiment{}, err
	}
	o.Actor = a.as(o.Actor)
	return l.l.CompleteExperiment(ctx, ref, id, o)
}

// Experiments lists those of one of the caller's projects.
func (l *Lab) Experiments(ctx context.Context, ref string) ([]project.Experiment, error) {
	_, ref, err := l.of(ctx, ref, looks)
	if err != nil {
		return nil, err
	}
	return l.l.Experiments(ctx, ref)
}

// Evaluate judges one of the caller's projects.
func (l *Lab) Evaluate(ctx context.Context, ref, actor string) (project.Evaluation, error) {
	a, ref, err := l.of(ctx, ref, changes)
	if err != nil {
		return project.Evaluation{}, err
	}
	return l.l.Evaluate(ctx, ref, a.as(actor))
}

// Evaluations lists those of one of the caller's projects.
func (l *Lab) Evaluations(ctx context.Context, ref string, limit int) ([]project.Evaluation, error) {
	_, ref, err := l.of(ctx, ref, looks)
	if err != nil {
		return nil, err
	}
	return l.l.Evaluations(ctx, ref, limit)
}

// Promote moves agents into production, for those who see all. A project of
// another owner is missing before that.
func (l *Lab) Promote(ctx context.Context, ref string, req project.PromotionRequest) (project.Promotion, error) {
	a, ref, err := l.of(ctx, ref, changes)
	if err == nil && a != nil {
		err = forOperators("promotion")
	}
	if err != nil {
		return project.Promotion{}, err
	}
	return l.l.Promote(ctx, ref, req)
}

// Promotions lists those of one of the caller's projects.
func (l *Lab) Promotions(ctx context.Context, ref string) ([]project.Promotion, error) {
	_, ref, err := l.of(ctx, ref, looks)
	if err != nil {
		return nil, err
	}
	return l.l.Promotions(ctx, ref)
}

// CreateAgent makes the sandbox of an agent, which the daemon itself does: the
// quota of the agent's owner holds, whoever asked and whenever it is made.
func (g *Manager) CreateAgent(ctx context.Context, req sandbox.CreateRequest, create func(context.Context, sandbox.CreateRequest) (sandbox.Sandbox, error)) (sandbox.Sandbox, error) {
	if c, called := access.Of(ctx); req.Actor == "" || called && c.SeesAll() && c.Owner == req.Actor {
		return create(ctx, req)
	}
	q, err := g.cfg.Quotas.Quota(ctx, req.Actor)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	release, err := g.reserve(ctx, req.Actor, q, g.needs(req.Spec, 1))
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return finish(ctx, release, func(ctx context.Context) (sandbox.Sandbox, error) { return create(ctx, req) })
}
