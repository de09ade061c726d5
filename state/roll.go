package state

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// RollUp says how readings are thinned out: once they are as old as After, of
// those in each span of Width the first and the last stay. So what UsageReport
// says of any time that is a multiple of Width stays the same.
type RollUp struct{ After, Width time.Duration }

// DefaultRollUps keep readings by the minute for a day, by the hour for days,
// and by the day for good.
func DefaultRollUps(days int) []RollUp {
	return []RollUp{
		{time.Hour, time.Minute},
		{24 * time.Hour, time.Hour},
		{time.Duration(days) * 24 * time.Hour, 24 * time.Hour},
	}
}

const (
	sqlDue  = `SELECT number, rolled, ended_at IS NOT NULL FROM ledger WHERE due <= ? ORDER BY due LIMIT 1`
	sqlThin = `DELETE FROM readings WHERE ledger = ?1 AND at IN (
		SELECT at FROM (SELECT at, lag(at) OVER w AS before, lead(at) OVER w AS after FROM readings
			WHERE ledger = ?1 AND at > ?2 AND at <= ?3 WINDOW w AS (ORDER BY at))
		WHERE (before - 1) / ?4 = (at - 1) / ?4 AND (after - 1) / ?4 = (at - 1) / ?4)`
	sqlLastAt = `SELECT max(at), min(at) < max(at) FROM readings WHERE ledger = ?`
	sqlRolled = `UPDATE ledger SET rolled = ?2, due = ?3 WHERE number = ?1`
)

// Roll thins out the readings of one sandbox that is due, in one transaction,
// and reports whether there was one. It only deletes, so whatever a crash keeps
// it from, it does the next time.
func (d *DB) Roll(ctx context.Context, now time.Time, levels []RollUp) (more bool, err error) {
	for _, l := range levels {
		if l.Width < time.Millisecond || l.After < 0 {
			return false, sandbox.Errorf(sandbox.ErrInvalid, "invalid_roll_up", "rolling up after %s to %s: use widths of a millisecond and more", l.After, l.Width)
		}
	}
	err = d.write(ctx, func(t *tx) error {
		more, err = t.roll(now.UnixMilli(), levels)
		return err
	})
	if err != nil {
		return false, fmt.Errorf("rolling up the ledger: %w", err)
	}
	return more, nil
}

func (t *tx) roll(now int64, levels []RollUp) (bool, error) {
	found, err := t.row(sqlDue, now)
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	var number, rolled, ended int64
	if err == nil {
		err = found.Scan(&number, &rolled, &ended)
	}
	if err != nil {
		return false, err
	}
	for _, l := range levels {
		after, width := l.After.Milliseconds(), l.Width.Milliseconds()
		from, to := (rolled-after)/width*width, (now-after)/width*width
		if rolled < after {
			from = 0
		}
		if to <= from {
			continue
		}
		if _, err := t.exec(sqlThin, number, from, to, width); err != nil {
			return false, err
		}
	}
	due, err := t.nextRoll(number, ended != 0, now, levels)
	if err == nil {
		_, err = t.exec(sqlRolled, number, max(now, rolled), due)
	}
	return true, err
}

// nextRoll is when a sandbox's readings are due again: of a living one as soon
// as there is more, of one that ended when a level takes the last of them; nil
// when none will find any.
func (t *tx) nextRoll(number int64, ended bool, now int64, levels []RollUp) (any, error) {
	var next int64
	var last, several sql.NullInt64
	found, err := t.row(sqlLastAt, number)
	if err == nil {
		err = found.Scan(&last, &several)
	}
	if err != nil {
		return nil, err
	}
	for _, l := range levels {
		at := now + l.After.Milliseconds()
		if width := l.Width.Milliseconds(); ended {
			at = (last.Int64+width-1)/width*width + l.After.Milliseconds()
		}
		if at > now && (!ended || several.Int64 != 0) && (next == 0 || at < next) {
			next = at
		}
	}
	if next == 0 {
		return nil, nil // null
	}
	return next, nil
}
