package launch

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runc/libcontainer"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Config is what a Launcher needs to know.
type Config struct {
	RunDir     string // the daemon's run directory; must be absolute
	InitBinary []byte // PID 1, a static program
	// ShellBinary is what libcontainer's stages run: a static program that
	// imports package stage. Empty: the running program, which starts slower.
	ShellBinary []byte
	InitEnv     []string // PID 1's environment, beside what it always has
}

// Launcher makes and removes shells. It is safe for concurrent use.
type Launcher struct {
	dir      string // run directory
	env      []string
	programs Config
	maxFiles uint64

	mu       sync.RWMutex // held for reading while a shell starts
	skeleton skeleton     // guarded by mu
}

// maxSunPath is the longest path of a socket (unix(7)).
const maxSunPath = 107

// New prepares the skeleton. The program must be in its own mount namespace
// (EnterPrivateMounts).
func New(cfg Config) (*Launcher, error) {
	if !cgroups.IsCgroup2UnifiedMode() {
		return nil, sandbox.Errorf(sandbox.ErrUnsupported, "cgroup2_missing", "no cgroup2 tree on %s: the program is not in its own mount namespace", cgroupMount)
	}
	// Its heap is small: where the kernel gives out huge pages unasked, one
	// of 2 MiB would be most of what a sandbox costs. Workloads get theirs.
	l := &Launcher{dir: cfg.RunDir, programs: cfg, env: append([]string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "GODEBUG=disablethp=1", "GOMAXPROCS=1",
	}, cfg.InitEnv...)}
	if err := CheckRunDir(cfg.RunDir); err != nil {
		return nil, err
	}
	if err := l.makeDirs(); err != nil {
		return nil, err
	}
	if err := checkReachable(l.dir); err != nil {
		return nil, err
	}
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		return nil, fmt.Errorf("read the limit of open files: %w", err)
	}
	// Without CAP_SYS_RESOURCE on the host the hard limit is the ceiling.
	l.maxFiles = min(max(lim.Max, 1024), 1<<20)
	// libcontainer hands this on to the stages, which are Go programs of one
	// thread: they need not find out how many processors they may use.
	if err := os.Setenv("GOMAXPROCS", "1"); err != nil {
		return nil, err
	}
	return l, l.makeSkeleton()
}

func (l *Launcher) makeDirs() error {
	// Mapped ids pass through the run directory to the skeleton.
	err := os.MkdirAll(l.dir, 0o711)
	if err == nil {
		err = os.Chmod(l.dir, 0o711)
	}
	for _, d := range []string{l.stateRoot(), l.socketRoot()} {
		if err == nil {
			err = os.MkdirAll(d, 0o711)
		}
	}
	return err
}

// makeSkeleton expects mu to be held, or nobody else to know l.
func (l *Launcher) makeSkeleton() error {
	sk, err := makeSkeleton(l.skeletonDir(), l.programs.InitBinary)
	if err != nil {
		return fmt.Errorf("prepare the skeleton root: %w", err)
	}
	if err := sk.addStage(l.programs.ShellBinary); err != nil {
		return errors.Join(fmt.Errorf("prepare the program for a shell's first stages: %w", err), sk.remove())
	}
	l.skeleton = sk
	return nil
}

// Restore makes again what somebody removed of the run directory, and tells
// whether that was anything. The sockets of shells that live are theirs, and lost.
func (l *Launcher) Restore() (made bool, err error) {
	for _, path := range []string{l.dir, l.stateRoot(), l.socketRoot()} {
		if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
			made = true
		}
	}
	if made {
		err = l.makeDirs()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, serr := os.Stat(l.skeleton.root() + initPath); err == nil && errors.Is(serr, os.ErrNotExist) {
		return true, errors.Join(l.skeleton.remove(), l.makeSkeleton())
	}
	return made, err
}

// CheckRunDir finds what is wrong with a run directory, which need not exist.
// Classes: ErrInvalid.
func CheckRunDir(dir string) error {
	l := Launcher{dir: dir}
	if n := len(l.SocketPath(sandbox.NewID())); n > maxSunPath {
		return sandbox.Errorf(sandbox.ErrInvalid, "run_dir_too_long", "run directory %s: sockets below it would have paths of %d bytes, and %d are the most: choose a shorter --run-dir", dir, n, maxSunPath)
	}
	// The directory itself is opened to others where it is not.
	for at := filepath.Dir(dir); ; at = filepath.Dir(at) {
		if _, err := os.Stat(at); err == nil || at == filepath.Dir(at) {
			return checkReachable(at)
		}
	}
}

// checkReachable makes sure that mapped ids, which own nothing here, can walk
// to dir: libcontainer opens the skeleton by its path with a sandbox's ids.
func checkReachable(dir string) error {
	for p := dir; ; p = filepath.Dir(p) {
		info, err := os.Stat(p)
		if err != nil {
			return err
		}
		if info.Mode().Perm()&0o001 == 0 {
			return sandbox.Errorf(sandbox.ErrInvalid, "run_dir_unreachable", "run directory %s: %s is closed to others (mode %04o), and sandboxes must pass through: chmod o+x %s, or choose another --run-dir", dir, p, info.Mode().Perm(), p)
		}
		if p == filepath.Dir(p) {
			return nil
		}
	}
}

// Close removes the skeleton. Shells go on.
func (l *Launcher) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.skeleton.remove()
}

// MaxOpenFiles is the most open files a process can be given on this host.
func (l *Launcher) MaxOpenFiles() uint64 { return l.maxFiles }

func (l *Launcher) skeletonDir() string { return filepath.Join(l.dir, "skeleton") }
func (l *Launcher) stateRoot() string   { return filepath.Join(l.dir, "shells") }
func (l *Launcher) socketRoot() string  { return filepath.Join(l.dir, "init") }

// SocketPath is where PID 1 of the sandbox listens.
func (l *Launcher) SocketPath(id sandbox.ID) string {
	return filepath.Join(l.socketRoot(), string(id)+".sock")
}

// ShellSpec is what distinguishes one shell from another.
type ShellSpec struct {
	ID         sandbox.ID
	CgroupPath string // below the cgroup2 mount; exists and is empty
	UIDBase    uint32 // first of its 65,536 host ids
	InitID     uint32 // the host id of PID 1, which is sandbox.InitID inside
}

// Shell is a running PID 1. Its descriptors belong to the caller.
type Shell struct {
	ID        sandbox.ID
	PID       int
	StartTime uint64 // clock ticks after boot: with PID it names the process for good (proc(5), stat field 22)
	UserNS    *os.File
	NetNS     *os.File
	PIDFD     *os.File

	mounts *os.File // see HoldMounts
}

// Close closes the shell's descriptors; PID 1 goes on.
func (s *Shell) Close() error {
	return errors.Join(closeFile(s.UserNS), closeFile(s.NetNS), closeFile(s.mounts), closeFile(s.PIDFD))
}

// Waits tells, for a person, what PID 1 waits for.
func (s *Shell) Waits() []string { return linux.WaitsOf(s.PID) }

// HoldMounts keeps the mounts of PID 1 beyond its end, until Close. Else the
// last of its threads unmounts them all, and waits for RCU, before anybody is
// told that it has ended. Where it has ended already there is nothing to hold.
func (s *Shell) HoldMounts() {
	if s.mounts != nil {
		return
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", s.PID))
	if err != nil {
		return
	}
	if !s.Alive() { // the number may have become another's
		_ = f.Close()
		return
	}
	s.mounts = f
}

func closeFile(f *os.File) error {
	if f == nil {
		return nil
	}
	return f.Close()
}

// Start makes a shell. On return PID 1 runs its program and its socket takes
// connections. On error nothing is left but processes in the cgroup, and
// what Remove takes away.
func (l *Launcher) Start(_ context.Context, spec ShellSpec) (*Shell, error) {
	if spec.UIDBase == 0 || spec.InitID == 0 {
		return nil, fmt.Errorf("start a shell for %s with the host's own root (ids %d and %d): %w", spec.ID, spec.UIDBase, spec.InitID, unix.EINVAL)
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	if err := l.Remove(spec.ID); err != nil {
		return nil, err
	}
	if err := l.skeleton.makeDev(spec.ID); err != nil {
		return nil, fmt.Errorf("make /dev for %s: %w", spec.ID, err)
	}
	ln, err := listen(l.SocketPath(spec.ID), spec.InitID)
	if err != nil {
		return nil, fmt.Errorf("listen for PID 1 of %s: %w", spec.ID, err)
	}
	defer ln.Close()

	ctr, err := libcontainer.Create(l.stateRoot(), string(spec.ID), shellConfig(l.skeleton, spec))
	if err != nil {
		return nil, fmt.Errorf("prepare a shell for %s: %w", spec.ID, err)
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	proc := &libcontainer.Process{
		Args: []string{initPath}, Env: l.env,
		Cwd: "/", UID: sandbox.InitID, Init: true, ExtraFiles: []*os.File{ln},
		Stdin: null, Stdout: null, Stderr: null,
	}
	if err := ctr.Run(proc); err != nil {
		return nil, fmt.Errorf("start the shell of %s: %w", spec.ID, err)
	}
	pid, err := proc.Pid()
	if err != nil {
		return nil, fmt.Errorf("pid of the shell of %s: %w", spec.ID, err)
	}
	// Who is inside could write it once, and no reset takes that back. Project 0 is
	// none; quotas go by the host's numbers, which nobody inside can set anyway.
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/projid_map", pid), []byte("0 0 1"), 0); err != nil {
		return nil, fmt.Errorf("map the project ids of %s: %w", spec.ID, err)
	}
	return l.open(spec.ID, pid, 0)
}

// Open returns the shell of an earlier daemon, if PID 1 still is the process
// that started at startTime; otherwise an error of class ErrNotFound.
func (l *Launcher) Open(id sandbox.ID, pid int, startTime uint64) (*Shell, error) {
	return l.open(id, pid, startTime)
}

func (l *Launcher) open(id sandbox.ID, pid int, startTime uint64) (*Shell, error) {
	gone := func(err error) error {
		return sandbox.Errorf(sandbox.ErrNotFound, "shell_gone", "PID 1 of %s (host pid %d) is gone: %w", id, pid, err)
	}
	// The pidfd is opened before the start time is read: if that matches,
	// the descriptor is of the process meant.
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, gone(err)
	}
	s := &Shell{ID: id, PID: pid, PIDFD: os.NewFile(uintptr(fd), "pidfd")}
	if s.StartTime, err = readStartTime(pid); err != nil {
		return nil, errors.Join(gone(err), s.Close())
	}
	if startTime != 0 && s.StartTime != startTime {
		return nil, errors.Join(gone(errors.New("the pid belongs to another process now")), s.Close())
	}
	for _, ns := range []struct {
		name string
		to   **os.File
	}{{"user", &s.UserNS}, {"net", &s.NetNS}} {
		f, err := os.Open(fmt.Sprintf("/proc/%d/ns/%s", pid, ns.name))
		if err != nil {
			return nil, errors.Join(gone(err), s.Close())
		}
		*ns.to = f
	}
	return s, nil
}

// Wait returns when PID 1 has ended, or with ctx's error. It takes the exit
// status where PID 1 is a child of this process, so that no zombie is left.
func (s *Shell) Wait(ctx context.Context) error {
	// A descriptor of its own, so that one wait's cancellation is not another's.
	var dup int
	err := s.withPIDFD(func(fd int) (err error) {
		dup, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return fmt.Errorf("wait for PID 1 of %s: %w", s.ID, err)
	}
	if err := unix.SetNonblock(dup, true); err != nil { // else the runtime would block a thread on it
		return errors.Join(err, unix.Close(dup))
	}
	f := os.NewFile(uintptr(dup), "pidfd")
	defer f.Close()
	stop := context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	err = conn.Read(func(fd uintptr) bool {
		dead, err := exited(int(fd))
		return err == nil && dead
	})
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("wait for PID 1 of %s: %w", s.ID, err)
	}
	return conn.Control(func(fd uintptr) {
		// ECHILD: it was the child of an earlier daemon, and init reaped it.
		_ = unix.Waitid(unix.P_PIDFD, int(fd), nil, unix.WEXITED|unix.WNOHANG, nil)
	})
}

// Alive reports whether PID 1 still runs. A shell that was closed does not.
func (s *Shell) Alive() bool {
	if s == nil {
		return false
	}
	dead := false
	err := s.withPIDFD(func(fd int) (err error) {
		dead, err = exited(fd)
		return err
	})
	return err == nil && !dead
}

// exited tells whether the process of a pidfd has ended: such a descriptor is
// readable (pidfd_open(2)). Poll can be interrupted even when it does not
// wait (poll(2), EINTR), and the Go runtime sends its threads signals.
func exited(pidfd int) (bool, error) {
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 0)
		if !errors.Is(err, unix.EINTR) {
			return n > 0, err
		}
	}
}

// withPIDFD runs f with the descriptor of PID 1 as a number, which cannot come
// to mean another file meanwhile: Close may be called at any time.
func (s *Shell) withPIDFD(f func(fd int) error) error {
	raw, err := s.PIDFD.SyscallConn()
	if err != nil {
		return err
	}
	var ferr error
	err = raw.Control(func(fd uintptr) { ferr = f(int(fd)) })
	return errors.Join(err, ferr)
}

// Kill ends PID 1, and with it every process of its pid namespace.
func (s *Shell) Kill() error {
	err := s.withPIDFD(func(fd int) error { return unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0) })
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill PID 1 of %s: %w", s.ID, err)
	}
	return nil
}

// Remove takes away what Start put on disk: the socket, libcontainer's state
// and /dev. The processes and the cgroup are the cgroup package's to end. What
// is gone already is fine.
func (l *Launcher) Remove(id sandbox.ID) error {
	for _, dir := range []string{filepath.Join(l.stateRoot(), string(id)), skeleton{dir: l.skeletonDir()}.dev(id)} {
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("remove what the shell of %s stood on: %w", id, err)
		}
	}
	if err := os.Remove(l.SocketPath(id)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove the socket of %s: %w", id, err)
	}
	return nil
}

// List names every sandbox of which a shell left something on disk.
func (l *Launcher) List() ([]sandbox.ID, error) {
	var ids []sandbox.ID
	for _, dir := range []string{l.stateRoot(), l.socketRoot()} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, fmt.Errorf("list shells: %w", err)
		}
		for _, e := range entries {
			if id, err := sandbox.ParseID(strings.TrimSuffix(e.Name(), ".sock")); err == nil && !slices.Contains(ids, id) {
				ids = append(ids, id)
			}
		}
	}
	return ids, nil
}

// listen makes a listening unix socket that only the host's root can reach,
// and returns it as a file to hand on. Unlike net.UnixListener's, closing it
// leaves the path. Its owner is for the first stage to see (package stage): a
// user who exists in no other place.
func listen(path string, owner uint32) (*os.File, error) {
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	ln.SetUnlinkOnClose(false)
	defer ln.Close()
	if err := errors.Join(os.Chmod(path, 0o600), os.Lchown(path, int(owner), -1)); err != nil {
		return nil, err
	}
	return ln.File()
}

// readStartTime reads field 22 of /proc/PID/stat; the fields are counted
// from behind the program's name, which may hold anything.
func readStartTime(pid int) (uint64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, rest, ok := strings.Cut(string(b[max(0, strings.LastIndexByte(string(b), ')')):]), ") ")
	fields := strings.Fields(rest)
	if !ok || len(fields) < 20 {
		return 0, fmt.Errorf("/proc/%d/stat: unexpected form", pid)
	}
	return strconv.ParseUint(fields[19], 10, 64)
}
