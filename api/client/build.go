package client

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"mime/multipart"
	"net/http"
	"net/url"
	"strconv"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// maxBuildLine is the longest line of a build's answer, in bytes.
const maxBuildLine = 4 << 20

// Build makes an image of a Dockerfile. files writes the archive of what the
// Dockerfile copies; nil: nothing. tell takes the events as they come; its
// error ends the build, as the end of ctx does.
func (c *Client) Build(ctx context.Context, req sandbox.BuildRequest, files func(io.Writer) error, tell func(sandbox.BuildEvent) error) (sandbox.Image, error) {
	ctx, cancel := context.WithCancel(ctx) // ends the build where we stop reading
	defer cancel()
	pr, pw := io.Pipe()
	form := multipart.NewWriter(pw)
	sent := make(chan error, 1)
	go func() {
		err := writeBuild(form, req, files)
		_ = pw.CloseWithError(err) // never fails
		sent <- err
	}()
	resp, err := c.do(ctx, call{
		method: http.MethodPost, path: path("images", "build"), body: pr,
		header: http.Header{"Content-Type": {form.FormDataContentType()}},
	})
	_ = pr.Close() // ends the sender, should it still be at it
	if werr := <-sent; err != nil {
		if werr != nil && !errors.Is(werr, io.ErrClosedPipe) {
			return sandbox.Image{}, werr // why the request broke off
		}
		return sandbox.Image{}, err
	}
	defer resp.Body.Close()
	return readBuild(ctx, resp.Body, tell)
}

func writeBuild(form *multipart.Writer, req sandbox.BuildRequest, files func(io.Writer) error) error {
	b, err := api.MarshalUTF8(req)
	if err != nil {
		return err
	}
	w, err := form.CreateFormField(api.BuildRequestPart)
	if err == nil {
		_, err = w.Write(b)
	}
	if err == nil && files != nil {
		if w, err = form.CreateFormFile(api.BuildContextPart, "context.tar"); err == nil {
			err = files(w)
		}
	}
	if err != nil {
		return err
	}
	return form.Close()
}

// readBuild reads events up to the last one.
func readBuild(ctx context.Context, body io.Reader, tell func(sandbox.BuildEvent) error) (sandbox.Image, error) {
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, maxBuildLine)
	for lines.Scan() {
		var m api.BuildMessage
		if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
			return sandbox.Image{}, sandbox.Errorf(sandbox.ErrUnavailable, "broken_answer", "reading the events of the build: %w", err)
		}
		if m.Type == api.BuildFailed {
			if m.Problem == nil {
				return sandbox.Image{}, sandbox.Errorf(sandbox.ErrUnavailable, "broken_answer", "the build ended with an error that says nothing")
			}
			return sandbox.Image{}, m.Problem.Err()
		}
		if err := tell(m.BuildEvent); err != nil {
			return sandbox.Image{}, err
		}
		if m.Type == sandbox.BuildImage && m.Image != nil {
			return *m.Image, nil
		}
	}
	if ctx.Err() != nil {
		return sandbox.Image{}, ctx.Err()
	}
	cause := lines.Err()
	if cause == nil {
		cause = io.ErrUnexpectedEOF
	}
	return sandbox.Image{}, sandbox.Errorf(sandbox.ErrUnavailable, "stream_broken", "the connection to the build broke, which ends it: %w; what was made stays in the cache: build again", cause)
}

// BuildCache tells what the cache of build steps holds.
func (c *Client) BuildCache(ctx context.Context) (sandbox.BuildCache, error) {
	return get[sandbox.BuildCache](ctx, c, path("build-cache"), nil)
}

// PruneBuildCache forgets steps of builds, and counts them.
func (c *Client) PruneBuildCache(ctx context.Context, req sandbox.BuildCachePrune) (sandbox.BuildCache, error) {
	q := url.Values{}
	if req.OlderThanSeconds > 0 {
		q.Set("older_than_seconds", strconv.FormatInt(req.OlderThanSeconds, 10))
	}
	if req.Keep > 0 {
		q.Set("keep", strconv.Itoa(req.Keep))
	}
	return ask[sandbox.BuildCache](ctx, c, call{method: http.MethodDelete, path: path("build-cache"), query: q})
}
