package runtime

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

// HostImage is the name of the image made of the host's own /usr.
const HostImage = "host"

// superseded is where an image goes whose name was given to another while
// sandboxes still stand on it. No person sees these.
const superseded = "superseded/"

// Images lists the images.
func (m *Manager) Images(ctx context.Context) ([]sandbox.Image, error) {
	all, err := m.state.Images(ctx)
	return slices.DeleteFunc(all, func(i sandbox.Image) bool { return strings.HasPrefix(i.Name, superseded) }), err
}

// Image returns one image.
func (m *Manager) Image(ctx context.Context, name string) (sandbox.Image, error) {
	img, err := m.state.Image(ctx, name)
	if errors.Is(err, sandbox.ErrNotFound) || strings.HasPrefix(name, superseded) {
		return img, imageNotFound(name)
	}
	return img, err
}

func imageNotFound(name string) error {
	return sandbox.Errorf(sandbox.ErrNotFound, "image_not_found", "no image %.80q: 'sandbox image ls' shows those there are, 'sandbox image import' adds one", name)
}

// imageOf returns the very image a sandbox was made of.
func (m *Manager) imageOf(ctx context.Context, s sandbox.Spec) (sandbox.Image, error) {
	img, err := m.state.Image(ctx, s.Image)
	if err == nil && img.Digest == s.ImageDigest {
		return img, nil
	}
	return m.state.Image(ctx, supersededName(s.ImageDigest))
}

func supersededName(digest string) string {
	return superseded + strings.ToLower(strings.ReplaceAll(digest, ":", "-"))
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
	m.imports.RLock() // no layer is collected between its commit and its row
	defer m.imports.RUnlock()
	img, err := m.roots.ImportTar(ctx, name, r)
	if err != nil {
		return img, err
	}
	if err := m.putImage(ctx, img); err != nil {
		return img, err
	}
	m.record(ctx, sandbox.Event{Type: "image.imported", Data: map[string]string{"image": name, "digest": img.Digest}})
	m.collectSoon()
	return img, nil
}

func reserved(name string) error {
	if name == HostImage || strings.HasPrefix(name, superseded) {
		return sandbox.Errorf(sandbox.ErrConflict, "image_reserved", "image name %q is the daemon's own: choose another", name)
	}
	return nil
}

// putImage gives an image its name; one that had it before steps aside.
func (m *Manager) putImage(ctx context.Context, img sandbox.Image) error {
	m.naming.Lock() // no sandbox is created of the old one meanwhile
	defer m.naming.Unlock()
	old, err := m.state.Image(ctx, img.Name)
	if err == nil && old.Digest != img.Digest {
		old.Name = supersededName(old.Digest)
		if err := m.state.PutImage(ctx, old); err != nil {
			return err
		}
	} else if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return err
	}
	return m.state.PutImage(ctx, img)
}

// RemoveImage forgets an image. Its layers go when nothing uses them.
func (m *Manager) RemoveImage(ctx context.Context, name string) error {
	if _, err := m.Image(ctx, name); err != nil {
		return err
	}
	if err := reserved(name); err != nil {
		return err
	}
	m.naming.Lock()
	err := m.state.DeleteImage(ctx, name)
	m.naming.Unlock()
	if err != nil {
		return err
	}
	m.record(ctx, sandbox.Event{Type: "image.removed", Data: map[string]string{"image": name}})
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

// collectLayers forgets superseded images no living sandbox stands on, and
// removes every layer no image names.
func (m *Manager) collectLayers(ctx context.Context) error {
	m.imports.Lock()
	defer m.imports.Unlock()
	m.naming.Lock()
	defer m.naming.Unlock()
	rows, err := m.state.Living(ctx)
	if err != nil {
		return err
	}
	standing := map[string]bool{}
	for _, row := range rows {
		standing[supersededName(row.Spec.ImageDigest)] = true
	}
	images, err := m.state.Images(ctx)
	if err != nil {
		return err
	}
	used := map[string]bool{}
	for _, img := range images {
		if strings.HasPrefix(img.Name, superseded) && !standing[img.Name] {
			if err := m.state.DeleteImage(ctx, img.Name); err != nil {
				return err
			}
			continue
		}
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
	return m.putImage(ctx, img)
}
