package guard

import (
	"context"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/sandbox"
)

// CreateVolume makes a volume of the caller's within the quota.
func (g *Manager) CreateVolume(ctx context.Context, req sandbox.VolumeRequest) (sandbox.Volume, error) {
	a, err := g.ask(ctx, changes)
	if err != nil || a == nil {
		return orElse(err, func() (sandbox.Volume, error) { return g.m.CreateVolume(ctx, req) })
	}
	if err := req.Validate(); err != nil {
		return sandbox.Volume{}, err
	}
	if err := a.fits("volume", req.Name); err != nil {
		return sandbox.Volume{}, err
	}
	if err := g.chargeable(ctx, a, "", req.Labels); err != nil {
		return sandbox.Volume{}, err
	}
	if _, err := g.rows.OwnVolume(ctx, a.Owner, a.stored(req.Name), req.Name); err == nil {
		return sandbox.Volume{}, sandbox.Errorf(sandbox.ErrConflict, "volume_exists", "there is a volume %s already: use it, or choose another name", req.Name)
	}
	release, err := g.roomForVolume(ctx, a, 0, first(req.SizeBytes, g.cfg.Defaults.DiskBytes))
	if err != nil {
		return sandbox.Volume{}, err
	}
	defer release()
	req.Actor, req.Name = a.Owner, a.stored(req.Name)
	v, err := g.m.CreateVolume(context.WithoutCancel(ctx), req) // the row must be there before the release
	return a.volume(v), a.plain(err)
}

// roomForVolume keeps room for a volume that had one size and is to have
// another; 0 means no bound.
func (g *Manager) roomForVolume(ctx context.Context, a *asker, had, want int64) (release func(), err error) {
	q, err := g.cfg.Quotas.Quota(ctx, a.Owner)
	switch {
	case err != nil:
		return nil, err
	case q.DiskBytes > 0 && want == 0:
		return nil, unbounded("quota_disk", "disk")
	case q.DiskBytes == 0 || want <= had:
		return func() {}, nil
	}
	return g.reserve(ctx, a.Owner, q, access.Held{DiskBytes: want - had})
}

// vol returns who asks and the stored name of the volume they mean.
func (g *Manager) vol(ctx context.Context, name string, in intent) (*asker, string, error) {
	a, err := g.ask(ctx, in)
	if a == nil || err != nil {
		return a, name, err
	}
	name, err = g.ownVolume(ctx, a, name)
	return a, name, err
}

// Volume returns one of the caller's volumes.
func (g *Manager) Volume(ctx context.Context, name string) (sandbox.Volume, error) {
	a, name, err := g.vol(ctx, name, looks)
	if err != nil {
		return sandbox.Volume{}, err
	}
	v, err := g.m.Volume(ctx, name)
	return a.volume(v), a.plain(err)
}

// Volumes lists the caller's volumes.
func (g *Manager) Volumes(ctx context.Context) ([]sandbox.Volume, error) {
	a, err := g.ask(ctx, looks)
	if err != nil {
		return nil, err
	}
	all, err := g.m.Volumes(ctx)
	if a != nil {
		all = only(all, func(v sandbox.Volume) bool { return v.Owner == a.Owner })
		for i := range all {
			all[i] = a.volume(all[i])
		}
	}
	return all, err
}

// ChangeVolume changes one of the caller's volumes within the quota.
func (g *Manager) ChangeVolume(ctx context.Context, name string, ch sandbox.VolumeChange) (sandbox.Volume, error) {
	a, name, err := g.vol(ctx, name, changes)
	if err != nil || a == nil {
		return orElse(err, func() (sandbox.Volume, error) { return g.m.ChangeVolume(ctx, name, ch) })
	}
	ch.Actor = a.Owner
	if ch.SizeBytes != nil {
		v, err := g.m.Volume(ctx, name)
		if err != nil {
			return sandbox.Volume{}, a.plain(err)
		}
		release, err := g.roomForVolume(ctx, a, v.SizeBytes, first(*ch.SizeBytes, g.cfg.Defaults.DiskBytes))
		if err != nil {
			return sandbox.Volume{}, err
		}
		defer release()
	}
	v, err := g.m.ChangeVolume(context.WithoutCancel(ctx), name, ch)
	return a.volume(v), a.plain(err)
}

// RemoveVolume removes one of the caller's volumes.
func (g *Manager) RemoveVolume(ctx context.Context, name, actor string) error {
	a, name, err := g.vol(ctx, name, changes)
	if err != nil {
		return err
	}
	return a.plain(g.m.RemoveVolume(ctx, name, a.as(actor)))
}

// SetSecret sets a secret of the caller's, which their sandboxes alone can
// have sent along.
func (g *Manager) SetSecret(ctx context.Context, req sandbox.SecretRequest) (sandbox.Secret, error) {
	a, err := g.ask(ctx, changes)
	if err == nil && a != nil {
		if err = req.Validate(); err == nil {
			err = a.fits("secret", req.Name)
		}
		req.Actor, req.Name = a.Owner, a.stored(req.Name)
	}
	if err != nil {
		return sandbox.Secret{}, err
	}
	s, err := g.m.SetSecret(ctx, req)
	return a.secret(s), a.plain(err)
}

// Secrets lists the caller's secrets.
func (g *Manager) Secrets(ctx context.Context) ([]sandbox.Secret, error) {
	a, err := g.ask(ctx, looks)
	if err != nil {
		return nil, err
	}
	all, err := g.m.Secrets(ctx)
	if a != nil {
		all = only(all, func(s sandbox.Secret) bool { return a.said(s.Name) != s.Name })
		for i := range all {
			all[i] = a.secret(all[i])
		}
	}
	return all, err
}

// RemoveSecret forgets one of the caller's secrets.
func (g *Manager) RemoveSecret(ctx context.Context, name, actor string) error {
	a, err := g.ask(ctx, changes)
	if err != nil {
		return err
	}
	if a != nil {
		name = a.stored(name)
	}
	return a.plain(g.m.RemoveSecret(ctx, name, a.as(actor)))
}

// CreateWebhook makes a webhook that is told of the caller's sandboxes.
func (g *Manager) CreateWebhook(ctx context.Context, req sandbox.WebhookRequest) (sandbox.Webhook, error) {
	a, err := g.ask(ctx, changes)
	if err == nil && a != nil {
		if req.Filter.Sandbox != "" {
			if _, err = sandbox.ParseID(string(req.Filter.Sandbox)); err == nil {
				_, err = g.rows.OwnByRef(ctx, a.Owner, string(req.Filter.Sandbox))
			}
		}
		if req.Filter.Owner != "" && req.Filter.Owner != a.Owner && err == nil {
			err = forOperators("a webhook that is told of other owners")
		}
		req.Owner, req.Actor, req.Filter.Owner = a.Owner, a.Owner, a.Owner
	}
	if err != nil {
		return sandbox.Webhook{}, err
	}
	return g.m.CreateWebhook(ctx, req)
}

// seesWebhook reports whether a webhook is the caller's, or of one of their
// projects.
func (g *Manager) seesWebhook(ctx context.Context, a *asker, w sandbox.Webhook) bool {
	if w.Project == "" {
		return w.Owner == a.Owner
	}
	_, err := g.rows.OwnProject(ctx, a.Owner, w.Project)
	return err == nil
}

// hook returns who asks, once it is sure that the webhook is theirs.
func (g *Manager) hook(ctx context.Context, id string, in intent) (*asker, error) {
	a, err := g.ask(ctx, in)
	if a == nil || err != nil {
		return a, err
	}
	w, err := g.m.Webhook(ctx, id)
	if err == nil && !g.seesWebhook(ctx, a, w) {
		err = noWebhook(id)
	}
	return a, err
}

func noWebhook(id string) error {
	return sandbox.Errorf(sandbox.ErrNotFound, "webhook_not_found", "no webhook %.40q: 'sandbox webhook ls' shows those there are", id)
}

// Webhooks lists the caller's webhooks.
func (g *Manager) Webhooks(ctx context.Context) ([]sandbox.Webhook, error) {
	a, err := g.ask(ctx, looks)
	if err != nil {
		return nil, err
	}
	all, err := g.m.Webhooks(ctx)
	if a != nil {
		all = only(all, func(w sandbox.Webhook) bool { return g.seesWebhook(ctx, a, w) })
	}
	return all, err
}

// Webhook returns one of the caller's webhooks.
func (g *Manager) Webhook(ctx context.Context, id string) (sandbox.Webhook, error) {
	if _, err := g.hook(ctx, id, looks); err != nil {
		return sandbox.Webhook{}, err
	}
	return g.m.Webhook(ctx, id)
}

// RemoveWebhook removes one of the caller's webhooks.
func (g *Manager) RemoveWebhook(ctx context.Context, id, actor string) error {
	a, err := g.hook(ctx, id, changes)
	if err != nil {
		return err
	}
	return g.m.RemoveWebhook(ctx, id, a.as(actor))
}

// TestWebhook sends one message to one of the caller's webhooks.
func (g *Manager) TestWebhook(ctx context.Context, id, actor string) (sandbox.Delivery, error) {
	a, err := g.hook(ctx, id, changes)
	if err != nil {
		return sandbox.Delivery{}, err
	}
	return g.m.TestWebhook(ctx, id, a.as(actor))
}

// DeadLetters lists what one of the caller's webhooks was not told.
func (g *Manager) DeadLetters(ctx context.Context, id string) ([]sandbox.DeadLetter, error) {
	a, err := g.hook(ctx, id, looks)
	if err != nil {
		return nil, err
	}
	all, err := g.m.DeadLetters(ctx, id)
	if a != nil {
		for i := range all {
			all[i].Event = a.event(all[i].Event)
		}
	}
	return all, err
}

// RetryDeadLetters tells one of the caller's webhooks again.
func (g *Manager) RetryDeadLetters(ctx context.Context, id string, seqs []int64) ([]sandbox.Delivery, error) {
	if _, err := g.hook(ctx, id, changes); err != nil {
		return nil, err
	}
	return g.m.RetryDeadLetters(ctx, id, seqs)
}
