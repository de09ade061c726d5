package state

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Root is what a sandbox's files stand on.
type Root struct {
	Image   sandbox.Image      // what it was made of
	Stack   []string           // layers below its upper, lowest first
	Point   sandbox.SnapshotID // the snapshot it was last frozen as or put back on; none: what it began with
	Pending *PendingRoot       // a change that was begun and not finished
}

// RootOp says which change of root was begun.
type RootOp string

// The changes of root.
const (
	RootFreeze  RootOp = "freeze"  // the upper becomes a layer, and a fresh one lies on it
	RootReplace RootOp = "replace" // the upper goes, and a fresh one lies on Stack
)

// PendingRoot is the intent to change a root, written before the files are
// touched. Recovery finishes it if the files say that it was done, or can be.
type PendingRoot struct {
	Op       RootOp             `json:"op"`
	Layer    string             `json:"layer,omitempty"`    // what the upper becomes
	Stack    []string           `json:"stack"`              // after it
	Point    sandbox.SnapshotID `json:"point,omitempty"`    // after it
	InitPID  int                `json:"init_pid,omitempty"` // PID 1 before it; 0 while stopped
	Snapshot *sandbox.Snapshot  `json:"snapshot,omitempty"` // that it makes
}

const (
	sqlRootOf    = `SELECT image_record, stack, point, pending FROM sandboxes WHERE id = ?`
	sqlBeginRoot = `UPDATE sandboxes SET pending = ?2, init_pid = 0 WHERE id = ?1 AND pending = ''`
	sqlEndRoot   = `UPDATE sandboxes SET pending = '', stack = ?2, point = ?3, init_pid = ?4 WHERE id = ?1 AND pending <> ''`
	sqlDropRoot  = `UPDATE sandboxes SET pending = '', init_pid = ?2 WHERE id = ?1 AND pending <> ''`
)

// RootOf returns what a sandbox's files stand on. ErrNotFound.
func (d *DB) RootOf(ctx context.Context, id sandbox.ID) (r Root, err error) {
	found, err := d.first(ctx, sqlRootOf, string(id))
	if errors.Is(err, sql.ErrNoRows) {
		return r, notFound(id)
	}
	var image, stack []byte
	var point, pending string
	if err == nil {
		err = found.Scan(&image, &stack, &point, &pending)
	}
	if err != nil {
		return r, err
	}
	r.Point = sandbox.SnapshotID(point)
	err = errors.Join(json.Unmarshal(image, &r.Image), json.Unmarshal(stack, &r.Stack))
	if pending != "" {
		r.Pending = &PendingRoot{}
		err = errors.Join(err, json.Unmarshal([]byte(pending), r.Pending))
	}
	if err != nil {
		return r, fmt.Errorf("reading the root of sandbox %s: %w", id, err)
	}
	if r.Image.Name == "" && len(r.Image.Layers) == 0 {
		return r, sandbox.Errorf(sandbox.ErrNotFound, "image_not_found", "no image is recorded for sandbox %s", id)
	}
	if r.Stack == nil {
		r.Stack = r.Image.Layers
	}
	return r, nil
}

// BeginRoot writes the intent to change a sandbox's root, takes PID 1 out of
// its row, and reserves the name and id of the snapshot it makes, if any.
// durable: it must outlast a power cut, for the files do.
// ErrConflict with code root_pending while another change is unfinished, or
// snapshot_name_taken.
func (d *DB) BeginRoot(ctx context.Context, id sandbox.ID, p PendingRoot, durable bool) error {
	if p.Snapshot != nil {
		if err := d.room(); err != nil {
			return err
		}
	}
	data, err := toJSON(p)
	if err != nil {
		return err
	}
	return d.write(ctx, func(t *tx) error {
		if durable {
			if err := t.mustLast(); err != nil {
				return err
			}
		}
		if p.Snapshot != nil {
			if err := t.insertSnapshot(*p.Snapshot, snapshotCreating, ""); err != nil {
				return err
			}
		}
		ok, err := t.changed(sqlBeginRoot, string(id), data)
		if err == nil && !ok {
			err = sandbox.Errorf(sandbox.ErrConflict, "root_pending", "the files of sandbox %s are being changed: try again", id)
		}
		return err
	})
}

// FinishRoot writes that a pending change of root is done: what the files
// stand on, PID 1's pid (0: none), the event of ch, and the snapshot it made.
// boot is that of a snapshot that is not on disk yet.
func (d *DB) FinishRoot(ctx context.Context, id sandbox.ID, p PendingRoot, initPID int, boot string, ch Change, durable bool) error {
	stack, err := toJSON(p.Stack)
	if err != nil {
		return err
	}
	return d.write(ctx, func(t *tx) error {
		if durable {
			if err := t.mustLast(); err != nil {
				return err
			}
		}
		ok, err := t.changed(sqlEndRoot, string(id), stack, string(p.Point), initPID)
		if err != nil || !ok {
			return errors.Join(err, notPending(ok, id))
		}
		now := time.Now()
		events := []sandbox.Event{}
		if ch.EventType != "" {
			events = append(events, ch.event(id, "", now))
		}
		if s := p.Snapshot; s != nil {
			if err := t.finishSnapshot(*s, boot); err != nil {
				return err
			}
			events = append(events, snapshotEvent(*s, now))
		}
		if len(events) == 0 {
			return nil
		}
		_, err = t.appendEvents(events...)
		return err
	})
}

// AbandonRoot takes an intent back whose files were not touched. Repeating
// it is safe.
func (d *DB) AbandonRoot(ctx context.Context, id sandbox.ID, p PendingRoot) error {
	return d.write(ctx, func(t *tx) error {
		if _, err := t.exec(sqlDropRoot, string(id), p.InitPID); err != nil || p.Snapshot == nil {
			return err
		}
		_, err := t.exec(sqlDropSnapshot, string(p.Snapshot.ID))
		return err
	})
}

func notPending(ok bool, id sandbox.ID) error {
	if ok {
		return nil
	}
	return sandbox.Errorf(sandbox.ErrConflict, "root_not_pending", "no change of the files of sandbox %s is under way", id)
}
