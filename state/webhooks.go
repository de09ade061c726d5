package state

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	webhookColumns      = `id, owner, project, cursor, secret, record, (SELECT count(*) FROM dead_letters WHERE webhook = webhooks.id)`
	sqlWebhooks         = `SELECT ` + webhookColumns + ` FROM webhooks ORDER BY created_at, id`
	sqlCountWebhooks    = `SELECT count(*) FROM webhooks`
	sqlCountOwners      = `SELECT count(*) FROM webhooks WHERE owner = ? AND project = ''`
	sqlInsertWebhook    = `INSERT INTO webhooks (id, owner, project, cursor, created_at, secret, record) VALUES (?, ?, ?, ?, ?, ?, ?)`
	sqlDeleteWebhook    = `DELETE FROM webhooks WHERE id = ? AND project = ''`
	sqlProjectWebhooks  = `SELECT id, secret, record FROM webhooks WHERE project = ? AND project <> ''`
	sqlDropWebhook      = `DELETE FROM webhooks WHERE id = ?`
	sqlDropWebhooks     = `DELETE FROM webhooks WHERE project = ? AND project <> ''`
	sqlAdvanceWebhook   = `UPDATE webhooks SET cursor = max(cursor, ?2) WHERE id = ?1`
	sqlLastSeq          = `SELECT max(coalesce((SELECT max(seq) FROM events), 0), (SELECT upto FROM events_pruned))`
	sqlPruned           = `SELECT upto FROM events_pruned`
	sqlSetPruned        = `UPDATE events_pruned SET upto = max(upto, ?)`
	sqlPutDeadLetter    = `INSERT INTO dead_letters (webhook, seq, record) VALUES (?1, ?2, ?3) ON CONFLICT (webhook, seq) DO UPDATE SET record = ?3`
	sqlDropDeadLetters  = `DELETE FROM dead_letters WHERE webhook = ?1 AND seq <= (SELECT seq FROM dead_letters WHERE webhook = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2)`
	sqlDeadLetters      = `SELECT record FROM dead_letters WHERE webhook = ? ORDER BY seq LIMIT ?`
	sqlDeleteDeadLetter = `DELETE FROM dead_letters WHERE webhook = ? AND seq = ?`
)

// Bounds of webhooks.
const (
	maxWebhooks        = 256 // of all
	maxWebhooksOfOwner = 32
	keptDeadLetters    = 1000 // of each webhook; the newest
)

// CreateWebhook writes a webhook, which wants the events that come after.
// ErrExhausted where there are too many.
func (d *DB) CreateWebhook(ctx context.Context, w sandbox.Webhook, actor string) (sandbox.Webhook, error) {
	err := d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil {
			return err
		}
		n, err := t.number(sqlCountOwners, w.Owner)
		if err != nil {
			return err
		}
		if n >= maxWebhooksOfOwner {
			return sandbox.Errorf(sandbox.ErrExhausted, "too_many_webhooks", "%s has %d webhooks: remove one first ('sandbox webhook ls')", w.Owner, n)
		}
		if w, err = t.insertWebhook(w); err != nil {
			return err
		}
		_, err = t.appendEvents(sandbox.Event{Type: "webhook.created", Actor: actor, Data: map[string]string{"webhook": w.ID, "url": w.URL}})
		return err
	})
	return w, err
}

func (t *tx) insertWebhook(w sandbox.Webhook) (sandbox.Webhook, error) {
	n, err := t.number(sqlCountWebhooks)
	if err != nil {
		return w, err
	}
	if n >= maxWebhooks {
		return w, sandbox.Errorf(sandbox.ErrExhausted, "too_many_webhooks", "there are %d webhooks, and no more than that may be: remove one first", n)
	}
	last, err := t.number(sqlLastSeq)
	if err != nil {
		return w, err
	}
	w.Cursor = int64(last)
	record := w
	record.Secret = ""
	data, err := toJSON(record)
	if err != nil {
		return w, err
	}
	_, err = t.exec(sqlInsertWebhook, w.ID, w.Owner, w.Project, w.Cursor, w.CreatedAt.UnixNano(), w.Secret, data)
	return w, err
}

// projectWebhooks makes the webhooks of a project those of its settings. One
// that did not change keeps its place.
func (t *tx) projectWebhooks(p project.Project) error {
	rows, err := t.all(sqlProjectWebhooks, string(p.ID))
	if err != nil {
		return err
	}
	old := map[string]string{} // what is told to whom -> id
	for _, r := range rows {
		var id, secret string
		var data []byte
		if err := r.Scan(&id, &secret, &data); err != nil {
			return err
		}
		var w sandbox.Webhook
		if err := json.Unmarshal(data, &w); err != nil {
			return fmt.Errorf("reading webhook %s: %w", id, err)
		}
		key, err := toJSON(project.Hook{URL: w.URL, Secret: secret, Events: w.Filter.Events})
		if err != nil {
			return err
		}
		old[key] = id
	}
	seen := map[string]bool{}
	for _, h := range p.Webhooks {
		key, err := toJSON(h)
		if err != nil {
			return err
		}
		if !seen[key] && old[key] == "" {
			w := sandbox.Webhook{ID: sandbox.NewWebhookID(), URL: h.URL, Project: string(p.ID), Secret: h.Secret, Filter: sandbox.WebhookFilter{Events: h.Events}, CreatedAt: time.Now().UTC()}
			if _, err := t.insertWebhook(w); err != nil {
				return err
			}
		}
		seen[key] = true
	}
	for key, id := range old {
		if seen[key] {
			continue
		}
		if _, err := t.exec(sqlDropWebhook, id); err != nil {
			return err
		}
	}
	return nil
}

// Webhooks lists all, with their secrets, the oldest first.
func (d *DB) Webhooks(ctx context.Context) ([]sandbox.Webhook, error) {
	rows, err := d.reader.QueryContext(ctx, sqlWebhooks)
	if err != nil {
		return nil, translate(err)
	}
	all, err := drain(rows, func(s scanner) (w sandbox.Webhook, err error) {
		var id, owner, of, secret string
		var cursor int64
		var dead int
		var data []byte
		if err := s.Scan(&id, &owner, &of, &cursor, &secret, &data, &dead); err != nil {
			return w, err
		}
		if err := json.Unmarshal(data, &w); err != nil {
			return w, fmt.Errorf("reading webhook %s: %w", id, err)
		}
		w.ID, w.Owner, w.Project, w.Secret, w.Cursor, w.Dead = id, owner, of, secret, cursor, dead
		return w, nil
	})
	return all, translate(err)
}

// DeleteWebhook forgets a webhook, that of a project excepted, and wipes its
// secret. ErrNotFound.
func (d *DB) DeleteWebhook(ctx context.Context, id, actor string) error {
	return d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil {
			return err
		}
		defer t.wiping()()
		ok, err := t.changed(sqlDeleteWebhook, id)
		if err == nil && !ok {
			err = sandbox.Errorf(sandbox.ErrNotFound, "webhook_not_found", "no webhook %.40q: 'sandbox webhook ls' shows those there are", id)
		}
		if err == nil {
			_, err = t.appendEvents(sandbox.Event{Type: "webhook.removed", Actor: actor, Data: map[string]string{"webhook": id}})
		}
		return err
	})
}

// AdvanceWebhooks writes how far webhooks have come. What is lost of it is
// delivered again. Repeating it is safe.
func (d *DB) AdvanceWebhooks(ctx context.Context, cursors map[string]int64) error {
	return d.write(ctx, func(t *tx) error {
		for id, seq := range cursors {
			if _, err := t.exec(sqlAdvanceWebhook, id, seq); err != nil {
				return err
			}
		}
		return nil
	})
}

// LastEventSeq returns the number of the newest event there was.
func (d *DB) LastEventSeq(ctx context.Context) (int64, error) {
	found, err := d.first(ctx, sqlLastSeq)
	if err != nil {
		return 0, translate(err)
	}
	var n int64
	err = found.Scan(&n)
	return n, err
}

// PrunedEvents returns the highest number of an event that was deleted.
func (d *DB) PrunedEvents(ctx context.Context) (int64, error) {
	found, err := d.first(ctx, sqlPruned)
	if err != nil {
		return 0, translate(err)
	}
	var n int64
	err = found.Scan(&n)
	return n, err
}

// PutDeadLetter keeps an event that was given up, and of each webhook the
// newest thousand. Repeating it is safe.
func (d *DB) PutDeadLetter(ctx context.Context, l sandbox.DeadLetter) error {
	data, err := toJSON(l)
	if err != nil {
		return err
	}
	err = d.write(ctx, func(t *tx) error {
		if _, err := t.exec(sqlPutDeadLetter, l.Webhook, l.Event.Seq, data); err != nil {
			return err
		}
		_, err := t.exec(sqlDropDeadLetters, l.Webhook, keptDeadLetters)
		return err
	})
	return err
}

// DeadLetters lists those of a webhook, the oldest first.
func (d *DB) DeadLetters(ctx context.Context, webhook string, limit int) ([]sandbox.DeadLetter, error) {
	return listed[sandbox.DeadLetter](ctx, d, sqlDeadLetters, webhook, limit)
}

// DeleteDeadLetter forgets one. Repeating it is safe.
func (d *DB) DeleteDeadLetter(ctx context.Context, webhook string, seq int64) error {
	return d.write(ctx, func(t *tx) error { _, err := t.exec(sqlDeleteDeadLetter, webhook, seq); return err })
}
