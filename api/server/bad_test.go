package server_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/api/server/servertest"
	"github.com/sandboxd/sandboxd/sandbox"
)

var codeForm = regexp.MustCompile(`^[a-z][a-z0-9_]{2,63}$`)

func TestBadInputs(t *testing.T) {
	m := servertest.New()
	if _, err := m.Create(t.Context(), sandbox.CreateRequest{Spec: sandbox.Spec{Name: "box"}}); err != nil {
		t.Fatal(err)
	}
	h := server.New(server.Config{Manager: m, Version: "test"})
	all := servertest.BadInputs()
	if len(all) < 200 {
		t.Errorf("%d bad inputs, want at least 200", len(all))
	}
	for i, tc := range all {
		name := fmt.Sprintf("%03d %s %.60s %.40s", i, tc.Method, tc.Path, tc.Body)
		req := httptest.NewRequest(tc.Method, "http://d/", strings.NewReader(tc.Body))
		req.URL.Path, req.URL.RawQuery, _ = strings.Cut(tc.Path, "?")
		if tc.Body != "" {
			req.Header.Set("Content-Type", "application/json")
		}
		for k, v := range tc.Header {
			req.Header.Set(k, v)
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, req)
		var p api.Problem
		if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil || w.Header().Get("Content-Type") != api.ProblemContentType {
			t.Errorf("%s: %d, not a problem: %.200s", name, w.Code, w.Body)
			continue
		}
		if w.Code != tc.Status || p.Status != tc.Status || p.Code != tc.Code {
			t.Errorf("%s: %d %s (%s), want %d %s", name, w.Code, p.Code, p.Detail, tc.Status, tc.Code)
		}
		if !codeForm.MatchString(p.Code) || len(p.Detail) < 10 || len(p.Detail) > 4096 || p.RequestID == "" || p.RequestID != w.Header().Get(api.HeaderRequestID) || p.Title == "" {
			t.Errorf("%s: poor problem %+v", name, p)
		}
	}
	// Nothing of all that is left, and a good request still works.
	if page, err := m.List(t.Context(), sandbox.Filter{}); err != nil || len(page.Items) != 1 {
		t.Errorf("%d sandboxes, %v", len(page.Items), err)
	}
	w := httptest.NewRecorder()
	req := httptest.NewRequest(http.MethodPost, "http://d/v1/sandboxes", strings.NewReader(`{"name":"good"}`))
	h.ServeHTTP(w, req)
	if w.Code != http.StatusCreated {
		t.Errorf("a good request: %d %s", w.Code, w.Body)
	}
}

func FuzzRefsAndCursors(f *testing.F) {
	m := servertest.New()
	h := server.New(server.Config{Manager: m})
	for _, s := range []string{"box", "sb", "sbaaaaaaaaaaaa", "..", "a/b", "\x00", "%2e"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		for _, set := range []func(*http.Request){
			func(r *http.Request) { r.URL.Path = "/v1/sandboxes/" + s },
			func(r *http.Request) { r.URL.Path = "/v1/images/" + s },
			func(r *http.Request) { r.URL.Path = "/v1/sandboxes"; r.URL.RawQuery = "cursor=" + s },
			func(r *http.Request) { r.URL.Path = "/v1/sandboxes"; r.URL.RawQuery = s },
			func(r *http.Request) { r.URL.Path = "/v1/events"; r.Header.Set("Last-Event-ID", s) },
		} {
			r := httptest.NewRequest(http.MethodGet, "http://d/", http.NoBody)
			set(r)
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			if w.Code >= 500 {
				body, _ := io.ReadAll(w.Body)
				t.Errorf("%s?%s: %d %s", r.URL.Path, r.URL.RawQuery, w.Code, body)
			}
		}
	})
}
