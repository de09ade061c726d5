package guard

import (
	"context"
	"fmt"
	"strings"
	"sync"

	"github.com/docker/go-units"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/sandbox"
)

// What an owner holds is in the rows, and what is being made beside them: a
// reservation lasts from the look at the rows until the row is there, or will
// not be. In between the same sandbox may count twice. So a request that does
// not fit because of reservations waits for their end, and is refused by rows
// alone: the bound is never passed, and never missed.

// purses are the reservations of all owners.
type purses struct {
	mu  sync.Mutex
	all map[string]*purse // of owners that have some; guarded by mu
}

// purse is what one owner has reserved.
type purse struct {
	look    sync.Mutex    // held from the look at the rows to the reservation
	imports chan struct{} // has one while an archive of the owner's is taken in

	users   int           // guarded by purses.mu
	pending access.Held   // guarded by purses.mu
	changed chan struct{} // closed when something was released; guarded by purses.mu
}

func (p *purses) open(owner string) *purse {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.all == nil {
		p.all = map[string]*purse{}
	}
	u := p.all[owner]
	if u == nil {
		u = &purse{changed: make(chan struct{}), imports: make(chan struct{}, 1)}
		p.all[owner] = u
	}
	u.users++
	return u
}

func (p *purses) shut(owner string, u *purse) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if u.users--; u.users == 0 {
		delete(p.all, owner)
	}
}

// takeIn waits for an owner's turn to send an archive that is unpacked as it
// comes: of the few places for them a slow client takes one.
func (p *purses) takeIn(ctx context.Context, owner string) (leave func(), err error) {
	u := p.open(owner)
	select {
	case u.imports <- struct{}{}:
		return func() { <-u.imports; p.shut(owner, u) }, nil
	case <-ctx.Done():
		p.shut(owner, u)
		return nil, fmt.Errorf("wait for the owner's other import: %w", context.Cause(ctx))
	}
}

// add changes what is pending; what is given back wakes those who wait.
func (p *purses) add(u *purse, h access.Held) {
	p.mu.Lock()
	defer p.mu.Unlock()
	u.pending = u.pending.Plus(h)
}

func (p *purses) giveBack(u *purse, h access.Held) {
	p.mu.Lock()
	defer p.mu.Unlock()
	u.pending = u.pending.Less(h)
	close(u.changed)
	u.changed = make(chan struct{})
}

func (p *purses) of(u *purse) (access.Held, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return u.pending, u.changed
}

// reserve keeps room in an owner's quota until release, which must come after
// the rows of what was made. Class ErrExhausted with code quota_sandboxes,
// quota_cpus, quota_memory or quota_disk.
func (g *Manager) reserve(ctx context.Context, owner string, q access.Quota, need access.Held) (release func(), err error) {
	if q.Sandboxes == 0 && q.CPUs == 0 && q.MemoryBytes == 0 && q.DiskBytes == 0 {
		return func() {}, nil
	}
	if err := g.crowded(owner, q, need); err != nil {
		return nil, err
	}
	u := g.purses.open(owner)
	for {
		wait, err := g.tryReserve(ctx, owner, u, q, need)
		if err != nil {
			g.purses.shut(owner, u)
			return nil, err
		}
		if wait == nil {
			return sync.OnceFunc(func() {
				g.purses.giveBack(u, need)
				g.purses.shut(owner, u)
			}), nil
		}
		select {
		case <-wait:
		case <-ctx.Done():
			g.purses.shut(owner, u)
			return nil, sandbox.Errorf(sandbox.ErrUnavailable, "create_abandoned", "the caller went away before there was room: nothing was made: %w", ctx.Err())
		}
	}
}

// crowded refuses what needs room on a volume that has none for this owner.
func (g *Manager) crowded(owner string, q access.Quota, need access.Held) error {
	if q.DiskBytes == 0 || need.DiskBytes == 0 && need.Sandboxes == 0 || g.cfg.Crowded == nil {
		return nil
	}
	return g.cfg.Crowded(owner)
}

// held adds up what an owner has in rows, images of the owner's own among it.
func (g *Manager) held(ctx context.Context, owner string) (access.Held, error) {
	h, err := g.rows.Held(ctx, owner)
	if err != nil {
		return h, err
	}
	all, err := g.m.Images(ctx)
	for _, img := range all {
		if strings.HasPrefix(img.Name, folder(owner)) {
			h.DiskBytes = sandbox.AddHeld(h.DiskBytes, img.SizeBytes)
		}
	}
	return h, err
}

// tryReserve reserves, refuses, or returns what to wait for.
func (g *Manager) tryReserve(ctx context.Context, owner string, u *purse, q access.Quota, need access.Held) (wait <-chan struct{}, err error) {
	u.look.Lock()
	defer u.look.Unlock()
	// Before the rows: what is released in between is in them.
	pending, changed := g.purses.of(u)
	held, err := g.held(ctx, owner)
	if err != nil {
		return nil, err
	}
	if err := exceeds(q, held, need); err != nil {
		return nil, err
	}
	if exceeds(q, held.Plus(pending), need) != nil {
		return changed, nil
	}
	g.purses.add(u, need)
	return nil, nil
}

// roundoff is more than sums of cpu limits are off by.
const roundoff = 1e-6

// exceeds is the error where what is held and what is needed pass a quota.
func exceeds(q access.Quota, held, need access.Held) error {
	over := func(code, what, used, bound, asked string) error {
		return sandbox.Errorf(sandbox.ErrExhausted, code, "quota of %s: %s of %s are used, %s more are asked for: remove something ('sandbox ls' shows what there is), ask for less, or ask an admin for a larger quota",
			what, used, bound, asked)
	}
	bytes := func(n int64) string { return units.BytesSize(float64(n)) }
	sum := held.Plus(need)
	switch {
	case q.Sandboxes > 0 && need.Sandboxes > 0 && sum.Sandboxes > q.Sandboxes:
		return over("quota_sandboxes", "sandboxes", fmt.Sprint(held.Sandboxes), fmt.Sprint(q.Sandboxes), fmt.Sprint(need.Sandboxes))
	case q.CPUs > 0 && need.CPUs > 0 && sum.CPUs > q.CPUs+roundoff:
		return over("quota_cpus", "cpus", fmt.Sprintf("%.4g", held.CPUs), fmt.Sprintf("%.4g", q.CPUs), fmt.Sprintf("%.4g", need.CPUs))
	case q.MemoryBytes > 0 && need.MemoryBytes > 0 && sum.MemoryBytes > q.MemoryBytes:
		return over("quota_memory", "memory", bytes(held.MemoryBytes), bytes(q.MemoryBytes), bytes(need.MemoryBytes))
	case q.DiskBytes > 0 && need.DiskBytes > 0 && sum.DiskBytes > q.DiskBytes:
		return over("quota_disk", "disk", bytes(held.DiskBytes), bytes(q.DiskBytes), bytes(need.DiskBytes))
	case need.Sandboxes == 0:
		return nil
	case q.CPUs > 0 && need.CPUs == 0:
		return unbounded("quota_cpus", "cpu")
	case q.MemoryBytes > 0 && need.MemoryBytes == 0:
		return unbounded("quota_memory", "memory")
	case q.DiskBytes > 0 && need.DiskBytes == 0:
		return unbounded("quota_disk", "disk")
	}
	return nil
}

// unbounded is the error for what would have no limit where a quota adds
// limits up.
func unbounded(code, what string) error {
	return sandbox.Errorf(sandbox.ErrExhausted, code, "quota of %s: this daemon gives no %s limit by itself: ask for one", what, what)
}
