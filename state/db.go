package state

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"sync"

	"github.com/mattn/go-sqlite3"

	"github.com/sandboxd/sandboxd/sandbox"
)

// DB is the open database. Its methods may be called at the same time.
type DB struct {
	writer *sql.DB // one connection; use only through write
	reader *sql.DB
	turn   chan struct{} // one token: the right to write
	stmts  map[string]*sql.Stmt
	reads  map[string]*sql.Stmt

	mu        sync.Mutex
	followers map[chan struct{}]bool
}

// Open opens the database, makes it where missing, and brings its schema up
// to date. ErrUnsupported where the linked SQLite is too old or the file was
// written by a newer daemon.
func Open(ctx context.Context, path string) (*DB, error) {
	if _, number, _ := sqlite3.Version(); !versionOK(number) {
		return nil, sandbox.Errorf(sandbox.ErrUnsupported, "sqlite_version",
			"SQLite %s can corrupt a database in WAL mode: build with 3.51.3, or 3.53.0 and later", versionString(number))
	}
	// SQLite gives its -wal and -shm files the mode of the database.
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening the database: %w", err)
	}
	if err := f.Close(); err != nil {
		return nil, fmt.Errorf("opening the database: %w", err)
	}
	d := &DB{turn: make(chan struct{}, 1), followers: map[chan struct{}]bool{}}
	if err := d.connect(path); err != nil {
		return nil, err
	}
	if err := d.prepare(ctx); err != nil {
		_ = d.closeAll()
		return nil, fmt.Errorf("opening the database %s: %w", path, translate(err))
	}
	return d, nil
}

// versionOK reports whether a SQLite of this number (3051003 for 3.51.3) is
// free of the bug in the reset of the write-ahead log: mended in 3.51.3 and
// 3.53.0, and not in what came between.
func versionOK(number int) bool {
	return number >= 3053000 || number >= 3051003 && number < 3052000
}

func versionString(n int) string { return fmt.Sprintf("%d.%d.%d", n/1_000_000, n/1000%1000, n%1000) }

// dsn names the file with the settings every connection must have: a pragma
// set later would hold for one pooled connection only.
func dsn(path string, readOnly bool) (string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	q := url.Values{
		"_journal_mode": {"WAL"},
		"_synchronous":  {"FULL"},
		"_foreign_keys": {"on"},
		"_busy_timeout": {"5000"},
		"_txlock":       {"immediate"}, // a deferred one can fail half-way as busy
	}
	if readOnly {
		q.Set("_query_only", "true")
		q.Set("_txlock", "deferred")
	}
	u := url.URL{Scheme: "file", Path: abs, RawQuery: q.Encode()}
	return u.String(), nil
}

func (d *DB) connect(path string) error {
	for _, side := range []struct {
		db          **sql.DB
		readOnly    bool
		connections int
	}{
		{&d.writer, false, 1},
		{&d.reader, true, max(4, runtime.NumCPU())},
	} {
		name, err := dsn(path, side.readOnly)
		if err != nil {
			return fmt.Errorf("opening the database: %w", err)
		}
		db, err := sql.Open("sqlite3", name)
		if err != nil {
			return fmt.Errorf("opening the database %s: %w", path, err)
		}
		db.SetMaxOpenConns(side.connections)
		db.SetMaxIdleConns(side.connections)
		*side.db = db
	}
	return nil
}

func (d *DB) prepare(ctx context.Context) error {
	var mode string
	if err := d.writer.QueryRowContext(ctx, `PRAGMA journal_mode`).Scan(&mode); err != nil {
		return err
	}
	if mode != "wal" {
		return fmt.Errorf("journal mode is %q, not wal: the file system may not support shared memory", mode)
	}
	if err := migrate(ctx, d.writer, migrations()); err != nil {
		return err
	}
	var err error
	if d.stmts, err = prepareAll(ctx, d.writer, writeStatements()); err != nil {
		return err
	}
	d.reads, err = prepareAll(ctx, d.reader, readStatements())
	return err
}

func prepareAll(ctx context.Context, db *sql.DB, queries []string) (map[string]*sql.Stmt, error) {
	all := map[string]*sql.Stmt{}
	for _, q := range queries {
		s, err := db.PrepareContext(ctx, q)
		if err != nil {
			return nil, fmt.Errorf("preparing %.60q: %w", q, err)
		}
		all[q] = s
	}
	return all, nil
}

// Close ends the connections; the last one folds the log into the database.
func (d *DB) Close() error {
	d.turn <- struct{}{} // never given back
	return translate(d.closeAll())
}

func (d *DB) closeAll() error {
	// The reader first: the last connection checkpoints, and only a writer can.
	return errors.Join(d.reader.Close(), d.writer.Close())
}

// tx is one write transaction.
type tx struct {
	*sql.Tx
	db *DB
	// event is set when the transaction wrote an event.
	event bool
}

// stmt returns the prepared form of a query of writeStatements.
func (t *tx) stmt(ctx context.Context, query string) *sql.Stmt {
	return t.StmtContext(ctx, t.db.stmts[query])
}

// write runs f in a transaction of its own and commits it. ctx bounds the
// wait for the turn; once begun, the transaction is short and runs to its
// end, so that a cancelled caller is never in doubt for long and no commit is
// interrupted. Every write of the package goes through here.
func (d *DB) write(ctx context.Context, f func(ctx context.Context, t *tx) error) error {
	select {
	case d.turn <- struct{}{}:
	case <-ctx.Done():
		return translate(ctx.Err())
	}
	wrote, err := d.transact(context.WithoutCancel(ctx), f)
	<-d.turn
	if err == nil && wrote {
		d.notify()
	}
	return translate(err)
}

func (d *DB) transact(ctx context.Context, f func(ctx context.Context, t *tx) error) (event bool, err error) {
	begun, err := d.writer.BeginTx(ctx, nil)
	if err != nil {
		return false, err
	}
	t := &tx{Tx: begun, db: d}
	if err := f(ctx, t); err != nil {
		return false, errors.Join(err, t.Rollback())
	}
	return t.event, t.Commit()
}

// Subscribe returns a channel that gets a token after new events were
// committed; tokens merge while nobody takes them. cancel ends it and may be
// called twice.
func (d *DB) Subscribe() (events <-chan struct{}, cancel func()) {
	c := make(chan struct{}, 1)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.followers[c] = true
	return c, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.followers, c)
	}
}

func (d *DB) notify() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for c := range d.followers {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}
