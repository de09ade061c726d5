package netns

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// probe is any address of the public internet: the route to it tells the
// uplink. Nothing is ever sent to it. (It is a root name server's.)
var probe = netip.MustParseAddr("198.41.0.4")

// forwardUplink makes the interfaces that lead to the internet, and to admitted
// ranges, forward, if it has not in the last moments: answers come in there. The global switch stays as it is. So
// that the host does not become a router for its neighbours by this, the rules
// drop what comes in there for anyone but sandboxes. No route is no error.
func (h *Host) forwardUplink() error {
	h.mu.Lock()
	fresh := time.Since(h.uplinkAt) < restTick
	h.mu.Unlock()
	if fresh {
		return nil
	}
	if err := h.forwardUplinkNow(); err != nil {
		return err
	}
	h.mu.Lock()
	h.uplinkAt = time.Now()
	h.mu.Unlock()
	return nil
}

// forwardUplinkNow does it without regard to when it was last done.
func (h *Host) forwardUplinkNow() error {
	links, err := h.ways()
	if err != nil {
		return err
	}
	for _, index := range links {
		link, err := h.route.LinkByIndex(index)
		if err != nil {
			return fmt.Errorf("finding the uplink: %w", err)
		}
		if link.Attrs().Flags&net.FlagLoopback == 0 {
			if err := h.forwardLink(link.Attrs().Name); err != nil {
				return err
			}
		}
	}
	return nil
}

// ways returns the links that lead to the internet and to the ranges the
// operator admits: each is one that answers come in by.
func (h *Host) ways() ([]int, error) {
	var links []int
	for _, to := range append([]netip.Addr{probe}, firstOf(h.admit)...) {
		routes, err := h.route.RouteGet(to.AsSlice())
		switch {
		case errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) || errors.Is(err, unix.ENETDOWN):
		case err != nil:
			return nil, fmt.Errorf("looking up the route to %s: %w", to, err)
		case len(routes) > 0:
			links = append(links, routes[0].LinkIndex)
		}
	}
	if len(h.admit) > 0 { // parts of a range may lie elsewhere than its first address
		routes, err := listing(func() ([]netlink.Route, error) { return h.route.RouteList(nil, unix.AF_INET) })
		if err != nil {
			return nil, fmt.Errorf("listing routes: %w", err)
		}
		for _, r := range routes {
			if r.Dst == nil {
				continue
			}
			ones, _ := r.Dst.Mask.Size()
			addr, ok := netip.AddrFromSlice(r.Dst.IP)
			if ok && slices.ContainsFunc(h.admit, netip.PrefixFrom(addr.Unmap(), ones).Overlaps) && ones > 0 && r.LinkIndex > 0 {
				links = append(links, r.LinkIndex)
			}
		}
	}
	slices.Sort(links)
	return slices.Compact(links), nil
}

func firstOf(list []netip.Prefix) (out []netip.Addr) {
	for _, p := range list {
		out = append(out, p.Masked().Addr())
	}
	return out
}

// forwardLink makes one link forward.
func (h *Host) forwardLink(name string) error {
	if forwarding(name) || strings.HasPrefix(name, linkPrefix) {
		return nil
	}
	h.mu.Lock()
	h.uplinks[name] = true
	h.mu.Unlock()
	var c change
	c.add = append(c.add, element{set: setUplinks, key: string(linkKey(name))})
	h.order.Lock()
	err := h.applyHealing(c)
	h.order.Unlock()
	if err != nil { // before the switch: never a router in between
		return err
	}
	h.log.Info("made the uplink forward for sandboxes", "link", name)
	if err := writeSysctl(filepath.Join("net/ipv4/conf", name, "forwarding"), "1"); err != nil {
		return err
	}
	// Who switches ip_forward off takes it from every interface, so from the
	// sandboxes' as well.
	for _, l := range h.links() {
		if l.connected {
			if err := writeSysctl(filepath.Join("net/ipv4/conf", l.name, "forwarding"), "1"); err != nil {
				return err
			}
		}
	}
	return nil
}

// uplinkMTU returns the size of packets sandboxes may send: the uplink's, so
// that tunnels and clouds with less than 1500 need no path discovery.
func (h *Host) uplinkMTU() int {
	const usual, least = 1500, 576 // Ethernet's; every IPv4 host's (RFC 791)
	routes, err := h.route.RouteGet(probe.AsSlice())
	if err != nil || len(routes) == 0 {
		return usual
	}
	link, err := h.route.LinkByIndex(routes[0].LinkIndex)
	if err != nil {
		return usual
	}
	return max(least, min(usual, link.Attrs().MTU))
}

func forwarding(link string) bool {
	return sysctlOn(filepath.Join("net/ipv4/conf", link, "forwarding"))
}

func sysctlOn(name string) bool {
	b, err := os.ReadFile(filepath.Join("/proc/sys", name))
	return err == nil && strings.TrimSpace(string(b)) != "0"
}

// checkOverlap refuses a pool that shadows a network of the host's.
func (h *Host) checkOverlap() error {
	routes, err := listing(func() ([]netlink.Route, error) { return h.route.RouteList(nil, unix.AF_INET) })
	if err != nil {
		return fmt.Errorf("listing routes: %w", err)
	}
	for _, r := range routes {
		if r.Dst == nil {
			continue
		}
		ones, _ := r.Dst.Mask.Size()
		addr, ok := netip.AddrFromSlice(r.Dst.IP)
		if !ok || ones == 0 || !netip.PrefixFrom(addr.Unmap(), ones).Overlaps(h.pool) {
			continue
		}
		link, err := h.route.LinkByIndex(r.LinkIndex)
		if err != nil || strings.HasPrefix(link.Attrs().Name, linkPrefix) {
			continue // a sandbox's own, or gone meanwhile
		}
		if ones < 8 {
			continue // half-internet routes of VPNs, not networks
		}
		return overlapError(h.pool, r.Dst, link)
	}
	return nil
}

func overlapError(pool netip.Prefix, dst *net.IPNet, link netlink.Link) error {
	return sandbox.Errorf(sandbox.ErrConflict, "pool_overlap",
		"network pool %s overlaps the route to %s by %s: configure another pool", pool, dst, link.Attrs().Name)
}
