package guard

import (
	"context"
	"fmt"
	"runtime/debug"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Create makes a sandbox within the caller's quota.
func (g *Manager) Create(ctx context.Context, req sandbox.CreateRequest) (sandbox.Sandbox, error) {
	a, err := g.ask(ctx, changes)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	if a == nil {
		return g.m.Create(ctx, req)
	}
	release, err := g.admit(ctx, a, &req)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	sb, err := finish(ctx, release, func(ctx context.Context) (sandbox.Sandbox, error) { return g.m.Create(ctx, req) })
	return a.sandbox(sb), a.plain(err)
}

// admit makes a request the caller's own and keeps room for what it asks.
func (g *Manager) admit(ctx context.Context, a *asker, req *sandbox.CreateRequest) (release func(), err error) {
	req.Actor = a.Owner
	quota, err := g.cfg.Quotas.Quota(ctx, a.Owner)
	if err != nil {
		return nil, err
	}
	if err := g.amend(ctx, a, quota, &req.Spec); err != nil {
		return nil, err
	}
	// A repeated request is answered with what there is.
	if used, err := g.rows.KeyUsed(ctx, a.Owner, req.IdempotencyKey); err != nil || used {
		return func() {}, err
	}
	return g.reserve(ctx, a.Owner, quota, g.needs(req.Spec, 1))
}

// finish runs what makes sandboxes to its end, and then releases what was kept
// for them, though the caller may have gone away: the rows must be there first.
func finish[T any](ctx context.Context, release func(), do func(context.Context) (T, error)) (T, error) {
	type result struct {
		v   T
		err error
	}
	done := make(chan result, 1)
	go func() {
		var r result
		defer func() {
			if p := recover(); p != nil { // one failed request, as everywhere
				r.err = fmt.Errorf("panic: %v: %s", p, debug.Stack())
			}
			release() // who hears of it may ask for the next at once
			done <- r
		}()
		r.v, r.err = do(context.WithoutCancel(ctx))
	}()
	select {
	case r := <-done:
		return r.v, r.err
	case <-ctx.Done():
		var none T
		return none, sandbox.Errorf(sandbox.ErrUnavailable, "create_abandoned", "the caller went away while a sandbox was being created: it goes on: %w", ctx.Err())
	}
}

// Sandbox returns one of the caller's sandboxes.
func (g *Manager) Sandbox(ctx context.Context, ref string) (sandbox.Sandbox, error) {
	a, ref, err := g.box(ctx, ref, looks)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	sb, err := g.m.Sandbox(ctx, ref)
	return a.sandbox(sb), err
}

// List lists the caller's sandboxes.
func (g *Manager) List(ctx context.Context, f sandbox.Filter) (sandbox.Page, error) {
	a, err := g.ask(ctx, looks)
	if err != nil {
		return sandbox.Page{}, err
	}
	if a != nil {
		f.Owner = a.Owner
	}
	page, err := g.m.List(ctx, f)
	page.Items = a.sandboxes(page.Items)
	return page, err
}

// Pause freezes one of the caller's sandboxes.
func (g *Manager) Pause(ctx context.Context, ref, actor string) (sandbox.Sandbox, error) {
	return g.act(ctx, ref, func(ref string) (sandbox.Sandbox, error) { return g.m.Pause(ctx, ref, actor) })
}

// Resume thaws one of the caller's sandboxes.
func (g *Manager) Resume(ctx context.Context, ref, actor string) (sandbox.Sandbox, error) {
	return g.goOn(ctx, ref, func(ref string) (sandbox.Sandbox, error) { return g.m.Resume(ctx, ref, actor) })
}

// Stop stops one of the caller's sandboxes.
func (g *Manager) Stop(ctx context.Context, ref, actor string) (sandbox.Sandbox, error) {
	return g.act(ctx, ref, func(ref string) (sandbox.Sandbox, error) { return g.m.Stop(ctx, ref, actor) })
}

// Start starts one of the caller's sandboxes, which stopped counts as living.
func (g *Manager) Start(ctx context.Context, ref, actor string) (sandbox.Sandbox, error) {
	return g.goOn(ctx, ref, func(ref string) (sandbox.Sandbox, error) { return g.m.Start(ctx, ref, actor) })
}

// Reset gives one of the caller's sandboxes its first files again.
func (g *Manager) Reset(ctx context.Context, ref, actor string) (sandbox.Sandbox, error) {
	return g.act(ctx, ref, func(ref string) (sandbox.Sandbox, error) { return g.m.Reset(ctx, ref, actor) })
}

// Remove ends one of the caller's sandboxes.
func (g *Manager) Remove(ctx context.Context, ref, actor string) (sandbox.Sandbox, error) {
	return g.act(ctx, ref, func(ref string) (sandbox.Sandbox, error) { return g.m.Remove(ctx, ref, actor) })
}

// SetNetwork changes the policy of one of the caller's sandboxes.
func (g *Manager) SetNetwork(ctx context.Context, ref string, p sandbox.NetworkPolicy, actor string) (sandbox.Sandbox, error) {
	a, ref, err := g.box(ctx, ref, changes)
	if err == nil {
		err = a.amendPolicy(&p)
	}
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	sb, err := g.m.SetNetwork(ctx, ref, p, actor)
	return a.sandbox(sb), a.plain(err)
}

// Usage reads the counters of one of the caller's sandboxes.
func (g *Manager) Usage(ctx context.Context, ref string) (sandbox.Usage, error) {
	_, ref, err := g.box(ctx, ref, looks)
	if err != nil {
		return sandbox.Usage{}, err
	}
	return g.m.Usage(ctx, ref)
}

// Network tells what one of the caller's sandboxes may reach.
func (g *Manager) Network(ctx context.Context, ref string) (sandbox.NetworkState, error) {
	a, ref, err := g.box(ctx, ref, looks)
	if err != nil {
		return sandbox.NetworkState{}, err
	}
	s, err := g.m.Network(ctx, ref)
	s.Policy = a.policy(s.Policy)
	return s, err
}

// ExplainNetwork tells what would become of a flow of one of the caller's
// sandboxes.
func (g *Manager) ExplainNetwork(ctx context.Context, ref string, q sandbox.NetworkQuery) (sandbox.NetworkVerdict, error) {
	_, ref, err := g.box(ctx, ref, looks)
	if err != nil {
		return sandbox.NetworkVerdict{}, err
	}
	return g.m.ExplainNetwork(ctx, ref, q)
}

// SetFault disturbs the network of one of the caller's sandboxes.
func (g *Manager) SetFault(ctx context.Context, ref string, f sandbox.NetworkFault, actor string) (sandbox.NetworkFault, error) {
	a, ref, err := g.box(ctx, ref, changes)
	if err != nil {
		return sandbox.NetworkFault{}, err
	}
	return g.m.SetFault(ctx, ref, f, a.as(actor))
}

// ClearFault ends that.
func (g *Manager) ClearFault(ctx context.Context, ref, actor string) error {
	a, ref, err := g.box(ctx, ref, changes)
	if err != nil {
		return err
	}
	return g.m.ClearFault(ctx, ref, a.as(actor))
}

// Fault tells of it.
func (g *Manager) Fault(ctx context.Context, ref string) (sandbox.NetworkFault, error) {
	_, ref, err := g.box(ctx, ref, looks)
	if err != nil {
		return sandbox.NetworkFault{}, err
	}
	return g.m.Fault(ctx, ref)
}

// Events returns what happened to what the caller has.
func (g *Manager) Events(ctx context.Context, after int64, ref string, limit int) ([]sandbox.Event, error) {
	a, err := g.ask(ctx, looks)
	switch {
	case err != nil:
		return nil, err
	case a == nil:
		return g.m.Events(ctx, after, ref, limit)
	case ref == "":
		all, err := g.rows.OwnEvents(ctx, a.Owner, after, limit)
		return a.events(all), err
	}
	sb, err := g.rows.OwnByRef(ctx, a.Owner, ref)
	if err != nil {
		return nil, err
	}
	all, err := g.m.Events(ctx, after, string(sb.ID), limit)
	return a.events(all), err
}

// Subscribe wakes after every event, whoever may see it.
func (g *Manager) Subscribe() (<-chan struct{}, func()) { return g.m.Subscribe() }

// Doctor examines the host, for those who see all.
func (g *Manager) Doctor(ctx context.Context) []sandbox.Check {
	if g.operators(ctx, "the doctor looks at the host") != nil {
		return nil
	}
	return g.m.Doctor(ctx)
}

// Pool tells how the pool does, for those who see all.
func (g *Manager) Pool(ctx context.Context) (sandbox.PoolStats, error) {
	if err := g.operators(ctx, "the pool is the host's"); err != nil {
		return sandbox.PoolStats{}, err
	}
	return g.m.Pool(ctx)
}

// needs is what n sandboxes of a spec take.
func (g *Manager) needs(s sandbox.Spec, n int) access.Held {
	l, d := s.Limits, g.cfg.Defaults
	return access.Held{
		Sandboxes: n, CPUs: float64(n) * first(l.CPUs, d.CPUs),
		MemoryBytes: int64(n) * first(l.MemoryBytes, d.MemoryBytes), DiskBytes: int64(n) * first(l.DiskBytes, d.DiskBytes),
	}
}

func first[T comparable](a, b T) T {
	var zero T
	if a != zero {
		return a
	}
	return b
}
