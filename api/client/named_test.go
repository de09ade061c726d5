package client

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

// TestEmptyReference: nothing is asked of the daemon where a reference names
// nothing; a name reaches it.
func TestEmptyReference(t *testing.T) {
	asked := 0
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked++
		http.Error(w, "no", http.StatusTeapot)
	}))
	defer srv.Close()
	c, err := New(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	for ref, want := range map[string]bool{"": false, ".": false, "..": false, "dev": true, "a/../b": true} {
		for what, do := range map[string]func() error{
			"remove": func() error { _, err := c.Remove(t.Context(), ref); return err },
			"stop":   func() error { _, err := c.Stop(t.Context(), ref); return err },
			"volume": func() error { return c.RemoveVolume(t.Context(), ref) },
			"port":   func() error { _, err := c.DialPort(t.Context(), ref, 80); return err },
		} {
			asked = 0
			err := do()
			if refused := sandbox.CodeOf(err) == "invalid_name"; refused == want || (asked > 0) != want {
				t.Errorf("%s %q: %d requests, %v", what, ref, asked, err)
			}
		}
	}
}
