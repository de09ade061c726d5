//go:build root

package integration

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
)

// forger puts frames on the wire of a sandbox as its kernel would if the
// workload had taken it over: no capability, socket or seccomp filter is
// between it and the link.
type forger struct {
	fd    int
	own   netip.Addr
	to    unix.SockaddrLinklayer
	other []netip.Addr // addresses it has no right to
}

// newForger opens the link of a sandbox from inside, with the host's rights.
func newForger(t testing.TB, ns *os.File, other ...netip.Addr) *forger {
	t.Helper()
	f := &forger{other: other}
	err := linux.InNetNS(ns, func() error {
		link, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		addrs, err := link.Addrs()
		if err != nil || len(addrs) == 0 {
			return errors.Join(err, errors.New("eth0 has no address"))
		}
		f.own = netip.MustParsePrefix(addrs[0].String()).Addr()
		mac, err := neighbour(gatewayAddr)
		if err != nil {
			return err
		}
		f.to = unix.SockaddrLinklayer{Ifindex: link.Index, Protocol: 0x0008, Halen: 6} // ETH_P_IP in network order
		copy(f.to.Addr[:], mac)
		f.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(f.fd) })
	return f
}

// neighbour reads a link address from the caller's namespace.
func neighbour(ip string) (net.HardwareAddr, error) {
	file, err := os.Open("/proc/thread-self/net/arp")
	if err != nil {
		return nil, err
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		if words := strings.Fields(lines.Text()); len(words) > 3 && words[0] == ip {
			return net.ParseMAC(words[3])
		}
	}
	return nil, fmt.Errorf("no link address of %s", ip)
}

func (f *forger) send(p []byte) error {
	to := f.to
	if p[0]>>4 == 6 {
		to.Protocol = 0xdd86 // ETH_P_IPV6 in network order
	}
	return unix.Sendto(f.fd, p, 0, &to)
}

// shot is a forged packet, or several.
type shot struct {
	kind   string
	id     uint64
	dst    netip.Addr
	proto  uint8
	port   uint16
	honest bool // what an honest kernel could have sent: it arrives where permitted
	counts bool // a refusal is counted
	frames [][]byte
}

// forgeries are the kinds of shots.
var forgeries = []string{
	"udp", "tcp syn", "echo", "fragments", "other protocol", // honest
	"source", "later fragment", "overlap", "flags", "icmp error", "source route", "ipv6", "ip in ip", "redirect", "bad header",
}

func sum16(parts ...[]byte) uint16 {
	var s uint32
	for _, p := range parts {
		for i := 0; i+1 < len(p); i += 2 {
			s += uint32(binary.BigEndian.Uint16(p[i:]))
		}
		if len(p)%2 == 1 {
			s += uint32(p[len(p)-1]) << 8
		}
	}
	for s>>16 != 0 {
		s = s&0xffff + s>>16
	}
	return ^uint16(s)
}

// ipv4 makes a packet; frag is the offset in bytes, with 1 added for more to come.
func ipv4(src, dst netip.Addr, proto uint8, id, frag uint16, options, payload []byte) []byte {
	h := 20 + len(options)
	p := make([]byte, h, h+len(payload))
	p[0], p[8], p[9] = 0x40|byte(h/4), 64, proto
	binary.BigEndian.PutUint16(p[2:], uint16(h+len(payload)))
	binary.BigEndian.PutUint16(p[4:], id)
	binary.BigEndian.PutUint16(p[6:], frag/8|frag&1<<13)
	copy(p[12:], src.AsSlice())
	copy(p[16:], dst.AsSlice())
	copy(p[20:], options)
	binary.BigEndian.PutUint16(p[10:], sum16(p))
	return append(p, payload...)
}

func udpSegment(sport, dport uint16, payload []byte) []byte {
	b := make([]byte, 8, 8+len(payload)) // without a checksum, which IPv4 permits
	binary.BigEndian.PutUint16(b, sport)
	binary.BigEndian.PutUint16(b[2:], dport)
	binary.BigEndian.PutUint16(b[4:], uint16(8+len(payload)))
	return append(b, payload...)
}

func tcpSegment(src, dst netip.Addr, sport, dport uint16, seq uint32, flags byte, payload []byte) []byte {
	b := make([]byte, 20, 20+len(payload))
	binary.BigEndian.PutUint16(b, sport)
	binary.BigEndian.PutUint16(b[2:], dport)
	binary.BigEndian.PutUint32(b[4:], seq)
	b[12], b[13] = 5<<4, flags
	binary.BigEndian.PutUint16(b[14:], 65535)
	b = append(b, payload...)
	pseudo := append(append(src.AsSlice(), dst.AsSlice()...), 0, unix.IPPROTO_TCP, byte(len(b)>>8), byte(len(b)))
	binary.BigEndian.PutUint16(b[16:], sum16(pseudo, b))
	return b
}

func icmpMessage(kind, code byte, rest, payload []byte) []byte {
	b := append([]byte{kind, code, 0, 0, 0, 0, 0, 0}, payload...)
	copy(b[4:8], rest)
	binary.BigEndian.PutUint16(b[2:], sum16(b))
	return b
}

// shoot makes up a shot of a kind at a target. lure is a destination that the
// policy permits, for tricks that begin somewhere honest.
func (f *forger) shoot(r *rand.Rand, kind string, id uint64, dst netip.Addr, port uint16, lure netip.AddrPort) shot {
	mark := binary.BigEndian.AppendUint64([]byte("attempt:"), id)
	sport := uint16(20000 + id%40000)
	ident := uint16(r.Uint32())
	s := shot{kind: kind, id: id, dst: dst, proto: unix.IPPROTO_UDP, port: port}
	add := func(p ...[]byte) { s.frames = append(s.frames, p...) }
	switch kind {
	case "udp":
		s.honest, s.counts = true, true
		add(ipv4(f.own, dst, s.proto, ident, 0, nil, udpSegment(sport, port, mark)))
	case "tcp syn":
		s.honest, s.counts, s.proto = true, true, unix.IPPROTO_TCP
		add(ipv4(f.own, dst, s.proto, ident, 0, nil, tcpSegment(f.own, dst, sport, port, r.Uint32(), 2, mark)))
	case "echo":
		s.honest, s.counts, s.proto, s.port = true, true, unix.IPPROTO_ICMP, 8
		add(ipv4(f.own, dst, s.proto, ident, 0, nil, icmpMessage(8, 0, []byte{byte(sport >> 8), byte(sport), 0, 1}, mark)))
	case "fragments":
		s.honest, s.counts = true, true
		whole := udpSegment(sport, port, append(mark, make([]byte, 1200)...))
		parts := [][]byte{ipv4(f.own, dst, s.proto, ident, 1, nil, whole[:600]), ipv4(f.own, dst, s.proto, ident, 600, nil, whole[600:])}
		if r.IntN(2) == 0 {
			parts[0], parts[1] = parts[1], parts[0]
		}
		add(parts...)
	case "other protocol":
		s.honest, s.counts, s.port = true, true, 0
		s.proto = pick(r, []uint8{47, 50, 51, 89, 103, 253}) // GRE, ESP, AH, OSPF, PIM, experiments
		body := append([]byte{0, 0, 8, 0, 0, 0, 0, 0}, mark...)
		add(ipv4(f.own, dst, s.proto, ident, 0, nil, body))
	case "source":
		forged := pick(r, f.other)
		s.proto = pick(r, []uint8{unix.IPPROTO_UDP, unix.IPPROTO_TCP})
		body := udpSegment(sport, port, mark)
		if s.proto == unix.IPPROTO_TCP {
			body = tcpSegment(forged, dst, sport, port, 1, 2, mark)
		}
		add(ipv4(forged, dst, s.proto, ident, 0, nil, body))
	case "later fragment":
		add(ipv4(f.own, dst, s.proto, ident, 1480, nil, append(mark, mark...)))
	case "overlap":
		// The lure's port in the first fragment, the target's in one that overlaps it.
		first := udpSegment(sport, lure.Port(), append(mark, make([]byte, 600)...))
		again := udpSegment(sport, port, append(mark, make([]byte, 600)...))
		add(ipv4(f.own, dst, s.proto, ident, 1, nil, first[:304]), ipv4(f.own, dst, s.proto, ident, 1, nil, again[:312]), ipv4(f.own, dst, s.proto, ident, 312, nil, again[312:]))
	case "flags":
		s.proto = unix.IPPROTO_TCP
		flags := pick(r, []byte{0, 1, 3, 4, 6, 16, 17, 18, 20, 41, 63, 255})
		add(ipv4(f.own, dst, s.proto, ident, 0, nil, tcpSegment(f.own, dst, sport, port, 1, flags, mark)))
	case "icmp error":
		// To the target, about a flow with the lure; or about one that never was.
		s.proto, s.port = unix.IPPROTO_ICMP, 3
		add(ipv4(f.own, lure.Addr(), unix.IPPROTO_UDP, ident, 0, nil, udpSegment(sport, lure.Port(), nil)))
		about := ipv4(pick(r, []netip.Addr{dst, lure.Addr(), lure.Addr()}), f.own, unix.IPPROTO_UDP, ident, 0, nil, udpSegment(lure.Port(), sport, mark))
		add(ipv4(f.own, dst, s.proto, ident, 0, nil, icmpMessage(pick(r, []byte{3, 4, 11, 12}), byte(r.IntN(5)), nil, about)))
	case "source route":
		hop, a := lure.Addr(), dst.As4()
		option := []byte{pick(r, []byte{0x83, 0x89}), 7, 4, a[0], a[1], a[2], a[3], 0}
		s.dst = hop
		s.port = lure.Port()
		add(ipv4(f.own, hop, s.proto, ident, 0, option, udpSegment(sport, lure.Port(), mark)))
	case "ipv6":
		p := make([]byte, 40)
		body := udpSegment(sport, port, mark)
		p[0], p[6], p[7] = 0x60, unix.IPPROTO_UDP, 64
		binary.BigEndian.PutUint16(p[4:], uint16(len(body)))
		copy(p[8:], netip.MustParseAddr("2606:2800:220::77").AsSlice())
		s.dst = netip.MustParseAddr(pick(r, []string{"2606:2800:220::fe", "2606:2800:220::1", "ff02::1", "::ffff:" + dst.String()}))
		copy(p[24:], s.dst.AsSlice())
		add(append(p, body...))
	case "ip in ip":
		s.proto, s.port = unix.IPPROTO_IPIP, 0
		add(ipv4(f.own, lure.Addr(), s.proto, ident, 0, nil, ipv4(f.own, dst, unix.IPPROTO_UDP, ident, 0, nil, udpSegment(sport, port, mark))))
		s.dst = lure.Addr()
	case "redirect":
		// To the host: use us as the way to the target.
		s.proto, s.port = unix.IPPROTO_ICMP, 5
		about := ipv4(addr(uplinkAddr), dst, unix.IPPROTO_UDP, ident, 0, nil, udpSegment(sport, port, mark))
		own := f.own.As4()
		add(ipv4(f.own, addr(pick(r, hostAddrs)), s.proto, ident, 0, nil, icmpMessage(5, 1, own[:], about)))
		s.dst = addr(gatewayAddr)
	case "bad header":
		p := ipv4(f.own, dst, s.proto, ident, 0, nil, udpSegment(sport, port, mark))
		p[r.IntN(12)] ^= byte(1 + r.IntN(255)) // version, lengths, checksum and the like; never the addresses
		add(p)
	}
	return s
}
