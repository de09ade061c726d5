//go:build root

package integration

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
)

// arrival is what one kind of packet has in common. Port is the destination's
// port, or the ICMP type; zero where there is neither, as in later fragments.
type arrival struct {
	src, dst netip.Addr
	proto    uint8
	from     uint16 // port of the sender, of IPv4's TCP and UDP
	port     uint16
	// Of an ICMP error: the flow it tells of, from the point of view of who
	// gets the error, so that remote is its other end.
	about  uint8 // protocol; 0 for everything else
	remote netip.AddrPort
}

func (a arrival) String() string {
	s := fmt.Sprintf("proto %d %s > %s port %d", a.proto, a.src, a.dst, a.port)
	if a.about != 0 {
		s += fmt.Sprintf(" about proto %d to %s", a.about, a.remote)
	}
	return s
}

// sighting is how often and when last.
type sighting struct {
	n    int
	last time.Time
}

// capture writes down every packet that arrives on a link.
type capture struct {
	fd   int
	done chan struct{}

	mu    sync.Mutex
	seen  map[arrival]sighting
	marks map[uint64]bool // numbers of attempts, where a packet bore one
	count uint64
}

const ethPAll = 0x0300 // ETH_P_ALL in network order

// startCapture captures what arrives on a link of a namespace until the test
// ends, and fails the test if it lost anything.
func startCapture(t testing.TB, ns *os.File, link string) *capture {
	t.Helper()
	c := &capture{done: make(chan struct{}), seen: map[arrival]sighting{}, marks: map[uint64]bool{}}
	err := linux.InNetNS(ns, func() error {
		i, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		if c.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		tick := unix.NsecToTimeval(int64(20 * time.Millisecond))
		return errors.Join(
			unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
			unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tick),
			unix.Bind(c.fd, &unix.SockaddrLinklayer{Protocol: ethPAll, Ifindex: i.Index}),
		)
	})
	if err != nil {
		t.Fatal(err)
	}
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		c.read(stop)
	}()
	t.Cleanup(func() {
		close(stop)
		<-ended
		if st, err := unix.GetsockoptTpacketStats(c.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS); err != nil || st.Drops > 0 {
			t.Errorf("the capture on %s lost packets: %+v, %v", link, st, err)
		}
		unix.Close(c.fd)
	})
	return c
}

func (c *capture) read(stop <-chan struct{}) {
	buf := make([]byte, 256)
	for {
		select {
		case <-stop:
			return
		default:
		}
		n, from, err := unix.Recvfrom(c.fd, buf, unix.MSG_TRUNC)
		if err != nil {
			continue // the tick
		}
		ll, ok := from.(*unix.SockaddrLinklayer)
		if !ok || ll.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		a, ok := parseArrival(buf[:min(n, len(buf))])
		if !ok {
			continue
		}
		c.mu.Lock()
		s := c.seen[a]
		c.seen[a] = sighting{s.n + 1, time.Now()}
		if _, mark, ok := bytes.Cut(buf[:min(n, len(buf))], []byte("attempt:")); ok && len(mark) >= 8 && a.about == 0 {
			c.marks[binary.BigEndian.Uint64(mark)] = true
		}
		c.count++
		c.mu.Unlock()
	}
}

// parseArrival reads an IP packet. What hosts on one link say to each other
// for themselves (ARP, neighbour discovery, group membership) is not told of.
func parseArrival(p []byte) (a arrival, ok bool) {
	if len(p) >= 40 && p[0]>>4 == 6 {
		a.src, a.dst, a.proto = netip.AddrFrom16([16]byte(p[8:24])), netip.AddrFrom16([16]byte(p[24:40])), p[6]
		if a.proto == unix.IPPROTO_ICMPV6 || a.proto == 0 { // the latter is MLD's hop-by-hop header
			return a, strings.Contains(string(p), "attempt:")
		}
		if len(p) >= 44 {
			a.port = binary.BigEndian.Uint16(p[42:])
		}
		return a, true
	}
	if len(p) < 20 || p[0]>>4 != 4 {
		return a, false
	}
	header := int(p[0]&15) * 4
	a.src, a.dst, a.proto = netip.AddrFrom4([4]byte(p[12:16])), netip.AddrFrom4([4]byte(p[16:20])), p[9]
	rest := p[min(header, len(p)):]
	if a.proto == unix.IPPROTO_IGMP {
		return a, false
	}
	if binary.BigEndian.Uint16(p[6:])&0x1fff != 0 || len(rest) < 8 {
		return a, true
	}
	switch a.proto {
	case unix.IPPROTO_ICMP:
		a.port = uint16(rest[0])
		if inner := rest[8:]; rest[0] != 0 && rest[0] != 8 && len(inner) >= 24 {
			a.about = inner[9]
			at := int(inner[0]&15) * 4
			if len(inner) >= at+4 {
				a.remote = netip.AddrPortFrom(netip.AddrFrom4([4]byte(inner[12:16])), binary.BigEndian.Uint16(inner[at:]))
			}
		}
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_UDPLITE, unix.IPPROTO_SCTP, unix.IPPROTO_DCCP:
		a.from, a.port = binary.BigEndian.Uint16(rest), binary.BigEndian.Uint16(rest[2:])
	}
	return a, true
}

// total is how many packets there were.
func (c *capture) total() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.count
}

// take returns what arrived, and forgets it.
func (c *capture) take() map[arrival]sighting {
	c.mu.Lock()
	defer c.mu.Unlock()
	seen := c.seen
	c.seen = map[arrival]sighting{}
	return seen
}

// takeMarks returns the numbers of the attempts that arrived, and forgets them.
func (c *capture) takeMarks() map[uint64]bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	marks := c.marks
	c.marks = map[uint64]bool{}
	return marks
}

// last is when a packet last arrived from a port of the host's, as the far end
// sees it; zero if never.
func (c *capture) last(match func(arrival) bool) (at time.Time, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for a, s := range c.seen {
		if match(a) {
			n += s.n
			if s.last.After(at) {
				at = s.last
			}
		}
	}
	return at, n
}
