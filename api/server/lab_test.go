package server_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/api/server/servertest"
	"github.com/sandboxd/sandboxd/sandbox"
)

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
		runs := strings.HasSuffix(path, "/exec") || strings.HasSuffix(path, "/run") || strings.HasSuffix(path, "/connect")
		money := strings.Contains(path, "/v1/costs") || strings.Contains(path, "/v1/revenue") || strings.Contains(path, "/v1/budgets")
		if want := method != http.MethodGet && !money || runs; refused != want {
			t.Errorf("%s in production: %d %s, want refused: %v", route, code, body, want)
		}
	}
}
