package client

import (
	"bytes"
	"context"
	"net/http"
	"net/url"
	"strconv"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Operations lists work that takes long, newest first: what is under way and
// what ended in the last day; all of it, or that of one status.
func (c *Client) Operations(ctx context.Context, status api.OperationStatus) ([]api.Operation, error) {
	q := url.Values{}
	set(q, "status", string(status))
	l, err := get[api.OperationList](ctx, c, path("operations"), q)
	return l.Items, err
}

// Operation returns one operation as it is now.
func (c *Client) Operation(ctx context.Context, id string) (api.Operation, error) {
	return get[api.Operation](ctx, c, path("operations", id), nil)
}

// WaitOperation returns an operation once it has ended, or with the error of
// ctx. That it failed is no error; see its Problem.
func (c *Client) WaitOperation(ctx context.Context, id string) (api.Operation, error) {
	q := url.Values{"wait_seconds": {strconv.Itoa(api.MaxOperationWait / 2)}}
	for {
		o, err := get[api.Operation](ctx, c, path("operations", id), q)
		if err != nil || o.Ended() {
			return o, err
		}
	}
}

// CancelOperation cancels an operation and returns how it ended. One that has
// ended stays as it is.
func (c *Client) CancelOperation(ctx context.Context, id string) (api.Operation, error) {
	return ask[api.Operation](ctx, c, call{method: http.MethodDelete, path: path("operations", id)})
}

// BeginPull has an image pulled without anybody waiting for it.
func (c *Client) BeginPull(ctx context.Context, req sandbox.PullRequest) (api.Operation, error) {
	return c.beginMove(ctx, path("images", "pull"), req)
}

// BeginPush has an image, a snapshot or a sandbox's files pushed without
// anybody waiting for it.
func (c *Client) BeginPush(ctx context.Context, req sandbox.PushRequest) (api.Operation, error) {
	return c.beginMove(ctx, path("images", "push"), req)
}

func (c *Client) beginMove(ctx context.Context, at string, req any) (api.Operation, error) {
	b, err := api.MarshalUTF8(req)
	if err != nil {
		return api.Operation{}, err
	}
	return ask[api.Operation](ctx, c, call{
		method: http.MethodPost, path: at, body: bytes.NewReader(b),
		header: http.Header{"Content-Type": {"application/json"}, "Prefer": {api.PreferAsync}},
	})
}
