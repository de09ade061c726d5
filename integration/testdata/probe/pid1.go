package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// PIDFD_THREAD of pidfd_open(2) and the scopes of pidfd_send_signal(2), from
// Linux 6.9 on.
const (
	pidfdThread      = unix.O_EXCL
	scopeThread      = 1
	scopeThreadGroup = 2
	scopeGroup       = 4
)

// siginfo is siginfo_t as rt_sigqueueinfo(2) takes it.
type siginfo struct {
	signo, errno, code, _ int32
	pid, uid              int32
	_                     [104]byte
}

// ways are those to send a signal to a thread or to the process it is of.
var ways = map[string]func(pid, tid int, sig unix.Signal) error{
	"kill":   func(_, tid int, sig unix.Signal) error { return unix.Kill(tid, sig) },
	"tkill":  func(_, tid int, sig unix.Signal) error { return kernel(unix.SYS_TKILL, uintptr(tid), uintptr(sig)) },
	"tgkill": func(pid, tid int, sig unix.Signal) error { return unix.Tgkill(pid, tid, sig) },
	"rt_sigqueueinfo": func(_, tid int, sig unix.Signal) error {
		info := siginfo{signo: int32(sig), code: -1, pid: int32(os.Getpid())}
		return kernel(unix.SYS_RT_SIGQUEUEINFO, uintptr(tid), uintptr(sig), uintptr(unsafe.Pointer(&info)))
	},
	"rt_tgsigqueueinfo": func(pid, tid int, sig unix.Signal) error {
		info := siginfo{signo: int32(sig), code: -1, pid: int32(os.Getpid())}
		return kernel(unix.SYS_RT_TGSIGQUEUEINFO, uintptr(pid), uintptr(tid), uintptr(sig), uintptr(unsafe.Pointer(&info)))
	},
	"pidfd of the process": byPIDFD(0, 0), "pidfd of the thread": byPIDFD(pidfdThread, 0),
	"pidfd, to the thread": byPIDFD(pidfdThread, scopeThread), "pidfd, to the process": byPIDFD(pidfdThread, scopeThreadGroup),
	"pidfd, to the group": byPIDFD(pidfdThread, scopeGroup),
	"/proc directory": func(_, tid int, sig unix.Signal) error {
		fd, err := unix.Open("/proc/"+strconv.Itoa(tid), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.PidfdSendSignal(fd, sig, nil, 0)
	},
	"owner of a socket, process": byOwner(1), "owner of a socket, thread": byOwner(0), "owner of a socket, group": byOwner(2),
	"timer": func(_, tid int, sig unix.Signal) error {
		event := struct {
			value        uint64
			sig, how, id int32
			_            [44]byte
		}{sig: int32(sig), how: 4 /* SIGEV_THREAD_ID */, id: int32(tid)}
		var timer int32
		if err := kernel(unix.SYS_TIMER_CREATE, unix.CLOCK_MONOTONIC, uintptr(unsafe.Pointer(&event)), uintptr(unsafe.Pointer(&timer))); err != nil {
			return err
		}
		soon := [4]int64{0, 0, 0, 1}
		return kernel(unix.SYS_TIMER_SETTIME, uintptr(timer), 0, uintptr(unsafe.Pointer(&soon)), 0)
	},
}

// ownThreadOnly are the ways that reach nobody but the caller: their control
// is the caller's own thread.
var ownThreadOnly = map[string]bool{"timer": true}

func byPIDFD(open, scope uintptr) func(pid, tid int, sig unix.Signal) error {
	return func(_, tid int, sig unix.Signal) error {
		fd, _, errno := unix.Syscall(unix.SYS_PIDFD_OPEN, uintptr(tid), open, 0)
		if errno != 0 {
			return errno
		}
		defer unix.Close(int(fd))
		return kernel(unix.SYS_PIDFD_SEND_SIGNAL, fd, uintptr(sig), 0, scope)
	}
}

// byOwner makes a socket tell its owner that bytes have come (fcntl(2), F_SETSIG).
func byOwner(kind int32) func(pid, tid int, sig unix.Signal) error {
	return func(_, tid int, sig unix.Signal) error {
		p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(p[0])
		defer unix.Close(p[1])
		owner := struct{ kind, id int32 }{kind, int32(tid)}
		if err := kernel(unix.SYS_FCNTL, uintptr(p[0]), unix.F_SETOWN_EX, uintptr(unsafe.Pointer(&owner))); err != nil {
			return err
		}
		if err := kernel(unix.SYS_FCNTL, uintptr(p[0]), unix.F_SETSIG, uintptr(sig)); err != nil {
			return err
		}
		if err := kernel(unix.SYS_FCNTL, uintptr(p[0]), unix.F_SETFL, unix.O_ASYNC|unix.O_NONBLOCK); err != nil {
			return err
		}
		_, err = unix.Write(p[1], []byte{1})
		return err
	}
}

func kernel(nr uintptr, args ...uintptr) error {
	var a [6]uintptr
	copy(a[:], args)
	if _, _, e := unix.Syscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5]); e != 0 {
		return e
	}
	return nil
}

// threads lists a process's.
func threads(pid int) []int {
	entries, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	var tids []int
	for _, e := range entries {
		if tid, err := strconv.Atoi(e.Name()); err == nil {
			tids = append(tids, tid)
		}
	}
	return tids
}

// tally counts outcomes: a name and what came of it.
type tally map[string]map[string]int

func (t tally) add(name string, err error) {
	if t[name] == nil {
		t[name] = map[string]int{}
	}
	what := "ok"
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		what = unix.ErrnoName(errno)
	} else if err != nil {
		what = err.Error()
	}
	t[name][what]++
}

func (t tally) tell() error {
	out := map[string]string{}
	for name, outcomes := range t {
		b, err := json.Marshal(outcomes)
		if err != nil {
			return err
		}
		out[name] = string(b)
	}
	return json.NewEncoder(os.Stdout).Encode(out)
}

// signals sends every signal in every way to every thread of a process, for so
// many rounds, and tells how often each way was refused, and how.
func signals(pid, rounds int, only ...string) error {
	signal := tally{}
	for range rounds {
		for name, send := range ways {
			if len(only) > 0 && !slices.Contains(only, name) {
				continue
			}
			for sig := unix.Signal(1); sig <= 64; sig++ {
				fmt.Fprintln(os.Stderr, name, int(sig)) // the last line is the culprit
				for _, tid := range threads(pid) {
					signal.add(name, send(pid, tid, sig))
				}
			}
		}
		for sig := unix.Signal(1); sig <= 64; sig++ {
			signal.add("exit signal of a sibling", sibling(sig))
			signal.add("kill all", unix.Kill(-1, 0)) // 0: the probe and what started it are to live
		}
		for _, sig := range []unix.Signal{unix.SIGHUP, unix.SIGWINCH} {
			signal.add("hangup of a terminal", hangup(pid, sig))
		}
	}
	return signal.tell()
}

// sibling makes a process whose parent is ours, and whose end is told with sig.
func sibling(sig unix.Signal) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, unix.CLONE_PARENT|uintptr(sig), 0, 0, 0, 0, 0)
	if errno != 0 {
		return errno
	}
	if pid == 0 {
		for {
			_, _, _ = unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0)
		}
	}
	return nil
}

// signalControl sends a signal in each way to an ordinary process, and tells
// whether it died of it.
func signalControl() error {
	out := tally{}
	for name, send := range ways {
		for _, sig := range []unix.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGHUP} {
			out.add(name, arrives(name, send, sig))
		}
	}
	return out.tell()
}

func arrives(name string, send func(pid, tid int, sig unix.Signal) error, sig unix.Signal) error {
	cmd := exec.Command("/proc/self/exe", "wait")
	if ownThreadOnly[name] {
		cmd.Args = []string{"probe", "timer", strconv.Itoa(int(sig))}
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	pid := cmd.Process.Pid
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	deadline := time.After(20 * time.Second)
	for {
		if !ownThreadOnly[name] {
			if err := send(pid, pid, sig); err != nil && !errors.Is(err, unix.ESRCH) {
				_ = cmd.Process.Kill()
				<-ended
				return err
			}
		}
		select {
		case <-ended:
			if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !ws.Signaled() && ws.ExitStatus() != 2 { // what Go makes of a fatal signal
				return fmt.Errorf("ended otherwise: %v", cmd.ProcessState)
			}
			return nil
		case <-deadline:
			_ = cmd.Process.Kill()
			<-ended
			return errors.New("did not arrive")
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// onThread are what a process may do to another's threads, where it may.
var onThread = map[string]func(tid int) error{
	"sched_setaffinity": func(tid int) error {
		// The first processor of its own: a cpuset may leave others out.
		var own, one unix.CPUSet
		if err := unix.SchedGetaffinity(0, &own); err != nil {
			return err
		}
		for cpu := range 1024 {
			if own.IsSet(cpu) {
				one.Set(cpu)
				break
			}
		}
		return unix.SchedSetaffinity(tid, &one)
	},
	"sched_setscheduler": func(tid int) error {
		var param int32
		return kernel(unix.SYS_SCHED_SETSCHEDULER, uintptr(tid), 3 /* SCHED_BATCH */, uintptr(unsafe.Pointer(&param)))
	},
	"sched_setparam": func(tid int) error {
		var param int32
		return kernel(unix.SYS_SCHED_SETPARAM, uintptr(tid), uintptr(unsafe.Pointer(&param)))
	},
	"sched_setattr": func(tid int) error {
		return unix.SchedSetAttr(tid, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Nice: 19}, 0)
	},
	"setpriority": func(tid int) error { return unix.Setpriority(unix.PRIO_PROCESS, tid, 19) },
	"ioprio_set":  func(tid int) error { return kernel(unix.SYS_IOPRIO_SET, 1, uintptr(tid), 3<<13) },
	"kcmp":        func(tid int) error { return kernel(unix.SYS_KCMP, uintptr(tid), uintptr(tid), 0, 0, 0) },
	"get_robust_list": func(tid int) error {
		var head, size uintptr
		return kernel(unix.SYS_GET_ROBUST_LIST, uintptr(tid), uintptr(unsafe.Pointer(&head)), uintptr(unsafe.Pointer(&size)))
	},
	"migrate_pages": func(tid int) error {
		from, to := uint64(1), uint64(1)
		return kernel(unix.SYS_MIGRATE_PAGES, uintptr(tid), 64, uintptr(unsafe.Pointer(&from)), uintptr(unsafe.Pointer(&to)))
	},
	"move_pages":          func(tid int) error { return kernel(unix.SYS_MOVE_PAGES, uintptr(tid), 0, 0, 0, 0, 0) },
	"process_vm_readv":    func(tid int) error { return kernel(unix.SYS_PROCESS_VM_READV, uintptr(tid), 0, 0, 0, 0, 0) },
	"ptrace":              func(tid int) error { return kernel(unix.SYS_PTRACE, 0x4206 /* PTRACE_SEIZE */, uintptr(tid), 0, 0) },
	"setpgid":             func(tid int) error { return unix.Setpgid(tid, 0) },
	"process_madvise":     withPIDFD(func(fd uintptr) error { return kernel(unix.SYS_PROCESS_MADVISE, fd, 0, 0, 21 /* MADV_PAGEOUT */, 0) }),
	"process_mrelease":    withPIDFD(func(fd uintptr) error { return kernel(unix.SYS_PROCESS_MRELEASE, fd, 0) }),
	"pidfd_getfd":         withPIDFD(func(fd uintptr) error { return kernel(unix.SYS_PIDFD_GETFD, fd, 0, 0) }),
	"setns":               withPIDFD(func(fd uintptr) error { return unix.Setns(int(fd), unix.CLONE_NEWPID) }),
	"open mem":            opens("mem", unix.O_RDONLY),
	"open environ":        reads("environ"),
	"open maps":           reads("maps"),
	"write oom_score_adj": writes("oom_score_adj", "1000"), "write oom_adj": writes("oom_adj", "15"),
	"write comm": writes("comm", "x"), "write timerslack_ns": writes("timerslack_ns", "1"), "write coredump_filter": writes("coredump_filter", "0"),
	"write autogroup": writes("autogroup", "19"), "write clear_refs": writes("clear_refs", "1"), "write sched": writes("sched", "0"),
	"write loginuid": writes("loginuid", "7"), "write gid_map": writes("gid_map", "0 0 1"), "write timens_offsets": writes("timens_offsets", "1 1 1"),
	"list fd":    func(tid int) error { _, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", tid)); return err },
	"enter root": func(tid int) error { _, err := os.ReadDir(fmt.Sprintf("/proc/%d/root", tid)); return err },
	"enter cwd":  func(tid int) error { _, err := os.ReadDir(fmt.Sprintf("/proc/%d/cwd", tid)); return err },
	"open exe":   opens("exe", unix.O_RDONLY),
}

func withPIDFD(f func(fd uintptr) error) func(tid int) error {
	return func(tid int) error {
		fd, _, errno := unix.Syscall(unix.SYS_PIDFD_OPEN, uintptr(tid), 0, 0)
		if errno != 0 {
			if fd, _, errno = unix.Syscall(unix.SYS_PIDFD_OPEN, uintptr(tid), pidfdThread, 0); errno != 0 {
				return errno
			}
		}
		defer unix.Close(int(fd))
		return f(fd)
	}
}

func opens(name string, flags int) func(tid int) error {
	return func(tid int) error {
		fd, err := unix.Open(fmt.Sprintf("/proc/%d/%s", tid, name), flags|unix.O_CLOEXEC, 0)
		if err == nil {
			_ = unix.Close(fd)
		}
		return err
	}
}

func reads(name string) func(tid int) error {
	return func(tid int) error { _, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", tid, name)); return err }
}

func writes(name, what string) func(tid int) error {
	return func(tid int) error {
		return os.WriteFile(fmt.Sprintf("/proc/%d/%s", tid, name), []byte(what), 0)
	}
}

// limits sets every limit of every thread of a process, and does to each all
// that onThread has.
func limits(pid int) error {
	out := tally{}
	for _, tid := range threads(pid) {
		for name, f := range onThread {
			out.add(name, f(tid))
		}
		// Last: a process that may have no memory dies of it.
		for res := range 16 {
			tight := unix.Rlimit{}
			out.add("prlimit "+strconv.Itoa(res), unix.Prlimit(tid, res, &tight, nil))
			out.add("prlimit asked "+strconv.Itoa(res), unix.Prlimit(tid, res, nil, &tight))
		}
	}
	return out.tell()
}

// limitsControl does the same to an ordinary process.
func limitsControl() error {
	pid, stop, err := ordinary()
	if err != nil {
		return err
	}
	defer stop()
	return limits(pid)
}

// ordinary starts a process like any other.
func ordinary() (pid int, stop func(), err error) {
	cmd := exec.Command("/proc/self/exe", "wait")
	if err := cmd.Start(); err != nil {
		return 0, nil, err
	}
	return cmd.Process.Pid, func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }, nil
}

// ownTimer sends its own thread a signal by a timer, and waits for it.
func ownTimer(sig int) error {
	runtime.LockOSThread()
	if err := ways["timer"](0, unix.Gettid(), unix.Signal(sig)); err != nil {
		return err
	}
	time.Sleep(time.Minute)
	return errors.New("no signal came")
}

// hammer sends the signals that end a process to every thread of one as fast as
// it goes, by the ways that reach it, until so much time is over.
func hammer(pid int, d time.Duration) error {
	out := tally{}
	for until := time.Now().Add(d); time.Now().Before(until); {
		tids := threads(pid)
		for range 500 {
			for _, sig := range []unix.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGUSR1, unix.SIGUSR2, 40} {
				for _, tid := range tids {
					for _, name := range []string{"kill", "tkill", "pidfd, to the process"} {
						out.add(name, ways[name](pid, tid, sig))
					}
				}
			}
		}
	}
	return out.tell()
}

// stopAll stops every process it may but itself (kill(2) with -1), as fast as it
// goes, for so long.
func stopAll(d time.Duration) error {
	out := tally{}
	for until := time.Now().Add(d); time.Now().Before(until); {
		for range 1000 {
			out.add("kill all", unix.Kill(-1, unix.SIGSTOP))
		}
	}
	return out.tell()
}

// hangup gives a terminal to a process's group where it can, and hangs it up.
func hangup(pid int, _ unix.Signal) error {
	fd, err := unix.Open("/dev/pts/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.IoctlSetPointerInt(fd, unix.TIOCSPGRP, pid)
}

// become takes an id in each way there is to have one, on threads that end with
// it, and gives files to it.
func become(id int) error {
	out := tally{}
	file, err := os.CreateTemp("/tmp", "become")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name())
	defer file.Close()
	name, err := unix.BytePtrFromString(file.Name())
	if err != nil {
		return err
	}
	path, u, same := uintptr(unsafe.Pointer(name)), uintptr(id), ^uintptr(0)
	fdcwd := ^uintptr(99) // AT_FDCWD, -100
	for what, a := range map[string][6]uintptr{
		"chown": {unix.SYS_CHOWN, path, u, same}, "lchown": {unix.SYS_LCHOWN, path, u, same}, "fchown": {unix.SYS_FCHOWN, file.Fd(), u, same},
		"fchownat": {unix.SYS_FCHOWNAT, fdcwd, path, u, same}, "setuid": {unix.SYS_SETUID, u}, "setreuid": {unix.SYS_SETREUID, u, same},
		"setreuid 2": {unix.SYS_SETREUID, same, u}, "setresuid": {unix.SYS_SETRESUID, u, same, same},
		"setresuid 2": {unix.SYS_SETRESUID, same, u, same}, "setresuid 3": {unix.SYS_SETRESUID, same, same, u},
	} {
		done := make(chan error)
		go func() {
			runtime.LockOSThread() // never unlocked: the thread ends with its ids
			done <- kernel(a[0], a[1:]...)
		}()
		out.add(what, <-done)
	}
	runtime.KeepAlive(name)
	return out.tell()
}
