package server

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/coder/websocket"
	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

type attachInput struct {
	ProcessTarget
	Offset int64 `query:"offset" default:"-1" minimum:"-1" doc:"First byte of output wanted; -1 means the oldest kept."`
}

// How long a client may take to say what to run, and how often an idle
// stream is written to so that a vanished client is noticed.
const (
	firstMessageTimeout = 10 * time.Second
	heartbeat           = 15 * time.Second
	lastWordTimeout     = 5 * time.Second
)

func (s *server) streamRoutes() {
	upgrade := map[string]*huma.Response{"101": {Description: "A process stream; its messages are described at the top of api/frames.go and in docs/API.md"}}
	register(s, huma.Operation{
		OperationID: "exec", Method: http.MethodGet, Path: "/v1/sandboxes/{ref}/exec",
		Summary: "WebSocket: run a command and stream it; the first message is a ProcessSpec", Tags: []string{"processes"}, Responses: upgrade,
	}, func(ctx context.Context, in *Target) (*huma.StreamResponse, error) {
		return s.upgrade(ctx, func(ctx context.Context, c *websocket.Conn) (sandbox.ProcessIO, error) {
			spec, err := readSpec(ctx, c)
			if err != nil {
				return nil, err
			}
			return s.m.Exec(ctx, in.Ref, spec)
		})
	})
	register(s, huma.Operation{
		OperationID: "attach", Method: http.MethodGet, Path: "/v1/sandboxes/{ref}/processes/{pid}/attach",
		Summary: "WebSocket: stream a process from an output offset on", Tags: []string{"processes"}, Responses: upgrade,
	}, func(ctx context.Context, in *attachInput) (*huma.StreamResponse, error) {
		return s.upgrade(ctx, func(ctx context.Context, _ *websocket.Conn) (sandbox.ProcessIO, error) {
			return s.m.Attach(ctx, in.Ref, sandbox.ProcessID(in.PID), in.Offset)
		})
	})
}

// upgrade turns a request into a process stream of what open connects to.
func (s *server) upgrade(ctx context.Context, open func(context.Context, *websocket.Conn) (sandbox.ProcessIO, error)) (*huma.StreamResponse, error) {
	req := requestOf(ctx)
	if req.r.Header.Get("Upgrade") == "" {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "not_a_websocket", "this path is a WebSocket: send Upgrade: websocket, or use POST …/processes and GET …/output")
	}
	end, err := streaming(ctx)
	if err != nil {
		return nil, err
	}
	return &huma.StreamResponse{Body: func(huma.Context) {
		defer end()
		c, err := websocket.Accept(req.w, req.r, &websocket.AcceptOptions{CompressionMode: websocket.CompressionDisabled})
		if err != nil {
			s.log.DebugContext(ctx, "websocket handshake", "request", req.id, "error", err)
			return // Accept has answered
		}
		c.SetReadLimit(api.MaxFrame)
		defer func() { _ = c.CloseNow() }() // already closed in the good case
		st := &stream{s: s, c: c}
		st.serve(ctx, open)
	}}, nil
}

// readSpec reads and checks the first message of an exec.
func readSpec(ctx context.Context, c *websocket.Conn) (sandbox.ProcessSpec, error) {
	ctx, cancel := context.WithTimeout(ctx, firstMessageTimeout)
	defer cancel()
	var spec sandbox.ProcessSpec
	typ, r, err := c.Reader(ctx)
	if err != nil {
		return spec, sandbox.Errorf(sandbox.ErrInvalid, "invalid_process_spec", "waiting for the process spec: %w", err)
	}
	if typ != websocket.MessageText {
		return spec, sandbox.Errorf(sandbox.ErrInvalid, "invalid_process_spec", "the first message must be a process spec as JSON text")
	}
	dec := json.NewDecoder(r)
	dec.DisallowUnknownFields()
	if err := dec.Decode(&spec); err != nil {
		return spec, sandbox.Errorf(sandbox.ErrInvalid, "invalid_process_spec", "process spec: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return spec, sandbox.Errorf(sandbox.ErrInvalid, "invalid_process_spec", "process spec: one JSON value, then nothing")
	}
	return spec, spec.Validate()
}

// stream is one client's connection to one process. Three goroutines serve
// it: the one of the request writes output, one reads the client and never
// waits for the process, one, once the client says anything, feeds stdin and
// may wait.
type stream struct {
	s *server
	c *websocket.Conn
	p sandbox.ProcessIO

	in    stdinQueue
	fed   bool        // feed runs; of read's goroutine
	pulse *time.Timer // runs beat
	// cancel ends the stream: it closes p, which wakes Next and
	// WriteStdin, and breaks the connection.
	cancel context.CancelFunc
}

func (st *stream) serve(parent context.Context, open func(context.Context, *websocket.Conn) (sandbox.ProcessIO, error)) {
	ctx, cancel := context.WithCancel(parent)
	defer cancel()
	st.cancel = cancel
	p, err := open(ctx, st.c)
	if err != nil {
		st.fail(ctx, err)
		return
	}
	st.p = p
	st.in.init()
	// Whoever ends first ends the others.
	go func() {
		select {
		case <-ctx.Done():
		case <-draining(parent):
			cancel()
		}
		st.in.close()
		if err := p.Close(); err != nil {
			st.s.log.DebugContext(parent, "closing a process stream", "error", err)
		}
	}()
	proc := p.Process()
	if err := st.send(ctx, api.Message{Type: api.MsgStarted, Process: &proc}); err != nil {
		return
	}
	go st.guard(ctx, st.read)
	// Set before it is started: beat uses it.
	st.pulse = time.AfterFunc(time.Hour, func() { st.guard(ctx, st.beat) })
	st.pulse.Reset(heartbeat)
	defer st.pulse.Stop()
	st.write(ctx)
}

// guard runs one of the stream's goroutines: a panic in it must end only
// this stream.
func (st *stream) guard(ctx context.Context, f func(context.Context)) {
	defer func() {
		if p := recover(); p != nil {
			st.s.log.ErrorContext(ctx, "panic in a process stream", "request", requestOf(ctx).id, "panic", p)
			st.cancel()
		}
	}()
	f(ctx)
}

// write sends output until the process ends. Its memory is one frame, and a
// client that does not read makes it wait here and nowhere else.
func (st *stream) write(ctx context.Context) {
	const most = api.MaxFrame / 2
	var frame []byte
	for {
		out, err := st.p.Next()
		switch {
		case errors.Is(err, io.EOF):
			st.finish(ctx)
			return
		case ctx.Err() != nil:
			return // client or server is leaving; a client that stays attaches again
		case err != nil:
			st.fail(ctx, err)
			return
		}
		if out.Dropped > 0 {
			if st.send(ctx, api.Message{Type: api.MsgDropped, Bytes: out.Dropped, Offset: out.Offset}) != nil {
				return
			}
		}
		for data, off := out.Data, out.Offset; len(data) > 0; {
			n := min(len(data), most)
			frame = api.AppendOutput(frame[:0], out.Stream, off, data[:n])
			if st.c.Write(ctx, websocket.MessageBinary, frame) != nil {
				return
			}
			data, off = data[n:], off+int64(n)
		}
	}
}

func (st *stream) finish(ctx context.Context) {
	msg := api.Message{Type: api.MsgExit}
	if exit, ok := st.p.Exit(); ok {
		msg.Exit = &exit
	}
	_ = st.p.Close() // nothing more to read; the sandbox may be waiting to end
	if st.send(ctx, msg) == nil {
		_ = st.c.Close(websocket.StatusNormalClosure, "") // the client may have left first
	}
}

// fail tells the client why the stream ends.
func (st *stream) fail(ctx context.Context, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastWordTimeout)
	defer cancel()
	if st.send(ctx, api.Message{Type: api.MsgError, Problem: st.s.problemOf(ctx, err)}) == nil {
		_ = st.c.Close(websocket.StatusNormalClosure, "see the error message") // the client may have left first
	}
}

func (st *stream) send(ctx context.Context, m api.Message) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return st.c.Write(ctx, websocket.MessageText, b)
}

// read takes what the client sends. It never waits for the process, so a
// close or a signal is seen however full standard input is.
func (st *stream) read(ctx context.Context) {
	defer st.cancel() // the client is gone or speaks nonsense
	buf := make([]byte, 0, 4<<10)
	for {
		typ, r, err := st.c.Reader(ctx)
		if err != nil {
			return
		}
		if buf, err = readAll(r, buf[:0]); err != nil {
			return
		}
		if !st.fed { // most commands get no stdin, and need no goroutine for it
			st.fed = true
			go st.guard(ctx, st.feed)
		}
		var bad error
		if typ == websocket.MessageBinary {
			data, ok := api.ParseStdin(buf)
			if !ok || !st.in.push(data) {
				bad = sandbox.Errorf(sandbox.ErrInvalid, "invalid_frame", "stdin frame of %d bytes: at most %d in a frame and %d not yet told as taken", len(buf), api.MaxStdinFrame, api.StdinWindow)
			}
		} else {
			bad = st.control(buf)
		}
		if bad != nil {
			st.fail(ctx, bad)
			return
		}
	}
}

func (st *stream) control(text []byte) error {
	var m api.Message
	if err := json.Unmarshal(text, &m); err != nil {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_message", "message: %w", err)
	}
	var err error
	switch m.Type {
	case api.MsgCloseStdin:
		st.in.finish()
	case api.MsgResize:
		err = st.p.Resize(sandbox.WindowSize{Cols: m.Cols, Rows: m.Rows})
	case api.MsgSignal:
		err = st.p.Signal(m.Signal)
	case api.MsgHeartbeat:
	default:
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_message", "message of type %.40q: use close-stdin, resize, signal or heartbeat", m.Type)
	}
	// A process that just ended cannot be resized or signalled, which its
	// exit message will tell; nonsense is told at once.
	if errors.Is(err, sandbox.ErrInvalid) {
		return err
	}
	return nil
}

// feed writes queued stdin to the process and tells the client what was
// taken. After the process closed its end it goes on taking, so that the
// client does not hang, and says so.
func (st *stream) feed(ctx context.Context) {
	total := st.p.Process().StdinBytes
	closed := false
	for {
		chunk, ok := st.in.pop()
		if !ok {
			break
		}
		if !closed {
			if _, err := st.p.WriteStdin(chunk); err != nil {
				closed = true
			}
		}
		total += int64(len(chunk))
		st.in.free(chunk)
		if st.send(ctx, api.Message{Type: api.MsgStdin, Bytes: total, Closed: closed}) != nil {
			return
		}
	}
	if st.in.finished() && !closed {
		_ = st.p.CloseStdin() // the process may have ended
	}
}

// beat writes now and then, so that the loss of an idle client is noticed.
func (st *stream) beat(ctx context.Context) {
	if ctx.Err() != nil {
		return
	}
	if st.send(ctx, api.Message{Type: api.MsgHeartbeat}) != nil {
		st.cancel()
		return
	}
	st.pulse.Reset(heartbeat)
}

// readAll reads r into buf, growing it up to the connection's read limit.
func readAll(r io.Reader, buf []byte) ([]byte, error) {
	for {
		if len(buf) == cap(buf) {
			buf = append(buf, 0)[:len(buf)]
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
