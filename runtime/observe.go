package runtime

import (
	"context"
	"maps"
	"sync"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Observer is told what the manager works at. Begin is called when a work
// begins and returns the context of its parts, and what to call with its
// error when it ends. Both are on the way of requests: they must not wait.
type Observer interface {
	Begin(ctx context.Context, work Work) (context.Context, func(error))
}

// Work is what an Observer is told of.
type Work string

// The works, and below the parts of a creation.
const (
	WorkCreate   Work = "create"
	WorkExec     Work = "exec" // until the command has begun
	WorkReset    Work = "reset"
	WorkRollback Work = "rollback"
	WorkFork     Work = "fork"
	WorkSnapshot Work = "snapshot"
	WorkStart    Work = "start"
	WorkStop     Work = "stop"
	WorkDestroy  Work = "destroy" // until nothing of it can run and its end is written

	PartPlan      Work = "create.plan"      // spec, image, what was made before
	PartShell     Work = "create.shell"     // built here: the pool had none that was any good
	PartLimits    Work = "create.limits"    // limits, and the upper's quota
	PartNetwork   Work = "create.network"   // link and policy
	PartRoot      Work = "create.root"      // files and mounts
	PartConfigure Work = "create.configure" // PID 1 takes its root
	PartRow       Work = "create.row"       // the database
)

// Works lists those that are whole.
func Works() []Work {
	return []Work{WorkCreate, WorkExec, WorkReset, WorkRollback, WorkFork, WorkSnapshot, WorkStart, WorkStop, WorkDestroy}
}

func unobserved(error) {}

// observe begins a work.
func (m *Manager) observe(ctx context.Context, w Work) (context.Context, func(error)) {
	if m.cfg.Observer == nil {
		return ctx, unobserved
	}
	return m.cfg.Observer.Begin(ctx, w)
}

// part is observe for what has no parts of its own.
func (m *Manager) part(ctx context.Context, w Work, f func() error) error {
	_, end := m.observe(ctx, w)
	err := f()
	end(err)
	return err
}

// sums count what happened since this daemon began.
type sums struct {
	mu       sync.Mutex
	meters   sandbox.Meters           // guarded by mu
	ends     map[sandbox.Reason]int64 // guarded by mu
	byBudget map[cost.Action]int64    // guarded by mu
}

// used adds what a meter went on by.
func (s *sums) used(more sandbox.Meters) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.meters = s.meters.Add(more)
}

func (s *sums) ended(r sandbox.Reason) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ends == nil {
		s.ends = map[sandbox.Reason]int64{}
	}
	s.ends[r]++
}

func (s *sums) acted(a cost.Action) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byBudget == nil {
		s.byBudget = map[cost.Action]int64{}
	}
	s.byBudget[a]++
}

// Stats are what there is now, and sums since this daemon began.
type Stats struct {
	Living map[sandbox.Status]int // those of them there are
	Pool   sandbox.PoolStats

	Ended    map[sandbox.Reason]int64
	ByBudget map[cost.Action]int64 // sandboxes that budgets paused, stopped and resumed
	Spent    int                   // budgets that are spent, and refuse what is new
	// Used has what sandboxes used of the processors, the network and disks, up
	// to the last look at their counters. The other meters are zero.
	Used sandbox.Meters
}

// Stats tells how the manager does. It asks neither the kernel nor the
// database.
func (m *Manager) Stats() Stats {
	s := Stats{Living: map[sandbox.Status]int{}, Pool: m.Pool()}
	for _, b := range m.living() {
		s.Living[b.standing()]++
	}
	if holds := m.budgets.holds.Load(); holds != nil {
		s.Spent = len(*holds)
	}
	c := &m.sums
	c.mu.Lock()
	defer c.mu.Unlock()
	u := c.meters
	s.Used = sandbox.Meters{CPU: u.CPU, NetRx: u.NetRx, NetTx: u.NetTx, IORead: u.IORead, IOWrite: u.IOWrite}
	s.Ended, s.ByBudget = maps.Clone(c.ends), maps.Clone(c.byBudget)
	return s
}
