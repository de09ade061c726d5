package state

import (
	"context"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// patience is how long a write that can wait does, for another transaction to
// take it along.
const patience = 10 * time.Millisecond

// patient are the writes that wait, in their order.
type patient struct {
	mu     sync.Mutex
	queue  []waiting // guarded by mu
	closed bool      // guarded by mu
}

// waiting is one of them.
type waiting struct {
	f    func(t *tx) error
	done func(error) // is told once how it went, and must not block
}

// writeSoon is write for what nobody is kept waiting for: it goes with the next
// transaction there is, before what that one is for, or after patience in one of
// its own. It survives the end of this process once it returns, not a power
// cut. With ctx over it may still be written.
func (d *DB) writeSoon(ctx context.Context, f func(t *tx) error) error {
	done := make(chan error, 1)
	d.noteSoon(f, func(err error) { done <- err })
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return translate(ctx.Err())
	}
}

// noteSoon is writeSoon for who does not wait at all.
func (d *DB) noteSoon(f func(t *tx) error, done func(error)) {
	d.patient.mu.Lock()
	defer d.patient.mu.Unlock()
	if d.patient.closed {
		done(sandbox.Errorf(sandbox.ErrUnavailable, "shutting_down", "the database is closed: try again when the daemon runs"))
		return
	}
	d.patient.queue = append(d.patient.queue, waiting{f, done})
	if len(d.patient.queue) == 1 {
		time.AfterFunc(patience, d.flushPatient)
	}
}

// takePatient is called in the writer's turn.
func (d *DB) takePatient() []waiting {
	d.patient.mu.Lock()
	defer d.patient.mu.Unlock()
	all := d.patient.queue
	d.patient.queue = nil
	return all
}

// flushPatient writes those that no transaction took along.
func (d *DB) flushPatient() {
	d.patient.mu.Lock()
	none := len(d.patient.queue) == 0
	d.patient.mu.Unlock()
	if !none {
		_ = d.write(context.Background(), func(*tx) error { return nil }) // each is told how it went
	}
}

// closePatient writes what waits, and takes no more.
func (d *DB) closePatient() {
	d.patient.mu.Lock()
	d.patient.closed = true
	d.patient.mu.Unlock()
	d.flushPatient()
}

const (
	sqlSave   = `SAVEPOINT one`
	sqlKept   = `RELEASE one`
	sqlUndone = `ROLLBACK TO one`
)

// runWith is run with those that waited before f, in one transaction. None
// suffers from another's error.
func (t *tx) runWith(company []waiting, f func(t *tx) error) error {
	if len(company) == 0 {
		return t.run(f)
	}
	failed := make([]error, len(company))
	var own error
	err := t.run(func(t *tx) error {
		for i, w := range company {
			if failed[i] = t.one(w.f); failed[i] != nil && t.lite.AutoCommit() {
				return failed[i]
			}
		}
		if own = t.one(f); own != nil && t.lite.AutoCommit() {
			return own
		}
		return nil
	})
	for i, w := range company {
		if failed[i] == nil {
			failed[i] = err
		}
		w.done(translate(failed[i]))
	}
	if own == nil {
		own = err
	}
	return own
}

// one runs f as a part of the transaction, which goes on without it where it
// fails, unless the error was one after which SQLite rolls all of it back.
func (t *tx) one(f func(t *tx) error) error {
	if _, err := t.exec(sqlSave); err != nil {
		return err
	}
	err := f(t)
	if t.lite.AutoCommit() {
		return err
	}
	if err != nil {
		if _, undo := t.exec(sqlUndone); undo != nil {
			return undo
		}
	}
	if _, kept := t.exec(sqlKept); err == nil {
		err = kept
	}
	return err
}
