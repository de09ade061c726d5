//go:build root

package integration

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// What follows says anew, without a look at how the daemon does it, what a
// policy permits. The two are compared.

// oracleRule is a destination as the tests write it.
type oracleRule struct {
	prefix      netip.Prefix
	name        string // or a name
	first, last uint16 // ports; 0: all
	proto       string
}

func (r oracleRule) String() string {
	var b strings.Builder
	switch {
	case r.name != "":
		b.WriteString(r.name)
	case r.prefix.IsSingleIP():
		b.WriteString(r.prefix.Addr().String())
	default:
		b.WriteString(r.prefix.String())
	}
	if r.first != 0 {
		fmt.Fprintf(&b, ":%d", r.first)
		if r.last != r.first {
			fmt.Fprintf(&b, "-%d", r.last)
		}
	}
	if r.proto != "" {
		b.WriteString("/" + r.proto)
	}
	return b.String()
}

// permitsPort is about everything but the address.
func (r oracleRule) permitsPort(proto string, port uint16) bool {
	if r.first == 0 {
		return r.proto == "" || r.proto == proto
	}
	ported := proto == "tcp" || proto == "udp"
	return ported && (r.proto == "" || r.proto == proto) && r.first <= port && port <= r.last
}

// oraclePolicy is a policy and what the world makes of it.
type oraclePolicy struct {
	mode        sandbox.NetworkMode
	allow, deny []oracleRule
	names       map[string][]netip.Addr // that the sandbox has asked for
}

// policy is the same for the daemon.
func (p oraclePolicy) policy() sandbox.NetworkPolicy {
	texts := func(rules []oracleRule) (out []string) {
		for _, r := range rules {
			out = append(out, r.String())
		}
		return out
	}
	return sandbox.NetworkPolicy{Mode: p.mode, Allow: texts(p.allow), Deny: texts(p.deny)}
}

func (p oraclePolicy) String() string {
	return fmt.Sprintf("%s allow %v deny %v", p.mode, p.allow, p.deny)
}

// reserved are the ranges that are not the public internet (RFC 6890 and the
// registry it began).
var reserved = prefixes("0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24 " +
	"192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4")

var (
	configDenied   = prefixes("20.205.243.0/24")
	configAdmitted = prefixes("10.77.0.0/24")
)

func prefixes(list string) (out []netip.Prefix) {
	for word := range strings.FieldsSeq(list) {
		out = append(out, netip.MustParsePrefix(word))
	}
	return out
}

func within(a netip.Addr, list []netip.Prefix) bool {
	return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
}

// permits judges a new flow.
func (p oraclePolicy) permits(dst netip.Addr, proto string, port uint16) bool {
	named := func(rules []oracleRule) bool {
		return slices.ContainsFunc(rules, func(r oracleRule) bool {
			if !r.permitsPort(proto, port) {
				return false
			}
			if r.name != "" {
				return slices.Contains(p.names[r.name], dst)
			}
			return r.prefix.Contains(dst)
		})
	}
	private := within(dst, reserved)
	switch {
	case p.mode == sandbox.NetworkOff, !dst.Is4(), slices.Contains(hostAddrs, dst.String()):
		return false
	case named(p.deny), within(dst, configDenied):
		return false
	case private && !within(dst, configAdmitted):
		return false
	case (proto == "tcp" || proto == "udp") && (port == 53 || port == 853):
		return false
	case named(p.allow):
		return true
	}
	return p.mode == sandbox.NetworkOpen && !private
}

// hopeless tells of an allow rule that permits nothing under any policy: the
// daemon must refuse it instead of keeping it quietly.
func (r oracleRule) hopeless() bool {
	inside := func(list []netip.Prefix) bool {
		return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Bits() <= r.prefix.Bits() && p.Contains(r.prefix.Addr()) })
	}
	admitted := slices.ContainsFunc(configAdmitted, r.prefix.Overlaps)
	return r.prefix.IsValid() && (inside(configDenied) || inside(reserved) && !admitted)
}

// protoName is how rules call a protocol.
func protoName(n uint8) string {
	switch n {
	case unix.IPPROTO_TCP:
		return "tcp"
	case unix.IPPROTO_UDP:
		return "udp"
	case unix.IPPROTO_ICMP:
		return "icmp"
	}
	return "other"
}

// permitsArrival judges a packet at the far end of a flow.
func (p oraclePolicy) permitsArrival(a arrival, all map[arrival]sighting) bool {
	if a.about != 0 && a.remote.Addr() == a.dst && p.permits(a.dst, protoName(a.about), a.remote.Port()) {
		return true // an error about a permitted flow
	}
	if a.port == 0 && a.proto != unix.IPPROTO_ICMP {
		// A later fragment, of something whose first one is judged by itself.
		for first := range all {
			if first.dst == a.dst && first.proto == a.proto && first.port != 0 && p.permits(a.dst, protoName(a.proto), first.port) {
				return true
			}
		}
	}
	return p.permits(a.dst, protoName(a.proto), a.port)
}

// somePolicy makes up a policy; the first few are always the same.
func somePolicy(r *rand.Rand, i int) oraclePolicy {
	everything := oracleRule{prefix: netip.MustParsePrefix("0.0.0.0/0")}
	one := oracleRule{prefix: netip.PrefixFrom(addr(publicHosts[0]), 32)}
	switch i {
	case 0:
		return oraclePolicy{mode: sandbox.NetworkOpen}
	case 1:
		return oraclePolicy{mode: sandbox.NetworkAllow}
	case 2:
		return oraclePolicy{mode: sandbox.NetworkAllow, allow: []oracleRule{everything}}
	case 3:
		return oraclePolicy{mode: sandbox.NetworkOff}
	case 4:
		return oraclePolicy{mode: sandbox.NetworkOpen, deny: []oracleRule{everything}}
	case 5:
		return oraclePolicy{mode: sandbox.NetworkAllow, allow: []oracleRule{one}, deny: []oracleRule{{prefix: one.prefix, first: 80, last: 80}}}
	}
	p := oraclePolicy{mode: sandbox.NetworkAllow}
	if r.IntN(3) == 0 {
		p.mode = sandbox.NetworkOpen
	}
	for range r.IntN(9) {
		p.allow = append(p.allow, someRule(r))
	}
	for range r.IntN(4) {
		p.deny = append(p.deny, someRule(r))
	}
	return p
}

// somePorts are ports that rules and attempts have in common.
var somePorts = []uint16{22, 53, 80, 443, 853, 5000, 5001, 5353, 8080, 8443, 65535, 1}

func someRule(r *rand.Rand) oracleRule {
	a := addr(someHost(r))
	bits := []int{32, 32, 32, 31, 24, 16, 8}[r.IntN(7)]
	rule := oracleRule{prefix: netip.PrefixFrom(a, bits).Masked()}
	switch r.IntN(4) {
	case 0:
	case 1:
		rule.first = pick(r, somePorts)
		rule.last = rule.first
	case 2:
		rule.first = pick(r, somePorts)
		rule.last = max(rule.first, pick(r, somePorts))
	case 3:
		rule.first, rule.last = uint16(1+r.IntN(30000)), uint16(30001+r.IntN(35535))
	}
	protos := []string{"", "tcp", "udp"}
	if rule.first == 0 {
		protos = append(protos, "icmp")
	}
	rule.proto = pick(r, protos)
	return rule
}

// someHost is an address of any kind, public ones more often.
func someHost(r *rand.Rand) string {
	switch r.IntN(9) {
	case 0:
		return pick(r, privateHosts)
	case 1:
		return pick(r, deniedHosts)
	case 2:
		return pick(r, admittedHosts)
	case 3:
		return pick(r, hostAddrs)
	}
	return pick(r, publicHosts)
}

// target makes up where to go: often where a rule leads, or just beside it.
func (p oraclePolicy) target(r *rand.Rand, extra ...netip.Addr) (netip.Addr, uint16) {
	port := pick(r, somePorts)
	rules := slices.Concat(p.allow, p.allow, p.deny)
	if len(rules) == 0 || r.IntN(2) == 0 {
		if len(extra) > 0 && r.IntN(12) == 0 {
			return pick(r, extra), port
		}
		return addr(someHost(r)), port
	}
	rule := pick(r, rules)
	dst := rule.prefix.Addr()
	if !rule.prefix.IsSingleIP() {
		for range 20 { // a host of the world that the rule covers
			if a := addr(someHost(r)); rule.prefix.Contains(a) {
				dst = a
				break
			}
		}
	}
	if rule.first != 0 {
		port = pick(r, []uint16{rule.first, rule.last, rule.first + (rule.last-rule.first)/2, rule.first - 1, rule.last + 1})
	}
	return dst, max(port, 1)
}
