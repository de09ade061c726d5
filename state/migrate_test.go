package state

import (
	"database/sql"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"testing/fstest"

	"github.com/sandboxd/sandboxd/sandbox"
)

// bare opens a database without a schema, as Open would before migrating.
func bare(t *testing.T, path string) *sql.DB {
	t.Helper()
	name, err := dsn(path, false)
	if err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open("sqlite3", name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

func version(t *testing.T, db *sql.DB) (n int) {
	t.Helper()
	if err := db.QueryRow(`SELECT version FROM schema_version`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func files(scripts ...string) fs.FS {
	m := fstest.MapFS{}
	for i, s := range scripts {
		m[fmt.Sprintf("%04d_x.sql", i+1)] = &fstest.MapFile{Data: []byte(s)}
	}
	return m
}

func TestMigrateStepByStep(t *testing.T) {
	db := bare(t, filepath.Join(t.TempDir(), "x.db"))
	one := `CREATE TABLE a (x INTEGER); INSERT INTO a VALUES (1);`
	two := `ALTER TABLE a ADD COLUMN y INTEGER; UPDATE a SET y = x + 1;`
	for range 2 {
		if err := migrate(t.Context(), db, files(one)); err != nil || version(t, db) != 1 {
			t.Fatalf("version %d, %v", version(t, db), err)
		}
	}
	// A step that fails half-way leaves the version before it, whole.
	if err := migrate(t.Context(), db, files(one, `UPDATE a SET x = 9; SELECT nothing FROM nowhere;`)); err == nil {
		t.Fatal("a broken migration passed")
	}
	var x, y int
	if err := db.QueryRow(`SELECT x FROM a`).Scan(&x); err != nil || x != 1 || version(t, db) != 1 {
		t.Fatalf("x %d at version %d after a broken migration, %v", x, version(t, db), err)
	}
	if err := migrate(t.Context(), db, files(one, two, `CREATE TABLE b (x INTEGER);`)); err != nil || version(t, db) != 3 {
		t.Fatalf("version %d, %v", version(t, db), err)
	}
	if err := db.QueryRow(`SELECT x, y FROM a`).Scan(&x, &y); err != nil || x != 1 || y != 2 {
		t.Fatalf("x %d, y %d, %v", x, y, err)
	}
	want(t, migrate(t.Context(), db, files(one, two)), sandbox.ErrUnsupported, "schema_newer")
}

func TestMigrationFilesAreNumbered(t *testing.T) {
	db := bare(t, filepath.Join(t.TempDir(), "x.db"))
	gap := fstest.MapFS{"0001_a.sql": {}, "0003_b.sql": {}}
	if err := migrate(t.Context(), db, gap); err == nil {
		t.Error("a gap in the numbers passed")
	}
	if err := migrate(t.Context(), bare(t, filepath.Join(t.TempDir(), "y.db")), migrations()); err != nil {
		t.Error(err)
	}
}

func TestNewerSchemaIsRefusedUntouched(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	d := openAt(t, path)
	if _, err := d.writer.ExecContext(t.Context(), `UPDATE schema_version SET version = version + 1`); err != nil {
		t.Fatal(err)
	}
	_, err := Open(t.Context(), path)
	want(t, err, sandbox.ErrUnsupported, "schema_newer")
	if _, err := d.writer.ExecContext(t.Context(), `UPDATE schema_version SET version = version - 1`); err != nil {
		t.Fatal(err)
	}
	openAt(t, path)
}

// TestFixturesOfEveryVersion opens a database as each released schema left
// it: testdata/vNNNN.sql, of the version NNNN, all with the same rows.
func TestFixturesOfEveryVersion(t *testing.T) {
	names, err := fs.Glob(migrations(), "*.sql")
	if err != nil {
		t.Fatal(err)
	}
	for n := 1; n <= len(names); n++ {
		script, err := os.ReadFile(fmt.Sprintf("testdata/v%04d.sql", n))
		if err != nil {
			t.Errorf("each version leaves a fixture for those after it: %v", err)
			continue
		}
		path := filepath.Join(t.TempDir(), "state.db")
		db := bare(t, path)
		if _, err := db.Exec(string(script)); err != nil {
			t.Fatal(err)
		}
		if got := version(t, db); got != n {
			t.Fatalf("testdata/v%04d.sql has schema version %d", n, got)
		}
		_ = db.Close()
		checkFixture(t, openAt(t, path))
	}
}

// checkFixture looks for the rows every fixture has, and works on.
func checkFixture(t *testing.T, d *DB) {
	t.Helper()
	rows, err := d.Living(t.Context())
	if err != nil || len(rows) != 1 {
		t.Fatalf("%d living, %v", len(rows), err)
	}
	r := rows[0]
	if r.ID != "sbaaaaaaaaaaaa" || r.Spec.Name != "web" || r.Status != sandbox.StatusRunning || r.Slot != 1 || r.UIDBase != 0x20010000 ||
		r.Address.String() != "10.200.0.1" || r.InitPID != 4242 || r.InitStart != 777 || r.BootID != "boot" || r.Deadline == nil ||
		r.Spec.Limits.MemoryBytes != 1<<28 || r.Usage.CPUSeconds != 1.5 || len(r.Enforcement) != 1 {
		t.Errorf("living %+v", r)
	}
	ended, err := d.ByName(t.Context(), "old")
	if err != nil || ended.Reason != sandbox.ReasonOOM || ended.ExitCode == nil || *ended.ExitCode != 137 || string(ended.LastOutput) != "bye" {
		t.Errorf("ended %+v, %v", ended, err)
	}
	procs, err := d.Processes(t.Context(), ended.ID)
	if err != nil || len(procs) != 1 || procs[0].ID != "p1" || string(procs[0].Tail) != "bye" {
		t.Errorf("processes %+v, %v", procs, err)
	}
	if img, err := d.Image(t.Context(), "host"); err != nil || img.Kind != sandbox.ImageHost {
		t.Errorf("image %+v, %v", img, err)
	}
	if img, err := d.ImageOf(t.Context(), r.ID); err != nil || len(img.Layers) != 1 || img.Layers[0] != "l0" {
		t.Errorf("made of %+v, %v", img, err)
	}
	events, err := d.Events(t.Context(), 0, "", 0)
	if err != nil || len(events) != 2 || events[1].Seq != 9 || events[1].Data["reason"] != "oom" {
		t.Errorf("events %+v, %v", events, err)
	}
	taken := params("web")
	taken.Sandbox.Owner = r.Owner
	_, _, err = d.CreateSandbox(t.Context(), taken)
	want(t, err, sandbox.ErrConflict, "name_taken")
	p := params("again")
	p.Sandbox.Owner, p.IdempotencyKey, p.RequestHash = "uid:7", "key", "hash"
	if sb, existed, err := d.CreateSandbox(t.Context(), p); err != nil || !existed || sb.ID != r.ID {
		t.Errorf("idempotency key: %s, %v, %v", sb.ID, existed, err)
	}
	bring(t, d, create(t, d, "new"), sandbox.StatusCompleted)
	end, err := d.Move(t.Context(), r.ID, []sandbox.Status{sandbox.StatusRunning}, sandbox.StatusFailed, Change{})
	if err != nil || end.EndedAt == nil || leases(t, d) != 0 {
		t.Errorf("ending the old sandbox: %v, %d leases", err, leases(t, d))
	}
}
