package netns

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
)

// addrRange is the IPv4 addresses from first to last, both included.
type addrRange struct{ first, last uint32 }

func (r addrRange) String() string { return fmt.Sprintf("%s-%s", addrOf(r.first), addrOf(r.last)) }

func (r addrRange) contains(a netip.Addr) bool {
	n := number(a)
	return r.first <= n && n <= r.last
}

func number(a netip.Addr) uint32 {
	b := a.As4()
	return binary.BigEndian.Uint32(b[:])
}

func addrOf(n uint32) netip.Addr {
	return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, n)))
}

func rangeOf(p netip.Prefix) addrRange {
	first := number(p.Masked().Addr())
	return addrRange{first, first | uint32(1<<(32-p.Bits())-1)}
}

func rangesOf(prefixes []netip.Prefix) []addrRange {
	out := make([]addrRange, len(prefixes))
	for i, p := range prefixes {
		out[i] = rangeOf(p)
	}
	return out
}

// merge returns the same addresses in order, in as few ranges as there can be:
// an interval set refuses overlaps.
func merge(ranges []addrRange) []addrRange {
	ranges = slices.Clone(ranges)
	slices.SortFunc(ranges, func(a, b addrRange) int { return cmp.Compare(a.first, b.first) })
	var out []addrRange
	for _, r := range ranges {
		if n := len(out); n > 0 && uint64(r.first) <= uint64(out[n-1].last)+1 {
			out[n-1].last = max(out[n-1].last, r.last)
			continue
		}
		out = append(out, r)
	}
	return out
}

// subtract returns the addresses of merged ranges that are in none of less.
func subtract(from, less []addrRange) []addrRange {
	for _, l := range less {
		var out []addrRange
		for _, r := range from {
			if l.last < r.first || r.last < l.first {
				out = append(out, r)
				continue
			}
			if r.first < l.first {
				out = append(out, addrRange{r.first, l.first - 1})
			}
			if l.last < r.last {
				out = append(out, addrRange{l.last + 1, r.last})
			}
		}
		from = out
	}
	return from
}

func anyContains(ranges []addrRange, a netip.Addr) bool {
	return slices.ContainsFunc(ranges, func(r addrRange) bool { return r.contains(a) })
}

// rangeElements turns merged ranges into the start and end marks of an
// interval set: [start, end) with the end marked, none where it would wrap
// around.
func rangeElements(ranges []addrRange) []nftables.SetElement {
	var out []nftables.SetElement
	if len(ranges) > 0 && ranges[0].first != 0 {
		out = append(out, nftables.SetElement{Key: make([]byte, 4), IntervalEnd: true})
	}
	for _, r := range ranges {
		out = append(out, nftables.SetElement{Key: binary.BigEndian.AppendUint32(nil, r.first)})
		if r.last < 1<<32-1 {
			out = append(out, nftables.SetElement{Key: binary.BigEndian.AppendUint32(nil, r.last+1), IntervalEnd: true})
		}
	}
	return out
}
