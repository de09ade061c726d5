package image

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandboxd/sandboxd/sandbox"
)

// teller tells how far a transfer has come, not too often and from one
// goroutine at a time.
type teller struct {
	mu   sync.Mutex
	last map[string]sandbox.ImageProgress
	at   map[string]time.Time
	to   func(sandbox.ImageProgress)
}

// between is the least time between two reports of the same step of a layer.
const between = 100 * time.Millisecond

func newTeller(to func(sandbox.ImageProgress)) *teller {
	return &teller{to: to, last: map[string]sandbox.ImageProgress{}, at: map[string]time.Time{}}
}

func (t *teller) tell(p sandbox.ImageProgress) {
	if t.to == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.last[p.Layer].Status == p.Status && p.Current < p.Total && time.Since(t.at[p.Layer]) < between {
		return
	}
	t.last[p.Layer], t.at[p.Layer] = p, time.Now()
	t.to(p)
}

// Pull brings an image in: its layers onto the volume, its manifest and
// configuration into the store. The image returned has no row yet. What is
// there already is not fetched; pulling the same twice at once does no harm.
// Cut off at any point it leaves whole layers, which nothing names yet, and
// parts of others that the next pull goes on with. report, which may be nil,
// hears how far it has come, one call at a time; it must not block for long.
//
// Classes and codes: ErrForbidden image_unauthorized; ErrNotFound
// image_not_found, image_no_platform; ErrUnavailable registry_unreachable,
// registry_busy, registry_untrusted, registry_refused; ErrInvalid
// image_digest_mismatch, image_bad_manifest; ErrUnsupported
// image_unsupported; ErrTooLarge image_too_large; ErrExhausted disk_full; and
// what the volume says of a layer.
func (s *Store) Pull(ctx context.Context, req sandbox.PullRequest, report func(sandbox.ImageProgress)) (sandbox.Image, error) {
	ref, err := sandbox.ParseImageRef(req.Reference)
	if err != nil {
		return sandbox.Image{}, err
	}
	if err := sandbox.ValidatePlatform(req.Platform); err != nil {
		return sandbox.Image{}, err
	}
	p := &pull{s: s, ref: ref, platform: cmp.Or(req.Platform, s.cfg.Platform), teller: newTeller(report)}
	defer p.close()
	if err := p.resolve(ctx, s.endpoints(ref.Host, req.PlainHTTP, req.Auth)); err != nil {
		return sandbox.Image{}, err
	}
	if err := p.configure(ctx); err != nil {
		return sandbox.Image{}, err
	}
	if err := p.layers(ctx); err != nil {
		return sandbox.Image{}, err
	}
	return p.image(ctx, cmp.Or(req.Name, ref.String()))
}

// pull is one image on its way in.
type pull struct {
	s        *Store
	ref      sandbox.ImageRef
	platform string
	*teller

	from   sources // that which told the manifest first, then those after it
	ends   []func()
	index  string // digest of the index, if there was one
	m      *manifest
	rawCfg []byte
	cfg    *configFile
	record sandbox.ImageConfig
}

func (p *pull) close() {
	for _, end := range p.ends {
		end()
	}
}

// resolve finds the manifest at the first endpoint that has it.
func (p *pull) resolve(ctx context.Context, from []endpoint) error {
	var err error
	for i, at := range from {
		var r *repository
		if r, err = p.open(ctx, at); err != nil {
			if ctx.Err() != nil {
				return err
			}
			p.s.log.InfoContext(ctx, "a registry is of no use", "registry", at.host, "err", err)
			continue
		}
		if err = p.manifest(ctx, r); err != nil {
			if ctx.Err() != nil || !elsewhere(err) {
				return err
			}
			continue
		}
		p.from = sources{p: p, ends: from[i:], open: []*repository{r}}
		return nil
	}
	return err
}

// sources are the registries an image can be had from, opened when they are
// needed: the first that has its manifest, then those after it.
type sources struct {
	p    *pull
	ends []endpoint

	mu   sync.Mutex
	open []*repository // guarded by mu; nil: not yet
}

// at returns the i-th.
func (s *sources) at(ctx context.Context, i int) (*repository, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.open) < len(s.ends) {
		s.open = append(s.open, nil)
	}
	if s.open[i] == nil {
		r, err := s.p.open(ctx, s.ends[i])
		if err != nil {
			return nil, err
		}
		s.open[i] = r
	}
	return s.open[i], nil
}

// elsewhere tells whether another registry may do better.
func elsewhere(err error) bool {
	switch sandbox.CodeOf(err) {
	case "image_unsupported", "image_no_platform", "image_too_large":
		return false
	}
	return true
}

func (p *pull) open(ctx context.Context, at endpoint) (*repository, error) {
	r, end, err := p.s.open(ctx, at, p.ref.Path, "repository:"+p.ref.Path+":pull")
	if err == nil {
		p.ends = append(p.ends, end)
	}
	return r, err
}

// manifest reads the manifest for the platform, through an index if there is
// one.
func (p *pull) manifest(ctx context.Context, r *repository) error {
	p.index = ""
	m, err := r.getManifest(ctx, cmp.Or(p.ref.Digest, p.ref.Tag))
	for depth := 0; err == nil && m.isIndex(); depth++ {
		if depth == maxNesting {
			return badImage("the index names an index, and that another: at most %d", maxNesting)
		}
		if depth == 0 {
			p.index = m.digest
		}
		var d descriptor
		if d, err = m.choose(p.platform); err != nil {
			return err
		}
		if m, err = r.getManifest(ctx, d.Digest); err == nil && int64(len(m.raw)) != d.Size {
			return mismatch("manifest %s has %d bytes, by its index %d", d.Digest, len(m.raw), d.Size)
		}
	}
	if err != nil {
		return err
	}
	var size int64
	for _, d := range m.Layers {
		size += d.Size
		if size > p.s.cfg.MaxBytes {
			return tooLarge("the image's layers have over %d bytes compressed: the daemon's configuration takes no more (volume.import_max)", p.s.cfg.MaxBytes)
		}
	}
	p.m = m
	p.tell(sandbox.ImageProgress{Status: sandbox.StepResolved, Detail: m.digest, Total: size})
	return nil
}

// configure reads the image's configuration.
func (p *pull) configure(ctx context.Context) error {
	var err error
	for i := range p.from.ends {
		var r *repository
		if r, err = p.from.at(ctx, i); err == nil {
			p.rawCfg, err = r.small(ctx, p.m.Config, maxConfig)
		}
		if err == nil || ctx.Err() != nil {
			break
		}
	}
	if err != nil {
		return err
	}
	if p.cfg, err = parseConfig(p.rawCfg, len(p.m.Layers)); err != nil {
		return err
	}
	if t := p.cfg.RootFS.Type; t != "layers" && t != "" {
		return unsupported("the image's file system is of type %.40q: only layers are known", t)
	}
	if p.cfg.OS != "" && parsePlatform(p.platform).rank(p.cfg.platform) == 0 {
		return sandbox.Errorf(sandbox.ErrNotFound, "image_no_platform", "the image is for %s, not for %s: name its platform with --platform, if this machine can run it", p.cfg.platform, p.platform)
	}
	p.record, err = p.cfg.record()
	return err
}

// layers brings every layer onto the volume, several at a time.
func (p *pull) layers(ctx context.Context) error {
	sandbox.HoldLayers(ctx, p.cfg.RootFS.DiffIDs...)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(parallelLayers)
	for i, d := range p.m.Layers {
		g.Go(func() error { return p.layer(ctx, d, p.cfg.RootFS.DiffIDs[i]) })
	}
	return g.Wait()
}

// layer brings one layer onto the volume, unless it is there.
func (p *pull) layer(ctx context.Context, d descriptor, diffID string) error {
	tell := func(step sandbox.ImageStep, n int64, detail string) {
		p.tell(sandbox.ImageProgress{Status: step, Layer: d.Digest, Current: n, Total: d.Size, Detail: detail})
	}
	tell(sandbox.StepWaiting, 0, "")
	unlock, err := p.s.lock(ctx, hexOf(d.Digest))
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := p.s.vol.Layer(diffID); err == nil {
		tell(sandbox.StepExists, d.Size, "")
		return p.remember(d, diffID)
	} else if !errors.Is(err, sandbox.ErrNotFound) {
		return err
	}
	f, err := p.s.fetch(ctx, &p.from, d, tell)
	if err != nil {
		return err
	}
	tell(sandbox.StepUnpacking, d.Size, "")
	_, err = p.s.vol.ImportLayer(ctx, diffID, f)
	err = errors.Join(err, f.Close())
	if ctx.Err() == nil || err == nil {
		// Unpacked, or never to be: only one that was cut off is worth keeping.
		if rerr := remove(f.Name()); rerr != nil {
			p.s.log.WarnContext(ctx, "remove a fetched layer", "err", rerr)
		}
	}
	if err != nil {
		return err
	}
	tell(sandbox.StepDone, d.Size, "")
	return p.remember(d, diffID)
}

// remember notes what the registry calls a layer, for a push.
func (p *pull) remember(d descriptor, diffID string) error {
	return p.s.remember(diffID, diffID, p.ref.Repository(), d)
}

// image describes what was pulled, once its manifest is kept.
func (p *pull) image(ctx context.Context, name string) (sandbox.Image, error) {
	img := sandbox.Image{
		Name: name, Digest: p.m.digest, Kind: sandbox.ImageOCI, Layers: stack(p.cfg.RootFS.DiffIDs), Config: p.record, CreatedAt: time.Now().UTC(),
		Reference: p.ref.String(), IndexDigest: p.index, Platform: p.cfg.String(),
	}
	return img, p.s.adopt(ctx, &img, p.m, p.rawCfg)
}

// adopt keeps an image's manifest and configuration and counts its layers.
// From then on they must not be tidied away until the image has its row.
func (s *Store) adopt(ctx context.Context, img *sandbox.Image, m *manifest, cfg []byte) error {
	for _, l := range img.Layers {
		info, err := s.vol.Layer(l)
		if err != nil {
			return fmt.Errorf("image: count layer %s: %w", l, err)
		}
		img.SizeBytes += info.Size
		img.Files += info.Files
	}
	sandbox.HoldAll(ctx)
	for _, f := range []struct {
		dir, name string
		data      []byte
	}{{configsDir, hexOf(m.Config.Digest), cfg}, {manifestsDir, hexOf(m.digest), m.raw}} {
		if _, err := os.Stat(s.path(f.dir, f.name)); err == nil {
			continue
		}
		if err := s.keep(f.dir, f.name, f.data); err != nil {
			return err
		}
	}
	return nil
}
