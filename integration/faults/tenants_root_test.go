//go:build root

package faults

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// tenantsE2B is where the daemon of these tests serves the E2B dialect; the
// network namespace is the tests' own.
const tenantsE2B = "127.0.0.1:39721"

// tenants is a daemon with two owners, a viewer of the first, an operator and
// an admin; and the E2B dialect.
type tenants struct {
	*harness.Daemon
	t    *testing.T
	keys map[string]string // by who
	ids  map[string]string // of keys
}

// roomy is a developer with room for all that these tests make.
const roomy = `{"role":"developer","quota":{"max_sandboxes":20,"max_cpus":50,"max_memory_bytes":68719476736,"max_disk_bytes":214748364800,"requests_per_minute":100000}}`

func newTenants(t *testing.T, more string) *tenants {
	w := &tenants{Daemon: harness.Install(t, "e2b: {listen: \""+tenantsE2B+"\"}\n"+more), t: t, keys: map[string]string{}, ids: map[string]string{}}
	for _, owner := range []string{"alice", "bob"} {
		w.root("PUT", "/v1/owners/"+owner, roomy)
	}
	for who, of := range map[string][2]string{
		"alice": {"alice", "developer"}, "viewer": {"alice", "viewer"}, "bob": {"bob", "developer"}, "operator": {"ops", "operator"}, "admin": {"boss", "admin"},
	} {
		w.key(who, of[0], of[1])
	}
	return w
}

// key makes a key for somebody.
func (w *tenants) key(who, owner, role string) {
	w.t.Helper()
	var k struct{ ID, Secret string }
	a := w.root("POST", "/v1/keys", fmt.Sprintf(`{"owner":%q,"role":%q}`, owner, role))
	if err := json.Unmarshal([]byte(a.body), &k); err != nil || k.Secret == "" {
		w.t.Fatalf("make a key for %s: %v", who, a)
	}
	w.keys[who], w.ids[who] = k.Secret, k.ID
}

type reply struct {
	status int
	body   string
}

func (w *tenants) transport() *http.Transport {
	return &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(w.Dir, "run", "sandboxd.sock"))
	}}
}

func (w *tenants) send(c *http.Client, method, url, body string, head ...string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(w.t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(head); i += 2 {
		req.Header.Set(head[i], head[i+1])
	}
	return c.Do(req)
}

func (w *tenants) read(res *http.Response, err error) reply {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return reply{res.StatusCode, string(b)}
}

// native asks the native API over the socket, with somebody's key.
func (w *tenants) native(who, method, path, body string, head ...string) reply {
	w.t.Helper()
	if who != "root" {
		head = append(head, "X-API-Key", w.keys[who])
	}
	tr := w.transport()
	defer tr.CloseIdleConnections()
	return w.read(w.send(&http.Client{Transport: tr, Timeout: time.Minute}, method, "http://x"+path, body, append(head, "X-Request-Id", "same")...))
}

// root asks as root and wants it to succeed.
func (w *tenants) root(method, path, body string) reply {
	w.t.Helper()
	a := w.native("root", method, path, body)
	if a.status/100 != 2 {
		w.t.Fatalf("%s %s as root: %d %s", method, path, a.status, a.body)
	}
	return a
}

// e2b asks the dialect.
func (w *tenants) e2b(method, path, body string, head ...string) reply {
	w.t.Helper()
	return w.read(w.send(&http.Client{Timeout: time.Minute, Transport: &http.Transport{DisableKeepAlives: true}}, method, "http://"+tenantsE2B+path, body, head...))
}

func field(t *testing.T, a reply, name string) string {
	t.Helper()
	var m map[string]any
	if err := json.Unmarshal([]byte(a.body), &m); err != nil {
		t.Fatalf("%v in %d %s", err, a.status, a.body)
	}
	s, _ := m[name].(string)
	return s
}

// make creates a sandbox by a native call.
func (w *tenants) make(who, spec string) string {
	w.t.Helper()
	a := w.native(who, "POST", "/v1/sandboxes", spec)
	if a.status != http.StatusCreated {
		w.t.Fatalf("a sandbox of %s: %d %s", who, a.status, a.body)
	}
	return field(w.t, a, "id")
}

const small = `"limits":{"memory_bytes":67108864}`

// run runs true with a sandbox's E2B token and returns the status.
func (w *tenants) run(id, token string) int {
	w.t.Helper()
	frame := append([]byte{0, 0, 0, 0, 0}, `{"process":{"cmd":"true"}}`...)
	frame[4] = byte(len(frame) - 5)
	return w.e2b("POST", "/process.Process/Start", string(frame), "Content-Type", "application/connect+json",
		"E2b-Sandbox-Id", id, "E2b-Sandbox-Port", "49983", "X-Access-Token", token).status
}

// TestTenants has each way one tenant had at another's sandboxes, secrets and
// names. Every probe has its control: who may do it, can.
func TestTenants(t *testing.T) {
	hosts := filepath.Join(t.TempDir(), "hosts.sock")
	w := newTenants(t, "network: {domain: box.test, ingress_listen: "+hosts+"}\n")
	t.Run("hosts", func(t *testing.T) { w.hosts(t, hosts) })
	t.Run("tokens", w.tokens)
	t.Run("ports", w.ports)
	t.Run("names", w.names)
	t.Run("labels", w.labels)
	t.Run("streams", w.streams)
	t.Run("background", w.background)
	t.Run("half sent", w.halfSent)
	t.Run("oracles", w.oracles)
	t.Run("origins", w.origins)
	t.Run("carried", w.carried)
}

// origins: a page from elsewhere may call nothing, with root's socket neither.
func (w *tenants) origins(t *testing.T) {
	w.t = t
	for _, path := range []string{"/v1/sandboxes", "/mcp", "/v1/run"} {
		if a := w.native("root", "GET", path, "", "Origin", "https://evil.example"); a.status != http.StatusForbidden || field(t, a, "code") != "origin_forbidden" {
			t.Errorf("%s for a foreign page: %d %s", path, a.status, a.body)
		}
	}
	if a := w.native("root", "GET", "/v1/sandboxes", "", "Origin", "http://x"); a.status != http.StatusOK { // the control
		t.Errorf("for a page of its own: %d %s", a.status, a.body)
	}
}

// carried: an archive that claims to hold nothing counts for what it holds.
func (w *tenants) carried(t *testing.T) {
	w.t = t
	box := w.make("bob", `{`+small+`}`)
	w.Sh(t, box, "head -c 3000000 /dev/urandom > /root/big; sync")
	snap := field(t, w.native("bob", "POST", "/v1/sandboxes/"+box+"/snapshots", `{}`), "id")
	archive := w.native("bob", "GET", "/v1/snapshots/"+snap+"/archive", "")
	if archive.status != http.StatusOK {
		t.Fatalf("export: %d %.300s", archive.status, archive.body)
	}
	var lying bytes.Buffer
	in, out := tar.NewReader(strings.NewReader(archive.body)), tar.NewWriter(&lying)
	for {
		h, err := in.Next()
		if err != nil {
			break
		}
		b, err := io.ReadAll(in)
		if err != nil {
			t.Fatal(err)
		}
		var record map[string]any
		if json.Unmarshal(b, &record) == nil && record["snapshot"] != nil {
			record["snapshot"].(map[string]any)["size_bytes"] = 0
			if b, err = json.Marshal(record); err != nil {
				t.Fatal(err)
			}
			h.Size = int64(len(b))
		}
		if err := out.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := out.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
	var s sandbox.Snapshot
	a := w.native("bob", "POST", "/v1/snapshots", lying.String(), "Content-Type", "application/x-tar")
	if err := json.Unmarshal([]byte(a.body), &s); err != nil || a.status/100 != 2 {
		t.Fatalf("import: %d %.300s", a.status, a.body)
	}
	if s.SizeBytes < 3_000_000 {
		t.Errorf("a snapshot of 3 MB that claims 0 counts for %d bytes", s.SizeBytes)
	}
}

func (w *tenants) tokens(t *testing.T) {
	w.t = t
	made := w.e2b("POST", "/sandboxes", `{"templateID":"base"}`, "X-API-Key", w.keys["alice"])
	id, token := field(t, made, "sandboxID"), field(t, made, "envdAccessToken")
	if got := w.run(id, token); got != http.StatusOK {
		t.Fatalf("the control: %d", got)
	}
	if seen := field(t, w.e2b("GET", "/sandboxes/"+id, "", "X-API-Key", w.keys["viewer"]), "envdAccessToken"); seen != "" {
		t.Errorf("a viewer reads a token, and a command with it: %d", w.run(id, seen))
	}
	w.key("leaver", "alice", "developer")
	left := field(t, w.e2b("GET", "/sandboxes/"+id, "", "X-API-Key", w.keys["leaver"]), "envdAccessToken")
	w.root("DELETE", "/v1/keys/"+w.ids["leaver"], "")
	if got := w.run(id, left); got != http.StatusUnauthorized {
		t.Errorf("a token whose key was revoked: %d", got)
	}
	changed := w.e2b("POST", "/sandboxes/"+id+"/token", "", "X-API-Key", w.keys["alice"])
	if got := w.run(id, token); changed.status != http.StatusCreated || got != http.StatusUnauthorized {
		t.Errorf("the token was changed (%d), the old one: %d", changed.status, got)
	}
	if changed.status == http.StatusCreated {
		token = field(t, changed, "envdAccessToken")
	}
	for _, c := range []struct{ what, end, back string }{
		{"disabled", `{"disabled":true}`, `{"disabled":false}`},
		{"demoted", `{"role":"viewer"}`, `{"role":"developer"}`},
	} {
		w.root("PUT", "/v1/owners/alice", c.end)
		if got := w.run(id, token); got != http.StatusUnauthorized {
			t.Errorf("a token of an owner who is %s: %d", c.what, got)
		}
		w.root("PUT", "/v1/owners/alice", c.back)
		if got := w.run(id, token); got != http.StatusOK {
			t.Errorf("the control, once that is over: %d", got)
		}
	}
	before := w.auditRows()
	for range 200 {
		w.e2b("POST", "/files?path=/x&signature=v1_no", "x", "E2b-Sandbox-Id", id, "E2b-Sandbox-Port", "49983")
	}
	<-time.After(1500 * time.Millisecond) // rows are written together
	if more := w.auditRows() - before; more > 5 {
		t.Errorf("200 refused requests without any credential wrote %d rows", more)
	}
}

func (w *tenants) auditRows() int64 {
	w.t.Helper()
	var rows []struct{ Seq int64 }
	var list struct{ Items []struct{ Seq int64 } }
	b := []byte(w.root("GET", "/v1/audit?limit=1", "").body)
	if json.Unmarshal(b, &list) == nil && len(list.Items) > 0 {
		return list.Items[0].Seq
	}
	if err := json.Unmarshal(b, &rows); err != nil || len(rows) == 0 {
		w.t.Fatalf("the audit: %s", b)
	}
	return rows[0].Seq
}

// ports: a native sandbox's do not answer through the dialect.
func (w *tenants) ports(t *testing.T) {
	w.t = t
	native := w.make("alice", `{`+small+`}`)
	made := w.e2b("POST", "/sandboxes", `{"templateID":"base","autoPause":true,"autoResume":{"enabled":true}}`, "X-API-Key", w.keys["alice"])
	open := field(t, made, "sandboxID")
	at := func(id string) reply { return w.e2b("GET", "/", "", "E2b-Sandbox-Id", id, "E2b-Sandbox-Port", "8123") }
	missing := at(string(sandbox.NewID()))
	if got := at(native); got.status != missing.status || strings.Contains(got.body, "port is not open") {
		t.Errorf("a port of a native sandbox: %d %s; of none: %d %s", got.status, got.body, missing.status, missing.body)
	}
	if got := at(open); !strings.Contains(got.body, "port is not open") { // nobody listens: but the way is open
		t.Errorf("the control: %d %s", got.status, got.body)
	}
	if a := w.e2b("POST", "/sandboxes/"+open+"/pause", "", "X-API-Key", w.keys["alice"]); a.status != http.StatusNoContent {
		t.Fatalf("pause: %d %s", a.status, a.body)
	}
	w.root("PUT", "/v1/owners/alice", `{"disabled":true}`)
	at(open)
	if status := field(t, w.root("GET", "/v1/sandboxes/"+open, ""), "status"); status != "paused" {
		t.Errorf("traffic woke the sandbox of an owner who is disabled: %s", status)
	}
	w.root("PUT", "/v1/owners/alice", `{"disabled":false}`)
	at(open)
	if status := field(t, w.root("GET", "/v1/sandboxes/"+open, ""), "status"); status != "running" {
		t.Errorf("the control: traffic does not wake it: %s", status)
	}
}

// names: what somebody calls base, web or s is not what others mean by it.
func (w *tenants) names(t *testing.T) {
	w.t = t
	box := w.make("bob", `{"name":"web",`+small+`}`)
	snap := w.native("bob", "POST", "/v1/sandboxes/"+box+"/snapshots", `{"name":"base"}`)
	if snap.status/100 != 2 {
		t.Fatalf("snapshot: %d %s", snap.status, snap.body)
	}
	for _, who := range []string{"admin", "operator", "alice"} {
		made := w.e2b("POST", "/sandboxes", `{"templateID":"base"}`, "X-API-Key", w.keys[who])
		id := field(t, made, "sandboxID")
		if a := w.native("root", "GET", "/v1/sandboxes/"+id, ""); strings.Contains(a.body, field(t, snap, "id")) {
			t.Errorf("base of %s is a snapshot of bob's: %s", who, a.body)
		}
		for _, path := range []string{"/v1/sandboxes/web", "/v1/snapshots/base"} {
			if a := w.native(who, "GET", path, ""); a.status != http.StatusNotFound {
				t.Errorf("%s of %s: %d %s", path, who, a.status, a.body)
			}
		}
	}
	if a := w.native("operator", "GET", "/v1/sandboxes/web@bob", ""); field(t, a, "id") != box { // the controls
		t.Errorf("web@bob of an operator: %d %s", a.status, a.body)
	}
	if a := w.native("bob", "GET", "/v1/sandboxes/web", ""); field(t, a, "id") != box {
		t.Errorf("web of bob: %d %s", a.status, a.body)
	}
}

// hosts: a host name stays with the owner who had it first, and tells nobody
// who has no token whether it leads anywhere.
func (w *tenants) hosts(t *testing.T, socket string) {
	w.t = t
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}
	defer tr.CloseIdleConnections()
	at := func(ref, token string) reply {
		a := w.read(w.send(&http.Client{Transport: tr, Timeout: time.Minute}, "GET", "http://8123-"+ref+".box.test/", "", "X-Sandbox-Token", token))
		a.body = strings.ReplaceAll(a.body, ref, "REF")
		return a
	}
	opens := func(who, id string) string {
		return field(t, w.native(who, "PUT", "/v1/sandboxes/"+id+"/port-token", ""), "token")
	}
	first := w.make("alice", `{"name":"shop",`+small+`}`)
	token := opens("alice", first)
	if a := at("shop", token); a.status != http.StatusBadGateway { // the control: the way is open, nobody listens
		t.Fatalf("alice's host name: %d %s", a.status, a.body)
	}
	if known, unknown := at("shop", ""), at("absent", ""); known != unknown || known.status != http.StatusUnauthorized {
		t.Errorf("without a token a host name tells what there is: %d %s and %d %s", known.status, known.body, unknown.status, unknown.body)
	}
	if a := w.native("alice", "DELETE", "/v1/sandboxes/"+first, ""); a.status/100 != 2 {
		t.Fatalf("remove: %d %s", a.status, a.body)
	}
	other := w.make("bob", `{"name":"shop",`+small+`}`)
	theirs := opens("bob", other)
	if a := at("shop", theirs); a.status == http.StatusBadGateway {
		t.Errorf("the host name passed to bob: %d %s", a.status, a.body)
	}
	if a := at(other, theirs); a.status != http.StatusBadGateway { // the controls
		t.Errorf("bob's, by its id: %d %s", a.status, a.body)
	}
	again := w.make("alice", `{"name":"shop",`+small+`}`)
	if a := at("shop", opens("alice", again)); a.status != http.StatusBadGateway {
		t.Errorf("alice's next of the name: %d %s", a.status, a.body)
	}
	release := func(who string) reply { return w.native(who, "DELETE", "/v1/host-names/shop", "") }
	if a := release("bob"); a.status != http.StatusForbidden {
		t.Errorf("bob releases alice's host name: %d %s", a.status, a.body)
	}
	if a := release("root"); a.status != http.StatusConflict || !strings.Contains(a.body, "host_name_in_use") {
		t.Errorf("release while alice's lives: %d %s", a.status, a.body)
	}
	w.native("alice", "DELETE", "/v1/sandboxes/"+again, "")
	if a := release("root"); a.status != http.StatusOK {
		t.Errorf("release: %d %s", a.status, a.body)
	}
	if a := at("shop", theirs); a.status != http.StatusBadGateway {
		t.Errorf("the host name once it is released to bob: %d %s", a.status, a.body)
	}
}

// labels: the daemon's own are refused, and look-ups by them stay with the owner.
func (w *tenants) labels(t *testing.T) {
	w.t = t
	a := w.native("bob", "POST", "/v1/sandboxes", `{"labels":{"sandboxd.developer":"uid:0"},`+small+`}`)
	if a.status != http.StatusBadRequest || field(t, a, "code") != "label_reserved" {
		t.Errorf("a label of the daemon's own: %d %s", a.status, a.body)
	}
	var p struct{ Sandbox sandbox.Sandbox }
	if err := json.Unmarshal([]byte(w.root("POST", "/sandbox/provision", `{"spec":{`+small+`}}`).body), &p); err != nil || p.Sandbox.Owner != "uid:0" {
		t.Errorf("root's developer sandbox belongs to %q: %v", p.Sandbox.Owner, err)
	}
	if a := w.native("bob", "POST", "/v1/sandboxes", `{"labels":{"own":"uid:0"},`+small+`}`); a.status != http.StatusCreated {
		t.Errorf("the control: %d %s", a.status, a.body)
	}
}
