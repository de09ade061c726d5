package client

import (
	"bytes"
	"context"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// SetNetwork changes what a living sandbox may reach; it is in force on
// return, for connections that exist too.
func (c *Client) SetNetwork(ctx context.Context, ref string, p sandbox.NetworkPolicy) (sandbox.Sandbox, error) {
	b, err := api.MarshalUTF8(p)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return ask[sandbox.Sandbox](ctx, c, call{
		method: http.MethodPut, path: at(ref, "network"), body: bytes.NewReader(b), short: true,
		header: http.Header{"Content-Type": {"application/json"}},
	})
}
