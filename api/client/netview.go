package client

import (
	"context"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Network returns what a sandbox may reach, and what it sent.
func (c *Client) Network(ctx context.Context, ref string) (sandbox.NetworkState, error) {
	return get[sandbox.NetworkState](ctx, c, at(ref, "network"), nil)
}
