package linux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// Foreign reports whether packets to an IPv4 address would leave this network
// namespace, or go nowhere: whether it is not the host's own, a broadcast or a
// multicast one. It asks the routes, which know of more addresses than
// interfaces have: what load balancers and transparent proxies receive is
// often the host's by a route alone (ip-route(8), type local).
func Foreign(addr netip.Addr) (bool, error) {
	if !addr.Is4() {
		return false, fmt.Errorf("ask the routes for %s: it is no IPv4 address", addr)
	}
	kind, err := routeType(addr)
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH):
		return true, nil // no route, or one of type unreachable; other errors may be anything
	case err != nil:
		return false, fmt.Errorf("ask the routes for %s: %w", addr, err)
	}
	return kind == unix.RTN_UNICAST, nil
}

// routeType returns the type of the route to an address (rtnetlink(7),
// RTM_GETROUTE). The kernel has answered when the question has been sent.
func routeType(addr netip.Addr) (byte, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return 0, os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	const size = unix.SizeofNlMsghdr + unix.SizeofRtMsg + unix.SizeofRtAttr + 4
	q := binary.NativeEndian.AppendUint32(nil, size)
	q = binary.NativeEndian.AppendUint16(q, unix.RTM_GETROUTE)
	q = binary.NativeEndian.AppendUint16(q, unix.NLM_F_REQUEST)
	q = append(q, make([]byte, 8)...) // sequence, port
	q = append(q, unix.AF_INET, 32)   // the family, and the bits of the destination
	q = append(q, make([]byte, unix.SizeofRtMsg-2)...)
	q = binary.NativeEndian.AppendUint16(q, unix.SizeofRtAttr+4)
	q = binary.NativeEndian.AppendUint16(q, unix.RTA_DST)
	q = append(q, addr.AsSlice()...)
	if err := unix.Sendto(fd, q, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return 0, os.NewSyscallError("sendto", err)
	}
	a := make([]byte, 4096)
	n, _, err := unix.Recvfrom(fd, a, unix.MSG_DONTWAIT)
	if err != nil {
		return 0, os.NewSyscallError("recvfrom", err)
	}
	const typeAt = 7 // of struct rtmsg
	body := a[min(n, unix.SizeofNlMsghdr):n]
	switch kind := binary.NativeEndian.Uint16(a[4:]); {
	case kind == unix.NLMSG_ERROR && len(body) >= 4:
		return 0, unix.Errno(-int32(binary.NativeEndian.Uint32(body)))
	case kind == unix.RTM_NEWROUTE && len(body) >= unix.SizeofRtMsg:
		return body[typeAt], nil
	default:
		return 0, fmt.Errorf("the kernel answers with a message of type %d", kind)
	}
}
