package server_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestSecrets: values go in and never come out.
func TestSecrets(t *testing.T) {
	d := start(t)
	c := d.client(t)
	const value = "Bearer not-to-be-told"
	s, err := c.SetSecret(t.Context(), sandbox.SecretRequest{Name: "key", Value: value, Hosts: []string{"example.com"}})
	if err != nil || s.Name != "key" || len(s.Hosts) != 1 || s.Owner == "" {
		t.Fatalf("%+v, %v", s, err)
	}
	if _, err := c.SetSecret(t.Context(), sandbox.SecretRequest{Name: "key", Value: value + "\n"}); !errors.Is(err, sandbox.ErrInvalid) || strings.Contains(err.Error(), "not-to-be-told") {
		t.Errorf("a line end: %v", err)
	}
	if all, err := c.Secrets(t.Context()); err != nil || len(all) != 1 || all[0].Name != "key" {
		t.Errorf("%+v, %v", all, err)
	}
	if d.m.Values["key"] != value {
		t.Errorf("set to %q", d.m.Values["key"])
	}
	h := server.New(server.Config{Manager: d.m})
	for _, r := range []*http.Request{
		httptest.NewRequest(http.MethodGet, "/v1/secrets", http.NoBody), httptest.NewRequest(http.MethodGet, "/v1/secrets/key", http.NoBody),
		httptest.NewRequest(http.MethodPut, "/v1/secrets/key", strings.NewReader(`{"value":"`+value+`"}`)),
		httptest.NewRequest(http.MethodPut, "/v1/secrets/key", strings.NewReader(`{"value":"`+value+`","more":1}`)),
		httptest.NewRequest(http.MethodPut, "/v1/secrets/key", strings.NewReader(`{"value":"`+strings.Repeat(value, 5000)+`"}`)),
	} {
		r.Header.Set("Content-Type", "application/json")
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if strings.Contains(w.Body.String(), "not-to-be-told") {
			t.Errorf("%s %s tells the value: %d %s", r.Method, r.URL, w.Code, w.Body)
		}
	}
	if err := c.RemoveSecret(t.Context(), "key"); err != nil {
		t.Error(err)
	}
	if err := c.RemoveSecret(t.Context(), "key"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("removed twice: %v", err)
	}
}
