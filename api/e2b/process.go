package e2b

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Messages of process.Process. Fields nobody needs are left out.
type (
	processConfig struct {
		Cmd  string            `json:"cmd"`
		Args []string          `json:"args,omitempty"`
		Envs map[string]string `json:"envs,omitempty"`
		Cwd  string            `json:"cwd,omitempty"`
	}
	ptySize struct {
		Cols number `json:"cols"`
		Rows number `json:"rows"`
	}
	pty struct {
		Size *ptySize `json:"size"`
	}
	selector struct {
		PID *number `json:"pid"`
		Tag *string `json:"tag"`
	}
	startRequest struct {
		Process processConfig `json:"process"`
		PTY     *pty          `json:"pty"`
		Tag     string        `json:"tag"`
		Stdin   *bool         `json:"stdin"` // nil is true, for clients from before it
	}
	connectRequest struct {
		Process selector `json:"process"`
		Replay  bool     `json:"replay"`
	}
	inputRequest struct {
		Process selector `json:"process"`
		Input   struct {
			Stdin *octets `json:"stdin"`
			PTY   *octets `json:"pty"`
		} `json:"input"`
	}
	signalRequest struct {
		Process selector   `json:"process"`
		Signal  signalName `json:"signal"`
	}
	updateRequest struct {
		Process selector `json:"process"`
		PTY     *pty     `json:"pty"`
	}
	selectRequest struct {
		Process selector `json:"process"`
	}
	emptyMessage struct{}

	processInfo struct {
		Config processConfig `json:"config"`
		PID    int           `json:"pid"`
		Tag    string        `json:"tag,omitempty"`
	}
	processList struct {
		Processes []processInfo `json:"processes"`
	}

	processEvent struct {
		Event eventBody `json:"event"`
	}
	eventBody struct {
		Start     *startEvent   `json:"start,omitempty"`
		End       *endEvent     `json:"end,omitempty"`
		Keepalive *emptyMessage `json:"keepalive,omitempty"`
	}
	startEvent struct {
		PID int `json:"pid"`
	}
	endEvent struct {
		ExitCode int    `json:"exitCode"`
		Exited   bool   `json:"exited"`
		Status   string `json:"status"`
		Error    string `json:"error,omitempty"`
	}
)

// signalName is a signal, by its name or its number.
type signalName string

// UnmarshalJSON knows the signals of the protocol.
func (s *signalName) UnmarshalJSON(b []byte) error {
	switch string(b) {
	case `"SIGNAL_SIGTERM"`, "15":
		*s = "SIGTERM"
	case `"SIGNAL_SIGKILL"`, "9":
		*s = "SIGKILL"
	}
	return nil // another is refused with the call
}

func (p *pty) window() (*sandbox.WindowSize, error) {
	if p == nil {
		return nil, nil
	}
	size := sandbox.WindowSize{Cols: 80, Rows: 24}
	if p.Size == nil {
		return &size, nil
	}
	const most = 1<<16 - 1
	if p.Size.Cols < 0 || p.Size.Cols > most || p.Size.Rows < 0 || p.Size.Rows > most {
		return nil, rpcErrorf(codeInvalidArgument, "a terminal of %d by %d: use 0 to %d each", p.Size.Cols, p.Size.Rows, most)
	}
	return &sandbox.WindowSize{Cols: uint16(p.Size.Cols), Rows: uint16(p.Size.Rows)}, nil
}

// start runs a command and streams what it says. A client that goes away
// leaves it running; the deadline of the call does not.
func (c *call) start(req startRequest, out *stream) error {
	after, limited, err := deadline(c.r)
	if err != nil {
		return err
	}
	spec := sandbox.ProcessSpec{
		Argv: append([]string{req.Process.Cmd}, req.Process.Args...), Env: req.Process.Envs, Tag: req.Tag,
		Stdin: req.Stdin == nil || *req.Stdin, TimeoutSeconds: after.Seconds(),
	}
	if spec.TTY, err = req.PTY.window(); err != nil {
		return err
	}
	p, err := asUser(c.user(), func(user string) (sandbox.ProcessIO, error) {
		spec := spec
		spec.User = user
		if spec.WorkDir, err = c.workDir(user, req.Process.Cwd); err != nil {
			return nil, err
		}
		return c.m.Exec(c.ctx(), c.ref, spec)
	})
	if err != nil {
		return err
	}
	f := c.follow(p, out)
	if limited {
		// PID 1 ends it too, with a grace and whether the client is there or not.
		id := p.Process().ID
		defer time.AfterFunc(after, func() {
			f.late.Store(true)
			ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx()), 10*time.Second)
			defer cancel()
			_ = c.m.SignalProcess(ctx, c.ref, id, "SIGKILL") // it may have ended
			f.close()
		}).Stop()
	}
	return f.run()
}

// workDir is where a command begins: where the client says, else where the
// template does, else at home.
func (c *call) workDir(user, cwd string) (string, error) {
	if cwd == "" {
		dir := c.box.Spec.WorkDir
		if image, err := c.m.Image(c.ctx(), c.box.Spec.Image); dir == "" && err == nil {
			dir = image.Config.WorkDir
		}
		if dir != "" && dir != "/" { // what a Dockerfile that says nothing comes to
			return dir, nil
		}
	}
	return c.absolute(user, cwd)
}

// connect streams what a running process says from now on.
func (c *call) connect(req connectRequest, out *stream) error {
	after, limited, err := deadline(c.r)
	if err != nil {
		return err
	}
	rec, err := c.find(req.Process)
	if err != nil {
		return err
	}
	from := rec.Output.End
	if req.Replay {
		from = -1
	}
	p, err := c.m.Attach(c.ctx(), c.ref, rec.ID, from)
	if err != nil {
		return err
	}
	f := c.follow(p, out)
	if limited {
		end := time.AfterFunc(after, func() { f.late.Store(true); f.close() })
		defer end.Stop()
	}
	return f.run()
}

// follower passes one process's output on.
type follower struct {
	c     *call
	p     sandbox.ProcessIO
	out   *stream
	close func()      // wakes Next
	late  atomic.Bool // the deadline is over
	lost  int64       // bytes of output nobody will see
}

func (c *call) follow(p sandbox.ProcessIO, out *stream) *follower {
	return &follower{c: c, p: p, out: out, close: sync.OnceFunc(func() { _ = p.Close() })}
}

func (f *follower) run() error {
	defer f.close()
	rec := f.p.Process()
	if err := f.out.send(processEvent{eventBody{Start: &startEvent{rec.PID}}}); err != nil {
		return nil // the client has gone: the process goes on
	}
	ctx, cancel := context.WithCancel(f.c.ctx())
	defer cancel()
	defer context.AfterFunc(ctx, f.close)()
	go f.out.keepAlive(ctx, keepaliveEvery(f.c.r), processEvent{eventBody{Keepalive: &emptyMessage{}}})
	for {
		o, err := f.p.Next()
		switch {
		case err == nil:
			f.lost += o.Dropped
			if err := f.output(rec.TTY, o); err != nil {
				return nil
			}
		case errors.Is(err, io.EOF):
			return f.end()
		case f.late.Load():
			return f.overdue()
		case f.c.ctx().Err() != nil:
			return nil
		default:
			f.c.log.Debug("a process's stream broke off", "sandbox", f.c.ref, "process", rec.ID, "err", err)
			if endedWith(err) {
				return err // which says why
			}
			return errAbort // PID 1 has gone
		}
	}
}

func (f *follower) overdue() error {
	return rpcErrorf(codeDeadlineExceeded, "the time given to the call is over")
}

// output sends one piece. It is put together by hand: this is what most of
// the bytes go through.
func (f *follower) output(tty bool, o sandbox.Output) error {
	name := "stdout"
	switch {
	case tty:
		name = "pty"
	case o.Stream == sandbox.Stderr:
		name = "stderr"
	}
	f.out.mu.Lock()
	defer f.out.mu.Unlock()
	return f.out.frame(0, func(p []byte) []byte {
		p = append(p, `{"event":{"data":{"`...)
		p = append(p, name...)
		p = append(p, `":"`...)
		p = base64.StdEncoding.AppendEncode(p, o.Data)
		return append(p, `"}}}`...)
	})
}

// end tells how the process ended.
func (f *follower) end() error {
	exit, ok := f.p.Exit()
	if !ok {
		return errAbort
	}
	if exit.TimedOut || f.late.Load() {
		return f.overdue()
	}
	if exit.Signal == "SIGKILL" && f.c.gone() {
		return errAbort // killed with its sandbox
	}
	e := endOf(exit)
	if f.lost > 0 {
		e.Error = joinWords(e.Error, fmt.Sprintf("%d bytes of output were lost: they were not read in time", f.lost))
	}
	if err := f.out.send(processEvent{eventBody{End: &e}}); err != nil {
		return nil
	}
	return nil
}

func joinWords(a, b string) string {
	if a == "" {
		return b
	}
	return a + "; " + b
}

// endOf words an exit as clients know it: a code of -1 where a signal ended
// the process.
func endOf(exit sandbox.ExitStatus) endEvent {
	if exit.Signal == "" {
		e := endEvent{ExitCode: exit.Code, Exited: true, Status: fmt.Sprintf("exit status %d", exit.Code)}
		if exit.Code != 0 {
			e.Error = e.Status
		}
		return e
	}
	text := "signal: " + signalWord(exit.Signal)
	if exit.OOM {
		text += " (out of memory)"
	}
	return endEvent{ExitCode: -1, Status: text, Error: text}
}

// signalWord is how Unix shells call a signal.
func signalWord(name string) string {
	words := map[string]string{
		"SIGKILL": "killed", "SIGTERM": "terminated", "SIGINT": "interrupt", "SIGHUP": "hangup", "SIGQUIT": "quit",
		"SIGSEGV": "segmentation fault", "SIGABRT": "aborted", "SIGPIPE": "broken pipe", "SIGILL": "illegal instruction",
		"SIGFPE": "floating point exception", "SIGBUS": "bus error", "SIGALRM": "alarm clock", "SIGTRAP": "trace/breakpoint trap",
		"SIGUSR1": "user defined signal 1", "SIGUSR2": "user defined signal 2", "SIGSYS": "bad system call",
		"SIGXCPU": "CPU time limit exceeded", "SIGXFSZ": "file size limit exceeded",
	}
	if w, ok := words[name]; ok {
		return w
	}
	return name
}

// running lists the processes that have not ended.
func (c *call) running() ([]sandbox.Process, error) {
	all, err := c.m.Processes(c.ctx(), c.ref)
	if err != nil {
		return nil, err
	}
	live := all[:0]
	for _, p := range all {
		if p.Exit == nil && len(p.Argv) > 0 {
			live = append(live, p)
		}
	}
	return live, nil
}

// find returns the running process a selector names: by its number inside, or
// by its tag the newest that has it.
func (c *call) find(s selector) (sandbox.Process, error) {
	live, err := c.running()
	if err != nil {
		return sandbox.Process{}, err
	}
	for _, p := range slices.Backward(live) {
		if s.PID != nil && int64(p.PID) == int64(*s.PID) || s.PID == nil && s.Tag != nil && *s.Tag != "" && p.Tag == *s.Tag {
			return p, nil
		}
	}
	switch {
	case s.PID != nil:
		return sandbox.Process{}, rpcErrorf(codeNotFound, "process with pid %d not found", *s.PID)
	case s.Tag != nil:
		return sandbox.Process{}, rpcErrorf(codeNotFound, "process with tag %.63q not found", *s.Tag)
	}
	return sandbox.Process{}, rpcErrorf(codeInvalidArgument, "the request names no process: give a pid or a tag")
}

func (c *call) listProcesses(emptyMessage) (any, error) {
	live, err := c.running()
	if err != nil {
		return nil, err
	}
	list := processList{Processes: []processInfo{}}
	for _, p := range live {
		list.Processes = append(list.Processes, processInfo{Config: processConfig{Cmd: p.Argv[0], Args: p.Argv[1:]}, PID: p.PID, Tag: p.Tag})
	}
	return list, nil
}

func (c *call) sendInput(req inputRequest) (any, error) {
	rec, err := c.find(req.Process)
	if err != nil {
		return nil, err
	}
	data := req.Input.Stdin
	switch {
	case data == nil && req.Input.PTY == nil:
		return nil, rpcErrorf(codeInvalidArgument, "the request brings no input")
	case rec.TTY && data != nil:
		return nil, rpcErrorf(codeFailedPrecondition, "process %d runs on a terminal: send the input as pty", rec.PID)
	case !rec.TTY && data == nil:
		return nil, rpcErrorf(codeFailedPrecondition, "process %d runs without a terminal: send the input as stdin", rec.PID)
	case data == nil:
		data = req.Input.PTY
	}
	return emptyMessage{}, c.feed(rec, *data, false)
}

func (c *call) closeStdin(req selectRequest) (any, error) {
	rec, err := c.find(req.Process)
	if err != nil {
		return nil, err
	}
	if rec.TTY {
		return nil, rpcErrorf(codeFailedPrecondition, "process %d runs on a terminal: send it the character 4 in place of an end", rec.PID)
	}
	return emptyMessage{}, c.feed(rec, nil, true)
}

// feed gives a process input. It returns once the process's pipe has taken
// all, so that inputs sent one after the other arrive in that order.
func (c *call) feed(rec sandbox.Process, data []byte, end bool) error {
	p, err := c.m.Attach(c.ctx(), c.ref, rec.ID, rec.Output.End)
	if err != nil {
		return err
	}
	defer p.Close()
	if f, ok := p.(sandbox.Feeder); ok {
		return f.Feed(c.ctx(), data, end)
	}
	if _, err := p.WriteStdin(data); err != nil || !end {
		return err
	}
	return p.CloseStdin()
}

func (c *call) sendSignal(req signalRequest) (any, error) {
	if req.Signal == "" {
		return nil, rpcErrorf(codeUnimplemented, "the signals are SIGNAL_SIGTERM and SIGNAL_SIGKILL")
	}
	rec, err := c.find(req.Process)
	if err != nil {
		return nil, err
	}
	return emptyMessage{}, c.m.SignalProcess(c.ctx(), c.ref, rec.ID, string(req.Signal))
}

func (c *call) update(req updateRequest) (any, error) {
	rec, err := c.find(req.Process)
	if err != nil {
		return nil, err
	}
	size, err := req.PTY.window()
	if err != nil || size == nil {
		return emptyMessage{}, err
	}
	p, err := c.m.Attach(c.ctx(), c.ref, rec.ID, rec.Output.End)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	return emptyMessage{}, p.Resize(*size)
}
