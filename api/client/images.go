package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// imagePath keeps the slashes of an image's name.
func imagePath(name string) string {
	return path(append([]string{"images"}, strings.Split(name, "/")...)...)
}

// Images lists the images.
func (c *Client) Images(ctx context.Context) ([]sandbox.Image, error) {
	l, err := get[api.ImageList](ctx, c, path("images"), nil)
	return l.Items, err
}

// Image returns one image.
func (c *Client) Image(ctx context.Context, name string) (sandbox.Image, error) {
	return get[sandbox.Image](ctx, c, imagePath(name), nil)
}

// ImportImage makes an image of an archive: of a root file system, an OCI
// image layout or docker save, plain or compressed. Without a name the archive
// must tell one.
func (c *Client) ImportImage(ctx context.Context, name string, r io.Reader) (sandbox.Image, error) {
	return c.ImportImageFor(ctx, sandbox.ImportRequest{Name: name}, r)
}

// ImportImageFor is ImportImage with a platform chosen.
func (c *Client) ImportImageFor(ctx context.Context, req sandbox.ImportRequest, r io.Reader) (sandbox.Image, error) {
	q := url.Values{}
	set(q, "name", req.Name)
	set(q, "platform", req.Platform)
	return ask[sandbox.Image](ctx, c, call{
		method: http.MethodPost, path: path("images"), query: q,
		header: http.Header{"Content-Type": {"application/x-tar"}}, body: r,
	})
}

// PullImage pulls an image from a registry and returns it. f, if not nil,
// hears how far it has come. Ending ctx ends the pull; what came is not lost.
func (c *Client) PullImage(ctx context.Context, req sandbox.PullRequest, f func(sandbox.ImageProgress)) (sandbox.Image, error) {
	return move[sandbox.Image](ctx, c, path("images", "pull"), req, f)
}

// PushImage pushes an image, a snapshot or a sandbox's files to a registry.
func (c *Client) PushImage(ctx context.Context, req sandbox.PushRequest, f func(sandbox.ImageProgress)) (sandbox.Pushed, error) {
	return move[sandbox.Pushed](ctx, c, path("images", "push"), req, f)
}

// move sends a request whose answer is progress and, last, an outcome.
func move[T any](ctx context.Context, c *Client, at string, req any, f func(sandbox.ImageProgress)) (T, error) {
	var out T
	b, err := api.MarshalUTF8(req)
	if err != nil {
		return out, err
	}
	resp, err := c.do(ctx, call{
		method: http.MethodPost, path: at, body: bytes.NewReader(b), short: true,
		header: http.Header{"Content-Type": {"application/json"}, "Accept": {"text/event-stream"}},
	})
	if err != nil {
		return out, err
	}
	s := &sse{body: resp.Body, r: bufio.NewReader(resp.Body)}
	defer s.body.Close()
	for {
		var raw json.RawMessage
		kind, err := s.nextOf(&raw)
		switch {
		case err != nil && ctx.Err() != nil:
			return out, ctx.Err()
		case errors.Is(err, io.EOF):
			return out, sandbox.Errorf(sandbox.ErrUnavailable, "stream_broken", "the daemon ended the stream before the outcome: is it shutting down? Repeat the command; it goes on where it was")
		case err != nil:
			return out, err
		case kind != "progress":
			if err := json.Unmarshal(raw, &out); err != nil {
				return out, sandbox.Errorf(sandbox.ErrUnavailable, "broken_answer", "reading the outcome: %w", err)
			}
			return out, nil
		}
		var p sandbox.ImageProgress
		if err := json.Unmarshal(raw, &p); err == nil && f != nil {
			f(p)
		}
	}
}

// ExportImage returns an archive of an image, a snapshot or a sandbox's
// files. The caller closes it; an archive cut short is an error of a read.
func (c *Client) ExportImage(ctx context.Context, req sandbox.ExportRequest) (io.ReadCloser, error) {
	b, err := api.MarshalUTF8(req)
	if err != nil {
		return nil, err
	}
	resp, err := c.do(ctx, call{
		method: http.MethodPost, path: path("images", "export"), body: bytes.NewReader(b),
		header: http.Header{"Content-Type": {"application/json"}},
	})
	if err != nil {
		return nil, err
	}
	return &download{ReadCloser: resp.Body, ctx: ctx, what: req.Source}, nil
}

// TagImage gives an image another name too.
func (c *Client) TagImage(ctx context.Context, source, name string) (sandbox.Image, error) {
	return post[sandbox.Image](ctx, c, path("images", "tag"), api.TagRequest{Source: source, Name: name}, nil)
}

// PruneImages removes images that nothing uses.
func (c *Client) PruneImages(ctx context.Context, req sandbox.PruneRequest) (sandbox.Pruned, error) {
	return post[sandbox.Pruned](ctx, c, path("images", "prune"), req, nil)
}

// RemoveImage removes an image.
func (c *Client) RemoveImage(ctx context.Context, name string) error {
	_, err := ask[none](ctx, c, call{method: http.MethodDelete, path: imagePath(name)})
	return err
}
