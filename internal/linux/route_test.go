package linux

import (
	"errors"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

func TestForeign(t *testing.T) {
	for addr, want := range map[string]bool{"127.0.0.1": false, "127.255.0.3": false, "224.0.0.251": false, "255.255.255.255": false} {
		if _, err := routeType(netip.MustParseAddr(addr)); errors.Is(err, unix.ENETUNREACH) {
			t.Logf("%s: no route here: nothing to tell", addr)
			continue
		}
		if got, err := Foreign(netip.MustParseAddr(addr)); err != nil || got != want {
			t.Errorf("%s: %v, %v", addr, got, err)
		}
	}
	own, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range own {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() {
			if got, err := Foreign(p.Addr()); got || err != nil {
				t.Errorf("%s is this host's own: %v, %v", p.Addr(), got, err)
			}
		}
	}
	if got, err := Foreign(netip.MustParseAddr("93.184.216.34")); !got || err != nil { // the control
		t.Errorf("somebody else's: %v, %v", got, err)
	}
	if _, err := Foreign(netip.IPv6Loopback()); err == nil {
		t.Error("asked for an IPv6 address")
	}
}
