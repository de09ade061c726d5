package state

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TotalsQuery asks what each sandbox that existed in [From, To) had used at
// some times.
type TotalsQuery struct {
	Times    []time.Time
	From, To time.Time // zero: the beginning, and no end
	By       string    // as UsageQuery has it
	Sandbox  string    // of this one only, if set
	Owner    string
	Project  string
	Agent    string // its cost.AgentLabel
}

// agentOf is the agent that a ledger row's sandbox is of.
const agentOf = `l.labels ->> '$.` + cost.AgentLabel + `'`

// Totals are what one sandbox had used at the times of the query.
type Totals struct {
	Sandbox sandbox.ID
	Key     string
	EndedAt time.Time // zero of one that lives
	At      []sandbox.Meters
}

// Totals answers with f(T) of UsageReport for each sandbox and time, all of one
// moment of the database. ErrInvalid with code invalid_report.
func (d *DB) Totals(ctx context.Context, q TotalsQuery) ([]Totals, error) {
	key, label, err := reportKey(q.By)
	if err != nil {
		return nil, err
	}
	// With a context that can end, the driver spends a goroutine on each row.
	ctx = context.WithoutCancel(ctx)
	t, err := d.reader.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
	if err != nil {
		return nil, translate(err)
	}
	defer func() { _ = t.Rollback() }()
	from, to := int64(0), int64(math.MaxInt64/2)
	if !q.From.IsZero() {
		from = q.From.UnixMilli()
	}
	if !q.To.IsZero() {
		to = q.To.UnixMilli()
	}
	filter := []any{from, to, label, q.Sandbox, q.Owner, q.Project, q.Agent}
	out, places, err := q.list(ctx, t, key, filter)
	if err != nil {
		return nil, fmt.Errorf("reading what sandboxes used: %w", translate(err))
	}
	query := q.at()
	for i, at := range q.Times {
		rows, err := t.QueryContext(ctx, query, append([]any{at.UnixMilli()}, filter...)...)
		if err == nil {
			_, err = drain(rows, func(row scanner) (struct{}, error) {
				var number int64
				var v [sandbox.MeterCount]int64
				dest := []any{&number}
				for j := range v {
					dest = append(dest, &v[j])
				}
				err := row.Scan(dest...)
				if place, ok := places[number]; ok {
					out[place].At[i] = sandbox.MetersOf(v)
				}
				return struct{}{}, err
			})
		}
		if err != nil {
			return nil, fmt.Errorf("reading what sandboxes used: %w", translate(err))
		}
	}
	return out, nil
}

// only is the condition that a column is what parameter n holds, or none where
// that is empty: so that an index can be used, and every parameter is.
func only(column string, n int, value string) string {
	if value == "" {
		return fmt.Sprintf("?%d IS NOT NULL", n)
	}
	return fmt.Sprintf("%s = ?%d", column, n)
}

// existed are the conditions for ?1 ≤ time < ?2 and the filters, shifted by n
// parameters. The label ?3 is the key's.
func (q TotalsQuery) existed(n int) string {
	return fmt.Sprintf(`l.created_at < ?%d AND (l.ended_at IS NULL OR l.ended_at >= ?%d) AND ?%d IS NOT NULL AND `, 2+n, 1+n, 3+n) +
		only("l.sandbox", 4+n, q.Sandbox) + ` AND ` + only("l.owner", 5+n, q.Owner) + ` AND ` + only("l.project", 6+n, q.Project) + ` AND ` + only(agentOf, 7+n, q.Agent)
}

// list lists the sandboxes, and where each number stands in the list.
func (q TotalsQuery) list(ctx context.Context, t *sql.Tx, key string, filter []any) ([]Totals, map[int64]int, error) {
	rows, err := t.QueryContext(ctx, `SELECT l.number, l.sandbox, `+key+`, coalesce(l.ended_at, 0) FROM ledger l WHERE `+q.existed(0), filter...)
	if err != nil {
		return nil, nil, err
	}
	places := map[int64]int{}
	out, err := drain(rows, func(row scanner) (Totals, error) {
		var number int64
		var id string
		v := Totals{At: make([]sandbox.Meters, len(q.Times))}
		var ended int64
		err := row.Scan(&number, &id, &v.Key, &ended)
		if ended != 0 {
			v.EndedAt = time.UnixMilli(ended)
		}
		v.Sandbox = sandbox.ID(id)
		places[number] = len(places)
		return v, err
	})
	return out, places, err
}

// at is the query for f(?1) of those that existed then.
func (q TotalsQuery) at() string {
	var values strings.Builder
	for _, c := range meterColumns {
		fmt.Fprintf(&values, ",\n\t%s", until("a", "b", "?1", c))
	}
	return `SELECT l.number` + values.String() + `
	FROM ledger l
	LEFT JOIN readings a ON a.ledger = l.number AND a.at = (SELECT max(at) FROM readings WHERE ledger = l.number AND at <= ?1)
	LEFT JOIN readings b ON b.ledger = l.number AND b.at = (SELECT min(at) FROM readings WHERE ledger = l.number AND at > ?1)
	WHERE l.created_at < ?1 AND ` + q.existed(1)
}

// OwnerOf returns who has a sandbox, living or pruned, and its project.
// ErrNotFound.
func (d *DB) OwnerOf(ctx context.Context, id sandbox.ID) (owner, project string, err error) {
	var agent string
	found, err := d.first(ctx, sqlOwnerOf, string(id))
	if errors.Is(err, sql.ErrNoRows) {
		return "", "", notFound(id)
	}
	if err == nil {
		err = found.Scan(&owner, &project, &agent)
	}
	return owner, project, err
}

const sqlOwnerOf = `SELECT ` + sqlPayer + `, coalesce(spec ->> '$.project', ''), coalesce(spec ->> '$.labels.` + cost.AgentLabel + `', '') FROM sandboxes WHERE id = ?1
	UNION ALL SELECT l.owner, l.project, coalesce(` + agentOf + `, '') FROM ledger l WHERE l.sandbox = ?1 LIMIT 1`
