package client

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"

	"github.com/sandboxd/sandboxd/sandbox"
)

// SetDeadline changes when a living sandbox's lifetime is over, or what
// becomes of it then.
func (c *Client) SetDeadline(ctx context.Context, ref string, req sandbox.DeadlineRequest) (sandbox.Sandbox, error) {
	b, err := json.Marshal(req)
	if err != nil {
		return sandbox.Sandbox{}, sandbox.Errorf(sandbox.ErrInvalid, "invalid_request", "request body: %w", err)
	}
	return ask[sandbox.Sandbox](ctx, c, call{
		method: http.MethodPatch, path: at(ref), body: bytes.NewReader(b), short: true,
		header: http.Header{"Content-Type": {"application/json"}},
	})
}
