package server

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Webhooks is the part of Manager that tells others of events.
type Webhooks interface {
	// CreateWebhook alone returns the secret.
	CreateWebhook(ctx context.Context, req sandbox.WebhookRequest) (sandbox.Webhook, error)
	Webhooks(ctx context.Context) ([]sandbox.Webhook, error)
	Webhook(ctx context.Context, id string) (sandbox.Webhook, error)
	RemoveWebhook(ctx context.Context, id, actor string) error
	// TestWebhook sends one message now; that it fails is no error.
	TestWebhook(ctx context.Context, id, actor string) (sandbox.Delivery, error)
	DeadLetters(ctx context.Context, id string) ([]sandbox.DeadLetter, error)
	// RetryDeadLetters tries those of these numbers or, without any, the
	// oldest once more.
	RetryDeadLetters(ctx context.Context, id string, seqs []int64) ([]sandbox.Delivery, error)
}

// WebhookTarget is the path of one webhook.
type WebhookTarget struct {
	ID string `path:"webhook" maxLength:"14" pattern:"^wh[a-z0-9]{12}$" patternDescription:"the id of a webhook"`
}

type webhookInput struct {
	Body sandbox.WebhookRequest
}

type retryInput struct {
	WebhookTarget
	Body api.RetryRequest
}

func (s *server) webhookRoutes() {
	register(s, huma.Operation{
		OperationID: "create-webhook", Method: http.MethodPost, Path: "/v1/webhooks", DefaultStatus: http.StatusCreated,
		Summary: "Have events posted to a URL, signed, from now on; the answer alone has the secret", Tags: []string{"webhooks"},
	}, func(ctx context.Context, in *webhookInput) (*result[sandbox.Webhook], error) {
		req := in.Body
		req.Actor = actorOf(ctx)
		if err := req.Validate(); err != nil {
			return nil, err
		}
		return wrap(s.m.CreateWebhook(ctx, req))
	})
	register(s, huma.Operation{
		OperationID: "list-webhooks", Method: http.MethodGet, Path: "/v1/webhooks",
		Summary: "List the webhooks, and how they do", Tags: []string{"webhooks"},
	}, func(ctx context.Context, _ *empty) (*result[api.WebhookList], error) {
		all, err := s.m.Webhooks(ctx)
		return wrap(api.WebhookList{Items: orEmpty(all)}, err)
	})
	register(s, huma.Operation{
		OperationID: "get-webhook", Method: http.MethodGet, Path: "/v1/webhooks/{webhook}",
		Summary: "One webhook, and how it does", Tags: []string{"webhooks"},
	}, func(ctx context.Context, in *WebhookTarget) (*result[sandbox.Webhook], error) {
		return wrap(s.m.Webhook(ctx, in.ID))
	})
	register(s, huma.Operation{
		OperationID: "remove-webhook", Method: http.MethodDelete, Path: "/v1/webhooks/{webhook}", DefaultStatus: http.StatusNoContent,
		Summary: "Forget a webhook, with what it was still to be told", Tags: []string{"webhooks"},
	}, func(ctx context.Context, in *WebhookTarget) (*empty, error) {
		return nil, s.m.RemoveWebhook(ctx, in.ID, actorOf(ctx))
	})
	register(s, huma.Operation{
		OperationID: "test-webhook", Method: http.MethodPost, Path: "/v1/webhooks/{webhook}/test", DefaultStatus: http.StatusOK,
		Summary: "Send one message of type webhook.test now, and tell what the receiver said", Tags: []string{"webhooks"},
	}, func(ctx context.Context, in *WebhookTarget) (*result[sandbox.Delivery], error) {
		return wrap(s.m.TestWebhook(ctx, in.ID, actorOf(ctx)))
	})
	register(s, huma.Operation{
		OperationID: "list-dead-letters", Method: http.MethodGet, Path: "/v1/webhooks/{webhook}/dead",
		Summary: "List the events whose delivery was given up", Tags: []string{"webhooks"},
	}, func(ctx context.Context, in *WebhookTarget) (*result[api.DeadLetterList], error) {
		all, err := s.m.DeadLetters(ctx, in.ID)
		return wrap(api.DeadLetterList{Items: orEmpty(all)}, err)
	})
	register(s, huma.Operation{
		OperationID: "retry-dead-letters", Method: http.MethodPost, Path: "/v1/webhooks/{webhook}/dead/retry", DefaultStatus: http.StatusOK,
		Summary: "Try dead letters once more, now; those taken are forgotten", Tags: []string{"webhooks"},
	}, func(ctx context.Context, in *retryInput) (*result[api.DeliveryList], error) {
		all, err := s.m.RetryDeadLetters(ctx, in.ID, in.Body.Seqs)
		return wrap(api.DeliveryList{Items: orEmpty(all)}, err)
	})
}
