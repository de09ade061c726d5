package initd

import (
	"crypto/rand"
	"errors"
	"fmt"
	"runtime"
	"syscall"
	"unsafe"

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
	jobs    chan forkJob
	profile sandbox.Capabilities
	token   linux.ForkToken // its thread's alone: lets it use clone3
}

type forkJob struct {
	enter bool // the Landlock domain; nothing else is set then
	path  string
	argv  []string
	attr  *syscall.ProcAttr
	done  chan<- forkResult
}

type forkResult struct {
	pid int
	err error
}

// startWorker starts the thread and waits until it is restricted but for its
// Landlock domain, which enter adds.
func startWorker(profile sandbox.Capabilities, filter []byte) (*worker, error) {
	caps, ok := profiles[profile]
	if !ok {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_capabilities", "capabilities %.40q: use root or none", profile)
	}
	w := &worker{jobs: make(chan forkJob), profile: profile}
	ready := make(chan error)
	go w.run(caps, filter, ready)
	if err := <-ready; err != nil {
		return nil, restrictError(err)
	}
	return w, nil
}

func restrictError(err error) error {
	return sandbox.Errorf(sandbox.ErrUnsupported, "restrict_failed", "restricting the thread that starts workloads: %w", err)
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
		if j.enter {
			j.done <- forkResult{err: linux.EnterLandlockDomain()}
			continue
		}
		pid, err := linux.ForkExec(j.path, j.argv, j.attr, w.token)
		j.done <- forkResult{pid, err}
	}
}

// restrict is in an order that matters: the bounding set needs CAP_SETPCAP,
// seccomp needs no_new_privs and comes last because it forbids the calls
// before it. It allows those that make a Landlock domain.
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
	if len(filter) == 0 {
		return fmt.Errorf("no seccomp filter given: %w", unix.EINVAL)
	}
	if _, err := rand.Read(unsafe.Slice((*byte)(unsafe.Pointer(&w.token)), unsafe.Sizeof(w.token))); err != nil {
		return err
	}
	return linux.SetSeccomp(linux.AllowClone3(filter, w.token))
}

// enter puts the thread into a Landlock domain of the present root, once, and
// before any fork. Kernels that have none are left without.
func (w *worker) enter() error {
	done := make(chan forkResult, 1)
	w.jobs <- forkJob{enter: true, done: done}
	if err := (<-done).err; err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return restrictError(err)
	}
	return nil
}

// fork starts one workload.
func (w *worker) fork(path string, argv []string, attr *syscall.ProcAttr) (int, error) {
	done := make(chan forkResult, 1)
	w.jobs <- forkJob{path: path, argv: argv, attr: attr, done: done}
	r := <-done
	return r.pid, r.err
}

// stop ends the thread. No fork may be under way or follow.
func (w *worker) stop() { close(w.jobs) }
