package state

import (
	"context"
	"database/sql"
	"errors"

	"github.com/sandboxd/sandboxd/sandbox"
)

// A slot is free, reserved for a shell of no sandbox yet, or leased to a
// sandbox, which may have ended (see KeepSlot):
//
//	free ─→ reserved ─→ leased
//	 ↑ ↑       │           │
//	 │ └───────┘           │
//	 └─────────────────────┘
const (
	sqlNextSlot = `SELECT coalesce(max(slot) + 1, 0) FROM slots`
	sqlFreeSlot = `SELECT slot FROM slots WHERE sandbox IS NULL AND reserved = 0 AND slot < ? ORDER BY freed, slot LIMIT 1`
	// sqlFreeSlots counts no further than it must.
	sqlFreeSlots = `SELECT count(*) FROM (SELECT 1 FROM slots WHERE sandbox IS NULL AND reserved = 0 AND slot < ? LIMIT ?)`
	sqlReserve   = `INSERT INTO slots (slot, reserved) VALUES (?, 1)
		ON CONFLICT (slot) DO UPDATE SET reserved = 1 WHERE sandbox IS NULL`
	sqlLease = `INSERT INTO slots (slot, sandbox) VALUES (?1, ?2)
		ON CONFLICT (slot) DO UPDATE SET sandbox = excluded.sandbox WHERE sandbox IS NULL AND reserved = 0`
	sqlLeaseReserved = `UPDATE slots SET sandbox = ?2, reserved = 0 WHERE slot = ?1 AND reserved = 1`

	sqlFreed = `freed = (SELECT coalesce(max(freed), 0) + 1 FROM slots WHERE sandbox IS NULL AND reserved = 0)`
	sqlFree  = `UPDATE slots SET sandbox = NULL, ` + sqlFreed + ` WHERE sandbox = ?`
	// sqlFreeOf asks for one row: IN (SELECT …) would list all that ended.
	sqlFreeOf = `UPDATE slots SET sandbox = NULL, ` + sqlFreed + ` WHERE sandbox = ?
		AND EXISTS (SELECT 1 FROM sandboxes WHERE id = slots.sandbox AND status IN ('completed', 'failed'))`
	sqlRelease    = `UPDATE slots SET reserved = 0, ` + sqlFreed + ` WHERE slot = ? AND reserved = 1`
	sqlReleaseAll = `UPDATE slots SET reserved = 0, ` + sqlFreed + ` WHERE reserved = 1`
	sqlInherit    = `UPDATE slots SET sandbox = NULL, reserved = 1
		WHERE sandbox IN (SELECT id FROM sandboxes WHERE status IN ('completed', 'failed'))`
)

// ReserveSlot takes a slot below slots out of the free ones, for a shell made
// in advance. It chooses as CreateSandbox does. ErrExhausted with code
// slots_exhausted unless spare more stay free.
func (d *DB) ReserveSlot(ctx context.Context, slots, spare int) (slot int, err error) {
	if err := d.room(); err != nil {
		return 0, err
	}
	err = d.write(ctx, func(t *tx) error {
		if slot, err = t.freeSlot(slots, spare); err != nil {
			return err
		}
		_, err = t.exec(sqlReserve, slot)
		return err
	})
	return slot, err
}

// ReleaseSlot gives a reservation back, when nothing the slot names exists
// any more. One that is not reserved, as a slot leased to a sandbox, stays as
// it is: repeating is safe.
func (d *DB) ReleaseSlot(ctx context.Context, slot int) error {
	return d.write(ctx, func(t *tx) error {
		_, err := t.exec(sqlRelease, slot)
		return err
	})
}

// FreeEnded takes from an ended sandbox what it still holds: the slot that a
// move with KeepSlot left it, its schedules, its ports with their token, and
// what was carried. It is in no hurry, some milliseconds. Repeating it is safe,
// and a living sandbox keeps all.
func (d *DB) FreeEnded(ctx context.Context, id sandbox.ID) error {
	return d.writeSoon(ctx, func(t *tx) error {
		held, err := t.changed(sqlFreeOf, string(id))
		if err != nil || !held {
			return err
		}
		for _, q := range []string{sqlDropSchedules, sqlDropPorts, sqlDropToken, sqlDropCarried} {
			if _, err := t.exec(q, string(id)); err != nil {
				return err
			}
		}
		return nil
	})
}

// ReleaseReserved gives back all reservations. With them go the slots that
// ended sandboxes kept when the database was opened, which made reservations
// of them; those kept since then wait for FreeEnded. Nothing that earlier
// daemons made under those slots may exist any more.
func (d *DB) ReleaseReserved(ctx context.Context) error {
	return d.write(ctx, func(t *tx) error {
		_, err := t.exec(sqlReleaseAll)
		return err
	})
}

// freeSlot chooses one of the free slots below slots, of which at least spare
// more must be left: one never used, else the one freed longest ago, so that
// a name, address or id range comes back as late as it can. The transaction
// is the only writer, so it stays free.
func (t *tx) freeSlot(slots, spare int) (int, error) {
	next, err := t.number(sqlNextSlot)
	if err != nil {
		return 0, err
	}
	if missing := spare + 1 - max(0, slots-next); spare > 0 && missing > 0 {
		n, err := t.number(sqlFreeSlots, slots, missing)
		if err != nil {
			return 0, err
		}
		if n < missing {
			return 0, slotsExhausted(slots)
		}
	}
	if next < slots {
		return next, nil
	}
	slot, err := t.number(sqlFreeSlot, slots)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, slotsExhausted(slots)
	}
	return slot, err
}

func slotsExhausted(slots int) error {
	return sandbox.Errorf(sandbox.ErrExhausted, "slots_exhausted",
		"all %d slots are taken by living sandboxes and shells made in advance: remove some, or raise the number in the daemon's configuration", slots)
}

// lease gives a sandbox its slot: the one reserved for it, else the chosen.
func (t *tx) lease(slot int, reserved bool, id sandbox.ID) error {
	if !reserved {
		_, err := t.exec(sqlLease, slot, string(id))
		return err
	}
	ok, err := t.changed(sqlLeaseReserved, slot, string(id))
	if err == nil && !ok {
		err = sandbox.Errorf(sandbox.ErrConflict, "slot_not_reserved", "slot %d is not reserved: reserve one, or let the slot be chosen", slot)
	}
	return err
}
