package linux

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// OnThread runs fn on an operating system thread of its own, which ends with
// fn: whatever fn does to the thread's ids, capabilities or working directory
// touches nobody else. fn must start no child and no goroutine it waits for
// that relies on that state.
func OnThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the runtime then ends the thread
		done <- fn()
	}()
	return <-done
}

// SetThreadFSIDs sets the ids by which the calling thread touches files and
// raises its effective capabilities again, which the change of a root fsuid
// takes away, all but those named. See setfsuid(2), capset(2).
func SetThreadFSIDs(uid, gid uint32, without ...uint) error {
	if err := unix.Setfsgid(int(gid)); err != nil {
		return fmt.Errorf("setfsgid %d: %w", gid, err)
	}
	if err := unix.Setfsuid(int(uid)); err != nil {
		return fmt.Errorf("setfsuid %d: %w", uid, err)
	}
	// Neither call reports failure: ask again with an id that cannot be set.
	if got, _ := unix.SetfsuidRetUid(-1); uint32(got) != uid {
		return fmt.Errorf("setfsuid %d: still %d: %w", uid, got, unix.EPERM)
	}
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return fmt.Errorf("capget: %w", err)
	}
	for i := range data {
		data[i].Effective = data[i].Permitted
	}
	for _, c := range without {
		data[c/32].Effective &^= 1 << (c % 32)
	}
	if err := unix.Capset(&hdr, &data[0]); err != nil {
		return fmt.Errorf("capset: %w", err)
	}
	return nil
}
