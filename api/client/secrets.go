package client

import (
	"bytes"
	"context"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// SetSecret sets a secret. Its value does not come back.
func (c *Client) SetSecret(ctx context.Context, req sandbox.SecretRequest) (sandbox.Secret, error) {
	b, err := api.MarshalUTF8(req)
	if err != nil {
		return sandbox.Secret{}, err
	}
	return ask[sandbox.Secret](ctx, c, call{
		method: http.MethodPut, path: path("secrets", req.Name), body: bytes.NewReader(b), short: true,
		header: http.Header{"Content-Type": {"application/json"}},
	})
}

// Secrets lists the secrets by name, without their values.
func (c *Client) Secrets(ctx context.Context) ([]sandbox.Secret, error) {
	l, err := get[api.SecretList](ctx, c, path("secrets"), nil)
	return l.Items, err
}

// RemoveSecret forgets a secret.
func (c *Client) RemoveSecret(ctx context.Context, name string) error {
	_, err := ask[none](ctx, c, call{method: http.MethodDelete, path: path("secrets", name)})
	return err
}
