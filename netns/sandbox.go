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
	end             bool   // the first key after an interval
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
		{set: setSources, key: key + string(addr[:])},
		{set: setSent, key: key},
		{set: setReceived, key: key},
		{set: setDropped, key: key},
	}
	if !l.connected {
		return out
	}
	add := func(when bool, set, key, value string) {
		if when {
			out = append(out, element{set: set, key: key, value: value})
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
	add(len(l.allowed)+len(l.denied) > 0, setShelves, key, markBytes(uint32(l.shelf())))
	add(l.limits() != nil, setLimited, key, l.own("limit"))
	return out
}

// own names a chain that belongs to the link, made of its present policy: what
// another policy is made of has other names.
func (l linkPlan) own(what string) string {
	return fmt.Sprintf("%s-%s-%08x", what, l.name, l.generation)
}

// ownedBy is the reverse: the link that a chain belongs to, or a set that an
// earlier version made. Names of some end with the link.
func ownedBy(name string) (link string, ok bool) {
	what, rest, _ := strings.Cut(name, "-")
	if !slices.Contains([]string{"deny", "allow", "limit", "denied", "allowed", "pins", "past"}, what) {
		return "", false
	}
	link, _, _ = strings.Cut(rest, "-")
	_, ok = linkID(link)
	return link, ok
}

// chains returns the chains of the link's own.
func (l linkPlan) chains() []chainPlan {
	if limits := l.limits(); limits != nil {
		return []chainPlan{{name: l.own("limit"), rules: limits}}
	}
	return nil
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
	sets       []string // of earlier versions
	generation uint32   // of the chains
}

func (l linkPlan) held() held {
	h := l.heldBesideLists()
	h.elements = append(h.elements, l.lists()...)
	return h
}

func (l linkPlan) heldBesideLists() held {
	h := held{elements: l.elements(), generation: l.generation}
	for _, c := range l.chains() {
		h.chains = append(h.chains, c.name)
	}
	return h
}

// change is one transaction, in this order.
type change struct {
	remove     []element
	dropChains []string
	dropSets   []string
	makeChains []chainPlan
	add        []element
	pins       []pinChange
}

func (c *change) empty() bool {
	return len(c.remove)+len(c.dropChains)+len(c.dropSets)+len(c.makeChains)+len(c.add)+len(c.pins) == 0
}

// heavy reports whether c is enough for one transaction.
func (c *change) heavy() bool {
	return len(c.dropChains)+len(c.dropSets)+len(c.makeChains) >= bulk || len(c.remove)+len(c.add) >= bulk*chunk
}

// diff adds to c what leads from one state of a link to another. Chains of its
// own that the new state has, too, are left alone: they hold what limits have
// left. Where one was emptied (no generation) all are made anew.
func (c *change) diff(from, to held, plan *linkPlan) {
	had, has := setOf(from.elements), setOf(to.elements)
	for _, e := range from.elements {
		if !has[e] {
			c.remove = append(c.remove, e)
		}
	}
	for _, e := range to.elements {
		if !had[e] {
			c.add = append(c.add, e)
		}
	}
	stays := func(name string) bool {
		return from.generation != 0 && slices.Contains(from.chains, name) && slices.Contains(to.chains, name)
	}
	dropped := slices.DeleteFunc(slices.Clone(from.chains), stays)
	c.dropChains = append(c.dropChains, dropped...)
	c.dropSets = append(c.dropSets, from.sets...)
	if plan != nil {
		c.makeChains = append(c.makeChains, slices.DeleteFunc(plan.chains(), func(p chainPlan) bool { return stays(p.name) })...)
	}
	// What a map names must not be dropped while it names it.
	for _, e := range from.elements {
		if e.value != "" && slices.Contains(dropped, e.value) && has[e] {
			c.remove = append(c.remove, e)
			c.add = append(c.add, e)
		}
	}
}

func setOf(elements []element) map[element]bool {
	out := make(map[element]bool, len(elements))
	for _, e := range elements {
		out[e] = true
	}
	return out
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
	k := nftables.SetElement{Key: []byte(e.key), IntervalEnd: e.end}
	switch {
	case !s.isMap(), e.end:
	case s.value.Name == nftables.TypeVerdict.Name:
		k.VerdictData = &expr.Verdict{Kind: expr.VerdictJump, Chain: e.value}
	default:
		k.Val = []byte(e.value)
	}
	return k
}
