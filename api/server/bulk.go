package server

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"
	"golang.org/x/sync/errgroup"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

type bulkInput struct {
	Selector
	DryRun bool `query:"dry_run" doc:"Change nothing: tell which it would be."`
	All    bool `query:"all" doc:"Every living sandbox: needed where nothing else is chosen by."`
}

// bulkAtOnce is how many sandboxes of a bulk request are worked on at a time.
const bulkAtOnce = 8

func (s *server) bulkRoutes() {
	for _, b := range []struct {
		verb, what string
		do         func(ctx context.Context, ref, actor string) (sandbox.Sandbox, error)
		of         []sandbox.Status // what the verb has something to do with, where none is asked for
	}{
		{"pause", "Freeze", s.m.Pause, []sandbox.Status{sandbox.StatusRunning}},
		{"resume", "Let go on", s.m.Resume, []sandbox.Status{sandbox.StatusPaused}},
		{"stop", "End every process of", s.m.Stop, []sandbox.Status{sandbox.StatusRunning, sandbox.StatusPaused}},
		{"start", "Run again", s.m.Start, []sandbox.Status{sandbox.StatusStopped}},
		{"remove", "End, and delete the files of,", s.m.Remove, nil},
	} {
		register(s, huma.Operation{
			OperationID: b.verb + "-sandboxes", Method: http.MethodPost, Path: "/v1/sandboxes:" + b.verb, DefaultStatus: http.StatusOK,
			Summary: b.what + " all sandboxes that a selector chooses; each by itself", Tags: []string{"sandboxes"},
		}, func(ctx context.Context, in *bulkInput) (*result[api.BulkResult], error) {
			return wrap(s.bulk(ctx, in, b.do, b.of))
		})
	}
}

func (s *server) bulk(ctx context.Context, in *bulkInput, do func(ctx context.Context, ref, actor string) (sandbox.Sandbox, error), of []sandbox.Status) (api.BulkResult, error) {
	out := api.BulkResult{DryRun: in.DryRun, Items: []api.BulkItem{}}
	if in.empty() != in.All {
		return out, sandbox.Errorf(sandbox.ErrInvalid, "selector_required", "choose by label, status or name, or else say all=true")
	}
	f, err := in.filter()
	if err != nil {
		return out, err
	}
	if len(f.Statuses) == 0 {
		f.Statuses = of
	}
	f.Limit = api.MaxBulk
	page, err := s.m.List(ctx, f)
	if err != nil {
		return out, err
	}
	out.More = page.Next != ""
	for _, sb := range page.Items {
		out.Items = append(out.Items, api.BulkItem{ID: sb.ID, Name: sb.Spec.Name, Status: sb.Status})
	}
	if in.DryRun {
		return out, nil
	}
	actor, errs := actorOf(ctx), make([]error, len(out.Items))
	var work errgroup.Group
	work.SetLimit(bulkAtOnce)
	for i := range out.Items {
		work.Go(func() error {
			item := &out.Items[i]
			sb, err := do(ctx, string(item.ID), actor)
			if err == nil {
				item.Status = sb.Status
			}
			errs[i] = err
			return nil
		})
	}
	_ = work.Wait() // none fails
	for i, err := range errs {
		if err != nil {
			out.Items[i].Error = s.problemOf(ctx, err) // it notes the code with the request
			out.Failed++
		}
	}
	return out, nil
}
