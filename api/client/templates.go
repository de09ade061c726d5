package client

import (
	"bytes"
	"context"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// SetTemplate names an image or a snapshot, with limits, for sandboxes to be
// made of.
func (c *Client) SetTemplate(ctx context.Context, req sandbox.TemplateRequest) (sandbox.BaseTemplate, error) {
	b, err := api.MarshalUTF8(req)
	if err != nil {
		return sandbox.BaseTemplate{}, err
	}
	return ask[sandbox.BaseTemplate](ctx, c, call{
		method: http.MethodPut, path: path("templates", req.Name), body: bytes.NewReader(b), short: true,
		header: http.Header{"Content-Type": {"application/json"}},
	})
}

// Template returns what a name means to the caller.
func (c *Client) Template(ctx context.Context, name string) (sandbox.BaseTemplate, error) {
	return get[sandbox.BaseTemplate](ctx, c, path("templates", name), nil)
}

// Templates lists the caller's templates and the shared ones, by name.
func (c *Client) Templates(ctx context.Context) ([]sandbox.BaseTemplate, error) {
	l, err := get[api.SandboxTemplateList](ctx, c, path("templates"), nil)
	return l.Items, err
}

// RemoveTemplate forgets one of the caller's templates.
func (c *Client) RemoveTemplate(ctx context.Context, name string) error {
	_, err := ask[none](ctx, c, call{method: http.MethodDelete, path: path("templates", name)})
	return err
}
