package server_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/api/server/servertest"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// eventually polls until ok holds.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	testenv.Eventually(t, 10*time.Second, what, ok)
}

// noise fills b with bytes that repeat nowhere, the same each time.
func noise(b []byte) {
	_, _ = rand.NewChaCha8([32]byte{1}).Read(b) // never fails
}

func TestStdinRoundTrip(t *testing.T) {
	c := start(t).client(t)
	create(t, c, sandbox.Spec{Name: "box"})
	p, err := c.Exec(t.Context(), "box", sandbox.ProcessSpec{Argv: []string{"cat"}, Stdin: true, OutputBytes: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	// Several windows' worth, so that the flow control is used.
	data := make([]byte, 5*api.StdinWindow+123)
	noise(data)
	go func() {
		if _, err := p.WriteStdin(data); err != nil {
			t.Error(err)
		}
		if err := errors.Join(p.CloseStdin(), p.CloseStdin()); err != nil {
			t.Error(err)
		}
	}()
	out, _, exit := output(t, p)
	if exit.Code != 0 || sha256.Sum256([]byte(out)) != sha256.Sum256(data) {
		t.Errorf("%d bytes in, %d out, %+v", len(data), len(out), exit)
	}
}

func TestSignalWhileStdinIsFull(t *testing.T) {
	c := start(t).client(t)
	create(t, c, sandbox.Spec{Name: "box"})
	p, err := c.Exec(t.Context(), "box", sandbox.ProcessSpec{Argv: []string{"sleep"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	wrote := make(chan error, 1)
	go func() {
		_, err := p.WriteStdin(make([]byte, 4*api.StdinWindow)) // nobody reads it
		wrote <- err
	}()
	if err := p.Signal("SIGTERM"); err != nil {
		t.Fatal(err)
	}
	if _, _, exit := output(t, p); exit.Signal != "SIGTERM" || exit.Code != 143 {
		t.Errorf("%+v", exit)
	}
	if err := <-wrote; err == nil {
		t.Error("writing four windows to a process that read nothing succeeded")
	}
}

func TestResizeAndTTY(t *testing.T) {
	c := start(t).client(t)
	create(t, c, sandbox.Spec{Name: "box"})
	p, err := c.Exec(t.Context(), "box", sandbox.ProcessSpec{Argv: []string{"size"}, TTY: &sandbox.WindowSize{}})
	if err != nil {
		t.Fatal(err)
	}
	if !p.Process().TTY {
		t.Error("no terminal")
	}
	if err := p.Resize(sandbox.WindowSize{Cols: 132, Rows: 43}); err != nil {
		t.Fatal(err)
	}
	if out, _, _ := output(t, p); out != "43 132\n" {
		t.Errorf("%q", out)
	}
}

// TestClientSurvivesRestarts breaks the connection again and again, by a
// daemon that goes down and comes back: no byte may be lost or repeated, in
// either direction.
func TestClientSurvivesRestarts(t *testing.T) {
	d := start(t)
	c := d.client(t)
	create(t, c, sandbox.Spec{Name: "box"})
	p, err := c.Exec(t.Context(), "box", sandbox.ProcessSpec{Argv: []string{"cat"}, Stdin: true, OutputBytes: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	data := make([]byte, 12<<20)
	noise(data)
	var through atomic.Int64
	var work sync.WaitGroup
	work.Go(func() {
		for part := data; len(part) > 0; {
			n := min(len(part), 100_000)
			if _, err := p.WriteStdin(part[:n]); err != nil {
				t.Error(err)
				return
			}
			part = part[n:]
		}
		if err := p.CloseStdin(); err != nil {
			t.Error(err)
		}
	})
	work.Go(func() {
		for i := range int64(4) {
			eventually(t, "enough is through for the next break", func() bool { return through.Load() > (i+1)*int64(len(data))/6 })
			if err := d.stop(); err != nil {
				t.Errorf("stop: %v", err)
			}
			d.serve(t)
		}
	})
	h := sha256.New()
	var n, next int64
	for {
		out, err := p.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if out.Offset != next || out.Dropped != 0 {
			t.Fatalf("offset %d after %d, %d dropped", out.Offset, next, out.Dropped)
		}
		next += int64(len(out.Data))
		n += int64(len(out.Data))
		through.Store(n)
		h.Write(out.Data)
	}
	work.Wait()
	if want := sha256.Sum256(data); n != int64(len(data)) || !bytes.Equal(h.Sum(nil), want[:]) {
		t.Errorf("%d bytes back of %d, equal: %v", n, len(data), bytes.Equal(h.Sum(nil), want[:]))
	}
}

func TestGivesUpWithoutPatience(t *testing.T) {
	d := start(t)
	c := d.client(t, client.WithPatience(0))
	create(t, c, sandbox.Spec{Name: "box"})
	p, err := c.Exec(t.Context(), "box", sandbox.ProcessSpec{Argv: []string{"sleep"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Next(); !errors.Is(err, sandbox.ErrUnavailable) {
		t.Errorf("%v", err)
	}
	if _, ok := p.Exit(); ok {
		t.Error("an exit status from nowhere")
	}
}

func TestAttachFromOffset(t *testing.T) {
	c := start(t).client(t)
	create(t, c, sandbox.Spec{Name: "box"})
	proc, err := c.StartProcess(t.Context(), "box", sandbox.ProcessSpec{Argv: []string{"echo", "0123456789"}})
	if err != nil {
		t.Fatal(err)
	}
	for offset, want := range map[int64]string{-1: "0123456789\n", 0: "0123456789\n", 5: "56789\n", 11: ""} {
		p, err := c.Attach(t.Context(), "box", proc.ID, offset)
		if err != nil {
			t.Fatal(err)
		}
		if out, _, _ := output(t, p); out != want {
			t.Errorf("from %d: %q, want %q", offset, out, want)
		}
		r, err := c.Output(t.Context(), "box", proc.ID, offset, true)
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(r); err != nil || string(b) != want {
			t.Errorf("plain output from %d: %q, %v", offset, b, err)
		}
	}
}

// TestSlowReader has a client that never reads while a process writes much:
// the server's memory stays, others are served, and the client is told how
// much it missed.
func TestSlowReader(t *testing.T) {
	d := start(t)
	c := d.client(t)
	create(t, c, sandbox.Spec{Name: "box"})
	for name, stdin := range map[string]bool{"posted": false, "websocket": true} {
		t.Run(name, func(t *testing.T) { slowReader(t, c, stdin) })
	}
}

func slowReader(t *testing.T, c *client.Client, stdin bool) {
	t.Helper()
	const total = 4 << 30
	p, err := c.Exec(t.Context(), "box", sandbox.ProcessSpec{Argv: []string{"yes", "4294967296"}, Stdin: stdin})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "all is written", func() bool {
		rec, err := c.Process(t.Context(), "box", p.Process().ID)
		if err != nil {
			t.Fatal(err)
		}
		return rec.Exit != nil
	})
	var mem runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&mem)
	if mem.HeapInuse > 64<<20 {
		t.Errorf("%d MiB of heap in use", mem.HeapInuse>>20)
	}
	var got, dropped int64
	for {
		out, err := p.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got += int64(len(out.Data))
		dropped += out.Dropped
	}
	if got+dropped != total || dropped == 0 {
		t.Errorf("%d received and %d dropped of %d", got, dropped, int64(total))
	}
}

// fails is a Manager whose methods fail as told.
func fails(how func(method string) error) *servertest.Memory {
	m := servertest.New()
	m.Fail = how
	return m
}

func TestPanicAndInternalError(t *testing.T) {
	var logged bytes.Buffer
	log := slog.New(slog.NewTextHandler(&logged, nil))
	m := fails(func(method string) error {
		switch method {
		case "List":
			panic("secret panic")
		case "Images":
			return errors.New("secret error")
		}
		return nil
	})
	h := server.New(server.Config{Manager: m, Log: log})
	for path, secret := range map[string]string{"/v1/sandboxes": "secret panic", "/v1/images": "secret error"} {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodGet, path, http.NoBody)
		r.Header.Set(api.HeaderRequestID, "mine-1")
		h.ServeHTTP(w, r)
		var p api.Problem
		if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil {
			t.Fatal(err)
		}
		if w.Code != 500 || p.Code != "internal" || p.RequestID != "mine-1" || strings.Contains(w.Body.String(), "secret") {
			t.Errorf("%s: %d %s", path, w.Code, w.Body)
		}
		if !strings.Contains(logged.String(), secret) || !strings.Contains(logged.String(), "mine-1") {
			t.Errorf("%s: the log lacks it: %s", path, &logged)
		}
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/healthz", http.NoBody))
	if w.Code != http.StatusNoContent {
		t.Errorf("after a panic: %d", w.Code)
	}
}

func TestRetryAfter(t *testing.T) {
	m := fails(func(string) error { return sandbox.Errorf(sandbox.ErrExhausted, "no_slots", "every slot is taken") })
	h := server.New(server.Config{Manager: m})
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/v1/sandboxes", http.NoBody))
	if w.Code != http.StatusTooManyRequests || w.Header().Get("Retry-After") == "" || !strings.Contains(w.Body.String(), "no_slots") {
		t.Errorf("%d %v %s", w.Code, w.Header(), w.Body)
	}
}

// TestStreamNonsense sends a process stream what it must refuse; each time
// only that stream ends.
func TestStreamNonsense(t *testing.T) {
	d := start(t)
	c := d.client(t)
	create(t, c, sandbox.Spec{Name: "box"})
	hc := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", d.sock)
	}}}
	const good = `{"argv":["sleep"],"stdin":true}`
	text := func(s string) func(*websocket.Conn) error {
		return func(ws *websocket.Conn) error { return ws.Write(t.Context(), websocket.MessageText, []byte(s)) }
	}
	binary := func(b ...byte) func(*websocket.Conn) error {
		return func(ws *websocket.Conn) error { return ws.Write(t.Context(), websocket.MessageBinary, b) }
	}
	for name, tc := range map[string]struct {
		first string
		then  func(*websocket.Conn) error
		code  string
	}{
		"spec is not JSON":    {first: "x", code: "invalid_process_spec"},
		"spec has more":       {first: good + "{}", code: "invalid_process_spec"},
		"unknown key":         {first: `{"argv":["echo"],"x":1}`, code: "invalid_process_spec"},
		"no UTF-8":            {first: `{"argv":["echo","\ud800"]}`, code: "invalid_process_spec"},
		"no argv":             {first: `{}`, code: "invalid_argv"},
		"no such command":     {first: `{"argv":["nope"]}`, code: "command_not_found"},
		"message is not JSON": {first: good, then: text("{"), code: "invalid_message"},
		"unknown message":     {first: good, then: text(`{"type":"dance"}`), code: "invalid_message"},
		"unknown frame":       {first: good, then: binary(9, 'x'), code: "invalid_frame"},
		"empty frame":         {first: good, then: binary(), code: "invalid_frame"},
		"frame too long":      {first: good, then: binary(make([]byte, api.MaxStdinFrame+2)...), code: "invalid_frame"},
		"over the window": {first: good, then: func(ws *websocket.Conn) error {
			for range 2*api.StdinWindow/api.MaxStdinFrame + 4 {
				if err := ws.Write(t.Context(), websocket.MessageBinary, make([]byte, 1+api.MaxStdinFrame)); err != nil {
					return nil // refused already
				}
			}
			return nil
		}, code: "invalid_frame"},
	} {
		ws, _, err := websocket.Dial(t.Context(), "http://d/v1/sandboxes/box/exec", &websocket.DialOptions{HTTPClient: hc})
		if err != nil {
			t.Fatal(err)
		}
		err = text(tc.first)(ws)
		if err == nil && tc.then != nil {
			err = tc.then(ws)
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for {
			_, b, err := ws.Read(t.Context())
			if err != nil {
				t.Errorf("%s: no error message: %v", name, err)
				break
			}
			var m api.Message
			if json.Unmarshal(b, &m) == nil && m.Type == api.MsgError {
				if m.Problem == nil || m.Problem.Code != tc.code {
					t.Errorf("%s: %s, want %s", name, b, tc.code)
				}
				break
			}
		}
		_ = ws.CloseNow() // done with it
	}
	p, err := c.Exec(t.Context(), "box", sandbox.ProcessSpec{Argv: []string{"echo", "fine"}})
	if err != nil {
		t.Fatal(err)
	}
	if out, _, _ := output(t, p); out != "fine\n" {
		t.Errorf("after all that: %q", out)
	}
}

// TestShutdownEndsStreams has one stream of each kind open while the server
// goes down.
func TestShutdownEndsStreams(t *testing.T) {
	d := start(t)
	c := d.client(t, client.WithPatience(0))
	create(t, c, sandbox.Spec{Name: "box"})
	p, err := c.Exec(t.Context(), "box", sandbox.ProcessSpec{Argv: []string{"sleep"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	r, err := c.Output(t.Context(), "box", p.Process().ID, 0, true)
	if err != nil {
		t.Fatal(err)
	}
	w, err := c.Files("box").Watch(t.Context(), "", "/tmp", true)
	if err != nil {
		t.Fatal(err)
	}
	followed := make(chan error, 1)
	go func() {
		followed <- c.Follow(t.Context(), client.EventQuery{}, func(sandbox.Event) error { return nil })
	}()
	eventually(t, "the subscription", func() bool { return d.m.Subscribers() == 1 })
	grace, undo := server.LongGrace()
	defer undo()
	begin := time.Now()
	if err := d.stop(); err != nil {
		t.Errorf("shutdown: %v", err)
	}
	if took := time.Since(begin); took >= grace {
		t.Errorf("shutdown took %v: some stream did not end by itself", took)
	}
	if _, err := p.Next(); err == nil {
		t.Error("the process stream goes on")
	}
	if _, err := io.ReadAll(r); err == nil {
		t.Error("cut-off output looks complete")
	}
	if _, err := w.Next(); err == nil {
		t.Error("the watch goes on")
	}
	if err := <-followed; err == nil {
		t.Error("the events go on")
	}
	eventually(t, "the subscription's end", func() bool { return d.m.Subscribers() == 0 })
}
