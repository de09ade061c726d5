package servertest

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// SetTemplate implements server.Manager. Every source is taken for an image,
// but for those with the form of a snapshot's id.
func (m *Memory) SetTemplate(_ context.Context, req sandbox.TemplateRequest) (sandbox.BaseTemplate, error) {
	if err := m.fail("SetTemplate"); err != nil {
		return sandbox.BaseTemplate{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	t := sandbox.BaseTemplate{Name: req.Name, Owner: req.Actor, Private: req.Private, Image: req.Source, Limits: req.Limits, CreatedAt: time.Now(), UpdatedAt: time.Now()}
	if id, err := sandbox.ParseSnapshotID(req.Source); err == nil {
		t.Image, t.Snapshot = "", id
	}
	m.templates = slices.DeleteFunc(m.templates, func(o sandbox.BaseTemplate) bool { return o.Name == t.Name && o.Owner == t.Owner })
	m.templates = append(m.templates, t)
	slices.SortFunc(m.templates, func(a, b sandbox.BaseTemplate) int { return strings.Compare(a.Name, b.Name) })
	return t, nil
}

// Template implements server.Manager.
func (m *Memory) Template(_ context.Context, name, actor string) (sandbox.BaseTemplate, error) {
	if err := m.fail("Template"); err != nil {
		return sandbox.BaseTemplate{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, own := range []bool{true, false} {
		for _, t := range m.templates {
			if t.Name == name && (own && t.Owner == actor || !own && !t.Private) {
				return t, nil
			}
		}
	}
	return sandbox.BaseTemplate{}, sandbox.Errorf(sandbox.ErrNotFound, "template_not_found", "no template %q", name)
}

// Templates implements server.Manager.
func (m *Memory) Templates(_ context.Context, actor string) ([]sandbox.BaseTemplate, error) {
	if err := m.fail("Templates"); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []sandbox.BaseTemplate
	for _, t := range m.templates {
		if actor == "" || t.Owner == actor || !t.Private {
			out = append(out, t)
		}
	}
	return out, nil
}

// RemoveTemplate implements server.Manager.
func (m *Memory) RemoveTemplate(_ context.Context, name, actor string) error {
	if err := m.fail("RemoveTemplate"); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	n := len(m.templates)
	m.templates = slices.DeleteFunc(m.templates, func(o sandbox.BaseTemplate) bool { return o.Name == name && o.Owner == actor })
	if len(m.templates) == n {
		return sandbox.Errorf(sandbox.ErrNotFound, "template_not_found", "no template %q", name)
	}
	return nil
}
