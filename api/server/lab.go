package server

import (
	"context"
	"net/http"
	"strings"
	"sync"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Lab is what the server needs of the lab. A ref is a project's id or name.
type Lab interface {
	CreateProject(ctx context.Context, req project.Request) (project.Project, error)
	// Projects lists those of a status; without one, those not killed or all.
	Projects(ctx context.Context, status project.Status, all bool) ([]project.Project, error)
	Summary(ctx context.Context, status project.Status) (project.Summary, error)
	View(ctx context.Context, ref string) (project.View, error)
	ChangeProject(ctx context.Context, ref string, ch project.Change) (project.Project, error)
	KillProject(ctx context.Context, ref string, dropWorkspace bool, actor string) (project.Project, error)
	// RemoveProject forgets a killed one.
	RemoveProject(ctx context.Context, ref, actor string) error
	Deploy(ctx context.Context, ref, kind string, spec project.AgentSpec, actor string) (project.Agent, error)
	// SetAgent pauses, resumes, stops or starts an agent of either world.
	SetAgent(ctx context.Context, id project.AgentID, verb, actor string) (project.Agent, error)
	// RemoveAgent ends one of production.
	RemoveAgent(ctx context.Context, id project.AgentID, actor string) error
	ProductionAgents(ctx context.Context) ([]project.Agent, error)
	Enter(ctx context.Context, ref string, e project.Entry, actor string) (project.Entry, error)
	Templates() []project.Template
	StartExperiment(ctx context.Context, ref string, req project.ExperimentRequest) (project.Experiment, error)
	CompleteExperiment(ctx context.Context, ref string, id project.ExperimentID, o project.Outcome) (project.Experiment, error)
	Experiments(ctx context.Context, ref string) ([]project.Experiment, error)
	Evaluate(ctx context.Context, ref, actor string) (project.Evaluation, error)
	Evaluations(ctx context.Context, ref string, limit int) ([]project.Evaluation, error)
	// Promote returns when the promotion has begun.
	Promote(ctx context.Context, ref string, req project.PromotionRequest) (project.Promotion, error)
	Promotions(ctx context.Context, ref string) ([]project.Promotion, error)
}

// ProjectTarget is the path of everything about one project.
type ProjectTarget struct {
	Project string `path:"project" maxLength:"127" pattern:"^[a-z0-9][a-z0-9._-]{0,62}(@[a-z0-9][a-z0-9._:-]*)?$" patternDescription:"the id, name or name@owner of a project"`
}

// AgentTarget is the path of one agent.
type AgentTarget struct {
	Agent string `path:"agent" maxLength:"63" pattern:"^[a-z0-9][a-z0-9._-]*$" patternDescription:"the id of an agent"`
}

type (
	projectInput  struct{ Body project.Request }
	projectsInput struct {
		Status string `query:"status" maxLength:"20" doc:"Only these: active, promoting, promoted or killed."`
		All    bool   `query:"all" doc:"Killed ones too."`
	}
	verbInput struct {
		AgentTarget
		Verb string `path:"verb" enum:"pause,resume,stop,start"`
	}
	projectChange struct {
		ProjectTarget
		Body project.Change
	}
	killInput struct {
		ProjectTarget
		DryInput
		Body api.KillRequest
	}
	deployInput struct {
		ProjectTarget
		Body api.DeployRequest
	}
	projectEntry struct {
		ProjectTarget
		Body project.Entry
	}
	experimentInput struct {
		ProjectTarget
		Body project.ExperimentRequest
	}
	outcomeInput struct {
		ProjectTarget
		Experiment string `path:"experiment" maxLength:"20"`
		Body       project.Outcome
	}
	evaluationsInput struct {
		ProjectTarget
		Limit int `query:"limit" minimum:"1" maximum:"1000" doc:"At most this many, the newest; 20 when absent."`
	}
	promoteInput struct {
		ProjectTarget
		Body project.PromotionRequest
	}
)

func labOp(id, method, path, summary string, status int) huma.Operation {
	return huma.Operation{OperationID: id, Method: method, Path: path, Summary: summary, DefaultStatus: status, Tags: []string{"projects"}}
}

func (s *server) labRoutes() {
	s.projectRoutes()
	s.agentRoutes()
	s.experimentRoutes()
	register(s, labOp("evaluate-project", http.MethodPost, "/v1/projects/{project}/evaluations", "Judge a project by what it came to", http.StatusCreated),
		func(ctx context.Context, in *ProjectTarget) (*result[project.Evaluation], error) {
			return wrap(s.lab.Evaluate(ctx, in.Project, actorOf(ctx)))
		})
	register(s, labOp("list-evaluations", http.MethodGet, "/v1/projects/{project}/evaluations", "A project's evaluations, the newest first", 0),
		func(ctx context.Context, in *evaluationsInput) (*result[api.EvaluationList], error) {
			all, err := s.lab.Evaluations(ctx, in.Project, in.Limit)
			return wrap(api.EvaluationList{Items: orEmpty(all)}, err)
		})
	register(s, labOp("promote-project", http.MethodPost, "/v1/projects/{project}/promotions", "Begin to move a project's agents into production", http.StatusAccepted),
		func(ctx context.Context, in *promoteInput) (*result[project.Promotion], error) {
			req := in.Body
			req.Actor = actorOf(ctx)
			return wrap(s.lab.Promote(ctx, in.Project, req))
		})
	register(s, labOp("list-promotions", http.MethodGet, "/v1/projects/{project}/promotions", "A project's promotions, the newest first", 0),
		func(ctx context.Context, in *ProjectTarget) (*result[api.PromotionList], error) {
			all, err := s.lab.Promotions(ctx, in.Project)
			return wrap(api.PromotionList{Items: orEmpty(all)}, err)
		})
}

func (s *server) projectRoutes() {
	register(s, labOp("create-project", http.MethodPost, "/v1/projects", "Make a project with a workspace", http.StatusCreated),
		func(ctx context.Context, in *projectInput) (*result[project.Project], error) {
			req := in.Body
			req.Actor = actorOf(ctx)
			return wrap(s.lab.CreateProject(ctx, req))
		})
	register(s, labOp("list-projects", http.MethodGet, "/v1/projects", "List the projects, the oldest first", 0),
		func(ctx context.Context, in *projectsInput) (*result[api.ProjectList], error) {
			all, err := s.lab.Projects(ctx, project.Status(in.Status), in.All)
			return wrap(api.ProjectList{Items: orEmpty(all)}, err)
		})
	register(s, labOp("summarize-projects", http.MethodGet, "/v1/project-summary", "What the projects came to, and their sum", 0),
		func(ctx context.Context, in *projectsInput) (*result[project.Summary], error) {
			return wrap(s.lab.Summary(ctx, project.Status(in.Status)))
		})
	register(s, labOp("get-project", http.MethodGet, "/v1/projects/{project}", "One project with all that belongs to it", 0),
		func(ctx context.Context, in *ProjectTarget) (*result[project.View], error) {
			v, err := s.lab.View(ctx, in.Project)
			v.Agents, v.Experiments = orEmpty(v.Agents), orEmpty(v.Experiments)
			return wrap(v, err)
		})
	register(s, labOp("change-project", http.MethodPatch, "/v1/projects/{project}", "Change a project's settings", 0),
		func(ctx context.Context, in *projectChange) (*result[project.Project], error) {
			ch := in.Body
			ch.Actor = actorOf(ctx)
			return wrap(s.lab.ChangeProject(ctx, in.Project, ch))
		})
	register(s, labOp("kill-project", http.MethodPost, "/v1/projects/{project}/kill", "End a project; its record stays", 0),
		func(ctx context.Context, in *killInput) (*result[project.Project], error) {
			if in.DryRun {
				v, err := s.lab.View(ctx, in.Project)
				return wrap(v.Project, err)
			}
			return wrap(s.lab.KillProject(ctx, in.Project, in.Body.DeleteWorkspace, actorOf(ctx)))
		})
	register(s, labOp("remove-project", http.MethodDelete, "/v1/projects/{project}", "Forget a killed project", http.StatusNoContent),
		func(ctx context.Context, in *ProjectTarget) (*empty, error) {
			return nil, s.lab.RemoveProject(ctx, in.Project, actorOf(ctx))
		})
	register(s, labOp("enter-money", http.MethodPost, "/v1/projects/{project}/entries", "Enter a cost or a revenue from outside", http.StatusCreated),
		func(ctx context.Context, in *projectEntry) (*result[project.Entry], error) {
			return wrap(s.lab.Enter(ctx, in.Project, in.Body, actorOf(ctx)))
		})
}

func (s *server) agentRoutes() {
	register(s, labOp("deploy-agent", http.MethodPost, "/v1/projects/{project}/agents", "Add an agent to a project and start it", http.StatusCreated),
		func(ctx context.Context, in *deployInput) (*result[project.Agent], error) {
			return wrap(s.lab.Deploy(ctx, in.Project, in.Body.Type, in.Body.Spec, actorOf(ctx)))
		})
	register(s, labOp("set-agent", http.MethodPost, "/v1/agents/{agent}/{verb}", "Pause, resume, stop or start an agent of either world", 0),
		func(ctx context.Context, in *verbInput) (*result[project.Agent], error) {
			return wrap(s.lab.SetAgent(ctx, project.AgentID(in.Agent), in.Verb, actorOf(ctx)))
		})
	register(s, labOp("remove-agent", http.MethodDelete, "/v1/agents/{agent}", "End an agent of production for good", http.StatusNoContent),
		func(ctx context.Context, in *AgentTarget) (*empty, error) {
			return nil, s.lab.RemoveAgent(ctx, project.AgentID(in.Agent), actorOf(ctx))
		})
	register(s, labOp("list-production-agents", http.MethodGet, "/v1/production-agents", "The agents of the production world", 0),
		func(ctx context.Context, _ *empty) (*result[api.AgentList], error) {
			all, err := s.lab.ProductionAgents(ctx)
			return wrap(api.AgentList{Items: orEmpty(all)}, err)
		})
}

func (s *server) experimentRoutes() {
	register(s, labOp("list-experiment-templates", http.MethodGet, "/v1/experiment-templates", "What experiments can begin with", 0),
		func(context.Context, *empty) (*result[api.TemplateList], error) {
			return wrap(api.TemplateList{Items: orEmpty(s.lab.Templates())}, nil)
		})
	register(s, labOp("start-experiment", http.MethodPost, "/v1/projects/{project}/experiments", "Begin an experiment", http.StatusCreated),
		func(ctx context.Context, in *experimentInput) (*result[project.Experiment], error) {
			req := in.Body
			req.Actor = actorOf(ctx)
			return wrap(s.lab.StartExperiment(ctx, in.Project, req))
		})
	register(s, labOp("list-experiments", http.MethodGet, "/v1/projects/{project}/experiments", "A project's experiments, the oldest first", 0),
		func(ctx context.Context, in *ProjectTarget) (*result[api.ExperimentList], error) {
			all, err := s.lab.Experiments(ctx, in.Project)
			return wrap(api.ExperimentList{Items: orEmpty(all)}, err)
		})
	register(s, labOp("complete-experiment", http.MethodPost, "/v1/projects/{project}/experiments/{experiment}/complete", "Write an experiment's outcome down", 0),
		func(ctx context.Context, in *outcomeInput) (*result[project.Experiment], error) {
			o := in.Body
			o.Actor = actorOf(ctx)
			return wrap(s.lab.CompleteExperiment(ctx, in.Project, project.ExperimentID(in.Experiment), o))
		})
}

// production serves the routes that look at the production world, which may
// come to be later than the server.
func (s *server) production(cfg Config) http.Handler {
	var (
		once  sync.Once
		world http.Handler
	)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		refuse := func(class error, code, detail string) {
			writeProblem(w, api.NewProblem(class, code, detail, requestOf(r.Context()).id))
		}
		var m Manager
		if cfg.Production != nil {
			m = cfg.Production()
		}
		switch {
		case m == nil:
			refuse(sandbox.ErrNotFound, "no_production", "there is no production world yet: a promotion makes it")
			return
		case r.Method != http.MethodGet && r.Method != http.MethodHead && !aboutMoney(r.URL.Path):
			refuse(sandbox.ErrForbidden, "production_read_only", "the production world is changed by promotions and 'sandbox project agent' alone")
			return
		}
		once.Do(func() {
			world = New(Config{Manager: m, Log: s.log, Version: s.version, Office: s.office, Audit: s.audit, world: "production:"})
		})
		world.ServeHTTP(w, r)
	})
}

// aboutMoney reports whether a route is of costs, revenue and budgets, which
// the production world has of its own.
func aboutMoney(path string) bool {
	for _, of := range []string{"/v1/costs", "/v1/revenue", "/v1/budgets"} {
		if path == of || strings.HasPrefix(path, of+"/") {
			return true
		}
	}
	return false
}
