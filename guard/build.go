package guard

import (
	"context"
	"io"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Build makes an image of the caller's. Its steps run in sandboxes that count,
// and are made through Workshop.
func (g *Manager) Build(ctx context.Context, req sandbox.BuildRequest, files io.Reader, tell func(sandbox.BuildEvent) error) (sandbox.Image, error) {
	a, err := g.ask(ctx, changes)
	if err != nil {
		return sandbox.Image{}, err
	}
	if a == nil {
		return g.m.Build(ctx, req, files, tell)
	}
	q, err := g.cfg.Quotas.Quota(ctx, a.Owner)
	if err != nil {
		return sandbox.Image{}, err
	}
	for _, n := range req.Names {
		if err := a.ownImage(n); err != nil {
			return sandbox.Image{}, err
		}
	}
	if err := limitsAllowed(req.Limits); err != nil {
		return sandbox.Image{}, err
	}
	if err := a.amendPolicy(&req.Network); err != nil {
		return sandbox.Image{}, err
	}
	req.Actor = a.Owner
	req.TimeoutSeconds = within(req.TimeoutSeconds, 0, min(q.Lifetime, 24*time.Hour))
	if err := ctx.Err(); err != nil {
		return sandbox.Image{}, err
	}
	img, err := g.m.Build(ctx, req, files, tell)
	return img, a.plain(err)
}

// BuildCache tells of the cache of all builds, to those who see all.
func (g *Manager) BuildCache(ctx context.Context) (sandbox.BuildCache, error) {
	if err := g.operators(ctx, "the cache holds everybody's builds"); err != nil {
		return sandbox.BuildCache{}, err
	}
	return g.m.BuildCache(ctx)
}

// PruneBuildCache is for those who see all.
func (g *Manager) PruneBuildCache(ctx context.Context, req sandbox.BuildCachePrune) (sandbox.BuildCache, error) {
	if err := g.operators(ctx, "the cache holds everybody's builds"); err != nil {
		return sandbox.BuildCache{}, err
	}
	return g.m.PruneBuildCache(ctx, req)
}

// Shop is what builds need of the manager.
type Shop interface {
	CreateOn(ctx context.Context, req sandbox.CreateRequest, base sandbox.Image) (sandbox.Sandbox, error)
	Exec(ctx context.Context, ref string, spec sandbox.ProcessSpec) (sandbox.ProcessIO, error)
	Files(ctx context.Context, ref string) (sandbox.Files, error)
	FreezeStep(ctx context.Context, ref string, base sandbox.Image) (sandbox.Image, error)
	Remove(ctx context.Context, ref, actor string) (sandbox.Sandbox, error)
	Image(ctx context.Context, name string) (sandbox.Image, error)
	Scratch(ctx context.Context) (sandbox.Image, error)
	PutBuilt(ctx context.Context, img sandbox.Image) error
	HoldLayers(ctx context.Context) (build context.Context, release func())
	BuildStep(ctx context.Context, key string) (sandbox.Image, error)
	PutBuildStep(ctx context.Context, key string, made sandbox.Image) error
}

// Workshop is the manager as builds may use it for the caller in the context:
// a step's sandbox takes of the quota, FROM and COPY --from mean images the
// caller sees, and of the cache each owner has their own part: else one could
// put into others' images what a step of theirs came to under other network
// rules.
type Workshop struct {
	Shop
	g *Manager
}

// Workshop wraps what builds need.
func (g *Manager) Workshop(s Shop) Workshop { return Workshop{s, g} }

// CreateOn makes a step's sandbox within the quota.
func (w Workshop) CreateOn(ctx context.Context, req sandbox.CreateRequest, base sandbox.Image) (sandbox.Sandbox, error) {
	a, err := w.g.ask(ctx, changes)
	if err != nil || a == nil {
		return orElse(err, func() (sandbox.Sandbox, error) { return w.Shop.CreateOn(ctx, req, base) })
	}
	q, err := w.g.cfg.Quotas.Quota(ctx, a.Owner)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	release, err := w.g.reserve(ctx, a.Owner, q, w.g.needs(req.Spec, 1))
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return finish(ctx, release, func(ctx context.Context) (sandbox.Sandbox, error) { return w.Shop.CreateOn(ctx, req, base) })
}

func orElse[T any](err error, do func() (T, error)) (T, error) {
	if err != nil {
		var none T
		return none, err
	}
	return do()
}

// Image returns an image the caller sees.
func (w Workshop) Image(ctx context.Context, name string) (sandbox.Image, error) {
	a, err := w.g.ask(ctx, looks)
	if err != nil || a == nil {
		return orElse(err, func() (sandbox.Image, error) { return w.Shop.Image(ctx, name) })
	}
	return w.g.image(ctx, a, name)
}

// BuildStep looks into the caller's part of the cache.
func (w Workshop) BuildStep(ctx context.Context, key string) (sandbox.Image, error) {
	a, err := w.g.ask(ctx, looks)
	return orElse(err, func() (sandbox.Image, error) { return w.Shop.BuildStep(ctx, a.step(key)) })
}

// PutBuildStep writes into it.
func (w Workshop) PutBuildStep(ctx context.Context, key string, made sandbox.Image) error {
	a, err := w.g.ask(ctx, changes)
	if err != nil {
		return err
	}
	return w.Shop.PutBuildStep(ctx, a.step(key), made)
}

func (a *asker) step(key string) string {
	if a == nil {
		return key
	}
	return a.Owner + "/" + key
}
