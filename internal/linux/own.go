package linux

import (
	"fmt"
	"net"
	"net/netip"
)

// OwnAddress reports whether a connection to addr ends on this host: whether it
// is an address of an interface of the calling process's network namespace, also
// as an IPv4 address in IPv6 form, or the host's own by a route alone (see
// Foreign; of IPv4).
func OwnAddress(addr netip.Addr) (bool, error) {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return false, fmt.Errorf("list the host's own addresses: %w", err)
	}
	addr = addr.Unmap().WithZone("")
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok {
			if own, ok := netip.AddrFromSlice(n.IP); ok && own.Unmap() == addr {
				return true, nil
			}
		}
	}
	if !addr.Is4() {
		return false, nil
	}
	foreign, err := Foreign(addr)
	return !foreign, err
}
