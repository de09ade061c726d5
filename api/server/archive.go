package server

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/sandbox"
)

func (s *server) archiveRoutes() {
	const path = "/v1/sandboxes/{ref}/files/archive"
	register(s, huma.Operation{
		OperationID: "get-archive", Method: http.MethodGet, Path: path, Tags: []string{"files"},
		Summary: "A file or tree as a tar archive, with names relative to its parent",
		Responses: map[string]*huma.Response{"200": {
			Description: "The archive", Content: map[string]*huma.MediaType{"application/x-tar": {Schema: &huma.Schema{Type: huma.TypeString, Format: "binary"}}},
		}},
	}, func(ctx context.Context, in *FileTarget) (*huma.StreamResponse, error) {
		if err := sandbox.ValidateFilePath(in.Path); err != nil {
			return nil, err
		}
		f, err := s.m.Files(ctx, in.Ref)
		if err != nil {
			return nil, err
		}
		body, err := begun(f.TarOut(ctx, in.User, in.Path))
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
		OperationID: "put-archive", Method: http.MethodPut, Path: path, DefaultStatus: http.StatusNoContent, Tags: []string{"files"},
		Summary: "Unpack a tar archive beneath a directory", RequestBody: streamBody("application/x-tar"),
	}, func(ctx context.Context, in *FileTarget) (*empty, error) {
		return s.fileWork(ctx, in.Ref, in.Path, func(f sandbox.Files) error {
			return f.TarIn(ctx, in.User, in.Path, requestOf(ctx).r.Body)
		})
	})
}
