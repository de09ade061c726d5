//go:build root

package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/server/servertest"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestBadInputs sends some hundreds of requests that must be refused to a real
// daemon: each gets a 4xx with a stable code and words, and the daemon lives.
func TestBadInputs(t *testing.T) {
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "box"})
	d.sh(t, "box", "echo x > /tmp/f")
	gone := d.create(t, sandbox.Spec{})
	if _, err := d.Remove(t.Context(), string(gone.ID)); err != nil {
		t.Fatal(err)
	}
	all := servertest.BadInputs()
	for _, tail := range []string{"/processes", "/files/mkdir"} {
		body := map[string]string{"/processes": `{"argv":["true"]}`, "/files/mkdir": `{"path":"/x"}`}[tail]
		all = append(all, servertest.BadInput{Method: "POST", Path: "/v1/sandboxes/" + string(gone.ID) + tail, Body: body, Status: 409, Code: "sandbox_ended"})
	}
	for _, verb := range []string{"pause", "resume", "stop", "start"} {
		all = append(all, servertest.BadInput{Method: "POST", Path: "/v1/sandboxes/" + string(gone.ID) + "/" + verb, Status: 409, Code: "sandbox_ended"})
	}
	if len(all) < 200 {
		t.Fatalf("%d bad inputs, want at least 200", len(all))
	}
	socket := filepath.Join(d.Dir, "run", "sandboxd.sock")
	hc := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}}
	defer hc.CloseIdleConnections()
	for i, in := range all {
		name := fmt.Sprintf("%03d %s %.60s %.40s", i, in.Method, in.Path, in.Body)
		path, query, _ := strings.Cut(in.Path, "?")
		req, err := http.NewRequestWithContext(t.Context(), in.Method, "http://d/", strings.NewReader(in.Body))
		if err != nil {
			t.Fatal(err)
		}
		req.URL = &url.URL{Scheme: "http", Host: "d", Path: path, RawQuery: query}
		if in.Body != "" {
			req.Header.Set("Content-Type", "application/json")
		}
		for k, v := range in.Header {
			req.Header.Set(k, v)
		}
		res, err := hc.Do(req)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		b, err := io.ReadAll(res.Body)
		res.Body.Close()
		var p api.Problem
		if err != nil || json.Unmarshal(b, &p) != nil {
			t.Errorf("%s: %d, not a problem: %.200s", name, res.StatusCode, b)
			continue
		}
		if res.StatusCode < 400 || res.StatusCode > 499 || p.Code != in.Code || len(p.Detail) < 10 {
			t.Errorf("%s: %d %s (%s), want %d %s", name, res.StatusCode, p.Code, p.Detail, in.Status, in.Code)
		}
	}
	// The daemon is the same process, holds nothing it should not, and works.
	d.agree(t)
	if got := d.sh(t, "box", "cat /tmp/f"); got != "x" {
		t.Errorf("after all that: %q", got)
	}
}
