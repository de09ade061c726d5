package netns

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// This file applies plans to nf_tables and reads counters back. No decision
// is made here.

// chunk bounds the elements of one message: an attribute holds 64 KiB.
const chunk = 256

// table is the kernel's `inet sandboxd`. Every change is one transaction.
type table struct {
	plan tablePlan

	mu   sync.Mutex // one batch at a time over one connection
	conn *nftables.Conn
	read map[int]*nl.SocketHandle // counters are read over a socket of their own
}

func openTable(plan tablePlan) (*table, error) {
	conn, err := nftables.New(nftables.AsLasting())
	if err != nil {
		return nil, fmt.Errorf("opening nf_tables: %w", err)
	}
	sock, err := nl.Subscribe(unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("opening nf_tables: %w", err), conn.CloseLasting())
	}
	return &table{
		plan: plan, conn: conn,
		read: map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: {Socket: sock}},
	}, nil
}

func (t *table) close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.read[unix.NETLINK_NETFILTER].Close()
	return t.conn.CloseLasting()
}

func kernelTable() *nftables.Table {
	return &nftables.Table{Name: tableName, Family: nftables.TableFamilyINet}
}

func (s setPlan) kernel() *nftables.Set {
	return &nftables.Set{
		Table: kernelTable(), Name: s.name, KeyType: s.key, Concatenation: s.concat,
		Interval: s.interval, Counter: s.counter, Dynamic: s.dynamic,
	}
}

// same reports whether the kernel's set can go on serving as s.
func (s setPlan) same(k *nftables.Set) bool {
	return k.KeyType.Bytes == s.key.Bytes && k.Interval == s.interval && k.Dynamic == s.dynamic && !k.IsMap
}

// install makes the table as planned in one transaction: at no moment do
// sandboxes run without rules. Sets of single links that already fit are kept
// with their elements and counters; everything else is made anew.
func (t *table) install() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	oldSets, oldChains, err := t.existing()
	if err != nil {
		return err
	}
	tbl := t.conn.AddTable(kernelTable())
	if len(oldChains) > 0 || len(oldSets) > 0 {
		t.conn.FlushTable(tbl)
	}
	for _, c := range oldChains {
		t.conn.DelChain(c)
	}
	kept := map[string]bool{}
	for _, k := range oldSets {
		i := slices.IndexFunc(t.plan.sets, func(s setPlan) bool { return s.name == k.Name })
		if i >= 0 && t.plan.sets[i].lasting && t.plan.sets[i].same(k) {
			kept[k.Name] = true
			continue
		}
		t.conn.DelSet(k)
	}
	for _, s := range t.plan.sets {
		if kept[s.name] {
			continue
		}
		if err := t.conn.AddSet(s.kernel(), t.plan.fixed(s.name)); err != nil {
			return fmt.Errorf("planning nf_tables set %s: %w", s.name, err)
		}
	}
	for _, c := range t.plan.chains {
		t.conn.AddChain(c.kernel(tbl))
	}
	for _, c := range t.plan.chains {
		for _, r := range c.rules {
			t.conn.AddRule(&nftables.Rule{Table: tbl, Chain: c.kernel(tbl), Exprs: r.exprs})
		}
	}
	if err := t.conn.Flush(); err != nil {
		return fmt.Errorf("installing nf_tables table inet %s: %w", tableName, err)
	}
	return nil
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

// present reports whether the table is still there with all its chains.
func (t *table) present() (bool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, chains, err := t.existing()
	return len(chains) >= len(t.plan.chains), err
}

// fixed returns the elements of the sets that belong to no single link.
func (p tablePlan) fixed(set string) []nftables.SetElement {
	switch set {
	case setPrivate:
		return privateElements(p.private)
	}
	return nil
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

// change is a set of elements to add and to remove, by set name.
type change struct {
	add, remove map[string][][]byte
}

func (c *change) adding(set string, key []byte) {
	if c.add == nil {
		c.add = map[string][][]byte{}
	}
	c.add[set] = append(c.add[set], key)
}

func (c *change) removing(set string, key []byte) {
	if c.remove == nil {
		c.remove = map[string][][]byte{}
	}
	c.remove[set] = append(c.remove[set], key)
}

func (c *change) empty() bool { return len(c.add) == 0 && len(c.remove) == 0 }

// apply makes a change in one transaction. Adding what is there and removing
// what is not there both succeed: nf_tables refuses to delete a missing
// element, so each removal is preceded by an addition (which leaves an element
// that exists, and its counter, untouched).
func (t *table) apply(c change) error {
	if c.empty() {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.plan.sets {
		set := s.kernel()
		for keys := range slices.Chunk(c.remove[s.name], chunk) {
			elems := asElements(keys)
			if err := errors.Join(t.conn.SetAddElements(set, elems), t.conn.SetDeleteElements(set, elems)); err != nil {
				return fmt.Errorf("planning removals from nf_tables set %s: %w", s.name, err)
			}
		}
		for keys := range slices.Chunk(c.add[s.name], chunk) {
			if err := t.conn.SetAddElements(set, asElements(keys)); err != nil {
				return fmt.Errorf("planning additions to nf_tables set %s: %w", s.name, err)
			}
		}
	}
	if err := t.conn.Flush(); err != nil {
		return fmt.Errorf("changing table inet %s: %w", tableName, err)
	}
	return nil
}

func asElements(keys [][]byte) []nftables.SetElement {
	out := make([]nftables.SetElement, len(keys))
	for i, k := range keys {
		out[i].Key = k
	}
	return out
}

// keys returns every key of a set.
func (t *table) keys(set string) ([][]byte, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	elems, err := t.conn.GetSetElements(&nftables.Set{Table: kernelTable(), Name: set})
	if err != nil {
		return nil, fmt.Errorf("reading set %s of table inet %s: %w", set, tableName, err)
	}
	out := make([][]byte, len(elems))
	for i, e := range elems {
		out[i] = e.Key
	}
	return out, nil
}

// Attributes of nf_tables messages that x/sys/unix does not name
// (linux/netfilter/nf_tables.h).
const nftaSetElemExpr = unix.NFTA_SET_ELEM_EXPR

// count reads one element's counter; false when there is no such element.
func (t *table) count(set string, key []byte) (packets, bytes uint64, ok bool, err error) {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETSETELEM, 0)
	req.Sockets = t.read
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
		return 0, 0, false, nil
	}
	if err != nil {
		return 0, 0, false, fmt.Errorf("reading a counter of set %s: %w", set, err)
	}
	for _, m := range msgs {
		if len(m) < nl.SizeofNfgenmsg {
			continue
		}
		path := []uint16{
			unix.NFTA_SET_ELEM_LIST_ELEMENTS, unix.NFTA_LIST_ELEM, nftaSetElemExpr, unix.NFTA_EXPR_DATA,
		}
		if data, found := attribute(m[nl.SizeofNfgenmsg:], path...); found {
			b, _ := attribute(data, unix.NFTA_COUNTER_BYTES)
			p, _ := attribute(data, unix.NFTA_COUNTER_PACKETS)
			if len(b) == 8 && len(p) == 8 {
				return binary.BigEndian.Uint64(p), binary.BigEndian.Uint64(b), true, nil
			}
		}
	}
	return 0, 0, false, fmt.Errorf("reading a counter of set %s: the kernel's answer holds none", set)
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
