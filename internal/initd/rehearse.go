package initd

import (
	"encoding/json"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/sandbox"
)

// rehearse goes through a configuration and the start of a process without
// doing either: the first real ones then find the code's pages mapped, the
// threads made and the decoders built. It fails at nothing, whatever goes wrong.
func (s *Server) rehearse(w *worker) {
	spec := sandbox.ProcessSpec{Argv: []string{"/"}, Env: map[string]string{"A": "B"}, Stdin: true}
	for _, v := range []any{initproto.Configure{Hostname: "h", Root: true, Extra: []string{"/x"}}, initproto.Exec{Spec: spec, Attach: true}} {
		raw, _ := json.Marshal(v)
		b, _ := json.Marshal(initproto.Request{Version: initproto.Version, Keep: true, Args: raw})
		var req initproto.Request
		_ = json.Unmarshal(b, &req)
		switch v.(type) {
		case initproto.Configure:
			_ = with(req, func(initproto.Configure) error { return nil })
		case initproto.Exec:
			_ = with(req, func(a initproto.Exec) error { return a.Spec.Validate() })
		}
	}
	acc, err := s.users.lookup("")
	if err != nil {
		return
	}
	st, err := openStdio(spec, acc)
	if err != nil {
		return
	}
	defer st.closeOurs()
	defer st.closeChild()
	now := time.Now()
	_, _ = json.Marshal(sandbox.Process{ID: "p0", Argv: spec.Argv, StartedAt: now, Exit: &sandbox.ExitStatus{At: now}})
	attr := &syscall.ProcAttr{Env: envList(buildEnv(acc, spec, initproto.Configure{})), Files: st.childFDs(), Sys: &syscall.SysProcAttr{
		Setsid: true, Credential: &syscall.Credential{Uid: acc.uid, Gid: acc.gid, Groups: acc.groups},
	}}
	s.procs.mu.Lock()
	if g := s.procs.spare; g != nil {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, g.dir
	}
	s.procs.mu.Unlock()
	// A directory cannot be executed: the child ends there, and its end is
	// taken by who forked it.
	s.procs.forking.RLock()
	pid, err := w.fork(forkJob{acc: acc, dirs: []string{"/"}, argv: spec.Argv, attr: attr})
	s.procs.forking.RUnlock()
	if err == nil {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
}
