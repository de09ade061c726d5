package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

type eventsInput struct {
	After       int64     `query:"after" default:"-1" minimum:"-1" doc:"Events after this seq; -1 (the default) means from the beginning or, for a stream, from now on."`
	Since       time.Time `query:"since" doc:"Events from this time on (RFC 3339) instead."`
	Sandbox     string    `query:"sandbox" maxLength:"63" doc:"Only of this sandbox."`
	Limit       int       `query:"limit" minimum:"1" maximum:"1000" doc:"At most this many; 100 when absent. Not for streams."`
	Accept      string    `header:"Accept" doc:"text/event-stream for a stream that goes on; JSON otherwise."`
	LastEventID string    `header:"Last-Event-ID" maxLength:"20" doc:"A broken stream goes on after it."`
}

const (
	eventStream = "text/event-stream"
	eventBatch  = 500
)

func (s *server) eventRoutes() {
	responses := sseResponse("Events", s.schemaOf(sandbox.Event{}, "Event"))
	responses["200"].Content["application/json"] = &huma.MediaType{Schema: s.schemaOf(api.EventList{}, "EventList")}
	register(s, huma.Operation{
		OperationID: "events", Method: http.MethodGet, Path: "/v1/events", Tags: []string{"events"}, Responses: responses,
		Summary: "What happened: a page as JSON, or a stream of server-sent events that resumes by Last-Event-ID",
	}, s.events)
}

func (s *server) events(ctx context.Context, in *eventsInput) (*huma.StreamResponse, error) {
	stream := strings.Contains(in.Accept, eventStream)
	after, err := s.firstEvent(ctx, in, stream)
	if err != nil {
		return nil, err
	}
	if stream {
		return s.sse(ctx, func(ctx context.Context, w *sseWriter) error { return s.streamEvents(ctx, w, after, in.Sandbox) })
	}
	limit := in.Limit
	if limit == 0 {
		limit = sandbox.DefaultPage
	}
	events, err := s.m.Events(ctx, after, in.Sandbox, limit)
	if err != nil {
		return nil, err
	}
	list := api.EventList{Items: orEmpty(events), Next: after}
	if n := len(events); n > 0 {
		list.Next = events[n-1].Seq
	}
	return &huma.StreamResponse{Body: func(hc huma.Context) {
		hc.SetHeader("Content-Type", "application/json")
		hc.SetStatus(http.StatusOK)
		_ = json.NewEncoder(hc.BodyWriter()).Encode(list) // the client may be gone
	}}, nil
}

// firstEvent finds the seq after which to begin.
func (s *server) firstEvent(ctx context.Context, in *eventsInput, stream bool) (int64, error) {
	switch {
	case in.LastEventID != "":
		id, err := strconv.ParseInt(in.LastEventID, 10, 64)
		if err != nil || id < 0 {
			return 0, sandbox.Errorf(sandbox.ErrInvalid, "invalid_event_id", "Last-Event-ID %.24q: use the id of an event", in.LastEventID)
		}
		return id, nil
	case !in.Since.IsZero():
		return s.seekEvents(ctx, func(e sandbox.Event) bool { return !e.Time.Before(in.Since) })
	case in.After >= 0:
		return in.After, nil
	case stream:
		return s.seekEvents(ctx, func(sandbox.Event) bool { return false })
	}
	return 0, nil
}

// seekEvents returns the seq after which come the events that late holds
// for. Seqs count up and times, but for steps of the clock, with them: so it
// halves, with about two short reads for each bit of the answer.
func (s *server) seekEvents(ctx context.Context, late func(sandbox.Event) bool) (int64, error) {
	beyond := func(seq int64) (bool, error) { // are all events after seq late ones?
		next, err := s.m.Events(ctx, seq, "", 1)
		if err != nil {
			return false, err
		}
		return len(next) == 0 || late(next[0]), nil
	}
	lo, hi := int64(0), int64(1)
	for {
		ok, err := beyond(hi)
		if err != nil {
			return 0, err
		}
		if ok || hi > 1<<61 {
			break
		}
		lo, hi = hi, hi*2
	}
	if ok, err := beyond(lo); err != nil || ok {
		return lo, err
	}
	for hi-lo > 1 { // not beyond(lo), beyond(hi)
		mid := lo + (hi-lo)/2
		ok, err := beyond(mid)
		if err != nil {
			return 0, err
		}
		if ok {
			hi = mid
		} else {
			lo = mid
		}
	}
	return hi, nil
}

// streamEvents sends events as they come.
func (s *server) streamEvents(ctx context.Context, w *sseWriter, after int64, ref string) error {
	// Subscribing before reading means that nothing falls between.
	news, stop := s.m.Subscribe()
	defer stop()
	followers := s.follow(actorOf(ctx))
	defer followers.Add(-1)
	// An id alone tells a client whose stream breaks before the first
	// event where to go on.
	if err := w.mark(after); err != nil {
		return err
	}
	for {
		began := time.Now()
		events, err := s.m.Events(ctx, after, ref, eventBatch)
		if err != nil {
			return err
		}
		took := time.Since(began)
		for _, e := range events {
			if err := w.event(strconv.FormatInt(e.Seq, 10), e.Type, e); err != nil {
				return err
			}
			after = e.Seq
		}
		// So long that an owner's followers together, however many, read for a
		// part of the time alone.
		if err := pause(ctx, took*followRest*time.Duration(followers.Load())); err != nil {
			return err
		}
		if len(events) == eventBatch {
			continue
		}
		if err := w.wait(ctx, news); err != nil {
			return err
		}
	}
}

// followRest is how many times longer than it reads an owner's only follower of
// events rests.
const followRest = 2

// follow notes a follower of events, and returns how many its owner has.
func (s *server) follow(owner string) *atomic.Int64 {
	n, _ := s.followers.LoadOrStore(owner, new(atomic.Int64)) // as many as owners
	count := n.(*atomic.Int64)                                //nolint:errcheck,forcetypeassert // nothing else is stored
	count.Add(1)
	return count
}

// pause waits.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// watchFiles sends the changes beneath a path.
func (s *server) watchFiles(ctx context.Context, in *watchInput) (*huma.StreamResponse, error) {
	if err := sandbox.ValidateFilePath(in.Path); err != nil {
		return nil, err
	}
	f, err := s.m.Files(ctx, in.Ref)
	if err != nil {
		return nil, err
	}
	watch, err := f.Watch(ctx, in.User, in.Path, in.Recursive)
	if err != nil {
		return nil, err
	}
	out, err := s.sse(ctx, func(ctx context.Context, w *sseWriter) error {
		defer s.closeWith(ctx, watch)()
		changes := make(chan sandbox.FileEvent)
		failed := make(chan error, 1)
		go func() {
			for {
				e, err := watch.Next()
				if err != nil {
					failed <- err
					return
				}
				select {
				case changes <- e:
				case <-ctx.Done():
					return
				}
			}
		}()
		tick := time.NewTicker(heartbeat)
		defer tick.Stop()
		for {
			var err error
			select {
			case e := <-changes:
				err = w.event("", "change", e)
			case err = <-failed:
			case <-tick.C:
				err = w.comment()
			case <-ctx.Done():
				err = ctx.Err()
			}
			if err != nil {
				return err
			}
		}
	})
	if err != nil {
		return nil, errors.Join(err, watch.Close())
	}
	return out, nil
}

// sse answers with a stream of server-sent events (WHATWG HTML, section
// 9.2), which ends with the client, with the server or with run.
func (s *server) sse(ctx context.Context, run func(context.Context, *sseWriter) error) (*huma.StreamResponse, error) {
	l, err := streaming(ctx)
	if err != nil {
		return nil, err
	}
	return &huma.StreamResponse{Body: func(huma.Context) {
		defer l.end()
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		l.onDrain(cancel)
		w := &sseWriter{w: requestOf(ctx).w, rc: http.NewResponseController(requestOf(ctx).w)}
		w.w.Header().Set("Content-Type", eventStream)
		w.w.Header().Set("Cache-Control", "no-store")
		w.w.WriteHeader(http.StatusOK)
		if w.comment() != nil {
			return
		}
		err := run(ctx, w)
		if err != nil && (ctx.Err() == nil && !errors.Is(err, io.EOF) || cutFor(ctx) != nil) {
			_ = w.event("", "error", s.problemOf(ctx, err)) // the client may be gone
		}
	}}, nil
}

type sseWriter struct {
	w  http.ResponseWriter
	rc *http.ResponseController
}

func (w *sseWriter) event(id, kind string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if id != "" {
		id = "id: " + id + "\n"
	}
	kind = strings.NewReplacer("\n", "", "\r", "").Replace(kind)
	if _, err := fmt.Fprintf(w.w, "%sevent: %s\ndata: %s\n\n", id, kind, data); err != nil {
		return err
	}
	return w.rc.Flush()
}

// mark sends an id without an event.
func (w *sseWriter) mark(id int64) error {
	if _, err := fmt.Fprintf(w.w, "id: %d\n\n", id); err != nil {
		return err
	}
	return w.rc.Flush()
}

// comment keeps the connection busy and shows whether it is still there.
func (w *sseWriter) comment() error {
	if _, err := io.WriteString(w.w, ": \n\n"); err != nil {
		return err
	}
	return w.rc.Flush()
}

// wait waits for news, writing a comment now and then.
func (w *sseWriter) wait(ctx context.Context, news <-chan struct{}) error {
	tick := time.NewTicker(heartbeat)
	defer tick.Stop()
	for {
		select {
		case _, ok := <-news:
			if !ok {
				return io.EOF
			}
			return nil
		case <-tick.C:
			if err := w.comment(); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func sseResponse(description string, schema *huma.Schema) map[string]*huma.Response {
	return map[string]*huma.Response{"200": {
		Description: description + "; the data of each event is JSON",
		Content:     map[string]*huma.MediaType{eventStream: {Schema: schema}},
	}}
}
