package netns

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// This file is the plan of what one sandbox has in the table: elements of the
// common sets and, where its policy has lists or limits, chains and sets of
// its own.

// linkPlan is one sandbox's link and policy.
type linkPlan struct {
	id     sandbox.ID
	name   string // of the link
	title  string // the sandbox's own name
	addr   netip.Addr
	policy sandbox.NetworkPolicy

	connected, open bool
	generation      uint32 // 0 where not connected
	group           uint32 // 0 for none
	allow, deny     []sandbox.NetworkRule
	allowed, denied []block
	pins            pinPlan
}

// planPolicy fills in what a policy means.
func (l *linkPlan) planPolicy(p sandbox.NetworkPolicy, salt string) error {
	l.policy = p
	l.connected, l.open = p.Connected(), p.Mode == sandbox.NetworkOpen
	if !l.connected {
		return nil
	}
	var err error
	if l.allow, l.deny, err = p.Rules(); err != nil {
		return err
	}
	if l.allowed, err = blocks(l.allow); err != nil {
		return err
	}
	if l.denied, err = blocks(l.deny); err != nil {
		return err
	}
	if l.pins, err = planPins(l.allow); err != nil {
		return err
	}
	l.generation, err = generation(p, salt)
	return err
}

// element is one element of a common set or map.
type element struct {
	set, key, value string // value of a map's; a chain's name of a verdict map's
}

// linkKey is an interface name as the kernel compares it: padded to IFNAMSIZ.
func linkKey(name string) []byte {
	key := make([]byte, unix.IFNAMSIZ)
	copy(key, name)
	return key
}

// linkOf is the link's name at the beginning of a key.
func linkOf(key []byte) string {
	if len(key) < unix.IFNAMSIZ {
		return ""
	}
	return unix.ByteSliceToString(key[:unix.IFNAMSIZ])
}

// splitSource is the reverse of a key of the set sources.
func splitSource(key []byte) (string, netip.Addr) {
	if len(key) != unix.IFNAMSIZ+4 {
		return "", netip.Addr{}
	}
	return linkOf(key), netip.AddrFrom4([4]byte(key[unix.IFNAMSIZ:]))
}

func markBytes(mark uint32) string { return string(binary.NativeEndian.AppendUint32(nil, mark)) }

// elements returns what one link has in the common sets.
func (l linkPlan) elements() []element {
	key := string(linkKey(l.name))
	addr := l.addr.As4()
	out := []element{
		{setSources, key + string(addr[:]), ""},
		{setSent, key, ""},
		{setReceived, key, ""},
		{setDropped, key, ""},
	}
	if !l.connected {
		return out
	}
	add := func(when bool, set, key, value string) {
		if when {
			out = append(out, element{set, key, value})
		}
	}
	mark := markBytes(l.generation)
	add(true, setConnected, key, "")
	add(true, setGenerations, key, mark)
	add(true, setGranted, key+mark, "")
	add(l.open, setOpen, key, "")
	add(l.policy.HTTP != nil, setGated, key, "")
	add(l.group != 0, setGroups, key, markBytes(l.group))
	add(l.group != 0, setMembers, markBytes(l.group)+string(addr[:]), "")
	add(len(l.denied) > 0, setDenied, key, l.own("deny"))
	add(len(l.allowed) > 0 || !l.pins.empty(), setAllowed, key, l.own("allow"))
	add(l.limits() != nil, setLimited, key, l.own("limit"))
	return out
}

// own names a chain or set that belongs to the link, made of its present
// policy: what another policy is made of has other names.
func (l linkPlan) own(what string) string {
	return fmt.Sprintf("%s-%s-%08x", what, l.name, l.generation)
}

// ownedBy is the reverse: the link that a chain or set belongs to. Names of
// earlier versions end with the link.
func ownedBy(name string) (link string, ok bool) {
	what, rest, _ := strings.Cut(name, "-")
	if !slices.Contains([]string{"deny", "allow", "limit", "denied", "allowed", "pins", "past"}, what) {
		return "", false
	}
	link, _, _ = strings.Cut(rest, "-")
	_, ok = linkID(link)
	return link, ok
}

// ownSets returns those of names that are sets of one kind.
func ownSets(names []string, what string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return !strings.HasPrefix(name, what+"-") })
}

// sets returns the sets of the link's own.
func (l linkPlan) sets() []setPlan {
	var out []setPlan
	add := func(what string, list []block) {
		if len(list) == 0 {
			return
		}
		s := setPlan{name: l.own(what), key: typeDoor, concat: true, interval: true}
		for _, b := range list {
			s.elements = append(s.elements, b.element())
		}
		out = append(out, s)
	}
	add("denied", l.denied)
	add("allowed", l.allowed)
	if !l.pins.empty() {
		out = append(out, l.pinSet(), l.pastSet())
	}
	return out
}

// pastSet holds what names had before a change of policy, also what is not
// pinned any more: connections that exist go on.
func (l linkPlan) pastSet() setPlan {
	s := l.pinSet()
	s.name = l.own("past")
	return s
}

func (l linkPlan) pinSet() setPlan {
	return setPlan{name: l.own("pins"), key: typeDoor, concat: true, timeout: true}
}

// chains returns the chains of the link's own.
func (l linkPlan) chains() []chainPlan {
	var out []chainPlan
	if len(l.denied) > 0 {
		out = append(out, chainPlan{name: l.own("deny"), rules: []rulePlan{rule(towardPort, in(l.own("denied")), jump("prohibited"))}})
	}
	var allow []rulePlan
	if len(l.allowed) > 0 {
		allow = append(allow, rule(towardPort, in(l.own("allowed")), accept))
	}
	allow = append(allow, l.pins.rules(l.own("pins"))...)
	allow = append(allow, l.pins.rules(l.own("past"), state("established", stateEstablished))...)
	if len(allow) > 0 {
		out = append(out, chainPlan{name: l.own("allow"), rules: allow})
	}
	if limits := l.limits(); limits != nil {
		out = append(out, chainPlan{name: l.own("limit"), rules: limits})
	}
	return out
}

// limits returns the rules that refuse what goes beyond the policy's limits.
// A burst is what a quarter of a second holds, and at least a handful.
func (l linkPlan) limits() []rulePlan {
	var out []rulePlan
	over := func(n uint64, least uint64, parts ...part) {
		if n > 0 {
			burst := uint32(min(max(n/4, least), 1<<16))
			out = append(out, rule(append(parts, overRate(n, burst), jump("refused"))...))
		}
	}
	isNew := state("new", stateNew)
	over(l.policy.Limits.PacketsPerSecond, 16)
	over(l.policy.Limits.ConnectionsPerSecond, 4, isNew, unmarked)
	if n := l.policy.Limits.Flows; n > 0 && n < flowsPerSandbox {
		out = append(out, rule(isNew, overCount(n), jump("refused")))
	}
	return out
}

// held is what a link has in the kernel.
type held struct {
	elements   []element
	chains     []string
	sets       []string
	generation uint32 // of the chains and sets
}

func (l linkPlan) held() held {
	h := held{elements: l.elements(), generation: l.generation}
	for _, c := range l.chains() {
		h.chains = append(h.chains, c.name)
	}
	for _, s := range l.sets() {
		h.sets = append(h.sets, s.name)
	}
	return h
}

// change is one transaction, in this order, or two (see steps).
type change struct {
	remove     []element
	dropChains []string
	dropSets   []string
	makeSets   []setPlan // with their elements
	makeChains []chainPlan
	add        []element
	pins       []pinChange
}

func (c *change) empty() bool {
	return len(c.remove)+len(c.dropChains)+len(c.dropSets)+len(c.makeSets)+len(c.makeChains)+len(c.add)+len(c.pins) == 0
}

// heavy reports whether c is enough for one transaction.
func (c *change) heavy() bool {
	return len(c.dropChains)+len(c.dropSets)+len(c.makeSets)+len(c.makeChains) >= bulk || len(c.remove)+len(c.add) >= bulk*chunk
}

// diff adds to c what leads from one state of a link to another. Chains and
// sets of its own that the new state has, too, are left alone: they hold pins.
// Where a chain was emptied (no generation) all are made anew.
func (c *change) diff(from, to held, plan *linkPlan) {
	for _, e := range from.elements {
		if !slices.Contains(to.elements, e) {
			c.remove = append(c.remove, e)
		}
	}
	for _, e := range to.elements {
		if !slices.Contains(from.elements, e) {
			c.add = append(c.add, e)
		}
	}
	stays := func(name string) bool {
		return from.generation != 0 && (slices.Contains(from.chains, name) && slices.Contains(to.chains, name) ||
			slices.Contains(from.sets, name) && slices.Contains(to.sets, name))
	}
	dropped := slices.DeleteFunc(slices.Clone(from.chains), stays)
	c.dropChains = append(c.dropChains, dropped...)
	c.dropSets = append(c.dropSets, slices.DeleteFunc(slices.Clone(from.sets), stays)...)
	if plan != nil {
		c.makeSets = append(c.makeSets, slices.DeleteFunc(plan.sets(), func(s setPlan) bool { return stays(s.name) })...)
		c.makeChains = append(c.makeChains, slices.DeleteFunc(plan.chains(), func(p chainPlan) bool { return stays(p.name) })...)
	}
	// What a map names must not be dropped while it names it.
	for _, e := range from.elements {
		if e.value != "" && slices.Contains(dropped, e.value) && slices.Contains(to.elements, e) {
			c.remove = append(c.remove, e)
			c.add = append(c.add, e)
		}
	}
}

// steps returns the transactions of c. Chains and sets that take the place of
// others are made in one before, when nothing leads to them yet: in kernels
// before 6.17 a set of intervals shows its elements a moment after the
// transaction that made them is in force, in which flows would be refused.
func (c change) steps() []change {
	if len(c.makeSets) == 0 || len(c.remove) == 0 {
		return []change{c}
	}
	if slices.ContainsFunc(c.makeSets, func(s setPlan) bool { return slices.Contains(c.dropSets, s.name) }) ||
		slices.ContainsFunc(c.makeChains, func(p chainPlan) bool { return slices.Contains(c.dropChains, p.name) }) {
		return []change{c}
	}
	return []change{
		{makeSets: c.makeSets, makeChains: c.makeChains, pins: c.pins},
		{remove: c.remove, dropChains: c.dropChains, dropSets: c.dropSets, add: c.add},
	}
}

func services(ports ...uint16) []nftables.SetElement {
	var out []nftables.SetElement
	for _, port := range ports {
		for _, proto := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			out = append(out, nftables.SetElement{Key: serviceKey(proto, port)})
		}
	}
	return out
}

func serviceKey(proto byte, port uint16) []byte {
	return []byte{proto, 0, 0, 0, byte(port >> 8), byte(port), 0, 0}
}

func doors(at netip.Addr, port uint16) []nftables.SetElement {
	var out []nftables.SetElement
	for _, proto := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		out = append(out, nftables.SetElement{Key: pinTail{proto, port}.key(at)})
	}
	return out
}

// kernelElement is e as the library wants it.
func (e element) kernel(s setPlan) nftables.SetElement {
	k := nftables.SetElement{Key: []byte(e.key)}
	switch {
	case !s.isMap():
	case s.value.Name == nftables.TypeVerdict.Name:
		k.VerdictData = &expr.Verdict{Kind: expr.VerdictJump, Chain: e.value}
	default:
		k.Val = []byte(e.value)
	}
	return k
}
