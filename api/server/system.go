package server

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

func (s *server) systemRoutes() {
	register(s, huma.Operation{
		OperationID: "version", Method: http.MethodGet, Path: "/v1/version",
		Summary: "Which daemon answers", Tags: []string{"system"},
	}, func(context.Context, *empty) (*result[api.Version], error) {
		return &result[api.Version]{Body: api.Version{Version: s.version, API: "v1"}}, nil
	})
	register(s, huma.Operation{
		OperationID: "doctor", Method: http.MethodGet, Path: "/v1/doctor",
		Summary: "What the daemon finds of its host, and how to mend it", Tags: []string{"system"},
	}, func(ctx context.Context, _ *empty) (*result[api.DoctorReport], error) {
		return &result[api.DoctorReport]{Body: api.DoctorReport{Checks: orEmpty(s.m.Doctor(ctx))}}, nil
	})
	register(s, huma.Operation{
		OperationID: "pool", Method: http.MethodGet, Path: "/v1/pool",
		Summary: "How the pool of ready shells does: hits, misses, age, time to refill", Tags: []string{"system"},
	}, func(ctx context.Context, _ *empty) (*result[sandbox.PoolStats], error) {
		return wrap(s.m.Pool(ctx))
	})
	register(s, huma.Operation{
		OperationID: "healthz", Method: http.MethodGet, Path: "/healthz", DefaultStatus: http.StatusNoContent,
		Summary: "204 as long as requests are answered", Tags: []string{"system"},
	}, func(context.Context, *empty) (*empty, error) { return nil, nil })
}
