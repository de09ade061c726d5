package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Push sends an image to a registry. A layer that the registry has, in this
// repository or in another from which it was pulled, is not sent. An image
// whose layers all are there as they were pulled keeps its manifest and so its
// digest; else the layers that are missing are compressed anew, and a new
// manifest names them. Repeating it sends what is missing.
//
// Classes and codes as of Pull.
func (s *Store) Push(ctx context.Context, src sandbox.ImageSource, req sandbox.PushRequest, report func(sandbox.ImageProgress)) (sandbox.Pushed, error) {
	ref, err := sandbox.ParseImageRef(req.Reference)
	if err != nil {
		return sandbox.Pushed{}, err
	}
	if ref.Digest != "" {
		return sandbox.Pushed{}, sandbox.Errorf(sandbox.ErrInvalid, "invalid_image_name", "push to %s: a registry makes the digest; give a tag", ref)
	}
	dir, done, err := s.spool()
	if err != nil {
		return sandbox.Pushed{}, err
	}
	defer done()
	own := s.endpoints(ref.Host, req.PlainHTTP, req.Auth)
	r, end, err := s.open(ctx, own[len(own)-1], ref.Path, s.scopes(ref, src)...)
	if err != nil {
		return sandbox.Pushed{}, err
	}
	defer end()
	p := &push{s: s, r: r, ref: ref, src: src, dir: dir, teller: newTeller(report), out: make([]packed, len(src.Layers))}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(parallelLayers)
	for i := range src.Layers {
		g.Go(func() error { return p.layer(gctx, i) })
	}
	if err := g.Wait(); err != nil {
		return sandbox.Pushed{}, err
	}
	return p.finish(ctx)
}

// push is one image on its way out.
type push struct {
	s   *Store
	r   *repository
	ref sandbox.ImageRef
	src sandbox.ImageSource
	dir string
	*teller
	out      []packed
	uploaded atomic.Int64
	rebuilt  atomic.Int32
}

// scopes are the rights a push needs: to write here, and to read where layers
// may be taken over from.
func (s *Store) scopes(ref sandbox.ImageRef, src sandbox.ImageSource) []string {
	all := []string{"repository:" + ref.Path + ":push,pull"}
	for _, l := range src.Layers {
		var repos []string
		for _, k := range s.known(l) {
			repos = append(repos, k.Repos...)
		}
		for _, repo := range repos {
			host, path, _ := strings.Cut(repo, "/")
			scope := "repository:" + path + ":pull"
			if host == ref.Host && path != ref.Path && !slices.Contains(all, scope) && len(all) < 2*maxRepos {
				all = append(all, scope)
			}
		}
	}
	return all
}

// layer sees to it that the repository has a layer.
func (p *push) layer(ctx context.Context, i int) error {
	name := p.src.Layers[i]
	tell := func(step sandbox.ImageStep, d descriptor, n int64) {
		p.tell(sandbox.ImageProgress{Status: step, Layer: name, Current: n, Total: d.Size})
	}
	forms := p.s.known(name)
	for _, k := range forms {
		there, err := p.takeOver(ctx, k)
		if err != nil {
			return err
		}
		if there {
			d := descriptor{MediaType: k.MediaType, Digest: k.Digest, Size: k.Size}
			tell(sandbox.StepExists, d, d.Size)
			p.out[i] = packed{descriptor: d, layer: name, diffID: k.DiffID}
			return p.s.remember(name, k.DiffID, p.ref.Repository(), d)
		}
	}
	tell(sandbox.StepPacking, descriptor{}, 0)
	made, err := p.s.pack(ctx, p.src.Layers, i, p.dir)
	if err != nil {
		return err
	}
	if len(forms) > 0 && made.Digest != forms[0].Digest {
		p.rebuilt.Add(1)
	}
	sent, err := p.r.upload(ctx, made.descriptor, func() (io.ReadCloser, error) { return os.Open(made.file) },
		func(n int64) { tell(sandbox.StepUploading, made.descriptor, n) })
	if err = errors.Join(err, remove(made.file)); err != nil {
		return err
	}
	p.uploaded.Add(sent)
	tell(sandbox.StepPushed, made.descriptor, made.Size)
	p.out[i] = made
	return p.s.remember(name, made.diffID, p.ref.Repository(), made.descriptor)
}

// takeOver tells whether the repository has a layer, or can take it from
// another one of the same registry.
func (p *push) takeOver(ctx context.Context, k known) (bool, error) {
	there, err := p.r.has(ctx, k.Digest)
	if there || err != nil {
		return there, err
	}
	for _, repo := range k.Repos {
		host, path, _ := strings.Cut(repo, "/")
		if host != p.ref.Host || path == p.ref.Path {
			continue
		}
		if there, err := p.r.mount(ctx, k.Digest, path); there || err != nil {
			return there, err
		}
	}
	return false, nil
}

// finish sends the configuration, then the manifest, which makes it an image.
func (p *push) finish(ctx context.Context) (sandbox.Pushed, error) {
	out, err := p.s.compose(p.src, p.out)
	if err != nil {
		return sandbox.Pushed{}, err
	}
	_, err = p.r.upload(ctx, out.m.Config, func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(out.cfg)), nil }, func(int64) {})
	if err == nil {
		err = p.r.putManifest(ctx, p.ref.Tag, out.m)
	}
	if err != nil {
		return sandbox.Pushed{}, err
	}
	result := sandbox.Pushed{Reference: p.ref.String(), Digest: out.m.digest, Uploaded: p.uploaded.Load(), Rebuilt: int(p.rebuilt.Load())}
	for _, l := range p.out {
		result.Size += l.Size
	}
	p.tell(sandbox.ImageProgress{Status: sandbox.StepPushed, Detail: out.m.digest, Current: result.Size, Total: result.Size})
	return result, nil
}

// has asks whether the repository has a blob.
func (r *repository) has(ctx context.Context, digest string) (there bool, err error) {
	err = r.retry(ctx, "ask for "+digest, func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodHead, r.url("blobs", digest), http.NoBody)
		if err != nil {
			return err
		}
		resp, err := r.send(req, "layer "+digest, http.StatusOK, http.StatusNotFound)
		if err != nil {
			return err
		}
		there = resp.StatusCode == http.StatusOK
		return resp.Body.Close()
	})
	return there, err
}

// mount asks the registry to take a blob over from another repository. It may
// say no, whatever the reason.
func (r *repository) mount(ctx context.Context, digest, from string) (bool, error) {
	q := url.Values{"mount": {digest}, "from": {from}}
	resp, err := r.begin(ctx, q)
	if err != nil {
		if ctx.Err() != nil {
			return false, err
		}
		return false, nil
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusCreated {
		return true, nil
	}
	r.abandon(ctx, resp) // it began an upload in place
	return false, nil
}

// begin begins an upload.
func (r *repository) begin(ctx context.Context, q url.Values) (*http.Response, error) {
	target := r.url("blobs", "uploads/")
	if len(q) > 0 {
		target += "?" + q.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, target, http.NoBody)
	if err != nil {
		return nil, err
	}
	return r.send(req, "upload to "+r.path, http.StatusAccepted, http.StatusCreated)
}

// abandon tells a registry that an upload is not wanted. It would find out by
// itself.
func (r *repository) abandon(ctx context.Context, begun *http.Response) {
	loc, err := begun.Location()
	if err != nil {
		return
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodDelete, loc.String(), http.NoBody)
	if err != nil {
		return
	}
	if resp, err := r.client.Do(req); err == nil {
		_ = resp.Body.Close() // whatever it said
	}
}

// upload sends a blob, unless the repository has it, and tells how many bytes
// it sent.
func (r *repository) upload(ctx context.Context, d descriptor, open func() (io.ReadCloser, error), tell func(int64)) (sent int64, err error) {
	there, err := r.has(ctx, d.Digest)
	if there || err != nil {
		return 0, err
	}
	err = r.retry(ctx, "send "+d.Digest, func(ctx context.Context) error {
		begun, err := r.begin(ctx, nil)
		if err != nil {
			return err
		}
		_ = begun.Body.Close() // only its header counts
		loc, err := begun.Location()
		if err != nil {
			return sandbox.Errorf(sandbox.ErrUnavailable, "registry_refused", "registry %s does not say where to send a layer: %w", r.at.host, err)
		}
		q := loc.Query()
		q.Set("digest", d.Digest)
		loc.RawQuery = q.Encode()
		body, err := open()
		if err != nil {
			return fmt.Errorf("image: read %s: %w", d.Digest, err)
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodPut, loc.String(), &told{ReadCloser: body, tell: tell})
		if err != nil {
			return errors.Join(err, body.Close())
		}
		req.ContentLength = d.Size
		req.Header.Set("Content-Type", "application/octet-stream")
		resp, err := r.send(req, "layer "+d.Digest, http.StatusCreated, http.StatusNoContent, http.StatusOK)
		if err != nil {
			return err
		}
		return resp.Body.Close()
	})
	return d.Size, err
}

// told is a body that tells how much of it was read.
type told struct {
	io.ReadCloser
	n    int64
	tell func(int64)
}

func (t *told) Read(b []byte) (int, error) {
	n, err := t.ReadCloser.Read(b)
	t.n += int64(n)
	t.tell(t.n)
	return n, err
}

// putManifest names a manifest whose parts the repository has.
func (r *repository) putManifest(ctx context.Context, tag string, m *manifest) error {
	return r.retry(ctx, "name the manifest", func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodPut, r.url("manifests", tag), bytes.NewReader(m.raw))
		if err != nil {
			return err
		}
		req.Header.Set("Content-Type", m.MediaType)
		resp, err := r.send(req, "manifest "+r.path+":"+tag, http.StatusCreated, http.StatusOK, http.StatusAccepted, http.StatusNoContent)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if told := resp.Header.Get("Docker-Content-Digest"); told != "" && told != m.digest {
			return mismatch("registry %s took the manifest %s for %.80s: do not trust it, or what stands between", r.at.host, m.digest, told)
		}
		return nil
	})
}
