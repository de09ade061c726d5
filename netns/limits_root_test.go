//go:build root

package netns

import (
	"net"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// arrivals counts the packets that reach a UDP port of the internet.
func arrivals(t testing.TB, w *world, port int) *atomic.Int64 {
	t.Helper()
	var n atomic.Int64
	must(t, linux.InNetNS(w.internet, func() error {
		c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.ParseIP(publicAddr), Port: port})
		if err != nil {
			return err
		}
		_ = c.SetReadBuffer(4 << 20)
		t.Cleanup(func() { c.Close() })
		go func() {
			buf := make([]byte, 2048)
			for {
				if _, err := c.Read(buf); err != nil {
					return
				}
				n.Add(1)
			}
		}()
		return nil
	}))
	return &n
}

// senders are sockets inside, each with a flow of its own.
func senders(t testing.TB, b *box, n, port int) []net.Conn {
	t.Helper()
	out := make([]net.Conn, n)
	must(t, linux.InNetNS(b.NetNS, func() error {
		for i := range out {
			c, err := net.Dial("udp4", net.JoinHostPort(publicAddr, strconv.Itoa(port)))
			if err != nil {
				return err
			}
			t.Cleanup(func() { c.Close() })
			out[i] = c
		}
		return nil
	}))
	return out
}

// settle waits until nothing more arrives.
func settle(n *atomic.Int64) int64 {
	for last := int64(-1); ; <-time.After(100 * time.Millisecond) {
		now := n.Load()
		if now == last {
			return now
		}
		last = now
	}
}

func refused(t testing.TB, h *Host, b *box) uint64 {
	t.Helper()
	c, known, err := h.Counters(b.ID, b.Slot)
	if err != nil || !known {
		t.Fatalf("counters: known %v, %v", known, err)
	}
	return c.Dropped
}

func limit(t testing.TB, h *Host, b *box, l sandbox.NetworkLimits) {
	t.Helper()
	b.Policy.Limits = l
	must(t, h.SetPolicy(t.Context(), b.Attachment))
}

// TestPacketsPerSecond sends faster than the limit for a while, and as fast
// without it. What does not arrive is counted.
func TestPacketsPerSecond(t *testing.T) {
	w := newWorld(t)
	h := openHost(t, Config{})
	b, other := newBox(t, 1, sandbox.NetworkOpen), newBox(t, 2, sandbox.NetworkOpen)
	attach(t, h, b)
	attach(t, h, other)
	limit(t, h, other, sandbox.NetworkLimits{PacketsPerSecond: 400})
	got := arrivals(t, w, 6001)
	const rate, lasts = 2000, time.Second
	run := func(from *box) (sent, arrived int64, took time.Duration) {
		before := settle(got)
		c := senders(t, from, 1, 6001)[0]
		start := time.Now()
		for took = 0; took < lasts; took = time.Since(start) {
			for ; float64(sent) < took.Seconds()*rate; sent++ {
				_, _ = c.Write([]byte("x"))
			}
			<-time.After(time.Millisecond)
		}
		return sent, settle(got) - before, took
	}
	if sent, arrived, _ := run(b); arrived < sent*99/100 {
		t.Fatalf("control: without a limit %d of %d packets arrived", arrived, sent)
	}
	for _, pps := range []uint64{100, 500} {
		limit(t, h, b, sandbox.NetworkLimits{PacketsPerSecond: pps})
		dropped := refused(t, h, b)
		sent, arrived, took := run(b)
		most := int64(float64(pps)*(took.Seconds()*1.1+0.3)) + 16
		if least := int64(float64(pps) * took.Seconds() * 0.9); arrived < least || arrived > most {
			t.Errorf("%d a second: %d of %d packets arrived in %s, want %d to %d", pps, arrived, sent, took, least, most)
		}
		if d := int64(refused(t, h, b) - dropped); d != sent-arrived {
			t.Errorf("%d a second: %d packets did not arrive, %d are counted as refused", pps, sent-arrived, d)
		}
	}
	if _, arrived, took := run(other); float64(arrived) < 400*took.Seconds()*0.9 {
		t.Errorf("a sandbox with a limit of its own got %d packets through in %s: limits are shared", arrived, took)
	}
	limit(t, h, b, sandbox.NetworkLimits{})
	if sent, arrived, _ := run(b); arrived < sent*99/100 {
		t.Errorf("with the limit lifted %d of %d packets arrived", arrived, sent)
	}
}

// TestConnectionsPerSecond begins many flows at once. Flows that exist are
// not bounded by it.
func TestConnectionsPerSecond(t *testing.T) {
	w := newWorld(t)
	h := openHost(t, Config{})
	b := newBox(t, 1, sandbox.NetworkOpen)
	attach(t, h, b)
	got := arrivals(t, w, 6002)
	const flows = 300
	run := func() (arrived int64, took time.Duration) {
		before := settle(got)
		all := senders(t, b, flows, 6002)
		start := time.Now()
		for _, c := range all {
			_, _ = c.Write([]byte("x"))
		}
		took = time.Since(start)
		return settle(got) - before, took
	}
	if arrived, _ := run(); arrived != flows {
		t.Fatalf("control: without a limit %d of %d flows began", arrived, flows)
	}
	old := senders(t, b, 1, 6002)[0]
	_, _ = old.Write([]byte("x"))
	settle(got)
	const cps = 40
	limit(t, h, b, sandbox.NetworkLimits{ConnectionsPerSecond: cps})
	dropped := refused(t, h, b)
	arrived, took := run()
	if most := int64(cps*(took.Seconds()+0.3)) + 4; arrived < 4 || arrived > most {
		t.Errorf("%d of %d flows began in %s, want 4 to %d", arrived, flows, took, most)
	}
	if d := int64(refused(t, h, b) - dropped); d != flows-arrived {
		t.Errorf("%d flows were refused, %d packets are counted", flows-arrived, d)
	}
	before := settle(got)
	for range 200 {
		_, _ = old.Write([]byte("x"))
	}
	if n := settle(got) - before; n != 200 {
		t.Errorf("of 200 packets of an old flow %d arrived", n)
	}
	eventually(t, "another flow may begin", func() bool {
		before := settle(got)
		_, _ = senders(t, b, 1, 6002)[0].Write([]byte("x"))
		return settle(got) > before
	})
}

// TestFlowsAtOneTime opens more connections than it may have, and closes some.
func TestFlowsAtOneTime(t *testing.T) {
	w := newWorld(t)
	echoServer(t, w, publicAddr+":7") // it does not hang up
	h := openHost(t, Config{})
	b, other := newBox(t, 1, sandbox.NetworkOpen), newBox(t, 2, sandbox.NetworkOpen)
	attach(t, h, b)
	attach(t, h, other)
	// open returns as many connections as it gets, up to n.
	open := func(from *box, n int, wait time.Duration) (all []net.Conn) {
		must(t, linux.InNetNS(from.NetNS, func() error {
			for range n {
				c, err := net.DialTimeout("tcp4", publicAddr+":7", wait)
				if err != nil {
					break
				}
				t.Cleanup(func() { resetOnClose(c); c.Close() })
				all = append(all, c)
			}
			return nil
		}))
		return all
	}
	end := func(all []net.Conn) {
		for _, c := range all {
			resetOnClose(c)
			c.Close()
		}
	}
	const most = 10
	all := open(b, 3*most, permittedWait)
	if len(all) != 3*most {
		t.Fatalf("control: without a limit %d of %d connections", len(all), 3*most)
	}
	end(all)
	limit(t, h, b, sandbox.NetworkLimits{Flows: most})
	eventually(t, "room for all it may have", func() bool {
		all = open(b, most, deniedWait)
		if len(all) < most {
			end(all)
		}
		return len(all) == most
	})
	dropped := refused(t, h, b)
	if more := open(b, 1, deniedWait); len(more) != 0 {
		t.Errorf("a connection more than %d", most)
	}
	eventually(t, "what was refused is counted", func() bool { return refused(t, h, b) != dropped })
	if n := len(open(other, 2*most, permittedWait)); n != 2*most {
		t.Errorf("another sandbox, without a limit, got %d of %d", n, 2*most)
	}
	end(all[:3])
	eventually(t, "room again after some ended", func() bool { return len(open(b, 1, deniedWait)) == 1 })
	limit(t, h, b, sandbox.NetworkLimits{})
	if n := len(open(b, 2*most, permittedWait)); n != 2*most {
		t.Errorf("with the limit lifted %d of %d connections", n, 2*most)
	}
}
