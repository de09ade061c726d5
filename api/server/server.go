package server

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Config is what a server is made of.
type Config struct {
	Manager Manager
	Log     *slog.Logger // nil means slog.Default
	Version string       // of the daemon
	Lab     Lab          // nil: there are no routes of projects
	// Production returns what there is to see of the production world, nil
	// where there is none yet. Once it has returned one it stays with that.
	Production func() Manager
	// Office knows who calls. Without one everybody may do everything, and
	// there are no routes of keys.
	Office  Office
	Audit   Audit        // nil: nobody keeps who changed what
	Watcher Watcher      // nil: nobody watches
	Metrics http.Handler // of GET /metrics; nil: there is none

	world string // see server
}

// server carries what the handlers share.
type server struct {
	m       Manager
	lab     Lab
	log     *slog.Logger
	version string
	huma    huma.API
	watcher Watcher
	office  Office
	audit   Audit
	world   string // before the names of operations in the audit; empty in the lab's

	ops          board      // of work that takes long
	followers    sync.Map   // of events, *atomic.Int64 by owner
	provisioning sync.Mutex // held while a developer sandbox is looked for and made
}

// New returns the handler of the whole API. It starts nothing; Serve does.
func New(cfg Config) http.Handler {
	frameworkOnce()
	s := &server{m: cfg.Manager, lab: cfg.Lab, log: cfg.Log, version: cfg.Version, office: cfg.Office, audit: cfg.Audit, world: cfg.world}
	if s.log == nil {
		s.log = slog.Default()
	}
	mux := http.NewServeMux()
	s.huma = humago.New(restMux{mux}, huma.Config{
		OpenAPI: &huma.OpenAPI{
			OpenAPI: "3.1.0",
			Info: &huma.Info{
				Title:   "sandboxd",
				Version: "v1",
				Description: "Sandboxes on one plain Linux box. A {ref} is a sandbox's id, name or unique beginning of its id. " +
					"Every error is application/problem+json with a stable code.",
			},
		},
		OpenAPIPath:                  "/openapi",
		Formats:                      map[string]huma.Format{"application/json": jsonFormat, "json": jsonFormat},
		DefaultFormat:                "application/json",
		RejectUnknownQueryParameters: true,
	})
	s.watch(cfg)
	s.huma.UseMiddleware(s.authorize)
	s.routes()
	mux.Handle(mcpPath, named(servedMCP, s.permitted(servedMCP, s.mcp())))
	mux.Handle("GET "+docsPath, named(servedDocs, s.docs()))
	if cfg.Metrics != nil {
		mux.Handle("GET "+metricsPath, named(servedMetrics, s.permitted(servedMetrics, cfg.Metrics)))
	}
	mux.HandleFunc("/", s.noRoute(mux))
	if cfg.Lab != nil {
		mux.Handle(api.PathProduction+"/", named(servedProduction, s.permitted(servedProduction, http.StripPrefix(api.PathProduction, s.production(cfg)))))
	}
	s.expect()
	return s.middleware(s.admit(mux))
}

// jsonFormat takes no JSON whose text decoding would change.
var jsonFormat = huma.Format{Marshal: huma.DefaultJSONFormat.Marshal, Unmarshal: func(b []byte, v any) error {
	if err := api.CheckUTF8(b); err != nil {
		return err
	}
	return json.Unmarshal(b, v)
}}

// routes registers every operation, one file per group.
func (s *server) routes() {
	s.systemRoutes()
	s.usageRoutes()
	s.costRoutes()
	s.budgetRoutes()
	s.sandboxRoutes()
	s.bulkRoutes()
	s.developerRoutes()
	s.snapshotRoutes()
	s.networkViewRoutes()
	s.processRoutes()
	s.execRoutes()
	s.streamRoutes()
	s.fileRoutes()
	s.archiveRoutes()
	s.imageRoutes()
	s.buildRoutes()
	s.operationRoutes()
	s.volumeRoutes()
	s.secretRoutes()
	s.templateRoutes()
	s.webhookRoutes()
	s.networkRoutes()
	s.portRoutes()
	s.eventRoutes()
	s.faultRoutes()
	if s.lab != nil {
		s.labRoutes()
	}
	if s.office != nil && s.world == "" {
		s.accessRoutes()
	}
}

// restMux lets the last path parameter of an image hold slashes, which the
// mux can and OpenAPI cannot say.
type restMux struct{ *http.ServeMux }

func (m restMux) HandleFunc(pattern string, h func(http.ResponseWriter, *http.Request)) {
	m.ServeMux.HandleFunc(strings.Replace(pattern, "/v1/images/{name}", "/v1/images/{name...}", 1), h)
}

// frameworkOnce sets the framework's process-wide switches: its own errors
// (validation, bodies) take our shape, and keys must match in case too.
var frameworkOnce = sync.OnceFunc(func() {
	huma.ValidateStrictCasing = true
	huma.NewError = func(status int, msg string, errs ...error) huma.StatusError {
		return frameworkProblem("", status, msg, errs)
	}
	huma.NewErrorWithContext = func(ctx huma.Context, status int, msg string, errs ...error) huma.StatusError {
		req := requestOf(ctx.Context())
		p := frameworkProblem(req.id, status, msg, errs)
		req.code = p.Code
		return p
	}
})

// frameworkProblem maps the framework's statuses onto the one table.
func frameworkProblem(id string, status int, msg string, errs []error) *api.Problem {
	class, code := sandbox.ErrInvalid, "invalid_request"
	switch status {
	case http.StatusRequestEntityTooLarge:
		class, code = sandbox.ErrTooLarge, "body_too_large"
	case http.StatusRequestTimeout:
		class, code = sandbox.ErrDeadline, "body_timeout"
	case http.StatusUnsupportedMediaType:
		code, msg = "unsupported_media_type", "the body must be application/json"
	case http.StatusInternalServerError:
		// What the framework cannot read is a body the client broke off.
		code = "broken_body"
	}
	return api.NewProblem(class, code, describe(msg, errs), id)
}

// describe lists what validation found, in words that name the field. It
// leaves out values: they can be as long as the body.
func describe(msg string, errs []error) string {
	const most = 5
	var parts []string
	for i, err := range errs {
		if err == nil {
			continue
		}
		if i == most {
			parts = append(parts, "and more")
			break
		}
		text := err.Error()
		if d, ok := err.(huma.ErrorDetailer); ok { // bare, as the framework hands them over
			d := d.ErrorDetail()
			text = clip(d.Message, 200)
			if d.Location != "" {
				text = clip(d.Location, 120) + ": " + text
			}
		}
		parts = append(parts, clip(text, 320))
	}
	if len(parts) > 0 {
		msg += ": " + strings.Join(parts, "; ")
	}
	return msg + " (see /openapi.json)"
}

func clip(s string, n int) string {
	if len(s) > n {
		return strings.ToValidUTF8(s[:n], "") + "…"
	}
	return s
}

// noRoute answers what no route matches: 405 where the path is known under
// another method, else 404.
func (s *server) noRoute(mux *http.ServeMux) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var allowed []string
		for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete} {
			other := r.Clone(r.Context())
			other.Method = method
			if _, pattern := mux.Handler(other); pattern != "/" && pattern != "" {
				allowed = append(allowed, method)
			}
		}
		id := requestOf(r.Context()).id
		if len(allowed) == 0 || slices.Contains(allowed, r.Method) {
			writeProblem(w, api.NewProblem(sandbox.ErrNotFound, "no_such_route",
				"no route "+clip(r.Method+" "+r.URL.Path, 200)+": /openapi.json lists them", id))
			return
		}
		w.Header().Set("Allow", strings.Join(allowed, ", "))
		p := api.NewProblem(sandbox.ErrInvalid, "method_not_allowed",
			"this path takes "+strings.Join(allowed, ", ")+", not "+clip(r.Method, 20), id)
		p.Status, p.Title = http.StatusMethodNotAllowed, http.StatusText(http.StatusMethodNotAllowed)
		writeProblem(w, p)
	}
}

// register adds one operation. Its handler's errors become problems here and
// nowhere else.
func register[I, O any](s *server, op huma.Operation, handler func(context.Context, *I) (*O, error)) {
	op.Errors = append(op.Errors, http.StatusBadRequest, http.StatusNotFound, http.StatusConflict)
	if op.MaxBodyBytes == 0 {
		op.MaxBodyBytes = api.MaxJSONBody
	}
	huma.Register(s.huma, op, func(ctx context.Context, in *I) (*O, error) {
		// The framework's deadline is for the body; left standing it
		// would cancel the request of a slow operation.
		requestOf(ctx).bodyRead()
		out, err := handler(ctx, in)
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		made(ctx, out)
		return out, nil
	})
}
