package server

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/sandbox"
)

// NetworkViews is the part of Manager that tells about networks.
type NetworkViews interface {
	// Network tells what a sandbox may reach now, and what it sent.
	Network(ctx context.Context, ref string) (sandbox.NetworkState, error)
}

func (s *server) networkViewRoutes() {
	register(s, huma.Operation{
		OperationID: "get-network", Method: http.MethodGet, Path: "/v1/sandboxes/{ref}/network",
		Summary: "What a sandbox may reach now, and what it sent", Tags: []string{"network"},
	}, func(ctx context.Context, in *Target) (*result[sandbox.NetworkState], error) {
		return wrap(s.m.Network(ctx, in.Ref))
	})
}
