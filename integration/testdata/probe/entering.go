package main

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// inWindow are what a process may do to another that is being started, where it
// may. Those of onThread that change nothing, and the descriptors.
var inWindow = []string{
	"process_vm_readv", "ptrace", "pidfd_getfd", "setns", "open mem", "open environ", "open maps", "list fd", "enter root", "enter cwd", "open exe",
}

// entering stops all it may, for so long, and looks for children of PID 1's
// that have not called execve yet: what of theirs can be opened.
func entering(length time.Duration) error {
	out := tally{}
	name, _ := commandOf(1)
	for end := time.Now().Add(length); time.Now().Before(end); {
		_ = unix.Kill(-1, unix.SIGSTOP)
		for _, pid := range processes() {
			if comm, _ := commandOf(pid); pid == 1 || comm != name {
				continue
			}
			out.add("caught", nil)
			before := func(what string, err error) {
				if comm, _ := commandOf(pid); comm == name { // else its program has begun
					out.add(what, err)
				}
			}
			for _, what := range inWindow {
				before(what, onThread[what](pid))
			}
			for n := range 32 {
				before("open fd", opens("fd/"+strconv.Itoa(n), unix.O_RDONLY|unix.O_NONBLOCK)(pid))
				before("climb from fd", opens(fmt.Sprintf("fd/%d/..", n), unix.O_PATH)(pid))
			}
			for _, how := range []int{unix.O_PATH, unix.O_WRONLY, unix.O_RDWR} {
				before("open exe", opens("exe", how)(pid))
			}
		}
		_ = unix.Kill(-1, unix.SIGCONT)
	}
	return out.tell()
}

// enteringControl does the same to an ordinary process.
func enteringControl() error {
	pid, stop, err := ordinary()
	if err != nil {
		return err
	}
	defer stop()
	out := tally{}
	for _, what := range inWindow {
		out.add(what, onThread[what](pid))
	}
	out.add("open fd", opens("fd/0", unix.O_RDONLY|unix.O_NONBLOCK)(pid))
	return out.tell()
}

// overwrite tries, for so long, to write the programs of all processes but its
// own by way of /proc: it holds a descriptor of each, and opens that for writing
// when the process has ended. It tells the outcomes by the processes' names.
func overwrite(length time.Duration) error {
	out, held := tally{}, map[string]int{} // by name and pid
	self := os.Getpid()
	for end := time.Now().Add(length); time.Now().Before(end); {
		for _, pid := range processes() {
			if pid == self || pid == os.Getppid() {
				continue
			}
			comm, _ := commandOf(pid)
			fd, err := unix.Open(fmt.Sprintf("/proc/%d/exe", pid), unix.O_PATH|unix.O_CLOEXEC, 0)
			out.add(comm, err)
			if err != nil {
				continue
			}
			file, _ := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
			key := fmt.Sprint(file, " ", pid)
			if _, ok := held[key]; ok || len(held) > 512 {
				_ = unix.Close(fd)
				continue
			}
			held[key] = fd
		}
		for key, fd := range held {
			w, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_WRONLY|unix.O_CLOEXEC, 0)
			if errors.Is(err, unix.ETXTBSY) {
				continue // it runs
			}
			file, _, _ := strings.Cut(key, " ")
			out.add(file+", for writing", err)
			if err == nil {
				_, err = unix.Pwrite(w, []byte("overwritten"), 0)
				out.add(file+", written", err)
				_ = unix.Close(w)
			}
			_ = unix.Close(fd)
			delete(held, key)
		}
	}
	return out.tell()
}

func processes() (pids []int) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil && pid != os.Getpid() {
			pids = append(pids, pid)
		}
	}
	return pids
}

// commandOf returns the name that /proc/PID/comm has.
func commandOf(pid int) (string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return strings.TrimSpace(string(b)), err
}
