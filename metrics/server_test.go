package metrics

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/api/server/servertest"
)

// counting is a registry as the API's watcher.
type counting struct{ *Registry }

func (c counting) Expect(operations []string) { c.Registry.Expect(operations...) }

func (c counting) Begin(ctx context.Context, _ *http.Request, _ string) context.Context { return ctx }

func (c counting) End(_ context.Context, operation string, status int) { c.Request(operation, status) }

// TestRequestsMakeNoSeries sends the API a thousand sandboxes' worth of names,
// paths and methods.
func TestRequestsMakeNoSeries(t *testing.T) {
	r := stocked(nil)
	h := server.New(server.Config{Manager: servertest.New(), Watcher: counting{r}, Metrics: r.Handler()})
	send := func(method, path, body string) {
		req := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(body))
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-Request-Id", fmt.Sprint("mine-", len(path), len(body)))
		h.ServeHTTP(httptest.NewRecorder(), req)
	}
	before, err := r.Series()
	if err != nil {
		t.Fatal(err)
	}
	for i := range 1000 {
		send("POST", "/v1/sandboxes", fmt.Sprintf(`{"name":"tiger%d","labels":{"n%d":"v"}}`, i, i))
		send("GET", fmt.Sprintf("/v1/sandboxes/tiger%d", i), "")
		send("GET", fmt.Sprintf("/v1/nowhere/%d", i), "")
		send(fmt.Sprintf("M%d", i), "/v1/sandboxes", "")
		send("DELETE", fmt.Sprintf("/v1/sandboxes/tiger%d", i), "")
	}
	after, err := r.Series()
	if err != nil || after != before {
		t.Errorf("%d series after a thousand sandboxes, %d before: %v", after, before, err)
	}
	text := scrape(t, r)
	for _, series := range []string{ // the control: they were counted
		`sandboxd_api_requests_total{class="2xx",operation="create-sandbox"} 1000`, `sandboxd_api_requests_total{class="2xx",operation="remove-sandbox"} 1000`,
		`sandboxd_api_requests_total{class="4xx",operation="other"} 2000`,
	} {
		if !strings.Contains(text, series) {
			t.Errorf("not counted: %s", series)
		}
	}
	if strings.Contains(text, "tiger") {
		t.Error("a name shows in the metrics")
	}
}
