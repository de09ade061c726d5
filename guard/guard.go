package guard

import (
	"context"
	"time"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Rows finds what one owner has. Of what another has its errors say what they
// say of what nobody has. A ref is as the manager takes it.
type Rows interface {
	OwnByRef(ctx context.Context, owner, ref string) (sandbox.Sandbox, error)
	// OwnInLedger also finds sandboxes whose records are gone.
	OwnInLedger(ctx context.Context, owner, ref string) (id string, err error)
	OwnSnapshot(ctx context.Context, owner, ref string) (sandbox.Snapshot, error)
	OwnSnapshots(ctx context.Context, owner string, kinds ...sandbox.SnapshotKind) ([]sandbox.Snapshot, error)
	OwnSchedule(ctx context.Context, owner, id string) (sandbox.Schedule, error)
	OwnSchedules(ctx context.Context, owner string) ([]sandbox.Schedule, error)
	OwnPort(ctx context.Context, owner, id string) (sandbox.Port, error)
	OwnPorts(ctx context.Context, owner string) ([]sandbox.Port, error)
	// OwnVolume returns under which of two names there is one.
	OwnVolume(ctx context.Context, owner, stored, name string) (string, error)
	OwnEvents(ctx context.Context, owner string, after int64, limit int) ([]sandbox.Event, error)
	OwnProject(ctx context.Context, owner, ref string) (project.Project, error)
	OwnAgent(ctx context.Context, owner string, id project.AgentID) (project.Agent, error)
	// Held adds up what an owner has, every sandbox made before the call
	// included.
	Held(ctx context.Context, owner string) (access.Held, error)
	// KeyUsed reports whether an idempotency key has made a sandbox.
	KeyUsed(ctx context.Context, owner, key string) (bool, error)
}

// Quotas tells what an owner may have.
type Quotas interface {
	Quota(ctx context.Context, owner string) (access.Quota, error)
}

// Config is what a Manager is made of.
type Config struct {
	Manager server.Manager
	Rows    Rows
	Quotas  Quotas

	// Crowded refuses an owner something more on the volume; nil: never.
	Crowded func(owner string) error

	// What the manager gives sandboxes that ask for nothing: quotas are
	// reckoned with it.
	Defaults    sandbox.Limits
	DefaultTTL  time.Duration
	DefaultIdle time.Duration

	// Closed says that only those who see all may call at all.
	Closed bool
}

// Manager is a server.Manager for the caller in the context.
type Manager struct {
	m      server.Manager
	cfg    Config
	rows   Rows
	purses purses
}

var _ server.Manager = (*Manager)(nil)

// New wraps a manager.
func New(cfg Config) *Manager {
	return &Manager{m: cfg.Manager, cfg: cfg, rows: cfg.Rows}
}

// asker is a caller who sees what is their own. A nil one sees all.
type asker struct {
	access.Caller
	names
}

// intent is whether a call looks or changes.
type intent bool

const (
	looks   intent = false
	changes intent = true
)

// ask returns who asks, nil for those who see all. ErrForbidden where they may
// not at all.
func (g *Manager) ask(ctx context.Context, in intent) (*asker, error) {
	a, err := askerOf(ctx, in)
	if err == nil && a != nil && g.cfg.Closed {
		return nil, forOperators("the production world")
	}
	return a, err
}

func askerOf(ctx context.Context, in intent) (*asker, error) {
	c, ok := access.Of(ctx)
	if !ok || c.SeesAll() {
		return nil, nil
	}
	if c.Owner == "" {
		return nil, sandbox.Errorf(sandbox.ErrForbidden, "role_forbidden", "a caller without an owner has nothing to work on")
	}
	if in == changes && !c.MayChange() {
		return nil, sandbox.Errorf(sandbox.ErrForbidden, "role_forbidden", "the role %s only looks: this takes the role %s", c.Role, access.RoleDeveloper)
	}
	return &asker{Caller: c, names: namesOf(c.Owner)}, nil
}

// forOperators is the error of what only those who see all may do.
func forOperators(what string) error {
	return sandbox.Errorf(sandbox.ErrForbidden, "role_forbidden", "%s: this takes the role %s; ask one", what, access.RoleOperator)
}

// operators lets those pass who see all.
func (g *Manager) operators(ctx context.Context, what string) error {
	a, err := g.ask(ctx, looks)
	if err == nil && a != nil {
		err = forOperators(what)
	}
	return err
}

// box returns who asks and the sandbox they mean by ref: for those who see all
// as they said it, for others the id of one of their own.
func (g *Manager) box(ctx context.Context, ref string, in intent) (*asker, string, error) {
	a, err := g.ask(ctx, in)
	if a == nil || err != nil {
		return a, ref, err
	}
	sb, err := g.rows.OwnByRef(ctx, a.Owner, ref)
	return a, string(sb.ID), err
}

// act changes one sandbox.
func (g *Manager) act(ctx context.Context, ref string, do func(ref string) (sandbox.Sandbox, error)) (sandbox.Sandbox, error) {
	a, ref, err := g.box(ctx, ref, changes)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	sb, err := do(ref)
	return a.sandbox(sb), a.plain(err)
}

// as is the actor of what a caller does: never another's.
func (a *asker) as(actor string) string {
	if a == nil {
		return actor
	}
	return a.Owner
}
