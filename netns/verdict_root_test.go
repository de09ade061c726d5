//go:build root

package netns

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// policyBox is an attached sandbox with a policy.
func policyBox(t testing.TB, h *Host, slot int, p sandbox.NetworkPolicy) *box {
	t.Helper()
	b := newBox(t, slot, p.Mode)
	b.Policy = p
	attach(t, h, b)
	return b
}

func (b *box) become(t testing.TB, h *Host, p sandbox.NetworkPolicy) {
	t.Helper()
	b.Policy = p
	must(t, h.SetPolicy(t.Context(), b.Attachment))
}

func allowing(rules ...string) sandbox.NetworkPolicy {
	return sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Allow: rules}
}

func opened(deny ...string) sandbox.NetworkPolicy {
	return sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen, Deny: deny}
}

func TestAllowListIsAll(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	b := policyBox(t, h, 100, allowing(publicAddr+":79-80,9999/tcp", "93.184.216.0/24:99"))
	reaches(t, b, "tcp4", publicAddr+":80")
	reaches(t, b, "udp4", internetAddr+":99")
	no := []struct{ network, addr string }{
		{"udp4", publicAddr + ":99"},
		{"tcp4", internetAddr + ":80"},
	}
	for _, c := range no {
		denied(t, b, c.network, c.addr)
	}
	b.become(t, h, opened())
	for _, c := range no {
		reaches(t, b, c.network, c.addr)
	}
	b.become(t, h, allowing())
	denied(t, b, "tcp4", publicAddr+":80")
}

func TestDenyListWins(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	b := policyBox(t, h, 101, opened(publicAddr+":80/tcp"))
	denied(t, b, "tcp4", publicAddr+":80")
	reaches(t, b, "udp4", publicAddr+":99")
	p := allowing("0.0.0.0/0")
	p.Deny = []string{"8.8.0.0/16"}
	b.become(t, h, p)
	denied(t, b, "tcp4", publicAddr+":80")
	reaches(t, b, "tcp4", internetAddr+":80")
	b.become(t, h, opened())
	reaches(t, b, "tcp4", publicAddr+":80")
}

func TestNamesAreNotAskedPastTheDaemon(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	b := policyBox(t, h, 102, opened())
	all := policyBox(t, h, 103, allowing("0.0.0.0/0"))
	for _, b := range []*box{b, all} {
		denied(t, b, "udp4", publicAddr+":53")
		denied(t, b, "tcp4", publicAddr+":53")
	}
	flush(t, h, func() { h.table.conn.FlushSet(setPlan{name: setNames}.kernel()) })
	for _, b := range []*box{b, all} {
		reaches(t, b, "udp4", publicAddr+":53")
		reaches(t, b, "tcp4", publicAddr+":53")
	}
}

func TestPrivateRangesAreAdmitted(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{Admit: []netip.Prefix{prefix("192.168.7.0/24"), prefix("169.254.0.0/16")}, Deny: []netip.Prefix{prefix("169.254.169.254/32")}})
	b := policyBox(t, h, 104, opened())
	denied(t, b, "tcp4", privateAddr+":80") // admitted, but not named
	p := opened()
	p.Allow = []string{privateAddr + ":80"}
	must(t, h.CheckPolicy(p))
	b.become(t, h, p)
	reaches(t, b, "tcp4", privateAddr+":80")
	reaches(t, b, "tcp4", publicAddr+":80")
	denied(t, b, "udp4", privateAddr+":99")
	p.Allow = []string{"0.0.0.0/0"}
	b.become(t, h, p)
	reaches(t, b, "udp4", privateAddr+":99")
	denied(t, b, "tcp4", resolverAddr+":80")
	denied(t, b, "tcp4", metadataAddr+":80")
	for _, rule := range []string{"10.0.0.0/8:80", metadataAddr, gateway(h.pool).String(), "192.168.8.1"} {
		if err := h.CheckPolicy(allowing(rule)); !errors.Is(sandbox.ClassOf(err), sandbox.ErrForbidden) {
			t.Errorf("rule %s: %v, want it forbidden", rule, err)
		}
	}
}

func pin(t testing.TB, h *Host, b *box, name string, addrs ...string) {
	t.Helper()
	var all []netip.Addr
	for _, a := range addrs {
		all = append(all, netipAddr(a))
	}
	must(t, h.Pin(t.Context(), b.ID, name, all, time.Minute))
}

func TestPins(t *testing.T) {
	newWorld(t)
	h, err := Open(t.Context(), Config{})
	must(t, err)
	p := allowing("*.example.com:80,1000-2000/tcp", "echo.test:99/udp", "wide.test:1-30000", "all.test", "tcp.test/tcp")
	b := policyBox(t, h, 105, p)
	for _, c := range []struct {
		name    string
		yes, no []string
	}{
		{"www.example.com.", []string{"tcp4 :80"}, []string{"udp4 :99"}},
		{"echo.test", []string{"udp4 :99"}, []string{"tcp4 :80"}},
		{"WIDE.test", []string{"udp4 :99", "tcp4 :80"}, nil},
		{"all.test", []string{"udp4 :99", "tcp4 :80"}, nil},
		{"tcp.test", []string{"tcp4 :80"}, []string{"udp4 :99"}},
		{"example.com", nil, []string{"udp4 :99", "tcp4 :80"}},
	} {
		b.become(t, h, sandbox.NetworkPolicy{})
		h.order.Lock()
		delete(h.pins, b.ID) // or they would come back
		h.order.Unlock()
		b.become(t, h, p)
		for _, probe := range append(c.yes, c.no...) {
			network, port, _ := strings.Cut(probe, " ")
			denied(t, b, network, publicAddr+port)
		}
		pin(t, h, b, c.name, publicAddr, privateAddr)
		for _, probe := range c.yes {
			network, port, _ := strings.Cut(probe, " ")
			reaches(t, b, network, publicAddr+port)
			denied(t, b, network, internetAddr+port)
			denied(t, b, network, privateAddr+port)
		}
		for _, probe := range c.no {
			network, port, _ := strings.Cut(probe, " ")
			denied(t, b, network, publicAddr+port)
		}
	}
	// They outlive the daemon, and policies that mean the same name.
	pin(t, h, b, "www.example.com", publicAddr)
	before := snapshot(t, h)
	must(t, h.Close())
	h = openHost(t, Config{})
	must(t, h.Recover(t.Context(), map[sandbox.ID]Attachment{b.ID: b.Attachment}))
	if d := cmp.Diff(own(before), own(snapshot(t, h))); d != "" {
		t.Errorf("a restart changed what is the sandbox's own:\n%s", d)
	}
	reaches(t, b, "tcp4", publicAddr+":80")
	b.become(t, h, allowing("www.example.com:80", "9.9.9.9"))
	reaches(t, b, "tcp4", publicAddr+":80")
	b.become(t, h, allowing("web.example.com:80", "9.9.9.9"))
	denied(t, b, "tcp4", publicAddr+":80")
	must(t, h.Pin(t.Context(), b.ID, "web.example.com", []netip.Addr{netipAddr(publicAddr)}, 0)) // no time at all
	reaches(t, b, "tcp4", publicAddr+":80")
}

// own keeps the lines of a snapshot that tell of chains, lists and pins of
// links.
func own(lines []string) []string {
	var out []string
	for _, l := range lines {
		what, _, _ := strings.Cut(strings.ReplaceAll(l, "-", " "), " ")
		if strings.Contains(l, "-"+linkPrefix) ||
			strings.Contains(l, linkPrefix) && slices.Contains([]string{setClasses, setPins, setPast, "places", "ports"}, what) {
			out = append(out, l)
		}
	}
	return out
}

// TestToolShowsLists: intervals of several fields are not what nft knows, and a
// set it dies of is none an operator can look at.
func TestToolShowsLists(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	b := policyBox(t, h, 107, allowing("9.9.9.0/24:80,1000-2000/tcp", "9.9.9.77/udp", "www.example.com:443,1000-2000"))
	pin(t, h, b, "www.example.com", publicAddr)
	l, _ := h.lookup(b.ID)
	for _, c := range []struct{ kind, name, want string }{
		{"map", setShelves, "0x"},
		{"map", placesOn(l.shelf()), "-"},
		{"set", portsOn(l.shelf()), "-"},
		{"map", setClasses, "-"},
		{"set", setPins, "www.example.com"},
	} {
		out, err := exec.Command("nft", "list", c.kind, "inet", tableName, c.name).CombinedOutput()
		if _, elements, _ := strings.Cut(string(out), "elements = {"); err != nil || !strings.Contains(elements, c.want) {
			t.Errorf("nft list %s %s: %v: %s", c.kind, c.name, err, out)
		}
	}
}

func TestTooManyPinsMakeRoom(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	b := policyBox(t, h, 106, allowing("*:80/tcp"))
	addrs := make([]netip.Addr, maxPins)
	for i := range addrs {
		addrs[i] = addrOf(0x01000000 + uint32(i))
	}
	must(t, h.Pin(t.Context(), b.ID, "many.example", addrs, time.Minute))
	must(t, h.Pin(t.Context(), b.ID, "last.example", []netip.Addr{netipAddr(publicAddr)}, time.Hour))
	reaches(t, b, "tcp4", publicAddr+":80")
	if n := len(pinsOf(t, h, b.ID)); n > maxPins || n < maxPins-2*pinRoom {
		t.Errorf("%d pins, want at most %d and not many fewer", n, maxPins)
	}
}

func TestGroups(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	team := allowing()
	team.Group = "team"
	a, b, c := policyBox(t, h, 107, team), policyBox(t, h, 108, team), policyBox(t, h, 109, allowing("10.213.0.0/16", "0.0.0.0/0"))
	other := opened()
	other.Group = "other"
	d := policyBox(t, h, 110, other)
	addr := func(b *box) string {
		x, err := h.Address(b.Slot)
		must(t, err)
		return x.String()
	}
	listenTCP(t, b.NetNS, "0.0.0.0:53") // within a group names may be served
	listenTCP(t, a.NetNS, "0.0.0.0:8080")
	if from := reaches(t, a, "tcp4", addr(b)+":53"); !strings.HasPrefix(from, addr(a)+":") {
		t.Errorf("a member saw %q, want the other's own address %s", from, addr(a))
	}
	reaches(t, b, "tcp4", addr(a)+":8080")
	for _, x := range []*box{c, d} {
		denied(t, x, "tcp4", addr(b)+":53")
	}
	var ca, cb sandbox.NetCounters
	if !testenv.Within(15*time.Second, func() bool { // the last reset may be counted later
		var erra, errb error
		ca, _, erra = h.Counters(a.ID, a.Slot)
		cb, _, errb = h.Counters(b.ID, b.Slot)
		must(t, errors.Join(erra, errb))
		return ca.TxBytes > 0 && ca.TxBytes == cb.RxBytes && ca.RxPackets == cb.TxPackets
	}) {
		t.Errorf("members counted %+v and %+v of the same packets", ca, cb)
	}
	a.Name = "alpha"
	denying := team
	denying.Deny = []string{addr(b) + ":53"}
	a.become(t, h, denying)
	denied(t, a, "tcp4", addr(b)+":53")
	reaches(t, b, "tcp4", addr(a)+":8080")
	if got, ok := h.Peer(b.ID, "alpha"); !ok || got.String() != addr(a) {
		t.Errorf("the peer alpha is %s, %v", got, ok)
	}
	if _, ok := h.Peer(d.ID, "alpha"); ok {
		t.Error("another group's member is found")
	}
	if tenant, ok := h.Tenant(netipAddr(addr(a))); !ok || tenant.ID != a.ID || tenant.Name != "alpha" || tenant.Policy.Group != "team" {
		t.Errorf("the tenant of %s is %+v, %v", addr(a), tenant, ok)
	}
	a.become(t, h, allowing())
	denied(t, a, "tcp4", addr(b)+":53")
	denied(t, b, "tcp4", addr(a)+":8080")
	d.become(t, h, team)
	reaches(t, d, "tcp4", addr(b)+":53")
}

// say serves TCP and UDP on one port of the gateway and says who it is.
func say(t testing.TB, h *Host, word string) uint16 {
	t.Helper()
	l, err := net.Listen("tcp4", h.Gateway().String()+":0")
	must(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			fmt.Fprintln(c, word, c.RemoteAddr())
			go func() {
				_ = c.SetReadDeadline(time.Now().Add(time.Second))
				_, _ = io.Copy(io.Discard, c)
				resetOnClose(c)
				c.Close()
			}()
		}
	}()
	c, err := net.ListenPacket("udp4", l.Addr().String())
	must(t, err)
	t.Cleanup(func() { c.Close() })
	go func() {
		buf := make([]byte, 100)
		for {
			_, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = c.WriteTo([]byte(word+" "+from.String()), from)
		}
	}()
	return netip.MustParseAddrPort(l.Addr().String()).Port()
}

func TestServicesOfTheDaemon(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	listenTCP(t, nil, "0.0.0.0:8080")
	gated := opened()
	gated.HTTP = &sandbox.HTTPGate{}
	plain, web, off := policyBox(t, h, 111, allowing()), policyBox(t, h, 112, gated), policyBox(t, h, 113, opened())
	gw := h.Gateway().String()
	denied(t, plain, "udp4", gw+":53") // nothing serves yet
	denied(t, web, "tcp4", publicAddr+":80")
	dns, gate := say(t, h, "dns"), say(t, h, "gate")
	must(t, h.Redirect(t.Context(), Services{DNS: dns, Gate: gate}))
	off.become(t, h, sandbox.NetworkPolicy{})

	addr, err := h.Address(plain.Slot)
	must(t, err)
	for _, network := range []string{"tcp4", "udp4"} {
		if said := reaches(t, plain, network, gw+":53"); !strings.HasPrefix(said, "dns "+addr.String()+":") {
			t.Errorf("%s to the gateway's port 53: %q", network, said)
		}
		denied(t, off, network, gw+":53")
		for _, port := range []uint16{dns, gate, 80, 8080} {
			denied(t, plain, network, fmt.Sprintf("%s:%d", gw, port))
			denied(t, web, network, fmt.Sprintf("%s:%d", gw, port))
		}
	}
	for _, a := range []string{publicAddr, privateAddr, metadataAddr} {
		if said := reaches(t, web, "tcp4", a+":80"); !strings.HasPrefix(said, "gate ") {
			t.Errorf("web traffic of a gated sandbox to %s met %q", a, said)
		}
	}
	reaches(t, web, "udp4", publicAddr+":99")
	denied(t, plain, "tcp4", publicAddr+":80")
	web.become(t, h, opened())
	if said := reaches(t, web, "tcp4", publicAddr+":80"); strings.HasPrefix(said, "gate") {
		t.Errorf("web traffic of a sandbox without a gate met %q", said)
	}
	// The table made anew leads there too.
	flush(t, h, h.table.conn.FlushRuleset)
	must(t, h.heal())
	reaches(t, plain, "udp4", gw+":53")
	must(t, h.Redirect(t.Context(), Services{}))
	denied(t, plain, "udp4", gw+":53")
}

// talker is a TCP connection from a sandbox to a server that echoes lines, or
// sends without end.
func talker(t testing.TB, b *box, addr string) net.Conn {
	t.Helper()
	var c net.Conn
	must(t, linux.InNetNS(b.NetNS, func() (err error) {
		c, err = net.DialTimeout("tcp4", addr, 5*time.Second)
		return err
	}))
	t.Cleanup(func() { resetOnClose(c); c.Close() })
	return c
}

func echoServer(t testing.TB, w *world, addr string) {
	t.Helper()
	must(t, linux.InNetNS(w.internet, func() error {
		l, err := net.Listen("tcp4", addr)
		if err != nil {
			return err
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					r := bufio.NewReader(c)
					line, _ := r.ReadString('\n')
					for strings.HasPrefix(line, "flood") {
						if _, err := c.Write(make([]byte, 1000)); err != nil {
							return
						}
						<-time.After(5 * time.Millisecond)
					}
					_, _ = io.WriteString(c, line)
					_, _ = io.Copy(c, r)
				}()
			}
		}()
		return nil
	}))
}

func TestPolicyChangeJudgesLiveFlows(t *testing.T) {
	w := newWorld(t)
	h := openHost(t, Config{})
	echoServer(t, w, publicAddr+":7")
	echoServer(t, w, internetAddr+":7")
	b := policyBox(t, h, 114, opened())
	stays, goes, download := talker(t, b, internetAddr+":7"), talker(t, b, publicAddr+":7"), talker(t, b, internetAddr+":7")
	echo := func(c net.Conn) error {
		_ = c.SetDeadline(time.Now().Add(2 * time.Second))
		if _, err := c.Write([]byte("x\n")); err != nil {
			return err
		}
		_, err := io.ReadFull(c, make([]byte, 2))
		return err
	}
	must(t, echo(stays))
	must(t, echo(goes))
	_, err := download.Write([]byte("flood\n"))
	must(t, err)
	flowing := func() {
		t.Helper()
		_ = download.SetReadDeadline(time.Now().Add(2 * time.Second))
		if _, err := io.ReadFull(download, make([]byte, 20000)); err != nil {
			t.Errorf("the permitted download: %v", err)
		}
	}
	for i := range 10 {
		b.become(t, h, allowing(internetAddr, fmt.Sprintf("9.9.9.%d", i)))
		flowing()
		must(t, echo(stays))
	}
	if err := echo(goes); err == nil {
		t.Error("a forbidden connection goes on")
	} else if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a forbidden connection ended by time alone: no reset: %v", err)
	}
	must(t, echo(stays))
	b.become(t, h, sandbox.NetworkPolicy{})
	if err := echo(stays); err == nil {
		t.Error("a connection goes on after the policy was off")
	}
}

// TestPolicyChangeKeepsFlowsOfExpiredPins: the name is still permitted, and a
// connection to an address that it had goes on; a new one needs a new answer.
func TestPolicyChangeKeepsFlowsOfExpiredPins(t *testing.T) {
	w := newWorld(t)
	h := openHost(t, Config{})
	echoServer(t, w, publicAddr+":7")
	b := policyBox(t, h, 115, allowing("www.example.com:7"))
	pin(t, h, b, "www.example.com", publicAddr)
	c := talker(t, b, publicAddr+":7")
	echo := func() error {
		_ = c.SetDeadline(time.Now().Add(2 * time.Second))
		if _, err := c.Write([]byte("x\n")); err != nil {
			return err
		}
		_, err := io.ReadFull(c, make([]byte, 2))
		return err
	}
	must(t, echo())
	expire := func() { // as if its time were over, in the kernel and here
		h.order.Lock()
		defer h.order.Unlock()
		for name, addrs := range h.pins[b.ID].names {
			for addr := range addrs {
				h.pins[b.ID].names[name][addr] = time.Now()
			}
		}
		clear(h.pins[b.ID].keys)
		flush(t, h, func() { h.table.conn.FlushSet(setPlan{name: setPins}.kernel()) })
	}
	expire()
	b.become(t, h, allowing("www.example.com:7", "9.9.9.9"))
	must(t, echo())
	denied(t, b, "tcp4", publicAddr+":7")
	b.become(t, h, allowing("www.example.com:7", "9.9.9.8"))
	must(t, echo())
	b.become(t, h, allowing("other.example.com:7"))
	if err := echo(); err == nil {
		t.Error("a connection to a name that is not permitted any more goes on")
	}
}

func TestLimits(t *testing.T) {
	w := newWorld(t)
	h := openHost(t, Config{})
	send := func(b *box, n int, newFlows bool) uint64 {
		t.Helper()
		before, _, err := h.Counters(b.ID, b.Slot)
		must(t, err)
		addr, err := h.Address(b.Slot)
		must(t, err)
		for i := range n {
			p := packet(addr, netipAddr(publicAddr), 7777, "x")
			if newFlows {
				p[20], p[21] = byte((i+2000)>>8), byte(i+2000)
			}
			must(t, sendRaw(b.NetNS, p))
		}
		var refused uint64
		testenv.Eventually(t, 20*time.Second, "every packet is counted", func() bool { // a busy kernel takes them later
			after, _, err := h.Counters(b.ID, b.Slot)
			must(t, err)
			refused = after.Dropped - before.Dropped
			return refused+after.TxPackets-before.TxPackets >= uint64(n)
		})
		return refused
	}
	receiver(t, w.internet, "udp4", publicAddr+":7777")
	for i, c := range []struct {
		name     string
		limits   sandbox.NetworkLimits
		newFlows bool
		most     uint64 // that pass of 200 sent at once
	}{
		{"packets", sandbox.NetworkLimits{PacketsPerSecond: 40}, false, 16 + 40},
		{"new flows", sandbox.NetworkLimits{ConnectionsPerSecond: 10}, true, 4 + 10},
		{"flows", sandbox.NetworkLimits{Flows: 20}, true, 21},
	} {
		free := policyBox(t, h, 120+2*i, opened())
		p := opened()
		p.Limits = c.limits
		bound := policyBox(t, h, 121+2*i, p)
		if n := send(free, 200, c.newFlows); n != 0 {
			t.Errorf("%s: without the limit %d packets were refused", c.name, n)
		}
		start := time.Now()
		n := send(bound, 200, c.newFlows)
		if secs := uint64(time.Since(start)/time.Second) + 1; n+c.most*secs < 200 || n >= 199 {
			t.Errorf("%s: %d of 200 packets were refused, want about %d", c.name, n, 200-c.most)
		}
	}
}

func TestListsComeBackAfterAFlush(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	p := allowing("*.example.com:80", internetAddr)
	p.Deny = []string{internetAddr + ":80"}
	p.Limits.Flows = 100
	b := policyBox(t, h, 130, p)
	pin(t, h, b, "a.example.com", publicAddr)
	check := func() {
		t.Helper()
		reaches(t, b, "tcp4", publicAddr+":80")
		reaches(t, b, "udp4", internetAddr+":99")
		denied(t, b, "tcp4", internetAddr+":80")
		denied(t, b, "udp4", publicAddr+":99")
	}
	check()
	flush(t, h, h.table.conn.FlushRuleset)
	must(t, h.heal())
	check()
}

func TestRecoverLists(t *testing.T) {
	newWorld(t)
	h, err := Open(t.Context(), Config{})
	must(t, err)
	p := allowing(publicAddr, "*.example.com")
	p.Deny, p.Group, p.Limits.PacketsPerSecond = []string{"9.9.9.9"}, "team", 1000
	kept, changed, lost := policyBox(t, h, 131, p), policyBox(t, h, 132, p), policyBox(t, h, 133, p)
	before := snapshot(t, h)
	must(t, h.Close())
	h = openHost(t, Config{})
	changed.Policy = allowing(internetAddr)
	keep := map[sandbox.ID]Attachment{kept.ID: kept.Attachment, changed.ID: changed.Attachment}
	must(t, h.Recover(t.Context(), keep))
	before, after := quiet(before), quiet(snapshot(t, h))
	only := func(lines []string, id sandbox.ID) (out []string) {
		for _, l := range lines {
			if strings.Contains(l, string(id)) {
				out = append(out, l)
			}
		}
		return out
	}
	if d := cmp.Diff(only(before, kept.ID), only(after, kept.ID)); d != "" {
		t.Errorf("what was right changed:\n%s", d)
	}
	if left := own(only(after, lost.ID)); len(left) > 0 {
		t.Errorf("left of the lost sandbox: %q", left)
	}
	reaches(t, kept, "tcp4", publicAddr+":80")
	reaches(t, changed, "tcp4", internetAddr+":80")
	denied(t, changed, "tcp4", publicAddr+":80")
	denied(t, lost, "tcp4", publicAddr+":80")
	again := quiet(snapshot(t, h))
	must(t, h.Recover(t.Context(), keep))
	if d := cmp.Diff(again, quiet(snapshot(t, h))); d != "" {
		t.Errorf("the second Recover changed:\n%s", d)
	}
	for _, b := range []*box{kept, changed} {
		b.kill()
		must(t, h.Detach(t.Context(), b.ID, b.Slot))
	}
	if left := own(snapshot(t, h)); len(left) > 0 {
		t.Errorf("left of removed sandboxes: %q", left)
	}
}

// TestToolListsRuleset: the nft of Debian 12 aborts on a lookup by what has no
// length to it, and then nobody can list or save the host's firewall.
func TestToolListsRuleset(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{Installation: "here"})
	b := policyBox(t, h, 108, allowing("9.9.9.0/24:80,1000-2000/tcp", "www.example.com:443"))
	pin(t, h, b, "www.example.com", publicAddr)
	out, err := exec.Command("nft", "list", "ruleset").CombinedOutput()
	for _, want := range []string{"table inet " + tableName, setPins, "www.example.com", `comment "here"`, "chain outbound"} {
		if err != nil || !strings.Contains(string(out), want) {
			t.Fatalf("nft list ruleset: %v, want %q in:\n%.2000s", err, want, out)
		}
	}
	if version, err := exec.Command("nft", "--version").Output(); err == nil {
		t.Logf("%s: %d bytes", strings.TrimSpace(string(version)), len(out))
	}
}
