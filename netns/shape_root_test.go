//go:build root

package netns

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// iperf measures with iperf3 (package iperf3) between the sandbox and the
// internet: the payload of TCP that arrives, in bits per second.
func iperf(t testing.TB, w *world, b *box, args ...string) float64 {
	t.Helper()
	if _, err := exec.LookPath("iperf3"); err != nil {
		t.Fatal("iperf3 is needed: apt-get install iperf3")
	}
	server := exec.CommandContext(t.Context(), "iperf3", "-s", "-1", "-B", publicAddr, "--forceflush")
	said := &syncBuffer{}
	server.Stdout, server.Stderr = said, said
	must(t, linux.InNetNS(w.internet, server.Start))
	defer func() { _ = server.Process.Kill(); _ = server.Wait() }()
	eventually(t, "iperf3 serves", func() bool { return strings.Contains(said.String(), "listening") })
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var out bytes.Buffer
	client := exec.CommandContext(ctx, "iperf3", append([]string{"-c", publicAddr, "-J", "-t", "2", "-O", "1"}, args...)...)
	client.Stdout = &out
	must(t, linux.InNetNS(b.NetNS, client.Start))
	err := client.Wait()
	var result struct {
		Error string
		End   struct {
			Received struct {
				BPS float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		}
	}
	if err := errors.Join(err, json.Unmarshal(out.Bytes(), &result)); err != nil || result.Error != "" {
		t.Fatalf("iperf3: %v %s %s", err, result.Error, out.String())
	}
	return result.End.Received.BPS
}

const intoSandbox = "-R" // iperf3's word for the other direction

// inside runs f in a namespace; nil is the host's.
func inside(ns *os.File, f func() error) error {
	if ns == nil {
		return f()
	}
	return linux.InNetNS(ns, f)
}

// flood sends UDP packets from one namespace to an address of another at a
// rate, and returns the bits per second of their payload that arrive.
func flood(t testing.TB, from, to *os.File, addr string, rate uint64) float64 {
	t.Helper()
	const payload, warm, window = 1400, 500 * time.Millisecond, 1500 * time.Millisecond
	var in, out net.Conn
	must(t, inside(to, func() (err error) {
		var pc net.PacketConn
		pc, err = net.ListenPacket("udp4", addr)
		if err == nil {
			in = pc.(*net.UDPConn)
		}
		return err
	}))
	defer in.Close()
	must(t, inside(from, func() (err error) { out, err = net.Dial("udp4", addr); return err }))
	stop := make(chan struct{})
	var sending sync.WaitGroup
	sending.Go(func() {
		packet := make([]byte, payload)
		start, sent := time.Now(), 0.0
		for tick := time.NewTicker(time.Millisecond); ; <-tick.C {
			for i := 0; i < 256 && sent < time.Since(start).Seconds()*float64(rate)/8; i++ {
				_, _ = out.Write(packet)
				sent += payload
			}
			select {
			case <-stop:
				tick.Stop()
				return
			default:
			}
		}
	})
	defer func() { close(stop); sending.Wait(); out.Close() }()
	buf := make([]byte, 2048)
	got := 0
	start := time.Now()
	must(t, in.SetReadDeadline(start.Add(warm+window)))
	for {
		n, err := in.Read(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return float64(got*8) / window.Seconds()
		}
		must(t, err)
		if time.Since(start) > warm {
			got += n
		}
	}
}

// within checks a rate measured as payload against one of whole packets. Once
// above it is wrong. Below, the machine may have been busy with something else:
// it is measured again, and on a machine that moves not far more than that
// without a limit nothing is concluded.
func within(t testing.TB, what string, free float64, want uint64, measure func() float64) {
	t.Helper()
	const tries, far = 8, 100
	best := 0.0
	for range tries {
		got := measure()
		if got > 1.1*float64(want) {
			t.Errorf("%s: %.2f Mbit/s, want at most %.2f and a tenth", what, got/1e6, float64(want)/1e6)
			return
		}
		if best = max(best, got); best >= 0.9*float64(want) {
			break
		}
	}
	t.Logf("%s: %.2f of %.2f Mbit/s", what, best/1e6, float64(want)/1e6)
	if best < 0.9*float64(want) && free > far*float64(want) {
		t.Errorf("%s: %.2f Mbit/s, want %.2f within a tenth", what, best/1e6, float64(want)/1e6)
	}
}

// TestRatesHold changes the rate of a living link.
func TestRatesHold(t *testing.T) {
	w := newWorld(t)
	h := openHost(t, Config{})
	b := newBox(t, 1, sandbox.NetworkOpen)
	addr := attach(t, h, b)
	must(t, linux.InNetNS(w.internet, func() error {
		return netlink.RouteAdd(&netlink.Route{LinkIndex: linkIndex(t, "net0"), Dst: pool4(h), Gw: net.ParseIP(hostAddr)})
	}))
	free := min(iperf(t, w, b), iperf(t, w, b, intoSandbox))
	t.Logf("without a limit: %.0f Mbit/s", free/1e6)
	for _, mbit := range []uint64{5, 50, 1000} {
		rate := mbit * 1_000_000
		b.Policy.Limits = sandbox.NetworkLimits{EgressBPS: rate, IngressBPS: rate}
		must(t, h.SetPolicy(t.Context(), b.Attachment))
		if free < 1.5*float64(rate) {
			t.Logf("%d Mbit/s are too near to what this machine does without a limit", mbit)
			continue
		}
		within(t, "TCP out", free, rate, func() float64 { return iperf(t, w, b) })
		within(t, "TCP in", free, rate, func() float64 { return iperf(t, w, b, intoSandbox) })
		if mbit <= 50 {
			within(t, "UDP out", free, rate, func() float64 { return flood(t, b.NetNS, w.internet, publicAddr+":6000", 2*rate) })
			within(t, "UDP in", free, rate, func() float64 { return flood(t, nil, b.NetNS, addr.String()+":6000", 2*rate) })
		}
	}
	b.Policy.Limits = sandbox.NetworkLimits{}
	must(t, h.SetPolicy(t.Context(), b.Attachment))
	if got := iperf(t, w, b); got < free/3 {
		t.Errorf("with the limit lifted: %.0f Mbit/s, before it was set %.0f", got/1e6, free/1e6)
	}
}

// syncBuffer is a buffer that a command writes while we read.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// hasQueues tells the kinds of the outermost queues of a link's two ends.
func hasQueues(t testing.TB, b *box) (in, out string) {
	t.Helper()
	kind := func(link string) string {
		l, err := netlink.LinkByName(link)
		must(t, err)
		all, err := netlink.QdiscList(l)
		must(t, err)
		for _, q := range all {
			if q.Attrs().Parent == netlink.HANDLE_ROOT {
				return q.Type()
			}
		}
		return "none"
	}
	in = kind(linkName(b.ID))
	must(t, linux.InNetNS(b.NetNS, func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		l, err := h.LinkByName(guestLink)
		if err != nil {
			return err
		}
		all, err := h.QdiscList(l)
		for _, q := range all {
			if q.Attrs().Parent == netlink.HANDLE_ROOT {
				out = q.Type()
			}
		}
		return err
	}))
	return in, out
}

func wantQueues(t testing.TB, what string, b *box, in, out string) {
	t.Helper()
	if gotIn, gotOut := hasQueues(t, b); gotIn != in || gotOut != out {
		t.Errorf("%s: queues %s in and %s out, want %s and %s", what, gotIn, gotOut, in, out)
	}
}

// nextHost is the next daemon's; the first one's clean-up removes the table.
func nextHost(t testing.TB, h *Host) *Host {
	t.Helper()
	must(t, h.Close())
	next, err := Open(t.Context(), Config{})
	must(t, err)
	t.Cleanup(func() { must(t, next.Close()) })
	return next
}

// TestQueuesFollowThePolicy: none without a limit, and each change alone.
func TestQueuesFollowThePolicy(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	free, bound := newBox(t, 1, sandbox.NetworkOpen), newBox(t, 2, sandbox.NetworkOpen)
	bound.Policy.Limits = sandbox.NetworkLimits{EgressBPS: 1e6}
	attach(t, h, free)
	attach(t, h, bound)
	wantQueues(t, "no limit", free, "noqueue", "noqueue")
	wantQueues(t, "made with a limit out", bound, "noqueue", "tbf")
	if len(h.shapes) != 1 {
		t.Errorf("%d links are remembered, want the one with a queue", len(h.shapes))
	}
	set := func(l sandbox.NetworkLimits) {
		t.Helper()
		bound.Policy.Limits = l
		must(t, h.SetPolicy(t.Context(), bound.Attachment))
		reaches(t, bound, "tcp4", publicAddr+":80")
	}
	set(sandbox.NetworkLimits{EgressBPS: 2e6, IngressBPS: 3e6})
	wantQueues(t, "both ways", bound, "tbf", "tbf")
	set(sandbox.NetworkLimits{IngressBPS: 3e6})
	wantQueues(t, "in only", bound, "tbf", "noqueue")

	// The next daemon finds the same, and lets go of what was lifted.
	h = nextHost(t, h)
	keep := map[sandbox.ID]Attachment{free.ID: free.Attachment, bound.ID: bound.Attachment}
	for range 2 {
		must(t, h.Recover(t.Context(), keep))
		wantQueues(t, "no limit, recovered", free, "noqueue", "noqueue")
		wantQueues(t, "in only, recovered", bound, "tbf", "noqueue")
	}
	if ids := h.Disturbed(); len(ids) != 0 {
		t.Errorf("limits are taken for faults: %v", ids)
	}
	bound.Policy.Limits = sandbox.NetworkLimits{}
	keep[bound.ID] = bound.Attachment
	must(t, h.Recover(t.Context(), keep))
	wantQueues(t, "lifted while the daemon was away", bound, "noqueue", "noqueue")
	noNS := bound.Attachment
	noNS.NetNS = nil
	must(t, h.SetPolicy(t.Context(), noNS)) // nothing to change inside
	noNS.Policy.Limits.EgressBPS = 1e6
	if err := h.SetPolicy(t.Context(), noNS); sandbox.CodeOf(err) != "no_netns" {
		t.Errorf("a rate without the namespace: %v", err)
	}
}

// TestPartition cuts a link, both ways, and mends it: asked to, and by the
// next daemon.
func TestPartition(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	b, other := newBox(t, 1, sandbox.NetworkOpen), newBox(t, 2, sandbox.NetworkOpen)
	b.Policy.Limits = sandbox.NetworkLimits{EgressBPS: 100e6}
	target := attach(t, h, b).String() + ":8080"
	attach(t, h, other)
	listenTCP(t, b.NetNS, "0.0.0.0:8080")
	works := func(what string, want bool) {
		t.Helper()
		wait := deniedWait
		if want {
			wait = permittedWait
		}
		_, out := dial(b.NetNS, "tcp4", publicAddr+":80", wait)
		_, udp := dial(b.NetNS, "udp4", publicAddr+":99", wait)
		c, in := net.DialTimeout("tcp4", target, wait)
		if in == nil {
			c.Close()
		}
		if (out == nil) != want || (udp == nil) != want || (in == nil) != want {
			t.Errorf("%s: TCP out %v, UDP out %v, TCP in %v; want it to work: %v", what, out, udp, in, want)
		}
		reaches(t, other, "tcp4", publicAddr+":80")
	}
	works("before", true)
	cut := &sandbox.NetworkFault{Partition: true}
	for range 2 {
		must(t, h.SetFault(t.Context(), b.Attachment, cut))
		works("cut", false)
	}
	must(t, h.SetPolicy(t.Context(), b.Attachment)) // does not mend it
	works("cut, with the policy set again", false)
	for range 2 {
		must(t, h.SetFault(t.Context(), b.Attachment, nil))
		works("mended", true)
	}
	wantQueues(t, "mended", b, "noqueue", "tbf")

	must(t, h.SetFault(t.Context(), b.Attachment, cut))
	h = nextHost(t, h)
	works("cut, between two daemons", false)
	must(t, h.Recover(t.Context(), map[sandbox.ID]Attachment{b.ID: b.Attachment, other.ID: other.Attachment}))
	works("mended by the next daemon", true)
	wantQueues(t, "mended by the next daemon", b, "noqueue", "tbf")
	if ids := h.Disturbed(); !slices.Equal(ids, []sandbox.ID{b.ID}) {
		t.Errorf("disturbed by an earlier daemon: %v, want %s", ids, b.ID)
	}

	off := newBox(t, 3, sandbox.NetworkOff)
	attach(t, h, off)
	if err := h.SetFault(t.Context(), off.Attachment, cut); sandbox.CodeOf(err) != "no_link" {
		t.Errorf("without a link: %v", err)
	}
	must(t, h.SetFault(t.Context(), off.Attachment, nil))
}

// TestLatencyAndLoss needs netem; where there is none the error says so, and
// what was there stays.
func TestLatencyAndLoss(t *testing.T) {
	newWorld(t)
	h := openHost(t, Config{})
	b := newBox(t, 1, sandbox.NetworkOpen)
	b.Policy.Limits = sandbox.NetworkLimits{EgressBPS: 100e6}
	attach(t, h, b)
	missing, err := QueueKinds()
	must(t, err)
	slow := &sandbox.NetworkFault{LatencyMS: 100, RateBPS: 50e6}
	if slices.Contains(missing, "netem") {
		if err := h.SetFault(t.Context(), b.Attachment, slow); sandbox.CodeOf(err) != "no_netem" || !errors.Is(err, sandbox.ErrUnsupported) {
			t.Errorf("without netem: %v", err)
		}
		wantQueues(t, "after the error", b, "noqueue", "tbf")
		must(t, h.SetFault(t.Context(), b.Attachment, &sandbox.NetworkFault{RateBPS: 50e6}))
		wantQueues(t, "a rate alone", b, "tbf", "tbf")
		testenv.Need(t, testenv.Netem)
	}
	roundTrip := func() time.Duration {
		start := time.Now()
		reaches(t, b, "udp4", publicAddr+":99")
		return time.Since(start)
	}
	roundTrip()
	before := roundTrip()
	must(t, h.SetFault(t.Context(), b.Attachment, slow))
	wantQueues(t, "slow", b, "netem", "netem")
	if after := roundTrip(); after-before < 95*time.Millisecond {
		t.Errorf("a round trip took %s, with 100 ms more %s", before, after)
	}
	must(t, h.SetFault(t.Context(), b.Attachment, &sandbox.NetworkFault{LossPercent: 100}))
	denied(t, b, "udp4", publicAddr+":99")
	must(t, h.SetFault(t.Context(), b.Attachment, &sandbox.NetworkFault{LatencyMS: 100, RateBPS: 50e6}))
	must(t, h.SetFault(t.Context(), b.Attachment, nil))
	wantQueues(t, "cleared", b, "noqueue", "tbf")
	if after := roundTrip(); after > 90*time.Millisecond {
		t.Errorf("with the fault cleared a round trip takes %s", after)
	}
}

// TestRateChangeKeepsConnections changes rates under an idle connection and a
// busy one.
func TestRateChangeKeepsConnections(t *testing.T) {
	w := newWorld(t)
	h := openHost(t, Config{})
	b := newBox(t, 1, sandbox.NetworkOpen)
	attach(t, h, b)
	must(t, linux.InNetNS(w.internet, func() error {
		l, err := net.Listen("tcp4", publicAddr+":7000")
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
				t.Cleanup(func() { c.Close() })
				go func() { _, _ = io.Copy(c, c) }()
			}
		}()
		return nil
	}))
	var idle, busy net.Conn
	must(t, linux.InNetNS(b.NetNS, func() (err error) {
		if idle, err = net.Dial("tcp4", publicAddr+":7000"); err == nil {
			busy, err = net.Dial("tcp4", publicAddr+":7000")
		}
		return err
	}))
	for _, c := range []net.Conn{idle, busy} {
		must(t, c.(*net.TCPConn).SetLinger(0)) // what it still has to send would keep its namespace
		defer c.Close()
	}
	ended := make(chan error, 2)
	go func() { _, err := io.Copy(busy, zeros{}); ended <- err }()
	go func() { _, err := io.Copy(io.Discard, busy); ended <- err }()
	buf := make([]byte, 1)
	for _, rate := range []uint64{0, 50e6, 10e6, 0, 20e6} {
		b.Policy.Limits = sandbox.NetworkLimits{EgressBPS: rate, IngressBPS: rate}
		must(t, h.SetPolicy(t.Context(), b.Attachment))
		must(t, idle.SetDeadline(time.Now().Add(10*time.Second)))
		if _, err := idle.Write(buf); err != nil {
			t.Fatalf("rate %d: %v", rate, err)
		}
		if _, err := io.ReadFull(idle, buf); err != nil {
			t.Fatalf("rate %d: %v", rate, err)
		}
		select {
		case err := <-ended:
			t.Fatalf("rate %d: the busy connection ended: %v", rate, err)
		case <-time.After(300 * time.Millisecond):
		}
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }
