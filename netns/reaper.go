package netns

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	// Between looks while there is work. Each looks through the host's whole
	// table of connections, some 5 ms of a processor however few there are.
	reapTick = time.Second
	restTick = 2 * time.Second // between looks at the table otherwise
	reapWait = 2 * time.Second // the kernel's own time to remove a dead namespace's link
)

// reaper does what Detach must not wait for: it drops the tracked connections
// of addresses that may be used again, and deletes links that outlive their
// sandbox. Links are known by index, so that a new link of the same name is
// safe from it.
type reaper struct {
	host  *Host
	route *netlink.Handle
	quit  chan struct{}
	wake  chan struct{}
	done  sync.WaitGroup

	flush sync.Mutex // held while tracked connections are being dropped

	mu     sync.Mutex
	graves map[int]grave
	notes  uint64 // counts what forget was told
	stale  map[netip.Addr]staleNote
}

// staleNote is what is still to be done about an address.
type staleNote struct {
	number uint64
	begun  bool // only the connections that began there
}

type grave struct {
	name  string
	since time.Time
}

func startReaper(h *Host) (*reaper, error) {
	// Its own socket: what it asks never holds up a request.
	route, err := netlink.NewHandle(unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("opening a netlink socket: %w", err)
	}
	r := &reaper{
		host: h, route: route, quit: make(chan struct{}), wake: make(chan struct{}, 1),
		graves: map[int]grave{}, stale: map[netip.Addr]staleNote{},
	}
	r.done.Go(r.run)
	return r, nil
}

func (r *reaper) stop() {
	close(r.quit)
	r.done.Wait()
	r.route.Close()
}

// bury notes a link that should vanish and an address that is free again.
func (r *reaper) bury(name string, index int, addr netip.Addr) {
	r.mu.Lock()
	r.graves[index] = grave{name: name, since: time.Now()}
	r.mu.Unlock()
	r.forget(addr)
}

// forget notes an address whose tracked connections must go.
func (r *reaper) forget(addr netip.Addr) { r.note(addr, false) }

// forgetBegun notes an address that may begin no connections any more. Those
// that the host began to it are not concerned.
func (r *reaper) forgetBegun(addr netip.Addr) { r.note(addr, true) }

func (r *reaper) note(addr netip.Addr, begun bool) {
	r.mu.Lock()
	r.notes++
	if before, pending := r.stale[addr]; pending {
		begun = begun && before.begun
	}
	r.stale[addr] = staleNote{r.notes, begun}
	r.mu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// settle makes sure that an address about to be used has no connections of an
// earlier user. It waits only if the background has not got there yet.
func (r *reaper) settle(l linkPlan) {
	r.mu.Lock()
	_, pending := r.stale[l.addr]
	r.mu.Unlock()
	if pending {
		r.dropConnections()
	}
}

func (r *reaper) run() {
	tick := time.NewTimer(restTick)
	defer tick.Stop()
	next := restTick
	for {
		select {
		case <-r.quit:
			return
		case <-r.wake:
			if next == restTick { // soon, but with what else ends meanwhile
				next = reapTick
				tick.Reset(next)
			}
			continue
		case <-tick.C:
		}
		r.host.check()
		r.dropConnections()
		next = restTick
		if r.dig() > 0 {
			next = reapTick
		}
		tick.Reset(next)
	}
}

// dropConnections deletes the tracked connections of all stale addresses in
// one pass. Those of their old users would otherwise let a stranger's packets
// in to the new ones.
func (r *reaper) dropConnections() {
	r.flush.Lock()
	defer r.flush.Unlock()
	r.mu.Lock()
	stale := maps.Clone(r.stale)
	r.mu.Unlock()
	if len(stale) == 0 {
		return
	}
	if _, err := r.route.ConntrackDeleteFilters(netlink.ConntrackTable, unix.AF_INET, connectionsOf(stale)); err != nil {
		r.host.log.Warn("dropping tracked connections of removed sandboxes; will try again", "error", err)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for addr, note := range stale {
		if r.stale[addr] == note { // not freed again meanwhile
			delete(r.stale, addr)
		}
	}
}

// dropOrphans deletes the tracked connections of the pool's addresses that
// nobody has: what an earlier daemon had not got to when it ended.
func (r *reaper) dropOrphans(pool netip.Prefix, tenants map[netip.Addr]sandbox.ID) {
	r.flush.Lock()
	defer r.flush.Unlock()
	if _, err := r.route.ConntrackDeleteFilters(netlink.ConntrackTable, unix.AF_INET, orphans{pool, tenants}); err != nil {
		r.host.log.Warn("dropping tracked connections of sandboxes that are gone", "error", err)
	}
}

type orphans struct {
	pool    netip.Prefix
	tenants map[netip.Addr]sandbox.ID
}

// MatchConntrackFlow selects flows to or from addresses that nobody has.
func (o orphans) MatchConntrackFlow(f *netlink.ConntrackFlow) bool {
	for _, ip := range []net.IP{f.Forward.SrcIP, f.Forward.DstIP} {
		addr, _ := netip.AddrFromSlice(ip)
		addr = addr.Unmap()
		if _, had := o.tenants[addr]; !had && o.pool.Contains(addr) && addr != gateway(o.pool) {
			return true
		}
	}
	return false
}

// dropServed deletes the tracked connections that began with the gateway.
func (r *reaper) dropServed(gateway netip.Addr) {
	r.flush.Lock()
	defer r.flush.Unlock()
	if _, err := r.route.ConntrackDeleteFilters(netlink.ConntrackTable, unix.AF_INET, connectionsTo(gateway)); err != nil {
		r.host.log.Warn("dropping tracked connections to the daemon's services", "error", err)
	}
}

type connectionsTo netip.Addr

// MatchConntrackFlow selects flows begun towards the address.
func (c connectionsTo) MatchConntrackFlow(f *netlink.ConntrackFlow) bool {
	dst, _ := netip.AddrFromSlice(f.Forward.DstIP)
	return dst.Unmap() == netip.Addr(c)
}

type connectionsOf map[netip.Addr]staleNote

// MatchConntrackFlow selects flows from the addresses, and to them.
func (c connectionsOf) MatchConntrackFlow(f *netlink.ConntrackFlow) bool {
	src, _ := netip.AddrFromSlice(f.Forward.SrcIP)
	dst, _ := netip.AddrFromSlice(f.Forward.DstIP)
	_, from := c[src.Unmap()]
	note, to := c[dst.Unmap()]
	return from || to && !note.begun
}

// dig looks after the buried links and returns how many are still there.
func (r *reaper) dig() int {
	r.mu.Lock()
	old := maps.Clone(r.graves)
	r.mu.Unlock()
	for index, g := range old {
		link, err := r.route.LinkByIndex(index)
		switch {
		case isNoLink(err), err == nil && link.Attrs().Name != g.name:
			r.unbury(index)
		case err != nil:
			r.host.log.Warn("looking for the link of a removed sandbox", "link", g.name, "error", err)
		case time.Since(g.since) > reapWait:
			if err := r.route.LinkDel(link); err != nil && !isNoLink(err) {
				r.host.log.Warn("deleting the link of a removed sandbox; will try again", "link", g.name, "error", err)
				continue
			}
			r.unbury(index)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.graves)
}

func (r *reaper) unbury(index int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.graves, index)
}
