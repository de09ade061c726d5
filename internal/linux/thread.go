package linux

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

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

// WithFSIDs runs fn on the calling thread with other ids for touching files
// and every permitted capability but those named in force (the change of a
// root fsuid takes them away, see setfsuid(2)), and then puts back what was.
// Where that fails the goroutine keeps its thread to the end of both, so that
// nobody else ever runs under those ids. fn must not begin what outlives it.
func WithFSIDs(uid, gid uint32, fn func() error, without ...uint) error {
	runtime.LockOSThread()
	before, err := capabilities()
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	inForce := before
	for i := range inForce {
		inForce[i].Effective = inForce[i].Permitted
	}
	for _, c := range without {
		inForce[c/32].Effective &^= 1 << (c % 32)
	}
	oldGID, _ := unix.SetfsgidRetGid(-1) // an id that cannot be set only asks
	oldUID, _ := unix.SetfsuidRetUid(-1)
	if err = setFSIDs(uid, gid, inForce); err == nil {
		err = fn()
	}
	if back := setFSIDs(uint32(oldUID), uint32(oldGID), before); back != nil {
		return errors.Join(err, fmt.Errorf("taking back the ids of the thread: %w", back))
	}
	runtime.UnlockOSThread()
	return err
}

type capabilitySets [2]unix.CapUserData

func capabilities() (capabilitySets, error) {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets capabilitySets
	if err := unix.Capget(&hdr, &sets[0]); err != nil {
		return sets, fmt.Errorf("capget: %w", err)
	}
	return sets, nil
}

// setFSIDs sets the ids and, as those may change them, the capabilities of
// the calling thread.
func setFSIDs(uid, gid uint32, sets capabilitySets) error {
	if err := unix.Setfsgid(int(gid)); err != nil {
		return fmt.Errorf("setfsgid %d: %w", gid, err)
	}
	if err := unix.Setfsuid(int(uid)); err != nil {
		return fmt.Errorf("setfsuid %d: %w", uid, err)
	}
	// Neither call reports failure.
	if got, _ := unix.SetfsuidRetUid(-1); uint32(got) != uid {
		return fmt.Errorf("setfsuid %d: still %d: %w", uid, got, unix.EPERM)
	}
	if got, _ := unix.SetfsgidRetGid(-1); uint32(got) != gid {
		return fmt.Errorf("setfsgid %d: still %d: %w", gid, got, unix.EPERM)
	}
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	if err := unix.Capset(&hdr, &sets[0]); err != nil {
		return fmt.Errorf("capset: %w", err)
	}
	return nil
}

// SetThreadEUID gives the calling thread alone another effective user id, as
// setresuid(2) does without libc's help. What asks for ids and not for
// capabilities, as the settings of an ipc namespace do, then sees this one.
func SetThreadEUID(uid uint32) error {
	const keep = ^uintptr(0)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, keep, uintptr(uid), keep); errno != 0 {
		return fmt.Errorf("setresuid(-1, %d, -1): %w", uid, errno)
	}
	return nil
}

// WaitsOf tells, for a person, what the threads of a process and its children wait
// for: of each its state, the kernel's function and the number of the system call
// (proc_pid_stat(5), proc_pid_wchan(5), proc_pid_syscall(5)).
func WaitsOf(pid int) (all []string) {
	waits := func(what, dir string) {
		stat, _ := os.ReadFile(dir + "/stat") // what is gone is told as nothing
		wchan, _ := os.ReadFile(dir + "/wchan")
		call, _ := os.ReadFile(dir + "/syscall")
		state, _, _ := strings.Cut(strings.TrimSpace(string(stat[bytes.LastIndexByte(stat, ')')+1:])), " ")
		number, _, _ := strings.Cut(strings.TrimSpace(string(call)), " ")
		all = append(all, fmt.Sprintf("%s %s %s %s %s", what, filepath.Base(dir), state, wchan, number))
	}
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	for _, task := range tasks {
		waits("thread", task)
		children, _ := os.ReadFile(task + "/children")
		for _, child := range strings.Fields(string(children)) {
			waits("child", "/proc/"+child)
		}
	}
	return all
}
