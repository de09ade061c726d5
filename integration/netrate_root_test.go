//go:build root

package integration

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// rateHost answers iperf3 on the internet, on two ports.
const (
	rateHost   = "93.184.216.34"
	fiftyMbits = 50_000_000
)

var ratePorts = []string{"5201", "5202"}

// serveRates runs iperf3 servers until the end of the test.
func (w *world) serveRates(t testing.TB) {
	t.Helper()
	if err := w.internet.within(func() error { // which has every other port for itself
		return errors.Join(
			run("ip", "addr", "add", rateHost+"/32", "dev", "lo"),
			nft(fmt.Sprintf("insert rule ip far any_port meta l4proto { tcp, udp } th dport { %s } return", strings.Join(ratePorts, ", "))),
		)
	}); err != nil {
		t.Fatal(err)
	}
	for _, port := range ratePorts {
		server := exec.CommandContext(t.Context(), "iperf3", "-s", "-B", rateHost, "-p", port)
		if err := w.internet.within(server.Start); err != nil {
			t.Fatalf("iperf3 is needed (apt-get install iperf3): %v", err)
		}
		t.Cleanup(func() { _ = server.Process.Kill(); _ = server.Wait() })
		testenv.Eventually(t, 10*time.Second, "iperf3 serves", func() bool {
			return w.internet.within(func() error {
				return exec.CommandContext(t.Context(), "sh", "-c", "ss -Hltn | grep -q "+rateHost+":"+port).Run()
			}) == nil
		})
	}
}

// rateReport is what iperf3 says at its end.
type rateReport struct {
	Error     string
	Intervals []struct {
		Sum struct {
			BPS float64 `json:"bits_per_second"`
		}
	}
	End struct {
		Received struct {
			BPS float64 `json:"bits_per_second"`
		} `json:"sum_received"`
		Sum struct {
			BPS  float64 `json:"bits_per_second"`
			Lost float64 `json:"lost_percent"`
		}
	}
}

func (d *daemon) iperf(t testing.TB, ref, port string, args ...string) (r rateReport) {
	t.Helper()
	out := d.exec(t, ref, append([]string{"iperf3", "-J", "-c", rateHost, "-p", port}, args...)...)
	if err := json.Unmarshal([]byte(out.stdout), &r); err != nil || r.Error != "" || out.exit.Code != 0 {
		t.Fatalf("iperf3 %v in %s: exit %d, %v %s\n%s", args, ref, out.exit.Code, err, r.Error, out.stderr)
	}
	return r
}

// tries is how often a rate is measured before it is too low.
const tries = 3

// nearRate measures a rate of payload against a limit of whole frames. Once
// above it is wrong; below, the machine may have been busy with something
// else, as it is if a sandbox without a limit gets no more.
func (d *daemon) nearRate(t testing.TB, what, ref, port string, want float64, args ...string) {
	t.Helper()
	var best, free float64
	for range tries {
		got := d.payload(t, ref, port, args...)
		if got > 1.1*want {
			t.Errorf("%s: %.1f Mbit/s, want at most %.1f and a tenth", what, got/1e6, want/1e6)
			return
		}
		if best = max(best, got); best >= 0.9*want {
			t.Logf("%s: %.1f of %.1f Mbit/s", what, best/1e6, want/1e6)
			return
		}
		free = max(free, d.payload(t, "free", port, args...))
	}
	if free < 1.5*want {
		t.Logf("%s: %.1f of %.1f Mbit/s: this machine is too busy, without a limit it moves %.1f", what, best/1e6, want/1e6, free/1e6)
		return
	}
	t.Errorf("%s: %.1f Mbit/s, want %.1f within a tenth; without a limit %.1f", what, best/1e6, want/1e6, free/1e6)
}

// payload is what arrives in a second, in bits.
func (d *daemon) payload(t testing.TB, ref, port string, args ...string) float64 {
	t.Helper()
	end := d.iperf(t, ref, port, append([]string{"-t", "3", "-O", "1"}, args...)...).End
	if slices.Contains(args, "-u") {
		return end.Sum.BPS * (1 - end.Sum.Lost/100)
	}
	return end.Received.BPS
}

// TestNetRate measures a limit both ways, by TCP and UDP, in two sandboxes at
// once, and changes one under a connection.
func TestNetRate(t *testing.T) {
	w := newWorld(t)
	w.serveRates(t)
	d := install(t, smallVolume+networkConfig)
	limits := sandbox.NetworkLimits{EgressBPS: fiftyMbits, IngressBPS: fiftyMbits}
	d.create(t, sandbox.Spec{Name: "free", Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}})
	for _, name := range []string{"a", "b"} {
		d.create(t, sandbox.Spec{Name: name, Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen, Limits: limits}})
	}
	free := d.iperf(t, "free", ratePorts[0], "-t", "1").End.Received.BPS
	t.Logf("without a limit: %.0f Mbit/s", free/1e6)
	if free < 4*fiftyMbits {
		t.Skipf("this machine moves %.0f Mbit/s without a limit: too little to see one of 50", free/1e6)
	}
	d.nearRate(t, "TCP out", "a", ratePorts[0], fiftyMbits)
	d.nearRate(t, "TCP in", "a", ratePorts[0], fiftyMbits, "-R")
	d.nearRate(t, "UDP out", "a", ratePorts[0], fiftyMbits, "-u", "-b", "100M", "-l", "1400")
	d.nearRate(t, "UDP in", "a", ratePorts[0], fiftyMbits, "-u", "-b", "100M", "-l", "1400", "-R")
	if free > 16*fiftyMbits { // there is room for two
		var both sync.WaitGroup
		for i, name := range []string{"a", "b"} {
			both.Go(func() {
				if got := d.payload(t, name, ratePorts[i]); math.Abs(got-fiftyMbits) > fiftyMbits/10 {
					t.Errorf("%s beside another: %.1f Mbit/s, want 50 within a tenth", name, got/1e6)
				}
			})
		}
		both.Wait()
	}

	// From 50 to 10 Mbit/s in the middle of a connection.
	done := make(chan rateReport, 1)
	go func() { done <- d.iperf(t, "a", ratePorts[0], "-t", "6", "-i", "1") }()
	time.Sleep(2 * time.Second) //nolint:forbidigo // the first part of what is measured
	limits.EgressBPS = 10_000_000
	d.setNetwork(t, "a", sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen, Limits: limits})
	var seconds []float64
	for _, i := range (<-done).Intervals {
		seconds = append(seconds, i.Sum.BPS)
	}
	if n := len(seconds); n < 6 || slices.Max(seconds[:2]) < 25_000_000 || slices.Min(seconds[n-2:]) > 15_000_000 {
		t.Errorf("Mbit/s second by second over a change from 50 to 10: %.0f", seconds)
	}
}

// TestNetFault cuts a network by the command line, and sees it end: on
// request, with its time, and with the daemon.
func TestNetFault(t *testing.T) {
	newWorld(t)
	d := install(t, smallVolume+networkConfig)
	sb := d.create(t, sandbox.Spec{Name: "a", Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}})
	cli := func(args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), program(t, "sandbox"), append([]string{"--host", d.host()}, args...)...)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("sandbox %v: %v\n%s", args, err, out)
		}
		return string(out)
	}
	works := func() bool {
		return d.exec(t, "a", "nc", "-z", "-w", "1", rateHost, fmt.Sprint(echoPort)).exit.Code == 0
	}
	want := func(when string, up bool) {
		t.Helper()
		if works() != up {
			t.Errorf("%s: the network works: %v, want %v", when, !up, up)
		}
		s, err := d.Sandbox(t.Context(), "a")
		if err != nil || (s.Fault == nil) != up {
			t.Errorf("%s: inspect shows the fault %+v, %v", when, s.Fault, err)
		}
	}
	want("before", true)
	if out := cli("net", "fault", "a", "--partition"); !strings.Contains(out, "partition") {
		t.Errorf("net fault --partition says %q", out)
	}
	want("cut", false)
	if out := cli("net", "show", "a"); !strings.Contains(out, "partition") {
		t.Errorf("net show says nothing of the fault:\n%s", out)
	}
	cli("net", "fault", "a", "--clear")
	cli("net", "fault", "a", "--clear")
	want("cleared", true)

	cli("net", "fault", "a", "--partition", "--for", "15s")
	want("cut for a while", false)
	testenv.Eventually(t, time.Minute, "its time is over", works)
	want("its time is over", true)

	cli("net", "fault", "a", "--partition", "--for", "1h")
	d.kill()
	d.start()
	want("after the daemon's death", true)
	if s, err := d.Sandbox(t.Context(), "a"); err != nil || s.InitPID != sb.InitPID {
		t.Errorf("it is another shell: PID %d, then %d (%v)", sb.InitPID, s.InitPID, err)
	}
	var told []string
	events, _, err := d.Events(t.Context(), client.EventQuery{Sandbox: "a", Limit: 1000})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range events {
		if what, ok := strings.CutPrefix(e.Type, "net.fault."); ok {
			told = append(told, strings.TrimSpace(what+" "+e.Data["why"]))
		}
	}
	if !slices.Equal(told, []string{"set", "cleared request", "set", "cleared time", "set", "cleared restart"}) {
		t.Errorf("events: %q", told)
	}
}
