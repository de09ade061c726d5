package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// archive is a state directory without a daemon.
type archive struct {
	config
	t *testing.T
}

func (a archive) must(err error) {
	a.t.Helper()
	if err != nil {
		a.t.Fatal(err)
	}
}

// change opens the database, and ends a generation there and on the volume.
func (a archive) change(id string, generation int64, f func(*state.DB)) {
	a.t.Helper()
	db, err := state.Open(a.t.Context(), filepath.Join(a.StateDir, "sandboxd.db"))
	a.must(err)
	f(db)
	m := rootfs.Mark{ID: id, Generation: generation, Nonce: newNonce(), Clean: true}
	m.LastEvent, err = db.LastEventSeq(a.t.Context())
	a.must(err)
	a.must(db.Stamp(a.t.Context(), m.ID, m.Generation, m.Nonce))
	a.must(db.Close())
	b, err := json.Marshal(m)
	a.must(err)
	a.must(os.MkdirAll(filepath.Join(a.StateDir, "volume"), 0o700))
	a.must(os.WriteFile(filepath.Join(a.StateDir, "volume", rootfs.MarkFile), b, 0o600))
}

// copy keeps the database as it is now.
func (a archive) copy() string {
	a.t.Helper()
	b, err := os.ReadFile(filepath.Join(a.StateDir, "sandboxd.db"))
	a.must(err)
	path := filepath.Join(a.t.TempDir(), "sandboxd-copy.db")
	a.must(os.WriteFile(path, b, 0o600))
	return path
}

// restore puts a backup back, and returns what that says and what it set aside.
func (a archive) restore(backup string) (said, aside string) {
	a.t.Helper()
	var out bytes.Buffer
	if err := putBack(a.t.Context(), a.config, backup, &out); err != nil {
		a.t.Fatal(err)
	}
	_, aside, _ = strings.Cut(out.String(), "what was there is ")
	aside, _, _ = strings.Cut(aside, "\n")
	return out.String(), aside
}

func newArchive(t *testing.T, id string) archive {
	a := archive{config{StateDir: t.TempDir()}, t}
	a.change(id, 5, func(db *state.DB) {
		for i, name := range []sandbox.ID{"sbkeptaaaaaaaa", "sbchangedaaaaa", "sbclosedaaaaaa"} {
			sb := sandbox.Sandbox{ID: name, Owner: "erin", Spec: sandbox.Spec{Name: string(name)}, CreatedAt: time.Unix(1, 0)}
			_, _, err := db.CreateSandbox(a.t.Context(), state.CreateParams{Sandbox: sb, Slots: 9, UIDBase: 1 << 20, Status: sandbox.StatusRunning})
			a.must(err)
			a.must(db.SetPortToken(t.Context(), name, []byte("first")))
			a.must(db.PutPort(t.Context(), sandbox.Port{ID: "po" + string(name), Sandbox: name, HostPort: uint16(i)}))
		}
		for i, k := range []access.Key{{ID: "kept", Owner: "of-kept"}, {ID: "revoked", Owner: "erin"}, {ID: "third", Owner: "boss", Role: access.RoleAdmin}} {
			k.Hash[0], k.Hash[1], k.CreatedAt, k.ID = byte(i), id[0], time.Unix(int64(i), 0), id+k.ID
			a.must(db.InsertKey(t.Context(), k, access.Owner{Name: k.Owner, Role: access.RoleAdmin}))
		}
	})
	return a
}

// TestRestoreTells: each restore says whom it lets in that newer databases of the
// installation do not, and that alone; and what the next start will find.
func TestRestoreTells(t *testing.T) {
	a := newArchive(t, "i")
	old := a.copy()
	a.change("i", 9, func(db *state.DB) {
		a.must(db.RevokeKey(t.Context(), "irevoked", time.Now()))
		a.must(db.PutOwner(t.Context(), access.Owner{Name: "erin", Role: access.RoleAdmin, Disabled: true}))
		a.must(db.PutOwner(t.Context(), access.Owner{Name: "boss", Role: access.RoleViewer}))
		a.must(db.SetPortToken(t.Context(), "sbchangedaaaaa", []byte("second")))
		a.must(db.SetPortToken(t.Context(), "sbclosedaaaaaa", nil))
		_, err := db.DeletePort(t.Context(), "posbclosedaaaaaa")
		a.must(err)
		for i, w := range []access.Owner{{Role: access.RoleDeveloper, Disabled: true}, {Role: access.RoleViewer}, {Role: access.RoleOperator}, {Role: access.RoleDeveloper}} {
			w.Name = fmt.Sprint("uid:", 7000+i) // nobody of the old one's
			a.must(db.PutOwner(t.Context(), w))
		}
		a.must(db.InsertKey(t.Context(), access.Key{ID: "late", Owner: "late"}, access.Owner{Name: "late", Role: access.RoleAdmin}))
	})
	check := func(when, said string, want []string, not ...string) {
		t.Helper()
		for _, w := range want {
			if !strings.Contains(said, w) {
				t.Errorf("%s, restore does not say %q:\n%s", when, w, said)
			}
		}
		for _, n := range not {
			if strings.Contains(said, n) {
				t.Errorf("%s, restore says %q:\n%s", when, n, said)
			}
		}
	}
	again := []string{"older than its volume", "sandboxd recover", "key revoke irevoked'", "owner set erin --disable'", "owner set boss --role viewer'", "owner set uid:7000 --disable'", "owner set uid:7001 --role viewer'", "port token sbchangedaaaaa'", "port token sbclosedaaaaaa'", "port rm posbclosedaaaaaa'"}
	said, newer := a.restore(old)
	check("an old one", said, again, "ikept", "sbkeptaaaaaaaa", "ithird", "late", "7002", "7003")
	said, _ = a.restore(old)
	check("an old one again", said, again, "ikept", "sbkeptaaaaaaaa", "ithird", "late", "7002", "7003")
	a.Access.SocketRole = access.RoleOperator
	said, _ = a.restore(old)
	check("where users of the socket are operators", said, append([]string{"owner set uid:7003 --role developer'"}, again...), "7002")
	a.Access.SocketRole = ""
	said, _ = a.restore(newer)
	check("the newer one", said, []string{"Database and volume agree"}, "Key ", "Owner ", "ort ", "recover", "newer than it")

	other := newArchive(t, "j")
	said, own := a.restore(other.copy())
	check("another installation's", said, []string{"another installation's", "sandboxd restore " + own}, "Key ", "Owner ")
	said, _ = a.restore(own)
	check("its own again", said, []string{"Database and volume agree"}, "Key ", "Owner ", "another installation's")

	a.change("i", 10, func(db *state.DB) { a.must(db.DropKeys(t.Context(), []string{"ikept"})) })
	said, _ = a.restore(newer) // its name is the database's own again
	check("one with a removed key", said, []string{"key revoke ikept'"}, "Owner ", "ithird", "irevoked")
	a.must(os.WriteFile(filepath.Join(a.StateDir, "sandboxd.db"), []byte("scribbled over"), 0o600))
	said, _ = a.restore(old)
	check("in the place of a damaged one", said, append(again, "cannot be compared"))
}

// TestNextBackupAfterTheClockWasSetBack: a backup of the future does not keep the next
// ones from being made.
func TestNextBackupAfterTheClockWasSetBack(t *testing.T) {
	a := archive{config{StateDir: t.TempDir()}, t}
	a.Backup.Every = duration(time.Hour)
	a.must(os.Mkdir(a.backupDir(), 0o700))
	path := filepath.Join(a.backupDir(), "sandboxd-20991231T000000Z"+backupEnd)
	a.must(os.WriteFile(path, nil, 0o600))
	for at, due := range map[time.Duration]bool{-2 * time.Hour: true, -time.Minute: false, 100 * time.Hour: true} {
		when := time.Now().Add(at)
		a.must(os.Chtimes(path, when, when))
		if wait, err := a.nextBackup("sandboxd"); err != nil || (wait <= 0) != due {
			t.Errorf("with one of %s: %s, %v", at, wait, err)
		}
	}
}

// TestBackupsOfTheFutureGoFirst: one that is just made stays, whatever a clock that went
// ahead has called those before it.
func TestBackupsOfTheFutureGoFirst(t *testing.T) {
	a := newArchive(t, "i")
	a.Backup.Keep = 2
	a.must(os.Mkdir(a.backupDir(), 0o700))
	for _, year := range []string{"2001", "2098", "2099"} {
		a.must(os.WriteFile(filepath.Join(a.backupDir(), "sandboxd-"+year+"0101T000000Z"+backupEnd), nil, 0o600))
	}
	a.change("i", 9, func(db *state.DB) { a.must(a.backUp(t.Context(), "sandboxd", db)) })
	all, err := a.backupsOf("sandboxd")
	if err != nil || len(all) != 2 || !strings.Contains(all[0], "-2001") || strings.Contains(all[1], "-209") {
		t.Errorf("left: %q, %v", all, err)
	}
}

// TestRestoreOfProduction: what was set aside of the production world goes back there.
func TestRestoreOfProduction(t *testing.T) {
	a := newArchive(t, "i")
	before, err := os.ReadFile(filepath.Join(a.StateDir, "sandboxd.db"))
	a.must(err)
	aside := filepath.Join(a.StateDir, "production.db.before-20200101T000000.000000Z")
	a.must(os.WriteFile(aside, before, 0o600))
	said, _ := a.restore(aside)
	if !strings.HasPrefix(said, filepath.Join(a.StateDir, "production.db")+" is ") {
		t.Errorf("restore says %s", said)
	}
}

// TestRestoreRefuses: what is no file to the end, or no database, or has no room,
// is refused before it is copied; a signal ends the copy. Nothing is left.
func TestRestoreRefuses(t *testing.T) {
	a := newArchive(t, "i")
	list := func() []string {
		all, err := filepath.Glob(filepath.Join(a.StateDir, "*"))
		a.must(err)
		return all
	}
	dir, had := t.TempDir(), list()
	put := func(name, text string, size int64) string {
		path := filepath.Join(dir, name)
		a.must(os.WriteFile(path, []byte(text), 0o600))
		a.must(os.Truncate(path, size))
		return path
	}
	pipe := filepath.Join(dir, "pipe")
	a.must(unix.Mkfifo(pipe, 0o600))
	var st unix.Statfs_t
	a.must(unix.Statfs(a.StateDir, &st))
	good := a.copy()
	for path, code := range map[string]string{
		pipe: "not_a_backup", "/dev/null": "not_a_backup", dir: "not_a_backup", put("empty", "", 0): "not_a_backup", put("text", "root:x:0:0", 1<<20): "not_a_backup",
		put("large", "SQLite format 3\x00", int64(st.Bfree)*st.Bsize+1<<30): "disk_full", good: "internal",
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		if path == good {
			cancel()
		}
		err := putBack(ctx, a.config, path, t.Output())
		late := ctx.Err() != nil && path != good
		cancel()
		if err == nil || sandbox.CodeOf(err) != code || late || !slices.Equal(list(), had) {
			t.Errorf("restore of %s: %v (code %q, want %q); there is %q, was %q", path, err, sandbox.CodeOf(err), code, list(), had)
		}
	}
	a.must(os.WriteFile(filepath.Join(a.StateDir, "sandboxd.db"+restoredEnd+"-wal"), []byte("of one that was killed"), 0o600))
	a.restore(good)
	if left, _ := filepath.Glob(filepath.Join(a.StateDir, "*"+restoredEnd+"*")); len(left) > 0 {
		t.Errorf("restore leaves %q", left)
	}
}
