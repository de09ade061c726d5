package state

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	sqlPutStep = `INSERT INTO build_cache (key, used_at, record) VALUES (?1, ?2, ?3)
		ON CONFLICT (key) DO UPDATE SET used_at = ?2, record = ?3`
	sqlStep       = `UPDATE build_cache SET used_at = ?2 WHERE key = ?1 RETURNING record`
	sqlSteps      = `SELECT count(*) FROM build_cache`
	sqlPruneSteps = `DELETE FROM build_cache WHERE used_at < ?1
		OR key NOT IN (SELECT key FROM build_cache ORDER BY used_at DESC, key LIMIT ?2)`
)

// PutBuildStep remembers what a step of a build made: an image without a
// name, whose layers stay as long as the row does. It replaces what the key
// stood for.
func (d *DB) PutBuildStep(ctx context.Context, key string, made sandbox.Image) error {
	if key == "" || made.Name != "" {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_build_step", "a build step needs a key, and its image no name: %.80q, %.80q", key, made.Name)
	}
	data, err := toJSON(made)
	if err != nil {
		return err
	}
	return d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil { // what else names its layers is deleted next
			return err
		}
		_, err := t.exec(sqlPutStep, key, time.Now().UnixNano(), data)
		return err
	})
}

// BuildStep returns what a step made, and notes that it was used. ErrNotFound.
func (d *DB) BuildStep(ctx context.Context, key string) (made sandbox.Image, err error) {
	err = d.write(ctx, func(t *tx) error {
		found, err := t.row(sqlStep, key, time.Now().UnixNano())
		if errors.Is(err, sql.ErrNoRows) {
			return sandbox.Errorf(sandbox.ErrNotFound, "build_step_not_found", "no build step %.80q is remembered", key)
		}
		if err != nil {
			return err
		}
		made, err = scanImage(found)
		return err
	})
	return made, err
}

// BuildSteps counts the steps remembered.
func (d *DB) BuildSteps(ctx context.Context) (n int, err error) {
	found, err := d.first(ctx, sqlSteps)
	if err == nil {
		err = found.Scan(&n)
	}
	return n, err
}

// PruneBuildSteps forgets steps not used since before (zero: any age is young enough), and of the others the
// least lately used beyond keep. It returns how many went; their layers go
// when nothing else needs them.
func (d *DB) PruneBuildSteps(ctx context.Context, before time.Time, keep int) (gone int, err error) {
	since := int64(0)
	if !before.IsZero() {
		since = before.UnixNano()
	}
	err = d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil {
			return err
		}
		res, err := t.exec(sqlPruneSteps, since, max(keep, 0))
		if err != nil {
			return err
		}
		n, err := res.RowsAffected()
		gone = int(n)
		return err
	})
	return gone, err
}
