//go:build root

package integration

import (
	"net/netip"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// fellow makes a sandbox that echoes, and watches its link.
func (d *daemon) fellow(t testing.TB, name string, p sandbox.NetworkPolicy) (sandbox.Sandbox, string, *capture) {
	t.Helper()
	sb := d.create(t, sandbox.Spec{Name: name, Network: p})
	probe := d.give(t, name)
	if _, err := d.StartProcess(t.Context(), name, sandbox.ProcessSpec{Argv: []string{probe, "echo", "0.0.0.0:5000"}}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 10*time.Second, name+" listens", func() bool {
		return d.attempts(t, name, probe, []netAttempt{{ID: 1, Proto: "tcp", To: netip.MustParseAddrPort("127.0.0.1:5000")}}, false)[1].Outcome == "ok"
	})
	return sb, probe, startCapture(t, netnsOf(t, sb.InitPID), "eth0")
}

// TestNetworkGroups lets sandboxes of one group meet, and nobody else.
func TestNetworkGroups(t *testing.T) {
	w := newWorld(t)
	serveZones(t, w, map[string]func(int) []string{"ok.example.com": always("60 A 151.101.1.69")})
	d := install(t, networkConfig+"max_sandboxes: 5\npool: {size: 0}\n") // addresses are soon used again
	in := func(group string) sandbox.NetworkPolicy {
		return sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Group: group}
	}
	_, probe, _ := d.fellow(t, "a", in("red"))
	b, _, _ := d.fellow(t, "b", in("red"))
	c, _, atC := d.fellow(t, "c", in("blue"))
	_, _, _ = d.fellow(t, "o", sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen})
	meets := func(from string, to sandbox.Sandbox, may bool) {
		t.Helper()
		at := netip.AddrPortFrom(to.Address, 5000)
		var list []netAttempt
		for i, proto := range []string{"tcp", "udp", "icmp", "udp"} {
			list = append(list, netAttempt{ID: i, Proto: proto, To: at, Trick: []string{"", "", "", "big"}[i]})
		}
		for id, o := range d.attempts(t, from, probe, list, may) {
			if (o.Outcome == "ok") != may {
				t.Errorf("%s to %s, %s: %s; permitted: %v", from, to.Spec.Name, list[id].Proto, o.Outcome, may)
			}
		}
	}
	a, err := d.Sandbox(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	meets("a", b, true)
	meets("b", a, true)
	atC.take()
	for _, from := range []string{"a", "b", "o"} {
		meets(from, c, false)
	}
	meets("c", a, false)
	meets("o", a, false)
	for seen, s := range atC.take() {
		if seen.src != addr(gatewayAddr) { // refusals of what c itself tried
			t.Errorf("at c arrived: %s (%d times)", seen, s.n)
		}
	}
	// They see each other as they are.
	atB := startCapture(t, netnsOf(t, b.InitPID), "eth0")
	meets("a", b, true)
	for seen := range atB.take() {
		if seen.src != a.Address {
			t.Errorf("at b arrived: %s, not from a", seen)
		}
	}
	const server = gatewayAddr + ":53"
	d.wantAddrs(t, "a", probe, server, map[string]string{
		"b": b.Address.String(), "b.red.internal": b.Address.String(), string(b.ID): b.Address.String(),
		"c": "", "c.blue.internal": "", "o": "", "b.blue.internal": "", "b.internal": "",
	})
	d.wantAddrs(t, "c", probe, server, map[string]string{"b": "", "b.red.internal": "", string(b.ID): ""})
	if r := d.ask(t, "a", probe, server, asking("b", dns.TypeTXT))[0]; r.Answers > 0 {
		t.Errorf("text about b: %+v", r)
	}
	// Being in a group opens nothing else.
	d.reaches(t, "a", probe, "tcp", "151.101.1.69:443", false)
	d.reaches(t, "a", probe, "tcp", "10.213.0.1:5000", false)

	// Who leaves is cut off, from both ends, and who comes is let in.
	flow := d.startFlow(t, "a", probe, "udp4", netip.AddrPortFrom(b.Address, 5000).String())
	testenv.Eventually(t, 10*time.Second, "the flow arrives", func() bool {
		_, n := atB.last(func(s arrival) bool { return s.src == a.Address })
		return n > 20
	})
	d.setNetwork(t, "b", in(""))
	changed := time.Now()
	if r := flow.report(t, d); r.Error == "" {
		t.Errorf("the flow to who left the group went on: %+v", r)
	}
	if last, _ := atB.last(func(s arrival) bool { return s.src == a.Address }); last.Sub(changed) > cutWithin {
		t.Errorf("a packet arrived %s after b left the group", last.Sub(changed))
	}
	meets("b", a, false)
	meets("a", b, false)
	d.setNetwork(t, "c", in("red"))
	meets("a", c, true)
	d.kill()
	d.start()
	meets("c", a, true)
	meets("a", b, false)

	// An address that was a fellow's and is now another's.
	if _, err := d.Remove(t.Context(), "c"); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, "c's address is another's", func() bool {
		heir, err := d.Create(t.Context(), sandbox.Spec{Name: "heir", Network: in("")}, "")
		if err != nil {
			return false // no room yet
		}
		meets("a", heir, false)
		meets("o", heir, false)
		_, err = d.Remove(t.Context(), "heir")
		return err == nil && heir.Address == c.Address
	})
}
