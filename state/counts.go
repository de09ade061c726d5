package state

import (
	"context"
)

// Counts are how many rows there are of what one keeps.
type Counts struct {
	Ended, Images, Snapshots, Volumes, DeadLetters int64
	LastEvent                                      int64 // number of the newest event there was
}

const (
	// sqlCounts reads indexes alone.
	sqlCounts = `SELECT (SELECT count(*) FROM sandboxes WHERE status IN ('completed', 'failed')),
		(SELECT count(*) FROM images), (SELECT count(*) FROM snapshots), (SELECT count(*) FROM volumes),
		(SELECT count(*) FROM dead_letters), (` + sqlLastSeq + `)`
	sqlEventTypes = `SELECT type, count(*) FROM events WHERE seq > ? AND seq <= ? GROUP BY type`
)

// Counts counts.
func (d *DB) Counts(ctx context.Context) (c Counts, err error) {
	err = d.reads[sqlCounts].QueryRowContext(ctx).Scan(&c.Ended, &c.Images, &c.Snapshots, &c.Volumes, &c.DeadLetters, &c.LastEvent)
	return c, translate(err)
}

// EventTypes counts the events after one number, up to another, by type; those
// that were pruned are none.
func (d *DB) EventTypes(ctx context.Context, after, upTo int64) (map[string]int64, error) {
	types := map[string]int64{}
	_, err := collect(ctx, d.reads[sqlEventTypes], func(s scanner) (struct{}, error) {
		var kind string
		var n int64
		err := s.Scan(&kind, &n)
		types[kind] = n
		return struct{}{}, err
	}, after, upTo)
	return types, err
}
