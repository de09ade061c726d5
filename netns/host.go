package netns

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Config configures a Host. The zero value works.
type Config struct {
	// Pool is where sandboxes get their addresses; 10.213.0.0/16 unless set.
	Pool netip.Prefix
	// Deny closes further IPv4 ranges to every sandbox: public addresses of
	// the operator's own networks, for instance.
	Deny []netip.Prefix
	// Admit lists private IPv4 ranges that allow rules of sandboxes may name.
	// Deny comes first.
	Admit []netip.Prefix
	// Tell, unless nil, hears of flows let out and packets refused. It must
	// not block: meanwhile the kernel drops what there is to tell.
	Tell func(sandbox.NetworkNews)
	Log  *slog.Logger
	// Installation, unless empty, is whose sandboxes these are. The table says
	// it, and so Open knows those of another.
	Installation string
	// Alone refuses a network namespace where sandboxes of another installation
	// live, and changes nothing there then.
	Alone bool
}

// Host is the networking of all sandboxes of one network namespace: the
// daemon's. Its methods may be called by many goroutines, but those about one
// sandbox one after another.
type Host struct {
	pool  netip.Prefix
	admit []netip.Prefix
	log   *slog.Logger
	table *table
	route *netlink.Handle
	raw   map[int]*nl.SocketHandle
	reap  *reaper
	audit *auditor // nil where nobody wants to hear
	mtu   int

	closed   sync.Once
	closeErr error

	order sync.Mutex // held while the table is changed, and what is known of it

	mu       sync.Mutex
	known    map[sandbox.ID]linkPlan // what the table should hold
	tenants  map[netip.Addr]sandbox.ID
	pins     map[sandbox.ID]*pinned // guarded by order
	groups   map[string]uint32      // marks of groups
	uplinks  map[string]bool        // interfaces we made forward
	uplinkAt time.Time              // when the uplink was last looked at
	shapes   map[sandbox.ID]shaped  // the queues of links that have any
	faults   map[sandbox.ID]*sandbox.NetworkFault
	seen     map[sandbox.ID]sandbox.NetCounters // as last told
	lost     map[sandbox.ID]sandbox.NetCounters // what was counted in a table that somebody removed
	// disturbed had faults of an earlier daemon.
	disturbed []sandbox.ID
	unfair    atomic.Bool // the kernel has no fq_codel

	agreedAt time.Time // when the table was last compared; for the reaper alone

	strangers map[string]bool // links found at the start; order guards it, until Recover
	held      atomic.Bool     // see Hold
	foreign   string          // the installation whose links were found, if not ours
}

// Attachment is a sandbox as this package knows it.
type Attachment struct {
	ID   sandbox.ID
	Name string // of the sandbox; peers of its group may ask for it
	Slot int
	// NetNS is the sandbox's network namespace. It is not closed, and not
	// kept. Nil is enough where no link has to be made.
	NetNS  *os.File
	Policy sandbox.NetworkPolicy
}

// Open readies the current network namespace for sandboxes. It replaces the
// table of an earlier daemon in one transaction and keeps the elements and
// counters of sandboxes: those are Recover's to judge. Repeating it is safe.
// Errors are of class ErrInvalid (pool), ErrConflict (the pool overlaps a
// network of the host; see also Config.Alone) or ErrUnsupported (no nf_tables).
func Open(ctx context.Context, cfg Config) (*Host, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if !cfg.Pool.IsValid() {
		cfg.Pool = DefaultPool
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if err := checkConfig(cfg); err != nil {
		return nil, err
	}
	h := &Host{
		pool: cfg.Pool.Masked(), admit: cfg.Admit, log: cfg.Log, mtu: 1500,
		known: map[sandbox.ID]linkPlan{}, tenants: map[netip.Addr]sandbox.ID{}, pins: map[sandbox.ID]*pinned{}, groups: map[string]uint32{},
		uplinks: map[string]bool{}, strangers: map[string]bool{},
		seen: map[sandbox.ID]sandbox.NetCounters{}, lost: map[sandbox.ID]sandbox.NetCounters{},
		shapes: map[sandbox.ID]shaped{}, faults: map[sandbox.ID]*sandbox.NetworkFault{},
	}
	if err := h.open(cfg); err != nil {
		return nil, errors.Join(err, h.Close())
	}
	var err error
	if h.reap, err = startReaper(h); err != nil {
		return nil, errors.Join(err, h.Close())
	}
	if cfg.Tell != nil {
		h.audit = startAuditor(h.log, cfg.Tell, h.linkNameOf, h.whyRefused())
	}
	return h, nil
}

// linkNameOf returns the name of a link of the host.
func (h *Host) linkNameOf(index int) (string, error) {
	l, err := h.route.LinkByIndex(index)
	if err != nil {
		return "", err
	}
	return l.Attrs().Name, nil
}

func checkConfig(cfg Config) error {
	for _, p := range cfg.Admit {
		if !p.Addr().Is4() {
			return sandbox.Errorf(sandbox.ErrInvalid, "invalid_admit", "admitted range %s: use an IPv4 prefix; sandboxes have no IPv6", p)
		}
	}
	for _, p := range cfg.Deny {
		if !p.Addr().Is4() {
			return sandbox.Errorf(sandbox.ErrInvalid, "invalid_deny", "denied range %s: use an IPv4 prefix; IPv6 is denied as a whole", p)
		}
	}
	return checkPool(cfg.Pool)
}

func (h *Host) open(cfg Config) error {
	var err error
	if h.route, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return fmt.Errorf("opening a netlink socket: %w", err)
	}
	sock, err := nl.Subscribe(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("opening a netlink socket: %w", err)
	}
	h.raw = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: sock}}
	if err := h.checkOverlap(); err != nil {
		return err
	}
	if h.table, err = openTable(planTable(h.pool, cfg.Deny, cfg.Admit)); err != nil {
		return err
	}
	if h.foreign, err = h.table.belong(cfg.Installation, func(link string) bool {
		_, err := h.route.LinkByName(link)
		return err == nil
	}); err != nil {
		return err
	}
	if h.foreign != "" && cfg.Alone {
		return sandbox.Errorf(sandbox.ErrConflict, "network_taken",
			"sandboxes of another installation (%s) live in this network namespace, and table inet %s is theirs: start this one in a network namespace of its own (ip netns exec), or first stop them where they belong ('sandboxd retire' with that configuration)", h.foreign, tableName)
	}
	if err := h.table.install(); err != nil {
		return sandbox.Errorf(sandbox.ErrUnsupported, "no_nftables", "%w: sandboxes need a kernel with nf_tables (inet tables, NAT, fib, connlimit) and CAP_NET_ADMIN", err)
	}
	uplinks, err := h.table.keys(setUplinks)
	if err != nil {
		return err
	}
	for _, key := range uplinks {
		h.uplinks[unix.ByteSliceToString(key)] = true
	}
	sources, err := h.table.keys(setSources)
	if err != nil {
		return err
	}
	for _, key := range sources {
		name, _ := splitSource(key)
		h.strangers[name] = true
	}
	h.mtu = h.uplinkMTU()
	// The gateway's address makes host and sandbox speak with each other by
	// one source the sandbox may know, not by an address of the host's. It is
	// on loopback, in host scope: never chosen for anything else.
	lo := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: 1, Name: "lo"}}
	gw := &netlink.Addr{IPNet: host32(gateway(h.pool)), Scope: int(netlink.SCOPE_HOST)}
	if err := h.route.AddrReplace(lo, gw); err != nil {
		return fmt.Errorf("setting the gateway address %s: %w", gateway(h.pool), err)
	}
	return nil
}

// Close lets go of sockets and goroutines. Sandboxes keep working: rules,
// links and routes stay. Repeating it does nothing.
func (h *Host) Close() error {
	h.closed.Do(func() { h.closeErr = h.close() })
	return h.closeErr
}

func (h *Host) close() error {
	if h.audit != nil {
		h.audit.stop() // it asks over the sockets closed below
	}
	if h.reap != nil {
		h.reap.stop()
	}
	var err error
	if h.table != nil {
		err = h.table.close()
	}
	for _, s := range h.raw {
		s.Close()
	}
	if h.route != nil {
		h.route.Close()
	}
	return err
}

// Uninstall takes away what Open made: the table of rules and the gateway's
// address. It is for a host that is to forget sandboxes, with none attached.
// What is gone already is no error.
func (h *Host) Uninstall() error {
	h.table.conn.DelTable(kernelTable())
	if err := h.table.conn.Flush(); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("removing the table of rules %s: %w", tableName, err)
	}
	lo := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: 1, Name: "lo"}}
	gw := &netlink.Addr{IPNet: host32(gateway(h.pool)), Scope: int(netlink.SCOPE_HOST)}
	if err := h.route.AddrDel(lo, gw); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
		return fmt.Errorf("removing the gateway address %s: %w", gateway(h.pool), err)
	}
	return nil
}

// Address returns the address of a slot, or an error of class ErrExhausted.
func (h *Host) Address(slot int) (netip.Addr, error) { return poolAddress(h.pool, slot) }

// Attach gives a sandbox its network. Without a link ("off") only loopback
// comes up inside; see the package documentation for why. With one, the link
// works when Attach returns. Repeating it completes or changes nothing; after
// an error, Detach cleans up.
func (h *Host) Attach(ctx context.Context, a Attachment) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	l, err := h.planLink(a)
	if err != nil {
		return err
	}
	if a.NetNS == nil {
		return sandbox.Errorf(sandbox.ErrInvalid, "no_netns", "attaching sandbox %s: no network namespace given", a.ID)
	}
	if !l.connected {
		if err := prepare(a.NetNS); err != nil {
			return fmt.Errorf("readying the network of sandbox %s: %w", a.ID, err)
		}
		return h.enforce(l)
	}
	h.doubtShape(a.ID)
	return h.connect(a, l)
}

// connect makes the link and then opens it.
func (h *Host) connect(a Attachment, l linkPlan) error {
	h.reap.settle(l)
	w := wire{
		name: l.name, addr: l.addr, gateway: gateway(h.pool),
		host: hostMAC(a.Slot), guest: sandboxMAC(a.Slot), mtu: h.mtu,
	}
	w.shape, w.had = h.wantShape(a)
	err := h.plug(a.NetNS, w)
	h.noteShape(a.ID, w.shape, err)
	if err != nil {
		return fmt.Errorf("connecting sandbox %s: %w", a.ID, err)
	}
	if err := h.forwardUplink(); err != nil {
		return fmt.Errorf("connecting sandbox %s: %w", a.ID, err)
	}
	return h.enforce(l)
}

// SetPolicy changes a living sandbox's policy; it is in force on return, for
// connections that exist too. Going from off to open makes the link if there
// is none yet, and then needs NetNS.
func (h *Host) SetPolicy(ctx context.Context, a Attachment) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	l, err := h.planLink(a)
	if err != nil {
		return err
	}
	if !l.connected {
		err := h.enforce(l)
		h.reap.forgetBegun(l.addr)
		return err
	}
	if a.NetNS != nil {
		return h.connect(a, l)
	}
	if _, err := h.route.LinkByName(l.name); err != nil {
		if isNoLink(err) {
			return sandbox.Errorf(sandbox.ErrConflict, "no_link", "sandbox %s has no network link yet: its network namespace is needed to make one", a.ID)
		}
		return fmt.Errorf("finding link %s: %w", l.name, err)
	}
	if want, have := h.wantShape(a); !have.settled(want) {
		return sandbox.Errorf(sandbox.ErrConflict, "no_netns", "changing the rates of sandbox %s: its network namespace is needed for that", a.ID)
	}
	return h.enforce(l)
}

// enforce makes the table agree with l.
func (h *Host) enforce(l linkPlan) error {
	h.order.Lock()
	defer h.order.Unlock()
	old, had := h.lookup(l.id)
	var from held
	if had {
		from = old.held()
	}
	var c change
	c.diff(from, l.held(), &l)
	h.remember(l)
	h.pinAgain(&c)
	var before, after change
	if had && old.generation != 0 && l.generation != old.generation {
		before.add, c.add = listed(c.add)
		after.remove, c.remove = listed(c.remove)
	}
	if err := h.applyHealing(before, c); err != nil {
		h.forget(l.id)
		if had {
			h.remember(old)
		}
		return err
	}
	if err := h.applyHealing(after); err != nil { // of no policy in force; the next mending or start takes it away
		h.log.Warn("removing the lists of a former policy", "link", l.name, "err", err)
	}
	return nil
}

func (h *Host) lookup(id sandbox.ID) (linkPlan, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l, ok := h.known[id]
	return l, ok
}

func (h *Host) remember(l linkPlan) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.known[l.id] = l
	h.tenants[l.addr] = l.id
}

func (h *Host) forget(id sandbox.ID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if l, ok := h.known[id]; ok && h.tenants[l.addr] == id {
		delete(h.tenants, l.addr)
	}
	delete(h.known, id)
}

// applyHealing applies changes. If somebody else changed the table meanwhile
// (`nft flush ruleset`), it is made again, with every sandbox known.
func (h *Host) applyHealing(all ...change) error {
	err := h.table.applyAll(all)
	if err == nil || !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.EEXIST) {
		return err
	}
	h.log.Warn("the nf_tables table of the sandboxes is not as it was left: mending it", "table", "inet "+tableName, "err", err)
	return h.mend()
}

// heal mends the table where somebody else changed it.
func (h *Host) heal() error {
	h.log.Warn("the nf_tables table of the sandboxes was removed or changed by someone: making it again", "table", "inet "+tableName)
	return h.mend()
}

// mend installs the table and whatever all known sandboxes lack in it; what
// belongs to nobody known is removed.
func (h *Host) mend() error {
	if err := h.table.install(); err != nil {
		return err
	}
	have, err := h.table.read(true)
	if err != nil {
		return err
	}
	h.keepCounters(have)
	h.mu.Lock()
	all := planRecovery(slices.Collect(maps.Values(h.known)), have, linkPlan.held)
	var c change
	for name := range h.uplinks {
		c.add = append(c.add, element{set: setUplinks, key: string(linkKey(name))})
	}
	h.mu.Unlock()
	for i := range all {
		h.pinAgain(&all[i])
	}
	return h.table.applyAll(append([]change{c}, all...))
}

// Detach ends a sandbox's network: on return nothing passes. The link itself
// goes with the namespace, which the caller lets die; a link still there
// seconds later is deleted in the background, as are connection-tracking
// entries. Works whether or not Attach ever ran.
func (h *Host) Detach(_ context.Context, id sandbox.ID, slot int) error {
	addr, err := h.clear(id, slot)
	if err != nil {
		return fmt.Errorf("detaching sandbox %s: %w", id, err)
	}
	h.forgetShape(id)
	link, err := h.route.LinkByName(linkName(id))
	switch {
	case isNoLink(err):
		h.reap.forget(addr)
		return nil
	case err != nil:
		return fmt.Errorf("finding link %s: %w", linkName(id), err)
	}
	h.reap.bury(linkName(id), link.Attrs().Index, addr)
	return nil
}

// clear removes all that the table holds of a sandbox, and returns its address.
func (h *Host) clear(id sandbox.ID, slot int) (netip.Addr, error) {
	h.order.Lock()
	defer h.order.Unlock()
	l, ok := h.lookup(id)
	if !ok {
		l = linkPlan{id: id, name: linkName(id)}
		var err error
		if l.addr, err = h.addressOf(id, slot); err != nil {
			return l.addr, err
		}
	}
	from := l.held()
	if !ok && h.strangers[l.name] { // of an earlier daemon, and Recover has not seen to it
		have, err := h.table.read(true)
		if err != nil {
			return l.addr, err
		}
		from = have[l.name]
	}
	for _, set := range []string{setFlows, setToldGranted, setToldRefused} { // made by packets
		from.elements = append(from.elements, element{set: set, key: string(linkKey(l.name))})
	}
	var c change
	c.diff(from, held{}, nil)
	h.pinAgain(&c)
	h.forget(id)
	h.forgetCounters(id)
	delete(h.pins, id)
	if err := h.applyHealing(c); err != nil {
		if ok {
			h.remember(l)
		}
		return l.addr, err
	}
	delete(h.strangers, l.name)
	return l.addr, nil
}

// addressOf returns the address a sandbox has, even if the pool was
// configured anew since it was attached.
func (h *Host) addressOf(id sandbox.ID, slot int) (netip.Addr, error) {
	if addr, err := h.Address(slot); err == nil {
		return addr, nil
	}
	keys, err := h.table.keys(setSources)
	if err != nil {
		return netip.Addr{}, err
	}
	for _, key := range keys {
		if name, addr := splitSource(key); name == linkName(id) {
			return addr, nil
		}
	}
	return netip.IPv4Unspecified(), nil // never attached: nothing will match
}

// Links returns the sandboxes that have a host-side link.
func (h *Host) Links() ([]sandbox.ID, error) {
	links, err := listing(h.route.LinkList)
	if err != nil {
		return nil, fmt.Errorf("listing links: %w", err)
	}
	var out []sandbox.ID
	for _, l := range links {
		if id, ok := linkID(l.Attrs().Name); ok {
			out = append(out, id)
		}
	}
	return out, nil
}

// Enforcement says what becomes of a policy here: all of it, or Open would
// have failed.
func (h *Host) Enforcement(p sandbox.NetworkPolicy) sandbox.Enforcement {
	mode := p.Mode
	if mode == "" {
		mode = sandbox.NetworkOff
	}
	return sandbox.Enforcement{Limit: "network", Asked: string(mode), Enforced: true}
}

// planLink checks an attachment and says what the sets should hold for it.
func (h *Host) planLink(a Attachment) (linkPlan, error) {
	if _, err := sandbox.ParseID(string(a.ID)); err != nil {
		return linkPlan{}, err
	}
	addr, err := h.Address(a.Slot)
	if err != nil {
		return linkPlan{}, err
	}
	if err := a.Policy.Validate(); err != nil {
		return linkPlan{}, err
	}
	l := linkPlan{id: a.ID, name: linkName(a.ID), addr: addr, title: a.Name}
	if err := l.planPolicy(a.Policy.Clone(), h.table.plan.salt); err != nil {
		return l, err
	}
	l.group = h.groupMark(a.Policy)
	return l, nil
}
