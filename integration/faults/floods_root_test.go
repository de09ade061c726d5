//go:build root

package faults

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/image/imagetest"
	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// floodsAPI is where the daemon of these tests listens for keys.
const floodsAPI = "127.0.0.1:39731"

// mostWait is how many times longer a tenant may wait while another floods.
const mostWait = 3

// flood is what one tenant sends without end.
type flood struct {
	name    string
	clients int
	one     func(ctx context.Context, c *http.Client, i int) // does one thing
}

// floods is the town of the tests of floods: alice floods, and bob works.
type floods struct {
	*tenants
	bob, far *client.Client // by the socket and by TLS
	aside    *client.Client // of a daemon that nobody floods
	box      string         // alice's
	boxes    []string       // bob's
}

// TestFloods: while one tenant floods the daemon in any way, another waits
// at most three times as long as in quiet, and the records stay whole.
func TestFloods(t *testing.T) {
	dir := t.TempDir()
	if out, err := exec.Command(harness.Program(t, "sandboxd"), "tls", "init", "--dir", dir, "--host", "127.0.0.1").CombinedOutput(); err != nil {
		t.Fatalf("tls init: %v %s", err, out)
	}
	f := &floods{}
	f.tenants = newTenants(t, fmt.Sprintf("listen: %s\ntls_cert: %s/server.pem\ntls_key: %s/server-key.pem\n", floodsAPI, dir, dir))
	ca, err := os.ReadFile(filepath.Join(dir, "ca.pem"))
	need(t, err)
	f.bob, err = client.New(f.Host(), client.WithKey(f.keys["bob"]), client.WithPatience(0))
	need(t, err)
	f.far, err = client.New("https://"+floodsAPI, client.WithKey(f.keys["bob"]), client.WithAuthority(ca), client.WithPatience(0))
	need(t, err)
	f.aside = harness.InstallApart(t, "").Client
	f.box = f.make("alice", `{`+small+`}`)
	body, head := f.build("FROM own/bob/missing\n")
	if a := f.native("bob", "POST", "/v1/images/build", body, head...); a.status != http.StatusOK && a.status != http.StatusNotFound {
		t.Fatalf("a build that fails: %d %s", a.status, a.body)
	}
	for _, x := range f.kinds(t) {
		t.Run(x.name, func(t *testing.T) { f.run(t, x) })
	}
	f.records(t)
}

// build is the body of a request to build, and its header.
func (f *floods) build(dockerfile string) (body string, head []string) {
	b, err := json.Marshal(map[string]any{"dockerfile": dockerfile})
	need(f.t, err)
	return "--b\r\nContent-Disposition: form-data; name=\"request\"\r\n\r\n" + string(b) + "\r\n--b--\r\n",
		[]string{"Content-Type", "multipart/form-data; boundary=b"}
}

// request is one by somebody's key.
func (f *floods) request(ctx context.Context, who, method, path string, body io.Reader, head ...string) *http.Request {
	req, err := http.NewRequestWithContext(ctx, method, "http://x"+path, body)
	if err != nil {
		panic(err) // by ourselves
	}
	req.Header.Set("X-API-Key", f.keys[who])
	for i := 0; i+1 < len(head); i += 2 {
		req.Header.Set(head[i], head[i+1])
	}
	return req
}

// read asks and reads the answer; a flood does not mind errors.
func answered(c *http.Client, req *http.Request) {
	if res, err := c.Do(req); err == nil {
		_, _ = io.Copy(io.Discard, res.Body)
		_ = res.Body.Close()
	}
}

// slowly is the body of an upload: its beginning, then a byte now and then.
type slowly struct {
	ctx   context.Context
	head  io.Reader
	pause time.Duration
}

func (b *slowly) Read(p []byte) (int, error) {
	if n, err := b.head.Read(p); err == nil {
		return n, nil
	}
	select {
	case <-b.ctx.Done():
		return 0, b.ctx.Err()
	case <-time.After(b.pause):
		p[0] = 'x'
		return 1, nil
	}
}

// dawdling is a registry that has no image, and below slow/ never ends an answer.
func dawdling(t *testing.T) string {
	registry := imagetest.Start(t)
	registry.Meddle(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/slow") {
			return false
		}
		w.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
		for r.Context().Err() == nil {
			_, _ = w.Write([]byte(" "))
			_ = http.NewResponseController(w).Flush()
			select {
			case <-r.Context().Done():
			case <-time.After(100 * time.Millisecond):
			}
		}
		return true
	})
	return registry.Host()
}

func (f *floods) kinds(t *testing.T) []flood {
	var n atomic.Int64 // makes names of their own
	registry, box := dawdling(t), "/v1/sandboxes/"+f.box
	pull := func(name, prefer string) func(context.Context, *http.Client, int) {
		return func(ctx context.Context, c *http.Client, _ int) {
			body := fmt.Sprintf(`{"reference":"%s/%s:%d"}`, registry, name, n.Add(1))
			answered(c, f.request(ctx, "operator", "POST", "/v1/images/pull", strings.NewReader(body), "Content-Type", "application/json", "Prefer", prefer))
		}
	}
	touch := func(ctx context.Context, c *http.Client) {
		answered(c, f.request(ctx, "alice", "PATCH", box, strings.NewReader(`{"ttl_seconds":3600}`), "Content-Type", "application/json"))
	}
	return []flood{
		{"refused calls", 32, func(ctx context.Context, c *http.Client, _ int) {
			answered(c, f.request(ctx, "viewer", "DELETE", box, nil))
		}},
		{"failing calls", 32, func(ctx context.Context, c *http.Client, _ int) {
			answered(c, f.request(ctx, "alice", "DELETE", "/v1/sandboxes/missing", nil))
		}},
		{"audited calls", 32, func(ctx context.Context, c *http.Client, _ int) { touch(ctx, c) }},
		{"operations", 32, pull("none/such", "respond-async")},
		{"builds", 32, func(ctx context.Context, c *http.Client, _ int) {
			body, head := f.build(fmt.Sprintf("FROM host\nRUN echo %d > /n\nRUN sleep 1\n", n.Add(1)))
			answered(c, f.request(ctx, "alice", "POST", "/v1/images/build", strings.NewReader(body), head...))
		}},
		{"uploads", 128, func(ctx context.Context, c *http.Client, i int) {
			to := []struct{ method, path string }{{"POST", "/v1/images?name=own/alice/x"}, {"POST", "/v1/images/build"}, {"PUT", box + "/files?path=/tmp/x"}, {"PUT", box + "/files/archive?path=/tmp"}}[i%4]
			body, head := "", []string{"Content-Type", "application/octet-stream"}
			if i%4 == 1 {
				body, head = f.build("FROM host\n")
				body = strings.TrimSuffix(body, "--\r\n") + "\r\nContent-Disposition: form-data; name=\"context\"\r\n\r\n"
			}
			slow := &slowly{ctx, strings.NewReader(body), time.Duration(50+i%8*1000) * time.Millisecond}
			answered(c, f.request(ctx, "alice", to.method, to.path, slow, head...))
		}},
		{"pulls", 48, pull("slow/app", "")},
		{"half-open requests", 300, f.halfOpen},
		{"events", 200, func(ctx context.Context, c *http.Client, i int) {
			if i%40 == 0 {
				touch(ctx, c)
				return
			}
			res, err := c.Do(f.request(ctx, "alice", "GET", "/v1/events?after=0", nil, "Accept", "text/event-stream"))
			if err != nil {
				return
			}
			defer res.Body.Close()
			if i%2 == 0 {
				_, _ = io.Copy(io.Discard, res.Body)
			}
			<-ctx.Done() // the other half reads nothing
		}},
	}
}

// halfOpen begins a handshake or a request, from an address that is not bob's.
func (f *floods) halfOpen(ctx context.Context, _ *http.Client, i int) {
	d := tls.Dialer{NetDialer: &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 9)}}, Config: &tls.Config{InsecureSkipVerify: true}}
	dial, begin := d.NetDialer.DialContext, "\x16\x03\x01"
	if i%2 == 1 {
		dial, begin = d.DialContext, "GET /healthz HTTP/1.1\r\nX-"
	}
	c, err := dial(ctx, "tcp", floodsAPI)
	if err != nil {
		return
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	_, _ = io.WriteString(c, begin)
	_, _ = io.Copy(io.Discard, c)
}

func (f *floods) client() *http.Client {
	return &http.Client{Transport: f.transport()}
}

// run measures bob in turns: quiet and flooded. Where that is too long, the
// machine may be busy with something else, and the flood's own work with it: in
// a short run a daemon beside it, which nobody floods, then tells how much of it
// is the processors'.
func (f *floods) run(t *testing.T, x flood) {
	who := f.bob
	if x.name == "half-open requests" {
		who = f.far
	}
	var ratio float64
	for try := range 8 { // others may load the machine meanwhile
		quiet, flooded := map[string][]time.Duration{}, map[string][]time.Duration{}
		asideQuiet, asideFlooded := map[string][]time.Duration{}, map[string][]time.Duration{}
		beside := func(times map[string][]time.Duration) {
			if all := f.boxes; try > 0 {
				f.turns(t, f.aside, harness.Soak(3, 10), times)
				f.boxes = all
			}
		}
		f.turns(t, who, 2, map[string][]time.Duration{}) // warm
		var did int64
		for range harness.Soak(2, 10) {
			f.turns(t, who, harness.Soak(3, 10), quiet)
			beside(asideQuiet)
			stop := f.begin(t, x)
			f.turns(t, who, harness.Soak(3, 10), flooded)
			beside(asideFlooded)
			did += stop()
		}
		if least := int64(x.clients * harness.Soak(2, 10)); did < least {
			t.Fatalf("the control: alice began %d things, not %d", did, least)
		}
		var worst string
		ratio = 0
		for verb, times := range flooded {
			q, fl := middle(quiet[verb]), middle(times)
			r := float64(fl) / float64(q)
			worst += fmt.Sprintf(" %s %v->%v (%.1f)", verb, q.Round(time.Millisecond/10), fl.Round(time.Millisecond/10), r)
			if verb == "all" {
				ratio = r
			}
		}
		t.Logf("try %d: %d things:%s", try, did, worst)
		if ratio <= mostWait {
			return
		}
		if try > 0 && harness.Soak(1, 0) == 1 {
			busy := float64(middle(asideFlooded["all"])) / float64(middle(asideQuiet["all"]))
			t.Logf("try %d: a daemon that nobody floods: %.1f times", try, busy)
			if ratio = ratio / max(1, busy); ratio <= mostWait {
				return
			}
		}
	}
	t.Errorf("bob waits %.1f times as long while alice floods", ratio)
}

func middle(d []time.Duration) time.Duration {
	d = slices.Clone(d)
	slices.Sort(d)
	return d[len(d)/2]
}

// begin starts a flood and waits until it flows; stop ends it and returns how
// many things were done.
func (f *floods) begin(t *testing.T, x flood) (stop func() int64) {
	ctx, cancel := context.WithCancel(t.Context())
	var did atomic.Int64
	var wg sync.WaitGroup
	for i := range x.clients {
		wg.Go(func() {
			c := f.client()
			defer c.CloseIdleConnections()
			for ctx.Err() == nil {
				did.Add(1)
				x.one(ctx, c, i)
			}
		})
	}
	<-time.After(500 * time.Millisecond) // it flows
	return func() int64 {
		cancel()
		wg.Wait()
		<-time.After(200 * time.Millisecond)
		return did.Load()
	}
}

// turns has bob do what he does, and notes how long he waited for each.
func (f *floods) turns(t *testing.T, c *client.Client, n int, times map[string][]time.Duration) {
	t.Helper()
	ctx := t.Context()
	for range n {
		began := time.Now()
		last := began
		did := func(verb string, err error) {
			t.Helper()
			if err != nil {
				t.Fatalf("%s of bob: %v", verb, err)
			}
			now := time.Now()
			times[verb] = append(times[verb], now.Sub(last))
			last = now
		}
		sb, err := c.Create(ctx, sandbox.Spec{Limits: sandbox.Limits{MemoryBytes: 64 << 20}}, "")
		did("create", err)
		f.boxes = append(f.boxes, string(sb.ID))
		p, err := c.Exec(ctx, string(sb.ID), sandbox.ProcessSpec{Argv: []string{"true"}})
		if err == nil {
			_, err = harness.Collect(p)
			_ = p.Close()
		}
		did("exec", err)
		_, err = c.Files(string(sb.ID)).Write(ctx, "", "/tmp/x", 0o644, bytes.NewReader(make([]byte, 64<<10)))
		did("put", err)
		_, r, err := c.Files(string(sb.ID)).Read(ctx, "", "/tmp/x", 0, 0)
		if err == nil {
			_, err = io.Copy(io.Discard, r)
			_ = r.Close()
		}
		did("get", err)
		for _, err = range c.All(ctx, sandbox.Filter{}) {
			if err != nil {
				break
			}
		}
		did("list", err)
		s, err := c.Snapshot(ctx, string(sb.ID), sandbox.SnapshotRequest{})
		did("snapshot", err)
		_, err = c.RemoveSnapshot(ctx, string(s.ID))
		did("forget", err)
		_, err = c.Remove(ctx, string(sb.ID))
		did("rm", err)
		times["all"] = append(times["all"], time.Since(began))
	}
}

// records wants all that bob did in the audit, the events and the operations.
func (f *floods) records(t *testing.T) {
	rows := map[string]int{}
	for q := (access.AuditQuery{Owner: "bob", Limit: 1000}); ; {
		page, err := f.Audit(t.Context(), q)
		need(t, err)
		for _, e := range page.Items {
			rows[e.Operation]++
			q.Before = e.Seq
		}
		if len(page.Items) < q.Limit {
			break
		}
	}
	for _, operation := range []string{"create-sandbox", "exec", "write-file", "create-snapshot", "remove-snapshot", "remove-sandbox"} {
		if rows[operation] != len(f.boxes) {
			t.Errorf("the audit has %d rows %s of bob, who did it %d times: %v", rows[operation], operation, len(f.boxes), rows)
		}
	}
	for _, id := range f.boxes {
		events, _, err := f.Events(t.Context(), client.EventQuery{Sandbox: id, Limit: 1000})
		need(t, err)
		seen := map[string]bool{}
		for _, e := range events {
			seen[e.Type] = true
		}
		for _, kind := range []string{"sandbox.running", "snapshot.created", "sandbox.completed"} {
			if !seen[kind] {
				t.Errorf("sandbox %s of bob has no event %s: %v", id, kind, seen)
			}
		}
	}
	if all, err := f.bob.Operations(t.Context(), api.OperationFailed); err != nil || len(all) != 1 {
		t.Errorf("bob's operations: %v, %v; want the build that failed", all, err)
	}
}
