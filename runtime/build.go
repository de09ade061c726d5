package runtime

import (
	"archive/tar"
	"bytes"
	"context"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// What builds of images need of the manager; package build says for what.

const (
	labelBuild = "sandboxd.build" // build.LabelBuild
	buildActor = "build:"         // build.ActorPrefix
)

// CreateOn is Create of an image that needs no name. Its layers must stay
// until it returns: see HoldLayers.
func (m *Manager) CreateOn(ctx context.Context, req sandbox.CreateRequest, base sandbox.Image) (sandbox.Sandbox, error) {
	base.Name = ""
	req.Base = &base
	return m.Create(ctx, req)
}

// FreezeStep ends what runs in a sandbox of a build and returns base with its
// files as one more layer, on disk. The layer stays as long as the sandbox
// does, or what the caller writes down.
func (m *Manager) FreezeStep(ctx context.Context, ref string, base sandbox.Image) (sandbox.Image, error) {
	if err := m.killStep(ctx, ref); err != nil {
		return base, err
	}
	return m.held(ctx, func() (sandbox.Image, error) { return m.freezeStep(ctx, ref, base) })
}

func (m *Manager) freezeStep(ctx context.Context, ref string, base sandbox.Image) (sandbox.Image, error) {
	// A snapshot of this kind goes with its sandbox, and with a crash.
	s, err := m.Snapshot(ctx, ref, sandbox.SnapshotRequest{Kind: sandbox.SnapshotFork, Sync: true, Comment: "step of a build"})
	if err != nil {
		return base, err
	}
	bytes, files := s.SizeBytes, s.Files
	if files == 0 && len(s.Layers) > len(base.Layers) {
		if bytes, files, err = m.roots.LayerUsage(ctx, s.Layers[len(s.Layers)-1]); err != nil {
			return base, err
		}
	}
	base.Layers = s.Layers
	base.SizeBytes += bytes
	base.Files += files
	return base, nil
}

// killStep is Stop without waiting for anybody: the step's command is over, and
// what it left running dies with it, as in a container whose first process ends.
func (m *Manager) killStep(ctx context.Context, ref string) error {
	_, err := m.change(ctx, ref, func(ctx context.Context, b *box, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
		if sb.Status != sandbox.StatusRunning {
			return sb, wrongState(sb, "freeze", sandbox.StatusRunning)
		}
		if err := m.state.Update(ctx, b.id, state.Change{InitPID: new(int)}); err != nil { // as Stop does
			return sb, err
		}
		return m.halt(ctx, b, sb, state.Change{Actor: "daemon"})
	})
	return err
}

// Scratch returns the image with nothing in it but the mount points.
func (m *Manager) Scratch(ctx context.Context) (sandbox.Image, error) {
	var empty bytes.Buffer
	if err := tar.NewWriter(&empty).Close(); err != nil {
		return sandbox.Image{}, err
	}
	img, err := m.roots.ImportTar(ctx, "scratch", &empty)
	img.Name = ""
	return img, err
}

// PutBuilt names an image that was built. One of the same name is replaced;
// sandboxes made of the old one keep it.
func (m *Manager) PutBuilt(ctx context.Context, img sandbox.Image) error {
	if err := m.open(); err != nil {
		return err
	}
	if err := sandbox.ValidateImageName(img.Name); err != nil {
		return err
	}
	if err := reserved(img.Name); err != nil {
		return err
	}
	if err := m.state.PutImage(ctx, img); err != nil {
		return err
	}
	m.record(context.WithoutCancel(ctx), sandbox.Event{Type: "image.built", Data: map[string]string{"image": img.Name, "digest": img.Digest}})
	m.collectSoon() // of the one before
	return nil
}

// BuildStep returns what a step of a build came to. ErrNotFound.
func (m *Manager) BuildStep(ctx context.Context, key string) (sandbox.Image, error) {
	return m.held(ctx, func() (sandbox.Image, error) { return m.state.BuildStep(ctx, key) })
}

// PutBuildStep remembers what a step of a build came to. What it names must
// be held until then.
func (m *Manager) PutBuildStep(ctx context.Context, key string, made sandbox.Image) error {
	return m.state.PutBuildStep(ctx, key, made)
}

// BuildCache tells what the cache of build steps holds.
func (m *Manager) BuildCache(ctx context.Context) (sandbox.BuildCache, error) {
	n, err := m.state.BuildSteps(ctx)
	return sandbox.BuildCache{Steps: n}, err
}

// PruneBuildCache forgets steps of builds. Layers nothing else needs go in
// the background.
func (m *Manager) PruneBuildCache(ctx context.Context, req sandbox.BuildCachePrune) (sandbox.BuildCache, error) {
	if err := m.open(); err != nil {
		return sandbox.BuildCache{}, err
	}
	before := time.Time{}
	keep := req.Keep
	if req.OlderThanSeconds > 0 {
		before = time.Now().Add(-time.Duration(req.OlderThanSeconds) * time.Second)
		if keep == 0 {
			keep = maxBuildSteps
		}
	}
	gone, err := m.state.PruneBuildSteps(ctx, before, keep)
	if err != nil {
		return sandbox.BuildCache{}, err
	}
	if gone > 0 {
		m.collectSoon()
	}
	return sandbox.BuildCache{Steps: gone}, nil
}

// maxBuildSteps is how many steps the cache keeps at most.
const maxBuildSteps = 10000

// buildCacheAge is how long a step that nothing used is kept.
const buildCacheAge = 30 * 24 * time.Hour

// pruneBuilds keeps the cache of build steps from growing without bound.
func (m *Manager) pruneBuilds(ctx context.Context) error {
	_, err := m.PruneBuildCache(ctx, sandbox.BuildCachePrune{OlderThanSeconds: int64(buildCacheAge / time.Second), Keep: maxBuildSteps})
	return err
}

// removeBuilds ends the sandboxes of builds that an earlier daemon left: with
// it, their builds ended.
func (m *Manager) removeBuilds(rows []state.Row) {
	for _, r := range rows {
		b := m.box(r.ID)
		if b == nil || r.Spec.Labels[labelBuild] == "" || !strings.HasPrefix(r.Owner, buildActor) {
			continue
		}
		m.endSoon(b, ending{reason: sandbox.ReasonCancelled, detail: "the daemon ended during the build", actor: "daemon"})
	}
}
