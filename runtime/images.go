package runtime

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// HostImage is the name of the image made of the host's own /usr.
const HostImage = "host"

// collectRetry is how long collecting layers waits while an import is under way.
const collectRetry = 100 * time.Millisecond

// Images lists the images.
func (m *Manager) Images(ctx context.Context) ([]sandbox.Image, error) { return m.state.Images(ctx) }

// Image returns one image.
func (m *Manager) Image(ctx context.Context, name string) (sandbox.Image, error) {
	img, err := m.state.Image(ctx, name)
	if errors.Is(err, sandbox.ErrNotFound) {
		return img, imageNotFound(name)
	}
	return img, err
}

func imageNotFound(name string) error {
	return sandbox.Errorf(sandbox.ErrNotFound, "image_not_found", "no image %.80q: 'sandbox image ls' shows those there are, 'sandbox image import' adds one", name)
}

// ImportImage makes an image of a tar archive, plain or compressed with gzip
// or zstd. An image of the same name is replaced; sandboxes made of the old
// one keep it.
func (m *Manager) ImportImage(ctx context.Context, name string, r io.Reader) (sandbox.Image, error) {
	if err := sandbox.ValidateImageName(name); err != nil {
		return sandbox.Image{}, err
	}
	if err := reserved(name); err != nil {
		return sandbox.Image{}, err
	}
	img, err := m.importTar(ctx, name, r)
	m.collectSoon() // of an old image, or of one that came to nothing
	if err != nil {
		return img, err
	}
	m.record(context.WithoutCancel(ctx), sandbox.Event{Type: "image.imported", Data: map[string]string{"image": name, "digest": img.Digest}})
	return img, nil
}

func (m *Manager) importTar(ctx context.Context, name string, r io.Reader) (sandbox.Image, error) {
	m.imports.RLock() // no layer is collected between its commit and its row
	defer m.imports.RUnlock()
	img, err := m.roots.ImportTar(ctx, name, r)
	if err != nil {
		return img, err
	}
	return img, m.state.PutImage(ctx, img)
}

func reserved(name string) error {
	if name == HostImage {
		return sandbox.Errorf(sandbox.ErrConflict, "image_reserved", "image %q is the daemon's own: choose another name", name)
	}
	return nil
}

// RemoveImage forgets an image. Its layers go when nothing uses them.
func (m *Manager) RemoveImage(ctx context.Context, name string) error {
	if _, err := m.Image(ctx, name); err != nil {
		return err
	}
	if err := reserved(name); err != nil {
		return err
	}
	if err := m.state.DeleteImage(ctx, name); err != nil {
		return err
	}
	m.record(context.WithoutCancel(ctx), sandbox.Event{Type: "image.removed", Data: map[string]string{"image": name}})
	m.collectSoon()
	return nil
}

// collectSoon removes unused layers in the background.
func (m *Manager) collectSoon() {
	m.spawn(func() {
		if err := m.collectLayers(m.life); err != nil && m.life.Err() == nil {
			m.log.Warn("remove unused layers", "err", err)
		}
	})
}

// collectLayers removes every layer that neither an image names nor a living
// sandbox stands on.
//
// It waits without standing in line for the lock: behind a waiting writer
// every new sandbox would wait for the slowest client that sends an archive.
func (m *Manager) collectLayers(ctx context.Context) error {
	for !m.imports.TryLock() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(collectRetry):
		}
	}
	defer m.imports.Unlock()
	used, err := m.state.LayersInUse(ctx)
	if err != nil {
		return err
	}
	layers, err := m.roots.Layers()
	if err != nil {
		return err
	}
	var errs []error
	for _, l := range layers {
		if !slices.Contains(used, l) {
			errs = append(errs, m.roots.RemoveLayer(l))
		}
	}
	return errors.Join(errs...)
}

// refreshHostImage brings the host's own image up to date.
func (m *Manager) refreshHostImage(ctx context.Context) error {
	img, err := m.roots.HostImage(ctx)
	if err != nil {
		return fmt.Errorf("make the host image: %w", err)
	}
	img.Name = HostImage
	return m.state.PutImage(ctx, img)
}
