package sandbox_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestIsPublic(t *testing.T) {
	for text, want := range map[string]bool{
		"8.8.8.8": true, "1.1.1.1": true, "100.128.0.1": true, "172.32.0.1": true, "223.255.255.255": true, "192.0.1.1": true,
		"0.1.2.3": false, "10.1.2.3": false, "100.64.0.1": false, "127.0.0.53": false, "169.254.169.254": false, "172.31.0.1": false,
		"192.0.0.1": false, "192.168.0.1": false, "198.19.0.1": false, "224.0.0.1": false, "255.255.255.255": false,
		"::ffff:8.8.8.8": false, "2001:4860:4860::8888": false,
	} {
		if got := sandbox.IsPublic(netip.MustParseAddr(text)); got != want {
			t.Errorf("IsPublic(%s) = %v", text, got)
		}
	}
	if sandbox.IsPublic(netip.Addr{}) {
		t.Error("no address is public")
	}
}

func TestSpecialRangesAreApart(t *testing.T) {
	all := sandbox.SpecialRanges()
	for i, p := range all {
		if p != p.Masked() || slices.ContainsFunc(all[i+1:], p.Overlaps) {
			t.Errorf("%s overlaps another or has host bits", p)
		}
	}
}
