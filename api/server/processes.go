package server

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"reflect"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

type (
	// ProcessTarget is the path of everything about one process; see Target.
	ProcessTarget struct {
		Target
		PID string `path:"pid" maxLength:"24" pattern:"^p[0-9]+$" patternDescription:"a process id as p1" doc:"Process id, as p1."`
	}
	processesInput struct {
		Target
		PageInput
	}
	startInput struct {
		Target
		IdempotencyKey string `header:"Idempotency-Key" maxLength:"255" doc:"A repeated request with the same key returns the process that the first started, or says how that ended (409 already_run)."`
		Body           sandbox.ProcessSpec
	}
	signalInput struct {
		ProcessTarget
		Body api.SignalRequest
	}
	outputInput struct {
		ProcessTarget
		Offset int64  `query:"offset" default:"-1" minimum:"-1" doc:"First byte wanted; -1 means the oldest kept."`
		Follow bool   `query:"follow" doc:"Wait for more until the process ends."`
		Stream string `query:"stream" enum:"stdout,stderr" doc:"Only this stream; both, mixed as written, when absent."`
		Accept string `header:"Accept" doc:"application/x-ndjson for lines with offset and stream; raw bytes otherwise."`
	}
)

const ndjson = "application/x-ndjson"

func (s *server) processRoutes() {
	register(s, huma.Operation{
		OperationID: "list-processes", Method: http.MethodGet, Path: "/v1/sandboxes/{ref}/processes",
		Summary: "The processes started through the API, ended ones too", Tags: []string{"processes"},
	}, func(ctx context.Context, in *processesInput) (*result[api.ProcessList], error) {
		procs, err := s.m.Processes(ctx, in.Ref)
		if err != nil {
			return nil, err
		}
		items, next, err := pageOf(in.PageInput, procs, func(p sandbox.Process) string { return string(p.ID) })
		return wrap(api.ProcessList{Items: items, Next: next}, err)
	})
	register(s, huma.Operation{
		OperationID: "start-process", Method: http.MethodPost, Path: "/v1/sandboxes/{ref}/processes", DefaultStatus: http.StatusCreated,
		Summary: "Start a command in the background", Tags: []string{"processes"},
	}, func(ctx context.Context, in *startInput) (*result[sandbox.Process], error) {
		if err := in.Body.Validate(); err != nil {
			return nil, err
		}
		in.Body.IdempotencyKey = in.IdempotencyKey
		return wrap(s.m.StartProcess(ctx, in.Ref, in.Body))
	})
	register(s, huma.Operation{
		OperationID: "get-process", Method: http.MethodGet, Path: "/v1/sandboxes/{ref}/processes/{pid}",
		Summary: "One process", Tags: []string{"processes"},
	}, func(ctx context.Context, in *ProcessTarget) (*result[sandbox.Process], error) {
		return wrap(s.m.Process(ctx, in.Ref, sandbox.ProcessID(in.PID)))
	})
	register(s, huma.Operation{
		OperationID: "signal-process", Method: http.MethodPost, Path: "/v1/sandboxes/{ref}/processes/{pid}/signal", DefaultStatus: http.StatusNoContent,
		Summary: "Send a signal to a process and all it started", Tags: []string{"processes"},
	}, func(ctx context.Context, in *signalInput) (*empty, error) {
		return nil, s.m.SignalProcess(ctx, in.Ref, sandbox.ProcessID(in.PID), in.Body.Signal)
	})
	register(s, huma.Operation{
		OperationID: "get-output", Method: http.MethodGet, Path: "/v1/sandboxes/{ref}/processes/{pid}/output",
		Summary: "A process's output from an offset on", Tags: []string{"processes"},
		Responses: map[string]*huma.Response{"200": {
			Description: "The output", Content: map[string]*huma.MediaType{
				"application/octet-stream": {Schema: &huma.Schema{Type: huma.TypeString, Format: "binary"}},
				ndjson:                     {Schema: s.schemaOf(api.OutputLine{}, "OutputLine")},
			},
		}},
	}, s.output)
	register(s, huma.Operation{
		OperationID: "get-last-output", Method: http.MethodGet, Path: "/v1/sandboxes/{ref}/output",
		Summary: "The end of the last process's output, as kept when the sandbox stopped or ended", Tags: []string{"processes"},
		Responses: map[string]*huma.Response{"200": {
			Description: "The output", Content: map[string]*huma.MediaType{
				"application/octet-stream": {Schema: &huma.Schema{Type: huma.TypeString, Format: "binary"}},
			},
		}},
	}, func(ctx context.Context, in *Target) (*huma.StreamResponse, error) {
		kept, err := s.m.KeptOutput(ctx, in.Ref, "")
		if err != nil {
			return nil, err
		}
		return rawBytes(kept), nil
	})
}

func rawBytes(b []byte) *huma.StreamResponse {
	return &huma.StreamResponse{Body: func(hc huma.Context) {
		hc.SetHeader("Content-Type", "application/octet-stream")
		hc.SetStatus(http.StatusOK)
		_, _ = hc.BodyWriter().Write(b) // the client may be gone
	}}
}

// output streams a process's output as plain chunked HTTP. Of a sandbox that
// no longer runs it is what was kept, whose offsets are no longer known.
func (s *server) output(ctx context.Context, in *outputInput) (*huma.StreamResponse, error) {
	id := sandbox.ProcessID(in.PID)
	p, err := s.m.Attach(ctx, in.Ref, id, in.Offset)
	if err != nil {
		kept, kerr := s.keptOutput(ctx, in, id)
		if kerr != nil {
			return nil, err
		}
		return kept, nil
	}
	l, err := streaming(ctx)
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return &huma.StreamResponse{Body: func(hc huma.Context) {
		defer l.end()
		defer s.closeWith(ctx, p)()
		w := newOutputWriter(requestOf(ctx).w, strings.Contains(in.Accept, ndjson), in.Stream)
		limit := int64(-1)
		if !in.Follow && p.Process().Exit == nil {
			limit = p.Process().Output.End
		}
		if err := w.copy(p, in.Offset, limit); err != nil {
			w.tell(s.problemOf(ctx, err))
			s.log.DebugContext(ctx, "output stream ended early", "sandbox", in.Ref, "process", id, "error", err)
			panic(http.ErrAbortHandler) // the client must not take it for the whole
		}
	}}, nil
}

// keptOutput answers for a sandbox that has stopped or ended.
func (s *server) keptOutput(ctx context.Context, in *outputInput, id sandbox.ProcessID) (*huma.StreamResponse, error) {
	sb, err := s.m.Sandbox(ctx, in.Ref)
	if err != nil {
		return nil, err
	}
	if sb.Status != sandbox.StatusStopped && !sb.Status.Terminal() {
		return nil, sandbox.Errorf(sandbox.ErrConflict, "not_ended", "sandbox %s is %s", sb.ID, sb.Status)
	}
	kept, err := s.m.KeptOutput(ctx, in.Ref, id)
	if err != nil {
		return nil, err
	}
	if strings.Contains(in.Accept, ndjson) {
		line, err := json.Marshal(api.OutputLine{Stream: "stdout", Data: kept})
		if err != nil {
			return nil, err
		}
		kept = append(line, '\n')
	}
	return rawBytes(kept), nil
}

// outputWriter writes pieces of output to an HTTP response.
type outputWriter struct {
	w     http.ResponseWriter
	rc    *http.ResponseController
	lines *json.Encoder // nil for raw bytes
	only  sandbox.Stream
}

func newOutputWriter(w http.ResponseWriter, lines bool, only string) *outputWriter {
	o := &outputWriter{w: w, rc: http.NewResponseController(w)}
	switch only {
	case "stdout":
		o.only = sandbox.Stdout
	case "stderr":
		o.only = sandbox.Stderr
	}
	contentType := "application/octet-stream"
	if lines {
		contentType = ndjson
		o.lines = json.NewEncoder(w)
	}
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(http.StatusOK)
	return o
}

// copy writes until the process has ended or, with a limit of 0 or more,
// the offset limit is reached.
func (o *outputWriter) copy(p sandbox.ProcessIO, from, limit int64) error {
	if limit >= 0 && limit <= max(from, p.Process().Output.Start) {
		return nil // nothing was written there yet
	}
	_ = o.rc.Flush() // the header, so that a follower sees the answer at once
	for {
		out, err := p.Next()
		if errors.Is(err, io.EOF) {
			exit, ok := p.Exit()
			if !ok {
				return noEnd(p)
			}
			if o.lines != nil {
				return o.lines.Encode(api.OutputLine{Offset: p.Process().Output.End, Exit: &exit})
			}
			return nil
		}
		if err != nil {
			return err
		}
		end := out.Offset + int64(len(out.Data))
		if err := o.piece(out); err != nil {
			return err
		}
		if limit >= 0 && end >= limit {
			return nil
		}
	}
}

// tell says, where lines are written, why they end here.
func (o *outputWriter) tell(p *api.Problem) {
	if o.lines != nil && o.lines.Encode(api.OutputLine{Problem: p}) == nil {
		_ = o.rc.Flush() // the client may be gone
	}
}

func (o *outputWriter) piece(out sandbox.Output) error {
	if o.only != 0 && out.Stream != o.only {
		return nil
	}
	if o.lines != nil {
		stream := "stdout"
		if out.Stream == sandbox.Stderr {
			stream = "stderr"
		}
		if err := o.lines.Encode(api.OutputLine{Stream: stream, Offset: out.Offset, Dropped: out.Dropped, Data: out.Data}); err != nil {
			return err
		}
	} else if _, err := o.w.Write(out.Data); err != nil {
		return err
	}
	return o.rc.Flush()
}

// closeWith closes p when the request or the server ends; the function it
// returns closes it at once and frees what watched.
func (s *server) closeWith(ctx context.Context, p io.Closer) func() {
	done := make(chan struct{})
	go func() {
		select {
		case <-ctx.Done():
		case <-draining(ctx):
		case <-done:
		}
		if err := p.Close(); err != nil {
			s.log.DebugContext(ctx, "closing a stream", "error", err)
		}
	}()
	return func() { close(done) }
}

// schemaOf puts a type into the document that no operation's fields name.
func (s *server) schemaOf(v any, name string) *huma.Schema {
	return s.huma.OpenAPI().Components.Schemas.Schema(reflect.TypeOf(v), true, name)
}
