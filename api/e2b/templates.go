package e2b

import (
	"cmp"
	"context"
	"errors"
	"math"
	"net/http"
	"slices"
	"strings"
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

// template finds what a name means: a template, a snapshot, an image, or for
// base, if there is no such image, the daemon's default.
func (s *Server) template(ctx context.Context, name, actor string) (template, error) {
	name = strings.TrimSuffix(name, ":default")
	t := template{id: name}
	missing := sandbox.Errorf(sandbox.ErrNotFound, "template_not_found", "template %.80q not found: name an image, a snapshot or one of 'sandbox template ls'", name)
	if name == "" {
		return t, bad("invalid_template", "no templateID given: use the name of a template, an image or a snapshot")
	}
	named, err := s.m.Template(ctx, name, actor)
	if err == nil {
		t.image, t.snapshot, t.limits = named.Image, named.Snapshot, named.Limits
		return t, nil
	}
	if !errors.Is(err, sandbox.ErrNotFound) {
		return t, err
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
func (s *Server) listTemplates(_ http.ResponseWriter, r *http.Request, actor string) (int, any, error) {
	named, err := s.m.Templates(r.Context(), actor)
	if err != nil {
		return 0, nil, err
	}
	images, err := s.m.Images(r.Context())
	if err != nil {
		return 0, nil, err
	}
	out := []shownTemplate{}
	seen := map[string]bool{}
	add := func(name, build string, l sandbox.Limits, public bool, made, changed time.Time) {
		if seen[name] {
			return
		}
		seen[name] = true
		out = append(out, shownTemplate{
			TemplateID: name, BuildID: build, BuildStatus: "ready", BuildCount: 1, Aliases: []string{name}, Names: []string{name},
			CPUCount: int64(math.Ceil(l.CPUs)), MemoryMB: l.MemoryBytes >> 20, DiskSizeMB: l.DiskBytes >> 20,
			EnvdVersion: envdVersion, Public: public, CreatedAt: made, UpdatedAt: changed,
		})
	}
	slices.SortStableFunc(named, func(a, b sandbox.BaseTemplate) int { // one's own hide others'
		return cmp.Compare(rank(a, actor), rank(b, actor))
	})
	for _, t := range named {
		add(t.Name, first(string(t.Snapshot), t.Image), t.Limits, !t.Private, t.CreatedAt, t.UpdatedAt)
	}
	for _, i := range images {
		add(i.Name, i.Digest, sandbox.Limits{}, false, i.CreatedAt, i.CreatedAt)
	}
	return http.StatusOK, out, nil
}

func rank(t sandbox.BaseTemplate, actor string) int {
	if t.Owner == actor {
		return 0
	}
	return 1
}

func first(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// removeTemplate forgets one of the caller's templates or snapshots. With a
// template its snapshot goes, as it was made for it, and with a snapshot the
// templates that name it; images stay.
func (s *Server) removeTemplate(_ http.ResponseWriter, r *http.Request, actor string) (int, any, error) {
	ctx, name := r.Context(), strings.TrimSuffix(r.PathValue("name"), ":default")
	missing := sandbox.Errorf(sandbox.ErrNotFound, "template_not_found", "template %.80q not found", name)
	id, err := sandbox.ParseSnapshotID(name)
	if err != nil {
		t, err := s.m.Template(ctx, name, actor)
		if err != nil || t.Owner != actor {
			return 0, nil, missing
		}
		if err := s.m.RemoveTemplate(ctx, name, actor); err != nil || t.Snapshot == "" {
			return http.StatusNoContent, nil, err
		}
		_, err = s.m.RemoveSnapshot(ctx, string(t.Snapshot), actor)
		if errors.Is(err, sandbox.ErrNotFound) { // it went before
			err = nil
		}
		return http.StatusNoContent, nil, err
	}
	if _, err := s.m.RemoveSnapshot(ctx, string(id), actor); err != nil {
		if errors.Is(err, sandbox.ErrNotFound) {
			err = missing
		}
		return 0, nil, err
	}
	named, err := s.m.Templates(ctx, actor)
	for _, t := range named {
		if t.Snapshot == id && t.Owner == actor {
			err = errors.Join(err, s.m.RemoveTemplate(ctx, t.Name, actor))
		}
	}
	return http.StatusNoContent, nil, err
}
