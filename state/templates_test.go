package state

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestTemplates(t *testing.T) {
	d := openAt(t, filepath.Join(t.TempDir(), "state.db"))
	put := func(owner, name, image string, private bool) {
		t.Helper()
		if _, err := d.PutTemplate(t.Context(), sandbox.BaseTemplate{Name: name, Owner: owner, Image: image, Private: private, CreatedAt: time.Now()}); err != nil {
			t.Fatal(err)
		}
	}
	put("root", "base", "debian:12", false)
	put("root", "hidden", "x", true)
	put("alice", "base", "mine", true)
	put("alice", "base", "mine2", true) // again
	put("bob", "tool", "tool", false)
	for _, c := range []struct{ owner, name, image string }{
		{"root", "base", "debian:12"}, {"alice", "base", "mine2"}, {"bob", "base", "debian:12"}, {"alice", "tool", "tool"}, {"root", "hidden", "x"},
	} {
		if got, err := d.Template(t.Context(), c.owner, c.name); err != nil || got.Image != c.image {
			t.Errorf("%s of %s: %+v, %v", c.name, c.owner, got, err)
		}
	}
	_, foreign := d.Template(t.Context(), "alice", "hidden")
	_, missing := d.Template(t.Context(), "root", "hiddem")
	if !errors.Is(foreign, sandbox.ErrNotFound) || len(foreign.Error()) != len(missing.Error()) {
		t.Errorf("another's: %v; a missing one: %v", foreign, missing)
	}
	for owner, want := range map[string]int{"alice": 3, "bob": 2, "root": 3, "": 4} {
		if all, err := d.Templates(t.Context(), owner); err != nil || len(all) != want {
			t.Errorf("%q sees %d: %+v, %v", owner, len(all), all, err)
		}
	}
	if err := d.DeleteTemplate(t.Context(), "alice", "tool"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("remove another's: %v", err)
	}
	if err := d.DeleteTemplate(t.Context(), "alice", "base"); err != nil {
		t.Error(err)
	}
	if got, err := d.Template(t.Context(), "alice", "base"); err != nil || got.Image != "debian:12" {
		t.Errorf("the shared one shows again: %+v, %v", got, err)
	}
}

// TestTemplatesOfVersion12: templates as version 12 wrote them.
func TestTemplatesOfVersion12(t *testing.T) {
	script, err := os.ReadFile("testdata/v0012.sql")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "state.db")
	db := bare(t, path)
	if _, err := db.Exec(string(script)); err != nil {
		t.Fatal(err)
	}
	_ = db.Close()
	d := openAt(t, path)
	if got, err := d.Template(t.Context(), "alice", "mine"); err != nil || got.Snapshot != "snaaaaaaaaaaaa" || got.Limits.CPUs != 2 {
		t.Errorf("%+v, %v", got, err)
	}
	if got, err := d.Template(t.Context(), "alice", "base"); err != nil || got.Image != "debian:12" {
		t.Errorf("%+v, %v", got, err)
	}
}
