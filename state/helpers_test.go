package state

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

const testUIDBase = 0x20000000

// openAt opens a database that is closed with the test.
func openAt(t testing.TB, path string) *DB {
	t.Helper()
	d, err := Open(context.Background(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return d
}

func open(t testing.TB) *DB {
	t.Helper()
	return openAt(t, filepath.Join(t.TempDir(), "state.db"))
}

func params(name string) CreateParams {
	return CreateParams{
		Sandbox: sandbox.Sandbox{
			ID: sandbox.NewID(), Owner: "uid:0", CreatedAt: time.Now().UTC(),
			Spec: sandbox.Spec{Name: name, Image: "host", Labels: map[string]string{"a.b": "c", "name": name}},
		},
		Slots: 1000, UIDBase: testUIDBase, Actor: "uid:0",
	}
}

func create(t testing.TB, d *DB, name string) sandbox.Sandbox {
	t.Helper()
	sb, existed, err := d.CreateSandbox(t.Context(), params(name))
	if err != nil || existed {
		t.Fatalf("create %q: existed %v, error %v", name, existed, err)
	}
	return sb
}

// path is a way from pending to each status.
var path = map[sandbox.Status][]sandbox.Status{
	sandbox.StatusPending:    {},
	sandbox.StatusCreating:   {sandbox.StatusCreating},
	sandbox.StatusRunning:    {sandbox.StatusCreating, sandbox.StatusRunning},
	sandbox.StatusPaused:     {sandbox.StatusCreating, sandbox.StatusRunning, sandbox.StatusPaused},
	sandbox.StatusStopped:    {sandbox.StatusCreating, sandbox.StatusRunning, sandbox.StatusStopped},
	sandbox.StatusCompleting: {sandbox.StatusCompleting},
	sandbox.StatusCompleted:  {sandbox.StatusCompleting, sandbox.StatusCompleted},
	sandbox.StatusFailed:     {sandbox.StatusFailed},
}

// bring moves a pending sandbox to a status.
func bring(t testing.TB, d *DB, sb sandbox.Sandbox, to sandbox.Status) sandbox.Sandbox {
	t.Helper()
	for _, next := range path[to] {
		moved, err := d.Move(t.Context(), sb.ID, []sandbox.Status{sb.Status}, next, Change{})
		if err != nil {
			t.Fatal(err)
		}
		sb = moved
	}
	return sb
}

// want checks an error's class and code.
func want(t testing.TB, err, class error, code string) {
	t.Helper()
	if !errors.Is(sandbox.ClassOf(err), class) || sandbox.CodeOf(err) != code {
		t.Fatalf("error %v (class %v, code %s), want class %v, code %s", err, sandbox.ClassOf(err), sandbox.CodeOf(err), class, code)
	}
}

// leases counts the slots that are leased.
func leases(t testing.TB, d *DB) int {
	t.Helper()
	var n int
	if err := d.reader.QueryRow(`SELECT count(*) FROM slots WHERE sandbox IS NOT NULL`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}
