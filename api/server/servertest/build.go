package servertest

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Build implements server.Manager. It runs nothing: each line of the
// Dockerfile is a step, COPY must name a file of the archive, and RUN fail
// fails.
func (m *Memory) Build(ctx context.Context, req sandbox.BuildRequest, files io.Reader, tell func(sandbox.BuildEvent) error) (sandbox.Image, error) {
	if err := m.fail("Build"); err != nil {
		return sandbox.Image{}, err
	}
	names := map[string]bool{}
	for tr := tar.NewReader(orEmpty(files)); files != nil; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return sandbox.Image{}, sandbox.Errorf(sandbox.ErrInvalid, "bad_context", "reading the archive: %w", err)
		}
		names[h.Name] = true
	}
	if !strings.HasPrefix(req.Dockerfile, "FROM ") {
		return sandbox.Image{}, sandbox.Errorf(sandbox.ErrInvalid, "dockerfile_invalid", "Dockerfile line 1: no FROM")
	}
	lines := strings.Split(strings.TrimSpace(req.Dockerfile), "\n")
	for i, l := range lines {
		if err := tell(sandbox.BuildEvent{Type: sandbox.BuildStep, Stage: "0", Step: i + 1, Steps: len(lines), Line: i + 1, Text: l, Cached: i > 0 && !req.NoCache}); err != nil {
			return sandbox.Image{}, err
		}
		word, rest, _ := strings.Cut(l, " ")
		switch {
		case word == "COPY" && !names[strings.Fields(rest)[0]]:
			return sandbox.Image{}, sandbox.Errorf(sandbox.ErrInvalid, "build_step_failed", "Dockerfile line %d: no such file", i+1)
		case word == "RUN" && rest == "fail":
			return sandbox.Image{}, sandbox.Errorf(sandbox.ErrInvalid, "build_step_failed", "Dockerfile line %d: exit status 1", i+1)
		case word == "RUN" && rest == "wait":
			<-ctx.Done()
			return sandbox.Image{}, ctx.Err()
		case word == "RUN":
			if err := tell(sandbox.BuildEvent{Type: sandbox.BuildOutput, Stage: "0", Step: i + 1, Line: i + 1, Stream: "stdout", Data: []byte(rest + "\n")}); err != nil {
				return sandbox.Image{}, err
			}
		}
	}
	img := sandbox.Image{Digest: "sha256:built", Kind: sandbox.ImageBuild, Layers: []string{"upper:built"}, CreatedAt: time.Now()}
	m.mu.Lock()
	for _, n := range req.Names {
		img.Name = n
		m.images = append(m.images, img)
	}
	m.steps += len(lines)
	m.mu.Unlock()
	return img, tell(sandbox.BuildEvent{Type: sandbox.BuildImage, Image: &img})
}

func orEmpty(r io.Reader) io.Reader {
	if r == nil {
		return strings.NewReader("")
	}
	return r
}

// BuildCache implements server.Manager.
func (m *Memory) BuildCache(context.Context) (sandbox.BuildCache, error) {
	if err := m.fail("BuildCache"); err != nil {
		return sandbox.BuildCache{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return sandbox.BuildCache{Steps: m.steps}, nil
}

// PruneBuildCache implements server.Manager; steps have no age here.
func (m *Memory) PruneBuildCache(_ context.Context, req sandbox.BuildCachePrune) (sandbox.BuildCache, error) {
	if err := m.fail("PruneBuildCache"); err != nil {
		return sandbox.BuildCache{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	gone := max(m.steps-req.Keep, 0)
	if req.OlderThanSeconds > 0 {
		gone = 0
	}
	m.steps -= gone
	return sandbox.BuildCache{Steps: gone}, nil
}
