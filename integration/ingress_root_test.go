//go:build root

package integration

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// serverBinary returns the path of the static test server, built beforehand
// where there is no Go.
var serverBinary = sync.OnceValues(func() (string, error) {
	if dir := os.Getenv("SANDBOXD_BIN"); dir != "" {
		if path := filepath.Join(dir, "test-server"); exists(path) {
			return path, nil
		}
	}
	dir, err := os.MkdirTemp("", "sandboxd-it-server-")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "test-server")
	cmd := exec.Command("go", "build", "-o", path, "./testdata/server")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the server: %w\n%s", err, out)
	}
	return path, nil
})

// serve starts the test server in a sandbox and waits until it listens.
func (d *daemon) serve(t testing.TB, ref string, args ...string) {
	t.Helper()
	const path = "/opt/server"
	if _, err := d.Files(ref).Stat(t.Context(), "root", path); err != nil {
		bin, err := serverBinary()
		if err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(bin)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := d.Files(ref).Write(t.Context(), "root", path, 0o755, f); err != nil {
			t.Fatal(err)
		}
	}
	var p sandbox.ProcessIO
	var err error
	// A process being forked when the file was written has it open for another moment.
	if !testenv.Within(10*time.Second, func() bool {
		p, err = d.Exec(t.Context(), ref, sandbox.ProcessSpec{Argv: append([]string{path}, args...)})
		return sandbox.CodeOf(err) != "command_not_executable"
	}) || err != nil {
		t.Fatal(err)
	}
	defer p.Close() // it goes on
	o, err := p.Next()
	if err != nil || string(o.Data) != "ready\n" {
		t.Fatalf("server %q: %q, %v", args, o.Data, err)
	}
}

// publish publishes a port or fails the test.
func (d *daemon) publish(t testing.TB, ref, port string, public bool) sandbox.Port {
	t.Helper()
	r, err := sandbox.ParsePort(port)
	if err != nil {
		t.Fatal(err)
	}
	r.Public = public
	p, err := d.PublishPort(t.Context(), ref, r)
	if err != nil {
		t.Fatalf("publish %s of %s: %v", port, ref, err)
	}
	return p
}

// ingressConfig opens host names on a unix socket of the installation's.
const ingressDomain = "box.test"

func ingressConfig(t testing.TB) (config, socket string) {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "sandboxd-it-ingress-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket = filepath.Join(dir, "http.sock")
	return "network: {domain: " + ingressDomain + ", ingress_listen: " + socket + "}\n", socket
}

// browser speaks HTTP to a socket whatever the URL's host is.
func browser(network, address string) *http.Client {
	return &http.Client{
		Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, network, address)
		}},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Timeout:       30 * time.Second,
	}
}

// fetched is an answer read to its end.
type fetched struct {
	*http.Response
	body string
}

func fetch(t testing.TB, c *http.Client, method, url string, header http.Header, body io.Reader) fetched {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	maps.Copy(req.Header, header)
	resp, err := c.Do(req)
	if err != nil {
		t.Fatalf("%s %s: %v", method, url, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%s %s: %v", method, url, err)
	}
	return fetched{resp, string(b)}
}

// speakHTTP tries what servers do: plain requests, long bodies both ways,
// events, WebSockets.
func speakHTTP(t testing.TB, c *http.Client, base string, header http.Header) {
	t.Helper()
	var got struct {
		Host   string
		Header http.Header
	}
	r := fetch(t, c, "GET", base+"/headers", header, http.NoBody)
	if err := json.Unmarshal([]byte(r.body), &got); err != nil || "http://"+got.Host != base {
		t.Fatalf("GET: %d %s, %v", r.StatusCode, r.body, err)
	}
	for _, own := range []string{"X-Sandbox-Token", "Cookie"} {
		if got.Header.Get(own) != "" {
			t.Errorf("the sandbox sees %s: %q", own, got.Header.Get(own))
		}
	}
	const long = 8 << 20
	if r := fetch(t, c, "PUT", base+"/put", header, bytes.NewReader(make([]byte, long))); r.body != fmt.Sprintln(long, "<nil>") {
		t.Errorf("PUT of %d bytes: %q", long, r.body)
	}
	if r := fetch(t, c, "GET", fmt.Sprintf("%s/get?n=%d", base, long), header, http.NoBody); len(r.body) != long {
		t.Errorf("GET of %d bytes: %d", long, len(r.body))
	}
	req, err := http.NewRequestWithContext(t.Context(), "GET", base+"/sse", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	req.Header = header.Clone()
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(resp.Body)
	for i := 0; i < 3; { // the answer never ends: each event is here before it
		if !lines.Scan() {
			t.Fatalf("SSE broke off: %v", lines.Err())
		}
		if lines.Text() == fmt.Sprintf("data: %d", i) {
			i++
		}
	}
	resp.Body.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	ws, _, err := websocket.Dial(ctx, base+"/ws", &websocket.DialOptions{HTTPClient: &http.Client{Transport: c.Transport}, HTTPHeader: header})
	if err != nil {
		t.Fatalf("websocket: %v", err)
	}
	defer func() { _ = ws.CloseNow() }()
	for _, word := range []string{"one", strings.Repeat("x", 20000)} {
		if err := ws.Write(ctx, websocket.MessageText, []byte(word)); err != nil {
			t.Fatal(err)
		}
		if _, b, err := ws.Read(ctx); err != nil || string(b) != word {
			t.Fatalf("websocket: %d bytes, %v", len(b), err)
		}
	}
	if err := ws.Close(websocket.StatusNormalClosure, ""); err != nil {
		t.Errorf("closing the websocket: %v", err)
	}
}

// TestReachHTTP: HTTP, long bodies, events and WebSockets reach sandboxes with
// and without a network, on all addresses and on loopback alone, through
// published ports and through host names.
func TestReachHTTP(t *testing.T) {
	config, socket := ingressConfig(t)
	d := install(t, config)
	for name, spec := range map[string]struct {
		mode   sandbox.NetworkMode
		listen string
	}{
		"off": {sandbox.NetworkOff, "0.0.0.0:8080"}, "off-loopback": {sandbox.NetworkOff, "127.0.0.1:8080"}, "off-v6": {sandbox.NetworkOff, "[::1]:8080"},
		"open": {sandbox.NetworkOpen, "0.0.0.0:8080"}, "allow": {sandbox.NetworkAllow, "0.0.0.0:8080"}, "open-loopback": {sandbox.NetworkOpen, "127.0.0.1:8080"},
	} {
		t.Run(name, func(t *testing.T) {
			d.create(t, sandbox.Spec{Name: name, Network: sandbox.NetworkPolicy{Mode: spec.mode}})
			d.serve(t, name, "http", spec.listen)
			p := d.publish(t, name, "8080", false)
			speakHTTP(t, browser("tcp", p.Where().String()), "http://"+p.Where().String(), http.Header{})
			token, err := d.NewPortToken(t.Context(), name)
			if err != nil {
				t.Fatal(err)
			}
			host := "http://8080-" + name + "." + ingressDomain
			speakHTTP(t, browser("unix", socket), host, http.Header{"X-Sandbox-Token": {token}})
			if r := fetch(t, browser("unix", socket), "GET", host+"/headers", nil, http.NoBody); r.StatusCode != http.StatusUnauthorized || !strings.Contains(r.body, "token_required") {
				t.Errorf("without the token: %d %s", r.StatusCode, r.body)
			}
		})
	}
}

// TestPortLife: a published port survives stop and start, kill -9 of the
// daemon and pauses, refuses while nothing can answer, and is free again when
// the sandbox is gone.
func TestPortLife(t *testing.T) {
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "life"})
	d.serve(t, "life", "tcp", "127.0.0.1:7000")
	p := d.publish(t, "life", "7000", false)
	where := p.Where().String()
	works := func(when string) {
		t.Helper()
		if got, err := talk(where, "hello"); err != nil || got != "hello" {
			t.Fatalf("%s: %q, %v", when, got, err)
		}
	}
	refuses := func(when string) {
		t.Helper()
		if got, err := talk(where, "hello"); !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
			t.Fatalf("%s: %q, %v; want a reset", when, got, err)
		}
	}
	works("at first")
	if _, err := d.PublishPort(t.Context(), "life", sandbox.PortRequest{HostPort: p.HostPort, Port: 1}); sandbox.CodeOf(err) != "port_taken" {
		t.Errorf("the same port of the host again: %v", err)
	}
	if _, err := d.PublishPort(t.Context(), "life", sandbox.PortRequest{Address: netip.MustParseAddr("203.0.113.9"), Port: 1}); sandbox.CodeOf(err) != "address_not_local" {
		t.Errorf("an address of somebody else: %v", err)
	}
	d.kill()
	if _, err := net.DialTimeout("tcp", where, time.Second); err == nil {
		t.Fatal("the port is listened for without a daemon")
	}
	d.start()
	works("after kill -9")
	if all, err := d.Ports(t.Context(), "life"); err != nil || len(all) != 1 || all[0].ID != p.ID || all[0].Error != "" || all[0].HostPort != p.HostPort {
		t.Errorf("listed after kill -9: %+v, %v", all, err)
	}
	d.stop()
	d.start()
	works("after a restart")
	if _, err := d.Pause(t.Context(), "life"); err != nil {
		t.Fatal(err)
	}
	refuses("paused")
	if _, err := d.Resume(t.Context(), "life"); err != nil {
		t.Fatal(err)
	}
	works("resumed")
	held, err := net.Dial("tcp", where)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	if _, err := d.Stop(t.Context(), "life"); err != nil {
		t.Fatal(err)
	}
	broken(t, held, "a connection into a sandbox that was stopped")
	refuses("stopped")
	if _, err := d.DialPort(t.Context(), "life", 7000); sandbox.CodeOf(err) != "sandbox_stopped" {
		t.Errorf("dial a stopped sandbox: %v", err)
	}
	if _, err := d.Start(t.Context(), "life"); err != nil {
		t.Fatal(err)
	}
	refuses("without the server")
	if _, err := d.DialPort(t.Context(), "life", 7000); sandbox.CodeOf(err) != "port_closed" {
		t.Errorf("dial a closed port: %v", err)
	}
	d.serve(t, "life", "tcp", "127.0.0.1:7000")
	works("started again")
	if held, err = net.Dial("tcp", where); err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	if _, err := d.Remove(t.Context(), "life"); err != nil {
		t.Fatal(err)
	}
	broken(t, held, "a connection into a sandbox that was removed")
	ln, err := net.Listen("tcp", where)
	if err != nil {
		t.Fatalf("the port of a sandbox that is gone: %v", err)
	}
	d.kill() // with the port in somebody else's hands
	ln.Close()
	d.start()
	if all, err := d.Ports(t.Context(), ""); err != nil || len(all) != 0 {
		t.Errorf("ports after all: %+v, %v", all, err)
	}
}

// talk sends words, closes its half and reads what comes back.
func talk(where, words string) (string, error) {
	c, err := net.DialTimeout("tcp", where, 10*time.Second)
	if err != nil {
		return "", err
	}
	defer c.Close()
	return converse(c, words)
}

func converse(c net.Conn, words string) (string, error) {
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		return "", err
	}
	if _, err := io.WriteString(c, words); err != nil {
		return "", err
	}
	if h, ok := c.(interface{ CloseWrite() error }); ok {
		if err := h.CloseWrite(); err != nil && !errors.Is(err, unix.ENOTCONN) { // reset meanwhile, which the reading tells
			return "", err
		}
	}
	b, err := io.ReadAll(c)
	return string(b), err
}

// broken wants a connection to end soon.
func broken(t testing.TB, c net.Conn, what string) {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%s: %v, want its end", what, err)
	}
}

// TestPortTakenMeanwhile: a port somebody else has when the daemon comes back
// is told as such, and had again once it is free.
func TestPortTakenMeanwhile(t *testing.T) {
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "meanwhile"})
	d.serve(t, "meanwhile", "tcp", "127.0.0.1:7000")
	p := d.publish(t, "meanwhile", "7000", false)
	d.kill()
	ln, err := net.Listen("tcp", p.Where().String())
	if err != nil {
		t.Fatal(err)
	}
	d.start()
	if all, err := d.Ports(t.Context(), "meanwhile"); err != nil || len(all) != 1 || !strings.Contains(all[0].Error, "taken") {
		t.Errorf("ports: %+v, %v", all, err)
	}
	ln.Close()
	testenv.Eventually(t, 30*time.Second, "the port is listened for again", func() bool {
		got, err := talk(p.Where().String(), "x")
		return err == nil && got == "x"
	})
}

// TestPortUDP: datagrams find their way in and back, with and without a link,
// on loopback alone, too.
func TestPortUDP(t *testing.T) {
	d := install(t, "")
	for name, mode := range map[string]sandbox.NetworkMode{"off": sandbox.NetworkOff, "open": sandbox.NetworkOpen} {
		d.create(t, sandbox.Spec{Name: name, Network: sandbox.NetworkPolicy{Mode: mode}})
		d.serve(t, name, "udp", "0.0.0.0:5000", "127.0.0.1:5001")
		for _, inner := range []string{"5000/udp", "5001/udp"} {
			p := d.publish(t, name, inner, false)
			for i := range 20 { // clients beside each other
				c, err := net.Dial("udp", p.Where().String())
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				word := fmt.Sprint(name, inner, i)
				buf := make([]byte, 100)
				testenv.Eventually(t, 20*time.Second, "a datagram comes back", func() bool {
					_, _ = io.WriteString(c, word)
					_ = c.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
					n, err := c.Read(buf)
					return err == nil && string(buf[:n]) == word
				})
			}
		}
	}
}

// TestPortForward: the API's own way in, and the command that uses it.
func TestPortForward(t *testing.T) {
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "fwd"})
	d.serve(t, "fwd", "tcp", "127.0.0.1:7000")
	c, err := d.DialPort(t.Context(), "fwd", 7000)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	words := strings.Repeat("there and back. ", 1<<16) // a MiB, and the end of a half
	if got, err := converse(c, words); err != nil || got != words {
		t.Errorf("through the API: %d bytes, %v", len(got), err)
	}
	cmd := exec.Command(program(t, "sandbox"), "--host", d.host(), "port-forward", "fwd", "0:7000")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	where, _, _ := strings.Cut(line, " ")
	for range 3 {
		if got, err := talk(where, words); err != nil || got != words {
			t.Errorf("through port-forward: %d bytes, %v", len(got), err)
		}
	}
	if _, err := d.Remove(t.Context(), "fwd"); err != nil {
		t.Fatal(err)
	}
	if _, err := talk(where, "x"); err == nil {
		t.Error("port-forward leads into a sandbox that is gone")
	}
}

// TestHostNames: which host names lead where, who may use them, and what the
// sandbox sees of it.
func TestHostNames(t *testing.T) {
	config, socket := ingressConfig(t)
	d := install(t, config)
	sb := d.create(t, sandbox.Spec{Name: "dev"})
	d.create(t, sandbox.Spec{Name: "other"})
	d.serve(t, "dev", "http", "127.0.0.1:8080", "127.0.0.1:9090")
	d.publish(t, "dev", "9090", true)
	token, err := d.NewPortToken(t.Context(), "dev")
	if err != nil {
		t.Fatal(err)
	}
	c := browser("unix", socket)
	with := http.Header{"X-Sandbox-Token": {token}}
	for name, tc := range map[string]struct {
		host   string
		header http.Header
		status int
		says   string
	}{
		"by name":                {"8080-dev", with, 200, ""},
		"by id":                  {"8080-" + string(sb.ID), with, 200, ""},
		"in capitals":            {"8080-DEV", with, 200, ""},
		"as a bearer":            {"8080-dev", http.Header{"Authorization": {"Bearer " + token}}, 200, ""},
		"as a cookie":            {"8080-dev", http.Header{"Cookie": {"a=b; sandbox_token=" + token}}, 200, ""},
		"no token":               {"8080-dev", nil, 401, "token_required"},
		"wrong token":            {"8080-dev", http.Header{"X-Sandbox-Token": {token + "x"}}, 401, "token_required"},
		"empty token":            {"8080-dev", http.Header{"X-Sandbox-Token": {""}}, 401, "token_required"},
		"public":                 {"9090-dev", nil, 200, ""},
		"of one without a token": {"8080-other", nil, 401, "token_required"},
		"another's token":        {"8080-other", with, 401, "token_required"},
		"nobody listens":         {"8081-dev", with, 502, "port_closed"},
		"no such sandbox":        {"8080-nobody", with, 401, "token_required"},
		"beginning of an id":     {"8080-" + string(sb.ID)[:8], with, 401, "token_required"},
		"no port":                {"dev", with, 404, "unknown_host"},
		"port 0":                 {"0-dev", with, 404, "unknown_host"},
	} {
		r := fetch(t, c, "GET", "http://"+tc.host+"."+ingressDomain+"/headers", tc.header, http.NoBody)
		if r.StatusCode != tc.status || !strings.Contains(r.body, tc.says) {
			t.Errorf("%s: %d %s, want %d %s", name, r.StatusCode, r.body, tc.status, tc.says)
		}
		if strings.Contains(r.body, token) {
			t.Errorf("%s: the token comes through: %s", name, r.body)
		}
		if tc.status >= 400 && r.Header.Get("Content-Type") != "application/problem+json" {
			t.Errorf("%s: an error of type %q", name, r.Header.Get("Content-Type"))
		}
	}
	if r := fetch(t, c, "GET", "http://other.example/", nil, http.NoBody); r.StatusCode != 404 {
		t.Errorf("a host of somebody else: %d", r.StatusCode)
	}

	// A browser brings the token once, and what it then has is a cookie.
	page := "http://8080-dev." + ingressDomain + "/headers?a=1&sandbox_token=" + token + "&b=2"
	r := fetch(t, c, "GET", page, nil, http.NoBody)
	cookies := r.Cookies()
	if r.StatusCode != http.StatusSeeOther || r.Header.Get("Location") != "/headers?a=1&b=2" || len(cookies) != 1 || !cookies[0].HttpOnly || cookies[0].Domain != "" {
		t.Fatalf("with the token in the URL: %d to %q, cookies %v", r.StatusCode, r.Header.Get("Location"), cookies)
	}
	r = fetch(t, c, "GET", "http://8080-dev."+ingressDomain+r.Header.Get("Location"), http.Header{"Cookie": {"x=y; " + cookies[0].Name + "=" + cookies[0].Value}, "X-Forwarded-For": {"192.0.2.7"}, "Authorization": {"Basic abc"}}, http.NoBody)
	for _, want := range []string{`"url":"/headers?a=1\u0026b=2"`, `"Cookie":["x=y"]`, `"host":"8080-dev.` + ingressDomain + `"`, `"X-Forwarded-For":["192.0.2.7`, `"Authorization":["Basic abc"]`} {
		if !strings.Contains(r.body, want) {
			t.Errorf("the sandbox sees %s, want %s in it", r.body, want)
		}
	}
	if r := fetch(t, c, "GET", "http://8080-dev."+ingressDomain+"//evil.example/?sandbox_token="+token, nil, http.NoBody); r.StatusCode != http.StatusSeeOther || strings.HasPrefix(r.Header.Get("Location"), "//") {
		t.Errorf("redirect to %q", r.Header.Get("Location"))
	}
	if r := fetch(t, c, "GET", "http://8080-dev."+ingressDomain+"/", http.Header{"Accept": {"text/html"}}, http.NoBody); r.StatusCode != 401 || !strings.Contains(r.body, "<h1>") {
		t.Errorf("a page for a browser: %d %s", r.StatusCode, r.body)
	}

	if _, err := d.Stop(t.Context(), "dev"); err != nil {
		t.Fatal(err)
	}
	if r := fetch(t, c, "GET", "http://8080-dev."+ingressDomain+"/headers", with, http.NoBody); r.StatusCode != 503 || !strings.Contains(r.body, "sandbox_stopped") || r.Header.Get("Retry-After") == "" {
		t.Errorf("of a stopped sandbox: %d %s", r.StatusCode, r.body)
	}
	if _, err := d.Start(t.Context(), "dev"); err != nil {
		t.Fatal(err)
	}
	d.kill()
	d.start()
	d.serve(t, "dev", "http", "127.0.0.1:8080")
	if r := fetch(t, c, "GET", "http://8080-dev."+ingressDomain+"/headers", with, http.NoBody); r.StatusCode != 200 {
		t.Errorf("after kill -9: %d %s", r.StatusCode, r.body)
	}
	again, err := d.NewPortToken(t.Context(), "dev")
	if err != nil {
		t.Fatal(err)
	}
	for tok, want := range map[string]int{token: 401, again: 200} {
		if r := fetch(t, c, "GET", "http://8080-dev."+ingressDomain+"/headers", http.Header{"X-Sandbox-Token": {tok}}, http.NoBody); r.StatusCode != want {
			t.Errorf("after a new token was made: %d, want %d", r.StatusCode, want)
		}
	}
	if err := d.RemovePortToken(t.Context(), "dev"); err != nil {
		t.Fatal(err)
	}
	if r := fetch(t, c, "GET", "http://8080-dev."+ingressDomain+"/headers", http.Header{"X-Sandbox-Token": {again}}, http.NoBody); r.StatusCode != 401 {
		t.Errorf("after the token was removed: %d", r.StatusCode)
	}
	if _, err := d.Remove(t.Context(), "dev"); err != nil {
		t.Fatal(err)
	}
	if r := fetch(t, c, "GET", "http://9090-dev."+ingressDomain+"/headers", nil, http.NoBody); r.StatusCode != 401 || !strings.Contains(r.body, "token_required") {
		t.Errorf("of a sandbox that is gone: %d %s", r.StatusCode, r.body)
	}
}

// TestReachLeavesNothing: a thousand connections, and a sandbox removed under
// many, leave the daemon as few descriptors and threads as before.
func TestReachLeavesNothing(t *testing.T) {
	d := install(t, "pool: {size: 0}\n")
	d.create(t, sandbox.Spec{Name: "many"})
	d.create(t, sandbox.Spec{Name: "linked", Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}})
	d.serve(t, "many", "tcp", "127.0.0.1:7000")
	d.serve(t, "many", "stay", "127.0.0.1:7001")
	d.serve(t, "linked", "tcp", "0.0.0.0:7000")
	d.serve(t, "linked", "stay", "0.0.0.0:7001")
	count := func() (files, threads int) {
		for dir, n := range map[string]*int{"fd": &files, "task": &threads} {
			list, err := os.ReadDir(fmt.Sprintf("/proc/%d/%s", d.PID(), dir))
			if err != nil {
				t.Fatal(err)
			}
			*n = len(list)
		}
		return files, threads
	}
	var where, silent []string
	for _, name := range []string{"many", "linked"} {
		where = append(where, d.publish(t, name, "7000", false).Where().String())
		silent = append(silent, d.publish(t, name, "7001", false).Where().String())
	}
	for _, w := range where {
		if got, err := talk(w, "x"); err != nil || got != "x" {
			t.Fatalf("%q, %v", got, err)
		}
	}
	before, threads := count()
	var wg sync.WaitGroup
	for worker := range 20 {
		wg.Go(func() {
			for i := range 50 {
				word := fmt.Sprint(worker, " ", i)
				if got, err := talk(where[i%2], word); err != nil || got != word {
					t.Errorf("connection %s: %q, %v", word, got, err)
				}
			}
		})
	}
	wg.Wait()
	settled := func(what string, most int) {
		t.Helper()
		n := 0
		if !testenv.Within(40*time.Second, func() bool {
			// The pipes splice(2) needs are kept for the next connection until
			// garbage is collected: make some.
			for range 100 {
				if _, err := d.List(t.Context(), sandbox.Filter{All: true}); err != nil {
					t.Fatal(err)
				}
			}
			n, _ = count()
			return n <= most
		}) {
			t.Errorf("%s: %d descriptors, %d before", what, n, before)
		}
	}
	settled("after 1000 connections", before)
	if _, now := count(); now > threads+40 {
		t.Errorf("after 1000 connections: %d threads, %d before", now, threads)
	}
	var held []net.Conn
	for i := range 400 {
		c, err := net.Dial("tcp", silent[i%2])
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, "hello"); err != nil {
			t.Fatal(err)
		}
		held = append(held, c)
	}
	if !testenv.Within(20*time.Second, func() bool { n, _ := count(); return n >= before+2*len(held) }) {
		n, _ := count()
		t.Fatalf("%d descriptors with %d connections: the count counts nothing", n, len(held))
	}
	for _, name := range []string{"many", "linked"} {
		if _, err := d.Remove(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range held {
		broken(t, c, "a connection into a sandbox that was removed")
	}
	settled("after the sandboxes are gone", before)
}

// TestReachIsCounted: bytes that no counter of the kernel's sees are counted
// by the daemon, once, also over kill -9.
func TestReachIsCounted(t *testing.T) {
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "off"})
	d.create(t, sandbox.Spec{Name: "open", Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}})
	const n = 4 << 20
	words := strings.Repeat("x", n)
	for name, listen := range map[string]string{"off": "127.0.0.1:7000", "open": "0.0.0.0:7000"} {
		d.serve(t, name, "tcp", listen)
		w := d.publish(t, name, "7000", false).Where().String()
		usage := func() sandbox.Usage {
			u, err := d.Usage(t.Context(), name)
			if err != nil {
				t.Fatal(err)
			}
			return u
		}
		near := func(when string, rounds float64) {
			t.Helper()
			u := usage()
			for what, got := range map[string]uint64{"in": u.NetRxBytes, "out": u.NetTxBytes} {
				if low, high := rounds*n, rounds*n*1.1; float64(got) < low || float64(got) > high {
					t.Errorf("%s, %s: %d bytes %s, want %.0f to %.0f", name, when, got, what, low, high)
				}
			}
		}
		carry := func() {
			t.Helper()
			if got, err := talk(w, words); err != nil || len(got) != n {
				t.Fatalf("%d bytes, %v", len(got), err)
			}
		}
		carry()
		near("at first", 1)
		<-time.After(5 * time.Second) // what was carried is written down each second
		d.kill()
		d.start()
		near("after kill -9", 1)
		carry()
		near("and once more", 2)
		if _, err := d.Stop(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		near("stopped", 2)
		d.kill()
		d.start()
		near("stopped and killed", 2)
		if _, err := d.Start(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		d.serve(t, name, "tcp", listen)
		carry()
		near("in the next shell", 3)
		gone, err := d.Remove(t.Context(), name)
		if err != nil || gone.Usage.NetRxBytes < 3*n || float64(gone.Usage.NetRxBytes) > 3.3*n {
			t.Errorf("%s, at the end: %d bytes in, %v", name, gone.Usage.NetRxBytes, err)
		}
	}
}

// TestPublishedPortIsNotForSandboxes: what the host publishes, for everybody,
// is for everybody outside: other sandboxes reach neither the host nor each
// other through it.
func TestPublishedPortIsNotForSandboxes(t *testing.T) {
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "server"})
	d.serve(t, "server", "greet", "127.0.0.1:7000")
	open := d.create(t, sandbox.Spec{Name: "open", Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}})
	bin := probeBinary(t)
	d.give(t, "open")
	p := d.publish(t, "server", "0.0.0.0:0:7000", false)
	gateway := open.Address.Prev()
	for !strings.HasSuffix(gateway.String(), ".0.1") { // the pool's first
		gateway = gateway.Prev()
	}
	at := "tcp/" + netip.AddrPortFrom(gateway, p.HostPort).String()
	if got := outside(t, bin, "dial", at)[at]; got != "ok" { // the control
		t.Fatalf("from the host, to %s: %s", at, got)
	}
	if got := d.inside(t, "open", "root", "/opt/probe", "dial", at)[at]; got == "ok" {
		t.Errorf("a sandbox reaches %s", at)
	}
}
