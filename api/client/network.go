package client

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"

	"github.com/sandboxd/sandboxd/sandbox"
)

// SetNetwork changes what a living sandbox may reach; it is in force on
// return, for connections that exist too.
func (c *Client) SetNetwork(ctx context.Context, ref string, p sandbox.NetworkPolicy) (sandbox.Sandbox, error) {
	b, err := json.Marshal(p)
	if err != nil {
		return sandbox.Sandbox{}, sandbox.Errorf(sandbox.ErrInvalid, "invalid_request", "request body: %w", err)
	}
	return ask[sandbox.Sandbox](ctx, c, call{
		method: http.MethodPut, path: at(ref, "network"), body: bytes.NewReader(b), short: true,
		header: http.Header{"Content-Type": {"application/json"}},
	})
}
