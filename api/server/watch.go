package server

import (
	"context"
	"net/http"
	"slices"

	"github.com/danielgtaylor/huma/v2"
)

// Watcher is told of every request, to count it or to draw its way. It is on
// that way, so it must not wait.
type Watcher interface {
	// Expect is called once, before the first request, with the names of all
	// operations there are: those of the API, and a few of what else is served.
	Expect(operations []string)
	// Begin returns the context that the request is worked on with. id is what
	// the answer and the log call the request.
	Begin(ctx context.Context, r *http.Request, id string) context.Context
	// End is called with that context when the answer is over, or its stream.
	// The operation is one of those expected, and empty where none was found;
	// the status is 0 where none was sent.
	End(ctx context.Context, operation string, status int)
}

// Names of what is served and is no operation of the API.
const (
	servedMCP        = "mcp"
	servedDocs       = "docs"
	servedMetrics    = "metrics"
	servedProduction = "production" // any operation of that world
)

const metricsPath = "/metrics"

// watch wraps what the middleware calls.
func (s *server) watch(cfg Config) {
	s.huma.UseMiddleware(func(ctx huma.Context, next func(huma.Context)) {
		requestOf(ctx.Context()).operation = ctx.Operation().OperationID
		next(ctx)
	})
	s.watcher = cfg.Watcher
}

// expect tells the watcher which operations there are.
func (s *server) expect() {
	if s.watcher == nil {
		return
	}
	all := []string{servedMCP, servedDocs, servedMetrics, servedProduction}
	for _, item := range s.huma.OpenAPI().Paths {
		for _, op := range []*huma.Operation{item.Get, item.Put, item.Post, item.Delete, item.Patch, item.Head} {
			if op != nil {
				all = append(all, op.OperationID)
			}
		}
	}
	slices.Sort(all)
	s.watcher.Expect(slices.Compact(all))
}

// named names what is served beside the operations of the API.
func named(operation string, h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requestOf(r.Context()).operation = operation
		h.ServeHTTP(w, r)
	})
}
