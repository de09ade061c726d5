package netns

import (
	"encoding/binary"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// bytesOf reads the byte counters of every element of a set, by link.
func (t *table) bytesOf(set string) (map[string]uint64, error) {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETSETELEM, unix.NLM_F_DUMP)
	req.Sockets = t.sock
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.NFPROTO_INET, Version: unix.NFNETLINK_V0})
	req.AddData(nl.NewRtAttr(unix.NFTA_SET_ELEM_LIST_TABLE, nl.ZeroTerminated(tableName)))
	req.AddData(nl.NewRtAttr(unix.NFTA_SET_ELEM_LIST_SET, nl.ZeroTerminated(set)))
	msgs, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return nil, fmt.Errorf("reading the counters of set %s: %w", set, err)
	}
	out := map[string]uint64{}
	for _, m := range msgs {
		if len(m) < nl.SizeofNfgenmsg {
			continue
		}
		list, _ := attribute(m[nl.SizeofNfgenmsg:], unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		eachAttribute(list, unix.NFTA_LIST_ELEM, func(e []byte) {
			key, _ := attribute(e, unix.NFTA_SET_ELEM_KEY, unix.NFTA_DATA_VALUE)
			n, _ := attribute(e, nftaSetElemExpr, unix.NFTA_EXPR_DATA, unix.NFTA_COUNTER_BYTES)
			if link := linkOf(key); link != "" && len(n) == 8 {
				out[link] = binary.BigEndian.Uint64(n)
			}
		})
	}
	return out, nil
}

// eachAttribute calls f with every attribute of a kind that lies side by side
// in b.
func eachAttribute(b []byte, kind uint16, f func([]byte)) {
	const header = unix.SizeofNlAttr
	for len(b) >= header {
		size := int(binary.NativeEndian.Uint16(b))
		if size < header || size > len(b) {
			return
		}
		if binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER) == kind {
			f(b[header:size])
		}
		b = b[min((size+3)&^3, len(b)):]
	}
}
