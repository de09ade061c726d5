package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// guestLink is the name of the link inside a sandbox.
const guestLink = "eth0"

// wire is everything about one sandbox's link: the plan of the calls below.
type wire struct {
	name    string
	addr    netip.Addr
	gateway netip.Addr
	host    net.HardwareAddr
	guest   net.HardwareAddr
	mtu     int
	shape   shape  // its queues
	had     shaped // those of an earlier plug
}

// prepare readies a network namespace that may never get a link: loopback up,
// IPv6 off on links to come (loopback keeps ::1), ICMP echo sockets open to
// everyone inside (there is no NET_RAW).
func prepare(ns *os.File) error {
	return linux.InNetNS(ns, func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return fmt.Errorf("opening a netlink socket inside: %w", err)
		}
		defer h.Close()
		return prepareInside(h)
	})
}

func prepareInside(h *netlink.Handle) error {
	if err := writeSysctl("net/ipv6/conf/default/disable_ipv6", "1"); err != nil {
		return err
	}
	// The range is in ids of the writer's user namespace, and only a bound:
	// no id outside the sandbox's own range lives in its namespace.
	if err := writeSysctl("net/ipv4/ping_group_range", "0 2147483647"); err != nil {
		return err
	}
	lo := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: 1, Name: "lo"}}
	if err := h.LinkSetUp(lo); err != nil {
		return fmt.Errorf("raising loopback inside: %w", err)
	}
	return nil
}

// plug makes the link of a sandbox, both ends, or completes one that an
// earlier plug left half made.
func (h *Host) plug(ns *os.File, w wire) error {
	var inside *netlink.Handle // its socket stays inside when we are out
	var outer, inner int
	err := linux.InNetNS(ns, func() (err error) {
		if inside, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
			return fmt.Errorf("opening a netlink socket inside: %w", err)
		}
		if err := prepareInside(inside); err != nil {
			return err
		}
		if outer, inner, err = h.makePair(inside, ns, w); err != nil {
			return err
		}
		// Before the link is up: what changes later waits for the kernel.
		if err := h.queue(inside, inner, w.had.out, w.had.unsureOut, w.shape.out); err != nil {
			return err
		}
		return configureInside(inside, inner, w)
	})
	if inside != nil {
		defer inside.Close()
	}
	if err != nil {
		return err
	}
	if err := h.queue(h.route, outer, w.had.in, w.had.unsureIn, w.shape.in); err != nil {
		return err
	}
	if err := h.configureOutside(outer, w); err != nil {
		return err
	}
	return awaitUp(inside, inner)
}

// awaitUp waits until a link carries packets. Of a pair, the end raised last
// does so at once; the other drops what it is given until a kernel worker has
// noticed, usually by now.
func awaitUp(h *netlink.Handle, index int) error {
	for deadline := time.Now().Add(linkWait); ; <-time.After(linkPoll) {
		link, err := h.LinkByIndex(index)
		if err != nil {
			return fmt.Errorf("waiting for the link inside: %w", err)
		}
		if link.Attrs().OperState == netlink.OperUp {
			return nil
		}
		if time.Now().After(deadline) {
			return sandbox.Errorf(sandbox.ErrUnavailable, "link_down", "the link inside did not come up within %s", linkWait)
		}
	}
}

const (
	linkWait = 5 * time.Second
	linkPoll = 100 * time.Microsecond
)

// makePair makes the pair with the peer already inside (moving it there later
// would cost an RCU grace period) and returns the indices of both ends.
func (h *Host) makePair(inside *netlink.Handle, ns *os.File, w wire) (outer, inner int, err error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr, attrs.MTU = w.name, w.host, w.mtu
	// One queue each way: the default is one for each possible cpu.
	attrs.NumTxQueues, attrs.NumRxQueues = 1, 1
	pair := &netlink.Veth{
		LinkAttrs: attrs, PeerName: guestLink, PeerHardwareAddr: w.guest, PeerTxQLen: -1,
		PeerNumTxQueues: 1, PeerNumRxQueues: 1, PeerMTU: uint32(w.mtu),
		PeerNamespace: netlink.NsFd(int(ns.Fd())),
	}
	err = h.route.LinkAdd(pair) // learns the outer index too
	if errors.Is(err, unix.EEXIST) {
		if outer, inner, ok := h.samePair(inside, w); ok {
			return outer, inner, nil
		}
		// The link of an earlier life of this sandbox, whose namespace is
		// still being dismantled: only now is waiting for it unavoidable.
		if err := h.deleteLink(w.name); err != nil {
			return 0, 0, err
		}
		pair.Index = 0
		err = h.route.LinkAdd(pair)
	}
	if err != nil {
		return 0, 0, fmt.Errorf("making link %s: %w", w.name, err)
	}
	peer, err := inside.LinkByName(guestLink)
	if err != nil {
		return 0, 0, fmt.Errorf("finding %s inside: %w", guestLink, err)
	}
	return pair.Index, peer.Attrs().Index, nil
}

// samePair returns the indices of the existing host link w.name and of the
// eth0 of this namespace, if they are the two ends of one pair.
func (h *Host) samePair(inside *netlink.Handle, w wire) (outer, inner int, ok bool) {
	link, err := h.route.LinkByName(w.name)
	if err != nil {
		return 0, 0, false
	}
	peer, err := inside.LinkByName(guestLink)
	if err != nil {
		return 0, 0, false
	}
	o, p := link.Attrs(), peer.Attrs()
	return o.Index, p.Index, o.ParentIndex == p.Index && p.ParentIndex == o.Index &&
		o.HardwareAddr.String() == w.host.String() && p.HardwareAddr.String() == w.guest.String()
}

// configureInside gives the sandbox its address and its only way out.
func configureInside(inside *netlink.Handle, index int, w wire) error {
	link := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index, Name: guestLink}}
	if err := inside.AddrReplace(link, &netlink.Addr{IPNet: host32(w.addr)}); err != nil {
		return fmt.Errorf("setting address %s inside: %w", w.addr, err)
	}
	if err := inside.LinkSetUp(link); err != nil {
		return fmt.Errorf("raising %s inside: %w", guestLink, err)
	}
	if err := inside.NeighSet(neighbour(index, w.gateway, w.host)); err != nil {
		return fmt.Errorf("setting the gateway's link address inside: %w", err)
	}
	route := &netlink.Route{LinkIndex: index, Gw: w.gateway.AsSlice(), Flags: int(netlink.FLAG_ONLINK)}
	if err := inside.RouteReplace(route); err != nil {
		return fmt.Errorf("setting the default route inside: %w", err)
	}
	return nil
}

// configureOutside raises the host's end and routes the sandbox's address to it.
func (h *Host) configureOutside(index int, w wire) error {
	if err := writeSysctl(filepath.Join("net/ipv6/conf", w.name, "disable_ipv6"), "1"); err != nil {
		return err
	}
	if err := h.raise(index); err != nil {
		return fmt.Errorf("raising link %s: %w", w.name, err)
	}
	if err := h.route.NeighSet(neighbour(index, w.addr, w.guest)); err != nil {
		return fmt.Errorf("setting the link address of %s: %w", w.addr, err)
	}
	route := &netlink.Route{LinkIndex: index, Dst: host32(w.addr), Scope: netlink.SCOPE_LINK, Src: w.gateway.AsSlice()}
	if err := h.route.RouteReplace(route); err != nil {
		return fmt.Errorf("routing %s to link %s: %w", w.addr, w.name, err)
	}
	return nil
}

// raise sets a host link up with ARP off, forwarding on and strict
// reverse-path filtering, in one message: the same by sysctl files costs more
// and takes the global networking lock by polling for it.
func (h *Host) raise(index int) error {
	req := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK)
	req.Sockets = h.raw
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(index)
	msg.Flags = unix.IFF_UP | unix.IFF_NOARP
	msg.Change = msg.Flags
	req.AddData(msg)
	req.AddData(inetConf(map[uint16]uint32{
		devconfForwarding: 1, devconfRPFilter: 1,
		devconfAcceptRedirects: 0, devconfSendRedirects: 0, devconfSourceRoute: 0,
	}))
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// Indices of per-interface IPv4 settings (IPV4_DEVCONF_*, linux/ip.h).
const (
	devconfForwarding      = 1
	devconfAcceptRedirects = 4
	devconfSendRedirects   = 6
	devconfRPFilter        = 8
	devconfSourceRoute     = 9
	iflaInetConf           = 1 // IFLA_INET_CONF, linux/if_link.h
)

func inetConf(values map[uint16]uint32) *nl.RtAttr {
	spec := nl.NewRtAttr(unix.IFLA_AF_SPEC|unix.NLA_F_NESTED, nil)
	conf := spec.AddRtAttr(unix.AF_INET|unix.NLA_F_NESTED, nil).AddRtAttr(iflaInetConf|unix.NLA_F_NESTED, nil)
	for k, v := range values {
		conf.AddRtAttr(int(k), nl.Uint32Attr(v))
	}
	return spec
}

// deleteLink deletes a host link and waits for the kernel (an RCU grace
// period, 14 ms and more): never on the path of a removal.
func (h *Host) deleteLink(name string) error {
	link, err := h.route.LinkByName(name)
	if isNoLink(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("finding link %s: %w", name, err)
	}
	if err := h.route.LinkDel(link); err != nil && !isNoLink(err) {
		return fmt.Errorf("deleting link %s: %w", name, err)
	}
	return nil
}

func isNoLink(err error) bool {
	return errors.As(err, new(netlink.LinkNotFoundError)) || errors.Is(err, unix.ENODEV)
}

func neighbour(index int, addr netip.Addr, mac net.HardwareAddr) *netlink.Neigh {
	return &netlink.Neigh{
		LinkIndex: index, Family: unix.AF_INET, State: netlink.NUD_PERMANENT,
		IP: addr.AsSlice(), HardwareAddr: mac,
	}
}

func host32(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(32, 32)}
}

// writeSysctl sets a value of the thread's network namespace. A kernel without
// that protocol has nothing to set.
func writeSysctl(name, value string) error {
	err := os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("setting sysctl %s to %s: %w", name, value, err)
	}
	return nil
}

// listing repeats a netlink dump that the kernel says was disturbed by a
// change; the last result is as good as any if they never stop.
func listing[T any](list func() ([]T, error)) ([]T, error) {
	for try := 0; ; try++ {
		out, err := list()
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			return out, err
		}
		if try == 10 {
			return out, nil
		}
	}
}
