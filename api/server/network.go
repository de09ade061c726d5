package server

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/sandbox"
)

type networkInput struct {
	Target
	Body sandbox.NetworkPolicy
}

func (s *server) networkRoutes() {
	register(s, huma.Operation{
		OperationID: "set-network", Method: http.MethodPut, Path: "/v1/sandboxes/{ref}/network", DefaultStatus: http.StatusOK,
		Summary: "Change what a sandbox may reach; in force when it answers", Tags: []string{"sandboxes"},
	}, func(ctx context.Context, in *networkInput) (*result[sandbox.Sandbox], error) {
		if err := in.Body.Validate(); err != nil {
			return nil, err
		}
		return wrap(s.m.SetNetwork(ctx, in.Ref, in.Body, actorOf(ctx)))
	})
}
