package state

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

//go:embed migrations/*.sql
var migrationFiles embed.FS

// migrations returns the embedded files. They are append-only: a file that
// was ever released is never changed, and each new one brings a fixture of
// the version before it in testdata.
func migrations() fs.FS {
	sub, err := fs.Sub(migrationFiles, "migrations")
	if err != nil {
		panic(err) // the name above is the directory's
	}
	return sub
}

// migrate brings the schema to the newest version of files, named
// NNNN_what.sql and numbered from 1 without a gap; each runs in a
// transaction of its own together with the note that it ran, so a crash
// leaves a whole version.
func migrate(ctx context.Context, db *sql.DB, files fs.FS) error {
	names, err := fs.Glob(files, "*.sql") // in order of the names
	if err != nil {
		return err
	}
	if _, err := db.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS schema_version (
		one INTEGER NOT NULL PRIMARY KEY CHECK (one = 1), version INTEGER NOT NULL) STRICT`); err != nil {
		return err
	}
	version := 0
	err = db.QueryRowContext(ctx, `SELECT version FROM schema_version`).Scan(&version)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return err
	}
	if version > len(names) {
		return sandbox.Errorf(sandbox.ErrUnsupported, "schema_newer",
			"the database has schema version %d, this daemon knows %d: run the newer daemon again, or restore a backup from before it", version, len(names))
	}
	for i, name := range names {
		if n, err := migrationNumber(name); err != nil || n != i+1 {
			return fmt.Errorf("migration file %s: want number %d first in its name", name, i+1)
		}
		if i < version {
			continue
		}
		script, err := fs.ReadFile(files, name)
		if err != nil {
			return err
		}
		if err := applyMigration(ctx, db, string(script), i+1); err != nil {
			return fmt.Errorf("migrating the database with %s: %w", name, err)
		}
	}
	return nil
}

func migrationNumber(name string) (int, error) {
	digits, _, _ := strings.Cut(name, "_")
	return strconv.Atoi(digits)
}

func applyMigration(ctx context.Context, db *sql.DB, script string, version int) error {
	t, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	_, err = t.ExecContext(ctx, script)
	if err == nil {
		_, err = t.ExecContext(ctx, `INSERT INTO schema_version (one, version) VALUES (1, ?1)
			ON CONFLICT (one) DO UPDATE SET version = ?1`, version)
	}
	if err != nil {
		return errors.Join(err, t.Rollback())
	}
	return t.Commit()
}
