//go:build root

package integration

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestManyClients has 200 clients, each with connections of its own, look and
// change things at once. Nothing may fail but what has nothing left (429),
// and who listens to the events must see each of them once, in order.
func TestManyClients(t *testing.T) {
	const clients, changing = 200, 10
	d := install(t, "")
	var refs []string
	for range changing {
		refs = append(refs, string(d.create(t, sandbox.Spec{}).ID))
	}
	begin := lastEvent(t, d)
	listening, hush := context.WithCancel(t.Context())
	defer hush()
	heard := make(chan sandbox.Event, 1<<16)
	go func() {
		defer close(heard)
		err := d.Follow(listening, client.EventQuery{After: begin}, func(e sandbox.Event) error { heard <- e; return nil })
		if err != nil && listening.Err() == nil {
			t.Errorf("the stream of events: %v", err)
		}
	}()

	end := time.Now().Add(time.Duration(soak(8, 60)) * time.Second)
	var asked, changed, refused atomic.Int64
	var wg sync.WaitGroup
	for i := range clients {
		wg.Go(func() {
			c, err := client.New(d.host())
			if err != nil {
				t.Error(err)
				return
			}
			ref := refs[i%len(refs)]
			for n := 0; time.Now().Before(end) && !t.Failed(); n++ {
				var err error
				switch {
				case i < changing && n%2 == 0:
					_, err = c.Pause(t.Context(), ref)
					changed.Add(1)
				case i < changing:
					_, err = c.Resume(t.Context(), ref)
					changed.Add(1)
				case n%10 == 0:
					_, err = c.List(t.Context(), sandbox.Filter{})
				default:
					_, err = c.Sandbox(t.Context(), ref)
				}
				asked.Add(1)
				if errors.Is(err, sandbox.ErrExhausted) {
					refused.Add(1)
				} else if err != nil {
					t.Errorf("client %d, request %d: %v", i, n, err)
				}
			}
		})
	}
	wg.Wait()
	if changed.Load() < 2*changing || asked.Load() < 10*clients {
		t.Errorf("only %d requests, %d of them changes", asked.Load(), changed.Load())
	}

	var want []int64
	for after := begin; ; {
		page, _, err := d.Events(t.Context(), client.EventQuery{After: after, Limit: 1000})
		if err != nil {
			t.Fatal(err)
		}
		if len(page) == 0 {
			break
		}
		for _, e := range page {
			want = append(want, e.Seq)
		}
		after = want[len(want)-1]
	}
	var got []int64
	for deadline := time.After(30 * time.Second); len(got) < len(want); {
		select {
		case e, ok := <-heard:
			if !ok {
				t.Fatalf("the stream ended after %d of %d events", len(got), len(want))
			}
			got = append(got, e.Seq)
		case <-deadline:
			t.Fatalf("%d events of %d came", len(got), len(want))
		}
	}
	if !slices.Equal(got[:len(want)], want) {
		t.Errorf("what came differs from what is kept: %s", firstDifference(got, want))
	}
	t.Logf("%d requests, %d changes, %d refused, %d events", asked.Load(), changed.Load(), refused.Load(), len(want))
}

func firstDifference(got, want []int64) string {
	for i := range want {
		if got[i] != want[i] {
			return fmt.Sprintf("at %d: %d, want %d", i, got[i], want[i])
		}
	}
	return "none"
}

// lastEvent is the seq after which new events come.
func lastEvent(t *testing.T, d *daemon) (after int64) {
	t.Helper()
	for {
		page, _, err := d.Events(t.Context(), client.EventQuery{After: after, Limit: 1000})
		if err != nil {
			t.Fatal(err)
		}
		if len(page) == 0 {
			return after
		}
		after = page[len(page)-1].Seq
	}
}
