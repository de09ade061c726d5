package state

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestWaitersShareFsyncs lets fsyncs take as long as the test wants.
func TestWaitersShareFsyncs(t *testing.T) {
	begun, end := make(chan uint64), make(chan struct{})
	var k *disk
	k = newDisk(func() error {
		begun <- k.last.Load()
		<-end
		return nil
	})
	var served atomic.Int32
	var wg sync.WaitGroup
	wait := func() {
		commit := k.committed()
		wg.Go(func() {
			if err := k.wait(commit); err != nil {
				t.Error(err)
			}
			k.mu.Lock()
			defer k.mu.Unlock()
			if k.saved < commit {
				t.Errorf("commit %d returned with %d saved", commit, k.saved)
			}
			served.Add(1)
		})
	}
	next := func() uint64 {
		t.Helper()
		select {
		case n := <-begun:
			return n
		case <-time.After(20 * time.Second):
			t.Fatal("no fsync begins: somebody was served by one that began too early")
			return 0
		}
	}
	wait()
	if n := next(); n != 1 {
		t.Fatalf("the first fsync began after commit %d, want 1", n)
	}
	// These came after it began: it must not serve them, one more must serve all.
	const late = 10
	for range late {
		wait()
	}
	end <- struct{}{}
	if n := next(); n != 1+late {
		t.Fatalf("the second fsync began after commit %d, want %d", n, 1+late)
	}
	if n := served.Load(); n > 1 {
		t.Fatalf("%d served by an fsync that began before their commits", n-1)
	}
	end <- struct{}{}
	wg.Wait()
	if n := served.Load(); n != 1+late {
		t.Fatalf("%d served by two fsyncs, want %d", n, 1+late)
	}
	// A commit that an earlier fsync covered needs none.
	if err := k.wait(3); err != nil {
		t.Fatal(err)
	}
}

// counted counts the database's fsyncs.
func counted(d *DB) *atomic.Int64 {
	var n atomic.Int64
	inner := d.disk.sync
	d.disk.sync = func() error { n.Add(1); return inner() }
	return &n
}

func TestWhichWritesWaitForTheDisk(t *testing.T) {
	d := open(t)
	fsyncs := counted(d)
	img := sandbox.Image{Name: "x", Digest: "1"}
	one := create(t, d, "")
	port := sandbox.Port{ID: sandbox.NewPortID(), Sandbox: one.ID}
	move := func(to sandbox.Status, ch Change) func() error {
		return func() error {
			sb, err := d.Sandbox(t.Context(), one.ID)
			if err == nil {
				_, err = d.Move(t.Context(), one.ID, []sandbox.Status{sb.Status}, to, ch)
			}
			return err
		}
	}
	update := func(ch Change) func() error {
		return func() error { return d.Update(t.Context(), one.ID, ch) }
	}
	for _, c := range []struct {
		what  string
		write func() error
		want  int64
	}{
		{"create", func() error { _, _, err := d.CreateSandbox(t.Context(), params("")); return err }, 0},
		{"reserve", func() error { _, err := d.ReserveSlot(t.Context(), 9, 0); return err }, 0},
		{"release", func() error { return d.ReleaseReserved(t.Context()) }, 0},
		{"event", func() error { _, err := d.AppendEvent(t.Context(), sandbox.Event{Type: "x"}); return err }, 0},
		{"process", func() error { return d.PutProcess(t.Context(), one.ID, sandbox.Process{ID: "p1"}, nil) }, 0},
		{"put image", func() error { return d.PutImage(t.Context(), img) }, 1},
		{"delete image", func() error { return d.DeleteImage(t.Context(), img.Name) }, 1},
		{"creating", move(sandbox.StatusCreating, Change{}), 0},
		{"running", move(sandbox.StatusRunning, Change{}), 0},
		{"paused", move(sandbox.StatusPaused, Change{}), 0},
		{"update", update(Change{InitPID: new(int)}), 0},
		{"update of usage", update(Change{Usage: &sandbox.Usage{}}), 1},
		{"running with usage", move(sandbox.StatusRunning, Change{Usage: &sandbox.Usage{}}), 1},
		{"stopped", move(sandbox.StatusStopped, Change{}), 1},
		{"publish port", func() error { return d.PutPort(t.Context(), port) }, 1},
		{"unpublish port", func() error { _, err := d.DeletePort(t.Context(), port.ID); return err }, 1},
		{"set token", func() error { return d.SetPortToken(t.Context(), one.ID, []byte("x")) }, 1},
		{"remove token", func() error { return d.SetPortToken(t.Context(), one.ID, nil) }, 1},
		{"what was carried", func() error { return d.PutCarried(t.Context(), one.ID, Carried{InitStart: 1}) }, 0},
		{"started again", move(sandbox.StatusCreating, Change{}), 1},
		{"running again", move(sandbox.StatusRunning, Change{}), 0},
		{"completing", move(sandbox.StatusCompleting, Change{}), 0},
		{"completed", move(sandbox.StatusCompleted, Change{}), 1},
		{"free what it held", func() error { return d.FreeEnded(t.Context(), one.ID) }, 0},
		{"prune", func() error { return d.Prune(t.Context(), 0, 0) }, 0},
	} {
		before := fsyncs.Load()
		if err := c.write(); err != nil {
			t.Fatalf("%s: %v", c.what, err)
		}
		if n := fsyncs.Load() - before; n != c.want {
			t.Errorf("%s: %d fsyncs, want %d", c.what, n, c.want)
		}
	}
}

// TestManyWritersTwoFsyncs: those who commit during an fsync share the next,
// and the turn is free meanwhile.
func TestManyWritersTwoFsyncs(t *testing.T) {
	d := open(t)
	const writers = 16
	var all []sandbox.Sandbox
	for range writers {
		all = append(all, create(t, d, ""))
	}
	update := func(sb sandbox.Sandbox) {
		if err := d.Update(t.Context(), sb.ID, Change{Usage: &sandbox.Usage{OOMKills: 1}}); err != nil {
			t.Error(err)
		}
	}
	fsyncs := counted(d)
	for _, sb := range all { // the control: in turn, each needs its own
		update(sb)
	}
	if n := fsyncs.Swap(0); n != writers {
		t.Fatalf("%d fsyncs for %d writes in turn", n, writers)
	}
	before, held, inner := d.disk.last.Load(), make(chan struct{}), d.disk.sync
	d.disk.sync = func() error { <-held; return inner() }
	var wg sync.WaitGroup
	for _, sb := range all {
		wg.Go(func() { update(sb) })
	}
	testenv.Eventually(t, 20*time.Second, "all commit", func() bool { return d.disk.last.Load() == before+writers })
	close(held)
	wg.Wait()
	// One if all committed before the first fsync read the number.
	if n := fsyncs.Load(); n < 1 || n > 2 {
		t.Fatalf("%d fsyncs for %d writes at once, want 2", n, writers)
	}
}

func TestFailedFsyncIsTheLast(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	d := openAt(t, path)
	sb := create(t, d, "")
	usage := Change{Usage: &sandbox.Usage{OOMKills: 1}}
	if err := d.Update(t.Context(), sb.ID, usage); err != nil {
		t.Fatalf("with a good disk: %v", err)
	}
	calls := 0
	d.disk.sync = func() error {
		if calls++; calls == 1 {
			return syscall.EIO
		}
		return nil // Linux says so, and means nothing by it
	}
	usage.Usage.OOMKills = 2
	err := d.Update(t.Context(), sb.ID, usage)
	want(t, err, sandbox.ErrUnavailable, "database_not_durable")
	if !errors.Is(err, syscall.EIO) {
		t.Errorf("%v does not tell the cause", err)
	}
	usage.Usage.OOMKills = 3
	want(t, d.Update(t.Context(), sb.ID, usage), sandbox.ErrUnavailable, "database_not_durable")
	if calls != 1 {
		t.Errorf("%d fsyncs, want none after the one that failed", calls)
	}
	if got, err := d.Sandbox(t.Context(), sb.ID); err != nil || got.Usage.OOMKills != 2 {
		t.Errorf("usage %+v, error %v; want the write that was refused at once left out", got.Usage, err)
	}
	create(t, d, "") // what need not last goes on
	again := openAt(t, path)
	if err := again.Update(t.Context(), sb.ID, usage); err != nil {
		t.Errorf("after a restart: %v", err)
	}
}

// TestLogStaysTheSameFile: the descriptor that is fsynced is that of the log
// SQLite writes, whatever checkpoints do.
func TestLogStaysTheSameFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	d := openAt(t, path)
	same := func() {
		t.Helper()
		ours, err := d.log.Stat()
		if err != nil {
			t.Fatal(err)
		}
		theirs, err := os.Stat(path + "-wal")
		if err != nil || !os.SameFile(ours, theirs) {
			t.Fatalf("the log is another file now, %v", err)
		}
	}
	same()
	sb := create(t, d, "")
	for _, mode := range []string{"PASSIVE", "FULL", "RESTART", "TRUNCATE"} {
		for range 50 {
			if err := d.Update(t.Context(), sb.ID, Change{LastOutput: make([]byte, maxTail)}); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := d.writer.ExecContext(t.Context(), `PRAGMA wal_checkpoint(`+mode+`)`); err != nil {
			t.Fatal(err)
		}
		same()
	}
	// Another process's end is not that of the last connection.
	other := bare(t, path)
	if err := other.Ping(); err != nil {
		t.Fatal(err)
	}
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	same()
}

// TestEventNumbersAfterACrash: a power cut may take events that followers
// have read; theirs are not given to others.
func TestEventNumbersAfterACrash(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	append1 := func(d *DB) int64 {
		t.Helper()
		seq, err := d.AppendEvent(t.Context(), sandbox.Event{Type: "t"})
		if err != nil {
			t.Fatal(err)
		}
		return seq
	}
	d, err := Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if n := append1(d); n != 1 {
		t.Fatalf("first event %d", n)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	d = openAt(t, path)
	if n := append1(d); n != 2 {
		t.Fatalf("after a clean end %d, want 2: nothing was lost", n)
	}
	// Left open, as by a crash.
	if n := append1(openAt(t, path)); n != 3+lostNumbers {
		t.Fatalf("after a crash %d, want %d", n, 3+lostNumbers)
	}
}

// TestLogIsFoldedInTheBackground watches the database's own file, which only
// checkpoints write.
func TestLogIsFoldedInTheBackground(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	d := openAt(t, path)
	written := func() time.Time {
		t.Helper()
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		return st.ModTime()
	}
	before := written()
	sb := create(t, d, "")
	write := func() {
		t.Helper()
		if err := d.Update(t.Context(), sb.ID, Change{LastOutput: make([]byte, 32<<10)}); err != nil {
			t.Fatal(err)
		}
	}
	for d.disk.last.Load() < checkpointEvery-1 {
		write()
	}
	if !written().Equal(before) {
		t.Fatalf("%d commits were folded before their time", d.disk.last.Load())
	}
	write()
	testenv.Eventually(t, 20*time.Second, "a write to the database", func() bool { return written().After(before) })
}

// TestSyncBesideClose: a flush that was put off may come while the database is
// closed, and must then touch no other file that got its descriptor's number.
func TestSyncBesideClose(t *testing.T) {
	for range 50 {
		f, err := os.CreateTemp(t.TempDir(), "log")
		if err != nil {
			t.Fatal(err)
		}
		if err := fdatasync(f); err != nil { // control
			t.Fatal(err)
		}
		ended := make(chan error)
		go func() {
			var err error
			for err == nil {
				err = fdatasync(f)
			}
			ended <- err
		}()
		if err := f.Close(); err != nil {
			t.Error(err)
		}
		if err := <-ended; !errors.Is(err, os.ErrClosed) {
			t.Fatalf("after the close: %v", err)
		}
	}
}
