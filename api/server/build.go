package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"mime/multipart"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Builds is the part of Manager that makes images of Dockerfiles.
type Builds interface {
	// Build reads files to its end before it tells the first event; an error
	// before that is about the request. It ends with ctx.
	Build(ctx context.Context, req sandbox.BuildRequest, files io.Reader, tell func(sandbox.BuildEvent) error) (sandbox.Image, error)
	BuildCache(ctx context.Context) (sandbox.BuildCache, error)
	PruneBuildCache(ctx context.Context, req sandbox.BuildCachePrune) (sandbox.BuildCache, error)
}

type pruneBuildsInput struct {
	OlderThan int64 `query:"older_than_seconds" minimum:"0" doc:"Forget steps not used for this long; 0: of any age."`
	Keep      int   `query:"keep" minimum:"0" doc:"Of the others keep this many, the last used; 0: with an age all of them, without one none."`
}

func (s *server) buildRoutes() {
	register(s, huma.Operation{
		OperationID: "build-image", Method: http.MethodPost, Path: "/v1/images/build", Tags: []string{"images"},
		Summary: "Build an image of a Dockerfile; the answer tells how it goes, a line for each event",
		Responses: s.accepted(map[string]*huma.Response{"200": {
			Description: "Events; the last is of type image or error",
			Content:     map[string]*huma.MediaType{ndjson: {Schema: s.schemaOf(api.BuildMessage{}, "BuildMessage")}},
		}}),
	}, func(ctx context.Context, in *PreferInput) (*huma.StreamResponse, error) {
		return s.build(ctx, in.async())
	})
	// Told afterwards: the framework would read a body it is told of before.
	s.huma.OpenAPI().Paths["/v1/images/build"].Post.RequestBody = &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{
		"multipart/form-data": {Schema: &huma.Schema{
			Type: huma.TypeObject, Required: []string{api.BuildRequestPart}, Properties: map[string]*huma.Schema{
				api.BuildRequestPart: s.schemaOf(sandbox.BuildRequest{}, "BuildRequest"),
				api.BuildContextPart: {Type: huma.TypeString, Format: "binary", Description: "Tar archive of the files COPY and ADD may take; after the request."},
			},
		}},
	}}
	register(s, huma.Operation{
		OperationID: "get-build-cache", Method: http.MethodGet, Path: "/v1/build-cache",
		Summary: "What the cache of build steps holds", Tags: []string{"images"},
	}, func(ctx context.Context, _ *empty) (*result[sandbox.BuildCache], error) {
		return wrap(s.m.BuildCache(ctx))
	})
	register(s, huma.Operation{
		OperationID: "prune-build-cache", Method: http.MethodDelete, Path: "/v1/build-cache",
		Summary: "Forget steps of builds; the answer counts them", Tags: []string{"images"},
	}, func(ctx context.Context, in *pruneBuildsInput) (*result[sandbox.BuildCache], error) {
		return wrap(s.m.PruneBuildCache(ctx, sandbox.BuildCachePrune{OlderThanSeconds: in.OlderThan, Keep: in.Keep}))
	})
}

// build runs a build. Its answer begins with its first event, so what is
// wrong with the request is told as any other problem is.
func (s *server) build(ctx context.Context, async bool) (*huma.StreamResponse, error) {
	r := uploadOf(ctx)
	parts, err := r.MultipartReader()
	if err != nil {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "unsupported_media_type", "the body must be multipart/form-data with the parts %s and %s: %w", api.BuildRequestPart, api.BuildContextPart, err)
	}
	req, err := buildRequest(parts)
	if err != nil {
		return nil, err
	}
	req.Actor = actorOf(ctx)
	files, err := contextPart(parts)
	if err != nil {
		return nil, err
	}
	if async {
		return background(ctx, s, operationBuild, subjectOf(req), true, func(ctx context.Context, report func(sandbox.BuildEvent)) (sandbox.Image, error) {
			return s.m.Build(ctx, req, files, func(e sandbox.BuildEvent) error {
				if e.Type != sandbox.BuildOutput { // the step it is of says more
					report(e)
				}
				return nil
			})
		})
	}
	l, err := streaming(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	l.onDrain(cancel)
	w := &lineWriter{w: requestOf(ctx).w}
	_, err = operate(ctx, s, operationBuild, subjectOf(req), nil, func(ctx context.Context, report func(sandbox.BuildEvent)) (sandbox.Image, error) {
		return s.m.Build(ctx, req, files, func(e sandbox.BuildEvent) error {
			if e.Type != sandbox.BuildOutput { // as above
				report(e)
			}
			return w.line(api.BuildMessage{BuildEvent: e})
		})
	})
	cancel()
	l.end()
	if err != nil && !w.begun {
		return nil, err
	}
	return &huma.StreamResponse{Body: func(huma.Context) {
		if err == nil {
			return
		}
		if werr := w.line(api.BuildMessage{BuildEvent: sandbox.BuildEvent{Type: api.BuildFailed}, Problem: s.problemOf(ctx, err)}); werr != nil {
			panic(http.ErrAbortHandler) // the client must not take it for the whole
		}
	}}, nil
}

// subjectOf is what a build is called among operations.
func subjectOf(req sandbox.BuildRequest) string {
	if len(req.Names) == 0 {
		return ""
	}
	return req.Names[0]
}

// lineWriter writes values as lines of JSON, each at once.
type lineWriter struct {
	w     http.ResponseWriter
	begun bool
}

func (l *lineWriter) line(v any) error {
	if !l.begun {
		l.begun = true
		l.w.Header().Set("Content-Type", ndjson)
		l.w.Header().Set("Cache-Control", "no-store")
		l.w.WriteHeader(http.StatusOK)
	}
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if _, err := l.w.Write(append(b, '\n')); err != nil {
		return err
	}
	return http.NewResponseController(l.w).Flush()
}

// buildRequest reads the first part.
func buildRequest(parts *multipart.Reader) (req sandbox.BuildRequest, err error) {
	bad := func(format string, args ...any) error {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_build", format, args...)
	}
	p, err := parts.NextPart()
	if err != nil {
		return req, bad("reading the part %s: %w", api.BuildRequestPart, err)
	}
	if p.FormName() != api.BuildRequestPart {
		return req, bad("the first part is %.40q: send %s first", p.FormName(), api.BuildRequestPart)
	}
	b, err := io.ReadAll(io.LimitReader(p, api.MaxBuildRequest+1))
	if err != nil {
		return req, bad("reading the part %s: %w", api.BuildRequestPart, err)
	}
	if len(b) > api.MaxBuildRequest {
		return req, sandbox.Errorf(sandbox.ErrTooLarge, "body_too_large", "the part %s: at most %d bytes", api.BuildRequestPart, api.MaxBuildRequest)
	}
	if err := api.CheckUTF8(b); err != nil {
		return req, bad("the part %s: %w", api.BuildRequestPart, err)
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&req); err != nil {
		return req, bad("the part %s: %w", api.BuildRequestPart, err)
	}
	return req, req.Validate()
}

// contextPart opens the second part; nil where there is none.
func contextPart(parts *multipart.Reader) (io.Reader, error) {
	p, err := parts.NextPart()
	if errors.Is(err, io.EOF) {
		return nil, nil //nolint:nilnil // a build without files
	}
	if err != nil {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_build", "reading the part %s: %w", api.BuildContextPart, err)
	}
	if p.FormName() != api.BuildContextPart {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_build", "the second part is %.40q: it must be %s", p.FormName(), api.BuildContextPart)
	}
	return p, nil
}
