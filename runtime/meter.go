package runtime

import (
	"context"
	"errors"
	"math"
	"math/bits"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// The ledger of what sandboxes use. Each box has a meter with the totals; a
// round reads the kernel's counters of all every few seconds and writes down
// those that need it:
//
//	round, every few seconds → what changed, in one transaction of all
//	change of status         → in the transaction of the change itself
//	end                      → with the counters read after the kill
//
// What the kernel counts is absolute while its shell lives, and the row's usage
// holds that of earlier shells, so a reading that was never written loses
// nothing a later one does not tell. Memory, storage and time have no counter:
// the meter adds them up, and a new daemon goes on from the last reading.

const (
	// A change below these is written with the next larger one, or after
	// slowly: what idles is not to fill the ledger.
	smallCPU   = 10_000 // microseconds
	smallBytes = 64 << 10
	smallKiB   = 1 << 10
	slowly     = 5 * time.Minute
	rollEvery  = 10 * time.Minute
)

// UsageConfig says how usage is written down; what is zero has its default.
type UsageConfig struct {
	Interval time.Duration // between two looks at the counters; 5 s
	Daily    int           // after so many days one reading a day is enough; 30
}

func (c UsageConfig) orDefault() UsageConfig {
	if c.Interval <= 0 {
		c.Interval = 5 * time.Second
	}
	if c.Daily <= 0 {
		c.Daily = 30
	}
	return c
}

// meter adds up what one sandbox uses.
type meter struct {
	mu    sync.Mutex // held by a change of status until it is written
	begun bool
	slot  int
	caps  caps
	now   point           // what is known
	wrote sandbox.Reading // the last one in the ledger

	payers payers
}

// payer is who pays for an owner's sandbox: for those of a build, who asked for
// the build. The ledger says the same.
func payer(owner string) string { return strings.TrimPrefix(owner, buildActor) }

// payers are whose budgets a sandbox counts for: its own, and those of each of
// these that is not empty.
type payers struct{ sandbox, agent, project, owner string }

func payersOf(sb sandbox.Sandbox) payers {
	return payers{string(sb.ID), sb.Spec.Labels[cost.AgentLabel], sb.Spec.Project, payer(sb.Owner)}
}

// in reports whether a budget is for one of them.
func (p payers) in(b cost.Budget) bool {
	want := payersBy(b)
	return want != (payers{}) && want.match(p)
}

// match reports whether those of p that are asked for, which are not empty,
// have each other.
func (p payers) match(has payers) bool {
	same := func(want, has string) bool { return want == "" || want == has }
	return same(p.sandbox, has.sandbox) && same(p.agent, has.agent) && same(p.project, has.project) && same(p.owner, has.owner)
}

// payersBy is the one a budget is for.
func payersBy(b cost.Budget) (p payers) {
	switch b.Scope {
	case cost.ScopeSandbox:
		p.sandbox = b.ID
	case cost.ScopeAgent:
		p.agent = b.ID
	case cost.ScopeProject:
		p.project = b.ID
	case cost.ScopeOwner:
		p.owner = b.ID
	}
	return p
}

// payers are who pays for a sandbox; for one without a meter it alone does.
func (b *box) payers() payers {
	b.meter.mu.Lock()
	defer b.meter.mu.Unlock()
	p := b.meter.payers
	p.sandbox = string(b.id)
	return p
}

// permit notes what a sandbox can use at most from now on.
func (t *meter) permit(c caps) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.caps = c
}

// point is a reading with what does not fill a unit yet.
type point struct {
	sandbox.Reading
	memory, storage int64 // KiB times milliseconds; below a thousand
	flat            bool  // memory is what it is next, not what it was: the shell is new
}

// instant is the time by both clocks.
type instant struct {
	wall time.Time
	boot int64 // milliseconds, the host's sleep counted
}

func now() instant {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic(err) // every kernel has had it since 2.6.39
	}
	return instant{wall: time.Now(), boot: ts.Nano() / int64(time.Millisecond)}
}

// counts is what is known of a sandbox's counters.
type counts struct {
	cpu, netRx, netTx, ioRead, ioWrite uint64
	memory, storage                    int64 // KiB now; -1: unknown
}

// spend adds to the time spent in a status.
func spend(m *sandbox.Meters, s sandbox.Status, ms int64) {
	in := &m.Other
	switch s {
	case sandbox.StatusRunning:
		in = &m.Running
	case sandbox.StatusPaused:
		in = &m.Paused
	case sandbox.StatusStopped:
		in = &m.Stopped
	}
	*in = sandbox.AddHeld(*in, ms)
}

// keep adds what was kept for ms, from was to is KiB, to a total in KiB times
// seconds. rest is what does not fill one yet. What has no room stays at the
// bound.
func keep(total, rest *int64, was, is, ms int64) {
	hi, lo := bits.Mul64(uint64(was)+uint64(is), uint64(ms))
	lo, carry := bits.Add64(lo, uint64(2**rest), 0)
	if hi += carry; hi >= 2000 {
		*total, *rest = math.MaxInt64, 0
		return
	}
	n, left := bits.Div64(hi, lo, 2000)
	*total, *rest = sandbox.AddHeld(*total, fit(n)), int64(left/2)
}

// fit returns a counter as the ledger has it, or the bound.
func fit(n uint64) int64 { return int64(min(n, math.MaxInt64)) }

// next is the point after p at t, from when on the sandbox is in status to.
// Totals never go down, whatever c says.
func (p point) next(t instant, c counts, to sandbox.Status) point {
	ms := max(0, t.boot-p.Clock)
	n := p
	n.Clock = max(p.Clock, t.boot)
	if n.At = t.wall.UTC().Truncate(time.Millisecond); !n.At.After(p.At) { // somebody set the clock back
		n.At = p.At.Add(time.Millisecond)
	}
	spend(&n.Meters, p.Status, ms)
	if n.Status = to; p.Status == sandbox.StatusCreating && to == sandbox.StatusRunning {
		n.Meters.Starts = sandbox.AddHeld(n.Meters.Starts, 1)
	}
	was := p.MemoryKiB
	if c.memory >= 0 {
		if n.MemoryKiB = c.memory; p.flat {
			was, n.flat = c.memory, false
		}
	}
	keep(&n.Meters.Memory, &n.memory, was, n.MemoryKiB, ms)
	was = p.StorageKiB
	if c.storage >= 0 {
		n.StorageKiB = c.storage
	}
	keep(&n.Meters.Storage, &n.storage, was, n.StorageKiB, ms)
	if to == sandbox.StatusStopped || to == sandbox.StatusCreating {
		n.MemoryKiB, n.flat = 0, true
	}
	n.Meters = n.Meters.AtLeast(sandbox.Meters{
		CPU: fit(c.cpu), NetRx: fit(c.netRx), NetTx: fit(c.netTx), IORead: fit(c.ioRead), IOWrite: fit(c.ioWrite),
	})
	return n
}

// begin starts a new sandbox's meter at its creation.
func (b *box) begin(sb sandbox.Sandbox, boot string, most caps) {
	t := now()
	age := max(0, t.wall.Sub(sb.CreatedAt).Milliseconds())
	b.meter.mu.Lock()
	defer b.meter.mu.Unlock()
	p := point{flat: true, Reading: sandbox.Reading{
		Sandbox: sb.ID, At: sb.CreatedAt.UTC().Truncate(time.Millisecond), Status: sb.Status, Clock: t.boot - age, Boot: boot,
	}}
	if sb.StartedAt != nil {
		p.Meters.Starts = 1
	}
	b.meter.slot, b.meter.now, b.meter.begun = sb.Slot, p, true
	b.meter.payers, b.meter.caps = payersOf(sb), most
}

// goOn starts the meter of a sandbox of an earlier daemon at its last reading.
// After a crash of the host it is not known how long it ran: that time, and the
// host's own, is none of running.
func (b *box) goOn(row state.Row, last sandbox.Reading, boot string, most caps) {
	known := last.Sandbox != ""
	if !known { // too young to have one
		b.begin(row.Sandbox, boot, most)
		if row.Status == sandbox.StatusRunning && row.BootID == boot {
			return
		}
		last = b.meter.now.Reading
		last.Boot = row.BootID
	}
	b.meter.mu.Lock()
	defer b.meter.mu.Unlock()
	if known {
		b.meter.wrote = last
	}
	p := point{Reading: last}
	if last.Boot != boot {
		t := now()
		p.Boot, p.Clock = boot, t.boot-max(0, t.wall.Sub(last.At).Milliseconds())
		p.MemoryKiB, p.flat = 0, true
		if p.Status != sandbox.StatusStopped {
			p.Status = sandbox.StatusCompleting
		}
		p = p.next(t, counts{memory: 0, storage: -1}, p.Status)
	}
	b.meter.slot, b.meter.now, b.meter.begun = row.Slot, p, true
	b.meter.payers, b.meter.caps = payersOf(row.Sandbox), most
}

// measure reads a sandbox's counters; net holds those of all, nil where they
// are not asked for now.
func (m *Manager) measure(b *box, slot int, net map[sandbox.ID]sandbox.NetCounters) counts {
	c := counts{memory: -1, storage: -1}
	u, counted := b.counters()
	if !counted {
		if now, err := m.cgroup.Meter(b.id); err == nil {
			n := net[b.id]
			now.NetRxBytes, now.NetTxBytes = n.RxBytes, n.TxBytes
			b.reach.add(&now)
			c.memory = int64(now.MemoryBytes >> 10)
			u = now.Add(u)
		}
	}
	c.of(u)
	if bytes, _, known, err := m.roots.Usage(b.id, slot); err == nil && known {
		c.storage = int64(bytes >> 10)
	}
	return c
}

// of takes what counts up from u.
func (c *counts) of(u sandbox.Usage) {
	c.cpu, c.netRx, c.netTx, c.ioRead, c.ioWrite = u.CPUMicros, u.NetRxBytes, u.NetTxBytes, u.IOReadBytes, u.IOWriteBytes
}

// turn adds to a change of status the readings that go with it, and calls
// write. While it does, nobody else touches the meter.
func (m *Manager) turn(b *box, to sandbox.Status, ch *state.Change, write func() error) error {
	b.meter.mu.Lock()
	defer b.meter.mu.Unlock()
	t := &b.meter
	if !t.begun {
		return write()
	}
	c := counts{memory: -1, storage: -1}
	if ch.Usage != nil { // read after the kill
		c.of(*ch.Usage)
	} else {
		c = m.measure(b, t.slot, nil)
	}
	n := t.now.next(now(), c, to)
	ch.Readings = t.due(n)
	err := write()
	if err == nil {
		m.advance(t, n)
		t.wrote = n.Reading
		t.begun = !to.Terminal()
	}
	return err
}

// meterNow reads the meter of a sandbox whose processes are about to be killed: what
// memory they had cannot be seen later.
func (m *Manager) meterNow(b *box) {
	b.meter.mu.Lock()
	defer b.meter.mu.Unlock()
	if t := &b.meter; t.begun {
		m.advance(t, t.now.next(now(), m.measure(b, t.slot, nil), t.now.Status))
	}
}

// advance takes in a new point, which the caller holds mu for.
func (m *Manager) advance(t *meter, n point) {
	m.sums.used(n.Meters.Less(t.now.Meters))
	t.now = n
}

// due returns the readings to write with a new one: also the one before it, if
// the ledger has none so young, for what is new came after that.
func (t *meter) due(n point) []sandbox.Reading {
	if t.now.At.After(t.wrote.At) && t.wrote.Sandbox != "" {
		return []sandbox.Reading{t.now.Reading, n.Reading}
	}
	return []sandbox.Reading{n.Reading}
}

// worth reports whether a reading must be written: one that is on a straight
// line with the last says nothing, until the day is over.
func (t *meter) worth(n sandbox.Reading) bool {
	w := t.wrote
	if w.Sandbox == "" || w.At.Truncate(24*time.Hour) != n.At.Truncate(24*time.Hour) {
		return true
	}
	d := func(a, b int64) int64 { return max(a-b, b-a) }
	x, y := n.Meters, w.Meters
	cpu, mem := x.CPU-y.CPU, max(d(n.MemoryKiB, w.MemoryKiB), d(n.StorageKiB, w.StorageKiB))
	bytes := max(x.NetRx-y.NetRx, x.NetTx-y.NetTx, x.IORead-y.IORead, x.IOWrite-y.IOWrite)
	if cpu >= smallCPU || bytes >= smallBytes || mem >= smallKiB {
		return true
	}
	return cpu+bytes+mem > 0 && n.At.Sub(w.At) >= slowly
}

// meterRound reads the meters of some boxes and writes what is due. With all
// set it writes of each what the ledger has no reading of that young.
func (m *Manager) meterRound(ctx context.Context, boxes []*box, all bool) error {
	if len(boxes) == 0 {
		return nil
	}
	net, err := m.net.AllBytes()
	if err != nil {
		m.log.WarnContext(ctx, "read the network counters of all sandboxes: tried again soon", "err", err)
	}
	var batch []sandbox.Reading
	of := map[*box]sandbox.Reading{}
	for _, b := range boxes {
		if all {
			b.meter.mu.Lock()
		} else if !b.meter.mu.TryLock() { // it is being written just now
			continue
		}
		t := &b.meter
		if t.begun {
			n := t.now.next(now(), m.measure(b, t.slot, net), t.now.Status)
			if t.worth(n.Reading) || all && n.At.Sub(t.wrote.At) >= m.cfg.Usage.Interval {
				batch = append(batch, t.due(n)...)
				of[b] = n.Reading
			}
			m.advance(t, n)
		}
		b.meter.mu.Unlock()
	}
	if err := m.state.PutReadings(ctx, batch); err != nil {
		return err
	}
	for b, r := range of {
		b.meter.mu.Lock()
		if r.At.After(b.meter.wrote.At) {
			b.meter.wrote = r
		}
		b.meter.mu.Unlock()
	}
	return nil
}

// keepLedger writes the ledger and thins it out, until the daemon's end.
func (m *Manager) keepLedger() {
	round := time.NewTicker(m.cfg.Usage.Interval)
	defer round.Stop()
	roll := time.NewTicker(rollEvery)
	defer roll.Stop()
	for {
		var err error
		select {
		case <-m.life.Done():
			return
		case <-round.C:
			err = m.meterRound(m.life, m.living(), false)
		case <-roll.C:
			err = errors.Join(m.rollUp(m.life), m.noteBooks(m.life))
		}
		if err != nil && m.life.Err() == nil {
			m.log.Error("keep the ledger of usage: tried again soon", "err", err)
		}
	}
}

// rollUp thins out all readings that are due.
func (m *Manager) rollUp(ctx context.Context) error {
	levels := state.DefaultRollUps(m.cfg.Usage.Daily)
	for more := true; more && ctx.Err() == nil; {
		var err error
		if more, err = m.state.Roll(ctx, time.Now(), levels); err != nil {
			return err
		}
	}
	return nil
}

// UsageReport adds up what was used in a span of time; of living sandboxes
// until now, but for what is small and younger than a round. ref, if set, names the one sandbox asked for, which may have been
// forgotten but for the ledger.
func (m *Manager) UsageReport(ctx context.Context, ref string, q sandbox.UsageQuery) (sandbox.UsageReport, error) {
	if ref != "" {
		q.Sandbox = sandbox.ID(ref)
		sb, err := m.Sandbox(ctx, ref)
		switch {
		case err == nil:
			q.Sandbox = sb.ID
		case !m.state.InLedger(ctx, q.Sandbox):
			return sandbox.UsageReport{}, err
		}
	}
	if q.To.IsZero() || time.Until(q.To) > -2*m.cfg.Usage.Interval {
		if err := m.meterRound(ctx, m.livingOf(payers{sandbox: string(q.Sandbox), owner: q.Owner}), true); err != nil {
			return sandbox.UsageReport{}, err
		}
	}
	return m.state.UsageReport(ctx, q)
}
