package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/coder/websocket"
	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

type (
	attachInput struct {
		ProcessTarget
		Offset  int64 `query:"offset" default:"-1" minimum:"-1" doc:"First byte of output wanted; -1 means the oldest kept."`
		Session int64 `query:"session" minimum:"0" doc:"Whose standard input this connection brings: a number of the client's own, above 1, or 1 for the client that started the process. The first stdin message tells how much of it was taken before. Without one, input is taken as it comes."`
	}
	execStreamInput struct {
		Target
		IdempotencyKey string `header:"Idempotency-Key" maxLength:"255" doc:"As of the POST."`
	}
	runStreamInput struct {
		IdempotencyKey string `header:"Idempotency-Key" maxLength:"255" doc:"As of the POST."`
	}
	// opener starts what a stream is connected to, and the sandbox if it
	// made one.
	opener func(context.Context, *websocket.Conn) (*sandbox.Sandbox, sandbox.ProcessIO, error)
)

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
		OperationID: "exec-stream", Method: http.MethodGet, Path: "/v1/sandboxes/{ref}/exec",
		Summary: "WebSocket: run a command and stream it; the first message is a ProcessSpec", Tags: []string{"processes"}, Responses: upgrade,
	}, func(ctx context.Context, in *execStreamInput) (*huma.StreamResponse, error) {
		return s.upgrade(ctx, func(ctx context.Context, c *websocket.Conn) (*sandbox.Sandbox, sandbox.ProcessIO, error) {
			var spec sandbox.ProcessSpec
			if err := readFirst(ctx, c, "process spec", &spec); err != nil {
				return nil, nil, err
			}
			if err := spec.Validate(); err != nil {
				return nil, nil, err
			}
			spec.IdempotencyKey = in.IdempotencyKey
			p, err := s.m.Exec(ctx, in.Ref, spec)
			return nil, p, err
		}, starter)
	})
	register(s, huma.Operation{
		OperationID: "run-stream", Method: http.MethodGet, Path: "/v1/run",
		Summary: "WebSocket: create a sandbox, run a command in it and stream it; the first message is the body of the POST, without input", Tags: []string{"processes"}, Responses: upgrade,
	}, func(ctx context.Context, in *runStreamInput) (*huma.StreamResponse, error) {
		return s.upgrade(ctx, func(ctx context.Context, c *websocket.Conn) (*sandbox.Sandbox, sandbox.ProcessIO, error) {
			var req struct {
				Sandbox sandbox.Spec        `json:"sandbox"`
				Process sandbox.ProcessSpec `json:"process"`
			}
			if err := readFirst(ctx, c, "run request", &req); err != nil {
				return nil, nil, err
			}
			if err := req.Sandbox.ValidateAsked(); err != nil {
				return nil, nil, err
			}
			if err := req.Process.Validate(); err != nil {
				return nil, nil, err
			}
			sb, p, err := s.m.Run(ctx, sandbox.CreateRequest{Spec: req.Sandbox, IdempotencyKey: in.IdempotencyKey, Actor: actorOf(ctx)}, req.Process)
			return &sb, p, err
		}, starter)
	})
	register(s, huma.Operation{
		OperationID: "attach", Method: http.MethodGet, Path: "/v1/sandboxes/{ref}/processes/{pid}/attach",
		Summary: "WebSocket: stream a process from an output offset on", Tags: []string{"processes"}, Responses: upgrade,
	}, func(ctx context.Context, in *attachInput) (*huma.StreamResponse, error) {
		return s.upgrade(ctx, func(ctx context.Context, _ *websocket.Conn) (*sandbox.Sandbox, sandbox.ProcessIO, error) {
			p, err := s.m.Attach(ctx, in.Ref, sandbox.ProcessID(in.PID), in.Offset)
			return nil, p, err
		}, in.Session)
	})
}

// starter is the session of the standard input of whoever started a process.
const starter = 1

// upgrade turns a request into a process stream of what open connects to, with
// the standard input of a session, or of none.
func (s *server) upgrade(ctx context.Context, open opener, session int64) (*huma.StreamResponse, error) {
	req := requestOf(ctx)
	if req.r.Header.Get("Upgrade") == "" {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "not_a_websocket", "this path is a WebSocket: send Upgrade: websocket, or or POST to it")
	}
	l, err := streaming(ctx)
	if err != nil {
		return nil, err
	}
	return &huma.StreamResponse{Body: func(huma.Context) {
		defer l.end()
		c, err := websocket.Accept(req.w, req.r, &websocket.AcceptOptions{CompressionMode: websocket.CompressionDisabled})
		if err != nil {
			s.log.DebugContext(ctx, "websocket handshake", "request", req.id, "error", err)
			return // Accept has answered
		}
		c.SetReadLimit(api.MaxFrame)
		defer func() { _ = c.CloseNow() }() // already closed in the good case
		st := &stream{s: s, c: c, session: session}
		st.serve(ctx, l, open)
	}}, nil
}

// readFirst reads the first message, which says what to run.
func readFirst(ctx context.Context, c *websocket.Conn, what string, v any) error {
	ctx, cancel := context.WithTimeout(ctx, firstMessageTimeout)
	defer cancel()
	c.SetReadLimit(api.MaxJSONBody)
	defer c.SetReadLimit(api.MaxFrame)
	typ, r, err := c.Reader(ctx)
	if err != nil {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_process_spec", "waiting for the %s: %w", what, err)
	}
	if typ != websocket.MessageText {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_process_spec", "the first message must be a %s as JSON text", what)
	}
	b, err := io.ReadAll(r)
	if err == nil {
		err = api.CheckUTF8(b)
	}
	if err != nil {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_process_spec", "%s: %w", what, err)
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_process_spec", "%s: %w", what, err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_process_spec", "%s: one JSON value, then nothing", what)
	}
	return nil
}

// stream is one client's connection to one process. Three goroutines serve
// it: the one of the request writes output, one reads the client and never
// waits for the process, one, once the client says anything, feeds stdin and
// may wait.
type stream struct {
	s *server
	c *websocket.Conn
	p sandbox.ProcessIO

	frame []byte // of write's goroutine
	in    stdinQueue

	session int64
	opened  bool          // the session is: set before any goroutine runs
	ready   chan struct{} // closed when it is known where it goes on
	total   int64         // of write's goroutine; what was taken of the session
	told    bool          // of write's goroutine; total is known

	fed   bool        // feed runs; of read's goroutine
	pulse *time.Timer // runs beat
	// cancel ends the stream: it closes p, which wakes Next and
	// WriteStdin, and breaks the connection.
	cancel context.CancelFunc
	leave  func() // closes p and in; may be repeated
}

func (st *stream) serve(parent context.Context, l *live, open opener) {
	ctx, cancel := context.WithCancel(parent)
	defer cancel()
	st.cancel = cancel
	sb, p, err := open(ctx, st.c)
	if err != nil {
		st.fail(ctx, err)
		return
	}
	st.p = p
	st.in.init()
	st.leave = sync.OnceFunc(func() {
		st.in.close()
		if err := p.Close(); err != nil {
			st.s.log.DebugContext(parent, "closing a process stream", "error", err)
		}
	})
	// Whoever ends first ends the others.
	context.AfterFunc(ctx, st.leave)
	l.onDrain(cancel)
	proc := p.Process()
	if err := st.message(ctx, api.Message{Type: api.MsgStarted, Process: &proc, Sandbox: sb}); err != nil {
		return
	}
	st.openStdin(ctx)
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

// write sends output until the process ends.
func (st *stream) write(ctx context.Context) {
	err := relay(ctx, st.p, st)
	switch {
	case err == nil:
		last := st.s.lastMessage(ctx, st.p)
		st.leave() // nothing more to read; the sandbox may be waiting to end
		if st.message(ctx, last) == nil {
			_ = st.c.Close(websocket.StatusNormalClosure, "") // the client may have left first
		}
	case ctx.Err() != nil || errors.Is(err, errReaderGone):
		// Client or server is leaving; a client that stays attaches again.
	default:
		st.fail(ctx, err)
	}
}

// output implements sink.
func (st *stream) output(ctx context.Context, stream sandbox.Stream, offset int64, data []byte) error {
	st.frame = api.AppendOutput(st.frame[:0], stream, offset, data)
	return st.c.Write(ctx, websocket.MessageBinary, st.frame)
}

// fail tells the client why the stream ends.
func (st *stream) fail(ctx context.Context, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastWordTimeout)
	defer cancel()
	if st.message(ctx, api.Message{Type: api.MsgError, Problem: st.s.problemOf(ctx, err)}) == nil {
		_ = st.c.Close(websocket.StatusNormalClosure, "see the error message") // the client may have left first
	}
}

// message implements sink.
func (st *stream) message(ctx context.Context, m api.Message) error {
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

// openStdin lets standard input come exactly once, where the client and the
// process can.
func (st *stream) openStdin(ctx context.Context) {
	in, ok := st.p.(sandbox.StdinSession)
	if !ok || st.session == 0 {
		return
	}
	st.ready = make(chan struct{})
	st.opened = in.OpenStdin(st.session, func(total int64, closed bool) { st.taken(ctx, total, closed) }) == nil
}

// taken passes on how much of the session's input the process took.
func (st *stream) taken(ctx context.Context, total int64, closed bool) {
	if st.told {
		st.in.free(int(total - st.total))
	} else {
		st.told = true
		close(st.ready)
	}
	st.total = total
	_ = st.message(ctx, api.Message{Type: api.MsgStdin, Bytes: total, Closed: closed}) // the next output meets the same error
}

// feed writes queued stdin to the process. Without a session it also tells
// the client what was passed on; and after the process closed its end it goes
// on taking, so that the client does not hang, and says so.
func (st *stream) feed(ctx context.Context) {
	if st.opened {
		select {
		case <-st.ready:
		case <-ctx.Done():
			return
		}
	}
	total, closed := st.p.Process().StdinBytes, false
	for {
		chunk, ok := st.in.pop()
		if !ok {
			break
		}
		if !closed {
			_, err := st.p.WriteStdin(chunk)
			closed = err != nil
		}
		if st.opened {
			if closed {
				return // the connection is over, and with it the stream
			}
			continue
		}
		total += int64(len(chunk))
		st.in.free(len(chunk))
		if st.message(ctx, api.Message{Type: api.MsgStdin, Bytes: total, Closed: closed}) != nil {
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
	if st.message(ctx, api.Message{Type: api.MsgHeartbeat}) != nil {
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
