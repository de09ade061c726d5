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
	// ownerOfEntry is who has an entry's target. Rows of projects from before
	// owners were written into them have none: the project tells.
	ownerOfEntry = `CASE WHEN e.owner = '' AND e.scope = 'project' THEN coalesce((SELECT owner FROM projects WHERE id = e.target), '') ELSE e.owner END`

	// A key is written with its sender behind a tab, which neither a key nor one
	// written before senders were, nor a cancellation's, has.
	entryColumns = `e.number, e.scope, e.target, substr(e.key, 1, instr(e.key || char(9), char(9)) - 1), e.kind, e.at, e.amount, e.meter, e.quantity, e.book, e.note, e.actor, ` + ownerOfEntry + `, e.project,
		coalesce(e.cancels, 0), coalesce(e.made_at, 0), coalesce((SELECT c.number FROM entries c WHERE c.cancels = e.number), 0), e.beyond`
	sqlEntry         = `SELECT ` + entryColumns + ` FROM entries e WHERE e.scope = ?1 AND e.target = ?2 AND (e.key = ?3 || char(9) || ?4 OR e.key = ?3 AND e.actor = ?4)`
	sqlEntryNumbered = `SELECT ` + entryColumns + ` FROM entries e WHERE e.number = ?`
	sqlPutEntry      = `INSERT INTO entries (scope, target, key, kind, at, amount, meter, quantity, book, note, actor, owner, project, upto)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING number`
	sqlCancelEntry = `INSERT INTO entries (scope, target, key, kind, at, amount, meter, quantity, book, note, actor, owner, project, upto, cancels, made_at)
		SELECT scope, target, 'cancel ' || number, kind, at, -max(amount, -9223372036854775807), meter, -max(quantity, -9223372036854775807), book, ?2, ?3, owner, project, 0, number, ?4
		FROM entries WHERE number = ?1 RETURNING number`

	sqlOwnerOfProject = `SELECT owner FROM projects WHERE id = ?`

	ofOneTotal    = ` WHERE scope = ? AND target = ? AND kind = ? AND meter = ? AND book = ?`
	sqlEntryTotal = `SELECT amount, quantity FROM entry_totals` + ofOneTotal
	sqlPutTotal   = `INSERT INTO entry_totals (amount, quantity, scope, target, kind, meter, book) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
		ON CONFLICT DO UPDATE SET amount = ?1, quantity = ?2`

	// splitSums add up amounts and quantities in halves, which cannot overflow
	// as sum(amount) can; cost.SplitSum joins them.
	splitSums      = `sum(amount >> 32), sum(amount & 4294967295), sum(quantity >> 32), sum(quantity & 4294967295)`
	sqlSumOfTarget = `SELECT coalesce(sum(amount >> 32), 0), coalesce(sum(amount & 4294967295), 0), coalesce(sum(quantity >> 32), 0), coalesce(sum(quantity & 4294967295), 0)
		FROM entries` + ofOneTotal + ` AND NOT beyond`
)

// PutEntry takes an entry in, once for its key of its actor: existed reports
// that it was there. A quantity costs what the total of its target's with this book costs
// more than the one before, so that many small ones cost what one large one
// does. On disk when it returns.
//
// ErrConflict with code idempotency_mismatch; ErrNotFound for a sandbox nobody
// has heard of; ErrInvalid with code unknown_meter; ErrTooLarge with code
// entry_too_large or entries_too_large.
func (d *DB) PutEntry(ctx context.Context, e cost.Entry, book *cost.Book, actor string) (p cost.Posted, existed bool, err error) {
	if err := e.Validate(); err != nil {
		return p, false, err
	}
	err = d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil {
			return err
		}
		found, err := t.row(sqlEntry, string(e.Scope), e.ID, e.Key, actor)
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
		found, err := t.row(sqlOwnerOfProject, e.ID)
		if err == nil {
			err = found.Scan(&p.Owner)
		}
		if err != nil && !errors.Is(err, sql.ErrNoRows) { // operators may name one of another world
			return p, err
		}
	case cost.ScopeOwner:
		p.Owner = e.ID
	}
	if e.Meter != "" {
		if err := e.Check(book); err != nil {
			return p, err
		}
		p.Book = book.Version
	}
	amount, quantity, err := t.entryTotal(p)
	if err != nil {
		return p, err
	}
	upto, err := quantity.Add(e.Quantity)
	charged := cost.SumOf(e.Amount)
	if err == nil && e.Meter != "" { // counted on from the target's last one
		charged, err = book.Charge(e.Meter, quantity, upto)
	}
	if err == nil {
		err = cost.CheckCharge(charged)
	}
	if err == nil {
		err = cost.CheckEntries(amount.Add(charged), upto)
	}
	if err != nil {
		return p, err
	}
	p.Charged, _ = charged.Nano()
	more, _ := e.Quantity.Uint64() // within the bounds of an entry, as upto is in those of all
	counted, _ := upto.Uint64()
	n, err := t.number(sqlPutEntry, string(e.Scope), e.ID, e.Key+"\t"+actor, string(e.Kind), e.At.UnixMilli(), int64(p.Charged), string(e.Meter), int64(more), p.Book,
		e.Note, actor, p.Owner, p.Project, int64(counted))
	p.Number = int64(n)
	if err == nil {
		err = t.putEntryTotal(p, amount.Add(charged), upto)
	}
	return p, err
}

// entryTotal returns what the entries beside p come to, of the same target,
// kind, meter and book.
func (t *tx) entryTotal(p cost.Posted) (amount cost.Sum, quantity cost.Quantity, err error) {
	of := []any{string(p.Scope), p.ID, string(p.Kind), string(p.Meter), p.Book}
	found, err := t.row(sqlEntryTotal, of...)
	if err == nil {
		var sum, count string
		if err = found.Scan(&sum, &count); err != nil {
			return amount, quantity, err
		}
		return amount, quantity, errors.Join(amount.UnmarshalText([]byte(sum)), quantity.UnmarshalText([]byte(count)))
	}
	if errors.Is(err, sql.ErrNoRows) { // the first since there are totals
		if found, err = t.row(sqlSumOfTarget, of...); err == nil {
			amount, quantity, err = scanSums(found)
		}
	}
	return amount, quantity, err
}

func (t *tx) putEntryTotal(p cost.Posted, amount cost.Sum, quantity cost.Quantity) error {
	_, err := t.exec(sqlPutTotal, amount.String(), quantity.String(), string(p.Scope), p.ID, string(p.Kind), string(p.Meter), p.Book)
	return err
}

// scanSums reads splitSums, behind other columns.
func scanSums(row scanner, dest ...any) (amount cost.Sum, quantity cost.Quantity, err error) {
	var n [4]int64
	for i := range n {
		dest = append(dest, &n[i])
	}
	err = row.Scan(dest...)
	return cost.SplitSum(n[0], n[1]), cost.SplitSum(n[2], n[3]).Spent(), err
}

// Entry returns an entry by its number. ErrNotFound with code entry_not_found.
func (d *DB) Entry(ctx context.Context, number int64) (cost.Posted, error) {
	found, err := d.first(ctx, sqlEntryNumbered, number)
	if errors.Is(err, sql.ErrNoRows) {
		return cost.Posted{}, cost.EntryNotFound(number)
	}
	if err != nil {
		return cost.Posted{}, err
	}
	return scanEntry(found)
}

// CancelEntry writes the opposite of an entry, once: existed reports that it
// was cancelled before, and p is that cancellation. On disk when it returns.
// ErrNotFound; ErrConflict with code entry_is_cancellation.
func (d *DB) CancelEntry(ctx context.Context, number int64, reason, actor string, at time.Time) (p cost.Posted, existed bool, err error) {
	if err := cost.ValidateReason(reason); err != nil {
		return p, false, err
	}
	err = d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil {
			return err
		}
		e, err := t.entryNumbered(number)
		switch {
		case err != nil:
			return err
		case e.Cancels != 0:
			return sandbox.Errorf(sandbox.ErrConflict, "entry_is_cancellation", "entry %d cancels entry %d and cannot be cancelled: enter the amount anew", number, e.Cancels)
		case e.CancelledBy != 0:
			existed = true
			p, err = t.entryNumbered(e.CancelledBy)
			return err
		}
		amount, quantity, err := t.entryTotal(e)
		if err != nil {
			return err
		}
		n, err := t.number(sqlCancelEntry, number, reason, actor, at.UnixMilli())
		if err == nil && !e.Quarantined {
			err = t.putEntryTotal(e, amount.Sub(cost.SumOf(e.Charged)), quantity.Less(e.Quantity))
		}
		if err == nil {
			p, err = t.entryNumbered(int64(n))
		}
		return err
	})
	return p, existed, err
}

func (t *tx) entryNumbered(number int64) (cost.Posted, error) {
	found, err := t.row(sqlEntryNumbered, number)
	if errors.Is(err, sql.ErrNoRows) {
		return cost.Posted{}, cost.EntryNotFound(number)
	}
	if err != nil {
		return cost.Posted{}, err
	}
	return scanEntry(found)
}

func scanEntry(row scanner) (p cost.Posted, err error) {
	var scope, kind, meter string
	var at, amount, quantity, made, beyond int64
	err = row.Scan(&p.Number, &scope, &p.ID, &p.Key, &kind, &at, &amount, &meter, &quantity, &p.Book, &p.Note, &p.Actor, &p.Owner, &p.Project,
		&p.Cancels, &made, &p.CancelledBy, &beyond)
	p.Scope, p.Kind, p.Meter, p.At = cost.Scope(scope), cost.Kind(kind), cost.Meter(meter), time.UnixMilli(at).UTC()
	if made != 0 {
		p.MadeAt = time.UnixMilli(made).UTC()
	}
	if quantity < 0 { // of a cancellation, whose amount has the sign
		quantity = -max(quantity, -math.MaxInt64)
	}
	p.Charged, p.Quantity, p.Quarantined = cost.Nano(amount), cost.Count(uint64(quantity)), beyond != 0
	if p.Meter == "" {
		p.Amount = p.Charged
	}
	return p, err
}

// entriesWhere are the conditions for ?1 ≤ time < ?2, and a sandbox ?3, an owner
// ?4, a project ?5, a kind ?6 and an agent ?7, each if not empty.
func entriesWhere(q cost.EntryQuery) string {
	owner := only("e.owner", 4, q.Owner)
	if q.Owner != "" { // ownerOfEntry, by indexes
		owner = `(` + owner + ` OR e.owner = '' AND e.scope = 'project' AND e.target IN (SELECT id FROM projects WHERE owner = ?4))`
	}
	where := `e.at >= ?1 AND e.at < ?2 AND ` + only("e.target", 3, q.Sandbox) + ` AND ` + owner + ` AND ` +
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
	Amount   cost.Sum
	Quantity cost.Quantity
}

// EntrySums adds entries up by a key as UsageReport's, without those in
// quarantine. Those of a project or an owner are of no sandbox, image or label.
func (d *DB) EntrySums(ctx context.Context, by string, q cost.EntryQuery) ([]EntrySum, error) {
	key, label, err := entryKey(by)
	if err != nil {
		return nil, err
	}
	rows, err := d.reader.QueryContext(ctx, `SELECT `+key+` AS k, e.kind, e.book, e.meter, `+splitSums+`
		FROM entries e LEFT JOIN ledger l ON e.scope = 'sandbox' AND l.sandbox = e.target
		WHERE NOT e.beyond AND `+entriesWhere(q)+` AND ?8 IS NOT NULL GROUP BY k, e.kind, e.book, e.meter`, append(entriesArgs(q), label)...)
	if err != nil {
		return nil, fmt.Errorf("adding up entries: %w", translate(err))
	}
	all, err := drain(rows, func(row scanner) (s EntrySum, err error) {
		var kind, meter string
		s.Amount, s.Quantity, err = scanSums(row, &s.Key, &kind, &s.Book, &meter)
		s.Kind, s.Meter = cost.Kind(kind), cost.Meter(meter)
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
	rows, err := d.reader.QueryContext(ctx, `SELECT `+key+` AS k, e.meter, sum(CASE WHEN e.at < ?9 THEN e.quantity >> 32 ELSE 0 END), sum(CASE WHEN e.at < ?9 THEN e.quantity & 4294967295 ELSE 0 END),
		sum(e.quantity >> 32), sum(e.quantity & 4294967295)
		FROM entries e LEFT JOIN ledger l ON e.scope = 'sandbox' AND l.sandbox = e.target
		WHERE e.meter <> '' AND NOT e.beyond AND `+entriesWhere(q)+` AND ?8 IS NOT NULL GROUP BY e.scope, e.target, e.meter`, append(entriesArgs(q), label, from)...)
	if err != nil {
		return nil, fmt.Errorf("adding up entries: %w", translate(err))
	}
	all, err := drain(rows, func(row scanner) (v Metered, err error) {
		var meter string
		before, upto, err := scanSums(row, &v.Key, &meter)
		v.Meter, v.Before, v.Upto = cost.Meter(meter), before.Spent(), upto
		return v, err
	})
	return all, translate(err)
}

// maxQuarantined is how many entries in quarantine are listed.
const maxQuarantined = 100

// Quarantined lists entries beyond the bounds of an entry that nobody has
// cancelled, the oldest first, at most 100: no sum has them.
func (d *DB) Quarantined(ctx context.Context, q cost.EntryQuery) ([]cost.Posted, error) {
	rows, err := d.reader.QueryContext(ctx, `SELECT `+entryColumns+` FROM entries e INDEXED BY entries_beyond WHERE e.beyond AND e.cancels IS NULL
		AND NOT EXISTS (SELECT 1 FROM entries c WHERE c.cancels = e.number) AND `+entriesWhere(q)+` ORDER BY e.number LIMIT ?8`, append(entriesArgs(q), maxQuarantined)...)
	if err != nil {
		return nil, translate(err)
	}
	all, err := drain(rows, scanEntry)
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
	case by == "owner":
		return ownerOfEntry, "", nil
	case by == "":
		return `''`, "", nil
	}
	return `e.` + by, "", nil // project
}
