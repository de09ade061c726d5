package state

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// The statuses of a snapshot's row. One that is creating only keeps its name.
const (
	snapshotCreating = "creating"
	snapshotReady    = "ready"
)

const (
	sqlInsertSnapshot = `INSERT INTO snapshots (id, name, sandbox, kind, status, created_at, boot_id, record, owner)
		VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)`
	sqlFinishSnapshot = `UPDATE snapshots SET status = 'ready', boot_id = ?2, record = ?3 WHERE id = ?1`
	sqlDropSnapshot   = `DELETE FROM snapshots WHERE id = ? AND status = 'creating'`
	sqlDropSnapshots  = `DELETE FROM snapshots WHERE status = 'creating' AND NOT EXISTS
		(SELECT 1 FROM sandboxes WHERE pending <> '' AND json_extract(pending, '$.snapshot.id') = snapshots.id)`
	sqlSnapshotDurable = `UPDATE snapshots SET boot_id = '', record = json_set(record, '$.durable', json('true')) WHERE id = ?1 AND status = 'ready'`
	sqlSnapshotCounted = `UPDATE snapshots SET record = json_set(record, '$.size_bytes', ?2, '$.files', ?3) WHERE id = ?1 AND status = 'ready'`
	// The history of what was made of a snapshot ends there, also once that is
	// gone: it is not part of the history of what the snapshot was taken of.
	sqlRelink = `UPDATE snapshots SET record = json_set(record, '$.parent', ?2)
		WHERE json_extract(record, '$.parent') = ?1 AND json_extract(record, '$.spec.snapshot') IS NOT ?1`
	sqlRepoint = `UPDATE sandboxes SET point = ?2
		WHERE point = ?1 AND status NOT IN ('completed', 'failed') AND json_extract(spec, '$.snapshot') IS NOT ?1`
	sqlDeleteSnapshot = `DELETE FROM snapshots WHERE id = ? AND status = 'ready' RETURNING record`
	sqlSnapshot       = `SELECT record FROM snapshots WHERE id = ?1 AND ?2 IS NOT NULL AND status = 'ready'`
	sqlSnapshotThere  = `SELECT id FROM snapshots WHERE id = ? AND status = 'ready'`
	sqlSnapshotNamed  = `SELECT record FROM snapshots WHERE name = ?1 AND name <> '' AND status = 'ready' ORDER BY owner <> ?2, created_at LIMIT 1`
	sqlSnapshotPrefix = `SELECT record FROM snapshots WHERE id >= ?1 AND id < ?2 AND status = 'ready' ORDER BY id LIMIT 2`
	sqlSnapshots      = `SELECT record FROM snapshots WHERE status = 'ready' AND (?1 = '' OR sandbox = ?1) ORDER BY created_at DESC, id DESC`
	sqlLostSnapshots  = `SELECT record FROM snapshots WHERE status = 'ready' AND boot_id <> '' AND boot_id <> ?`

	sqlFlattened    = `SELECT layer FROM flattened WHERE layers = ?`
	sqlPutFlattened = `INSERT INTO flattened (layers, layer) VALUES (?1, ?2) ON CONFLICT (layers) DO UPDATE SET layer = ?2`
	sqlForgetFlat   = `DELETE FROM flattened WHERE layer = ?`
	sqlSetLayers    = `UPDATE snapshots SET record = json_set(record, '$.layers', json(?2)) WHERE id = ?1 AND status = 'ready'`
)

func snapshotNotFound(ref string) error {
	return sandbox.Errorf(sandbox.ErrNotFound, "snapshot_not_found", "no snapshot %.80q: 'sandbox snapshot ls' shows those there are", ref)
}

func (t *tx) insertSnapshot(s sandbox.Snapshot, status, boot string) error {
	data, err := toJSON(s)
	if err != nil {
		return err
	}
	_, err = t.exec(sqlInsertSnapshot, string(s.ID), s.Name, string(s.Sandbox), string(s.Kind), status, s.CreatedAt.UnixNano(), boot, data, s.Owner)
	if isUnique(err) && strings.Contains(err.Error(), "snapshots.name") {
		return sandbox.Errorf(sandbox.ErrConflict, "snapshot_name_taken", "a snapshot is called %q: choose another name, or remove that one", s.Name)
	}
	return err
}

func (t *tx) finishSnapshot(s sandbox.Snapshot, boot string) error {
	data, err := toJSON(s)
	if err != nil {
		return err
	}
	_, err = t.exec(sqlFinishSnapshot, string(s.ID), boot, data)
	return err
}

func snapshotEvent(s sandbox.Snapshot, now time.Time) sandbox.Event {
	data := map[string]string{"snapshot": string(s.ID), "kind": string(s.Kind)}
	if s.Name != "" {
		data["name"] = s.Name
	}
	return sandbox.Event{Time: now, Sandbox: s.Sandbox, Type: "snapshot.created", Actor: s.Owner, Data: data}
}

// ReserveSnapshot keeps the id and name of a snapshot whose files are being
// made. ErrConflict with code snapshot_name_taken.
func (d *DB) ReserveSnapshot(ctx context.Context, s sandbox.Snapshot) error {
	if err := d.room(); err != nil {
		return err
	}
	return d.write(ctx, func(t *tx) error { return t.insertSnapshot(s, snapshotCreating, "") })
}

// PutSnapshot writes that the files of a reserved snapshot are whole, and
// that its sandbox came through it. boot is that of one not on disk yet.
func (d *DB) PutSnapshot(ctx context.Context, s sandbox.Snapshot, boot string) error {
	return d.write(ctx, func(t *tx) error {
		if boot == "" {
			if err := t.mustLast(); err != nil {
				return err
			}
		}
		if err := t.finishSnapshot(s, boot); err != nil {
			return err
		}
		if _, err := t.exec(sqlSetPoint, string(s.Sandbox), string(s.ID)); err != nil {
			return err
		}
		_, err := t.appendEvents(snapshotEvent(s, time.Now()))
		return err
	})
}

// ReleaseSnapshot takes a reservation back. Repeating it is safe.
func (d *DB) ReleaseSnapshot(ctx context.Context, id sandbox.SnapshotID) error {
	return d.write(ctx, func(t *tx) error { _, err := t.exec(sqlDropSnapshot, string(id)); return err })
}

// ReleaseSnapshots takes all reservations back that no pending change of a
// root holds: those of an earlier daemon.
func (d *DB) ReleaseSnapshots(ctx context.Context) error {
	return d.write(ctx, func(t *tx) error { _, err := t.exec(sqlDropSnapshots); return err })
}

// SnapshotDurable writes that a snapshot is on disk.
func (d *DB) SnapshotDurable(ctx context.Context, id sandbox.SnapshotID) error {
	return d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil {
			return err
		}
		_, err := t.exec(sqlSnapshotDurable, string(id))
		return err
	})
}

// SnapshotCounted writes how much a snapshot's own layer holds.
func (d *DB) SnapshotCounted(ctx context.Context, id sandbox.SnapshotID, bytes, files int64) error {
	return d.write(ctx, func(t *tx) error { _, err := t.exec(sqlSnapshotCounted, string(id), bytes, files); return err })
}

// Snapshot returns a snapshot by id, name, or the beginning of an id if that
// is unique. A name is unique among an owner's, and means the caller's, or with
// NAME@OWNER that of another. ErrNotFound; ErrInvalid with code ambiguous_id.
func (d *DB) Snapshot(ctx context.Context, ref string) (sandbox.Snapshot, error) {
	name, owner, called := meant(ctx, ref)
	if called && name != ref {
		return d.OwnSnapshot(ctx, owner, name)
	}
	prefix := func() ([]sandbox.Snapshot, error) {
		return collect(ctx, d.reads[sqlSnapshotPrefix], scanSnapshot, ref, ref+"{")
	}
	byName := sqlSnapshotNamed
	if called {
		byName = sqlOwnSnapshotNamed
	}
	return d.snapshotBy(ctx, ref, sqlSnapshot, byName, prefix, owner)
}

// snapshotBy tries the ways a ref can be meant; more are further parameters of
// the two queries.
func (d *DB) snapshotBy(ctx context.Context, ref, byID, byName string, byPrefix func() ([]sandbox.Snapshot, error), more ...any) (s sandbox.Snapshot, err error) {
	args := append([]any{ref}, more...)
	found, err := d.first(ctx, byID, args...)
	if errors.Is(err, sql.ErrNoRows) {
		found, err = d.first(ctx, byName, args...)
	}
	if err == nil {
		return scanSnapshot(found)
	}
	if !errors.Is(err, sql.ErrNoRows) {
		return s, err
	}
	if len(ref) < 4 || !strings.HasPrefix(ref, "sn") {
		return s, snapshotNotFound(ref)
	}
	all, err := byPrefix()
	switch {
	case err != nil:
		return s, err
	case len(all) == 0:
		return s, snapshotNotFound(ref)
	case len(all) > 1:
		return s, sandbox.Errorf(sandbox.ErrInvalid, "ambiguous_id", "more than one snapshot id begins with %q: give more of it", ref)
	}
	return all[0], nil
}

// Snapshots lists snapshots, newest first.
func (d *DB) Snapshots(ctx context.Context, f sandbox.SnapshotFilter) ([]sandbox.Snapshot, error) {
	all, err := collect(ctx, d.reads[sqlSnapshots], scanSnapshot, string(f.Sandbox))
	if len(f.Kinds) > 0 {
		all = slices.DeleteFunc(all, func(s sandbox.Snapshot) bool { return !slices.Contains(f.Kinds, s.Kind) })
	}
	return all, err
}

// LostSnapshots lists those that were not on disk when another boot than this
// one ended: their files may lack data. With no boot, all that are not known to
// be on disk.
func (d *DB) LostSnapshots(ctx context.Context, boot string) ([]sandbox.Snapshot, error) {
	return collect(ctx, d.reads[sqlLostSnapshots], scanSnapshot, boot)
}

// DeleteSnapshot forgets a snapshot. Sandboxes made of it keep its layers.
// ErrNotFound.
func (d *DB) DeleteSnapshot(ctx context.Context, id sandbox.SnapshotID, actor string) error {
	return d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil { // its layers are deleted next
			return err
		}
		found, err := t.row(sqlDeleteSnapshot, string(id))
		if errors.Is(err, sql.ErrNoRows) {
			return snapshotNotFound(string(id))
		}
		if err != nil {
			return err
		}
		s, err := scanSnapshot(found)
		if err != nil {
			return err
		}
		// What came after it now comes after what was before it.
		for _, query := range []string{sqlRelink, sqlRepoint} {
			if _, err := t.exec(query, string(s.ID), string(s.Parent)); err != nil {
				return err
			}
		}
		_, err = t.appendEvents(sandbox.Event{Sandbox: s.Sandbox, Type: "snapshot.removed", Actor: actor, Data: map[string]string{"snapshot": string(id)}})
		return err
	})
}

func scanSnapshot(row scanner) (s sandbox.Snapshot, err error) {
	var data []byte
	if err := row.Scan(&data); err != nil {
		return s, err
	}
	if err := json.Unmarshal(data, &s); err != nil {
		return s, fmt.Errorf("reading a snapshot: %w", err)
	}
	return s, nil
}

// Flattened returns the layer that stands for a run of layers, or none.
func (d *DB) Flattened(ctx context.Context, layers []string) (string, error) {
	key, err := toJSON(layers)
	if err != nil {
		return "", err
	}
	found, err := d.first(ctx, sqlFlattened, key)
	if errors.Is(err, sql.ErrNoRows) {
		return "", nil
	}
	var layer string
	if err == nil {
		err = found.Scan(&layer)
	}
	return layer, err
}

// PutFlattened writes that one layer stands for a run of them, and lets every
// snapshot stand on it whose layers begin with base and that run.
func (d *DB) PutFlattened(ctx context.Context, base, run []string, layer string) error {
	key, err := toJSON(run)
	if err != nil {
		return err
	}
	all, err := d.Snapshots(ctx, sandbox.SnapshotFilter{})
	if err != nil {
		return err
	}
	long := slices.Concat(base, run)
	return d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil { // the layers it replaces are deleted next
			return err
		}
		if _, err := t.exec(sqlPutFlattened, key, layer); err != nil {
			return err
		}
		for _, s := range all {
			if len(s.Layers) < len(long) || !slices.Equal(s.Layers[:len(long)], long) {
				continue
			}
			data, err := toJSON(slices.Concat(base, []string{layer}, s.Layers[len(long):]))
			if err != nil {
				return err
			}
			if _, err := t.exec(sqlSetLayers, string(s.ID), data); err != nil {
				return err
			}
		}
		return nil
	})
}

// ForgetFlattened forgets what a layer that goes stood for.
func (d *DB) ForgetFlattened(ctx context.Context, layer string) error {
	return d.write(ctx, func(t *tx) error { _, err := t.exec(sqlForgetFlat, layer); return err })
}
