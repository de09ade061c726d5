package webhook

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// line delivers the events of one webhook.
type line struct {
	d      *Desk
	hook   sandbox.Webhook // with its secret
	life   context.Context //nolint:containedctx // of the line itself
	cancel context.CancelFunc
	poked  chan struct{} // holds one

	mu        sync.Mutex
	read      int64      // events up to here were looked at; guarded by mu
	gap       int64      // the highest number told to be gone; guarded by mu
	kept      int64      // the cursor in the database; guarded by mu
	jobs      []*job     // what is not done, oldest first; guarded by mu
	down      int        // attempts in a row that nobody answered; guarded by mu
	failures  int        // attempts in a row that failed; guarded by mu
	notBefore time.Time  // guarded by mu
	lastError string     // guarded by mu
	last      *time.Time // of a delivery; guarded by mu
}

// job is one message on its way.
type job struct {
	event    sandbox.Event
	before   int64 // where to begin again for this one
	m        sandbox.WebhookMessage
	lane     string // those of one lane go one after another
	busy     bool
	done     bool
	attempts int
	refused  int
	next     time.Time
}

func newLine(d *Desk, w sandbox.Webhook) *line {
	life, cancel := context.WithCancel(d.life)
	return &line{d: d, hook: w, life: life, cancel: cancel, poked: make(chan struct{}, 1), read: w.Cursor, kept: w.Cursor}
}

// message is an event as a webhook gets it.
func message(hook string, e sandbox.Event) sandbox.WebhookMessage {
	id := "ev" + strconv.FormatInt(e.Seq, 10)
	if e.Type == sandbox.WebhookGap {
		id = "gap" + strconv.FormatInt(e.Seq, 10)
	}
	return sandbox.WebhookMessage{ID: hook + "-" + id, Webhook: hook, Type: e.Type, Time: e.Time, Seq: e.Seq, Sandbox: e.Sandbox, Actor: e.Actor, Data: e.Data}
}

// run works until the line or the desk ends.
func (l *line) run() {
	var tasks sync.WaitGroup
	defer tasks.Wait()
	for l.life.Err() == nil {
		more, err := l.fill(l.life)
		if err != nil && l.life.Err() == nil {
			l.d.log.Error("read events for a webhook: tried again", "webhook", l.hook.ID, "err", err)
		}
		due, wait := l.due(time.Now())
		for _, j := range due {
			tasks.Go(func() { l.attempt(j) })
		}
		if more {
			continue
		}
		if err != nil {
			wait = min(wait, time.Second)
		}
		t := time.NewTimer(wait)
		select {
		case <-l.life.Done():
		case <-l.poked:
		case <-t.C:
		}
		t.Stop()
	}
}

// fill looks at more events while there is room for those that are wanted,
// and reports whether there may be more at once.
func (l *line) fill(ctx context.Context) (more bool, err error) {
	l.mu.Lock()
	room, after, told := window-len(l.jobs), l.read, l.gap
	l.mu.Unlock()
	if room <= 0 {
		return false, nil
	}
	gone, err := l.d.tail.missed(ctx, after)
	if err != nil {
		return false, err
	}
	events, err := l.d.tail.after(ctx, after)
	if err != nil {
		return false, err
	}
	var jobs []*job
	if gone > max(after, told) {
		e := sandbox.Event{
			Seq: gone, Time: time.Now().UTC(), Type: sandbox.WebhookGap, Actor: "daemon",
			Data: map[string]string{"after": strconv.FormatInt(after, 10), "upto": strconv.FormatInt(gone, 10)},
		}
		jobs = append(jobs, &job{event: e, before: after, m: message(l.hook.ID, e)})
	}
	last := after // of others than who loses most, some before gone are kept
	if len(events) == 0 {
		last = max(after, gone)
	}
	for _, e := range events {
		wanted, err := l.wants(ctx, e)
		if err != nil {
			return false, err
		}
		if wanted {
			jobs = append(jobs, &job{event: e, before: e.Seq - 1, m: message(l.hook.ID, e), lane: string(e.Sandbox)})
		}
		last = max(last, e.Seq)
		if len(jobs) >= room {
			break
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.jobs = append(l.jobs, jobs...)
	l.read, l.gap = last, max(gone, told)
	return last > after && len(l.jobs) < window, nil
}

// wants judges an event.
func (l *line) wants(ctx context.Context, e sandbox.Event) (bool, error) {
	f := l.hook.Filter
	switch {
	case l.hook.Project != "" && e.Data["project"] != l.hook.Project,
		f.Sandbox != "" && e.Sandbox != f.Sandbox,
		!f.WantsType(e.Type):
		return false, nil
	case !f.OfSandbox():
		return true, nil
	case e.Sandbox == "":
		return false, nil
	}
	owner, labels, err := l.d.tail.who(ctx, e.Sandbox)
	return err == nil && f.WantsSandbox(owner, labels), err
}

// may reports whether the webhook's owner may be told of an event now: rights
// are judged at the delivery, not when the webhook was made.
func (l *line) may(ctx context.Context, e sandbox.Event) (bool, error) {
	if l.d.cfg.Standing == nil || l.hook.Owner == "" {
		return true, nil
	}
	all, ok := l.d.cfg.Standing(l.hook.Owner)
	switch {
	case !ok:
		return false, nil
	case all || l.hook.Project != "": // of a project: its own events alone
		return true, nil
	case e.Sandbox == "":
		return e.Actor == l.hook.Owner || e.Type == sandbox.WebhookGap, nil
	}
	owner, _, err := l.d.tail.who(ctx, e.Sandbox)
	return err == nil && owner == l.hook.Owner, err
}

// due marks what may be sent now as busy and returns it, and how long nothing
// else will be due.
func (l *line) due(now time.Time) (due []*job, wait time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	wait = time.Minute
	most := atOnce
	if l.down > 0 {
		most = 1 // one to find out with
	}
	taken := map[string]bool{}
	for _, j := range l.jobs {
		if j.busy {
			most--
		}
	}
	if d := l.notBefore.Sub(now); d > 0 {
		return nil, min(wait, d)
	}
	for _, j := range l.jobs {
		if j.done || taken[j.lane] {
			continue
		}
		taken[j.lane] = true
		if j.busy {
			continue
		}
		if d := j.next.Sub(now); d > 0 {
			wait = min(wait, d)
			continue
		}
		if most <= 0 {
			break // who ends pokes
		}
		most--
		j.busy = true
		due = append(due, j)
	}
	return due, wait
}

// attempt sends one message, and decides what comes next.
func (l *line) attempt(j *job) {
	defer wake(l.poked)
	l.mu.Lock()
	j.attempts++
	n := j.attempts
	l.mu.Unlock()
	if ok, err := l.may(l.life, j.event); err != nil || !ok {
		if l.life.Err() == nil && err == nil {
			l.finish(j)
		} else {
			l.mu.Lock()
			j.busy, j.next = false, time.Now().Add(time.Second)
			l.mu.Unlock()
		}
		return
	}
	r := l.d.send(l.life, l.hook, j.m, n)
	if l.life.Err() != nil {
		return // the next daemon tries again
	}
	if r.OK {
		l.d.delivered.Add(1)
		l.succeed(j, r.At)
		return
	}
	l.d.failed.Add(1)
	if !l.fail(j, r) {
		return
	}
	l.d.died.Add(1)
	l.d.log.Warn("an event is given up: see 'sandbox webhook dead ls'", "webhook", l.hook.ID, "event", j.event.Seq, "type", j.event.Type, "attempts", n, "err", r.Error)
	letter := sandbox.DeadLetter{Webhook: l.hook.ID, Event: j.event, Attempts: n, Error: r.Error, At: r.At}
	if err := l.d.cfg.Store.PutDeadLetter(l.life, letter); err != nil {
		if l.life.Err() == nil {
			l.d.log.Error("keep an event that was given up: tried again", "webhook", l.hook.ID, "err", err)
		}
		l.mu.Lock()
		j.busy = false
		l.mu.Unlock()
		return
	}
	l.finish(j)
}

func (l *line) succeed(j *job, at time.Time) {
	l.mu.Lock()
	l.down, l.failures, l.notBefore, l.lastError, l.last = 0, 0, time.Time{}, "", &at
	l.mu.Unlock()
	l.finish(j)
}

// finish takes what is done from the list.
func (l *line) finish(j *job) {
	l.mu.Lock()
	j.done, j.busy = true, false
	kept := l.jobs[:0]
	for _, o := range l.jobs {
		if !o.done {
			kept = append(kept, o)
		}
	}
	clear(l.jobs[len(kept):])
	l.jobs = kept
	l.mu.Unlock()
	l.d.note(l.hook.ID)
}

// fail notes a failure, and reports whether the message is given up. A
// receiver that refuses a message makes that one wait; one that does not
// answer makes all wait.
func (l *line) fail(j *job, r sandbox.Delivery) (givenUp bool) {
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failures++
	l.lastError = r.Error
	refused := r.Status >= 400 && r.Status < 500 && r.Status != http.StatusTooManyRequests && r.Status != http.StatusRequestTimeout
	if refused {
		l.down = 0
		j.refused++
	} else {
		l.down++
		l.notBefore = now.Add(l.d.pause(l.down))
	}
	j.next = now.Add(l.d.pause(j.attempts))
	if !refused { // the line waits already
		j.next = l.notBefore
	}
	l.d.log.Debug("a delivery failed", "webhook", l.hook.ID, "event", j.event.Seq, "attempt", j.attempts, "err", r.Error)
	old := j.attempts >= leastTries && now.Sub(j.event.Time) > l.d.cfg.GiveUp
	if j.refused >= l.d.cfg.Refusals || old {
		return true
	}
	j.busy = false
	return false
}

// pause is the wait after n failures in a row: twice as long each time, and
// between half of that and all, so that many do not come back together.
func (d *Desk) pause(n int) time.Duration {
	full := min(longestPause, d.cfg.Pause<<min(n-1, 16))
	return full/2 + rand.N(full/2+1)
}

// cursor is the number up to which all is done; mu is held.
func (l *line) cursor() int64 {
	if len(l.jobs) > 0 {
		return l.jobs[0].before
	}
	return l.read
}

func (l *line) unsaved() (cursor int64, moved bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.cursor()
	return c, c > l.kept
}

func (l *line) saved(cursor int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.kept = max(l.kept, cursor)
}

// describe fills in how a webhook does.
func (l *line) describe(w *sandbox.Webhook) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w.Cursor, w.Waiting, w.Failures, w.LastError, w.DeliveredAt = l.cursor(), len(l.jobs), l.failures, l.lastError, l.last
}

// String is for logs: no secret.
func (l *line) String() string { return fmt.Sprintf("webhook %s", l.hook.ID) }
