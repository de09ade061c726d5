package client

import (
	"context"
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

// ImportImage makes an image of a tar archive.
func (c *Client) ImportImage(ctx context.Context, name string, r io.Reader) (sandbox.Image, error) {
	return ask[sandbox.Image](ctx, c, call{
		method: http.MethodPost, path: path("images"), query: url.Values{"name": {name}},
		header: http.Header{"Content-Type": {"application/x-tar"}}, body: r,
	})
}

// RemoveImage removes an image.
func (c *Client) RemoveImage(ctx context.Context, name string) error {
	_, err := ask[none](ctx, c, call{method: http.MethodDelete, path: imagePath(name)})
	return err
}
