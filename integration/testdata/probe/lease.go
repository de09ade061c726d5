package main

import (
	"fmt"
	"os"
	"os/signal"
	"time"

	"golang.org/x/sys/unix"
)

// lease asks for a lease on a file of one's own, tells what came of it, and
// keeps it, whoever waits.
func lease(path string) error {
	signal.Ignore(unix.SIGIO)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	if _, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		fmt.Println(err)
	} else {
		fmt.Println("ok")
	}
	for err == nil {
		time.Sleep(time.Hour)
	}
	return f.Close()
}
