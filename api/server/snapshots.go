package server

import (
	"context"
	"errors"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

type (
	snapshotInput struct {
		Target
		IdempotencyKey string `header:"Idempotency-Key" maxLength:"255" doc:"A repeated request with the same key returns the snapshot the first one made, while that is there."`
		Body           sandbox.SnapshotRequest
	}
	snapshotListInput struct {
		Sandbox string   `query:"sandbox" maxLength:"63" doc:"Of this sandbox, living or ended, only."`
		Kind    []string `query:"kind" maxItems:"4" enum:"manual,fork,auto,scheduled" doc:"Only these kinds, separated by commas."`
		PageInput
	}
	forkInput struct {
		Target
		IdempotencyKey string `header:"Idempotency-Key" maxLength:"255" doc:"A repeated request with the same key returns the sandboxes the first one made, and makes those it did not come to."`
		Body           sandbox.ForkRequest
	}
	rollbackInput struct {
		Target
		DryInput
		Body api.RollbackRequest
	}
	undoInput struct {
		Target
		Body api.UndoRequest
	}
	resetInput struct {
		Target
		DryInput
		Body *api.ResetRequest
	}
	snapshotImport struct {
		Name string `query:"name" maxLength:"63" doc:"Name, unique among snapshots; empty: the one it had."`
	}
	scheduleInput struct {
		Target
		Body api.ScheduleRequest
	}
	scheduleListInput struct {
		Sandbox string `query:"sandbox" maxLength:"63" doc:"Of this sandbox only."`
	}
	scheduleTarget struct {
		ID string `path:"id" maxLength:"14" doc:"Of the schedule."`
	}
	diffInput struct {
		From  string `query:"from" maxLength:"63" doc:"A snapshot; empty: what 'to' began with."`
		To    string `query:"to" required:"true" maxLength:"63" doc:"A snapshot, or a living sandbox."`
		Limit int    `query:"limit" minimum:"1" maximum:"100000" default:"10000" doc:"At most this many changes."`
	}
)

func (s *server) snapshotRoutes() {
	tags := []string{"snapshots"}
	register(s, huma.Operation{
		OperationID: "create-snapshot", Method: http.MethodPost, Path: "/v1/sandboxes/{ref}/snapshots", DefaultStatus: http.StatusCreated,
		Summary: "Freeze a sandbox's files", Tags: tags,
	}, func(ctx context.Context, in *snapshotInput) (*result[sandbox.Snapshot], error) {
		in.Body.Actor, in.Body.IdempotencyKey = actorOf(ctx), in.IdempotencyKey
		return wrap(s.m.Snapshot(ctx, in.Ref, in.Body))
	})
	register(s, huma.Operation{
		OperationID: "list-snapshots", Method: http.MethodGet, Path: "/v1/snapshots", Summary: "List snapshots, newest first", Tags: tags,
	}, func(ctx context.Context, in *snapshotListInput) (*result[api.SnapshotList], error) {
		var kinds []sandbox.SnapshotKind
		for _, k := range in.Kind {
			kinds = append(kinds, sandbox.SnapshotKind(k))
		}
		all, err := s.m.Snapshots(ctx, in.Sandbox, kinds...)
		if err != nil {
			return nil, err
		}
		items, next, err := pageOf(in.PageInput, all, func(sn sandbox.Snapshot) string { return string(sn.ID) })
		return wrap(api.SnapshotList{Items: items, Next: next}, err)
	})
	register(s, huma.Operation{
		OperationID: "get-snapshot", Method: http.MethodGet, Path: "/v1/snapshots/{ref}", Summary: "One snapshot", Tags: tags,
	}, func(ctx context.Context, in *Target) (*result[sandbox.Snapshot], error) {
		return wrap(s.m.SnapshotOf(ctx, in.Ref))
	})
	register(s, huma.Operation{
		OperationID: "remove-snapshot", Method: http.MethodDelete, Path: "/v1/snapshots/{ref}",
		Summary: "Forget a snapshot; sandboxes made of it stay as they are", Tags: tags,
	}, func(ctx context.Context, in *endInput) (*result[sandbox.Snapshot], error) {
		if in.DryRun {
			return wrap(s.m.SnapshotOf(ctx, in.Ref))
		}
		return wrap(s.m.RemoveSnapshot(ctx, in.Ref, actorOf(ctx)))
	})
	register(s, huma.Operation{
		OperationID: "export-snapshot", Method: http.MethodGet, Path: "/v1/snapshots/{ref}/archive", Tags: tags,
		Summary: "A snapshot as an archive that another host can import",
		Responses: map[string]*huma.Response{"200": {
			Description: "The archive", Content: map[string]*huma.MediaType{"application/x-tar": {Schema: &huma.Schema{Type: huma.TypeString, Format: "binary"}}},
		}},
	}, func(ctx context.Context, in *Target) (*huma.StreamResponse, error) {
		body, err := begun(s.m.ExportSnapshot(ctx, in.Ref))
		if err != nil {
			return nil, err
		}
		return &huma.StreamResponse{Body: func(hc huma.Context) {
			defer s.closeWith(ctx, body)()
			hc.SetHeader("Content-Type", "application/x-tar")
			hc.SetStatus(http.StatusOK)
			s.pour(ctx, requestOf(ctx).w, body)
		}}, nil
	})
	register(s, huma.Operation{
		OperationID: "import-snapshot", Method: http.MethodPost, Path: "/v1/snapshots", DefaultStatus: http.StatusCreated, Tags: tags,
		Summary: "Make a snapshot of an exported one", RequestBody: streamBody("application/x-tar"),
	}, func(ctx context.Context, in *snapshotImport) (*result[sandbox.Snapshot], error) {
		return wrap(s.m.ImportSnapshot(ctx, in.Name, actorOf(ctx), uploadOf(ctx).Body))
	})
	for path, what := range map[string]string{"/v1/snapshots/{ref}/fork": "snapshot", "/v1/sandboxes/{ref}/fork": "sandbox"} {
		register(s, huma.Operation{
			OperationID: "fork-" + what, Method: http.MethodPost, Path: path, DefaultStatus: http.StatusCreated,
			Summary: "Make sandboxes that begin with the files of a " + what, Tags: tags,
		}, func(ctx context.Context, in *forkInput) (*result[api.ForkList], error) {
			in.Body.Actor, in.Body.IdempotencyKey = actorOf(ctx), in.IdempotencyKey
			if what == sandbox.ForkOfSandbox {
				in.Body.ForkOf = what
			}
			made, err := s.m.Fork(ctx, in.Ref, in.Body)
			return wrap(api.ForkList{Items: orEmpty(made)}, err)
		})
	}
	s.historyRoutes(tags)
	s.scheduleRoutes()
}

func (s *server) scheduleRoutes() {
	tags := []string{"schedules"}
	register(s, huma.Operation{
		OperationID: "create-schedule", Method: http.MethodPost, Path: "/v1/sandboxes/{ref}/schedules", DefaultStatus: http.StatusCreated,
		Summary: "Repeat a snapshot or a reset of a sandbox", Tags: tags,
	}, func(ctx context.Context, in *scheduleInput) (*result[sandbox.Schedule], error) {
		b := in.Body
		return wrap(s.m.AddSchedule(ctx, in.Ref, sandbox.Schedule{Action: b.Action, Cron: b.Cron, Keep: b.Keep, KeepFor: b.KeepFor, Force: b.Force}))
	})
	register(s, huma.Operation{
		OperationID: "list-schedules", Method: http.MethodGet, Path: "/v1/schedules", Summary: "List schedules", Tags: tags,
	}, func(ctx context.Context, in *scheduleListInput) (*result[api.ScheduleList], error) {
		all, err := s.m.Schedules(ctx, in.Sandbox)
		return wrap(api.ScheduleList{Items: orEmpty(all)}, err)
	})
	register(s, huma.Operation{
		OperationID: "remove-schedule", Method: http.MethodDelete, Path: "/v1/schedules/{id}", DefaultStatus: http.StatusNoContent,
		Summary: "End a schedule; what it made stays", Tags: tags,
	}, func(ctx context.Context, in *scheduleTarget) (*empty, error) {
		return &empty{}, s.m.RemoveSchedule(ctx, in.ID)
	})
}

func (s *server) historyRoutes(tags []string) {
	register(s, huma.Operation{
		OperationID: "rollback-sandbox", Method: http.MethodPost, Path: "/v1/sandboxes/{ref}/rollback", DefaultStatus: http.StatusOK,
		Summary: "Put a sandbox back on a snapshot's files, in place; its processes are killed", Tags: tags,
	}, func(ctx context.Context, in *rollbackInput) (*result[sandbox.Sandbox], error) {
		if in.DryRun {
			if _, err := s.m.SnapshotOf(ctx, in.Body.Snapshot); err != nil {
				return nil, err
			}
			return wrap(s.m.Sandbox(ctx, in.Ref))
		}
		return wrap(s.m.Rollback(ctx, in.Ref, in.Body.Snapshot, actorOf(ctx)))
	})
	register(s, huma.Operation{
		OperationID: "undo-sandbox", Method: http.MethodPost, Path: "/v1/sandboxes/{ref}/undo", DefaultStatus: http.StatusOK,
		Summary: "Put a sandbox back by so many restore points; its processes are killed", Tags: tags,
	}, func(ctx context.Context, in *undoInput) (*result[sandbox.Sandbox], error) {
		return wrap(s.m.Undo(ctx, in.Ref, in.Body.Steps, actorOf(ctx)))
	})
	register(s, huma.Operation{
		OperationID: "reset-sandbox", Method: http.MethodPost, Path: "/v1/sandboxes/{ref}/reset", DefaultStatus: http.StatusOK,
		Summary: "Give a sandbox its first files again, in place: all, and its processes are killed, or some paths", Tags: tags,
	}, func(ctx context.Context, in *resetInput) (*result[sandbox.Sandbox], error) {
		if in.DryRun {
			return wrap(s.m.Sandbox(ctx, in.Ref))
		}
		if in.Body != nil && len(in.Body.Only) > 0 {
			return wrap(s.m.ResetPaths(ctx, in.Ref, in.Body.Only, actorOf(ctx)))
		}
		return wrap(s.m.Reset(ctx, in.Ref, actorOf(ctx)))
	})
	register(s, huma.Operation{
		OperationID: "get-history", Method: http.MethodGet, Path: "/v1/sandboxes/{ref}/history",
		Summary: "The snapshots a sandbox's files came through, newest first", Tags: tags,
	}, func(ctx context.Context, in *Target) (*result[sandbox.History], error) {
		return wrap(s.m.History(ctx, in.Ref))
	})
	register(s, huma.Operation{
		OperationID: "diff", Method: http.MethodGet, Path: "/v1/diff", Summary: "How the files of one state differ from those of another", Tags: tags,
	}, s.diff)
}

// errFull ends a listing that has as much as was asked for.
var errFull = errors.New("full")

func (s *server) diff(ctx context.Context, in *diffInput) (*result[api.FileChanges], error) {
	out := api.FileChanges{Items: []sandbox.FileChange{}}
	err := s.m.Diff(ctx, in.From, in.To, func(c sandbox.FileChange) error {
		if len(out.Items) == in.Limit {
			out.More = true
			return errFull
		}
		out.Items = append(out.Items, c)
		return nil
	})
	if errors.Is(err, errFull) {
		err = nil
	}
	return wrap(out, err)
}
