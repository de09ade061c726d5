package state

import (
	"context"
	"errors"

	"github.com/mattn/go-sqlite3"

	"github.com/sandboxd/sandboxd/sandbox"
)

// translate gives SQLite's and the context's errors a class of ours. What
// has one keeps it; nil stays nil; a broken database stays without, for it is
// nobody's fault out there.
func translate(err error) error {
	if err == nil || sandbox.ClassOf(err) != nil {
		return err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return sandbox.Errorf(sandbox.ErrDeadline, "database_deadline", "the database was busy until the deadline: %w", err)
	}
	lite, ok := errors.AsType[sqlite3.Error](err)
	if !ok {
		return err
	}
	switch lite.Code {
	case sqlite3.ErrBusy, sqlite3.ErrLocked:
		return sandbox.Errorf(sandbox.ErrUnavailable, "database_busy", "the database is held by another process, try again: %w", err)
	case sqlite3.ErrConstraint:
		return sandbox.Errorf(sandbox.ErrConflict, "database_constraint", "the database refused the change: %w", err)
	case sqlite3.ErrCantOpen:
		return sandbox.Errorf(sandbox.ErrUnavailable, "database_not_opened", "the database, or its log, cannot be opened: see whether its file system is full or read-only: %w", err)
	case sqlite3.ErrFull:
		return sandbox.Errorf(sandbox.ErrExhausted, "disk_full", "the disk with the database is full, make room: %w", err)
	}
	return err
}

// isUnique reports a violated unique index or key.
func isUnique(err error) bool {
	lite, ok := errors.AsType[sqlite3.Error](err)
	return ok && (lite.ExtendedCode == sqlite3.ErrConstraintUnique || lite.ExtendedCode == sqlite3.ErrConstraintPrimaryKey)
}
