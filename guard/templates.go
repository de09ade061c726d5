package guard

import (
	"context"

	"github.com/sandboxd/sandboxd/sandbox"
)

// SetTemplate names an image or a snapshot for the caller alone; only those who
// see all can share one.
func (g *Manager) SetTemplate(ctx context.Context, req sandbox.TemplateRequest) (sandbox.BaseTemplate, error) {
	a, err := g.ask(ctx, changes)
	if err != nil || a == nil {
		return orElse(err, func() (sandbox.BaseTemplate, error) { return g.m.SetTemplate(ctx, req) })
	}
	if err := req.Validate(); err != nil {
		return sandbox.BaseTemplate{}, err
	}
	if err := limitsAllowed(req.Limits); err != nil {
		return sandbox.BaseTemplate{}, err
	}
	req.Actor, req.Private = a.Owner, true
	if snap, err := g.rows.OwnSnapshot(ctx, a.Owner, req.Source); err == nil {
		req.Source = string(snap.ID)
	} else {
		img, err := g.image(ctx, a, req.Source)
		if err != nil {
			return sandbox.BaseTemplate{}, err
		}
		req.Source = img.Name
	}
	return g.m.SetTemplate(ctx, req)
}

// Template is what a name means to the caller.
func (g *Manager) Template(ctx context.Context, name, actor string) (sandbox.BaseTemplate, error) {
	a, err := g.ask(ctx, looks)
	if err != nil {
		return sandbox.BaseTemplate{}, err
	}
	return g.m.Template(ctx, name, a.as(actor))
}

// Templates lists the caller's and those that are shared.
func (g *Manager) Templates(ctx context.Context, actor string) ([]sandbox.BaseTemplate, error) {
	a, err := g.ask(ctx, looks)
	if err != nil {
		return nil, err
	}
	return g.m.Templates(ctx, a.as(actor))
}

// RemoveTemplate forgets one of the caller's.
func (g *Manager) RemoveTemplate(ctx context.Context, name, actor string) error {
	a, err := g.ask(ctx, changes)
	if err != nil {
		return err
	}
	return g.m.RemoveTemplate(ctx, name, a.as(actor))
}

// shared finds a snapshot that somebody else shares as a template.
func (g *Manager) shared(ctx context.Context, a *asker, ref string) (sandbox.Snapshot, bool) {
	all, err := g.m.Templates(ctx, a.Owner)
	if err != nil {
		return sandbox.Snapshot{}, false
	}
	for _, t := range all {
		if t.Snapshot != "" && string(t.Snapshot) == ref && !t.Private {
			snap, err := g.m.SnapshotOf(ctx, ref)
			return snap, err == nil
		}
	}
	return sandbox.Snapshot{}, false
}
