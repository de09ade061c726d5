package gate

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// soOriginalDst is SO_ORIGINAL_DST of linux/netfilter_ipv4.h: the destination
// a connection had before it was led here, as a sockaddr_in.
const soOriginalDst = 80

// originalDst returns where the client meant to connect to.
func originalDst(c *net.TCPConn) (netip.AddrPort, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("ask for the original destination: %w", err)
	}
	var addr netip.AddrPort
	var serr error
	err = raw.Control(func(fd uintptr) {
		// A structure of 20 bytes, of which the kernel fills in 16.
		var mreq *unix.IPv6Mreq
		if mreq, serr = unix.GetsockoptIPv6Mreq(int(fd), unix.SOL_IP, soOriginalDst); serr == nil {
			sa := mreq.Multiaddr
			addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte(sa[4:8])), binary.BigEndian.Uint16(sa[2:4]))
		}
	})
	if err == nil {
		err = serr
	}
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("ask for the original destination: %w", err)
	}
	return addr, nil
}
