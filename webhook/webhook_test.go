package webhook

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

var loopback = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}

// receiver takes messages and checks each signature.
type receiver struct {
	*httptest.Server
	secret string
	answer func(m sandbox.WebhookMessage) int // nil: 200

	mu  sync.Mutex
	got []sandbox.WebhookMessage // those it took, in order
	all int
}

func newReceiver(t *testing.T, secret string) *receiver {
	r := &receiver{secret: secret}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		var m sandbox.WebhookMessage
		if err := json.Unmarshal(body, &m); err != nil {
			t.Errorf("body %s: %v", body, err)
		}
		if err := sandbox.VerifyWebhook(r.secret, req.Header.Get(sandbox.WebhookSignatureHeader), body, time.Now(), time.Minute); err != nil {
			t.Errorf("signature of %s: %v", body, err)
		}
		if req.Header.Get(sandbox.WebhookIDHeader) != m.ID || req.Header.Get(sandbox.WebhookTypeHeader) != m.Type || req.Header.Get(sandbox.WebhookHeader) != m.Webhook {
			t.Errorf("headers %v of %+v", req.Header, m)
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.all++
		status := http.StatusOK
		if r.answer != nil {
			status = r.answer(m)
		}
		if status == http.StatusOK {
			r.got = append(r.got, m)
		}
		if status == http.StatusFound {
			w.Header().Set("Location", "/elsewhere")
		}
		w.WriteHeader(status)
	}))
	t.Cleanup(r.Close)
	return r
}

func (r *receiver) says(f func(m sandbox.WebhookMessage) int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answer = f
}

func (r *receiver) messages() []sandbox.WebhookMessage {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]sandbox.WebhookMessage(nil), r.got...)
}

// world is a database, and a desk on it.
type world struct {
	t  *testing.T
	db *state.DB
	*Desk
	cfg Config
}

func newWorld(t *testing.T, cfg Config) *world {
	db, err := state.Open(t.Context(), filepath.Join(t.TempDir(), "state.db"))
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Pause == 0 {
		cfg.Pause = 2 * time.Millisecond
	}
	cfg.Store = db
	w := &world{t: t, db: db, cfg: cfg}
	w.start()
	t.Cleanup(func() { _ = w.Close(context.Background()); _ = db.Close() })
	return w
}

func (w *world) start() {
	w.t.Helper()
	w.Desk = New(w.cfg)
	if err := w.Start(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
}

// crash ends a desk that writes nothing any more.
func (w *world) crash() {
	w.cancel()
	w.tasks.Wait()
}

func (w *world) hook(url string, f sandbox.WebhookFilter) sandbox.Webhook {
	w.t.Helper()
	h, err := w.CreateWebhook(w.t.Context(), sandbox.WebhookRequest{URL: url, Secret: "a secret", Filter: f, Actor: "uid:0"})
	if err != nil {
		w.t.Fatal(err)
	}
	return h
}

var noise = sandbox.WebhookFilter{Events: []string{"x.*"}}

func (w *world) happen(n int, sandboxes ...sandbox.ID) {
	w.t.Helper()
	for i := range n {
		e := sandbox.Event{Type: "x.happened", Data: map[string]string{"n": fmt.Sprint(i)}}
		if len(sandboxes) > 0 {
			e.Sandbox = sandboxes[i%len(sandboxes)]
		}
		if _, err := w.db.AppendEvent(w.t.Context(), e); err != nil {
			w.t.Fatal(err)
		}
	}
}

// inOrder fails unless the first arrivals of each sandbox are in order and
// none of the sequence is missing, and returns how many there were.
func inOrder(t *testing.T, got []sandbox.WebhookMessage, first, last int64) (n int) {
	t.Helper()
	seen, latest := map[int64]bool{}, map[sandbox.ID]int64{}
	for _, m := range got {
		if seen[m.Seq] {
			continue
		}
		if m.Seq < latest[m.Sandbox] {
			t.Errorf("%d of %q came after %d", m.Seq, m.Sandbox, latest[m.Sandbox])
		}
		seen[m.Seq], latest[m.Sandbox] = true, m.Seq
	}
	for seq := first; seq <= last; seq++ {
		if !seen[seq] {
			t.Errorf("event %d never came", seq)
		}
	}
	return len(seen)
}

func TestEveryEventInOrder(t *testing.T) {
	r := newReceiver(t, "a secret")
	w := newWorld(t, Config{AllowPrivate: loopback})
	h := w.hook(r.URL, noise)
	w.happen(1000, "sba", "sbb", "sbc", "")
	testenv.Eventually(t, 20*time.Second, "all come", func() bool { return len(r.messages()) >= 1000 })
	if n := inOrder(t, r.messages(), h.Cursor+2, h.Cursor+1001); n != 1000 { // after webhook.created
		t.Errorf("%d different ones of 1000", n)
	}
	testenv.Eventually(t, 20*time.Second, "all are counted", func() bool { return w.Stats().Delivered >= 1000 }) // once their answers are read
	if s := w.Stats(); s.Delivered != 1000 || s.Failed != 0 || s.Webhooks != 1 {
		t.Errorf("stats %+v", s)
	}
}

// TestReceiverDownAndCrashes: the receiver refuses, hangs up and is away, and
// the desk crashes meanwhile.
func TestReceiverDownAndCrashes(t *testing.T) {
	r := newReceiver(t, "a secret")
	n := 0
	r.says(func(sandbox.WebhookMessage) int {
		n++
		return []int{200, 500, 503, 302, 200, 429}[n%6]
	})
	w := newWorld(t, Config{AllowPrivate: loopback})
	h := w.hook(r.URL, noise)
	for range 5 {
		before := len(r.messages())
		w.happen(60, "sba", "sbb", "")
		testenv.Eventually(t, 20*time.Second, "some come", func() bool { return len(r.messages()) > before })
		w.crash()
		w.happen(20, "sba", "sbb", "")
		w.start()
	}
	r.says(nil)
	testenv.Eventually(t, 20*time.Second, "the cursor reaches the end", func() bool {
		got, err := w.Webhook(t.Context(), h.ID)
		return err == nil && got.Waiting == 0 && got.Cursor >= h.Cursor+401
	})
	inOrder(t, r.messages(), h.Cursor+2, h.Cursor+401)
	if all, err := w.DeadLetters(t.Context(), h.ID); err != nil || len(all) != 0 {
		t.Errorf("dead %+v, %v", all, err)
	}
	// What was delivered and written down does not come again.
	if err := w.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := len(r.messages())
	w.start()
	w.happen(1)
	testenv.Eventually(t, 10*time.Second, "one more comes", func() bool { return len(r.messages()) > before })
	if got := r.messages(); len(got) != before+1 {
		t.Errorf("%d came again after an orderly end", len(got)-before-1)
	}
}

// slowToSubscribe is a store whose reader subscribes late.
type slowToSubscribe struct {
	Store
	idle      chan struct{} // holds one, after a read that found nothing
	subscribe chan struct{}
}

func (s slowToSubscribe) Subscribe() (<-chan struct{}, func()) {
	<-s.subscribe
	return s.Store.Subscribe()
}

func (s slowToSubscribe) Events(ctx context.Context, after int64, id sandbox.ID, limit int) ([]sandbox.Event, error) {
	events, err := s.Store.Events(ctx, after, id, limit)
	if len(events) == 0 {
		wake(s.idle)
	}
	return events, err
}

// TestEventsOfTheStart: what happens while the desk starts, after its lines
// looked and before it follows the log, comes without a further event.
func TestEventsOfTheStart(t *testing.T) {
	r := newReceiver(t, "a secret")
	w := newWorld(t, Config{AllowPrivate: loopback})
	w.hook(r.URL, noise)
	if err := w.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	late := slowToSubscribe{Store: w.db, idle: make(chan struct{}, 1), subscribe: make(chan struct{})}
	w.cfg.Store = late
	w.start()
	<-late.idle
	w.happen(1)
	close(late.subscribe)
	testenv.Eventually(t, 20*time.Second, "it comes", func() bool { return len(r.messages()) == 1 })
}

// hangingUp is a store whose caller goes away once a webhook is made or removed, and
// that cannot list them as often as it is told.
type hangingUp struct {
	Store
	cancel func()
	fail   *atomic.Int64
}

func (s hangingUp) CreateWebhook(ctx context.Context, w sandbox.Webhook, actor string) (sandbox.Webhook, error) {
	defer s.cancel()
	return s.Store.CreateWebhook(ctx, w, actor)
}

func (s hangingUp) DeleteWebhook(ctx context.Context, id, actor string) error {
	defer s.cancel()
	return s.Store.DeleteWebhook(ctx, id, actor)
}

func (s hangingUp) Webhooks(ctx context.Context) ([]sandbox.Webhook, error) {
	if s.fail.Load() > 0 {
		s.fail.Add(-1)
		return nil, errors.New("disk")
	}
	return s.Store.Webhooks(ctx)
}

// TestWebhooksAreTakenUp: those that are made or removed count at once, whoever has
// asked for it and gone away, and those of projects also where they cannot be read
// at first.
func TestWebhooksAreTakenUp(t *testing.T) {
	r := newReceiver(t, "a secret")
	ctx, hangUp := context.WithCancel(t.Context())
	w := newWorld(t, Config{AllowPrivate: loopback})
	if err := w.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	store := hangingUp{w.db, func() { hangUp() }, new(atomic.Int64)}
	w.cfg.Store = store
	w.start()
	h, err := w.CreateWebhook(ctx, sandbox.WebhookRequest{URL: r.URL, Secret: "a secret", Filter: noise, Actor: "uid:0"})
	if h.ID == "" {
		t.Fatal(err)
	}
	w.happen(1)
	testenv.Eventually(t, 10*time.Second, "the event comes", func() bool { return len(r.messages()) == 1 })
	ctx, hangUp = context.WithCancel(t.Context())
	defer hangUp()
	_ = w.RemoveWebhook(ctx, h.ID, "") // that its caller is gone is none of this test's
	w.mu.Lock()
	n := len(w.lines)
	w.mu.Unlock()
	if n != 0 {
		t.Error("one that was removed is delivered to")
	}
	store.fail.Store(2)
	if _, err := w.db.CreateWebhook(t.Context(), sandbox.Webhook{ID: sandbox.NewWebhookID(), URL: r.URL, Filter: noise, Owner: "uid:0"}, ""); err != nil {
		t.Fatal(err)
	}
	if _, err := w.db.AppendEvent(t.Context(), sandbox.Event{Type: "project.changed"}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 10*time.Second, "it is taken up", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return len(w.lines) == 1
	})
}

// TestOneSandboxHoldsUpNoOther: an event that is refused ends as a dead
// letter, and only its sandbox waits for that.
func TestOneSandboxHoldsUpNoOther(t *testing.T) {
	r := newReceiver(t, "a secret")
	var poison int64
	r.says(func(m sandbox.WebhookMessage) int {
		if m.Seq == poison {
			return http.StatusBadRequest
		}
		return http.StatusOK
	})
	w := newWorld(t, Config{AllowPrivate: loopback, Refusals: 4, Pause: 500 * time.Millisecond})
	h := w.hook(r.URL, noise)
	r.mu.Lock()
	poison = h.Cursor + 2
	r.mu.Unlock()
	w.happen(100, "sba", "sbb")
	testenv.Eventually(t, time.Minute, "all others come", func() bool { return len(r.messages()) == 99 })
	got := r.messages()
	for _, m := range got[:50] {
		if m.Sandbox != "sbb" {
			t.Fatalf("%+v came while the one before it was tried", m)
		}
	}
	testenv.Eventually(t, 10*time.Second, "nothing waits", func() bool { return w.Stats().Waiting == 0 })
	dead, err := w.DeadLetters(t.Context(), h.ID)
	if err != nil || len(dead) != 1 || dead[0].Event.Seq != poison || dead[0].Attempts != 4 || !strings.Contains(dead[0].Error, "400") {
		t.Fatalf("dead %+v, %v", dead, err)
	}
	tried, err := w.RetryDeadLetters(t.Context(), h.ID, nil)
	if err != nil || len(tried) != 1 || tried[0].OK || tried[0].Status != 400 || tried[0].Attempts != 5 {
		t.Errorf("tried while refused: %+v, %v", tried, err)
	}
	r.says(nil)
	if _, err := w.RetryDeadLetters(t.Context(), h.ID, []int64{poison + 1}); sandbox.CodeOf(err) != "dead_letter_not_found" {
		t.Errorf("of another number: %v", err)
	}
	if tried, err = w.RetryDeadLetters(t.Context(), h.ID, []int64{poison}); err != nil || len(tried) != 1 || !tried[0].OK {
		t.Errorf("tried again: %+v, %v", tried, err)
	}
	if dead, err = w.DeadLetters(t.Context(), h.ID); err != nil || len(dead) != 0 {
		t.Errorf("left dead: %+v, %v", dead, err)
	}
}

// TestDeadReceiverHoldsUpNoOther: one that never answers has no part in what
// others get.
func TestDeadReceiverHoldsUpNoOther(t *testing.T) {
	release := make(chan struct{})
	var asked sync.WaitGroup
	var givenUp atomic.Int64
	hung := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		defer asked.Done()
		select {
		case <-release:
		case <-r.Context().Done():
			givenUp.Add(1)
		}
	}))
	t.Cleanup(hung.Close)
	t.Cleanup(func() { close(release) })
	r := newReceiver(t, "a secret")
	w := newWorld(t, Config{AllowPrivate: loopback})
	for range 20 {
		w.hook(hung.URL, noise)
	}
	w.hook(r.URL, noise)
	w.happen(500, "sba", "sbb", "sbc", "sbd", "sbe")
	testenv.Eventually(t, time.Minute, "the first comes", func() bool { return len(r.messages()) > 0 })
	if n := givenUp.Load(); n > 0 {
		t.Errorf("the first came only after %d attempts on the dead ones were given up", n)
	}
	testenv.Eventually(t, time.Minute, "all come", func() bool { return len(r.messages()) == 500 })
}

func TestFilters(t *testing.T) {
	r := newReceiver(t, "a secret")
	w := newWorld(t, Config{AllowPrivate: loopback})
	if err := w.db.PutImage(t.Context(), sandbox.Image{Name: "host", Digest: "host"}); err != nil {
		t.Fatal(err)
	}
	image, err := w.db.Image(t.Context(), "host")
	if err != nil {
		t.Fatal(err)
	}
	create := func(owner string, labels map[string]string) sandbox.ID {
		sb, _, err := w.db.CreateSandbox(t.Context(), state.CreateParams{
			Sandbox: sandbox.Sandbox{ID: sandbox.NewID(), Owner: owner, Spec: sandbox.Spec{Labels: labels}, CreatedAt: time.Now()},
			Slots:   10, UIDBase: 1 << 16, Actor: owner, Image: image,
		})
		if err != nil {
			t.Fatal(err)
		}
		return sb.ID
	}
	mine, other := create("ann", map[string]string{"team": "a"}), create("bob", map[string]string{"team": "b"})
	hooks := map[string]sandbox.Webhook{
		"owner":   w.hook(r.URL, sandbox.WebhookFilter{Owner: "ann"}),
		"label":   w.hook(r.URL, sandbox.WebhookFilter{Labels: map[string]string{"team": "b"}}),
		"sandbox": w.hook(r.URL, sandbox.WebhookFilter{Sandbox: mine}),
		"both":    w.hook(r.URL, sandbox.WebhookFilter{Owner: "ann", Labels: map[string]string{"team": "b"}}),
		"type":    w.hook(r.URL, noise),
	}
	for _, e := range []sandbox.Event{{Type: "x.a", Sandbox: mine}, {Type: "y.b", Sandbox: other}, {Type: "x.c"}, {Type: "z.d", Sandbox: "sbgonegonegone"}} {
		if _, err := w.db.AppendEvent(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
	want := map[string]string{"owner": "x.a", "label": "y.b", "sandbox": "x.a", "both": "", "type": "x.a x.c"}
	got := func(id string) string {
		var types []string
		for _, m := range r.messages() {
			if m.Webhook == id {
				types = append(types, m.Type)
			}
		}
		if len(types) == 2 && types[0] > types[1] { // of two lanes
			types[0], types[1] = types[1], types[0]
		}
		return strings.Join(types, " ")
	}
	testenv.Eventually(t, 10*time.Second, "nothing waits", func() bool {
		all, err := w.Webhooks(t.Context())
		last, lerr := w.db.LastEventSeq(t.Context())
		for _, h := range all {
			if h.Waiting > 0 || h.Cursor != last {
				return false
			}
		}
		return err == nil && lerr == nil
	})
	for name, h := range hooks {
		if got(h.ID) != want[name] {
			t.Errorf("%s: got %q, want %q", name, got(h.ID), want[name])
		}
	}
}

// TestGap: who is behind what is kept hears how much is missing.
func TestGap(t *testing.T) {
	r := newReceiver(t, "a secret")
	w := newWorld(t, Config{AllowPrivate: loopback})
	w.hook(r.URL, noise)
	if err := w.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.happen(30)
	// One of them is the caller's, of the webhook's making.
	if err := w.db.Prune(t.Context(), 10, 6); err != nil {
		t.Fatal(err)
	}
	w.start()
	testenv.Eventually(t, 10*time.Second, "six messages", func() bool { return len(r.messages()) == 6 })
	var gap sandbox.WebhookMessage
	for _, m := range r.messages() {
		if m.Type == sandbox.WebhookGap {
			gap = m
		}
	}
	kept, err := w.db.Events(t.Context(), 1, "", 1)
	if err != nil || gap.Data["upto"] != fmt.Sprint(kept[0].Seq-1) || gap.Data["after"] == "" {
		t.Errorf("gap %+v, oldest kept %+v, %v", gap, kept, err)
	}
	// Nobody else hears of it.
	other := newReceiver(t, "a secret")
	w.hook(other.URL, sandbox.WebhookFilter{})
	w.happen(1)
	testenv.Eventually(t, 10*time.Second, "the new one comes", func() bool { return len(other.messages()) >= 2 })
	for _, m := range other.messages() {
		if m.Type == sandbox.WebhookGap {
			t.Errorf("a new webhook heard of %+v", m)
		}
	}
}

// TestGapHidesNothing: who is behind when another's events were displaced
// hears of a gap once, and of every event that is kept.
func TestGapHidesNothing(t *testing.T) {
	r := newReceiver(t, "a secret")
	w := newWorld(t, Config{AllowPrivate: loopback})
	w.hook(r.URL, noise)
	if err := w.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	flood := slices.Repeat([]sandbox.Event{{Type: "flood", Actor: "uid:9"}}, 1000)
	mine := slices.Repeat([]sandbox.Event{{Type: "x.happened", Actor: "uid:0"}}, 3*window)
	for _, events := range [][]sandbox.Event{flood, mine, flood} {
		if err := w.db.AppendEvents(t.Context(), events); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.db.Prune(t.Context(), 10, len(mine)+900); err != nil {
		t.Fatal(err)
	}
	w.start()
	count := func(gap bool) (n int) {
		seen := map[int64]bool{}
		for _, m := range r.messages() {
			if (m.Type == sandbox.WebhookGap) == gap && !seen[m.Seq] {
				seen[m.Seq] = true
				n++
			}
		}
		return n
	}
	if !testenv.Within(30*time.Second, func() bool { return count(false) == len(mine) }) || count(true) != 1 {
		t.Errorf("%d of %d events and %d gaps came", count(false), len(mine), count(true))
	}
}

// TestOldEventsAreGivenUp: age ends the tries where nobody answers.
func TestOldEventsAreGivenUp(t *testing.T) {
	r := newReceiver(t, "a secret")
	r.says(func(sandbox.WebhookMessage) int { return http.StatusBadGateway })
	w := newWorld(t, Config{AllowPrivate: loopback, GiveUp: time.Millisecond})
	h := w.hook(r.URL, noise)
	w.happen(3)
	testenv.Eventually(t, 10*time.Second, "all are dead", func() bool {
		all, err := w.DeadLetters(t.Context(), h.ID)
		return err == nil && len(all) == 3 && all[0].Attempts >= leastTries
	})
	if s := w.Stats(); s.Died != 3 || s.Failed < 9 {
		t.Errorf("stats %+v", s)
	}
}

func TestAddresses(t *testing.T) {
	g := guard{}
	for a, want := range map[string]bool{
		"1.1.1.1": true, "8.8.8.8": true, "2606:4700::1": true, "::ffff:1.1.1.1": true,
		"127.0.0.1": false, "::1": false, "10.1.2.3": false, "172.31.0.1": false, "192.168.1.1": false, "169.254.169.254": false,
		"fe80::1": false, "fe80::1%eth0": false, "fd00::1": false, "0.0.0.0": false, "::": false, "100.64.0.1": false, "224.0.0.1": false, "255.255.255.255": false,
		"::ffff:127.0.0.1": false, "::ffff:169.254.169.254": false, "::127.0.0.1": false, "64:ff9b::a9fe:a9fe": false, "2002:7f00:1::": false, "2001:0:1::": false,
	} {
		if got := g.permits(netip.MustParseAddr(a)); got != want {
			t.Errorf("%s: permitted %v, want %v", a, got, want)
		}
	}
	g.allow = []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}
	if !g.permits(netip.MustParseAddr("10.1.2.3")) || !g.permits(netip.MustParseAddr("::ffff:10.1.2.3")) || g.permits(netip.MustParseAddr("10.2.0.1")) {
		t.Error("allow_private is not what permits")
	}
}

// TestPrivateIsRefused: by its address at once, by a name at the connection.
// The control is every other test, where the range is permitted.
func TestPrivateIsRefused(t *testing.T) {
	r := newReceiver(t, "a secret")
	w := newWorld(t, Config{})
	_, err := w.CreateWebhook(t.Context(), sandbox.WebhookRequest{URL: r.URL})
	if sandbox.CodeOf(err) != "webhook_address" {
		t.Errorf("an address: %v", err)
	}
	h := w.hook(strings.Replace(r.URL, "127.0.0.1", "localhost", 1), noise)
	d, err := w.TestWebhook(t.Context(), h.ID, "uid:0")
	if err != nil || d.OK || !strings.Contains(d.Error, "not public") {
		t.Errorf("a name: %+v, %v", d, err)
	}
	if len(r.messages()) != 0 || r.all != 0 {
		t.Error("it was called")
	}
	w.cfg.AllowPrivate = append([]netip.Prefix{netip.MustParsePrefix("::1/128")}, loopback...)
	_ = w.Close(t.Context())
	w.start()
	if d, err = w.TestWebhook(t.Context(), h.ID, "uid:0"); err != nil || !d.OK || d.Status != 200 {
		t.Errorf("permitted: %+v, %v", d, err)
	}
}

func TestSignature(t *testing.T) {
	now := time.Unix(1700000000, 0)
	body := []byte(`{"id":"x"}`)
	sig := sandbox.SignWebhook("key", now, body)
	// Computed by: printf '1700000000.{"id":"x"}' | openssl dgst -sha256 -hmac key
	if sig != "t=1700000000,v1="+wantMAC {
		t.Errorf("signature %s", sig)
	}
	if err := sandbox.VerifyWebhook("key", sig, body, now.Add(time.Minute), 5*time.Minute); err != nil {
		t.Error(err)
	}
	for name, err := range map[string]error{
		"another secret": sandbox.VerifyWebhook("kez", sig, body, now, 0),
		"another body":   sandbox.VerifyWebhook("key", sig, body[1:], now, 0),
		"another time":   sandbox.VerifyWebhook("key", strings.Replace(sig, "t=17", "t=18", 1), body, now, 0),
		"old":            sandbox.VerifyWebhook("key", sig, body, now.Add(time.Hour), 5*time.Minute),
		"none":           sandbox.VerifyWebhook("key", "", body, now, 0),
	} {
		if !errors.Is(err, sandbox.ErrForbidden) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

const wantMAC = "c275209bfed50f54f9b0d8dafaf250f3f08155fdaadece7fc4d3f5c7e3c8b6ba"

// TestRightsAreJudgedAtDelivery: what an owner may not see any more is not told,
// whatever the filter says.
func TestRightsAreJudgedAtDelivery(t *testing.T) {
	var mu sync.Mutex
	all, ok := true, true
	may := func(a, o bool) { mu.Lock(); defer mu.Unlock(); all, ok = a, o }
	r := newReceiver(t, "a secret")
	w := newWorld(t, Config{AllowPrivate: loopback, Standing: func(string) (bool, bool) { mu.Lock(); defer mu.Unlock(); return all, ok }})
	w.hook(r.URL, noise)
	for _, c := range []struct {
		what    string
		all, ok bool
		told    int
	}{{"an admin", true, true, 10}, {"demoted", false, true, 0}, {"disabled", false, false, 0}, {"an admin again", true, true, 10}} {
		may(c.all, c.ok)
		before := len(r.messages())
		w.happen(10, "sba")
		testenv.Eventually(t, 20*time.Second, "all are looked at", func() bool { return w.Stats().Waiting == 0 && w.caughtUp() })
		if n := len(r.messages()) - before; n != c.told {
			t.Errorf("%s is told %d events of another's sandbox, want %d", c.what, n, c.told)
		}
	}
}

// caughtUp reports whether every line has read to the log's end.
func (w *world) caughtUp() bool {
	last, err := w.db.LastEventSeq(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	for _, l := range w.all() {
		var h sandbox.Webhook
		if l.describe(&h); h.Cursor < last {
			return false
		}
	}
	return true
}
