package guard

import (
	"context"
	"errors"
	"io"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

// ownImages begin the names of images that belong to one owner; all others are
// shared.
const ownImages = "own/"

// folder is where an owner's images are: own/OWNER/. The colon of uid:N, which
// no part of an image's name may have, is a dash there.
func folder(owner string) string { return ownImages + strings.ReplaceAll(owner, ":", "-") + "/" }

// Folder is the beginning that the names of an owner's images have.
func Folder(owner string) string { return folder(owner) }

// seesImage reports whether an image of that name exists for the caller.
func (a *asker) seesImage(name string) bool {
	return a == nil || !strings.HasPrefix(name, ownImages) || strings.HasPrefix(name, folder(a.Owner))
}

// ownImage refuses names a caller may not give to images.
func (a *asker) ownImage(name string) error {
	if a == nil || strings.HasPrefix(name, folder(a.Owner)) && len(name) > len(folder(a.Owner)) {
		return nil
	}
	base := strings.TrimPrefix(name, ownImages)
	if i := strings.LastIndexByte(base, '/'); i >= 0 {
		base = base[i+1:]
	}
	if base == "" {
		base = "NAME"
	}
	return sandbox.Errorf(sandbox.ErrForbidden, "image_name_forbidden", "image name %.80q: images without %s are shared, which takes the role operator: call it %s%.80s", name, folder(a.Owner), folder(a.Owner), base)
}

// image returns the image a caller means by a name, among those they see.
func (g *Manager) image(ctx context.Context, a *asker, name string) (sandbox.Image, error) {
	img, err := g.m.Image(ctx, name)
	if a == nil || err == nil && a.seesImage(img.Name) || err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return img, err
	}
	ref, perr := sandbox.ParseImageRef(name)
	if err != nil || perr != nil || ref.Digest == "" {
		return sandbox.Image{}, sandbox.ImageNotFound(name)
	}
	// What was found by its digest has another name too, perhaps.
	all, err := g.m.Images(ctx)
	if err != nil {
		return sandbox.Image{}, err
	}
	for _, img := range all {
		from, err := sandbox.ParseImageRef(first(img.Reference, img.Name))
		if err == nil && a.seesImage(img.Name) && from.Repository() == ref.Repository() && (img.Digest == ref.Digest || img.IndexDigest == ref.Digest) {
			return img, nil
		}
	}
	return sandbox.Image{}, sandbox.ImageNotFound(name)
}

// Images lists the shared images and the caller's own.
func (g *Manager) Images(ctx context.Context) ([]sandbox.Image, error) {
	a, err := g.ask(ctx, looks)
	if err != nil {
		return nil, err
	}
	all, err := g.m.Images(ctx)
	if a != nil {
		all = only(all, func(img sandbox.Image) bool { return a.seesImage(img.Name) })
	}
	return all, err
}

// Image returns an image the caller sees.
func (g *Manager) Image(ctx context.Context, name string) (sandbox.Image, error) {
	a, err := g.ask(ctx, looks)
	if err != nil {
		return sandbox.Image{}, err
	}
	return g.image(ctx, a, name)
}

// ImportImage makes an image of the caller's. One beyond the quota is removed
// again.
func (g *Manager) ImportImage(ctx context.Context, req sandbox.ImportRequest, r io.Reader) (sandbox.Image, error) {
	a, err := g.ask(ctx, changes)
	if err == nil {
		err = a.ownImage(req.Name)
	}
	if err != nil {
		return sandbox.Image{}, err
	}
	req.Actor = a.as(req.Actor)
	if a == nil {
		return g.m.ImportImage(ctx, req, r)
	}
	leave, err := g.purses.takeIn(ctx, a.Owner)
	if err != nil {
		return sandbox.Image{}, err
	}
	defer leave()
	q, err := g.cfg.Quotas.Quota(ctx, a.Owner)
	if err == nil {
		err = g.roomForOne(ctx, a.Owner, q)
	}
	if err != nil {
		return sandbox.Image{}, err
	}
	img, err := g.m.ImportImage(ctx, req, r)
	if err != nil {
		return img, err
	}
	clean := context.WithoutCancel(ctx)
	if err := g.fitted(clean, a.Owner, q, img.SizeBytes); err != nil {
		return sandbox.Image{}, errors.Join(err, g.m.RemoveImage(clean, img.Name))
	}
	return img, nil
}

// PullImage is for those who see all: it uses the daemon's credentials, and its
// place in the network.
func (g *Manager) PullImage(ctx context.Context, req sandbox.PullRequest, report func(sandbox.ImageProgress)) (sandbox.Image, error) {
	if err := g.operators(ctx, "registries are reached with the daemon's own credentials"); err != nil {
		return sandbox.Image{}, err
	}
	return g.m.PullImage(ctx, req, report)
}

// PushImage is for those who see all, as PullImage.
func (g *Manager) PushImage(ctx context.Context, req sandbox.PushRequest, report func(sandbox.ImageProgress)) (sandbox.Pushed, error) {
	if err := g.operators(ctx, "registries are reached with the daemon's own credentials"); err != nil {
		return sandbox.Pushed{}, err
	}
	return g.m.PushImage(ctx, req, report)
}

// ExportImage writes an image the caller sees, or the files of one of the
// caller's snapshots or sandboxes.
func (g *Manager) ExportImage(ctx context.Context, req sandbox.ExportRequest) (io.ReadCloser, error) {
	a, err := g.ask(ctx, looks)
	if err == nil && a != nil {
		req.Actor = a.Owner
		req.Source, err = g.exportSource(ctx, a, req.Source)
	}
	if err != nil {
		return nil, err
	}
	return g.m.ExportImage(ctx, req)
}

// exportSource resolves a source as the manager does: by the form of the ref.
func (g *Manager) exportSource(ctx context.Context, a *asker, source string) (string, error) {
	if _, err := sandbox.ParseID(source); err == nil {
		sb, err := g.rows.OwnByRef(ctx, a.Owner, source)
		return string(sb.ID), err
	}
	if _, err := sandbox.ParseSnapshotID(source); err == nil {
		s, err := g.rows.OwnSnapshot(ctx, a.Owner, source)
		return string(s.ID), err
	}
	img, err := g.image(ctx, a, source)
	return img.Name, err
}

// TagImage gives an image the caller sees a name of the caller's.
func (g *Manager) TagImage(ctx context.Context, name, to, actor string) (sandbox.Image, error) {
	a, err := g.ask(ctx, changes)
	if err == nil && a != nil {
		var img sandbox.Image
		if img, err = g.image(ctx, a, name); err == nil {
			name, err = img.Name, a.ownImage(to)
		}
	}
	if err != nil {
		return sandbox.Image{}, err
	}
	return g.m.TagImage(ctx, name, to, a.as(actor))
}

// PruneImages is for those who see all.
func (g *Manager) PruneImages(ctx context.Context, req sandbox.PruneRequest, actor string) (sandbox.Pruned, error) {
	if err := g.operators(ctx, "pruning is about everybody's images"); err != nil {
		return sandbox.Pruned{}, err
	}
	return g.m.PruneImages(ctx, req, actor)
}

// RemoveImage forgets one of the caller's images.
func (g *Manager) RemoveImage(ctx context.Context, name string) error {
	a, err := g.ask(ctx, changes)
	if err == nil && a != nil {
		var img sandbox.Image
		if img, err = g.image(ctx, a, name); err == nil {
			name = img.Name
			if !strings.HasPrefix(name, folder(a.Owner)) {
				err = forOperators("image " + name + " is shared")
			}
		}
	}
	if err != nil {
		return err
	}
	return g.m.RemoveImage(ctx, name)
}
