package runtime

import (
	"context"
	"errors"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// SetTemplate gives an image or a snapshot a name, with limits, in place of
// what the actor called so before. Class ErrNotFound where there is no such
// source.
func (m *Manager) SetTemplate(ctx context.Context, req sandbox.TemplateRequest) (sandbox.BaseTemplate, error) {
	if err := req.Validate(); err != nil {
		return sandbox.BaseTemplate{}, err
	}
	now := time.Now().UTC()
	t := sandbox.BaseTemplate{Name: req.Name, Owner: req.Actor, Private: req.Private, Limits: req.Limits, CreatedAt: now, UpdatedAt: now}
	image, err := m.Image(ctx, req.Source)
	switch {
	case err == nil:
		t.Image = image.Name
	case errors.Is(err, sandbox.ErrNotFound), errors.Is(err, sandbox.ErrInvalid):
		snap, err := m.SnapshotOf(ctx, req.Source)
		if errors.Is(err, sandbox.ErrNotFound) || errors.Is(err, sandbox.ErrInvalid) {
			err = sandbox.Errorf(sandbox.ErrNotFound, "image_not_found", "neither an image nor a snapshot is called %.80q: 'sandbox image ls' and 'sandbox snapshot ls' show what there is", req.Source)
		}
		if err != nil {
			return t, err
		}
		t.Snapshot = snap.ID
	default:
		return t, err
	}
	if t, err = m.state.PutTemplate(ctx, t); err != nil {
		return t, err
	}
	m.record(context.WithoutCancel(ctx), sandbox.Event{Type: "template.set", Actor: req.Actor, Data: map[string]string{"template": t.Name, "source": req.Source}})
	return t, nil
}

// Template is what a name means to somebody: their own template, else one that
// is shared. ErrNotFound with code template_not_found.
func (m *Manager) Template(ctx context.Context, name, actor string) (sandbox.BaseTemplate, error) {
	return m.state.Template(ctx, actor, name)
}

// Templates lists those somebody sees, or with an empty actor all, by name.
func (m *Manager) Templates(ctx context.Context, actor string) ([]sandbox.BaseTemplate, error) {
	return m.state.Templates(ctx, actor)
}

// RemoveTemplate forgets one of the actor's templates; what it names stays.
// ErrNotFound.
func (m *Manager) RemoveTemplate(ctx context.Context, name, actor string) error {
	if err := m.state.DeleteTemplate(ctx, actor, name); err != nil {
		return err
	}
	m.record(context.WithoutCancel(ctx), sandbox.Event{Type: "template.removed", Actor: actor, Data: map[string]string{"template": name}})
	return nil
}
