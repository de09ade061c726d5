package netns

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// part is a piece of a rule: a match, a load or a verdict.
type part struct {
	text  string
	exprs []expr.Any
}

func rule(parts ...part) rulePlan {
	var r rulePlan
	texts := make([]string, len(parts))
	for i, p := range parts {
		texts[i] = p.text
		r.exprs = append(r.exprs, p.exprs...)
	}
	r.text = strings.Join(texts, " ")
	return r
}

// Registers: 1 holds 16 bytes (an interface name); what is concatenated to it
// follows in 2. Beneath them lie sixteen 4-byte registers from 8 on, four to
// each wide one.
const (
	reg1     = unix.NFT_REG_1
	reg2     = unix.NFT_REG_2
	regWord0 = unix.NFT_REG32_00
	regWord1 = unix.NFT_REG32_01
	regWord2 = unix.NFT_REG32_02
	regWord4 = unix.NFT_REG32_04
	regWord5 = unix.NFT_REG32_05
	regWord6 = unix.NFT_REG32_06
	regWord7 = unix.NFT_REG32_07

	regWord15 = unix.NFT_REG32_15 // the last
)

// Bits of ct state as nf_tables loads it (NF_CT_STATE_BIT and friends).
const (
	stateInvalid     = 1
	stateEstablished = 2
	stateRelated     = 4
	stateNew         = 8
	stateUntracked   = 64
)

const (
	rtnUnicast    = 1  // RTN_UNICAST: the route type of an address that is not the host's
	dirOriginal   = 0  // IP_CT_DIR_ORIGINAL
	dirReply      = 1  // IP_CT_DIR_REPLY
	statusDNAT    = 32 // IPS_DST_NAT
	flagSYN       = 2  // of a TCP header's flags, its byte 13
	icmpxProhibit = unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED
)

var (
	iifname        = part{"iifname", []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg1}}}
	oifname        = part{"oifname", []expr.Any{&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: reg1}}}
	fromSandbox    = byPrefix("iifname", expr.MetaKeyIIFNAME, expr.CmpOpEq)
	notFromSandbox = byPrefix("iifname", expr.MetaKeyIIFNAME, expr.CmpOpNeq)
	toSandbox      = byPrefix("oifname", expr.MetaKeyOIFNAME, expr.CmpOpEq)
	notToSandbox   = byPrefix("oifname", expr.MetaKeyOIFNAME, expr.CmpOpNeq)

	notIPv4 = part{"meta nfproto != ipv4", []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg1},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg1, Data: []byte{unix.NFPROTO_IPV4}},
	}}
	icmp = part{"meta l4proto icmp", []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: []byte{unix.IPPROTO_ICMP}},
	}}
	tcp = part{"meta l4proto tcp", []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: []byte{unix.IPPROTO_TCP}},
	}}
	source = part{"iifname . ip saddr", []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg1},
		&expr.Payload{DestRegister: reg2, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4},
	}}
	daddr = part{"ip daddr", []expr.Any{
		&expr.Payload{DestRegister: reg1, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4},
	}}
	// What a flow was begun with, from which end a packet of it comes: so both
	// directions, and errors about it, are judged alike, before any NAT of the
	// host's own. (The address takes sixteen bytes of register in an inet
	// table, and fills four: what is concatenated comes after it.)
	toward  = part{"ct original ip daddr", towardAt(reg1)}
	service = part{"ct protocol . ct original proto-dst", []expr.Any{
		&expr.Ct{Key: expr.CtKeyPROTOCOL, Register: regWord0},
		&expr.Ct{Key: expr.CtKeyPROTODST, Direction: dirOriginal, Register: regWord1},
	}}
	door = part{"ip daddr . meta l4proto . th dport", []expr.Any{
		&expr.Payload{DestRegister: regWord0, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: regWord1},
		&expr.Payload{DestRegister: regWord2, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
	}}
	inMark  = part{"iifname . ct mark", byMark(expr.MetaKeyIIFNAME)}
	outMark = part{"oifname . ct mark", byMark(expr.MetaKeyOIFNAME)}
	// The name that inMark or outMark has loaded: register 1 still holds it.
	stillIn  = part{text: "iifname"}
	stillOut = part{text: "oifname"}
	// A flow that was never granted. To the kernel one without an answer is new
	// with each of its packets.
	unmarked = part{"ct mark 0", []expr.Any{
		&expr.Ct{Key: expr.CtKeyMARK, Register: reg1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: make([]byte, 4)},
	}}
	unpaced = part{"ct mark & 0x80000000 != 0", []expr.Any{
		&expr.Ct{Key: expr.CtKeyMARK, Register: reg1},
		&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(markUnpaced), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg1, Data: make([]byte, 4)},
	}}
	fellow = part{"iifname map @" + setGroups + " . ip daddr", slices.Concat(
		[]expr.Any{
			&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg1},
			&expr.Lookup{SourceRegister: reg1, DestRegister: regWord4, IsDestRegSet: true, SetName: setGroups},
		},
		sized(regWord4),
		[]expr.Any{&expr.Payload{DestRegister: regWord5, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4}},
	)}
	markFlow = part{"ct mark set iifname map @" + setGenerations, []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg1},
		&expr.Lookup{SourceRegister: reg1, DestRegister: regWord4, IsDestRegSet: true, SetName: setGenerations},
		&expr.Ct{Key: expr.CtKeyMARK, Register: regWord4, SourceRegister: true},
	}}
	goingOn = part{"tcp flags & syn == 0", []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{DestRegister: reg1, Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1},
		&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: 1, Mask: []byte{flagSYN}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: []byte{0}},
	}}
	translated = part{"ct status dnat", []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATUS, Register: reg1},
		&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(statusDNAT), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg1, Data: make([]byte, 4)},
	}}
	notUnicast = part{"fib daddr type != unicast", []expr.Any{
		&expr.Fib{Register: reg1, FlagDADDR: true, ResultADDRTYPE: true},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg1, Data: binaryutil.NativeEndian.PutUint32(rtnUnicast)},
	}}
	reply = part{"ct direction reply", []expr.Any{
		&expr.Ct{Key: expr.CtKeyDIRECTION, Register: reg1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: []byte{dirReply}},
	}}

	original = part{"ct direction original", []expr.Any{
		&expr.Ct{Key: expr.CtKeyDIRECTION, Register: reg1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: []byte{dirOriginal}},
	}}
	notNew = part{"ct state != new", []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: reg1},
		&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(stateNew), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: make([]byte, 4)},
	}}

	accept     = verdict("accept", expr.VerdictAccept)
	drop       = verdict("drop", expr.VerdictDrop)
	ret        = verdict("return", expr.VerdictReturn)
	masquerade = part{"masquerade", []expr.Any{&expr.Masq{}}}
	reset      = part{"reject with tcp reset", []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}}}
	prohibit   = part{"reject with icmpx type admin-prohibited", []expr.Any{
		&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: icmpxProhibit},
	}}
)

// byPrefix compares only the first bytes of an interface name, which is how
// nft writes a wildcard.
func byPrefix(word string, key expr.MetaKey, op expr.CmpOp) part {
	not := ""
	if op == expr.CmpOpNeq {
		not = "!= "
	}
	return part{fmt.Sprintf("%s %s\"%s*\"", word, not, linkPrefix), []expr.Any{
		&expr.Meta{Key: key, Register: reg1},
		&expr.Cmp{Op: op, Register: reg1, Data: []byte(linkPrefix)},
	}}
}

func in(set string) part {
	return part{"@" + set, []expr.Any{&expr.Lookup{SourceRegister: reg1, SetName: set}}}
}

// at looks up what was loaded from another register on.
func at(register uint32, set string) part {
	return part{"@" + set, []expr.Any{&expr.Lookup{SourceRegister: register, SetName: set}}}
}

func notIn(set string) part {
	return part{"!= @" + set, []expr.Any{&expr.Lookup{SourceRegister: reg1, SetName: set, Invert: true}}}
}

func state(text string, bits uint32) part {
	return part{"ct state " + text, []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: reg1},
		&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg1, Data: make([]byte, 4)},
	}}
}

// vmap gives the verdict that a map has for what was loaded, if any.
func vmap(set string) part {
	return part{"vmap @" + set, []expr.Any{
		&expr.Lookup{SourceRegister: reg1, DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true, SetName: set},
	}}
}

func byMark(key expr.MetaKey) []expr.Any {
	return []expr.Any{&expr.Meta{Key: key, Register: reg1}, &expr.Ct{Key: expr.CtKeyMARK, Register: regWord4}}
}

// deliver sends new flows to the gateway's port that a map has for theirs.
func deliver(gateway netip.Addr, ports string) part {
	return part{fmt.Sprintf("dnat ip to %s : meta l4proto . th dport map @%s", gateway, ports), []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: regWord0},
		&expr.Payload{DestRegister: regWord1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Lookup{SourceRegister: regWord0, DestRegister: regWord5, IsDestRegSet: true, SetName: ports},
		&expr.Immediate{Register: regWord4, Data: gateway.AsSlice()},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: regWord4, RegProtoMin: regWord5, Specified: true},
	}}
}

func toAddr(a netip.Addr) part {
	return part{"ip daddr " + a.String(), []expr.Any{
		&expr.Payload{DestRegister: reg1, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: a.AsSlice()},
	}}
}

// overRate matches what exceeds n a second.
func overRate(n uint64, burst uint32) part {
	return part{fmt.Sprintf("limit rate over %d/second burst %d packets", n, burst), []expr.Any{
		&expr.Limit{Type: expr.LimitTypePkts, Rate: n, Unit: expr.LimitTimeSecond, Burst: burst, Over: true},
	}}
}

// overCount matches new flows once the rule has seen n that live.
func overCount(n uint32) part {
	return part{fmt.Sprintf("ct count over %d", n), []expr.Any{&expr.Connlimit{Count: n, Flags: expr.NFT_CONNLIMIT_F_INV}}}
}

// overFlows matches once the link has more than n tracked connections.
func overFlows(n uint32) part {
	return part{fmt.Sprintf("add @%s { iifname ct count over %d }", setFlows, n), []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg1},
		&expr.Dynset{SrcRegKey: reg1, SetName: setFlows, Operation: unix.NFT_DYNSET_OP_ADD, Exprs: []expr.Any{
			&expr.Connlimit{Count: n, Flags: expr.NFT_CONNLIMIT_F_INV},
		}},
	}}
}

// overAsks matches what the link sends beyond its allowance of questions.
var overAsks = allowance("iifname", expr.MetaKeyIIFNAME, setAsks, expr.Limit{Rate: asksPerSecond, Burst: asksBurst, Over: true})

// allowanceKept is how long a link's allowance is remembered after it was made.
const allowanceKept = time.Minute

// allowance matches packets within what each link may have in a second and at
// once or, with Over, beyond it. The set holds what it has left.
func allowance(word string, key expr.MetaKey, set string, l expr.Limit) part {
	over := ""
	if l.Over {
		over = "over "
	}
	l.Type, l.Unit = expr.LimitTypePkts, expr.LimitTimeSecond
	return part{
		fmt.Sprintf("add @%s { %s timeout 1m limit rate %s%d/second burst %d packets }", set, word, over, l.Rate, l.Burst),
		[]expr.Any{
			&expr.Meta{Key: key, Register: reg1},
			&expr.Dynset{SrcRegKey: reg1, SetName: set, Operation: unix.NFT_DYNSET_OP_ADD, Timeout: allowanceKept, Exprs: []expr.Any{&l}},
		},
	}
}

// jump leaves for another chain and does not come back.
func jump(chain string) part {
	return part{"goto " + chain, []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}}}
}

func verdict(text string, kind expr.VerdictKind) part {
	return part{text, []expr.Any{&expr.Verdict{Kind: kind}}}
}
