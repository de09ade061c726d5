package runtime

import (
	"context"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/runtime/launch"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// box is the daemon's memory of one living sandbox.
type box struct {
	id    sandbox.ID
	guest PID1

	// op is held by whoever changes the sandbox's status: one at a time.
	op chan struct{}

	stamp string        // of the upper at the last restore point; op's holder uses it
	words *state.Change // what the shell's processes said when an end was last tried; op's holder uses it

	mu           sync.Mutex
	status       sandbox.Status     // guarded by mu; as in the row, or about to be in that of one that was struck
	owner        string             // guarded by mu; as in the row, once it runs
	byBudget     bool               // guarded by mu; a budget made it so
	acted        bool               // guarded by mu; one is being carried out on it
	resumesLater bool               // guarded by mu; a resume that failed is tried again later
	shell        *launch.Shell      // guarded by mu; nil while none runs
	unwatch      context.CancelFunc // guarded by mu; ends the shell's watchers
	expected     bool               // guarded by mu; PID 1's end is our doing
	cut          cut                // guarded by mu; what is killing its processes now
	struck       *ending            // guarded by mu; how it ends, of one killed before its row says so
	earlier      sandbox.Usage      // guarded by mu; of shells before this one
	counted      bool               // guarded by mu; earlier has this one's too, for good
	oomKills     uint64             // guarded by mu; last count seen
	oomAt        time.Time          // guarded by mu; when that count last rose
	ttl          *time.Timer        // guarded by mu
	points       bool               // guarded by mu; restore points are wanted
	pointed      map[int64]bool     // guarded by mu; numbers of processes whose restore points were seen to
	idle         idleClock          // guarded by mu
	fault        *faulted           // guarded by mu; on the shell's link, nil without one
	record       *sandbox.Sandbox   // guarded by mu; its last, once it has ended
	// before is the number of the last process of roots before the present
	// one: what main processes up to it do does not matter any more.
	before int64        // guarded by mu
	main   *mainProcess // guarded by mu; of this shell, nil while none is known
	// adopted is when this daemon took it over from an earlier one.
	adopted time.Time // guarded by mu

	resets atomic.Int64 // of its root, begun ones too
	unseen atomic.Int64 // bytes that may be written before its memory is looked at
	lent   atomic.Bool  // somebody follows what PID 1 holds for it in memory

	reach reach // connections from outside
	looks looks // at its counters
	meter meter // what it uses
}

// mainProcess is the process the sandbox ends with, if it has one. The box's
// mu guards it.
type mainProcess struct {
	id      sandbox.ProcessID
	readers int           // clients that still take its output
	drained chan struct{} // closed when the last of them is gone; nil before its end is told
}

// idleClock tells since when nothing has happened.
type idleClock struct {
	after   time.Duration // 0: never
	live    int           // running processes
	calls   int           // requests and streams under way
	paused  bool
	timer   *time.Timer
	changes int64 // of this clock
	silent  bool  // PID 1 did not answer when its time was over
	expired func(since int64)
}

func newBox(id sandbox.ID, g PID1) *box {
	return &box{id: id, guest: g, op: make(chan struct{}, 1)}
}

// present is the shell that runs now, or nil.
func (b *box) present() *launch.Shell {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.shell
}

// setStatus notes what the row says now.
func (b *box) setStatus(s sandbox.Status, why sandbox.Reason) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.status, b.byBudget = s, why == sandbox.ReasonBudget
}

// setCut notes what kills the processes from now on.
func (b *box) setCut(c cut) {
	if c == cutReset {
		b.resets.Add(1)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.cut = c
}

// lastRecord is the row as its end was written, if it was by this box.
func (b *box) lastRecord() (sandbox.Sandbox, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.record == nil {
		return sandbox.Sandbox{}, false
	}
	return *b.record, true
}

func (b *box) setLastRecord(sb sandbox.Sandbox) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.record = &sb
}

// standing is the status the row has, or is about to have.
func (b *box) standing() sandbox.Status {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.status
}

// outlived reports whether what an ending is about is gone, and its reason with
// it.
func (b *box) outlived(e ending) bool {
	b.mu.Lock()
	since := b.idle.changes
	b.mu.Unlock()
	return e.reason == sandbox.ReasonIdle && e.idleSince != since || e.shell != nil && e.shell != b.present() || e.main != "" && b.ofBefore(e.main)
}

// runs reports whether the row says running and nobody struck it since.
func (b *box) runs() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.status == sandbox.StatusRunning
}

// wantsPoints reports whether restore points are to be taken.
func (b *box) wantsPoints() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.points
}

// sawPoint reports whether the restore point after a process was seen to: its
// end is told by whoever is connected to it, and by the events of PID 1.
func (b *box) sawPoint(id sandbox.ProcessID) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.pointed[processNumber(id)]
}

// maxPointed bounds the memory of that.
const maxPointed = 4096

func (b *box) notePoint(id sandbox.ProcessID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pointed == nil || len(b.pointed) >= maxPointed {
		b.pointed = map[int64]bool{}
	}
	if n := processNumber(id); n > 0 {
		b.pointed[n] = true
	}
}

// counters are those of earlier shells, and whether the present one's are in
// them already.
func (b *box) counters() (earlier sandbox.Usage, counted bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.earlier, b.counted
}

// setBefore notes the number of the last process of earlier roots.
func (b *box) setBefore(n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.before = max(b.before, n)
	if b.main != nil && processNumber(b.main.id) <= b.before {
		b.main = nil
	}
}

// ofBefore reports whether a process ran on an earlier root.
func (b *box) ofBefore(id sandbox.ProcessID) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return processNumber(id) <= b.before
}

// processNumber is the number in a process id; 0 of none.
func processNumber(id sandbox.ProcessID) int64 {
	n, _ := strconv.ParseInt(strings.TrimPrefix(string(id), "p"), 10, 64)
	return n
}

// mainOf returns the note of a main process; the caller holds mu.
func (b *box) mainOf(id sandbox.ProcessID) *mainProcess {
	if b.main == nil || b.main.id != id {
		b.main = &mainProcess{id: id}
	}
	return b.main
}

// codeBusy is the code of the error for a sandbox whose status somebody else
// is changing.
const codeBusy = "sandbox_busy"

// lock takes the right to change the sandbox's status.
func (b *box) lock(ctx context.Context) error {
	select {
	case b.op <- struct{}{}:
		return nil
	case <-ctx.Done():
		return sandbox.Errorf(sandbox.ErrUnavailable, codeBusy, "sandbox %s is changing state: try again: %w", b.id, ctx.Err())
	}
}

func (b *box) unlock() { <-b.op }

// enter counts a call as activity until leave is called.
func (b *box) enter() (leave func()) {
	b.note(func(c *idleClock) { c.calls++ })
	var once sync.Once
	return func() { once.Do(func() { b.note(func(c *idleClock) { c.calls-- }) }) }
}

// calls is how many calls and streams are under way.
func (b *box) calls() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.idle.calls
}

// note changes the idle clock and starts or stops its timer.
func (b *box) note(change func(*idleClock)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := &b.idle
	change(c)
	c.changes++
	if c.timer != nil {
		c.timer.Stop()
		c.timer = nil
	}
	if c.after > 0 && c.live == 0 && c.calls == 0 && !c.paused && c.expired != nil {
		since, expired := c.changes, c.expired
		c.timer = time.AfterFunc(c.after, func() { expired(since) })
	}
}

// quiet stops the timers and watchers of the box.
func (b *box) quiet() {
	b.note(func(c *idleClock) { c.expired = nil })
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ttl != nil {
		b.ttl.Stop()
		b.ttl = nil
	}
	if b.fault != nil && b.fault.timer != nil {
		b.fault.timer.Stop()
	}
}

// strike kills PID 1, and so all of the sandbox, and does not wait for that.
// From then on nobody finds it running.
func (b *box) strike(e ending) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.shell != nil {
		b.expected = true
		b.shell.HoldMounts()
		if err := b.shell.Kill(); err != nil {
			return err
		}
	}
	b.status, b.byBudget, b.struck = sandbox.StatusCompleting, false, &e
	return nil
}

// correct makes a row that was read say what it is about to.
func (b *box) correct(row *sandbox.Sandbox) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if e := b.struck; e != nil && (row.Status == sandbox.StatusRunning || row.Status == sandbox.StatusPaused) {
		row.Status, row.Reason, row.Detail = sandbox.StatusCompleting, e.reason, e.detail
	}
}

// letGo marks PID 1's end as expected, ends the watchers and hands over the
// shell for closing; nil if none runs.
func (b *box) letGo() *launch.Shell {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.expected = true
	if b.unwatch != nil {
		b.unwatch()
		b.unwatch = nil
	}
	b.takeFaultLocked() // it goes with the link
	s := b.shell
	b.shell, b.main, b.before, b.pointed = nil, nil, 0, nil
	return s
}
