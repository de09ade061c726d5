package state

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/mattn/go-sqlite3"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestVersionGate(t *testing.T) {
	for n, ok := range map[int]bool{
		3051002: false, 3051003: true, 3051004: true, 3052000: false, 3053000: true, 3053004: true, 4000000: true,
	} {
		if versionOK(n) != ok {
			t.Errorf("SQLite %s: %v, want %v", versionString(n), !ok, ok)
		}
	}
	if _, n, _ := sqlite3.Version(); !versionOK(n) {
		t.Errorf("the linked SQLite %s is refused", versionString(n))
	}
}

// TestEveryConnectionIsConfigured holds several connections at once, so that
// each is a different one.
func TestEveryConnectionIsConfigured(t *testing.T) {
	d := open(t)
	conns := map[string]*sql.Conn{"writer": d.writer}
	for i := range 3 {
		c, err := d.reader.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns[fmt.Sprint("reader ", i)] = c
	}
	for name, c := range conns {
		queryOnly := "1"
		if c == d.writer {
			queryOnly = "0"
		}
		for pragma, value := range map[string]string{
			"journal_mode": "wal", "synchronous": "1", "foreign_keys": "1", "busy_timeout": "5000", "query_only": queryOnly,
		} {
			var got string
			if err := c.QueryRowContext(t.Context(), "PRAGMA "+pragma).Scan(&got); err != nil || got != value {
				t.Errorf("%s: %s is %q, error %v; want %q", name, pragma, got, err, value)
			}
		}
	}
}

func TestFileIsPrivateAndPathsAreTakenLiterally(t *testing.T) {
	path := filepath.Join(t.TempDir(), "odd ?name%41#.db")
	create(t, openAt(t, path), "")
	for _, p := range []string{path, path + "-wal"} {
		if st, err := os.Stat(p); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, error %v; want mode 0600", p, st, err)
		}
	}
}

func TestNotADatabase(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	if err := os.WriteFile(path, []byte(strings.Repeat("not a database. ", 100)), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), path); err == nil || !strings.Contains(err.Error(), path) {
		t.Fatalf("error %v, want one that names %s", err, path)
	}
}

func TestTranslate(t *testing.T) {
	for _, c := range []struct {
		in    error
		class error
	}{
		{sqlite3.Error{Code: sqlite3.ErrBusy}, sandbox.ErrUnavailable},
		{sqlite3.Error{Code: sqlite3.ErrLocked}, sandbox.ErrUnavailable},
		{sqlite3.Error{Code: sqlite3.ErrConstraint}, sandbox.ErrConflict},
		{sqlite3.Error{Code: sqlite3.ErrFull}, sandbox.ErrExhausted},
		{sqlite3.Error{Code: sqlite3.ErrCorrupt}, nil},
		{context.DeadlineExceeded, sandbox.ErrDeadline},
		{context.Canceled, nil},
		{errors.New("other"), nil},
		{nil, nil},
		{sandbox.Errorf(sandbox.ErrNotFound, "x", "x"), sandbox.ErrNotFound},
	} {
		out := translate(c.in)
		if !errors.Is(out, c.in) || !errors.Is(sandbox.ClassOf(out), c.class) {
			t.Errorf("%v: %v of class %v, want class %v and the cause kept", c.in, out, sandbox.ClassOf(out), c.class)
		}
	}
}

// TestFullDisk bounds the database's pages, which SQLite reports just as it
// does a full disk.
func TestFullDisk(t *testing.T) {
	d := open(t)
	sb := create(t, d, "")
	if _, err := d.writer.ExecContext(t.Context(), `PRAGMA max_page_count = 1`); err != nil { // clamped to the present size
		t.Fatal(err)
	}
	err := d.Update(t.Context(), sb.ID, Change{LastOutput: make([]byte, maxTail)})
	want(t, err, sandbox.ErrExhausted, "disk_full")
	if _, err := d.writer.ExecContext(t.Context(), `PRAGMA max_page_count = 1000000`); err != nil {
		t.Fatal(err)
	}
	if err := d.Update(t.Context(), sb.ID, Change{LastOutput: make([]byte, maxTail)}); err != nil {
		t.Fatalf("with room again: %v", err)
	}
}

func TestCancelledCallerWritesNothing(t *testing.T) {
	d := open(t)
	d.turn <- struct{}{} // someone writes
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, _, err := d.CreateSandbox(ctx, params(""))
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("error %v, want cancelled", err)
	}
	<-d.turn
	if n := leases(t, d); n != 0 {
		t.Fatalf("%d leases, want none", n)
	}
	create(t, d, "") // and the turn was given back
}

func TestReadersDoNotWaitForTheWriter(t *testing.T) {
	d := open(t)
	sb := create(t, d, "")
	err := d.write(t.Context(), func(tx *tx) error {
		if _, err := tx.exec(`UPDATE sandboxes SET detail = 'unseen'`); err != nil {
			return err
		}
		got, err := d.Sandbox(t.Context(), sb.ID)
		if err == nil && got.Detail != "" {
			t.Errorf("a reader saw %q before the commit", got.Detail)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := d.Sandbox(t.Context(), sb.ID); err != nil || got.Detail != "unseen" {
		t.Fatalf("after the commit %q, error %v", got.Detail, err)
	}
}

func TestSubscribersWakeAfterCommit(t *testing.T) {
	d := open(t)
	woken, cancel := d.Subscribe()
	defer cancel()
	sb := create(t, d, "")
	select {
	case <-woken:
	default:
		t.Fatal("no token after a create returned")
	}
	if err := d.Update(t.Context(), sb.ID, Change{}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-woken:
		t.Fatal("a token without an event")
	default:
	}
	cancel()
	cancel()
	if _, err := d.AppendEvent(t.Context(), sandbox.Event{Type: "x"}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-woken:
		t.Fatal("a token after the subscription ended")
	default:
	}
}

func TestEventsResumeAndPrune(t *testing.T) {
	d := open(t)
	a, b := create(t, d, ""), create(t, d, "")
	var last int64
	for i := range 5 {
		id := a.ID
		if i%2 == 1 {
			id = b.ID
		}
		seq, err := d.AppendEvent(t.Context(), sandbox.Event{Sandbox: id, Type: "t", Data: map[string]string{"i": string(rune('0' + i))}})
		if err != nil || seq <= last {
			t.Fatalf("seq %d after %d, error %v", seq, last, err)
		}
		last = seq
	}
	seqs := func(after int64, id sandbox.ID, limit int) (out []int64) {
		t.Helper()
		events, err := d.Events(t.Context(), after, id, limit)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range events {
			out = append(out, e.Seq)
		}
		return out
	}
	for _, c := range []struct {
		after int64
		id    sandbox.ID
		limit int
		want  []int64
	}{
		{0, "", 0, []int64{1, 2, 3, 4, 5, 6, 7}},
		{5, "", 0, []int64{6, 7}},
		{0, "", 2, []int64{1, 2}},
		{0, b.ID, 0, []int64{2, 4, 6}},
		{7, "", 0, nil},
	} {
		if diff := cmp.Diff(c.want, seqs(c.after, c.id, c.limit)); diff != "" {
			t.Errorf("after %d of %q (-want +got):\n%s", c.after, c.id, diff)
		}
	}
	if err := d.Prune(t.Context(), 10, 2); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]int64{6, 7}, seqs(0, "", 0)); diff != "" {
		t.Fatalf("kept (-want +got):\n%s", diff)
	}
	if err := d.Prune(t.Context(), 10, 0); err != nil {
		t.Fatal(err)
	}
	if seq, err := d.AppendEvent(t.Context(), sandbox.Event{Type: "t"}); err != nil || seq != last+1 {
		t.Fatalf("seq %d after all were pruned, error %v; want %d: numbers are never used again", seq, err, last+1)
	}
}

func TestPruneKeepsTheLivingAndTheNewest(t *testing.T) {
	d := open(t)
	var ended []sandbox.Sandbox
	for range 4 {
		sb := bring(t, d, create(t, d, ""), sandbox.StatusCompleted)
		if err := d.PutProcess(t.Context(), sb.ID, sandbox.Process{ID: "p1", Argv: []string{"true"}}, []byte("x")); err != nil {
			t.Fatal(err)
		}
		ended = append(ended, sb)
	}
	living := create(t, d, "")
	if err := d.Prune(t.Context(), 2, 1000); err != nil {
		t.Fatal(err)
	}
	for i, sb := range append(ended, living) {
		_, err := d.Sandbox(t.Context(), sb.ID)
		if gone := i < 2; gone != errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("sandbox %d: error %v, want gone %v", i, err, gone)
		}
		procs, err := d.Processes(t.Context(), sb.ID)
		if kept := i == 2 || i == 3; err != nil || kept != (len(procs) == 1) {
			t.Errorf("sandbox %d: %d processes, error %v, want kept %v", i, len(procs), err, kept)
		}
	}
	want(t, d.Prune(t.Context(), -1, 0), sandbox.ErrInvalid, "invalid_prune")
}

func TestImages(t *testing.T) {
	d := open(t)
	img := sandbox.Image{Name: "debian:12", Digest: "sha256:1", Kind: sandbox.ImageTar, Layers: []string{"a", "b"}, Config: sandbox.ImageConfig{Env: []string{"A=b"}}}
	want(t, d.DeleteImage(t.Context(), img.Name), sandbox.ErrNotFound, "image_not_found")
	for _, digest := range []string{"sha256:1", "sha256:2"} {
		img.Digest = digest
		if err := d.PutImage(t.Context(), img); err != nil {
			t.Fatal(err)
		}
		got, err := d.Image(t.Context(), img.Name)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(img, got); diff != "" {
			t.Fatalf("image (-want +got):\n%s", diff)
		}
	}
	p := params("")
	p.Sandbox.Spec.Image = img.Name
	sb, _, err := d.CreateSandbox(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	want(t, d.DeleteImage(t.Context(), img.Name), sandbox.ErrConflict, "image_in_use")
	bring(t, d, sb, sandbox.StatusFailed)
	if err := d.DeleteImage(t.Context(), img.Name); err != nil {
		t.Fatal(err)
	}
	_, err = d.Image(t.Context(), img.Name)
	want(t, err, sandbox.ErrNotFound, "image_not_found")
	if all, err := d.Images(t.Context()); err != nil || len(all) != 0 {
		t.Fatal(all, err)
	}
}

// TestReplacedImageStaysWithItsSandboxes replaces an image under a sandbox.
func TestReplacedImageStaysWithItsSandboxes(t *testing.T) {
	d := open(t)
	img := sandbox.Image{Name: "x", Digest: "1", Layers: []string{"base", "one"}, CreatedAt: time.Now().UTC()}
	put := func() {
		t.Helper()
		if err := d.PutImage(t.Context(), img); err != nil {
			t.Fatal(err)
		}
	}
	layers := func() []string {
		t.Helper()
		all, err := d.LayersInUse(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		slices.Sort(all)
		return all
	}
	put()
	old, err := d.Image(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	p := params("")
	p.Image = old
	sb, _, err := d.CreateSandbox(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	img.Digest, img.Layers = "2", []string{"base", "two"}
	put()
	if got, err := d.ImageOf(t.Context(), sb.ID); err != nil || got.Digest != "1" {
		t.Fatalf("made of %+v, %v; want digest 1", got, err)
	}
	if diff := cmp.Diff([]string{"base", "one", "two"}, layers()); diff != "" {
		t.Fatalf("in use (-want +got):\n%s", diff)
	}
	// Who read the image before it was replaced must read again.
	p = params("")
	p.Image = old
	_, _, err = d.CreateSandbox(t.Context(), p)
	want(t, err, sandbox.ErrConflict, "image_changed")
	bring(t, d, sb, sandbox.StatusFailed)
	if diff := cmp.Diff([]string{"base", "two"}, layers()); diff != "" {
		t.Fatalf("in use after the end (-want +got):\n%s", diff)
	}
	_, err = d.ImageOf(t.Context(), create(t, d, "").ID)
	want(t, err, sandbox.ErrNotFound, "image_not_found")
}

func TestProcessesOutliveTheirSandbox(t *testing.T) {
	d := open(t)
	sb := create(t, d, "")
	long := append(make([]byte, maxTail), "the end"...)
	for _, id := range []sandbox.ProcessID{"p10", "p9"} {
		if err := d.PutProcess(t.Context(), sb.ID, sandbox.Process{ID: id, Argv: []string{"a", "b"}}, long); err != nil {
			t.Fatal(err)
		}
	}
	// The record is replaced, the tail stays where none is given.
	exit := &sandbox.ExitStatus{Code: 137, Signal: "SIGKILL", OOM: true}
	if err := d.PutProcess(t.Context(), sb.ID, sandbox.Process{ID: "p9", Argv: []string{"a", "b"}, Exit: exit}, nil); err != nil {
		t.Fatal(err)
	}
	late := Change{LastOutput: []byte("last"), Processes: []ProcessRecord{{Process: sandbox.Process{ID: "p11"}, Tail: long}}}
	if err := d.Update(t.Context(), sb.ID, late); err != nil {
		t.Fatal(err)
	}
	if sb = bring(t, d, sb, sandbox.StatusFailed); string(sb.LastOutput) != "last" {
		t.Errorf("last output %q, want that of the update", sb.LastOutput)
	}
	got, err := d.Processes(t.Context(), sb.ID)
	if err != nil || len(got) != 3 || got[0].ID != "p9" || got[1].ID != "p10" || got[2].ID != "p11" {
		t.Fatalf("%+v, error %v; want p9, p10 and p11", got, err)
	}
	if diff := cmp.Diff(exit, got[0].Exit); diff != "" {
		t.Fatalf("exit (-want +got):\n%s", diff)
	}
	for _, p := range got {
		if len(p.Tail) != maxTail || !strings.HasSuffix(string(p.Tail), "the end") {
			t.Fatalf("%s: %d bytes kept, want the last %d", p.ID, len(p.Tail), maxTail)
		}
	}
	want(t, d.PutProcess(t.Context(), sandbox.NewID(), sandbox.Process{ID: "p1"}, nil), sandbox.ErrConflict, "database_constraint")
	for _, bad := range []sandbox.ProcessID{"", "p", "1", "p-1", "px"} {
		want(t, d.PutProcess(t.Context(), sb.ID, sandbox.Process{ID: bad}, nil), sandbox.ErrInvalid, "invalid_process_id")
	}
}

func BenchmarkCreate(b *testing.B) {
	d := open(b)
	for b.Loop() {
		p := params("")
		p.Slots = 1 << 20
		if _, _, err := d.CreateSandbox(b.Context(), p); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkMove(b *testing.B) {
	d := open(b)
	sb := bring(b, d, create(b, d, ""), sandbox.StatusRunning)
	next := map[sandbox.Status]sandbox.Status{sandbox.StatusRunning: sandbox.StatusPaused, sandbox.StatusPaused: sandbox.StatusRunning}
	for b.Loop() {
		moved, err := d.Move(b.Context(), sb.ID, []sandbox.Status{sb.Status}, next[sb.Status], Change{})
		if err != nil {
			b.Fatal(err)
		}
		sb = moved
	}
}

func BenchmarkUpdateUsage(b *testing.B) {
	d := open(b)
	sb := create(b, d, "")
	for b.Loop() {
		if err := d.Update(b.Context(), sb.ID, Change{Usage: &sandbox.Usage{CPUSeconds: 1, MemoryBytes: 5}}); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkSandbox(b *testing.B) {
	d := open(b)
	sb := create(b, d, "")
	for b.Loop() {
		if _, err := d.Sandbox(b.Context(), sb.ID); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkCreateRunning is the whole write of a sandbox that is made from
// a shell of the pool.
func BenchmarkCreateRunning(b *testing.B) {
	d := open(b)
	img := sandbox.Image{Name: "host", Digest: "sha256:1", Kind: sandbox.ImageHost, Layers: []string{"a", "b"}, CreatedAt: time.Now().UTC()}
	if err := d.PutImage(b.Context(), img); err != nil {
		b.Fatal(err)
	}
	var took []time.Duration
	for b.Loop() {
		b.StopTimer()
		slot, err := d.ReserveSlot(b.Context(), 1<<20, 0)
		if err != nil {
			b.Fatal(err)
		}
		now, pid, start, boot, addr := time.Now(), 4242, uint64(777), "boot", netip.AddrFrom4([4]byte{10, 200, 0, byte(slot)})
		p := params("")
		p.Slot, p.Status, p.Image = &slot, sandbox.StatusRunning, img
		p.IdempotencyKey, p.RequestHash = string(p.Sandbox.ID), "hash"
		p.Change = Change{
			StartedAt: &now, Deadline: &now, Address: &addr, InitPID: &pid, InitStart: &start, BootID: &boot,
			Enforcement: []sandbox.Enforcement{{Limit: "cpu", Asked: "2", Enforced: true}, {Limit: "memory", Asked: "2", Enforced: true}, {Limit: "pids", Asked: "2", Enforced: true}},
		}
		b.StartTimer()
		begun := time.Now()
		if _, _, err := d.CreateSandbox(b.Context(), p); err != nil {
			b.Fatal(err)
		}
		took = append(took, time.Since(begun))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "median-ns")
	b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds()), "p99-ns")
	b.ReportMetric(float64(took[len(took)-1].Nanoseconds()), "max-ns")
}

// TestInstallation: what was stamped is read at the next open; a table from
// before there were nonces gets the column.
func TestInstallation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	for _, nonce := range []string{"one", "two"} {
		d := openAt(t, path)
		if err := d.Stamp(t.Context(), "i", 7, nonce); err != nil {
			t.Fatal(err)
		}
		in := openAt(t, path).Installation()
		if in.ID != "i" || in.Generation != 7 || in.Nonce != nonce || in.Made {
			t.Fatalf("read: %+v", in)
		}
		if _, err := d.writer.ExecContext(t.Context(), `ALTER TABLE installation DROP COLUMN nonce`); err != nil {
			t.Fatal(err)
		}
		if in := openAt(t, path).Installation(); in.ID != "i" || in.Generation != 7 || in.Nonce != "" {
			t.Fatalf("read of before: %+v", in)
		}
	}
}
