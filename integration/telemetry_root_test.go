//go:build root

package integration

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// scraped is one scrape, and what it said.
func (d *daemon) scraped(t testing.TB) func(series string) float64 {
	t.Helper()
	h := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(d.Dir, "run", "sandboxd.sock"))
		},
	}}
	res, err := h.Get("http://sandboxd/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != http.StatusOK {
		t.Fatalf("scrape: %s, %v\n%s", res.Status, err, text)
	}
	return func(series string) float64 {
		t.Helper()
		found := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(series) + ` (\S+)$`).FindSubmatch(text)
		if found == nil {
			t.Fatalf("no series %s in\n%s", series, text)
		}
		n, err := strconv.ParseFloat(string(found[1]), 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
}

// TestMetrics: what a sandbox does shows in the numbers.
func TestMetrics(t *testing.T) {
	d := install(t, "usage: {interval: 200ms}\n")
	before := d.scraped(t)
	sb := d.create(t, sandbox.Spec{})
	d.sh(t, string(sb.ID), "i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done")
	running := d.scraped(t)
	if n := running(`sandboxd_sandboxes{status="running",world="lab"}`); n != 1 {
		t.Errorf("%g sandboxes run, want 1", n)
	}
	if _, err := d.Remove(t.Context(), string(sb.ID)); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 10*time.Second, "the end shows", func() bool {
		return d.scraped(t)(`sandboxd_sandboxes_ended_total{reason="cancelled",world="lab"}`) == 1
	})
	after := d.scraped(t)
	for series, more := range map[string]float64{
		`sandboxd_work_total{outcome="ok",work="create"}`:                     1,
		`sandboxd_work_seconds_count{work="create"}`:                          1,
		`sandboxd_work_total{outcome="ok",work="exec"}`:                       1,
		`sandboxd_work_total{outcome="ok",work="destroy"}`:                    1,
		`sandboxd_api_requests_total{class="2xx",operation="create-sandbox"}`: 1,
		`sandboxd_used_cpu_seconds_total{world="lab"}`:                        .001,
		`sandboxd_events_total{kind="sandbox",world="lab"}`:                   3,
		`sandboxd_sandbox_records{world="lab"}`:                               1,
	} {
		if was, is := before(series), after(series); is < was+more {
			t.Errorf("%s: %g and then %g, want %g more", series, was, is, more)
		}
	}
	for _, series := range []string{
		`sandboxd_disk_bytes{disk="volume",state="free"}`, `sandboxd_disk_bytes{disk="state",state="used"}`,
		`sandboxd_database_bytes{world="lab"}`, `sandboxd_api_connections`, `sandboxd_scrape_ok`, `sandboxd_images{world="lab"}`,
	} {
		if n := after(series); n <= 0 && series != `sandboxd_images{world="lab"}` {
			t.Errorf("%s is %g", series, n)
		}
	}
}

// TestTraces: a create's parts reach the collector below its request, which is
// below what the caller named.
func TestTraces(t *testing.T) {
	var mu sync.Mutex
	var got []byte // of all exports: the names in them are plain text
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		mu.Lock()
		defer mu.Unlock()
		got = append(got, b...)
	}))
	defer collector.Close()
	d := install(t, "telemetry: {otlp_endpoint: \""+collector.URL+"\"}\n")
	sb := d.create(t, sandbox.Spec{})
	d.sh(t, string(sb.ID), "true")
	if _, err := d.Remove(t.Context(), string(sb.ID)); err != nil {
		t.Fatal(err)
	}
	d.stop() // sends what waits
	d.start()
	mu.Lock()
	defer mu.Unlock()
	for _, span := range []string{"create-sandbox", "create.plan", "create.root", "create.configure", "create.row", "exec", "destroy", "sandboxd.request_id"} {
		if !bytes.Contains(got, []byte(span)) {
			t.Errorf("the collector heard nothing of %s", span)
		}
	}
}
