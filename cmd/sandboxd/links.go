package main

import (
	"context"
	"maps"
	"net/netip"
	"strings"
	"sync"

	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/sandbox"
)

var _ runtime.Network = (*worldNetwork)(nil)

// sharedNetwork is the one network of the host, which both worlds use: there
// is one table of rules, one pool of addresses and one gateway. Each world has
// a part of the pool's slots, sees its own sandboxes alone, and cannot be in a
// group of the other's.
type sharedNetwork struct {
	*netns.Host

	mu         sync.Mutex
	views      []*worldNetwork                                   // those that recover together
	kept       map[*worldNetwork]map[sandbox.ID]netns.Attachment // guarded by mu; until all have told
	recovered  chan struct{}                                     // closed when that was done
	err        error                                             // of it; read after recovered
	production map[sandbox.ID]bool                               // guarded by mu
}

// worldNetwork is what one world sees of the network.
type worldNetwork struct {
	*netns.Host
	shared     *sharedNetwork
	production bool
	first      int // of the pool's slots, its slot 0
}

// productionGroups begins the names of production's groups.
const productionGroups = "production."

// view returns a world's part of the network. Those made before the first
// Recover must all recover: the table is made to agree with all of them at
// once. One made later begins with nothing.
func (s *sharedNetwork) view(production bool, first int) *worldNetwork {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := &worldNetwork{Host: s.Host, shared: s, production: production, first: first}
	if s.recovered == nil {
		s.views = append(s.views, w)
	}
	return w
}

// inProduction reports whether a sandbox is one of production's.
func (s *sharedNetwork) inProduction(id sandbox.ID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.production[id]
}

// note remembers production's sandboxes.
func (w *worldNetwork) note(id sandbox.ID, here bool) {
	if !w.production {
		return
	}
	w.shared.mu.Lock()
	defer w.shared.mu.Unlock()
	if w.shared.production == nil {
		w.shared.production = map[sandbox.ID]bool{}
	}
	if here {
		w.shared.production[id] = true
	} else {
		delete(w.shared.production, id)
	}
}

// here is an attachment in the host's numbers.
func (w *worldNetwork) here(a netns.Attachment) netns.Attachment {
	a.Slot += w.first
	if w.production && a.Policy.Group != "" {
		a.Policy.Group = productionGroups + a.Policy.Group
	}
	return a
}

// CheckPolicy reports what a policy may not ask for here.
func (w *worldNetwork) CheckPolicy(p sandbox.NetworkPolicy) error {
	if !w.production && strings.HasPrefix(p.Group, productionGroups) {
		return sandbox.Errorf(sandbox.ErrForbidden, "group_denied", "network group %s: names that begin with %s belong to the production world", p.Group, productionGroups)
	}
	p = w.here(netns.Attachment{Policy: p}).Policy
	if err := p.Validate(); err != nil {
		return err
	}
	return w.Host.CheckPolicy(p)
}

// Address returns the address of a slot.
func (w *worldNetwork) Address(slot int) (netip.Addr, error) { return w.Host.Address(slot + w.first) }

// Attach gives a sandbox its network.
func (w *worldNetwork) Attach(ctx context.Context, a netns.Attachment) error {
	w.note(a.ID, true)
	return w.Host.Attach(ctx, w.here(a))
}

// Detach takes it away.
func (w *worldNetwork) Detach(ctx context.Context, id sandbox.ID, slot int) error {
	err := w.Host.Detach(ctx, id, slot+w.first)
	if err == nil {
		w.note(id, false)
	}
	return err
}

// SetPolicy changes a sandbox's policy.
func (w *worldNetwork) SetPolicy(ctx context.Context, a netns.Attachment) error {
	return w.Host.SetPolicy(ctx, w.here(a))
}

// Explain tells what a policy says of a destination.
func (w *worldNetwork) Explain(a netns.Attachment, q sandbox.NetworkQuery) (sandbox.NetworkVerdict, error) {
	return w.Host.Explain(w.here(a), q)
}

// Counters returns what passed a sandbox's link.
func (w *worldNetwork) Counters(id sandbox.ID, slot int) (sandbox.NetCounters, bool, error) {
	return w.Host.Counters(id, slot+w.first)
}

// SetFault disturbs a link.
func (w *worldNetwork) SetFault(ctx context.Context, a netns.Attachment, f *sandbox.NetworkFault) error {
	return w.Host.SetFault(ctx, w.here(a), f)
}

// Disturbed lists this world's sandboxes that had faults of an earlier daemon.
func (w *worldNetwork) Disturbed() []sandbox.ID {
	var own []sandbox.ID
	for _, id := range w.Host.Disturbed() {
		if w.shared.inProduction(id) == w.production {
			own = append(own, id)
		}
	}
	return own
}

// Recover waits for every world to tell what it keeps, and then makes the
// network agree with all of it, once. A world opened later has nothing yet.
func (w *worldNetwork) Recover(ctx context.Context, keep map[sandbox.ID]netns.Attachment) error {
	own := make(map[sandbox.ID]netns.Attachment, len(keep))
	for id, a := range keep {
		w.note(id, true)
		own[id] = w.here(a)
	}
	done, last := w.shared.tell(w, own)
	if done == nil {
		return nil
	}
	if last != nil {
		w.shared.err = w.Host.Recover(ctx, last)
		close(done)
		return w.shared.err
	}
	select {
	case <-done:
		return w.shared.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// tell notes what a world keeps. To the last one it returns what all keep; to
// one that is not waited for, no channel.
func (s *sharedNetwork) tell(w *worldNetwork, own map[sandbox.ID]netns.Attachment) (done chan struct{}, all map[sandbox.ID]netns.Attachment) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.recovered == nil {
		s.recovered, s.kept = make(chan struct{}), map[*worldNetwork]map[sandbox.ID]netns.Attachment{}
	}
	if s.kept == nil {
		return nil, nil
	}
	s.kept[w] = own
	if len(s.kept) < len(s.views) {
		return s.recovered, nil
	}
	all = map[sandbox.ID]netns.Attachment{}
	for _, k := range s.kept {
		maps.Copy(all, k)
	}
	s.kept = nil
	return s.recovered, all
}
