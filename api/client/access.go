package client

import (
	"bytes"
	"context"
	"net/http"
	"net/url"
	"strconv"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/api"
)

// Whoami tells who the daemon takes the client for.
func (c *Client) Whoami(ctx context.Context) (api.Whoami, error) {
	return get[api.Whoami](ctx, c, path("whoami"), nil)
}

// CreateKey makes an API key. The answer alone has its secret.
func (c *Client) CreateKey(ctx context.Context, req api.KeyRequest) (access.Key, error) {
	return post[access.Key](ctx, c, path("keys"), req, nil)
}

// Keys lists API keys, of one owner or of all for an empty name.
func (c *Client) Keys(ctx context.Context, owner string) ([]access.Key, error) {
	l, err := get[api.KeyList](ctx, c, path("keys"), chosen("owner", owner))
	return l.Items, err
}

// RevokeKey makes a key work no more, at once and for good.
func (c *Client) RevokeKey(ctx context.Context, id string) (access.Key, error) {
	return ask[access.Key](ctx, c, call{method: http.MethodDelete, path: path("keys", id)})
}

// Owners lists the owners.
func (c *Client) Owners(ctx context.Context) ([]api.Owner, error) {
	l, err := get[api.OwnerList](ctx, c, path("owners"), nil)
	return l.Items, err
}

// Owner returns one owner.
func (c *Client) Owner(ctx context.Context, name string) (api.Owner, error) {
	return get[api.Owner](ctx, c, path("owners", name), nil)
}

// SetOwner changes an owner, or makes one.
func (c *Client) SetOwner(ctx context.Context, name string, change api.OwnerChange) (api.Owner, error) {
	b, err := api.MarshalUTF8(change)
	if err != nil {
		return api.Owner{}, err
	}
	return ask[api.Owner](ctx, c, call{
		method: http.MethodPut, path: path("owners", name), body: bytes.NewReader(b), short: true,
		header: http.Header{"Content-Type": {"application/json"}},
	})
}

// RemoveOwner forgets an owner and revokes its keys; what it has stays.
func (c *Client) RemoveOwner(ctx context.Context, name string) error {
	_, err := ask[none](ctx, c, call{method: http.MethodDelete, path: path("owners", name)})
	return err
}

// Audit returns a page of who changed what, the newest first.
func (c *Client) Audit(ctx context.Context, q access.AuditQuery) (api.AuditList, error) {
	v := chosen("owner", q.Owner, "object", q.Object)
	if q.Before > 0 {
		v.Set("before", strconv.FormatInt(q.Before, 10))
	}
	if q.Limit > 0 {
		v.Set("limit", strconv.Itoa(q.Limit))
	}
	return get[api.AuditList](ctx, c, path("audit"), v)
}

// VerifyAudit has the chain of the audit computed anew. If seq is not 0, that
// row must have the hash.
func (c *Client) VerifyAudit(ctx context.Context, seq int64, hash string) (access.AuditCheck, error) {
	v := url.Values{}
	if seq != 0 {
		v = chosen("seq", strconv.FormatInt(seq, 10), "hash", hash)
	}
	return get[access.AuditCheck](ctx, c, path("audit", "verify"), v)
}

// chosen makes a query of those of its pairs that have a value.
func chosen(pairs ...string) url.Values {
	v := url.Values{}
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			v.Set(pairs[i], pairs[i+1])
		}
	}
	return v
}
