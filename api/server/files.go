package server

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

type (
	// FileTarget is the path and query of everything about one file; see Target.
	FileTarget struct {
		Target
		Path string `query:"path" required:"true" minLength:"1" maxLength:"4096" doc:"Absolute, inside the sandbox."`
		User string `query:"user" maxLength:"64" doc:"As whom; the sandbox's user when absent."`
	}
	readInput struct {
		FileTarget
		Range string `header:"Range" maxLength:"64" doc:"One range of bytes, as bytes=0-99."`
	}
	writeInput struct {
		FileTarget
		Mode string `query:"mode" pattern:"^[0-7]{3,4}$" doc:"Octal; 0644 when absent."`
	}
	listFilesInput struct {
		FileTarget
		Depth int `query:"depth" default:"1" minimum:"1" maximum:"64"`
	}
	removeInput struct {
		FileTarget
		Recursive bool `query:"recursive"`
	}
	watchInput struct {
		FileTarget
		Recursive bool `query:"recursive"`
	}
	bodyInput[T any] struct {
		Target
		Body T
	}
)

func (s *server) fileRoutes() {
	const base = "/v1/sandboxes/{ref}/files"
	tags := []string{"files"}
	register(s, huma.Operation{
		OperationID: "read-file", Method: http.MethodGet, Path: base, Summary: "Stream a regular file", Tags: tags,
		Responses: map[string]*huma.Response{"200": {
			Description: "The content; X-File-Info is base64 of the file's record",
			Content:     map[string]*huma.MediaType{"application/octet-stream": {Schema: &huma.Schema{Type: huma.TypeString, Format: "binary"}}},
		}, "206": {Description: "The range asked for"}},
	}, s.readFile)
	register(s, huma.Operation{
		OperationID: "write-file", Method: http.MethodPut, Path: base, Summary: "Make or replace a regular file, at once at the end of the body",
		Tags: tags, RequestBody: streamBody("application/octet-stream"),
	}, func(ctx context.Context, in *writeInput) (*result[sandbox.FileInfo], error) {
		mode, err := parseMode(in.Mode, 0o644)
		if err != nil {
			return nil, err
		}
		return withFiles(ctx, s, in.Ref, in.Path, func(f sandbox.Files) (sandbox.FileInfo, error) {
			return f.Write(ctx, in.User, in.Path, mode, requestOf(ctx).r.Body)
		})
	})
	register(s, huma.Operation{
		OperationID: "remove-file", Method: http.MethodDelete, Path: base, DefaultStatus: http.StatusNoContent,
		Summary: "Delete a file, or with recursive a tree", Tags: tags,
	}, func(ctx context.Context, in *removeInput) (*empty, error) {
		return s.fileWork(ctx, in.Ref, in.Path, func(f sandbox.Files) error { return f.Remove(ctx, in.User, in.Path, in.Recursive) })
	})
	register(s, huma.Operation{
		OperationID: "stat-file", Method: http.MethodGet, Path: base + "/stat", Summary: "Describe a file", Tags: tags,
	}, func(ctx context.Context, in *FileTarget) (*result[sandbox.FileInfo], error) {
		return withFiles(ctx, s, in.Ref, in.Path, func(f sandbox.Files) (sandbox.FileInfo, error) { return f.Stat(ctx, in.User, in.Path) })
	})
	register(s, huma.Operation{
		OperationID: "list-files", Method: http.MethodGet, Path: base + "/list", Summary: "List a directory", Tags: tags,
		Responses: map[string]*huma.Response{"200": {
			Description: "The entries, sent as they are found", Content: map[string]*huma.MediaType{"application/json": {Schema: s.schemaOf(api.FileList{}, "FileList")}},
		}},
	}, s.listFiles)
	register(s, huma.Operation{
		OperationID: "make-dir", Method: http.MethodPost, Path: base + "/mkdir", DefaultStatus: http.StatusOK, Summary: "Make a directory and its parents", Tags: tags,
	}, func(ctx context.Context, in *bodyInput[api.MkdirRequest]) (*result[sandbox.FileInfo], error) {
		mode, err := parseMode(in.Body.Mode, 0o755)
		if err != nil {
			return nil, err
		}
		return withFiles(ctx, s, in.Ref, in.Body.Path, func(f sandbox.Files) (sandbox.FileInfo, error) {
			return f.Mkdir(ctx, in.Body.User, in.Body.Path, mode)
		})
	})
	register(s, huma.Operation{
		OperationID: "move-file", Method: http.MethodPost, Path: base + "/move", DefaultStatus: http.StatusNoContent, Summary: "Rename a file or tree", Tags: tags,
	}, func(ctx context.Context, in *bodyInput[api.MoveRequest]) (*empty, error) {
		if err := sandbox.ValidateFilePath(in.Body.To); err != nil {
			return nil, err
		}
		return s.fileWork(ctx, in.Ref, in.Body.From, func(f sandbox.Files) error { return f.Move(ctx, in.Body.User, in.Body.From, in.Body.To) })
	})
	register(s, huma.Operation{
		OperationID: "chmod-file", Method: http.MethodPost, Path: base + "/chmod", DefaultStatus: http.StatusNoContent, Summary: "Change permission bits", Tags: tags,
	}, func(ctx context.Context, in *bodyInput[api.ChmodRequest]) (*empty, error) {
		mode, err := parseMode(in.Body.Mode, 0)
		if err != nil {
			return nil, err
		}
		return s.fileWork(ctx, in.Ref, in.Body.Path, func(f sandbox.Files) error { return f.Chmod(ctx, in.Body.User, in.Body.Path, mode) })
	})
	register(s, huma.Operation{
		OperationID: "watch-files", Method: http.MethodGet, Path: base + "/watch", Summary: "Server-sent events of changes beneath a path", Tags: tags,
		Responses: sseResponse("File changes", s.schemaOf(sandbox.FileEvent{}, "FileEvent")),
	}, s.watchFiles)
}

// withFiles does file work that has a result.
func withFiles[T any](ctx context.Context, s *server, ref, path string, do func(sandbox.Files) (T, error)) (*result[T], error) {
	if err := sandbox.ValidateFilePath(path); err != nil {
		return nil, err
	}
	f, err := s.m.Files(ctx, ref)
	if err != nil {
		return nil, err
	}
	return wrap(do(f))
}

// fileWork does file work that has none.
func (s *server) fileWork(ctx context.Context, ref, path string, do func(sandbox.Files) error) (*empty, error) {
	_, err := withFiles(ctx, s, ref, path, func(f sandbox.Files) (empty, error) { return empty{}, do(f) })
	return nil, err
}

// parseMode reads octal permission bits.
func parseMode(s string, absent uint32) (uint32, error) {
	if s == "" {
		return absent, nil
	}
	mode, err := strconv.ParseUint(s, 8, 32)
	if err != nil || mode > 0o7777 {
		return 0, sandbox.Errorf(sandbox.ErrInvalid, "invalid_mode", "mode %.20q: use three or four octal digits, as 0644", s)
	}
	return uint32(mode), nil
}

// byteRange is one range of a Range header; to < 0 means to the end.
type byteRange struct{ from, to int64 }

// parseRange reads the Range header (RFC 9110 section 14.1.2). Ranges from
// the end and lists of ranges are refused: a stream knows neither.
func parseRange(h string) (byteRange, bool, error) {
	if h == "" {
		return byteRange{0, -1}, false, nil
	}
	spec, ok := strings.CutPrefix(h, "bytes=")
	from, to, dash := strings.Cut(spec, "-")
	r := byteRange{0, -1}
	var ferr, terr error
	r.from, ferr = strconv.ParseInt(from, 10, 64)
	if to != "" {
		r.to, terr = strconv.ParseInt(to, 10, 64)
	}
	if !ok || !dash || ferr != nil || terr != nil || r.from < 0 || (to != "" && r.to < r.from) {
		return r, false, sandbox.Errorf(sandbox.ErrInvalid, "invalid_range", "range %.64q: use one range as bytes=0-99 or bytes=100-", h)
	}
	return r, true, nil
}

func (s *server) readFile(ctx context.Context, in *readInput) (*huma.StreamResponse, error) {
	if err := sandbox.ValidateFilePath(in.Path); err != nil {
		return nil, err
	}
	rng, partial, err := parseRange(in.Range)
	if err != nil {
		return nil, err
	}
	f, err := s.m.Files(ctx, in.Ref)
	if err != nil {
		return nil, err
	}
	limit := int64(-1)
	if rng.to >= 0 {
		limit = rng.to - rng.from + 1
	}
	info, body, err := f.Read(ctx, in.User, in.Path, rng.from, limit)
	if err != nil {
		return nil, err
	}
	// A file of size 0 may still have content, as those of /proc do.
	if partial && info.Size > 0 && rng.from >= info.Size {
		return nil, errors.Join(sandbox.Errorf(sandbox.ErrInvalid, "invalid_range", "range %.64q begins after the file's %d bytes", in.Range, info.Size), body.Close())
	}
	return &huma.StreamResponse{Body: func(hc huma.Context) {
		defer s.closeWith(ctx, body)()
		w := requestOf(ctx).w
		record, err := json.Marshal(info)
		if err == nil {
			w.Header().Set(api.HeaderFileInfo, base64.StdEncoding.EncodeToString(record))
		}
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("Accept-Ranges", "bytes")
		var src io.Reader = body
		status := http.StatusOK
		if info.Size > 0 {
			n := info.Size - rng.from
			if limit >= 0 {
				n = min(n, limit)
			}
			if partial {
				status = http.StatusPartialContent
				w.Header().Set("Content-Range", "bytes "+strconv.FormatInt(rng.from, 10)+"-"+strconv.FormatInt(rng.from+n-1, 10)+"/"+strconv.FormatInt(info.Size, 10))
			}
			w.Header().Set("Content-Length", strconv.FormatInt(n, 10))
			src = io.LimitReader(body, n) // what is appended meanwhile belongs to the next read
		}
		hc.SetStatus(status)
		s.pour(ctx, w, src)
	}}, nil
}

// listFiles sends entries as PID 1 names them: however long the listing, one
// is held at a time.
func (s *server) listFiles(ctx context.Context, in *listFilesInput) (*huma.StreamResponse, error) {
	if err := sandbox.ValidateFilePath(in.Path); err != nil {
		return nil, err
	}
	f, err := s.m.Files(ctx, in.Ref)
	if err != nil {
		return nil, err
	}
	// What goes wrong before the first entry is told as an error.
	list := api.NewItemWriter(requestOf(ctx).w, "items")
	err = f.Each(ctx, in.User, in.Path, in.Depth, func(info sandbox.FileInfo) error { return list.Add(info) })
	switch {
	case err != nil && !list.Begun():
		return nil, err
	case err != nil:
		s.log.DebugContext(ctx, "listing broke", "request", requestOf(ctx).id, "error", err)
		panic(http.ErrAbortHandler)
	}
	return &huma.StreamResponse{Body: func(huma.Context) {
		_ = list.End() // the client may be gone
	}}, nil
}

// Buffers that streams are copied with. So many at a time are large; what
// comes beyond works with small ones, slower.
const (
	largeCopies = 64
	largeCopy   = 256 << 10
	smallCopy   = 32 << 10
)

var (
	copyBuffers = sync.Pool{New: func() any { b := make([]byte, largeCopy); return &b }}
	copying     = make(chan struct{}, largeCopies)
)

// begun waits for the first byte of a stream, so that what is refused before
// it is told as an error.
func begun(body io.ReadCloser, err error) (io.ReadCloser, error) {
	if err != nil {
		return nil, err
	}
	r := bufio.NewReader(body)
	if _, err := r.Peek(1); err != nil && !errors.Is(err, io.EOF) {
		return nil, errors.Join(err, body.Close())
	}
	return struct {
		io.Reader
		io.Closer
	}{r, body}, nil
}

// pour copies a stream to the client. What breaks after the first byte can
// only be told by breaking the connection.
func (s *server) pour(ctx context.Context, w http.ResponseWriter, src io.Reader) {
	var buf []byte
	select {
	case copying <- struct{}{}:
		defer func() { <-copying }()
		b, _ := copyBuffers.Get().(*[]byte) // nothing else is put in
		defer copyBuffers.Put(b)
		buf = *b
	default:
		buf = make([]byte, smallCopy)
	}
	// Hiding WriterTo keeps the copy in our buffer.
	if _, err := io.CopyBuffer(w, struct{ io.Reader }{src}, buf); err != nil {
		s.log.DebugContext(ctx, "stream broke", "request", requestOf(ctx).id, "error", err)
		panic(http.ErrAbortHandler)
	}
}
