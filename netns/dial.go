package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
)

// DialInside connects to a port on the loopback of a sandbox, by IPv4 and,
// where nobody listens there, by IPv6: servers that listen on 127.0.0.1
// alone, and sandboxes without a link, are reached in no other way. network is
// "tcp" or "udp". Nothing of the connection is ours once it is closed. The
// error wraps unix.ECONNREFUSED where nobody listens.
//
// Only the socket is made inside, on a borrowed thread; what may take long is
// waited for outside, so that a server that does not answer costs no thread.
func (h *Host) DialInside(ctx context.Context, ns *os.File, network string, port uint16) (net.Conn, error) {
	var errs []error
	for _, to := range []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()} {
		c, err := dialInside(ctx, ns, network, netip.AddrPortFrom(to, port))
		if err == nil {
			return c, nil
		}
		errs = append(errs, fmt.Errorf("connecting to %s port %d of %s inside: %w", network, port, to, err))
		if ctx.Err() != nil {
			break
		}
	}
	return nil, errors.Join(errs...)
}

func dialInside(ctx context.Context, ns *os.File, network string, to netip.AddrPort) (net.Conn, error) {
	kind := unix.SOCK_STREAM
	if network == "udp" {
		kind = unix.SOCK_DGRAM
	}
	var f *os.File
	err := linux.InNetNS(ns, func() (err error) {
		f, err = beginConnect(kind, to)
		return err
	})
	if err != nil {
		if f != nil {
			_ = f.Close() // the way back out failed: the error says so
		}
		return nil, err
	}
	defer f.Close() // FileConn takes a descriptor of its own
	if err := awaitConnect(ctx, f); err != nil {
		return nil, err
	}
	return net.FileConn(f)
}

// beginConnect makes a socket that does not block, and starts to connect it.
func beginConnect(kind int, to netip.AddrPort) (*os.File, error) {
	family := unix.AF_INET
	var sa unix.Sockaddr = &unix.SockaddrInet4{Port: int(to.Port()), Addr: [4]byte{127, 0, 0, 1}}
	if to.Addr().Is6() {
		family, sa = unix.AF_INET6, &unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()}
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	if err := unix.Connect(fd, sa); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		unix.Close(fd)
		return nil, os.NewSyscallError("connect", err)
	}
	return os.NewFile(uintptr(fd), "socket inside a sandbox"), nil
}

// awaitConnect waits until a socket is connected, within ctx.
func awaitConnect(ctx context.Context, f *os.File) error {
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = f.SetWriteDeadline(time.Unix(1, 0)) }) // wakes the wait below
	defer stop()
	var done error
	err = rc.Write(func(fd uintptr) bool {
		ready := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		if n, err := unix.Poll(ready, 0); err != nil || n == 0 {
			return err != nil && !errors.Is(err, unix.EINTR)
		}
		no, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		if err == nil && no != 0 {
			err = unix.Errno(no)
		}
		done = os.NewSyscallError("connect", err)
		return true
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return errors.Join(err, done)
}
