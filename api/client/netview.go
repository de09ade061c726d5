package client

import (
	"context"
	"net/url"
	"strconv"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Network returns what a sandbox may reach, and what it sent.
func (c *Client) Network(ctx context.Context, ref string) (sandbox.NetworkState, error) {
	return get[sandbox.NetworkState](ctx, c, at(ref, "network"), nil)
}

// ExplainNetwork tells what would become of a new flow of a sandbox.
func (c *Client) ExplainNetwork(ctx context.Context, ref string, q sandbox.NetworkQuery) (sandbox.NetworkVerdict, error) {
	v := url.Values{"dest": {q.Dest}}
	if q.Port != 0 {
		v.Set("port", strconv.Itoa(int(q.Port)))
	}
	set(v, "protocol", q.Protocol)
	return get[sandbox.NetworkVerdict](ctx, c, at(ref, "network", "explain"), v)
}
