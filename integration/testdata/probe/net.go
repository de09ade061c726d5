package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// netAttempt is one try to get a few bytes somewhere and an answer back.
type netAttempt struct {
	ID    int            `json:"id"`
	Proto string         `json:"proto"` // tcp, udp, icmp, udplite, sctp, raw, packet
	To    netip.AddrPort `json:"to"`
	Trick string         `json:"trick,omitempty"`
	Via   netip.AddrPort `json:"via,omitzero"` // where the trick begins
}

// netOutcome is what came of it. Sent means that the kernel took a packet, so
// that somebody had to judge it.
type netOutcome struct {
	ID      int    `json:"id"`
	Outcome string `json:"outcome"`
	Sent    bool   `json:"sent"`
}

const (
	netAtOnce = 96
	netWait   = 400 * time.Millisecond // for an answer that is not to come
	netLong   = 10 * time.Second       // where the caller knows that it will
)

// netAttempts makes the attempts in a file, many at once.
func netAttempts(path string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var list []netAttempt
	if err := json.Unmarshal(b, &list); err != nil {
		return err
	}
	out := make([]netOutcome, len(list))
	var wg sync.WaitGroup
	slots := make(chan struct{}, netAtOnce)
	for i, a := range list {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			sent, err := a.try()
			out[i] = netOutcome{ID: a.ID, Outcome: "ok", Sent: sent}
			if err != nil {
				out[i].Outcome = err.Error()
			}
		})
	}
	wg.Wait()
	return json.NewEncoder(os.Stdout).Encode(out)
}

// mark is the payload of an attempt.
func (a netAttempt) mark() []byte {
	b := make([]byte, 16)
	copy(b, "attempt:")
	binary.BigEndian.PutUint64(b[8:], uint64(a.ID))
	if a.Trick == "big" {
		b = append(b, make([]byte, 4000)...)
	}
	return b
}

func (a netAttempt) try() (sent bool, err error) {
	switch a.Proto {
	case "tcp":
		return a.stream()
	case "udp":
		return a.datagram(unix.SOCK_DGRAM, 0)
	case "icmp":
		return a.echo()
	case "udplite":
		return a.datagram(unix.SOCK_DGRAM, unix.IPPROTO_UDPLITE)
	case "sctp":
		return a.sctp()
	case "raw":
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		return false, closed(fd, err)
	case "packet":
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		return false, closed(fd, err)
	}
	return false, fmt.Errorf("unknown protocol %q", a.Proto)
}

// socket opens a socket of the attempt's family and plays its trick on it.
func (a netAttempt) socket(kind, proto int) (fd int, err error) {
	family := unix.AF_INET
	if a.Trick == "mapped" || a.To.Addr().Is6() {
		family = unix.AF_INET6
	}
	if fd, err = unix.Socket(family, kind|unix.SOCK_CLOEXEC, proto); err != nil {
		return -1, fmt.Errorf("socket: %w", err)
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	switch a.Trick {
	case "device":
		err = unix.BindToDevice(fd, "eth0")
	case "freebind":
		err = errors.Join(unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_FREEBIND, 1), unix.Bind(fd, address(a.Via, family)))
	case "transparent":
		err = errors.Join(unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1), unix.Bind(fd, address(a.Via, family)))
	case "loopback source":
		err = unix.Bind(fd, address(netip.MustParseAddrPort("127.0.0.1:0"), family))
	case "mark":
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, 1)
	case "source route":
		// LSRR (RFC 791, 3.1): the packet goes to its first hop and names the rest.
		to := a.To.Addr().As4()
		err = unix.SetsockoptString(fd, unix.SOL_IP, unix.IP_OPTIONS, string([]byte{0x83, 7, 4, to[0], to[1], to[2], to[3], 0}))
	}
	if err != nil {
		return -1, fmt.Errorf("%s: %w", a.Trick, err)
	}
	wait := unix.NsecToTimeval(int64(a.patience()))
	return fd, errors.Join(
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &wait), // bounds connect too
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BROADCAST, 1),
	)
}

func (a netAttempt) patience() time.Duration {
	if os.Getenv("PROBE_PATIENT") != "" {
		return netLong
	}
	return netWait
}

func address(a netip.AddrPort, family int) unix.Sockaddr {
	if family == unix.AF_INET6 {
		return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
	}
	return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
}

func (a netAttempt) family() int {
	if a.Trick == "mapped" || a.To.Addr().Is6() {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// target is where the packet is addressed to at first.
func (a netAttempt) target() unix.Sockaddr {
	if a.Trick == "source route" {
		return address(a.Via, a.family())
	}
	return address(a.To, a.family())
}

// left tells from an error of connect or sendto whether a packet went out.
func left(err error) bool {
	for _, local := range []error{
		unix.ENETUNREACH, unix.EINVAL, unix.EPERM, unix.EACCES, unix.EADDRNOTAVAIL, unix.EADDRINUSE,
		unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT, unix.EMSGSIZE, unix.ENOBUFS,
	} {
		if errors.Is(err, local) {
			return false
		}
	}
	return true
}

func (a netAttempt) stream() (sent bool, err error) {
	fd, err := a.socket(unix.SOCK_STREAM, 0)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	// A reset, not a FIN: nothing of this attempt comes later.
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	mark := a.mark()
	if a.Trick == "fast open" {
		if err := unix.Sendto(fd, mark, unix.MSG_FASTOPEN|unix.MSG_NOSIGNAL, a.target()); err != nil {
			return left(err), fmt.Errorf("sendto: %w", err)
		}
		return true, a.answered(fd, mark)
	}
	if err := unix.Connect(fd, a.target()); err != nil {
		return left(err), fmt.Errorf("connect: %w", err)
	}
	if _, err := unix.SendmsgN(fd, mark, nil, nil, unix.MSG_NOSIGNAL); err != nil {
		return true, fmt.Errorf("send: %w", err)
	}
	return true, a.answered(fd, mark)
}

// answered wants the mark back.
func (a netAttempt) answered(fd int, mark []byte) error {
	got := make([]byte, 0, len(mark))
	buf := make([]byte, 65536)
	for len(got) < len(mark) {
		n, err := unix.Read(fd, buf)
		if err != nil {
			return fmt.Errorf("receive: %w", err)
		}
		if n == 0 {
			return errors.New("receive: end of stream")
		}
		got = append(got, buf[:n]...)
	}
	if string(got) != string(mark) {
		return fmt.Errorf("answer is %q", got)
	}
	return nil
}

func (a netAttempt) datagram(kind, proto int) (sent bool, err error) {
	fd, err := a.socket(kind, proto)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	mark := a.mark()
	switch a.Trick {
	case "unconnected":
		err = unix.Sendto(fd, mark, 0, a.target())
	case "reconnect":
		// Connected elsewhere, used there, then turned around.
		err = unix.Connect(fd, address(a.Via, a.family()))
		if err == nil {
			_, _ = unix.Write(fd, mark)
			_, _ = unix.Read(fd, make([]byte, 65536))
			err = unix.Connect(fd, a.target())
		}
		if err == nil {
			_, err = unix.Write(fd, mark)
		}
	default:
		if err = unix.Connect(fd, a.target()); err == nil {
			_, err = unix.Write(fd, mark)
		}
	}
	if err != nil {
		return left(err), fmt.Errorf("send: %w", err)
	}
	return true, a.answered(fd, mark)
}

// echo pings through a socket that needs no capability (icmp(7)).
func (a netAttempt) echo() (sent bool, err error) {
	fd, err := a.socket(unix.SOCK_DGRAM, unix.IPPROTO_ICMP)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	request := append([]byte{8, 0, 0, 0, 0, 0, 0, 1}, a.mark()...)
	if err := unix.Sendto(fd, request, 0, a.target()); err != nil {
		return left(err), fmt.Errorf("send: %w", err)
	}
	buf := make([]byte, 65536)
	n, err := unix.Read(fd, buf)
	if err != nil {
		return true, fmt.Errorf("receive: %w", err)
	}
	if n < 8 || buf[0] != 0 || string(buf[8:n]) != string(a.mark()) {
		return true, fmt.Errorf("answer is %q", buf[:n])
	}
	return true, nil
}

func (a netAttempt) sctp() (sent bool, err error) {
	fd, err := a.socket(unix.SOCK_STREAM, unix.IPPROTO_SCTP)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, a.target()); err != nil {
		return left(err), fmt.Errorf("connect: %w", err)
	}
	return true, nil
}
