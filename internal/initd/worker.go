package initd

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path"
	"runtime"
	"strings"
	"syscall"
	"time"
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
	// What the thread is to files.
	fsuid, fsgid uint32
	groups       []uint32
}

type forkJob struct {
	enter bool     // the Landlock domain; nothing else is set then
	acc   account  // whose rights decide
	dirs  []string // working directories, see workDirs
	argv  []string
	path  string // the variable PATH
	attr  *syscall.ProcAttr
	under *linux.Forking
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
	fsuid, _ := unix.SetfsuidRetUid(-1) // an id that cannot be set only asks
	fsgid, _ := unix.SetfsgidRetGid(-1)
	w := &worker{jobs: make(chan forkJob), profile: profile, fsuid: uint32(fsuid), fsgid: uint32(fsgid)}
	groups, err := os.Getgroups()
	if err != nil {
		return nil, restrictError(err)
	}
	for _, g := range groups {
		w.groups = append(w.groups, uint32(g))
	}
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
		pid, err := w.start(j)
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

// A child that is stopped gets on after forkLook, if only once; it is killed
// after maxStopped looks that found it so, or maxAsleep that found it asleep.
const (
	forkLook   = 50 * time.Millisecond
	maxStopped = 20
	maxAsleep  = 40
)

// errStalled is a child that waited too long for another process.
var errStalled = errors.New("the child did not come through its execve")

// fork starts one workload. Until its execve others in the sandbox may stop the
// child, as any process of the same user or of root's, and the thread with it:
// so the caller looks after it. Others may also have it wait, by a lease on the
// program (fcntl(2), F_SETLEASE): it is asleep then as nothing else in a start is
// for long. A child that is slow for other reasons has the time it takes.
func (w *worker) fork(j forkJob) (int, error) {
	done := make(chan forkResult, 1)
	j.done, j.under = done, new(linux.Forking)
	w.jobs <- j
	for stopped, asleep := 0, 0; ; {
		select {
		case r := <-done:
			return r.pid, r.err
		case <-time.After(forkLook):
		}
		j.under.Look(func(pid int) error {
			state, executed := forkState(pid)
			switch {
			case executed: // what it does now is its own: this thread is about to tell
			case state == "S":
				if asleep++; asleep > maxAsleep {
					return errStalled
				}
			case state == "T", state == "t", state == "":
				if stopped++; stopped > maxStopped {
					return linux.ErrEndedEarly
				}
				_ = unix.Kill(pid, unix.SIGCONT)
			}
			return nil
		})
	}
}

// start enters the working directory as the user and tries every candidate for
// the program, as execvp(3) does: execve itself, with the user's rights,
// decides. The child inherits the directory: it resolves no name of the user's
// but that of the program, which was looked up before.
func (w *worker) start(j forkJob) (int, error) {
	defer leaveDir()
	var rest []string // candidates not yet tried; what a relative one counts from is cwd
	var cwd string
	verdict := error(unix.ENOENT)
	for first := true; first || len(rest) > 0; first = false {
		name := ""
		err := w.as(j.acc, func() error {
			root, err := openRoot()
			if err != nil {
				return err
			}
			defer unix.Close(root)
			if first {
				if cwd, err = enterAny(root, j.dirs); err != nil {
					return err
				}
				rest = candidates(j.argv[0], j.path, cwd)
			}
			name, rest, err = nextFound(root, cwd, rest)
			if err != nil {
				verdict = err
			}
			return nil
		})
		if err != nil {
			return 0, err
		}
		if name == "" {
			break
		}
		pid, err := linux.ForkExec(name, j.argv, j.attr, w.token, j.under)
		switch {
		case err == nil:
			return pid, nil
		case errors.Is(err, unix.EACCES):
			verdict = err
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
			if strings.Contains(j.argv[0], "/") {
				verdict = errNoLoader
			}
		default:
			return 0, err
		}
	}
	return 0, verdict
}

// nextFound returns the first of the candidates that is there for the user, and
// those after it. The error is why another may not be looked at.
func nextFound(root int, cwd string, names []string) (name string, rest []string, verdict error) {
	for i, name := range names {
		full := name
		if !path.IsAbs(name) {
			full = cwd + "/" + name // ".." is for the kernel to follow
		}
		switch err := found(root, full); {
		case err == nil:
			return name, names[i+1:], verdict
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		default:
			verdict = err
		}
	}
	return "", nil, verdict
}

// enterAny enters the first directory that is not missing.
func enterAny(root int, dirs []string) (cwd string, err error) {
	for _, dir := range dirs {
		if cwd, err = enterDir(root, dir); err == nil {
			return cwd, nil
		}
		err = &workDirError{dir, err}
		if !errors.Is(err, unix.ENOENT) {
			break
		}
	}
	return "", err
}

// as runs f with the rights over files that a child of the user's will have. The
// kernel takes the file capabilities from another file system user than root and
// gives them back to root (capabilities(7)): of those users, only 0 has any.
func (w *worker) as(acc account, f func() error) error {
	if w.fsuid == 0 && acc.uid == 0 && acc.gid == 0 && len(acc.groups) <= 1 {
		return f() // what the thread is
	}
	if err := linux.SetThreadGroups(acc.groups); err != nil {
		return err
	}
	err := linux.SetFSIDs(acc.uid, acc.gid)
	if err == nil {
		err = f()
	}
	return errors.Join(err, linux.SetFSIDs(w.fsuid, w.fsgid), linux.SetThreadGroups(w.groups))
}

// stop ends the thread. No fork may be under way or follow.
func (w *worker) stop() { close(w.jobs) }
