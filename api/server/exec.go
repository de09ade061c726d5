package server

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

type (
	execInput struct {
		Target
		IdempotencyKey string `header:"Idempotency-Key" maxLength:"255" doc:"A repeated request with the same key runs nothing: it streams the output of what the first started, from the beginning, or says how that ended (409 already_run)."`
		Body           api.ExecRequest
	}
	runInput struct {
		IdempotencyKey string `header:"Idempotency-Key" maxLength:"255" doc:"A repeated request with the same key runs nothing: it is a conflict. POST /v1/sandboxes with the key and the same sandbox tells which one the first made, and an exec there with the key and the same process streams what was run."`
		Body           api.RunRequest
	}
)

// holdBack is how long the news that a process has started may wait for
// something to leave with, so that a short command costs one write. Output
// never waits.
const holdBack = time.Millisecond

func (s *server) execRoutes() {
	stream := map[string]*huma.Response{"200": {
		Description: "A process stream: frames of a kind (1 byte), a length (4 bytes, big endian) and a message, which are described at the top of api/frames.go and in docs/API.md",
		Content:     map[string]*huma.MediaType{api.StreamContentType: {Schema: &huma.Schema{Type: huma.TypeString, Format: "binary"}}},
	}}
	register(s, huma.Operation{
		OperationID: "exec", Method: http.MethodPost, Path: "/v1/sandboxes/{ref}/exec",
		Summary: "Run a command and stream its output; standard input is a part of the request", Tags: []string{"processes"},
		Responses: stream, MaxBodyBytes: api.MaxExecBody,
	}, func(ctx context.Context, in *execInput) (*huma.StreamResponse, error) {
		if err := in.Body.Validate(); err != nil {
			return nil, err
		}
		return s.streamed(ctx, in.Body, func(ctx context.Context, spec sandbox.ProcessSpec) (*sandbox.Sandbox, sandbox.ProcessIO, error) {
			spec.IdempotencyKey = in.IdempotencyKey
			p, err := s.m.Exec(ctx, in.Ref, spec)
			return nil, p, err
		})
	})
	register(s, huma.Operation{
		OperationID: "run", Method: http.MethodPost, Path: "/v1/run",
		Summary: "Create a sandbox, run a command in it and stream its output", Tags: []string{"processes"},
		Responses: stream, MaxBodyBytes: api.MaxExecBody,
	}, func(ctx context.Context, in *runInput) (*huma.StreamResponse, error) {
		if err := in.Body.Validate(); err != nil {
			return nil, err
		}
		return s.streamed(ctx, in.Body.Process, func(ctx context.Context, spec sandbox.ProcessSpec) (*sandbox.Sandbox, sandbox.ProcessIO, error) {
			sb, p, err := s.m.Run(ctx, sandbox.CreateRequest{Spec: in.Body.Sandbox, IdempotencyKey: in.IdempotencyKey, Actor: actorOf(ctx)}, spec)
			return &sb, p, err
		})
	})
}

// streamed answers with the stream of the process that start starts.
func (s *server) streamed(ctx context.Context, req api.ExecRequest, start func(context.Context, sandbox.ProcessSpec) (*sandbox.Sandbox, sandbox.ProcessIO, error)) (*huma.StreamResponse, error) {
	l, err := streaming(ctx)
	if err != nil {
		return nil, err
	}
	spec := req.ProcessSpec
	spec.Stdin = len(req.Input) > 0
	sb, p, err := start(ctx, spec)
	if err != nil {
		l.end()
		return nil, err
	}
	return &huma.StreamResponse{Body: func(huma.Context) {
		defer l.end()
		s.stream(ctx, l, sb, p, req.Input)
	}}, nil
}

// stream passes a process's output on as the body of the response. It needs
// no goroutine but the request's own, and one more while there is input.
func (s *server) stream(ctx context.Context, l *live, sb *sandbox.Sandbox, p sandbox.ProcessIO, input []byte) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	leave := sync.OnceFunc(func() {
		if err := p.Close(); err != nil {
			s.log.DebugContext(ctx, "closing a process stream", "error", err)
		}
	})
	defer leave()
	defer context.AfterFunc(ctx, leave)() // the client went, or the server goes down: the process goes on
	l.onDrain(cancel)
	if len(input) > 0 {
		go s.feedAll(ctx, p, input)
	}
	w := newFrameWriter(requestOf(ctx).w)
	defer w.stop()
	proc := p.Process()
	err := w.message(ctx, api.Message{Type: api.MsgStarted, Process: &proc, Sandbox: sb})
	if err == nil {
		err = relay(ctx, p, w)
	}
	switch {
	case err == nil:
		last := s.lastMessage(ctx, p)
		leave() // nothing more to read; the sandbox may be waiting to end
		err = w.message(ctx, last)
	case cutFor(ctx) != nil || ctx.Err() == nil && !errors.Is(err, errReaderGone):
		err = w.message(ctx, api.Message{Type: api.MsgError, Problem: s.problemOf(ctx, err)})
	}
	if err != nil {
		s.log.DebugContext(ctx, "process stream ended early", "process", proc.ID, "error", err)
		panic(http.ErrAbortHandler) // the client must not take it for the whole
	}
}

// feedAll writes a command's whole standard input. It ends with the stream
// at the latest: closing p wakes it.
func (s *server) feedAll(ctx context.Context, p sandbox.ProcessIO, input []byte) {
	defer func() {
		if v := recover(); v != nil {
			s.log.ErrorContext(ctx, "panic in a process stream", "request", requestOf(ctx).id, "panic", v)
		}
	}()
	if in, ok := p.(sandbox.StdinSession); ok {
		// A client that comes back by attaching goes on where this stops.
		ready := make(chan int64, 1)
		var once sync.Once
		if in.OpenStdin(starter, func(total int64, _ bool) { once.Do(func() { ready <- total }) }) == nil {
			select {
			case total := <-ready: // not 0 where a key started it before
				input = input[min(total, int64(len(input))):]
			case <-ctx.Done():
				return
			}
		}
	}
	if _, err := p.WriteStdin(input); err != nil {
		return // the process takes no more
	}
	_ = p.CloseStdin() // it may have ended
}

// sink is where a process's output goes.
type sink interface {
	message(ctx context.Context, m api.Message) error
	// output sends at most maxPiece bytes.
	output(ctx context.Context, stream sandbox.Stream, offset int64, data []byte) error
}

// maxPiece is the most data of one output frame, in bytes.
const maxPiece = api.MaxFrame / 2

// errReaderGone means that the client takes nothing any more.
var errReaderGone = errors.New("the reader of the stream has gone")

// relay sends output until the process ends, and returns nil then. Its memory
// is one piece, and a client that does not read makes it wait here and
// nowhere else.
func relay(ctx context.Context, p sandbox.ProcessIO, to sink) error {
	for {
		out, err := p.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if out.Dropped > 0 {
			if err := to.message(ctx, api.Message{Type: api.MsgDropped, Bytes: out.Dropped, Offset: out.Offset}); err != nil {
				return errors.Join(errReaderGone, err)
			}
		}
		for data, off := out.Data, out.Offset; len(data) > 0; {
			n := min(len(data), maxPiece)
			if err := to.output(ctx, out.Stream, off, data[:n]); err != nil {
				return errors.Join(errReaderGone, err)
			}
			data, off = data[n:], off+int64(n)
		}
	}
}

// lastMessage tells how a process ended whose output was read to its end.
func (s *server) lastMessage(ctx context.Context, p sandbox.ProcessIO) api.Message {
	exit, ok := p.Exit()
	if !ok {
		return api.Message{Type: api.MsgError, Problem: s.problemOf(ctx, noEnd(p))}
	}
	return api.Message{Type: api.MsgExit, Exit: &exit}
}

// noEnd is the error of a stream that ended and does not say how the process
// did.
func noEnd(p sandbox.ProcessIO) error {
	return sandbox.Errorf(sandbox.ErrUnavailable, "stream_broken", "the output of process %s ended before the process did: attach to it again", p.Process().ID)
}

// frameWriter writes a process stream as the body of a response. What is
// written leaves with the next output, with the end of the response, or when
// the timer says so; the same timer sends heartbeats.
type frameWriter struct {
	mu    sync.Mutex // guards all; a write may wait for the client
	w     http.ResponseWriter
	rc    *http.ResponseController
	held  bool // something is written and not flushed
	beats bool // the time to hold back is over: what comes now are heartbeats
	done  bool
	timer *time.Timer
	head  [api.FrameHeader + api.OutputHeader]byte
}

func newFrameWriter(w http.ResponseWriter) *frameWriter {
	w.Header().Set("Content-Type", api.StreamContentType)
	f := &frameWriter{w: w, rc: http.NewResponseController(w), held: true}
	f.timer = time.AfterFunc(time.Hour, f.tick) // set before it runs: tick uses it
	f.timer.Reset(holdBack)
	return f
}

// tick sends what is held back, or else a heartbeat, after a write that waits for
// the client.
func (f *frameWriter) tick() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.done {
		return
	}
	if f.beats && !f.held {
		_ = f.put(api.FrameText, heartbeatText) // flush meets the same error
		f.held = true
	}
	if f.held && f.flush() != nil {
		return // the context of the request ends with the connection
	}
	f.beats = true
	f.timer.Reset(heartbeat)
}

var heartbeatText = []byte(`{"type":"` + api.MsgHeartbeat + `"}`)

// stop keeps tick from writing to a response that is over.
func (f *frameWriter) stop() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.done = true
	f.timer.Stop()
}

// put writes a message; f.mu is held.
func (f *frameWriter) put(kind byte, msg []byte) error {
	api.PutFrameHeader(f.head[:], kind, len(msg))
	if _, err := f.w.Write(f.head[:api.FrameHeader]); err != nil {
		return err
	}
	_, err := f.w.Write(msg)
	return err
}

// flush sends what is written; f.mu is held.
func (f *frameWriter) flush() error {
	f.held = false
	return f.rc.Flush()
}

func (f *frameWriter) message(_ context.Context, m api.Message) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.held = true // output or the end of the response follows, or the timer
	if f.beats {
		f.timer.Reset(holdBack)
	}
	return f.put(api.FrameText, b)
}

func (f *frameWriter) output(_ context.Context, stream sandbox.Stream, offset int64, data []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	head := f.head[:api.FrameHeader]
	api.PutFrameHeader(head, api.FrameBinary, api.OutputHeader+len(data))
	head = api.AppendOutputHeader(head, stream, offset)
	if _, err := f.w.Write(head); err != nil {
		return err
	}
	if _, err := f.w.Write(data); err != nil {
		return err
	}
	return f.flush()
}
