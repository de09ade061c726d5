package server

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/sandbox"
)

type faultInput struct {
	Target
	Body sandbox.NetworkFault
}

// faultRoutes registers what disturbs networks.
func (s *server) faultRoutes() {
	const path = "/v1/sandboxes/{ref}/network/fault"
	tags := []string{"network"}
	register(s, huma.Operation{
		OperationID: "set-network-fault", Method: http.MethodPut, Path: path,
		Summary: "Disturb a sandbox's network: latency, loss, a lower rate, a partition", Tags: tags,
	}, func(ctx context.Context, in *faultInput) (*result[sandbox.NetworkFault], error) {
		return wrap(s.m.SetFault(ctx, in.Ref, in.Body, actorOf(ctx)))
	})
	register(s, huma.Operation{
		OperationID: "get-network-fault", Method: http.MethodGet, Path: path,
		Summary: "What disturbs a sandbox's network now; empty when nothing does", Tags: tags,
	}, func(ctx context.Context, in *Target) (*result[sandbox.NetworkFault], error) {
		return wrap(s.m.Fault(ctx, in.Ref))
	})
	register(s, huma.Operation{
		OperationID: "clear-network-fault", Method: http.MethodDelete, Path: path, DefaultStatus: http.StatusNoContent,
		Summary: "End what disturbs a sandbox's network", Tags: tags,
	}, func(ctx context.Context, in *Target) (*empty, error) {
		return &empty{}, s.m.ClearFault(ctx, in.Ref, actorOf(ctx))
	})
}
