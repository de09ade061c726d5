package linux

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// What a process does with a signal it does not handle (sigaction(2)).
const (
	SignalDefault uint64 = iota // SIG_DFL
	SignalIgnored               // SIG_IGN
)

// SetSignal says what the whole process does with a signal, behind the back of
// the Go runtime.
func SetSignal(sig unix.Signal, does uint64) error {
	// struct kernel_sigaction: handler, flags, restorer, mask of 64 bits.
	action := [4]uint64{does}
	if _, _, e := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(&action)), 0, unsafe.Sizeof(action[3]), 0, 0); e != 0 {
		return fmt.Errorf("setting what signal %d does: %w", sig, e)
	}
	return nil
}
