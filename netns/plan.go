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

// This file is the plan: which table the kernel should hold, as values. It
// makes no system call. Each rule carries its text in nft's language beside
// its expressions, because every match is built by one helper that knows both.

const tableName = "sandboxd"

// Priorities of the base chains (netfilter: lower runs first). Between them
// and the host's own firewall, which usually sits at 0, both may drop and
// neither can overrule the other's drop.
const (
	prioritySource  = -300 // raw: before connection tracking, so forged packets leave no trace there
	priorityLocal   = -150 // mangle: tracking known, destination NAT (-100) not done yet
	priorityFilter  = -10  // just before the host's filter chains
	priorityMasq    = 100  // srcnat
	flowsPerSandbox = 8192 // tracked connections; the host's table has room for 65,536 and more
)

// setPlan is one named set.
type setPlan struct {
	name     string
	what     string // for people
	key      nftables.SetDatatype
	concat   bool
	interval bool
	counter  bool
	dynamic  bool
	lasting  bool // its elements outlive the daemon that made them
}

// chainPlan is one chain; base chains have a hook.
type chainPlan struct {
	name     string
	what     string
	kind     nftables.ChainType
	hook     *nftables.ChainHook
	priority int
	rules    []rulePlan
}

// rulePlan is one rule: its text and its expressions.
type rulePlan struct {
	text  string
	exprs []expr.Any
}

// tablePlan is everything in the table except the elements of single links.
type tablePlan struct {
	sets    []setPlan
	chains  []chainPlan
	private []netip.Prefix
}

var (
	typeSource = nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeIPAddr)
)

// The names of the sets.
const (
	setSources  = "sources"
	setOpen     = "open"
	setSent     = "sent"
	setReceived = "received"
	setDropped  = "dropped"
	setFlows    = "flows"
	setPrivate  = "private"
	setUplinks  = "uplinks"
)

// special lists the IPv4 ranges that are not the public internet: IANA's
// special-purpose registry (RFC 6890 and its updates), multicast (RFC 5771)
// and the reserved class E (RFC 1112).
var special = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("10.0.0.0/8"),
	netip.MustParsePrefix("100.64.0.0/10"),
	netip.MustParsePrefix("127.0.0.0/8"),
	netip.MustParsePrefix("169.254.0.0/16"), // cloud metadata lives here
	netip.MustParsePrefix("172.16.0.0/12"),
	netip.MustParsePrefix("192.0.0.0/24"),
	netip.MustParsePrefix("192.0.2.0/24"),
	netip.MustParsePrefix("192.88.99.0/24"),
	netip.MustParsePrefix("192.168.0.0/16"),
	netip.MustParsePrefix("198.18.0.0/15"),
	netip.MustParsePrefix("198.51.100.0/24"),
	netip.MustParsePrefix("203.0.113.0/24"),
	netip.MustParsePrefix("224.0.0.0/4"),
	netip.MustParsePrefix("240.0.0.0/4"),
}

// privateRanges returns the ranges closed to sandboxes: the special ones and
// more, without overlaps (an interval set refuses them).
func privateRanges(more ...netip.Prefix) []netip.Prefix {
	all := append(slices.Clone(special), more...)
	slices.SortFunc(all, func(a, b netip.Prefix) int { return a.Bits() - b.Bits() })
	var out []netip.Prefix
	for _, p := range all {
		if !slices.ContainsFunc(out, p.Overlaps) {
			out = append(out, p.Masked())
		}
	}
	slices.SortFunc(out, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
	return out
}

// planTable plans the table for a pool and the further ranges sandboxes may
// not reach.
func planTable(pool netip.Prefix, deny []netip.Prefix) tablePlan {
	return tablePlan{
		sets:    planSets(),
		chains:  planChains(),
		private: privateRanges(append(slices.Clone(deny), pool)...),
	}
}

func planSets() []setPlan {
	return []setPlan{
		{name: setSources, what: "each link with the one address it may send from", key: typeSource, concat: true, lasting: true},
		{name: setOpen, what: "links whose policy is open", key: nftables.TypeIFName, lasting: true},
		{name: setSent, what: "packets and bytes a sandbox sent and we let through", key: nftables.TypeIFName, counter: true, lasting: true},
		{name: setReceived, what: "packets and bytes a sandbox received", key: nftables.TypeIFName, counter: true, lasting: true},
		{name: setDropped, what: "packets refused by policy", key: nftables.TypeIFName, counter: true, lasting: true},
		{name: setFlows, what: "links with their tracked connections", key: nftables.TypeIFName, dynamic: true, lasting: true},
		{name: setPrivate, what: "ranges that are not the public internet", key: nftables.TypeIPAddr, interval: true},
		{name: setUplinks, what: "interfaces the daemon made forward", key: nftables.TypeIFName, lasting: true},
	}
}

func planChains() []chainPlan {
	filter := nftables.ChainTypeFilter
	return []chainPlan{
		{
			name: "refused", what: "from a sandbox, without an answer",
			rules: []rulePlan{rule(iifname, in(setDropped), drop), rule(drop)},
		},
		{
			name: "prohibited", what: "from a sandbox, told so at once: a connect fails instead of hanging",
			rules: []rulePlan{rule(iifname, in(setDropped), prohibit), rule(drop)},
		},
		{
			name: "unasked", what: "to a sandbox that did not ask",
			rules: []rulePlan{rule(oifname, in(setDropped), drop), rule(drop)},
		},
		{
			name: "sent", what: "let out and counted",
			rules: []rulePlan{rule(iifname, in(setSent), accept), rule(jump("refused"))},
		},
		{
			name: "received", what: "let in and counted",
			rules: []rulePlan{rule(oifname, in(setReceived), accept), rule(drop)},
		},
		{
			name: "outbound", what: "sandbox to anywhere but the host",
			rules: []rulePlan{
				rule(toSandbox, jump("prohibited")),
				rule(iifname, notIn(setOpen), jump("prohibited")),
				rule(daddr, in(setPrivate), jump("prohibited")),
				rule(jump("sent")),
			},
		},
		{
			name: "inbound", what: "anywhere but the host to a sandbox: answers only",
			rules: []rulePlan{
				rule(oifname, notIn(setOpen), jump("unasked")),
				rule(reply, state("established", stateEstablished), jump("received")),
				rule(reply, state("related", stateRelated), icmp, jump("received")),
				rule(jump("unasked")),
			},
		},
		{
			name: "source", what: "IPv6 and forged sources end here", kind: filter,
			hook: nftables.ChainHookPrerouting, priority: prioritySource,
			rules: []rulePlan{
				rule(notFromSandbox, ret),
				rule(notIPv4, jump("refused")),
				rule(source, in(setSources), ret),
				rule(iifname, notIn(setDropped), tcp, reset), // see the package documentation
				rule(jump("refused")),
			},
		},
		{
			name: "local", what: "the host's addresses, before any NAT can hide them", kind: filter,
			hook: nftables.ChainHookPrerouting, priority: priorityLocal,
			rules: []rulePlan{
				rule(notFromSandbox, ret),
				rule(state("invalid,untracked", stateInvalid|stateUntracked), jump("refused")),
				rule(state("new", stateNew), notUnicast, jump("refused")),
				rule(state("new", stateNew), overFlows(flowsPerSandbox), jump("refused")),
			},
		},
		{
			name: "input", what: "sandbox to host: only answers to what the host began", kind: filter,
			hook: nftables.ChainHookInput, priority: priorityFilter,
			rules: []rulePlan{
				rule(notFromSandbox, ret),
				rule(reply, state("established,related", stateEstablished|stateRelated), iifname, in(setSent), accept),
				rule(jump("refused")),
			},
		},
		{
			name: "forward", what: "through the host", kind: filter,
			hook: nftables.ChainHookForward, priority: priorityFilter,
			rules: []rulePlan{
				rule(fromSandbox, jump("outbound")),
				rule(toSandbox, jump("inbound")),
				rule(iifname, in(setUplinks), drop),
			},
		},
		{
			name: "output", what: "host to sandbox: counted", kind: filter,
			hook: nftables.ChainHookOutput, priority: priorityFilter,
			rules: []rulePlan{rule(notToSandbox, ret), rule(oifname, in(setReceived), accept)},
		},
		{
			name: "masquerade", what: "leave with the host's address", kind: nftables.ChainTypeNAT,
			hook: nftables.ChainHookPostrouting, priority: priorityMasq,
			rules: []rulePlan{rule(fromSandbox, notToSandbox, masquerade)},
		},
	}
}

// Text returns the plan in nft's language, without the elements of single
// links. The package documentation holds it; a test compares the two.
func (t tablePlan) Text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "table inet %s {\n", tableName)
	for _, s := range t.sets {
		fmt.Fprintf(&b, "  set %s { type %s%s }\n    # %s\n", s.name, s.key.Name, s.flags(), s.what)
	}
	for _, c := range t.chains {
		fmt.Fprintf(&b, "  chain %s { # %s\n", c.name, c.what)
		if c.hook != nil {
			fmt.Fprintf(&b, "    type %s hook %s priority %d; policy accept;\n", c.kind, hookNames[*c.hook], c.priority)
		}
		for _, r := range c.rules {
			fmt.Fprintf(&b, "    %s\n", r.text)
		}
		b.WriteString("  }\n")
	}
	b.WriteString("}\n")
	return b.String()
}

func (s setPlan) flags() string {
	var b strings.Builder
	if s.interval {
		b.WriteString("; flags interval")
	}
	if s.dynamic {
		b.WriteString("; flags dynamic")
	}
	if s.counter {
		b.WriteString("; counter")
	}
	return b.String()
}

var hookNames = map[nftables.ChainHook]string{
	*nftables.ChainHookPrerouting:  "prerouting",
	*nftables.ChainHookInput:       "input",
	*nftables.ChainHookForward:     "forward",
	*nftables.ChainHookOutput:      "output",
	*nftables.ChainHookPostrouting: "postrouting",
}

// privateElements turns prefixes into the start and end marks of an interval
// set: [start, end) with the end marked, none where it would wrap around.
func privateElements(prefixes []netip.Prefix) []nftables.SetElement {
	var out []nftables.SetElement
	var zero [4]byte
	if len(prefixes) > 0 && prefixes[0].Addr().As4() != zero {
		out = append(out, nftables.SetElement{Key: zero[:], IntervalEnd: true})
	}
	for _, p := range prefixes {
		start := p.Masked().Addr().As4()
		out = append(out, nftables.SetElement{Key: start[:]})
		end := uint64(binary.BigEndian.Uint32(start[:])) + 1<<(32-p.Bits())
		if end > 0xffffffff {
			continue
		}
		key := binary.BigEndian.AppendUint32(nil, uint32(end))
		out = append(out, nftables.SetElement{Key: key, IntervalEnd: true})
	}
	return out
}

// linkKey is an interface name as the kernel compares it: padded to IFNAMSIZ.
func linkKey(name string) []byte {
	key := make([]byte, unix.IFNAMSIZ)
	copy(key, name)
	return key
}

// linkPlan is what one sandbox has in the sets.
type linkPlan struct {
	name string
	addr netip.Addr
	open bool

	connected bool
	title     string
	policy    sandbox.NetworkPolicy
}

// splitSource is the reverse of a key of the set sources.
func splitSource(key []byte) (string, netip.Addr) {
	if len(key) != unix.IFNAMSIZ+4 {
		return "", netip.Addr{}
	}
	return unix.ByteSliceToString(key[:unix.IFNAMSIZ]), netip.AddrFrom4([4]byte(key[unix.IFNAMSIZ:]))
}

// elements returns the keys one link has in each set that must hold them.
func (l linkPlan) elements() map[string][]byte {
	key := linkKey(l.name)
	addr := l.addr.As4()
	out := map[string][]byte{
		setSources:  append(slices.Clone(key), addr[:]...),
		setSent:     key,
		setReceived: key,
		setDropped:  key,
	}
	if l.open {
		out[setOpen] = key
	}
	return out
}
