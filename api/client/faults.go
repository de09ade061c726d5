package client

import (
	"bytes"
	"context"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// SetFault disturbs a sandbox's network, in place of what disturbed it before.
func (c *Client) SetFault(ctx context.Context, ref string, f sandbox.NetworkFault) (sandbox.NetworkFault, error) {
	b, err := api.MarshalUTF8(f)
	if err != nil {
		return f, err
	}
	return ask[sandbox.NetworkFault](ctx, c, call{
		method: http.MethodPut, path: at(ref, "network", "fault"), body: bytes.NewReader(b), short: true,
		header: http.Header{"Content-Type": {"application/json"}},
	})
}

// ClearFault ends what disturbs a sandbox's network, if anything does.
func (c *Client) ClearFault(ctx context.Context, ref string) error {
	_, err := ask[struct{}](ctx, c, call{method: http.MethodDelete, path: at(ref, "network", "fault")})
	return err
}

// Fault returns what disturbs a sandbox's network; the zero fault if nothing
// does.
func (c *Client) Fault(ctx context.Context, ref string) (sandbox.NetworkFault, error) {
	return get[sandbox.NetworkFault](ctx, c, at(ref, "network", "fault"), nil)
}
