package sandbox

import (
	"net/netip"
	"slices"
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

// SpecialRanges returns the IPv4 ranges that are not the public internet, in
// order and without overlaps. No policy opens them by itself.
func SpecialRanges() []netip.Prefix { return slices.Clone(special) }

// IsPublic reports whether addr is an IPv4 address of the public internet.
// An IPv4 address in IPv6 form is not: nobody but a trickster writes it so.
func IsPublic(addr netip.Addr) bool {
	return addr.Is4() && !slices.ContainsFunc(special, func(p netip.Prefix) bool { return p.Contains(addr) })
}
