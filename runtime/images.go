package runtime

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/sandbox"
)

// HostImage is the name of the image made of the host's own /usr.
const HostImage = "host"

// collectRetry is how long collecting layers waits while something keeps them all.
const collectRetry = 100 * time.Millisecond

// Images lists the images.
func (m *Manager) Images(ctx context.Context) ([]sandbox.Image, error) { return m.state.Images(ctx) }

// Image returns the image of a name. A short name stands for the reference
// docker would make of it where no image has it as it is; a digest for what
// was pulled by it.
func (m *Manager) Image(ctx context.Context, name string) (sandbox.Image, error) {
	return m.held(ctx, func() (sandbox.Image, error) { return m.imageNamed(ctx, name) })
}

func (m *Manager) imageNamed(ctx context.Context, name string) (sandbox.Image, error) {
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

// holds is what exports, imports and builds need for as long as their clients
// take: collecting leaves those layers, and need not wait.
type holds struct {
	mu  sync.Mutex
	all map[*sandbox.ImageSource]bool // what they point to is guarded by mu, too
}

// keep keeps the image and the layers of src until done, which may be called
// again. m.imports must be held since src was read.
func (m *Manager) keep(src *sandbox.ImageSource) (done func()) {
	m.holds.mu.Lock()
	defer m.holds.mu.Unlock()
	if m.holds.all == nil {
		m.holds.all = map[*sandbox.ImageSource]bool{}
	}
	m.holds.all[src] = true
	return sync.OnceFunc(func() {
		m.holds.mu.Lock()
		delete(m.holds.all, src)
		m.holds.mu.Unlock()
		m.collectSoon() // what only this kept
	})
}

// HoldLayers returns a context for an operation that brings layers in or builds
// on them. Those it holds, and all images it reads of the manager, are kept
// until release, which may be called again.
func (m *Manager) HoldLayers(ctx context.Context) (operation context.Context, release func()) {
	src, all := &sandbox.ImageSource{}, false
	done := m.keep(src)
	hold := func(layers []string) {
		m.imports.RLock() // a collection under way does not know of them
		m.holds.mu.Lock()
		defer m.holds.mu.Unlock()
		if len(layers) == 0 && !all {
			all = true
			return // with the lock
		}
		defer m.imports.RUnlock()
		for _, l := range layers {
			if !slices.Contains(src.Layers, l) {
				src.Layers = append(src.Layers, l)
			}
		}
	}
	return sandbox.WithHold(ctx, hold), sync.OnceFunc(func() {
		done()
		m.holds.mu.Lock()
		defer m.holds.mu.Unlock()
		if all {
			m.imports.RUnlock()
		}
	})
}

// held reads an image and holds its layers before they could be collected.
func (m *Manager) held(ctx context.Context, read func() (sandbox.Image, error)) (sandbox.Image, error) {
	m.imports.RLock()
	defer m.imports.RUnlock()
	img, err := read()
	sandbox.HoldLayers(ctx, img.Layers...)
	return img, err
}

// kept returns what is held now; m.imports is held for writing.
func (m *Manager) kept() (images []sandbox.Image, layers []string) {
	m.holds.mu.Lock()
	defer m.holds.mu.Unlock()
	for src := range m.holds.all {
		images, layers = append(images, src.Image), slices.Concat(layers, src.Image.Layers, src.Layers)
	}
	return images, layers
}

// collectLayers removes every layer that neither an image names, nor a living
// sandbox stands on, nor an operation under way holds.
//
// It waits without standing in line for the lock: behind a waiting writer
// every new sandbox would wait for the slowest that reads.
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
	images, held := m.kept()  // first: what is let go was given its row before
	used, err := m.state.LayersInUse(ctx)
	if err != nil {
		return err
	}
	used = append(used, held...)
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
	return errors.Join(append(errs, m.tidyLibrary(ctx, images, used))...)
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
