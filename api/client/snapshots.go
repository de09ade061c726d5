package client

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Snapshot freezes the files of a sandbox.
func (c *Client) Snapshot(ctx context.Context, ref string, req sandbox.SnapshotRequest) (sandbox.Snapshot, error) {
	return post[sandbox.Snapshot](ctx, c, at(ref, "snapshots"), req, keyed(req.IdempotencyKey))
}

// SnapshotOf returns one snapshot, by id, name or unique beginning of an id.
func (c *Client) SnapshotOf(ctx context.Context, ref string) (sandbox.Snapshot, error) {
	return get[sandbox.Snapshot](ctx, c, path("snapshots", ref), nil)
}

// Snapshots lists snapshots, newest first: of one sandbox, or with an empty
// ref of all.
func (c *Client) Snapshots(ctx context.Context, ref string, kinds ...sandbox.SnapshotKind) ([]sandbox.Snapshot, error) {
	q := url.Values{}
	set(q, "sandbox", ref)
	words := make([]string, len(kinds))
	for i, k := range kinds {
		words[i] = string(k)
	}
	set(q, "kind", strings.Join(words, ","))
	list, err := get[api.SnapshotList](ctx, c, path("snapshots"), q)
	return list.Items, err
}

// RemoveSnapshot forgets a snapshot; what was made of it stays.
func (c *Client) RemoveSnapshot(ctx context.Context, ref string) (sandbox.Snapshot, error) {
	return ask[sandbox.Snapshot](ctx, c, call{method: http.MethodDelete, path: path("snapshots", ref)})
}

// Fork makes sandboxes that begin with the files of a snapshot, or of a
// sandbox as it is now. Those that could not be made say why.
func (c *Client) Fork(ctx context.Context, ref string, req sandbox.ForkRequest) ([]sandbox.Fork, error) {
	list, err := post[api.ForkList](ctx, c, path("snapshots", ref, "fork"), req, keyed(req.IdempotencyKey))
	return list.Items, err
}

// Rollback puts a sandbox back on a snapshot's files, in place.
func (c *Client) Rollback(ctx context.Context, ref, snapshot string) (sandbox.Sandbox, error) {
	return post[sandbox.Sandbox](ctx, c, at(ref, "rollback"), api.RollbackRequest{Snapshot: snapshot}, nil)
}

// Undo puts a sandbox back by so many restore points.
func (c *Client) Undo(ctx context.Context, ref string, steps int) (sandbox.Sandbox, error) {
	return post[sandbox.Sandbox](ctx, c, at(ref, "undo"), api.UndoRequest{Steps: steps}, nil)
}

// ResetPaths gives some paths of a running sandbox their first content again.
func (c *Client) ResetPaths(ctx context.Context, ref string, paths ...string) (sandbox.Sandbox, error) {
	return post[sandbox.Sandbox](ctx, c, at(ref, "reset"), api.ResetRequest{Only: paths}, nil)
}

// History returns the snapshots a sandbox's files came through.
func (c *Client) History(ctx context.Context, ref string) (sandbox.History, error) {
	return get[sandbox.History](ctx, c, at(ref, "history"), nil)
}

// Diff returns how the files of one state differ from those of another, up to
// limit changes; more says that there are others. from is a snapshot, or empty
// for what to began with; to is a snapshot or a living sandbox.
func (c *Client) Diff(ctx context.Context, from, to string, limit int) (changes []sandbox.FileChange, more bool, err error) {
	q := url.Values{}
	set(q, "from", from)
	set(q, "to", to)
	if limit > 0 {
		q.Set("limit", strconv.Itoa(limit))
	}
	out, err := get[api.FileChanges](ctx, c, path("diff"), q)
	return out.Items, out.More, err
}

// AddSchedule repeats a snapshot or a reset of a sandbox.
func (c *Client) AddSchedule(ctx context.Context, ref string, req api.ScheduleRequest) (sandbox.Schedule, error) {
	return post[sandbox.Schedule](ctx, c, at(ref, "schedules"), req, nil)
}

// Schedules lists the schedules of one sandbox, or with an empty ref all.
func (c *Client) Schedules(ctx context.Context, ref string) ([]sandbox.Schedule, error) {
	q := url.Values{}
	set(q, "sandbox", ref)
	list, err := get[api.ScheduleList](ctx, c, path("schedules"), q)
	return list.Items, err
}

// RemoveSchedule ends a schedule; what it made stays.
func (c *Client) RemoveSchedule(ctx context.Context, id string) error {
	_, err := ask[struct{}](ctx, c, call{method: http.MethodDelete, path: path("schedules", id)})
	return err
}

// ExportSnapshot streams a snapshot as an archive that ImportSnapshot takes.
func (c *Client) ExportSnapshot(ctx context.Context, ref string) (io.ReadCloser, error) {
	resp, err := c.do(ctx, call{method: http.MethodGet, path: path("snapshots", ref, "archive")})
	if err != nil {
		return nil, err
	}
	return &download{ReadCloser: resp.Body, ctx: ctx, what: ref}, nil
}

// ImportSnapshot makes a snapshot of an exported one, of this host or another.
func (c *Client) ImportSnapshot(ctx context.Context, name string, r io.Reader) (sandbox.Snapshot, error) {
	q := url.Values{}
	set(q, "name", name)
	return ask[sandbox.Snapshot](ctx, c, call{
		method: http.MethodPost, path: path("snapshots"), query: q, body: r, header: http.Header{"Content-Type": {"application/x-tar"}},
	})
}
