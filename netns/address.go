package netns

import (
	"encoding/binary"
	"net"
	"net/netip"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

// linkPrefix begins the name of every host-side link, and of no other link:
// "v" and then the sandbox ID, which always begins with "sb". The rules match
// on it, so that a link without any set element is denied too.
const linkPrefix = "vsb"

// Addresses of the pool: the first names the network, the second is the
// gateway all sandboxes share, the last is left alone (it is the broadcast
// address of anyone who mistakes the pool for one Ethernet).
const (
	gatewayOffset = 1
	firstOffset   = 2
)

// DefaultPool is where sandboxes get their addresses unless configured.
var DefaultPool = netip.MustParsePrefix("10.213.0.0/16")

// linkName returns the host-side link of a sandbox: 15 bytes, the most a link
// name can have (IFNAMSIZ less its terminating zero).
func linkName(id sandbox.ID) string { return "v" + string(id) }

// linkID is the reverse of linkName; false for links that are not ours.
func linkID(name string) (sandbox.ID, bool) {
	rest, ok := strings.CutPrefix(name, "v")
	if !ok {
		return "", false
	}
	id, err := sandbox.ParseID(rest)
	return id, err == nil
}

// checkPool accepts an IPv4 prefix with room for at least one sandbox.
func checkPool(pool netip.Prefix) error {
	if !pool.IsValid() || !pool.Addr().Is4() || pool.Bits() < 8 || pool.Bits() > 29 {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_pool", "network pool %s: use an IPv4 prefix from /8 to /29, such as %s", pool, DefaultPool)
	}
	return nil
}

// poolAddress returns the address of a slot.
func poolAddress(pool netip.Prefix, slot int) (netip.Addr, error) {
	last := 1<<(32-pool.Bits()) - 2 // the one before broadcast
	if slot < 0 || slot > last-firstOffset {
		return netip.Addr{}, sandbox.Errorf(sandbox.ErrExhausted, "no_address",
			"network pool %s has addresses for slots 0 to %d, not %d: configure a larger pool or remove sandboxes", pool, last-firstOffset, slot)
	}
	return offset(pool, slot+firstOffset), nil
}

// gateway returns the address sandboxes route through.
func gateway(pool netip.Prefix) netip.Addr { return offset(pool, gatewayOffset) }

func offset(pool netip.Prefix, n int) netip.Addr {
	a := pool.Masked().Addr().As4()
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(a[:])+uint32(n))
	return netip.AddrFrom4(b)
}

// The link addresses follow from the slot: both ends know the other's without
// asking, so neither needs ARP. The first byte marks a locally administered
// unicast address (IEEE 802, 8.2).
func hostMAC(slot int) net.HardwareAddr    { return mac(0, slot) }
func sandboxMAC(slot int) net.HardwareAddr { return mac(1, slot) }

func mac(end byte, slot int) net.HardwareAddr {
	return net.HardwareAddr{0x02, 0x5b, end, byte(slot >> 16), byte(slot >> 8), byte(slot)}
}
