package client

import (
	"bytes"
	"context"
	"net/http"
	"net/url"
	"strconv"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/project"
)

// InProduction returns a client of the same daemon that sees the production
// world: it can look at sandboxes there, and change nothing.
func (c *Client) InProduction() *Client {
	p := *c
	p.base += api.PathProduction
	return &p
}

// CreateProject makes a project.
func (c *Client) CreateProject(ctx context.Context, req project.Request) (project.Project, error) {
	return post[project.Project](ctx, c, path("projects"), req, nil)
}

// Projects lists the projects of a status; without one, those that were not
// killed, or all.
func (c *Client) Projects(ctx context.Context, status project.Status, all bool) ([]project.Project, error) {
	q := url.Values{}
	set(q, "status", string(status))
	if all {
		q.Set("all", "true")
	}
	l, err := get[api.ProjectList](ctx, c, path("projects"), q)
	return l.Items, err
}

// ProjectSummary sums the projects of a status up, or all.
func (c *Client) ProjectSummary(ctx context.Context, status project.Status) (project.Summary, error) {
	q := url.Values{}
	set(q, "status", string(status))
	return get[project.Summary](ctx, c, path("project-summary"), q)
}

// Project returns a project with all that belongs to it.
func (c *Client) Project(ctx context.Context, ref string) (project.View, error) {
	return get[project.View](ctx, c, path("projects", ref), nil)
}

// ChangeProject changes a project's settings.
func (c *Client) ChangeProject(ctx context.Context, ref string, ch project.Change) (project.Project, error) {
	b, err := api.MarshalUTF8(ch)
	if err != nil {
		return project.Project{}, err
	}
	return ask[project.Project](ctx, c, call{
		method: http.MethodPatch, path: path("projects", ref), body: bytes.NewReader(b), short: true,
		header: http.Header{"Content-Type": {"application/json"}},
	})
}

// KillProject ends a project.
func (c *Client) KillProject(ctx context.Context, ref string, deleteWorkspace bool) (project.Project, error) {
	return post[project.Project](ctx, c, path("projects", ref, "kill"), api.KillRequest{DeleteWorkspace: deleteWorkspace}, nil)
}

// RemoveProject forgets a killed project.
func (c *Client) RemoveProject(ctx context.Context, ref string) error {
	_, err := ask[none](ctx, c, call{method: http.MethodDelete, path: path("projects", ref)})
	return err
}

// Deploy adds an agent to a project.
func (c *Client) Deploy(ctx context.Context, ref, kind string, spec project.AgentSpec) (project.Agent, error) {
	return post[project.Agent](ctx, c, path("projects", ref, "agents"), api.DeployRequest{Type: kind, Spec: spec}, nil)
}

// SetAgent pauses, resumes, stops or starts an agent.
func (c *Client) SetAgent(ctx context.Context, id project.AgentID, verb string) (project.Agent, error) {
	return post[project.Agent](ctx, c, path("agents", string(id), verb), nil, nil)
}

// RemoveAgent ends an agent of production for good.
func (c *Client) RemoveAgent(ctx context.Context, id project.AgentID) error {
	_, err := ask[none](ctx, c, call{method: http.MethodDelete, path: path("agents", string(id))})
	return err
}

// ProductionAgents lists the agents of the production world.
func (c *Client) ProductionAgents(ctx context.Context) ([]project.Agent, error) {
	l, err := get[api.AgentList](ctx, c, path("production-agents"), nil)
	return l.Items, err
}

// EnterMoney enters a cost or a revenue from outside.
func (c *Client) EnterMoney(ctx context.Context, ref string, e project.Entry) (project.Entry, error) {
	return post[project.Entry](ctx, c, path("projects", ref, "entries"), e, nil)
}

// ExperimentTemplates lists what experiments can begin with.
func (c *Client) ExperimentTemplates(ctx context.Context) ([]project.Template, error) {
	l, err := get[api.TemplateList](ctx, c, path("experiment-templates"), nil)
	return l.Items, err
}

// StartExperiment begins an experiment.
func (c *Client) StartExperiment(ctx context.Context, ref string, req project.ExperimentRequest) (project.Experiment, error) {
	return post[project.Experiment](ctx, c, path("projects", ref, "experiments"), req, nil)
}

// CompleteExperiment writes an experiment's outcome down.
func (c *Client) CompleteExperiment(ctx context.Context, ref string, id project.ExperimentID, o project.Outcome) (project.Experiment, error) {
	return post[project.Experiment](ctx, c, path("projects", ref, "experiments", string(id), "complete"), o, nil)
}

// Experiments lists a project's experiments.
func (c *Client) Experiments(ctx context.Context, ref string) ([]project.Experiment, error) {
	l, err := get[api.ExperimentList](ctx, c, path("projects", ref, "experiments"), nil)
	return l.Items, err
}

// Evaluate judges a project.
func (c *Client) Evaluate(ctx context.Context, ref string) (project.Evaluation, error) {
	return post[project.Evaluation](ctx, c, path("projects", ref, "evaluations"), nil, nil)
}

// Evaluations lists a project's last evaluations, the newest first.
func (c *Client) Evaluations(ctx context.Context, ref string, limit int) ([]project.Evaluation, error) {
	q := url.Values{}
	if limit > 0 {
		q.Set("limit", strconv.Itoa(limit))
	}
	l, err := get[api.EvaluationList](ctx, c, path("projects", ref, "evaluations"), q)
	return l.Items, err
}

// Promote begins to move a project's agents into production.
func (c *Client) Promote(ctx context.Context, ref string, req project.PromotionRequest) (project.Promotion, error) {
	return post[project.Promotion](ctx, c, path("projects", ref, "promotions"), req, nil)
}

// Promotions lists a project's promotions, the newest first.
func (c *Client) Promotions(ctx context.Context, ref string) ([]project.Promotion, error) {
	l, err := get[api.PromotionList](ctx, c, path("projects", ref, "promotions"), nil)
	return l.Items, err
}
