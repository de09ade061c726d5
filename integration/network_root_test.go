//go:build root

package integration

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// netAttempt and netOutcome are what the probe reads and writes.
type netAttempt struct {
	ID    int            `json:"id"`
	Proto string         `json:"proto"`
	To    netip.AddrPort `json:"to"`
	Trick string         `json:"trick,omitempty"`
	Via   netip.AddrPort `json:"via,omitzero"`
}

type netOutcome struct {
	ID      int    `json:"id"`
	Outcome string `json:"outcome"`
	Sent    bool   `json:"sent"`
}

// socketTricks are what an unprivileged program can try, by protocol.
var socketTricks = map[string][]string{
	"tcp":     {"", "", "", "", "mapped", "device", "fast open", "freebind", "transparent", "loopback source", "mark", "source route"},
	"udp":     {"", "", "", "mapped", "device", "unconnected", "reconnect", "big", "freebind", "transparent", "loopback source", "mark", "source route"},
	"icmp":    {"", "", "source route"},
	"udplite": {""},
	"sctp":    {""},
	"raw":     {""},
	"packet":  {""},
}

// honestTricks still mean what they say: permitted is answered.
var honestTricks = []string{"", "mapped", "device", "fast open", "unconnected", "reconnect", "big"}

// never are sockets that a sandbox does not get whatever its policy.
var never = []string{"raw", "packet"}

// campaign is many attempts under many policies.
type campaign struct {
	t      *testing.T
	d      *daemon
	w      *world
	host   hostWatch
	r      *rand.Rand
	lastID int
	victim sandbox.Sandbox
	hurt   *capture // what the victim's link gets
	counts map[string]int
}

// TestNetworkAttempts makes thousands of attempts under policies made up from
// a seed, from programs inside and by frames forged on the sandbox's own wire.
// What may arrive is said by the oracle, what did by the far ends.
func TestNetworkAttempts(t *testing.T) {
	w := newWorld(t)
	d := install(t, networkConfig)
	c := &campaign{t: t, d: d, w: w, host: watchHost(t), r: rand.New(rand.NewPCG(20261121, 7)), counts: map[string]int{}}
	c.victim = d.create(t, sandbox.Spec{Name: "victim", Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}})
	d.sh(t, "victim", "sleep 1000 >/dev/null 2>&1 &")
	c.hurt = startCapture(t, netnsOf(t, c.victim.InitPID), "eth0")
	phases := 20
	each := testenv.Cycles(t, 2000, 10000) / phases
	for i := range phases {
		c.phase(i, somePolicy(c.r, i), each*2/3, each-each*2/3)
	}
	c.enough()
}

// phase plays one policy through in a sandbox of its own.
func (c *campaign) phase(i int, p oraclePolicy, sockets, forged int) {
	t := c.t
	name := fmt.Sprintf("phase%d", i)
	if hopeless := slices.IndexFunc(p.allow, oracleRule.hopeless); hopeless >= 0 {
		if _, err := c.d.Create(t.Context(), sandbox.Spec{Network: p.policy()}, ""); sandbox.CodeOf(err) != "range_not_admitted" {
			t.Errorf("phase %d (%s): %s is of no use; create: %v", i, p, p.allow[hopeless], err)
		}
		p.allow = slices.DeleteFunc(p.allow, oracleRule.hopeless)
		c.counts["refused policies"]++
	}
	spec := sandbox.Spec{Name: name, Network: p.policy()}
	sb := c.d.create(t, spec)
	probe := c.d.give(t, name)
	fail := func(format string, args ...any) {
		t.Helper()
		t.Errorf("phase %d (%s): %s", i, p, fmt.Sprintf(format, args...))
	}
	c.w.settle(t)
	c.forget()
	before := c.d.usage(t, name).NetDropped
	var refused int
	answered := map[int]netAttempt{}
	attempts := c.makeAttempts(p, sockets)
	outcomes := c.d.attempts(t, name, probe, attempts, false)
	for _, a := range attempts {
		o := outcomes[a.ID]
		may, ok := c.may(p, a), o.Outcome == "ok"
		kind := a.Proto + " " + a.Trick
		switch {
		case may && !ok:
			answered[a.ID] = a // to be tried with patience
		case may:
			c.counts["permitted "+kind]++
		case ok && !a.To.Addr().IsLoopback(): // its own loopback is its own affair
			fail("%+v was answered", a)
		default:
			c.counts["denied "+kind]++
			if o.Sent && slices.Contains(honestTricks, a.Trick) && !a.To.Addr().IsLoopback() && p.mode != sandbox.NetworkOff {
				refused++
			}
		}
	}
	c.again(name, probe, answered, fail)
	var shots []shot
	if p.mode != sandbox.NetworkOff {
		shots = c.shoot(p, sb, forged)
	}
	for _, s := range shots {
		if s.counts && !p.permits(s.dst, protoName(s.proto), s.port) {
			refused++
		}
	}
	c.w.settle(t)
	c.judge(p, shots, fail)
	// Each packet refused is in the books.
	if now := c.d.usage(t, name).NetDropped; now-before < uint64(refused) {
		fail("%d packets refused, %d counted", refused, now-before)
	}
	if _, err := c.d.Remove(t.Context(), name); err != nil {
		t.Fatal(err)
	}
}

// may tells whether an attempt is to be answered.
func (c *campaign) may(p oraclePolicy, a netAttempt) bool {
	return slices.Contains(honestTricks, a.Trick) && (a.Proto == "tcp" || a.Proto == "udp" || a.Proto == "icmp") &&
		p.permits(a.To.Addr(), a.Proto, a.To.Port())
}

// again gives permitted attempts that failed the time they need on a busy
// machine.
func (c *campaign) again(name, probe string, failed map[int]netAttempt, fail func(string, ...any)) {
	if len(failed) == 0 {
		return
	}
	var list []netAttempt
	for _, a := range failed {
		list = append(list, a)
	}
	for id, o := range c.d.attempts(c.t, name, probe, list, true) {
		a := failed[id]
		if o.Outcome != "ok" {
			fail("%+v: %s; it is permitted", a, o.Outcome)
		}
		c.counts["permitted "+a.Proto+" "+a.Trick]++
	}
}

// attempts has the probe make attempts in a sandbox.
func (d *daemon) attempts(t testing.TB, ref, probe string, list []netAttempt, patient bool) map[int]netOutcome {
	t.Helper()
	b, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	const path = "/tmp/attempts.json"
	env := map[string]string{}
	if patient {
		env["PROBE_PATIENT"] = "1"
	}
	if _, err := d.Files(ref).Write(t.Context(), "root", path, 0o644, bytes.NewReader(b)); err != nil {
		t.Fatal(err)
	}
	r, err := d.try(t.Context(), ref, sandbox.ProcessSpec{Argv: []string{probe, "net", path}, User: "root", Env: env})
	if err != nil || r.exit.Code != 0 {
		t.Fatalf("the probe: %+v %v\n%s", r.exit, err, r.stderr)
	}
	var out []netOutcome
	if err := json.Unmarshal([]byte(r.stdout), &out); err != nil {
		t.Fatalf("the probe: %v\n%.300s", err, r.stdout)
	}
	got := map[int]netOutcome{}
	for _, o := range out {
		got[o.ID] = o
	}
	if len(got) != len(list) {
		t.Fatalf("the probe told of %d attempts, not %d", len(got), len(list))
	}
	return got
}

func (c *campaign) makeAttempts(p oraclePolicy, n int) (list []netAttempt) {
	others := []netip.Addr{c.victim.Address, addr("224.0.0.1"), addr("239.1.2.3"), addr("255.255.255.255"), addr("10.213.255.255"), addr("10.213.0.0")}
	others = slices.DeleteFunc(others, func(a netip.Addr) bool { return !a.IsValid() })
	for range n {
		c.lastID++
		dst, port := p.target(c.r, others...)
		a := netAttempt{ID: c.lastID, To: netip.AddrPortFrom(dst, port)}
		a.Proto = pick(c.r, []string{"tcp", "tcp", "tcp", "udp", "udp", "udp", "icmp", "icmp", "udplite", "sctp", "raw", "packet"})
		if (a.Proto == "tcp" || a.Proto == "udp") && c.r.IntN(40) == 0 {
			a.To = netip.AddrPortFrom(addr("2606:2800:220::fe"), port)
			list = append(list, a)
			continue
		}
		a.Trick = pick(c.r, socketTricks[a.Proto])
		switch a.Trick {
		case "freebind", "transparent":
			a.Via = netip.AddrPortFrom(addr(pick(c.r, []string{"8.8.8.8", uplinkAddr, gatewayAddr, "10.213.77.77"})), 0)
		case "reconnect", "source route":
			a.Via = c.lure(p)
		}
		list = append(list, a)
	}
	return list
}

// lure is somewhere the policy permits to go by UDP, if there is such a place.
func (c *campaign) lure(p oraclePolicy) netip.AddrPort {
	for range 50 {
		if dst, port := p.target(c.r); p.permits(dst, "udp", port) {
			return netip.AddrPortFrom(dst, port)
		}
	}
	return netip.AddrPortFrom(addr(publicHosts[0]), 5000)
}

// shoot sends forged packets.
func (c *campaign) shoot(p oraclePolicy, sb sandbox.Sandbox, n int) (shots []shot) {
	forger := newForger(c.t, netnsOf(c.t, sb.InitPID),
		addr("8.8.8.8"), c.victim.Address, addr(uplinkAddr), addr(gatewayAddr), addr("127.0.0.1"), addr("0.0.0.0"),
		addr("10.213.77.77"), addr("255.255.255.255"), addr("224.0.0.1"), addr(lanAddr), addr("169.254.169.254"))
	for range n {
		c.lastID++
		dst, port := p.target(c.r, c.victim.Address)
		s := forger.shoot(c.r, pick(c.r, forgeries), uint64(c.lastID), dst, port, c.lure(p))
		for _, frame := range s.frames {
			if err := forger.send(frame); err != nil {
				c.t.Fatalf("send a forged packet (%s): %v", s.kind, err)
			}
		}
		shots = append(shots, s)
	}
	return shots
}

// forget begins anew at every far end.
func (c *campaign) forget() {
	for _, seen := range []*capture{c.w.internet.seen, c.w.lan.seen, c.hurt} {
		seen.take()
	}
	c.host.arrived()
}

// judge compares what arrived with what may.
func (c *campaign) judge(p oraclePolicy, shots []shot, fail func(string, ...any)) {
	marks := map[uint64]bool{}
	for side, seen := range map[string]struct {
		c    *capture
		from string
	}{"internet": {c.w.internet.seen, uplinkAddr}, "local network": {c.w.lan.seen, lanHostAddr}} {
		for id := range seen.c.takeMarks() {
			marks[id] = true
		}
		all := seen.c.take()
		for a, s := range all {
			if a.dst.String() == resolverAddr && a.port == 53 && a.src.String() == uplinkAddr {
				continue // the daemon's own questions
			}
			if a.src.String() != seen.from {
				fail("on the %s arrived, not from the host: %s (%d times)", side, a, s.n)
			}
			if !p.permitsArrival(a, all) {
				fail("on the %s arrived: %s (%d times)", side, a, s.n)
			}
		}
	}
	for a, s := range c.hurt.take() {
		fail("at the other sandbox arrived: %s (%d times)", a, s.n)
	}
	for _, what := range c.host.arrived() {
		if p.mode != sandbox.NetworkOff && strings.Contains(what, gatewayAddr+" ") && strings.HasSuffix(what, "p 53]]") {
			continue // the daemon's resolver
		}
		fail("at the host arrived: %s", what)
	}
	for _, s := range shots {
		may := s.honest && p.permits(s.dst, protoName(s.proto), s.port)
		switch {
		case may && !marks[s.id]:
			fail("%s %s proto %d port %d did not arrive; it is permitted", s.kind, s.dst, s.proto, s.port)
		case may:
			c.counts["permitted forged "+s.kind]++
		case !p.permits(s.dst, protoName(s.proto), s.port) && marks[s.id]:
			fail("%s %s proto %d port %d arrived", s.kind, s.dst, s.proto, s.port)
		default:
			c.counts["denied forged "+s.kind]++
		}
	}
}

// enough wants every kind of attempt to have been made often, and those that
// can be permitted to have been both.
func (c *campaign) enough() {
	want := func(what string) {
		if c.counts[what] < 3 {
			c.t.Errorf("%s: only %d", what, c.counts[what])
		}
	}
	for proto, tricks := range socketTricks {
		for _, trick := range tricks {
			want("denied " + proto + " " + trick)
			if slices.Contains(honestTricks, trick) && !slices.Contains(append(never, "udplite", "sctp"), proto) {
				want("permitted " + proto + " " + trick)
			}
		}
	}
	for _, kind := range forgeries {
		want("denied forged " + kind)
		if slices.Index(forgeries, kind) < slices.Index(forgeries, "source") {
			want("permitted forged " + kind)
		}
	}
	want("refused policies")
	var list []string
	for what, n := range c.counts {
		list = append(list, fmt.Sprintf("%s: %d", what, n))
	}
	slices.SortFunc(list, func(a, b string) int { return cmp.Compare(a, b) })
	c.t.Log(strings.Join(list, "; "))
}
