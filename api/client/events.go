package client

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// EventQuery chooses events.
type EventQuery struct {
	After   int64     // only those after this seq
	Since   time.Time // only those from this time on; zero means any
	Sandbox string    // only of this sandbox; empty means any
	Limit   int       // most events of a page; 0 means the server's default
}

func (q EventQuery) values() url.Values {
	v := url.Values{}
	if q.After > 0 {
		v.Set("after", strconv.FormatInt(q.After, 10))
	}
	if !q.Since.IsZero() {
		v.Set("since", q.Since.Format(time.RFC3339Nano))
	}
	set(v, "sandbox", q.Sandbox)
	if q.Limit > 0 {
		v.Set("limit", strconv.Itoa(q.Limit))
	}
	return v
}

// Events returns one page, oldest first, and the seq to ask after next.
func (c *Client) Events(ctx context.Context, q EventQuery) ([]sandbox.Event, int64, error) {
	l, err := get[api.EventList](ctx, c, path("events"), q.values())
	return l.Items, l.Next, err
}

// Follow calls f for each event as it comes, from now on unless q says from
// where, until ctx ends or f returns an error, which it returns. A broken
// connection is made again where it broke, without a gap or a repetition.
func (c *Client) Follow(ctx context.Context, q EventQuery, f func(sandbox.Event) error) error {
	last := ""
	b := backoff{patience: c.patience}
	for {
		s, err := c.openSSE(ctx, path("events"), q.values(), last)
		opened := time.Now()
		for err == nil {
			var e sandbox.Event
			err = s.next(&e)
			last = s.id
			if err != nil {
				_ = s.body.Close() // broken already
				break
			}
			b.reset()
			if ferr := f(e); ferr != nil {
				return errors.Join(ferr, s.body.Close())
			}
		}
		if errors.Is(err, io.EOF) {
			err = sandbox.Errorf(sandbox.ErrUnavailable, "stream_broken", "the daemon ended the event stream: is it shutting down?")
		}
		// The daemon was back; one whose streams all break at once is not.
		if time.Since(opened) > slowest {
			b.reset()
		}
		if ctx.Err() == nil && errors.Is(err, sandbox.ErrUnavailable) && b.wait(ctx) {
			continue
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return err
	}
}

// sse reads server-sent events.
type sse struct {
	body io.ReadCloser
	r    *bufio.Reader
	id   string // the last one seen: where to go on
}

func (c *Client) openSSE(ctx context.Context, path string, q url.Values, last string) (*sse, error) {
	h := http.Header{"Accept": {"text/event-stream"}}
	if last != "" {
		h.Set(api.HeaderLastEventID, last)
	}
	resp, err := c.do(ctx, call{method: http.MethodGet, path: path, query: q, header: h})
	if err != nil {
		return nil, err
	}
	return &sse{body: resp.Body, r: bufio.NewReader(resp.Body), id: last}, nil
}

// next reads one event's data into v; io.EOF at the end of the stream. An
// event of type error is the error it carries.
func (s *sse) next(v any) error {
	_, err := s.nextOf(v)
	return err
}

// nextOf is next, with the event's type.
func (s *sse) nextOf(v any) (kind string, err error) {
	for {
		line, err := s.r.ReadString('\n')
		if errors.Is(err, io.EOF) {
			return "", io.EOF
		}
		if err != nil {
			return "", sandbox.Errorf(sandbox.ErrUnavailable, "stream_broken", "the event stream broke: %w", err)
		}
		field, value, _ := strings.Cut(strings.TrimRight(line, "\r\n"), ":")
		value = strings.TrimPrefix(value, " ")
		switch field {
		case "":
			kind = ""
		case "id": // the server sends it last, before the data, and alone to say where a stream begins
			s.id = value
		case "event":
			kind = value
		case "data": // the server never splits it over lines
			if kind == "error" {
				var p api.Problem
				if err := json.Unmarshal([]byte(value), &p); err == nil {
					return kind, p.Err()
				}
			}
			if err := json.Unmarshal([]byte(value), v); err != nil {
				return kind, sandbox.Errorf(sandbox.ErrUnavailable, "broken_answer", "reading an event: %w", err)
			}
			return kind, nil
		}
	}
}

// slowest is the longest wait between attempts to come back.
const slowest = 2 * time.Second

// backoff spaces attempts to come back, from 50 ms to slowest apart.
type backoff struct {
	patience time.Duration
	delay    time.Duration
	since    time.Time // of the first failure in a row
}

func (b *backoff) reset() { b.delay, b.since = 0, time.Time{} }

// wait sleeps before the next attempt; false when patience or ctx has ended.
func (b *backoff) wait(ctx context.Context) bool {
	if b.since.IsZero() {
		b.since = time.Now()
	}
	b.delay = min(max(2*b.delay, 50*time.Millisecond), slowest)
	if time.Since(b.since)+b.delay > b.patience {
		return false
	}
	t := time.NewTimer(b.delay)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
