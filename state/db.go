package state

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/mattn/go-sqlite3"

	"github.com/sandboxd/sandboxd/sandbox"
)

// DB is the open database. Its methods may be called at the same time.
type DB struct {
	pool   *sql.DB       // of the writer alone
	writer *sql.Conn     // use only through write
	conn   *conn         // the same, below database/sql
	turn   chan struct{} // one token: the right to write
	reader *sql.DB
	reads  map[string]*sql.Stmt
	quick  struct { // a reader, see first
		mu   sync.Mutex
		conn *sql.Conn
		low  *conn // the same, below database/sql
	}
	log    *os.File       // SQLite's write-ahead log
	full   chan struct{}  // asks for a checkpoint
	folded sync.WaitGroup // the checkpoints
	disk   *disk

	path    string
	ballast atomic.Pointer[ballast] // nil: none is kept
	closing chan struct{}

	installation Installation
	patient      patient
	auditKept    int64 // rows

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
	_, err = os.Lstat(path + "-wal")
	unclean := err == nil // a clean end takes the log away
	if unclean {
		if err := keepLog(path); err != nil {
			return nil, fmt.Errorf("opening the database: %w", err)
		}
	}
	d := &DB{turn: make(chan struct{}, 1), followers: map[chan struct{}]bool{}, auditKept: keptAudit, path: path, closing: make(chan struct{})}
	if err := d.connect(path); err != nil {
		return nil, err
	}
	if err := d.prepare(ctx, path, unclean); err != nil {
		_ = d.closeAll()
		return nil, fmt.Errorf("opening the database %s: %w", path, translate(err))
	}
	d.full = make(chan struct{}, 1)
	d.folded.Go(d.checkpoints)
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
		"_synchronous":  {"NORMAL"}, // see disk
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

// chunk is what the database's file grows by. Its end is room for what lies in
// the log: on a full disk the log is folded into it, and its own room is used again.
const chunk = 1 << 20

// connector opens connections to the database of this name.
type connector string

// Driver implements driver.Connector.
func (connector) Driver() driver.Driver {
	return &sqlite3.SQLiteDriver{ConnectHook: func(c *sqlite3.SQLiteConn) error {
		return c.SetFileControlInt("main", sqlite3.SQLITE_FCNTL_CHUNK_SIZE, chunk)
	}}
}

// Connect implements driver.Connector.
func (c connector) Connect(context.Context) (driver.Conn, error) { return c.Driver().Open(string(c)) }

func (d *DB) connect(path string) error {
	for _, side := range []struct {
		db          **sql.DB
		readOnly    bool
		connections int
	}{
		{&d.pool, false, 1},
		{&d.reader, true, 1 + max(4, runtime.NumCPU())},
	} {
		name, err := dsn(path, side.readOnly)
		if err != nil {
			return fmt.Errorf("opening the database: %w", err)
		}
		db := sql.OpenDB(connector(name))
		db.SetMaxOpenConns(side.connections)
		db.SetMaxIdleConns(side.connections)
		*side.db = db
	}
	return nil
}

func (d *DB) prepare(ctx context.Context, path string, unclean bool) error {
	var mode string
	if err := d.pool.QueryRowContext(ctx, `PRAGMA journal_mode`).Scan(&mode); err != nil {
		return unreadable(err)
	}
	if mode != "wal" {
		return fmt.Errorf("journal mode is %q, not wal: the file system may not support shared memory", mode)
	}
	if err := quickCheck(ctx, d.pool); err != nil {
		return err
	}
	var err error
	if d.installation, err = readInstallation(ctx, d.pool); err != nil {
		return err
	}
	// With it, all that was read back from the log of an earlier daemon is
	// written anew: see disk. While others have the file open it may do less.
	// It comes before the first write: on a full disk that has the log's room.
	if _, err := d.pool.ExecContext(ctx, `PRAGMA wal_checkpoint(TRUNCATE)`); err != nil {
		return err
	}
	if err := migrate(ctx, d.pool, migrations()); err != nil {
		return err
	}
	if _, err := d.pool.ExecContext(ctx, sqlInherit); err != nil {
		return err
	}
	if unclean {
		if err := skipLostNumbers(ctx, d.pool); err != nil {
			return err
		}
	}
	if d.log, err = openLog(path); err != nil {
		return err
	}
	d.keepRoom()
	d.disk = newDisk(func() error { return fdatasync(d.log) })
	if d.writer, err = d.pool.Conn(ctx); err != nil {
		return err
	}
	if _, err := d.writer.ExecContext(ctx, fmt.Sprint(`PRAGMA wal_autocheckpoint = `, maxLog)); err != nil {
		return err
	}
	if d.conn, err = beneath(d.writer, writeStatements()); err != nil {
		return err
	}
	if d.quick.conn, err = d.reader.Conn(ctx); err != nil {
		return err
	}
	if d.quick.low, err = beneath(d.quick.conn, nil); err != nil {
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

// lostNumbers is more than a crash of the host can take of the event log:
// what was not yet on disk, less than maxLog pages with a few events each.
const lostNumbers = 1 << 20

// skipLostNumbers leaves out the numbers of events that were read by
// followers before the host crashed with them: none is ever given out again.
func skipLostNumbers(ctx context.Context, db *sql.DB) error {
	_, err := db.ExecContext(ctx, `INSERT INTO sqlite_sequence (name, seq) SELECT 'events', 0
		WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'events')`)
	if err == nil {
		_, err = db.ExecContext(ctx, `UPDATE sqlite_sequence SET seq = seq + ? WHERE name = 'events'`, lostNumbers)
	}
	if err != nil {
		return fmt.Errorf("skipping event numbers: %w", err)
	}
	return nil
}

// Close ends the connections; the last one folds the log into the database. What
// room the log had the ballast takes, for the next start.
func (d *DB) Close() error {
	d.closePatient()
	d.turn <- struct{}{} // never given back
	close(d.full)
	close(d.closing)
	d.folded.Wait()
	err := d.closeAll()
	if b := d.ballast.Load(); b != nil {
		_ = b.take(closedSpare)
	}
	return translate(err)
}

func (d *DB) closeAll() error {
	// The reader first: the last connection checkpoints, and only a writer can.
	var errs []error
	for _, side := range []struct {
		low  *conn
		conn *sql.Conn
		pool *sql.DB
	}{{d.quick.low, d.quick.conn, d.reader}, {d.conn, d.writer, d.pool}} {
		if side.low != nil {
			errs = append(errs, side.low.close())
		}
		if side.conn != nil {
			errs = append(errs, side.conn.Close())
		}
		errs = append(errs, side.pool.Close())
	}
	if d.log != nil {
		errs = append(errs, d.log.Close())
	}
	return errors.Join(errs...)
}

const (
	sqlBegin    = `BEGIN IMMEDIATE` // a deferred one can fail half-way as busy
	sqlCommit   = `COMMIT`
	sqlRollback = `ROLLBACK`
)

// tx is one write transaction.
type tx struct {
	*conn
	disk    *disk
	event   bool // it wrote an event
	durable bool
}

// mustLast makes the write return only when it would survive a power cut.
// With the disk broken it fails at once.
func (t *tx) mustLast() error {
	t.durable = true
	return t.disk.failed()
}

// number and text return the only column of a query's first row,
// sql.ErrNoRows where there is none.
func (t *tx) number(query string, args ...any) (n int, err error) {
	found, err := t.row(query, args...)
	if err != nil {
		return 0, err
	}
	err = found.Scan(&n)
	return n, err
}

func (t *tx) text(query string, args ...any) (s string, err error) {
	found, err := t.row(query, args...)
	if err != nil {
		return "", err
	}
	err = found.Scan(&s)
	return s, err
}

// write runs f in a transaction of its own and commits it. ctx bounds the
// wait for the turn; once begun, the transaction is short and runs to its
// end, so that a cancelled caller is never in doubt for long and no commit is
// interrupted. Every write of the package goes through here.
//
// A commit survives the end of this process. One that must survive a power
// cut waits for the disk after its turn, so that the next can write meanwhile.
func (d *DB) write(ctx context.Context, f func(t *tx) error) error {
	select {
	case d.turn <- struct{}{}:
	case <-ctx.Done():
		return translate(ctx.Err())
	}
	t := &tx{conn: d.conn, disk: d.disk}
	company := d.takePatient()
	err := d.writer.Raw(func(any) error { return t.runWith(company, f) })
	if sandbox.CodeOf(translate(err)) == "disk_full" && d.ballast.Load().release() {
		err = d.writer.Raw(func(any) error { return t.run(f) })
	}
	var commit uint64
	if err == nil || len(company) > 0 {
		commit = d.disk.committed()
		d.askCheckpoint(commit)
	}
	<-d.turn
	if t.event {
		d.notify()
	}
	if err != nil {
		return translate(err)
	}
	if t.durable {
		return d.disk.wait(commit)
	}
	d.disk.later()
	return nil
}

// Answers waits for a turn of the writer and begins a transaction of nothing:
// nil says that the database can be written to.
func (d *DB) Answers(ctx context.Context) error {
	return d.write(ctx, func(*tx) error { return nil })
}

// run is the transaction: f and the commit, or a rollback.
func (t *tx) run(f func(t *tx) error) error {
	if _, err := t.exec(sqlBegin); err != nil {
		return err
	}
	err := f(t)
	if err == nil {
		_, err = t.exec(sqlCommit)
	}
	// After some errors SQLite has rolled back already.
	if err != nil && !t.lite.AutoCommit() {
		_, undo := t.exec(sqlRollback)
		err = errors.Join(err, undo)
	}
	return err
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
