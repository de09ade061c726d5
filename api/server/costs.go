package server

import (
	"context"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/cost"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Costs is the part of Manager that knows money.
type Costs interface {
	// Prices lists the price books, the earliest first.
	Prices(ctx context.Context) ([]cost.Book, error)
	// PostEntry takes an entry in, once for its key; without one each time.
	PostEntry(ctx context.Context, req cost.EntryRequest) (cost.Posted, error)
	// Entry returns the entry of a number.
	Entry(ctx context.Context, number int64) (cost.Posted, error)
	// CancelEntry writes the opposite of an entry, once, and returns it.
	CancelEntry(ctx context.Context, number int64, reason, actor string) (cost.Posted, error)
	// Entries lists the newest first.
	Entries(ctx context.Context, q cost.EntryQuery) ([]cost.Posted, error)
	Statement(ctx context.Context, q cost.StatementQuery) (cost.Statement, error)
}

type (
	entryInput struct {
		IdempotencyKey string `header:"Idempotency-Key" maxLength:"128" doc:"A repeated request with the same key is taken once; keys are the sender's own, for each target."`
		Body           cost.EntryRequest
	}
	entriesInput struct {
		SpanInput
		Kind   string `query:"kind" enum:"cost,revenue" doc:"Only these."`
		Before int64  `query:"before" minimum:"0" doc:"next of the page before."`
		Limit  int    `query:"limit" minimum:"1" maximum:"1000" doc:"At most this many; 100 when absent."`
	}
	statementInput struct {
		SpanInput
		By   string `query:"by" doc:"sandbox, owner, project, image or label:KEY; without it, one line for all."`
		Book string `query:"book" maxLength:"63" doc:"Rate all anew with this price book."`
	}
)

// EntryTarget is the path of one entry.
type EntryTarget struct {
	Entry int64 `path:"entry" minimum:"1" doc:"Its number."`
}

type cancelEntryInput struct {
	EntryTarget
	Body api.CancelEntryRequest
}

// SpanInput is a span of time and whose it is.
type SpanInput struct {
	From    time.Time `query:"from" doc:"Begin then; without it, at the beginning."`
	To      time.Time `query:"to" doc:"End before then; without it, now."`
	Sandbox string    `query:"sandbox" maxLength:"63" doc:"Of this one only: an id, also one long gone, or a name."`
	Project string    `query:"project" maxLength:"63" doc:"Of this project only."`
	Owner   string    `query:"owner" maxLength:"256" doc:"Of this owner only."`
}

func (s *server) costRoutes() {
	register(s, huma.Operation{
		OperationID: "list-prices", Method: http.MethodGet, Path: "/v1/prices",
		Summary: "List the price books, the earliest first", Tags: []string{"costs"},
	}, func(ctx context.Context, _ *empty) (*result[api.PriceList], error) {
		books, err := s.m.Prices(ctx)
		return wrap(api.PriceList{Items: orEmpty(books)}, err)
	})
	for _, e := range []struct {
		kind           cost.Kind
		id, path, what string
	}{
		{cost.KindCost, "add-cost", "/v1/costs", "Enter a cost from outside: an amount, or a quantity of a custom meter"},
		{cost.KindRevenue, "add-revenue", "/v1/revenue", "Enter what a sandbox, project or owner earned"},
	} {
		register(s, huma.Operation{
			OperationID: e.id, Method: http.MethodPost, Path: e.path, DefaultStatus: http.StatusCreated,
			Summary: e.what, Tags: []string{"costs"},
		}, func(ctx context.Context, in *entryInput) (*result[cost.Posted], error) {
			req := in.Body
			req.Key, req.Kind, req.Actor = in.IdempotencyKey, e.kind, actorOf(ctx)
			return wrap(s.m.PostEntry(ctx, req))
		})
	}
	register(s, huma.Operation{
		OperationID: "cancel-entry", Method: http.MethodPost, Path: "/v1/costs/{entry}/cancel", DefaultStatus: http.StatusOK,
		Summary: "Cancel a cost or a revenue: sums and budgets are as if it had not been; again is the same", Tags: []string{"costs"},
	}, func(ctx context.Context, in *cancelEntryInput) (*result[cost.Posted], error) {
		return wrap(s.m.CancelEntry(ctx, in.Entry, in.Body.Reason, actorOf(ctx)))
	})
	register(s, huma.Operation{
		OperationID: "list-costs", Method: http.MethodGet, Path: "/v1/costs",
		Summary: "List costs and revenue from outside, newest first", Tags: []string{"costs"},
	}, s.entries)
	register(s, huma.Operation{
		OperationID: "report-costs", Method: http.MethodGet, Path: "/v1/costs/report",
		Summary: "What was spent and earned in a span of time", Tags: []string{"costs"},
	}, func(ctx context.Context, in *statementInput) (*result[cost.Statement], error) {
		r, err := s.m.Statement(ctx, cost.StatementQuery{
			From: in.From, To: in.To, By: in.By, Book: in.Book, Sandbox: in.Sandbox, Project: in.Project, Owner: in.Owner,
		})
		r.Lines = orEmpty(r.Lines)
		return wrap(r, err)
	})
}

func (s *server) entries(ctx context.Context, in *entriesInput) (*result[api.EntryList], error) {
	q := cost.EntryQuery{
		From: in.From, To: in.To, Sandbox: in.Sandbox, Project: in.Project, Owner: in.Owner, Kind: cost.Kind(in.Kind),
		Before: in.Before, Limit: in.Limit,
	}
	if q.Limit == 0 {
		q.Limit = sandbox.DefaultPage
	}
	q.Limit++ // one more tells whether there is another page
	found, err := s.m.Entries(ctx, q)
	if err != nil {
		return nil, err
	}
	out := api.EntryList{Items: orEmpty(found)}
	if len(found) == q.Limit {
		out.Items = found[:q.Limit-1]
		out.Next = out.Items[q.Limit-2].Number
	}
	return &result[api.EntryList]{Body: out}, nil
}
