package servertest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// ImportImage implements server.Manager; it keeps the digest only.
func (m *Memory) ImportImage(_ context.Context, req sandbox.ImportRequest, r io.Reader) (sandbox.Image, error) {
	if err := m.fail("ImportImage"); err != nil {
		return sandbox.Image{}, err
	}
	if req.Name == "" {
		return sandbox.Image{}, sandbox.Errorf(sandbox.ErrInvalid, "image_name_missing", "the archive tells no name: give one")
	}
	if err := sandbox.ValidateImageName(req.Name); err != nil {
		return sandbox.Image{}, err
	}
	h := sha256.New()
	n, err := io.Copy(h, r)
	if err != nil {
		return sandbox.Image{}, sandbox.Errorf(sandbox.ErrInvalid, "bad_archive", "reading the archive: %w", err)
	}
	digest := "sha256:" + hex.EncodeToString(h.Sum(nil))
	img := sandbox.Image{Name: req.Name, Digest: digest, Kind: sandbox.ImageTar, Layers: []string{digest}, SizeBytes: n, CreatedAt: time.Now()}
	m.putImage(img, "image.imported")
	return img, nil
}

func (m *Memory) putImage(img sandbox.Image, event string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.images = append(slices.DeleteFunc(m.images, func(i sandbox.Image) bool { return i.Name == img.Name }), img)
	m.note("", event, "")
}

// PullImage implements server.Manager: every image of one registry,
// registry.test, is there, and has one layer.
func (m *Memory) PullImage(_ context.Context, req sandbox.PullRequest, report func(sandbox.ImageProgress)) (sandbox.Image, error) {
	if err := m.fail("PullImage"); err != nil {
		return sandbox.Image{}, err
	}
	ref, err := sandbox.ParseImageRef(req.Reference)
	if err != nil {
		return sandbox.Image{}, err
	}
	if ref.Host != "registry.test" {
		return sandbox.Image{}, sandbox.Errorf(sandbox.ErrUnavailable, "registry_unreachable", "there is no registry %s: check the name", ref.Host)
	}
	sum := sha256.Sum256([]byte(ref.String()))
	digest := "sha256:" + hex.EncodeToString(sum[:])
	steps := []sandbox.ImageProgress{{Status: sandbox.StepResolved, Detail: digest, Total: 1000}}
	for n := int64(0); n <= 1000; n += 100 {
		steps = append(steps, sandbox.ImageProgress{Status: sandbox.StepDownloading, Layer: digest, Current: n, Total: 1000})
	}
	for _, p := range append(steps, sandbox.ImageProgress{Status: sandbox.StepDone, Layer: digest, Current: 1000, Total: 1000}) {
		if report != nil {
			report(p)
		}
	}
	img := sandbox.Image{Name: ref.String(), Reference: ref.String(), Digest: digest, Kind: sandbox.ImageOCI, Layers: []string{digest}, SizeBytes: 1000, CreatedAt: time.Now(), Config: sandbox.ImageConfig{Entrypoint: []string{"echo"}, Cmd: []string{"hello"}}}
	if req.Name != "" {
		img.Name = req.Name
	}
	m.putImage(img, "image.pulled")
	return img, nil
}

// PushImage implements server.Manager.
func (m *Memory) PushImage(ctx context.Context, req sandbox.PushRequest, report func(sandbox.ImageProgress)) (sandbox.Pushed, error) {
	if err := m.fail("PushImage"); err != nil {
		return sandbox.Pushed{}, err
	}
	img, err := m.Image(ctx, req.Source)
	if err != nil {
		return sandbox.Pushed{}, err
	}
	if report != nil {
		report(sandbox.ImageProgress{Status: sandbox.StepPushed, Layer: img.Digest, Current: img.SizeBytes, Total: img.SizeBytes})
	}
	return sandbox.Pushed{Reference: req.Reference, Digest: img.Digest, Size: img.SizeBytes, Uploaded: img.SizeBytes}, nil
}

// ExportImage implements server.Manager; the archive is the image's digest.
func (m *Memory) ExportImage(ctx context.Context, req sandbox.ExportRequest) (io.ReadCloser, error) {
	if err := m.fail("ExportImage"); err != nil {
		return nil, err
	}
	img, err := m.Image(ctx, req.Source)
	if err != nil {
		return nil, err
	}
	return io.NopCloser(strings.NewReader(img.Digest)), nil
}

// TagImage implements server.Manager.
func (m *Memory) TagImage(ctx context.Context, name, to, _ string) (sandbox.Image, error) {
	if err := sandbox.ValidateImageName(to); err != nil {
		return sandbox.Image{}, err
	}
	img, err := m.Image(ctx, name)
	if err != nil {
		return img, err
	}
	img.Name = to
	m.putImage(img, "image.tagged")
	return img, nil
}

// PruneImages implements server.Manager; no image is in use.
func (m *Memory) PruneImages(_ context.Context, req sandbox.PruneRequest, _ string) (sandbox.Pruned, error) {
	if err := m.fail("PruneImages"); err != nil {
		return sandbox.Pruned{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	out := sandbox.Pruned{Images: []string{}}
	m.images = slices.DeleteFunc(m.images, func(i sandbox.Image) bool {
		if i.Kind == sandbox.ImageHost || i.Kind != sandbox.ImageOCI && !req.All || time.Since(i.CreatedAt) < time.Duration(req.Until)*time.Second {
			return false
		}
		out.Images = append(out.Images, i.Name)
		if req.DryRun {
			return false
		}
		out.FreedBytes += i.SizeBytes
		return true
	})
	return out, nil
}
