package state

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	entryColumns = `number, scope, target, key, kind, at, amount, meter, quantity, book, note, actor, owner, project`
	sqlEntry     = `SELECT ` + entryColumns + ` FROM entries WHERE scope = ? AND target = ? AND key = ?`
	sqlUpTo      = `SELECT upto FROM entries WHERE scope = ? AND target = ? AND meter = ? AND book = ? AND meter <> '' ORDER BY number DESC LIMIT 1`
	sqlPutEntry  = `INSERT INTO entries (scope, target, key, kind, at, amount, meter, quantity, book, note, actor, owner, project, upto)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING number`
)

// PutEntry takes an entry in, once for its key: existed reports that it was
// there. A quantity costs what the total of its target's with this book costs
// more than the one before, so that many small ones cost what one large one
// does. On disk when it returns.
//
// ErrConflict with code idempotency_mismatch; ErrNotFound for a sandbox nobody
// has heard of; ErrInvalid with code unknown_meter; ErrTooLarge.
func (d *DB) PutEntry(ctx context.Context, e cost.Entry, book *cost.Book, actor string) (p cost.Posted, existed bool, err error) {
	if err := e.Validate(); err != nil {
		return p, false, err
	}
	err = d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil {
			return err
		}
		found, err := t.row(sqlEntry, string(e.Scope), e.ID, e.Key)
		if err == nil {
			if p, err = scanEntry(found); err == nil {
				existed = true
				err = e.Repeats(p.Entry)
			}
			return err
		}
		if !errors.Is(err, sql.ErrNoRows) {
			return err
		}
		p, err = t.post(e, book, actor)
		return err
	})
	if err != nil {
		return cost.Posted{}, false, err
	}
	return p, existed, nil
}

// post writes a new entry.
func (t *tx) post(e cost.Entry, book *cost.Book, actor string) (p cost.Posted, err error) {
	e.At = e.At.UTC().Truncate(time.Millisecond)
	p = cost.Posted{Entry: e, Charged: e.Amount, Actor: actor}
	switch e.Scope {
	case cost.ScopeSandbox:
		found, err := t.row(sqlOwnerOf, e.ID)
		if errors.Is(err, sql.ErrNoRows) {
			return p, notFound(e.ID)
		}
		if err == nil {
			err = found.Scan(&p.Owner, &p.Project, &p.Agent)
		}
		if err != nil {
			return p, err
		}
	case cost.ScopeProject:
		p.Project = e.ID
	case cost.ScopeOwner:
		p.Owner = e.ID
	}
	var upto, quantity int64
	if e.Meter != "" {
		if err := e.Check(book); err != nil {
			return p, err
		}
		p.Book = book.Version
		if upto, quantity, p.Charged, err = t.charge(e, book); err != nil {
			return p, err
		}
	}
	n, err := t.number(sqlPutEntry, string(e.Scope), e.ID, e.Key, string(e.Kind), e.At.UnixMilli(), int64(p.Charged), string(e.Meter), quantity, p.Book,
		e.Note, actor, p.Owner, p.Project, upto)
	p.Number = int64(n)
	return p, err
}

// charge prices a quantity, counted on from the target's last one.
func (t *tx) charge(e cost.Entry, book *cost.Book) (upto, quantity int64, amount cost.Nano, err error) {
	found, err := t.row(sqlUpTo, string(e.Scope), e.ID, string(e.Meter), book.Version)
	if err == nil {
		err = found.Scan(&upto)
	}
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return 0, 0, 0, err
	}
	n, fits := e.Quantity.Uint64()
	if !fits || n > math.MaxInt64-uint64(upto) {
		return 0, 0, 0, sandbox.Errorf(sandbox.ErrTooLarge, "quantity_too_large", "%s of %s: all entries of one target together must stay below 2^63", e.Quantity, e.Meter)
	}
	before := cost.Count(uint64(upto))
	upto += int64(n)
	amount, err = book.Charge(e.Meter, before, cost.Count(uint64(upto)))
	return upto, int64(n), amount, err
}

func scanEntry(row scanner) (p cost.Posted, err error) {
	var scope, kind, meter string
	var at, amount, quantity int64
	err = row.Scan(&p.Number, &scope, &p.ID, &p.Key, &kind, &at, &amount, &meter, &quantity, &p.Book, &p.Note, &p.Actor, &p.Owner, &p.Project)
	p.Scope, p.Kind, p.Meter, p.At = cost.Scope(scope), cost.Kind(kind), cost.Meter(meter), time.UnixMilli(at).UTC()
	p.Charged, p.Quantity = cost.Nano(amount), cost.Count(uint64(max(quantity, 0)))
	if p.Meter == "" {
		p.Amount = p.Charged
	}
	return p, err
}

// entriesWhere are the conditions for ?1 ≤ time < ?2, and a sandbox ?3, an owner
// ?4, a project ?5, a kind ?6 and an agent ?7, each if not empty.
func entriesWhere(q cost.EntryQuery) string {
	where := `e.at >= ?1 AND e.at < ?2 AND ` + only("e.target", 3, q.Sandbox) + ` AND ` + only("e.owner", 4, q.Owner) + ` AND ` +
		only("e.project", 5, q.Project) + ` AND ` + only("e.kind", 6, string(q.Kind)) + ` AND ` +
		only(`(SELECT `+agentOf+` FROM ledger l WHERE e.scope = 'sandbox' AND l.sandbox = e.target)`, 7, q.Agent)
	if q.Sandbox != "" {
		where += ` AND e.scope = 'sandbox'`
	}
	return where
}

func entriesArgs(q cost.EntryQuery) []any {
	from, to := int64(0), int64(math.MaxInt64)
	if !q.From.IsZero() {
		from = q.From.UnixMilli()
	}
	if !q.To.IsZero() {
		to = q.To.UnixMilli()
	}
	return []any{from, to, q.Sandbox, q.Owner, q.Project, string(q.Kind), q.Agent}
}

// Entries lists entries, the newest first, before the number q.Before if that
// is not 0.
func (d *DB) Entries(ctx context.Context, q cost.EntryQuery) ([]cost.Posted, error) {
	rows, err := d.reader.QueryContext(ctx, `SELECT `+entryColumns+` FROM entries e WHERE `+entriesWhere(q)+`
		AND (?8 = 0 OR e.number < ?8) ORDER BY e.number DESC LIMIT ?9`, append(entriesArgs(q), q.Before, q.Limit)...)
	if err != nil {
		return nil, translate(err)
	}
	all, err := drain(rows, scanEntry)
	return all, translate(err)
}

// EntrySum is what entries with one key, kind, book and meter come to.
type EntrySum struct {
	Key      string
	Kind     cost.Kind
	Book     string
	Meter    cost.Meter
	Amount   cost.Nano
	Quantity cost.Quantity
}

// EntrySums adds entries up by a key as UsageReport's. Those of a project or
// an owner are of no sandbox, image or label.
func (d *DB) EntrySums(ctx context.Context, by string, q cost.EntryQuery) ([]EntrySum, error) {
	key, label, err := entryKey(by)
	if err != nil {
		return nil, err
	}
	rows, err := d.reader.QueryContext(ctx, `SELECT `+key+` AS k, e.kind, e.book, e.meter, sum(e.amount), sum(e.quantity)
		FROM entries e LEFT JOIN ledger l ON e.scope = 'sandbox' AND l.sandbox = e.target
		WHERE `+entriesWhere(q)+` AND ?8 IS NOT NULL GROUP BY k, e.kind, e.book, e.meter`, append(entriesArgs(q), label)...)
	if err != nil {
		return nil, fmt.Errorf("adding up entries: %w", translate(err))
	}
	all, err := drain(rows, func(row scanner) (s EntrySum, err error) {
		var kind, meter string
		var amount, quantity int64
		err = row.Scan(&s.Key, &kind, &s.Book, &meter, &amount, &quantity)
		s.Kind, s.Meter, s.Amount, s.Quantity = cost.Kind(kind), cost.Meter(meter), cost.Nano(amount), cost.Count(uint64(max(quantity, 0)))
		return s, err
	})
	return all, translate(err)
}

// Metered is what one target has used of a custom meter at two times.
type Metered struct {
	Key          string
	Meter        cost.Meter
	Before, Upto cost.Quantity
}

// MeteredEntries tells for each target and custom meter the quantities entered
// before q.From and before q.To, for rating them anew.
func (d *DB) MeteredEntries(ctx context.Context, by string, q cost.EntryQuery) ([]Metered, error) {
	key, label, err := entryKey(by)
	if err != nil {
		return nil, err
	}
	from := int64(0)
	if !q.From.IsZero() {
		from = q.From.UnixMilli()
	}
	q.From = time.Time{}
	rows, err := d.reader.QueryContext(ctx, `SELECT `+key+` AS k, e.meter, sum(CASE WHEN e.at < ?9 THEN e.quantity ELSE 0 END), sum(e.quantity)
		FROM entries e LEFT JOIN ledger l ON e.scope = 'sandbox' AND l.sandbox = e.target
		WHERE e.meter <> '' AND `+entriesWhere(q)+` AND ?8 IS NOT NULL GROUP BY e.scope, e.target, e.meter`, append(entriesArgs(q), label, from)...)
	if err != nil {
		return nil, fmt.Errorf("adding up entries: %w", translate(err))
	}
	all, err := drain(rows, func(row scanner) (v Metered, err error) {
		var meter string
		var before, upto int64
		err = row.Scan(&v.Key, &meter, &before, &upto)
		v.Meter, v.Before, v.Upto = cost.Meter(meter), cost.Count(uint64(max(before, 0))), cost.Count(uint64(max(upto, 0)))
		return v, err
	})
	return all, translate(err)
}

// entryKey is reportKey for entries; the label is ?8.
func entryKey(by string) (expr, label string, err error) {
	_, label, err = reportKey(by)
	switch {
	case err != nil:
		return "", "", err
	case label != "":
		return `coalesce((SELECT value FROM json_each(l.labels) WHERE key = ?8), '')`, label, nil
	case by == "sandbox":
		return `CASE e.scope WHEN 'sandbox' THEN e.target ELSE '' END`, "", nil
	case by == "image":
		return `coalesce(l.image, '')`, "", nil
	case by == "":
		return `''`, "", nil
	}
	return `e.` + by, "", nil // owner, project
}
