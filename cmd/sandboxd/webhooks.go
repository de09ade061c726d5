package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
	"github.com/sandboxd/sandboxd/webhook"
)

// The fit of two packages that must not know each other.
var _ webhook.Store = (*state.DB)(nil)

// webhookConfig is about webhooks.
type webhookConfig struct {
	AllowPrivate []netip.Prefix `yaml:"allow_private"` // beside public addresses
	GiveUp       duration       `yaml:"give_up"`
	Refusals     int            `yaml:"refusals"`
}

func (c webhookConfig) check() []error {
	var errs []error
	for _, p := range c.AllowPrivate {
		if !p.IsValid() || p.Masked() != p {
			errs = append(errs, fmt.Errorf("webhooks.allow_private %s: use prefixes without host bits, as 10.20.0.0/16", p))
		}
	}
	if c.GiveUp == 0 || time.Duration(c.GiveUp) > 30*24*time.Hour || c.Refusals < 1 || c.Refusals > 1000 {
		errs = append(errs, errors.New("webhooks: use a give_up of more than 0 and at most 720h, and 1 to 1000 refusals"))
	}
	return errs
}

// hookDesk is a desk and its end.
type hookDesk struct{ *webhook.Desk }

func openWebhooks(ctx context.Context, c config, db *state.DB, office *access.Office, log *slog.Logger) (hookDesk, error) {
	d := webhook.New(webhook.Config{
		Store: db, Log: log, AllowPrivate: c.Webhooks.AllowPrivate,
		GiveUp: time.Duration(c.Webhooks.GiveUp), Refusals: c.Webhooks.Refusals,
		Standing: func(owner string) (seesAll, ok bool) {
			caller, err := office.Standing(owner)
			return caller.SeesAll(), err == nil
		},
	})
	return hookDesk{d}, d.Start(ctx)
}

func (d hookDesk) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	return d.Close(ctx)
}

// CreateWebhook has events posted to a URL.
func (s *service) CreateWebhook(ctx context.Context, req sandbox.WebhookRequest) (sandbox.Webhook, error) {
	return s.hooks.CreateWebhook(ctx, req)
}

// Webhooks lists those there are.
func (s *service) Webhooks(ctx context.Context) ([]sandbox.Webhook, error) {
	return s.hooks.Webhooks(ctx)
}

// Webhook returns one.
func (s *service) Webhook(ctx context.Context, id string) (sandbox.Webhook, error) {
	return s.hooks.Webhook(ctx, id)
}

// RemoveWebhook forgets one.
func (s *service) RemoveWebhook(ctx context.Context, id, actor string) error {
	return s.hooks.RemoveWebhook(ctx, id, actor)
}

// TestWebhook sends one message.
func (s *service) TestWebhook(ctx context.Context, id, actor string) (sandbox.Delivery, error) {
	return s.hooks.TestWebhook(ctx, id, actor)
}

// DeadLetters lists what was given up.
func (s *service) DeadLetters(ctx context.Context, id string) ([]sandbox.DeadLetter, error) {
	return s.hooks.DeadLetters(ctx, id)
}

// RetryDeadLetters tries that once more.
func (s *service) RetryDeadLetters(ctx context.Context, id string, seqs []int64) ([]sandbox.Delivery, error) {
	return s.hooks.RetryDeadLetters(ctx, id, seqs)
}

// Webhooks lists none: they are told of the lab's world.
func (s productionService) Webhooks(context.Context) ([]sandbox.Webhook, error) { return nil, nil }

// Webhook finds none.
func (s productionService) Webhook(_ context.Context, id string) (sandbox.Webhook, error) {
	return sandbox.Webhook{}, sandbox.Errorf(sandbox.ErrNotFound, "webhook_not_found", "no webhook %.40q in the production world: they are told of the lab's", id)
}

// CreateWebhook is refused.
func (s productionService) CreateWebhook(context.Context, sandbox.WebhookRequest) (sandbox.Webhook, error) {
	return sandbox.Webhook{}, lookOnly()
}

// RemoveWebhook is refused.
func (s productionService) RemoveWebhook(context.Context, string, string) error { return lookOnly() }

// TestWebhook is refused.
func (s productionService) TestWebhook(context.Context, string, string) (sandbox.Delivery, error) {
	return sandbox.Delivery{}, lookOnly()
}

// DeadLetters finds no webhook.
func (s productionService) DeadLetters(ctx context.Context, id string) ([]sandbox.DeadLetter, error) {
	_, err := s.Webhook(ctx, id)
	return nil, err
}

// RetryDeadLetters is refused.
func (s productionService) RetryDeadLetters(context.Context, string, []int64) ([]sandbox.Delivery, error) {
	return nil, lookOnly()
}
