package initd

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// Prepare makes the calling process fit to be PID 1. It must run before any
// workload does.
//
// Every signal is caught and dropped: workloads may signal PID 1 as far as
// their rights go, and the Go runtime would end the process on some. They are
// not set to be ignored, which the workloads would inherit. Not being
// dumpable keeps same-user workloads from tracing PID 1 and the child it
// forks, which shares PID 1's memory until it has called execve.
func Prepare() error {
	dropped := make(chan os.Signal, 1) // nobody reads: a full channel loses the rest
	for s := syscall.Signal(1); s < 65; s++ {
		switch s {
		case syscall.SIGKILL, syscall.SIGSTOP, syscall.SIGCHLD, syscall.SIGURG:
			// The first two cannot be caught, CHLD does nothing, URG is the runtime's own.
		default:
			signal.Notify(dropped, s)
		}
	}
	unix.Umask(0o022)
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("making PID 1 untraceable: %w", err)
	}
	return nil
}
