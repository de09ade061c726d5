package netns

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// This file speaks the kernel's packet log (nfnetlink_log): it binds groups
// and reads what rules with a log expression tell. What it reads begins with
// the kernel's own words and ends with bytes a sandbox chose.

// Of linux/netfilter/nfnetlink_log.h, which x/sys/unix does not name.
const (
	nfulPacket    = 0 // NFULNL_MSG_PACKET
	nfulConfig    = 1 // NFULNL_MSG_CONFIG
	nfulCfgCmd    = 1 // NFULA_CFG_CMD
	nfulCfgMode   = 2 // NFULA_CFG_MODE
	nfulCfgTimer  = 4 // NFULA_CFG_TIMEOUT, in hundredths of a second
	nfulCfgQueue  = 5 // NFULA_CFG_QTHRESH
	nfulCmdBind   = 1 // NFULNL_CFG_CMD_BIND
	nfulCopyRange = 2 // NFULNL_COPY_PACKET
	nfulHeader    = 1 // NFULA_PACKET_HDR
	nfulInDev     = 4 // NFULA_IFINDEX_INDEV
	nfulOutDev    = 5 // NFULA_IFINDEX_OUTDEV
	nfulPayload   = 9 // NFULA_PAYLOAD
)

const (
	logSnap    = 128     // bytes of a packet: both headers with their options
	logTimer   = 10      // hundredths of a second that a packet may wait for others
	logQueue   = 64      // packets of one message
	logBuffer  = 2 << 20 // what a slow reader may leave; the rest is counted as lost
	logReadMax = 1 << 18 // above the kernel's largest message of one group
)

// packetLog is a socket that groups of the packet log are bound to.
type packetLog struct {
	file *os.File
	buf  []byte
}

// openPacketLog binds the groups in the current network namespace. A group
// that another program has bound is EBUSY.
func openPacketLog(groups ...uint16) (*packetLog, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("opening the packet log: %w", err)
	}
	err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	// More than the system's bound on buffers, as the daemon may.
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, logBuffer) // else a smaller one
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5})
	for i, g := range groups {
		if err == nil {
			err = bindLogGroup(fd, g, uint32(i+1))
		}
	}
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("binding groups %d of the packet log: %w", groups, err), unix.Close(fd))
	}
	return &packetLog{file: os.NewFile(uintptr(fd), "nflog"), buf: make([]byte, logReadMax)}, nil
}

// bindLogGroup asks for a group's packets, and awaits the kernel's word.
func bindLogGroup(fd int, group uint16, seq uint32) error {
	mode := binary.BigEndian.AppendUint32(nil, logSnap)
	for _, attrs := range [][]byte{
		netlinkAttr(nil, nfulCfgCmd, []byte{nfulCmdBind}),
		netlinkAttr(netlinkAttr(netlinkAttr(nil,
			nfulCfgMode, append(mode, nfulCopyRange, 0)),
			nfulCfgTimer, binary.BigEndian.AppendUint32(nil, logTimer)),
			nfulCfgQueue, binary.BigEndian.AppendUint32(nil, logQueue)),
	} {
		if err := unix.Sendto(fd, logRequest(group, seq, attrs), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
			return err
		}
		if err := awaitAck(fd, seq); err != nil {
			return err
		}
	}
	return nil
}

func logRequest(group uint16, seq uint32, attrs []byte) []byte {
	const size = unix.SizeofNlMsghdr + 4
	b := binary.NativeEndian.AppendUint32(nil, uint32(size+len(attrs)))
	b = binary.NativeEndian.AppendUint16(b, unix.NFNL_SUBSYS_ULOG<<8|nfulConfig)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST|unix.NLM_F_ACK)
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = append(b, unix.AF_UNSPEC, unix.NFNETLINK_V0)
	b = binary.BigEndian.AppendUint16(b, group)
	return append(b, attrs...)
}

func netlinkAttr(b []byte, kind uint16, data []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(unix.SizeofNlAttr+len(data)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, data...)
	return append(b, make([]byte, (4-len(data)%4)%4)...)
}

// awaitAck reads up to the answer to a request. Packets of a group bound
// before may come first; they are lost, which a daemon's start may cost.
func awaitAck(fd int, seq uint32) error {
	buf := make([]byte, logReadMax)
	for {
		n, _, err := unix.Recvfrom(fd, buf, 0)
		if errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		var answer error
		found := false
		eachMessage(buf[:n], func(kind uint16, msgSeq uint32, body []byte) {
			if kind == unix.NLMSG_ERROR && msgSeq == seq && len(body) >= 4 {
				found = true
				if code := int32(binary.NativeEndian.Uint32(body)); code != 0 {
					answer = unix.Errno(-code)
				}
			}
		})
		if found {
			return answer
		}
	}
}

// eachMessage goes through the netlink messages of one datagram.
func eachMessage(b []byte, f func(kind uint16, seq uint32, body []byte)) {
	for len(b) >= unix.SizeofNlMsghdr {
		size := int(binary.NativeEndian.Uint32(b))
		if size < unix.SizeofNlMsghdr || size > len(b) {
			return
		}
		f(binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint32(b[8:]), b[unix.SizeofNlMsghdr:size])
		b = b[min((size+3)&^3, len(b)):]
	}
}

// read waits for packets and gives each to f. ENOBUFS tells that some were
// lost before these; os.ErrClosed that close was called.
func (p *packetLog) read(f func(loggedPacket)) error {
	raw, err := p.file.SyscallConn()
	if err != nil {
		return err
	}
	var n int
	var from unix.Sockaddr
	var rerr error
	err = raw.Read(func(fd uintptr) bool {
		n, from, rerr = unix.Recvfrom(int(fd), p.buf, 0)
		return !errors.Is(rerr, unix.EAGAIN) && !errors.Is(rerr, unix.EINTR)
	})
	if err = errors.Join(err, rerr); err != nil {
		return err
	}
	if a, ok := from.(*unix.SockaddrNetlink); !ok || a.Pid != 0 {
		return nil // not the kernel
	}
	eachMessage(p.buf[:n], func(kind uint16, _ uint32, body []byte) {
		if kind == unix.NFNL_SUBSYS_ULOG<<8|nfulPacket {
			if l, ok := parseLogged(body); ok {
				f(l)
			}
		}
	})
	return nil
}

func (p *packetLog) close() error { return p.file.Close() }

// loggedPacket is one packet as the log tells of it.
type loggedPacket struct {
	group    uint16
	in, out  int // interface indices; 0 where there is none
	src, dst netip.Addr
	protocol uint8 // of the IP header
	version  uint8
	srcPort  uint16
	dstPort  uint16
}

// parseLogged reads the body of a packet message: the nfgenmsg, which holds
// the group, and attributes.
func parseLogged(b []byte) (loggedPacket, bool) {
	var l loggedPacket
	if len(b) < 4 {
		return l, false
	}
	l.group = binary.BigEndian.Uint16(b[2:])
	attrs := b[4:]
	if v, ok := attribute(attrs, nfulInDev); ok && len(v) == 4 {
		l.in = int(binary.BigEndian.Uint32(v))
	}
	if v, ok := attribute(attrs, nfulOutDev); ok && len(v) == 4 {
		l.out = int(binary.BigEndian.Uint32(v))
	}
	payload, ok := attribute(attrs, nfulPayload)
	return l, ok && l.parseIP(payload)
}

// parseIP reads a packet's headers, as far as they are there. It believes no
// length in them.
func (l *loggedPacket) parseIP(b []byte) bool {
	if len(b) == 0 {
		return false
	}
	var transport []byte
	switch l.version = b[0] >> 4; {
	case l.version == 4 && len(b) >= 20:
		l.src, l.dst = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
		l.protocol = b[9]
		const offsetBits = 0x1fff
		if size := int(b[0]&0xf) * 4; size >= 20 && size <= len(b) && binary.BigEndian.Uint16(b[6:])&offsetBits == 0 {
			transport = b[size:]
		}
	case l.version == 6 && len(b) >= 40:
		l.src, l.dst = netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
		l.protocol = b[6] // an extension header, maybe: it is refused as a whole
		transport = b[40:]
	default:
		return false
	}
	switch l.protocol {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP, unix.IPPROTO_DCCP, unix.IPPROTO_UDPLITE:
		if len(transport) >= 4 {
			l.srcPort, l.dstPort = binary.BigEndian.Uint16(transport), binary.BigEndian.Uint16(transport[2:])
		}
	}
	return true
}

// protocolName is the word of a rule for a protocol, or its number.
func protocolName(version, protocol uint8) string {
	switch {
	case version == 6:
		return "ipv6"
	case protocol == unix.IPPROTO_TCP:
		return "tcp"
	case protocol == unix.IPPROTO_UDP:
		return "udp"
	case protocol == unix.IPPROTO_ICMP:
		return "icmp"
	}
	return strconv.Itoa(int(protocol))
}
