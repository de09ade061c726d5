package runtime

import (
	"bufio"
	"context"
	"errors"
	"io"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Library moves images in and out of this host. What it brings in has no row
// yet; what it keeps beside the layers Keep bounds.
type Library interface {
	Pull(ctx context.Context, req sandbox.PullRequest, report func(sandbox.ImageProgress)) (sandbox.Image, error)
	Push(ctx context.Context, src sandbox.ImageSource, req sandbox.PushRequest, report func(sandbox.ImageProgress)) (sandbox.Pushed, error)
	Import(ctx context.Context, req sandbox.ImportRequest, r io.Reader) (sandbox.Image, error)
	Export(ctx context.Context, src sandbox.ImageSource, req sandbox.ExportRequest, w io.Writer) error
	Keep(images []sandbox.Image, layers []string) error
}

func (m *Manager) library() (Library, error) {
	if m.cfg.Library == nil {
		return nil, sandbox.Errorf(sandbox.ErrUnsupported, "no_library", "this daemon moves no images: import a tar archive")
	}
	return m.cfg.Library, nil
}

// PullImage brings an image of a registry in. report, which may be nil, hears
// how far it has come. The row comes last: cut off before, the image is absent
// and what came is found again by the next pull.
func (m *Manager) PullImage(ctx context.Context, req sandbox.PullRequest, report func(sandbox.ImageProgress)) (sandbox.Image, error) {
	if err := req.Validate(); err != nil {
		return sandbox.Image{}, err
	}
	return m.bringIn(ctx, "image.pulled", req.Name, req.Actor, func(ctx context.Context, l Library) (sandbox.Image, error) { return l.Pull(ctx, req, report) })
}

// ImportImage makes an image of an archive: of a root file system, plain or
// compressed with gzip or zstd; of an OCI layout; or of docker save. An image
// of the same name is replaced; sandboxes made of the old one keep it.
func (m *Manager) ImportImage(ctx context.Context, req sandbox.ImportRequest, r io.Reader) (sandbox.Image, error) {
	if req.Name != "" {
		if err := sandbox.ValidateImageName(req.Name); err != nil {
			return sandbox.Image{}, err
		}
	}
	if err := sandbox.ValidatePlatform(req.Platform); err != nil {
		return sandbox.Image{}, err
	}
	if m.cfg.Library == nil {
		return m.bringInBy(ctx, "image.imported", req.Name, req.Actor, func(ctx context.Context) (sandbox.Image, error) { return m.roots.ImportTar(ctx, req.Name, r) })
	}
	return m.bringIn(ctx, "image.imported", req.Name, req.Actor, func(ctx context.Context, l Library) (sandbox.Image, error) { return l.Import(ctx, req, r) })
}

func (m *Manager) bringIn(ctx context.Context, event, name, actor string, by func(context.Context, Library) (sandbox.Image, error)) (sandbox.Image, error) {
	l, err := m.library()
	if err != nil {
		return sandbox.Image{}, err
	}
	return m.bringInBy(ctx, event, name, actor, func(ctx context.Context) (sandbox.Image, error) { return by(ctx, l) })
}

// bringInBy keeps the layers that by holds until the row names them.
func (m *Manager) bringInBy(ctx context.Context, event, name, actor string, by func(context.Context) (sandbox.Image, error)) (sandbox.Image, error) {
	if err := m.open(); err != nil {
		return sandbox.Image{}, err
	}
	if err := reserved(name); err != nil {
		return sandbox.Image{}, err
	}
	img, err := func() (sandbox.Image, error) {
		ctx, release := m.HoldLayers(ctx) // afterwards an old image is collected, or one that came to nothing
		defer release()
		img, err := by(ctx)
		if err == nil {
			err = reserved(img.Name)
		}
		if err != nil {
			return img, err
		}
		return img, m.state.PutImage(ctx, img)
	}()
	if err != nil {
		return img, err
	}
	m.record(context.WithoutCancel(ctx), sandbox.Event{Type: event, Actor: actor, Data: map[string]string{"image": img.Name, "digest": img.Digest}})
	return img, nil
}

// TagImage gives an image another name; an image that has it is replaced.
func (m *Manager) TagImage(ctx context.Context, name, to, actor string) (sandbox.Image, error) {
	if err := sandbox.ValidateImageName(to); err != nil {
		return sandbox.Image{}, err
	}
	if err := errors.Join(reserved(name), reserved(to)); err != nil {
		return sandbox.Image{}, err
	}
	return m.bringInBy(ctx, "image.tagged", to, actor, func(ctx context.Context) (sandbox.Image, error) {
		img, err := m.Image(ctx, name)
		img.Name = to
		return img, err
	})
}

// PushImage sends an image, a snapshot or the files of a sandbox to a
// registry.
func (m *Manager) PushImage(ctx context.Context, req sandbox.PushRequest, report func(sandbox.ImageProgress)) (sandbox.Pushed, error) {
	l, err := m.library()
	if err != nil {
		return sandbox.Pushed{}, err
	}
	src, done, err := m.source(ctx, req.Source, req.Actor)
	if err != nil {
		return sandbox.Pushed{}, err
	}
	defer done()
	if req.Reference == "" && !src.Whole() {
		return sandbox.Pushed{}, sandbox.Errorf(sandbox.ErrInvalid, "reference_missing", "push of %s: say where to; without a word it would take the place of its image %s", req.Source, src.Image.Name)
	}
	req.Reference = first(req.Reference, src.Image.Name)
	if _, err := sandbox.ParseImageRef(req.Reference); err != nil {
		return sandbox.Pushed{}, err
	}
	p, err := l.Push(ctx, src, req, report)
	if err == nil {
		m.record(context.WithoutCancel(ctx), sandbox.Event{Type: "image.pushed", Actor: req.Actor, Data: map[string]string{"image": req.Source, "reference": p.Reference, "digest": p.Digest}})
	}
	return p, err
}

// ExportImage writes an image, a snapshot or the files of a sandbox as an
// archive.
func (m *Manager) ExportImage(ctx context.Context, req sandbox.ExportRequest) (io.ReadCloser, error) {
	l, err := m.library()
	if err != nil {
		return nil, err
	}
	switch req.Format {
	case "", sandbox.FormatOCI, sandbox.FormatDocker, sandbox.FormatTar:
	default:
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_format", "format %.20q: use oci, docker or tar", req.Format)
	}
	if req.Name != "" {
		if err := sandbox.ValidateImageName(req.Name); err != nil {
			return nil, err
		}
	}
	src, done, err := m.source(ctx, req.Source, req.Actor)
	if err != nil {
		return nil, err
	}
	r, w := io.Pipe()
	m.spawn(func() {
		defer done()
		_ = w.CloseWithError(l.Export(ctx, src, req, w)) // the reader hears of it
	})
	return begun(r)
}

// begun waits for the first byte of an archive, so that one that cannot be
// made is refused and does not break off.
func begun(r io.ReadCloser) (io.ReadCloser, error) {
	b := bufio.NewReader(r)
	if _, err := b.Peek(1); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return struct {
		io.Reader
		io.Closer
	}{b, r}, nil
}

// source finds what is to be pushed or exported: a snapshot or a sandbox by
// its id, or an image. Until done its layers stay.
func (m *Manager) source(ctx context.Context, name, actor string) (src sandbox.ImageSource, done func(), err error) {
	if id, err := sandbox.ParseID(name); err == nil {
		return m.sandboxSource(ctx, id, actor)
	}
	m.imports.RLock()
	defer m.imports.RUnlock()
	if _, err := sandbox.ParseSnapshotID(name); err == nil {
		var snap sandbox.Snapshot
		if snap, err = m.state.Snapshot(ctx, name); err == nil {
			src, err = exportable(snap.Image, snap.Layers)
		}
		if err != nil {
			return src, nil, err
		}
		return src, m.keep(&src), nil
	}
	img, err := m.Image(ctx, name)
	if err == nil {
		src, err = exportable(img, img.Layers)
	}
	if err != nil {
		return src, nil, err
	}
	return src, m.keep(&src), nil
}

// sandboxSource is a sandbox's files as they are now: of a snapshot that is
// there meanwhile.
func (m *Manager) sandboxSource(ctx context.Context, id sandbox.ID, actor string) (src sandbox.ImageSource, done func(), err error) {
	snap, err := m.Snapshot(ctx, string(id), sandbox.SnapshotRequest{Kind: sandbox.SnapshotFork, Comment: "so that it could be exported", Actor: actor})
	if err != nil {
		return src, nil, err
	}
	done = func() {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownTimeout)
		defer cancel()
		if _, err := m.RemoveSnapshot(clean, string(snap.ID), "daemon"); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			m.log.WarnContext(ctx, "remove the snapshot an export was made of; it goes with its sandbox", "snapshot", snap.ID, "err", err)
		}
	}
	if src, err = exportable(snap.Image, snap.Layers); err != nil {
		done()
		return src, nil, err
	}
	return src, done, nil
}

// exportable refuses what stands on files of the host.
func exportable(img sandbox.Image, layers []string) (sandbox.ImageSource, error) {
	if img.Kind == sandbox.ImageHost {
		return sandbox.ImageSource{}, sandbox.Errorf(sandbox.ErrUnsupported, "image_unsupported", "image %q shows this machine's own /usr, which no archive of it would hold: begin with an image that was imported or pulled", img.Name)
	}
	return sandbox.ImageSource{Image: img, Layers: layers}, nil
}

// PruneImages removes images that no living sandbox and no snapshot was made
// of: of those that can be pulled again, or of all.
func (m *Manager) PruneImages(ctx context.Context, req sandbox.PruneRequest, actor string) (sandbox.Pruned, error) {
	if err := m.open(); err != nil {
		return sandbox.Pruned{}, err
	}
	out := sandbox.Pruned{Images: []string{}}
	all, err := m.state.Images(ctx)
	if err != nil {
		return out, err
	}
	snapshots, err := m.state.Snapshots(ctx, sandbox.SnapshotFilter{})
	if err != nil {
		return out, err
	}
	used := map[string]bool{} // of a dry run: what the store would refuse
	if req.DryRun {
		if used, err = m.imagesInUse(ctx); err != nil {
			return out, err
		}
	}
	var gone []sandbox.Image
	for _, img := range all {
		if !prunable(img, req, m.cfg.DefaultImage) ||
			slices.ContainsFunc(snapshots, func(s sandbox.Snapshot) bool { return s.Image.Name == img.Name && s.Image.Digest == img.Digest }) {
			continue
		}
		if req.DryRun {
			if !used[img.Name] {
				out.Images = append(out.Images, img.Name)
			}
			continue
		}
		if err := m.state.DeleteImage(ctx, img.Name); err != nil {
			if errors.Is(err, sandbox.ErrConflict) || errors.Is(err, sandbox.ErrNotFound) {
				continue // in use, or gone meanwhile
			}
			return out, err
		}
		out.Images = append(out.Images, img.Name)
		gone = append(gone, img)
		m.record(context.WithoutCancel(ctx), sandbox.Event{Type: "image.removed", Actor: actor, Data: map[string]string{"image": img.Name}})
	}
	if req.DryRun {
		return out, nil
	}
	out.FreedBytes, err = m.freed(ctx, gone)
	m.collectSoon()
	return out, err
}

// imagesInUse returns the names of the images that living sandboxes have.
func (m *Manager) imagesInUse(ctx context.Context) (map[string]bool, error) {
	used := map[string]bool{}
	for f := (sandbox.Filter{Limit: sandbox.MaxPage}); ; {
		page, err := m.List(ctx, f)
		if err != nil {
			return nil, err
		}
		for _, sb := range page.Items {
			used[sb.Spec.Image] = true
		}
		if f.Cursor = page.Next; f.Cursor == "" {
			return used, nil
		}
	}
}

func prunable(img sandbox.Image, req sandbox.PruneRequest, keep string) bool {
	switch {
	case img.Name == HostImage, img.Name == keep:
		return false
	case time.Since(img.CreatedAt) < time.Duration(req.Until)*time.Second:
		return false
	}
	return req.All || img.Reference != ""
}

// freed counts the bytes of layers of images gone that nothing uses now.
func (m *Manager) freed(ctx context.Context, gone []sandbox.Image) (int64, error) {
	used, err := m.state.LayersInUse(ctx)
	if err != nil {
		return 0, err
	}
	var freed int64
	seen := map[string]bool{}
	for _, img := range gone {
		for _, l := range img.Layers {
			if seen[l] || slices.Contains(used, l) {
				continue
			}
			seen[l] = true
			size, _, err := m.roots.LayerUsage(ctx, l)
			if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
				return freed, err
			}
			freed += size
		}
	}
	return freed, nil
}

// tidyLibrary drops what is kept of images and layers that are gone, but for
// what is held; the imports are held.
func (m *Manager) tidyLibrary(ctx context.Context, held []sandbox.Image, used []string) error {
	if m.cfg.Library == nil {
		return nil
	}
	images, err := m.state.Images(ctx)
	if err != nil {
		return err
	}
	return m.cfg.Library.Keep(append(images, held...), used)
}

// imageCommand puts the words of a sandbox's image into a command that is to
// run as the image says.
func (m *Manager) imageCommand(ctx context.Context, b *box, spec *sandbox.ProcessSpec) error {
	if !spec.ImageCommand {
		return nil
	}
	img, err := m.state.ImageOf(ctx, b.id)
	if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return err
	}
	if spec.Argv, err = img.Config.Argv(spec.Argv); err != nil {
		return err
	}
	spec.ImageCommand = false
	return spec.Validate()
}
