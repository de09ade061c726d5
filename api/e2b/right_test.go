package e2b

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/api/server/servertest"
	"github.com/sandboxd/sandboxd/sandbox"
)

// office is who may call, in memory.
type office struct {
	mu      sync.Mutex
	keys    map[string]access.Caller // by the secret, which is the id as well
	off     map[string]bool          // owners that are disabled
	cuts    map[*func()]string       // owners
	refused int
	many    bool   // refusals are too many
	letIn   func() // if not nil, called when a token was found good
}

func (o *office) standing(key string) (access.Caller, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	c, ok := o.keys[key]
	if !ok || o.off[c.Owner] {
		return c, sandbox.Errorf(sandbox.ErrUnauthenticated, "key_revoked", "no key %s", key)
	}
	return c, nil
}

func (o *office) Authenticate(r *http.Request) (context.Context, string, error) {
	c, err := o.standing(r.Header.Get(keyHeader))
	return access.With(r.Context(), c), c.Owner, err
}

func (o *office) Acting(r *http.Request, box sandbox.Sandbox, key string) (context.Context, error) {
	if o.letIn != nil {
		o.letIn()
	}
	c, err := o.standing(key)
	if err == nil && (!c.MayChange() || !c.Sees(box.Owner)) {
		err = sandbox.Errorf(sandbox.ErrForbidden, "role_forbidden", "no")
	}
	return access.With(r.Context(), c), err
}

func (o *office) Guest(r *http.Request, box sandbox.Sandbox) (context.Context, error) {
	if o.letIn != nil {
		o.letIn()
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.off[box.Owner] {
		return nil, sandbox.Errorf(sandbox.ErrForbidden, "owner_disabled", "no")
	}
	return access.With(r.Context(), access.Caller{Owner: box.Owner, Role: access.RoleDeveloper}), nil
}

func (o *office) ActingKeys(owner string) (ids []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for id, c := range o.keys {
		if !o.off[c.Owner] && c.MayChange() && c.Sees(owner) {
			ids = append(ids, id)
		}
	}
	return ids
}

func (o *office) Hold(ctx context.Context, cut func()) func() {
	c, _ := access.Of(ctx)
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.cuts == nil {
		o.cuts = map[*func()]string{}
	}
	o.cuts[&cut] = c.Owner
	return func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		delete(o.cuts, &cut)
	}
}

func (o *office) Refused(*http.Request) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.refused++; o.many {
		return sandbox.Errorf(sandbox.ErrExhausted, "too_many_failures", "slower")
	}
	return nil
}

// disable does to an owner what the office does.
func (o *office) disable(owner string) {
	o.mu.Lock()
	o.off[owner] = true
	cuts := maps.Clone(o.cuts)
	o.mu.Unlock()
	for cut, of := range cuts {
		if of == owner {
			(*cut)()
		}
	}
}

// dialing is a manager whose sandboxes have a server on each port.
type dialing struct {
	*servertest.Memory
	to string
}

func (d *dialing) DialPort(ctx context.Context, _ string, _ int) (net.Conn, error) {
	if d.Fail != nil {
		if err := d.Fail("DialPort"); err != nil {
			return nil, err
		}
	}
	return new(net.Dialer).DialContext(ctx, "tcp", d.to)
}

// world is the whole dialect over a manager in memory.
type world struct {
	t     *testing.T
	url   string
	mem   *dialing
	keys  *office
	mu    sync.Mutex
	deeds []Deed
	box   sandbox.Sandbox // of alice, made by a call of the dialect
	token string
}

func newWorld(t *testing.T) *world { return newWorldOf(t, note{}) }

// newWorldOf has a sandbox with a note.
func newWorldOf(t *testing.T, n note) *world {
	w := &world{t: t, mem: &dialing{Memory: servertest.New()}, keys: &office{off: map[string]bool{}, keys: map[string]access.Caller{
		"alice":  {Owner: "alice", Role: access.RoleDeveloper, Key: "alice"},
		"second": {Owner: "alice", Role: access.RoleDeveloper, Key: "second"},
		"viewer": {Owner: "alice", Role: access.RoleViewer, Key: "viewer"},
		"bob":    {Owner: "bob", Role: access.RoleDeveloper, Key: "bob"},
		"root":   {Owner: "root", Role: access.RoleOperator, Key: "root"},
	}}}
	rotated, err := OpenRotations(filepath.Join(t.TempDir(), "rotated"), nil)
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(New(Config{
		Manager: w.mem, Callers: w.keys, Secret: make([]byte, secretBytes), DefaultImage: "host", Rotated: rotated,
		Find: func(ctx context.Context, id sandbox.ID) (sandbox.Sandbox, error) {
			return w.mem.Sandbox(ctx, string(id))
		},
		Living: func() []sandbox.ID { return []sandbox.ID{w.box.ID} },
		Note: func(_ context.Context, d Deed) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.deeds = append(w.deeds, d)
		},
	}))
	t.Cleanup(srv.Close)
	w.url = srv.URL
	labels, err := labelsOf(nil, "base", n)
	if err == nil {
		w.box, err = w.mem.Create(t.Context(), sandbox.CreateRequest{Spec: sandbox.Spec{Labels: labels}, Actor: "alice"})
	}
	if err != nil {
		t.Fatal(err)
	}
	w.token = w.read("alice")
	return w
}

func (w *world) do(method, path string, body string, head ...string) (int, string) {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), method, w.url+path, strings.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
	}
	for i := 0; i+1 < len(head); i += 2 {
		req.Header.Set(head[i], head[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b)
}

// read is the token that GET /sandboxes/ID shows to a key.
func (w *world) read(key string) string {
	w.t.Helper()
	status, b := w.do(http.MethodGet, "/sandboxes/"+string(w.box.ID), "", keyHeader, key)
	var d struct{ EnvdAccessToken string }
	if status != http.StatusOK || json.Unmarshal([]byte(b), &d) != nil {
		w.t.Fatalf("%s looks at the sandbox: %d %s", key, status, b)
	}
	return d.EnvdAccessToken
}

// acts writes a file with a token.
func (w *world) acts(token string) (int, string) {
	w.t.Helper()
	return w.do(http.MethodPost, "/files?path=/x", "text", "Content-Type", "application/octet-stream",
		sandboxHeader, string(w.box.ID), portHeader, fmt.Sprint(dataPort), tokenHeader, token)
}

// TestWhoOnlyLooksGetsNoToken: a viewer sees the sandbox and not what opens it.
func TestWhoOnlyLooksGetsNoToken(t *testing.T) {
	w := newWorld(t)
	if got := w.read("viewer"); got != "" {
		t.Errorf("a viewer reads the token %q", got)
	}
	if status, b := w.do(http.MethodPost, "/sandboxes/"+string(w.box.ID)+"/token", "", keyHeader, "viewer"); status != http.StatusForbidden {
		t.Errorf("a viewer changes the token: %d %s", status, b)
	}
	for _, key := range []string{"alice", "root"} { // the control
		if status, b := w.acts(w.read(key)); status != http.StatusOK {
			t.Errorf("the token of %s: %d %s", key, status, b)
		}
	}
}

// TestTokensDieWithTheirRight: with the key they were given to, with its role,
// with its owner, and when they are changed.
func TestTokensDieWithTheirRight(t *testing.T) {
	for name, end := range map[string]func(w *world){
		"key revoked": func(w *world) { delete(w.keys.keys, "alice") },
		"key demoted": func(w *world) {
			w.keys.keys["alice"] = access.Caller{Owner: "alice", Role: access.RoleViewer, Key: "alice"}
		},
		"owner disabled": func(w *world) { w.keys.disable("alice") },
		"token changed": func(w *world) {
			w.change()
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			signed := w.signed("/x", http.MethodGet, w.token)
			if status, b := w.acts(w.token); status != http.StatusOK { // the control
				t.Fatalf("a good token: %d %s", status, b)
			}
			if status, b := w.do(http.MethodGet, signed, ""); status != http.StatusOK {
				t.Fatalf("a signed URL: %d %s", status, b)
			}
			end(w)
			if status, b := w.acts(w.token); status != http.StatusUnauthorized {
				t.Errorf("the token: %d %s", status, b)
			}
			if status, b := w.do(http.MethodGet, signed, ""); status == http.StatusOK {
				t.Errorf("what was signed with it: %d %s", status, b)
			}
			if name == "token changed" {
				if status, b := w.acts(w.read("alice")); status != http.StatusOK {
					t.Errorf("the new token: %d %s", status, b)
				}
			}
		})
	}
}

// TestTokenChangedWhileItLetsIn: a request whose token is changed between the
// look at it and the hold that would be cut does nothing.
func TestTokenChangedWhileItLetsIn(t *testing.T) {
	reached := 0
	inside := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached++ }))
	t.Cleanup(inside.Close)
	for name, c := range map[string]struct {
		send func(w *world, traffic string) int
		want int
		done func(w *world) bool
	}{
		"token": {func(w *world, _ string) int { status, _ := w.acts(w.token); return status }, http.StatusUnauthorized, (*world).wrote},
		"signature": {func(w *world, _ string) int {
			status, _ := w.do(http.MethodPost, w.signed("/x", http.MethodPost, w.token), "text", "Content-Type", "application/octet-stream")
			return status
		}, http.StatusUnauthorized, (*world).wrote},
		"traffic": {func(w *world, traffic string) int {
			status, _ := w.do(http.MethodGet, "/", "", sandboxHeader, string(w.box.ID), portHeader, "8000", trafficHeader, traffic)
			return status
		}, http.StatusForbidden, func(*world) bool { return reached > 0 }},
	} {
		for _, changed := range []bool{false, true} { // the control first
			t.Run(fmt.Sprint(name, " changed ", changed), func(t *testing.T) {
				w := newWorldOf(t, note{Private: true})
				w.mem.to, reached = inside.Listener.Addr().String(), 0
				want := http.StatusOK
				traffic := w.change()
				w.token = w.read("alice")
				if changed {
					want = c.want
					w.keys.letIn = func() { w.change() }
				}
				if got := c.send(w, traffic); got != want || c.done(w) == changed {
					t.Errorf("answered %d, want %d; done: %v", got, want, c.done(w))
				}
			})
		}
	}
}

// wrote reports whether the file that acts writes is there.
func (w *world) wrote() bool {
	f, err := w.mem.Files(w.t.Context(), string(w.box.ID))
	if err == nil {
		_, err = f.Stat(w.t.Context(), "", "/x")
	}
	return err == nil
}

// change changes the tokens of the sandbox, and returns that of its ports.
func (w *world) change() string {
	w.t.Helper()
	status, b := w.do(http.MethodPost, "/sandboxes/"+string(w.box.ID)+"/token", "", keyHeader, "second")
	var d struct{ TrafficAccessToken string }
	if err := json.Unmarshal([]byte(b), &d); status != http.StatusCreated || err != nil {
		w.t.Errorf("change the token: %d %s", status, b)
	}
	return d.TrafficAccessToken
}

// TestStreamsEndWithTheirRight: a command's stream is cut, and the stream of
// another owner goes on.
func TestStreamsEndWithTheirRight(t *testing.T) {
	w := newWorld(t)
	start := func(token string, ctx context.Context) *http.Response {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.url+"/process.Process/Start", strings.NewReader(string(framed(`{"process":{"cmd":"cat"},"stdin":true}`))))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", typeStream)
		req.Header.Set(tokenHeader, token)
		resp, err := http.DefaultClient.Do(req)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("start: %v %v", resp, err)
		}
		return resp
	}
	cut, stays := start(w.token, t.Context()), start(w.read("root"), t.Context())
	defer cut.Body.Close()
	defer stays.Body.Close()
	w.keys.disable("alice")
	ended := make(chan error, 2)
	go func() { _, err := io.Copy(io.Discard, cut.Body); ended <- err }()
	select {
	case <-ended:
	case <-time.After(30 * time.Second):
		t.Fatal("a stream outlived its owner's right")
	}
	go func() { _, err := io.Copy(io.Discard, stays.Body); ended <- err }()
	select {
	case err := <-ended:
		t.Errorf("the operator's stream ended, too: %v", err)
	case <-time.After(500 * time.Millisecond):
	}
}

// signed is a URL for a file of the sandbox.
func (w *world) signed(path, method, token string, more ...string) string {
	op := "read"
	if method == http.MethodPost {
		op = "write"
	}
	user, until := "", ""
	if len(more) > 0 {
		user = more[0]
	}
	if len(more) > 1 {
		until = more[1]
	}
	q := url.Values{"path": {path}, "signature": {signatureOf(path, op, user, token, until)}}
	if user != "" {
		q.Set("username", user)
	}
	if until != "" {
		q.Set("signature_expiration", until)
	}
	return "/files?" + q.Encode()
}

func TestSignedURLs(t *testing.T) {
	w := newWorld(t)
	later, past := fmt.Sprint(time.Now().Add(time.Hour).Unix()), fmt.Sprint(time.Now().Add(-time.Hour).Unix())
	for _, path := range []string{"/x", "/a:b"} {
		if status, b := w.do(http.MethodPost, w.signed(path, http.MethodPost, w.token), "text", "Content-Type", "application/octet-stream"); status != http.StatusOK {
			t.Fatal(status, b)
		}
	}
	for _, head := range [][]string{nil, {sandboxHeader, string(w.box.ID), portHeader, fmt.Sprint(dataPort)}} {
		for target, want := range map[string]int{
			w.signed("/x", http.MethodGet, w.token):                                    http.StatusOK,
			w.signed("/a:b", http.MethodGet, w.token):                                  http.StatusOK,
			w.signed("/x", http.MethodGet, w.token, "root", later):                     http.StatusOK,
			w.signed("/x", http.MethodPost, w.token):                                   http.StatusUnauthorized, // it is read
			w.signed("/x", http.MethodGet, w.token, "", past):                          http.StatusUnauthorized,
			w.signed("/x", http.MethodGet, w.token, "", "never"):                       http.StatusUnauthorized,
			w.signed("/x", http.MethodGet, w.token) + "&signature_expiration=" + later: http.StatusUnauthorized,
			"/files?path=/x&signature=v1_x":                                            http.StatusUnauthorized,
		} {
			status, b := w.do(http.MethodGet, target, "", head...)
			if status != want || want == http.StatusOK && b != "text" {
				t.Errorf("%v %s: %d %s, want %d", head, target, status, b, want)
			}
		}
	}
}

// TestSignedTextHasOneMeaning: /x:read for the user root, written, is signed as
// /x, read, for the user write:root. Neither is taken.
func TestSignedTextHasOneMeaning(t *testing.T) {
	w := newWorld(t)
	head := []string{sandboxHeader, string(w.box.ID), portHeader, fmt.Sprint(dataPort), "Content-Type", "application/octet-stream"}
	given := w.signed("/x", http.MethodGet, w.token, "write:root")
	turned := w.signed("/x:read", http.MethodPost, w.token, "root")
	a, _ := url.Parse(given)
	b, _ := url.Parse(turned)
	if a.Query().Get("signature") != b.Query().Get("signature") {
		t.Fatal("the two are signed alike by the SDK: the probe is wrong")
	}
	if status, body := w.do(http.MethodPost, turned, "text", head...); status != http.StatusUnauthorized {
		t.Errorf("a URL to read with was made one to write with: %d %s", status, body)
	}
	if status, body := w.do(http.MethodGet, given, "", head...); status != http.StatusUnauthorized {
		t.Errorf("a user with a colon: %d %s", status, body)
	}
	if status, body := w.do(http.MethodPost, w.signed("/x", http.MethodPost, w.token, "root"), "text", head...); status != http.StatusOK { // the control
		t.Errorf("a plain one: %d %s", status, body)
	}
}

// TestRefusedRequestsLeaveNoRows: what brings nothing good is counted, paced,
// answered alike whether there is such a sandbox, and leaves nothing in the
// audit.
func TestRefusedRequestsLeaveNoRows(t *testing.T) {
	w := newWorld(t)
	data := func(id string) (int, string) {
		return w.do(http.MethodPost, "/files?path=/x&signature=v1_no", "x", sandboxHeader, id, portHeader, fmt.Sprint(dataPort))
	}
	there, b1 := data(string(w.box.ID))
	missing, b2 := data(string(sandbox.NewID()))
	if there != http.StatusUnauthorized || there != missing || b1 != b2 {
		t.Errorf("a sandbox that is there: %d %s; one that is not: %d %s", there, b1, missing, b2)
	}
	for range 50 {
		_, _ = w.acts("wrong")
	}
	if w.keys.refused < 52 || len(w.deeds) != 0 {
		t.Errorf("%d refusals were counted, %d rows written", w.keys.refused, len(w.deeds))
	}
	w.keys.many = true
	if status, _ := w.acts("wrong"); status != http.StatusTooManyRequests {
		t.Errorf("too many refusals: %d", status)
	}
	if status, b := w.acts(w.token); status != http.StatusOK { // the control
		t.Errorf("a good token beside them: %d %s", status, b)
	}
	if len(w.deeds) != 1 {
		t.Errorf("rows of what was done: %v", w.deeds)
	}
}

// TestPortsAreNotOpenByThemselves: only those of sandboxes that were made by
// calls of the dialect, while their owner may act.
func TestPortsAreNotOpenByThemselves(t *testing.T) {
	w := newWorld(t)
	inside := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "inside") }))
	t.Cleanup(inside.Close)
	w.mem.to = inside.Listener.Addr().String()
	native, err := w.mem.Create(t.Context(), sandbox.CreateRequest{Actor: "alice"})
	if err != nil {
		t.Fatal(err)
	}
	at := func(id sandbox.ID) (int, string) {
		return w.do(http.MethodGet, "/", "", sandboxHeader, string(id), portHeader, "8000")
	}
	if status, b := at(w.box.ID); status != http.StatusOK || b != "inside" { // the control
		t.Errorf("the dialect's own sandbox: %d %s", status, b)
	}
	status, b := at(native.ID)
	gone := sandbox.NewID()
	missing, b2 := at(gone)
	if status != http.StatusBadGateway || status != missing || strings.ReplaceAll(b, string(native.ID), "ID") != strings.ReplaceAll(b2, string(gone), "ID") {
		t.Errorf("a native sandbox: %d %s; a missing one: %d %s", status, b, missing, b2)
	}
	w.keys.disable("alice")
	if status, b := at(w.box.ID); status != http.StatusBadGateway {
		t.Errorf("of an owner who is disabled: %d %s", status, b)
	}
}
