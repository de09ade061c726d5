package guest

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Bounds on what a hostile PID 1 may make the daemon hold.
const (
	maxProcesses = 1 << 13 // it keeps 4096 ended ones at most, and has cgroups for as many
	maxEntries   = 100_000
)

// Info is what PID 1 says about itself.
type Info = initproto.Info

// Timings says where the time of a Configure went inside PID 1, and which
// processes it divided.
type Timings = initproto.Configured

// Ping asks PID 1 whether it lives. Errors: ErrUnavailable with code
// sandbox_unreachable, ErrUnsupported with code protocol_version.
func (g *Guest) Ping(ctx context.Context) (Info, error) {
	var info Info
	if err := g.do(ctx, initproto.OpPing, nil, &info); err != nil {
		return Info{}, err
	}
	return info, initproto.CheckVersion("sandbox's init", info.Version)
}

// Config is a whole configuration of a sandbox.
type Config struct {
	Hostname     string
	Address      string // for /etc/hosts
	Env          map[string]string
	WorkDir      string
	User         string
	Capabilities sandbox.Capabilities // empty means root
	OpenFiles    uint64               // 0 leaves the limit as it is
	Seccomp      []byte               // from seccomp.Compile; may be empty after the first time
	Hosts        string               // /etc/hosts; empty means made of Hostname and Address
	ResolvConf   string               // /etc/resolv.conf; empty leaves the image's
	Furnished    bool                 // the root's /etc says all that already: nothing is written
	KeepEnded    int                  // ended processes kept; 0 means 64
	LastProcess  int64                // process numbers go on after it
	Keys         []byte               // what CloseKeys said of the PID 1 before this one

	// Work has workloads go to the cgroup initproto.WorkCgroup beneath the root
	// of PID 1's cgroup namespace, which must exist; once said, it holds.
	Work bool
	// Root is a new root to switch to; nil keeps the present one.
	Root *RootMount
	// IfIdle takes the root only if no process runs and no file work is under
	// way; else it is class ErrConflict with code root_busy and nothing
	// changed. What earlier processes left outside their files stays.
	IfIdle bool
	// Entries lets programs find sbx, which enters costs and revenue.
	Entries bool
	// Timings, if not nil, is filled in.
	Timings *Timings
}

// RootMount is a root and what is mounted beneath it: detached mounts, as
// fsmount(2) or open_tree(2) return them. The caller keeps and closes its
// descriptors.
type RootMount struct {
	Root  *os.File
	Extra []ExtraMount
}

// ExtraMount is one more mount at an absolute path beneath the root.
type ExtraMount struct {
	File *os.File
	Path string
}

// PrepareConfig is what Prepare needs.
type PrepareConfig struct {
	Capabilities sandbox.Capabilities // empty means root
	Seccomp      []byte               // from seccomp.Compile
	Work         bool                 // as in Config
}

// Prepare does for a PID 1 that has no configuration yet what needs no root:
// most of the time a Configure takes. That may then leave out Seccomp and
// Work. If it names other capabilities or another program, or if PID 1 was
// never prepared, it takes longer, with the same result. The connection is
// kept until the next operation. Preparing one that is configured does
// nothing, repeating it is safe.
func (g *Guest) Prepare(ctx context.Context, cfg PrepareConfig) error {
	a := initproto.Prepare{Capabilities: cfg.Capabilities, Seccomp: cfg.Seccomp, Work: cfg.Work}
	if a.Capabilities == "" {
		a.Capabilities = sandbox.CapabilitiesRoot
	}
	if err := g.do(ctx, initproto.OpPrepare, a, nil); err != nil {
		return err
	}
	g.spare.hold()
	return nil
}

// Configure replaces PID 1's configuration. With a Root it first kills every
// process, cuts all file work, and switches; when it returns nil nothing of
// the old root is in use any more. Repeating it is safe.
func (g *Guest) Configure(ctx context.Context, cfg Config) error {
	a := initproto.Configure{
		Hostname: cfg.Hostname, Address: cfg.Address, Env: cfg.Env, WorkDir: cfg.WorkDir, User: cfg.User,
		Capabilities: cfg.Capabilities, OpenFiles: cfg.OpenFiles, Seccomp: cfg.Seccomp, Hosts: cfg.Hosts,
		ResolvConf: cfg.ResolvConf, Furnished: cfg.Furnished, KeepEnded: cfg.KeepEnded, LastProcess: cfg.LastProcess, Work: cfg.Work, Root: cfg.Root != nil,
		IfIdle: cfg.IfIdle, Entries: cfg.Entries, Keys: cfg.Keys,
	}
	if a.Capabilities == "" {
		a.Capabilities = sandbox.CapabilitiesRoot
	}
	var files []*os.File
	if cfg.Root != nil {
		files = append(files, cfg.Root.Root)
		for _, e := range cfg.Root.Extra {
			files = append(files, e.File)
			a.Extra = append(a.Extra, e.Path)
		}
	}
	var done Timings
	if err := g.do(ctx, initproto.OpConfigure, a, &done, files...); err != nil {
		return err
	}
	if cfg.Timings != nil {
		*cfg.Timings = done
	}
	return nil
}

// Start runs a command and returns at once. Errors: ErrInvalid with code
// command_not_found, command_not_executable, unknown_user or
// workdir_not_found; ErrExhausted; ErrUnavailable.
func (g *Guest) Start(ctx context.Context, spec sandbox.ProcessSpec) (sandbox.Process, error) {
	if err := spec.Validate(); err != nil {
		return sandbox.Process{}, err
	}
	var p sandbox.Process
	if err := g.do(ctx, initproto.OpExec, initproto.Exec{Spec: spec, Key: keyOf(spec)}, &p); err != nil {
		return p, err
	}
	return p, checkProcess(p)
}

// keyOf is a command's idempotency key as PID 1 knows it: a hash of the key, and
// one of what must be the same when it is repeated.
func keyOf(spec sandbox.ProcessSpec) []byte {
	if spec.IdempotencyKey == "" {
		return nil
	}
	id := sha256.Sum256([]byte(spec.IdempotencyKey))
	what := fmt.Sprintf("%q %q %q %q", spec.Argv, spec.User, spec.WorkDir, spec.Env) // maps are printed in order
	request := sha256.Sum256([]byte(what))
	return append(id[:initproto.KeyIDSize:initproto.KeyIDSize], request[:initproto.KeyHashSize]...)
}

// CloseKeys has PID 1 start no command with a new idempotency key any more, and
// returns those it knows, for the Config of the next one.
func (g *Guest) CloseKeys(ctx context.Context) ([]byte, error) {
	var all initproto.Keys
	if err := g.do(ctx, initproto.OpCloseKeys, nil, &all); err != nil {
		return nil, err
	}
	if len(all.Keys)%initproto.KeyEntrySize != 0 || len(all.Keys) > initproto.MaxKeys*initproto.KeyEntrySize {
		return nil, broken(fmt.Errorf("%w: idempotency keys of %d bytes", initproto.ErrFrame, len(all.Keys)))
	}
	return all.Keys, nil
}

// Processes lists what runs and what is still kept of what ended, oldest first.
func (g *Guest) Processes(ctx context.Context) ([]sandbox.Process, error) {
	c, err := g.call(ctx, initproto.OpProcesses, nil, nil)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return gather(ctx, func(f func(sandbox.Process, int) error) error {
		return each(c, g.patience(initproto.OpProcesses), maxProcesses, func(p sandbox.Process, size int) error {
			if err := checkProcess(p); err != nil {
				return err
			}
			return f(p, size)
		})
	})
}

// Process returns one record; ErrNotFound where there is none.
func (g *Guest) Process(ctx context.Context, id sandbox.ProcessID) (sandbox.Process, error) {
	return g.target(ctx, initproto.OpProcess, initproto.Target{ID: id})
}

// Signal signals a process's whole tree. ErrConflict: nothing of it is left.
func (g *Guest) Signal(ctx context.Context, id sandbox.ProcessID, name string) error {
	_, err := g.target(ctx, initproto.OpSignal, initproto.Target{ID: id, Signal: name})
	return err
}

// Forget kills what is left of a process and drops its record and output.
// One already gone is no error.
func (g *Guest) Forget(ctx context.Context, id sandbox.ProcessID) error {
	_, err := g.target(ctx, initproto.OpForget, initproto.Target{ID: id})
	if errors.Is(sandbox.ClassOf(err), sandbox.ErrNotFound) {
		return nil
	}
	return err
}

func (g *Guest) target(ctx context.Context, op string, t initproto.Target) (sandbox.Process, error) {
	var p sandbox.Process
	if err := g.do(ctx, op, t, &p); err != nil {
		return p, err
	}
	return p, checkProcess(p)
}

// checkProcess refuses a record no honest PID 1 would send. Callers print
// and store what is in it.
func checkProcess(p sandbox.Process) error {
	digits, ok := strings.CutPrefix(string(p.ID), "p")
	number, err := strconv.ParseInt(digits, 10, 64)
	if !ok || err != nil || number < 1 || len(p.Argv) == 0 {
		return broken(fmt.Errorf("%w: process %.40q with %d arguments", initproto.ErrFrame, p.ID, len(p.Argv)))
	}
	if p.Exit != nil {
		return checkExit(*p.Exit)
	}
	return nil
}

func checkExit(e sandbox.ExitStatus) error {
	// Real-time signals have no name.
	if e.Signal != "" && unix.SignalNum(e.Signal) == 0 {
		return broken(fmt.Errorf("%w: ended by signal %.40q", initproto.ErrFrame, e.Signal))
	}
	return nil
}

// Event is one change in PID 1's process table.
type Event struct {
	Seq  int64
	Type string // started, exited, lost or asked
	// Live is the number of processes that had not ended right after it.
	Live    int
	Process sandbox.Process // as it was then; empty for lost and asked
	Ask     initproto.Ask   // of asked
}

// EventStream is a running stream of events. It holds a connection.
type EventStream struct {
	c    *conn
	info Info
}

// Events follows the process table from the first event after a sequence
// number. Where PID 1 no longer keeps what follows it, the first event is
// one of type lost: list the processes then. Cancelling ctx ends the stream.
func (g *Guest) Events(ctx context.Context, after int64) (*EventStream, error) {
	var info Info
	c, err := g.open(ctx, initproto.OpEvents, initproto.EventsAfter{After: after}, &info)
	if err != nil {
		return nil, err
	}
	return &EventStream{c: c, info: info}, nil
}

// Info tells PID 1's state when the stream began.
func (s *EventStream) Info() Info { return s.info }

// Next waits for the next event. An error ends the stream; ErrUnavailable
// means PID 1 has gone.
func (s *EventStream) Next() (Event, error) {
	fr, err := s.c.next(nil)
	if err != nil {
		return Event{}, err
	}
	if fr.Type != initproto.FrameItem {
		return Event{}, unexpected(fr.Type)
	}
	var e initproto.Event
	if err := decode(fr.Payload, &e); err != nil {
		return Event{}, err
	}
	out := Event{Seq: e.Seq, Type: e.Type, Live: max(e.Live, 0)}
	if e.Process != nil {
		out.Process = *e.Process
		return out, checkProcess(out.Process)
	}
	if e.Ask != nil {
		out.Ask = *e.Ask
		if len(out.Ask.Line) > initproto.MaxAsk || len(out.Ask.Key) > 64 {
			return out, broken(fmt.Errorf("%w: a question of %d bytes", initproto.ErrFrame, len(out.Ask.Line)))
		}
	}
	return out, nil
}

// Answer hands a line to the program inside that asked. ErrNotFound where it
// does not wait any more.
func (g *Guest) Answer(ctx context.Context, id int64, line string) error {
	return g.do(ctx, initproto.OpAnswer, initproto.Answer{ID: id, Line: line}, nil)
}

// Close ends the stream; repeating it is safe.
func (s *EventStream) Close() error { return s.c.Close() }

const shortOp = 10 * time.Second // bound of a side call made without a caller's context
