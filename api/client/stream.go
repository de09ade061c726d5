package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// signalTimeout bounds a signal sent on a stream, which has no context.
const signalTimeout = 10 * time.Second

// stream is a ProcessIO over a WebSocket that is made again, from the offset
// after the last byte seen, when it breaks. Only the goroutine in Next reads
// and reconnects; stdin has its own state (stdin.go).
type stream struct {
	c      *Client
	ref    string
	ctx    context.Context // of the whole stream, ended by Close
	cancel context.CancelFunc

	process sandbox.Process
	conn    *websocket.Conn
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
// takes it, which is learned in Next: somebody must call it meanwhile.
func (c *Client) Exec(ctx context.Context, ref string, spec sandbox.ProcessSpec) (sandbox.ProcessIO, error) {
	first, err := json.Marshal(spec)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_process_spec", "process spec: %w", err)
	}
	s := c.newStream(ctx, ref, 0)
	conn, p, err := c.dialProcess(s.ctx, at(ref, "exec"), nil, first)
	if err != nil {
		s.cancel()
		return nil, err
	}
	s.begin(conn, p)
	return s, nil
}

// Attach connects to a running or ended process, from an output offset on;
// a negative one means the oldest byte kept. The stream is as Exec's.
func (c *Client) Attach(ctx context.Context, ref string, id sandbox.ProcessID, offset int64) (sandbox.ProcessIO, error) {
	s := c.newStream(ctx, ref, offset)
	conn, p, err := s.attach(id, offset)
	if err != nil {
		s.cancel()
		return nil, err
	}
	s.begin(conn, p)
	return s, nil
}

func (c *Client) newStream(ctx context.Context, ref string, offset int64) *stream {
	s := &stream{c: c, ref: ref, offset: offset}
	s.ctx, s.cancel = context.WithCancel(ctx)
	return s
}

func (s *stream) begin(conn *websocket.Conn, p sandbox.Process) {
	s.conn, s.process = conn, p
	s.in.init(conn, p.StdinBytes)
	context.AfterFunc(s.ctx, func() { s.in.end(context.Cause(s.ctx)) })
}

func (s *stream) attach(id sandbox.ProcessID, offset int64) (*websocket.Conn, sandbox.Process, error) {
	return s.c.dialProcess(s.ctx, at(s.ref, "processes", string(id), "attach"), url.Values{"offset": {strconv.FormatInt(max(offset, -1), 10)}}, nil)
}

// dialProcess opens a process stream up to its "started" message.
func (c *Client) dialProcess(ctx context.Context, path string, q url.Values, first []byte) (*websocket.Conn, sandbox.Process, error) {
	target := c.base + path
	if len(q) > 0 {
		target += "?" + q.Encode()
	}
	conn, resp, err := websocket.Dial(ctx, target, &websocket.DialOptions{HTTPClient: c.ws, CompressionMode: websocket.CompressionDisabled})
	if err != nil {
		if resp != nil && resp.StatusCode != http.StatusSwitchingProtocols {
			return nil, sandbox.Process{}, problem(resp)
		}
		return nil, sandbox.Process{}, c.unreachable(ctx, err)
	}
	conn.SetReadLimit(api.MaxFrame)
	p, err := handshake(ctx, conn, first)
	if err != nil {
		_ = conn.CloseNow() // the error says more
		return nil, p, err
	}
	return conn, p, nil
}

func handshake(ctx context.Context, conn *websocket.Conn, first []byte) (sandbox.Process, error) {
	broke := func(err error) error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return sandbox.Errorf(sandbox.ErrUnavailable, "stream_broken", "the connection broke before the process was known: %w; 'sandbox ps' tells whether it runs", err)
	}
	if first != nil {
		if err := conn.Write(ctx, websocket.MessageText, first); err != nil {
			return sandbox.Process{}, broke(err)
		}
	}
	for {
		_, b, err := conn.Read(ctx)
		if err != nil {
			return sandbox.Process{}, broke(err)
		}
		var m api.Message
		if err := json.Unmarshal(b, &m); err != nil {
			return sandbox.Process{}, broke(err)
		}
		switch {
		case m.Type == api.MsgStarted && m.Process != nil:
			return *m.Process, nil
		case m.Type == api.MsgError && m.Problem != nil:
			return sandbox.Process{}, m.Problem.Err()
		case m.Type != api.MsgHeartbeat:
			return sandbox.Process{}, broke(fmt.Errorf("message of type %.40q", m.Type))
		}
	}
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
		typ, r, err := s.conn.Reader(s.ctx)
		if err == nil {
			s.buf, err = readAll(r, s.buf[:0])
		}
		if err != nil {
			if err := s.reconnect(err); err != nil {
				s.finish(err)
			}
			continue
		}
		if typ == websocket.MessageBinary {
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
		s.in.taken(m.Bytes, m.Closed)
	case api.MsgDropped:
		s.dropped += m.Bytes
	case api.MsgExit:
		s.exit = m.Exit
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
	s.cancel()
	_ = s.conn.CloseNow() // nothing more is wanted of it
}

// reconnect attaches again at the offset reached. It returns what ends the
// stream: cause when patience is over, or why the process cannot be found.
func (s *stream) reconnect(cause error) error {
	_ = s.conn.CloseNow() // broken already
	s.in.detach()
	if s.ctx.Err() != nil {
		return s.ctx.Err()
	}
	b := backoff{patience: s.c.patience}
	for b.wait(s.ctx) {
		conn, p, err := s.attach(s.process.ID, s.offset)
		if err == nil {
			s.conn, s.dropped = conn, 0 // what was told and not returned is told again
			s.in.attach(s.ctx, conn, p.StdinBytes)
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
func (s *stream) Resize(size sandbox.WindowSize) error { return s.in.resize(s.ctx, size) }

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
