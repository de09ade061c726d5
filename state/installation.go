package state

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/mattn/go-sqlite3"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Installation is what a database says of where it belongs; see ADR 17.
type Installation struct {
	ID         string // none: nobody has stamped it
	Generation int64
	Nonce      string // of the generation
	LastEvent  int64  // number of its newest event when it was opened
	Made       bool   // by this Open: the file was missing or empty
}

const (
	// The table is no migration: a database of any version has it.
	sqlMakeInstallation = `CREATE TABLE IF NOT EXISTS installation (
		one INTEGER NOT NULL PRIMARY KEY CHECK (one = 1), id TEXT NOT NULL, generation INTEGER NOT NULL,
		nonce TEXT NOT NULL DEFAULT '') STRICT`
	sqlHasNonce     = `SELECT count(*) FROM pragma_table_info('installation') WHERE name = 'nonce'`
	sqlAddNonce     = `ALTER TABLE installation ADD COLUMN nonce TEXT NOT NULL DEFAULT ''`
	sqlInstallation = `SELECT id, generation, nonce FROM installation`
	sqlStamp        = `INSERT INTO installation (one, id, generation, nonce) VALUES (1, ?1, ?2, ?3)
		ON CONFLICT (one) DO UPDATE SET id = ?1, generation = ?2, nonce = ?3`
	sqlHasTable = `SELECT count(*) FROM sqlite_master WHERE name = ?`
)

// Installation returns what the database said when it was opened.
func (d *DB) Installation() Installation { return d.installation }

// Stamp writes where the database belongs, to disk.
func (d *DB) Stamp(ctx context.Context, id string, generation int64, nonce string) error {
	return d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil {
			return err
		}
		_, err := t.exec(sqlStamp, id, generation, nonce)
		return err
	})
}

// readInstallation looks before anything else is changed: event numbers are. It
// makes the table where there is none.
func readInstallation(ctx context.Context, db *sql.DB) (in Installation, err error) {
	has := func(table string) (yes bool) {
		if err == nil {
			err = db.QueryRowContext(ctx, sqlHasTable, table).Scan(&yes)
		}
		return yes
	}
	in.Made = !has("schema_version")
	if !in.Made && has("events_pruned") {
		err = errors.Join(err, db.QueryRowContext(ctx, sqlLastSeq).Scan(&in.LastEvent))
	}
	if err != nil {
		return in, err
	}
	if err := makeInstallation(ctx, db); err != nil {
		return in, err
	}
	err = db.QueryRowContext(ctx, sqlInstallation).Scan(&in.ID, &in.Generation, &in.Nonce)
	if errors.Is(err, sql.ErrNoRows) {
		err = nil
	}
	return in, err
}

// makeInstallation makes the table, or gives one from before there were nonces theirs.
func makeInstallation(ctx context.Context, db *sql.DB) error {
	if _, err := db.ExecContext(ctx, sqlMakeInstallation); err != nil {
		return err
	}
	var has bool
	if err := db.QueryRowContext(ctx, sqlHasNonce).Scan(&has); err != nil || has {
		return err
	}
	_, err := db.ExecContext(ctx, sqlAddNonce)
	return err
}

// quickCheck reads the whole file. What it finds is for people to mend.
func quickCheck(ctx context.Context, db *sql.DB) error {
	err := fault(ctx, db)
	if found, ok := errors.AsType[faultError](err); ok {
		return damaged(found)
	}
	return unreadable(err)
}

// faultError is what SQLite finds wrong in a file that it can read.
type faultError string

func (f faultError) Error() string { return string(f) }

func fault(ctx context.Context, db *sql.DB) error {
	var found string
	err := db.QueryRowContext(ctx, `PRAGMA quick_check(1)`).Scan(&found)
	if err == nil && found != "ok" {
		err = faultError(found)
	}
	return err
}

// unreadable says what to do about an error that tells of a damaged file.
func unreadable(err error) error {
	if lite, ok := errors.AsType[sqlite3.Error](err); ok && (lite.Code == sqlite3.ErrCorrupt || lite.Code == sqlite3.ErrNotADB) {
		return damaged(err)
	}
	return err
}

func damaged(err error) error {
	return sandbox.Errorf(sandbox.ErrUnavailable, "database_damaged",
		"the file is damaged; nothing was deleted. 'sandboxd restore' puts the newest backup in its place and keeps this file beside it: %w", err)
}

// keepLog sets the write-ahead log of a database aside that is gone itself:
// SQLite would delete it.
func keepLog(path string) error {
	if st, err := os.Stat(path); err != nil || st.Size() > 0 {
		return err
	}
	return os.Rename(path+"-wal", fmt.Sprintf("%s-wal.left-%d", path, time.Now().Unix()))
}
