package runtime

import (
	"context"
	"maps"
	"math"
	goruntime "runtime"
	"slices"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// tally is what one budget has spent in its period: what has ended and what
// came from outside is added up, what lives is read at each look. The budgets'
// mu guards it.
type tally struct {
	row   state.BudgetRow
	built bool
	at    time.Time // when it was built
	span  cost.Span

	money   cost.Sum   // of what has ended, and from outside
	used    cost.Usage // the same
	stakes  map[sandbox.ID]*stake
	counted map[sandbox.ID]bool // among the ended ones, and young

	spent   cost.Quantity
	holds   cost.Action
	looked  time.Time
	next    time.Time // look again then
	samples []cost.Sample
	err     error     // why the last look did not find what was spent
	failing time.Time // since when looks have had an error
	told    bool      // of err, by an event
}

// stake is a living sandbox, with its totals at the times the tally needs.
type stake struct {
	box *box
	at  map[int64]sandbox.Meters // by milliseconds; before it was there: nothing
}

func newTally(r state.BudgetRow) *tally {
	t := &tally{row: r, stakes: map[sandbox.ID]*stake{}}
	if r.Err != nil { // its mark is not known either
		t.holds = t.row.Strongest()
	}
	if r.Mark.Paused { // until it is looked at
		t.holds = cost.ActionPause
	}
	return t
}

const (
	// young is how long a sandbox that ended while a tally was built may still
	// be reported as ended.
	young = time.Minute
	// aheadOfClock is more than the readings of a ledger are ahead of a clock that
	// was set back.
	aheadOfClock = 48 * time.Hour
	// For forecasts so many samples are kept, at first this far apart.
	maxSamples  = 240
	sampleApart = time.Second
)

// state tells how the budget stands.
func (t *tally) state() cost.BudgetState {
	b := t.row.Budget
	s := cost.BudgetState{
		StoredBudget: t.row.StoredBudget, Limit: b.Meter.FormatLimit(b.Limit), Spent: b.Meter.Format(t.spent),
		Percent: b.Percent(t.spent), Since: t.span.Start, Until: t.span.End, Holds: t.holds, Fired: t.row.Mark.Fired,
	}
	if t.err != nil {
		s.Unknown = t.err.Error()
	} else if d, ok := b.Forecast(t.samples); ok {
		secs := int64(d / time.Second)
		s.ExhaustedIn = &secs
	}
	return s
}

// fold takes in what ended and what was entered since the last look; the
// caller holds mu.
func (m *Manager) fold() {
	b := &m.budgets
	b.queued.Lock()
	over, posted := b.over, b.posted
	b.over, b.posted = nil, nil
	b.queued.Unlock()
	for _, t := range b.tallies {
		if !t.built {
			continue // will find them in the database
		}
		for _, x := range over {
			if t.err == nil {
				t.err = m.foldBox(t, x)
			}
		}
		for _, p := range posted {
			if t.err == nil {
				t.err = t.foldEntry(p)
			}
		}
		if t.err != nil { // begin anew
			t.built = false
		}
	}
}

// foldBox adds an ended sandbox to what is settled.
func (m *Manager) foldBox(t *tally, x *box) error {
	if !t.has(x) || t.counted[x.id] {
		return nil
	}
	s := t.stakes[x.id]
	if s == nil { // made and ended since the last look
		s = &stake{box: x}
	}
	money, used, err := m.charge(t, s, whole(time.Now()))
	if err != nil {
		return err
	}
	delete(t.stakes, x.id)
	return t.add(money, used)
}

// counts reports whether an entry is in the budget's scope.
func (t *tally) counts(p cost.Posted) bool {
	who := payers{agent: p.Agent, project: p.Project, owner: p.Owner}
	if p.Scope == cost.ScopeSandbox {
		who.sandbox = p.ID
	}
	return p.Kind == cost.KindCost && who.in(t.row.Budget)
}

func (t *tally) foldEntry(p cost.Posted) error {
	if !t.counts(p) || !t.span.Contains(p.At) {
		return nil
	}
	used := cost.Usage{}
	if p.Meter != "" {
		used[p.Meter] = p.Quantity
	}
	return t.add(cost.SumOf(p.Charged), used)
}

func (t *tally) add(money cost.Sum, used cost.Usage) error {
	all, err := t.used.Plus(used)
	if err == nil {
		t.money, t.used = t.money.Add(money), all
	}
	return err
}

// has reports whether a sandbox is in the budget's scope.
func (t *tally) has(b *box) bool { return b.payers().in(t.row.Budget) }

// livingOf lists what lives and is paid by all of these that are not empty.
func (m *Manager) livingOf(of payers) []*box {
	if of.sandbox != "" {
		if x := m.box(sandbox.ID(of.sandbox)); x != nil && of.match(x.payers()) {
			return []*box{x}
		}
		return nil
	}
	return slices.DeleteFunc(m.living(), func(x *box) bool { return !of.match(x.payers()) })
}

// lookAt finds what was spent, decides, and plans the next look. An error means
// that it is not known what was spent.
func (m *Manager) lookAt(ctx context.Context, t *tally, net func() map[sandbox.ID]sandbox.NetCounters) error {
	if t.row.Err != nil {
		return t.row.Err
	}
	now := whole(time.Now())
	span := t.row.Span(t.row.Mark, now)
	if !t.built || span != t.span || m.pricesChanged(t.at, now) {
		if err := m.buildTally(ctx, t, span, now); err != nil {
			return err
		}
	}
	m.join(t)
	m.readStakes(t, net)
	money, used := t.money, maps.Clone(t.used)
	for _, s := range t.stakes {
		amount, more, err := m.charge(t, s, now)
		if err == nil {
			used, err = used.Plus(more)
		}
		if err != nil {
			return err
		}
		money = money.Add(amount)
	}
	spent, err := t.row.Meter.Spent(used, money)
	if err != nil {
		return err
	}
	t.spent, t.holds, t.looked = spent, t.row.Holds(spent), time.Now()
	t.sample(cost.Sample{At: now, Spent: spent})
	most, err := m.most(t, now)
	if err != nil {
		most = cost.MaxQuantity
	}
	t.next = t.looked.Add(max(lookApart, t.row.NextLook(t.row.Mark, now, spent, most)))
	if err := m.noteBudget(ctx, t, t.row.Decide(t.row.Mark, now, spent)); err != nil {
		// What was spent is known, and is acted upon without its events.
		m.log.ErrorContext(ctx, "keep what a budget did: tried again soon", "budget", t.row.Key, "err", err)
		t.next = minTime(t.next, t.looked.Add(time.Second))
	}
	return nil
}

// closeAfter is how long the error of a look may last, of a database that is
// busy or a disk that is full, until what runs is stopped for it. What may not
// be added up is stopped for at once.
const closeAfter = 10 * time.Second

// missed takes in that a look did not find what was spent. A budget that is not
// known does as if it were all spent.
func (m *Manager) missed(ctx context.Context, t *tally, err error) {
	now := time.Now()
	if t.failing.IsZero() {
		t.failing = now
	}
	if t.err == nil || t.err.Error() != err.Error() {
		m.log.ErrorContext(ctx, "look at a budget: tried again every second", "budget", t.row.Key, "err", err)
	}
	t.err, t.next = err, now.Add(time.Second)
	if class := sandbox.ClassOf(err); class == nil && now.Sub(t.failing) < closeAfter {
		return // nothing new may begin meanwhile: see publishHolds
	}
	if t.holds = t.row.Strongest(); !t.told {
		t.told = true
		m.tellUnknown(ctx, t, eventBudgetUnknown)
	}
}

// found takes in that a look found what was spent.
func (m *Manager) found(ctx context.Context, t *tally) {
	if t.told {
		m.tellUnknown(ctx, t, eventBudgetKnown)
	}
	t.err, t.failing, t.told = nil, time.Time{}, false
}

func (m *Manager) tellUnknown(ctx context.Context, t *tally, what string) {
	data := budgetData(t.row.StoredBudget)
	data["holds"] = string(t.holds)
	if what == eventBudgetUnknown {
		data["reason"] = t.err.Error()
	}
	m.record(ctx, sandbox.Event{Time: time.Now().UTC(), Sandbox: sandboxOf(t.row.Budget), Type: what, Actor: "daemon", Data: data})
}

// sample keeps a sample for the forecast, every second one of many.
func (t *tally) sample(s cost.Sample) {
	if n := len(t.samples); n > 1 && s.At.Sub(t.samples[n-2].At) < sampleApart {
		t.samples[n-1] = s // the last one is always the present
		return
	}
	t.samples = append(t.samples, s)
	if len(t.samples) > maxSamples {
		half := t.samples[:0]
		for i := range t.samples {
			if i%2 == 0 || i == len(t.samples)-1 {
				half = append(half, t.samples[i])
			}
		}
		t.samples = half
	}
}

// pricesChanged reports whether a book came in force after one time and not
// after another.
func (m *Manager) pricesChanged(after, until time.Time) bool {
	a, _ := m.prices.At(after)
	b, _ := m.prices.At(until)
	return a != b
}

// buildTally adds up from the database what the period has seen so far: of what
// lives its totals at the beginning, of what has ended all.
func (m *Manager) buildTally(ctx context.Context, t *tally, span cost.Span, now time.Time) error {
	boxes := m.livingOf(payersBy(t.row.Budget))
	if err := m.meterRound(ctx, boxes, true); err != nil { // so that the ledger knows them
		return err
	}
	m.budgets.posting.Lock()
	m.fold() // what is queued is in the database; of other tallies it is still to come
	fresh := newTally(t.row)
	fresh.span, fresh.at, fresh.samples = span, now, t.samples
	fresh.used, fresh.counted = cost.Usage{}, map[sandbox.ID]bool{}
	err := m.addOutside(ctx, fresh)
	m.budgets.posting.Unlock()
	if err != nil {
		return err
	}
	// To the last reading there is: one may be younger than now by a little.
	end := now.Add(aheadOfClock)
	pieces := openEnded(m.prices.Stretches(span.Start, now), end)
	times := cost.Instants(pieces)
	p := payersBy(t.row.Budget)
	all, err := m.state.Totals(ctx, state.TotalsQuery{
		Times: times, From: span.Start, Sandbox: p.sandbox, Agent: p.agent, Project: p.project, Owner: p.owner,
	})
	if err != nil {
		return err
	}
	for _, b := range boxes {
		fresh.stakes[b.id] = &stake{box: b}
	}
	for _, x := range all {
		if s := fresh.stakes[x.Sandbox]; s != nil {
			s.at = map[int64]sandbox.Meters{}
			for i, at := range times[:max(0, len(times)-1)] {
				s.at[at.UnixMilli()] = x.At[i]
			}
			continue
		}
		if x.EndedAt.IsZero() { // it began a moment ago: join finds it
			continue
		}
		money, used, err := chargeAt(pieces, span, func(at time.Time) sandbox.Meters { return metersAt(times, x.At, at) }, end)
		if err == nil {
			err = fresh.add(money, used)
		}
		if err != nil {
			return err
		}
		if x.EndedAt.After(now.Add(-young)) {
			fresh.counted[x.Sandbox] = true
		}
	}
	fresh.built, fresh.looked, fresh.next = true, t.looked, t.next
	fresh.err, fresh.failing, fresh.told = t.err, t.failing, t.told
	*t = *fresh
	return nil
}

// openEnded lets the last piece go on to a later end.
func openEnded(pieces []cost.Stretch, end time.Time) []cost.Stretch {
	if len(pieces) > 0 {
		pieces[len(pieces)-1].To = end
	}
	return pieces
}

// addOutside adds what was entered in the period.
func (m *Manager) addOutside(ctx context.Context, t *tally) error {
	p := payersBy(t.row.Budget)
	q := cost.EntryQuery{From: t.span.Start, Kind: cost.KindCost, Sandbox: p.sandbox, Agent: p.agent, Project: p.project, Owner: p.owner}
	sums, err := m.state.EntrySums(ctx, "", q)
	if err == nil {
		err = m.addSums(t, sums)
	}
	if err != nil {
		return err
	}
	aside, err := m.state.Quarantined(ctx, q)
	for _, e := range aside {
		if t.row.Meter == cost.MeterMoney || t.row.Meter == e.Meter {
			return sandbox.Errorf(sandbox.ErrConflict, "entry_quarantined",
				"entry %d of %s %s (%s, quantity %s) is beyond the bounds of an entry: 'sandbox cost cancel %d' takes it out", e.Number, e.Scope, e.ID, e.Charged, e.Quantity, e.Number)
		}
	}
	return err
}

func (m *Manager) addSums(t *tally, sums []state.EntrySum) error {
	for _, e := range sums {
		used := cost.Usage{}
		if e.Meter != "" {
			used[e.Meter] = e.Quantity
		}
		if err := t.add(e.Amount, used); err != nil {
			return err
		}
	}
	return nil
}

// join gives new sandboxes of the scope a stake.
func (m *Manager) join(t *tally) {
	for _, b := range m.livingOf(payersBy(t.row.Budget)) {
		if t.stakes[b.id] == nil && !t.counted[b.id] {
			t.stakes[b.id] = &stake{box: b}
		}
	}
}

// readStakes reads the counters of all that lives.
func (m *Manager) readStakes(t *tally, once func() map[sandbox.ID]sandbox.NetCounters) {
	var net map[sandbox.ID]sandbox.NetCounters
	if m.countsNet(t.row.Meter) {
		net = once()
	}
	for _, s := range t.stakes {
		x := &s.box.meter
		x.mu.Lock()
		if x.begun {
			m.advance(x, x.now.next(now(), m.measure(s.box, x.slot, net), x.now.Status))
		}
		x.mu.Unlock()
	}
}

// netOnce reads the network's counters at its first call.
func (m *Manager) netOnce() func() map[sandbox.ID]sandbox.NetCounters {
	return sync.OnceValue(func() map[sandbox.ID]sandbox.NetCounters {
		net, err := m.net.AllBytes()
		if err != nil {
			m.log.Warn("read the network counters of all sandboxes: tried again soon", "err", err)
		}
		return net
	})
}

// countsNet reports whether a budget's meter needs the network's counters.
func (m *Manager) countsNet(meter cost.Meter) bool {
	switch meter {
	case cost.MeterNet, cost.MeterNetIn, cost.MeterNetOut:
		return true
	case cost.MeterMoney:
		b, ok := m.prices.At(time.Now())
		return ok && (b.Prices[cost.MeterNetIn].Price > 0 || b.Prices[cost.MeterNetOut].Price > 0)
	}
	return false
}

// charge is what a sandbox has used of the tally's period until now.
func (m *Manager) charge(t *tally, s *stake, now time.Time) (cost.Sum, cost.Usage, error) {
	s.box.meter.mu.Lock()
	present := s.box.meter.now.Meters
	s.box.meter.mu.Unlock()
	return chargeAt(m.prices.Stretches(t.span.Start, now), t.span, func(at time.Time) sandbox.Meters {
		if at.Equal(now) {
			return present
		}
		return s.at[at.UnixMilli()]
	}, now)
}

// chargeAt rates what was used from the beginning of a span until now.
func chargeAt(pieces []cost.Stretch, span cost.Span, at func(time.Time) sandbox.Meters, now time.Time) (cost.Sum, cost.Usage, error) {
	charges, err := cost.ChargePieces(pieces, func(x time.Time) cost.Usage { return cost.UsageOf(at(x)) })
	if err != nil {
		return cost.Sum{}, nil, err
	}
	var bill cost.Bill
	if err := bill.Add(charges...); err != nil {
		return cost.Sum{}, nil, err
	}
	used := cost.UsageOf(at(now))
	if !span.Start.IsZero() {
		used = used.Since(cost.UsageOf(at(span.Start)))
	}
	return bill.Total(), used, nil
}

// mostNet is more than any host moves in a second, each way.
const mostNet = 12_500_000_000

// caps are the most that one sandbox can use in a second, or hold.
type caps struct {
	cpu, memory, net uint64 // nanoseconds, bytes, bytes
}

// caps of a spec are what its limits permit where this host enforces them, and
// else all that the host has.
func (m *Manager) caps(s sandbox.Spec) caps {
	c := caps{cpu: uint64(goruntime.NumCPU()) * uint64(time.Second), memory: hostMemory(), net: mostNet}
	for _, e := range m.cgroup.Enforcement(s.Limits) {
		switch {
		case !e.Enforced:
		case e.Limit == "cpu" && s.Limits.CPUs > 0:
			c.cpu = min(c.cpu, uint64(s.Limits.CPUs*float64(time.Second))+1)
		case e.Limit == "memory" && s.Limits.MemoryBytes > 0:
			c.memory = min(c.memory, 2*uint64(s.Limits.MemoryBytes)) // the kernel's own part is on top
		}
	}
	if s.Network.Mode == sandbox.NetworkOff {
		c.net = 0
	}
	return c
}

// most is what can be spent in a second at most, by all that lives in the
// scope together: no more than this host has, however many they are.
func (m *Manager) most(t *tally, now time.Time) (cost.Quantity, error) {
	var running, paused, stopped, disk uint64
	var all caps
	for _, s := range t.stakes {
		x := &s.box.meter
		x.mu.Lock()
		p, c := x.now, x.caps
		x.mu.Unlock()
		disk += uint64(max(p.StorageKiB, 0)) << 10
		switch p.Status {
		case sandbox.StatusRunning, sandbox.StatusCreating:
			running++
			all.cpu += c.cpu
			all.memory += c.memory
			all.net += c.net
		case sandbox.StatusPaused:
			paused++
			all.memory += uint64(max(p.MemoryKiB, 0)) << 10 // it gets no more
		case sandbox.StatusStopped:
			stopped++
		}
	}
	if running > 0 {
		disk += mostNet // written in this second
	}
	u := cost.Usage{
		cost.MeterCPU:    cost.Count(min(all.cpu, uint64(goruntime.NumCPU())*uint64(time.Second))),
		cost.MeterMemory: cost.Product(min(all.memory, hostMemory()), 1000), cost.MeterStorage: cost.Product(disk, 1000),
		cost.MeterNetIn: cost.Count(min(all.net, mostNet)), cost.MeterNetOut: cost.Count(min(all.net, mostNet)),
		cost.MeterRunning: cost.Count(1000 * running), cost.MeterPaused: cost.Count(1000 * paused), cost.MeterStopped: cost.Count(1000 * stopped),
	}
	var money cost.Sum
	if b, ok := m.prices.At(now); ok && t.row.Meter == cost.MeterMoney {
		var err error
		if money, err = b.Most(u); err != nil {
			return cost.Count(math.MaxInt64), nil // more than any budget has
		}
	}
	return t.row.Meter.Spent(u, money)
}
