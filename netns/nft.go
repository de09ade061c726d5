package netns

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// This file applies plans to nf_tables and reads counters back. No decision
// is made here.

const (
	// chunk bounds the elements of one message: an attribute holds 64 KiB, and
	// a pin with its name takes some 350 bytes. It is even, so that the ends of
	// an interval stay together.
	chunk = 160
	// bulk bounds the chains and sets of one transaction, and its messages with
	// elements, where there may be those of many links.
	bulk = 64
	// What a transaction may need on its way to the kernel, and its receipts on
	// their way back: the longest lists in the place of others as long.
	sendBuffer, receiveBuffer = 16 << 20, 4 << 20
)

// wideBuffers is an option of the connection to the kernel.
func wideBuffers[C interface {
	SetWriteBuffer(bytes int) error
	SetReadBuffer(bytes int) error
}](c C,
) error {
	return errors.Join(c.SetWriteBuffer(sendBuffer), c.SetReadBuffer(receiveBuffer))
}

func connect() (*nftables.Conn, error) {
	return nftables.New(nftables.AsLasting(), nftables.WithSockOptions(wideBuffers))
}

// table is the kernel's `inet sandboxd`. Every change is one transaction.
type table struct {
	plan tablePlan

	mu   sync.Mutex // one batch at a time over one connection
	conn *nftables.Conn
	sock map[int]*nl.SocketHandle // counters are read over a socket of their own

	services map[string][]nftables.SetElement // of the sets that name the daemon's services

	// generation is the kernel's count of changes to all tables, as it is if
	// since the table was last found whole only we changed any; 0 if unknown.
	generation uint32
}

func openTable(plan tablePlan) (*table, error) {
	conn, err := connect()
	if err != nil {
		return nil, fmt.Errorf("opening nf_tables: %w", err)
	}
	sock, err := nl.Subscribe(unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("opening nf_tables: %w", err), conn.CloseLasting())
	}
	return &table{
		plan: plan, conn: conn,
		sock: map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: {Socket: sock}},
	}, nil
}

// reopen forgets what was queued and not sent.
func (t *table) reopen() error {
	err := t.conn.CloseLasting()
	conn, openErr := connect()
	if openErr == nil {
		t.conn = conn
	}
	return errors.Join(err, openErr)
}

func (t *table) close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sock[unix.NETLINK_NETFILTER].Close()
	return t.conn.CloseLasting()
}

func kernelTable() *nftables.Table {
	return &nftables.Table{Name: tableName, Family: nftables.TableFamilyINet}
}

func (s setPlan) kernel() *nftables.Set {
	return &nftables.Set{
		Table: kernelTable(), Name: s.name, KeyType: s.key, DataType: s.value, IsMap: s.isMap(), Concatenation: s.concat,
		Interval: s.interval, HasTimeout: s.timeout, Counter: s.counter, Dynamic: s.dynamic,
	}
}

// same reports whether the kernel's set can go on serving as s. (Of a map of
// verdicts the library reads no key type.)
func (s setPlan) same(k *nftables.Set) bool {
	if s.isMap() != k.IsMap || s.interval != k.Interval || s.dynamic != k.Dynamic || s.timeout != k.HasTimeout {
		return false
	}
	if s.list {
		return s.value.Bytes == k.DataType.Bytes // nor of a list
	}
	return s.value.Name == nftables.TypeVerdict.Name || s.key.Bytes == k.KeyType.Bytes && s.value.Bytes == k.DataType.Bytes
}

// install makes the table as planned in one transaction: at no moment do
// sandboxes run without rules. Sets that outlive the daemon are kept with
// their elements and counters where they fit, as are the chains and sets of
// single links; everything else is made anew.
func (t *table) install() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	oldSets, oldChains, err := t.existing()
	if err != nil {
		return err
	}
	tbl := t.conn.AddTable(kernelTable())
	t.clear(tbl, oldChains)
	kept := t.keep(oldSets)
	for _, k := range oldSets {
		if _, owned := ownedBy(k.Name); !owned && !kept[k.Name] {
			t.conn.DelSet(k)
		}
	}
	for _, s := range t.plan.sets {
		if kept[s.name] {
			continue
		}
		elements := s.elements
		if s.lead { // to chains that come later
			elements = nil
		}
		if err := t.conn.AddSet(s.kernel(), slices.Concat(elements, t.services[s.name])); err != nil {
			return fmt.Errorf("planning nf_tables set %s: %w", s.name, err)
		}
	}
	t.addChains(t.plan.chains)
	for _, s := range t.plan.sets {
		if s.lead {
			if err := t.conn.SetAddElements(s.kernel(), s.elements); err != nil {
				return fmt.Errorf("planning nf_tables set %s: %w", s.name, err)
			}
		}
	}
	if err := t.commit(); err != nil {
		return fmt.Errorf("installing nf_tables table inet %s: %w", tableName, err)
	}
	return nil
}

// keep names the sets whose elements go on. Where lists are missing, of links
// that had some, nothing of policies is kept but what they granted: until it is
// made again, new flows are refused.
func (t *table) keep(old []*nftables.Set) map[string]bool {
	kept := map[string]bool{}
	for _, k := range old {
		i := slices.IndexFunc(t.plan.sets, func(s setPlan) bool { return s.name == k.Name })
		if i >= 0 && t.plan.sets[i].lasting && t.plan.sets[i].same(k) {
			kept[k.Name] = true
		}
	}
	for _, s := range t.plan.sets {
		if (s.list || s.pins) && !kept[s.name] {
			for _, name := range []string{setOpen, setGroups, setGenerations} {
				delete(kept, name)
			}
		}
	}
	return kept
}

// clear empties the chains that were there, and deletes those with a hook,
// which may have changed, and those not planned any more. Others may be named
// by rules of single links.
func (t *table) clear(tbl *nftables.Table, old []*nftables.Chain) {
	for _, c := range old {
		if _, owned := ownedBy(c.Name); !owned {
			t.conn.FlushChain(&nftables.Chain{Table: tbl, Name: c.Name})
		}
	}
	for _, c := range old {
		planned := slices.ContainsFunc(t.plan.chains, func(p chainPlan) bool { return p.name == c.Name && p.hook == nil })
		if _, owned := ownedBy(c.Name); !owned && (c.Hooknum != nil || !planned) {
			t.conn.DelChain(c)
		}
	}
}

func (t *table) addChains(chains []chainPlan) {
	tbl := kernelTable()
	for _, c := range chains {
		t.conn.AddChain(c.kernel(tbl))
	}
	for _, c := range chains {
		for _, r := range c.rules {
			t.conn.AddRule(&nftables.Rule{Table: tbl, Chain: c.kernel(tbl), Exprs: r.exprs})
		}
	}
}

// existing returns what a predecessor left in the table.
func (t *table) existing() ([]*nftables.Set, []*nftables.Chain, error) {
	tables, err := t.conn.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, nil, fmt.Errorf("listing nf_tables: %w", err)
	}
	if !slices.ContainsFunc(tables, func(k *nftables.Table) bool { return k.Name == tableName }) {
		return nil, nil, nil
	}
	sets, err := t.conn.GetSets(kernelTable())
	if err != nil {
		return nil, nil, fmt.Errorf("listing sets of table inet %s: %w", tableName, err)
	}
	chains, err := t.conn.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, nil, fmt.Errorf("listing nf_tables chains: %w", err)
	}
	return sets, slices.DeleteFunc(chains, func(c *nftables.Chain) bool { return c.Table.Name != tableName }), nil
}

// untouched reports whether nobody but us changed any table since the last
// call of whole.
func (t *table) untouched() (bool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now, err := t.countChanges()
	return err == nil && now != 0 && now == t.generation, err
}

// whole notes that the table was found to be as it should, when the kernel had
// counted so many changes.
func (t *table) whole(changes uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.generation = changes
}

// changes returns the kernel's count of changes to all tables.
func (t *table) changes() (uint32, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.countChanges()
}

func (t *table) countChanges() (uint32, error) {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN, 0)
	req.Sockets = t.sock
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: unix.NFNETLINK_V0})
	msgs, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return 0, fmt.Errorf("reading the generation of nf_tables: %w", err)
	}
	for _, m := range msgs {
		if id, ok := attribute(m[min(nl.SizeofNfgenmsg, len(m)):], unix.NFTA_GEN_ID); ok && len(id) == 4 {
			return binary.BigEndian.Uint32(id), nil
		}
	}
	return 0, nil
}

// present reports whether the table is still there with all its chains, and as
// many rules in them as planned.
func (t *table) present() (bool, error) {
	t.mu.Lock()
	_, chains, err := t.existing()
	t.mu.Unlock()
	if err != nil {
		return false, err
	}
	rules, err := t.countRules()
	if err != nil {
		return false, err
	}
	there := map[string]bool{}
	for _, c := range chains {
		there[c.Name] = true
	}
	for _, c := range t.plan.chains {
		if !there[c.name] || rules[c.name] != len(c.rules) {
			return false, nil
		}
	}
	return true, nil
}

// countRules returns how many rules each chain has.
func (t *table) countRules() (map[string]int, error) {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP)
	req.Sockets = t.sock
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.NFPROTO_INET, Version: unix.NFNETLINK_V0})
	req.AddData(nl.NewRtAttr(unix.NFTA_RULE_TABLE, nl.ZeroTerminated(tableName)))
	msgs, err := listing(func() ([][]byte, error) { return req.Execute(unix.NETLINK_NETFILTER, 0) })
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("listing the rules of table inet %s: %w", tableName, err)
	}
	out := map[string]int{}
	for _, m := range msgs {
		if name, ok := attribute(m[min(nl.SizeofNfgenmsg, len(m)):], unix.NFTA_RULE_CHAIN); ok {
			out[unix.ByteSliceToString(name)]++
		}
	}
	return out, nil
}

func (c chainPlan) kernel(tbl *nftables.Table) *nftables.Chain {
	out := &nftables.Chain{Table: tbl, Name: c.name}
	if c.hook != nil {
		policy := nftables.ChainPolicyAccept // of packets that are none of ours
		out.Type, out.Hooknum, out.Policy = c.kind, c.hook, &policy
		out.Priority = new(nftables.ChainPriority(c.priority))
	}
	return out
}

// apply makes a change in one transaction. Adding what is there and removing
// what is not there both succeed for elements: nf_tables refuses to delete a
// missing element, so each removal is preceded by an addition (which leaves an
// element that exists, and its counter, untouched). Not so for lists, which
// only we change.
func (t *table) apply(c change) error {
	if c.empty() {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.queue(c); err != nil { // cannot be: keys are of our own making
		return errors.Join(err, t.reopen())
	}
	if err := t.commit(); err != nil {
		return fmt.Errorf("changing table inet %s: %w", tableName, err)
	}
	return nil
}

func (t *table) queue(c change) error {
	tbl := kernelTable()
	err := t.elements(c.remove, func(p setPlan, e []nftables.SetElement) error {
		s := p.kernel()
		if p.list {
			return t.conn.SetDeleteElements(s, e)
		}
		return errors.Join(t.conn.SetAddElements(s, e), t.conn.SetDeleteElements(s, e))
	})
	for _, name := range c.dropChains {
		chain := &nftables.Chain{Table: tbl, Name: name}
		t.conn.FlushChain(chain)
		t.conn.DelChain(chain)
	}
	for _, name := range c.dropSets {
		t.conn.DelSet(&nftables.Set{Table: tbl, Name: name})
	}
	t.addChains(c.makeChains)
	err = errors.Join(err, t.elements(c.add, func(p setPlan, e []nftables.SetElement) error {
		return t.conn.SetAddElements(p.kernel(), e)
	}))
	for _, p := range c.pins {
		err = errors.Join(err, t.pin(p))
	}
	return err
}

// pin queues a change of pins. A time-out can only be changed by making the
// element anew, and one that is to go may just have gone.
func (t *table) pin(p pinChange) error {
	s := t.plan.set(p.set).kernel()
	kernel := func(all ...[]nftables.SetElement) []nftables.SetElement {
		out := slices.Concat(all...)
		for i := range out {
			out[i].Key = pinKey(p.prefix, string(out[i].Key))
		}
		return out
	}
	var err error
	for part := range slices.Chunk(kernel(p.drop, p.again), chunk) {
		err = errors.Join(err, t.conn.SetAddElements(s, part), t.conn.SetDeleteElements(s, part))
	}
	for part := range slices.Chunk(kernel(p.again, p.fresh), chunk) {
		err = errors.Join(err, t.conn.SetAddElements(s, part))
	}
	return err
}

// redirect replaces the elements of the sets that tell of services.
func (t *table) redirect(services map[string][]nftables.SetElement) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.services = services
	for _, s := range t.plan.sets {
		elems, ok := services[s.name]
		if !ok {
			continue
		}
		t.conn.FlushSet(s.kernel())
		if len(elems) > 0 {
			if err := t.conn.SetAddElements(s.kernel(), elems); err != nil {
				return fmt.Errorf("planning nf_tables set %s: %w", s.name, errors.Join(err, t.reopen()))
			}
		}
	}
	return t.commit()
}

// commit sends what is queued as one transaction.
func (t *table) commit() error {
	err := t.conn.Flush()
	if t.generation++; err != nil {
		t.generation = 0
	}
	return err
}

// elements does something with elements, set by set.
func (t *table) elements(all []element, do func(setPlan, []nftables.SetElement) error) error {
	by := map[string][]element{}
	for _, e := range all {
		by[e.set] = append(by[e.set], e)
	}
	for _, s := range t.plan.sets {
		if s.interval { // the kernel takes an interval's end after its beginning
			slices.SortFunc(by[s.name], func(a, b element) int { return cmp.Or(cmp.Compare(a.key, b.key), endFirst(a, b)) })
		}
		for some := range slices.Chunk(by[s.name], chunk) {
			part := make([]nftables.SetElement, len(some))
			for i, e := range some {
				part[i] = e.kernel(s)
			}
			if err := do(s, part); err != nil {
				return fmt.Errorf("planning nf_tables set %s: %w", s.name, err)
			}
		}
	}
	return nil
}

// applyAll makes changes one after another.
func (t *table) applyAll(all []change) error {
	for _, c := range all {
		if err := t.apply(c); err != nil {
			return err
		}
	}
	return nil
}

// read returns all that the table holds of single links, by link, but for
// pins, and lists if not asked for.
func (t *table) read(lists bool) (map[string]held, error) {
	out := map[string]held{}
	for _, s := range t.plan.sets {
		if !s.lasting || s.pins || s.list && !lists || s.name == setUplinks || s.name == setMembers {
			continue
		}
		elems, err := t.list(s.name)
		if err != nil {
			return nil, err
		}
		for _, k := range elems {
			e := element{set: s.name, key: string(k.Key), value: string(k.Val), end: k.IntervalEnd}
			if s.value.Name == nftables.TypeVerdict.Name {
				e.value = verdictChain(k.Val)
			}
			h := out[linkOf(k.Key)]
			h.elements = append(h.elements, e)
			if s.name == setGenerations && len(k.Val) == 4 {
				h.generation = binary.NativeEndian.Uint32(k.Val)
			}
			out[linkOf(k.Key)] = h
		}
	}
	t.mu.Lock()
	sets, chains, err := t.existing()
	t.mu.Unlock()
	if err != nil {
		return nil, err
	}
	for _, s := range sets {
		if link, ok := ownedBy(s.Name); ok {
			h := out[link]
			h.sets = append(h.sets, s.Name)
			out[link] = h
		}
	}
	rules, err := t.countRules()
	if err != nil {
		return nil, err
	}
	for _, c := range chains {
		if link, ok := ownedBy(c.Name); ok {
			h := out[link]
			h.chains = append(h.chains, c.Name)
			if rules[c.Name] == 0 { // somebody emptied it: to be made anew
				h.generation = 0
			}
			out[link] = h
		}
	}
	return out, t.readMembers(out)
}

// readMembers adds the members of groups, which are known by their address.
func (t *table) readMembers(links map[string]held) error {
	elems, err := t.list(setMembers)
	if err != nil {
		return err
	}
	by := map[netip.Addr]string{}
	for link, h := range links {
		for _, e := range h.elements {
			if e.set == setSources {
				_, addr := splitSource([]byte(e.key))
				by[addr] = link
			}
		}
	}
	for _, k := range elems {
		if len(k.Key) != 8 {
			continue
		}
		link := by[netip.AddrFrom4([4]byte(k.Key[4:]))] // "" of nobody's
		h := links[link]
		h.elements = append(h.elements, element{set: setMembers, key: string(k.Key)})
		links[link] = h
	}
	return nil
}

// verdictChain is the chain a verdict leads to.
func verdictChain(b []byte) string {
	chain, _ := attribute(b, unix.NFTA_VERDICT_CHAIN)
	return unix.ByteSliceToString(chain)
}

// endFirst orders the end of an interval before the beginning of the next.
func endFirst(a, b element) int {
	switch {
	case a.end == b.end:
		return 0
	case a.end:
		return -1
	}
	return 1
}

// set returns a set's plan.
func (t tablePlan) set(name string) setPlan {
	return t.sets[slices.IndexFunc(t.sets, func(s setPlan) bool { return s.name == name })]
}

func (t *table) list(set string) ([]nftables.SetElement, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	elems, err := t.conn.GetSetElements(&nftables.Set{Table: kernelTable(), Name: set})
	if err != nil {
		return nil, fmt.Errorf("reading set %s of table inet %s: %w", set, tableName, err)
	}
	return elems, nil
}

// keys returns every key of a set.
func (t *table) keys(set string) ([][]byte, error) {
	elems, err := t.list(set)
	out := make([][]byte, len(elems))
	for i, e := range elems {
		out[i] = e.Key
	}
	return out, err
}

// Attributes of nf_tables messages that x/sys/unix does not name
// (linux/netfilter/nf_tables.h).
const nftaSetElemExpr = unix.NFTA_SET_ELEM_EXPR

// count reads one element's counter; false when there is no such element.
func (t *table) count(set string, key []byte) (packets, bytes uint64, ok bool, err error) {
	data, ok, err := t.element(set, key, nftaSetElemExpr, unix.NFTA_EXPR_DATA)
	if err != nil || !ok {
		return 0, 0, false, err
	}
	b, _ := attribute(data, unix.NFTA_COUNTER_BYTES)
	p, _ := attribute(data, unix.NFTA_COUNTER_PACKETS)
	if len(b) != 8 || len(p) != 8 {
		return 0, 0, false, fmt.Errorf("reading a counter of set %s: the kernel's answer holds none", set)
	}
	return binary.BigEndian.Uint64(p), binary.BigEndian.Uint64(b), true, nil
}

// expires reads how long an element will still be there; false when it is not.
func (t *table) expires(set string, key []byte) (left time.Duration, ok bool, err error) {
	ms, ok, err := t.element(set, key, unix.NFTA_SET_ELEM_EXPIRATION)
	if err != nil || !ok {
		return 0, false, err
	}
	if len(ms) != 8 {
		return 0, false, fmt.Errorf("reading a time of set %s: the kernel's answer holds none", set)
	}
	return time.Duration(binary.BigEndian.Uint64(ms)) * time.Millisecond, true, nil
}

// element reads an attribute of one element; false when there is no such
// element.
func (t *table) element(set string, key []byte, path ...uint16) (value []byte, ok bool, err error) {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETSETELEM, 0)
	req.Sockets = t.sock
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.NFPROTO_INET, Version: unix.NFNETLINK_V0})
	req.AddData(nl.NewRtAttr(unix.NFTA_SET_ELEM_LIST_TABLE, nl.ZeroTerminated(tableName)))
	req.AddData(nl.NewRtAttr(unix.NFTA_SET_ELEM_LIST_SET, nl.ZeroTerminated(set)))
	list := nl.NewRtAttr(unix.NFTA_SET_ELEM_LIST_ELEMENTS|unix.NLA_F_NESTED, nil)
	list.AddRtAttr(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, nil).
		AddRtAttr(unix.NFTA_SET_ELEM_KEY|unix.NLA_F_NESTED, nil).
		AddRtAttr(unix.NFTA_DATA_VALUE, key)
	req.AddData(list)
	msgs, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("reading an element of set %s: %w", set, err)
	}
	path = append([]uint16{unix.NFTA_SET_ELEM_LIST_ELEMENTS, unix.NFTA_LIST_ELEM}, path...)
	for _, m := range msgs {
		if value, ok := attribute(m[min(nl.SizeofNfgenmsg, len(m)):], path...); ok {
			return value, true, nil
		}
	}
	return nil, false, fmt.Errorf("reading an element of set %s: the kernel's answer does not hold what was asked for", set)
}

// attribute follows a path of nested netlink attributes.
func attribute(b []byte, path ...uint16) ([]byte, bool) {
	const header = unix.SizeofNlAttr
	for len(b) >= header {
		size := int(binary.NativeEndian.Uint16(b))
		kind := binary.NativeEndian.Uint16(b[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
		if size < header || size > len(b) {
			return nil, false
		}
		if kind == path[0] {
			if len(path) == 1 {
				return b[header:size], true
			}
			return attribute(b[header:size], path[1:]...)
		}
		b = b[min((size+3)&^3, len(b)):]
	}
	return nil, false
}
