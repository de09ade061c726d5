package lab

import (
	"context"
	"io"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Sandboxes is the manager of one world's sandboxes.
type Sandboxes interface {
	Create(ctx context.Context, req sandbox.CreateRequest) (sandbox.Sandbox, error)
	Sandbox(ctx context.Context, ref string) (sandbox.Sandbox, error)
	Pause(ctx context.Context, ref, actor string) (sandbox.Sandbox, error)
	Resume(ctx context.Context, ref, actor string) (sandbox.Sandbox, error)
	Stop(ctx context.Context, ref, actor string) (sandbox.Sandbox, error)
	Start(ctx context.Context, ref, actor string) (sandbox.Sandbox, error)
	Remove(ctx context.Context, ref, actor string) (sandbox.Sandbox, error)
	StartProcess(ctx context.Context, ref string, spec sandbox.ProcessSpec) (sandbox.Process, error)
	Processes(ctx context.Context, ref string) ([]sandbox.Process, error)
	SignalProcess(ctx context.Context, ref string, id sandbox.ProcessID, signal string) error
	Exec(ctx context.Context, ref string, spec sandbox.ProcessSpec) (sandbox.ProcessIO, error)
	Files(ctx context.Context, ref string) (sandbox.Files, error)
	CreateVolume(ctx context.Context, req sandbox.VolumeRequest) (sandbox.Volume, error)
	RemoveVolume(ctx context.Context, name, actor string) error
	Image(ctx context.Context, name string) (sandbox.Image, error)
	ExportImage(ctx context.Context, req sandbox.ExportRequest) (io.ReadCloser, error)
	ImportImage(ctx context.Context, req sandbox.ImportRequest, r io.Reader) (sandbox.Image, error)
	Events(ctx context.Context, after int64, ref string, limit int) ([]sandbox.Event, error)
	Subscribe() (<-chan struct{}, func())
	SetBudget(ctx context.Context, req cost.BudgetRequest) (cost.BudgetState, error)
	Budgets(ctx context.Context) ([]cost.BudgetState, error)
	RemoveBudget(ctx context.Context, key, actor string) error
}

// Rows are the lab's rows in one world's database.
type Rows interface {
	UpdateLab(ctx context.Context, f func(project.Tx) error) error
	AppendEvent(ctx context.Context, e sandbox.Event) (seq int64, err error)
	Agent(ctx context.Context, id project.AgentID) (project.Agent, error)
	// Agents returns those of a project, or with an empty id all.
	Agents(ctx context.Context, id project.ID) ([]project.Agent, error)
}

// Store is the database of the lab's own world.
type Store interface {
	Rows
	Project(ctx context.Context, id project.ID) (project.Project, error)
	ProjectByName(ctx context.Context, name string) (project.Project, error)
	Projects(ctx context.Context) ([]project.Project, error)
	LiveProjects(ctx context.Context) ([]project.Project, error)
	Experiments(ctx context.Context, id project.ID) ([]project.Experiment, error)
	Evaluations(ctx context.Context, id project.ID, limit int) ([]project.Evaluation, error)
	Promotions(ctx context.Context, id project.ID) ([]project.Promotion, error)
}

// Books keep what was spent and earned in the lab.
type Books interface {
	// Money returns what each agent of a project came to, sandboxes that are
	// gone included, and what was entered for the project as a whole.
	Money(ctx context.Context, id project.ID) (agents map[project.AgentID]project.Money, own project.Money, err error)
	// Enter takes money from outside in, once for its key: for a sandbox, or
	// without one for the project.
	Enter(ctx context.Context, id project.ID, of sandbox.ID, e project.Entry, actor string) error
}

// World is a database with agents, and the sandboxes they run in.
type World struct {
	Rows      Rows
	Sandboxes Sandboxes
}

// NextRun tells when a cron expression comes due after a moment. Class
// ErrInvalid.
type NextRun func(expression string, after time.Time) (time.Time, error)
