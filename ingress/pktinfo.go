package ingress

import (
	"errors"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// A UDP socket that listens on all addresses must answer from the one that was
// asked, or clients take the answer for somebody else's. Each datagram tells
// it, and each answer says it, in a control message (ip(7), ipv6(7): PKTINFO).

// tellLocal has a socket tell the address each datagram was sent to.
func tellLocal(c *net.UDPConn) error {
	rc, err := c.SyscallConn()
	if err != nil {
		return err
	}
	at := addrOf(c.LocalAddr()).Addr()
	var serr error
	err = rc.Control(func(fd uintptr) {
		if at.Is4() {
			serr = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
		} else {
			serr = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1)
		}
	})
	return errors.Join(err, serr)
}

// localOf reads the address a datagram was sent to, invalid where it does not
// say.
func localOf(oob []byte) netip.Addr {
	for len(oob) > 0 {
		h, data, rest, err := unix.ParseOneSocketControlMessage(oob)
		if err != nil {
			return netip.Addr{}
		}
		switch {
		case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_PKTINFO && len(data) >= unix.SizeofInet4Pktinfo:
			return netip.AddrFrom4([4]byte(data[4:8])) // ipi_spec_dst, after ipi_ifindex
		case h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_PKTINFO && len(data) >= unix.SizeofInet6Pktinfo:
			return netip.AddrFrom16([16]byte(data[:16])) // ipi6_addr
		}
		oob = rest
	}
	return netip.Addr{}
}

// comeFrom makes what has a datagram leave from an address.
func comeFrom(a netip.Addr) []byte {
	switch {
	case a.Is4():
		return unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: a.As4()})
	case a.Is6():
		return unix.PktInfo6(&unix.Inet6Pktinfo{Addr: a.As16()})
	}
	return nil
}
