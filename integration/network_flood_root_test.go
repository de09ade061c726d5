//go:build root

package integration

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestNetworkFlood has one sandbox fill whatever can be filled: refusals, the
// audit of them, new flows, names, pins. The daemon stays small and prompt, the
// books stay exact, and a neighbour notices nothing.
func TestNetworkFlood(t *testing.T) {
	w := newWorld(t)
	serveZones(t, w, map[string]func(int) []string{
		"*.many.example.com": manyAddrs, "ok.example.com": always("60 A 151.101.1.69"),
	})
	d := install(t, networkConfig)
	flooder := d.create(t, sandbox.Spec{Name: "flooder", Network: sandbox.NetworkPolicy{
		Mode: sandbox.NetworkAllow, Allow: []string{"1.1.1.1", "*.many.example.com:80,443,8000-8100"},
	}})
	d.create(t, sandbox.Spec{Name: "neighbour", Network: named})
	probe := d.give(t, "flooder")
	d.give(t, "neighbour")
	const server = gatewayAddr + ":53"
	var alone time.Duration
	quiet := func(when string) {
		t.Helper()
		start := time.Now()
		d.wantAddrs(t, "neighbour", probe, server, map[string]string{"ok.example.com": "151.101.1.69", "other.example.com": ""})
		d.reaches(t, "neighbour", probe, "tcp", "151.101.1.69:443", true)
		d.reaches(t, "neighbour", probe, "tcp", "1.1.1.1:443", false)
		took := time.Since(start)
		t.Logf("%s the neighbour waited %s", when, took.Round(time.Millisecond))
		if alone == 0 {
			alone = took
		} else if took > 5*alone {
			t.Errorf("%s the neighbour waited %s, alone %s", when, took, alone)
		}
	}
	quiet("before")
	memory := d.memory(t, "VmRSS")
	f := newForger(t, netnsOf(t, flooder.InitPID), addr("8.8.8.8"))
	before := d.usage(t, "flooder")

	// Refusals: each counted, few of them told.
	n := testenv.Cycles(t, 30000, 1000000)
	sent := f.flood(t, n, func(r *rand.Rand) netip.Addr { return addr(privateHosts[r.IntN(len(privateHosts))]) })
	quiet("amid refusals")
	w.settle(t)
	u := d.usage(t, "flooder")
	if got := u.NetDropped - before.NetDropped; got > uint64(sent) || got < uint64(sent)*9/10 { // the kernel's own queue may overflow
		t.Errorf("%d refused packets, %d counted", sent, got)
	}
	// New flows: bounded, and others' are not touched.
	f.flood(t, n, func(*rand.Rand) netip.Addr { return addr("1.1.1.1") })
	quiet("amid new flows")
	d.reaches(t, "neighbour", probe, "udp", "151.101.1.69:443", true)

	// Names that stand for many addresses, on many ports.
	for i := range 60 {
		q := asking(fmt.Sprintf("n%d.many.example.com", i), dns.TypeA)
		q.TCP = true
		d.ask(t, "flooder", probe, server, q)
	}
	quiet("amid pins")
	var events int
	for after, more := int64(0), true; more; {
		page, _, err := d.Events(t.Context(), client.EventQuery{Sandbox: "flooder", After: after, Limit: 1000})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range page {
			after = e.Seq
			if strings.HasPrefix(e.Type, "net.") {
				events++
			}
		}
		more = len(page) == 1000
	}
	if events == 0 || events > 3000 {
		t.Errorf("%d refused packets made %d events", sent, events)
	}
	if grown := d.memory(t, "VmRSS") - memory; grown > 64<<20 {
		t.Errorf("the daemon grew by %d MiB", grown>>20)
	}
	t.Logf("%d refused packets: %d events; the daemon grew by %d KiB", sent, events, (d.memory(t, "VmRSS")-memory)>>10)
	start := time.Now()
	if _, err := d.Remove(t.Context(), "flooder"); err != nil {
		t.Errorf("removal: %v", err)
	}
	t.Logf("removal took %s", time.Since(start).Round(time.Millisecond))
	quiet("afterwards")
}

// flood sends small datagrams as fast as the link takes them, each of a flow
// of its own, and returns how many it took.
func (f *forger) flood(t testing.TB, n int, to func(*rand.Rand) netip.Addr) (sent int) {
	t.Helper()
	r := rand.New(rand.NewPCG(1, 2))
	for i := range n {
		p := ipv4(f.own, to(r), unix.IPPROTO_UDP, uint16(i), 0, nil, udpSegment(uint16(1024+i%60000), uint16(1024+i/7%60000), binary.BigEndian.AppendUint32(nil, uint32(i))))
		if f.send(p) == nil {
			sent++
		}
	}
	return sent
}
