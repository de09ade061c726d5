package state

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/access"
)

const (
	auditColumns   = `seq, time, owner, key, role, origin, operation, object, status, code, request, hash`
	sqlLastAudit   = `SELECT seq, hash FROM audit ORDER BY seq DESC LIMIT 1`
	sqlAuditBase   = `SELECT seq, hash FROM audit_base`
	sqlAppendAudit = `INSERT INTO audit (` + auditColumns + `) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`
	sqlWalkAudit   = `SELECT ` + auditColumns + ` FROM audit WHERE seq > ? ORDER BY seq LIMIT ?`
	sqlMoveBase    = `UPDATE audit_base SET (seq, hash) = (SELECT seq, hash FROM audit WHERE seq = ?1)
		WHERE EXISTS (SELECT 1 FROM audit WHERE seq = ?1)`
	sqlPruneAudit = `DELETE FROM audit WHERE seq <= ?`
)

// Bounds of the audit.
const (
	keptAudit   = 1_000_000 // rows, the newest
	pruneAudit  = 1000      // old rows that are deleted together
	walkAudit   = 1000      // rows of one reading of the whole
	defaultPage = 100
	maxPage     = 1000
)

// AppendAudit numbers, chains and writes rows in the order given, in one
// transaction. With lasting set all rows until now are on disk when it
// returns; rows may be empty for that alone. Otherwise it waits for another
// transaction to go with, a few milliseconds.
func (d *DB) AppendAudit(ctx context.Context, rows []access.AuditRow, lasting bool) error {
	write := d.writeSoon
	if lasting {
		write = d.write
	}
	return write(ctx, func(t *tx) error {
		if lasting {
			if err := t.mustLast(); err != nil {
				return err
			}
		}
		if len(rows) == 0 {
			return nil
		}
		seq, hash, err := t.auditEnd()
		if err != nil {
			return err
		}
		for _, e := range rows {
			seq++
			e.Seq = seq
			hash = e.Chain(hash)
			if _, err := t.exec(sqlAppendAudit, e.Seq, e.Time.UnixNano(), e.Owner, e.Key, string(e.Role), e.From,
				e.Operation, e.Object, e.Status, e.Code, e.Request, hash[:]); err != nil {
				return fmt.Errorf("appending to the audit: %w", err)
			}
		}
		return t.pruneAudit(seq, int64(len(rows)), d.auditKept)
	})
}

// auditEnd returns the newest row there is or was.
func (t *tx) auditEnd() (seq int64, hash access.Sum, err error) {
	found, err := t.row(sqlLastAudit)
	if errors.Is(err, sql.ErrNoRows) {
		found, err = t.row(sqlAuditBase)
	}
	if err != nil {
		return 0, hash, err
	}
	var raw []byte
	if err := found.Scan(&seq, &raw); err != nil {
		return 0, hash, err
	}
	if copy(hash[:], raw) != len(hash) {
		return 0, hash, fmt.Errorf("reading the audit: the hash of row %d has %d bytes", seq, len(raw))
	}
	return seq, hash, nil
}

// pruneAudit deletes the oldest rows now and then.
func (t *tx) pruneAudit(last, added, kept int64) error {
	if last/pruneAudit == (last-added)/pruneAudit || last <= kept {
		return nil
	}
	upTo := last - kept
	moved, err := t.changed(sqlMoveBase, upTo)
	if err != nil || !moved {
		return err // a row that somebody took away: nothing more is, or it would be covered up
	}
	_, err = t.exec(sqlPruneAudit, upTo)
	return err
}

// Audit returns rows, the newest first.
func (d *DB) Audit(ctx context.Context, q access.AuditQuery) ([]access.AuditRow, error) {
	var where []string
	var args []any
	if q.Owner != "" {
		where, args = append(where, `owner = ?`), append(args, q.Owner)
	}
	if q.Object != "" {
		where, args = append(where, `object = ? AND object <> ''`), append(args, q.Object)
	}
	if q.Before > 0 {
		where, args = append(where, `seq < ?`), append(args, q.Before)
	}
	query := `SELECT ` + auditColumns + ` FROM audit`
	if len(where) > 0 {
		query += ` WHERE ` + strings.Join(where, ` AND `)
	}
	if q.Limit <= 0 {
		q.Limit = defaultPage
	}
	rows, err := d.reader.QueryContext(ctx, query+` ORDER BY seq DESC LIMIT ?`, append(args, min(q.Limit, maxPage))...)
	if err != nil {
		return nil, translate(err)
	}
	all, err := drain(rows, scanAudit)
	return all, translate(err)
}

func scanAudit(s scanner) (e access.AuditRow, err error) {
	var at int64
	var hash []byte
	err = s.Scan(&e.Seq, &at, &e.Owner, &e.Key, &e.Role, &e.From, &e.Operation, &e.Object, &e.Status, &e.Code, &e.Request, &hash)
	e.Time = time.Unix(0, at).UTC()
	copy(e.Hash[:], hash) // one of another length is not the row's
	return e, err
}

// VerifyAudit computes the whole chain anew, from rows as they are in the
// database. If anchor is not 0, the row of that number must have the hash
// want. It reads in parts, so that writers go on; what comes meanwhile is
// looked at too.
func (d *DB) VerifyAudit(ctx context.Context, anchor int64, want access.Sum) (access.AuditCheck, error) {
	for {
		base, hash, err := d.auditBase(ctx)
		if err != nil {
			return access.AuditCheck{}, err
		}
		v := access.NewVerifier(base, hash, anchor, want)
		if err := d.walkAudit(ctx, base, v.Add); err != nil {
			return access.AuditCheck{}, err
		}
		check := v.Result()
		if check.OK {
			return check, nil
		}
		// Old rows may have been deleted while we read.
		if again, _, err := d.auditBase(ctx); err != nil || again == base {
			return check, err
		}
	}
}

// auditBase returns the newest of the rows that were deleted for their age.
func (d *DB) auditBase(ctx context.Context) (seq int64, hash access.Sum, err error) {
	found, err := d.first(ctx, sqlAuditBase)
	if err != nil {
		return 0, hash, err
	}
	var raw []byte
	err = found.Scan(&seq, &raw)
	copy(hash[:], raw)
	return seq, hash, err
}

// walkAudit calls f for the rows after one, in order, until it returns false.
func (d *DB) walkAudit(ctx context.Context, after int64, f func(access.AuditRow) bool) error {
	for {
		rows, err := d.reader.QueryContext(ctx, sqlWalkAudit, after, walkAudit)
		if err != nil {
			return translate(err)
		}
		part, err := drain(rows, scanAudit)
		if err != nil {
			return translate(err)
		}
		for _, e := range part {
			if !f(e) {
				return nil
			}
			after = e.Seq
		}
		if len(part) < walkAudit {
			return nil
		}
	}
}
