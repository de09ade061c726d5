package client

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// StartProcess starts a command in the background.
func (c *Client) StartProcess(ctx context.Context, ref string, spec sandbox.ProcessSpec) (sandbox.Process, error) {
	return post[sandbox.Process](ctx, c, at(ref, "processes"), spec, keyed(spec.IdempotencyKey))
}

// Processes lists the processes started through the API, ended ones too.
func (c *Client) Processes(ctx context.Context, ref string) ([]sandbox.Process, error) {
	l, err := get[api.ProcessList](ctx, c, at(ref, "processes"), nil)
	return l.Items, err
}

// Process returns one process.
func (c *Client) Process(ctx context.Context, ref string, id sandbox.ProcessID) (sandbox.Process, error) {
	return get[sandbox.Process](ctx, c, at(ref, "processes", string(id)), nil)
}

// SignalProcess sends a signal, as "SIGTERM", to a process and all it started.
func (c *Client) SignalProcess(ctx context.Context, ref string, id sandbox.ProcessID, signal string) error {
	_, err := post[none](ctx, c, at(ref, "processes", string(id), "signal"), api.SignalRequest{Signal: signal}, nil)
	return err
}

// Output streams a process's output as plain bytes, both streams mixed as
// written, from offset on (negative: from the oldest byte kept); with follow
// until it ends. Of a sandbox that has ended it is what was kept.
func (c *Client) Output(ctx context.Context, ref string, id sandbox.ProcessID, offset int64, follow bool) (io.ReadCloser, error) {
	q := url.Values{}
	if offset >= 0 {
		q.Set("offset", strconv.FormatInt(offset, 10))
	}
	if follow {
		q.Set("follow", "true")
	}
	resp, err := c.do(ctx, call{method: http.MethodGet, path: at(ref, "processes", string(id), "output"), query: q})
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// LastOutput returns the end of the last process's output, kept when its
// sandbox stopped or ended.
func (c *Client) LastOutput(ctx context.Context, ref string) ([]byte, error) {
	resp, err := c.do(ctx, call{method: http.MethodGet, path: at(ref, "output")})
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.ErrUnavailable, "broken_answer", "reading the last output of %s: %w", ref, err)
	}
	return b, nil
}
