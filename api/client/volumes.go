package client

import (
	"bytes"
	"context"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// CreateVolume makes a volume.
func (c *Client) CreateVolume(ctx context.Context, req sandbox.VolumeRequest) (sandbox.Volume, error) {
	return post[sandbox.Volume](ctx, c, path("volumes"), req, nil)
}

// Volumes lists the volumes by name.
func (c *Client) Volumes(ctx context.Context) ([]sandbox.Volume, error) {
	l, err := get[api.VolumeList](ctx, c, path("volumes"), nil)
	return l.Items, err
}

// Volume returns one volume, with what it holds now.
func (c *Client) Volume(ctx context.Context, name string) (sandbox.Volume, error) {
	return get[sandbox.Volume](ctx, c, path("volumes", name), nil)
}

// ChangeVolume changes a volume's limits.
func (c *Client) ChangeVolume(ctx context.Context, name string, ch sandbox.VolumeChange) (sandbox.Volume, error) {
	b, err := api.MarshalUTF8(ch)
	if err != nil {
		return sandbox.Volume{}, err
	}
	return ask[sandbox.Volume](ctx, c, call{
		method: http.MethodPatch, path: path("volumes", name), body: bytes.NewReader(b), short: true,
		header: http.Header{"Content-Type": {"application/json"}},
	})
}

// RemoveVolume deletes a volume and all it holds.
func (c *Client) RemoveVolume(ctx context.Context, name string) error {
	_, err := ask[none](ctx, c, call{method: http.MethodDelete, path: path("volumes", name)})
	return err
}
