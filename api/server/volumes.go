package server

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// VolumeTarget is the path of one volume.
type VolumeTarget struct {
	Name string `path:"name" maxLength:"63" pattern:"^[a-z0-9][a-z0-9._-]*$" patternDescription:"the name of a volume"`
}

type (
	volumeInput struct{ Body sandbox.VolumeRequest }
	volumeEnd   struct {
		VolumeTarget
		DryInput
	}
	volumeChangeInput struct {
		VolumeTarget
		Body sandbox.VolumeChange
	}
)

func (s *server) volumeRoutes() {
	register(s, huma.Operation{
		OperationID: "create-volume", Method: http.MethodPost, Path: "/v1/volumes", DefaultStatus: http.StatusCreated,
		Summary: "Make a volume: a directory that outlives sandboxes", Tags: []string{"volumes"},
	}, func(ctx context.Context, in *volumeInput) (*result[sandbox.Volume], error) {
		req := in.Body
		req.Actor = actorOf(ctx)
		if err := req.Validate(); err != nil {
			return nil, err
		}
		return wrap(s.m.CreateVolume(ctx, req))
	})
	register(s, huma.Operation{
		OperationID: "list-volumes", Method: http.MethodGet, Path: "/v1/volumes",
		Summary: "List the volumes, by name", Tags: []string{"volumes"},
	}, func(ctx context.Context, in *PageInput) (*result[api.VolumeList], error) {
		volumes, err := s.m.Volumes(ctx)
		if err != nil {
			return nil, err
		}
		items, next, err := pageOf(*in, volumes, func(v sandbox.Volume) string { return v.Name })
		return wrap(api.VolumeList{Items: items, Next: next}, err)
	})
	register(s, huma.Operation{
		OperationID: "get-volume", Method: http.MethodGet, Path: "/v1/volumes/{name}",
		Summary: "One volume, what it holds now and who uses it", Tags: []string{"volumes"},
	}, func(ctx context.Context, in *VolumeTarget) (*result[sandbox.Volume], error) {
		return wrap(s.m.Volume(ctx, in.Name))
	})
	register(s, huma.Operation{
		OperationID: "change-volume", Method: http.MethodPatch, Path: "/v1/volumes/{name}",
		Summary: "Change a volume's limits, at once", Tags: []string{"volumes"},
	}, func(ctx context.Context, in *volumeChangeInput) (*result[sandbox.Volume], error) {
		ch := in.Body
		ch.Actor = actorOf(ctx)
		if err := ch.Validate(); err != nil {
			return nil, err
		}
		return wrap(s.m.ChangeVolume(ctx, in.Name, ch))
	})
	register(s, huma.Operation{
		OperationID: "remove-volume", Method: http.MethodDelete, Path: "/v1/volumes/{name}", DefaultStatus: http.StatusNoContent,
		Summary: "Delete a volume and all it holds", Tags: []string{"volumes"},
	}, func(ctx context.Context, in *volumeEnd) (*empty, error) {
		if in.DryRun {
			v, err := s.m.Volume(ctx, in.Name)
			if err == nil && len(v.UsedBy) > 0 {
				err = sandbox.Errorf(sandbox.ErrConflict, "volume_in_use", "volume %s is used by sandbox %s: remove that first", in.Name, v.UsedBy[0])
			}
			return nil, err
		}
		return nil, s.m.RemoveVolume(ctx, in.Name, actorOf(ctx))
	})
}
