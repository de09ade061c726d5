package state

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"

	"github.com/mattn/go-sqlite3"
)

// conn is a connection spoken to below database/sql, which would spend a
// goroutine, locks and reflection on every statement of a transaction: more
// than SQLite itself takes for it. One goroutine at a time uses it.
type conn struct {
	lite  *sqlite3.SQLiteConn
	stmts map[string]*stmt
	args  []driver.NamedValue // of the statement being run
}

type stmt struct {
	*sqlite3.SQLiteStmt
	columns int // of a row; -1 until the first
}

// beneath returns what is under a connection of database/sql, with queries
// prepared. It is used within Raw only, and closed before the connection.
func beneath(above *sql.Conn, queries []string) (c *conn, err error) {
	err = above.Raw(func(driverConn any) error {
		c, err = newConn(driverConn, queries)
		return err
	})
	return c, err
}

func newConn(driverConn any, queries []string) (*conn, error) {
	lite, ok := driverConn.(*sqlite3.SQLiteConn)
	if !ok {
		return nil, fmt.Errorf("the connection is a %T, not one of SQLite", driverConn)
	}
	c := &conn{lite: lite, stmts: map[string]*stmt{}}
	for _, q := range queries {
		if err := c.prepare(q); err != nil {
			return nil, errors.Join(err, c.close())
		}
	}
	return c, nil
}

func (c *conn) prepare(query string) error {
	prepared, err := c.lite.Prepare(query)
	if err != nil {
		return fmt.Errorf("preparing %.60q: %w", query, err)
	}
	s, ok := prepared.(*sqlite3.SQLiteStmt)
	if !ok {
		return fmt.Errorf("preparing %.60q: a %T is no statement of SQLite", query, prepared)
	}
	c.stmts[query] = &stmt{SQLiteStmt: s, columns: -1}
	return nil
}

// close ends the statements; the connection is its owner's.
func (c *conn) close() error {
	var errs []error
	for _, s := range c.stmts {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}

// find returns a prepared statement and its bound form of args.
func (c *conn) find(query string, args []any) (*stmt, []driver.NamedValue, error) {
	s := c.stmts[query]
	if s == nil {
		if err := c.prepare(query); err != nil {
			return nil, nil, err
		}
		s = c.stmts[query]
	}
	c.args = c.args[:0]
	for i, a := range args {
		switch v := a.(type) { // the driver knows one kind of integer
		case int:
			a = int64(v)
		case uint32:
			a = int64(v)
		}
		c.args = append(c.args, driver.NamedValue{Ordinal: i + 1, Value: a})
	}
	return s, c.args, nil
}

// exec runs a statement and returns what it did. It cannot be interrupted:
// what this package runs is short.
func (c *conn) exec(query string, args ...any) (driver.Result, error) {
	s, bound, err := c.find(query, args)
	if err != nil {
		return nil, err
	}
	return s.ExecContext(context.Background(), bound)
}

// changed is exec for who needs to know whether it changed a row.
func (c *conn) changed(query string, args ...any) (bool, error) {
	res, err := c.exec(query, args...)
	if err != nil {
		return false, err
	}
	n, err := res.RowsAffected()
	return n > 0, err
}

// row returns the first row of a query's result, sql.ErrNoRows where there is
// none. It runs the statement to its end, as one that writes must.
func (c *conn) row(query string, args ...any) (record, error) {
	s, bound, err := c.find(query, args)
	if err != nil {
		return nil, err
	}
	rows, err := s.QueryContext(context.Background(), bound)
	if err != nil {
		return nil, err
	}
	if s.columns < 0 {
		s.columns = len(rows.Columns())
	}
	first := make(record, s.columns)
	err = rows.Next(first)
	for more := err; more == nil; {
		if more = rows.Next(nil); more != nil && !errors.Is(more, io.EOF) {
			err = more
		}
	}
	if errors.Is(err, io.EOF) {
		err = sql.ErrNoRows
	}
	return first, errors.Join(err, rows.Close())
}

// record is a row as the driver gives it, a scanner for the types this
// package reads.
type record []driver.Value

func (r record) Scan(dest ...any) error {
	if len(dest) != len(r) {
		return fmt.Errorf("a row has %d columns, not %d", len(r), len(dest))
	}
	for i, d := range dest {
		if !assign(d, r[i]) {
			return fmt.Errorf("column %d: a %T does not go into a %T", i+1, r[i], d)
		}
	}
	return nil
}

// assign reports whether it could set what d points to.
func assign(d any, v driver.Value) (ok bool) {
	var n int64
	switch d := d.(type) {
	case *string:
		*d, ok = v.(string)
	case *int64:
		*d, ok = v.(int64)
	case *int:
		n, ok = v.(int64)
		*d = int(n)
	case *uint32:
		n, ok = v.(int64)
		*d = uint32(n)
	case *sql.NullInt64:
		d.Int64, d.Valid = v.(int64)
		ok = d.Valid || v == nil
	case *[]byte:
		switch v := v.(type) {
		case nil:
			*d, ok = nil, true
		case []byte:
			*d, ok = v, true
		case string:
			*d, ok = []byte(v), true
		}
	}
	return ok
}
