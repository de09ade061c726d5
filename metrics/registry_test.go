package metrics

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// stocked is a registry that reads something of everything.
func stocked(read func(*Reading)) *Registry {
	reg := New(Config{
		Version: "v1.2.3", Works: []string{"create", "exec", "reset", "destroy"},
		Read: func(context.Context) (Reading, error) {
			r := Reading{
				Worlds: []World{{
					Name: "lab", Living: map[sandbox.Status]int{sandbox.StatusRunning: 3}, Ended: map[sandbox.Reason]int64{sandbox.ReasonTTL: 2},
					Used: sandbox.Meters{CPU: 1_500_000, NetRx: 7}, ByBudget: map[cost.Action]int64{cost.ActionStop: 1},
					Events: map[string]int64{"sandbox.running": 4, "made-up": 1},
				}},
				Disks: []Disk{{Name: "volume", Total: 100, Free: 30}},
			}
			if read != nil {
				read(&r)
			}
			return r, nil
		},
	})
	reg.Expect("create-sandbox", "exec")
	return reg
}

// scrape returns what Prometheus would get.
func scrape(t *testing.T, r *Registry) string {
	t.Helper()
	w := httptest.NewRecorder()
	r.Handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/metrics", nil))
	b, err := io.ReadAll(w.Result().Body)
	if err != nil || w.Code != 200 {
		t.Fatalf("scrape: %d, %v\n%s", w.Code, err, b)
	}
	return string(b)
}

func TestScrape(t *testing.T) {
	r := stocked(nil)
	r.Request("create-sandbox", 201)
	r.Request("exec", 101)
	r.Request("never heard of", 404)
	r.Request("exec", 0)
	r.Work("create", 30*time.Millisecond, nil)
	r.Work("create", time.Second, sandbox.Errorf(sandbox.ErrExhausted, "slots_exhausted", "full"))
	r.Work("create", time.Second, fmt.Errorf("wrapped: %w", errors.New("no class")))
	scrape(t, r)
	text := scrape(t, r)
	for _, want := range []string{
		`sandboxd_api_requests_total{class="2xx",operation="create-sandbox"} 1`,
		`sandboxd_api_requests_total{class="1xx",operation="exec"} 1`,
		`sandboxd_api_requests_total{class="none",operation="exec"} 1`,
		`sandboxd_api_requests_total{class="4xx",operation="other"} 1`,
		`sandboxd_work_total{outcome="ok",work="create"} 1`,
		`sandboxd_work_total{outcome="exhausted",work="create"} 1`,
		`sandboxd_work_total{outcome="internal",work="create"} 1`,
		`sandboxd_work_seconds_bucket{work="create",le="0.05"} 1`,
		`sandboxd_work_seconds_count{work="create"} 3`,
		`sandboxd_sandboxes{status="running",world="lab"} 3`,
		`sandboxd_sandboxes{status="paused",world="lab"} 0`,
		`sandboxd_sandboxes_ended_total{reason="ttl",world="lab"} 2`,
		`sandboxd_used_cpu_seconds_total{world="lab"} 1.5`,
		`sandboxd_budget_acts_total{act="stop",world="lab"} 1`,
		`sandboxd_events_total{kind="sandbox",world="lab"} 8`, // of two readings
		`sandboxd_events_total{kind="other",world="lab"} 2`,
		`sandboxd_disk_bytes{disk="volume",state="used"} 70`,
		`sandboxd_scrape_ok 1`,
		`go_goroutines `, `process_resident_memory_bytes `, `version="v1.2.3"`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no line with %s", want)
		}
	}
	if t.Failed() {
		t.Log(text)
	}
}

// TestScrapeOfWhatCannotBeRead has what else there is, and says so.
func TestScrapeOfWhatCannotBeRead(t *testing.T) {
	r := New(Config{Read: func(context.Context) (Reading, error) {
		return Reading{Connections: 5}, errors.New("the database does not answer")
	}})
	if text := scrape(t, r); !strings.Contains(text, "sandboxd_scrape_ok 0") || !strings.Contains(text, "sandboxd_api_connections 5") {
		t.Errorf("a scrape with an error:\n%s", text)
	}
}

// TestSeriesAreBounded: what callers choose makes no series. The control: what
// this program chooses does.
func TestSeriesAreBounded(t *testing.T) {
	n := 0
	r := stocked(func(r *Reading) {
		n++
		r.Worlds[0].Events[fmt.Sprintf("custom%d.event", n)] = 1
		r.Worlds[0].Living[sandbox.Status(fmt.Sprint("odd", n))] = 1
		r.Worlds[0].Ended[sandbox.Reason(fmt.Sprint("odd", n))] = 1
	})
	for status := range 600 { // every class of the operations used below
		r.Request("exec", status)
		r.Request("x", status)
	}
	before, err := r.Series()
	if err != nil {
		t.Fatal(err)
	}
	for i := range 1000 {
		name := fmt.Sprintf("/v1/sandboxes/sb%012d", i)
		r.Request(name, 200+i%400)
		r.Request("exec", i)
		r.Work(name, time.Duration(i)*time.Millisecond, fmt.Errorf("about %s", name))
		r.Work("create", time.Second, sandbox.Errorf(sandbox.ErrConflict, name, "%s", name))
	}
	after, err := r.Series()
	if err != nil || after != before {
		t.Errorf("%d series after a thousand names, %d before: %v", after, before, err)
	}
	r.Request("create-sandbox", 301)
	if grown, err := r.Series(); err != nil || grown != after+1 {
		t.Errorf("the control: %d series after a status never seen, want %d: %v", grown, after+1, err)
	}
}

// BenchmarkRequest is what the counting adds to each request.
func BenchmarkRequest(b *testing.B) {
	r := stocked(nil)
	b.ReportAllocs()
	for b.Loop() {
		r.Request("exec", 200)
	}
}

// BenchmarkWork is what it adds to each work.
func BenchmarkWork(b *testing.B) {
	r := stocked(nil)
	err := sandbox.Errorf(sandbox.ErrConflict, "wrong_state", "no")
	b.ReportAllocs()
	for b.Loop() {
		r.Work("create", 20*time.Millisecond, err)
	}
}
