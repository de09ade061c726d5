package access

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// ledger is an audit store of tests.
type ledger struct {
	AuditStore
	mu      sync.Mutex
	rows    []AuditRow
	commits int
	lasting int // rows that are on disk
	fail    error
}

func (l *ledger) AppendAudit(_ context.Context, rows []AuditRow, lasting bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fail != nil {
		return l.fail
	}
	l.commits++
	l.rows = append(l.rows, rows...)
	if lasting {
		l.lasting = len(l.rows)
	}
	return nil
}

func (l *ledger) set(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fail = err
}

func (l *ledger) counts() (rows, commits, lasting int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.rows), l.commits, l.lasting
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(what)
		}
	}
}

func TestJournalGathers(t *testing.T) {
	l := &ledger{}
	j := OpenJournal(l, nil)
	for i := range 1000 {
		j.Note(AuditRow{Seq: int64(i)})
	}
	until(t, "the rows are not written", func() bool { n, _, _ := l.counts(); return n == 1000 })
	if _, commits, _ := l.counts(); commits > 100 {
		t.Errorf("%d transactions for 1000 rows", commits)
	}
	until(t, "the rows do not go to the disk", func() bool { _, _, n := l.counts(); return n == 1000 })
	if err := j.NoteNow(t.Context(), AuditRow{Seq: 1000}); err != nil {
		t.Fatal(err)
	}
	if _, _, n := l.counts(); n != 1001 {
		t.Errorf("%d rows on disk when somebody waited for 1001", n)
	}
	j.Note(AuditRow{Seq: 1001})
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if _, _, n := l.counts(); n != 1002 {
		t.Errorf("%d rows on disk at the end", n)
	}
	for i, e := range l.rows {
		if e.Seq != int64(i) || e.Time.IsZero() {
			t.Fatalf("row %d is %+v", i, e)
		}
	}
	if err := j.Ready(); !errors.Is(err, sandbox.ErrUnavailable) {
		t.Errorf("after the end: %v", err)
	}
}

// TestJournalLosesNothing: while the store refuses, rows wait; when there are
// too many, nothing more may be done.
func TestJournalLosesNothing(t *testing.T) {
	l := &ledger{fail: errors.New("disk full")}
	j := OpenJournal(l, slog.New(slog.DiscardHandler))
	j.Note(AuditRow{})
	if err := j.NoteNow(t.Context(), AuditRow{}); !errors.Is(err, l.fail) {
		t.Errorf("%v", err)
	}
	if err := j.Ready(); err != nil {
		t.Errorf("with two rows waiting: %v", err)
	}
	for range backlog {
		j.Note(AuditRow{})
	}
	if err := j.Ready(); sandbox.CodeOf(err) != "audit_unavailable" {
		t.Errorf("%v", err)
	}
	l.set(nil)
	until(t, "the rows are not written", func() bool { n, _, _ := l.counts(); return n == backlog+2 })
	until(t, "not ready again", func() bool { return j.Ready() == nil })
	if err := j.Close(); err != nil {
		t.Error(err)
	}
	if err := j.Close(); err != nil {
		t.Error(err)
	}
}

// TestRefusalsAreBounded: a flood of refused calls leaves few rows, which say how
// many they were, and every row of what was done.
func TestRefusalsAreBounded(t *testing.T) {
	l := &ledger{}
	j := OpenJournal(l, slog.New(slog.DiscardHandler))
	for i := range 20000 {
		j.Note(AuditRow{Owner: "bob", Operation: "exec", Status: 403})
		if i%200 == 0 {
			j.Note(AuditRow{Owner: "alice", Operation: "exec", Status: 404})
		}
		if i%20 == 0 {
			j.Note(AuditRow{Owner: "bob", Operation: "exec", Status: 200})
		}
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	var refused, told, done, others int
	for _, e := range l.rows {
		switch {
		case e.Owner == "alice":
			others++
		case e.Status == 200:
			done++
		case e.Operation == "refused":
			told++
			if !strings.Contains(e.Object, "calls, the last: exec") {
				t.Errorf("%q", e.Object)
			}
		default:
			refused++
		}
	}
	if refused < refusalsAtOnce || refused > refusalsAtOnce+20 || told == 0 || done != 1000 || others != 100 {
		t.Errorf("%d refused, %d that tell of more, %d done, %d of somebody else", refused, told, done, others)
	}
}
