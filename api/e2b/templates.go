package e2b

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// baseTemplate is what clients name that name nothing.
const baseTemplate = "base"

// template is what a sandbox can be made of.
type template struct {
	id       string // as the caller names it
	image    string
	snapshot sandbox.SnapshotID
	limits   sandbox.Limits
}

// template finds what a name means: a snapshot, an image, or for base, if
// there is no such image, the daemon's default.
func (s *Server) template(ctx context.Context, name, _ string) (template, error) {
	t := template{id: name}
	missing := sandbox.Errorf(sandbox.ErrNotFound, "template_not_found", "template %.80q not found: name an image, a snapshot or one of 'sandbox template ls'", name)
	if name == "" {
		return t, bad("invalid_template", "no templateID given: use the name of a template, an image or a snapshot")
	}
	snap, err := s.m.SnapshotOf(ctx, name)
	if err == nil {
		t.snapshot = snap.ID
		return t, nil
	}
	if !errors.Is(err, sandbox.ErrNotFound) && !errors.Is(err, sandbox.ErrInvalid) {
		return t, err
	}
	image, err := s.m.Image(ctx, name)
	switch {
	case err == nil:
		t.image = image.Name
		return t, nil
	case !errors.Is(err, sandbox.ErrNotFound) && !errors.Is(err, sandbox.ErrInvalid):
		return t, err
	case name == baseTemplate:
		t.image = s.image
		return t, nil
	}
	return t, missing
}

// templateAlias tells whether a name means something.
func (s *Server) templateAlias(_ http.ResponseWriter, r *http.Request, actor string) (int, any, error) {
	t, err := s.template(r.Context(), r.PathValue("name"), actor)
	if err != nil {
		return 0, nil, err
	}
	return http.StatusOK, map[string]any{"templateID": t.id, "public": false}, nil
}

// shownTemplate is a template in lists. What E2B tells of builds says here
// that it is there.
type shownTemplate struct {
	TemplateID    string    `json:"templateID"`
	BuildID       string    `json:"buildID"`
	BuildStatus   string    `json:"buildStatus"`
	BuildCount    int       `json:"buildCount"`
	Aliases       []string  `json:"aliases"`
	Names         []string  `json:"names"`
	CPUCount      int64     `json:"cpuCount"`
	MemoryMB      int64     `json:"memoryMB"`
	DiskSizeMB    int64     `json:"diskSizeMB"`
	EnvdVersion   string    `json:"envdVersion"`
	Public        bool      `json:"public"`
	SpawnCount    int       `json:"spawnCount"`
	CreatedAt     time.Time `json:"createdAt"`
	UpdatedAt     time.Time `json:"updatedAt"`
	LastSpawnedAt *string   `json:"lastSpawnedAt"`
	CreatedBy     *string   `json:"createdBy"`
}

// listTemplates is everything a sandbox can be made of by name.
func (s *Server) listTemplates(_ http.ResponseWriter, r *http.Request, _ string) (int, any, error) {
	images, err := s.m.Images(r.Context())
	if err != nil {
		return 0, nil, err
	}
	out := make([]shownTemplate, 0, len(images))
	for _, i := range images {
		out = append(out, shownTemplate{
			TemplateID: i.Name, BuildID: i.Digest, BuildStatus: "ready", BuildCount: 1, Aliases: []string{i.Name}, Names: []string{i.Name},
			EnvdVersion: envdVersion, CreatedAt: i.CreatedAt, UpdatedAt: i.CreatedAt,
		})
	}
	return http.StatusOK, out, nil
}

// removeTemplate forgets a snapshot.
func (s *Server) removeTemplate(_ http.ResponseWriter, r *http.Request, actor string) (int, any, error) {
	name := r.PathValue("name")
	_, err := s.m.RemoveSnapshot(r.Context(), name, actor)
	if errors.Is(err, sandbox.ErrInvalid) {
		err = sandbox.Errorf(sandbox.ErrNotFound, "template_not_found", "template %.80q not found", name)
	}
	return http.StatusNoContent, nil, err
}
