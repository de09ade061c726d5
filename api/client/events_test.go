package client

import (
	"context"
	"errors"
	"io"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// quiet is a daemon whose event streams have no event and break after a while.
type quiet struct {
	stand   time.Duration // how long a stream does
	code    string        // of the error that it ends with, if any
	streams int
}

func (q *quiet) RoundTrip(r *http.Request) (*http.Response, error) {
	q.streams++
	out, in := io.Pipe()
	go func() {
		_, _ = io.WriteString(in, ": \n\nid: 7\n\n")
		select {
		case <-time.After(q.stand):
			if q.code != "" {
				_, _ = io.WriteString(in, "event: error\ndata: {\"status\":503,\"code\":\""+q.code+"\",\"detail\":\"no\"}\n\n")
			}
		case <-r.Context().Done():
		}
		_ = in.Close()
	}()
	return &http.Response{StatusCode: http.StatusOK, Body: out, Request: r}, nil
}

// TestFollowQuietStream: patience is for one absence of the daemon, and not for
// all that there were since the last event.
func TestFollowQuietStream(t *testing.T) {
	for name, c := range map[string]struct {
		stand time.Duration
		code  string
		want  error
	}{
		"streams that stand":         {20 * time.Second, "", context.DeadlineExceeded},
		"streams that break at once": {0, "", sandbox.ErrUnavailable}, // the controls
		"streams that are refused":   {0, "database", sandbox.ErrUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := &quiet{stand: c.stand, code: c.code}
				cl, err := New("http://localhost:1", WithPatience(time.Minute))
				if err != nil {
					t.Fatal(err)
				}
				cl.http.Transport = q
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				if err := cl.Follow(ctx, EventQuery{}, func(sandbox.Event) error { return nil }); !errors.Is(err, c.want) {
					t.Errorf("after %d streams: %v, want %v", q.streams, err, c.want)
				}
			})
		})
	}
}
