package linux

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// deepTree makes one directory inside another, n deep, and returns how deep
// it came. It works by descriptor, for no path reaches that far.
func deepTree(t *testing.T, dir string, n int) {
	t.Helper()
	d, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	for range n {
		if err := d.Mkdir("d", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := d.Symlink("/etc/passwd", "l"); err != nil {
			t.Fatal(err)
		}
		next, err := d.OpenRoot("d")
		if err != nil {
			t.Fatal(err)
		}
		d.Close()
		d = next
	}
	d.Close()
}

// TestRemoveTree deletes trees made to be hard to delete, and nothing else.
func TestRemoveTree(t *testing.T) {
	base := t.TempDir()
	keep := filepath.Join(base, "keep")
	if err := os.WriteFile(keep, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	tree := filepath.Join(base, "tree")
	for _, d := range []string{"deep", "wide", "none", ".up1/x", "a/.up2"} {
		if err := os.MkdirAll(filepath.Join(tree, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	deepTree(t, filepath.Join(tree, "deep"), 5000) // a path of 10 KB
	for i := range 3 * removeBatch {
		if err := os.WriteFile(fmt.Sprintf("%s/wide/%d", tree, i), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(base, filepath.Join(tree, "up")); err != nil {
		t.Fatal(err)
	}
	parent, err := os.Open(base)
	if err != nil {
		t.Fatal(err)
	}
	defer parent.Close()
	never := func() error { return nil }
	stop := errors.New("stopped")
	// Stopped half way, it goes on later.
	n := 0
	if err := RemoveTree(int(parent.Fd()), "tree", func() error {
		if n++; n > 200 {
			return stop
		}
		return nil
	}); !errors.Is(err, stop) {
		t.Fatalf("stopping: %v", err)
	}
	for _, name := range []string{"tree", "tree", "never-was"} {
		if err := RemoveTree(int(parent.Fd()), name, never); err != nil {
			t.Fatal(err)
		}
	}
	if names, err := os.ReadDir(base); err != nil || len(names) != 1 || names[0].Name() != "keep" {
		t.Errorf("left: %v, %v", names, err)
	}
}
