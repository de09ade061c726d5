package e2b

import (
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// nextHeader brings the token of the next page.
const nextHeader = "X-Next-Token"

// maxPage is the most a page has.
const maxPage = 100

// listPage is one page of the caller's sandboxes, newest first.
func (s *Server) listPage(w http.ResponseWriter, r *http.Request, _ string) (int, any, error) {
	q := r.URL.Query()
	f, err := filterOf(q)
	if err != nil {
		return 0, nil, err
	}
	if f.Limit, err = pageSize(q); err != nil {
		return 0, nil, err
	}
	f.Cursor = q.Get("nextToken")
	page, err := s.m.List(r.Context(), f)
	if err != nil {
		return 0, nil, err
	}
	if page.Next != "" {
		w.Header().Set(nextHeader, page.Next)
	}
	return http.StatusOK, showAll(page.Items), nil
}

// listRunning is the list as old clients ask for it: of those that run, whole.
func (s *Server) listRunning(_ http.ResponseWriter, r *http.Request, _ string) (int, any, error) {
	q := r.URL.Query()
	q.Set("state", stateRunning)
	f, err := filterOf(q)
	if err != nil {
		return 0, nil, err
	}
	f.Limit = sandbox.MaxPage
	page, err := s.m.List(r.Context(), f)
	if err != nil {
		return 0, nil, err
	}
	return http.StatusOK, showAll(page.Items), nil
}

func showAll(boxes []sandbox.Sandbox) []shown {
	out := make([]shown, 0, len(boxes))
	for _, b := range boxes {
		out = append(out, show(b))
	}
	return out
}

// filterOf reads what a list is to hold.
func filterOf(q url.Values) (f sandbox.Filter, err error) {
	if f.Statuses, err = statusesOf(q["state"]); err != nil {
		return f, err
	}
	if f.Labels, err = metadataFilter(q.Get("metadata")); err != nil {
		return f, err
	}
	if t := q.Get("template"); t != "" {
		f.Labels[templateLabel] = t
	}
	if text := q.Get("startedAfter"); text != "" {
		if f.StartedAfter, err = time.Parse(time.RFC3339, text); err != nil {
			return f, bad("invalid_query", "startedAfter %.60q: use a time as 2026-01-31T12:00:00Z", text)
		}
	}
	switch order := q.Get("order"); order {
	case "", "desc":
	case "asc":
		f.OldestFirst = true
	default:
		return f, bad("invalid_query", "order %.20q: use asc or desc", order)
	}
	return f, nil
}

func statusesOf(states []string) (out []sandbox.Status, err error) {
	var words []string
	for _, s := range states {
		words = append(words, strings.Split(s, ",")...)
	}
	for _, word := range words {
		switch word {
		case "":
		case stateRunning:
			out = append(out, sandbox.StatusRunning)
		case statePaused:
			out = append(out, sandbox.StatusPaused, sandbox.StatusStopped)
		default:
			return nil, bad("invalid_query", "state %.40q: use running, paused or both", word)
		}
	}
	if len(out) == 0 {
		out = []sandbox.Status{sandbox.StatusRunning, sandbox.StatusPaused, sandbox.StatusStopped}
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// metadataFilter reads pairs that were encoded one by one before they were put
// into a query of their own, which is one parameter of the request's.
func metadataFilter(text string) (map[string]string, error) {
	out := map[string]string{}
	pairs, err := url.ParseQuery(text)
	if err != nil {
		return nil, bad("invalid_query", "metadata %.80q: use k=v&k=v, each part percent-encoded", text)
	}
	plain := func(s string) string {
		if p, err := url.PathUnescape(s); err == nil {
			return p
		}
		return s
	}
	for k, v := range pairs {
		out[plain(k)] = plain(v[0])
	}
	return out, nil
}

func pageSize(q url.Values) (int, error) {
	text := q.Get("limit")
	if text == "" {
		return maxPage, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		return 0, bad("invalid_query", "limit %.20q: use 1 to %d", text, maxPage)
	}
	return min(n, maxPage), nil
}
