package netns

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

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
	prioritySource   = -300 // raw: before connection tracking, so forged packets leave no trace there
	priorityLocal    = -150 // mangle: tracking known, destination NAT (-100) not done yet
	priorityRedirect = -105 // just before the host's own dstnat
	priorityFilter   = -10  // just before the host's filter chains
	priorityMasq     = 100  // srcnat
	flowsPerSandbox  = 8192 // tracked connections; the host's table has room for 65,536 and more

	// Questions to the daemon's resolver that one link may send. All share a
	// socket there: who floods it would take the place of the others'.
	asksPerSecond = 1000
	asksBurst     = 2000
)

// setPlan is one named set, or map where it has values.
type setPlan struct {
	name     string
	what     string // for people
	key      nftables.SetDatatype
	value    nftables.SetDatatype // of a map
	concat   bool
	interval bool
	timeout  bool
	counter  bool
	dynamic  bool
	lasting  bool // its elements outlive the daemon that made them
	list     bool // of many elements for each link
	pins     bool // made by the resolver's answers
	lead     bool // its elements are verdicts of the plan
	twin     bool // as the one before
	elements []nftables.SetElement
}

// chainPlan is one chain; base chains have a hook.
type chainPlan struct {
	name     string
	what     string
	kind     nftables.ChainType
	hook     *nftables.ChainHook
	priority int
	back     bool // what no rule decides goes on where it came from
	twin     bool // as the one before
	rules    []rulePlan
}

// rulePlan is one rule: its text and its expressions.
type rulePlan struct {
	text  string
	exprs []expr.Any
}

// tablePlan is everything in the table except what belongs to single links.
type tablePlan struct {
	gateway netip.Addr
	sets    []setPlan
	chains  []chainPlan
	closed  []addrRange // nobody's, whatever a policy says
	private []addrRange // not the public internet: only where an allow rule names it
	salt    string      // of the marks of policies
}

var (
	typeSource  = nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeIPAddr)
	typeMarked  = nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeMark)
	typeService = nftables.MustConcatSetType(nftables.TypeInetProto, nftables.TypeInetService)
	typeDoor    = nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeInetProto, nftables.TypeInetService)
	typeMember  = nftables.MustConcatSetType(nftables.TypeMark, nftables.TypeIPAddr)
	typePin     = nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeMark, nftables.TypeInetProto, nftables.TypeInetService, nftables.TypeIPAddr)
)

// The names of the sets and maps.
const (
	setSources     = "sources"
	setConnected   = "connected"
	setOpen        = "open"
	setGated       = "gated"
	setGenerations = "generations"
	setGranted     = "granted"
	setShelves     = "shelves"
	setShelvesOut  = "shelves_out"
	setShelvesIn   = "shelves_in"
	setClasses     = "classes"
	setPins        = "pins"
	setPast        = "past"
	setLimited     = "limited"
	setGroups      = "groups"
	setMembers     = "members"
	setSent        = "sent"
	setReceived    = "received"
	setDropped     = "dropped"
	setFlows       = "flows"
	setAsks        = "asks"
	setClosed      = "closed"
	setPrivate     = "private"
	setNames       = "names"
	setWeb         = "web"
	setDoors       = "doors"
	setResolver    = "resolver"
	setServices    = "services"
	setGate        = "gate"
	setGates       = "gates"
	setUplinks     = "uplinks"
	setOwner       = "installation"
)

// planTable plans the table for a pool, the ranges the operator closes to all
// sandboxes, and the private ones that allow rules may name.
func planTable(pool netip.Prefix, deny, admit []netip.Prefix) tablePlan {
	notPublic := append(rangesOf(sandbox.SpecialRanges()), rangesOf(append(slices.Clone(deny), pool))...)
	t := tablePlan{
		gateway: gateway(pool),
		private: merge(notPublic),
		// A pool cannot be admitted: it is the sandboxes' own.
		closed: merge(append(subtract(merge(notPublic), rangesOf(admit)), rangesOf(append(slices.Clone(deny), pool))...)),
	}
	t.salt = fmt.Sprint(planVersion, t.gateway, t.closed, t.private)
	t.sets, t.chains = planSets(t), planChains(t.gateway)
	return t
}

// planVersion changes when what is made of one link's policy does: then it is
// made anew.
const planVersion = 4

// The daemon's services are asked on these ports.
const (
	portDNS   = 53
	portDoT   = 853
	portHTTP  = 80
	portHTTPS = 443
)

func planSets(t tablePlan) []setPlan {
	link := nftables.TypeIFName
	return append([]setPlan{
		{name: setSources, what: "each link with the one address it may send from", key: typeSource, concat: true, lasting: true},
		{name: setConnected, what: "links whose policy is not off", key: link, lasting: true},
		{name: setOpen, what: "links whose policy is open", key: link, lasting: true},
		{name: setGated, what: "links whose web traffic goes through the daemon's gate", key: link, lasting: true},
		{name: setGenerations, what: "the mark of each link's policy", key: link, value: nftables.TypeMark, lasting: true},
		{name: setGranted, what: "links with the mark of flows that their present policy granted", key: typeMarked, concat: true, lasting: true},
		{name: setLimited, what: "links with limits of their own", key: link, value: nftables.TypeVerdict, lasting: true},
		{name: setGroups, what: "links that share a network", key: link, value: nftables.TypeMark, lasting: true},
		{name: setMembers, what: "the addresses in each shared network", key: typeMember, concat: true, lasting: true},
		{name: setSent, what: "packets and bytes a sandbox sent and we let through", key: link, counter: true, lasting: true},
		{name: setReceived, what: "packets and bytes a sandbox received", key: link, counter: true, lasting: true},
		{name: setDropped, what: "packets refused by policy", key: link, counter: true, lasting: true},
		{name: setFlows, what: "links with their tracked connections", key: link, dynamic: true, lasting: true},
		{name: setAsks, what: "what links may still ask the daemon's resolver", key: link, dynamic: true, timeout: true},
		{name: setClosed, what: "ranges that no sandbox reaches", key: nftables.TypeIPAddr, interval: true, elements: rangeElements(t.closed)},
		{name: setPrivate, what: "ranges that are not the public internet", key: nftables.TypeIPAddr, interval: true, elements: rangeElements(t.private)},
		{name: setNames, what: "where names are asked for: not past the daemon", key: typeService, concat: true, elements: services(portDNS, portDoT)},
		{name: setWeb, what: "where the web is", key: typeService, concat: true, elements: services(portHTTP, portHTTPS)},
		{name: setDoors, what: "what of the host is open to sandboxes", key: typeDoor, concat: true, elements: doors(t.gateway, portDNS)},
		{name: setServices, what: "the ports of the gateway, and where their services listen", key: typeService, value: nftables.TypeInetService, concat: true},
		{name: setResolver, what: "where the daemon's resolver listens", key: typeDoor, concat: true},
		{name: setGates, what: "the ports of the web, and where the gate listens", key: typeService, value: nftables.TypeInetService, concat: true},
		{name: setGate, what: "where the gate listens", key: typeDoor, concat: true},
		{name: setToldGranted, what: "what links may still tell of flows let out", key: link, dynamic: true, timeout: true},
		{name: setToldRefused, what: "what links may still tell of packets refused", key: link, dynamic: true, timeout: true},
		{name: setUplinks, what: "interfaces the daemon made forward", key: link, lasting: true},
		{name: setOwner, what: "whose sandboxes these are, as a comment", key: nftables.TypeMark},
	}, listSets()...)
}

// judgement is how a packet of a flow that the present policy has not granted
// is judged, by what the flow was begun with: d and link tell whose. Who
// comes to its end may pass.
func judgement(d direction, link part) []rulePlan {
	return slices.Concat([]rulePlan{
		rule(toward, in(setClosed), jump("prohibited")),
		rule(service, in(setNames), jump("prohibited")),
		rule(link, in(setGated), service, in(setWeb), jump("prohibited")),
		rule(d.shelf()),
	}, d.pinned(setPins), d.pinned(setPast, state("established", stateEstablished)), []rulePlan{
		rule(link, notIn(setOpen), jump("prohibited")),
		rule(toward, in(setPrivate), jump("prohibited")),
		rule(jump("passed")),
	})
}

func planChains(gateway netip.Addr) []chainPlan {
	return slices.Concat(planVerdicts(), listChains(), planForward(), planLocal(gateway))
}

// planVerdicts are the chains in which packets end that may not pass.
func planVerdicts() []chainPlan {
	return []chainPlan{
		{
			name: "unasked", what: "to a sandbox that did not ask",
			rules: []rulePlan{rule(oifname, notIn(setDropped), drop), rule(tellUnasked), rule(oifname, in(setDropped), drop), rule(drop)},
		},
		{
			name: "refused", what: "from a sandbox, without an answer",
			rules: []rulePlan{rule(iifname, notIn(setDropped), drop), rule(tellRefused), rule(iifname, in(setDropped), drop), rule(drop)},
		},
		{
			name: "prohibited", what: "from a sandbox, told so at once: a connect fails instead of hanging, a connection ends",
			rules: []rulePlan{
				rule(notFromSandbox, jump("unasked")),
				rule(iifname, notIn(setDropped), drop),
				rule(tellRefused),
				rule(goingOn, iifname, in(setDropped), reset),
				rule(iifname, in(setDropped), prohibit),
				rule(drop),
			},
		},
	}
}

// planForward are the chains of what passes through the host.
func planForward() []chainPlan {
	filter := nftables.ChainTypeFilter
	return []chainPlan{
		{
			name: "outbound", what: "sandbox to anywhere but the host",
			rules: append([]rulePlan{
				rule(toSandbox, jump("between")),
				rule(state("established", stateEstablished), inMark, in(setGranted), stillIn, in(setSent), accept), // most packets
				rule(state("established,new", stateEstablished|stateNew), inMark, in(setGranted), jump("passed")),
				rule(daddr, in(setClosed), jump("prohibited")), // behind a NAT of the host's own, too
			}, judgement(outward, iifname)...),
		},
		{
			name: "between", what: "sandbox to sandbox: of one group only",
			rules: []rulePlan{rule(fellow, at(regWord4, setMembers), jump("fellows")), rule(jump("prohibited"))},
		},
		{
			name: "fellows", what: "within a group, what who began it does not deny itself",
			rules: []rulePlan{
				rule(original, outward.shelf()),
				rule(reply, inward.shelf()),
				rule(jump("passed")),
			},
		},
		{
			name: "inbound", what: "anywhere but the host to a sandbox: answers only",
			rules: []rulePlan{
				rule(reply, state("established", stateEstablished), outMark, in(setGranted), stillOut, in(setReceived), accept), // most packets
				rule(original, jump("unasked")),
				rule(state("established", stateEstablished), jump("answer")),
				rule(state("related", stateRelated), icmp, jump("answer")),
				rule(jump("unasked")),
			},
		},
		{
			name: "answer", what: "to what a sandbox began",
			rules: append([]rulePlan{
				rule(outMark, in(setGranted), jump("passed")),
			}, judgement(inward, oifname)...),
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
			name: "passed", what: "what may pass: counted, and its flow marked as granted",
			rules: []rulePlan{
				rule(toSandbox, oifname, in(setReceived)),
				rule(notFromSandbox, accept),
				rule(iifname, in(setSent)),
				rule(state("new", stateNew), tellGranted),
				rule(toSandbox, accept),
				rule(markFlow),
				rule(accept),
			},
		},
		{
			name: "masquerade", what: "leave with the host's address", kind: nftables.ChainTypeNAT,
			hook: nftables.ChainHookPostrouting, priority: priorityMasq,
			rules: []rulePlan{rule(fromSandbox, notToSandbox, masquerade)},
		},
	}
}

// planLocal are the chains of what every packet meets first, and of what is
// for the host or from it.
func planLocal(gateway netip.Addr) []chainPlan {
	filter := nftables.ChainTypeFilter
	return []chainPlan{
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
			name: "local", what: "limits, and the host's addresses before any NAT can hide them", kind: filter,
			hook: nftables.ChainHookPrerouting, priority: priorityLocal,
			rules: []rulePlan{
				rule(notFromSandbox, ret),
				rule(state("established", stateEstablished), unpaced, ret), // most packets
				rule(state("invalid,untracked", stateInvalid|stateUntracked), jump("refused")),
				rule(iifname, vmap(setLimited)),
				rule(notNew, ret),
				rule(overFlows(flowsPerSandbox), jump("refused")),
				rule(door, in(setDoors), ret),
				rule(notUnicast, jump("refused")),
			},
		},
		{
			name: "redirect", what: "to the daemon's own services", kind: nftables.ChainTypeNAT,
			hook: nftables.ChainHookPrerouting, priority: priorityRedirect,
			rules: []rulePlan{
				rule(notFromSandbox, ret),
				rule(toAddr(gateway), deliver(gateway, setServices)),
				rule(fellow, at(regWord4, setMembers), ret),
				rule(iifname, in(setGated), deliver(gateway, setGates)),
			},
		},
		{
			name: "input", what: "sandbox to host: the daemon's services, and answers to what the host began", kind: filter,
			hook: nftables.ChainHookInput, priority: priorityFilter,
			rules: []rulePlan{
				rule(notFromSandbox, ret),
				rule(reply, state("established,related", stateEstablished|stateRelated), iifname, in(setSent), accept),
				rule(door, in(setResolver), overAsks, jump("refused")),
				rule(iifname, in(setConnected), door, in(setResolver), jump("served")),
				rule(iifname, in(setGated), door, in(setGate), jump("served")),
				rule(jump("prohibited")),
			},
		},
		{
			name: "served", what: "by the door, not past it",
			rules: []rulePlan{rule(translated, iifname, in(setSent), accept), rule(jump("refused"))},
		},
		{
			name: "output", what: "host to sandbox: counted", kind: filter,
			hook: nftables.ChainHookOutput, priority: priorityFilter,
			rules: []rulePlan{rule(notToSandbox, ret), rule(oifname, in(setReceived), accept)},
		},
	}
}

// Text returns the plan in nft's language, without the elements of single
// links. The package documentation holds it; a test compares the two.
func (t tablePlan) Text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "table inet %s {\n", tableName)
	for _, s := range t.sets {
		if !s.twin {
			b.WriteString(s.Text())
		}
	}
	for _, c := range t.chains {
		if c.twin {
			continue
		}
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

// Text returns the set in nft's language.
func (s setPlan) Text() string {
	kind, value := "set", ""
	if s.isMap() {
		kind, value = "map", " : "+s.value.Name
	}
	return fmt.Sprintf("  %s %s { type %s%s%s }\n    # %s\n", kind, s.name, s.key.Name, value, s.flags(), s.what)
}

func (s setPlan) isMap() bool { return s.value.Name != "" }

func (s setPlan) flags() string {
	var b strings.Builder
	if s.interval {
		b.WriteString("; flags interval")
	}
	if s.timeout {
		b.WriteString("; flags timeout")
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
