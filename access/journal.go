package access

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Times of the journal.
const (
	gather    = 5 * time.Millisecond // how long rows wait for others
	lastEvery = time.Second          // how often rows go to the disk that nobody waits for
	tryAgain  = 200 * time.Millisecond
	backlog   = 4096 // rows that wait while the store refuses
)

// Journal writes the audit, many rows with one transaction. A row that nobody
// waits for is in the database some milliseconds after Note, where the end of
// the daemon, kill -9 included, does not lose it, and on the disk about a
// second later.
type Journal struct {
	AuditStore
	log   *slog.Logger
	ended chan struct{}
	wake  chan struct{} // one token: there are rows
	stop  chan struct{}

	mu     sync.Mutex
	rows   []AuditRow
	waits  []chan error // of those who want the rows until now on disk
	full   bool         // the store refuses, and the backlog is full
	closed bool

	refusals map[string]*refusals // of owners; guarded by mu
}

// Bounds of rows about refused calls, so that who is refused writes nobody
// else's rows out of the audit.
const (
	refusalsAtOnce = 300 // rows of one owner
	refusalEvery   = 10 * time.Second
	refusalsToldIn = time.Minute // after which those without a row are told, in one
)

// refusals are those of one owner.
type refusals struct {
	pace   *rate.Limiter
	untold int      // without a row
	last   AuditRow // of these
}

// refused reports whether a refused call has a row of its own; j.mu is held.
func (j *Journal) refused(e AuditRow) bool {
	r := j.refusals[e.Owner]
	if r == nil {
		if j.refusals == nil {
			j.refusals = map[string]*refusals{}
		}
		r = &refusals{pace: rate.NewLimiter(rate.Every(refusalEvery), refusalsAtOnce)}
		j.refusals[e.Owner] = r
	}
	if r.pace.Allow() {
		return true
	}
	if r.untold++; r.untold == 1 {
		time.AfterFunc(refusalsToldIn, func() {
			j.mu.Lock()
			j.tell(r)
			j.mu.Unlock()
			j.rouse()
		})
	}
	r.last = e
	return false
}

// tell writes one row of refused calls that have none; j.mu is held.
func (j *Journal) tell(r *refusals) {
	if r.untold == 0 {
		return
	}
	e := r.last
	e.Operation, e.Object, e.Request = "refused", fmt.Sprintf("%d calls, the last: %s %.100s", r.untold, e.Operation, e.Object), ""
	r.untold = 0
	j.add(e)
}

// OpenJournal starts the writer; Close ends it.
func OpenJournal(store AuditStore, log *slog.Logger) *Journal {
	if log == nil {
		log = slog.Default()
	}
	j := &Journal{AuditStore: store, log: log, ended: make(chan struct{}), wake: make(chan struct{}, 1), stop: make(chan struct{})}
	go j.run()
	return j
}

// Ready is an error, of class ErrUnavailable, while the audit cannot be
// written: what is to be in it must not be done then.
func (j *Journal) Ready() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.full || j.closed {
		return sandbox.Errorf(sandbox.ErrUnavailable, "audit_unavailable", "the audit cannot be written, so nothing may be changed: the daemon's log says why; make room on the disk with the database, or mend it")
	}
	return nil
}

// Note has a row written soon. Of calls that were refused an owner has some
// hundred, and then one in some seconds; of the others one row a minute says how many they were.
func (j *Journal) Note(e AuditRow) {
	j.mu.Lock()
	if e.Status < 400 || j.refused(e) {
		j.add(e)
	}
	j.mu.Unlock()
	j.rouse()
}

// NoteNow returns when the row, and every one before it, is on disk.
func (j *Journal) NoteNow(ctx context.Context, e AuditRow) error {
	done := make(chan error, 1)
	j.mu.Lock()
	if j.closed {
		j.mu.Unlock()
		return sandbox.Errorf(sandbox.ErrUnavailable, "shutting_down", "the daemon is shutting down: try again in a moment")
	}
	j.add(e)
	j.waits = append(j.waits, done)
	j.mu.Unlock()
	j.rouse()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// add takes a row; j.mu is held. What was done must be told even when there
// is no more room: Ready keeps more from being done.
func (j *Journal) add(e AuditRow) {
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	e.Time = e.Time.UTC()
	j.rows = append(j.rows, e)
	j.full = len(j.rows) >= backlog
}

func (j *Journal) rouse() {
	select {
	case j.wake <- struct{}{}:
	default:
	}
}

// Close writes what is left and ends the writer.
func (j *Journal) Close() error {
	j.mu.Lock()
	if j.closed {
		j.mu.Unlock()
		return nil
	}
	for _, r := range j.refusals {
		j.tell(r)
	}
	j.closed = true
	j.mu.Unlock()
	close(j.stop)
	<-j.ended
	return j.write(true)
}

func (j *Journal) run() {
	defer close(j.ended)
	var lasted time.Time // when rows last went to the disk
	var loose bool       // some have not
	idle := time.NewTimer(time.Hour)
	defer idle.Stop()
	for {
		idle.Reset(time.Hour)
		if loose {
			idle.Reset(lastEvery)
		}
		select {
		case <-j.stop:
			return
		case <-idle.C:
			if !loose {
				continue
			}
		case <-j.wake:
			if !j.waited() && !j.pause(gather) {
				return
			}
		}
		lasting := j.waited() || time.Since(lasted) >= lastEvery
		for j.write(lasting) != nil {
			if !j.pause(tryAgain) {
				return
			}
		}
		loose = !lasting
		if lasting {
			lasted = time.Now()
		}
	}
}

func (j *Journal) waited() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.waits) > 0
}

// pause reports whether the time passed without the end coming.
func (j *Journal) pause(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-j.stop:
		return false
	}
}

// maxBatch bounds a transaction.
const maxBatch = 512

// write writes all there is. Rows that could not be written stay.
func (j *Journal) write(lasting bool) error {
	for {
		j.mu.Lock()
		batch := j.rows[:min(len(j.rows), maxBatch)]
		waits := j.waits
		last := len(batch) == len(j.rows)
		lasting := lasting || len(waits) > 0
		j.mu.Unlock()
		if len(batch) == 0 && !lasting {
			return nil
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		err := j.AppendAudit(ctx, batch, lasting && last)
		cancel()
		if err != nil {
			j.log.Error("write the audit", "rows", len(batch), "err", err)
		}
		j.mu.Lock()
		if err == nil {
			j.rows = append([]AuditRow(nil), j.rows[len(batch):]...)
			j.full = len(j.rows) >= backlog
		}
		if err != nil || last {
			for _, w := range waits {
				w <- err
			}
			j.waits = j.waits[len(waits):]
		}
		j.mu.Unlock()
		if err != nil || last {
			return err
		}
	}
}
