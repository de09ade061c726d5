//go:build root

package gate

import (
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/linux"
)

// TestHostsOwnRoutes: an address that the host takes for its own by a route
// alone, as load balancers have theirs, is on no interface; it is the host's
// all the same.
func TestHostsOwnRoutes(t *testing.T) {
	ip := func(args string) {
		t.Helper()
		if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v: %s", args, err, out)
		}
	}
	ip("link add uplink0 type veth peer name far0")
	t.Cleanup(func() { ip("link del uplink0") })
	ip("addr add 192.0.2.2/24 dev uplink0")
	ip("link set uplink0 up")
	ip("link set far0 up")
	ip("route add default via 192.0.2.1")
	ip("route add local 93.184.216.34/32 dev uplink0")
	ln, err := net.Listen("tcp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	port := netip.MustParseAddrPort(ln.Addr().String()).Port()
	r := reach{foreign: linux.Foreign}
	if c, err := r.dialTCP(t.Context(), netip.AddrPortFrom(webAddr, port)); err == nil {
		c.Close()
		t.Error("the host was dialed by an address it has by a route")
	}
	for addr, outside := range map[string]bool{
		"93.184.216.34": false, "192.0.2.2": false, "192.0.2.255": false, "192.0.2.1": true, // the control: others are not
		"93.184.216.35": true,
	} {
		if r.outside(netip.MustParseAddr(addr)) != outside {
			t.Errorf("%s is outside: %v", addr, !outside)
		}
	}
}
