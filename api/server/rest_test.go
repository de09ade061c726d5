package server_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/api/server/servertest"
	"github.com/sandboxd/sandboxd/sandbox"
)

func TestIdempotencyKey(t *testing.T) {
	c := start(t).client(t)
	a, err := c.Create(t.Context(), sandbox.Spec{}, "k1")
	if err != nil {
		t.Fatal(err)
	}
	b, err := c.Create(t.Context(), sandbox.Spec{}, "k1")
	if err != nil || a.ID != b.ID {
		t.Errorf("%s and %s, %v", a.ID, b.ID, err)
	}
	if d, err := c.Create(t.Context(), sandbox.Spec{}, ""); err != nil || d.ID == a.ID {
		t.Errorf("without a key: %s, %v", d.ID, err)
	}
}

func TestPagesAndFilters(t *testing.T) {
	c := start(t).client(t)
	for i := range 7 {
		label := "even"
		if i%2 == 1 {
			label = "odd, yes" // needs escaping
		}
		create(t, c, sandbox.Spec{Labels: map[string]string{"kind": label}})
	}
	page, err := c.List(t.Context(), sandbox.Filter{Limit: 3})
	if err != nil || len(page.Items) != 3 || page.Next == "" {
		t.Fatalf("%d items, next %q, %v", len(page.Items), page.Next, err)
	}
	count := func(f sandbox.Filter) (n int) {
		for _, err := range c.All(t.Context(), f) {
			if err != nil {
				t.Fatal(err)
			}
			n++
		}
		return n
	}
	for want, f := range map[int]sandbox.Filter{
		7: {Limit: 2}, 3: {Labels: map[string]string{"kind": "odd, yes"}, Limit: 1}, 0: {Statuses: []sandbox.Status{sandbox.StatusPaused, sandbox.StatusStopped}},
	} {
		if n := count(f); n != want {
			t.Errorf("%+v: %d, want %d", f, n, want)
		}
	}
	if _, err := c.Pause(t.Context(), string(page.Items[0].ID)); err != nil {
		t.Fatal(err)
	}
	if n := count(sandbox.Filter{Statuses: []sandbox.Status{sandbox.StatusPaused, sandbox.StatusStopped}}); n != 1 {
		t.Errorf("%d paused, want 1", n)
	}
}

func TestActorIsThePeer(t *testing.T) {
	d := start(t)
	c := d.client(t)
	create(t, c, sandbox.Spec{})
	events, next, err := c.Events(t.Context(), client.EventQuery{})
	if err != nil || len(events) != 1 || next != events[0].Seq {
		t.Fatalf("%v, next %d, %v", events, next, err)
	}
	if !strings.HasPrefix(events[0].Actor, "uid:") {
		t.Errorf("actor %q", events[0].Actor)
	}
}

func TestFiles(t *testing.T) {
	c := start(t).client(t)
	create(t, c, sandbox.Spec{Name: "box"})
	f := c.Files("box")
	ctx := t.Context()
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<18) // 4 MiB, over the JSON bound
	info, err := f.Write(ctx, "", "/tmp/big", 0o600, bytes.NewReader(big))
	if err != nil || info.Size != int64(len(big)) || info.Mode != 0o600 {
		t.Fatalf("%+v, %v", info, err)
	}
	for _, tc := range []struct{ offset, limit, from, to int64 }{
		{0, -1, 0, int64(len(big))}, {5, -1, 5, int64(len(big))}, {5, 10, 5, 15}, {0, 1, 0, 1}, {0, 0, 0, 0}, {int64(len(big)) - 3, 100, int64(len(big)) - 3, int64(len(big))},
	} {
		info, r, err := f.Read(ctx, "", "/tmp/big", tc.offset, tc.limit)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil || !bytes.Equal(b, big[tc.from:tc.to]) || info.Path != "/tmp/big" || info.Size != int64(len(big)) {
			t.Errorf("%+v: %d bytes, %+v, %v", tc, len(b), info, err)
		}
		_ = r.Close() // read to its end
	}
	if _, _, err := f.Read(ctx, "", "/tmp/big", int64(len(big)), -1); sandbox.CodeOf(err) != "invalid_range" {
		t.Errorf("beyond the end: %v", err)
	}
	if _, err := f.Write(ctx, "", "/tmp/empty", 0o644, strings.NewReader("")); err != nil {
		t.Fatal(err)
	}
	if _, r, err := f.Read(ctx, "", "/tmp/empty", 0, -1); err != nil {
		t.Errorf("empty: %v", err)
	} else if b, err := io.ReadAll(r); err != nil || len(b) != 0 {
		t.Errorf("empty: %q %v", b, err)
	}
	// A body that breaks off leaves the old content.
	broken := io.MultiReader(bytes.NewReader(make([]byte, 1<<20)), iotestErr{})
	if _, err := f.Write(ctx, "", "/tmp/big", 0o644, broken); err == nil {
		t.Error("a broken body was taken")
	}
	if info, err := f.Stat(ctx, "", "/tmp/big"); err != nil || info.Size != int64(len(big)) {
		t.Errorf("after a broken body: %+v, %v", info, err)
	}
	if err := errors.Join(f.Chmod(ctx, "", "/tmp/big", 0), f.Move(ctx, "", "/tmp/big", "/tmp/b ig&x=é")); err != nil {
		t.Error(err)
	}
	if info, err := f.Stat(ctx, "", "/tmp/b ig&x=é"); err != nil || info.Mode != 0 {
		t.Errorf("%+v, %v", info, err)
	}
	if _, err := f.Mkdir(ctx, "", "/srv/a/b", 0o711); err != nil {
		t.Error(err)
	}
	if items, err := f.List(ctx, "", "/srv", 2); err != nil || len(items) != 2 {
		t.Errorf("%v, %v", items, err)
	}
	if err := f.Remove(ctx, "", "/srv", false); !errors.Is(err, sandbox.ErrConflict) {
		t.Errorf("removing a full directory: %v", err)
	}
	if err := f.Remove(ctx, "", "/srv", true); err != nil {
		t.Error(err)
	}
	r, err := f.TarOut(ctx, "", "/tmp")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Mkdir(ctx, "", "/copy", 0o755); err != nil {
		t.Error(err)
	}
	if err := errors.Join(f.TarIn(ctx, "", "/copy", r), r.Close()); err != nil {
		t.Error(err)
	}
	if info, err := f.Stat(ctx, "", "/copy/tmp/b ig&x=é"); err != nil || info.Size != int64(len(big)) {
		t.Errorf("%+v, %v", info, err)
	}
}

type iotestErr struct{}

func (iotestErr) Read([]byte) (int, error) { return 0, errors.New("source broke") }

func TestWatch(t *testing.T) {
	c := start(t).client(t)
	create(t, c, sandbox.Spec{Name: "box"})
	f := c.Files("box")
	w, err := f.Watch(t.Context(), "", "/tmp", true)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(t.Context(), "", "/tmp/new", 0o644, strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	if e, err := w.Next(); err != nil || e.Path != "/tmp/new" {
		t.Errorf("%+v, %v", e, err)
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
}

func TestImages(t *testing.T) {
	c := start(t).client(t)
	img, err := c.ImportImage(t.Context(), "deb/ian:12", strings.NewReader("an archive"))
	if err != nil || img.SizeBytes != 10 {
		t.Fatalf("%+v, %v", img, err)
	}
	if got, err := c.Image(t.Context(), "deb/ian:12"); err != nil || got.Digest != img.Digest {
		t.Errorf("%+v, %v", got, err)
	}
	if all, err := c.Images(t.Context()); err != nil || len(all) != 2 {
		t.Errorf("%v, %v", all, err)
	}
	if err := c.RemoveImage(t.Context(), "deb/ian:12"); err != nil {
		t.Error(err)
	}
	if _, err := c.Image(t.Context(), "deb/ian:12"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("%v", err)
	}
}

// TestFollowResumes breaks an event stream by restarts of the daemon: each
// event arrives once, in order.
func TestFollowResumes(t *testing.T) {
	d := start(t)
	c := d.client(t)
	create(t, c, sandbox.Spec{}) // before the stream: not part of it
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var mu sync.Mutex
	var seqs []int64
	done := make(chan error, 1)
	go func() {
		done <- c.Follow(ctx, client.EventQuery{}, func(e sandbox.Event) error {
			mu.Lock()
			defer mu.Unlock()
			seqs = append(seqs, e.Seq)
			return nil
		})
	}()
	eventually(t, "the subscription", func() bool { return d.m.Subscribers() == 1 })
	seen := func(n int) func() bool {
		return func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(seqs) == n
		}
	}
	// The first break comes before any event.
	if err := d.stop(); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		if _, err := d.m.Create(t.Context(), sandbox.CreateRequest{}); err != nil { // while nobody listens
			t.Fatal(err)
		}
		d.serve(t)
		eventually(t, "the event of the gap", seen(2*i+1))
		create(t, c, sandbox.Spec{})
		eventually(t, "the event after it", seen(2*i+2))
		if err := d.stop(); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	for i, seq := range seqs {
		if seq != int64(i+2) {
			t.Fatalf("seqs %v", seqs)
		}
	}
}

func TestEventsSince(t *testing.T) {
	d := start(t)
	c := d.client(t)
	var middle time.Time
	for i := range 40 {
		if i == 23 {
			time.Sleep(2 * time.Millisecond) //nolint:forbidigo // the clock itself must move on
			middle = time.Now()
		}
		create(t, c, sandbox.Spec{})
	}
	events, _, err := c.Events(t.Context(), client.EventQuery{Since: middle})
	if err != nil || len(events) != 17 || events[0].Seq != 24 {
		t.Errorf("%d events, %v", len(events), err)
	}
	if events, _, err := c.Events(t.Context(), client.EventQuery{Since: time.Now().Add(time.Hour)}); err != nil || len(events) != 0 {
		t.Errorf("from the future: %d, %v", len(events), err)
	}
	if events, _, err := c.Events(t.Context(), client.EventQuery{Since: time.Unix(1, 0)}); err != nil || len(events) != 40 {
		t.Errorf("from the past: %d, %v", len(events), err)
	}
}

// TestSlowCreateIsNotCancelled has a creation that takes longer than a body
// may: the deadline is for the body alone.
func TestSlowCreateIsNotCancelled(t *testing.T) {
	if testing.Short() {
		t.Skip("takes as long as the body timeout")
	}
	m := servertest.New()
	m.Fail = func(method string) error {
		if method == "Create" {
			time.Sleep(6 * time.Second) //nolint:forbidigo // longer than the framework's timeout for bodies is the point
		}
		return nil
	}
	d := &daemon{m: m, sock: t.TempDir() + "/s.sock"}
	d.serve(t)
	create(t, d.client(t), sandbox.Spec{})
}

func TestRequestID(t *testing.T) {
	h := server.New(server.Config{Manager: servertest.New()})
	for given, kept := range map[string]bool{"abc-1": true, "": false, "a b": false, "a\"b": false, strings.Repeat("x", 65): false} {
		r := httptest.NewRequest(http.MethodGet, "/v1/version", http.NoBody)
		if given != "" {
			r.Header[api.HeaderRequestID] = []string{given}
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if got := w.Header().Get(api.HeaderRequestID); got == "" || (got == given) != kept {
			t.Errorf("%q became %q", given, got)
		}
	}
}

// TestHalfARequest opens connections that say half a request and stay: the
// server answers others and still goes down in time.
func TestHalfARequest(t *testing.T) {
	d := start(t)
	for range 50 {
		c, err := net.Dial("unix", d.sock)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		if _, err := io.WriteString(c, "POST /v1/sandboxes HTTP/1.1\r\nHost: d\r\nContent-Le"); err != nil {
			t.Fatal(err)
		}
	}
	create(t, d.client(t), sandbox.Spec{})
	grace, undo := server.LongGrace()
	defer undo()
	begin := time.Now()
	if err := d.stop(); err != nil {
		t.Errorf("shutdown: %v", err)
	}
	if took := time.Since(begin); took >= grace {
		t.Errorf("shutdown took %v", took)
	}
}
