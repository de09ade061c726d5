package runtime

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/runtime/guest"
	"github.com/sandboxd/sandboxd/sandbox"
)

// PoolConfig says how many shells are kept ready, and at what price.
type PoolConfig struct {
	// Size is how many are kept in quiet times; misses make it more, see
	// most. 0: every sandbox gets a shell of its own making.
	Size int
	// CPUShare is the part of one processor that refilling may take, above 0
	// and at most 1.
	CPUShare float64
}

// most is how many shells are kept at most.
func (c PoolConfig) most() int { return min(c.Size*poolFactor, c.Size+poolGrowth) }

const (
	// poolGrowth bounds how many more demand makes of it, and poolFactor how
	// many times as many.
	poolGrowth, poolFactor = 32, 4
	// poolCalm is how long without a miss brings the target one step down.
	poolCalm = 5 * time.Second
	// poolTick is how often the pool looks at the machine's memory.
	poolTick = 2 * time.Second
	// poolRest is how long an attempt to build is not repeated after one
	// failed or the memory was short.
	poolRest = 10 * time.Second
	// poolSpare is how many slots stay out of the pool's hands.
	// at most; a host of few slots spares a quarter of them.
	poolSpare = 16
)

// spare is how many of so many slots stay out of the pool's hands.
func spare(slots int) int { return min(poolSpare, slots/4) }

// pool keeps shells ready: PID 1 in its namespaces and cgroup, with loopback,
// default limits and an empty upper. What takes ten milliseconds is done
// before anybody asks. A pooled shell has no row; the sweep of a restart
// removes it, and its slot is reserved in the database.
type pool struct {
	m   *Manager
	cfg PoolConfig

	wake     chan struct{}
	building atomic.Bool // a shell is being built

	mu     sync.Mutex
	ready  []*pooled // guarded by mu, oldest first
	target int       // guarded by mu
	missed time.Time // guarded by mu; the last miss, or step down after it
	rests  time.Time // guarded by mu; nothing is built until then
	closed bool      // guarded by mu; nothing is added any more
	stats  sandbox.PoolStats
}

// pooled is one shell nobody has asked for yet.
type pooled struct {
	b    *box
	slot int
	has  given
	born time.Time
}

func newPool(m *Manager, cfg PoolConfig) *pool {
	if cfg.CPUShare <= 0 || cfg.CPUShare > 1 {
		cfg.CPUShare = 1
	}
	return &pool{m: m, cfg: cfg, target: cfg.Size, wake: make(chan struct{}, 1)}
}

// take returns the oldest ready shell that lives, or nil.
func (p *pool) take() *pooled {
	if p.cfg.Size == 0 {
		return nil
	}
	defer p.nudge()
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.ready) > 0 {
		s := p.ready[0]
		p.ready = p.ready[1:]
		if s.b.present().Alive() {
			p.stats.Hits++
			return s
		}
		p.stats.Lost++
		p.m.spawn(func() { p.m.scrap(s) })
	}
	p.stats.Misses++
	if time.Now().Before(p.rests) {
		return nil // more could not be had
	}
	p.missed = time.Now()
	p.target = min(max(p.target+p.target/2, p.target+1), p.cfg.most())
	return nil
}

// nudge wakes the refill.
func (p *pool) nudge() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// Stats tells how the pool does.
func (p *pool) Stats() sandbox.PoolStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.stats
	s.Size, s.Target, s.Ready = p.cfg.Size, p.target, len(p.ready)
	if len(p.ready) > 0 {
		s.OldestSeconds = time.Since(p.ready[0].born).Seconds()
	}
	return s
}

// run refills until the daemon ends, and then gives the shells back.
func (p *pool) run() {
	if p.cfg.Size == 0 {
		return
	}
	ctx := p.m.life
	tick := time.NewTicker(poolTick)
	defer tick.Stop()
	for ctx.Err() == nil {
		p.bury()
		p.calmDown()
		for p.watchMemory() && p.wants() && ctx.Err() == nil {
			if err := p.add(ctx); err != nil && ctx.Err() == nil {
				p.failed(err)
			}
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		case <-p.wake:
		}
	}
	p.close()
}

// failed notes that a shell could not be built. Where only slots are wanting,
// sandboxes have them, and soon may not.
func (p *pool) failed(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if errors.Is(err, sandbox.ErrExhausted) {
		p.rests = time.Now().Add(poolTick)
		return
	}
	p.stats.Failed++
	p.rests = time.Now().Add(poolRest)
	p.m.log.Warn("keep a shell ready: tried again later", "err", err)
}

// watchMemory gives the shells back where the machine's memory is short, and
// reports whether it is not.
func (p *pool) watchMemory() bool {
	why, short := p.m.cgroup.MemoryShort()
	if short {
		p.shed(why)
	}
	return !short
}

func (p *pool) wants() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.ready) < p.target && time.Now().After(p.rests)
}

// bury scraps the shells that died unasked.
func (p *pool) bury() {
	p.mu.Lock()
	var dead []*pooled
	p.ready = slices.DeleteFunc(p.ready, func(s *pooled) bool {
		if s.b.present().Alive() {
			return false
		}
		dead = append(dead, s)
		return true
	})
	p.stats.Lost += int64(len(dead))
	p.mu.Unlock()
	p.m.scrapAll(dead)
}

// calmDown takes back what misses added, once they are some time ago.
func (p *pool) calmDown() {
	p.mu.Lock()
	var over []*pooled
	if p.target > p.cfg.Size && time.Since(p.missed) > poolCalm {
		p.target = max(p.cfg.Size, p.target*3/4)
		p.missed = time.Now()
		if n := len(p.ready) - p.target; n > 0 {
			over = append(over, p.ready[:n]...)
			p.ready = p.ready[n:]
		}
	}
	p.mu.Unlock()
	p.m.scrapAll(over)
}

// shed empties the pool because the machine's memory is short.
func (p *pool) shed(why string) {
	p.mu.Lock()
	all := p.ready
	p.ready = nil
	p.stats.Shed += int64(len(all))
	p.rests = time.Now().Add(poolRest)
	p.mu.Unlock()
	if len(all) > 0 {
		p.m.log.Warn("memory is short: giving the ready shells back", "shells", len(all), "why", why)
		p.m.scrapAll(all)
	}
}

// close empties the pool for good.
func (p *pool) close() {
	p.mu.Lock()
	all := p.ready
	p.ready, p.closed = nil, true
	p.mu.Unlock()
	p.m.scrapAll(all)
}

// add builds one shell and rests as long as the share of the processor asks.
func (p *pool) add(ctx context.Context) error {
	p.m.hurry.letPass(ctx, p.halfFull)
	p.building.Store(true)
	defer p.building.Store(false)
	began := time.Now()
	s, err := p.m.buildPooled(ctx)
	took := time.Since(began)
	if err != nil {
		return err
	}
	p.mu.Lock()
	closed := p.closed
	if !closed {
		p.ready = append(p.ready, s)
	}
	p.stats.Built++
	p.stats.BuildSeconds += took.Seconds()
	p.mu.Unlock()
	p.building.Store(false)
	if closed {
		p.m.scrap(s)
	}
	pause(ctx, time.Duration(float64(took)*(1/p.cfg.CPUShare-1)))
	return nil
}

// halfFull tells whether a refill can wait.
func (p *pool) halfFull() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return 2*len(p.ready) >= p.target
}

// buildPooled makes a shell that a sandbox with default limits can have as it
// is. On error nothing of it is left, or will not be soon.
func (m *Manager) buildPooled(ctx context.Context) (*pooled, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer cancel()
	slot, err := m.state.ReserveSlot(ctx, m.cfg.Slots, spare(m.cfg.Slots))
	if err != nil {
		return nil, err
	}
	id := sandbox.NewID()
	s := &pooled{b: newBox(id, m.dial(m.shells.SocketPath(id))), slot: slot, born: time.Now()}
	if err := m.raiseForPool(ctx, s); err != nil {
		m.scrap(s)
		return nil, fmt.Errorf("build a shell for the pool: %w", err)
	}
	s.born = time.Now()
	return s, nil
}

func (m *Manager) raiseForPool(ctx context.Context, s *pooled) error {
	shell, err := m.raise(ctx, s.b, s.slot, false)
	if err != nil {
		return err
	}
	limits := withDefaults(sandbox.Limits{}, m.cfg.Defaults)
	if err := m.cgroup.SetLimits(s.b.id, limits); err != nil {
		return err
	}
	if err := m.roots.CreateUpper(s.b.id, s.slot, limits); err != nil {
		return err
	}
	off := sandbox.NetworkPolicy{Mode: sandbox.NetworkOff}
	guess, err := m.identity(sandbox.Sandbox{Slot: s.slot, Spec: sandbox.Spec{Hostname: string(s.b.id), Network: off}})
	if err != nil {
		return err
	}
	if _, err := m.roots.Furnish(s.b.id, sandbox.Image{}, rootfs.Identity{}, guess); err != nil {
		return err
	}
	if err := m.net.Attach(ctx, netns.Attachment{ID: s.b.id, Slot: s.slot, NetNS: shell.NetNS, Policy: off}); err != nil {
		return err
	}
	s.has = given{cgroup: &limits, upper: &limits, identity: guess, network: true, prepared: true}
	return s.b.guest.Prepare(ctx, guest.PrepareConfig{Seccomp: m.cfg.Seccomp, Work: true})
}

// scrap removes a shell without a row, again and again until nothing is left,
// and then gives its slot back.
func (m *Manager) scrap(s *pooled) {
	m.leaving.Add(1)
	defer m.leaving.Add(-1)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(m.life), teardownTimeout)
	defer cancel()
	release, err := m.killShell(ctx, s.b)
	if err == nil {
		release()
		err = m.clear(ctx, s.b.id, s.slot)
	}
	if err == nil {
		err = m.state.ReleaseSlot(ctx, s.slot)
	}
	if err != nil {
		m.log.ErrorContext(ctx, "remove a shell of the pool: tried again later", "shell", s.b.id, "err", err)
		m.later(func() { m.scrap(s) })
	}
}

func (m *Manager) scrapAll(all []*pooled) {
	var g errgroup.Group
	g.SetLimit(atOnce)
	for _, s := range all {
		g.Go(func() error { m.scrap(s); return nil })
	}
	_ = g.Wait()
}
