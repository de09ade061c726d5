//go:build root

package netns

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// opening is the first packet of a flow: a SYN, a datagram or an echo request.
func opening(src netip.Addr, f flow, srcPort uint16) []byte {
	var body []byte
	switch f.proto {
	case unix.IPPROTO_TCP:
		body = make([]byte, 20)
		body[12], body[13], body[14] = 5<<4, flagSYN, 0xff
	case unix.IPPROTO_UDP:
		body = make([]byte, 8)
		body[5] = 8
	default:
		body = []byte{8, 0, 0, 0, byte(srcPort >> 8), byte(srcPort), 0, 1}
	}
	sumAt := map[byte]int{unix.IPPROTO_TCP: 16, unix.IPPROTO_UDP: 6, unix.IPPROTO_ICMP: 2}[f.proto]
	var pseudo []byte
	if f.proto != unix.IPPROTO_ICMP {
		binary.BigEndian.PutUint16(body, srcPort)
		binary.BigEndian.PutUint16(body[2:], f.port)
		pseudo = append(append(src.AsSlice(), f.dest.AsSlice()...), 0, f.proto, 0, byte(len(body)))
	}
	var sum uint32
	for _, b := range [][]byte{pseudo, body} {
		for i := 0; i+1 < len(b); i += 2 {
			sum += uint32(b[i])<<8 | uint32(b[i+1])
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(body[sumAt:], ^uint16(sum))
	p := make([]byte, 20, 20+len(body))
	p[0], p[8], p[9] = 0x45, 64, f.proto
	copy(p[12:], src.AsSlice())
	copy(p[16:], f.dest.AsSlice())
	return append(p, body...)
}

// kernelSays sends the first packet of a flow and tells from the sandbox's
// counters whether it was let through.
func kernelSays(t *testing.T, h *Host, b *box, own netip.Addr, f flow, srcPort uint16) bool {
	t.Helper()
	was, _, err := h.Counters(b.ID, b.Slot)
	must(t, err)
	must(t, sendRaw(b.NetNS, opening(own, f, srcPort)))
	for deadline := time.Now().Add(5 * time.Second); ; <-time.After(time.Millisecond) {
		is, _, err := h.Counters(b.ID, b.Slot)
		must(t, err)
		switch sent, dropped := is.TxPackets-was.TxPackets, is.Dropped-was.Dropped; {
		case sent == 1 && dropped == 0:
			return true
		case sent == 0 && dropped == 1:
			return false
		case sent+dropped > 1:
			t.Fatalf("one packet was counted as %d sent and %d dropped", sent, dropped)
		}
		if time.Now().After(deadline) {
			t.Fatalf("the packet to %v is not counted at all", f)
		}
	}
}

// dice makes policies and flows.
type dice struct {
	*rand.Rand
	dests []string
}

func (d dice) pick(words ...string) string { return words[d.IntN(len(words))] }

func (d dice) rule() string {
	dest := d.pick(d.dests...)
	if d.IntN(3) == 0 {
		bits := []int{0, 8, 16, 24, 31}[d.IntN(5)]
		dest = netip.PrefixFrom(netip.MustParseAddr(dest), bits).Masked().String()
	}
	if d.IntN(3) == 0 {
		dest = d.pick("pin.example", "*.wild.example", "*")
	}
	ports := d.pick("", "", ":443", ":80,443", ":8000-8100", ":1-65535", ":22,53,80-90,443,853,8000-9000")
	proto := d.pick("", "", "/tcp", "/udp", "/icmp")
	if ports != "" && proto == "/icmp" {
		proto = ""
	}
	return dest + ports + proto
}

func (d dice) policy() sandbox.NetworkPolicy {
	p := sandbox.NetworkPolicy{Mode: []sandbox.NetworkMode{sandbox.NetworkAllow, sandbox.NetworkOpen}[d.IntN(2)]}
	if d.IntN(8) == 0 {
		p.Mode = sandbox.NetworkOff
	}
	for range d.IntN(4) {
		p.Deny = append(p.Deny, d.rule())
	}
	if !p.Connected() {
		return p
	}
	for range d.IntN(6) {
		p.Allow = append(p.Allow, d.rule())
	}
	p.Group = d.pick("", "ring", "other")
	if d.IntN(4) == 0 {
		p.HTTP = &sandbox.HTTPGate{}
	}
	return p
}

func (d dice) flow() flow {
	f := flow{dest: netip.MustParseAddr(d.pick(d.dests...)), proto: []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_ICMP}[d.IntN(3)]}
	if f.proto != unix.IPPROTO_ICMP {
		f.port = []uint16{22, 53, 80, 443, 853, 8000, 8050, 8100, 8101, 40000}[d.IntN(10)]
	}
	return f
}

// TestExplainAgreesWithTheKernel asks both about the same flows under the same
// policies: of all steps there are, and at random.
func TestExplainAgreesWithTheKernel(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{Admit: []netip.Prefix{prefix("10.1.0.0/16")}, Deny: []netip.Prefix{prefix("44.1.0.0/16")}})
	// Nobody listens there: what gets through is answered by nothing that
	// would be counted.
	must(t, h.Redirect(t.Context(), Services{DNS: 9953, Gate: 9980}))
	fellow, stranger := newBox(t, 11, sandbox.NetworkOpen), newBox(t, 12, sandbox.NetworkOpen)
	fellow.Policy.Group, stranger.Policy.Group = "ring", "other"
	fellowAddr, strangerAddr := attach(t, h, fellow), attach(t, h, stranger)
	b := newBox(t, 10, sandbox.NetworkOpen)
	own := attach(t, h, b)

	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	d := dice{rand.New(rand.NewPCG(seed, 1)), []string{
		"8.8.4.5", "8.8.4.6", "9.9.9.77", "1.2.3.4", "1.2.3.5", "223.1.2.3", // silent ones of the internet
		"10.1.2.3", "10.1.255.9", "10.2.3.4", "192.168.3.3", "172.16.9.9", "100.64.7.7", "169.254.169.250", "44.1.2.3", "198.18.0.7", "240.1.2.3",
		hostAddr, "93.184.216.255", "224.0.0.9", gateway(h.pool).String(), fellowAddr.String(), strangerAddr.String(), "10.213.200.9",
	}}
	steps := map[string]int{}
	srcPort := uint16(20000)
	asked := 0
	covered := func() bool {
		return asked >= 300 && !slices.ContainsFunc(wantSteps, func(s string) bool { return steps[s] == 0 })
	}
	for range 1000 {
		if covered() {
			break
		}
		p := d.policy()
		if err := h.CheckPolicy(p); err != nil {
			continue
		}
		a := b.Attachment
		a.Policy = p
		must(t, h.SetPolicy(t.Context(), a))
		must(t, h.Pin(t.Context(), b.ID, "pin.example", []netip.Addr{netipAddr("1.2.3.4"), netipAddr("10.1.2.3")}, time.Minute))
		must(t, h.Pin(t.Context(), b.ID, "a.wild.example", []netip.Addr{netipAddr("1.2.3.5"), netipAddr("192.168.3.3")}, time.Minute))
		for range 10 {
			f := d.flow()
			v, err := h.Explain(a, sandbox.NetworkQuery{Dest: f.dest.String(), Port: f.port, Protocol: protocolName(4, f.proto)})
			must(t, err)
			asked++
			srcPort = max(20000, srcPort+1)
			if got := kernelSays(t, h, b, own, f, srcPort); got != v.Allowed {
				t.Errorf("%v under %+v: the kernel says %v, explained as %+v", f, p, got, v)
			}
			steps[fmt.Sprint(v.Step, " ", v.Allowed)]++
			if len(v.Steps) == 0 || v.Why == "" || v.Steps[len(v.Steps)-1].Step != v.Step {
				t.Errorf("a verdict without its steps: %+v", v)
			}
		}
	}
	t.Logf("steps that decided: %v", steps)
	if !covered() {
		t.Errorf("%d flows; to be decided by %v", asked, wantSteps)
	}
}

// wantSteps is what must have decided some flow, and how.
var wantSteps = []string{
	"off false", "host false", "closed false", "dns false", "deny false", "allow true", "pin true", "default false", "open true", "private false",
	"group false", "group true", "gate false", "gate true", "service true",
}

// TestExplainPins: a pin permits while it lives, what it pins, and is shown.
func TestExplainPins(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	b := newBox(t, 10, sandbox.NetworkAllow)
	b.Policy.Allow = []string{"pin.example:443", "*.wild.example:8000-8100/udp", "whole.example"}
	own := attach(t, h, b)
	ask := func(dest string, port uint16, proto string) sandbox.NetworkVerdict {
		t.Helper()
		v, err := h.Explain(b.Attachment, sandbox.NetworkQuery{Dest: dest, Port: port, Protocol: proto})
		must(t, err)
		return v
	}
	srcPort := uint16(30000)
	same := func(dest string, port uint16, proto string, want bool, step string) {
		t.Helper()
		srcPort++
		v := ask(dest, port, proto)
		got := kernelSays(t, h, b, own, flow{netipAddr(dest), protocolNumber(proto), port}, srcPort)
		if v.Allowed != want || got != want || v.Step != step {
			t.Errorf("%s:%d/%s: the kernel says %v, explained as %+v; want %v by %s", dest, port, proto, got, v, want, step)
		}
	}
	same("1.2.3.4", 443, "tcp", false, stepDefault)
	for name, addr := range map[string]string{"pin.example": "1.2.3.4", "a.wild.example": "1.2.3.5", "whole.example": "1.2.3.6", "nobody.example": "1.2.3.7"} {
		must(t, h.Pin(t.Context(), b.ID, name, []netip.Addr{netipAddr(addr)}, time.Minute))
	}
	same("1.2.3.4", 443, "tcp", true, stepPin)
	same("1.2.3.4", 443, "udp", true, stepPin)
	same("1.2.3.4", 80, "tcp", false, stepDefault)
	same("1.2.3.5", 8050, "udp", true, stepPin)
	same("1.2.3.5", 8050, "tcp", false, stepDefault)
	same("1.2.3.5", 8101, "udp", false, stepDefault)
	same("1.2.3.6", 0, "icmp", true, stepPin)
	same("1.2.3.6", 53, "udp", false, stepDNS)
	same("1.2.3.7", 443, "tcp", false, stepDefault)
	if v := ask("1.2.3.5", 8050, "udp"); v.Rule != "*.wild.example:8000-8100/udp" {
		t.Errorf("by %q", v.Rule)
	}
	pins, err := h.Pins(b.ID)
	must(t, err)
	var got []string
	for _, p := range pins {
		if left := time.Until(p.Expires); left < 30*time.Second || left > time.Minute {
			t.Errorf("%s ends in %s", p.Name, left)
		}
		got = append(got, p.Name+" "+p.Address.String())
	}
	slices.Sort(got)
	if want := []string{"a.wild.example 1.2.3.5", "pin.example 1.2.3.4", "whole.example 1.2.3.6"}; !slices.Equal(got, want) {
		t.Errorf("pins %v, want %v", got, want)
	}
}
