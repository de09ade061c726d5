package state

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Backup writes a whole copy of the database as it is at one moment to path,
// which must not exist. It reads beside everybody, and keeps no writer waiting.
func (d *DB) Backup(ctx context.Context, path string) (err error) {
	name, err := dsn(d.path, false)
	if err != nil {
		return err
	}
	db, err := sql.Open("sqlite3", name)
	if err != nil {
		return fmt.Errorf("opening the database for a backup: %w", err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if _, err := db.ExecContext(ctx, `VACUUM INTO ?`, path); err != nil {
		return errors.Join(fmt.Errorf("writing a backup to %s: %w", path, translate(err)), notThere(os.Remove(path)))
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err == nil {
		err = errors.Join(f.Chmod(0o600), f.Sync(), f.Close())
	}
	return err
}

// CheckBackup says whether the file at path, nobody's yet, is a whole database
// of sandboxd. Its write-ahead log, where it has one, is folded into it. Class
// ErrInvalid, code not_a_backup.
func CheckBackup(ctx context.Context, path string) error {
	name, err := dsn(path, false)
	if err != nil {
		return err
	}
	db, err := sql.Open("sqlite3", name)
	if err != nil {
		return err
	}
	ours := false
	err = fault(ctx, db)
	if err == nil {
		err = db.QueryRowContext(ctx, sqlHasTable, "schema_version").Scan(&ours)
	}
	if err = errors.Join(err, db.Close()); err == nil && !ours {
		err = errors.New("it has no schema version")
	}
	if err != nil {
		return sandbox.Errorf(sandbox.ErrInvalid, "not_a_backup", "not a whole database of sandboxd: %w", err)
	}
	return nil
}

// Credentials reads the keys and owners of the database at path, nobody's now, if
// its pages are whole. Its write-ahead log is folded into it, as by CheckBackup.
func Credentials(ctx context.Context, path string) (keys []access.Key, owners []access.Owner, err error) {
	name, err := dsn(path, false)
	if err != nil {
		return nil, nil, err
	}
	db, err := sql.Open("sqlite3", name+"&mode=rw")
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if err := quickCheck(ctx, db); err != nil {
		return nil, nil, err
	}
	d := &DB{reader: db}
	keys, err = d.Keys(ctx)
	if err == nil {
		owners, err = d.Owners(ctx)
	}
	return keys, owners, err
}

func notThere(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
