//go:build root

package integration

import (
	"encoding/json"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestWebhookReceiverDown: who is told of events is away for a while, and the
// daemon is killed meanwhile, twice. Then every event comes, those of one
// sandbox in their order.
func TestWebhookReceiverDown(t *testing.T) {
	const at = "127.0.0.1:39731" // the namespace is the tests' own
	d := install(t, "webhooks: {allow_private: [127.0.0.0/8]}\n")
	begin := lastEvent(t, d)
	if _, err := d.CreateWebhook(t.Context(), sandbox.WebhookRequest{URL: "http://" + at, Filter: sandbox.WebhookFilter{Events: []string{"sandbox.*"}}}); err != nil {
		t.Fatal(err)
	}
	down := time.Now()
	live := func() {
		for range 5 {
			sb := d.create(t, sandbox.Spec{})
			if _, err := d.Pause(t.Context(), string(sb.ID)); err != nil {
				t.Fatal(err)
			}
			if _, err := d.Remove(t.Context(), string(sb.ID)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for range 2 {
		live()
		d.kill()
		d.start()
	}
	live()
	<-time.After(time.Until(down.Add(time.Duration(soak(2, 60)) * time.Second))) // how long it is away

	var mu sync.Mutex
	var got []sandbox.WebhookMessage
	ln, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var m sandbox.WebhookMessage
		if err := json.NewDecoder(r.Body).Decode(&m); err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		mu.Lock()
		got = append(got, m)
		mu.Unlock()
	})}
	go func() { _ = srv.Serve(ln) }() // until it is closed
	t.Cleanup(func() { _ = srv.Close() })

	want := map[int64]sandbox.ID{}
	for after := begin; ; {
		page, _, err := d.Events(t.Context(), client.EventQuery{After: after, Limit: 1000})
		if err != nil {
			t.Fatal(err)
		}
		if len(page) == 0 {
			break
		}
		for _, e := range page {
			if strings.HasPrefix(e.Type, "sandbox.") {
				want[e.Seq] = e.Sandbox
			}
			after = e.Seq
		}
	}
	if len(want) < 45 {
		t.Fatalf("only %d events happened", len(want))
	}
	testenv.Eventually(t, 3*time.Minute, "all events come", func() bool {
		mu.Lock()
		defer mu.Unlock()
		seen := map[int64]bool{}
		for _, m := range got {
			seen[m.Seq] = true
		}
		for seq := range want {
			if !seen[seq] {
				return false
			}
		}
		return true
	})
	mu.Lock()
	defer mu.Unlock()
	last, seen := map[sandbox.ID]int64{}, map[int64]bool{}
	for _, m := range got {
		if !seen[m.Seq] && m.Seq < last[m.Sandbox] {
			t.Errorf("event %d of %s came after %d", m.Seq, m.Sandbox, last[m.Sandbox])
		}
		seen[m.Seq], last[m.Sandbox] = true, max(last[m.Sandbox], m.Seq)
	}
	t.Logf("%d events, %d deliveries, after %s", len(want), len(got), time.Since(down).Round(time.Second))
}
