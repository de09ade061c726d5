package state

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
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

func notThere(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
