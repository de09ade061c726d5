package main

import (
	"context"
	"time"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/build"
	"github.com/sandboxd/sandboxd/guard"
	"github.com/sandboxd/sandboxd/lab"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// The fits of the guard, who stands between the API and the manager.
var (
	_ guard.Rows      = (*state.DB)(nil)
	_ guard.Shop      = (*runtime.Manager)(nil)
	_ build.Sandboxes = guard.Workshop{}
	_ build.Images    = guard.Workshop{}
	_ build.Cache     = guard.Workshop{}
	_ lab.Sandboxes   = agentSandboxes{}
)

// newGuard lets each caller at what is theirs, within their quota.
func newGuard(c config, m server.Manager, crowded func(string) error, db *state.DB, quotas guard.Quotas) *guard.Manager {
	return guard.New(guard.Config{
		Manager: m, Rows: db, Quotas: quotas, Crowded: crowded,
		Defaults: c.limits(), DefaultTTL: time.Duration(c.TTL), DefaultIdle: time.Duration(c.Idle),
	})
}

// guardedView is the production world for those who see all; nil where there
// is none.
func (w *worlds) guardedView() server.Manager {
	m := w.view()
	if m == nil {
		return nil
	}
	return guard.New(guard.Config{Manager: m, Rows: w.parts.db, Closed: true})
}

// labSandboxes are a world's manager as the lab has it, which finds agents'
// sandboxes by their names, whoever has them and whoever asked.
type labSandboxes struct{ *runtime.Manager }

// Sandbox finds a sandbox.
func (s labSandboxes) Sandbox(ctx context.Context, ref string) (sandbox.Sandbox, error) {
	return s.Manager.Sandbox(access.Without(ctx), ref)
}

// agentSandboxes are those of the lab's own world: the quotas of agents' owners
// hold, also for what the lab makes by itself.
type agentSandboxes struct {
	labSandboxes
	g *guard.Manager
}

// Create makes an agent's sandbox.
func (s agentSandboxes) Create(ctx context.Context, req sandbox.CreateRequest) (sandbox.Sandbox, error) {
	return s.g.CreateAgent(ctx, req, s.Manager.Create)
}
