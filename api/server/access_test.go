package server_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/api/server/servertest"
	"github.com/sandboxd/sandboxd/sandbox"
)

// least is who may call what, written down once more by hand: operation ids,
// and routes of what is no operation.
var least = map[access.Role]string{
	"": "healthz GET/docs GET/openapi.json GET/openapi.yaml",
	access.RoleViewer: `version whoami events list-operations get-operation developer-status developer-logs
		list-sandboxes get-sandbox get-usage get-history get-last-output diff report-usage list-processes get-process get-output
		read-file stat-file list-files watch-files get-archive get-network explain-network get-network-fault
		list-sandbox-ports list-ports list-snapshots get-snapshot export-snapshot list-schedules list-images get-image list-volumes get-volume
		list-secrets list-templates get-template list-webhooks get-webhook list-dead-letters list-prices list-costs report-costs list-budgets get-budget
		list-projects get-project summarize-projects list-experiment-templates list-experiments list-evaluations list-promotions
		GET/v1/nothing GET/nothing POST/healthz DELETE/docs`,
	access.RoleDeveloper: `provision reset-developer-sandbox cancel-operation change-sandbox run-scenario
		create-sandbox remove-sandbox pause-sandbox resume-sandbox stop-sandbox start-sandbox reset-sandbox
		pause-sandboxes resume-sandboxes stop-sandboxes start-sandboxes remove-sandboxes
		create-snapshot remove-snapshot import-snapshot fork-snapshot fork-sandbox rollback-sandbox undo-sandbox create-schedule remove-schedule
		run run-stream exec exec-stream start-process signal-process attach write-file remove-file make-dir move-file chmod-file put-archive
		set-network set-network-fault clear-network-fault publish-port unpublish-port set-port-token remove-port-token connect-port
		import-image build-image pull-image push-image export-image tag-image remove-image create-volume change-volume remove-volume
		set-secret remove-secret set-template remove-template create-webhook remove-webhook test-webhook retry-dead-letters add-cost add-revenue cancel-entry set-budget remove-budget
		create-project change-project remove-project kill-project enter-money deploy-agent set-agent remove-agent
		start-experiment complete-experiment evaluate-project POST/mcp GET/mcp`,
	access.RoleOperator: `doctor pool get-build-cache list-production-agents prune-images prune-build-cache release-host-name promote-project
		GET/metrics GET/worlds/production/v1/sandboxes POST/worlds/production/v1/costs`,
	access.RoleAdmin: `create-key list-keys revoke-key list-owners get-owner set-owner remove-owner list-audit verify-audit`,
}

// house is a server with an office, and a key of each kind.
type house struct {
	asking
	office *access.Office
	audit  *access.Journal
	vault  *servertest.Vault
	keys   map[string]string
	knocks int
}

func newHouse(t *testing.T) *house {
	t.Helper()
	now := time.Now()
	office, audit, vault := servertest.NewOffice(access.Config{Now: func() time.Time { return now }})
	m := servertest.New()
	if _, err := m.Create(t.Context(), sandbox.CreateRequest{Spec: sandbox.Spec{Name: "box"}}); err != nil {
		t.Fatal(err)
	}
	far := servertest.New()
	h := &house{office: office, audit: audit, vault: vault, keys: map[string]string{"bad": "e2b_" + strings.Repeat("ab", 32)}}
	h.asking = asking{server.New(server.Config{
		Manager: m, Version: "test", Lab: servertest.NewLab(), Office: office, Audit: audit,
		Production: func() server.Manager { return far },
		Metrics:    http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }),
	})}
	t.Cleanup(func() { _ = audit.Close() })
	make := func(name string, req access.KeyRequest) access.Key {
		t.Helper()
		k, err := office.CreateKey(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		h.keys[name] = k.Secret
		return k
	}
	make("expired", access.KeyRequest{Owner: "exp", Expires: now.Add(time.Second)})
	revoked := make("revoked", access.KeyRequest{Owner: "rev", Role: access.RoleAdmin})
	make("disabled", access.KeyRequest{Owner: "dis", Role: access.RoleAdmin})
	for _, r := range access.Roles() {
		make(string(r), access.KeyRequest{Owner: "the-" + string(r), Role: r})
	}
	now = now.Add(time.Second)
	if _, err := office.RevokeKey(t.Context(), revoked.ID); err != nil {
		t.Fatal(err)
	}
	yes := true
	if _, err := office.SetOwner(t.Context(), "dis", access.OwnerChange{Disabled: &yes}); err != nil {
		t.Fatal(err)
	}
	for _, o := range office.Owners() { // thousands of requests come
		if _, err := office.SetOwner(t.Context(), o.Name, access.OwnerChange{Quota: func(q *access.Quota) { q.PerMinute = 0 }}); err != nil {
			t.Fatal(err)
		}
	}
	return h
}

// knock sends a request with a key; n is the address it comes from, 0 one of
// its own.
func (h *house) knock(t *testing.T, n int, method, path, key string) (*httptest.ResponseRecorder, api.Problem) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond) // for streams
	defer cancel()
	r := httptest.NewRequestWithContext(ctx, method, path, http.NoBody)
	if h.knocks++; n == 0 {
		n = h.knocks + 1000
	}
	r.RemoteAddr = fmt.Sprintf("10.%d.%d.%d:1", n>>16&255, n>>8&255, n&255)
	if key != "" {
		r.Header.Set("Authorization", "Bearer "+key)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	var p api.Problem
	if w.Code >= 400 {
		_ = json.Unmarshal(w.Body.Bytes(), &p) // judged by its code
	}
	return w, p
}

var fill = strings.NewReplacer("{ref}", "box", "{pid}", "p1", "{name}", "absent", "{port}", "80", "{key}", "key_aaaaaaaaaaaaaaaa", "{owner}", "nobody",
	"{id}", "absent", "{operation}", "opaaaaaaaaaaaa", "{webhook}", "whaaaaaaaaaaaa", "{budget}", "absent", "{project}", "absent", "{agent}", "absent", "{verb}", "pause", "{experiment}", "absent")

// TestEveryRouteAsksWho sends every request there is with every kind of key.
func TestEveryRouteAsksWho(t *testing.T) {
	h := newHouse(t)
	w, _ := h.knock(t, 0, http.MethodGet, "/openapi.json", "")
	var doc document
	if err := json.Unmarshal(w.Body.Bytes(), &doc); err != nil {
		t.Fatal(err)
	}
	routes := map[string][2]string{}
	for path, item := range doc.Paths {
		for method, op := range item {
			routes[op.OperationID] = [2]string{strings.ToUpper(method), fill.Replace(path)}
		}
	}
	for role, names := range least {
		for name := range strings.FieldsSeq(names) {
			route, listed := routes[name]
			if method, path, is := strings.Cut(name, "/"); is {
				route, listed = [2]string{method, "/" + path}, true
			}
			if !listed {
				t.Errorf("the table has %s, which is no operation", name)
				continue
			}
			h.judge(t, name, route[0], route[1], role)
			delete(routes, name)
		}
	}
	for name, route := range routes {
		t.Errorf("operation %s (%s) is in no row: decide who may call it, in roles.go, here and in docs/ACCESS.md", name, route)
	}
}

// judge sends one request with every kind of key.
func (h *house) judge(t *testing.T, name, method, path string, role access.Role) {
	t.Helper()
	for kind, want := range map[string]string{
		"none": "401 key_missing", "bad": "401 key_unknown", "revoked": "401 key_revoked", "expired": "401 key_expired", "disabled": "403 owner_disabled",
		"admin": "", "operator": "", "developer": "", "viewer": "",
	} {
		w, p := h.knock(t, 0, method, path, h.keys[kind])
		got := fmt.Sprintf("%d %s", w.Code, p.Code)
		if role == "" {
			want = "" // whatever key comes along
		} else if r := access.Role(kind); r.Valid() && !r.AtLeast(role) {
			want = "403 role_too_low"
		}
		switch {
		case want != "" && got != want:
			t.Errorf("%s with key %s: %s, want %s", name, kind, got, want)
		case want == "" && (w.Code == http.StatusUnauthorized || p.Code == "role_too_low" || p.Code == "owner_disabled"):
			t.Errorf("%s with key %s: %s", name, kind, got)
		}
		if challenge := w.Header().Get("WWW-Authenticate"); (challenge != "") != (w.Code == http.StatusUnauthorized) ||
			challenge != "" && strings.Contains(challenge, "invalid_token") != (kind != "none") {
			t.Errorf("%s with key %s: %d, WWW-Authenticate %q", name, kind, w.Code, challenge)
		}
	}
}

// TestKeysOnTheirWay: both headers carry a key; nothing else does.
func TestKeysOnTheirWay(t *testing.T) {
	h := newHouse(t)
	key := h.keys["developer"]
	for name, tc := range map[string]struct {
		header []string
		path   string
		code   int
	}{
		"bearer":           {[]string{"Authorization", "Bearer " + key}, "/v1/whoami", 200},
		"bearer, any case": {[]string{"authorization", "bEARER  " + key}, "/v1/whoami", 200},
		"x-api-key":        {[]string{"X-API-Key", key}, "/v1/whoami", 200},
		"basic":            {[]string{"Authorization", "Basic " + key}, "/v1/whoami", 401},
		"bare":             {[]string{"Authorization", key}, "/v1/whoami", 401},
		"upper case":       {[]string{"X-API-Key", strings.ToUpper(key)}, "/v1/whoami", 401},
		"query":            {nil, "/v1/whoami?key=" + key, 401},
		"cookie":           {[]string{"Cookie", "key=" + key}, "/v1/whoami", 401},
		"path":             {[]string{"X-API-Key", key}, "//v1/whoami", 301},
		"path, no key":     {nil, "/v1/../healthz/../v1/whoami", 401},
		"docs, no key":     {nil, "/docs/../v1/whoami", 401},
	} {
		if code, raw := h.ask(t, http.MethodGet, tc.path, "", tc.header...); code != tc.code && (tc.code != 301 || code != 307) {
			t.Errorf("%s: %d %s", name, code, raw)
		}
	}
	who := askFor[api.Whoami](t, h.asking, http.MethodGet, "/v1/whoami", "", "X-API-Key", key)
	if who.Owner != "the-developer" || who.Role != access.RoleDeveloper || !strings.HasPrefix(who.Key, "key_") || who.Quota.LifetimeSeconds != 86400 || who.Quota.Sandboxes != 3 {
		t.Errorf("%+v", who)
	}
}

// TestPaceIsKept: too many requests get 429 with the time to wait.
func TestPaceIsKept(t *testing.T) {
	h := newHouse(t)
	if _, err := h.office.SetOwner(t.Context(), "the-viewer", access.OwnerChange{Quota: func(q *access.Quota) { q.PerMinute = 6 }}); err != nil {
		t.Fatal(err)
	}
	if w, _ := h.knock(t, 1, http.MethodGet, "/v1/version", h.keys["viewer"]); w.Code != http.StatusOK {
		t.Errorf("the first: %d", w.Code)
	}
	w, p := h.knock(t, 1, http.MethodGet, "/v1/version", h.keys["viewer"])
	if w.Code != http.StatusTooManyRequests || p.Code != "too_many_requests" || w.Header().Get("Retry-After") != "10" {
		t.Errorf("the second: %d %s, Retry-After %q", w.Code, p.Code, w.Header().Get("Retry-After"))
	}
	if w, _ := h.knock(t, 1, http.MethodGet, "/v1/version", h.keys["developer"]); w.Code != http.StatusOK { // the control
		t.Errorf("another owner: %d", w.Code)
	}
	for i := range 30 {
		w, p = h.knock(t, 2, http.MethodGet, "/v1/version", h.keys["bad"])
		if i > 25 && (w.Code != http.StatusTooManyRequests || p.Code != "too_many_failures" || w.Header().Get("Retry-After") != "3") {
			t.Errorf("wrong key %d: %d %s %q", i, w.Code, p.Code, w.Header().Get("Retry-After"))
		}
	}
}

// TestKeysByAPI walks the life of keys and owners over HTTP, and what the
// audit says of it.
func TestKeysByAPI(t *testing.T) {
	h := newHouse(t)
	admin := []string{"X-API-Key", h.keys["admin"]}
	made := askFor[access.Key](t, h.asking, http.MethodPost, "/v1/keys", `{"owner":"alice","name":"ci","expires_at":"2099-01-01T00:00:00Z"}`, admin...)
	if made.Secret == "" || made.Role != access.RoleDeveloper || made.ExpiresAt == nil {
		t.Errorf("%v", made)
	}
	alice := []string{"X-API-Key", made.Secret}
	if who := askFor[api.Whoami](t, h.asking, http.MethodGet, "/v1/whoami", "", alice...); who.Owner != "alice" || who.Key != made.ID {
		t.Errorf("%+v", who)
	}
	box := askFor[sandbox.Sandbox](t, h.asking, http.MethodPost, "/v1/sandboxes", `{"name":"alices"}`, alice...)
	if _, raw := h.ask(t, http.MethodGet, "/v1/keys?owner=alice", "", admin...); strings.Contains(string(raw), "secret") || !strings.Contains(string(raw), made.Begins) {
		t.Errorf("listed %s", raw)
	}
	owner := askFor[api.Owner](t, h.asking, http.MethodPut, "/v1/owners/alice", `{"quota":{"max_sandboxes":0,"max_lifetime_seconds":60}}`, admin...)
	if owner.Quota.Sandboxes != 0 || owner.Quota.LifetimeSeconds != 60 || owner.Quota.CPUs != 6 || owner.Keys != 1 {
		t.Errorf("%+v", owner)
	}
	for code, body := range map[string]string{
		"invalid_owner": `{"owner":"Alice"}`, "invalid_request": `{"owner":"alice","role":"king"}`, "role_above_owner": `{"owner":"alice","role":"admin"}`, "invalid_expiry": `{"owner":"alice","expires_at":"2001-01-01T00:00:00Z"}`,
	} {
		if got := h.code(t, http.MethodPost, "/v1/keys", body, admin...); got != code {
			t.Errorf("%s: %s", body, got)
		}
	}
	if got := askFor[access.Key](t, h.asking, http.MethodDelete, "/v1/keys/"+made.ID, "", admin...); got.RevokedAt == nil {
		t.Errorf("%v", got)
	}
	if got := h.code(t, http.MethodGet, "/v1/whoami", "", alice...); got != "key_revoked" {
		t.Error(got)
	}
	if code, raw := h.ask(t, http.MethodDelete, "/v1/owners/alice", "", admin...); code != http.StatusNoContent {
		t.Errorf("%d %s", code, raw)
	}
	h.ask(t, http.MethodPost, "/v1/sandboxes", `{"name":"x"}`, "X-API-Key", h.keys["viewer"])
	if err := h.audit.Close(); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range h.vault.Rows {
		if e.Operation == "create-key" && e.Status >= 400 {
			continue // the bad ones above, in any order
		}
		got = append(got, fmt.Sprint(e.Owner, " ", e.Operation, " ", e.Object, " ", e.Status, " ", e.Code))
	}
	want := []string{
		"the-admin create-key " + made.ID + " 201 ",
		"alice create-sandbox " + string(box.ID) + " 201 ",
		"the-admin set-owner alice 200 ",
		"the-admin revoke-key " + made.ID + " 200 ",
		"the-admin remove-owner alice 204 ",
		"the-viewer create-sandbox  403 role_too_low",
	}
	if !slices.Equal(got, want) {
		t.Errorf("audit:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if e := h.vault.Rows[1]; e.Key != made.ID || e.Role != access.RoleDeveloper || e.From == "" || !strings.HasPrefix(e.Request, "rq") {
		t.Errorf("%+v", e)
	}
}

// TestAuditOverHTTP pages through the audit, checks it, and finds the row that
// was changed.
func TestAuditOverHTTP(t *testing.T) {
	h := newHouse(t)
	admin := []string{"X-API-Key", h.keys["admin"]}
	for range 3 {
		h.ask(t, http.MethodPut, "/v1/owners/alice", `{"role":"viewer"}`, admin...)
	}
	page := askFor[api.AuditList](t, h.asking, http.MethodGet, "/v1/audit?limit=2&object=alice", "", admin...)
	if len(page.Items) != 2 || page.Items[0].Seq != 3 || page.Next != 2 {
		t.Errorf("%+v", page)
	}
	page = askFor[api.AuditList](t, h.asking, http.MethodGet, "/v1/audit?before=2", "", admin...)
	if len(page.Items) != 1 || page.Next != 0 {
		t.Errorf("%+v", page)
	}
	check := askFor[access.AuditCheck](t, h.asking, http.MethodGet, "/v1/audit/verify", "", admin...)
	if !check.OK || check.Last != 3 {
		t.Errorf("%+v", check)
	}
	anchored := fmt.Sprintf("/v1/audit/verify?seq=%d&hash=%s", check.Last, check.Head)
	if got := askFor[access.AuditCheck](t, h.asking, http.MethodGet, anchored, "", admin...); !got.OK {
		t.Errorf("%+v", got)
	}
	h.vault.Rows[1].Status = 403
	if got := askFor[access.AuditCheck](t, h.asking, http.MethodGet, anchored, "", admin...); got.OK || got.BrokenAt != 2 {
		t.Errorf("%+v", got)
	}
	for _, bad := range []string{"?seq=1", "?hash=00", "?seq=1&hash=xyz"} {
		if got := h.code(t, http.MethodGet, "/v1/audit/verify"+bad, "", admin...); got != "invalid_hash" {
			t.Errorf("%s: %s", bad, got)
		}
	}
}

// TestNothingChangesWithoutAudit: while the audit cannot be written, what is
// to be in it is refused, and what only looks is not.
func TestNothingChangesWithoutAudit(t *testing.T) {
	h := newHouse(t)
	if err := h.audit.Close(); err != nil {
		t.Fatal(err)
	}
	key := []string{"X-API-Key", h.keys["developer"]}
	if got := h.code(t, http.MethodPost, "/v1/sandboxes", `{"name":"x"}`, key...); got != "audit_unavailable" {
		t.Error(got)
	}
	if page := askFor[api.SandboxList](t, h.asking, http.MethodGet, "/v1/sandboxes", "", key...); len(page.Items) != 1 {
		t.Errorf("%d sandboxes", len(page.Items))
	}
}

// TestRevocationCutsStreams: a request in flight ends with the key it came
// with, others go on.
func TestRevocationCutsStreams(t *testing.T) {
	h := newHouse(t)
	srv := httptest.NewServer(h.Handler)
	defer srv.Close()
	open := func(key string) *http.Response {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, srv.URL+"/v1/events", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("X-API-Key", key)
		r.Header.Set("Accept", "text/event-stream")
		resp, err := srv.Client().Do(r)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%v %v", resp, err)
		}
		return resp
	}
	ended := func(resp *http.Response) chan struct{} {
		done := make(chan struct{})
		go func() {
			defer close(done)
			for buf := make([]byte, 4096); ; {
				if _, err := resp.Body.Read(buf); err != nil {
					return
				}
			}
		}()
		return done
	}
	stays, goes := open(h.keys["operator"]), open(h.keys["developer"])
	defer stays.Body.Close()
	defer goes.Body.Close()
	on, off := ended(stays), ended(goes)
	if _, err := h.office.RevokeKey(t.Context(), h.office.Keys("the-developer")[0].ID); err != nil {
		t.Fatal(err)
	}
	select {
	case <-off:
	case <-time.After(5 * time.Second):
		t.Error("a stream goes on with a revoked key")
	}
	select {
	case <-on:
		t.Error("another key's stream ended too")
	case <-time.After(50 * time.Millisecond):
	}
}
