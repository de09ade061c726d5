package server_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/api/server/servertest"
)

// routes is every route there is, written down once more by hand.
var routes = []string{
	"POST /v1/sandboxes:pause", "POST /v1/sandboxes:resume", "POST /v1/sandboxes:stop", "POST /v1/sandboxes:start", "POST /v1/sandboxes:remove",
	"POST /sandbox/provision", "POST /sandbox/reset", "GET /sandbox/status", "POST /sandbox/scenario/{id}", "GET /sandbox/logs",
	"GET /healthz", "GET /v1/version", "GET /v1/doctor", "GET /v1/events",
	"GET /v1/sandboxes", "POST /v1/sandboxes", "GET /v1/sandboxes/{ref}", "PATCH /v1/sandboxes/{ref}", "DELETE /v1/sandboxes/{ref}",
	"POST /v1/sandboxes/{ref}/pause", "POST /v1/sandboxes/{ref}/resume", "POST /v1/sandboxes/{ref}/stop", "POST /v1/sandboxes/{ref}/start", "POST /v1/sandboxes/{ref}/reset", "PUT /v1/sandboxes/{ref}/network", "GET /v1/pool", "GET /v1/usage",
	"GET /v1/prices", "POST /v1/costs", "POST /v1/costs/{entry}/cancel", "POST /v1/revenue", "GET /v1/costs", "GET /v1/costs/report",
	"POST /v1/budgets", "GET /v1/budgets", "GET /v1/budgets/{budget}", "DELETE /v1/budgets/{budget}",
	"PUT /v1/sandboxes/{ref}/network/fault", "GET /v1/sandboxes/{ref}/network/fault", "DELETE /v1/sandboxes/{ref}/network/fault",
	"POST /v1/sandboxes/{ref}/snapshots", "GET /v1/snapshots", "GET /v1/snapshots/{ref}", "DELETE /v1/snapshots/{ref}",
	"POST /v1/snapshots/{ref}/fork", "POST /v1/sandboxes/{ref}/fork", "POST /v1/sandboxes/{ref}/rollback", "POST /v1/sandboxes/{ref}/undo",
	"GET /v1/sandboxes/{ref}/history", "GET /v1/diff", "GET /v1/snapshots/{ref}/archive", "POST /v1/snapshots",
	"POST /v1/sandboxes/{ref}/schedules", "GET /v1/schedules", "DELETE /v1/schedules/{id}",
	"GET /v1/sandboxes/{ref}/usage", "GET /v1/sandboxes/{ref}/output", "GET /v1/sandboxes/{ref}/exec",
	"POST /v1/sandboxes/{ref}/exec", "GET /v1/run", "POST /v1/run",
	"GET /v1/sandboxes/{ref}/processes", "POST /v1/sandboxes/{ref}/processes", "GET /v1/sandboxes/{ref}/processes/{pid}",
	"POST /v1/sandboxes/{ref}/processes/{pid}/signal", "GET /v1/sandboxes/{ref}/processes/{pid}/output", "GET /v1/sandboxes/{ref}/processes/{pid}/attach",
	"GET /v1/sandboxes/{ref}/files", "PUT /v1/sandboxes/{ref}/files", "DELETE /v1/sandboxes/{ref}/files",
	"GET /v1/sandboxes/{ref}/files/stat", "GET /v1/sandboxes/{ref}/files/list", "POST /v1/sandboxes/{ref}/files/mkdir", "POST /v1/sandboxes/{ref}/files/move",
	"POST /v1/sandboxes/{ref}/files/chmod", "GET /v1/sandboxes/{ref}/files/watch", "GET /v1/sandboxes/{ref}/files/archive", "PUT /v1/sandboxes/{ref}/files/archive",
	"GET /v1/sandboxes/{ref}/network", "GET /v1/sandboxes/{ref}/network/explain",
	"DELETE /v1/host-names/{name}", "GET /v1/images", "POST /v1/images", "GET /v1/images/{name}", "DELETE /v1/images/{name}",
	"GET /v1/operations", "GET /v1/operations/{operation}", "DELETE /v1/operations/{operation}",
	"POST /v1/images/build", "GET /v1/build-cache", "DELETE /v1/build-cache",
	"GET /v1/templates", "PUT /v1/templates/{name}", "GET /v1/templates/{name}", "DELETE /v1/templates/{name}",
	"GET /v1/volumes", "POST /v1/volumes", "GET /v1/volumes/{name}", "PATCH /v1/volumes/{name}", "DELETE /v1/volumes/{name}",
	"GET /v1/secrets", "PUT /v1/secrets/{name}", "DELETE /v1/secrets/{name}",
	"GET /v1/webhooks", "POST /v1/webhooks", "GET /v1/webhooks/{webhook}", "DELETE /v1/webhooks/{webhook}",
	"POST /v1/webhooks/{webhook}/test", "GET /v1/webhooks/{webhook}/dead", "POST /v1/webhooks/{webhook}/dead/retry",
	"POST /v1/sandboxes/{ref}/ports", "GET /v1/sandboxes/{ref}/ports", "GET /v1/ports", "DELETE /v1/ports/{id}",
	"PUT /v1/sandboxes/{ref}/port-token", "DELETE /v1/sandboxes/{ref}/port-token", "GET /v1/sandboxes/{ref}/ports/{port}/connect",
	"GET /v1/whoami", "GET /v1/keys", "POST /v1/keys", "DELETE /v1/keys/{key}", "GET /v1/audit", "GET /v1/audit/verify",
	"GET /v1/owners", "GET /v1/owners/{owner}", "PUT /v1/owners/{owner}", "DELETE /v1/owners/{owner}",
	"POST /v1/images/pull", "POST /v1/images/push", "POST /v1/images/export", "POST /v1/images/tag", "POST /v1/images/prune",
	"GET /v1/projects", "POST /v1/projects", "GET /v1/project-summary", "GET /v1/projects/{project}", "PATCH /v1/projects/{project}", "DELETE /v1/projects/{project}",
	"POST /v1/projects/{project}/kill", "POST /v1/projects/{project}/entries", "POST /v1/projects/{project}/agents", "POST /v1/agents/{agent}/{verb}", "DELETE /v1/agents/{agent}", "GET /v1/production-agents",
	"GET /v1/experiment-templates", "POST /v1/projects/{project}/experiments", "GET /v1/projects/{project}/experiments", "POST /v1/projects/{project}/experiments/{experiment}/complete",
	"POST /v1/projects/{project}/evaluations", "GET /v1/projects/{project}/evaluations", "POST /v1/projects/{project}/promotions", "GET /v1/projects/{project}/promotions",
}

type document struct {
	OpenAPI string
	Paths   map[string]map[string]struct {
		OperationID string `json:"operationId"`
		Summary     string
		Parameters  []struct{ Name, In string }
		Responses   map[string]json.RawMessage
	}
	Components struct{ Schemas map[string]json.RawMessage }
}

func TestOpenAPI(t *testing.T) {
	office, audit, _ := servertest.NewOffice(access.Config{})
	defer audit.Close()
	h := server.New(server.Config{Manager: servertest.New(), Version: "test", Lab: servertest.NewLab(), Office: office, Audit: audit})
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/openapi.json", http.NoBody))
	raw := w.Body.Bytes()
	var doc document
	if err := json.Unmarshal(raw, &doc); err != nil || w.Code != http.StatusOK {
		t.Fatalf("%d %v", w.Code, err)
	}
	if to := os.Getenv("SANDBOXD_OPENAPI_OUT"); to != "" { // make sdk
		var whole any
		err := json.Unmarshal(raw, &whole)
		sorted, merr := json.Marshal(whole)
		if err := errors.Join(err, merr, os.WriteFile(to, sorted, 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	if doc.OpenAPI != "3.1.0" {
		t.Errorf("version %q", doc.OpenAPI)
	}
	var got []string
	ids := map[string]bool{}
	inPath := regexp.MustCompile(`\{([^}]*)\}`)
	for path, ops := range doc.Paths {
		for method, op := range ops {
			route := strings.ToUpper(method) + " " + path
			got = append(got, route)
			if op.OperationID == "" || ids[op.OperationID] || op.Summary == "" {
				t.Errorf("%s: operation id %q is empty or taken, or no summary", route, op.OperationID)
			}
			ids[op.OperationID] = true
			if len(op.Responses) < 2 {
				t.Errorf("%s: only %d responses", route, len(op.Responses))
			}
			for _, m := range inPath.FindAllStringSubmatch(path, -1) {
				if !slices.ContainsFunc(op.Parameters, func(p struct{ Name, In string }) bool { return p.Name == m[1] && p.In == "path" }) {
					t.Errorf("%s: path parameter %s is not described", route, m[1])
				}
			}
		}
	}
	slices.Sort(got)
	want := slices.Sorted(slices.Values(routes))
	if !slices.Equal(got, want) {
		t.Errorf("routes are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	for _, m := range regexp.MustCompile(`"\$ref":"#/components/schemas/([^"]*)"`).FindAllSubmatch(raw, -1) {
		if doc.Components.Schemas[string(m[1])] == nil {
			t.Errorf("$ref to %s leads nowhere", m[1])
		}
	}
}

// TestDocumentedRoutesAnswer asks every documented route for something: none
// may say that it does not exist.
func TestDocumentedRoutesAnswer(t *testing.T) {
	office, audit, _ := servertest.NewOffice(access.Config{})
	defer audit.Close()
	h := server.New(server.Config{Manager: servertest.New(), Version: "test", Lab: servertest.NewLab(), Office: office, Audit: audit})
	ctx := access.With(t.Context(), access.Caller{Owner: "uid:0", Role: access.RoleAdmin})
	for _, route := range routes {
		method, path, _ := strings.Cut(route, " ")
		if strings.Contains(path, "/scenario/") {
			continue // there are none, and it says so
		}
		path = strings.NewReplacer("{ref}", "absent", "{pid}", "p1", "{name}", "absent").Replace(path)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequestWithContext(ctx, method, path, http.NoBody))
		if strings.Contains(w.Body.String(), "no_such_route") || w.Code == http.StatusMethodNotAllowed || w.Code >= 500 {
			t.Errorf("%s: %d %s", route, w.Code, w.Body)
		}
	}
}
