//go:build root

package netns

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/nftables"

	"github.com/sandboxd/sandboxd/sandbox"
)

func echoes(c net.Conn) error {
	_ = c.SetDeadline(time.Now().Add(2 * time.Second))
	if _, err := c.Write([]byte("x\n")); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 2))
	return err
}

// TestDenyRuleTakesPinsAway: a deny rule wins over the allow rule a name was
// answered by, also for what was answered before.
func TestDenyRuleTakesPinsAway(t *testing.T) {
	w := newWorld(t)
	h := openHost(t, Config{})
	echoServer(t, w, publicAddr+":7")
	echoServer(t, w, internetAddr+":7")
	b := policyBox(t, h, 130, allowing("*.example.com"))
	pin(t, h, b, "bad.example.com", publicAddr)
	pin(t, h, b, "good.example.com", internetAddr)
	bad, good := talker(t, b, publicAddr+":7"), talker(t, b, internetAddr+":7")
	must(t, echoes(bad))
	must(t, echoes(good))
	p := allowing("*.example.com")
	p.Deny = []string{"bad.example.com"}
	b.become(t, h, p)
	if err := echoes(bad); err == nil {
		t.Error("a connection to a name that is denied now goes on")
	}
	denied(t, b, "tcp4", publicAddr+":80")
	must(t, echoes(good)) // control
	reaches(t, b, "tcp4", internetAddr+":80")
}

// TestPinsNameNoPrivateRange: a private address is reached only while a rule
// names it by its prefix.
func TestPinsNameNoPrivateRange(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{Admit: []netip.Prefix{prefix("192.168.7.0/24")}})
	b := policyBox(t, h, 131, allowing("db.corp.example", "192.168.7.0/24:9999"))
	pin(t, h, b, "db.corp.example", privateAddr, publicAddr)
	reaches(t, b, "tcp4", privateAddr+":80") // control
	b.become(t, h, allowing("db.corp.example"))
	denied(t, b, "tcp4", privateAddr+":80")
	reaches(t, b, "tcp4", publicAddr+":80") // control
	pin(t, h, b, "db.corp.example", privateAddr)
	denied(t, b, "tcp4", privateAddr+":80")
}

// TestPinsAreBounded: who is answered names without end costs the daemon no
// more than one who is answered many.
func TestPinsAreBounded(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	b := policyBox(t, h, 137, allowing("*.many.example"))
	const each = 64
	for i := range 4 * maxPins / each {
		addrs := make([]netip.Addr, each)
		for j := range addrs {
			addrs[j] = addrOf(0x01000000 + uint32(i*each+j))
		}
		must(t, h.Pin(t.Context(), b.ID, fmt.Sprintf("n%d.many.example", i), addrs, time.Hour))
	}
	must(t, h.Pin(t.Context(), b.ID, "last.many.example", []netip.Addr{netipAddr(publicAddr)}, time.Hour))
	reaches(t, b, "tcp4", publicAddr+":80") // control: the newest is pinned
	h.order.Lock()
	book := h.pins[b.ID]
	known := 0
	for _, addrs := range book.names {
		known += len(addrs)
	}
	keys, counted := len(book.keys), book.known
	h.order.Unlock()
	if known != counted {
		t.Errorf("%d addresses of names, counted as %d", known, counted)
	}
	if known > 2*maxPins || keys > maxPins {
		t.Errorf("%d addresses of names and %d pins remembered, want at most %d and %d", known, keys, 2*maxPins, maxPins)
	}
}

// TestPinsOfManyPortsAreBounded: the bound holds in the kernel, also where one
// answer alone is beyond it.
func TestPinsOfManyPortsAreBounded(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	b := policyBox(t, h, 146, allowing("*.wide.example:80,1000-1015,2000-2015,3000-3015,4000-4015"))
	for i := range 4 {
		addrs := make([]netip.Addr, 64)
		for j := range addrs {
			addrs[j] = addrOf(0x01000000 + uint32(i*len(addrs)+j))
		}
		must(t, h.Pin(t.Context(), b.ID, fmt.Sprintf("n%d.wide.example", i), addrs, time.Hour))
	}
	must(t, h.Pin(t.Context(), b.ID, "last.wide.example", []netip.Addr{netipAddr(publicAddr)}, 2*time.Hour))
	reaches(t, b, "tcp4", publicAddr+":80") // control: the newest is pinned
	if n := len(pinsOf(t, h, b.ID)); n > maxPins || n == 0 {
		t.Errorf("%d pins in the kernel, want some and at most %d", n, maxPins)
	}
}

// pinsOf returns the kernel's pins of a sandbox.
func pinsOf(t testing.TB, h *Host, id sandbox.ID) []nftables.SetElement {
	t.Helper()
	elems, err := h.table.list(setPins)
	must(t, err)
	return slices.DeleteFunc(elems, func(e nftables.SetElement) bool { return linkOf(e.Key) != linkName(id) })
}
