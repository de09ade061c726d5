package e2b

import (
	"encoding/json"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// maxLogs is the most lines of one answer.
const maxLogs = 1000

type logLine struct {
	Timestamp time.Time `json:"timestamp"`
	Line      string    `json:"line"`
}

type logEntry struct {
	Timestamp time.Time         `json:"timestamp"`
	Level     string            `json:"level"`
	Message   string            `json:"message"`
	Fields    map[string]string `json:"fields"`
}

// logs tells what happened to a sandbox, oldest first: its events. Each line
// is an object of JSON, which E2B's command line takes apart.
func (s *Server) logs(_ http.ResponseWriter, r *http.Request, _ string) (int, any, error) {
	entries, err := s.entries(r, "start", false)
	if err != nil {
		return 0, nil, err
	}
	lines := make([]logLine, len(entries))
	for i, e := range entries {
		line := map[string]string{"level": e.Level, "logger": "sandboxd", "message": e.Message}
		maps.Copy(line, e.Fields)
		text, err := json.Marshal(line)
		if err != nil {
			return 0, nil, err
		}
		lines[i] = logLine{e.Timestamp, string(text)}
	}
	return http.StatusOK, map[string]any{"logs": lines, "logEntries": entries}, nil
}

// logsPage is the same for newer clients.
func (s *Server) logsPage(_ http.ResponseWriter, r *http.Request, _ string) (int, any, error) {
	entries, err := s.entries(r, "cursor", r.URL.Query().Get("direction") == "backward")
	if err != nil {
		return 0, nil, err
	}
	return http.StatusOK, map[string]any{"logs": entries}, nil
}

func fieldsText(fields map[string]string) string {
	var words []string
	for _, k := range slices.Sorted(maps.Keys(fields)) {
		words = append(words, k+"="+fields[k])
	}
	return strings.Join(words, " ")
}

// entries are the events of a sandbox from a time on, in milliseconds, or back
// from it.
func (s *Server) entries(r *http.Request, from string, back bool) ([]logEntry, error) {
	q := r.URL.Query()
	at, err := unixTime(q.Get(from), 0)
	if err != nil {
		return nil, err
	}
	limit, err := logLimit(q)
	if err != nil {
		return nil, err
	}
	box, err := s.boxOf(r)
	if err != nil {
		return nil, err
	}
	out := []logEntry{}
	for after := int64(0); ; {
		events, err := s.m.Events(r.Context(), after, string(box.ID), maxLogs)
		if err != nil {
			return nil, err
		}
		for _, e := range events {
			after = e.Seq
			ms := e.Time.UnixMilli()
			if !back && ms < at || back && at > 0 && ms > at {
				continue
			}
			entry := logEntryOf(e)
			if search := q.Get("search"); search != "" && !strings.Contains(entry.Message+" "+fieldsText(entry.Fields), search) {
				continue
			}
			if out = append(out, entry); len(out) > limit && back {
				out = out[1:]
			}
		}
		if len(events) < maxLogs || !back && len(out) >= limit {
			break
		}
	}
	if back {
		slices.Reverse(out)
	}
	return out[:min(limit, len(out))], nil
}

func logEntryOf(e sandbox.Event) logEntry {
	fields := maps.Clone(e.Data)
	if fields == nil {
		fields = map[string]string{}
	}
	if e.Actor != "" {
		fields["actor"] = e.Actor
	}
	return logEntry{Timestamp: e.Time, Level: "info", Message: e.Type, Fields: fields}
}

func logLimit(q url.Values) (int, error) {
	text := q.Get("limit")
	if text == "" {
		return maxLogs, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 {
		return 0, bad("invalid_query", "limit %.20q: use 0 to %d", text, maxLogs)
	}
	return min(n, maxLogs), nil
}

// unixTime reads a time since 1970, in whatever unit.
func unixTime(text string, otherwise int64) (int64, error) {
	if text == "" {
		return otherwise, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return 0, bad("invalid_query", "time %.30q: use a whole number since 1970-01-01 UTC", text)
	}
	return n, nil
}
