//go:build root

package netns

import (
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// ear collects what a Host tells.
type ear struct {
	mu    sync.Mutex
	heard []sandbox.NetworkNews
}

func (e *ear) tell(n sandbox.NetworkNews) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.heard = append(e.heard, n)
}

func (e *ear) count(match func(sandbox.NetworkNews) bool) (n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, h := range e.heard {
		if match(h) {
			n++
		}
	}
	return n
}

// expect waits until news of this kind were heard.
func (e *ear) expect(t *testing.T, want sandbox.NetworkNews) {
	t.Helper()
	same := func(n sandbox.NetworkNews) bool {
		return n.Sandbox == want.Sandbox && n.Type == want.Type && n.Protocol == want.Protocol && n.Dest == want.Dest && n.Port == want.Port && n.Inbound == want.Inbound && (want.Why == "" || n.Why == want.Why)
	}
	for deadline := time.Now().Add(5 * time.Second); e.count(same) == 0; <-time.After(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			e.mu.Lock()
			defer e.mu.Unlock()
			t.Fatalf("%+v was not told; told were %+v", want, e.heard)
		}
	}
}

// TestAuditTells: what goes out and what is refused is told with whom and
// where to; what belongs to a flow that was told is not told again.
func TestAuditTells(t *testing.T) {
	w := newWorld(t)
	var e ear
	h := openHost(t, Config{Tell: e.tell})
	b := newBox(t, 5, sandbox.NetworkOpen)
	own := attach(t, h, b)
	news := func(kind, protocol, dest string, port uint16, why ...string) sandbox.NetworkNews {
		return sandbox.NetworkNews{Sandbox: b.ID, Type: kind, Protocol: protocol, Dest: dest, Port: port, Why: strings.Join(why, "")}
	}
	reaches(t, b, "tcp4", publicAddr+":80")
	e.expect(t, news(sandbox.EventNetAllowed, "tcp", publicAddr, 80))
	if n := e.count(func(n sandbox.NetworkNews) bool { return n.Type == sandbox.EventNetAllowed }); n != 1 {
		t.Errorf("one connection was told %d times", n)
	}
	reaches(t, b, "udp4", publicAddr+":99")
	e.expect(t, news(sandbox.EventNetAllowed, "udp", publicAddr, 99))
	denied(t, b, "tcp4", privateAddr+":80")
	e.expect(t, news(sandbox.EventNetDenied, "tcp", privateAddr, 80, stepClosed))
	denied(t, b, "udp4", metadataAddr+":99")
	e.expect(t, news(sandbox.EventNetDenied, "udp", metadataAddr, 99, stepClosed))
	denied(t, b, "tcp4", hostAddr+":22") // the host itself
	e.expect(t, news(sandbox.EventNetDenied, "tcp", hostAddr, 22, stepHost))
	denied(t, b, "udp4", publicAddr+":53")
	e.expect(t, news(sandbox.EventNetDenied, "udp", publicAddr, 53, stepDNS))

	// IPv6, forged sources, protocols nobody asked for.
	must(t, sendFrame(b.NetNS, guestLink, frame6(hostMAC(b.Slot), sandboxMAC(b.Slot), netipAddr("2001:db8::2"), netipAddr("2001:db8::1"), 7777, "six")))
	off := linkName(b.ID)
	must(t, writeSysctl("net/ipv6/conf/"+off+"/disable_ipv6", "0"))
	must(t, sendFrame(b.NetNS, guestLink, frame6(hostMAC(b.Slot), sandboxMAC(b.Slot), netipAddr("2001:db8::2"), netipAddr("2001:db8::1"), 7777, "six")))
	e.expect(t, news(sandbox.EventNetDenied, "ipv6", "2001:db8::1", 7777, stepIPv6))
	must(t, sendRaw(b.NetNS, packet(netipAddr("1.2.3.4"), netipAddr(publicAddr), 7777, "forged")))
	e.expect(t, news(sandbox.EventNetDenied, "udp", publicAddr, 7777, whyForged))

	// From outside, unasked.
	routeBack(t, w, h)
	must(t, sendRaw(w.internet, packet(netipAddr(publicAddr), own, 4444, "unasked")))
	in := news(sandbox.EventNetDenied, "udp", publicAddr, 4444, whyUnasked)
	in.Inbound = true
	e.expect(t, in)
}

// routeBack lets the internet send to the sandboxes' addresses.
func routeBack(t *testing.T, w *world, h *Host) {
	t.Helper()
	must(t, linux.InNetNS(w.internet, func() error {
		return netlink.RouteAdd(&netlink.Route{LinkIndex: linkIndex(t, "net0"), Dst: pool4(h), Gw: net.ParseIP(hostAddr)})
	}))
}

// TestAuditIsBoundedInTheKernel: a flood is told as far as its allowance goes,
// counted to the last packet, and takes nothing of a neighbour's.
func TestAuditIsBoundedInTheKernel(t *testing.T) {
	newWorld(t)
	var e ear
	h := openHost(t, Config{Tell: e.tell})
	loud, quiet := newBox(t, 5, sandbox.NetworkOpen), newBox(t, 6, sandbox.NetworkOpen)
	attach(t, h, loud)
	attach(t, h, quiet)
	const flood = 5000
	start := time.Now()
	must(t, linux.InNetNS(loud.NetNS, func() error {
		c, err := net.Dial("udp4", privateAddr+":99")
		if err != nil {
			return err
		}
		defer c.Close()
		for range flood {
			_, _ = c.Write([]byte("x")) // refused, and told so now and then
		}
		return nil
	}))
	denied(t, quiet, "tcp4", privateAddr+":80")
	e.expect(t, sandbox.NetworkNews{Sandbox: quiet.ID, Type: sandbox.EventNetDenied, Protocol: "tcp", Dest: privateAddr, Port: 80})
	told := e.count(func(n sandbox.NetworkNews) bool { return n.Sandbox == loud.ID })
	if most := tellBurst + int(time.Since(start).Seconds()+1)*tellRate; told > most || told < tellBurst/2 {
		t.Errorf("%d of a flood of %d were told, want at most %d and some", told, flood, most)
	}
	// The socket's own queue may drop some of them before.
	if c, _, err := h.Counters(loud.ID, loud.Slot); err != nil || c.Dropped < flood/2 {
		t.Errorf("dropped %d of %d, %v", c.Dropped, flood, err)
	}
	// What may be refused does not use up what may be let out.
	reaches(t, loud, "tcp4", publicAddr+":80")
	e.expect(t, sandbox.NetworkNews{Sandbox: loud.ID, Type: sandbox.EventNetAllowed, Protocol: "tcp", Dest: publicAddr, Port: 80})
}

// TestAuditComesBack: a daemon that finds the groups taken works, and hears
// once they are free.
func TestAuditComesBack(t *testing.T) {
	newWorld(t)
	first, err := openPacketLog(logGranted, logRefused)
	must(t, err)
	if other, err := openPacketLog(logRefused); err == nil {
		_ = other.close()
		t.Fatal("control: the same group was bound twice")
	}
	var e ear
	h := openHost(t, Config{Tell: e.tell})
	b := newBox(t, 5, sandbox.NetworkOpen)
	attach(t, h, b)
	denied(t, b, "tcp4", privateAddr+":80")
	must(t, first.close())
	eventually(t, "the groups bound again", func() bool {
		denied(t, b, "tcp4", privateAddr+":80")
		return e.count(func(n sandbox.NetworkNews) bool { return n.Sandbox == b.ID }) > 0
	})
}

// TestAuditNeverWaits: who does not read loses what there is to tell, and the
// sandbox does not notice.
func TestAuditNeverWaits(t *testing.T) {
	newWorld(t)
	stuck := make(chan struct{})
	var once sync.Once
	h := openHost(t, Config{Tell: func(sandbox.NetworkNews) { <-stuck }})
	defer once.Do(func() { close(stuck) })
	// A small buffer, or a test would have to send megabytes.
	raw, err := h.audit.socket.file.SyscallConn()
	must(t, err)
	must(t, raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 4096) }))
	must(t, err)
	var boxes []*box
	for slot := range 4 {
		b := newBox(t, slot, sandbox.NetworkOpen)
		attach(t, h, b)
		boxes = append(boxes, b)
	}
	for range 3 {
		for _, b := range boxes {
			must(t, linux.InNetNS(b.NetNS, func() error {
				c, err := net.Dial("udp4", privateAddr+":99")
				if err != nil {
					return err
				}
				defer c.Close()
				for range 200 {
					_, _ = c.Write([]byte("x"))
				}
				return nil
			}))
		}
	}
	reaches(t, boxes[0], "tcp4", publicAddr+":80")
	once.Do(func() { close(stuck) })
	eventually(t, "the loss counted", func() bool { return h.AuditLost() > 0 })
}
