package server

import (
	"context"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Reports is the part of Manager that tells what was used.
type Reports interface {
	// UsageReport is of the one sandbox ref names, which may be long gone, or
	// with an empty ref of all.
	UsageReport(ctx context.Context, ref string, q sandbox.UsageQuery) (sandbox.UsageReport, error)
}

type reportInput struct {
	By      string    `query:"by" doc:"sandbox, owner, project, image or label:KEY; without it, one line for all."`
	Sandbox string    `query:"sandbox" doc:"Of this one only: an id, also one long gone, or a name."`
	From    time.Time `query:"from" doc:"Begin then; without it, at the beginning."`
	To      time.Time `query:"to" doc:"End before then; without it, now."`
}

func (s *server) usageRoutes() {
	register(s, huma.Operation{
		OperationID: "report-usage", Method: http.MethodGet, Path: "/v1/usage",
		Summary: "What was used in a span of time, by the ledger", Tags: []string{"system"},
	}, func(ctx context.Context, in *reportInput) (*result[sandbox.UsageReport], error) {
		r, err := s.m.UsageReport(ctx, in.Sandbox, sandbox.UsageQuery{By: in.By, From: in.From, To: in.To})
		r.Lines = orEmpty(r.Lines)
		return wrap(r, err)
	})
}
