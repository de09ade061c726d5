package main

import (
	"context"
	"io"

	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/sandbox"
)

var _ server.Manager = productionService{}

// productionService is the production world as the API shows it, which only
// looks: what would change something there the lab alone does.
type productionService struct{ *runtime.Manager }

// Sandbox has the counters of now.
func (s productionService) Sandbox(ctx context.Context, ref string) (sandbox.Sandbox, error) {
	return s.Inspect(ctx, ref)
}

// Doctor has nothing to say of production alone.
func (s productionService) Doctor(context.Context) []sandbox.Check { return nil }

// Pool tells how the pool of shells does.
func (s productionService) Pool(context.Context) (sandbox.PoolStats, error) {
	return s.Manager.Pool(), nil
}

// Ports lists none: none can be published there.
func (s productionService) Ports(context.Context, string) ([]sandbox.Port, error) { return nil, nil }

func lookOnly() error {
	return sandbox.Errorf(sandbox.ErrForbidden, "production_read_only", "the production world is changed by promotions and 'sandbox project agent' alone")
}

// Build is refused.
func (s productionService) Build(context.Context, sandbox.BuildRequest, io.Reader, func(sandbox.BuildEvent) error) (sandbox.Image, error) {
	return sandbox.Image{}, lookOnly()
}

// PublishPort is refused.
func (s productionService) PublishPort(context.Context, string, sandbox.PortRequest, string) (sandbox.Port, error) {
	return sandbox.Port{}, lookOnly()
}

// UnpublishPort is refused.
func (s productionService) UnpublishPort(context.Context, string, string) (sandbox.Port, error) {
	return sandbox.Port{}, lookOnly()
}

// NewPortToken is refused.
func (s productionService) NewPortToken(context.Context, string, string) (string, error) {
	return "", lookOnly()
}

// RemovePortToken is refused.
func (s productionService) RemovePortToken(context.Context, string, string) error { return lookOnly() }

// books are the lab's books: the ledger of its world, by agent.
type books struct{ m *runtime.Manager }

// Money adds up what a project's agents came to.
func (b books) Money(ctx context.Context, id project.ID) (map[project.AgentID]project.Money, project.Money, error) {
	var own project.Money
	s, err := b.m.Statement(ctx, cost.StatementQuery{By: "label:" + project.LabelAgent, Project: string(id)})
	if err != nil {
		return nil, own, err
	}
	sums := map[project.AgentID]project.Money{}
	for _, l := range s.Lines {
		m := project.Money{Cost: l.Cost, Revenue: l.Revenue}
		if l.Key == "" { // of the project as a whole, and of sandboxes that are no agent's
			own = m
			continue
		}
		sums[project.AgentID(l.Key)] = m
	}
	return sums, own, nil
}

// Enter takes an entry in.
func (b books) Enter(ctx context.Context, id project.ID, of sandbox.ID, e project.Entry, actor string) error {
	req := cost.EntryRequest{Sandbox: string(of), Amount: e.Amount, Note: e.Note, Key: e.Key, Kind: e.Kind, Actor: actor}
	if of == "" {
		req.Project = string(id)
	}
	_, err := b.m.PostEntry(ctx, req)
	return err
}
