package state

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// typesOf are the types of all events, in their order.
func typesOf(t *testing.T, d *DB) (types []string) {
	t.Helper()
	all, err := d.Events(t.Context(), 0, "", 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		types = append(types, e.Type)
	}
	return types
}

// noted is NoteEvent, with a channel that gets its error.
func noted(d *DB, kind string) <-chan error {
	failed := make(chan error, 1)
	d.NoteEvent(sandbox.Event{Type: kind}, func(err error) { failed <- err })
	return failed
}

func TestPatientWritesGoAlong(t *testing.T) {
	d := open(t)
	before := d.disk.last.Load()
	noted(d, "one")
	noted(d, "two")
	if _, err := d.AppendEvent(t.Context(), sandbox.Event{Type: "three"}); err != nil {
		t.Fatal(err)
	}
	if got := typesOf(t, d); !slices.Equal(got, []string{"one", "two", "three"}) {
		t.Errorf("the log has %v", got)
	}
	if n := d.disk.last.Load() - before; n != 1 {
		t.Errorf("%d commits, want 1", n)
	}
	noted(d, "four")
	testenv.Eventually(t, 20*time.Second, "written with nobody's help", func() bool { return len(typesOf(t, d)) == 4 })
	if n := d.disk.last.Load() - before; n != 2 {
		t.Errorf("%d commits, want 2", n)
	}
}

// TestPatientWritesApart: none of those that share a transaction suffers from
// another's error.
func TestPatientWritesApart(t *testing.T) {
	d := open(t)
	injected := errors.New("injected")
	half := func(kind string) func(*tx) error {
		return func(tx *tx) error {
			if _, err := tx.appendEvents(sandbox.Event{Type: kind}); err != nil {
				t.Error(err)
			}
			return injected
		}
	}
	said := make(chan error, 2)
	d.noteSoon(half("bad"), func(err error) { said <- err })
	good := noted(d, "good")
	if err := d.write(t.Context(), half("worse")); !errors.Is(err, injected) {
		t.Errorf("the write says %v", err)
	}
	if err := <-said; !errors.Is(err, injected) {
		t.Errorf("the patient one says %v", err)
	}
	if got := typesOf(t, d); !slices.Equal(got, []string{"good"}) {
		t.Errorf("the log has %v", got)
	}
	// An error that takes the whole transaction with it, as a full disk may.
	d.noteSoon(func(tx *tx) error {
		_, err := tx.exec(sqlRollback)
		return errors.Join(err, injected)
	}, func(err error) { said <- err })
	after := noted(d, "after")
	if _, err := d.AppendEvent(t.Context(), sandbox.Event{Type: "main"}); !errors.Is(err, injected) {
		t.Errorf("the write says %v", err)
	}
	if err := <-after; !errors.Is(err, injected) {
		t.Errorf("the one after says %v", err)
	}
	select {
	case err := <-good:
		t.Errorf("the good one says %v", err)
	default:
	}
	if got := typesOf(t, d); !slices.Equal(got, []string{"good"}) {
		t.Errorf("the log has %v", got)
	}
	if _, err := d.AppendEvent(t.Context(), sandbox.Event{Type: "then"}); err != nil {
		t.Errorf("after that: %v", err)
	}
}

func TestPatientWritesAtTheEnd(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	d, err := Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	noted(d, "last")
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	want(t, <-noted(d, "late"), sandbox.ErrUnavailable, "shutting_down")
	want(t, d.writeSoon(t.Context(), func(*tx) error { return nil }), sandbox.ErrUnavailable, "shutting_down")
	if got := typesOf(t, openAt(t, path)); !slices.Equal(got, []string{"last"}) {
		t.Errorf("the log has %v", got)
	}
}

func TestPatientWriteOfNoTime(t *testing.T) {
	d := open(t)
	d.turn <- struct{}{} // somebody writes for long
	defer func() { <-d.turn }()
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	err := d.writeSoon(ctx, func(*tx) error { return nil })
	want(t, err, sandbox.ErrDeadline, "database_deadline")
}
