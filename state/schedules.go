package state

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	sqlPutSchedule = `INSERT INTO schedules (id, sandbox, next_at, record) SELECT ?1, ?2, ?3, ?4
		WHERE EXISTS (SELECT 1 FROM sandboxes WHERE id = ?2 AND status NOT IN ('completing', 'completed', 'failed'))`
	sqlRunSchedule    = `UPDATE schedules SET next_at = ?2, record = ?3 WHERE id = ?1`
	sqlSchedules      = `SELECT record FROM schedules WHERE ?1 = '' OR sandbox = ?1 ORDER BY sandbox, id`
	sqlSchedule       = `SELECT record FROM schedules WHERE id = ?`
	sqlDeleteSchedule = `DELETE FROM schedules WHERE id = ?`
	sqlDropSchedules  = `DELETE FROM schedules WHERE sandbox = ?`
	sqlOldSchedules   = `DELETE FROM schedules WHERE sandbox IN (SELECT id FROM sandboxes WHERE status IN ('completed', 'failed'))`
)

func scheduleNotFound(id string) error {
	return sandbox.Errorf(sandbox.ErrNotFound, "schedule_not_found", "no schedule %.40q: 'sandbox schedule ls' shows those there are", id)
}

// PutSchedule adds a schedule. ErrConflict with code sandbox_ended where its
// sandbox is gone, or going.
func (d *DB) PutSchedule(ctx context.Context, s sandbox.Schedule) error {
	data, err := toJSON(s)
	if err != nil {
		return err
	}
	return d.write(ctx, func(t *tx) error {
		ok, err := t.changed(sqlPutSchedule, s.ID, string(s.Sandbox), s.NextAt.UnixNano(), data)
		if err == nil && !ok {
			err = sandbox.Errorf(sandbox.ErrConflict, "sandbox_ended", "sandbox %s has ended: nothing can be repeated in it", s.Sandbox)
		}
		return err
	})
}

// ScheduleRan writes what became of a run; one that was removed meanwhile
// stays so.
func (d *DB) ScheduleRan(ctx context.Context, s sandbox.Schedule) error {
	data, err := toJSON(s)
	if err != nil {
		return err
	}
	return d.write(ctx, func(t *tx) error { _, err := t.exec(sqlRunSchedule, s.ID, s.NextAt.UnixNano(), data); return err })
}

// Schedules lists those of one sandbox, or with an empty id all.
func (d *DB) Schedules(ctx context.Context, id sandbox.ID) ([]sandbox.Schedule, error) {
	return collect(ctx, d.reads[sqlSchedules], scanSchedule, string(id))
}

// Schedule returns one schedule. ErrNotFound.
func (d *DB) Schedule(ctx context.Context, id string) (sandbox.Schedule, error) {
	found, err := d.first(ctx, sqlSchedule, id)
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Schedule{}, scheduleNotFound(id)
	}
	if err != nil {
		return sandbox.Schedule{}, err
	}
	return scanSchedule(found)
}

// DeleteSchedule removes one schedule. ErrNotFound.
func (d *DB) DeleteSchedule(ctx context.Context, id string) error {
	return d.write(ctx, func(t *tx) error {
		ok, err := t.changed(sqlDeleteSchedule, id)
		if err == nil && !ok {
			err = scheduleNotFound(id)
		}
		return err
	})
}

// DropOldSchedules removes those of all sandboxes that have ended.
func (d *DB) DropOldSchedules(ctx context.Context) error {
	return d.write(ctx, func(t *tx) error {
		_, err := t.exec(sqlOldSchedules)
		return err
	})
}

func scanSchedule(row scanner) (s sandbox.Schedule, err error) {
	var data []byte
	if err := row.Scan(&data); err != nil {
		return s, err
	}
	if err := json.Unmarshal(data, &s); err != nil {
		return s, fmt.Errorf("reading a schedule: %w", err)
	}
	return s, nil
}
