package server

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Secrets is the part of Manager that keeps secrets. No value comes back.
type Secrets interface {
	SetSecret(ctx context.Context, req sandbox.SecretRequest) (sandbox.Secret, error)
	Secrets(ctx context.Context) ([]sandbox.Secret, error)
	RemoveSecret(ctx context.Context, name, actor string) error
}

// SecretTarget is the path of one secret.
type SecretTarget struct {
	Name string `path:"name" maxLength:"63" pattern:"^[a-z0-9][a-z0-9._-]*$" patternDescription:"the name of a secret"`
}

type secretInput struct {
	SecretTarget
	Body sandbox.SecretRequest
}

func (s *server) secretRoutes() {
	register(s, huma.Operation{
		OperationID: "set-secret", Method: http.MethodPut, Path: "/v1/secrets/{name}", DefaultStatus: http.StatusOK,
		Summary: "Set a secret, which no answer ever tells", Tags: []string{"secrets"},
	}, func(ctx context.Context, in *secretInput) (*result[sandbox.Secret], error) {
		req := in.Body
		req.Name, req.Actor = in.Name, actorOf(ctx)
		if err := req.Validate(); err != nil {
			return nil, err
		}
		return wrap(s.m.SetSecret(ctx, req))
	})
	register(s, huma.Operation{
		OperationID: "list-secrets", Method: http.MethodGet, Path: "/v1/secrets",
		Summary: "List the secrets by name, without their values", Tags: []string{"secrets"},
	}, func(ctx context.Context, _ *empty) (*result[api.SecretList], error) {
		secrets, err := s.m.Secrets(ctx)
		return wrap(api.SecretList{Items: orEmpty(secrets)}, err)
	})
	register(s, huma.Operation{
		OperationID: "remove-secret", Method: http.MethodDelete, Path: "/v1/secrets/{name}", DefaultStatus: http.StatusNoContent,
		Summary: "Forget a secret; requests that need it are refused", Tags: []string{"secrets"},
	}, func(ctx context.Context, in *SecretTarget) (*empty, error) {
		return nil, s.m.RemoveSecret(ctx, in.Name, actorOf(ctx))
	})
}
