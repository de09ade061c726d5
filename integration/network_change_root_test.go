//go:build root

package integration

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// cutWithin is how long after a policy change a packet of a flow that it
// forbids may still arrive at the far end.
const cutWithin = 100 * time.Millisecond

// flowLimit ends a flow that nothing else ends.
const flowLimit = 10 * time.Minute

// runningFlow is a flow kept busy from inside the sandbox ref.
type runningFlow struct {
	ref, network, to string
	port             uint16 // its own, which the host's translation keeps
	id               sandbox.ProcessID
}

// arrived matches its packets, and no host's answer to those of an earlier
// flow that its server sends again.
func (f *runningFlow) arrived(a arrival) bool { return at(f.to)(a) && a.from == f.port }

// flowReport is what the probe tells of it at its end.
type flowReport struct {
	Local    string `json:"local"`
	Sent     int    `json:"sent"`
	Answered int    `json:"answered"`
	Error    string `json:"error"`
}

// startFlow starts a flow and waits until it has begun.
func (d *daemon) startFlow(t testing.TB, ref, probe, network, to string) *runningFlow {
	t.Helper()
	p, err := d.StartProcess(t.Context(), ref, sandbox.ProcessSpec{Argv: []string{probe, "flow", network + "/" + to, flowLimit.String()}})
	if err != nil {
		t.Fatal(err)
	}
	f := &runningFlow{ref: ref, network: network, to: to, id: p.ID}
	testenv.Eventually(t, 10*time.Second, fmt.Sprintf("the flow %s %s begins", network, to), func() bool {
		local, _, told := strings.Cut(d.output(t, ref, p.ID), "\n")
		if told {
			f.port = netip.MustParseAddrPort(local).Port()
		}
		return told
	})
	return f
}

// output is what a process has written so far.
func (d *daemon) output(t testing.TB, ref string, id sandbox.ProcessID) string {
	t.Helper()
	r, err := d.Output(t.Context(), ref, id, 0, false)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var b bytes.Buffer
	_, _ = b.ReadFrom(r)
	return b.String()
}

// report waits for a flow's end.
func (f *runningFlow) report(t testing.TB, d *daemon) flowReport {
	t.Helper()
	d.ended(t, 20*time.Second, f.ref, f.id)
	for lines := bufio.NewScanner(strings.NewReader(d.output(t, f.ref, f.id))); lines.Scan(); {
		var r flowReport
		if json.Unmarshal(lines.Bytes(), &r) == nil && r.Local != "" {
			return r
		}
	}
	t.Fatalf("the flow %s %s told nothing: %q", f.network, f.to, d.output(t, f.ref, f.id))
	return flowReport{}
}

// at matches what arrives for one destination, TCP or UDP.
func at(to string) func(arrival) bool {
	dst := netip.MustParseAddrPort(to)
	return func(a arrival) bool {
		return a.dst == dst.Addr() && a.port == dst.Port() && (a.proto == unix.IPPROTO_TCP || a.proto == unix.IPPROTO_UDP)
	}
}

// arrivesAgain waits for a packet after now.
func (w *world) arrivesAgain(t testing.TB, match func(arrival) bool) {
	t.Helper()
	if limit := 10 * time.Second; !w.arrivesWithin(limit, match) {
		t.Fatalf("not within %s: a packet arrives", limit)
	}
}

// arrivesWithin reports whether a packet arrives, and so soon.
func (w *world) arrivesWithin(limit time.Duration, match func(arrival) bool) bool {
	since := time.Now()
	return testenv.Within(limit, func() bool {
		last, _ := w.internet.seen.last(match)
		return last.After(since)
	})
}

// setNetwork changes a policy or fails the test.
func (d *daemon) setNetwork(t testing.TB, ref string, p sandbox.NetworkPolicy) {
	t.Helper()
	if _, err := d.SetNetwork(t.Context(), ref, p); err != nil {
		t.Fatalf("set the network policy %+v: %v", p, err)
	}
}

// The addresses of the flows.
const (
	keptTCP, keptUDP     = "1.1.1.1:5000", "1.1.1.1:5001"
	doomedTCP, doomedUDP = "8.8.4.4:6000", "8.8.4.4:6001"
)

// allowing is a policy that permits some destinations.
func allowing(rules ...string) sandbox.NetworkPolicy {
	return sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Allow: rules}
}

// flips are pairs of policies: the first permits the doomed flows, the second
// does not; both permit the others.
var flips = [][2]sandbox.NetworkPolicy{
	{allowing("1.1.1.1", "8.8.4.4"), allowing("1.1.1.1")},
	{allowing("1.1.1.1", "8.8.4.0/24:6000-6001"), allowing("1.1.1.1", "8.8.4.4:6002")},
	{{Mode: sandbox.NetworkOpen}, {Mode: sandbox.NetworkOpen, Deny: []string{"8.8.4.4"}}},
	{{Mode: sandbox.NetworkOpen}, allowing("1.1.1.1:5000-5001")},
	{allowing("0.0.0.0/0"), {Mode: sandbox.NetworkAllow, Allow: []string{"0.0.0.0/0"}, Deny: []string{"8.8.0.0/16:6000-6001"}}},
}

// TestNetworkChange changes policies under flows: those that the new one
// forbids are cut at once, and the others lose nothing.
func TestNetworkChange(t *testing.T) {
	w := newWorld(t)
	d := install(t, networkConfig)
	d.create(t, sandbox.Spec{Name: "s", Network: flips[0][0]})
	probe := d.give(t, "s")
	n := testenv.Cycles(t, 10, 50)
	kept := []*runningFlow{d.startFlow(t, "s", probe, "tcp4", keptTCP), d.startFlow(t, "s", probe, "udp4", keptUDP)}
	var slowest time.Duration
	began := time.Now()
	for i := range n {
		may, mayNot := flips[i%len(flips)][0], flips[i%len(flips)][1]
		d.setNetwork(t, "s", may)
		tcp := d.startFlow(t, "s", probe, "tcp4", doomedTCP)
		udp := d.startFlow(t, "s", probe, "udp4", doomedUDP)
		w.arrivesAgain(t, tcp.arrived)
		w.arrivesAgain(t, udp.arrived)
		d.setNetwork(t, "s", mayNot)
		changed := time.Now()
		// The client hears of it: a reset, an unreachable. UDP flows too.
		for _, f := range []*runningFlow{tcp, udp} {
			if r := f.report(t, d); r.Error == "" {
				t.Errorf("flip %d: the %s flow went on to its end: %+v", i, f.network, r)
			}
		}
		for _, f := range []*runningFlow{tcp, udp} {
			last, _ := w.internet.seen.last(f.arrived)
			late := last.Sub(changed)
			slowest = max(slowest, late)
			if late > cutWithin {
				t.Errorf("flip %d (%+v): a packet arrived at %s %s after the change", i, mayNot, f.to, late)
			}
		}
		for _, f := range kept {
			if !w.arrivesWithin(10*time.Second, f.arrived) {
				t.Fatalf("flip %d: nothing arrives any more of the flow %s %s: %s", i, f.network, f.to, d.output(t, "s", f.id))
			}
		}
	}
	t.Logf("%d flips in %s; the last packet of a cut flow arrived %s after the change", n, time.Since(began).Round(time.Second), slowest)
	d.unhurt(t, kept)
}

// unhurt ends flows and wants them to have lived till then without loss.
func (d *daemon) unhurt(t testing.TB, flows []*runningFlow) {
	t.Helper()
	for _, f := range flows {
		if err := d.SignalProcess(t.Context(), f.ref, f.id, "SIGTERM"); err != nil {
			t.Errorf("the permitted flow %s %s: %v: %s", f.network, f.to, err, d.output(t, f.ref, f.id))
			continue
		}
		r := f.report(t, d)
		if r.Error != "" || r.Answered != r.Sent || r.Sent < 200 {
			t.Errorf("the permitted flow %s %s: %+v", f.network, f.to, r)
		}
	}
}

// TestNetworkChangeSurvivesKills kills the daemon while it changes policies.
// What the record says and what the kernel does are the same afterwards, and
// flows permitted throughout never notice.
func TestNetworkChangeSurvivesKills(t *testing.T) {
	w := newWorld(t)
	d := install(t, networkConfig)
	d.create(t, sandbox.Spec{Name: "s", Network: flips[0][0]})
	probe := d.give(t, "s")
	n := testenv.Cycles(t, 5, 50)
	kept := []*runningFlow{d.startFlow(t, "s", probe, "tcp4", keptTCP), d.startFlow(t, "s", probe, "udp4", keptUDP)}
	try := func() map[string]bool {
		var list []netAttempt
		for i, to := range []string{keptTCP, keptUDP, doomedTCP, doomedUDP} {
			list = append(list, netAttempt{ID: i, Proto: []string{"tcp", "udp"}[i%2], To: netip.MustParseAddrPort(to)})
		}
		got := d.attempts(t, "s", probe, list, true)
		out := map[string]bool{}
		for _, a := range list {
			out[a.To.String()] = got[a.ID].Outcome == "ok"
		}
		return out
	}
	for i := range n {
		pair := flips[i%len(flips)]
		d.setNetwork(t, "s", pair[0])
		var changing sync.WaitGroup
		ctx, cancel := context.WithCancel(t.Context())
		changing.Go(func() { // the daemon dies somewhere in here
			for j := 0; ctx.Err() == nil; j++ {
				if _, err := d.SetNetwork(ctx, "s", pair[(j+1)%2]); err != nil {
					return
				}
			}
		})
		<-time.After(time.Duration(i*7%40) * time.Millisecond)
		d.kill()
		cancel()
		changing.Wait()
		for _, f := range kept { // without a daemon
			w.arrivesAgain(t, f.arrived)
		}
		d.start()
		sb, err := d.Sandbox(t.Context(), "s")
		if err != nil {
			t.Fatal(err)
		}
		which := slices.IndexFunc(pair[:], func(p sandbox.NetworkPolicy) bool {
			return p.Mode == sb.Spec.Network.Mode && slices.Equal(p.Allow, sb.Spec.Network.Allow) && slices.Equal(p.Deny, sb.Spec.Network.Deny)
		})
		got := try()
		want := which == 0
		if which < 0 || !got[keptTCP] || !got[keptUDP] || got[doomedTCP] != want || got[doomedUDP] != want {
			t.Errorf("kill %d: the record says %+v, the kernel does %v", i, sb.Spec.Network, got)
		}
	}
	d.unhurt(t, kept)
}

// TestNetworkCounters compares what the daemon says of a sandbox's traffic
// with what the far end counted, through kills of the daemon.
func TestNetworkCounters(t *testing.T) {
	w := newWorld(t)
	d := install(t, networkConfig)
	d.create(t, sandbox.Spec{Name: "s", Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}})
	probe := d.give(t, "s")
	came0, _ := w.internet.traffic(t, "came")
	went0, _ := w.internet.traffic(t, "went")
	check := func(when string) {
		t.Helper()
		w.settle(t)
		came, _ := w.internet.traffic(t, "came")
		went, _ := w.internet.traffic(t, "went")
		u := d.usage(t, "s")
		for _, c := range []struct {
			what      string
			ours, far uint64
		}{{"out of the sandbox", u.NetTxBytes, came - came0}, {"into the sandbox", u.NetRxBytes, went - went0}} {
			off := float64(c.ours)/float64(max(c.far, 1)) - 1
			t.Logf("%s, %s: %d bytes, the far end %d (%+.3f%%)", when, c.what, c.ours, c.far, 100*off)
			if c.far < 1<<20 || off > 0.01 || off < -0.01 {
				t.Errorf("%s, %s: %d bytes, the far end %d", when, c.what, c.ours, c.far)
			}
		}
	}
	mixed := func(n int) {
		var list []netAttempt
		for i := range n {
			a := netAttempt{ID: i, To: netip.AddrPortFrom(addr(publicHosts[i%len(publicHosts)]), uint16(6000+i)), Proto: []string{"tcp", "udp", "icmp"}[i%3]}
			if a.Proto == "udp" {
				a.Trick = "big"
			}
			if i%10 == 9 {
				a.To = netip.AddrPortFrom(addr("192.168.7.7"), 80) // refused, and no traffic
			}
			list = append(list, a)
		}
		d.attempts(t, "s", probe, list, false)
	}
	flow := func(network string) *runningFlow { return d.startFlow(t, "s", probe, network, "1.1.1.1:5000") }
	mixed(900)
	check("attempts")
	for i := range testenv.Cycles(t, 3, 20) {
		running := []*runningFlow{flow("tcp4"), flow("udp4")}
		<-time.After(500 * time.Millisecond) // traffic before, during and after the kill
		d.kill()
		w.arrivesAgain(t, at("1.1.1.1:5000"))
		d.start()
		w.arrivesAgain(t, at("1.1.1.1:5000"))
		d.unhurt(t, running)
		check(fmt.Sprintf("kill %d", i))
	}
	before := d.usage(t, "s")
	d.stop()
	d.start()
	if now := d.usage(t, "s"); now.NetRxBytes != before.NetRxBytes || now.NetTxBytes != before.NetTxBytes || now.NetDropped != before.NetDropped {
		t.Errorf("a restart turned %d, %d, %d into %d, %d, %d", before.NetRxBytes, before.NetTxBytes, before.NetDropped, now.NetRxBytes, now.NetTxBytes, now.NetDropped)
	}
	// The next life of the sandbox goes on counting.
	if _, err := d.Stop(t.Context(), "s"); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Start(t.Context(), "s"); err != nil {
		t.Fatal(err)
	}
	mixed(600)
	check("a second life")
}
