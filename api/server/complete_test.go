package server_test

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/api/server/servertest"
	"github.com/sandboxd/sandboxd/sandbox"
)

// asking sends plain requests to a handler.
type asking struct{ http.Handler }

func (h asking) ask(t *testing.T, method, path, body string, header ...string) (int, []byte) {
	t.Helper()
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Code, w.Body.Bytes()
}

// askFor is ask for a JSON answer of a good request.
func askFor[T any](t *testing.T, h asking, method, path, body string, header ...string) T {
	t.Helper()
	code, raw := h.ask(t, method, path, body, header...)
	var v T
	if err := json.Unmarshal(raw, &v); err != nil || code >= 300 {
		t.Fatalf("%s %s: %d %s %v", method, path, code, raw, err)
	}
	return v
}

// code is that of the problem a request ends with.
func (h asking) code(t *testing.T, method, path, body string, header ...string) string {
	t.Helper()
	_, raw := h.ask(t, method, path, body, header...)
	var p api.Problem
	if err := json.Unmarshal(raw, &p); err != nil {
		t.Fatalf("%s %s: %s", method, path, raw)
	}
	return p.Code
}

func memory(t *testing.T, specs ...sandbox.Spec) (*servertest.Memory, asking) {
	t.Helper()
	m := servertest.New()
	for _, s := range specs {
		if _, err := m.Create(t.Context(), sandbox.CreateRequest{Spec: s}); err != nil {
			t.Fatal(err)
		}
	}
	return m, asking{server.New(server.Config{Manager: m, Version: "test", Lab: servertest.NewLab()})}
}

func TestLabelSelectors(t *testing.T) {
	_, h := memory(
		t,
		sandbox.Spec{Name: "a", Labels: map[string]string{"team": "x", "env": "prod"}},
		sandbox.Spec{Name: "b", Labels: map[string]string{"team": "x", "env": "test"}},
		sandbox.Spec{Name: "c", Labels: map[string]string{"team": "y", "note": "one, two"}},
		sandbox.Spec{Name: "d"},
	)
	for query, want := range map[string]string{
		"":                                     "d c b a",
		"label=team%3Dx":                       "b a",
		"label=team%3Dx,env!%3Dprod":           "b",
		"label=team%3Dx&label=env%3Dprod":      "a",
		"label=team!%3Dx":                      "d c",
		"label=note%3Done,%20two":              "c", // the comma is the value's
		"label=note%3Done,%20two,team%3Dy":     "c",
		"label=team!%3Dx,team!%3Dx,env%3Dprod": "",
		"label=env!%3Dprod&status=running":     "d c b",
	} {
		var names []string
		for _, sb := range askFor[api.SandboxList](t, h, "GET", "/v1/sandboxes?"+query, "").Items {
			names = append(names, sb.Spec.Name)
		}
		if got := strings.Join(names, " "); got != want {
			t.Errorf("%s: %q, want %q", query, got, want)
		}
	}
	for _, bad := range []string{"label=team", "label=%3Dx", "label=!%3Dx", "label=team!%3Dx,team!%3Dy"} {
		if got := h.code(t, "GET", "/v1/sandboxes?"+bad, ""); got != "invalid_label" {
			t.Errorf("%s: %s", bad, got)
		}
	}
}

func TestBulk(t *testing.T) {
	m, h := memory(
		t,
		sandbox.Spec{Name: "a", Labels: map[string]string{"team": "x"}}, sandbox.Spec{Name: "b", Labels: map[string]string{"team": "x"}}, sandbox.Spec{Name: "c"},
	)
	names := func(r api.BulkResult) string {
		var all []string
		for _, i := range r.Items {
			all = append(all, i.Name+":"+string(i.Status))
		}
		slices.Sort(all)
		return strings.Join(all, " ")
	}
	dry := askFor[api.BulkResult](t, h, "POST", "/v1/sandboxes:stop?label=team%3Dx&dry_run=true", "")
	if !dry.DryRun || names(dry) != "a:running b:running" {
		t.Errorf("dry run: %+v", dry)
	}
	if sb, err := m.Sandbox(t.Context(), "a"); err != nil || sb.Status != sandbox.StatusRunning {
		t.Errorf("after the dry run: %v %v", sb.Status, err)
	}
	if r := askFor[api.BulkResult](t, h, "POST", "/v1/sandboxes:stop?label=team%3Dx", ""); r.DryRun || r.Failed != 0 || names(r) != "a:stopped b:stopped" {
		t.Errorf("stop: %+v", r)
	}
	if r := askFor[api.BulkResult](t, h, "POST", "/v1/sandboxes:start?status=stopped&name=a", ""); names(r) != "a:running" {
		t.Errorf("start: %+v", r)
	}
	m.Fail = func(method string) error {
		if method == "Remove" {
			return sandbox.Errorf(sandbox.ErrUnavailable, "busy", "not now: try again")
		}
		return nil
	}
	if r := askFor[api.BulkResult](t, h, "POST", "/v1/sandboxes:remove?all=true", ""); r.Failed != 3 || len(r.Items) != 3 || r.Items[0].Error == nil || r.Items[0].Error.Code != "busy" {
		t.Errorf("failing: %+v", r)
	}
	m.Fail = nil
	for _, bad := range []string{"", "?dry_run=true", "?all=true&label=team%3Dx"} {
		if got := h.code(t, "POST", "/v1/sandboxes:remove"+bad, ""); got != "selector_required" {
			t.Errorf("%q: %s", bad, got)
		}
	}
	if r := askFor[api.BulkResult](t, h, "POST", "/v1/sandboxes:remove?all=true", ""); r.Failed != 0 || len(r.Items) != 3 {
		t.Errorf("remove: %+v", r)
	}
	if list := askFor[api.SandboxList](t, h, "GET", "/v1/sandboxes", ""); len(list.Items) != 0 {
		t.Errorf("%d are left", len(list.Items))
	}
}

func TestDryRuns(t *testing.T) {
	_, h := memory(t, sandbox.Spec{Name: "a"})
	askFor[sandbox.Snapshot](t, h, "POST", "/v1/sandboxes/a/snapshots", `{"name":"s"}`)
	askFor[sandbox.Volume](t, h, "POST", "/v1/volumes", `{"name":"v"}`)
	for _, step := range []struct{ method, path, body string }{
		{"DELETE", "/v1/sandboxes/a", ""},
		{"POST", "/v1/sandboxes/a/reset", ""},
		{"POST", "/v1/sandboxes/a/rollback", `{"snapshot":"s"}`},
		{"DELETE", "/v1/snapshots/s", ""},
		{"DELETE", "/v1/volumes/v", ""},
	} {
		if code, raw := h.ask(t, step.method, step.path+"?dry_run=true", step.body); code >= 300 {
			t.Errorf("%s %s: %d %s", step.method, step.path, code, raw)
		}
	}
	for _, path := range []string{"/v1/sandboxes/a", "/v1/snapshots/s", "/v1/volumes/v"} {
		if code, raw := h.ask(t, "GET", path, ""); code != 200 {
			t.Errorf("%s after dry runs: %d %s", path, code, raw)
		}
	}
	if sb := askFor[sandbox.Sandbox](t, h, "GET", "/v1/sandboxes/a", ""); sb.Status != sandbox.StatusRunning {
		t.Errorf("after dry runs: %s", sb.Status)
	}
	for path, want := range map[string]string{"/v1/sandboxes/absent": "sandbox_not_found", "/v1/snapshots/absent": "snapshot_not_found", "/v1/volumes/absent": "volume_not_found"} {
		if got := h.code(t, "DELETE", path+"?dry_run=true", ""); got != want {
			t.Errorf("%s: %s", path, got)
		}
	}
	// The control: without it they do go.
	for _, path := range []string{"/v1/snapshots/s", "/v1/volumes/v"} {
		if code, raw := h.ask(t, "DELETE", path, ""); code >= 300 {
			t.Errorf("%s: %d %s", path, code, raw)
		}
		if code, _ := h.ask(t, "GET", path, ""); code != 404 {
			t.Errorf("%s is still there: %d", path, code)
		}
	}
}

func TestPagesOfWholeLists(t *testing.T) {
	_, h := memory(t, sandbox.Spec{Name: "a"})
	var want []string
	for _, name := range []string{"s1", "s2", "s3", "s4", "s5"} {
		askFor[sandbox.Snapshot](t, h, "POST", "/v1/sandboxes/a/snapshots", `{"name":"`+name+`"}`)
		want = append([]string{name}, want...)
	}
	var got []string
	for cursor, pages := "", 0; ; pages++ {
		page := askFor[api.SnapshotList](t, h, "GET", "/v1/snapshots?limit=2&cursor="+cursor, "")
		for _, s := range page.Items {
			got = append(got, s.Name)
		}
		if pages == 1 { // what is new does not move what is old
			askFor[sandbox.Snapshot](t, h, "POST", "/v1/sandboxes/a/snapshots", `{"name":"late"}`)
		}
		if cursor = page.Next; cursor == "" {
			break
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if all := askFor[api.SnapshotList](t, h, "GET", "/v1/snapshots", ""); len(all.Items) != 6 || all.Next != "" {
		t.Errorf("without a limit: %d, next %q", len(all.Items), all.Next)
	}
	for _, path := range []string{"/v1/snapshots", "/v1/images", "/v1/volumes", "/v1/sandboxes/a/processes"} {
		if got := h.code(t, "GET", path+"?cursor=nonsense", ""); got != "invalid_cursor" {
			t.Errorf("%s: %s", path, got)
		}
	}
}

func TestExecOnce(t *testing.T) {
	_, h := memory(t, sandbox.Spec{Name: "a"})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			code, raw := h.ask(t, "POST", "/v1/sandboxes/a/exec", `{"argv":["echo","hello"]}`, api.HeaderIdempotencyKey, "k")
			if code != 200 || !bytes.Contains(raw, []byte("hello\n")) || !bytes.Contains(raw, []byte(`"type":"exit"`)) {
				t.Errorf("%d %q", code, raw)
			}
		})
	}
	wg.Wait()
	list := func() int { return len(askFor[api.ProcessList](t, h, "GET", "/v1/sandboxes/a/processes", "").Items) }
	if n := list(); n != 1 {
		t.Errorf("%d processes for one key", n)
	}
	if _, raw := h.ask(t, "POST", "/v1/sandboxes/a/exec", `{"argv":["echo","hello"]}`, api.HeaderIdempotencyKey, "other"); !bytes.Contains(raw, []byte(`"id":"p2"`)) {
		t.Errorf("another key: %s", raw)
	}
	if got := h.code(t, "POST", "/v1/sandboxes/a/exec", `{"argv":["echo","else"]}`, api.HeaderIdempotencyKey, "k"); got != "idempotency_mismatch" {
		t.Errorf("another command: %s", got)
	}
	one := askFor[sandbox.Process](t, h, "POST", "/v1/sandboxes/a/processes", `{"argv":["sleep"]}`, api.HeaderIdempotencyKey, "bg")
	two := askFor[sandbox.Process](t, h, "POST", "/v1/sandboxes/a/processes", `{"argv":["sleep"]}`, api.HeaderIdempotencyKey, "bg")
	if one.ID != two.ID || list() != 3 {
		t.Errorf("%s and %s, %d in all", one.ID, two.ID, list())
	}
}

func TestDeveloperVerbs(t *testing.T) {
	_, h := memory(t)
	for _, path := range []string{"GET /sandbox/status", "GET /sandbox/logs", "POST /sandbox/reset"} {
		method, path, _ := strings.Cut(path, " ")
		if got := h.code(t, method, path, ""); got != "not_provisioned" {
			t.Errorf("%s: %s", path, got)
		}
	}
	one := askFor[api.Provisioned](t, h, "POST", "/sandbox/provision", `{"spec":{"labels":{"a":"b"}}}`)
	two := askFor[api.Provisioned](t, h, "POST", "/sandbox/provision", "")
	if !one.Created || two.Created || one.Sandbox.ID != two.Sandbox.ID || one.Sandbox.Spec.Labels["a"] != "b" {
		t.Errorf("%+v, then %+v", one, two)
	}
	id := string(one.Sandbox.ID)
	h.ask(t, "POST", "/v1/sandboxes/"+id+"/stop", "")
	if p := askFor[api.Provisioned](t, h, "POST", "/sandbox/provision", ""); p.Created || p.Sandbox.Status != sandbox.StatusRunning {
		t.Errorf("after a stop: %+v", p)
	}
	h.ask(t, "POST", "/v1/sandboxes/"+id+"/exec", `{"argv":["echo","hello"]}`)
	askFor[sandbox.Process](t, h, "POST", "/v1/sandboxes/"+id+"/processes", `{"argv":["sleep"]}`)
	if st := askFor[api.DeveloperStatus](t, h, "GET", "/sandbox/status", ""); string(st.Sandbox.ID) != id || len(st.Processes) != 1 || st.Processes[0].Argv[0] != "sleep" {
		t.Errorf("status: %+v", st)
	}
	if _, raw := h.ask(t, "GET", "/sandbox/logs?process=p1", ""); string(raw) != "hello\n" {
		t.Errorf("logs: %q", raw)
	}
	askFor[sandbox.Snapshot](t, h, "POST", "/v1/sandboxes/"+id+"/snapshots", `{"name":"s"}`)
	for _, body := range []string{"", `{"only":["/etc"]}`, `{"snapshot":"s"}`, `{"sandbox":"` + id + `"}`} {
		if sb := askFor[sandbox.Sandbox](t, h, "POST", "/sandbox/reset", body); string(sb.ID) != id {
			t.Errorf("reset %s: %s", body, sb.ID)
		}
	}
	if got := h.code(t, "POST", "/sandbox/reset", `{"only":["/etc"],"snapshot":"s"}`); got != "invalid_reset" {
		t.Errorf("both: %s", got)
	}
	if code, raw := h.ask(t, "POST", "/sandbox/scenario/demo", ""); code != 501 || !bytes.Contains(raw, []byte(`"scenarios_not_available"`)) {
		t.Errorf("scenario: %d %s", code, raw)
	}
}

// TestDocs wants a page that holds every operation and needs nothing else.
func TestDocs(t *testing.T) {
	_, h := memory(t)
	code, page := h.ask(t, "GET", "/docs", "")
	if code != 200 {
		t.Fatalf("%d %s", code, page)
	}
	var doc document
	_, raw := h.ask(t, "GET", "/openapi.json", "")
	if err := json.Unmarshal(raw, &doc); err != nil {
		t.Fatal(err)
	}
	for path, ops := range doc.Paths {
		for _, op := range ops {
			if !bytes.Contains(page, []byte(`<details id="`+op.OperationID+`">`)) {
				t.Errorf("%s %s is not on the page", op.OperationID, path)
			}
		}
	}
	for name := range doc.Components.Schemas {
		if !bytes.Contains(page, []byte(`id="schema-`+name+`"`)) {
			t.Errorf("schema %s is not on the page", name)
		}
	}
	for _, m := range regexp.MustCompile(`href="#([^"]*)"`).FindAllSubmatch(page, -1) {
		if !bytes.Contains(page, []byte(`id="`+string(m[1])+`"`)) {
			t.Errorf("a link to #%s leads nowhere", m[1])
		}
	}
	if m := regexp.MustCompile(`(?i)<script|<link|<img|src=|url\(|@import|href="[^#/]`).Find(page); m != nil {
		t.Errorf("the page needs something else: %s", m)
	}
}
