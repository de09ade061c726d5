package state

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// idsPerSlot is how many user ids a slot stands for.
const idsPerSlot = 65536

// maxTail is the most output kept of a sandbox or process, its end.
const maxTail = 64 << 10

// CreateParams is the intent to make a sandbox.
type CreateParams struct {
	Sandbox sandbox.Sandbox // ID, Owner, Spec and CreatedAt count
	Slots   int             // slots 0 to Slots-1 may be leased
	UIDBase uint32          // first id of slot 0; each slot has 65,536
	Actor   string          // who asks, for the event

	// Image is what the sandbox is made of, as Image returned it: kept with
	// it, for its name may come to stand for another. Without a name: none.
	Image sandbox.Image

	// With a key, a repeated call of the same owner with the same hash
	// returns what the first made.
	IdempotencyKey string
	RequestHash    string
}

const (
	sqlIdempotent = `SELECT sandbox, hash FROM idempotency WHERE owner = ? AND key = ?`
	sqlNextSlot   = `SELECT coalesce(max(slot) + 1, 0) FROM slots`
	sqlFreeSlot   = `SELECT slot FROM slots WHERE sandbox IS NULL AND slot < ? ORDER BY freed, slot LIMIT 1`
	sqlLease      = `INSERT INTO slots (slot, sandbox) VALUES (?1, ?2)
		ON CONFLICT (slot) DO UPDATE SET sandbox = excluded.sandbox WHERE sandbox IS NULL`
	sqlRelease = `UPDATE slots SET sandbox = NULL,
		freed = (SELECT coalesce(max(freed), 0) + 1 FROM slots WHERE sandbox IS NULL)
		WHERE sandbox = ?`
	sqlInsertSandbox = `INSERT INTO sandboxes (id, name, owner, image, status, created_at, slot, uid_base, spec, image_record)
		VALUES (?, ?, ?, ?, 'pending', ?, ?, ?, ?, ?)`
	sqlInsertKey = `INSERT INTO idempotency (owner, key, hash, sandbox) VALUES (?, ?, ?, ?)`
	sqlSandbox   = `SELECT ` + columns + ` FROM sandboxes WHERE id = ?`
)

// CreateSandbox writes, in one transaction, the row of a pending sandbox, the
// lease of its slot and its event. The slot is one never used, else the one
// freed longest ago, so that a name, address or id range comes back as late
// as it can. existed reports that the idempotency key had made it before.
//
// ErrConflict with code name_taken, idempotency_mismatch or, where the image
// was removed or replaced since it was read, image_changed: so no layer of a
// sandbox's image is collected between the reading and the row. ErrExhausted
// with code slots_exhausted.
func (d *DB) CreateSandbox(ctx context.Context, p CreateParams) (sb sandbox.Sandbox, existed bool, err error) {
	if _, err := sandbox.ParseID(string(p.Sandbox.ID)); err != nil {
		return sb, false, err
	}
	spec, err := toJSON(p.Sandbox.Spec)
	if err != nil {
		return sb, false, err
	}
	image, err := toJSON(p.Image)
	if err != nil {
		return sb, false, err
	}
	err = d.write(ctx, func(ctx context.Context, t *tx) error {
		var before sandbox.ID
		if before, err = t.idempotent(ctx, p); err != nil || before != "" {
			existed = before != ""
			if existed {
				sb, err = t.sandbox(ctx, before)
			}
			return err
		}
		return t.create(ctx, p, spec, image, &sb)
	})
	if err != nil {
		return sandbox.Sandbox{}, false, err
	}
	return sb, existed, nil
}

// idempotent returns the sandbox the key made before, or none.
func (t *tx) idempotent(ctx context.Context, p CreateParams) (sandbox.ID, error) {
	if p.IdempotencyKey == "" {
		return "", nil
	}
	var id, hash string
	err := t.stmt(ctx, sqlIdempotent).QueryRowContext(ctx, p.Sandbox.Owner, p.IdempotencyKey).Scan(&id, &hash)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return "", nil
	case err != nil:
		return "", err
	case hash != p.RequestHash:
		return "", sandbox.Errorf(sandbox.ErrConflict, "idempotency_mismatch",
			"idempotency key %.80q was used for another request, which made sandbox %s: use a new key", p.IdempotencyKey, id)
	}
	return sandbox.ID(id), nil
}

func (t *tx) create(ctx context.Context, p CreateParams, spec, image string, sb *sandbox.Sandbox) error {
	if err := t.imageUnchanged(ctx, p.Image, image); err != nil {
		return err
	}
	slot, err := t.freeSlot(ctx, p.Slots)
	if err != nil {
		return err
	}
	created := p.Sandbox.CreatedAt
	if created.IsZero() {
		created = time.Now()
	}
	in := p.Sandbox
	_, err = t.stmt(ctx, sqlInsertSandbox).ExecContext(ctx, string(in.ID), in.Spec.Name, in.Owner, in.Spec.Image,
		created.UnixNano(), slot, p.UIDBase+uint32(slot)*idsPerSlot, spec, image)
	if isUnique(err) {
		if strings.Contains(err.Error(), "sandboxes.name") {
			return sandbox.Errorf(sandbox.ErrConflict, "name_taken", "a living sandbox is called %q: choose another name, or remove that one", in.Spec.Name)
		}
		return sandbox.Errorf(sandbox.ErrConflict, "id_taken", "sandbox %s exists already: %w", in.ID, err)
	}
	if err != nil {
		return err
	}
	if _, err := t.stmt(ctx, sqlLease).ExecContext(ctx, slot, string(in.ID)); err != nil {
		return err
	}
	if p.IdempotencyKey != "" {
		if _, err := t.stmt(ctx, sqlInsertKey).ExecContext(ctx, in.Owner, p.IdempotencyKey, p.RequestHash, string(in.ID)); err != nil {
			return err
		}
	}
	if *sb, err = t.sandbox(ctx, in.ID); err != nil {
		return err
	}
	_, err = t.appendEvent(ctx, sandbox.Event{Time: created, Sandbox: in.ID, Type: eventType(sandbox.StatusPending), Actor: p.Actor})
	return err
}

// freeSlot chooses a slot; the transaction is the only writer, so it stays free.
func (t *tx) freeSlot(ctx context.Context, slots int) (int, error) {
	var slot int
	if err := t.stmt(ctx, sqlNextSlot).QueryRowContext(ctx).Scan(&slot); err != nil {
		return 0, err
	}
	if slot < slots {
		return slot, nil
	}
	err := t.stmt(ctx, sqlFreeSlot).QueryRowContext(ctx, slots).Scan(&slot)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, sandbox.Errorf(sandbox.ErrExhausted, "slots_exhausted", "all %d slots are taken by living sandboxes: remove some, or raise the number in the daemon's configuration", slots)
	}
	return slot, err
}

// sandbox reads a row inside the transaction.
func (t *tx) sandbox(ctx context.Context, id sandbox.ID) (sandbox.Sandbox, error) {
	row, err := scanRow(t.stmt(ctx, sqlSandbox).QueryRowContext(ctx, string(id)))
	if errors.Is(err, sql.ErrNoRows) {
		err = notFound(id)
	}
	return row.Sandbox, err
}

func notFound(ref any) error {
	return sandbox.Errorf(sandbox.ErrNotFound, "sandbox_not_found", "no sandbox %v", ref)
}

func eventType(s sandbox.Status) string { return "sandbox." + string(s) }

// Move takes a sandbox from one of the statuses in from to another, with what
// ch sets and an event, in one transaction. A terminal status also frees the
// slot and the name, forgets PID 1 and, if ch does not say it, takes now as
// the end: so nothing the slot names may exist any more.
//
// ErrConflict with code wrong_state, naming the present status, where that is
// not in from: someone else was faster. ErrInvalid with code illegal_move
// where the statuses themselves do not permit it. ErrNotFound.
func (d *DB) Move(ctx context.Context, id sandbox.ID, from []sandbox.Status, to sandbox.Status, ch Change) (sandbox.Sandbox, error) {
	for _, f := range from {
		if !f.CanMove(to) {
			return sandbox.Sandbox{}, sandbox.Errorf(sandbox.ErrInvalid, "illegal_move", "sandbox %s: nothing moves from %q to %q", id, f, to)
		}
	}
	set, err := ch.columns()
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	var out sandbox.Sandbox
	err = d.write(ctx, func(ctx context.Context, t *tx) error {
		now := time.Now()
		present, err := t.sandbox(ctx, id)
		if err != nil {
			return err
		}
		if !slices.Contains(from, present.Status) {
			return sandbox.Errorf(sandbox.ErrConflict, "wrong_state", "sandbox %s is %s, not %s", id, present.Status, joinStatuses(from))
		}
		if to.Terminal() {
			set.end(now)
		}
		if out, err = t.update(ctx, id, present.Status, to, set); err != nil {
			return err
		}
		if to.Terminal() {
			if _, err := t.stmt(ctx, sqlRelease).ExecContext(ctx, string(id)); err != nil {
				return err
			}
		}
		_, err = t.appendEvent(ctx, ch.event(id, to, now))
		return err
	})
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return out, nil
}

// Update sets columns without a change of status, and appends an event only
// if ch names a type. ErrNotFound.
func (d *DB) Update(ctx context.Context, id sandbox.ID, ch Change) error {
	set, err := ch.columns()
	if err != nil {
		return err
	}
	return d.write(ctx, func(ctx context.Context, t *tx) error {
		present, err := t.sandbox(ctx, id)
		if err != nil {
			return err
		}
		if _, err := t.update(ctx, id, present.Status, present.Status, set); err != nil || ch.EventType == "" {
			return err
		}
		_, err = t.appendEvent(ctx, ch.event(id, present.Status, time.Now()))
		return err
	})
}

// update writes the columns of set if the status still is from.
func (t *tx) update(ctx context.Context, id sandbox.ID, from, to sandbox.Status, set columnSet) (sandbox.Sandbox, error) {
	args := append([]any{string(id), string(from), string(to)}, set.args()...)
	row, err := scanRow(t.stmt(ctx, sqlUpdate).QueryRowContext(ctx, args...))
	if errors.Is(err, sql.ErrNoRows) {
		return row.Sandbox, sandbox.Errorf(sandbox.ErrConflict, "wrong_state", "sandbox %s is not %s any more", id, from)
	}
	return row.Sandbox, err
}

func joinStatuses(all []sandbox.Status) string {
	words := make([]string, len(all))
	for i, s := range all {
		words[i] = string(s)
	}
	return strings.Join(words, " or ")
}

// Prune deletes what is beyond the newest keepEnded ended sandboxes, with
// their processes and idempotency keys, and beyond the newest keepEvents
// events. Living sandboxes stay whatever their number.
func (d *DB) Prune(ctx context.Context, keepEnded, keepEvents int) error {
	if keepEnded < 0 || keepEvents < 0 {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_prune", "keeping %d sandboxes and %d events: use 0 or more", keepEnded, keepEvents)
	}
	return d.write(ctx, func(ctx context.Context, t *tx) error {
		if _, err := t.ExecContext(ctx, `DELETE FROM sandboxes WHERE id IN (
			SELECT id FROM sandboxes WHERE status IN ('completed', 'failed')
			ORDER BY ended_at DESC, id DESC LIMIT -1 OFFSET ?)`, keepEnded); err != nil {
			return fmt.Errorf("pruning ended sandboxes: %w", err)
		}
		if _, err := t.ExecContext(ctx, `DELETE FROM events WHERE seq <= (
			SELECT seq FROM events ORDER BY seq DESC LIMIT 1 OFFSET ?)`, keepEvents); err != nil {
			return fmt.Errorf("pruning events: %w", err)
		}
		return nil
	})
}
