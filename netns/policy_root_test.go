//go:build root

package netns

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// withoutRules runs f while the table is gone, then has it made again. It is
// the positive control of what the rules deny.
func withoutRules(t *testing.T, h *Host, f func()) {
	t.Helper()
	h.reap.stop() // or it would make the table again
	flush(t, h, func() { h.table.conn.DelTable(kernelTable()) })
	f()
	must(t, h.heal())
	var err error
	h.reap, err = startReaper(h)
	must(t, err)
}

// withoutRanges runs f while no range counts as private.
func withoutRanges(t *testing.T, h *Host, f func()) {
	t.Helper()
	flush(t, h, func() {
		h.table.conn.FlushSet(setPlan{name: setPrivate}.kernel())
		h.table.conn.FlushSet(setPlan{name: setClosed}.kernel())
	})
	f()
	must(t, h.table.install())
}

func listenTCP(t *testing.T, ns *os.File, addr string) {
	t.Helper()
	listen := func() error {
		l, err := net.Listen("tcp", addr)
		if err == nil {
			t.Cleanup(func() { l.Close() })
			go serveTCP(l)
		}
		return err
	}
	if ns == nil {
		must(t, listen())
		return
	}
	must(t, linux.InNetNS(ns, listen))
}

func TestOpenReachesThePublicInternetOnly(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	b := newBox(t, 5, sandbox.NetworkOpen)
	attach(t, h, b)

	if from := reaches(t, b, "tcp4", publicAddr+":80"); !strings.HasPrefix(from, hostAddr+":") {
		t.Errorf("the internet saw %q, want the host's address %s", from, hostAddr)
	}
	reaches(t, b, "udp4", publicAddr+":99")
	reaches(t, b, "tcp4", internetAddr+":80")
	for _, a := range beyond {
		denied(t, b, "tcp4", a+":80")
		denied(t, b, "udp4", a+":99")
	}
	withoutRanges(t, h, func() {
		for _, a := range beyond {
			reaches(t, b, "tcp4", a+":80")
			reaches(t, b, "udp4", a+":99")
		}
	})
	denied(t, b, "tcp4", metadataAddr+":80")
	if got := readSysctl(t, "net/ipv4/ip_forward"); got != "0" {
		t.Errorf("net.ipv4.ip_forward is %s: the global switch must stay off", got)
	}
}

func TestHostIsOutOfReach(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	b := newBox(t, 0, sandbox.NetworkOpen)
	attach(t, h, b)
	listenTCP(t, nil, "0.0.0.0:8080")
	targets := []string{hostAddr + ":8080", gateway(h.pool).String() + ":8080"}
	for _, a := range targets {
		denied(t, b, "tcp4", a)
	}
	withoutRules(t, h, func() {
		for _, a := range targets {
			reaches(t, b, "tcp4", a)
		}
	})
	for _, a := range targets {
		denied(t, b, "tcp4", a)
	}
}

func TestSandboxesAreApart(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	a, b := newBox(t, 1, sandbox.NetworkOpen), newBox(t, 2, sandbox.NetworkOpen)
	attach(t, h, a)
	target := attach(t, h, b).String() + ":8080"
	listenTCP(t, b.NetNS, "0.0.0.0:8080")
	denied(t, a, "tcp4", target)
	withoutRanges(t, h, func() { denied(t, a, "tcp4", target) }) // by link as well as by range
	withoutRules(t, h, func() { reaches(t, a, "tcp4", target) })
}

func TestNothingComesInUnasked(t *testing.T) {
	w := newWorld(t)
	h := openHost(t, Config{})
	b := newBox(t, 3, sandbox.NetworkOpen)
	target := attach(t, h, b).String() + ":8080"
	listenTCP(t, b.NetNS, "0.0.0.0:8080")
	must(t, linux.InNetNS(w.internet, func() error {
		return netlink.RouteAdd(&netlink.Route{LinkIndex: linkIndex(t, "net0"), Dst: pool4(h), Gw: net.ParseIP(hostAddr)})
	}))
	if said, err := dial(w.internet, "tcp4", target, deniedWait); err == nil {
		t.Errorf("the sandbox answered %q to the internet", said)
	}
	withoutRules(t, h, func() {
		if _, err := dial(w.internet, "tcp4", target, 5*time.Second); err != nil {
			t.Errorf("control: without rules the internet should reach the sandbox: %v", err)
		}
	})
	// The host itself may: port forwarding goes this way.
	if from, err := dialHere(target); err != nil || !strings.HasPrefix(from, gateway(h.pool).String()+":") {
		t.Errorf("from the host: said %q, error %v; want the gateway's address", from, err)
	}
}

func dialHere(addr string) (string, error) {
	c, err := net.DialTimeout("tcp4", addr, 5*time.Second)
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
	buf := make([]byte, 200)
	n, err := c.Read(buf)
	return string(buf[:n]), err
}

func pool4(h *Host) *net.IPNet {
	return &net.IPNet{IP: h.pool.Addr().AsSlice(), Mask: net.CIDRMask(h.pool.Bits(), 32)}
}

// packet is an IPv4 UDP packet without a UDP checksum.
func packet(src, dst netip.Addr, port uint16, payload string) []byte {
	p := make([]byte, 28, 28+len(payload))
	p[0], p[8], p[9] = 0x45, 64, unix.IPPROTO_UDP
	copy(p[12:], src.AsSlice())
	copy(p[16:], dst.AsSlice())
	p[20], p[21], p[22], p[23] = 0x30, 0x39, byte(port>>8), byte(port)
	p[25] = byte(8 + len(payload))
	return append(p, payload...)
}

// sendRaw sends an IPv4 packet as it is; the kernel fills in length and checksum.
func sendRaw(ns *os.File, p []byte) error {
	return linux.InNetNS(ns, func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, p, 0, &unix.SockaddrInet4{Addr: [4]byte(p[16:20])})
	})
}

// receiver collects the payloads that reach a UDP port in ns.
func receiver(t *testing.T, ns *os.File, network, addr string) <-chan string {
	t.Helper()
	got := make(chan string, 100)
	listen := func() error {
		c, err := net.ListenPacket(network, addr)
		if err != nil {
			return err
		}
		t.Cleanup(func() { c.Close() })
		go func() {
			buf := make([]byte, 2048)
			for {
				n, _, err := c.ReadFrom(buf)
				if err != nil {
					return
				}
				got <- string(buf[:n])
			}
		}()
		return nil
	}
	if ns == nil {
		must(t, listen())
	} else {
		must(t, linux.InNetNS(ns, listen))
	}
	return got
}

func expect(t *testing.T, got <-chan string, want string) {
	t.Helper()
	select {
	case s := <-got:
		if s != want {
			t.Errorf("arrived: %q, want %q", s, want)
		}
	case <-time.After(5 * time.Second):
		t.Errorf("%q did not arrive", want)
	}
}

func expectNothing(t *testing.T, got <-chan string) {
	t.Helper()
	select {
	case s := <-got:
		t.Errorf("arrived: %q, want nothing", s)
	case <-time.After(deniedWait):
	}
}

func TestForgedSourceIsDropped(t *testing.T) {
	w := newWorld(t)
	h := openHost(t, Config{})
	b, other := newBox(t, 6, sandbox.NetworkOpen), newBox(t, 7, sandbox.NetworkOpen)
	own, others := attach(t, h, b), attach(t, h, other)
	got := receiver(t, w.internet, "udp4", publicAddr+":7777")
	dst := netip.MustParseAddr(publicAddr)

	must(t, sendRaw(b.NetNS, packet(own, dst, 7777, "own")))
	expect(t, got, "own")
	for _, forged := range []netip.Addr{others, netip.MustParseAddr("1.2.3.4"), netip.MustParseAddr(hostAddr), gateway(h.pool)} {
		was, _, err := h.Counters(b.ID, b.Slot)
		must(t, err)
		must(t, sendRaw(b.NetNS, packet(forged, dst, 7777, "forged")))
		eventually(t, fmt.Sprintf("one more dropped, of source %s", forged), func() bool {
			is, _, err := h.Counters(b.ID, b.Slot)
			must(t, err)
			return is.Dropped == was.Dropped+1
		})
		expectNothing(t, got)
	}
	// Control: without the rules and the route check it passes.
	withoutRules(t, h, func() {
		must(t, sendRaw(b.NetNS, packet(netip.MustParseAddr("1.2.3.4"), dst, 7777, "forged")))
		expectNothing(t, got) // strict reverse-path filtering stands behind the rules
		must(t, writeSysctl(filepath.Join("net/ipv4/conf", linkName(b.ID), "rp_filter"), "0"))
		must(t, sendRaw(b.NetNS, packet(netip.MustParseAddr("1.2.3.4"), dst, 7777, "forged")))
		expect(t, got, "forged")
	})
}

// frame6 is an Ethernet frame with an IPv6 UDP packet.
func frame6(dstMAC, srcMAC net.HardwareAddr, src, dst netip.Addr, port uint16, payload string) []byte {
	udp := []byte{0x30, 0x39, byte(port >> 8), byte(port), 0, byte(8 + len(payload)), 0, 0}
	udp = append(udp, payload...)
	sum := uint32(unix.IPPROTO_UDP) + uint32(len(udp))
	for _, b := range [][]byte{src.AsSlice(), dst.AsSlice(), append(slices.Clip(udp), make([]byte, len(udp)%2)...)} {
		for i := 0; i < len(b); i += 2 {
			sum += uint32(b[i])<<8 | uint32(b[i+1])
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	udp[6], udp[7] = byte(^sum>>8), byte(^sum)
	f := append(append([]byte{}, dstMAC...), srcMAC...)
	f = append(f, 0x86, 0xdd, 0x60, 0, 0, 0, 0, byte(len(udp)), unix.IPPROTO_UDP, 64)
	f = append(append(f, src.AsSlice()...), dst.AsSlice()...)
	return append(f, udp...)
}

func sendFrame(ns *os.File, link string, frame []byte) error {
	return linux.InNetNS(ns, func() error {
		i, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: i.Index, Protocol: 0xdd86})
	})
}

func TestIPv6IsDropped(t *testing.T) {
	newWorld(t)
	addAddr(t, "lo", "2001:db8:1::1/128")
	h := openHost(t, Config{})
	b := newBox(t, 8, sandbox.NetworkOpen)
	attach(t, h, b)
	got := receiver(t, nil, "udp6", "[2001:db8:1::1]:7777")
	frame := frame6(hostMAC(b.Slot), sandboxMAC(b.Slot), netip.MustParseAddr("2001:db8:2::2"), netip.MustParseAddr("2001:db8:1::1"), 7777, "six")

	must(t, linux.InNetNS(b.NetNS, func() error {
		if got := readSysctl(t, "net/ipv6/conf/eth0/disable_ipv6"); got != "1" {
			return fmt.Errorf("inside, disable_ipv6 of eth0 is %s", got)
		}
		return nil
	}))
	must(t, sendFrame(b.NetNS, guestLink, frame))
	expectNothing(t, got)
	// The rules alone suffice, too.
	off := filepath.Join("net/ipv6/conf", linkName(b.ID), "disable_ipv6")
	must(t, writeSysctl(off, "0"))
	must(t, sendFrame(b.NetNS, guestLink, frame))
	eventually(t, "the rules saw the frame", func() bool {
		c, _, err := h.Counters(b.ID, b.Slot)
		must(t, err)
		return c.Dropped > 0
	})
	expectNothing(t, got)
	withoutRules(t, h, func() {
		must(t, sendFrame(b.NetNS, guestLink, frame))
		expect(t, got, "six")
	})
}

func TestPolicyChangesCutLiveConnections(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	b := newBox(t, 9, sandbox.NetworkOff)
	attach(t, h, b)
	if links, err := h.Links(); err != nil || len(links) != 0 {
		t.Fatalf("off made links %v, %v", links, err)
	}
	denied(t, b, "tcp4", publicAddr+":80")
	must(t, linux.InNetNS(b.NetNS, func() error {
		l, err := net.Listen("tcp4", "127.0.0.1:0") // loopback works
		if err == nil {
			l.Close()
		}
		return err
	}))

	a := b.Attachment
	a.NetNS, a.Policy.Mode = nil, sandbox.NetworkOpen
	if err := h.SetPolicy(t.Context(), a); !errors.Is(sandbox.ClassOf(err), sandbox.ErrConflict) {
		t.Errorf("opening without link or namespace: %v, want a conflict", err)
	}
	a.NetNS = b.NetNS
	must(t, h.SetPolicy(t.Context(), a))
	reaches(t, b, "tcp4", publicAddr+":80")

	var c net.Conn
	must(t, linux.InNetNS(b.NetNS, func() (err error) {
		c, err = net.Dial("udp4", publicAddr+":99")
		return err
	}))
	defer c.Close()
	echo := func(wait time.Duration) error {
		if _, err := c.Write([]byte("x")); err != nil {
			return err
		}
		_ = c.SetReadDeadline(time.Now().Add(wait))
		_, err := io.ReadFull(c, make([]byte, 1))
		return err
	}
	must(t, echo(permittedWait))
	a.NetNS, a.Policy.Mode = nil, sandbox.NetworkOff
	must(t, h.SetPolicy(t.Context(), a))
	if err := echo(deniedWait); err == nil {
		t.Error("a connection from before went on after the policy was off")
	}
	denied(t, b, "tcp4", publicAddr+":80")
	a.Policy.Mode = sandbox.NetworkOpen
	must(t, h.SetPolicy(t.Context(), a))
	reaches(t, b, "tcp4", publicAddr+":80")
	eventually(t, "the old connection works again", func() bool { return echo(deniedWait) == nil })
}

// TestUplinkIsNoRouter: the uplink forwards for sandboxes, but the host must
// not become a way between other networks by that.
func TestUplinkIsNoRouter(t *testing.T) {
	w := newWorld(t)
	lan := newNetNS(t)
	must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "lan0", TxQLen: -1}, PeerName: "lan1", PeerTxQLen: -1, PeerNamespace: netlink.NsFd(int(lan.Fd()))}))
	t.Cleanup(func() {
		l, err := netlink.LinkByName("lan0")
		must(t, err)
		must(t, netlink.LinkDel(l))
	})
	addAddr(t, "lan0", "10.77.0.1/24")
	must(t, linux.InNetNS(lan, func() error { addAddr(t, "lan1", "10.77.0.2/24"); return nil }))
	must(t, linux.InNetNS(lan, func() error {
		return netlink.RouteAdd(&netlink.Route{LinkIndex: linkIndex(t, "lan1"), Gw: net.ParseIP("10.77.0.1")})
	}))
	_, dst, _ := net.ParseCIDR("10.77.0.0/24")
	must(t, linux.InNetNS(w.internet, func() error {
		return netlink.RouteAdd(&netlink.Route{LinkIndex: linkIndex(t, "net0"), Dst: dst, Gw: net.ParseIP(hostAddr)})
	}))
	got := receiver(t, lan, "udp4", "10.77.0.2:7777")
	h := openHost(t, Config{})
	attach(t, h, newBox(t, 10, sandbox.NetworkOpen))
	probe := packet(netip.MustParseAddr(internetAddr), netip.MustParseAddr("10.77.0.2"), 7777, "through")
	must(t, sendRaw(w.internet, probe))
	expectNothing(t, got)

	// A restarted daemon still knows that it was the one who did it.
	again, err := Open(t.Context(), Config{})
	must(t, err)
	defer again.Close()
	must(t, sendRaw(w.internet, probe))
	expectNothing(t, got)

	withoutRules(t, h, func() {
		must(t, sendRaw(w.internet, probe))
		expect(t, got, "through")
	})
	// Once the operator wants a router, it is one.
	must(t, writeSysctl("net/ipv4/ip_forward", "1"))
	t.Cleanup(func() { must(t, writeSysctl("net/ipv4/ip_forward", "0")) })
	eventually(t, "forwarding between the host's networks", func() bool {
		must(t, sendRaw(w.internet, probe))
		select {
		case <-got:
			return true
		case <-time.After(deniedWait):
			return false
		}
	})
}
