package mcp

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Daemon is what the tools need. A ref is an id, a name or a unique beginning
// of an id. Errors wrap one class of package sandbox.
type Daemon interface {
	Create(ctx context.Context, spec sandbox.Spec, idempotencyKey string) (sandbox.Sandbox, error)
	Sandbox(ctx context.Context, ref string) (sandbox.Sandbox, error)
	List(ctx context.Context, f sandbox.Filter) (sandbox.Page, error)
	Start(ctx context.Context, ref string) (sandbox.Sandbox, error)
	Stop(ctx context.Context, ref string) (sandbox.Sandbox, error)
	Remove(ctx context.Context, ref string) (sandbox.Sandbox, error)
	// Exec starts a command and connects to it; the connection is closed by
	// who asked for it.
	Exec(ctx context.Context, ref string, spec sandbox.ProcessSpec) (sandbox.ProcessIO, error)
	StartProcess(ctx context.Context, ref string, spec sandbox.ProcessSpec) (sandbox.Process, error)
	// Attach reads from an output offset on, until the process ends.
	Attach(ctx context.Context, ref string, id sandbox.ProcessID, offset int64) (sandbox.ProcessIO, error)
	// LastOutput returns what was kept of a stopped or ended sandbox.
	LastOutput(ctx context.Context, ref string) ([]byte, error)
	Processes(ctx context.Context, ref string) ([]sandbox.Process, error)
	Files(ctx context.Context, ref string) (sandbox.Files, error)
	Snapshot(ctx context.Context, ref string, req sandbox.SnapshotRequest) (sandbox.Snapshot, error)
	Snapshots(ctx context.Context, ref string, kinds ...sandbox.SnapshotKind) ([]sandbox.Snapshot, error)
	Fork(ctx context.Context, ref string, req sandbox.ForkRequest) ([]sandbox.Fork, error)
	Rollback(ctx context.Context, ref, snapshot string) (sandbox.Sandbox, error)
	Statement(ctx context.Context, q cost.StatementQuery) (cost.Statement, error)
}

// Config is what a server is made of.
type Config struct {
	Daemon  Daemon
	Version string       // of the program that serves
	Log     *slog.Logger // nil: nothing is logged
	// Problem turns an error into what the caller may see of it; nil: by
	// api.ProblemOf.
	Problem func(ctx context.Context, err error) *api.Problem
}

// instructions are what a model reads first.
const instructions = `Sandboxes are isolated Linux machines: own files, processes, network and limits. ` +
	`Use create_sandbox once and keep its id, or run_code without a sandbox for something short. Files and processes stay until remove_sandbox. ` +
	`Take a snapshot before something risky and rollback to it, or fork to try several ways. ` +
	`What a tool leaves out of a long answer it says, with the call that returns the rest.`

// schemas are the same for every server: they are worked out once.
var schemas = sdk.NewSchemaCache()

// newServer makes the tools of one daemon. They act in the name of the request
// whose context is given, and end with it.
func newServer(request context.Context, cfg Config) *sdk.Server {
	s := sdk.NewServer(&sdk.Implementation{Name: "sandboxd", Title: "Sandboxes", Version: cfg.Version}, &sdk.ServerOptions{
		Instructions: instructions, Logger: cfg.Log, SchemaCache: schemas,
		Capabilities: &sdk.ServerCapabilities{Tools: &sdk.ToolCapabilities{}, Resources: &sdk.ResourceCapabilities{}}, // lists never change
	})
	t := &tools{cfg: cfg, d: cfg.Daemon, request: request}
	t.sandboxTools(s)
	t.runTools(s)
	t.fileTools(s)
	t.timeTools(s)
	t.resources(s)
	return s
}

// Serve speaks with one client over a pair of streams, a message a line, until
// the client closes its end or ctx ends.
func Serve(ctx context.Context, cfg Config, in io.ReadCloser, out io.WriteCloser) error {
	err := newServer(ctx, cfg).Run(ctx, &sdk.IOTransport{Reader: in, Writer: out, MaxLineLength: maxMessage})
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("serving MCP over stdio: %w", err)
	}
	return nil
}

// maxMessage bounds one message of a client, in bytes: a file's content in
// base64 fits.
const maxMessage = 4 << 20

// Handler is streamable HTTP. It keeps no sessions: each request brings its
// own rights, and a restart of the daemon disturbs nobody. What a tool does is
// done with the values of the request's context, and ends with it; the answer
// has a moment more, to say why.
func Handler(cfg Config) http.Handler {
	h := sdk.NewStreamableHTTPHandler(
		func(r *http.Request) *sdk.Server {
			return newServer(r.Context().Value(requestKey{}).(context.Context), cfg) //nolint:errcheck,forcetypeassert // put there below
		},
		&sdk.StreamableHTTPOptions{Stateless: true, Logger: cfg.Log, MaxRequestBodyBytes: maxMessage, PropagateRequestCancellation: true},
	)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer, cancel := context.WithCancel(context.WithValue(context.WithoutCancel(r.Context()), requestKey{}, r.Context()))
		defer cancel()
		defer context.AfterFunc(r.Context(), func() { time.AfterFunc(lastWord, cancel) })()
		h.ServeHTTP(w, r.WithContext(answer))
	})
}

// requestKey is under which the context of an answer has its request's.
type requestKey struct{}

// lastWord is how long the answer to a request that has ended may take.
const lastWord = 200 * time.Millisecond

// tools are the handlers of one server.
type tools struct {
	cfg     Config
	d       Daemon
	request context.Context //nolint:containedctx // the protocol library detaches its own from the request, whose rights and end count
}

// acting is the context of a call with what the request's holds.
type acting struct {
	context.Context //nolint:containedctx // it is one
	request         context.Context
}

func (a acting) Value(key any) any {
	if v := a.Context.Value(key); v != nil {
		return v
	}
	return a.request.Value(key)
}

// begin returns the context of one call.
func (t *tools) begin(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(t.request, func() { cancel(context.Cause(t.request)) })
	return acting{ctx, t.request}, func() { stop(); cancel(nil) }
}

// fault makes an error one for the model: the stable code, and what to do.
func (t *tools) fault(ctx context.Context, err error) error {
	if p, ok := err.(*api.Problem); ok { //nolint:errorlint // made below, and never wrapped
		return p
	}
	p := api.ProblemOf(err, "")
	if t.cfg.Problem != nil {
		p = t.cfg.Problem(ctx, err)
	}
	return fmt.Errorf("%s: %s", p.Code, p.Detail)
}

// tool is one tool before it is added.
type tool struct {
	name, title, what string
	hints             hints
}

// hints are what a client may tell its user beforehand.
type hints struct {
	readOnly, destructive, idempotent bool
	open                              bool // it may reach out of the machine
}

var (
	looks  = hints{readOnly: true, idempotent: true}
	makes  = hints{}
	runs   = hints{destructive: true, open: true} // what a command does is not known
	spoils = hints{destructive: true}
	repeat = hints{destructive: true, idempotent: true}
)

// add registers a tool. Its answer is the structured result; where f gives a
// text too, that is what a model reads.
func add[I, O any](t *tools, s *sdk.Server, d tool, f func(context.Context, I) (O, string, error)) {
	sdk.AddTool(s, &sdk.Tool{
		Name: d.name, Title: d.title, Description: d.what,
		Annotations: &sdk.ToolAnnotations{
			Title: d.title, ReadOnlyHint: d.hints.readOnly, DestructiveHint: &d.hints.destructive,
			IdempotentHint: d.hints.idempotent, OpenWorldHint: &d.hints.open,
		},
	}, func(ctx context.Context, req *sdk.CallToolRequest, in I) (*sdk.CallToolResult, O, error) {
		ctx, cancel := t.begin(ctx)
		defer cancel()
		var out O
		var text string
		err := api.CheckUTF8(req.Params.Arguments)
		if err == nil {
			out, text, err = f(ctx, in)
		}
		if err == nil {
			err = context.Cause(t.request) // a command killed with it did not end by itself
		}
		if err != nil {
			var none O
			return nil, none, t.fault(ctx, err)
		}
		if text == "" {
			return nil, out, nil
		}
		return &sdk.CallToolResult{Content: []sdk.Content{&sdk.TextContent{Text: text}}}, out, nil
	})
}
