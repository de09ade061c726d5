package state

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	sqlBudgetOf  = `SELECT id, scope, target, meter, period, record, mark FROM budgets WHERE scope = ? AND target = ? AND meter = ? AND period = ?`
	sqlPutBudget = `INSERT INTO budgets (id, scope, target, meter, period, record) VALUES (?1, ?2, ?3, ?4, ?5, ?6)
		ON CONFLICT (id) DO UPDATE SET record = ?6`
	sqlBudgets      = `SELECT id, scope, target, meter, period, record, mark FROM budgets ORDER BY id`
	sqlKeepMark     = `UPDATE budgets SET mark = ?2 WHERE id = ?1`
	sqlDeleteBudget = `DELETE FROM budgets WHERE id = ?`
)

// BudgetRow is a budget and what it has done.
type BudgetRow struct {
	cost.StoredBudget
	Mark cost.Mark
	Err  error // the row cannot be read: only its key, target, meter and period are known
}

func budgetNotFound(key string) error {
	return sandbox.Errorf(sandbox.ErrNotFound, "budget_not_found", "no budget %.40q: 'sandbox budget ls' shows those there are", key)
}

// PutBudget sets a budget. Where its target has one for the same meter and
// period, that one's id, and what it has done, stay. On disk when it returns.
func (d *DB) PutBudget(ctx context.Context, b cost.StoredBudget) (row BudgetRow, err error) {
	err = d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil {
			return err
		}
		row = BudgetRow{StoredBudget: b}
		found, err := t.row(sqlBudgetOf, string(b.Scope), b.ID, string(b.Meter), string(b.Period))
		if err == nil {
			var before BudgetRow
			if before, err = scanBudget(found); err == nil {
				row.Key, row.CreatedAt, row.Mark = before.Key, before.CreatedAt, before.Mark
			}
		}
		if err != nil && !errors.Is(err, sql.ErrNoRows) {
			return err
		}
		record, err := toJSON(row.StoredBudget)
		if err == nil {
			_, err = t.exec(sqlPutBudget, row.Key, string(b.Scope), b.ID, string(b.Meter), string(b.Period), record)
		}
		return err
	})
	return row, err
}

// Budgets lists all budgets.
func (d *DB) Budgets(ctx context.Context) ([]BudgetRow, error) {
	rows, err := d.reader.QueryContext(ctx, sqlBudgets)
	if err != nil {
		return nil, translate(err)
	}
	all, err := drain(rows, scanBudget)
	return all, translate(err)
}

// KeepMark notes what a budget has done, and the events of that, in one
// transaction. A budget that was removed meanwhile stays so.
func (d *DB) KeepMark(ctx context.Context, key string, m cost.Mark, events ...sandbox.Event) error {
	mark, err := toJSON(m)
	if err != nil {
		return err
	}
	return d.write(ctx, func(t *tx) error {
		ok, err := t.changed(sqlKeepMark, key, mark)
		if err != nil || !ok || len(events) == 0 {
			return err
		}
		_, err = t.appendEvents(events...)
		return err
	})
}

// DeleteBudget removes a budget. ErrNotFound.
func (d *DB) DeleteBudget(ctx context.Context, key string) error {
	return d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil {
			return err
		}
		ok, err := t.changed(sqlDeleteBudget, key)
		if err == nil && !ok {
			err = budgetNotFound(key)
		}
		return err
	})
}

// scanBudget reads a row. One that says nothing, or nothing valid, is told in
// its Err: it must not keep others from being read.
func scanBudget(row scanner) (b BudgetRow, err error) {
	var record, mark []byte
	var key, scope, target, meter, period string
	if err := row.Scan(&key, &scope, &target, &meter, &period, &record, &mark); err != nil {
		return b, err
	}
	if b.Err = errors.Join(json.Unmarshal(record, &b.StoredBudget), json.Unmarshal(mark, &b.Mark)); b.Err == nil && len(b.At) == 0 {
		b.Err = errors.New("it has no thresholds")
	}
	if b.Err != nil {
		b.Err = sandbox.Errorf(sandbox.ErrConflict, "budget_unreadable", "its record in the database is damaged: set it anew, or remove it: %w", b.Err)
		b.Mark, b.At = cost.Mark{}, cost.DefaultThresholds()
	}
	b.Key, b.Scope, b.ID, b.Meter, b.Period = key, cost.Scope(scope), target, cost.Meter(meter), cost.Period(period)
	return b, nil
}
