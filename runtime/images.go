package runtime

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/sandboxd/sandboxd/sandbox"
)

// HostImage is the name of the image made of the host's own /usr.
const HostImage = "host"

// Images lists the images.
func (m *Manager) Images(ctx context.Context) ([]sandbox.Image, error) { return m.state.Images(ctx) }

// Image returns one image.
func (m *Manager) Image(ctx context.Context, name string) (sandbox.Image, error) {
	img, err := m.state.Image(ctx, name)
	if errors.Is(err, sandbox.ErrNotFound) {
		return img, sandbox.Errorf(sandbox.ErrNotFound, "image_not_found", "no image %.80q: 'sandbox image ls' shows those there are", name)
	}
	return img, err
}

// ImportImage makes an image of a tar archive, plain or compressed with gzip
// or zstd. An image of the same name is replaced; sandboxes made of the old
// one keep its layers.
func (m *Manager) ImportImage(ctx context.Context, name string, r io.Reader) (sandbox.Image, error) {
	if err := sandbox.ValidateImageName(name); err != nil {
		return sandbox.Image{}, err
	}
	if name == HostImage {
		return sandbox.Image{}, sandbox.Errorf(sandbox.ErrConflict, "image_reserved", "image name %q is the host's own: choose another", name)
	}
	img, err := m.roots.ImportTar(ctx, name, r)
	if err != nil {
		return img, err
	}
	if err := m.state.PutImage(ctx, img); err != nil {
		return img, err
	}
	m.record(ctx, sandbox.Event{Type: "image.imported", Data: map[string]string{"image": name, "digest": img.Digest}})
	return img, m.collectLayers(ctx)
}

// RemoveImage forgets an image. Its layers go when nothing uses them.
func (m *Manager) RemoveImage(ctx context.Context, name string) error {
	if _, err := m.Image(ctx, name); err != nil {
		return err
	}
	if name == HostImage {
		return sandbox.Errorf(sandbox.ErrConflict, "image_reserved", "image %q is the host's own and stays", name)
	}
	if err := m.state.DeleteImage(ctx, name); err != nil {
		return err
	}
	m.record(ctx, sandbox.Event{Type: "image.removed", Data: map[string]string{"image": name}})
	return m.collectLayers(ctx)
}

// collectLayers removes every layer that no image names. A sandbox's image
// cannot be removed while the sandbox lives, so images are enough to ask.
func (m *Manager) collectLayers(ctx context.Context) error {
	images, err := m.state.Images(ctx)
	if err != nil {
		return err
	}
	used := map[string]bool{}
	for _, img := range images {
		for _, l := range img.Layers {
			used[l] = true
		}
	}
	layers, err := m.roots.Layers()
	if err != nil {
		return err
	}
	var errs []error
	for _, l := range layers {
		if !used[l] {
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
	old, err := m.state.Image(ctx, HostImage)
	if err == nil && old.Digest == img.Digest && slices.Equal(old.Layers, img.Layers) {
		return nil
	}
	return m.state.PutImage(ctx, img)
}
