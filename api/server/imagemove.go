package server

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

type (
	pullInput struct {
		PreferInput
		Accept string `header:"Accept" doc:"text/event-stream for a stream of progress that ends with the image; JSON of the image otherwise."`
		Body   sandbox.PullRequest
	}
	pushInput struct {
		PreferInput
		Accept string `header:"Accept" doc:"text/event-stream for a stream of progress that ends with the outcome; JSON of the outcome otherwise."`
		Body   sandbox.PushRequest
	}
	exportInput struct{ Body sandbox.ExportRequest }
	tagInput    struct{ Body api.TagRequest }
	pruneInput  struct{ Body sandbox.PruneRequest }
)

// The events that end a stream of progress.
const (
	progressEvent = "progress"
	pulledEvent   = "image"
	pushedEvent   = "pushed"
)

// slowReader is how long a client may take for one event of a stream whose
// work waits for it.
const slowReader = time.Minute

// imageMoveRoutes are the routes by which images come and go.
func (s *server) imageMoveRoutes() {
	responses := func(last any, name string) map[string]*huma.Response {
		all := sseResponse("progress events, then one with the outcome", s.schemaOf(sandbox.ImageProgress{}, "ImageProgress"))
		all["200"].Content["application/json"] = &huma.MediaType{Schema: s.schemaOf(last, name)}
		return s.accepted(all)
	}
	register(s, huma.Operation{
		OperationID: "pull-image", Method: http.MethodPost, Path: "/v1/images/pull", Tags: []string{"images"},
		Summary: "Pull an image from a registry", Responses: responses(sandbox.Image{}, "Image"),
	}, func(ctx context.Context, in *pullInput) (*huma.StreamResponse, error) {
		in.Body.Actor = actorOf(ctx)
		if err := in.Body.Validate(); err != nil {
			return nil, err
		}
		work := func(ctx context.Context, report func(sandbox.ImageProgress)) (sandbox.Image, error) {
			return s.m.PullImage(ctx, in.Body, report)
		}
		if in.async() {
			return background(ctx, s, operationPull, in.Body.Reference, false, work)
		}
		return told(ctx, s, in.Accept, pulledEvent, func(ctx context.Context, report func(sandbox.ImageProgress)) (sandbox.Image, error) {
			return operate(ctx, s, operationPull, in.Body.Reference, report, work)
		})
	})
	register(s, huma.Operation{
		OperationID: "push-image", Method: http.MethodPost, Path: "/v1/images/push", Tags: []string{"images"},
		Summary: "Push an image, a snapshot or a sandbox's files to a registry", Responses: responses(sandbox.Pushed{}, "Pushed"),
	}, func(ctx context.Context, in *pushInput) (*huma.StreamResponse, error) {
		in.Body.Actor = actorOf(ctx)
		work := func(ctx context.Context, report func(sandbox.ImageProgress)) (sandbox.Pushed, error) {
			return s.m.PushImage(ctx, in.Body, report)
		}
		if in.async() {
			return background(ctx, s, operationPush, in.Body.Source, false, work)
		}
		return told(ctx, s, in.Accept, pushedEvent, func(ctx context.Context, report func(sandbox.ImageProgress)) (sandbox.Pushed, error) {
			return operate(ctx, s, operationPush, in.Body.Source, report, work)
		})
	})
	register(s, huma.Operation{
		OperationID: "export-image", Method: http.MethodPost, Path: "/v1/images/export", Tags: []string{"images"},
		Summary: "An image, a snapshot or a sandbox's files as one archive",
		Responses: map[string]*huma.Response{"200": {
			Description: "The archive", Content: map[string]*huma.MediaType{"application/x-tar": {Schema: &huma.Schema{Type: huma.TypeString, Format: "binary"}}},
		}},
	}, s.exportImage)
	register(s, huma.Operation{
		OperationID: "tag-image", Method: http.MethodPost, Path: "/v1/images/tag", Tags: []string{"images"},
		Summary: "Give an image another name too",
	}, func(ctx context.Context, in *tagInput) (*result[sandbox.Image], error) {
		return wrap(s.m.TagImage(ctx, in.Body.Source, in.Body.Name, actorOf(ctx)))
	})
	register(s, huma.Operation{
		OperationID: "prune-images", Method: http.MethodPost, Path: "/v1/images/prune", Tags: []string{"images"},
		Summary: "Remove images that nothing uses",
	}, func(ctx context.Context, in *pruneInput) (*result[sandbox.Pruned], error) {
		return wrap(s.m.PruneImages(ctx, in.Body, actorOf(ctx)))
	})
}

func (s *server) exportImage(ctx context.Context, in *exportInput) (*huma.StreamResponse, error) {
	in.Body.Actor = actorOf(ctx)
	body, err := begun(s.m.ExportImage(ctx, in.Body))
	if err != nil {
		return nil, err
	}
	return &huma.StreamResponse{Body: func(hc huma.Context) {
		defer s.closeWith(ctx, body)()
		hc.SetHeader("Content-Type", "application/x-tar")
		hc.SetStatus(http.StatusOK)
		s.pour(ctx, requestOf(ctx).w, body)
	}}, nil
}

// told does work and answers with its outcome: as JSON at its end, or with
// events as it goes on. A client that goes away ends the work.
func told[T any](ctx context.Context, s *server, accept, last string, work func(context.Context, func(sandbox.ImageProgress)) (T, error)) (*huma.StreamResponse, error) {
	if strings.Contains(accept, eventStream) {
		return s.sse(ctx, func(ctx context.Context, w *sseWriter) error { return tellAll(ctx, s, w, last, work) })
	}
	l, err := streaming(ctx)
	if err != nil {
		return nil, err
	}
	defer l.end()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	l.onDrain(cancel)
	v, err := work(ctx, nil)
	if err != nil {
		return nil, err
	}
	return &huma.StreamResponse{Body: func(hc huma.Context) {
		hc.SetHeader("Content-Type", "application/json")
		hc.SetStatus(http.StatusOK)
		_ = json.NewEncoder(hc.BodyWriter()).Encode(v) // the client may be gone
	}}, nil
}

// tellAll sends an event for each step of work, and one for its outcome.
func tellAll[T any](ctx context.Context, s *server, w *sseWriter, last string, work func(context.Context, func(sandbox.ImageProgress)) (T, error)) error {
	ctx, cancel := context.WithCancel(ctx)
	steps := make(chan sandbox.ImageProgress, 256)
	var v T
	var failed error
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if p := recover(); p != nil {
				failed = fmt.Errorf("panic: %v", p)
			}
		}()
		v, failed = work(ctx, func(p sandbox.ImageProgress) {
			passing := p.Status == sandbox.StepDownloading || p.Status == sandbox.StepUploading
			select {
			case steps <- p:
				return
			default:
			}
			if passing { // the next one says more
				return
			}
			select {
			case steps <- p:
			case <-ctx.Done():
			}
		})
	}()
	defer func() { cancel(); <-done }()
	tick := time.NewTicker(heartbeat)
	defer tick.Stop()
	send := func(kind string, v any) error {
		_ = w.rc.SetWriteDeadline(time.Now().Add(slowReader)) // recorders of tests have none
		return w.event("", kind, v)
	}
	for {
		var err error
		select {
		case p := <-steps:
			err = send(progressEvent, p)
		case <-tick.C:
			_ = w.rc.SetWriteDeadline(time.Now().Add(slowReader)) // as above
			err = w.comment()
		case <-done:
			for len(steps) > 0 && err == nil {
				err = send(progressEvent, <-steps)
			}
			if err != nil {
				break
			}
			if failed != nil { // also where it wraps the end of another stream
				err = send("error", s.problemOf(ctx, failed))
			} else {
				err = send(last, v)
			}
			if err == nil {
				err = io.EOF
			}
		}
		if err != nil {
			return err
		}
	}
}
