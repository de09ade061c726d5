package servertest

import (
	"context"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

func webhookNotFound(id string) error {
	return sandbox.Errorf(sandbox.ErrNotFound, "webhook_not_found", "no webhook %q", id)
}

// CreateWebhook implements server.Manager.
func (m *Memory) CreateWebhook(_ context.Context, req sandbox.WebhookRequest) (sandbox.Webhook, error) {
	if err := m.fail("CreateWebhook"); err != nil {
		return sandbox.Webhook{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	w := sandbox.Webhook{ID: sandbox.NewWebhookID(), URL: req.URL, Owner: req.Actor, Filter: req.Filter, CreatedAt: time.Now()}
	m.webhooks = append(m.webhooks, w)
	if w.Secret = req.Secret; w.Secret == "" {
		w.Secret = sandbox.NewWebhookSecret()
	}
	return w, nil
}

// Webhooks implements server.Manager.
func (m *Memory) Webhooks(context.Context) ([]sandbox.Webhook, error) {
	if err := m.fail("Webhooks"); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.webhooks), nil
}

// Webhook implements server.Manager.
func (m *Memory) Webhook(_ context.Context, id string) (sandbox.Webhook, error) {
	if err := m.fail("Webhook"); err != nil {
		return sandbox.Webhook{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, w := range m.webhooks {
		if w.ID == id {
			return w, nil
		}
	}
	return sandbox.Webhook{}, webhookNotFound(id)
}

// RemoveWebhook implements server.Manager.
func (m *Memory) RemoveWebhook(_ context.Context, id, _ string) error {
	if err := m.fail("RemoveWebhook"); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	n := len(m.webhooks)
	m.webhooks = slices.DeleteFunc(m.webhooks, func(w sandbox.Webhook) bool { return w.ID == id })
	if len(m.webhooks) == n {
		return webhookNotFound(id)
	}
	return nil
}

// TestWebhook implements server.Manager. It sends nothing.
func (m *Memory) TestWebhook(ctx context.Context, id, _ string) (sandbox.Delivery, error) {
	if _, err := m.Webhook(ctx, id); err != nil {
		return sandbox.Delivery{}, err
	}
	return sandbox.Delivery{ID: "test-" + id, Type: sandbox.WebhookTest, Error: "nobody there", At: time.Now(), Attempts: 1}, nil
}

// DeadLetters implements server.Manager.
func (m *Memory) DeadLetters(ctx context.Context, id string) ([]sandbox.DeadLetter, error) {
	if _, err := m.Webhook(ctx, id); err != nil {
		return nil, err
	}
	return []sandbox.DeadLetter{{Webhook: id, Event: sandbox.Event{Seq: 7, Type: "sandbox.created"}, Attempts: 10, Error: "refused", At: time.Now()}}, nil
}

// RetryDeadLetters implements server.Manager.
func (m *Memory) RetryDeadLetters(ctx context.Context, id string, seqs []int64) ([]sandbox.Delivery, error) {
	if _, err := m.Webhook(ctx, id); err != nil {
		return nil, err
	}
	out := []sandbox.Delivery{}
	for range max(1, len(seqs)) {
		out = append(out, sandbox.Delivery{ID: "x", Type: "sandbox.created", OK: true, Status: 200, At: time.Now()})
	}
	return out, nil
}
