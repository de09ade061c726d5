package linux

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
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

// TestRemoveTreeMeetsMoves: what is moved away while a tree is removed is gone
// from it, and no error.
func TestRemoveTreeMeetsMoves(t *testing.T) {
	base := t.TempDir()
	parent, err := os.Open(base)
	if err != nil {
		t.Fatal(err)
	}
	defer parent.Close()
	hold, tree := filepath.Join(base, "hold"), filepath.Join(base, "tree")
	if err := os.MkdirAll(filepath.Join(hold, "x"), 0o755); err != nil {
		t.Fatal(err)
	}
	var n atomic.Int64
	stop, moved := make(chan bool), make(chan bool)
	go func() {
		defer close(moved)
		for {
			select {
			case <-stop:
				return
			default:
			}
			_ = os.Mkdir(hold, 0o755) // it was removed in the tree
			if os.Rename(hold, filepath.Join(tree, "0")) == nil {
				n.Add(1)
				_ = os.Rename(filepath.Join(tree, "0"), hold) // it may be gone
			}
		}
	}()
	for i := 0; i < 500 || n.Load() == 0 && i < 200_000; i++ {
		if err := os.MkdirAll(filepath.Join(tree, "b"), 0o755); err != nil {
			t.Fatal(err)
		}
		// Not empty: it came back.
		if err := RemoveTree(int(parent.Fd()), "tree", func() error { return nil }); err != nil && !errors.Is(err, unix.ENOTEMPTY) {
			t.Fatal(err)
		}
	}
	close(stop)
	<-moved
	if n.Load() == 0 {
		t.Error("nothing was moved")
	}
}
