package state

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestSecrets(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	d := openAt(t, path)
	day := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	_, _, err := d.Secret(t.Context(), "key")
	want(t, err, sandbox.ErrNotFound, "secret_not_found")
	want(t, d.DeleteSecret(t.Context(), "key"), sandbox.ErrNotFound, "secret_not_found")
	s := sandbox.Secret{Name: "key", Owner: "uid:7", Hosts: []string{"example.com"}, CreatedAt: day, UpdatedAt: day}
	if _, err := d.PutSecret(t.Context(), s, "Bearer one"); err != nil {
		t.Fatal(err)
	}
	s.CreatedAt, s.UpdatedAt = day.Add(time.Hour), day.Add(time.Hour)
	s.Hosts = nil
	got, err := d.PutSecret(t.Context(), s, strings.Repeat("x", sandbox.MaxSecretBytes))
	if err != nil || !got.CreatedAt.Equal(day) || !got.UpdatedAt.Equal(day.Add(time.Hour)) {
		t.Errorf("set again: %+v, %v", got, err)
	}
	got, value, err := d.Secret(t.Context(), "key")
	if err != nil || value != strings.Repeat("x", sandbox.MaxSecretBytes) || got.Owner != "uid:7" || len(got.Hosts) != 0 || !got.CreatedAt.Equal(day) {
		t.Errorf("%+v, %d bytes, %v", got, len(value), err)
	}
	if _, err := d.PutSecret(t.Context(), sandbox.Secret{Name: "a"}, "b"); err != nil {
		t.Fatal(err)
	}
	if all, err := d.Secrets(t.Context()); err != nil || len(all) != 2 || all[0].Name != "a" || all[1].Name != "key" {
		t.Errorf("%+v, %v", all, err)
	}
	for _, name := range []string{path, path + "-wal", path + "-shm"} {
		if st, err := os.Stat(name); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, st, err)
		}
	}
	if err := d.DeleteSecret(t.Context(), "key"); err != nil {
		t.Fatal(err)
	}
	_, _, err = d.Secret(t.Context(), "key")
	want(t, err, sandbox.ErrNotFound, "secret_not_found")
}

// TestForgottenSecrets: a value that was replaced or removed is in no file.
func TestForgottenSecrets(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	d := openAt(t, path)
	const mark = "not-to-be-found"
	put := func(name, value string) {
		t.Helper()
		if _, err := d.PutSecret(t.Context(), sandbox.Secret{Name: name}, value); err != nil {
			t.Fatal(err)
		}
	}
	found := func() (n int) {
		t.Helper()
		if _, err := d.writer.ExecContext(t.Context(), `PRAGMA wal_checkpoint(TRUNCATE)`); err != nil {
			t.Fatal(err)
		}
		for _, p := range []string{path, path + "-wal"} {
			b, err := os.ReadFile(p)
			if err != nil {
				t.Fatal(err)
			}
			n += bytes.Count(b, []byte(mark))
		}
		return n
	}
	long := strings.Repeat(mark+" ", 2000) // on pages of its own
	for name, value := range map[string]string{"removed": mark, "long": long, "replaced": mark, "shorter": long} {
		put(name, value)
	}
	if found() == 0 { // the control
		t.Fatal("values are not in the file at all")
	}
	put("replaced", "another")
	put("shorter", "another")
	for _, name := range []string{"removed", "long"} {
		if err := d.DeleteSecret(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	if n := found(); n != 0 {
		t.Errorf("%d traces of forgotten values", n)
	}
}
