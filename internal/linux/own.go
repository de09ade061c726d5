package linux

import (
	"fmt"
	"net"
	"net/netip"
)

// OwnAddress reports whether addr is an address of an interface of the calling
// process's network namespace, also where it is an IPv4 address in IPv6 form:
// a connection to it ends on this host.
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
	return false, nil
}
