package servertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// process is one running command. Its output is kept whole up to keep bytes
// from the end, in pieces as written.
type process struct {
	mu       sync.Mutex
	wake     sync.Cond
	key      string // the idempotency key that started it
	rec      sandbox.Process
	pieces   []piece
	keep     int64
	stdin    bytes.Buffer
	sessions map[int64]int64 // bytes of standard input of each
	eof      bool
	killed   string
	cut      error // why the sandbox killed it, see Memory.endProcesses
	size     sandbox.WindowSize
	done     chan struct{}
	onEnd    func()
}

type piece struct {
	stream sandbox.Stream
	offset int64
	data   []byte
}

// errKilled ends a command that was signalled.
var errKilled = errors.New("killed")

func (p *process) write(stream sandbox.Stream, data []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.killed != "" {
		return errKilled
	}
	p.pieces = append(p.pieces, piece{stream, p.rec.Output.End, data})
	p.rec.Output.End += int64(len(data))
	for len(p.pieces) > 1 && p.rec.Output.End-p.pieces[1].offset >= p.keep {
		p.pieces = p.pieces[1:]
	}
	p.rec.Output.Start = p.pieces[0].offset
	p.wake.Broadcast()
	return nil
}

// Read reads standard input.
func (p *process) Read(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.stdin.Len() == 0 && !p.eof && p.killed == "" {
		p.wake.Wait()
	}
	if p.killed != "" {
		return 0, errKilled
	}
	if p.stdin.Len() == 0 {
		return 0, io.EOF
	}
	defer p.wake.Broadcast()
	return p.stdin.Read(b)
}

func (p *process) signal(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.rec.Exit == nil && p.killed == "" && name != "SIGCONT" { // which ends none
		p.killed = name
		p.wake.Broadcast()
	}
}

func (p *process) tail() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []byte
	for _, x := range p.pieces {
		all = append(all, x.data...)
	}
	return all[max(0, len(all)-4096):]
}

func (p *process) finish(code int, err error) {
	p.mu.Lock()
	exit := &sandbox.ExitStatus{Code: code, At: time.Now()}
	if errors.Is(err, errKilled) {
		numbers := map[string]int{"SIGINT": 2, "SIGKILL": 9, "SIGTERM": 15, "SIGHUP": 1}
		exit.Signal, exit.Code = p.killed, 128+numbers[p.killed]
	}
	p.rec.Exit = exit
	p.mu.Unlock()
	p.onEnd()
	p.mu.Lock()
	p.wake.Broadcast()
	p.mu.Unlock()
	close(p.done)
}

// Run is what the commands do:
//
//	echo WORDS…   err WORDS…   to stdout, to stderr
//	cat                        stdin to stdout
//	exit N                     ends with N
//	yes BYTES                  that many bytes, in pieces of 64 KiB
//	ticks N                    N numbered lines, one each 10 ms
//	size                       waits for a resize and prints it
//	sleep                      until signalled, reading nothing
//	sh -c WORDS                the same, and so for bash, python3 and node -e
func (p *process) run() (int, error) {
	argv := words(p.rec.Argv)
	number := func() int {
		n, err := strconv.Atoi(argv[len(argv)-1])
		if err != nil {
			panic(err)
		}
		return n
	}
	switch argv[0] {
	case "echo":
		return 0, p.write(sandbox.Stdout, []byte(strings.Join(argv[1:], " ")+"\n"))
	case "err":
		return 0, p.write(sandbox.Stderr, []byte(strings.Join(argv[1:], " ")+"\n"))
	case "cat":
		for {
			buf := make([]byte, 32<<10)
			n, err := p.Read(buf)
			if errors.Is(err, io.EOF) {
				return 0, nil
			}
			if err != nil {
				return 1, err
			}
			if err := p.write(sandbox.Stdout, buf[:n]); err != nil {
				return 1, err
			}
		}
	case "exit":
		return number(), nil
	case "yes":
		block := bytes.Repeat([]byte("y\n"), 32<<10)
		for left := number(); left > 0; left -= len(block) {
			if err := p.write(sandbox.Stdout, block[:min(left, len(block))]); err != nil {
				return 1, err
			}
		}
		return 0, nil
	case "ticks":
		for i := range number() {
			if err := p.write(sandbox.Stdout, fmt.Appendf(nil, "%d\n", i)); err != nil {
				return 1, err
			}
			time.Sleep(10 * time.Millisecond) //nolint:forbidigo // what the command does
		}
		return 0, nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.killed == "" && (argv[0] != "size" || p.size == (sandbox.WindowSize{})) {
		p.wake.Wait()
	}
	if p.killed != "" {
		return 1, errKilled
	}
	size := p.size
	p.mu.Unlock()
	defer p.mu.Lock()
	return 0, p.write(sandbox.Stdout, fmt.Appendf(nil, "%d %d\n", size.Rows, size.Cols))
}

// words returns the command that an interpreter is given, or the command.
func words(argv []string) []string {
	if len(argv) == 3 {
		switch argv[0] + " " + argv[1] {
		case "sh -c", "bash -c", "python3 -c", "node -e":
			return append(strings.Fields(argv[2]), "")[:max(1, len(strings.Fields(argv[2])))]
		}
	}
	return argv
}

func (m *Memory) start(method, ref string, spec sandbox.ProcessSpec) (*process, error) {
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	b, err := m.running(method, ref)
	if err != nil {
		return nil, err
	}
	if spec.ImageCommand {
		img, err := m.Image(context.Background(), b.sb.Spec.Image)
		if err != nil {
			return nil, err
		}
		if spec.Argv, err = img.Config.Argv(spec.Argv); err != nil {
			return nil, err
		}
	}
	switch words(spec.Argv)[0] {
	case "echo", "err", "cat", "exit", "yes", "ticks", "size", "sleep":
	default:
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "command_not_found", "no command %q in the sandbox", spec.Argv[0])
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range b.procs {
		if spec.IdempotencyKey == "" || p.key != spec.IdempotencyKey {
			continue
		}
		if !slices.Equal(p.rec.Argv, spec.Argv) {
			return nil, sandbox.Errorf(sandbox.ErrConflict, "idempotency_mismatch", "the idempotency key belongs to process %s, another command", p.rec.ID)
		}
		return p, nil
	}
	p := &process{key: spec.IdempotencyKey, done: make(chan struct{}), keep: int64(spec.OutputBytes), eof: !spec.Stdin && spec.TTY == nil}
	if p.keep == 0 {
		p.keep = sandbox.DefaultOutput
	}
	p.wake.L = &p.mu
	p.rec = sandbox.Process{
		ID: sandbox.ProcessID(fmt.Sprintf("p%d", len(b.procs)+1)), PID: len(b.procs) + 2, Argv: spec.Argv,
		User: spec.User, Tag: spec.Tag, TTY: spec.TTY != nil, Main: spec.Main, StartedAt: time.Now(),
	}
	b.procs = append(b.procs, p)
	m.note(b.sb.ID, "process.started", "")
	p.onEnd = func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.note(b.sb.ID, "process.exited", "")
		if spec.Main && !b.sb.Status.Terminal() {
			code := p.rec.Exit.Code
			b.sb.ExitCode = &code
			m.end(b, sandbox.ReasonExited, "daemon")
		}
	}
	go func() { p.finish(p.run()) }()
	return p, nil
}

// StartProcess implements server.Manager.
func (m *Memory) StartProcess(_ context.Context, ref string, spec sandbox.ProcessSpec) (sandbox.Process, error) {
	p, err := m.start("StartProcess", ref, spec)
	if err != nil {
		return sandbox.Process{}, err
	}
	return p.record(), nil
}

// Exec implements server.Manager.
func (m *Memory) Exec(_ context.Context, ref string, spec sandbox.ProcessSpec) (sandbox.ProcessIO, error) {
	p, err := m.start("Exec", ref, spec)
	if err != nil {
		return nil, err
	}
	return &conn{p: p, rec: p.record()}, nil
}

// Run implements server.Manager.
func (m *Memory) Run(ctx context.Context, req sandbox.CreateRequest, spec sandbox.ProcessSpec) (sandbox.Sandbox, sandbox.ProcessIO, error) {
	if err := spec.Validate(); err != nil {
		return sandbox.Sandbox{}, nil, err
	}
	sb, existed, err := m.create(req)
	switch {
	case err != nil:
		return sb, nil, err
	case existed:
		return sb, nil, sandbox.Errorf(sandbox.ErrConflict, "already_run", "the idempotency key made sandbox %s before: nothing is run again", sb.ID)
	}
	spec.IdempotencyKey = req.IdempotencyKey
	var p sandbox.ProcessIO
	if err = ctx.Err(); err == nil {
		p, err = m.Exec(ctx, string(sb.ID), spec)
	}
	if err != nil {
		_, rerr := m.Remove(ctx, string(sb.ID), req.Actor)
		return sb, nil, errors.Join(err, rerr)
	}
	return sb, p, nil
}

func (m *Memory) process(method, ref string, id sandbox.ProcessID) (*process, error) {
	if err := m.fail(method); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	b, err := m.find(ref)
	if err != nil {
		return nil, err
	}
	for _, p := range b.procs {
		if p.rec.ID == id {
			return p, nil
		}
	}
	return nil, sandbox.Errorf(sandbox.ErrNotFound, "process_not_found", "no process %s in sandbox %s", id, ref)
}

// Attach implements server.Manager.
func (m *Memory) Attach(_ context.Context, ref string, id sandbox.ProcessID, offset int64) (sandbox.ProcessIO, error) {
	p, err := m.process("Attach", ref, id)
	if err != nil {
		return nil, err
	}
	rec := p.record()
	if offset < 0 {
		offset = rec.Output.Start
	}
	return &conn{p: p, rec: rec, offset: offset}, nil
}

// Processes implements server.Manager.
func (m *Memory) Processes(_ context.Context, ref string) ([]sandbox.Process, error) {
	if err := m.fail("Processes"); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	b, err := m.find(ref)
	if err != nil {
		return nil, err
	}
	var out []sandbox.Process
	for _, p := range b.procs {
		out = append(out, p.record())
	}
	return out, nil
}

// Process implements server.Manager.
func (m *Memory) Process(_ context.Context, ref string, id sandbox.ProcessID) (sandbox.Process, error) {
	p, err := m.process("Process", ref, id)
	if err != nil {
		return sandbox.Process{}, err
	}
	return p.record(), nil
}

// SignalProcess implements server.Manager.
func (m *Memory) SignalProcess(_ context.Context, ref string, id sandbox.ProcessID, signal string) error {
	p, err := m.process("SignalProcess", ref, id)
	if err != nil {
		return err
	}
	if !strings.HasPrefix(signal, "SIG") {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_signal", "signal %.20q: use a name as SIGTERM", signal)
	}
	p.signal(signal)
	return nil
}

// KeptOutput implements server.Manager.
func (m *Memory) KeptOutput(_ context.Context, ref string, id sandbox.ProcessID) ([]byte, error) {
	m.mu.Lock()
	b, err := m.find(ref)
	m.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if id == "" {
		return b.sb.LastOutput, nil
	}
	p, err := m.process("KeptOutput", ref, id)
	if err != nil {
		return nil, err
	}
	return p.tail(), nil
}

func (p *process) record() sandbox.Process {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.rec
}

// conn is one reader.
type conn struct {
	p      *process
	rec    sandbox.Process
	offset int64
	exit   *sandbox.ExitStatus
	closed bool // p.mu

	session int64 // p.mu
	taken   func(total int64, closed bool)
	told    int64 // of the session, -1 before anything was
}

// OpenStdin implements sandbox.StdinSession.
func (c *conn) OpenStdin(id int64, taken func(total int64, closed bool)) error {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	c.session, c.taken, c.told = id, taken, -1
	c.p.wake.Broadcast()
	return nil
}

// news tells what was taken since it last did; p.mu is held.
func (c *conn) news() {
	n := c.p.sessions[c.session]
	if c.session == 0 || n == c.told {
		return
	}
	c.told = n
	closed := c.p.eof || c.p.rec.Exit != nil
	c.p.mu.Unlock()
	c.taken(n, closed)
	c.p.mu.Lock()
}

func (c *conn) Process() sandbox.Process { return c.rec }

func (c *conn) Next() (sandbox.Output, error) {
	p := c.p
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		c.news()
		if c.closed {
			return sandbox.Output{}, sandbox.Errorf(sandbox.ErrUnavailable, "closed", "the connection is closed")
		}
		for _, x := range p.pieces {
			if end := x.offset + int64(len(x.data)); end > c.offset {
				out := sandbox.Output{Stream: x.stream, Offset: max(c.offset, x.offset), Dropped: max(0, x.offset-c.offset)}
				out.Data = x.data[out.Offset-x.offset:]
				c.offset = end
				return out, nil
			}
		}
		select {
		case <-p.done:
			if p.cut != nil {
				return sandbox.Output{}, p.cut
			}
			c.exit = p.rec.Exit
			return sandbox.Output{}, io.EOF
		default:
		}
		if p.rec.Exit != nil { // about to be done
			p.mu.Unlock()
			<-p.done
			p.mu.Lock()
			continue
		}
		p.wake.Wait()
	}
}

func (c *conn) Exit() (sandbox.ExitStatus, bool) {
	if c.exit == nil {
		return sandbox.ExitStatus{}, false
	}
	return *c.exit, true
}

func (c *conn) WriteStdin(b []byte) (int, error) {
	p := c.p
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.stdin.Len() > 64<<10 && p.rec.Exit == nil && !c.closed {
		p.wake.Wait() // a full pipe
	}
	if p.rec.Exit != nil || p.eof || c.closed {
		return 0, sandbox.Errorf(sandbox.ErrConflict, "stdin_closed", "standard input is closed")
	}
	p.stdin.Write(b)
	p.rec.StdinBytes += int64(len(b))
	if p.sessions == nil {
		p.sessions = map[int64]int64{}
	}
	p.sessions[c.session] += int64(len(b))
	p.wake.Broadcast()
	return len(b), nil
}

func (c *conn) CloseStdin() error {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	c.p.eof = true
	c.p.wake.Broadcast()
	return nil
}

func (c *conn) Resize(s sandbox.WindowSize) error {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	c.p.size = s
	c.p.wake.Broadcast()
	return nil
}

func (c *conn) Signal(name string) error { c.p.signal(name); return nil }

func (c *conn) Close() error {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	c.closed = true
	c.p.wake.Broadcast()
	return nil
}
