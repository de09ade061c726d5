package guard

import (
	"context"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Lifetimes within a quota are counted from the creation: resting, which takes
// a deadline away, does not lengthen them.

// left is what of a sandbox's lifetime the quota leaves, in seconds of at least
// one. ErrExhausted with code quota_lifetime where that is nothing.
func left(sb sandbox.Sandbox, lifetime time.Duration) (int64, error) {
	d := time.Until(sb.CreatedAt.Add(lifetime))
	if d <= 0 {
		return 0, sandbox.Errorf(sandbox.ErrExhausted, "quota_lifetime", "sandbox %s was made %s ago, and the quota gives it %s: 'sandbox fork %s' makes another with its files, or ask an admin for a larger quota",
			sb.ID, time.Since(sb.CreatedAt).Round(time.Second), lifetime, sb.ID)
	}
	return max(int64(d/time.Second), 1), nil
}

// SetDeadline moves the end of one of the caller's sandboxes, as far as the
// quota leaves it.
func (g *Manager) SetDeadline(ctx context.Context, ref string, req sandbox.DeadlineRequest) (sandbox.Sandbox, error) {
	a, err := g.ask(ctx, changes)
	if err != nil || a == nil {
		return orElse(err, func() (sandbox.Sandbox, error) { return g.m.SetDeadline(ctx, ref, req) })
	}
	req.Actor = a.Owner
	row, err := g.rows.OwnByRef(ctx, a.Owner, ref)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	q, err := g.cfg.Quotas.Quota(ctx, a.Owner)
	if err == nil && q.Lifetime > 0 && req.TTLSeconds != nil && req.Validate() == nil {
		var most int64
		if most, err = left(row, q.Lifetime); err == nil && (*req.TTLSeconds == 0 || *req.TTLSeconds > most) {
			req.TTLSeconds = &most
		}
	}
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	sb, err := g.m.SetDeadline(ctx, string(row.ID), req)
	return a.sandbox(sb), err
}

// goOn resumes or starts a sandbox, which may get its whole lifetime anew: the
// quota's end stays where it was.
func (g *Manager) goOn(ctx context.Context, ref string, do func(ref string) (sandbox.Sandbox, error)) (sandbox.Sandbox, error) {
	a, err := g.ask(ctx, changes)
	if err != nil || a == nil {
		return orElse(err, func() (sandbox.Sandbox, error) { return do(ref) })
	}
	row, err := g.rows.OwnByRef(ctx, a.Owner, ref)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	q, err := g.cfg.Quotas.Quota(ctx, a.Owner)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	agents := strings.HasPrefix(row.Spec.Name, agentNames) // live as long as they are wanted
	if q.Lifetime > 0 && !row.Status.Terminal() && !agents {
		if _, err := left(row, q.Lifetime); err != nil {
			return sandbox.Sandbox{}, err
		}
	}
	sb, err := do(string(row.ID))
	if err != nil || q.Lifetime == 0 || agents {
		return a.sandbox(sb), err
	}
	if end := row.CreatedAt.Add(q.Lifetime); sb.Deadline == nil || sb.Deadline.After(end.Add(time.Second)) {
		most, err := left(row, q.Lifetime)
		if err != nil {
			most = 1 // just now over
		}
		if sb, err = g.m.SetDeadline(context.WithoutCancel(ctx), string(row.ID), sandbox.DeadlineRequest{TTLSeconds: &most, Actor: a.Owner}); err != nil {
			return a.sandbox(sb), err
		}
	}
	return a.sandbox(sb), nil
}
