package main

import (
	"fmt"
	"io"
	"net"
	"os"
)

// echo sends back what comes by TCP and UDP, until killed.
func echo(addr string) error {
	l, err := net.Listen("tcp4", addr)
	if err != nil {
		return err
	}
	u, err := net.ListenPacket("udp4", addr)
	if err != nil {
		return err
	}
	fmt.Fprintln(os.Stdout, "listening")
	go func() {
		buf := make([]byte, 65536)
		for {
			n, from, err := u.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = u.WriteTo(buf[:n], from)
		}
	}()
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer c.Close()
			_, _ = io.Copy(c, c)
		}()
	}
}
