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
	// ExplainNetwork tells what would become of a new flow.
	ExplainNetwork(ctx context.Context, ref string, q sandbox.NetworkQuery) (sandbox.NetworkVerdict, error)
}

type explainInput struct {
	Target
	Dest     string `query:"dest" required:"true" minLength:"1" maxLength:"260" doc:"Address or name."`
	Port     uint16 `query:"port" doc:"Of tcp 443 when absent; udp needs one, icmp has none."`
	Protocol string `query:"protocol" enum:"tcp,udp,icmp" default:"tcp"`
}

func (s *server) networkViewRoutes() {
	register(s, huma.Operation{
		OperationID: "get-network", Method: http.MethodGet, Path: "/v1/sandboxes/{ref}/network",
		Summary: "What a sandbox may reach now, and what it sent", Tags: []string{"network"},
	}, func(ctx context.Context, in *Target) (*result[sandbox.NetworkState], error) {
		return wrap(s.m.Network(ctx, in.Ref))
	})
	register(s, huma.Operation{
		OperationID: "explain-network", Method: http.MethodGet, Path: "/v1/sandboxes/{ref}/network/explain",
		Summary: "What would become of a new flow of a sandbox, and why; nothing is sent", Tags: []string{"network"},
	}, func(ctx context.Context, in *explainInput) (*result[sandbox.NetworkVerdict], error) {
		q := sandbox.NetworkQuery{Dest: in.Dest, Port: in.Port, Protocol: in.Protocol}
		if err := q.Complete(); err != nil {
			return nil, err
		}
		return wrap(s.m.ExplainNetwork(ctx, in.Ref, q))
	})
}
