// Command pid1 stands in for sandbox-init in the tests of the launch package:
// it answers each connection with what it sees of itself and waits for the next.
package main

import (
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
)

func main() {
	ln, err := net.FileListener(os.NewFile(3, "listener"))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for {
		c, err := ln.Accept()
		if err != nil {
			os.Exit(1)
		}
		read := func(p string) string { b, _ := os.ReadFile(p); return strings.Join(strings.Fields(string(b)), " ") }
		host, _ := os.Hostname()
		_, errInit := os.ReadFile("/sandbox-init")
		errMake := os.Mkdir("/x", 0o755)
		null, errNull := os.OpenFile("/dev/null", os.O_RDWR, 0)
		null.Close()
		errPTS := syscall.Mount("devpts", "/dev/pts", "devpts", syscall.MS_NOSUID|syscall.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5")
		_, errPTY := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
		errUNS := os.WriteFile("/proc/sys/user/max_user_namespaces", []byte("0"), 0)
		links, _ := os.ReadDir("/sys/class/net")
		fmt.Fprintf(c, "pid=%d\nuid=%d\nuidmap=%s\nhostname=%s\ncgroup=%s\nreadinit=%v\nmkdir=%v\nnull=%v\npts=%v\npty=%v\nuserns=%v\nlinks=%d\nmounts=%d\n", os.Getpid(), os.Getuid(), read("/proc/self/uid_map"), host, read("/proc/self/cgroup"), errInit, errMake, errNull, errPTS, errPTY, errUNS, len(links), strings.Count(read("/proc/self/mountinfo"), " - "))
		c.Close()
	}
}
