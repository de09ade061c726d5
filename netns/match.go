package netns

import (
	"fmt"
	"strings"

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
	rtnUnicast    = 1 // RTN_UNICAST: the route type of an address that is not the host's
	dirReply      = 1 // IP_CT_DIR_REPLY
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
	notUnicast = part{"fib daddr type != unicast", []expr.Any{
		&expr.Fib{Register: reg1, FlagDADDR: true, ResultADDRTYPE: true},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg1, Data: binaryutil.NativeEndian.PutUint32(rtnUnicast)},
	}}
	reply = part{"ct direction reply", []expr.Any{
		&expr.Ct{Key: expr.CtKeyDIRECTION, Register: reg1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: []byte{dirReply}},
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

// overFlows matches once the link has more than n tracked connections.
func overFlows(n uint32) part {
	return part{fmt.Sprintf("add @%s { iifname ct count over %d }", setFlows, n), []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg1},
		&expr.Dynset{SrcRegKey: reg1, SetName: setFlows, Operation: unix.NFT_DYNSET_OP_ADD, Exprs: []expr.Any{
			&expr.Connlimit{Count: n, Flags: expr.NFT_CONNLIMIT_F_INV},
		}},
	}}
}

// jump leaves for another chain and does not come back.
func jump(chain string) part {
	return part{"goto " + chain, []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}}}
}

func verdict(text string, kind expr.VerdictKind) part {
	return part{text, []expr.Any{&expr.Verdict{Kind: kind}}}
}
