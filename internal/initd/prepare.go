package initd

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
)

// runtimeSignal is one the Go runtime sends to its own threads; it is harmless
// when a workload does.
const runtimeSignal = syscall.SIGURG

// threadSignal is another, number 33, which has no name.
const threadSignal = syscall.Signal(33)

// Prepare makes the calling process fit to be PID 1. It must run before any
// workload does.
//
// Every signal is ignored that can be. Workloads may signal PID 1 as far as
// their rights go, root inside by CAP_KILL, and the Go runtime, which handles
// all of them, would end the process on some. The kernel drops those with
// default action, too (pid_namespaces(7)), but not one to the whole process
// that came by a thread which blocks it, as one does while it forks: only what is
// ignored is harmless there, whatever the kernel. Children put the default back
// (linux.ForkExec). A fault of its own ends PID 1 all the same. SIGCHLD keeps
// its default action, which wakes nobody: ignored, it would take the children's
// ends away.
//
// Not being dumpable keeps same-user workloads from tracing PID 1 and the
// child it forks, which shares PID 1's memory until it has called execve.
//
// Where PID 1 has a user id of its own (sandbox.InitID), its file work is done
// as the sandbox's root all the same: only the file system id is 0, of every
// thread there is and so of every one to come.
//
// It mounts what stands on /dev, see sharedMounts, and covers the boot id.
func Prepare() error {
	for s := syscall.Signal(1); s < 65; s++ {
		switch s {
		case syscall.SIGKILL, syscall.SIGSTOP, runtimeSignal, threadSignal:
			continue
		}
		signal.Ignore(s) // the runtime then leaves it alone
		does := linux.SignalIgnored
		if s == syscall.SIGCHLD {
			does = linux.SignalDefault
		}
		if err := linux.SetSignal(s, does); err != nil {
			return err
		}
	}
	if os.Geteuid() != 0 {
		if _, _, e := syscall.AllThreadsSyscall(unix.SYS_SETFSUID, 0, 0, 0); e != 0 {
			return fmt.Errorf("doing file work as the sandbox's root: %w", e)
		}
	}
	// Times are told in UTC. The zone of the root's /etc/localtime is nothing to
	// PID 1, which must not open what a workload may have put there.
	time.Local = time.UTC
	unix.Umask(0o022)
	// PID 1 keeps a few descriptors per process; workloads get the limit of the
	// spec from it. Not libcontainer's to set: the daemon would need
	// CAP_SYS_RESOURCE over the namespace for it, which not every host gives.
	if err := setOpenFiles(unix.Rlimit{Cur: 1 << 20, Max: 1 << 20}); err != nil {
		return fmt.Errorf("limiting open files: %w", err)
	}
	var core unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_CORE, &core); err != nil {
		return err
	}
	core.Cur = 0
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &core); err != nil {
		return fmt.Errorf("writing no core files: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("making PID 1 untraceable: %w", err)
	}
	if err := coverBootID(); err != nil {
		return err
	}
	return mountShared()
}
