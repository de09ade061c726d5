package client

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"net/url"
	"strconv"
	"time"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// signalTimeout bounds a signal sent on a stream, which has no context.
const signalTimeout = 10 * time.Second

// starter is the session of the standard input of whoever starts a process.
const starter = 1

// stream is a ProcessIO over one connection, which is made again, from the
// offset after the last byte seen, when it breaks. Only the goroutine in Next
// reads and reconnects; stdin has its own state (stdin.go).
type stream struct {
	c      *Client
	ref    string
	ctx    context.Context // of the whole stream, ended by Close
	cancel context.CancelFunc

	session int64 // of our standard input

	process sandbox.Process
	conn    wire
	in      stdin

	// Of the goroutine in Next.
	offset  int64 // after the last byte returned; negative before the first
	dropped int64 // told, and not yet returned
	buf     []byte
	exit    *sandbox.ExitStatus
	end     error // what Next returns from now on
}

var _ sandbox.ProcessIO = (*stream)(nil)

// Exec starts a command and connects to it. The stream lives as long as ctx.
// When the connection breaks it attaches again and goes on where it was; an
// error from Next of class ErrUnavailable means that it gave up, and the
// command may still run. Standard input is sent only as fast as the command
// takes it, which is learned in Next: somebody must call it meanwhile. With the
// spec's idempotency key a repeated call connects to what the first started.
func (c *Client) Exec(ctx context.Context, ref string, spec sandbox.ProcessSpec) (sandbox.ProcessIO, error) {
	_, p, err := c.begin(ctx, spec.IdempotencyKey, interactive(spec), ref, api.ExecRequest{ProcessSpec: spec}, nil)
	return p, err
}

// ExecInput is Exec of a command whose standard input is known beforehand: at
// most api.MaxInput bytes, and then its end. It is one request, on a
// connection that is used again.
func (c *Client) ExecInput(ctx context.Context, ref string, spec sandbox.ProcessSpec, input []byte) (sandbox.ProcessIO, error) {
	_, p, err := c.begin(ctx, spec.IdempotencyKey, false, ref, api.ExecRequest{ProcessSpec: spec, Input: input}, nil)
	return p, err
}

// Run makes a sandbox and starts a command in it, in one request; the stream
// is as Exec's. A command that cannot start leaves no sandbox. With an
// idempotency key a repeated call runs nothing and is ErrConflict: Create with
// the same key and spec returns the sandbox of the first, and Exec there with
// the key and the same command connects to what was run.
func (c *Client) Run(ctx context.Context, req api.RunRequest, idempotencyKey string) (sandbox.Sandbox, sandbox.ProcessIO, error) {
	sb, p, err := c.begin(ctx, idempotencyKey, interactive(req.Process.ProcessSpec), "", req.Process, &req)
	if err == nil && sb == nil {
		_ = p.Close() // nobody knows it
		err = sandbox.Errorf(sandbox.ErrUnavailable, "broken_answer", "the daemon does not tell which sandbox it made: 'sandbox ls' lists them")
	}
	if err != nil {
		return sandbox.Sandbox{}, nil, err
	}
	return *sb, p, nil
}

// begin starts a command in a sandbox, or in the one that run makes; talk says
// that there is more to say to it.
func (c *Client) begin(ctx context.Context, key string, talk bool, ref string, req api.ExecRequest, run *api.RunRequest) (sb *sandbox.Sandbox, p sandbox.ProcessIO, err error) {
	err = c.persist(ctx, key != "", func() error {
		sb, p, err = c.beginOnce(ctx, key, talk, ref, req, run)
		if c.insist > 0 && run != nil && sandbox.CodeOf(err) == "already_run" {
			sb, p, err = c.rejoin(ctx, key, talk, *run)
		}
		return err
	})
	return sb, p, err
}

// rejoin connects to what an earlier Run began, or does the rest of it.
func (c *Client) rejoin(ctx context.Context, key string, talk bool, run api.RunRequest) (*sandbox.Sandbox, sandbox.ProcessIO, error) {
	sb, err := c.Create(ctx, run.Sandbox, key)
	if err != nil {
		return nil, nil, err
	}
	_, p, err := c.beginOnce(ctx, key, talk, string(sb.ID), run.Process, nil)
	if err != nil && !errors.Is(err, sandbox.ErrConflict) && !errors.Is(err, sandbox.ErrUnavailable) { // it cannot start
		_, rerr := c.Remove(ctx, string(sb.ID))
		err = errors.Join(err, rerr)
	}
	return &sb, p, err
}

func (c *Client) beginOnce(ctx context.Context, key string, talk bool, ref string, req api.ExecRequest, run *api.RunRequest) (*sandbox.Sandbox, sandbox.ProcessIO, error) {
	s := c.newStream(ctx, ref, 0)
	where, whole, first := at(ref, "exec"), any(req), any(req.ProcessSpec)
	if run != nil {
		where, whole, first = path("run"), *run, *run
	}
	var conn wire
	var ws *websocket.Conn
	var started api.Message
	var err error
	if talk {
		var w *socket
		if w, started, err = c.dial(s.ctx, where, nil, keyed(key), first); err == nil {
			conn, ws = w, w.ws
		}
	} else {
		conn, started, err = c.stream(s.ctx, where, keyed(key), whole)
	}
	if err != nil {
		return nil, nil, s.fail(err)
	}
	if started.Sandbox != nil {
		s.ref = string(started.Sandbox.ID)
	}
	s.begin(conn, ws, started)
	if ws == nil {
		s.in.given(req.Input)
	}
	return started.Sandbox, s, nil
}

// interactive tells whether a client may have more to say to a process after
// it has started, but for signals, which are requests of their own.
func interactive(spec sandbox.ProcessSpec) bool { return spec.Stdin || spec.TTY != nil }

// Attach connects to a running or ended process, from an output offset on;
// a negative one means the oldest byte kept. The stream is as Exec's.
func (c *Client) Attach(ctx context.Context, ref string, id sandbox.ProcessID, offset int64) (sandbox.ProcessIO, error) {
	s := c.newStream(ctx, ref, offset)
	s.session = 2 + rand.Int64N(1<<62) //nolint:gosec // to tell clients apart, no secret
	w, started, err := s.attach(id, offset)
	if err != nil {
		return nil, s.fail(err)
	}
	s.begin(w, w.ws, started)
	return s, nil
}

func (c *Client) newStream(ctx context.Context, ref string, offset int64) *stream {
	s := &stream{c: c, ref: ref, offset: offset, session: starter}
	s.ctx, s.cancel = context.WithCancel(ctx)
	return s
}

// fail lets go of a stream that could not begin.
func (s *stream) fail(err error) error {
	s.cancel()
	return err
}

// begin notes the first connection; ws is nil where it takes no messages.
func (s *stream) begin(w wire, ws *websocket.Conn, started api.Message) {
	s.conn, s.process = w, *started.Process
	s.in.init(ws, s.session)
	context.AfterFunc(s.ctx, func() { s.in.end(context.Cause(s.ctx)) })
}

// attach connects to the stream's process, at first or again.
func (s *stream) attach(id sandbox.ProcessID, offset int64) (*socket, api.Message, error) {
	q := url.Values{"offset": {strconv.FormatInt(max(offset, -1), 10)}, "session": {strconv.FormatInt(s.session, 10)}}
	return s.c.dial(s.ctx, at(s.ref, "processes", string(id), "attach"), q, nil, nil)
}

// Process implements sandbox.ProcessIO.
func (s *stream) Process() sandbox.Process { return s.process }

// Exit implements sandbox.ProcessIO.
func (s *stream) Exit() (sandbox.ExitStatus, bool) {
	if s.exit == nil {
		return sandbox.ExitStatus{}, false
	}
	return *s.exit, true
}

// Next implements sandbox.ProcessIO.
func (s *stream) Next() (sandbox.Output, error) {
	for s.end == nil {
		var kind byte
		var err error
		if kind, s.buf, err = s.conn.read(s.ctx, s.buf); err != nil {
			if err := s.reconnect(err); err != nil {
				s.finish(err)
			}
			continue
		}
		if kind == api.FrameBinary {
			if out, ok := s.output(s.buf); ok {
				return out, nil
			}
			continue
		}
		s.message(s.buf)
	}
	if s.dropped > 0 { // the very last bytes were dropped
		out := sandbox.Output{Stream: sandbox.Stdout, Offset: s.offset + s.dropped, Dropped: s.dropped}
		s.offset, s.dropped = out.Offset, 0
		return out, nil
	}
	return sandbox.Output{}, s.end
}

// output takes a frame; false when it brings nothing new.
func (s *stream) output(frame []byte) (sandbox.Output, bool) {
	kind, offset, data, ok := api.ParseOutput(frame)
	if !ok {
		return sandbox.Output{}, false
	}
	if s.offset > offset { // sent before, on the connection that broke
		data = data[min(s.offset-offset, int64(len(data))):]
		offset = s.offset
	}
	if len(data) == 0 {
		return sandbox.Output{}, false
	}
	out := sandbox.Output{Stream: kind, Offset: offset, Dropped: s.dropped, Data: data}
	s.offset, s.dropped = offset+int64(len(data)), 0
	return out, true
}

func (s *stream) message(text []byte) {
	var m api.Message
	if err := json.Unmarshal(text, &m); err != nil {
		s.finish(sandbox.Errorf(sandbox.ErrUnavailable, "broken_answer", "reading a stream message: %w", err))
		return
	}
	switch m.Type {
	case api.MsgStdin:
		s.in.taken(s.ctx, m.Bytes, m.Closed)
	case api.MsgDropped:
		s.dropped += m.Bytes
	case api.MsgExit:
		if s.exit = m.Exit; s.exit == nil {
			s.finish(sandbox.Errorf(sandbox.ErrUnavailable, "broken_answer", "the stream of process %s ended without its exit status: 'sandbox ps' tells what became of it", s.process.ID))
			return
		}
		s.finish(io.EOF)
	case api.MsgError:
		err := error(sandbox.Errorf(sandbox.ErrUnavailable, "broken_answer", "the stream ended with an error that says nothing"))
		if m.Problem != nil {
			err = m.Problem.Err()
		}
		if !errors.Is(err, sandbox.ErrUnavailable) {
			s.finish(err)
			return
		}
		// The daemon lost its side of the process; it may find it again.
		if err := s.reconnect(err); err != nil {
			s.finish(err)
		}
	}
}

// finish makes Next return err for good.
func (s *stream) finish(err error) {
	s.end = err
	s.conn.close(errors.Is(err, io.EOF))
	s.cancel()
}

// reconnect attaches again at the offset reached. It returns what ends the
// stream: cause when patience is over, or why the process cannot be found.
func (s *stream) reconnect(cause error) error {
	s.conn.close(false) // broken already
	s.in.detach()
	if s.ctx.Err() != nil {
		return s.ctx.Err()
	}
	b := backoff{patience: s.c.patience}
	for b.wait(s.ctx) {
		w, _, err := s.attach(s.process.ID, s.offset)
		if err == nil {
			s.conn, s.dropped = w, 0 // what was told and not returned is told again
			s.in.attach(w.ws)
			return nil
		}
		if !errors.Is(err, sandbox.ErrUnavailable) {
			return err
		}
		cause = err
	}
	if s.ctx.Err() != nil {
		return s.ctx.Err()
	}
	if _, ok := errors.AsType[*sandbox.Error](cause); ok {
		return cause
	}
	return sandbox.Errorf(sandbox.ErrUnavailable, "stream_broken", "the connection to process %s broke: %w; 'sandbox logs -f' goes on reading it", s.process.ID, cause)
}

// WriteStdin implements sandbox.ProcessIO. It returns when the bytes are on
// their way; they are sent again if the connection breaks before they were
// taken. After the process closed its end it returns io.ErrClosedPipe.
func (s *stream) WriteStdin(p []byte) (int, error) { return s.in.write(s.ctx, p) }

// CloseStdin implements sandbox.ProcessIO.
func (s *stream) CloseStdin() error { return s.in.finish(s.ctx) }

// Resize implements sandbox.ProcessIO. The last size is sent again on a new
// connection.
func (s *stream) Resize(size sandbox.WindowSize) error {
	if !s.process.TTY {
		return sandbox.Errorf(sandbox.ErrConflict, "no_terminal", "process %s has no terminal: start it with tty", s.process.ID)
	}
	return s.in.resize(s.ctx, size)
}

// Signal implements sandbox.ProcessIO. It has its own request, so it arrives
// however full standard input is.
func (s *stream) Signal(name string) error {
	ctx, cancel := context.WithTimeout(s.ctx, signalTimeout)
	defer cancel()
	return s.c.SignalProcess(ctx, s.ref, s.process.ID, name)
}

// Close implements sandbox.ProcessIO.
func (s *stream) Close() error {
	s.cancel()
	return nil
}

// readAll reads r into buf, growing it as needed; the read limit of the
// connection bounds it.
func readAll(r io.Reader, buf []byte) ([]byte, error) {
	for {
		if len(buf) == cap(buf) {
			grown := make([]byte, len(buf), max(2*cap(buf), 4<<10))
			copy(grown, buf)
			buf = grown
		}
		n, err := r.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		if errors.Is(err, io.EOF) {
			return buf, nil
		}
		if err != nil {
			return buf, err
		}
	}
}
