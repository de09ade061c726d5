package server

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

type (
	imageTarget struct {
		Name string `path:"name" maxLength:"512" doc:"May hold slashes, as they are."`
	}
	importInput struct {
		Name     string `query:"name" maxLength:"512" doc:"Absent: the one the archive tells, if it is of an image."`
		Platform string `query:"platform" maxLength:"64" doc:"Of an archive for several; the host's when absent."`
	}
)

func (s *server) imageRoutes() {
	register(s, huma.Operation{
		OperationID: "list-images", Method: http.MethodGet, Path: "/v1/images",
		Summary: "List the images", Tags: []string{"images"},
	}, func(ctx context.Context, in *PageInput) (*result[api.ImageList], error) {
		images, err := s.m.Images(ctx)
		if err != nil {
			return nil, err
		}
		items, next, err := pageOf(*in, images, func(i sandbox.Image) string { return i.Name })
		return wrap(api.ImageList{Items: items, Next: next}, err)
	})
	register(s, huma.Operation{
		OperationID: "import-image", Method: http.MethodPost, Path: "/v1/images", DefaultStatus: http.StatusCreated,
		Summary: "Import an archive as an image: of a root file system, an OCI layout or docker save", Tags: []string{"images"}, RequestBody: streamBody("application/x-tar"),
	}, func(ctx context.Context, in *importInput) (*result[sandbox.Image], error) {
		req := sandbox.ImportRequest{Name: in.Name, Platform: in.Platform, Actor: actorOf(ctx)}
		return wrap(s.m.ImportImage(ctx, req, uploadOf(ctx).Body))
	})
	s.imageMoveRoutes()
	register(s, huma.Operation{
		OperationID: "get-image", Method: http.MethodGet, Path: "/v1/images/{name}",
		Summary: "One image", Tags: []string{"images"},
	}, func(ctx context.Context, in *imageTarget) (*result[sandbox.Image], error) {
		if err := sandbox.ValidateImageName(in.Name); err != nil {
			return nil, err
		}
		return wrap(s.m.Image(ctx, in.Name))
	})
	register(s, huma.Operation{
		OperationID: "remove-image", Method: http.MethodDelete, Path: "/v1/images/{name}", DefaultStatus: http.StatusNoContent,
		Summary: "Remove an image's name and what only it used", Tags: []string{"images"},
	}, func(ctx context.Context, in *imageTarget) (*empty, error) {
		if err := sandbox.ValidateImageName(in.Name); err != nil {
			return nil, err
		}
		return nil, s.m.RemoveImage(ctx, in.Name)
	})
}

// streamBody documents a body that is read as it comes and not as JSON.
func streamBody(contentType string) *huma.RequestBody {
	return &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{
		contentType: {Schema: &huma.Schema{Type: huma.TypeString, Format: "binary"}},
	}}
}
