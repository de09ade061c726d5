package runtime

import (
	"context"
	"errors"
	"maps"
	"strconv"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	// auditWindow is how long the repetitions of one thing become one event.
	auditWindow = 10 * time.Second
	// auditEvery is how often news are written: also what 'net log -f' is late.
	auditEvery = 250 * time.Millisecond
	// Different things a sandbox may have in one window, and all together.
	auditPerBox, auditAll = 256, 32768
	// Events a second of one sandbox and one type, and of all together. What
	// is beyond is told as a number.
	auditRate, auditBurst       = 2, 200
	auditAllRate, auditAllBurst = 400, 4000
	// auditBatch is how many events one transaction writes.
	auditBatch = 200
	// auditNames is how many addresses of one sandbox have their names kept.
	auditNames = 1024
	// auditDest is the longest name there is (RFC 1035) and some.
	auditDest = 260
)

// audit turns what the network tells into events: the first of a kind at
// once, its repetitions within a window as one more with their number. It is
// bounded, whatever a sandbox does; what goes into no event is counted.
type audit struct {
	now   func() time.Time
	write func(context.Context, []sandbox.Event) error

	mu    sync.Mutex
	boxes map[sandbox.ID]*auditBox
	open  int // entries of all boxes
	all   *bucket
}

// auditBox is what is known of one sandbox.
type auditBox struct {
	entries map[auditKey]*auditEntry
	names   map[string]string  // of addresses it was told
	rates   map[string]*bucket // by type
	untold  map[string]uint64  // by type
	since   time.Time          // of the oldest untold
	last    time.Time          // when anything was heard
}

// auditKey says which news are the same.
type auditKey struct {
	kind, protocol, dest, why string
	request                   string // to the gate
	port                      uint16
	inbound                   bool
}

// auditEntry is one thing that happened, and how often since it was told.
type auditEntry struct {
	first  time.Time
	fresh  bool // not told at all yet
	count  uint64
	detail map[string]string
}

func newAudit(write func(context.Context, []sandbox.Event) error) *audit {
	return &audit{now: time.Now, write: write, boxes: map[sandbox.ID]*auditBox{}, all: newBucket(auditAllRate, auditAllBurst)}
}

// hear takes one piece of news. It never waits for anything.
func (a *audit) hear(n sandbox.NetworkNews) {
	now := a.now()
	key := auditKey{
		kind: n.Type, protocol: n.Protocol, dest: clip(n.Dest, auditDest), why: clip(n.Why, auditDest),
		request: clip(n.Detail["method"]+" "+n.Detail["path"], auditDest), port: n.Port, inbound: n.Inbound,
	}
	count := max(n.Count, 1)
	a.mu.Lock()
	defer a.mu.Unlock()
	b := a.boxes[n.Sandbox]
	if b == nil {
		b = &auditBox{entries: map[auditKey]*auditEntry{}, rates: map[string]*bucket{}, untold: map[string]uint64{}}
		a.boxes[n.Sandbox] = b
	}
	b.last = now
	b.learn(n)
	if e := b.entries[key]; e != nil {
		e.count += count
		return
	}
	if len(b.entries) >= auditPerBox || a.open >= auditAll {
		b.leave(n.Type, count, now)
		return
	}
	detail := maps.Clone(n.Detail)
	if name := b.names[n.Dest]; name != "" && !n.Inbound {
		if detail == nil {
			detail = map[string]string{}
		}
		detail["name"] = name
	}
	b.entries[key] = &auditEntry{first: now, fresh: true, count: count, detail: detail}
	a.open++
}

// learn keeps which name an address was told for: flows are then told with it.
// The name may not be the one the sandbox meant, where several have one
// address.
func (b *auditBox) learn(n sandbox.NetworkNews) {
	for _, a := range n.Addrs {
		if len(b.names) >= auditNames {
			clear(b.names)
		}
		if b.names == nil {
			b.names = map[string]string{}
		}
		b.names[a.String()] = clip(n.Dest, auditDest)
	}
}

func (b *auditBox) leave(kind string, count uint64, now time.Time) {
	if len(b.untold) == 0 {
		b.since = now
	}
	b.untold[kind] += count
}

// due takes out what is to be written now; all of it at the end.
func (a *audit) due(end bool) []sandbox.Event {
	now := a.now()
	a.mu.Lock()
	defer a.mu.Unlock()
	var events []sandbox.Event
	for id, b := range a.boxes {
		for key, e := range b.entries {
			over := end || now.Sub(e.first) >= auditWindow
			if e.count > 0 && (e.fresh || over) {
				if a.may(b, key.kind, now) {
					events = append(events, key.event(id, e, now))
				} else {
					b.leave(key.kind, e.count, now)
				}
				if over && !e.fresh {
					e.first = now // it goes on: the next window begins
				}
				e.fresh, e.count = false, 0
				continue
			}
			if over {
				delete(b.entries, key)
				a.open--
			}
		}
		if len(b.untold) > 0 && (end || now.Sub(b.since) >= auditWindow) {
			events = append(events, untoldEvent(id, b.untold, now))
			clear(b.untold)
		}
		if len(b.entries) == 0 && len(b.untold) == 0 && now.Sub(b.last) > auditBurst/auditRate*time.Second {
			delete(a.boxes, id) // its buckets are full again
		}
	}
	return events
}

func (a *audit) may(b *auditBox, kind string, now time.Time) bool {
	r := b.rates[kind]
	if r == nil {
		r = newBucket(auditRate, auditBurst)
		b.rates[kind] = r
	}
	return r.take(now) && a.all.take(now)
}

// event is an entry as the log of all has it.
func (k auditKey) event(id sandbox.ID, e *auditEntry, now time.Time) sandbox.Event {
	at := now
	if e.fresh {
		at = e.first
	}
	d := map[string]string{"protocol": k.protocol, "dest": k.dest}
	for key, v := range e.detail {
		d[key] = clip(v, auditDest)
	}
	if k.port != 0 {
		d["port"] = strconv.Itoa(int(k.port))
	}
	if k.inbound {
		d["direction"] = "in"
	}
	if k.why != "" {
		d["why"] = k.why
	}
	if e.count > 1 || !e.fresh {
		d["count"] = strconv.FormatUint(e.count, 10)
	}
	return sandbox.Event{Time: at.UTC(), Sandbox: id, Type: k.kind, Actor: "daemon", Data: d}
}

func untoldEvent(id sandbox.ID, untold map[string]uint64, now time.Time) sandbox.Event {
	d := map[string]string{}
	for kind, n := range untold {
		d[kind] = strconv.FormatUint(n, 10)
	}
	return sandbox.Event{Time: now.UTC(), Sandbox: id, Type: sandbox.EventNetUntold, Actor: "daemon", Data: d}
}

func (a *audit) flush(ctx context.Context, end bool) error {
	var errs []error
	events := a.due(end)
	for len(events) > 0 {
		n := min(len(events), auditBatch)
		errs = append(errs, a.write(ctx, events[:n]))
		events = events[n:]
	}
	return errors.Join(errs...)
}

// NetworkNews takes what the network tells of sandboxes, for the event log.
// It never waits, and may be called from many goroutines.
func (m *Manager) NetworkNews(n sandbox.NetworkNews) {
	if n.Sandbox != "" {
		m.audit.hear(n)
	}
}

// writeAudit writes what was heard until the daemon ends, and then the rest.
func (m *Manager) writeAudit() {
	tick := time.NewTicker(auditEvery)
	defer tick.Stop()
	for {
		var err error
		select {
		case <-tick.C:
			err = m.audit.flush(m.life, false)
		case <-m.life.Done():
			end, cancel := context.WithTimeout(context.WithoutCancel(m.life), tailTimeout)
			defer cancel()
			if err := m.audit.flush(end, true); err != nil {
				m.log.Warn("write the last events of the network", "err", err)
			}
			return
		}
		if err != nil && m.life.Err() == nil {
			m.log.Warn("write events of the network", "err", err)
		}
	}
}
