package netns

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

// The steps of a verdict, in the order in which the rules ask.
const (
	stepOff     = "off"     // no policy permits anything
	stepInside  = "inside"  // the packet does not leave the sandbox
	stepIPv6    = "ipv6"    // there is none
	stepService = "service" // the daemon's resolver
	stepHost    = "host"    // the host's own addresses, and what is no one's
	stepGate    = "gate"    // the web gate judges by the name
	stepGroup   = "group"   // another sandbox
	stepClosed  = "closed"  // ranges no policy opens
	stepDNS     = "dns"     // names are asked of the daemon only
	stepDeny    = "deny"
	stepAllow   = "allow"
	stepPin     = "pin"
	stepDefault = "default" // nothing permits it
	stepPrivate = "private"
	stepOpen    = "open"
	stepName    = "name" // the resolver does not answer it
)

// scene is what a verdict needs to know besides the policy.
type scene struct {
	table    tablePlan
	services Services
	// tenant finds the sandbox that has an address.
	tenant func(netip.Addr) (linkPlan, bool)
	boxes  []linkPlan // for names
	// local says what kind of an address of the host's it is, empty for none.
	local func(netip.Addr) string
	// pins are those of the sandbox in question, by the keys of its set.
	pins map[string]livePin
}

// flow is what a flow was begun with.
type flow struct {
	dest  netip.Addr
	proto byte
	port  uint16
}

// trial is one verdict in the making.
type trial struct {
	scene
	link linkPlan
	v    sandbox.NetworkVerdict
}

// pass notes a step that did not decide.
func (t *trial) pass(step, format string, args ...any) {
	t.v.Steps = append(t.v.Steps, sandbox.NetworkStep{Step: step, Answer: fmt.Sprintf(format, args...)})
}

// decide notes the step that did.
func (t *trial) decide(allowed bool, step, rule, format string, args ...any) sandbox.NetworkVerdict {
	why := fmt.Sprintf(format, args...)
	t.pass(step, "%s", why)
	t.v.Allowed, t.v.Step, t.v.Rule, t.v.Why = allowed, step, rule, why
	return t.v
}

// mend says what would permit what was refused.
func (t *trial) mend(format string, args ...any) sandbox.NetworkVerdict {
	t.v.Mend = fmt.Sprintf(format, args...)
	return t.v
}

func (t *trial) ref() string {
	if t.link.title != "" {
		return t.link.title
	}
	return string(t.link.id)
}

// rule is the narrowest rule that means what was asked for.
func (t *trial) rule() string {
	text := t.v.Dest
	if t.v.Port != 0 {
		text += fmt.Sprintf(":%d", t.v.Port)
	}
	if t.v.Protocol != sandbox.ProtocolTCP {
		text += "/" + t.v.Protocol
	}
	return text
}

func (t *trial) add() string { return fmt.Sprintf("sandbox net set %s --add %s", t.ref(), t.rule()) }

// explain is the verdict on a new flow of a sandbox to an address, by the
// same steps in the same order as the rules of the table.
func (s scene) explain(l linkPlan, f flow) sandbox.NetworkVerdict {
	t := &trial{scene: s, link: l, v: sandbox.NetworkVerdict{Sandbox: l.id, Dest: f.dest.String(), Port: f.port, Protocol: protocolName(4, f.proto)}}
	return t.address(f)
}

func (t *trial) address(f flow) sandbox.NetworkVerdict {
	l := t.link
	switch {
	case f.dest.Is4() && (f.dest.IsLoopback() || f.dest == l.addr && l.connected):
		return t.decide(true, stepInside, "", "it does not leave the sandbox: its own loopback or address")
	case !l.connected:
		t.decide(false, stepOff, "", "the policy is off: nothing leaves the sandbox")
		return t.mend("sandbox net set %s --allow %s", t.ref(), t.rule())
	case !f.dest.Is4():
		return t.decide(false, stepIPv6, "", "sandboxes have no IPv6")
	}
	if v, done := t.hosts(f); done {
		return v
	}
	other, known := t.neighbour(f)
	if known && t.link.group != 0 && other.group == t.link.group {
		return t.fellow(f)
	}
	if v, done := t.web(f); done {
		return v
	}
	if known {
		t.decide(false, stepGroup, "", "it is another sandbox, not of the same group")
		return t.mend("sandbox net set %s --net-group NAME, and the same for the other one", t.ref())
	}
	return t.far(f)
}

// hosts judges what the chains of the host's own addresses do.
func (t *trial) hosts(f flow) (sandbox.NetworkVerdict, bool) {
	if f.dest == t.table.gateway && f.port == portDNS && (f.proto == protocolNumber(sandbox.ProtocolTCP) || f.proto == protocolNumber(sandbox.ProtocolUDP)) {
		if t.services.DNS == 0 {
			return t.decide(false, stepService, "", "the daemon's resolver does not run"), true
		}
		return t.decide(true, stepService, "", "the daemon's resolver answers here"), true
	}
	if kind := t.local(f.dest); kind != "" {
		return t.decide(false, stepHost, "", "it is a %s address of the host's networks, which no sandbox reaches", kind), true
	}
	t.pass(stepHost, "not an address of the host's")
	return sandbox.NetworkVerdict{}, false
}

// web judges what the gate takes over.
func (t *trial) web(f flow) (sandbox.NetworkVerdict, bool) {
	if t.link.policy.HTTP == nil || f.proto != protocolNumber(sandbox.ProtocolTCP) || f.port != portHTTP && f.port != portHTTPS {
		return sandbox.NetworkVerdict{}, false
	}
	if t.services.Gate == 0 {
		return t.decide(false, stepGate, "", "web traffic goes through the daemon's gate, which does not run"), true
	}
	return t.decide(true, stepGate, "", "the gate takes it, and judges it by the name in it: ask about the name"), true
}

// neighbour finds the other sandbox that has an address and a link.
func (t *trial) neighbour(f flow) (linkPlan, bool) {
	other, ok := t.tenant(f.dest)
	return other, ok && other.id != t.link.id && other.connected
}

// fellow judges what goes to another sandbox of the group.
func (t *trial) fellow(f flow) sandbox.NetworkVerdict {
	if r, ok := t.denied(f); ok {
		t.decide(false, stepDeny, r, "a deny rule names it")
		return t.mend("sandbox net set %s --remove %s", t.ref(), r)
	}
	return t.decide(true, stepGroup, "", "it is a sandbox of the same group, %s", sandbox.Unmarked(t.link.policy.Group))
}

// far judges what leaves the host.
func (t *trial) far(f flow) sandbox.NetworkVerdict {
	if r, ok := rangeWith(t.table.closed, f.dest); ok {
		t.decide(false, stepClosed, r, "it lies in a range that no sandbox reaches")
		return t.mend("the operator can admit a private range with network.admit in the daemon's configuration; a rule must then name it")
	}
	t.pass(stepClosed, "not in a range that is closed to every sandbox")
	tcpOrUDP := f.proto == protocolNumber(sandbox.ProtocolTCP) || f.proto == protocolNumber(sandbox.ProtocolUDP)
	if tcpOrUDP && (f.port == portDNS || f.port == portDoT) {
		return t.decide(false, stepDNS, "", "names are asked of the daemon's resolver, %s, and of nobody else", t.table.gateway)
	}
	if t.link.policy.HTTP != nil && tcpOrUDP && (f.port == portHTTP || f.port == portHTTPS) {
		return t.decide(false, stepGate, "", "web traffic goes through the daemon's gate, which speaks TCP and not QUIC")
	}
	if r, ok := t.denied(f); ok {
		t.decide(false, stepDeny, r, "a deny rule names it")
		return t.mend("sandbox net set %s --remove %s", t.ref(), r)
	}
	t.pass(stepDeny, "no deny rule with an address names it")
	if r, ok := ruleFor(t.link.allow, f); ok {
		return t.decide(true, stepAllow, r, "an allow rule names it")
	}
	t.pass(stepAllow, "no allow rule with an address names it")
	if pin, ok := t.pinned(f); ok {
		return t.decide(true, stepPin, t.ruleOf(pin.name), "the sandbox was told this address for %s, which an allow rule names", pin.name)
	}
	if !t.link.pins.empty() {
		t.pass(stepPin, "not an address that a permitted name has now")
	}
	if !t.link.open {
		t.decide(false, stepDefault, "", "the policy allows what its rules name, and none names this")
		return t.mend("%s", t.add())
	}
	if r, ok := rangeWith(t.table.private, f.dest); ok {
		t.decide(false, stepPrivate, r, "it is no public address, and no allow rule names it")
		return t.mend("%s", t.add())
	}
	return t.decide(true, stepOpen, "", "the policy is open, and the address public")
}

// pinned looks a flow up as the rules of the link's own chain do.
func (t *trial) pinned(f flow) (livePin, bool) {
	p := t.link.pins
	var tails []pinTail
	if p.single {
		tails = append(tails, pinTail{f.proto, f.port})
	}
	if p.protocol {
		tails = append(tails, pinTail{f.proto, 0})
	}
	if p.all {
		tails = append(tails, pinTail{})
	}
	for i, c := range p.classes {
		if c.proto == f.proto && c.ports.First <= f.port && f.port <= c.ports.Last {
			tails = append(tails, pinTail{pinClass, uint16(i + 1)})
		}
	}
	for _, tail := range tails {
		if pin, ok := t.pins[string(tail.key(f.dest))]; ok {
			return pin, true
		}
	}
	return livePin{}, false
}

// ruleOf returns the allow rule a name was answered by.
func (t *trial) ruleOf(name string) string {
	for _, r := range t.link.allow {
		if r.MatchesName(name) && r.MatchesPort(t.v.Protocol, t.v.Port) {
			return r.String()
		}
	}
	return ""
}

func (t *trial) denied(f flow) (string, bool) { return ruleFor(t.link.deny, f) }

// ruleFor returns the first rule with a prefix that means a flow.
func ruleFor(rules []sandbox.NetworkRule, f flow) (string, bool) {
	for _, r := range rules {
		if r.Domain != "" || !r.Prefix.Contains(f.dest) {
			continue
		}
		for _, s := range shapes(r) {
			if s.protos[0] <= f.proto && f.proto <= s.protos[1] && s.ports.First <= f.port && f.port <= s.ports.Last {
				return r.String(), true
			}
		}
	}
	return "", false
}

func rangeWith(ranges []addrRange, a netip.Addr) (string, bool) {
	i := slices.IndexFunc(ranges, func(r addrRange) bool { return r.contains(a) })
	if i < 0 {
		return "", false
	}
	return ranges[i].String(), true
}

// explainName is the verdict on a name: what the resolver and the gate make of
// it, and what the rules make of the addresses it will have.
func (s scene) explainName(l linkPlan, name, protocol string, port uint16) sandbox.NetworkVerdict {
	t := &trial{scene: s, link: l, v: sandbox.NetworkVerdict{Sandbox: l.id, Dest: name, Port: port, Protocol: protocol}}
	if !l.connected {
		t.decide(false, stepOff, "", "the policy is off: nothing leaves the sandbox")
		return t.mend("sandbox net set %s --allow %s", t.ref(), t.rule())
	}
	for _, other := range s.boxes {
		if other.connected && other.group != 0 && other.group == l.group && other.id != l.id && isPeerName(other, name, l.policy.Group) {
			t.pass(stepName, "it is the sandbox %s of the same group, at %s", other.id, other.addr)
			return t.address(flow{other.addr, protocolNumber(protocol), port})
		}
	}
	for _, r := range l.deny {
		if r.MatchesName(name) {
			t.decide(false, stepDeny, r.String(), "a deny rule names it: the resolver does not answer it")
			return t.mend("sandbox net set %s --remove %s", t.ref(), r)
		}
	}
	t.pass(stepDeny, "no deny rule names it")
	var named []string
	for _, r := range l.allow {
		if !r.MatchesName(name) {
			continue
		}
		if named = append(named, r.String()); r.MatchesPort(protocol, port) {
			return t.permitted(r.String(), "an allow rule names it")
		}
	}
	switch {
	case l.open && (protocol == sandbox.ProtocolICMP || port != portDNS && port != portDoT):
		return t.permitted("", "the policy is open")
	case l.open:
		return t.decide(false, stepDNS, "", "names are asked of the daemon's resolver, %s, and of nobody else", s.table.gateway)
	case len(named) > 0:
		t.decide(false, stepDefault, strings.Join(named, ", "), "the resolver answers it, but no rule permits this port or protocol")
	default:
		t.decide(false, stepName, "", "no allow rule names it: the resolver does not answer it")
	}
	return t.mend("%s", t.add())
}

// permitted is the verdict on a name that a rule permits.
func (t *trial) permitted(rule, why string) sandbox.NetworkVerdict {
	gated := t.link.policy.HTTP != nil && t.v.Protocol != sandbox.ProtocolICMP && (t.v.Port == portHTTP || t.v.Port == portHTTPS)
	switch {
	case gated && t.v.Protocol == sandbox.ProtocolUDP:
		return t.decide(false, stepGate, "", "web traffic goes through the daemon's gate, which speaks TCP and not QUIC")
	case gated && t.services.Gate == 0:
		return t.decide(false, stepGate, "", "web traffic goes through the daemon's gate, which does not run")
	case gated && t.v.Port == portHTTP && len(t.link.policy.HTTP.Rules) > 0:
		t.pass(stepAllow, "%s", why)
		return t.decide(true, stepGate, rule, "%s; the gate then judges each request by the policy's http rules", why)
	case (t.v.Port == portDNS || t.v.Port == portDoT) && t.v.Protocol != sandbox.ProtocolICMP:
		return t.decide(false, stepDNS, "", "names are asked of the daemon's resolver, %s, and of nobody else", t.table.gateway)
	}
	return t.decide(true, stepAllow, rule, "%s; of its addresses those that are public, or admitted and named, and not denied", why)
}

// isPeerName reports whether a name is another sandbox's in its group.
func isPeerName(l linkPlan, name, group string) bool {
	for _, said := range []string{group, sandbox.Unmarked(group)} {
		name = strings.TrimSuffix(name, "."+said+".internal")
	}
	return name == string(l.id) || l.title != "" && name == l.title
}

// The reasons of refusals that no policy names.
const (
	whyForged  = "forged"  // not from the sandbox's own address
	whyUnasked = "unasked" // nothing that the sandbox began
	whyLimit   = "limit"   // beyond a limit of the policy
	whyState   = "state"   // of no flow that there is
)

// whyRefused is the step by which a packet of a sandbox was refused, as far as
// that can be told afterwards: without asking the kernel for pins, which only
// permit.
func (s scene) whyRefused(l linkPlan, p loggedPacket) string {
	if p.version == 4 && p.src != l.addr {
		return whyForged
	}
	v := s.explain(l, flow{p.dst, p.protocol, p.dstPort})
	switch {
	case !v.Allowed:
		return v.Step
	case l.policy.Limits != (sandbox.NetworkLimits{}):
		return whyLimit
	}
	return whyState
}
