package server_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/api/server/servertest"
	"github.com/sandboxd/sandboxd/sandbox"
)

// counted is a listener that counts its connections.
type counted struct {
	net.Listener
	n atomic.Int64
}

func (l *counted) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		l.n.Add(1)
	}
	return c, err
}

// post sends a body with the plainest of clients.
func post(t *testing.T, d *daemon, path, body string, header ...string) *http.Response {
	t.Helper()
	hc := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", d.sock)
	}}}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://d"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := hc.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = resp.Body.Close() }) // read as far as the test likes
	return resp
}

// frames splits a whole stream.
func frames(t *testing.T, b []byte) (messages []api.Message, out []byte) {
	t.Helper()
	for len(b) > 0 {
		kind, n, ok := api.ParseFrameHeader(b)
		if !ok || len(b) < api.FrameHeader+n {
			t.Fatalf("no frame: %.20x", b)
		}
		msg := b[api.FrameHeader : api.FrameHeader+n]
		b = b[api.FrameHeader+n:]
		if kind == api.FrameBinary {
			_, _, data, ok := api.ParseOutput(msg)
			if !ok {
				t.Fatalf("no output frame: %.20x", msg)
			}
			out = append(out, data...)
			continue
		}
		var m api.Message
		if err := json.Unmarshal(msg, &m); err != nil {
			t.Fatal(err)
		}
		messages = append(messages, m)
	}
	return messages, out
}

// TestExecOnTheWire reads a stream as documented, without the client.
func TestExecOnTheWire(t *testing.T) {
	d := start(t)
	create(t, d.client(t), sandbox.Spec{Name: "box"})
	resp := post(t, d, "/v1/sandboxes/box/exec", `{"argv":["cat"],"input":"aGVsbG8K"}`)
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != api.StreamContentType || resp.Header.Get(api.HeaderRequestID) == "" {
		t.Fatalf("%d %v %v", resp.StatusCode, resp.Header, err)
	}
	ms, out := frames(t, b)
	if len(ms) != 2 || ms[0].Type != api.MsgStarted || ms[0].Process == nil || ms[0].Sandbox != nil || ms[1].Type != api.MsgExit || ms[1].Exit == nil || string(out) != "hello\n" {
		t.Errorf("%+v %q", ms, out)
	}
	resp = post(t, d, "/v1/run", `{"sandbox":{"name":"other"},"process":{"argv":["exit","4"]}}`)
	b, err = io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if ms, _ = frames(t, b); len(ms) != 2 || ms[0].Sandbox == nil || ms[0].Sandbox.Spec.Name != "other" || ms[1].Exit == nil || ms[1].Exit.Code != 4 {
		t.Errorf("%+v", ms)
	}
	// Nothing but its output is sent of a command that talks.
	resp = post(t, d, "/v1/sandboxes/box/exec", `{"argv":["ticks","5"]}`)
	b, err = io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if ms, out = frames(t, b); len(ms) != 2 || string(out) != "0\n1\n2\n3\n4\n" {
		t.Errorf("%+v %q", ms, out)
	}
	// A command that has nothing to say for long is heard of at once.
	resp = post(t, d, "/v1/sandboxes/box/exec", `{"argv":["sleep"]}`)
	head := make([]byte, api.FrameHeader)
	if _, err := io.ReadFull(resp.Body, head); err != nil || head[0] != api.FrameText {
		t.Errorf("%x %v", head, err)
	}
}

func TestExecInput(t *testing.T) {
	c := start(t).client(t)
	create(t, c, sandbox.Spec{Name: "box"})
	data := make([]byte, api.MaxInput)
	noise(data)
	for _, n := range []int{0, 1, 4096, 100_000, len(data)} {
		p, err := c.ExecInput(t.Context(), "box", sandbox.ProcessSpec{Argv: []string{"cat"}, OutputBytes: 4 << 20}, data[:n])
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.WriteStdin([]byte("more")); !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("writing more: %v", err)
		}
		if out, _, exit := output(t, p); exit.Code != 0 || out != string(data[:n]) {
			t.Errorf("%d bytes in, %d out, %+v", n, len(out), exit)
		}
	}
	_, err := c.ExecInput(t.Context(), "box", sandbox.ProcessSpec{Argv: []string{"cat"}}, make([]byte, api.MaxInput+1))
	if sandbox.CodeOf(err) != "input_too_large" || !errors.Is(err, sandbox.ErrTooLarge) {
		t.Errorf("too much: %v", err)
	}
}

// TestExecReusesConnections has a hundred clients' worth of commands go over
// as many connections as there are commands at a time, refused ones too.
func TestExecReusesConnections(t *testing.T) {
	d := &daemon{m: servertest.New(), sock: t.TempDir() + "/s.sock"}
	var l *counted
	d.listen = func(ln net.Listener) net.Listener { l = &counted{Listener: ln}; return l }
	d.serve(t)
	c := d.client(t)
	create(t, c, sandbox.Spec{Name: "box"})
	const clients, each = 100, 20
	var work sync.WaitGroup
	for i := range clients {
		work.Go(func() {
			for j := range each {
				if j%5 == 4 {
					if _, err := c.Exec(t.Context(), "box", sandbox.ProcessSpec{Argv: []string{"nope"}}); sandbox.CodeOf(err) != "command_not_found" || !errors.Is(err, sandbox.ErrInvalid) {
						t.Errorf("%v", err)
					}
					continue
				}
				word := fmt.Sprint(i, j)
				p, err := c.Exec(t.Context(), "box", sandbox.ProcessSpec{Argv: []string{"echo", word}})
				if err != nil {
					t.Error(err)
					return
				}
				if out, err := p.Next(); err != nil || string(out.Data) != word+"\n" {
					t.Errorf("%q %v", out.Data, err)
				}
				if _, err := p.Next(); !errors.Is(err, io.EOF) {
					t.Errorf("%v", err)
				}
			}
		})
	}
	work.Wait()
	if n := l.n.Load(); n > clients {
		t.Errorf("%d connections for %d clients", n, clients)
	}
}

// TestExecOnAClosedConnection lets the server go while the client keeps an
// idle connection to it: the next request must not meet it.
func TestExecOnAClosedConnection(t *testing.T) {
	d := start(t)
	c := d.client(t)
	create(t, c, sandbox.Spec{Name: "box"})
	for range 3 {
		p, err := c.Exec(t.Context(), "box", sandbox.ProcessSpec{Argv: []string{"echo", "x"}})
		if err != nil {
			t.Fatal(err)
		}
		output(t, p)
		if err := d.stop(); err != nil {
			t.Fatal(err)
		}
		d.serve(t)
	}
}

// TestClientGoesFromExec breaks a stream in the middle: the command runs on,
// and whatever served the stream goes.
func TestClientGoesFromExec(t *testing.T) {
	d := start(t)
	c := d.client(t)
	create(t, c, sandbox.Spec{Name: "box"})
	begin := runtime.NumGoroutine()
	for name, argv := range map[string][]string{"quiet": {"sleep"}, "talking": {"ticks", "100000"}, "flooding": {"yes", "4294967296"}} {
		ctx, cancel := context.WithCancel(t.Context())
		p, err := c.Exec(ctx, "box", sandbox.ProcessSpec{Argv: argv})
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		if _, err := p.Next(); err == nil && name == "quiet" {
			t.Errorf("%s: output after the end", name)
		}
		rec, err := c.Process(t.Context(), "box", p.Process().ID)
		if err != nil || rec.Exit != nil && name != "flooding" {
			t.Errorf("%s: the command went with its client: %+v %v", name, rec, err)
		}
		if err := c.SignalProcess(t.Context(), "box", rec.ID, "SIGKILL"); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the streams' goroutines have ended", func() bool { return runtime.NumGoroutine() <= begin+4 })
}

// TestExecComesBack breaks POSTed streams by restarts of the daemon: they go
// on without losing or repeating a byte, input included.
func TestExecComesBack(t *testing.T) {
	d := start(t)
	c := d.client(t)
	create(t, c, sandbox.Spec{Name: "box"})
	p, err := c.Exec(t.Context(), "box", sandbox.ProcessSpec{Argv: []string{"ticks", "60"}})
	if err != nil {
		t.Fatal(err)
	}
	input := make([]byte, 1<<20)
	noise(input)
	q, err := c.ExecInput(t.Context(), "box", sandbox.ProcessSpec{Argv: []string{"cat"}, OutputBytes: 4 << 20}, input)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.stop(); err != nil {
		t.Fatal(err)
	}
	d.serve(t)
	var want strings.Builder
	for i := range 60 {
		fmt.Fprintln(&want, i)
	}
	if out, _, exit := output(t, p); out != want.String() || exit.Code != 0 {
		t.Errorf("%q %+v", out, exit)
	}
	if out, _, exit := output(t, q); !bytes.Equal([]byte(out), input) || exit.Code != 0 {
		t.Errorf("%d bytes of %d, %+v", len(out), len(input), exit)
	}
}

func TestRunIsOneRequest(t *testing.T) {
	d := start(t)
	c := d.client(t)
	living := func() int {
		page, err := d.m.List(t.Context(), sandbox.Filter{})
		if err != nil {
			t.Fatal(err)
		}
		return len(page.Items)
	}
	req := func(argv ...string) api.RunRequest {
		return api.RunRequest{Process: api.ExecRequest{ProcessSpec: sandbox.ProcessSpec{Argv: argv, Main: true}}}
	}
	for name, stdin := range map[string]bool{"posted": false, "interactive": true} {
		t.Run(name, func(t *testing.T) {
			r := req("cat")
			if r.Process.Stdin = stdin; !stdin {
				r.Process.Input = []byte("in and out")
			}
			sb, p, err := c.Run(t.Context(), r, "key-"+name)
			if err != nil || sb.Status != sandbox.StatusRunning {
				t.Fatalf("%+v %v", sb, err)
			}
			if stdin {
				if _, err := p.WriteStdin([]byte("in and out")); err != nil {
					t.Fatal(err)
				}
				if err := p.CloseStdin(); err != nil {
					t.Fatal(err)
				}
			}
			if out, _, _ := output(t, p); out != "in and out" {
				t.Errorf("%q", out)
			}
			eventually(t, "the sandbox ends with its command", func() bool { return living() == 0 })
			// The key leads to the sandbox and runs nothing.
			if _, _, err := c.Run(t.Context(), r, "key-"+name); !errors.Is(err, sandbox.ErrConflict) || sandbox.CodeOf(err) != "already_run" || !strings.Contains(err.Error(), string(sb.ID)) {
				t.Errorf("again: %v", err)
			}
			if found, err := c.Create(t.Context(), sandbox.Spec{}, "key-"+name); err != nil || found.ID != sb.ID {
				t.Errorf("by the key: %s, want %s, %v", found.ID, sb.ID, err)
			}
			// What cannot start leaves nothing.
			r.Process.Argv = []string{"nope"}
			if _, _, err := c.Run(t.Context(), r, ""); sandbox.CodeOf(err) != "command_not_found" {
				t.Errorf("%v", err)
			}
			if n := living(); n != 0 {
				t.Errorf("%d sandboxes left", n)
			}
		})
	}
}

// TestShutdownEndsExec has POSTed streams open while the server goes down.
func TestShutdownEndsExec(t *testing.T) {
	d := start(t)
	c := d.client(t, client.WithPatience(0))
	create(t, c, sandbox.Spec{Name: "box"})
	p, err := c.Exec(t.Context(), "box", sandbox.ProcessSpec{Argv: []string{"sleep"}})
	if err != nil {
		t.Fatal(err)
	}
	resp := post(t, d, "/v1/sandboxes/box/exec", `{"argv":["sleep"]}`)
	if err := d.stop(); err != nil {
		t.Error(err)
	}
	if _, err := p.Next(); !errors.Is(err, sandbox.ErrUnavailable) {
		t.Errorf("%v", err)
	}
	if _, err := io.ReadAll(resp.Body); err == nil {
		t.Error("a stream that was cut off looks complete")
	}
}
