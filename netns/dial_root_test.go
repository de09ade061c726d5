//go:build root

package netns

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// freshNS makes a network namespace in which only loopback is up.
func freshNS(t *testing.T) *os.File {
	t.Helper()
	testenv.Need(t, testenv.Root)
	ns := newNetNS(t)
	must(t, prepare(ns))
	return ns
}

// listenIn listens in a network namespace.
func listenIn(t *testing.T, ns *os.File, network, at string) (ln net.Listener) {
	t.Helper()
	must(t, linux.InNetNS(ns, func() (err error) {
		ln, err = net.Listen(network, at)
		return err
	}))
	t.Cleanup(func() { ln.Close() })
	return ln
}

func TestDialInside(t *testing.T) {
	h := &Host{}
	ns := freshNS(t)
	ln4, ln6 := listenIn(t, ns, "tcp4", "127.0.0.1:7000"), listenIn(t, ns, "tcp6", "[::1]:7001")
	lo, err := netlink.LinkByName("lo")
	must(t, err)
	must(t, netlink.LinkSetUp(lo)) // of the tests' own namespace
	here, err := net.Listen("tcp", "127.0.0.1:7002")
	must(t, err)
	defer here.Close()
	for port, ln := range map[uint16]net.Listener{7000: ln4, 7001: ln6} {
		c, err := h.DialInside(t.Context(), ns, "tcp", port)
		if err != nil {
			t.Fatal(err)
		}
		other, err := ln.Accept()
		must(t, err)
		_, err = io.WriteString(c, "x")
		must(t, err)
		must(t, c.(*net.TCPConn).CloseWrite())
		if b, err := io.ReadAll(other); err != nil || string(b) != "x" {
			t.Errorf("port %d: %q, %v", port, b, err)
		}
		other.Close()
		c.Close()
	}
	// What listens out here is not inside; out here it does.
	if c, err := h.DialInside(t.Context(), ns, "tcp", 7002); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("a port of the host: %v, %v", c, err)
	}
	c, err := net.Dial("tcp", "127.0.0.1:7002")
	must(t, err)
	c.Close()
}

// TestDialInsideWaitsOutside: a server that takes no connection costs the time
// given, and a wait is ended by its context.
func TestDialInsideWaitsOutside(t *testing.T) {
	h := &Host{}
	ns := freshNS(t)
	var fd int
	must(t, linux.InNetNS(ns, func() (err error) {
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		if err := unix.Bind(fd, &unix.SockaddrInet4{Port: 7000, Addr: [4]byte{127, 0, 0, 1}}); err != nil {
			return err
		}
		return unix.Listen(fd, 0) // room for one
	}))
	defer unix.Close(fd)
	first, err := h.DialInside(t.Context(), ns, "tcp", 7000)
	must(t, err)
	defer first.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		for { // how many the kernel has room for is its own affair
			c, err := h.DialInside(ctx, ns, "tcp", 7000)
			if err != nil {
				done <- err
				return
			}
			defer c.Close()
		}
	}()
	select {
	case err := <-done:
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a server that takes none: %v", err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the dial does not heed its context")
	}
}

func TestDialInsideUDP(t *testing.T) {
	h := &Host{}
	ns := freshNS(t)
	var server net.PacketConn
	must(t, linux.InNetNS(ns, func() (err error) {
		server, err = net.ListenPacket("udp", "127.0.0.1:7000")
		return err
	}))
	defer server.Close()
	c, err := h.DialInside(t.Context(), ns, "udp", 7000)
	must(t, err)
	defer c.Close()
	must(t, server.SetDeadline(time.Now().Add(10*time.Second)))
	must(t, c.SetDeadline(time.Now().Add(10*time.Second)))
	_, err = io.WriteString(c, "x")
	must(t, err)
	buf := make([]byte, 10)
	n, from, err := server.ReadFrom(buf)
	must(t, err)
	_, err = server.WriteTo(buf[:n], from)
	must(t, err)
	if n, err := c.Read(buf); err != nil || string(buf[:n]) != "x" {
		t.Errorf("%q, %v", buf[:n], err)
	}
}
