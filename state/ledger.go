package state

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// The ledger is a list of readings for each sandbox, every one a total since
// its creation. So a reading written twice, or one that is missing, changes no
// sum: see UsageReport for how sums are made, Roll for what goes, and the
// migration for what the database itself refuses.

// meterColumns are the meters as readings has them, in the order of
// Meters.Values.
var meterColumns = [sandbox.MeterCount]string{
	"cpu", "memory", "storage", "net_rx", "net_tx", "io_read", "io_write", "running", "paused", "stopped", "other", "starts",
}

// sqlPayer is who pays for a sandbox: for one of a build, who asked for the
// build.
const sqlPayer = `CASE WHEN owner GLOB 'build:*' THEN substr(owner, 7) ELSE owner END`

const (
	readingColumns = `at, cpu, memory, storage, net_rx, net_tx, io_read, io_write, running, paused, stopped, other, starts,
		status, clock, memory_kib, storage_kib`
	sqlLedger       = `SELECT number, boot FROM ledger WHERE sandbox = ?`
	sqlInsertLedger = `INSERT INTO ledger (sandbox, owner, project, name, image, labels, created_at, boot, due)
		SELECT id, ` + sqlPayer + `, coalesce(spec ->> '$.project', ''), name, image, coalesce(spec -> '$.labels', '{}'), created_at / 1000000, ?2, ?3 FROM sandboxes WHERE id = ?1
		RETURNING number`
	sqlLedgerBoot = `UPDATE ledger SET boot = ?2 WHERE number = ?1`
	sqlEndLedger  = `UPDATE ledger SET ended_at = ?2 WHERE sandbox = ?1`
	sqlPutReading = `INSERT INTO readings (ledger, ` + readingColumns + `)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`
	sqlLastReadings = `SELECT l.sandbox, l.boot, ` + readingColumns + ` FROM ledger l
		JOIN readings r ON r.ledger = l.number AND r.at = (SELECT max(at) FROM readings WHERE ledger = l.number)
		WHERE l.sandbox IN (SELECT id FROM sandboxes WHERE status NOT IN ('completed', 'failed'))`
)

// PutReadings writes readings of any sandboxes, in one transaction. One that
// is in the ledger, or older than the last there, changes nothing: writing them
// again is safe. ErrConflict where a total is lower than one before; then none
// is written. They do not wait for the disk.
func (d *DB) PutReadings(ctx context.Context, all []sandbox.Reading) error {
	if len(all) == 0 {
		return nil
	}
	return d.write(ctx, func(t *tx) error {
		for _, r := range all {
			if err := t.putReading(r); err != nil {
				return err
			}
		}
		return nil
	})
}

func (t *tx) putReading(r sandbox.Reading) error {
	number, err := t.ledger(r)
	if errors.Is(err, sql.ErrNoRows) {
		return nil // of a sandbox that was never written down
	}
	if err == nil {
		args := make([]any, 0, sandbox.MeterCount+6)
		args = append(args, number, r.At.UnixMilli())
		for _, v := range r.Meters.Values() {
			args = append(args, v)
		}
		_, err = t.exec(sqlPutReading, append(args, string(r.Status), r.Clock, r.MemoryKiB, r.StorageKiB)...)
	}
	if err != nil {
		return fmt.Errorf("writing a reading of sandbox %s: %w", r.Sandbox, err)
	}
	return nil
}

// ledger returns the number of a sandbox's row in the ledger, and writes it
// with the first reading. sql.ErrNoRows where there is no such sandbox.
func (t *tx) ledger(r sandbox.Reading) (number int64, err error) {
	found, err := t.row(sqlLedger, string(r.Sandbox))
	if errors.Is(err, sql.ErrNoRows) {
		n, err := t.number(sqlInsertLedger, string(r.Sandbox), r.Boot, r.At.UnixMilli())
		return int64(n), err
	}
	var boot string
	if err == nil {
		err = found.Scan(&number, &boot)
	}
	if err == nil && boot != r.Boot {
		_, err = t.exec(sqlLedgerBoot, number, r.Boot)
	}
	return number, err
}

// note writes the readings that belong to a change, and whether they are the
// last.
func (t *tx) note(id sandbox.ID, all []sandbox.Reading, last bool) error {
	for i, r := range all {
		if r.Sandbox != id {
			return fmt.Errorf("writing a reading of sandbox %q with a change of %s", r.Sandbox, id)
		}
		err := t.putReading(r)
		if err == nil && last && i == len(all)-1 {
			_, err = t.exec(sqlEndLedger, string(id), r.At.UnixMilli())
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// InLedger reports whether the ledger knows a sandbox, which may be pruned.
func (d *DB) InLedger(ctx context.Context, id sandbox.ID) bool {
	_, err := d.first(ctx, sqlLedger, string(id))
	return err == nil
}

// LastReadings returns the last reading of each living sandbox that has one.
func (d *DB) LastReadings(ctx context.Context) (map[sandbox.ID]sandbox.Reading, error) {
	rows, err := d.reader.QueryContext(ctx, sqlLastReadings)
	if err != nil {
		return nil, translate(err)
	}
	out := map[sandbox.ID]sandbox.Reading{}
	_, err = drain(rows, func(row scanner) (struct{}, error) {
		var r sandbox.Reading
		var id, status string
		var at int64
		var v [sandbox.MeterCount]int64
		dest := []any{&id, &r.Boot, &at}
		for i := range v {
			dest = append(dest, &v[i])
		}
		err := row.Scan(append(dest, &status, &r.Clock, &r.MemoryKiB, &r.StorageKiB)...)
		r.Sandbox, r.Status, r.At, r.Meters = sandbox.ID(id), sandbox.Status(status), time.UnixMilli(at).UTC(), sandbox.MetersOf(v)
		out[r.Sandbox] = r
		return struct{}{}, err
	})
	return out, translate(err)
}
