package guard

import (
	"context"
	"errors"
	"io"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Snapshot freezes the files of one of the caller's sandboxes, where the quota
// has room for what it wrote.
func (g *Manager) Snapshot(ctx context.Context, ref string, req sandbox.SnapshotRequest) (sandbox.Snapshot, error) {
	a, ref, err := g.box(ctx, ref, changes)
	if err != nil {
		return sandbox.Snapshot{}, err
	}
	req.Actor = a.as(req.Actor)
	release, err := g.roomForFiles(ctx, a, ref)
	if err != nil {
		return sandbox.Snapshot{}, err
	}
	defer release()
	s, err := g.m.Snapshot(ctx, ref, req)
	return a.snapshot(s), err
}

// roomForFiles keeps room for what a sandbox has written.
func (g *Manager) roomForFiles(ctx context.Context, a *asker, ref string) (release func(), err error) {
	release = func() {}
	if a == nil {
		return release, nil
	}
	q, err := g.cfg.Quotas.Quota(ctx, a.Owner)
	if err != nil || q.DiskBytes == 0 {
		return release, err
	}
	u, err := g.m.Usage(ctx, ref)
	if err != nil {
		return nil, err
	}
	return g.reserve(ctx, a.Owner, q, access.Held{DiskBytes: int64(u.DiskBytes)})
}

// snap returns who asks and the snapshot they mean by ref.
func (g *Manager) snap(ctx context.Context, ref string, in intent) (*asker, string, error) {
	a, err := g.ask(ctx, in)
	if a == nil || err != nil {
		return a, ref, err
	}
	s, err := g.rows.OwnSnapshot(ctx, a.Owner, ref)
	return a, string(s.ID), err
}

// SnapshotOf returns one of the caller's snapshots.
func (g *Manager) SnapshotOf(ctx context.Context, ref string) (sandbox.Snapshot, error) {
	a, ref, err := g.snap(ctx, ref, looks)
	if err != nil {
		return sandbox.Snapshot{}, err
	}
	s, err := g.m.SnapshotOf(ctx, ref)
	return a.snapshot(s), err
}

// Snapshots lists the caller's snapshots, or those of one sandbox.
func (g *Manager) Snapshots(ctx context.Context, ref string, kinds ...sandbox.SnapshotKind) ([]sandbox.Snapshot, error) {
	a, err := g.ask(ctx, looks)
	switch {
	case err != nil:
		return nil, err
	case a == nil:
		return g.m.Snapshots(ctx, ref, kinds...)
	case ref == "":
		all, err := g.rows.OwnSnapshots(ctx, a.Owner, kinds...)
		return a.snapshots(all), err
	}
	sb, err := g.rows.OwnByRef(ctx, a.Owner, ref)
	if err != nil {
		return nil, err
	}
	all, err := g.m.Snapshots(ctx, string(sb.ID), kinds...)
	return a.snapshots(all), err
}

// RemoveSnapshot forgets one of the caller's snapshots.
func (g *Manager) RemoveSnapshot(ctx context.Context, ref, actor string) (sandbox.Snapshot, error) {
	a, ref, err := g.snap(ctx, ref, changes)
	if err != nil {
		return sandbox.Snapshot{}, err
	}
	s, err := g.m.RemoveSnapshot(ctx, ref, a.as(actor))
	return a.snapshot(s), err
}

// ExportSnapshot streams one of the caller's snapshots.
func (g *Manager) ExportSnapshot(ctx context.Context, ref string) (io.ReadCloser, error) {
	_, ref, err := g.snap(ctx, ref, looks)
	if err != nil {
		return nil, err
	}
	return g.m.ExportSnapshot(ctx, ref)
}

// ImportSnapshot takes a snapshot in. How large it is shows at its end: one
// beyond the quota is removed again.
func (g *Manager) ImportSnapshot(ctx context.Context, name, actor string, r io.Reader) (sandbox.Snapshot, error) {
	a, err := g.ask(ctx, changes)
	if err != nil {
		return sandbox.Snapshot{}, err
	}
	if a == nil {
		return g.m.ImportSnapshot(ctx, name, actor, r)
	}
	leave, err := g.purses.takeIn(ctx, a.Owner)
	if err != nil {
		return sandbox.Snapshot{}, err
	}
	defer leave()
	q, err := g.cfg.Quotas.Quota(ctx, a.Owner)
	if err != nil {
		return sandbox.Snapshot{}, err
	}
	if err := g.roomForOne(ctx, a.Owner, q); err != nil {
		return sandbox.Snapshot{}, err
	}
	s, err := g.m.ImportSnapshot(ctx, name, a.Owner, r)
	if err != nil {
		return s, a.plain(err)
	}
	clean := context.WithoutCancel(ctx)
	if err := g.fitted(clean, a.Owner, q, s.SizeBytes); err != nil {
		_, rerr := g.m.RemoveSnapshot(clean, string(s.ID), a.Owner)
		return sandbox.Snapshot{}, errors.Join(err, rerr)
	}
	return a.snapshot(s), nil
}

// roomForOne refuses an owner whose disk quota is full one thing more, however
// small.
func (g *Manager) roomForOne(ctx context.Context, owner string, q access.Quota) error {
	one := access.Held{DiskBytes: 1}
	held, err := g.held(ctx, owner)
	if err == nil {
		err = g.crowded(owner, q, one)
	}
	if err == nil {
		err = exceeds(q, held, one)
	}
	return err
}

// fitted is the error where something that is there passes its owner's quota.
func (g *Manager) fitted(ctx context.Context, owner string, q access.Quota, bytes int64) error {
	held, err := g.held(ctx, owner)
	if err != nil {
		return err
	}
	held.DiskBytes -= bytes
	return exceeds(q, held, access.Held{DiskBytes: max(bytes, 1)})
}

// Fork makes sandboxes of one of the caller's snapshots or sandboxes, within
// the quota.
func (g *Manager) Fork(ctx context.Context, ref string, req sandbox.ForkRequest) ([]sandbox.Fork, error) {
	a, err := g.ask(ctx, changes)
	if err != nil {
		return nil, err
	}
	if a == nil {
		return g.m.Fork(ctx, ref, req)
	}
	of, ref, err := g.forkSource(ctx, a, ref, req)
	if err != nil {
		return nil, err
	}
	if req.Limits != nil {
		of.Limits = *req.Limits
	}
	q, err := g.cfg.Quotas.Quota(ctx, a.Owner)
	if err != nil {
		return nil, err
	}
	req.Actor = a.Owner
	amending := context.WithoutCancel(ctx)
	req.Amend = func(s *sandbox.Spec) error { return g.amend(amending, a, q, s) }
	missing := max(req.Count, 1)
	for i := 0; i < max(req.Count, 1) && req.IdempotencyKey != ""; i++ { // a repeated request is answered with what there is
		used, err := g.rows.KeyUsed(ctx, a.Owner, req.KeyOf(i))
		if err != nil {
			return nil, err
		}
		if used {
			missing--
		}
	}
	release, err := g.reserve(ctx, a.Owner, q, g.needs(of, missing))
	if err != nil {
		return nil, err
	}
	all, err := finish(ctx, release, func(ctx context.Context) ([]sandbox.Fork, error) { return g.m.Fork(ctx, ref, req) })
	return a.forks(all), a.plain(err)
}

// forkSource is what a ref means to a fork, in the manager's order: the spec,
// and the id.
func (g *Manager) forkSource(ctx context.Context, a *asker, ref string, req sandbox.ForkRequest) (sandbox.Spec, string, error) {
	if req.ForkOf != sandbox.ForkOfSandbox {
		s, err := g.rows.OwnSnapshot(ctx, a.Owner, ref)
		if !errors.Is(err, sandbox.ErrNotFound) {
			return s.Spec, string(s.ID), err
		}
	}
	sb, err := g.rows.OwnByRef(ctx, a.Owner, ref)
	if errors.Is(err, sandbox.ErrNotFound) && req.ForkOf != sandbox.ForkOfSandbox {
		err = sandbox.NothingToFork(ref)
	}
	return sb.Spec, string(sb.ID), err
}

// Rollback puts one of the caller's sandboxes back on one of the caller's
// snapshots.
func (g *Manager) Rollback(ctx context.Context, ref, snapshot, actor string) (sandbox.Sandbox, error) {
	a, ref, err := g.box(ctx, ref, changes)
	if err == nil && a != nil && snapshot != "" {
		var s sandbox.Snapshot
		s, err = g.rows.OwnSnapshot(ctx, a.Owner, snapshot)
		snapshot = string(s.ID)
	}
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	sb, err := g.m.Rollback(ctx, ref, snapshot, a.as(actor))
	return a.sandbox(sb), err
}

// Undo goes back in the history of one of the caller's sandboxes.
func (g *Manager) Undo(ctx context.Context, ref string, steps int, actor string) (sandbox.Sandbox, error) {
	return g.act(ctx, ref, func(ref string) (sandbox.Sandbox, error) { return g.m.Undo(ctx, ref, steps, actor) })
}

// ResetPaths resets some paths of one of the caller's sandboxes.
func (g *Manager) ResetPaths(ctx context.Context, ref string, paths []string, actor string) (sandbox.Sandbox, error) {
	return g.act(ctx, ref, func(ref string) (sandbox.Sandbox, error) { return g.m.ResetPaths(ctx, ref, paths, actor) })
}

// History tells how the files of one of the caller's sandboxes came to be.
func (g *Manager) History(ctx context.Context, ref string) (sandbox.History, error) {
	a, ref, err := g.box(ctx, ref, looks)
	if err != nil {
		return sandbox.History{}, err
	}
	h, err := g.m.History(ctx, ref)
	h.Points = a.snapshots(h.Points)
	return h, err
}

// AddSchedule repeats something in one of the caller's sandboxes.
func (g *Manager) AddSchedule(ctx context.Context, ref string, s sandbox.Schedule) (sandbox.Schedule, error) {
	_, ref, err := g.box(ctx, ref, changes)
	if err != nil {
		return sandbox.Schedule{}, err
	}
	return g.m.AddSchedule(ctx, ref, s)
}

// Schedules lists those of the caller's sandboxes, or of one.
func (g *Manager) Schedules(ctx context.Context, ref string) ([]sandbox.Schedule, error) {
	a, err := g.ask(ctx, looks)
	switch {
	case err != nil:
		return nil, err
	case a == nil:
		return g.m.Schedules(ctx, ref)
	case ref == "":
		return g.rows.OwnSchedules(ctx, a.Owner)
	}
	sb, err := g.rows.OwnByRef(ctx, a.Owner, ref)
	if err != nil {
		return nil, err
	}
	return g.m.Schedules(ctx, string(sb.ID))
}

// RemoveSchedule ends a schedule of one of the caller's sandboxes.
func (g *Manager) RemoveSchedule(ctx context.Context, id string) error {
	a, err := g.ask(ctx, changes)
	if err == nil && a != nil {
		_, err = g.rows.OwnSchedule(ctx, a.Owner, id)
	}
	if err != nil {
		return err
	}
	return g.m.RemoveSchedule(ctx, id)
}

// Diff compares what the caller has.
func (g *Manager) Diff(ctx context.Context, from, to string, emit func(sandbox.FileChange) error) error {
	a, err := g.ask(ctx, looks)
	if err != nil {
		return err
	}
	if a != nil {
		for _, ref := range []*string{&to, &from} { // in the manager's order
			if *ref, err = g.stateOf(ctx, a, *ref); err != nil {
				return err
			}
		}
	}
	return g.m.Diff(ctx, from, to, emit)
}

// stateOf is the snapshot or sandbox a ref means to a comparison.
func (g *Manager) stateOf(ctx context.Context, a *asker, ref string) (string, error) {
	if ref == "" {
		return "", nil
	}
	s, err := g.rows.OwnSnapshot(ctx, a.Owner, ref)
	if !errors.Is(err, sandbox.ErrNotFound) {
		return string(s.ID), err
	}
	sb, err := g.rows.OwnByRef(ctx, a.Owner, ref)
	return string(sb.ID), err
}
