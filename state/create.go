package state

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// idsPerSlot is how many user ids a slot stands for.
const idsPerSlot = 65536

// CreateParams is the intent to make a sandbox, or, with a Status, the record
// of one that is made already.
type CreateParams struct {
	Sandbox sandbox.Sandbox // ID, Owner, Spec and CreatedAt count
	Slots   int             // slots 0 to Slots-1 may be leased
	UIDBase uint32          // first id of slot 0; each slot has 65,536
	Actor   string          // who asks, for the events

	// Slot is the reserved one to lease; nil to have one chosen.
	Slot *int

	// Status is where the row begins: pending (also if empty), creating or
	// running. The statuses on the way leave their events too.
	Status sandbox.Status
	// Change is set with the row, as Move sets it. What it says of the event
	// is of the last one; the actor is Actor.
	Change Change

	// Image is what the sandbox is made of, as Image returned it: kept with
	// it, but for what running it never needs, for its name may come to stand
	// for another. Without a name: none.
	Image sandbox.Image
	// Snapshot is what it is made of in place of that image as it is now: the
	// image's layers are the snapshot's, which must still be there.
	Snapshot sandbox.SnapshotID

	// With a key, a repeated call of the same owner with the same hash
	// returns what the first made.
	IdempotencyKey string
	RequestHash    string
}

const (
	sqlIdempotent    = `SELECT sandbox, hash FROM idempotency WHERE owner = ? AND key = ?`
	sqlInsertSandbox = `INSERT INTO sandboxes (` + columns + `, name, image, image_record)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`
	sqlSetPoint  = `UPDATE sandboxes SET point = ?2 WHERE id = ?1`
	sqlInsertKey = `INSERT INTO idempotency (owner, key, hash, sandbox) VALUES (?, ?, ?, ?)`
	sqlFreeKey   = `DELETE FROM idempotency WHERE sandbox = ?`
)

// firstStatuses is the way of a new sandbox, as far as one create can go.
var firstStatuses = []sandbox.Status{sandbox.StatusPending, sandbox.StatusCreating, sandbox.StatusRunning}

// CreateSandbox writes, in one transaction, the row of a sandbox, the lease
// of its slot and its events. existed reports that the idempotency key had
// made it before; then, as after an error, a reserved Slot stays reserved.
//
// ErrConflict with code name_taken, idempotency_mismatch, slot_not_reserved
// or, where the image was removed or replaced since it was read,
// image_changed: so no layer of a sandbox's image is collected between the
// reading and the row. ErrNotFound with code volume_not_found: so no volume of
// a living sandbox is removed. ErrExhausted with code slots_exhausted.
// ErrInvalid with code illegal_move for a status a sandbox cannot begin with.
func (d *DB) CreateSandbox(ctx context.Context, p CreateParams) (sb sandbox.Sandbox, existed bool, err error) {
	b, err := p.plan(time.Now())
	if err != nil {
		return sb, false, err
	}
	err = d.write(ctx, func(t *tx) error {
		before, err := t.idempotent(p)
		if err != nil {
			return err
		}
		if existed = before != ""; !existed {
			if err := d.room(); err != nil {
				return err
			}
			return t.create(b)
		}
		found, err := t.row(sqlSandbox, string(before))
		if err == nil {
			b.row, err = scanRow(found)
		}
		return err
	})
	if err != nil {
		return sandbox.Sandbox{}, false, err
	}
	return b.row.Sandbox, existed, nil
}

// idempotent returns the sandbox the key made before, or none.
func (t *tx) idempotent(p CreateParams) (sandbox.ID, error) {
	if p.IdempotencyKey == "" {
		return "", nil
	}
	found, err := t.row(sqlIdempotent, p.Sandbox.Owner, p.IdempotencyKey)
	if errors.Is(err, sql.ErrNoRows) {
		return "", nil
	}
	var id, hash string
	if err == nil {
		err = found.Scan(&id, &hash)
	}
	switch {
	case err != nil:
		return "", err
	case hash != p.RequestHash:
		return "", sandbox.Errorf(sandbox.ErrConflict, "idempotency_mismatch",
			"idempotency key %.80q was used for another request, which made sandbox %s: use a new key", p.IdempotencyKey, id)
	}
	return sandbox.ID(id), nil
}

// birth is a create with all done that needs no transaction.
type birth struct {
	CreateParams
	columns record // in the order of the constant, but for the slot
	row     Row    // columns as they will be read
	image   string // its record, as images has it
	lean    string // the same as the sandbox keeps it
	events  []sandbox.Event
}

// The places of the columns that depend on the slot.
const (
	slotColumn    = 10
	uidBaseColumn = 11
)

// plan is the pure half of a create.
func (p CreateParams) plan(now time.Time) (*birth, error) {
	b := &birth{CreateParams: p}
	if _, err := sandbox.ParseID(string(p.Sandbox.ID)); err != nil {
		return nil, err
	}
	last := max(0, slices.Index(firstStatuses, p.Status))
	if p.Status != "" && p.Status != firstStatuses[last] {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "illegal_move", "sandbox %s: none begins %q", p.Sandbox.ID, p.Status)
	}
	b.Status = firstStatuses[last]
	created := p.Sandbox.CreatedAt
	if created.IsZero() {
		created = now
	}
	set, err := p.Change.columns()
	if err != nil {
		return nil, err
	}
	if set.spec == nil {
		if set.spec, err = toJSON(p.Sandbox.Spec); err != nil {
			return nil, err
		}
	}
	if b.image, err = toJSON(p.Image); err != nil {
		return nil, err
	}
	lean := p.Image
	lean.Config = lean.Config.Lean()
	if b.lean, err = toJSON(lean); err != nil {
		return nil, err
	}
	b.columns = record{
		string(p.Sandbox.ID), p.Sandbox.Owner, string(b.Status), or(set.reason, ""), or(set.detail, ""),
		created.UnixNano(), set.startedAt, set.endedAt, set.deadline, set.exitCode,
		int64(0), or(set.uidBase, int64(0)), or(set.address, ""), or(set.initPID, int64(0)), or(set.initStart, int64(0)), or(set.bootID, ""),
		set.spec, or(set.enforcement, "null"), or(set.usage, "{}"), set.lastOutput,
	}
	if b.row, err = scanRow(b.columns); err != nil {
		return nil, err
	}
	b.row.LastOutput = slices.Clone(b.row.LastOutput) // the caller's until here
	ch := p.Change
	ch.Actor = p.Actor
	for i, s := range firstStatuses[:last+1] {
		e := sandbox.Event{Sandbox: p.Sandbox.ID, Type: eventType(s), Actor: p.Actor}
		if i == last {
			e = ch.event(p.Sandbox.ID, s, now)
		}
		e.Time = now
		if i == 0 {
			e.Time = created
		}
		b.events = append(b.events, e)
	}
	return b, nil
}

// or returns v, or what stands for a column that is not set.
func or(v, unset any) any {
	if v == nil {
		return unset
	}
	return v
}

// sourceUnchanged refuses a create whose image or snapshot is not any more
// what it was when it was read.
func (t *tx) sourceUnchanged(b *birth) error {
	if b.Snapshot == "" {
		return t.imageUnchanged(b.Image, b.image)
	}
	_, err := t.text(sqlSnapshotThere, string(b.Snapshot))
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Errorf(sandbox.ErrNotFound, "snapshot_not_found", "snapshot %s was removed meanwhile", b.Snapshot)
	}
	return err
}

// create writes a planned sandbox.
func (t *tx) create(b *birth) error {
	if err := t.sourceUnchanged(b); err != nil {
		return err
	}
	if err := t.volumesReady(b.Sandbox.Spec.Volumes); err != nil {
		return err
	}
	var slot int
	if b.Slot != nil {
		slot = *b.Slot
	} else {
		var err error
		if slot, err = t.freeSlot(b.Slots, 0); err != nil {
			return err
		}
	}
	if b.row.Slot = slot; b.Change.UIDBase == nil {
		b.row.UIDBase = b.UIDBase + uint32(slot)*idsPerSlot
	}
	b.columns[slotColumn], b.columns[uidBaseColumn] = int64(slot), int64(b.row.UIDBase)
	id, spec := b.row.ID, b.Sandbox.Spec
	args := make([]any, 0, len(b.columns)+3)
	for _, c := range b.columns {
		args = append(args, c)
	}
	_, err := t.exec(sqlInsertSandbox, append(args, spec.Name, spec.Image, b.lean)...)
	if isUnique(err) {
		if strings.Contains(err.Error(), "sandboxes.name") {
			return sandbox.Errorf(sandbox.ErrConflict, "name_taken", "a living sandbox is called %q: choose another name, or remove that one", spec.Name)
		}
		return sandbox.Errorf(sandbox.ErrConflict, "id_taken", "sandbox %s exists already: %w", id, err)
	}
	if err != nil {
		return err
	}
	if b.Snapshot != "" {
		if _, err := t.exec(sqlSetPoint, string(id), string(b.Snapshot)); err != nil {
			return err
		}
	}
	if err := t.lease(slot, b.Slot != nil, id); err != nil {
		return err
	}
	if b.IdempotencyKey != "" {
		if _, err := t.exec(sqlInsertKey, b.row.Owner, b.IdempotencyKey, b.RequestHash, string(id)); err != nil {
			return err
		}
	}
	_, err = t.appendEvents(b.events...)
	return err
}
