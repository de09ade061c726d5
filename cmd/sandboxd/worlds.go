package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/cgroup"
	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/guard"
	"github.com/sandboxd/sandboxd/internal/seccomp"
	"github.com/sandboxd/sandboxd/lab"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/launch"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// The fits of the lab.
var (
	_ lab.Store     = (*state.DB)(nil)
	_ lab.Sandboxes = (*runtime.Manager)(nil)
	_ server.Lab    = (*lab.Lab)(nil)
)

// labConfig is about projects.
type labConfig struct {
	Window    duration           `yaml:"promotion_window"` // how long health decides on a promotion
	Templates []project.Template `yaml:"experiment_templates"`
	Tokens    tokensConfig       `yaml:"agent_tokens"`
}

// tokensConfig is the budget that agents begin with.
type tokensConfig struct {
	Production uint64      `yaml:"production"`     // tokens of one agent there; 0: agents begin without a budget
	Factor     uint64      `yaml:"sandbox_factor"` // in the lab it has so many times that
	Meter      cost.Meter  `yaml:"meter"`
	Period     cost.Period `yaml:"period"`
}

func builtinLab() labConfig {
	return labConfig{Window: duration(10 * time.Minute), Tokens: tokensConfig{Production: 1_000_000, Factor: 10, Meter: "tokens", Period: cost.Day}}
}

func (t tokensConfig) allowance() lab.Allowance {
	return lab.Allowance{Limit: t.Production, Factor: t.Factor, Meter: t.Meter, Period: t.Period}
}

// productionConfig is about the production world.
type productionConfig struct {
	Cost     *costConfig `yaml:"cost"` // nil: the lab's
	Slots    int         `yaml:"max_sandboxes"`
	Volume   size        `yaml:"volume_size"` // of its loop image, where one is needed
	Defaults limitConfig `yaml:"default_limits"`
}

func builtinProduction() productionConfig {
	return productionConfig{
		Slots:    256,
		Defaults: limitConfig{CPUs: 2, Memory: 1 << 30, PIDs: 1024, OpenFiles: 8192, Disk: 4 << 30, Inodes: 400000},
	}
}

// lastSlot is the highest slot the lab may be given.
const lastSlot = 57000

// firstSlot is where production's slots begin, in the numbers of the lab's:
// as high as ids and addresses reach, so that it stays where it is when the
// lab's number changes.
func (c config) firstSlot() int {
	ids := int((1<<32 - 2 - uint64(c.UIDBase)) >> 16)
	addresses := 1<<(32-min(max(c.Network.Pool.Bits(), 0), 32)) - 3 // an invalid one has -1, and is refused elsewhere
	return min(lastSlot, ids-c.Production.Slots, addresses-c.Production.Slots)
}

func (c config) checkLab() []error {
	var errs []error
	if c.Production.Slots < 1 || c.Production.Slots > 4096 || c.Production.Volume < 0 {
		errs = append(errs, errors.New("production: use 1 to 4096 max_sandboxes and a volume_size of 0 or more"))
	}
	if err := c.production().limits().Validate(); err != nil {
		errs = append(errs, fmt.Errorf("production.default_limits: %w", err))
	}
	if _, err := cost.Reopen(c.production().Cost.Books, nil); err != nil {
		errs = append(errs, fmt.Errorf("production.cost: %w", err))
	}
	if c.Lab.Window == 0 || time.Duration(c.Lab.Window) > 7*24*time.Hour {
		errs = append(errs, errors.New("lab.promotion_window: use more than 0 and at most 168h"))
	}
	if err := c.Lab.Tokens.allowance().Validate(); err != nil {
		errs = append(errs, fmt.Errorf("lab.agent_tokens: %w", err))
	}
	seen := map[string]bool{}
	for _, t := range c.Lab.Templates {
		if sandbox.ValidateName(t.Name) != nil || t.Hypothesis == "" || t.Seconds < 0 || seen[t.Name] {
			errs = append(errs, fmt.Errorf("lab.experiment_templates: %.70q: each needs a name of its own, a hypothesis, and seconds of 0 or more", t.Name))
		}
		seen[t.Name] = true
	}
	return errs
}

// production is the configuration of the production world.
func (c config) production() config {
	p := c
	p.StateDir, p.RunDir, p.CgroupRoot = filepath.Join(c.StateDir, "production"), filepath.Join(c.RunDir, "production"), filepath.Join(c.CgroupRoot, "production")
	p.Slots, p.UIDBase, p.Defaults, p.Volume.Size = c.Production.Slots, c.UIDBase+uint32(max(0, c.firstSlot()))<<16, c.Production.Defaults, c.Production.Volume
	p.TTL, p.Idle = 0, 0
	if c.Production.Cost != nil {
		p.Cost = *c.Production.Cost
	}
	return p
}

// worlds are the lab's world, which is always there, and production's.
type worlds struct {
	c     config
	m     *runtime.Manager // of the lab's world
	parts parts
	log   *slog.Logger
	lab   *lab.Lab

	closing sync.Once
	closed  error // by closing

	mu     sync.Mutex
	far    *runtime.Manager // guarded by mu; nil until production is open
	farDB  *state.DB        // guarded by mu
	opened closers          // guarded by mu; production's

	inStep func() (stop func()) // keeps production's database and volume so
	stops  []func()             // of those that keep
}

func newWorlds(c config, m *runtime.Manager, p parts, log *slog.Logger) *worlds {
	return &worlds{c: c, m: m, parts: p, log: log}
}

// exists reports whether there is a production world.
func (w *worlds) exists() bool {
	for _, sign := range []string{w.database(), filepath.Join(w.c.production().StateDir, "volume", rootfs.MarkFile), filepath.Join(w.c.production().StateDir, "volume.img")} {
		if _, err := os.Lstat(sign); err == nil {
			return true
		}
	}
	return false
}

func (w *worlds) database() string { return filepath.Join(w.c.StateDir, "production.db") }

// recover brings the databases and the kernel together, of both worlds at
// once, for they share the network.
func (w *worlds) recover(ctx context.Context) error {
	if w.exists() {
		if err := w.assemble(ctx); err != nil {
			return err
		}
	}
	all := ctx
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return w.m.Recover(ctx) })
	if w.far != nil {
		g.Go(func() error { return w.far.Recover(ctx) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	w.stops = append(w.stops, keepInStep(all, w.c, "sandboxd", w.parts.whose, w.parts.db, w.parts.roots, w.parts.tree, w.log))
	if w.far != nil {
		w.stops = append(w.stops, w.inStep())
	}
	return nil
}

// checkSlots tells whether there is room for production's sandboxes.
func (w *worlds) checkSlots() error {
	if first := w.c.firstSlot(); first < w.c.Slots {
		return sandbox.Errorf(sandbox.ErrUnsupported, "no_slots", "the production world needs %d slots above the lab's %d, and ids and addresses reach to %d: lower max_sandboxes or production.max_sandboxes, or use a larger network.pool",
			w.c.Production.Slots, w.c.Slots, first+w.c.Production.Slots)
	}
	return nil
}

// assemble opens production's packages and makes its manager.
func (w *worlds) assemble(ctx context.Context) (err error) {
	c := w.c.production()
	if err := w.checkSlots(); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.opened.close())
			w.opened = closers{}
		}
	}()
	filter, err := seccomp.Compile()
	if err != nil {
		return fmt.Errorf("compile the seccomp filter: %w", err)
	}
	bootID, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return fmt.Errorf("read the host's boot id: %w", err)
	}
	bestEffort := c.Cgroup == cgroupBestEffort
	roots, err := rootfs.Open(ctx, rootfs.Config{
		Dir: c.StateDir, VolumeBytes: int64(c.Volume.Size), BestEffort: bestEffort, Second: true,
		ImportMaxBytes: int64(c.Volume.MaxBytes), ImportMaxFiles: c.Volume.MaxFiles,
	})
	if err != nil {
		return err
	}
	w.opened.add(roots.Close)
	library, err := openLibrary(c, roots, w.log)
	if err != nil {
		return err
	}
	tree, err := cgroup.Open(cgroup.Config{
		Mount: "/sys/fs/cgroup", Parent: c.CgroupRoot, BestEffort: bestEffort, Log: w.log,
		IODevices:     func() []string { return disksOf(filepath.Join(c.StateDir, "volume")) },
		IOReadDevices: func() []string { return disksBeneath(c.StateDir, filepath.Join(c.StateDir, "volume")) },
	})
	if err == nil {
		err = launch.Shield(c.CgroupRoot)
	}
	if err != nil {
		return err
	}
	shells, err := openLauncher(c.RunDir, w.log)
	if err != nil {
		return err
	}
	w.opened.add(shells.Close)
	w.opened.add(keepWhole(w.log, c.RunDir, shells.Restore))
	// The database last: where it is, there is a production world.
	db, err := state.Open(ctx, w.database())
	if err != nil {
		return err
	}
	w.opened.add(db.Close)
	whose, err := identify(db, roots, tree)
	if err != nil {
		return err
	}
	whose.meet(w.parts.network, roots)
	w.inStep = func() (stop func()) {
		return keepInStep(ctx, w.c, "production", whose, db, roots, tree, w.log.With("world", "production"))
	}
	w.far, w.farDB = runtime.New(runtime.Config{
		DefaultImage: c.Image, Defaults: c.limits(), Slots: c.Slots, UIDBase: c.UIDBase, Seccomp: filter, Quarantine: whose.why,
		BootID: strings.TrimSpace(string(bootID)), KeepEnded: c.KeepEnded, KeepEvents: c.KeepEvents,
		Log: w.log.With("world", "production"), Library: library,
		Usage:   runtime.UsageConfig{Interval: time.Duration(c.Usage.Interval), Daily: c.Usage.DailyDays},
		Prices:  c.Cost.Books,
		Network: runtime.NetworkConfig{Default: c.Network.Default.NetworkPolicy, Most: c.Network.Most},
		Pool:    runtime.PoolConfig{CPUShare: c.Pool.CPUShare}, Observer: observer{w.parts.telemetry}, Answers: w.m.Answers(),
	}, db, tree, w.parts.links.view(true, w.c.firstSlot()), roots, shells), db
	w.parts.news.far.Store(w.far)
	return nil
}

// production returns the production world, made where there is none.
func (w *worlds) production(ctx context.Context) (lab.World, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.far == nil {
		// It is the daemon's from here on, whoever asked.
		ctx = context.WithoutCancel(ctx)
		if err := w.assemble(ctx); err != nil {
			return lab.World{}, err
		}
		if err := w.far.Recover(ctx); err != nil {
			// Nothing is there to lose; the next to ask begins anew.
			err = errors.Join(err, w.far.Close(ctx), w.opened.close())
			w.parts.news.far.Store(nil)
			w.far, w.farDB, w.opened = nil, nil, closers{}
			return lab.World{}, err
		}
		w.stops = append(w.stops, w.inStep())
		w.log.InfoContext(ctx, "the production world is open", "database", w.database())
	}
	return lab.World{Rows: w.farDB, Sandboxes: labSandboxes{w.far}}, nil
}

// view returns what the API shows of production; nil where there is none.
func (w *worlds) view() server.Manager {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.far == nil {
		return nil
	}
	return productionService{w.far}
}

// promoted is what production is made of; nil where there is none.
func (w *worlds) promoted() (*runtime.Manager, *state.DB) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.far, w.farDB
}

// openLab wakes the lab.
func (w *worlds) openLab(ctx context.Context, g *guard.Manager) (*lab.Lab, error) {
	l := lab.New(lab.Config{
		Store: w.parts.db, Sandboxes: agentSandboxes{labSandboxes{w.m}, g}, Books: books{w.m}, Production: w.production, InProduction: w.far != nil,
		NextRun: runtime.NextRun, Templates: w.c.Lab.Templates, Window: time.Duration(w.c.Lab.Window), Allowance: w.c.Lab.Tokens.allowance(), Log: w.log,
	})
	w.lab = l
	return l, l.Start(ctx)
}

// stopFor stops the sandboxes of both worlds where the host goes down, or
// where asked; true if it did. They are not left to the end of the host, which
// kills what still runs and writes no file of theirs to disk first.
func (w *worlds) stopFor(ctx context.Context, asked bool) (stopped bool, err error) {
	down := hostGoesDown(ctx)
	if !down && !asked {
		return false, nil
	}
	limit, reason, detail := shutdownTimeout, sandbox.ReasonNone, ""
	if down {
		limit, reason, detail = hostDownTimeout, sandbox.ReasonHostRestart, "the host was shut down; its files are whole"
	}
	w.log.InfoContext(ctx, "stopping every sandbox", "host_goes_down", down)
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if w.lab != nil { // it would start its agents again
		err = w.lab.Close(ctx)
	}
	return true, errors.Join(err, w.stopAll(ctx, reason, detail))
}

// stopAll stops every sandbox of both worlds.
func (w *worlds) stopAll(ctx context.Context, reason sandbox.Reason, detail string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	err := w.m.StopAll(ctx, "daemon", reason, detail)
	if w.far != nil {
		err = errors.Join(err, w.far.StopAll(ctx, "daemon", reason, detail))
	}
	return err
}

// databases are those of the worlds that are open.
func (w *worlds) databases() []*state.DB {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := []*state.DB{w.parts.db}
	if w.farDB != nil {
		all = append(all, w.farDB)
	}
	return all
}

// close ends the lab, and lets go of production; its sandboxes go on.
// Repeating it is safe.
func (w *worlds) close(ctx context.Context) error {
	w.closing.Do(func() { w.closed = w.letGo(ctx) })
	return w.closed
}

func (w *worlds) letGo(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	var errs []error
	if w.lab != nil {
		errs = append(errs, w.lab.Close(ctx))
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, stop := range w.stops {
		stop()
	}
	if w.far != nil {
		errs = append(errs, w.far.Close(ctx))
	}
	return errors.Join(append(errs, w.opened.close())...)
}
