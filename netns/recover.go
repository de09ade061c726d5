package netns

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// PartlyError tells of single sandboxes that something could not be done for,
// while all others are as they should be.
type PartlyError struct{ Err error }

func (e PartlyError) Error() string { return e.Err.Error() }

// Unwrap returns what went wrong.
func (e PartlyError) Unwrap() error { return e.Err }

// Recover makes kernel and keep agree after a restart: elements and links of
// sandboxes not in keep vanish, missing ones of those in keep are made.
// One that cannot be recovered does not keep the others from it: then the error
// is a PartlyError, and those it names have no network.
// Elements that are right stay, and with them their counters. A kept sandbox
// whose link is gone needs NetNS to get it back. A second run changes nothing.
func (h *Host) Recover(ctx context.Context, keep map[sandbox.ID]Attachment) error {
	want := map[sandbox.ID]linkPlan{}
	var errs []error
	for id, a := range keep {
		a.ID = id
		l, err := h.planLink(a)
		if err != nil { // its elements vanish: denied, not half alive
			errs = append(errs, fmt.Errorf("recovering the network of sandbox %s: %w", id, err))
			continue
		}
		want[id] = l
	}
	gone, err := h.recover(want)
	if err != nil {
		return err
	}
	for _, addr := range gone {
		h.reap.forget(addr)
	}
	h.mu.Lock()
	tenants := maps.Clone(h.tenants)
	h.mu.Unlock()
	if !h.held.Load() {
		h.reap.dropOrphans(h.pool, tenants)
		errs = append(errs, h.removeUnknownLinks(ctx, keep))
	}
	errs = append(errs, h.reshapeKept(ctx, keep), h.reconnect(ctx, keep, want))
	if err := errors.Join(errs...); err != nil {
		return PartlyError{err}
	}
	return nil
}

// recover makes the table agree and returns the addresses nobody has any more.
func (h *Host) recover(want map[sandbox.ID]linkPlan) (gone []netip.Addr, err error) {
	h.order.Lock()
	defer h.order.Unlock()
	have, err := h.table.read(true)
	if err != nil {
		return nil, err
	}
	held := h.held.Load()
	if held {
		links := map[string]bool{}
		for _, l := range want {
			links[l.name] = true
		}
		beside(links, have, h.strangers)
	}
	all := planRecovery(slices.Collect(maps.Values(want)), have, linkPlan.held)
	h.mu.Lock()
	h.known, h.tenants = want, map[netip.Addr]sandbox.ID{}
	for id, l := range want {
		h.tenants[l.addr] = id
	}
	h.mu.Unlock()
	stale, err := h.readPins(want, have)
	if err != nil {
		return nil, err
	}
	maps.DeleteFunc(h.pins, func(id sandbox.ID, _ *pinned) bool { _, ok := want[id]; return !ok })
	for i := range all {
		h.pinAgain(&all[i])
		for _, e := range all[i].remove {
			if e.set == setSources {
				_, addr := splitSource([]byte(e.key))
				gone = append(gone, addr)
			}
		}
	}
	if held { // pins of others, too
		stale = change{}
	}
	if err := h.applyHealing(append(all, stale)...); err != nil {
		return nil, err
	}
	if !held {
		h.strangers = nil
	}
	return gone, nil
}

// planRecovery returns what separates the table from what it should hold, in
// transactions that the kernel takes: each is about whole links.
func planRecovery(want []linkPlan, have map[string]held, hold func(linkPlan) held) []change {
	var all []change
	var c change
	next := func() {
		if c.heavy() {
			all, c = append(all, c), change{}
		}
	}
	wanted := map[string]bool{}
	for i := range want {
		l := &want[i]
		wanted[l.name] = true
		from := have[l.name]
		// Made by packets of a sandbox that lives.
		from.elements = slices.DeleteFunc(slices.Clone(from.elements), func(e element) bool { return e.set == setFlows })
		c.diff(from, hold(*l), l)
		next()
	}
	for link, from := range have {
		if !wanted[link] {
			c.diff(from, held{}, nil)
			next()
		}
	}
	if !c.empty() {
		all = append(all, c)
	}
	return all
}

// removeUnknownLinks deletes the links of sandboxes nobody knows.
func (h *Host) removeUnknownLinks(ctx context.Context, keep map[sandbox.ID]Attachment) error {
	ids, err := h.Links()
	if err != nil {
		return err
	}
	var errs []error
	for _, id := range ids {
		if _, ok := keep[id]; ok {
			continue
		}
		if err := ctx.Err(); err != nil {
			return errors.Join(append(errs, err)...)
		}
		errs = append(errs, h.deleteLink(linkName(id)))
	}
	return errors.Join(errs...)
}

// reconnect completes the links of open sandboxes.
func (h *Host) reconnect(ctx context.Context, keep map[sandbox.ID]Attachment, want map[sandbox.ID]linkPlan) error {
	var errs []error
	for id, l := range want {
		if err := ctx.Err(); err != nil {
			return errors.Join(append(errs, err)...)
		}
		a := keep[id]
		a.ID = id
		if l.connected && a.NetNS != nil {
			errs = append(errs, h.connect(a, l))
		}
	}
	return errors.Join(errs...)
}

// check looks after what other programs may have changed since: the table,
// the uplink, and the host's own wish to be a router.
func (h *Host) check() {
	if err := h.checkTable(); err != nil {
		h.log.Error("checking the nf_tables table of the sandboxes", "error", err)
	}
	if err := h.checkUplinks(); err != nil {
		h.log.Error("checking the uplink of the sandboxes", "error", err)
	}
}

// checkTable makes the table again where somebody removed or changed it. While
// nobody changes any table of the host's, that is one question.
func (h *Host) checkTable() error {
	if ok, err := h.table.untouched(); ok || err != nil {
		return err
	}
	changes, err := h.table.changes()
	if err != nil {
		return err
	}
	ok, err := h.table.present()
	if err != nil {
		return err
	}
	if ok && time.Since(h.agreedAt) < agreeEvery {
		return nil // looked at again the next time
	}
	h.order.Lock()
	defer h.order.Unlock()
	if ok {
		h.agreedAt = time.Now()
		if ok, err = h.agrees(); err != nil {
			return err
		}
	}
	switch {
	case ok:
		h.table.whole(changes) // unless we changed it meanwhile: then it is looked at again
		return nil
	case len(h.strangers) > 0:
		return h.table.install() // whose elements are Recover's to judge
	}
	return h.heal()
}

// agreeEvery is how often all elements are compared at most, where other
// programs change their tables all the time: nobody may change ours meanwhile,
// which with a thousand sandboxes takes some 60 ms.
const agreeEvery = 10 * time.Second

// agrees reports whether the table holds of single links what it should, of
// lists their beginnings. What an earlier daemon left is Recover's to judge.
func (h *Host) agrees() (bool, error) {
	if len(h.strangers) > 0 {
		return true, nil
	}
	have, err := h.table.read(false)
	if err != nil {
		return false, err
	}
	delete(have, "")               // members that nobody is
	for link, from := range have { // made by packets of links that are gone
		from.elements = slices.DeleteFunc(from.elements, func(e element) bool { return e.set == setFlows })
		if have[link] = from; len(from.elements)+len(from.chains)+len(from.sets) == 0 {
			delete(have, link)
		}
	}
	all := h.links()
	if len(planRecovery(all, have, linkPlan.heldBesideLists)) > 0 {
		return false, nil
	}
	for _, l := range all {
		if ok, err := h.listsStart(l); !ok || err != nil {
			return false, err
		}
	}
	return true, nil
}

// listsStart reports whether the first interval of each of a link's lists is
// there: to read all of them takes seconds where there are many.
func (h *Host) listsStart(l linkPlan) (bool, error) {
	seen := map[string]bool{}
	for _, e := range l.lists() {
		if seen[e.set] {
			continue
		}
		seen[e.set] = true
		if _, ok, err := h.table.element(e.set, []byte(e.key), unix.NFTA_SET_ELEM_KEY); !ok || err != nil {
			return false, err
		}
	}
	return true, nil
}

// checkUplinks follows a changed default route, and lets go of the uplinks
// once somebody turned forwarding on for the whole host: from then on what
// passes between other interfaces is none of our business.
func (h *Host) checkUplinks() error {
	h.mu.Lock()
	open := false
	for _, l := range h.known {
		open = open || l.connected
	}
	var c change
	if sysctlOn(filepath.Join("net/ipv4", "ip_forward")) {
		for name := range h.uplinks {
			c.remove = append(c.remove, element{set: setUplinks, key: string(linkKey(name))})
			delete(h.uplinks, name)
		}
	}
	h.mu.Unlock()
	if err := h.table.apply(c); err != nil {
		return fmt.Errorf("letting go of the uplinks: %w", err)
	}
	if !open {
		return nil
	}
	return h.forwardUplinkNow()
}
