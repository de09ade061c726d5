package linux

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// DefaultSignal gives a signal its default action for the whole process
// (sigaction(2), SIG_DFL), behind the back of the Go runtime.
func DefaultSignal(sig unix.Signal) error {
	// struct kernel_sigaction: handler, flags, restorer, mask of 64 bits.
	var action [4]uint64
	if _, _, e := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(&action)), 0, unsafe.Sizeof(action[3]), 0, 0); e != 0 {
		return fmt.Errorf("giving signal %d its default action: %w", sig, e)
	}
	return nil
}
