package initd

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	// maxConns bounds the operations under way at once.
	maxConns = 256
	// ListenFD is where PID 1 finds its listening socket.
	ListenFD = 3
	// tidyAfter is how long nothing must happen before memory is given back.
	tidyAfter = time.Second
	// tidyAbove is how many operations must have been done since the last time
	// for that to pay. One allocates some 6 KiB, and the first collection
	// leaves about 0.5 MiB of bookkeeping for good, so a sandbox that never did
	// much never collects.
	tidyAbove = 128
)

// Server is PID 1's state.
type Server struct {
	build string
	began time.Time
	procs *table
	users userCache
	idle  *time.Timer  // runs tidy
	done  atomic.Int64 // operations since memory was last given back
	slots chan struct{}

	// root is held for reading by file work, however long that takes, for
	// writing while a root is switched. Taken before cfgMu.
	root sync.RWMutex
	// cfgMu guards cfg, closed and left; starting a process holds it for reading.
	cfgMu    sync.RWMutex
	cfg      settings
	closed   bool // no namespace can be made inside
	left     leftovers
	used     atomic.Bool // by a process or file work, since left was noted or cleared
	switches atomic.Int64
	before   atomic.Int64 // the last process's number at the last switch
	ready    atomic.Bool

	asked           *askers
	askers, sudoers *guests // nil: there is no such socket

	connMu sync.Mutex
	conns  map[*conn]bool // true: at work in the present root
}

// settings is what configure set.
type settings struct {
	initproto.Configure
	work   *os.File // the work cgroup's directory, or nil
	worker *worker
	// ready is a worker made in advance, without a Landlock domain: one that
	// fits the root there is then would not fit the next.
	ready *worker
}

// New returns a server; build names the program's version.
func New(build string) *Server {
	s := &Server{
		build: build, began: time.Now(), procs: newTable(),
		slots: make(chan struct{}, maxConns), conns: make(map[*conn]bool),
	}
	s.asked = newAskers(s.began)
	s.idle = time.AfterFunc(time.Hour, s.tidy)
	s.idle.Stop()
	s.procs.idle = func() { s.idle.Reset(tidyAfter) }
	return s
}

// tidy gives back after a burst of work what an idle sandbox does not need:
// memory, and the second processor if no process runs.
func (s *Server) tidy() {
	if s.done.Load() < tidyAbove {
		return
	}
	s.done.Store(0)
	s.procs.forking.Lock()
	if live, _ := s.procs.summary(); live == 0 {
		runtime.GOMAXPROCS(1)
	}
	s.procs.forking.Unlock()
	debug.FreeOSMemory()
}

// worked notes that an operation is over.
func (s *Server) worked() {
	s.done.Add(1)
	s.idle.Reset(tidyAfter)
}

// awake gives PID 1 a second processor: a fork holds one until the runtime
// takes it away, and a frozen or starved child can put its program off for long. The caller
// holds s.procs.forking for reading.
func awake() {
	if runtime.GOMAXPROCS(0) < 2 {
		runtime.GOMAXPROCS(2)
	}
}

// Serve takes connections from the listening socket fd, and reaps. It never
// returns but with an error. The calling goroutine is the one that waits for
// children: where it holds the main thread, that is put to use.
func (s *Server) Serve(fd int) error {
	unix.CloseOnExec(fd)
	if err := unix.SetNonblock(fd, true); err != nil {
		return fmt.Errorf("descriptor %d is no listening socket: %w", fd, err)
	}
	l := os.NewFile(uintptr(fd), "listener")
	raw, err := l.SyscallConn()
	if err != nil {
		return fmt.Errorf("using the listening socket: %w", err)
	}
	if g, err := listenInside(); err == nil {
		s.askers = g
		go s.serveGuests(g, s.asked.slots, s.inside)
	}
	if g, err := listenSudo(); err == nil {
		s.sudoers = g
		go s.serveGuests(g, make(chan struct{}, maxSudo), s.sudo)
	}
	failed := make(chan error, 1)
	go func() {
		failed <- s.accept(raw)
		s.procs.stop()
	}()
	s.procs.reap()
	return <-failed
}

func (s *Server) accept(raw syscall.RawConn) error {
	for {
		s.slots <- struct{}{}
		nfd := -1
		var aerr error
		err := raw.Read(func(fd uintptr) bool {
			nfd, _, aerr = unix.Accept4(int(fd), unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
			return !errors.Is(aerr, unix.EAGAIN)
		})
		if err != nil {
			return fmt.Errorf("waiting for a connection: %w", err)
		}
		if aerr != nil {
			<-s.slots
			if errors.Is(aerr, unix.EBADF) || errors.Is(aerr, unix.EINVAL) || errors.Is(aerr, unix.ENOTSOCK) {
				return fmt.Errorf("accepting: %w", aerr)
			}
			if errors.Is(aerr, unix.EMFILE) || errors.Is(aerr, unix.ENFILE) || errors.Is(aerr, unix.ENOMEM) {
				<-time.After(10 * time.Millisecond) // nothing to wait on: someone must close first
			}
			continue
		}
		go s.serve(nfd)
	}
}

func (s *Server) serve(fd int) {
	defer func() { <-s.slots; s.worked() }()
	c, err := newConn(fd)
	if err != nil {
		return
	}
	s.bind(c, false)
	defer func() {
		s.connMu.Lock()
		delete(s.conns, c)
		s.connMu.Unlock()
		c.close()
	}()
	for s.operation(c) {
		s.worked()
	}
}

// keeping are the operations after which the connection may be kept; whole
// tells those whose answer may wait until it is complete.
var keeping = map[string]struct{ whole bool }{
	initproto.OpPing: {true}, initproto.OpPrepare: {true}, initproto.OpConfigure: {true}, initproto.OpExec: {}, initproto.OpAttach: {},
	initproto.OpSignal: {true}, initproto.OpResize: {true}, initproto.OpProcess: {true}, initproto.OpForget: {true},
	initproto.OpProcesses: {true}, initproto.OpStat: {true}, initproto.OpList: {true}, initproto.OpMkdir: {true},
	initproto.OpMove: {true}, initproto.OpRemove: {true}, initproto.OpChmod: {true}, initproto.OpAnswer: {true},
	initproto.OpInput: {true}, initproto.OpSetAttrs: {true},
}

// operation serves one request; true means that another may follow.
func (s *Server) operation(c *conn) bool {
	req, err := c.request()
	if err != nil {
		if !errors.Is(err, io.EOF) {
			c.fail(err)
		}
		return false
	}
	how, keep := keeping[req.Op]
	c.keep = keep && req.Keep
	c.corked = c.keep && how.whole
	if err := s.dispatch(c, req); err != nil {
		c.fail(err)
		return false
	}
	if c.corked {
		s.bind(c, false)
		return c.idle() == nil
	}
	return c.next != nil
}

// dispatch runs one operation. An error it returns is told to the daemon.
func (s *Server) dispatch(c *conn, req initproto.Request) error {
	switch req.Op {
	case initproto.OpConfigure:
		return with(req, func(a initproto.Configure) error { return s.configure(c, a) })
	case initproto.OpPrepare:
		return with(req, func(a initproto.Prepare) error { return s.prepare(c, a) })
	}
	c.noMoreFDs()
	switch req.Op {
	case initproto.OpPing:
		return c.reply(s.info())
	case initproto.OpExec:
		return with(req, func(a initproto.Exec) error { return s.exec(c, a) })
	case initproto.OpAttach:
		return with(req, func(a initproto.Attach) error { return s.attach(c, a) })
	case initproto.OpSignal, initproto.OpResize, initproto.OpProcess, initproto.OpForget:
		return with(req, func(a initproto.Target) error { return s.target(c, req.Op, a) })
	case initproto.OpInput:
		return with(req, func(a initproto.Input) error { return s.input(c, a) })
	case initproto.OpProcesses:
		return s.list(c)
	case initproto.OpAnswer:
		return with(req, func(a initproto.Answer) error {
			if err := s.asked.answer(a.ID, a.Line); err != nil {
				return err
			}
			return c.reply(struct{}{})
		})
	case initproto.OpCloseKeys:
		return c.reply(initproto.Keys{Keys: s.procs.closeKeys()})
	case initproto.OpEvents:
		return with(req, func(a initproto.EventsAfter) error { return s.events(c, a) })
	}
	if op, ok := fileOps[req.Op]; ok {
		return with(req, func(a initproto.File) error { return s.file(c, a, op) })
	}
	return sandbox.Errorf(sandbox.ErrUnsupported, "unknown_operation", "init does not know the operation %.40q", req.Op)
}

func with[T any](req initproto.Request, f func(T) error) error {
	var args T
	if len(req.Args) > 0 {
		if err := json.Unmarshal(req.Args, &args); err != nil {
			return sandbox.Errorf(sandbox.ErrInvalid, "bad_request", "arguments of %s: %w", req.Op, err)
		}
	}
	return f(args)
}

func (s *Server) info() initproto.Info {
	live, seq := s.procs.summary()
	return initproto.Info{
		Version: initproto.Version, Build: s.build, UptimeSecs: time.Since(s.began).Seconds(),
		Live: live, LastSeq: seq, Configured: s.ready.Load(), Switches: int(s.switches.Load()),
		Before: s.before.Load(),
	}
}

// bind notes whether c is at work in the present root, so that a switch ends it.
func (s *Server) bind(c *conn, atWork bool) {
	s.connMu.Lock()
	s.conns[c] = atWork
	s.connMu.Unlock()
}

// cutBound ends every connection at work in the root that is about to go.
func (s *Server) cutBound() {
	s.connMu.Lock()
	for c, bound := range s.conns {
		if bound {
			c.shut()
		}
	}
	s.connMu.Unlock()
}

func errNotConfigured() error {
	return sandbox.Errorf(sandbox.ErrConflict, "not_configured", "the sandbox has no configuration yet: configure it first")
}

// settingsNow returns the configuration; the caller holds s.cfgMu.
func (s *Server) settingsNow() (settings, error) {
	if !s.ready.Load() {
		return settings{}, errNotConfigured()
	}
	return s.cfg, nil
}
