//go:build root

package main

import (
	"database/sql"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// TestRestoreWithLittleRoom: a copy for which there is room, and none to open it, is
// not called damaged. The control has a little more.
func TestRestoreWithLittleRoom(t *testing.T) {
	backup := newArchive(t, "i").copy()
	st, err := os.Stat(backup)
	if err != nil {
		t.Fatal(err)
	}
	a := archive{config{StateDir: t.TempDir()}, t}
	a.must(unix.Mount("tmpfs", a.StateDir, "tmpfs", 0, "size=16m"))
	defer func() { a.must(unix.Unmount(a.StateDir, 0)) }()
	filler := filepath.Join(a.StateDir, "filler")
	const whole = 16 << 20
	for _, room := range []int64{4096, 64 << 10, 256 << 10, 960 << 10} {
		a.must(os.WriteFile(filler, make([]byte, whole-st.Size()-room), 0o600))
		if err := putBack(t.Context(), a.config, backup, t.Output()); sandbox.CodeOf(err) != "disk_full" {
			t.Errorf("%d bytes more than the copy takes: %v", room, err)
		}
		if left, _ := filepath.Glob(filepath.Join(a.StateDir, "sandboxd*")); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	}
	a.must(os.WriteFile(filler, make([]byte, whole-st.Size()-roomToOpen-64<<10), 0o600))
	a.restore(backup)
}

// TestRestoreOfALogWithLittleRoom: a file that was set aside with its log takes room
// for what is in that, too. The control has it.
func TestRestoreOfALogWithLittleRoom(t *testing.T) {
	from := newArchive(t, "i")
	path := filepath.Join(from.StateDir, "sandboxd.db")
	db, err := sql.Open("sqlite3", "file:"+path+"?_journal_mode=WAL")
	from.must(err)
	db.SetMaxOpenConns(1)
	for _, q := range []string{`PRAGMA wal_autocheckpoint = 0`, `CREATE TABLE ballast (x)`, `INSERT INTO ballast VALUES (randomblob(3000000))`} {
		_, err := db.ExecContext(t.Context(), q)
		from.must(err)
	}
	backup := filepath.Join(t.TempDir(), "sandboxd.db.before-1Z")
	var size int64
	for _, end := range []string{"", "-wal"} {
		b, err := os.ReadFile(path + end)
		from.must(err)
		from.must(os.WriteFile(backup+end, b, 0o600))
		size += int64(len(b))
	}
	from.must(db.Close())
	if size < 3<<20 {
		t.Fatalf("a log of %d bytes at most", size)
	}
	a := archive{config{StateDir: t.TempDir()}, t}
	a.must(unix.Mount("tmpfs", a.StateDir, "tmpfs", 0, "size=16m"))
	defer func() { a.must(unix.Unmount(a.StateDir, 0)) }()
	filler := filepath.Join(a.StateDir, "filler")
	a.must(os.WriteFile(filler, make([]byte, 16<<20-size-roomToOpen-1<<20), 0o600))
	if err := putBack(t.Context(), a.config, backup, t.Output()); sandbox.CodeOf(err) != "disk_full" {
		t.Errorf("with room for the copy alone: %v", err)
	}
	a.must(os.Remove(filler))
	a.restore(backup)
	if left, _ := filepath.Glob(filepath.Join(a.StateDir, "*-wal")); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}
