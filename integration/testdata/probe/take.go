package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// take takes as much as it gets of resources that the kernel counts for a user
// or for the whole host, writes how much that was of each as JSON, and keeps
// it until its standard input ends. It takes at most so many of each.
func take(most int) error {
	got := map[string]int{}
	for what, one := range map[string]func(i int) error{
		"inotify": func(int) error { _, err := unix.InotifyInit1(unix.IN_CLOEXEC); return err },
		"mqueue":  takeQueue,
		"signals": queueSignal,
		"aio":     func(int) error { return setupAIO(1024) },
		"pty":     func(int) error { _, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY, 0); return err },
	} {
		for got[what] < most {
			if err := one(got[what]); err != nil {
				fmt.Fprintln(os.Stderr, what, got[what], err)
				break
			}
			got[what]++
		}
	}
	if err := json.NewEncoder(os.Stdout).Encode(got); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

// takeQueue makes a message queue of 80 KiB, which has no name when it has
// come about (mq_overview(7)).
func takeQueue(i int) error {
	name, err := unix.BytePtrFromString(fmt.Sprintf("take-%d-%d", os.Getpid(), i))
	if err != nil {
		return err
	}
	attr := [8]int64{1: 10, 2: 8192} // mq_maxmsg, mq_msgsize
	_, _, errno := unix.Syscall6(unix.SYS_MQ_OPEN, uintptr(unsafe.Pointer(name)), unix.O_CREAT|unix.O_RDWR, 0o600, uintptr(unsafe.Pointer(&attr)), 0, 0)
	if errno != 0 {
		return errno
	}
	if _, _, errno = unix.Syscall(unix.SYS_MQ_UNLINK, uintptr(unsafe.Pointer(name)), 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// queueSignal queues a real-time signal that is blocked, for a thread that
// does nothing else.
func queueSignal(int) error {
	blocker.once.Do(block)
	var info [128]byte
	*(*int32)(unsafe.Pointer(&info[0])) = int32(sigQueued)
	*(*int32)(unsafe.Pointer(&info[8])) = -1 // SI_QUEUE
	_, _, errno := unix.Syscall6(unix.SYS_RT_TGSIGQUEUEINFO, uintptr(os.Getpid()), uintptr(blocker.tid), uintptr(sigQueued), uintptr(unsafe.Pointer(&info[0])), 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

const sigQueued = 50

// blocker is a thread with the signal blocked.
var blocker = struct {
	once sync.Once
	tid  int
}{}

func block() {
	ready := make(chan int)
	go func() {
		runtime.LockOSThread()
		var all unix.Sigset_t
		all.Val[0] = ^uint64(0)
		if err := unix.PthreadSigmask(unix.SIG_SETMASK, &all, nil); err != nil {
			panic(err)
		}
		ready <- unix.Gettid()
		select {}
	}()
	blocker.tid = <-ready
}

func setupAIO(events uint) error {
	var ctx uintptr
	if _, _, errno := unix.Syscall(unix.SYS_IO_SETUP, uintptr(events), uintptr(unsafe.Pointer(&ctx)), 0); errno != 0 {
		return errno
	}
	return nil
}
