package initd

import (
	"errors"
	"maps"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// exec starts a process and, if asked, serves its streams on the connection.
func (s *Server) exec(c *conn, a initproto.Exec) error {
	p, err := s.startOnce(a.Spec, a.Key)
	if err != nil {
		return err
	}
	if !a.Attach {
		c.corked = c.keep
		return c.reply(p.record(s.procs))
	}
	return s.stream(c, p, 0)
}

func (s *Server) start(spec sandbox.ProcessSpec) (*process, error) {
	return s.startWith(spec, openStdio)
}

// startWith is start with streams of the caller's. Where it fails before open
// was called, they are the caller's still.
func (s *Server) startWith(spec sandbox.ProcessSpec, open func(sandbox.ProcessSpec, account) (*stdio, error)) (*process, error) {
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	s.cfgMu.RLock()
	defer s.cfgMu.RUnlock()
	cfg, err := s.settingsNow()
	if err != nil {
		return nil, err
	}
	user := spec.User
	if user == "" {
		user = cfg.User
	}
	acc, err := s.users.lookup(user)
	if err != nil {
		return nil, err
	}
	env := buildEnv(acc, spec, cfg.Configure)
	id := s.procs.newID()
	p := &process{out: newRing(s.procs.ringSize(spec.OutputBytes))}
	p.rec = sandbox.Process{ID: id, Argv: shortArgv(spec.Argv), User: acc.name, Tag: spec.Tag, TTY: spec.TTY != nil, Main: spec.Main}
	st, err := open(spec, acc)
	if err != nil {
		return nil, err
	}
	defer st.closeChild()
	if cfg.work != nil {
		if p.group, err = s.procs.groupFor(cfg.work); err != nil {
			st.closeOurs()
			return nil, sandbox.Errorf(sandbox.ErrUnavailable, "cgroup_failed", "starting process %s: %w", id, err)
		}
	}
	attr := &syscall.ProcAttr{Env: envList(env), Files: st.childFDs(), Sys: &syscall.SysProcAttr{
		Setsid: true, Setctty: spec.TTY != nil,
		Credential: &syscall.Credential{Uid: acc.uid, Gid: acc.gid, Groups: acc.groups},
	}}
	if p.group != nil {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, p.group.dir
	}
	p.rec.StartedAt = time.Now()
	job := forkJob{acc: acc, dirs: workDirs(spec, cfg.Configure, acc), argv: spec.Argv, path: env["PATH"], attr: attr}
	if err := s.forkAndAdd(cfg.worker, p, st, job); err != nil {
		s.procs.mu.Lock()
		p.dropGroupLocked(s.procs)
		s.procs.mu.Unlock()
		st.closeOurs()
		p.out.release()
		if se, ok := errors.AsType[*sandbox.Error](err); ok {
			return nil, se
		}
		return nil, explainExec(err, spec.Argv[0], acc)
	}
	p.armTimeout(s.procs, time.Duration(spec.TimeoutSeconds*float64(time.Second)))
	for i, f := range p.outputs {
		go p.pump(s.procs, f, []sandbox.Stream{sandbox.Stdout, sandbox.Stderr}[i])
	}
	return p, nil
}

// forkAndAdd starts the program, and enters the process before its end can be
// seen.
func (s *Server) forkAndAdd(w *worker, p *process, st *stdio, job forkJob) error {
	s.procs.forking.RLock()
	defer s.procs.forking.RUnlock()
	s.procs.forked.Store(true)
	s.used.Store(true)
	awake()
	pid, err := w.fork(job)
	if err != nil {
		return err
	}
	p.rec.PID = pid
	p.stdin, p.tty, p.outputs = st.stdin, st.tty, st.outputs
	// Pumps must be counted before the reaper can see the process.
	p.parts.Store(int32(1 + len(p.outputs)))
	s.procs.add(p)
	return nil
}

// candidates lists where a program may be. A name with a slash is itself,
// and relative to the working directory dir.
func candidates(name, pathVar, dir string) []string {
	if strings.Contains(name, "/") {
		return []string{name}
	}
	if pathVar == "" {
		pathVar = defaultPath
	}
	var out []string
	for d := range strings.SplitSeq(pathVar, ":") {
		if d == "" || !path.IsAbs(d) {
			d = path.Join(dir, d)
		}
		if c := path.Join(d, name); !slices.Contains(out, c) {
			out = append(out, c)
		}
	}
	return out
}

// workDirError is why no working directory could be entered.
type workDirError struct {
	dir string
	err error
}

func (e *workDirError) Error() string { return e.dir + ": " + e.err.Error() }
func (e *workDirError) Unwrap() error { return e.err }

// errNoLoader is a program that is there, and what it needs to begin is not.
var errNoLoader = errors.New("its interpreter or loader does not exist inside")

// explainExec tells what a failed start meant.
func explainExec(err error, name string, acc account) error {
	if e, ok := errors.AsType[*workDirError](err); ok {
		switch {
		case errors.Is(err, unix.ENOTDIR):
			return sandbox.Errorf(sandbox.ErrInvalid, "workdir_not_found", "working directory %.200q is not a directory: %w", e.dir, e.err)
		case errors.Is(err, unix.ELOOP):
			return sandbox.Errorf(sandbox.ErrInvalid, "workdir_not_found", "working directory %.200q: its links lead in a circle, or through one of /proc that leads out of the files: name the directory itself: %w", e.dir, e.err)
		}
		return sandbox.Errorf(sandbox.ErrInvalid, "workdir_not_found", "working directory %.200q for user %s: %w", e.dir, acc.name, e.err)
	}
	switch {
	case errors.Is(err, linux.ErrEndedEarly):
		return sandbox.Errorf(sandbox.ErrUnavailable, "start_stopped", "command %.200q was stopped or killed before it began by another process of the sandbox: end that one and try again", name)
	case errors.Is(err, errStalled):
		return sandbox.Errorf(sandbox.ErrUnavailable, "start_stalled", "command %.200q waited two seconds for whoever holds its file, by a lease or as its filesystem: end that one, or copy the file, and try again", name)
	case errors.Is(err, errNoLoader):
		return sandbox.Errorf(sandbox.ErrInvalid, "command_not_executable", "command %.200q: %w", name, err)
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return sandbox.Errorf(sandbox.ErrInvalid, "command_not_found", "command %.200q is not in the sandbox: check its name and PATH", name)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM), errors.Is(err, unix.ENOEXEC), errors.Is(err, unix.EISDIR),
		errors.Is(err, unix.ELOOP), errors.Is(err, unix.ELIBBAD), errors.Is(err, unix.ETXTBSY), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENAMETOOLONG):
		return sandbox.Errorf(sandbox.ErrInvalid, "command_not_executable", "command %.200q cannot be executed by %s: %w", name, acc.name, err)
	case errors.Is(err, unix.E2BIG):
		return sandbox.Errorf(sandbox.ErrTooLarge, "argv_too_large", "command %.200q: arguments and environment are too large together: %w", name, err)
	case errors.Is(err, unix.EAGAIN):
		return sandbox.Errorf(sandbox.ErrExhausted, "pids_exhausted", "command %.200q: the sandbox may start no more tasks (limit pids): %w", name, err)
	case errors.Is(err, unix.ENOMEM):
		return sandbox.Errorf(sandbox.ErrExhausted, "memory_exhausted", "command %.200q: no memory to start it: %w", name, err)
	}
	return sandbox.Errorf(sandbox.ErrUnavailable, "start_failed", "starting command %.200q: %w", name, err)
}

// workDirs are the working directories to try: the next one where one is
// missing.
func workDirs(spec sandbox.ProcessSpec, cfg initproto.Configure, acc account) []string {
	switch {
	case spec.WorkDir != "":
		return []string{spec.WorkDir}
	case cfg.WorkDir != "":
		return []string{cfg.WorkDir}
	}
	return []string{acc.home, "/"}
}

func buildEnv(acc account, spec sandbox.ProcessSpec, shared initproto.Configure) map[string]string {
	env := map[string]string{
		"PATH": defaultPath, "HOME": acc.home, "USER": acc.name, "LOGNAME": acc.name, "SHELL": acc.shell,
	}
	if spec.TTY != nil {
		env["TERM"] = "xterm-256color"
	}
	for _, m := range []map[string]string{shared.Env, spec.Env} {
		maps.Copy(env, m)
	}
	if shared.Entries {
		env["PATH"] += ":" + entriesDir
	}
	return env
}

func envList(env map[string]string) []string {
	out := make([]string, 0, len(env))
	for k, v := range env {
		out = append(out, k+"="+v)
	}
	slices.Sort(out)
	return out
}
