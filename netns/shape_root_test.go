//go:build root

package netns

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sandboxd/sandboxd/internal/linux"
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

// within checks a rate measured as payload against one of whole packets.
func within(t testing.TB, what string, got float64, want uint64) {
	t.Helper()
	t.Logf("%s: %.2f of %.2f Mbit/s", what, got/1e6, float64(want)/1e6)
	if math.Abs(got-float64(want)) > float64(want)/10 {
		t.Errorf("%s: %.2f Mbit/s, want %.2f within a tenth", what, got/1e6, float64(want)/1e6)
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
	for _, mbit := range []uint64{1, 50, 1000} {
		rate := mbit * 1_000_000
		b.Policy.Limits = sandbox.NetworkLimits{EgressBPS: rate, IngressBPS: rate}
		must(t, h.SetPolicy(t.Context(), b.Attachment))
		if free < 1.5*float64(rate) {
			t.Logf("%d Mbit/s are too near to what this machine does without a limit", mbit)
			continue
		}
		within(t, "TCP out", iperf(t, w, b), rate)
		within(t, "TCP in", iperf(t, w, b, intoSandbox), rate)
		if mbit <= 50 {
			within(t, "UDP out", flood(t, b.NetNS, w.internet, publicAddr+":6000", 2*rate), rate)
			within(t, "UDP in", flood(t, nil, b.NetNS, addr.String()+":6000", 2*rate), rate)
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
