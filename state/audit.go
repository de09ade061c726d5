package state

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
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
	sqlAuditOwners = `SELECT owner, count(*) FROM audit WHERE owner <> '' GROUP BY owner`
	// What is displaced leaves its number and hash, without which the row after it
	// cannot be checked: of rows in a sequence the last ones alone.
	sqlEmptyAudit = `UPDATE audit SET owner = '', key = '', role = '', origin = '', operation = '', object = '', code = '', request = '', time = 0, status = 0
		WHERE seq IN (SELECT seq FROM audit WHERE owner = ?1
			AND NOT (status < 400 AND operation IN ('create-key', 'revoke-key', 'set-owner', 'remove-owner')) ORDER BY seq LIMIT ?2)
		RETURNING seq`
	sqlJoinAudit = `DELETE FROM audit WHERE owner = '' AND operation = '' AND seq BETWEEN ?1 - 1 AND ?2
		AND EXISTS (SELECT 1 FROM audit AS next WHERE next.seq = audit.seq + 1 AND next.owner = '' AND next.operation = '')`
)

// Bounds of the audit.
const (
	keptAudit   = 1_000_000 // rows
	pruneAudit  = 1000      // old rows that are displaced together
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

// pruneAudit now and then displaces the oldest rows of the owners who have most,
// until there are as many as are kept: whatever one owner does, it is that
// owner's rows that go. Changes of keys and owners stay.
func (t *tx) pruneAudit(last, added, kept int64) error {
	if last/pruneAudit == (last-added)/pruneAudit || last <= kept {
		return nil
	}
	has, rows, err := t.perOwner(sqlAuditOwners)
	if err != nil {
		return err
	}
	for owner, n := range displaced(has, rows-kept) {
		if err := t.displaceAudit(owner, n); err != nil {
			return err
		}
	}
	return nil
}

// perOwner reads how many rows each owner has, and adds them up.
func (t *tx) perOwner(query string) (has map[string]int64, sum int64, err error) {
	rows, err := t.all(query)
	has = map[string]int64{}
	for _, r := range rows {
		var owner string
		var n int64
		if err := r.Scan(&owner, &n); err != nil {
			return nil, 0, err
		}
		has[owner] = n
		sum += n
	}
	return has, sum, err
}

// displaced says how many rows each owner loses so that over go: those who have
// most come down to the same number.
func displaced(has map[string]int64, over int64) map[string]int64 {
	loses := map[string]int64{}
	owners := slices.SortedFunc(maps.Keys(has), func(a, b string) int { return cmp.Compare(has[b], has[a]) })
	left := -over // to those that come down
	for i, o := range owners {
		left += has[o]
		n := int64(i + 1)
		if i+1 < len(owners) && left < n*has[owners[i+1]] {
			continue // the next does, too
		}
		for j, o := range owners[:n] {
			level := max(left, 0) / n
			if int64(j) < max(left, 0)%n {
				level++
			}
			if over > 0 && has[o] > level {
				loses[o] = has[o] - level
			}
		}
		break
	}
	return loses
}

// displaceAudit takes away the oldest rows of an owner.
func (t *tx) displaceAudit(owner string, n int64) error {
	rows, err := t.all(sqlEmptyAudit, owner, n)
	if err != nil || len(rows) == 0 {
		return err
	}
	first, last := int64(math.MaxInt64), int64(0)
	for _, r := range rows {
		var seq int64
		if err := r.Scan(&seq); err != nil {
			return err
		}
		first, last = min(first, seq), max(last, seq)
	}
	_, err = t.exec(sqlJoinAudit, first, last)
	return err
}

// Audit returns rows, the newest first.
func (d *DB) Audit(ctx context.Context, q access.AuditQuery) ([]access.AuditRow, error) {
	where := []string{`operation <> ''`} // of others that were displaced the hash is left
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
	query := `SELECT ` + auditColumns + ` FROM audit WHERE ` + strings.Join(where, ` AND `)
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
		if check.OK && check.Displaced > 0 && check.Rows < d.auditKept { // not by us
			check.OK, check.BrokenAt, check.Detail = false, check.FirstDisplaced, "rows were emptied while there was room for them"
		}
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
