package client

import (
	"bytes"
	"context"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// SetDeadline changes when a living sandbox's lifetime is over, or what
// becomes of it then.
func (c *Client) SetDeadline(ctx context.Context, ref string, req sandbox.DeadlineRequest) (sandbox.Sandbox, error) {
	b, err := api.MarshalUTF8(req)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return ask[sandbox.Sandbox](ctx, c, call{
		method: http.MethodPatch, path: at(ref), body: bytes.NewReader(b), short: true,
		header: http.Header{"Content-Type": {"application/json"}},
	})
}
