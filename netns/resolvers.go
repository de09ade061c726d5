package netns

import (
	"net/netip"
	"slices"
	"strings"
)

// maxResolvers is how many a resolver library reads (MAXNS, resolv.conf(5)).
const maxResolvers = 3

// Resolvers returns the name servers of a resolv.conf's text that an open
// sandbox can use: public IPv4 addresses, at most three, in order. A stub on
// the host's loopback means nothing inside a sandbox; one in a private range
// is closed by policy, and opening it (Config.Resolvers) shows sandboxes the
// names of a private network, so that is left to the operator. Behind
// systemd-resolved, the text to give is /run/systemd/resolve/resolv.conf.
// Lines that make no sense are passed over, as resolvers do.
func Resolvers(resolvConf string) []netip.Addr {
	closed := privateRanges()
	var out []netip.Addr
	for line := range strings.Lines(resolvConf) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		addr, err := netip.ParseAddr(fields[1])
		if err != nil || !addr.Is4() || slices.Contains(out, addr) {
			continue
		}
		if slices.ContainsFunc(closed, func(p netip.Prefix) bool { return p.Contains(addr) }) {
			continue
		}
		if out = append(out, addr); len(out) == maxResolvers {
			break
		}
	}
	return out
}
