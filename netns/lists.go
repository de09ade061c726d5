package netns

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// This file is the plan of lists of addresses and ports in the table.
//
// Links have no sets of their own: nf_tables finds a set by walking all there
// are, and looks through every chain once a verdict leads to one more, so that
// a new sandbox would wait for what all others have. They do not all share one
// set either: of a set of intervals the kernel makes a copy for each change. So
// links share shelves, each of which has its sets and chains from the start.
// Elements of one link and policy begin with its name and mark.
//
// What a rule means is a box: a range of addresses, of some protocols and
// ports. A set of intervals orders its keys byte by byte, so that an interval
// fits a range in the last field only. So a list is in two sets: one gives the
// place, which stands for all addresses with the same ports, the other has the
// ports of each place.

// shelves is how many there are: a thousand sandboxes put eight on each.
const shelves = 128

// The two lists of a link, as they stand in keys.
const (
	listDeny  = 1
	listAllow = 2
)

// listKey is the type of keys that are compared byte by byte, of so many words
// of four bytes. It is a number to nft, which cannot show such intervals of
// concatenated fields.
func listKey(words uint32) nftables.SetDatatype {
	t := nftables.TypeInteger
	t.Bytes = 4 * words
	return t
}

const wordsOfLink = unix.IFNAMSIZ/4 + 1 // a link's name, and its policy's mark

func placesOn(shelf int) string { return fmt.Sprintf("places-%02x", shelf) }
func portsOn(shelf int) string  { return fmt.Sprintf("ports-%02x", shelf) }

// shelf is where a link's lists are.
func (l linkPlan) shelf() int { return int(number(l.addr) % shelves) }

// listSets are the sets of all lists, and of pins.
func listSets() []setPlan {
	out := []setPlan{
		{name: setShelves, what: "links with lists, and where those are", key: nftables.TypeIFName, value: nftables.TypeMark, lasting: true},
		{name: setClasses, what: "ranges of ports that names are allowed on: link, policy, protocol, port", key: listKey(wordsOfLink + 2), value: nftables.TypeInetService, interval: true, lasting: true, list: true},
		{name: setPins, what: "what allowed names have now", key: typePin, concat: true, timeout: true, lasting: true, pins: true},
		{name: setPast, what: "what they had before a change of policy, for connections that exist", key: typePin, concat: true, timeout: true, lasting: true, pins: true},
	}
	for i := range shelves {
		out = append(
			out,
			setPlan{name: placesOn(i), what: "places of addresses: link, policy, list, address", key: listKey(wordsOfLink + 2), value: nftables.TypeMark, interval: true, lasting: true, list: true, twin: i > 0},
			setPlan{name: portsOn(i), what: "what lists mean there: link, policy, place, protocol, port", key: listKey(wordsOfLink + 3), interval: true, lasting: true, list: true, twin: i > 0},
		)
	}
	for _, d := range []direction{outward, inward} {
		s := setPlan{name: d.shelves, what: d.what, key: nftables.TypeMark, value: nftables.TypeVerdict, lead: true}
		for i := range shelves {
			s.elements = append(s.elements, nftables.SetElement{
				Key: []byte(markBytes(uint32(i))), VerdictData: &expr.Verdict{Kind: expr.VerdictJump, Chain: d.chain(i)},
			})
		}
		out = append(out, s)
	}
	return out
}

// direction is on which side of a packet's way the sandbox is whose lists count.
type direction struct {
	key           expr.MetaKey
	word          string
	shelves, what string
}

var (
	outward = direction{expr.MetaKeyIIFNAME, "iifname", setShelvesOut, "the lists on each shelf, for what a sandbox sends"}
	inward  = direction{expr.MetaKeyOIFNAME, "oifname", setShelvesIn, "the same for what it receives"}
)

func (d direction) chain(shelf int) string {
	return fmt.Sprintf("%s-%02x", map[expr.MetaKey]string{expr.MetaKeyIIFNAME: "sends", expr.MetaKeyOIFNAME: "receives"}[d.key], shelf)
}

// listChains are the chains that look into the lists.
func listChains() []chainPlan {
	var out []chainPlan
	for i := range shelves {
		for _, d := range []direction{outward, inward} {
			out = append(out, chainPlan{name: d.chain(i), what: "what a list means, or whatever follows", back: true, twin: i > 0, rules: []rulePlan{
				rule(d.listed(i, listDeny), jump("prohibited")),
				rule(d.listed(i, listAllow), jump("passed")),
			}})
		}
	}
	return out
}

// listed parts elements of lists from others. Those of a new policy are there
// before it is in force, and those of the old one as long: the kernel shows a
// change of a set of intervals later than one of the map that has the mark, and
// a packet on its way may have read that before.
func listed(all []element) (lists, others []element) {
	for _, e := range all {
		if e.set == setClasses || strings.HasPrefix(e.set, "places-") || strings.HasPrefix(e.set, "ports-") {
			lists = append(lists, e)
		} else {
			others = append(others, e)
		}
	}
	return lists, others
}

// prefix begins the keys of the link's lists and pins under its present policy.
func (l linkPlan) prefix() string { return string(linkKey(l.name)) + markBytes(l.generation) }

// linkOfMark is the key of a link's mark, if e is its element.
func linkOfMark(e element) (link string, ok bool) {
	return linkOf([]byte(e.key)), e.set == setGenerations
}

// lists returns the elements of the link's lists.
func (l linkPlan) lists() []element {
	if !l.connected {
		return nil
	}
	out := slices.Concat(l.list(listDeny, l.denied), l.list(listAllow, l.allowed))
	for i, c := range l.pins.classes {
		first := serviceKey(c.proto, c.ports.First)
		out = append(out, interval(setClasses, l.prefix(), first, serviceKey(c.proto, c.ports.Last), portBytes(uint16(i+1)))...)
	}
	return out
}

// list returns the elements of blocks, which come in the order of addresses.
func (l linkPlan) list(list uint32, blocks []block) []element {
	var out, what []element
	prefix, at, ports := l.prefix(), placesOn(l.shelf()), portsOn(l.shelf())
	places := map[string]uint32{} // by what is there
	for first := 0; first < len(blocks); {
		here := blocks[first].addrs
		shape, end := "", first
		for ; end < len(blocks) && blocks[end].addrs == here; end++ {
			shape += fmt.Sprint(blocks[end].protos, blocks[end].ports)
		}
		place, known := places[shape]
		if !known {
			place = uint32(len(places)+1)<<8 | list
			places[shape] = place
			for _, b := range blocks[first:end] {
				from, to := serviceKey(b.protos[0], b.ports.First), serviceKey(b.protos[1], b.ports.Last)
				if b.ports == everyPort { // of these protocols whatever is in place of a port
					copy(from[4:], []byte{0, 0, 0, 0})
					copy(to[1:], []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
				}
				what = append(what, interval(ports, prefix+markBytes(place), from, to, "")...)
			}
		}
		out = append(out, interval(at, prefix+markBytes(list), binary.BigEndian.AppendUint32(nil, here.first), binary.BigEndian.AppendUint32(nil, here.last), markBytes(place))...)
		first = end
	}
	return append(out, what...)
}

// interval returns the two elements of the keys from first to last.
func interval(set, prefix string, first, last []byte, value string) []element {
	return []element{
		{set: set, key: prefix + string(first), value: value},
		{set: set, key: successor(prefix + string(last)), end: true},
	}
}

// successor is the next key of the same length. There is one: no link's name
// is all ones.
func successor(key string) string {
	b := []byte(key)
	for i := len(b) - 1; i >= 0; i-- {
		if b[i]++; b[i] != 0 {
			break
		}
	}
	return string(b)
}

func portBytes(port uint16) string { return string([]byte{byte(port >> 8), byte(port)}) }

// byPolicy loads a link's name and its policy's mark, to which the rest of a
// key in the lists follows from regWord5 on.
func (d direction) byPolicy() []expr.Any {
	return append([]expr.Any{
		&expr.Meta{Key: d.key, Register: reg1},
		&expr.Lookup{SourceRegister: reg1, DestRegister: regWord4, IsDestRegSet: true, SetName: setGenerations},
	}, sized(regWord4)...)
}

// sized gives what is in a word the length of a word, for who lists the rule:
// nft 1.0.6 (Debian 12) knows none of what a map has for a key, or of an address
// of a flow, and it aborts on a concatenation of such a member, so that nobody
// could list or save the host's firewall. The packet's mark has a length. It is
// lent for a moment, in which nothing else can see the packet.
func sized(word uint32) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: regWord15},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: word},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: word},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: regWord15},
	}
}

// towardAt loads what a flow was begun with into a register.
func towardAt(word uint32) []expr.Any {
	// The address takes four words, and fills one.
	return append([]expr.Any{&expr.Ct{Key: expr.CtKeyDST, Direction: dirOriginal, Register: word}}, sized(word)...)
}

func (d direction) policyText() string {
	return fmt.Sprintf("%s . %[1]s map @%s", d.word, setGenerations)
}

// shelf leads to the chain of a link's lists, if it has any, and back.
func (d direction) shelf() part {
	return part{fmt.Sprintf("%s map @%s vmap @%s", d.word, setShelves, d.shelves), slices.Concat(
		[]expr.Any{
			&expr.Meta{Key: d.key, Register: reg1},
			&expr.Lookup{SourceRegister: reg1, DestRegister: reg1, IsDestRegSet: true, SetName: setShelves},
		},
		sized(reg1),
		[]expr.Any{&expr.Lookup{SourceRegister: reg1, DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true, SetName: d.shelves}},
	)}
}

// listed matches what a list of the link's policy means.
func (d direction) listed(shelf int, list uint32) part {
	return part{
		fmt.Sprintf("(%s . %d . ct original ip daddr) map @%s . ct protocol . ct original proto-dst @%s", d.policyText(), list, placesOn(shelf), portsOn(shelf)),
		slices.Concat(
			d.byPolicy(),
			[]expr.Any{&expr.Immediate{Register: regWord5, Data: []byte(markBytes(list))}},
			towardAt(regWord6),
			[]expr.Any{&expr.Lookup{SourceRegister: reg1, DestRegister: regWord5, IsDestRegSet: true, SetName: placesOn(shelf)}},
			sized(regWord5),
			[]expr.Any{
				&expr.Ct{Key: expr.CtKeyPROTOCOL, Register: regWord6},
				&expr.Ct{Key: expr.CtKeyPROTODST, Direction: dirOriginal, Register: regWord7},
				&expr.Lookup{SourceRegister: reg1, SetName: portsOn(shelf)},
			},
		),
	}
}

// pinned permits what is pinned in a set, on conditions: each kind of pin has
// another key.
func (d direction) pinned(set string, when ...part) []rulePlan {
	proto, port := &expr.Ct{Key: expr.CtKeyPROTOCOL, Register: regWord5}, &expr.Ct{Key: expr.CtKeyPROTODST, Direction: dirOriginal, Register: regWord6}
	number := func(register uint32, b ...byte) expr.Any {
		return &expr.Immediate{Register: register, Data: append(b, 0, 0, 0)}
	}
	class := &expr.Lookup{SourceRegister: reg1, DestRegister: regWord6, IsDestRegSet: true, SetName: setClasses}
	var out []rulePlan
	for _, kind := range []struct {
		text string
		load []expr.Any
	}{
		{"ct protocol . ct original proto-dst", []expr.Any{proto, port}},
		{"ct protocol . 0", []expr.Any{proto, number(regWord6, 0)}},
		{"0 . 0", []expr.Any{number(regWord5, 0), number(regWord6, 0)}},
		{fmt.Sprintf("%d . ct protocol . ct original proto-dst map @%s", pinClass, setClasses), slices.Concat([]expr.Any{proto, port, class}, sized(regWord6), []expr.Any{number(regWord5, pinClass)})},
	} {
		exprs := slices.Concat(d.byPolicy(), kind.load, towardAt(regWord7), []expr.Any{&expr.Lookup{SourceRegister: reg1, SetName: set}})
		text := fmt.Sprintf("%s . %s . ct original ip daddr @%s", d.policyText(), kind.text, set)
		out = append(out, rule(append(when, part{text, exprs}, jump("passed"))...))
	}
	return out
}

// pinKey is a pin's key in the set, of its key in the books: an address, and
// what belongs to it.
func pinKey(prefix, key string) []byte { return []byte(prefix + key[4:] + key[:4]) }

// splitPin is the reverse.
func splitPin(key []byte) (prefix, pin string, ok bool) {
	const head, size = 4 * wordsOfLink, 4 * (wordsOfLink + 3)
	if len(key) != size {
		return "", "", false
	}
	return string(key[:head]), string(key[size-4:]) + string(key[head:size-4]), true
}
