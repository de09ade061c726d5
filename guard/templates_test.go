package guard

import (
	"errors"
	"testing"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestTemplatesOfDevelopers: what a developer names is theirs alone, and made
// of what they see.
func TestTemplatesOfDevelopers(t *testing.T) {
	w := newTown(t, access.Quota{})
	ctx := w.as(alice, access.RoleDeveloper)
	mine, foreign := w.refs["snapshot"][alice][0], w.refs["snapshot"][bob][0]
	got, err := w.SetTemplate(ctx, sandbox.TemplateRequest{Name: "x", Source: mine, Actor: "someone"})
	if err != nil || got.Owner != alice || !got.Private {
		t.Errorf("of one's own snapshot: %+v, %v", got, err)
	}
	if _, err := w.SetTemplate(ctx, sandbox.TemplateRequest{Name: "x", Source: foreign}); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("of another's snapshot: %v", err)
	}
	if got, err := w.SetTemplate(w.as("root", access.RoleAdmin), sandbox.TemplateRequest{Name: "x", Source: foreign, Actor: "root"}); err != nil || got.Private {
		t.Errorf("of an admin: %+v, %v", got, err)
	}
	if _, err := w.SetTemplate(w.as(alice, access.RoleViewer), sandbox.TemplateRequest{Name: "x", Source: mine}); !errors.Is(err, sandbox.ErrForbidden) {
		t.Errorf("of a viewer: %v", err)
	}
	if err := w.RemoveTemplate(w.as(alice, access.RoleViewer), "x", alice); !errors.Is(err, sandbox.ErrForbidden) {
		t.Errorf("removed by a viewer: %v", err)
	}
}
