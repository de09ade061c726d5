package runtime

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/sandbox"
)

// HostImage is the name of the image made of the host's own /usr.
const HostImage = "host"

// collectRetry is how long collecting layers waits while an import is under way.
const collectRetry = 100 * time.Millisecond

// Images lists the images.
func (m *Manager) Images(ctx context.Context) ([]sandbox.Image, error) { return m.state.Images(ctx) }

// Image returns the image of a name. A short name stands for the reference
// docker would make of it where no image has it as it is; a digest for what
// was pulled by it.
func (m *Manager) Image(ctx context.Context, name string) (sandbox.Image, error) {
	img, err := m.state.Image(ctx, name)
	if !errors.Is(err, sandbox.ErrNotFound) {
		return img, err
	}
	ref, perr := sandbox.ParseImageRef(name)
	if perr != nil {
		return img, perr
	}
	if full := ref.String(); full != name {
		if img, err = m.state.Image(ctx, full); !errors.Is(err, sandbox.ErrNotFound) {
			return img, err
		}
	}
	if ref.Digest != "" {
		return m.imageByDigest(ctx, ref, name)
	}
	return img, sandbox.ImageNotFound(name)
}

// imageByDigest finds an image of a repository by the digest of its manifest,
// or of the index that named that.
func (m *Manager) imageByDigest(ctx context.Context, ref sandbox.ImageRef, name string) (sandbox.Image, error) {
	all, err := m.state.Images(ctx)
	if err != nil {
		return sandbox.Image{}, err
	}
	for _, img := range all {
		from, err := sandbox.ParseImageRef(first(img.Reference, img.Name))
		if err == nil && from.Repository() == ref.Repository() && (img.Digest == ref.Digest || img.IndexDigest == ref.Digest) {
			return img, nil
		}
	}
	return sandbox.Image{}, sandbox.ImageNotFound(name)
}

func reserved(name string) error {
	if name == HostImage {
		return sandbox.Errorf(sandbox.ErrConflict, "image_reserved", "image %q is the daemon's own: choose another name", name)
	}
	return nil
}

// RemoveImage forgets an image. Its layers go when nothing uses them.
func (m *Manager) RemoveImage(ctx context.Context, name string) error {
	if err := m.open(); err != nil {
		return err
	}
	img, err := m.Image(ctx, name)
	if err != nil {
		return err
	}
	name = img.Name
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

// collectSoon removes unused layers in the background. One that still waits
// will see what this one would.
func (m *Manager) collectSoon() {
	if !m.collecting.CompareAndSwap(false, true) {
		return
	}
	m.spawn(func() {
		if err := m.collectLayers(m.life); err != nil && m.life.Err() == nil {
			m.log.Warn("remove unused layers", "err", err)
		}
	})
}

// collectAfter removes unused layers where a sandbox no longer stands on what
// it stood on.
func (m *Manager) collectAfter(was, now []string) {
	if !slices.Equal(was, now) {
		m.collectSoon()
	}
}

// collectLayers removes every layer that neither an image names nor a living
// sandbox stands on.
//
// It waits without standing in line for the lock: behind a waiting writer
// every new sandbox would wait for the slowest client that sends an archive.
func (m *Manager) collectLayers(ctx context.Context) error {
	if m.open() != nil {
		m.collecting.Store(false)
		return nil
	}
	for !m.imports.TryLock() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(collectRetry):
		}
	}
	defer m.imports.Unlock()
	m.collecting.Store(false) // before it looks
	used, err := m.state.LayersInUse(ctx)
	if err != nil {
		return err
	}
	layers, err := m.roots.Layers()
	if err != nil {
		return err
	}
	stays := make(map[string]bool, len(used))
	for _, l := range used {
		stays[l] = true
	}
	var errs []error
	for _, l := range layers {
		if stays[l] {
			continue
		}
		if strings.HasPrefix(l, rootfs.UpperPrefix) {
			errs = append(errs, m.state.ForgetFlattened(ctx, l)) // what it stood for, if it was a flattened one
		}
		errs = append(errs, m.roots.RemoveLayer(l))
	}
	return errors.Join(append(errs, m.tidyLibrary(ctx, used))...)
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
