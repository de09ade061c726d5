package server

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Templates is the part of Manager that names what sandboxes are made of.
type Templates interface {
	SetTemplate(ctx context.Context, req sandbox.TemplateRequest) (sandbox.BaseTemplate, error)
	// Template is the actor's own of that name, else one that is shared.
	Template(ctx context.Context, name, actor string) (sandbox.BaseTemplate, error)
	// Templates lists those the actor sees; an empty one sees all.
	Templates(ctx context.Context, actor string) ([]sandbox.BaseTemplate, error)
	// RemoveTemplate forgets one of the actor's own.
	RemoveTemplate(ctx context.Context, name, actor string) error
}

// TemplateTarget is the path of one template.
type TemplateTarget struct {
	Name string `path:"name" maxLength:"63" pattern:"^[a-z0-9][a-z0-9._:-]*$" patternDescription:"the name of a template"`
}

type templateInput struct {
	TemplateTarget
	Body sandbox.TemplateRequest
}

func (s *server) templateRoutes() {
	tags := []string{"templates"}
	register(s, huma.Operation{
		OperationID: "set-template", Method: http.MethodPut, Path: "/v1/templates/{name}", DefaultStatus: http.StatusOK,
		Summary: "Name an image or a snapshot, with limits, for sandboxes to be made of", Tags: tags,
	}, func(ctx context.Context, in *templateInput) (*result[sandbox.BaseTemplate], error) {
		req := in.Body
		req.Name, req.Actor = in.Name, actorOf(ctx)
		if err := req.Validate(); err != nil {
			return nil, err
		}
		return wrap(s.m.SetTemplate(ctx, req))
	})
	register(s, huma.Operation{
		OperationID: "list-templates", Method: http.MethodGet, Path: "/v1/templates",
		Summary: "List the caller's templates and the shared ones, by name", Tags: tags,
	}, func(ctx context.Context, _ *empty) (*result[api.SandboxTemplateList], error) {
		all, err := s.m.Templates(ctx, actorOf(ctx))
		return wrap(api.SandboxTemplateList{Items: orEmpty(all)}, err)
	})
	register(s, huma.Operation{
		OperationID: "get-template", Method: http.MethodGet, Path: "/v1/templates/{name}",
		Summary: "What a template's name means to the caller", Tags: tags,
	}, func(ctx context.Context, in *TemplateTarget) (*result[sandbox.BaseTemplate], error) {
		return wrap(s.m.Template(ctx, in.Name, actorOf(ctx)))
	})
	register(s, huma.Operation{
		OperationID: "remove-template", Method: http.MethodDelete, Path: "/v1/templates/{name}", DefaultStatus: http.StatusNoContent,
		Summary: "Forget one of the caller's templates; what it names stays", Tags: tags,
	}, func(ctx context.Context, in *TemplateTarget) (*empty, error) {
		return nil, s.m.RemoveTemplate(ctx, in.Name, actorOf(ctx))
	})
}
