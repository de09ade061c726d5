package state

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/mattn/go-sqlite3"

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
// of sandboxd, and where that belongs. Its write-ahead log, where it has one, is
// folded into it. Class ErrInvalid, code not_a_backup; another where that cannot be
// told, as on a full disk.
func CheckBackup(ctx context.Context, path string) (in Installation, err error) {
	name, err := dsn(path, false)
	if err != nil {
		return in, err
	}
	db, err := sql.Open("sqlite3", name)
	if err != nil {
		return in, err
	}
	if err = fault(ctx, db); err == nil {
		in, err = readInstallation(ctx, db)
	}
	if err == nil { // the last to close tells of no error of it
		_, err = db.ExecContext(ctx, `PRAGMA wal_checkpoint(TRUNCATE)`)
	}
	if err = errors.Join(err, db.Close()); err == nil && in.Made {
		err = errors.New("it has no schema version")
	}
	if ctx.Err() != nil {
		return in, ctx.Err()
	}
	lite, _ := errors.AsType[sqlite3.Error](err)
	if err = translate(err); sandbox.ClassOf(err) != nil || lite.Code == sqlite3.ErrIoErr {
		return in, err // says nothing of the file
	}
	if err != nil {
		return in, sandbox.Errorf(sandbox.ErrInvalid, "not_a_backup", "not a whole database of sandboxd: %w", err)
	}
	return in, nil
}

// Credentials are whom a database lets in.
type Credentials struct {
	Installation

	Keys       []access.Key
	Owners     []access.Owner
	Ports      []sandbox.Port
	PortTokens map[sandbox.ID][]byte // hashes
}

// ReadCredentials reads those of the database at path, nobody's now, if its pages
// are whole. Its write-ahead log is folded into it, as by CheckBackup; one that
// has none is not changed.
func ReadCredentials(ctx context.Context, path string) (c Credentials, err error) {
	name, err := dsn(path, false)
	if err != nil {
		return c, err
	}
	name += "&mode=rw"
	if _, err := os.Lstat(path + "-wal"); errors.Is(err, os.ErrNotExist) {
		name, _, _ = strings.Cut(name, "?")
		name += "?mode=ro&immutable=1"
	}
	db, err := sql.Open("sqlite3", name)
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if err := quickCheck(ctx, db); err != nil {
		return c, err
	}
	d := &DB{reader: db}
	c.Installation, err = readInstallation(ctx, db)
	if err == nil {
		c.Keys, err = d.Keys(ctx)
	}
	if err == nil {
		c.Owners, err = d.Owners(ctx)
	}
	if err == nil {
		c.Ports, err = d.Ports(ctx, "")
	}
	if err == nil {
		c.PortTokens, err = d.PortTokens(ctx)
	}
	return c, err
}

func notThere(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
