package initd

import (
	"errors"
	"fmt"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// profiles says which capabilities a workload may ever hold: its bounding set.
// See capabilities(7); docs/SECURITY.md says why these.
var profiles = map[sandbox.Capabilities]uint64{
	sandbox.CapabilitiesNone: 0,
	sandbox.CapabilitiesRoot: 1<<unix.CAP_CHOWN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_FOWNER | 1<<unix.CAP_FSETID |
		1<<unix.CAP_SETUID | 1<<unix.CAP_SETGID | 1<<unix.CAP_KILL | 1<<unix.CAP_NET_BIND_SERVICE,
}

// becomeUser is what the forking thread itself needs to give a child another
// user. Exec takes it away again: for user 0 the new permitted set is the
// bounding set (inheritable and ambient are empty), for others it is empty.
const becomeUser uint64 = 1<<unix.CAP_SETUID | 1<<unix.CAP_SETGID

// worker is the one OS thread that forks workloads. It has given up for good
// whatever a workload must not have, so that each fork inherits the
// restriction at no cost. Landlock cannot be lifted, so every root gets a
// new worker.
type worker struct {
	jobs chan forkJob
	// landlock tells whether the domain could be entered.
	landlock bool
}

type forkJob struct {
	path string
	argv []string
	attr *syscall.ProcAttr
	done chan<- forkResult
}

type forkResult struct {
	pid int
	err error
}

// startWorker starts the thread and waits until it is restricted.
func startWorker(profile sandbox.Capabilities, filter []byte) (*worker, error) {
	caps, ok := profiles[profile]
	if !ok {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_capabilities", "capabilities %.40q: use root or none", profile)
	}
	w := &worker{jobs: make(chan forkJob)}
	ready := make(chan error)
	go w.run(caps, filter, ready)
	if err := <-ready; err != nil {
		return nil, sandbox.Errorf(sandbox.ErrUnsupported, "restrict_failed", "restricting the thread that starts workloads: %w", err)
	}
	return w, nil
}

// run never unlocks its thread, which therefore ends with it. It must not
// return to other goroutines what it has become.
func (w *worker) run(caps uint64, filter []byte, ready chan<- error) {
	runtime.LockOSThread()
	err := w.restrict(caps, filter)
	ready <- err
	if err != nil {
		return
	}
	for j := range w.jobs {
		pid, err := syscall.ForkExec(j.path, j.argv, j.attr)
		j.done <- forkResult{pid, err}
	}
}

// restrict is in an order that matters: the bounding set needs CAP_SETPCAP,
// Landlock and seccomp need no_new_privs, and seccomp comes last because it
// forbids the calls before it.
func (w *worker) restrict(caps uint64, filter []byte) error {
	if err := linux.SetNoNewPrivs(); err != nil {
		return err
	}
	if err := linux.LimitBoundingSet(caps); err != nil {
		return err
	}
	if err := linux.SetCapabilities(caps | becomeUser); err != nil {
		return err
	}
	switch err := linux.EnterLandlockDomain(); {
	case err == nil:
		w.landlock = true
	case !errors.Is(err, unix.EOPNOTSUPP):
		return err
	}
	if len(filter) == 0 {
		return fmt.Errorf("no seccomp filter given: %w", unix.EINVAL)
	}
	return linux.SetSeccomp(filter)
}

// fork starts one workload.
func (w *worker) fork(path string, argv []string, attr *syscall.ProcAttr) (int, error) {
	done := make(chan forkResult, 1)
	w.jobs <- forkJob{path, argv, attr, done}
	r := <-done
	return r.pid, r.err
}

// stop ends the thread. No fork may be under way or follow.
func (w *worker) stop() { close(w.jobs) }
