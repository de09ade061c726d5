package netns

import (
	"cmp"
	"context"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/google/nftables"

	"github.com/sandboxd/sandboxd/sandbox"
)

// A pin is an address that an allowed name had, for as long as the resolver
// said. It is an element, with a time-out and the name as its comment, of the
// set pins, so that the kernel forgets it by itself and the next daemon finds
// it.

const (
	minPin   = 30 * time.Second // names that change all the time are still reached
	maxPin   = 24 * time.Hour
	maxPins  = 4096 // of one sandbox
	pinRoom  = 256  // made at once where there are too many
	pinSlack = time.Second
	pinPrune = 30 * time.Second // between looks for what has expired
	pastFor  = 24 * time.Hour   // that it is remembered for connections that go on
)

// pinned is what a sandbox has pinned; Host.order guards it.
type pinned struct {
	id     sandbox.ID
	names  map[string]map[netip.Addr]time.Time // until when; also what was, lately
	known  int                                 // addresses of names
	keys   map[string]time.Time                // of the kernel's set, without what a link's begin with
	past   []string                            // of the other one
	prefix string                              // what they begin with there
	pruned time.Time
}

// pinChange adds elements to a set of pins. Those of fresh are new to it.
type pinChange struct {
	set, prefix  string
	drop         []nftables.SetElement
	fresh, again []nftables.SetElement
}

// Pin permits a sandbox to reach the addresses of a name, on the ports of all
// its allow rules that match the name, for ttl but at least half a minute. It
// is in force on return. A name that no allow rule matches, or a deny rule
// does, changes nothing, nor does an address that the policy does not open by
// name. Of more than 4,096 pins of a sandbox those that end first make room.
func (h *Host) Pin(ctx context.Context, id sandbox.ID, name string, addrs []netip.Addr, ttl time.Duration) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	h.order.Lock()
	defer h.order.Unlock()
	l, ok := h.lookup(id)
	if !ok {
		return sandbox.Errorf(sandbox.ErrNotFound, "sandbox_not_found", "pinning %.253q: no sandbox %s has a network", name, id)
	}
	tails := l.tails(name)
	if len(tails) == 0 {
		return nil
	}
	book := h.pins[id]
	if book == nil {
		book = newPinned(l)
		h.pins[id] = book
	}
	now := time.Now()
	until := now.Add(min(max(ttl, minPin), maxPin))
	p := pinChange{set: setPins, prefix: l.prefix()}
	for _, addr := range addrs {
		addr = addr.Unmap()
		if !h.table.plan.pinnable(l, addr) {
			continue
		}
		book.note(name, addr, until)
		for _, t := range tails {
			p.put(book, t.key(addr), name, until, now)
		}
	}
	if p.drop = book.makeRoom(now); len(p.drop) > 0 { // maybe of these, too
		gone := func(e nftables.SetElement) bool { return book.keys[string(e.Key)].IsZero() }
		p.fresh, p.again = slices.DeleteFunc(p.fresh, gone), slices.DeleteFunc(p.again, gone)
	}
	if len(p.fresh)+len(p.again)+len(p.drop) == 0 {
		return nil
	}
	err := h.applyHealing(change{pins: []pinChange{p}})
	if err != nil {
		for key := range book.keys { // what is in force is not known: the next one writes it again
			book.keys[key] = time.Time{}
		}
	}
	return err
}

func newPinned(l linkPlan) *pinned {
	return &pinned{id: l.id, names: map[string]map[netip.Addr]time.Time{}, keys: map[string]time.Time{}, prefix: l.prefix()}
}

// put adds a pin unless one is there that lasts as long.
func (p *pinChange) put(book *pinned, key []byte, name string, until, now time.Time) {
	had, known := book.keys[string(key)]
	if known && until.Sub(had) < pinSlack && had.After(now) {
		return
	}
	book.keys[string(key)] = until
	e := nftables.SetElement{Key: key, Timeout: until.Sub(now), Comment: name}
	if known {
		p.again = append(p.again, e)
	} else {
		p.fresh = append(p.fresh, e)
	}
}

// note remembers until when a name has an address.
func (b *pinned) note(name string, addr netip.Addr, until time.Time) {
	if b.names[name] == nil {
		b.names[name] = map[netip.Addr]time.Time{}
	}
	had, known := b.names[name][addr]
	if !known {
		b.known++
	}
	if until.After(had) {
		b.names[name][addr] = until
	}
}

// makeRoom forgets what has expired, and what ends first where there are too
// many; of these it returns the elements. It does so for many at once: who asks
// for names without end must not keep others from changing the table.
func (b *pinned) makeRoom(now time.Time) []nftables.SetElement {
	if len(b.keys) <= maxPins && b.known <= 2*maxPins && now.Sub(b.pruned) < pinPrune {
		return nil
	}
	b.pruned = now
	maps.DeleteFunc(b.keys, func(_ string, until time.Time) bool { return !until.After(now) })
	b.forgetUntil(now.Add(-pastFor))
	if b.known > 2*maxPins { // only what is pinned
		b.forgetUntil(now)
	}
	if b.known > 2*maxPins {
		ends := make([]time.Time, 0, b.known)
		for _, addrs := range b.names {
			ends = slices.AppendSeq(ends, maps.Values(addrs))
		}
		slices.SortFunc(ends, time.Time.Compare)
		b.forgetUntil(ends[len(ends)-maxPins-1])
	}
	if len(b.keys) <= maxPins {
		return nil
	}
	keys := slices.SortedFunc(maps.Keys(b.keys), func(x, y string) int { return b.keys[x].Compare(b.keys[y]) })
	var out []nftables.SetElement
	for _, key := range keys[:len(keys)-maxPins+pinRoom] {
		delete(b.keys, key)
		out = append(out, nftables.SetElement{Key: []byte(key)})
	}
	return out
}

// forgetUntil forgets the addresses that names had until then, or not so long.
func (b *pinned) forgetUntil(end time.Time) {
	b.known = 0
	for name, addrs := range b.names {
		maps.DeleteFunc(addrs, func(_ netip.Addr, until time.Time) bool { return !until.After(end) })
		if b.known += len(addrs); len(addrs) == 0 {
			delete(b.names, name)
		}
	}
}

// tails returns what is pinned of a name: what the allow rules say that match
// it, and nothing of one that a deny rule means, which the resolver does not
// answer any more.
func (l linkPlan) tails(name string) []pinTail {
	if slices.ContainsFunc(l.deny, func(r sandbox.NetworkRule) bool { return r.MatchesName(name) }) {
		return nil
	}
	return l.pins.tails(l.allow, name)
}

// pinnable reports whether a name may open an address: a public one, or one of
// an admitted range that an allow rule names by a prefix.
func (t tablePlan) pinnable(l linkPlan, addr netip.Addr) bool {
	if !addr.Is4() || anyContains(t.closed, addr) {
		return false
	}
	return !anyContains(t.private, addr) || slices.ContainsFunc(l.allow, func(r sandbox.NetworkRule) bool {
		return r.Domain == "" && r.Prefix.Contains(addr)
	})
}

// pinAgain takes away the pins of policies that a change ends, and makes those
// of policies that it begins: all that their rules match.
func (h *Host) pinAgain(c *change) {
	for _, e := range c.remove {
		if book := h.bookOf(e); book != nil {
			book.unpin(c)
		}
	}
	for _, e := range c.add {
		book := h.bookOf(e)
		if book == nil {
			continue
		}
		book.unpin(c) // or they would be taken for those in force
		if l, ok := h.lookup(book.id); ok {
			h.pinBook(c, l, book)
		}
	}
}

// bookOf returns the pins of the link whose policy's mark is an element.
func (h *Host) bookOf(e element) *pinned {
	link, ok := linkOfMark(e)
	if !ok {
		return nil
	}
	id, _ := linkID(link)
	return h.pins[id]
}

// unpin adds to a change what takes all pins out of the kernel.
func (b *pinned) unpin(c *change) {
	pins, past := pinChange{set: setPins, prefix: b.prefix}, pinChange{set: setPast, prefix: b.prefix}
	for key := range b.keys {
		pins.drop = append(pins.drop, nftables.SetElement{Key: []byte(key)})
	}
	for _, key := range b.past {
		past.drop = append(past.drop, nftables.SetElement{Key: []byte(key)})
	}
	for _, p := range []pinChange{pins, past} {
		if len(p.drop) > 0 {
			c.pins = append(c.pins, p)
		}
	}
	b.keys, b.past = map[string]time.Time{}, nil
}

// pinBook adds to a change the pins that a policy has from the start.
func (h *Host) pinBook(c *change, l linkPlan, book *pinned) {
	now := time.Now()
	book.prefix = l.prefix()
	p, past := pinChange{set: setPins, prefix: book.prefix}, pinChange{set: setPast, prefix: book.prefix}
	for _, name := range slices.SortedFunc(maps.Keys(book.names), cmp.Compare) {
		for _, t := range l.tails(name) {
			for addr, until := range book.names[name] {
				if !h.table.plan.pinnable(l, addr) {
					continue
				}
				if len(past.fresh) < 2*maxPins {
					past.fresh = append(past.fresh, nftables.SetElement{Key: t.key(addr), Timeout: pastFor, Comment: name})
				}
				if until.After(now) && len(book.keys) < maxPins {
					p.put(book, t.key(addr), name, until, now)
				}
			}
		}
	}
	p.fresh, p.again = uniqueKeys(append(p.fresh, p.again...)), nil
	past.fresh = uniqueKeys(past.fresh)
	for _, e := range past.fresh {
		book.past = append(book.past, string(e.Key))
	}
	c.pins = append(c.pins, p, past)
}

// uniqueKeys keeps the last of elements with one key.
func uniqueKeys(all []nftables.SetElement) []nftables.SetElement {
	seen := map[string]bool{}
	var out []nftables.SetElement
	for _, e := range slices.Backward(all) {
		if !seen[string(e.Key)] {
			seen[string(e.Key)] = true
			out = append(out, e)
		}
	}
	return out
}

// links returns the plans of all known sandboxes.
func (h *Host) links() []linkPlan {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Collect(maps.Values(h.known))
}

// readPins learns the pins that an earlier daemon made, maybe of an earlier
// policy, and returns what takes those away that nobody has any more.
func (h *Host) readPins(want map[sandbox.ID]linkPlan, have map[string]held) (change, error) {
	now := time.Now()
	learn := map[string]*pinned{} // by link
	for id, l := range want {
		if h.pins[id] != nil {
			continue
		}
		book := newPinned(l)
		book.pruned = now
		learn[l.name] = book
		for _, set := range have[l.name].sets { // of an earlier version
			elems, err := h.table.list(set)
			if err != nil {
				return change{}, err
			}
			for _, e := range elems {
				if len(e.Key) == pinSize {
					book.learn(string(e.Key), e.Comment, now.Add(e.Expires))
				}
			}
		}
	}
	wanted := map[string]bool{}
	for _, l := range want {
		wanted[l.prefix()] = true
	}
	var c change
	for _, set := range []string{setPast, setPins} {
		elems, err := h.table.list(set)
		if err != nil {
			return change{}, err
		}
		drop := map[string][]nftables.SetElement{}
		for _, e := range elems {
			prefix, key, ok := splitPin(e.Key)
			if !ok {
				continue
			}
			if !wanted[prefix] {
				drop[prefix] = append(drop[prefix], nftables.SetElement{Key: []byte(key)})
			}
			book := learn[linkOf(e.Key)]
			switch {
			case book == nil:
			case set == setPast:
				book.learn(key, e.Comment, now)
				if wanted[prefix] {
					book.past = append(book.past, key)
				}
			default:
				book.learn(key, e.Comment, now.Add(e.Expires))
				if wanted[prefix] {
					book.keys[key] = now.Add(e.Expires)
				}
			}
		}
		for prefix, elems := range drop {
			c.pins = append(c.pins, pinChange{set: set, prefix: prefix, drop: elems})
		}
	}
	for id, l := range want {
		if book := learn[l.name]; book != nil && len(book.names) > 0 {
			h.pins[id] = book
		}
	}
	return c, nil
}

// pinSize is how long a pin's key is in the books: an address, a protocol and
// a port, each in words of four bytes.
const pinSize = 12

// learn notes until when a name has an address, by the kernel's element.
func (b *pinned) learn(key, name string, until time.Time) {
	if name != "" {
		b.note(name, netip.AddrFrom4([4]byte([]byte(key[:4]))), until)
	}
}
