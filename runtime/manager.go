package runtime

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/runtime/guest"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// Config is what a Manager is told at its start.
type Config struct {
	DefaultImage string
	Defaults     sandbox.Limits // for limits a spec leaves at zero
	DefaultTTL   time.Duration  // 0: none
	DefaultIdle  time.Duration  // 0: none
	Slots        int            // most living sandboxes
	UIDBase      uint32         // first id of slot 0
	Network      NetworkConfig
	Seccomp      []byte // the compiled filter every workload runs under
	BootID       string // of the host's running kernel
	Quarantine   string // why; empty: none
	KeepEnded    int    // ended sandboxes whose records are kept
	KeepEvents   int    // events kept
	Usage        UsageConfig
	Prices       []cost.Book // as configured
	Pool         PoolConfig
	Library      Library        // nil: no image can be pulled, pushed or exported
	Dial         Dial           // nil: the real one
	Observer     Observer       // nil: nobody watches
	Answers      *guest.Account // what sandboxes' answers may take in memory; nil: one of its own
	Log          *slog.Logger
}

// Manager holds every living sandbox. It is safe for concurrent use.
type Manager struct {
	cfg    Config
	log    *slog.Logger
	state  *state.DB
	cgroup Cgroups
	net    Network
	roots  Roots
	shells Shells
	dial   Dial

	life   context.Context // ends with the daemon; watchers hang on it
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	space atomic.Pointer[space] // of the volume, as last seen; nil before

	volumes sync.Mutex    // held while a volume is made, changed or removed
	holds   holds         // what exports, imports and builds need
	imports sync.RWMutex  // read-held between the making or reading of layers and their hold or row, held while layers are collected
	retry   time.Duration // before a teardown that failed is tried again

	launchIn time.Duration // the time a shell has to start

	prices  cost.Shelf // set by Recover
	budgets budgets
	sums    sums

	audit    *audit
	auditing sync.Once // starts its writing

	pool     *pool
	hurry    hurry
	cleaning chan struct{} // one token for each clean-up in the background
	leaving  atomic.Int64  // sandboxes and shells whose slots will be free soon

	collecting atomic.Bool // unused layers are about to be collected

	schedules  chan struct{} // holds one: there is a new one
	scheduling sync.Mutex    // held while the record of a schedule is changed
	acting     sync.Map      // ids of schedules whose run is under way

	onEnd func(sandbox.ID) // set before Recover; nil: nobody asks

	mu    sync.Mutex
	boxes map[sandbox.ID]*box // living sandboxes, guarded by mu
}

// Bounds of work that goes on without its caller.
const (
	createTimeout   = 60 * time.Second
	teardownTimeout = 60 * time.Second
	retryTeardown   = 5 * time.Second
	idSpan          = 65536
	// cleanUps is how many ended sandboxes are cleaned up at the same time
	// besides the requests that ended them.
	cleanUps = 64
	// slotPatience is how long a create waits for a slot that is about to be
	// free, looking every slotPoll.
	slotPatience = 5 * time.Second
	slotPoll     = 10 * time.Millisecond
)

// New returns a manager that knows of no sandbox yet: call Recover before
// the first request.
func New(cfg Config, db *state.DB, cg Cgroups, net Network, roots Roots, shells Shells) *Manager {
	dial := cfg.Dial
	if dial == nil {
		dial = dialGuest
	}
	life, cancel := context.WithCancel(context.Background())
	m := &Manager{
		cfg: cfg, log: cfg.Log, state: db, cgroup: cg, net: net, roots: roots, shells: shells, dial: dial,
		life: life, cancel: cancel, retry: retryTeardown, launchIn: launchTimeout, cleaning: make(chan struct{}, cleanUps), boxes: map[sandbox.ID]*box{},
		schedules: make(chan struct{}, 1),
	}
	if cfg.Answers == nil {
		m.cfg.Answers = guest.NewAccount()
	}
	m.cfg.Usage = cfg.Usage.orDefault()
	m.budgets.wake, m.budgets.tallies = make(chan struct{}, 1), map[string]*tally{}
	m.pool = newPool(m, cfg.Pool)
	m.audit = newAudit(db.AppendEvents)
	return m
}

// Close stops watching; sandboxes go on. It waits for teardowns under way,
// within ctx. The next daemon finishes what it could not.
func (m *Manager) Close(ctx context.Context) error {
	m.cancel()
	for _, b := range m.living() {
		b.quiet() // no timer begins anything now
	}
	done := make(chan struct{})
	go func() { m.tasks.Wait(); close(done) }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for background work: %w", ctx.Err())
	}
}

// StopAll stops every running sandbox, keeping the filesystems, and has every
// snapshot on disk when it returns. Their rows say reason and detail.
func (m *Manager) StopAll(ctx context.Context, actor string, reason sandbox.Reason, detail string) error {
	ch := state.Change{Actor: actor}
	if reason != sandbox.ReasonNone {
		ch.Reason, ch.Detail = &reason, &detail
	}
	boxes := m.living()
	errs := make([]error, len(boxes))
	var g errgroup.Group
	g.SetLimit(32) // each may wait for its processes, and all together have one shutdown's time
	for i, b := range boxes {
		g.Go(func() error {
			_, err := m.stop(ctx, string(b.id), ch)
			if !errors.Is(err, sandbox.ErrConflict) {
				errs[i] = err
			}
			return nil
		})
	}
	_ = g.Wait()
	m.hardenLeft()
	m.letHear(ctx, boxes)
	return errors.Join(errs...)
}

// letHear waits a moment until those who were connected to processes of
// stopped sandboxes were told.
func (m *Manager) letHear(ctx context.Context, boxes []*box) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	for _, b := range boxes {
		for b.standing() == sandbox.StatusStopped && b.calls() > 0 && ctx.Err() == nil {
			pause(ctx, fatePoll)
		}
	}
}

// living returns the boxes there are now.
func (m *Manager) living() []*box {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := make([]*box, 0, len(m.boxes))
	for _, b := range m.boxes {
		all = append(all, b)
	}
	return all
}

// box returns the living sandbox's box, or nil.
func (m *Manager) box(id sandbox.ID) *box {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.boxes[id]
}

// keepBox makes a living sandbox's box known.
func (m *Manager) keepBox(b *box) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.boxes[b.id] = b
}

func (m *Manager) dropBox(id sandbox.ID) {
	m.mu.Lock()
	b := m.boxes[id]
	delete(m.boxes, id)
	m.mu.Unlock()
	if b != nil {
		m.budgets.ended(b)
	}
	if m.onEnd != nil {
		m.onEnd(id)
	}
}

// Sandbox returns the record ref names: an id, a name, or the beginning of an
// id if that is unique. A name means the living sandbox of that name, else
// the one that ended last.
func (m *Manager) Sandbox(ctx context.Context, ref string) (sandbox.Sandbox, error) {
	sb, err := m.state.ByRef(ctx, ref)
	if err != nil {
		return sb, err
	}
	if b := m.box(sb.ID); b != nil {
		b.correct(&sb)
	} else if !sb.Status.Terminal() { // its end was written meanwhile
		return m.state.Sandbox(ctx, sb.ID)
	}
	return sb, nil
}

// find returns the box of a living sandbox and its record.
func (m *Manager) find(ctx context.Context, ref string) (*box, sandbox.Sandbox, error) {
	sb, err := m.Sandbox(ctx, ref)
	if err != nil {
		return nil, sb, err
	}
	b := m.box(sb.ID)
	if b == nil {
		return nil, sb, ended(sb)
	}
	return b, sb, nil
}

// running is find for what needs PID 1 to answer. Of an id it does not ask
// the database.
func (m *Manager) running(ctx context.Context, ref string) (*box, error) {
	if b := m.box(sandbox.ID(ref)); b != nil && b.runs() {
		return b, nil
	}
	b, sb, err := m.find(ctx, ref)
	if err == nil && sb.Status == sandbox.StatusRunning && !b.runs() {
		// Its row is written a moment before PID 1 has its root.
		if err := b.lock(ctx); err != nil {
			return nil, err
		}
		b.unlock()
		b, sb, err = m.find(ctx, ref)
	}
	if err != nil {
		return nil, err
	}
	switch sb.Status {
	case sandbox.StatusRunning:
		return b, nil
	case sandbox.StatusPaused:
		return nil, sandbox.Errorf(sandbox.ErrConflict, "sandbox_paused", "sandbox %s is paused: 'sandbox resume %s' first", ref, ref)
	case sandbox.StatusStopped:
		return nil, stopped(sb)
	case sandbox.StatusCompleting, sandbox.StatusCompleted, sandbox.StatusFailed:
		return nil, ended(sb)
	default:
		return nil, sandbox.Errorf(sandbox.ErrConflict, "sandbox_not_running", "sandbox %s is %s, not running", ref, sb.Status)
	}
}

// charged has what a sandbox's PID 1 answers counted as the sandbox's, and its
// owner's.
func (m *Manager) charged(ctx context.Context, b *box) context.Context {
	b.mu.Lock()
	owner := b.owner
	b.mu.Unlock()
	return m.cfg.Answers.Charge(ctx, b.id, owner)
}

// Answers returns the account of what sandboxes' answers take.
func (m *Manager) Answers() *guest.Account { return m.cfg.Answers }

// ended is the error for work on a sandbox that is gone.
func ended(sb sandbox.Sandbox) error {
	why := string(sb.Reason)
	if sb.Detail != "" {
		why += ": " + clip(sb.Detail, 500)
	}
	return &sandbox.Error{Class: sandbox.ErrConflict, Code: sandbox.CodeEnded, Reason: sb.Reason, Detail: fmt.Sprintf("sandbox %s has ended (%s); its record stays, create another to go on", sb.ID, why)}
}

// stopped is the error for work on a sandbox that has no processes.
func stopped(sb sandbox.Sandbox) error {
	why, first := "", ""
	if sb.Reason != sandbox.ReasonNone {
		why = " (" + string(sb.Reason) + ")"
	}
	if sb.Reason == sandbox.ReasonBudget {
		first = "once its budget ('sandbox budget ls') is raised or its period is over, "
	}
	return &sandbox.Error{Class: sandbox.ErrConflict, Code: sandbox.CodeStopped, Reason: sb.Reason, Detail: fmt.Sprintf("sandbox %s is stopped%s, its files are kept: %s'sandbox start %s' first", sb.ID, why, first, sb.ID)}
}

// List returns a page of sandboxes.
func (m *Manager) List(ctx context.Context, f sandbox.Filter) (sandbox.Page, error) {
	page, err := m.state.List(ctx, f)
	for i := range page.Items {
		m.lookForFiles(ctx, &page.Items[i])
	}
	return page, err
}

// Events returns events after a sequence number, of one sandbox or of all.
func (m *Manager) Events(ctx context.Context, after int64, ref string, limit int) ([]sandbox.Event, error) {
	var id sandbox.ID
	if ref != "" {
		sb, err := m.Sandbox(ctx, ref)
		if err != nil {
			return nil, err
		}
		id = sb.ID
	}
	return m.state.Events(ctx, after, id, limit)
}

// Pool tells how the pool of shells does.
func (m *Manager) Pool() sandbox.PoolStats { return m.pool.Stats() }

// Subscribe wakes its channel after each new event.
func (m *Manager) Subscribe() (<-chan struct{}, func()) { return m.state.Subscribe() }

// spawn runs background work that Close waits for.
func (m *Manager) spawn(f func()) {
	m.tasks.Go(f)
}

// IDs lists the ids of the living sandboxes, in no order. It asks no database.
func (m *Manager) IDs() []sandbox.ID {
	boxes := m.living()
	ids := make([]sandbox.ID, len(boxes))
	for i, b := range boxes {
		ids[i] = b.id
	}
	return ids
}
