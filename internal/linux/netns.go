package linux

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// InNetNS runs do on an OS thread that is inside the network namespace ns,
// and brings the thread back. do must start no goroutine that relies on the
// namespace. Sockets made by do stay in ns after it returns.
//
// The thread goes back to the scheduler only when it is provably home: if the
// way back fails it stays locked, and the Go runtime ends it with its
// goroutine. Throwing every thread away instead would be wrong here: the
// process's first thread cannot end, and would pin the namespace for ever.
//
// See setns(2): the caller needs CAP_SYS_ADMIN in the user namespace that owns
// ns and in its own.
func InNetNS(ns *os.File, do func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("opening the thread's own network namespace: %w", err)
			return
		}
		defer home.Close()
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("entering network namespace %s: %w", ns.Name(), err)
			return
		}
		err = do()
		if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back != nil {
			done <- errors.Join(err, fmt.Errorf("leaving network namespace %s: %w", ns.Name(), back))
			return // still locked: the thread ends here
		}
		runtime.UnlockOSThread()
		done <- err
	}()
	return <-done
}
