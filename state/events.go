package state

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	// sqlInsertEvent is of one event; each more adds its eventValues.
	sqlInsertEvent = `INSERT INTO events (time, sandbox, type, actor, data, owner) VALUES ` + eventValues
	eventValues    = `(?, ?, ?, ?, ?, coalesce((SELECT owner FROM sandboxes WHERE id = ?), (SELECT owner FROM projects WHERE id = ?), ?))`
	eventArgs      = 8
	sqlEvents      = `SELECT seq, time, sandbox, type, actor, data FROM events WHERE seq > ? ORDER BY seq LIMIT ?`
	sqlEventsOf    = `SELECT seq, time, sandbox, type, actor, data FROM events
		WHERE sandbox = ? AND sandbox <> '' AND seq > ? ORDER BY seq LIMIT ?`
)

// sqlLastEvent has a clause that keeps the partial index in use.
const sqlLastEvent = `SELECT seq, time, sandbox, type, actor, data FROM events
	WHERE sandbox = ?1 AND sandbox <> '' AND type = ?2 AND seq > (
		SELECT coalesce(max(seq), 0) FROM events WHERE sandbox = ?1 AND sandbox <> '' AND type = ?3)
	ORDER BY seq DESC LIMIT 1`

// Bounds of one reading of events.
const (
	defaultEvents = 100
	maxEvents     = 1000
)

// AppendEvent writes an event, at its Time or now, and returns its number.
func (d *DB) AppendEvent(ctx context.Context, e sandbox.Event) (seq int64, err error) {
	err = d.write(ctx, func(t *tx) error {
		seq, err = t.appendEvents(e)
		return err
	})
	return seq, err
}

// NoteEvent is AppendEvent for who need not know when: the event is written some
// milliseconds later, before whatever is written from now on. failed is told if
// it is not; it must not block.
func (d *DB) NoteEvent(e sandbox.Event, failed func(error)) {
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	d.noteSoon(func(t *tx) error {
		_, err := t.appendEvents(e)
		return err
	}, func(err error) {
		if err != nil {
			failed(err)
		}
	})
}

// AppendEvents writes events, at most 1000 at a time, in one transaction.
func (d *DB) AppendEvents(ctx context.Context, events []sandbox.Event) error {
	if len(events) == 0 {
		return nil
	}
	if len(events) > maxEvents {
		return sandbox.Errorf(sandbox.ErrInvalid, "too_many_events", "%d events at once: at most %d", len(events), maxEvents)
	}
	return d.write(ctx, func(t *tx) error {
		_, err := t.appendEvents(events...)
		return err
	})
}

// appendEvents writes a few events with one statement and returns the number
// of the last.
func (t *tx) appendEvents(events ...sandbox.Event) (int64, error) {
	args := make([]any, 0, eventArgs*len(events))
	for _, e := range events {
		data := "null"
		if e.Data != nil {
			var err error
			if data, err = toJSON(e.Data); err != nil {
				return 0, err
			}
		}
		if e.Time.IsZero() {
			e.Time = time.Now()
		}
		of, by := e.Data["project"], e.Actor // whose it is where no sandbox tells
		if e.Sandbox != "" {
			of, by = "", ""
		}
		args = append(args, e.Time.UnixNano(), string(e.Sandbox), e.Type, e.Actor, data, string(e.Sandbox), of, by)
	}
	query := sqlInsertEvent + strings.Repeat(", "+eventValues, len(events)-1)
	res, err := t.exec(query, args...)
	if err != nil {
		return 0, fmt.Errorf("appending events: %w", err)
	}
	t.event = true
	return res.LastInsertId()
}

// Events returns events after a number, oldest first: of one sandbox, or of
// all for an empty id. limit is at most 1000; 0 means 100.
func (d *DB) Events(ctx context.Context, afterSeq int64, id sandbox.ID, limit int) ([]sandbox.Event, error) {
	if limit <= 0 {
		limit = defaultEvents
	}
	limit = min(limit, maxEvents)
	if id == "" {
		return collect(ctx, d.reads[sqlEvents], scanEvent, afterSeq, limit)
	}
	return collect(ctx, d.reads[sqlEventsOf], scanEvent, string(id), afterSeq, limit)
}

// LastEvent returns the newest event of a type that is newer than the newest
// of type since, if there is one of that. ErrNotFound.
func (d *DB) LastEvent(ctx context.Context, id sandbox.ID, kind, since string) (sandbox.Event, error) {
	e, err := scanEvent(d.reads[sqlLastEvent].QueryRowContext(ctx, string(id), kind, since))
	if errors.Is(err, sql.ErrNoRows) {
		return e, sandbox.Errorf(sandbox.ErrNotFound, "event_not_found", "no event %s of sandbox %s", kind, id)
	}
	return e, translate(err)
}

func scanEvent(s scanner) (sandbox.Event, error) {
	var e sandbox.Event
	var at int64
	var data []byte
	if err := s.Scan(&e.Seq, &at, &e.Sandbox, &e.Type, &e.Actor, &data); err != nil {
		return e, err
	}
	e.Time = time.Unix(0, at).UTC()
	if err := json.Unmarshal(data, &e.Data); err != nil {
		return e, fmt.Errorf("reading event %d: %w", e.Seq, err)
	}
	return e, nil
}
