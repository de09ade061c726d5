package client

import (
	"context"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// path joins parts to a path, each escaped by itself.
func path(parts ...string) string {
	p := "/v1"
	for _, part := range parts {
		p += "/" + url.PathEscape(part)
	}
	return p
}

// named refuses a path in which what names something is empty, or would lead
// elsewhere.
func named(path string) error {
	for part := range strings.SplitSeq(path[1:], "/") {
		if part == "" || part == "." || part == ".." {
			return sandbox.Errorf(sandbox.ErrInvalid, "invalid_name", "a name or id is missing (%q): give one; 'sandbox ls' shows those of sandboxes", part)
		}
	}
	return nil
}

func at(ref string, more ...string) string {
	return path(append([]string{"sandboxes", ref}, more...)...)
}

// Create makes a sandbox and returns when it runs. With an idempotency key a
// repeated call returns the sandbox the first one made.
func (c *Client) Create(ctx context.Context, spec sandbox.Spec, idempotencyKey string) (sandbox.Sandbox, error) {
	return post[sandbox.Sandbox](ctx, c, path("sandboxes"), spec, keyed(idempotencyKey))
}

// keyed is the header of an idempotency key.
func keyed(key string) http.Header {
	h := http.Header{}
	if key != "" {
		h.Set(api.HeaderIdempotencyKey, key)
	}
	return h
}

// Sandbox returns one sandbox, living or ended, by id, name or unique prefix.
func (c *Client) Sandbox(ctx context.Context, ref string) (sandbox.Sandbox, error) {
	return get[sandbox.Sandbox](ctx, c, at(ref), nil)
}

// List returns one page.
func (c *Client) List(ctx context.Context, f sandbox.Filter) (sandbox.Page, error) {
	q := filterQuery(f)
	set(q, "cursor", f.Cursor)
	if f.Limit > 0 {
		q.Set("limit", strconv.Itoa(f.Limit))
	}
	list, err := get[api.SandboxList](ctx, c, path("sandboxes"), q)
	return sandbox.Page{Items: list.Items, Next: list.Next}, err
}

// filterQuery writes down what a filter chooses.
func filterQuery(f sandbox.Filter) url.Values {
	q := url.Values{}
	words := make([]string, len(f.Statuses))
	for i, s := range f.Statuses {
		words[i] = string(s)
	}
	set(q, "status", strings.Join(words, ","))
	for k, v := range f.Labels {
		q.Add("label", k+"="+v)
	}
	for k, v := range f.Unlike {
		q.Add("label", k+"!="+v)
	}
	set(q, "name", f.Name)
	if f.All {
		q.Set("all", "true")
	}
	return q
}

// Bulk does pause, resume, stop, start or remove with all that f chooses by
// labels, status and name, each by itself; with a dry run it tells which these
// are. A filter that chooses nothing in particular is ErrInvalid: set All.
func (c *Client) Bulk(ctx context.Context, verb string, f sandbox.Filter, dryRun bool) (api.BulkResult, error) {
	q := filterQuery(f)
	if dryRun {
		q.Set("dry_run", "true")
	}
	return ask[api.BulkResult](ctx, c, call{method: http.MethodPost, path: path("sandboxes:" + verb), query: q})
}

// All goes through every page.
func (c *Client) All(ctx context.Context, f sandbox.Filter) iter.Seq2[sandbox.Sandbox, error] {
	return func(yield func(sandbox.Sandbox, error) bool) {
		for {
			page, err := c.List(ctx, f)
			if err != nil {
				yield(sandbox.Sandbox{}, err)
				return
			}
			for _, sb := range page.Items {
				if !yield(sb, nil) {
					return
				}
			}
			if page.Next == "" {
				return
			}
			f.Cursor = page.Next
		}
	}
}

func set(q url.Values, key, value string) {
	if value != "" {
		q.Set(key, value)
	}
}

// Remove ends a sandbox and deletes its files. Its record stays; repeating
// it returns the record.
func (c *Client) Remove(ctx context.Context, ref string) (sandbox.Sandbox, error) {
	return ask[sandbox.Sandbox](ctx, c, call{method: http.MethodDelete, path: at(ref)})
}

// Pause freezes a sandbox.
func (c *Client) Pause(ctx context.Context, ref string) (sandbox.Sandbox, error) {
	return post[sandbox.Sandbox](ctx, c, at(ref, "pause"), nil, nil)
}

// Resume lets a paused sandbox go on.
func (c *Client) Resume(ctx context.Context, ref string) (sandbox.Sandbox, error) {
	return post[sandbox.Sandbox](ctx, c, at(ref, "resume"), nil, nil)
}

// Stop ends every process and keeps the files.
func (c *Client) Stop(ctx context.Context, ref string) (sandbox.Sandbox, error) {
	return post[sandbox.Sandbox](ctx, c, at(ref, "stop"), nil, nil)
}

// Start runs a stopped sandbox again.
func (c *Client) Start(ctx context.Context, ref string) (sandbox.Sandbox, error) {
	return post[sandbox.Sandbox](ctx, c, at(ref, "start"), nil, nil)
}

// Reset kills every process of a running sandbox and gives it its image's
// files again; id, address and name stay.
func (c *Client) Reset(ctx context.Context, ref string) (sandbox.Sandbox, error) {
	return post[sandbox.Sandbox](ctx, c, at(ref, "reset"), nil, nil)
}

// Usage returns the counters, read now.
func (c *Client) Usage(ctx context.Context, ref string) (sandbox.Usage, error) {
	return get[sandbox.Usage](ctx, c, at(ref, "usage"), nil)
}

// UsageReport tells what was used in a span of time: by one sandbox, or with an
// empty ref by all.
func (c *Client) UsageReport(ctx context.Context, ref string, q sandbox.UsageQuery) (sandbox.UsageReport, error) {
	query := url.Values{}
	for name, value := range map[string]string{"sandbox": ref, "by": q.By, "from": rfc3339(q.From), "to": rfc3339(q.To)} {
		if value != "" {
			query.Set(name, value)
		}
	}
	return get[sandbox.UsageReport](ctx, c, path("usage"), query)
}

// rfc3339 writes a time for a query; the zero time is none.
func rfc3339(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339Nano)
}

// Version names the daemon.
func (c *Client) Version(ctx context.Context) (api.Version, error) {
	return get[api.Version](ctx, c, path("version"), nil)
}

// Pool tells how the daemon's pool of ready shells does.
func (c *Client) Pool(ctx context.Context) (sandbox.PoolStats, error) {
	return get[sandbox.PoolStats](ctx, c, path("pool"), nil)
}

// Doctor returns what the daemon finds of its host.
func (c *Client) Doctor(ctx context.Context) ([]sandbox.Check, error) {
	r, err := get[api.DoctorReport](ctx, c, path("doctor"), nil)
	return r.Checks, err
}
