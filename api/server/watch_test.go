package server_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/api/server/servertest"
)

// watcher remembers what it was told.
type watcher struct {
	mu       sync.Mutex
	expected []string
	seen     []string // operation and status
}

type watched struct{}

func (w *watcher) Expect(operations []string) { w.expected = operations }

func (w *watcher) Begin(ctx context.Context, _ *http.Request, id string) context.Context {
	return context.WithValue(ctx, watched{}, id)
}

func (w *watcher) End(ctx context.Context, operation string, status int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if ctx.Value(watched{}) == nil {
		operation = "without the context of Begin: " + operation
	}
	w.seen = append(w.seen, fmt.Sprint(operation, " ", status))
}

func TestWatcher(t *testing.T) {
	w := &watcher{}
	h := server.New(server.Config{
		Manager: servertest.New(), Watcher: w,
		Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "numbers 1\n") }),
	})
	for _, c := range []struct{ method, path, body, want string }{
		{"GET", "/v1/version", "", "version 200"},
		{"GET", "/v1/sandboxes/nothing-there", "", "get-sandbox 404"},
		{"GET", "/v1/sandboxes/another", "", "get-sandbox 404"},
		{"GET", "/v1/events?after=x", "", "events 400"}, // found, and refused before its handler
		{"POST", "/v1/sandboxes", `{"spec":{"nonsense":1}}`, "create-sandbox 400"},
		{"GET", "/docs", "", "docs 200"},
		{"GET", "/metrics", "", "metrics 200"},
		{"GET", "/v1/made/up", "", " 404"},
	} {
		req := httptest.NewRequestWithContext(t.Context(), c.method, c.path, strings.NewReader(c.body))
		req.Header.Set("Content-Type", "application/json")
		h.ServeHTTP(httptest.NewRecorder(), req)
		if got := w.seen[len(w.seen)-1]; got != c.want {
			t.Errorf("%s %s: watched %q, want %q", c.method, c.path, got, c.want)
		}
	}
	for _, op := range []string{"version", "create-sandbox", "mcp", "metrics"} {
		if !slices.Contains(w.expected, op) {
			t.Errorf("%s is not expected", op)
		}
	}
	if n := len(w.expected); n < 50 || len(slices.Compact(slices.Clone(w.expected))) != n {
		t.Errorf("%d operations are expected, or some twice: %v", n, w.expected)
	}
}

// TestMetricsAreForOperators: who sees one owner's objects does not see the
// numbers of all.
func TestMetricsAreForOperators(t *testing.T) {
	h := server.New(server.Config{
		Manager: servertest.New(),
		Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "numbers 1\n") }),
	})
	for role, want := range map[access.Role]int{
		access.RoleAdmin: 200, access.RoleOperator: 200, access.RoleDeveloper: 403, access.RoleViewer: 403,
	} {
		ctx := access.With(t.Context(), access.Caller{Owner: "alice", Role: role})
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, httptest.NewRequestWithContext(ctx, "GET", "/metrics", nil))
		if rec.Code != want || (want == 200) != strings.Contains(rec.Body.String(), "numbers") {
			t.Errorf("%s: %d %s, want %d", role, rec.Code, rec.Body, want)
		}
	}
}
