//go:build root

package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// openAPI is what requests are made up from.
type openAPI struct {
	Paths map[string]map[string]struct {
		OperationID string `json:"operationId"`
		Parameters  []struct {
			Name, In string
			Schema   *shape
		}
		RequestBody *struct {
			Content map[string]struct{ Schema *shape }
		} `json:"requestBody"`
	}
	Components struct{ Schemas map[string]*shape }
}

// shape is a JSON schema, as far as it is heeded here.
type shape struct {
	Ref        string `json:"$ref"`
	Type       any
	Enum       []any
	Properties map[string]*shape
	Items      *shape
}

// inventor makes up requests: of a daemon's own document, with something in
// most that no document permits.
type inventor struct {
	*rand.Rand
	doc openAPI
	ops []inventedOp
}

type inventedOp struct{ method, path string }

var junk = []any{
	nil, true, -1, 1e308, "", "\x00", "ü", strings.Repeat("a", 5000),
	[]any{},
	[]any{[]any{[]any{}}},
	map[string]any{},
	map[string]any{"$ref": "x"},
	"../../etc/passwd", "9223372036854775808", -9223372036854775808, "2026-13-45T99:99:99Z", "box; reboot", "*", "%n%s", 0.5,
}

var junkPaths = []string{"box", "box", "sbaaaaaaaaaaaa", "snaaaaaaaaaaaa", "..", "%00", "-1", "a b", "ü", "*", strings.Repeat("x", 300), "'", "nobody", "host", "0", "80"}

func (v *inventor) fill(s *shape, depth int) any {
	if s == nil || depth > 6 || v.IntN(12) == 0 {
		return pick(v.Rand, junk)
	}
	if name, ok := strings.CutPrefix(s.Ref, "#/components/schemas/"); ok {
		return v.fill(v.doc.Components.Schemas[name], depth+1)
	}
	if len(s.Enum) > 0 {
		return pick(v.Rand, s.Enum)
	}
	kind, _ := s.Type.(string)
	if kinds, ok := s.Type.([]any); ok && len(kinds) > 0 {
		kind, _ = pick(v.Rand, kinds).(string)
	}
	switch kind {
	case "object":
		out := map[string]any{}
		for _, name := range sortedNames(s.Properties) {
			if v.IntN(3) > 0 {
				out[name] = v.fill(s.Properties[name], depth+1)
			}
		}
		if v.IntN(8) == 0 {
			out["unheard_of"] = 1
		}
		return out
	case "array":
		var out []any
		for range v.IntN(3) {
			out = append(out, v.fill(s.Items, depth+1))
		}
		return out
	case "integer":
		return v.IntN(1000) - 10
	case "number":
		return v.Float64() * 10
	case "boolean":
		return v.IntN(2) == 0
	}
	return pick(v.Rand, []string{"a", "/tmp/x", "box", "host", "10.0.0.0/8", "1s", "1m", "x=y", "echo", "é"})
}

func sortedNames[T any](m map[string]T) (names []string) {
	for name := range m {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

var pathParameter = regexp.MustCompile(`\{[^}]*\}`)

// request makes one up.
func (v *inventor) request() (method, path, query string, body []byte, kind string) {
	chosen := pick(v.Rand, v.ops)
	op := v.doc.Paths[chosen.path][chosen.method]
	path = pathParameter.ReplaceAllStringFunc(chosen.path, func(string) string { return url.PathEscape(pick(v.Rand, junkPaths)) })
	q := url.Values{}
	for _, p := range op.Parameters {
		if p.In == "query" && v.IntN(3) == 0 {
			q.Set(p.Name, fmt.Sprint(v.fill(p.Schema, 5)))
		}
	}
	if v.IntN(10) == 0 {
		q.Set("unheard_of", "1")
	}
	if op.RequestBody == nil {
		return strings.ToUpper(chosen.method), path, q.Encode(), nil, ""
	}
	kinds := sortedNames(op.RequestBody.Content)
	kind = pick(v.Rand, kinds)
	switch v.IntN(10) {
	case 0:
		body = []byte(pick(v.Rand, []string{"", "{", "[]", "null", "\xff\xfe", `{"a":` + strings.Repeat("[", 2000), "0"}))
	case 1:
		kind = "text/x-nothing"
		fallthrough
	default:
		body, _ = json.Marshal(v.fill(op.RequestBody.Content[pick(v.Rand, kinds)].Schema, 0)) // no channels, no functions
	}
	return strings.ToUpper(chosen.method), path, q.Encode(), body, kind
}

// ours reports whether an answer is the daemon's own failure. That this host or
// build cannot is none, nor that a registry which a good request names is not
// there, or a sandbox that another request removes meanwhile.
func ours(status int, p api.Problem) bool {
	return status >= 500 && status != http.StatusNotImplemented && p.Code != "registry_unreachable" && p.Code != "sandbox_unreachable"
}

// TestMadeUpRequests sends 2,000 requests made up from the daemon's own
// document, as root and as a developer: none is an error of the daemon's own,
// and it lives on.
func TestMadeUpRequests(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	requests := soak(2000, 100000)
	d := install(t, "default_limits: {pids: 64}\n")
	d.create(t, sandbox.Spec{Name: "box"})
	key, errs, code := d.cli(t, nil, "", "key", "create", "dora", "--role", "developer")
	key = regexp.MustCompile(`e2b_[0-9a-f]{64}`).FindString(key)
	if code != 0 || key == "" {
		t.Fatalf("make a key: %d %s", code, errs)
	}
	if _, errs, code := d.cli(t, nil, "", "owner", "set", "dora", "--requests-per-minute", "1000000"); code != 0 {
		t.Fatalf("let her ask as often as she likes: %d %s", code, errs)
	}
	hc := &http.Client{
		Transport: &http.Transport{MaxIdleConnsPerHost: 8, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(d.Dir, "run", "sandboxd.sock"))
		}},
	}
	defer hc.CloseIdleConnections()
	v := &inventor{Rand: rand.New(rand.NewPCG(seed, 0))}
	resp, err := hc.Get("http://d/openapi.json")
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(json.NewDecoder(resp.Body).Decode(&v.doc), resp.Body.Close())
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range sortedNames(v.doc.Paths) {
		for _, method := range sortedNames(v.doc.Paths[path]) {
			v.ops = append(v.ops, inventedOp{method, path})
		}
	}
	if len(v.ops) < 100 {
		t.Fatalf("the document has %d operations", len(v.ops))
	}

	var mu sync.Mutex // of v
	var asked atomic.Int64
	statuses := [6]atomic.Int64{}
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			for asked.Add(1) <= int64(requests) && !t.Failed() {
				mu.Lock()
				method, path, query, body, kind := v.request()
				mu.Unlock()
				header := http.Header{"Content-Type": {kind}}
				if worker%2 == 0 {
					header.Set("X-Api-Key", key)
				}
				status, problem, err := madeUp(t.Context(), hc, method, path, query, body, header)
				if err != nil {
					t.Errorf("%s %s?%s %.300s: %v", method, path, query, body, err)
					continue
				}
				statuses[status/100].Add(1)
				if ours(status, problem) {
					t.Errorf("%s %s?%s %.300s: %d %s: %s", method, path, query, body, status, problem.Code, problem.Detail)
				}
			}
		})
	}
	wg.Wait()
	t.Logf("answers by hundreds: %d %d %d %d", statuses[2].Load(), statuses[3].Load(), statuses[4].Load(), statuses[5].Load())
	if statuses[4].Load() < int64(requests)/2 {
		t.Error("most of them should have been refused")
	}
	if _, err := d.List(t.Context(), sandbox.Filter{}); err != nil {
		t.Errorf("afterwards: %v", err)
	}
	if strings.Contains(d.Log.String(), "panic") {
		t.Error("the daemon's log tells of a panic")
	}
}

// madeUp sends one request; of a stream it reads the beginning.
func madeUp(ctx context.Context, hc *http.Client, method, path, query string, body []byte, header http.Header) (status int, p api.Problem, err error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, "http://d"+path, bytes.NewReader(body))
	if err != nil {
		return 0, p, fmt.Errorf("make a request: %w", err)
	}
	r.URL.RawQuery, r.Header = query, header
	resp, err := hc.Do(r)
	if err != nil {
		return 0, p, err
	}
	defer resp.Body.Close()
	if resp.StatusCode < 400 {
		return resp.StatusCode, p, nil // the rest may be a stream without end
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err == nil {
		err = json.Unmarshal(text, &p)
	}
	if err == nil && p.Code == "" {
		err = fmt.Errorf("a %d without a code: %.200s", resp.StatusCode, text)
	}
	return resp.StatusCode, p, err
}
