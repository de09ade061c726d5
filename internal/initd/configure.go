package initd

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/sandbox"
)

// switchPatience is how long old processes and file work may take to end
// before a root switch gives up.
const switchPatience = 10 * time.Second

// idlePatience is how long file work may take to end before a root is not
// called idle.
const idlePatience = 50 * time.Millisecond

// namespaceLimits are set to 0: no namespace of any kind can be made inside.
// Only the first matters to a process without CAP_SYS_ADMIN; it must exist.
var namespaceLimits = []string{
	"max_user_namespaces", "max_mnt_namespaces", "max_pid_namespaces", "max_net_namespaces",
	"max_ipc_namespaces", "max_uts_namespaces", "max_cgroup_namespaces", "max_time_namespaces",
}

// configure takes a whole configuration and, if one comes along, a new root.
// Repeating it is safe: settings are replaced, and a root switch ends every
// process of the root before it.
func (s *Server) configure(c *conn, a initproto.Configure) error {
	began := time.Now()
	var done initproto.Configured
	root, extra, err := takeConfigureFDs(c, a)
	if err != nil {
		return err
	}
	defer closeAll(append(extra, root)...)
	if _, ok := profiles[a.Capabilities]; !ok {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_capabilities", "capabilities %.40q: use root or none", a.Capabilities)
	}
	unlock, err := s.lockRoot(a, &done)
	if err != nil {
		return err
	}
	defer unlock()
	if err := s.takeWork(a.Work); err != nil {
		return err
	}
	if err := s.applyRoot(a, root, extra, &done); err != nil {
		return err
	}
	if err := s.applySettings(a, &done); err != nil {
		return err
	}
	done.Total = time.Since(began)
	return c.reply(done)
}

// prepare does in advance what a configuration will need. Where one is in
// force there is nothing to prepare.
func (s *Server) prepare(c *conn, a initproto.Prepare) error {
	c.noMoreFDs()
	s.cfgMu.Lock()
	defer s.cfgMu.Unlock()
	if s.ready.Load() {
		return c.reply(struct{}{})
	}
	if err := s.takeWork(a.Work); err != nil {
		return err
	}
	if err := s.closeNamespaces(); err != nil {
		return err
	}
	if err := s.left.note(); err != nil {
		return sandbox.Errorf(sandbox.ErrUnavailable, "note_failed", "looking at what no process has touched yet: %w", err)
	}
	w, err := startWorker(a.Capabilities, a.Seccomp)
	if err != nil {
		return err
	}
	s.cfg.dropReady()
	s.cfg.ready, s.cfg.Seccomp = w, a.Seccomp
	if s.cfg.work != nil {
		if err := s.procs.makeSpare(s.cfg.work); err != nil {
			return sandbox.Errorf(sandbox.ErrUnavailable, "cgroup_failed", "preparing for a process: %w", err)
		}
	}
	s.rehearse(w)
	return c.reply(struct{}{})
}

func (c *settings) dropReady() {
	if c.ready != nil {
		c.ready.stop()
		c.ready = nil
	}
}

// workerFor returns a worker in a Landlock domain of the present root: the
// one made in advance, if it fits.
func (s *Server) workerFor(a initproto.Configure) (w *worker, err error) {
	w = s.cfg.ready
	s.cfg.ready = nil
	if w != nil && (w.profile != a.Capabilities || !bytes.Equal(a.Seccomp, s.cfg.Seccomp)) {
		w.stop()
		w = nil
	}
	if w == nil {
		if w, err = startWorker(a.Capabilities, a.Seccomp); err != nil {
			return nil, err
		}
	}
	if err := w.enter(); err != nil {
		w.stop()
		return nil, err
	}
	return w, nil
}

func takeConfigureFDs(c *conn, a initproto.Configure) (root *os.File, extra []*os.File, err error) {
	defer c.noMoreFDs()
	if a.Root {
		if root, err = c.takeFD("root"); err != nil {
			return nil, nil, err
		}
	}
	for _, path := range a.Extra {
		f, err := c.takeFD("extra mount " + path)
		if err != nil {
			closeAll(append(extra, root)...)
			return nil, nil, err
		}
		extra = append(extra, f)
	}
	if len(extra) > 0 && root == nil {
		closeAll(extra...)
		return nil, nil, sandbox.Errorf(sandbox.ErrInvalid, "bad_request", "extra mounts come with a new root only")
	}
	return root, extra, nil
}

// takeWork opens the cgroup that processes go to, the first time it is wanted.
func (s *Server) takeWork(want bool) error {
	if !want || s.cfg.work != nil {
		return nil
	}
	var err error
	if s.cfg.work, err = openWork(); err != nil {
		return sandbox.Errorf(sandbox.ErrUnavailable, "cgroup_failed", "opening the cgroup of processes: %w", err)
	}
	return nil
}

func closeAll(files ...*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}

// lockRoot waits until nothing is at work in the present root. If that is to
// go, its processes are killed and its connections cut first, and the number
// of the last one is noted. Until unlock is called there is no other: a start
// takes its number and forks under one hold of cfgMu.
func (s *Server) lockRoot(a initproto.Configure, done *initproto.Configured) (unlock func(), err error) {
	if !a.Root {
		s.cfgMu.Lock()
		done.Before = s.before.Load()
		return s.cfgMu.Unlock, nil
	}
	if a.IfIdle {
		return s.lockIdleRoot(done)
	}
	began := time.Now()
	deadline := began.Add(switchPatience)
	if err := s.emptyRoot(deadline); err != nil {
		return nil, err
	}
	s.cfgMu.Lock()
	unlock = func() { s.cfgMu.Unlock(); s.root.Unlock() }
	if err := s.procs.killAll(deadline); err != nil {
		unlock()
		return nil, err
	}
	done.Before = s.procs.numberAfter(a.LastProcess)
	done.Kill = time.Since(began)
	return unlock, nil
}

// lockIdleRoot is lockRoot for a root in which nothing is at work: nothing is
// killed or cut. File work is given a moment to end.
func (s *Server) lockIdleRoot(done *initproto.Configured) (unlock func(), err error) {
	for deadline := time.Now().Add(idlePatience); !s.root.TryLock(); <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			return nil, rootBusy("file work is under way")
		}
	}
	s.cfgMu.Lock()
	unlock = func() { s.cfgMu.Unlock(); s.root.Unlock() }
	if s.procs.forked.Load() {
		// Of a pid namespace: any process but PID 1 (kill(2)).
		if err := unix.Kill(-1, 0); !errors.Is(err, unix.ESRCH) {
			unlock()
			return nil, rootBusy("a process runs")
		}
	}
	done.Before = s.before.Load()
	return unlock, nil
}

func rootBusy(why string) error {
	return sandbox.Errorf(sandbox.ErrConflict, "root_busy", "%s in the root that was to be changed while idle", why)
}

// emptyRoot takes s.root for writing, having ended the file work that holds it.
func (s *Server) emptyRoot(deadline time.Time) error {
	if s.root.TryLock() {
		return nil
	}
	locked := make(chan struct{})
	go func() { s.root.Lock(); close(locked) }()
	// Readers of the lock that came before us end once their connections do.
	for {
		s.cutBound()
		select {
		case <-locked:
			return nil
		case <-time.After(2 * time.Millisecond):
			if time.Now().After(deadline) {
				go func() { <-locked; s.root.Unlock() }()
				return sandbox.Errorf(sandbox.ErrConflict, "root_busy", "file work in the old root did not end in %s: try again", switchPatience)
			}
		}
	}
}

// killAll ends every process of the pid namespace but PID 1, which kill(2)
// spares, and returns when all are reaped. The caller keeps new ones from
// being started.
func (t *table) killAll(deadline time.Time) error {
	if !t.forked.Load() {
		return nil // kill(2) would look at every process of the machine
	}
	for {
		err := unix.Kill(-1, unix.SIGKILL)
		if errors.Is(err, unix.ESRCH) {
			t.mu.Lock()
			gone := len(t.byPID) == 0
			if gone {
				t.sweepLocked()
			}
			t.mu.Unlock()
			if gone {
				t.forked.Store(false)
				return nil
			}
		}
		if time.Now().After(deadline) {
			return sandbox.Errorf(sandbox.ErrConflict, "root_busy", "processes of the old root do not die: stop the sandbox instead")
		}
		<-time.After(200 * time.Microsecond) // killed processes need a moment; each round also catches new ones
	}
}

// clearLeftovers lets nothing outlive the root that goes. Before the first
// root no process was: what is there is what it shall be.
func (s *Server) clearLeftovers() error {
	if s.switches.Load() == 0 {
		return s.left.note()
	}
	if !s.used.Load() {
		return nil
	}
	s.askers.clear()
	s.sudoers.clear()
	if err := s.left.clear(); err != nil {
		return err
	}
	s.used.Store(false)
	return nil
}

func (s *Server) applyRoot(a initproto.Configure, root *os.File, extra []*os.File, done *initproto.Configured) error {
	if err := s.closeNamespaces(); err != nil {
		return err
	}
	began := time.Now()
	if root != nil {
		if !a.IfIdle { // else the sandbox goes on, with what it left
			if err := s.clearLeftovers(); err != nil {
				return sandbox.Errorf(sandbox.ErrUnavailable, "clear_failed", "clearing what the old root's processes left: %w", err)
			}
		}
		done.Clear = time.Since(began)
		began = time.Now()
		first := s.switches.Load() == 0
		if a.Entries && first {
			if err := mountEntries(); err != nil {
				return sandbox.Errorf(sandbox.ErrUnavailable, "entries_failed", "placing what costs are entered with: %w", err)
			}
		}
		if err := switchRoot(root, extra, a.Extra, first); err != nil {
			if e, ok := errors.AsType[*sandbox.Error](err); ok { // the place of a mount: the asker's to mend
				return e
			}
			return sandbox.Errorf(sandbox.ErrUnavailable, "root_switch_failed", "taking the new root: %w", err)
		}
		s.before.Store(done.Before) // first: who sees the switch counted sees it too
		s.switches.Add(1)
		s.users.forget()
	}
	done.Switch = time.Since(began)
	began = time.Now()
	if a.Hostname != "" {
		if err := unix.Sethostname([]byte(a.Hostname)); err != nil {
			return sandbox.Errorf(sandbox.ErrInvalid, "invalid_hostname", "setting host name %.64q: %w", a.Hostname, err)
		}
	}
	if root != nil && !a.Furnished {
		if err := writeIdentity(a); err != nil {
			return sandbox.Errorf(sandbox.ErrUnavailable, "identity_failed", "writing the new root's names: %w", err)
		}
	}
	done.Files = time.Since(began)
	return nil
}

// applySettings starts a worker for the new settings and lets the old one go.
func (s *Server) applySettings(a initproto.Configure, done *initproto.Configured) error {
	began := time.Now()
	if len(a.Seccomp) == 0 {
		a.Seccomp = s.cfg.Seccomp
	}
	if a.OpenFiles > 0 {
		lim := unix.Rlimit{Cur: a.OpenFiles, Max: a.OpenFiles}
		if err := setOpenFiles(lim); err != nil {
			return sandbox.Errorf(sandbox.ErrUnsupported, "open_files_failed", "limiting open files to %d: %w", a.OpenFiles, err)
		}
	}
	w, err := s.workerFor(a)
	if err != nil {
		return err
	}
	if s.cfg.worker != nil {
		s.cfg.worker.stop()
	}
	if !s.ready.Load() {
		s.procs.restoreKeys(a.Keys)
	}
	a.Keys = nil
	s.cfg.worker, s.cfg.Configure = w, a
	s.ready.Store(true)
	keep := a.KeepEnded
	if keep <= 0 {
		keep = defaultKeepEnded
	}
	s.procs.mu.Lock()
	s.procs.keep = min(keep, 4096)
	s.procs.mu.Unlock()
	s.procs.numberAfter(a.LastProcess)
	done.Workers = time.Since(began)
	return nil
}

// setOpenFiles bounds the descriptors of PID 1 and what it starts. PID 1
// needs some for itself, so it never goes below ownFiles; there the workload
// gets a little more than asked for.
func setOpenFiles(lim unix.Rlimit) error {
	const ownFiles = 512
	lim.Cur, lim.Max = max(lim.Cur, ownFiles), max(lim.Max, ownFiles)
	var now unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &now); err != nil {
		return err
	}
	// Raising the hard limit takes a right over the host: what was given is the most.
	lim.Max = min(lim.Max, now.Max)
	lim.Cur = min(lim.Cur, lim.Max)
	return unix.Setrlimit(unix.RLIMIT_NOFILE, &lim)
}

// closeNamespaces sees to it that no namespace can be made inside, once.
func (s *Server) closeNamespaces() error {
	if s.closed {
		return nil
	}
	if err := closeNamespaces(); err != nil {
		return sandbox.Errorf(sandbox.ErrUnsupported, "namespaces_open", "forbidding nested namespaces: %w", err)
	}
	s.closed = true
	return nil
}

// closeNamespaces writes 0 to the limits of the sandbox's user namespace
// (namespaces(7)). Where /proc/sys is mounted read-only it is made writable
// for that moment: the mount is PID 1's own.
func closeNamespaces() error {
	const dir = "/proc/sys/user/"
	write := func(name string) error { return os.WriteFile(dir+name, []byte("0"), 0) }
	err := write(namespaceLimits[0])
	if errors.Is(err, unix.EROFS) {
		if rerr := remount("/proc/sys", 0); rerr != nil {
			return fmt.Errorf("making /proc/sys writable for a moment: %w", rerr)
		}
		defer func() { _ = remount("/proc/sys", unix.MOUNT_ATTR_RDONLY) }()
		err = write(namespaceLimits[0])
	}
	if err != nil {
		return err
	}
	for _, name := range namespaceLimits[1:] {
		if err := write(name); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

func remount(path string, set uint64) error {
	attr := unix.MountAttr{Attr_set: set, Attr_clr: unix.MOUNT_ATTR_RDONLY &^ set}
	return unix.MountSetattr(unix.AT_FDCWD, path, 0, &attr)
}

// hostsFile returns the content of /etc/hosts where none was given.
func hostsFile(a initproto.Configure) string {
	if a.Hosts != "" {
		return a.Hosts
	}
	var b strings.Builder
	b.WriteString("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n")
	if a.Hostname != "" {
		addr := a.Address
		if addr == "" {
			addr = "127.0.1.1"
		}
		fmt.Fprintf(&b, "%s\t%s\n", addr, a.Hostname)
	}
	return b.String()
}
