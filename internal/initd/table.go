package initd

import (
	"errors"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	defaultKeepEnded = 64
	maxEndedBytes    = 16 << 20
	// Rings of running processes. With small ones for all the processes the
	// cgroup tree has room for (4096) it stays below what init is given.
	maxLiveBytes = 192 << 20
	smallRing    = 32 << 10
	maxEvents    = 128 // each takes some 500 bytes
)

// table holds every process the daemon asked for, living or ended, and the
// events about them.
type table struct {
	mu      sync.Mutex
	changed sync.Cond // an event, or a child was reaped
	next    int64
	all     map[sandbox.ProcessID]*process
	order   []*process       // by age
	byPID   map[int]*process // main processes not yet reaped
	live    int
	keep    int
	seq     int64
	events  []initproto.Event
	reaped  uint64
	// forking holds reaping back between a fork and the entry in byPID, and
	// whoever must be sure that no fork is under way. Taken before mu.
	forking sync.RWMutex
	forked  atomic.Bool // since all were last killed
	idle    func()      // called when a process has ended
	stopped bool        // nobody will start a process any more
	// spare is an empty cgroup kept for the next process: making and removing
	// one takes longer than all else PID 1 does for a short command.
	spare    *procGroup
	groupSeq int64

	keys       map[keyID]keyed // commands that idempotency keys have started
	keyOrder   []keyID         // by age
	keysClosed bool            // the sandbox is being stopped: no key starts anything
}

func newTable() *table {
	t := &table{all: make(map[sandbox.ProcessID]*process), byPID: make(map[int]*process), keep: defaultKeepEnded}
	t.changed.L = &t.mu
	return t
}

// reap waits for children, its own and orphans, as long as PID 1 lives. It
// first looks (WNOWAIT) and then takes under the lock, so that whoever holds
// the lock and sees a process unreaped may signal its pid: the number cannot
// have been given to another.
func (t *table) reap() {
	for {
		var info unix.Siginfo
		err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOWAIT, nil)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ECHILD):
			if !t.awaitChild() {
				return
			}
			continue
		}
		t.collect()
	}
}

// awaitChild blocks until a workload is forked: with no child at all there is
// nothing waitid could wait for, and only the forking thread makes children.
// It returns false once there will be none.
func (t *table) awaitChild() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for len(t.byPID) == 0 && !t.stopped {
		t.changed.Wait()
	}
	return !t.stopped
}

// stop ends reap once no child is left.
func (t *table) stop() {
	t.mu.Lock()
	t.stopped = true
	t.changed.Broadcast()
	t.mu.Unlock()
}

// collect takes every child that has ended.
func (t *table) collect() {
	t.forking.Lock()
	t.mu.Lock()
	var ended []*process
	orphans := false
	for {
		var ws unix.WaitStatus
		pid, err := unix.Wait4(-1, &ws, unix.WNOHANG, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			break
		}
		t.reaped++
		p, ok := t.byPID[pid]
		if !ok {
			orphans = true
			continue
		}
		delete(t.byPID, pid)
		p.endedLocked(ws, time.Now())
		t.keyEndedLocked(p)
		if ws.Signal() == unix.SIGKILL {
			// If that was the host's cgroup.kill above us, it hit the spare
			// and this process's cgroup too: see procGroup.killed.
			t.dropSpareLocked()
			if p.group != nil {
				p.group.killed = true
			}
		}
		t.live--
		t.eventLocked(initproto.EventExited, p)
		ended = append(ended, p)
	}
	if orphans {
		t.sweepLocked()
	}
	t.changed.Broadcast()
	t.mu.Unlock()
	t.forking.Unlock()
	for _, p := range ended {
		p.afterExit(t)
	}
	if len(ended) > 0 && t.idle != nil {
		t.idle()
	}
}

// sweepLocked removes cgroups that have become empty since their main process
// ended: the last member of one is always an orphan, reaped here.
func (t *table) sweepLocked() {
	for _, p := range t.order {
		if p.exit != nil {
			p.dropGroupLocked(t)
		}
	}
}

// groupFor returns an empty cgroup beneath work: the spare, or a new one.
func (t *table) groupFor(work *os.File) (*procGroup, error) {
	t.mu.Lock()
	g := t.spare
	t.spare = nil
	t.groupSeq++
	name := "g" + strconv.FormatInt(t.groupSeq, 10)
	t.mu.Unlock()
	if g != nil && g.work == work {
		return g, nil
	}
	if g != nil {
		g.remove()
	}
	return newGroup(work, name)
}

// makeSpare makes the cgroup the next process will go to.
func (t *table) makeSpare(work *os.File) error {
	g, err := t.groupFor(work)
	if err != nil {
		return err
	}
	t.mu.Lock()
	t.spare = g
	t.mu.Unlock()
	return nil
}

// dropSpareLocked removes the spare cgroup.
func (t *table) dropSpareLocked() {
	if t.spare != nil {
		t.spare.remove()
		t.spare = nil
	}
}

// retireLocked takes a cgroup back if nothing lives in it any more.
func (t *table) retireLocked(g *procGroup) bool {
	if t.spare != nil || g.killed {
		return g.remove()
	}
	if !g.empty() {
		return false
	}
	t.spare = g
	return true
}

// numberAfter lets numbers go on after last, if they are not there yet, and
// returns the last one given.
func (t *table) numberAfter(last int64) int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.next = max(t.next, last)
	return t.next
}

// newID reserves the next id. The caller holds Server.cfgMu for reading until
// the process is in the table, so that every number is of one root.
func (t *table) newID() sandbox.ProcessID {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.next++
	return sandbox.ProcessID("p" + strconv.FormatInt(t.next, 10))
}

// addLocked enters a process that was just forked.
func (t *table) add(p *process) {
	t.mu.Lock()
	t.all[p.rec.ID] = p
	t.order = append(t.order, p)
	t.byPID[p.rec.PID] = p
	t.live++
	t.eventLocked(initproto.EventStarted, p)
	t.mu.Unlock()
}

func (t *table) eventLocked(kind string, p *process) {
	t.seq++
	rec := p.recordLocked()
	t.keepLocked(initproto.Event{Seq: t.seq, Type: kind, Live: t.live, Process: &rec})
}

// keepLocked adds an event, and drops the older half of too many.
func (t *table) keepLocked(e initproto.Event) {
	t.events = append(t.events, e)
	if len(t.events) > maxEvents {
		t.events = append(t.events[:0], t.events[len(t.events)-maxEvents/2:]...)
	}
	t.changed.Broadcast()
}

// eventsAfter waits for events newer than seq; false once stop says so.
func (t *table) eventsAfter(seq int64, stop *bool) ([]initproto.Event, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for t.seq <= seq && !*stop {
		t.changed.Wait()
	}
	if *stop {
		return nil, false
	}
	first := t.events[0].Seq
	var out []initproto.Event
	if seq+1 < first {
		out = append(out, initproto.Event{Seq: first - 1, Type: initproto.EventLost, Live: t.live})
	}
	for _, e := range t.events {
		if e.Seq > seq {
			out = append(out, e)
		}
	}
	return out, true
}

func (t *table) summary() (live int, seq int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.live, t.seq
}

func (t *table) get(id sandbox.ProcessID) (*process, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p, ok := t.all[id]
	if !ok {
		return nil, sandbox.Errorf(sandbox.ErrNotFound, "process_not_found", "no process %.40q: it never was, or its record was dropped", id)
	}
	return p, nil
}

func (t *table) records() []sandbox.Process {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]sandbox.Process, 0, len(t.order))
	for _, p := range t.order {
		out = append(out, p.recordLocked())
	}
	return out
}

// ringSize is how much output a new process may keep: what it asks for while
// the rings of all that run leave room, a small one after that. PID 1 has
// little memory of its own, and to lose it is to lose the sandbox.
func (t *table) ringSize(asked int) int {
	if asked <= 0 {
		asked = sandbox.DefaultOutput
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	room := int64(maxLiveBytes)
	for _, p := range t.order {
		if p.exit == nil {
			room -= p.out.size
		}
	}
	return max(smallRing, int(min(int64(asked), room)))
}

// trim drops, beyond the bounds on their number and bytes, the processes that
// ended first. One that still has a reader or members in its cgroup stays, and the
// main process, whose end ends the sandbox, for who missed the event of that.
func (t *table) trim() {
	t.mu.Lock()
	defer t.mu.Unlock()
	var ended []*process
	for _, p := range t.order {
		if p.exit != nil {
			ended = append(ended, p)
		}
	}
	slices.SortStableFunc(ended, func(a, b *process) int { return b.exit.At.Compare(a.exit.At) })
	bytes := int64(0)
	for i, p := range ended {
		bytes += p.out.kept()
		if (i >= t.keep || i > 0 && bytes > maxEndedBytes) && p.readers.Load() == 0 && p.group == nil && !p.rec.Main {
			t.dropLocked(p)
		}
	}
}

func (t *table) dropLocked(p *process) {
	delete(t.all, p.rec.ID)
	for i, q := range t.order {
		if q == p {
			t.order = append(t.order[:i], t.order[i+1:]...)
			break
		}
	}
	p.out.release()
}
