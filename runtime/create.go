package runtime

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// Create makes a sandbox and returns when PID 1 is ready for work. A caller
// that goes away does not stop it: the work is the daemon's from the moment
// it began. With an idempotency key a repeated call returns the sandbox of the
// first.
func (m *Manager) Create(ctx context.Context, req sandbox.CreateRequest) (sandbox.Sandbox, error) {
	sb, _, err := m.createOnce(ctx, req)
	return sb, err
}

// createOnce is Create; existed reports that the idempotency key had made the
// sandbox before.
func (m *Manager) createOnce(ctx context.Context, req sandbox.CreateRequest) (sb sandbox.Sandbox, existed bool, err error) {
	if err := m.open(); err != nil {
		return sandbox.Sandbox{}, false, err
	}
	type result struct {
		sb      sandbox.Sandbox
		existed bool
		err     error
	}
	done := make(chan result, 1)
	m.spawn(func() {
		work, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
		defer cancel()
		defer m.hurry.begin()()
		work, observed := m.observe(work, WorkCreate)
		sb, existed, err := m.createPatiently(work, req)
		observed(err)
		if existed && err == nil && (sb.Status == sandbox.StatusCompleting || sb.Status.Terminal()) {
			err = &sandbox.Error{Class: sandbox.ErrConflict, Code: sandbox.CodeKeyGone, Reason: sb.Reason, Detail: fmt.Sprintf(
				"the idempotency key made sandbox %s, which has ended (%s): nothing is made again; use a new key for another", sb.ID, sb.Reason)}
		}
		done <- result{sb, existed, err}
	})
	select {
	case r := <-done:
		return r.sb, r.existed, r.err
	case <-ctx.Done():
		return sandbox.Sandbox{}, false, sandbox.Errorf(sandbox.ErrUnavailable, "create_abandoned", "the caller went away while a sandbox was being created: it goes on: %w", ctx.Err())
	}
}

// createPatiently waits a little for a slot that something on its way out
// still has: who removes a sandbox may make another at once.
func (m *Manager) createPatiently(ctx context.Context, req sandbox.CreateRequest) (sb sandbox.Sandbox, existed bool, err error) {
	for deadline := time.Now().Add(slotPatience); ; pause(ctx, slotPoll) {
		coming := m.leaving.Load() > 0 || m.pool.building.Load()
		sb, existed, err = m.create(ctx, req)
		if !coming || sandbox.CodeOf(err) != codeNoSlot || time.Now().After(deadline) {
			return sb, existed, err
		}
	}
}

// create gives a shell of the pool what was asked for, or builds one where
// the pool has none or its shell was no good.
func (m *Manager) create(ctx context.Context, req sandbox.CreateRequest) (sb sandbox.Sandbox, existed bool, err error) {
	// The image keeps its layers until the row names them.
	m.imports.RLock()
	unlock := sync.OnceFunc(m.imports.RUnlock)
	defer unlock()
	var p intention
	spoken := false
	err = m.part(ctx, PartPlan, func() (err error) {
		if p, err = m.plan(ctx, req); err == nil {
			spoken, err = m.state.Spoken(ctx, p.sb.Owner, p.key, p.sb.Spec.Name)
		}
		return err
	})
	if err != nil {
		return sandbox.Sandbox{}, false, err
	}
	if !spoken { // else it is answered with what there is, or refused
		if err := m.allow(payersOf(p.sb)); err != nil {
			return sandbox.Sandbox{}, false, err
		}
	}
	if s := m.takeUnless(spoken); s != nil {
		sb, existed, err := m.claim(ctx, s, p)
		if !errors.Is(err, errUnfit) {
			return sb, existed, err
		}
		m.log.WarnContext(ctx, "a shell of the pool was no good: building another", "shell", s.b.id, "err", err)
	}
	b, sb, err := m.intend(ctx, p)
	unlock()
	if err != nil {
		return sb, false, err
	}
	if b == nil {
		sb, err = m.settled(ctx, sb)
		return sb, true, err
	}
	defer b.unlock()
	sb, err = m.build(ctx, b, sb, p)
	return sb, false, err
}

// takeUnless takes a shell from the pool, but not for a request that will be
// refused, or answered with what an earlier one made.
func (m *Manager) takeUnless(spoken bool) *pooled {
	if spoken {
		return nil
	}
	return m.pool.take()
}

// codeNoSlot is the code of the error for a host that is full.
const codeNoSlot = "slots_exhausted"

// intention is what a create request comes to.
type intention struct {
	sb    sandbox.Sandbox // without an id and what follows from it
	image sandbox.Image
	key   string // for idempotency
	hash  string
}

// plan completes and checks a request.
func (m *Manager) plan(ctx context.Context, req sandbox.CreateRequest) (intention, error) {
	spec, image, err := m.complete(ctx, req.Spec, req.Base)
	if err == nil {
		err = m.checkMounts(ctx, spec.Volumes, req.Actor)
	}
	if err != nil {
		return intention{}, err
	}
	hash, err := specHash(req.Spec)
	return intention{
		sb:    sandbox.Sandbox{Owner: req.Actor, Spec: spec, CreatedAt: time.Now().UTC()},
		image: image, key: req.IdempotencyKey, hash: hash,
	}, err
}

// named is the intention's sandbox once it has an id.
func (p intention) named(id sandbox.ID) sandbox.Sandbox {
	sb := p.sb
	sb.ID = id
	if sb.Spec.Hostname == "" {
		sb.Spec.Hostname = hostname(sb.Spec.Name, id)
	}
	return sb
}

func (m *Manager) params(p intention, sb sandbox.Sandbox) state.CreateParams {
	return state.CreateParams{
		Sandbox: sb, Slots: m.cfg.Slots, UIDBase: m.cfg.UIDBase, Actor: sb.Owner, Image: p.image, Snapshot: sb.Spec.Snapshot,
		IdempotencyKey: p.key, RequestHash: p.hash,
	}
}

// errUnfit is wrapped by the error of a claim that another shell may serve.
var errUnfit = errors.New("shell unfit")

// claim makes a pooled shell a sandbox. Its row is written last, running, in
// the one commit of this path, while PID 1 takes its root: what a crash leaves
// before that is a shell without a row, which the next start sweeps away, and
// between the two a PID 1 that says it has no configuration.
func (m *Manager) claim(ctx context.Context, s *pooled, p intention) (row sandbox.Sandbox, existed bool, err error) {
	b := s.b
	b.op <- struct{}{} // nobody knows the box yet
	defer b.unlock()
	sb := p.named(b.id)
	sb.Slot = s.slot
	answers := m.answers(ctx, b)
	o, ch, err := m.dress(ctx, b, sb, p.image, s.has)
	if hung := <-answers; hung != nil && err == nil {
		o.Close()
		err = hung
	}
	if err != nil {
		m.spawn(func() { m.scrap(s) })
		return sb, false, fmt.Errorf("%w: %w", errUnfit, err)
	}
	configured := make(chan error, 1)
	m.spawn(func() {
		defer o.Close()
		configured <- m.part(ctx, PartConfigure, func() error { return b.guest.Configure(ctx, o.config) })
	})
	params := m.params(p, sb)
	params.Slot, params.Status, params.Change = &s.slot, sandbox.StatusRunning, ch
	// The box stands before the row, so that nobody finds a row without one.
	m.keepBox(b)
	err = m.part(ctx, PartRow, func() (err error) {
		row, existed, err = m.state.CreateSandbox(ctx, params)
		return err
	})
	if err == nil && !existed {
		b.begin(row, m.cfg.BootID, m.caps(row.Spec))
	}
	unconfigured := <-configured
	switch {
	case err == nil && !existed && unconfigured == nil:
		b.setStatus(row.Status, row.Reason)
		m.budgets.begun(b)
		m.watch(b, row, b.present(), 0)
		return row, false, nil
	case err == nil && !existed:
		m.failed(ctx, b, unconfigured)
		return row, false, unconfigured
	}
	m.dropBox(b.id)
	m.spawn(func() { m.scrap(s) })
	if err == nil {
		row, err = m.settled(ctx, row)
	}
	return row, existed, err
}

// claimPatience is how long a pooled shell may take to say that it lives: one
// that hangs must not become somebody's sandbox.
const claimPatience = 3 * time.Second

// answers asks PID 1 whether it lives, besides other work.
func (m *Manager) answers(ctx context.Context, b *box) <-chan error {
	done := make(chan error, 1)
	m.spawn(func() {
		ctx, cancel := context.WithTimeout(ctx, claimPatience)
		defer cancel()
		_, err := b.guest.Ping(ctx)
		done <- err
	})
	return done
}

// settled waits for a creation another request began and returns its outcome.
func (m *Manager) settled(ctx context.Context, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
	if b := m.box(sb.ID); b != nil {
		if err := b.lock(ctx); err != nil {
			return sb, err
		}
		b.unlock()
	}
	return m.state.Sandbox(ctx, sb.ID)
}

// intend writes the intent of a new sandbox and returns its box, locked; no
// box where an idempotency key led to a sandbox made before.
func (m *Manager) intend(ctx context.Context, p intention) (*box, sandbox.Sandbox, error) {
	id := sandbox.NewID()
	b := newBox(id, m.dial(m.shells.SocketPath(id)))
	b.op <- struct{}{}
	m.keepBox(b)
	params := m.params(p, p.named(id))
	params.Status = sandbox.StatusCreating
	sb, existed, err := m.state.CreateSandbox(ctx, params)
	if err != nil || existed {
		m.dropBox(id)
		return nil, sb, err
	}
	b.setStatus(sb.Status, sb.Reason)
	b.begin(sb, m.cfg.BootID, m.caps(sb.Spec))
	return b, sb, nil
}

// build takes a sandbox in status creating to running, or tears it down.
func (m *Manager) build(ctx context.Context, b *box, sb sandbox.Sandbox, p intention) (sandbox.Sandbox, error) {
	row, err := m.bringUp(ctx, b, sb, p.image, sb.Owner)
	if err != nil {
		m.failed(ctx, b, err)
		return sb, err
	}
	return row, nil
}

// failed ends a sandbox that has a row and came to nothing.
func (m *Manager) failed(ctx context.Context, b *box, err error) {
	var waits []string
	if shell := b.present(); shell != nil && sandbox.CodeOf(err) == "deadline" {
		waits = shell.Waits()
	}
	m.log.ErrorContext(ctx, "create sandbox", "sandbox", b.id, "err", err, "init", waits)
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownTimeout)
	defer cancel()
	_ = m.endLocked(clean, b, ending{reason: sandbox.ReasonCreateFailed, detail: explain(err), actor: "daemon"})
}

// bringUp gives a sandbox in status creating its kernel objects and moves it
// to running. What it made before an error, the one teardown takes away.
func (m *Manager) bringUp(ctx context.Context, b *box, sb sandbox.Sandbox, image sandbox.Image, actor string) (sandbox.Sandbox, error) {
	has, err := m.raiseFor(ctx, b, sb, image)
	if err != nil {
		return sb, err
	}
	o, ch, err := m.dress(ctx, b, sb, image, has)
	if err != nil {
		return sb, err
	}
	defer o.Close()
	if err := m.part(ctx, PartConfigure, func() error { return b.guest.Configure(ctx, o.config) }); err != nil {
		return sb, err
	}
	ch.Actor = actor
	row := sb
	err = m.part(ctx, PartRow, func() (err error) {
		row, err = m.move(ctx, b.id, sandbox.StatusRunning, ch, sandbox.StatusCreating)
		return err
	})
	if err != nil {
		return sb, err
	}
	m.watch(b, row, b.present(), 0)
	return row, nil
}

// explain is an error as the record of an ended sandbox tells it.
func explain(err error) string { return clip(err.Error(), 500) }
