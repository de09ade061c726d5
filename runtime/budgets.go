package runtime

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Budgets are looked at in time, and carried out by level, not by edge: a look
// finds what was spent, from that what must be so, and whatever in the scope is
// not so is told to be. What a budget has done before decides on events alone.
// So there is no step that a crash could lose: the first look of the next
// daemon, before its first request, finds the same.
//
//	set, start of a sandbox, entry, time ─► look ─► mark and events
//	                                             ─► holds: refuses create, start, resume
//	                                             ─► pause, stop or resume, sandbox by sandbox

// budgets are all there are, with what they have spent.
type budgets struct {
	n     atomic.Int64  // how many there are
	wake  chan struct{} // holds one: a plan has changed
	holds atomic.Pointer[[]hold]

	mu      sync.Mutex // held by a look
	tallies map[string]*tally

	queued sync.Mutex
	began  []*box        // run since the last look; guarded by queued
	over   []*box        // ended since; guarded by queued
	posted []cost.Posted // entries since; guarded by queued

	posting sync.RWMutex // read-held from before an entry is written until it is queued
}

// hold is a budget that is spent.
type hold struct {
	budget cost.Budget
	action cost.Action // what is done to what runs
	err    error       // of what would begin
}

// Bounds of looks.
const (
	// lookApart is the least between two looks at one budget.
	lookApart = 100 * time.Millisecond
	// actAgain is when to look whether all is as it must be.
	actAgain = 250 * time.Millisecond
	// actTimeout bounds a pause, stop or resume.
	actTimeout = teardownTimeout

	eventBudget       = "budget." // and the action
	eventBudgetResume = eventBudget + string(cost.ActionResume)
	// What was spent cannot be told, or can again.
	eventBudgetUnknown = eventBudget + "unknown"
	eventBudgetKnown   = eventBudget + "known"
)

func (b *budgets) poke() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// allow refuses what a spent budget forbids: creates, starts and resumes.
func (m *Manager) allow(p payers) error {
	holds := m.budgets.holds.Load()
	if holds == nil {
		return nil
	}
	for _, h := range *holds {
		if p.in(h.budget) {
			return h.err
		}
	}
	return nil
}

// strongest is the strongest of what spent budgets do to what runs.
func (m *Manager) strongest(p payers) (a cost.Action) {
	a = cost.ActionNone
	if holds := m.budgets.holds.Load(); holds != nil {
		for _, h := range *holds {
			if p.in(h.budget) && (h.action == cost.ActionStop || h.action == cost.ActionPause && a == cost.ActionNone) {
				a = h.action
			}
		}
	}
	return a
}

// begun tells the budgets of a sandbox that begins to run, or may spend faster.
func (b *budgets) begun(x *box) {
	if b.n.Load() == 0 {
		return
	}
	b.queued.Lock()
	b.began = append(b.began, x)
	b.queued.Unlock()
	b.poke()
}

// takeBegun returns those told of since the last call.
func (b *budgets) takeBegun() []*box {
	b.queued.Lock()
	defer b.queued.Unlock()
	all := b.began
	b.began = nil
	return all
}

// ended tells them of one that has ended, with its last counters.
func (b *budgets) ended(x *box) {
	if b.n.Load() == 0 {
		return
	}
	b.queued.Lock()
	defer b.queued.Unlock()
	b.over = append(b.over, x)
}

// entered tells them of an entry; the caller read-holds posting.
func (b *budgets) entered(p cost.Posted) {
	if b.n.Load() == 0 {
		return
	}
	b.queued.Lock()
	defer b.queued.Unlock()
	b.posted = append(b.posted, p)
}

// openBudgets looks at every budget for the first time: what is spent holds
// before the first request.
func (m *Manager) openBudgets(ctx context.Context) error {
	rows, err := m.state.Budgets(ctx)
	if err != nil {
		return err
	}
	b := &m.budgets
	b.mu.Lock()
	for _, r := range rows {
		if r.Scope == cost.ScopeSandbox && m.forgotten(ctx, sandbox.ID(r.ID)) {
			if err := m.state.DeleteBudget(ctx, r.Key); err != nil {
				m.log.WarnContext(ctx, "forget the budget of a sandbox that is long gone", "budget", r.Key, "err", err)
			}
			continue
		}
		b.tallies[r.Key] = newTally(r)
	}
	b.n.Store(int64(len(b.tallies)))
	b.mu.Unlock()
	m.assess(ctx, nil)
	if m.open() == nil { // a crash came between the removal of a budget and this
		for _, x := range m.living() {
			m.release(x)
		}
	}
	m.spawn(m.keepBudgets)
	return nil
}

// release resumes what a budget has paused that is no more.
func (m *Manager) release(x *box) {
	if m.life.Err() != nil || m.box(x.id) != x {
		return
	}
	whose := x.payers()
	x.mu.Lock()
	do := wanted(cost.ActionNone, x.status, x.byBudget)
	if do != cost.ActionNone && (x.acted || m.allow(whose) != nil) {
		do = cost.ActionNone
	}
	x.acted = x.acted || do != cost.ActionNone
	x.mu.Unlock()
	if do != cost.ActionNone {
		m.spawn(func() { m.carryOut(x, do, "", nil) })
	}
}

// forgotten reports whether the record of a sandbox was pruned.
func (m *Manager) forgotten(ctx context.Context, id sandbox.ID) bool {
	_, err := m.state.Sandbox(ctx, id)
	return errors.Is(err, sandbox.ErrNotFound)
}

// keepBudgets looks at each budget when its time has come, until the daemon's
// end.
func (m *Manager) keepBudgets() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-m.life.Done():
			return
		case <-m.budgets.wake:
			if began := m.budgets.takeBegun(); len(began) > 0 {
				m.assess(m.life, func(t *tally, now time.Time) bool { return slices.ContainsFunc(began, t.has) && t.soon(now) })
			}
		case <-timer.C:
			m.assess(m.life, func(t *tally, now time.Time) bool { return !t.next.After(now) })
		}
		timer.Reset(m.untilLook())
	}
}

// untilLook is how long nothing need be looked at.
func (m *Manager) untilLook() time.Duration {
	m.budgets.mu.Lock()
	defer m.budgets.mu.Unlock()
	wait := cost.MaxLook
	for _, t := range m.budgets.tallies {
		wait = min(wait, time.Until(t.next))
	}
	return max(wait, time.Millisecond)
}

// SetBudget sets a budget and carries it out.
func (m *Manager) SetBudget(ctx context.Context, req cost.BudgetRequest) (cost.BudgetState, error) {
	b, err := req.Budget()
	if err == nil && b.Scope == cost.ScopeSandbox {
		var sb sandbox.Sandbox
		if sb, err = m.Sandbox(ctx, b.ID); err == nil {
			b.ID = string(sb.ID)
		}
	}
	if err != nil {
		return cost.BudgetState{}, err
	}
	ctx = context.WithoutCancel(ctx)
	now := time.Now().UTC()
	m.budgets.mu.Lock()
	row, err := m.state.PutBudget(ctx, cost.StoredBudget{Key: cost.NewBudgetKey(), Budget: b, CreatedAt: now, UpdatedAt: now, Actor: req.Actor})
	if err == nil {
		t := m.budgets.tallies[row.Key]
		if t == nil {
			t = newTally(row)
			m.budgets.tallies[row.Key] = t
		}
		t.row.StoredBudget, t.row.Err = row.StoredBudget, nil
		m.budgets.n.Store(int64(len(m.budgets.tallies)))
	}
	m.budgets.mu.Unlock()
	if err != nil {
		return cost.BudgetState{}, err
	}
	m.record(ctx, sandbox.Event{Sandbox: sandboxOf(b), Type: eventBudget + "set", Actor: req.Actor, Data: budgetData(row.StoredBudget)})
	m.assess(ctx, nil) // all: a pause by one may end where another still holds
	return m.Budget(ctx, row.Key)
}

// Budget tells how a budget stands now. ErrNotFound with code
// budget_not_found.
func (m *Manager) Budget(ctx context.Context, key string) (cost.BudgetState, error) {
	all, err := m.budgetStates(ctx, func(t *tally) bool { return t.row.Key == key })
	if err != nil || len(all) == 0 {
		return cost.BudgetState{}, firstError(err, sandbox.Errorf(sandbox.ErrNotFound, "budget_not_found", "no budget %.40q: 'sandbox budget ls' shows those there are", key))
	}
	return all[0], nil
}

// Budgets tells how all budgets stand now, by target.
func (m *Manager) Budgets(ctx context.Context) ([]cost.BudgetState, error) {
	return m.budgetStates(ctx, func(*tally) bool { return true })
}

func firstError(err, other error) error {
	if err != nil {
		return err
	}
	return other
}

func (m *Manager) budgetStates(ctx context.Context, which func(*tally) bool) ([]cost.BudgetState, error) {
	m.assess(ctx, func(t *tally, _ time.Time) bool { return which(t) })
	m.budgets.mu.Lock()
	defer m.budgets.mu.Unlock()
	var out []cost.BudgetState
	for _, t := range m.budgets.tallies {
		if !which(t) {
			continue
		}
		out = append(out, t.state())
	}
	slices.SortFunc(out, func(a, b cost.BudgetState) int {
		return slices.Compare([]string{string(a.Scope), a.ID, a.Key}, []string{string(b.Scope), b.ID, b.Key})
	})
	return out, nil
}

// RemoveBudget removes a budget; what it has paused goes on. ErrNotFound.
func (m *Manager) RemoveBudget(ctx context.Context, key, actor string) error {
	ctx = context.WithoutCancel(ctx)
	m.budgets.mu.Lock()
	err := m.state.DeleteBudget(ctx, key)
	t := m.budgets.tallies[key]
	if err == nil {
		delete(m.budgets.tallies, key)
		m.budgets.n.Store(int64(len(m.budgets.tallies)))
		m.publishHolds()
	}
	m.budgets.mu.Unlock()
	if err != nil || t == nil {
		return err
	}
	m.record(ctx, sandbox.Event{Sandbox: sandboxOf(t.row.Budget), Type: eventBudget + "removed", Actor: actor, Data: budgetData(t.row.StoredBudget)})
	m.enforce(t.row.Budget, cost.ActionNone, t.row.Key, nil)
	return nil
}

// sandboxOf is whose events a budget's are: the sandbox's it is for.
func sandboxOf(b cost.Budget) sandbox.ID {
	if b.Scope == cost.ScopeSandbox {
		return sandbox.ID(b.ID)
	}
	return ""
}

func budgetData(b cost.StoredBudget) map[string]string {
	return map[string]string{
		"budget": b.Key, "scope": string(b.Scope), "id": b.ID, "meter": string(b.Meter), "limit": b.Meter.FormatLimit(b.Limit), "period": string(b.Period),
	}
}

// assess looks at budgets, all or some of them, and carries out what they say.
// One that cannot be looked at holds what it is of, says so, and is tried again.
func (m *Manager) assess(ctx context.Context, due func(*tally, time.Time) bool) {
	ctx = context.WithoutCancel(ctx) // who asked may go away
	b := &m.budgets
	if b.n.Load() == 0 {
		return
	}
	type act struct {
		budget cost.Budget
		key    string
		holds  cost.Action
		err    error
	}
	var acts []act
	b.mu.Lock()
	m.fold()
	now := time.Now()
	net := m.netOnce()
	for _, t := range b.tallies {
		if due != nil && !due(t, now) {
			continue
		}
		if err := m.lookAt(ctx, t, net); err != nil {
			if m.life.Err() != nil { // the daemon ends: nothing can be told any more
				continue
			}
			m.missed(ctx, t, err)
		} else {
			m.found(ctx, t)
		}
		acts = append(acts, act{t.row.Budget, t.row.Key, t.holds, t.err})
	}
	m.publishHolds()
	b.mu.Unlock()
	again := false
	for _, a := range acts {
		again = m.enforce(a.budget, a.holds, a.key, a.err) || again
	}
	if again {
		b.mu.Lock()
		for _, a := range acts {
			if t := b.tallies[a.key]; t != nil {
				t.next = minTime(t.next, time.Now().Add(actAgain))
			}
		}
		b.mu.Unlock()
	}
	b.poke() // the plan has changed
}

// soon reports whether a tally may be looked at again, or plans it for when.
func (t *tally) soon(now time.Time) bool {
	if t.built && now.Sub(t.looked) < lookApart {
		t.next = minTime(t.next, t.looked.Add(lookApart))
		return false
	}
	return true
}

func minTime(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// publishHolds tells allow what is spent; the caller holds mu.
func (m *Manager) publishHolds() {
	var all []hold
	now := time.Now()
	for _, t := range m.budgets.tallies {
		if t.err != nil && t.row.Strongest() != cost.ActionNone {
			all = append(all, hold{t.row.Budget, t.holds, unknownBudget(t)})
			continue
		}
		if t.holds == cost.ActionNone {
			continue
		}
		err := t.row.Allow(t.row.Mark, now, t.spent)
		if err == nil { // what it has spent is not known yet
			err = sandbox.Errorf(sandbox.ErrExhausted, "budget_exhausted", "%s %.70q has spent its budget of %s: raise it", t.row.Scope, t.row.ID, t.row.Meter)
		}
		all = append(all, hold{t.row.Budget, t.holds, err})
	}
	m.budgets.holds.Store(&all)
}

// unknownBudget is why nothing of a budget may begin that is not known.
func unknownBudget(t *tally) error {
	return sandbox.Errorf(sandbox.ErrExhausted, "budget_unknown", "%s %.70q: it cannot be told what was spent of its budget %s (%s), so nothing of it may run: %s",
		t.row.Scope, t.row.ID, t.row.Key, t.row.Meter, t.err.Error())
}

// note keeps what a look decided, with its events.
func (m *Manager) noteBudget(ctx context.Context, t *tally, d cost.Decision) error {
	if sameMark(d.Mark, t.row.Mark) && len(d.Fired) == 0 && d.Do != cost.ActionResume {
		return nil
	}
	var events []sandbox.Event
	event := func(action string, percent int) {
		data := budgetData(t.row.StoredBudget)
		data["spent"] = t.row.Meter.Format(t.spent)
		if percent > 0 {
			data["percent"] = strconv.Itoa(percent)
		}
		events = append(events, sandbox.Event{Time: time.Now().UTC(), Sandbox: sandboxOf(t.row.Budget), Type: eventBudget + action, Actor: "daemon", Data: data})
	}
	for _, f := range d.Fired {
		event(string(f.Action), f.Percent)
	}
	if d.Do == cost.ActionResume {
		event(string(cost.ActionResume), 0)
	}
	if err := m.state.KeepMark(ctx, t.row.Key, d.Mark, events...); err != nil {
		return err
	}
	t.row.Mark = d.Mark
	return nil
}

func sameMark(a, b cost.Mark) bool {
	return a.Period == b.Period && a.Start.Equal(b.Start) && a.Paused == b.Paused && slices.Equal(a.Fired, b.Fired)
}
