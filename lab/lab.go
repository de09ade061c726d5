package lab

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Config is what a Lab is made of.
type Config struct {
	Store     Store
	Sandboxes Sandboxes
	Books     Books
	// Production returns the production world, which it opens when it is
	// first asked. Repeating it returns the same.
	Production func(ctx context.Context) (World, error)
	// InProduction says that there is a production world already: its agents
	// are looked after from the start.
	InProduction bool
	NextRun      NextRun
	Templates    []project.Template // besides the built-in ones
	Window       time.Duration      // of promotions that name none; 0: ten minutes
	Allowance    Allowance
	Tick         time.Duration // between two looks at deadlines and alerts; 0: five seconds
	Log          *slog.Logger

	// Step, unless nil, is told each step of a promotion before it is taken.
	// An error ends the work there and then, as a crash would. For tests.
	Step func(step string) error
}

// Lab runs the projects. It is safe for concurrent use.
type Lab struct {
	cfg   Config
	log   *slog.Logger
	store Store
	rules *rules

	life   context.Context // ends with the lab
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	own   *supervisor   // of the lab's world
	ticks chan struct{} // holds one: look now

	mu         sync.Mutex
	production *supervisor // guarded by mu; nil until the world was opened
	driving    map[project.PromotionID]bool
}

const (
	defaultWindow = 10 * time.Minute
	defaultTick   = 5 * time.Second
	workTimeout   = 2 * time.Minute
)

// New returns a lab at rest: Start wakes it.
func New(cfg Config) *Lab {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Window == 0 {
		cfg.Window = defaultWindow
	}
	if cfg.Tick == 0 {
		cfg.Tick = defaultTick
	}
	life, cancel := context.WithCancel(context.Background())
	l := &Lab{
		cfg: cfg, log: cfg.Log, store: cfg.Store, rules: newRules(), life: life, cancel: cancel,
		ticks: make(chan struct{}, 1), driving: map[project.PromotionID]bool{},
	}
	l.own = newSupervisor(l, "lab", World{Rows: cfg.Store, Sandboxes: cfg.Sandboxes})
	return l
}

// Start takes up what an earlier daemon left: agents, promotions that have not
// ended, projects that were being killed.
func (l *Lab) Start(ctx context.Context) error {
	if err := l.own.start(ctx); err != nil {
		return fmt.Errorf("take up the agents of the lab: %w", err)
	}
	if l.cfg.InProduction {
		if _, err := l.inProduction(ctx); err != nil {
			return fmt.Errorf("take up the agents of production: %w", err)
		}
	}
	running, err := l.store.Promotions(ctx, "")
	if err != nil {
		return err
	}
	for _, p := range running {
		l.drive(p.ID)
	}
	all, err := l.store.Projects(ctx)
	if err != nil {
		return err
	}
	for _, p := range all {
		if p.Ending {
			l.spawn(func() { l.endProject(p.ID) })
		}
	}
	l.spawn(l.keepTicking)
	return nil
}

// Close ends the work; agents go on. It waits within ctx.
func (l *Lab) Close(ctx context.Context) error {
	l.cancel()
	done := make(chan struct{})
	go func() { l.tasks.Wait(); close(done) }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the lab's work: %w", ctx.Err())
	}
}

func (l *Lab) spawn(f func()) { l.tasks.Go(f) }

// inProduction returns the supervisor of the production world, opening it.
func (l *Lab) inProduction(ctx context.Context) (*supervisor, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.production != nil {
		return l.production, nil
	}
	if l.cfg.Production == nil {
		return nil, sandbox.Errorf(sandbox.ErrUnsupported, "no_production", "this daemon has no production world")
	}
	w, err := l.cfg.Production(ctx)
	if err != nil {
		return nil, fmt.Errorf("open the production world: %w", err)
	}
	s := newSupervisor(l, "production", w)
	if err := s.start(ctx); err != nil {
		return nil, err
	}
	l.production = s
	return s, nil
}

// ProductionAgents lists the agents of the production world; none where there
// is no such world yet.
func (l *Lab) ProductionAgents(ctx context.Context) ([]project.Agent, error) {
	l.mu.Lock()
	s := l.production
	l.mu.Unlock()
	if s == nil {
		return nil, nil
	}
	return s.world.Rows.Agents(ctx, "")
}

// find returns the project a ref names: an id or a name.
func (l *Lab) find(ctx context.Context, ref string) (project.Project, error) {
	if id, err := project.ParseID(ref); err == nil {
		return l.store.Project(ctx, id)
	}
	return l.store.ProjectByName(ctx, ref)
}

// update runs a transaction on the lab's rows.
func (l *Lab) update(ctx context.Context, f func(project.Tx) error) error {
	return l.store.UpdateLab(ctx, f)
}

// wake puts a token into a channel of one, unless there is one.
func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// pause waits, but not beyond the end of ctx, which it then reports.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// is reports whether an error has a class.
func is(err, class error) bool { return errors.Is(err, class) }

// ended is the error for work on a project that does no more of that kind.
func notActive(p project.Project) error {
	return sandbox.Errorf(sandbox.ErrConflict, "project_not_active", "project %s is %s: only an active one can do that", p.ID, p.Status)
}
