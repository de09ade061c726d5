//go:build root

package integration

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// The world of the network tests: the host (the namespace this program and
// its daemons are in) has an uplink to an internet and a link to a local
// network. Each of the two is a namespace that takes every address for its own,
// answers on every port, and writes down whatever arrives.
const (
	uplinkAddr   = "93.184.216.1"   // the host on the internet
	internetAddr = "93.184.216.254" // its router
	lanHostAddr  = "10.77.0.1"      // the host on the local network
	lanAddr      = "10.77.0.2"
	gatewayAddr  = "10.213.0.1" // of the sandboxes
	resolverAddr = "9.9.9.9"    // whom the daemon asks
	echoPort     = 7777
)

// Hosts of the internet that tests speak with.
var publicHosts = []string{
	"8.8.4.4", "1.1.1.1", "93.184.216.34", "151.101.1.69", "185.199.108.153", "142.250.74.36", "104.16.132.229", "151.101.65.69",
}

// deniedHosts are public, and closed by the daemon's configuration.
var deniedHosts = []string{"20.205.243.166", "20.205.243.1"}

// admittedHosts are private, and the configuration lets policies name them.
var admittedHosts = []string{"10.77.0.5", "10.77.0.6"}

// privateHosts are never to be reached, though the host routes them all.
var privateHosts = []string{
	"169.254.169.254", "169.254.1.1", "10.9.8.7", "10.78.0.5", "172.16.5.5", "172.31.255.254", "192.168.7.7", "192.168.255.255",
	"100.64.1.1", "100.127.255.254", "198.18.0.1", "192.0.0.9", "192.0.2.1", "198.51.100.1", "203.0.113.1", "240.0.0.1",
}

// hostAddrs are the host's own.
var hostAddrs = []string{uplinkAddr, lanHostAddr, gatewayAddr, "127.0.0.1", "127.0.0.53"}

// networkConfig lets the daemons of these tests know their world.
const networkConfig = "network: {resolvers: [" + resolverAddr + "], admit: [10.77.0.0/24], deny: [20.205.243.0/24]}\n"

// far is one end of a link of the host's.
type far struct {
	ns   *os.File
	seen *capture
}

// within runs f in the namespace.
func (f *far) within(do func() error) error { return linux.InNetNS(f.ns, do) }

// world is what lies around the host.
type world struct {
	internet, lan *far
}

// newNetNS makes an empty network namespace that lives as long as the file.
func newNetNS(t testing.TB) *os.File {
	t.Helper()
	type made struct {
		f   *os.File
		err error
	}
	done := make(chan made)
	go func() {
		runtime.LockOSThread() // thrown away with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- made{nil, err}
			return
		}
		f, err := os.Open("/proc/thread-self/ns/net")
		done <- made{f, err}
	}()
	m := <-done
	if m.err != nil {
		t.Fatal(m.err)
	}
	t.Cleanup(func() { m.f.Close() })
	return m.f
}

// newWorld makes the world and removes it at the end of the test.
func newWorld(t testing.TB) *world {
	t.Helper()
	testenv.Need(t, testenv.Root, testenv.NFT)
	w := &world{
		internet: newFar(t, "itup0", uplinkAddr+"/24", internetAddr+"/24", "2606:2800:220::1/64", "2606:2800:220::fe/64"),
		lan:      newFar(t, "itlan0", lanHostAddr+"/24", lanAddr+"/24", "", ""),
	}
	// The host would forward IPv6 for anybody, if it was let.
	const forwarding = "/proc/sys/net/ipv6/conf/all/forwarding"
	was, err := os.ReadFile(forwarding)
	if err := errors.Join(
		err, os.WriteFile(forwarding, []byte("1"), 0),
		run("ip", "route", "replace", "default", "via", internetAddr),
		run("ip", "-6", "route", "replace", "default", "via", "2606:2800:220::fe"),
	); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.WriteFile(forwarding, was, 0) })
	return w
}

// newFar makes a link of the host's and what lies at its other end.
func newFar(t testing.TB, link, hostCIDR, farCIDR, host6, far6 string) *far {
	t.Helper()
	f := &far{ns: newNetNS(t)}
	if err := errors.Join(
		run("ip", "link", "add", link, "type", "veth", "peer", "name", "net0"),
		moveLink("net0", f.ns),
		run("ip", "addr", "add", hostCIDR, "dev", link),
		run("ip", "link", "set", link, "up"),
	); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = run("ip", "link", "del", link) })
	err := f.within(func() error {
		err := errors.Join(
			run("ip", "link", "set", "lo", "up"),
			run("ip", "addr", "add", farCIDR, "dev", "net0"),
			run("ip", "link", "set", "net0", "up"),
			// Whatever comes in is for us, and on any port.
			run("ip", "route", "add", "local", "default", "dev", "lo", "table", "100"),
			run("ip", "rule", "add", "pref", "1", "iif", "net0", "lookup", "100"),
			nft(farRules),
		)
		if far6 != "" {
			err = errors.Join(err, run("ip", "addr", "add", far6, "dev", "net0", "nodad"))
		}
		return errors.Join(err, f.serve(t))
	})
	if host6 != "" {
		err = errors.Join(err, run("ip", "addr", "add", host6, "dev", link, "nodad"))
	}
	if err != nil {
		t.Fatal(err)
	}
	f.seen = startCapture(t, f.ns, "net0")
	return f
}

// farRules redirect every port to one and count what comes and goes.
var farRules = fmt.Sprintf(`table ip far {
	counter came {}
	counter went {}
	chain count_in { type filter hook prerouting priority -350; iifname net0 counter name came; }
	chain count_out { type filter hook postrouting priority 350; oifname net0 counter name went; }
	chain any_port { type nat hook prerouting priority -100;
		ip daddr %s meta l4proto { tcp, udp } th dport 53 return
		iifname net0 meta l4proto { tcp, udp } redirect to :%d
		iifname net0 icmp type echo-request redirect
	}
}`, resolverAddr, echoPort)

// nft loads rules in the caller's namespace.
func nft(rules string) error {
	cmd := exec.Command("nft", "-f", "-")
	cmd.Stdin = strings.NewReader(rules)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("nft: %w: %s", err, out)
	}
	return nil
}

// moveLink moves a link of this namespace to another.
func moveLink(link string, ns *os.File) error {
	cmd := exec.Command("ip", "link", "set", link, "netns", "/proc/self/fd/3")
	cmd.ExtraFiles = []*os.File{ns}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("move link %s: %w: %s", link, err, out)
	}
	return nil
}

// serve echoes whatever comes; called in the namespace.
func (f *far) serve(t testing.TB) error {
	tcp, err := net.Listen("tcp4", fmt.Sprintf("0.0.0.0:%d", echoPort))
	if err != nil {
		return err
	}
	udp, err := net.ListenUDP("udp4", &net.UDPAddr{Port: echoPort})
	if err != nil {
		return errors.Join(err, tcp.Close())
	}
	_ = udp.SetReadBuffer(8 << 20)
	t.Cleanup(func() { tcp.Close(); udp.Close() })
	go func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	go func() {
		buf := make([]byte, 65536)
		for {
			n, from, err := udp.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			_, _ = udp.WriteToUDPAddrPort(buf[:n], from)
		}
	}()
	return nil
}

// traffic reads a far counter: bytes of IP, and packets.
func (f *far) traffic(t testing.TB, name string) (bytes, packets uint64) {
	t.Helper()
	var out []byte
	err := f.within(func() (err error) {
		out, err = exec.Command("nft", "-j", "list", "counter", "ip", "far", name).Output()
		return err
	})
	var list struct {
		Nftables []struct {
			Counter *struct{ Bytes, Packets uint64 } `json:"counter"`
		} `json:"nftables"`
	}
	if err := errors.Join(err, json.Unmarshal(out, &list)); err != nil {
		t.Fatalf("read counter %s: %v: %s", name, err, out)
	}
	for _, item := range list.Nftables {
		if item.Counter != nil {
			return item.Counter.Bytes, item.Counter.Packets
		}
	}
	t.Fatalf("no counter %s in %s", name, out)
	return 0, 0
}

// hostWatch tells what sandboxes got through to the host itself.
type hostWatch struct{ t testing.TB }

// watchHost counts, behind every rule of the daemon's, packets from sandboxes
// that begin something, by where they wanted to go at first.
func watchHost(t testing.TB) hostWatch {
	t.Helper()
	const rules = `table ip itwatch {
		set seen { type ipv4_addr . inet_proto . inet_service; flags dynamic; size 65535; }
		counter others {}
		chain in { type filter hook input priority 500;
			iifname != "vsb*" return
			ct direction reply return
			meta l4proto { tcp, udp } update @seen { ct original ip daddr . meta l4proto . ct original proto-dst } return
			counter name others
		}
	}`
	if err := nft(rules); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = run("nft", "delete", "table", "ip", "itwatch") })
	return hostWatch{t}
}

// arrived lists what got through, and forgets it.
func (h hostWatch) arrived() (list []string) {
	h.t.Helper()
	out, err := exec.Command("nft", "-j", "list", "table", "ip", "itwatch").Output()
	var table struct {
		Nftables []struct {
			Set *struct {
				Elem []any `json:"elem"`
			} `json:"set"`
			Counter *struct{ Packets uint64 } `json:"counter"`
		} `json:"nftables"`
	}
	if err := errors.Join(err, json.Unmarshal(out, &table), run("nft", "flush", "set", "ip", "itwatch", "seen"), run("nft", "reset", "counters", "table", "ip", "itwatch")); err != nil {
		h.t.Fatal(err)
	}
	for _, item := range table.Nftables {
		if item.Set != nil {
			for _, e := range item.Set.Elem {
				list = append(list, fmt.Sprint(e))
			}
		}
		if item.Counter != nil && item.Counter.Packets > 0 {
			list = append(list, fmt.Sprintf("%d packets that are neither TCP nor UDP", item.Counter.Packets))
		}
	}
	return list
}

// netnsOf opens the network namespace of a sandbox.
func netnsOf(t testing.TB, pid int) *os.File {
	t.Helper()
	f, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// addr parses an address of this file.
func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// settle waits until nothing has arrived anywhere for a moment.
func (w *world) settle(t testing.TB) {
	t.Helper()
	const calm = 60 * time.Millisecond
	last, since := w.internet.seen.total()+w.lan.seen.total(), time.Now()
	testenv.Eventually(t, 30*time.Second, "nothing arrives any more", func() bool {
		if now := w.internet.seen.total() + w.lan.seen.total(); now != last {
			last, since = now, time.Now()
		}
		return time.Since(since) > calm
	})
}
