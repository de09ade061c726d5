package client

import (
	"context"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// CreateWebhook has events posted to a URL. The answer alone has the secret;
// sandbox.VerifyWebhook checks signatures with it.
func (c *Client) CreateWebhook(ctx context.Context, req sandbox.WebhookRequest) (sandbox.Webhook, error) {
	return post[sandbox.Webhook](ctx, c, path("webhooks"), req, nil)
}

// Webhooks lists the webhooks, without secrets.
func (c *Client) Webhooks(ctx context.Context) ([]sandbox.Webhook, error) {
	l, err := get[api.WebhookList](ctx, c, path("webhooks"), nil)
	return l.Items, err
}

// Webhook returns one webhook, and how it does.
func (c *Client) Webhook(ctx context.Context, id string) (sandbox.Webhook, error) {
	return get[sandbox.Webhook](ctx, c, path("webhooks", id), nil)
}

// RemoveWebhook forgets a webhook.
func (c *Client) RemoveWebhook(ctx context.Context, id string) error {
	_, err := ask[none](ctx, c, call{method: http.MethodDelete, path: path("webhooks", id)})
	return err
}

// TestWebhook has one message sent now. That the receiver fails is no error.
func (c *Client) TestWebhook(ctx context.Context, id string) (sandbox.Delivery, error) {
	return post[sandbox.Delivery](ctx, c, path("webhooks", id, "test"), nil, nil)
}

// DeadLetters lists the events whose delivery was given up.
func (c *Client) DeadLetters(ctx context.Context, id string) ([]sandbox.DeadLetter, error) {
	l, err := get[api.DeadLetterList](ctx, c, path("webhooks", id, "dead"), nil)
	return l.Items, err
}

// RetryDeadLetters has those of these numbers, or without any the oldest
// hundred, tried once more.
func (c *Client) RetryDeadLetters(ctx context.Context, id string, seqs ...int64) ([]sandbox.Delivery, error) {
	l, err := post[api.DeliveryList](ctx, c, path("webhooks", id, "dead", "retry"), api.RetryRequest{Seqs: seqs}, nil)
	return l.Items, err
}
