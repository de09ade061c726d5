package client

import (
	"context"
	"iter"
	"net/http"
	"net/url"
	"strconv"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/cost"
)

// Prices lists the price books, the earliest first.
func (c *Client) Prices(ctx context.Context) ([]cost.Book, error) {
	l, err := get[api.PriceList](ctx, c, path("prices"), nil)
	return l.Items, err
}

// PostEntry enters a cost or a revenue from outside, by the request's kind.
// With a key it is taken once, however often it is sent.
func (c *Client) PostEntry(ctx context.Context, req cost.EntryRequest) (cost.Posted, error) {
	where := "costs"
	if req.Kind == cost.KindRevenue {
		where = "revenue"
	}
	var header http.Header
	if req.Key != "" {
		header = http.Header{api.HeaderIdempotencyKey: {req.Key}}
	}
	return post[cost.Posted](ctx, c, path(where), req, header)
}

// CancelEntry cancels a cost or a revenue by its number, and returns the
// cancellation; again, the same.
func (c *Client) CancelEntry(ctx context.Context, number int64, reason string) (cost.Posted, error) {
	return post[cost.Posted](ctx, c, path("costs", strconv.FormatInt(number, 10), "cancel"), api.CancelEntryRequest{Reason: reason}, nil)
}

// Entries goes through costs and revenue from outside, the newest first, page
// by page; q.Limit bounds how many, if set.
func (c *Client) Entries(ctx context.Context, q cost.EntryQuery) iter.Seq2[cost.Posted, error] {
	return func(yield func(cost.Posted, error) bool) {
		query := span(q.Sandbox, q.Project, q.Owner, rfc3339(q.From), rfc3339(q.To))
		if q.Kind != "" {
			query.Set("kind", string(q.Kind))
		}
		for before, n := q.Before, 0; ; {
			if before > 0 {
				query.Set("before", strconv.FormatInt(before, 10))
			}
			page, err := get[api.EntryList](ctx, c, path("costs"), query)
			if err != nil {
				yield(cost.Posted{}, err)
				return
			}
			for _, e := range page.Items {
				if n++; !yield(e, nil) || n == q.Limit {
					return
				}
			}
			if before = page.Next; before == 0 {
				return
			}
		}
	}
}

// Statement tells what was spent and earned in a span of time.
func (c *Client) Statement(ctx context.Context, q cost.StatementQuery) (cost.Statement, error) {
	query := span(q.Sandbox, q.Project, q.Owner, rfc3339(q.From), rfc3339(q.To))
	for name, value := range map[string]string{"by": q.By, "book": q.Book} {
		if value != "" {
			query.Set(name, value)
		}
	}
	return get[cost.Statement](ctx, c, path("costs", "report"), query)
}

// span is a span of time and whose it is, as a query.
func span(sandbox, project, owner, from, to string) url.Values {
	query := url.Values{}
	for name, value := range map[string]string{"sandbox": sandbox, "project": project, "owner": owner, "from": from, "to": to} {
		if value != "" {
			query.Set(name, value)
		}
	}
	return query
}
