package client

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Files returns the file work of one sandbox.
func (c *Client) Files(ref string) sandbox.Files { return &files{c: c, ref: ref} }

type files struct {
	c   *Client
	ref string
}

func (f *files) at(more ...string) string { return at(f.ref, append([]string{"files"}, more...)...) }

func fileQuery(user, path string) url.Values {
	q := url.Values{"path": {path}}
	set(q, "user", user)
	return q
}

func octal(mode uint32) string {
	s := strconv.FormatUint(uint64(mode), 8)
	for len(s) < 3 {
		s = "0" + s
	}
	return s
}

func (f *files) Stat(ctx context.Context, user, path string) (sandbox.FileInfo, error) {
	return get[sandbox.FileInfo](ctx, f.c, f.at("stat"), fileQuery(user, path))
}

func (f *files) List(ctx context.Context, user, path string, depth int) ([]sandbox.FileInfo, error) {
	q := fileQuery(user, path)
	q.Set("depth", strconv.Itoa(max(depth, 1)))
	l, err := get[api.FileList](ctx, f.c, f.at("list"), q)
	return l.Items, err
}

func (f *files) Each(ctx context.Context, user, path string, depth int, g func(sandbox.FileInfo) error) error {
	items, err := f.List(ctx, user, path, depth)
	for i := 0; err == nil && i < len(items); i++ {
		err = g(items[i])
	}
	return err
}

func (f *files) Read(ctx context.Context, user, path string, offset, limit int64) (sandbox.FileInfo, io.ReadCloser, error) {
	h := http.Header{}
	switch {
	case limit == 0: // no range says nothing: describe, read nothing
		info, err := f.Stat(ctx, user, path)
		return info, http.NoBody, err
	case limit > 0:
		h.Set("Range", "bytes="+strconv.FormatInt(offset, 10)+"-"+strconv.FormatInt(offset+limit-1, 10))
	case offset > 0:
		h.Set("Range", "bytes="+strconv.FormatInt(offset, 10)+"-")
	}
	var info sandbox.FileInfo
	resp, err := f.c.do(ctx, call{method: http.MethodGet, path: f.at(), query: fileQuery(user, path), header: h})
	if err != nil {
		return info, nil, err
	}
	if record, err := base64.StdEncoding.DecodeString(resp.Header.Get(api.HeaderFileInfo)); err != nil || json.Unmarshal(record, &info) != nil {
		_ = resp.Body.Close() // the answer is of no use
		return info, nil, sandbox.Errorf(sandbox.ErrUnavailable, "broken_answer", "the answer about %s has no %s header", path, api.HeaderFileInfo)
	}
	return info, &download{ReadCloser: resp.Body, ctx: ctx, what: path}, nil
}

// download is a body that comes from a sandbox, whose breaking off is told.
type download struct {
	io.ReadCloser
	ctx  context.Context //nolint:containedctx // of the request the body belongs to
	what string
	n    int64
}

func (d *download) Read(p []byte) (int, error) {
	n, err := d.ReadCloser.Read(p)
	d.n += int64(n)
	if err == nil || errors.Is(err, io.EOF) || d.ctx.Err() != nil {
		return n, err
	}
	return n, sandbox.Errorf(sandbox.ErrUnavailable, "download_broken", "what came of %s broke off after %d bytes: a file changed while it was read or could not be read, or the sandbox or the daemon ended; try again: %w", d.what, d.n, err)
}

func (f *files) Write(ctx context.Context, user, path string, mode uint32, r io.Reader) (sandbox.FileInfo, error) {
	q := fileQuery(user, path)
	q.Set("mode", octal(mode))
	return ask[sandbox.FileInfo](ctx, f.c, call{
		method: http.MethodPut, path: f.at(), query: q, body: r, header: http.Header{"Content-Type": {"application/octet-stream"}},
	})
}

func (f *files) Mkdir(ctx context.Context, user, path string, mode uint32) (sandbox.FileInfo, error) {
	return post[sandbox.FileInfo](ctx, f.c, f.at("mkdir"), api.MkdirRequest{Path: path, Mode: octal(mode), User: user}, nil)
}

func (f *files) Move(ctx context.Context, user, from, to string) error {
	_, err := post[none](ctx, f.c, f.at("move"), api.MoveRequest{From: from, To: to, User: user}, nil)
	return err
}

func (f *files) Remove(ctx context.Context, user, path string, recursive bool) error {
	q := fileQuery(user, path)
	if recursive {
		q.Set("recursive", "true")
	}
	_, err := ask[none](ctx, f.c, call{method: http.MethodDelete, path: f.at(), query: q})
	return err
}

func (f *files) Chmod(ctx context.Context, user, path string, mode uint32) error {
	_, err := post[none](ctx, f.c, f.at("chmod"), api.ChmodRequest{Path: path, Mode: octal(mode), User: user}, nil)
	return err
}

func (f *files) TarOut(ctx context.Context, user, path string) (io.ReadCloser, error) {
	resp, err := f.c.do(ctx, call{method: http.MethodGet, path: f.at("archive"), query: fileQuery(user, path)})
	if err != nil {
		return nil, err
	}
	return &download{ReadCloser: resp.Body, ctx: ctx, what: path}, nil
}

func (f *files) TarIn(ctx context.Context, user, path string, r io.Reader) error {
	_, err := ask[none](ctx, f.c, call{
		method: http.MethodPut, path: f.at("archive"), query: fileQuery(user, path), body: r,
		header: http.Header{"Content-Type": {"application/x-tar"}},
	})
	return err
}

func (f *files) Watch(ctx context.Context, user, path string, recursive bool) (sandbox.FileWatch, error) {
	q := fileQuery(user, path)
	if recursive {
		q.Set("recursive", "true")
	}
	s, err := f.c.openSSE(ctx, f.at("watch"), q, "")
	if err != nil {
		return nil, err
	}
	return &watch{s}, nil
}

type watch struct{ s *sse }

func (w *watch) Next() (sandbox.FileEvent, error) {
	var e sandbox.FileEvent
	err := w.s.next(&e)
	return e, err
}

func (w *watch) Close() error { return w.s.body.Close() }
