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
	LastEvent  int64 // number of its newest event when it was opened
	Made       bool  // by this Open: the file was missing or empty
}

const (
	// The table is no migration: a database of any version has it.
	sqlMakeInstallation = `CREATE TABLE IF NOT EXISTS installation (
		one INTEGER NOT NULL PRIMARY KEY CHECK (one = 1), id TEXT NOT NULL, generation INTEGER NOT NULL) STRICT`
	sqlInstallation = `SELECT id, generation FROM installation`
	sqlStamp        = `INSERT INTO installation (one, id, generation) VALUES (1, ?1, ?2)
		ON CONFLICT (one) DO UPDATE SET id = ?1, generation = ?2`
	sqlHasTable = `SELECT count(*) FROM sqlite_master WHERE name = ?`
)

// Installation returns what the database said when it was opened.
func (d *DB) Installation() Installation { return d.installation }

// Stamp writes where the database belongs, to disk.
func (d *DB) Stamp(ctx context.Context, id string, generation int64) error {
	return d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil {
			return err
		}
		_, err := t.exec(sqlStamp, id, generation)
		return err
	})
}

// readInstallation looks before anything is changed: event numbers are.
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
	if has("installation") {
		if e := db.QueryRowContext(ctx, sqlInstallation).Scan(&in.ID, &in.Generation); !errors.Is(e, sql.ErrNoRows) {
			err = errors.Join(err, e)
		}
	}
	return in, err
}

// quickCheck reads the whole file. What it finds is for people to mend.
func quickCheck(ctx context.Context, db *sql.DB) error {
	var found string
	err := db.QueryRowContext(ctx, `PRAGMA quick_check(1)`).Scan(&found)
	if err == nil && found != "ok" {
		return damaged(errors.New(found))
	}
	return unreadable(err)
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
