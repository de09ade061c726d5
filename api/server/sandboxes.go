package server

import (
	"context"
	"net/http"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Target is the path of everything about one sandbox. It is exported, as the
// other embedded parts of inputs are, because the framework looks only there.
type Target struct {
	Ref string `path:"ref" maxLength:"127" pattern:"^[a-z0-9][a-z0-9._-]{0,62}(@[a-z0-9][a-z0-9._:-]*)?$" patternDescription:"a sandbox id, name, name@owner or beginning of an id" doc:"Id, name or unique beginning of an id; NAME@OWNER for who sees all."`
}

type (
	createInput struct {
		IdempotencyKey string `header:"Idempotency-Key" maxLength:"255" doc:"A repeated request with the same key returns the sandbox the first one made."`
		Body           sandbox.Spec
	}
	listInput struct {
		Selector
		All    bool   `query:"all" doc:"Ended ones too."`
		Cursor string `query:"cursor" maxLength:"256" doc:"next of the page before."`
		Limit  int    `query:"limit" minimum:"1" maximum:"1000" doc:"At most this many; 100 when absent."`
	}
	endInput struct {
		Target
		DryInput
	}
	deadlineInput struct {
		Target
		Body sandbox.DeadlineRequest
	}
	// result is a response with a JSON body.
	result[T any] struct{ Body T }
	empty         struct{}
)

func (s *server) sandboxRoutes() {
	register(s, huma.Operation{
		OperationID: "create-sandbox", Method: http.MethodPost, Path: "/v1/sandboxes", DefaultStatus: http.StatusCreated,
		Summary: "Create a sandbox; answers when it runs", Tags: []string{"sandboxes"},
	}, s.create)
	register(s, huma.Operation{
		OperationID: "list-sandboxes", Method: http.MethodGet, Path: "/v1/sandboxes",
		Summary: "List sandboxes, newest first", Tags: []string{"sandboxes"},
	}, s.list)
	register(s, huma.Operation{
		OperationID: "get-sandbox", Method: http.MethodGet, Path: "/v1/sandboxes/{ref}",
		Summary: "One sandbox, living or ended", Tags: []string{"sandboxes"},
	}, func(ctx context.Context, in *Target) (*result[sandbox.Sandbox], error) {
		return wrap(s.m.Sandbox(ctx, in.Ref))
	})
	register(s, huma.Operation{
		OperationID: "remove-sandbox", Method: http.MethodDelete, Path: "/v1/sandboxes/{ref}",
		Summary: "End a sandbox and delete its files; its record stays", Tags: []string{"sandboxes"},
	}, func(ctx context.Context, in *endInput) (*result[sandbox.Sandbox], error) {
		if in.DryRun {
			return wrap(s.m.Sandbox(ctx, in.Ref))
		}
		return wrap(s.m.Remove(ctx, in.Ref, actorOf(ctx)))
	})
	register(s, huma.Operation{
		OperationID: "change-sandbox", Method: http.MethodPatch, Path: "/v1/sandboxes/{ref}", DefaultStatus: http.StatusOK,
		Summary: "Change when a sandbox's lifetime is over, and what becomes of it then", Tags: []string{"sandboxes"},
	}, func(ctx context.Context, in *deadlineInput) (*result[sandbox.Sandbox], error) {
		in.Body.Actor = actorOf(ctx)
		return wrap(s.m.SetDeadline(ctx, in.Ref, in.Body))
	})
	for _, move := range []struct {
		verb, summary string
		do            func(ctx context.Context, ref, actor string) (sandbox.Sandbox, error)
	}{
		{"pause", "Freeze every process; memory is kept", s.m.Pause},
		{"resume", "Let a paused sandbox go on", s.m.Resume},
		{"stop", "End every process; files are kept", s.m.Stop},
		{"start", "Run a stopped sandbox again", s.m.Start},
	} {
		register(s, huma.Operation{
			OperationID: move.verb + "-sandbox", Method: http.MethodPost, Path: "/v1/sandboxes/{ref}/" + move.verb,
			DefaultStatus: http.StatusOK, Summary: move.summary, Tags: []string{"sandboxes"},
		}, func(ctx context.Context, in *Target) (*result[sandbox.Sandbox], error) {
			return wrap(move.do(ctx, in.Ref, actorOf(ctx)))
		})
	}
	register(s, huma.Operation{
		OperationID: "get-usage", Method: http.MethodGet, Path: "/v1/sandboxes/{ref}/usage",
		Summary: "What the kernel counted, read now", Tags: []string{"sandboxes"},
	}, func(ctx context.Context, in *Target) (*result[sandbox.Usage], error) {
		return wrap(s.m.Usage(ctx, in.Ref))
	})
}

// wrap makes a response of a manager's two results.
func wrap[T any](v T, err error) (*result[T], error) {
	if err != nil {
		return nil, err
	}
	return &result[T]{Body: v}, nil
}

func (s *server) create(ctx context.Context, in *createInput) (*result[sandbox.Sandbox], error) {
	if err := in.Body.ValidateAsked(); err != nil {
		return nil, err
	}
	return wrap(s.m.Create(ctx, sandbox.CreateRequest{Spec: in.Body, IdempotencyKey: in.IdempotencyKey, Actor: actorOf(ctx)}))
}

func (s *server) list(ctx context.Context, in *listInput) (*result[api.SandboxList], error) {
	f, err := in.filter()
	if err != nil {
		return nil, err
	}
	f.All, f.Cursor, f.Limit = in.All, in.Cursor, in.Limit
	page, err := s.m.List(ctx, f)
	if err != nil {
		return nil, err
	}
	return &result[api.SandboxList]{Body: api.SandboxList{Items: orEmpty(page.Items), Next: page.Next}}, nil
}

func statusWords() string {
	var words []string
	for _, s := range sandbox.Statuses() {
		words = append(words, string(s))
	}
	return strings.Join(words, ", ")
}

// orEmpty makes an absent list [] and not null on the wire.
func orEmpty[T any](items []T) []T {
	if items == nil {
		return []T{}
	}
	return items
}
