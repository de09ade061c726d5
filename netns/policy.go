package netns

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// This file turns the rules of a policy into what the kernel can look up: the
// addresses of prefixes into blocks that do not overlap, the ports of names
// into keys under which an address is pinned.

// Bounds of what one policy may become in the kernel.
const (
	maxBlocks     = 4096
	maxPortRules  = 128
	enumeratePort = 16 // a range of at most so many ports is pinned port by port
)

// pinClass in place of a protocol begins the key of a pin whose ports are a
// range: what follows is the number of the range. (255 is reserved by IANA.)
const pinClass = 255

// block is the flows to some addresses, of some protocols, to some ports. For
// protocols without ports the kernel has other numbers there.
type block struct {
	addrs  addrRange
	protos [2]byte
	ports  sandbox.PortRange
}

var (
	everyProto = [2]byte{0, 255}
	everyPort  = sandbox.PortRange{First: 0, Last: 65535}
)

func protocolNumber(name string) byte {
	switch name {
	case sandbox.ProtocolTCP:
		return unix.IPPROTO_TCP
	case sandbox.ProtocolUDP:
		return unix.IPPROTO_UDP
	case sandbox.ProtocolICMP:
		return unix.IPPROTO_ICMP
	}
	return 0
}

// protocols lists those a rule with ports means.
func protocols(r sandbox.NetworkRule) []byte {
	if n := protocolNumber(r.Protocol); n != 0 {
		return []byte{n}
	}
	return []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP}
}

// shapes returns what a rule permits at its addresses.
func shapes(r sandbox.NetworkRule) []block {
	if len(r.Ports) == 0 {
		protos := everyProto
		if n := protocolNumber(r.Protocol); n != 0 {
			protos = [2]byte{n, n}
		}
		return []block{{protos: protos, ports: everyPort}}
	}
	var out []block
	for _, proto := range protocols(r) {
		for _, p := range r.Ports {
			out = append(out, block{protos: [2]byte{proto, proto}, ports: p})
		}
	}
	return out
}

// blocks returns the flows that the rules with prefixes mean, so that no two
// blocks overlap: a set of intervals refuses that.
func blocks(rules []sandbox.NetworkRule) ([]block, error) {
	var edges []uint64
	for _, r := range rules {
		if r.Domain == "" {
			a := rangeOf(r.Prefix)
			edges = append(edges, uint64(a.first), uint64(a.last)+1)
		}
	}
	slices.Sort(edges)
	edges = slices.Compact(edges)
	var out, last []block
	for i := range max(len(edges)-1, 0) {
		here := addrRange{uint32(edges[i]), uint32(edges[i+1] - 1)}
		now := blocksAt(rules, here)
		if n := len(out); n > 0 && len(now) > 0 && sameShapes(last, now) && out[n-1].addrs.last+1 == here.first {
			for j := range last { // the same goes on
				out[n-len(last)+j].addrs.last = here.last
			}
			continue
		}
		if out = append(out, now...); len(out) > maxBlocks {
			return nil, sandbox.Errorf(sandbox.ErrTooLarge, "too_many_rules", "the prefixes and ports of a policy's rules cut each other into more than %d pieces: use fewer or simpler ones", maxBlocks)
		}
		last = now
	}
	return out, nil
}

func sameShapes(a, b []block) bool {
	return slices.EqualFunc(a, b, func(x, y block) bool { return x.protos == y.protos && x.ports == y.ports })
}

// blocksAt returns what the rules permit at addresses that each of them means
// all or none of.
func blocksAt(rules []sandbox.NetworkRule, here addrRange) []block {
	ports := map[byte][]sandbox.PortRange{}
	for _, r := range rules {
		if r.Domain != "" || !rangeOf(r.Prefix).contains(addrOf(here.first)) {
			continue
		}
		for _, s := range shapes(r) {
			if s.protos == everyProto {
				return []block{{here, everyProto, everyPort}}
			}
			ports[s.protos[0]] = append(ports[s.protos[0]], s.ports)
		}
	}
	var out []block
	for _, proto := range []byte{unix.IPPROTO_ICMP, unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		for _, p := range mergePorts(ports[proto]) {
			out = append(out, block{here, [2]byte{proto, proto}, p})
		}
	}
	return out
}

func mergePorts(all []sandbox.PortRange) []sandbox.PortRange {
	all = slices.Clone(all)
	slices.SortFunc(all, func(a, b sandbox.PortRange) int { return cmp.Compare(a.First, b.First) })
	var out []sandbox.PortRange
	for _, p := range all {
		if n := len(out); n > 0 && int(p.First) <= int(out[n-1].Last)+1 {
			out[n-1].Last = max(out[n-1].Last, p.Last)
			continue
		}
		out = append(out, p)
	}
	return out
}

// portClass is a range of ports that names are allowed on.
type portClass struct {
	proto byte
	ports sandbox.PortRange
}

func (c portClass) within(all portClass) bool {
	return c.proto == all.proto && all.ports.First <= c.ports.First && c.ports.Last <= all.ports.Last
}

// pinPlan says how pinned addresses are looked up: only what the policy needs.
type pinPlan struct {
	single   bool // of single ports
	protocol bool // of a protocol
	all      bool
	classes  []portClass // of ranges; the first has number 1
}

func (p pinPlan) empty() bool { return !p.single && !p.protocol && !p.all && len(p.classes) == 0 }

// planPins plans for the rules with names.
func planPins(rules []sandbox.NetworkRule) (pinPlan, error) {
	var p pinPlan
	for _, r := range rules {
		if r.Domain == "" {
			continue
		}
		for _, s := range shapes(r) {
			switch {
			case s.protos == everyProto:
				p.all = true
			case s.ports == everyPort:
				p.protocol = true
			case s.ports.Last-s.ports.First < enumeratePort:
				p.single = true
			default:
				c := portClass{s.protos[0], s.ports}
				if !slices.Contains(p.classes, c) {
					p.classes = append(p.classes, c)
				}
			}
		}
	}
	if len(p.classes) > maxPortRules {
		return p, sandbox.Errorf(sandbox.ErrTooLarge, "too_many_rules", "%d ranges of ports of names, each protocol counted: at most %d", len(p.classes), maxPortRules)
	}
	p.classes = cutClasses(p.classes)
	return p, nil
}

// cutClasses cuts ranges where others begin or end, so that no two overlap.
func cutClasses(all []portClass) []portClass {
	var out []portClass
	for _, proto := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		var edges []int // where a range begins, or the one before has ended
		for _, c := range all {
			if c.proto == proto {
				edges = append(edges, int(c.ports.First), int(c.ports.Last)+1)
			}
		}
		slices.Sort(edges)
		edges = slices.Compact(edges)
		for i := range max(len(edges)-1, 0) {
			cut := portClass{proto, sandbox.PortRange{First: uint16(edges[i]), Last: uint16(edges[i+1] - 1)}}
			if slices.ContainsFunc(all, cut.within) {
				out = append(out, cut)
			}
		}
	}
	return out
}

// pinTail is the key of a pin without its address.
type pinTail struct {
	proto byte
	port  uint16
}

// tails returns what is pinned for a name that some rules match.
func (p pinPlan) tails(rules []sandbox.NetworkRule, name string) []pinTail {
	var out []pinTail
	add := func(t pinTail) {
		if !slices.Contains(out, t) {
			out = append(out, t)
		}
	}
	for _, r := range rules {
		if !r.MatchesName(name) {
			continue
		}
		for _, s := range shapes(r) {
			switch {
			case s.protos == everyProto:
				add(pinTail{})
			case s.ports == everyPort:
				add(pinTail{s.protos[0], 0})
			case s.ports.Last-s.ports.First < enumeratePort:
				for port := int(s.ports.First); port <= int(s.ports.Last); port++ {
					add(pinTail{s.protos[0], uint16(port)})
				}
			default:
				for i, c := range p.classes {
					if c.within(portClass{s.protos[0], s.ports}) {
						add(pinTail{pinClass, uint16(i + 1)})
					}
				}
			}
		}
	}
	return out
}

func (t pinTail) key(addr netip.Addr) []byte {
	a := addr.As4()
	return append(a[:], t.proto, 0, 0, 0, byte(t.port>>8), byte(t.port), 0, 0)
}

// generation is the mark of flows that a policy granted, on this host.
func generation(p sandbox.NetworkPolicy, salt string) (uint32, error) {
	text, err := json.Marshal(p)
	if err != nil {
		return 0, err
	}
	mark := markOf(salt+"\x00"+string(text)) &^ markUnpaced
	if p.Limits.PacketsPerSecond == 0 {
		mark |= markUnpaced
	}
	return max(mark, 1), nil
}

// markUnpaced is in the marks of policies that do not limit packets: those of a
// flow that such a policy granted need no look at the link's limits.
const markUnpaced = 1 << 31

// markOf is never 0, which is the mark of every flow nobody has marked.
func markOf(text string) uint32 {
	sum := sha256.Sum256([]byte(text))
	return max(binary.BigEndian.Uint32(sum[:]), 1)
}
