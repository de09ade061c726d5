package server_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/api/server/servertest"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestProductionStreamsAreJudged: what streams into production is refused as
// the rest that changes, whoever asks, and who may not look gets no further.
func TestProductionStreamsAreJudged(t *testing.T) {
	m := servertest.New()
	if _, err := m.Create(context.Background(), sandbox.CreateRequest{Spec: sandbox.Spec{Name: "promoted", Image: "host"}}); err != nil {
		t.Fatal(err)
	}
	h := server.New(server.Config{Manager: m, Version: "test", Lab: servertest.NewLab(), Production: func() server.Manager { return m }})
	for role, code := range map[access.Role]string{
		access.RoleViewer: "role_too_low", access.RoleDeveloper: "role_too_low", access.RoleOperator: "production_read_only", access.RoleAdmin: "production_read_only",
	} {
		with := func(method, path, body string) (int, string) {
			req := httptest.NewRequest(method, path, strings.NewReader(body))
			req.Header.Set("Accept", "application/json, text/event-stream")
			req.Header.Set("Content-Type", "application/json")
			w := httptest.NewRecorder()
			h.ServeHTTP(w, req.WithContext(access.With(req.Context(), access.Caller{Owner: "x", Role: role})))
			return w.Code, w.Body.String()
		}
		ask := func(path string) (int, string) { return with(http.MethodGet, path, "") }
		const call = `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"list_sandboxes","arguments":{}}}`
		for _, method := range []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodDelete} {
			for _, path := range []string{"/mcp", "/%6dcp"} {
				status, body := with(method, "/worlds/production"+path, call)
				wants := code
				if method == http.MethodHead {
					wants = "" // it has no body
				}
				if status != http.StatusForbidden || !strings.Contains(body, wants) {
					t.Errorf("%s %s of %s: %d %s", method, path, role, status, body)
				}
			}
		}
		if status, body := with(http.MethodPost, "/mcp", call); role.AtLeast(access.RoleDeveloper) && !strings.Contains(body, "promoted") { // the control
			t.Errorf("tools in the lab as %s: %d %s", role, status, body)
		}
		const box = "/v1/sandboxes/promoted"
		for _, path := range []string{box + "/processes/p1/attach", box + "/processes/p1/%61ttach", box + "/exec", box + "/ports/80/connect", "/v1/run"} {
			if status, body := ask("/worlds/production" + path); status != http.StatusForbidden || !strings.Contains(body, code) {
				t.Errorf("%s of %s: %d %s", path, role, status, body)
			}
		}
		if status, _ := ask("/worlds/production" + box); (status == http.StatusOK) != (code == "production_read_only") { // the controls
			t.Errorf("looking as %s: %d", role, status)
		}
		if status, body := ask(box + "/processes/p1/attach"); role.AtLeast(access.RoleDeveloper) && !strings.Contains(body, "not_a_websocket") {
			t.Errorf("attach in the lab as %s: %d %s", role, status, body)
		}
	}
}

// TestProductionIsForLooking asks the production world for everything: what
// looks is answered, what changes is refused, before and after there is one.
func TestProductionIsForLooking(t *testing.T) {
	var far server.Manager
	h := server.New(server.Config{Manager: servertest.New(), Version: "test", Lab: servertest.NewLab(), Production: func() server.Manager { return far }})
	ask := func(method, path string) (int, string) {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(method, path, http.NoBody))
		return w.Code, w.Body.String()
	}
	if code, body := ask(http.MethodGet, "/worlds/production/v1/sandboxes"); code != http.StatusNotFound || !strings.Contains(body, "no_production") {
		t.Errorf("before there is one: %d %s", code, body)
	}
	m := servertest.New()
	if _, err := m.Create(context.Background(), sandbox.CreateRequest{Spec: sandbox.Spec{Name: "promoted", Image: "host"}}); err != nil {
		t.Fatal(err)
	}
	far = m
	if code, body := ask(http.MethodGet, "/worlds/production/v1/sandboxes"); code != http.StatusOK || !strings.Contains(body, "promoted") {
		t.Errorf("its sandboxes: %d %s", code, body)
	}
	if code, body := ask(http.MethodGet, "/v1/sandboxes"); code != http.StatusOK || strings.Contains(body, "promoted") {
		t.Errorf("the lab's sandboxes: %d %s", code, body)
	}
	for _, route := range routes {
		method, path, _ := strings.Cut(route, " ")
		path = strings.NewReplacer("{ref}", "promoted", "{pid}", "p1", "{name}", "absent", "{port}", "80").Replace(path)
		code, body := ask(method, "/worlds/production"+path)
		refused := code == http.StatusForbidden && strings.Contains(body, "production_read_only")
		runs := strings.HasSuffix(path, "/exec") || strings.HasSuffix(path, "/run") || strings.HasSuffix(path, "/connect") || strings.HasSuffix(path, "/attach")
		money := strings.Contains(path, "/v1/costs") || strings.Contains(path, "/v1/revenue") || strings.Contains(path, "/v1/budgets")
		if want := method != http.MethodGet && !money || runs; refused != want {
			t.Errorf("%s in production: %d %s, want refused: %v", route, code, body, want)
		}
	}
}
