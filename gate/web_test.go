package gate

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

func TestWebByName(t *testing.T) {
	w := newWorld(t, allow("example.com"))
	srv := newSeen(t, false, hello200)
	w.serve("example.com", webAddr, 80, srv.addr())
	w.serve("evil.net", otherAddr, 80, srv.addr())
	for _, host := range []string{"example.com", "EXAMPLE.com.", "example.com:80"} {
		if a := w.get(host, "/x?q=1"); a.StatusCode != 200 || a.body != "hello example.com" {
			t.Errorf("%s: %d %s", host, a.StatusCode, a.body)
		}
	}
	if e := w.last(); !e.Permitted || e.Host != "example.com" || e.Path != "/x" || e.Rule != "example.com" || e.Sandbox != "sbaaaaaaaaaaaa" || e.Kind != KindHTTP {
		t.Errorf("event %+v", e)
	}
	n, dials := len(srv.requests()), len(w.dialed())
	a := w.get("evil.net", "/secret?token=1")
	if a.StatusCode != 403 || a.code() != codeDenied || !strings.Contains(a.body, "allow evil.net:80") || a.Header.Get("Content-Type") != "application/problem+json" {
		t.Errorf("denied: %d %s", a.StatusCode, a.body)
	}
	if e := w.last(); e.Permitted || e.Host != "evil.net" || e.Code != codeDenied || e.Path != "/secret" || strings.Contains(fmt.Sprintf("%+v", e), "token") {
		t.Errorf("event %+v", e)
	}
	// Which address was dialed is of no consequence: the name decides.
	for _, host := range []string{"93.184.216.34", "127.0.0.1", "[::1]", "2130706433", "localhost", "example.com@evil.net", "evil.net#example.com", "", "gateway"} {
		if a := w.get(host, "/"); a.StatusCode != 403 && a.StatusCode != 400 {
			t.Errorf("host %q: %d", host, a.StatusCode)
		}
	}
	if len(srv.requests()) != n || len(w.dialed()) != dials {
		t.Errorf("%d requests and %d dials came of refused ones", len(srv.requests())-n, len(w.dialed())-dials)
	}
	// The control: with a rule it passes.
	w.policy(func(p *sandbox.NetworkPolicy) { p.Allow = append(p.Allow, "evil.net:80") })
	if a := w.get("evil.net", "/"); a.StatusCode != 200 {
		t.Errorf("permitted now: %d %s", a.StatusCode, a.body)
	}
}

// TestWebRebinding: a permitted name whose addresses are not.
func TestWebRebinding(t *testing.T) {
	w := newWorld(t, allow("*.example.com", "93.184.216.36"))
	srv := newSeen(t, false, hello200)
	for host, addr := range map[string]string{
		"loop.example.com": "127.0.0.1", "meta.example.com": "169.254.169.254", "box.example.com": "10.213.0.7", "zero.example.com": "0.0.0.0",
		"inner.example.com": "10.9.8.7", "lan.example.com": "192.168.1.1", "six.example.com": "::ffff:93.184.216.34", "v6.example.com": "2606:2800:220:1::1",
	} {
		a := netip.MustParseAddr(addr)
		w.serve(host, a, 80, srv.addr())
		if got := w.get(host, "/"); got.StatusCode != 403 {
			t.Errorf("%s at %s: %d %s", host, addr, got.StatusCode, got.body)
		}
	}
	if len(w.dialed()) != 0 {
		t.Errorf("dialed %v", w.dialed())
	}
	// An admitted range needs a rule that names it; then it passes.
	w.policy(func(p *sandbox.NetworkPolicy) { p.Allow = append(p.Allow, "10.9.8.0/24") })
	if got := w.get("inner.example.com", "/"); got.StatusCode != 200 {
		t.Errorf("admitted and named: %d %s", got.StatusCode, got.body)
	}
	// The address that was dialed is used where it is one of the name's ...
	w.set(func() { w.names["two.example.com"] = []netip.Addr{otherAddr, webAddr} })
	w.serve("www.example.com", webAddr, 80, srv.addr())
	if got := w.get("two.example.com", "/"); got.StatusCode != 200 || w.dialed()[len(w.dialed())-1] != netip.AddrPortFrom(webAddr, 80) {
		t.Errorf("%d, dialed %v", got.StatusCode, w.dialed())
	}
	// ... and one that does not answer is passed over.
	w.set(func() {
		w.names["two.example.com"] = []netip.Addr{otherAddr, netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("93.184.216.36")}
	})
	w.set(func() { w.routes[netip.MustParseAddrPort("93.184.216.36:80")] = srv.addr() })
	if got := w.get("two.example.com", "/"); got.StatusCode != 200 {
		t.Errorf("second address: %d %s", got.StatusCode, got.body)
	}
}

// TestWebEachRequestAlone: a connection that was good for one request is not
// therefore good for the next.
func TestWebEachRequestAlone(t *testing.T) {
	p := allow("example.com:80")
	p.HTTP = &sandbox.HTTPGate{Rules: []string{"GET example.com/api/*"}}
	w := newWorld(t, p)
	srv := newSeen(t, false, hello200)
	w.serve("example.com", webAddr, 80, srv.addr())
	one := func(method, host, path string) string {
		return method + " " + path + " HTTP/1.1\r\nHost: " + host + "\r\nContent-Length: 0\r\n\r\n"
	}
	got := w.rawN(one("GET", "example.com", "/api/a")+one("GET", "evil.net", "/api/a")+one("DELETE", "example.com", "/api/a")+
		one("GET", "example.com", "/admin")+one("GET", "example.com", "/api/%2e%2e/admin")+one("GET", "example.com", "/api//admin")+one("GET", "example.com", "/api/z"), 7)
	var codes []string
	for _, a := range got {
		codes = append(codes, fmt.Sprint(a.StatusCode))
	}
	if s := strings.Join(codes, " "); s != "200 403 403 403 400 400 200" {
		t.Errorf("answers %s", s)
	}
	var paths []string
	for _, r := range srv.requests() {
		paths = append(paths, r.Method+" "+r.URL.Path)
	}
	if s := strings.Join(paths, ", "); s != "GET /api/a, GET /api/z" {
		t.Errorf("the server saw %s", s)
	}
}

// TestWebSmuggling sends what proxies and servers read differently. What
// reaches the server must be what was judged, as many times as it was.
func TestWebSmuggling(t *testing.T) {
	p := allow("example.com:80")
	p.HTTP = &sandbox.HTTPGate{Rules: []string{"GET,POST example.com/ok"}}
	const head = "POST /ok HTTP/1.1\r\nHost: example.com\r\n"
	const anyNumber = -1 // a body may break off after its request was sent on
	const hidden = "GET /admin HTTP/1.1\r\nHost: example.com\r\nX: "
	for name, tc := range map[string]struct {
		request string
		served  int // requests the server may see, all of them /ok
	}{
		"plain":                       {head + "Content-Length: 2\r\n\r\nhi", 1},
		"CL.TE":                       {head + "Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + hidden, 1},
		"TE.CL":                       {head + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n" + fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(hidden), hidden), 1},
		"two lengths":                 {head + "Content-Length: 0\r\nContent-Length: 40\r\n\r\n" + hidden, 0},
		"length list":                 {head + "Content-Length: 0, 40\r\n\r\n" + hidden, 0},
		"signed length":               {head + "Content-Length: +2\r\n\r\nhi", 0},
		"TE twice":                    {head + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n", 0},
		"TE obscured":                 {head + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + hidden, 0},
		"TE space before colon":       {head + "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 0},
		"chunk size overflow":         {head + "Transfer-Encoding: chunked\r\n\r\nffffffffffffffff1\r\n" + hidden, anyNumber},
		"two hosts":                   {"GET /ok HTTP/1.1\r\nHost: example.com\r\nHost: evil.net\r\n\r\n", 0},
		"host in the line wins":       {"GET http://example.com/ok HTTP/1.1\r\nHost: evil.net\r\n\r\n", 1},
		"other host in the line":      {"GET http://evil.net/ok HTTP/1.1\r\nHost: example.com\r\n\r\n", 0},
		"user in the line":            {"GET http://example.com@evil.net/ok HTTP/1.1\r\nHost: example.com\r\n\r\n", 0},
		"https in the line":           {"GET https://example.com/ok HTTP/1.1\r\nHost: example.com\r\n\r\n", 0},
		"opaque target":               {"GET http:example.com/ok HTTP/1.1\r\nHost: example.com\r\n\r\n", 0},
		"no host":                     {"GET /ok HTTP/1.1\r\n\r\n", 0},
		"old without host":            {"GET /ok HTTP/1.0\r\n\r\n", 0},
		"old with host":               {"GET /ok HTTP/1.0\r\nHost: example.com\r\n\r\n", 1},
		"HTTP/2 preface":              {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 0},
		"HTTP/0.9":                    {"GET /ok\r\n", 0},
		"space in the path":           {"GET /ok HTTP/1.1 /admin HTTP/1.1\r\nHost: example.com\r\n\r\n", 0},
		"NUL in a header":             {"GET /ok HTTP/1.1\r\nHost: example.com\r\nX: a\x00b\r\n\r\n", 0},
		"upgrade to HTTP/2":           {"GET /ok HTTP/1.1\r\nHost: example.com\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n", 1},
		"method override":             {"GET /ok HTTP/1.1\r\nHost: example.com\r\nX-HTTP-Method-Override: DELETE\r\n\r\n", 0},
		"method override underscores": {"GET /ok HTTP/1.1\r\nHost: example.com\r\nX_Original_URL: /admin\r\n\r\n", 0},
		"connect to itself":           {"CONNECT example.com:80 HTTP/1.1\r\nHost: example.com:80\r\n\r\n" + hidden, 0},
		"LF only":                     {"GET /ok HTTP/1.1\nHost: example.com\n\n", 1},
		"folded header":               {"GET /ok HTTP/1.1\r\nHost: example.com\r\nX: a\r\n Content-Length: 40\r\n\r\n" + hidden, 1},
		"folded host":                 {"GET /ok HTTP/1.1\r\nHost:\r\n evil.net\r\n\r\n", 0},
		"CR in a header":              {"GET /ok HTTP/1.1\r\nHost: example.com\r\nX: a\rHost: evil.net\r\n\r\n", 0},
		"pipelined":                   {"GET /ok HTTP/1.1\r\nHost: example.com\r\n\r\nGET /admin HTTP/1.1\r\nHost: example.com\r\n\r\nGET /ok HTTP/1.1\r\nHost: example.com\r\n\r\n", 2},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, p)
			srv := newSeen(t, false, hello200)
			w.serve("example.com", webAddr, 80, srv.addr())
			w.serve("evil.net", otherAddr, 80, srv.addr())
			answers := max(1, tc.served)
			if name == "pipelined" {
				answers++
			}
			w.rawN(tc.request, answers)
			got := srv.requests()
			for _, r := range got {
				if r.URL.Path != "/ok" || r.Host != "example.com" {
					t.Errorf("the server saw %s %s%s", r.Method, r.Host, r.URL.Path)
				}
			}
			if len(got) != tc.served && tc.served != anyNumber {
				t.Errorf("the server saw %d requests, want %d", len(got), tc.served)
			}
			srv.mu.Lock()
			wire := srv.wire.String()
			srv.mu.Unlock()
			for _, word := range []string{"\r\n ", "H2c", "h2c", "HTTP2-Settings"} {
				if strings.Contains(wire, word) {
					t.Errorf("%q was sent on: %q", word, wire)
				}
			}
			if lower := strings.ToLower(wire); strings.Contains(lower, "content-length: ") && strings.Contains(lower, "transfer-encoding") {
				t.Errorf("sent on with two lengths: %q", wire)
			}
		})
	}
}

// TestWebBodies: what HTTP can carry arrives, both ways.
func TestWebBodies(t *testing.T) {
	w := newWorld(t, allow("example.com"))
	var trailer string
	srv := newSeen(t, false, func(rw http.ResponseWriter, r *http.Request) {
		trailer = r.Trailer.Get("X-Sum")
		rw.Header().Set("Trailer", "X-End")
		rw.Header().Add("Set-Cookie", "a=1")
		rw.Header().Add("Set-Cookie", "b=2")
		_, _ = io.WriteString(rw, "body")
		rw.Header().Set("X-End", "done")
	})
	w.serve("example.com", webAddr, 80, srv.addr())
	got := w.rawN("POST /up;v=1//x%2Fy?a;b&c=%zz HTTP/1.1\r\nHost: example.com\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\nX-Forwarded-For: 1.2.3.4\r\nExpect: 100-continue\r\n\r\n3\r\nabc\r\n0\r\nX-Sum: 7\r\n\r\n", 1)
	for len(got) > 0 && got[0].StatusCode == 100 {
		got = got[1:]
	}
	if len(got) != 1 || got[0].StatusCode != 200 || got[0].body != "body" || got[0].Trailer.Get("X-End") != "done" || len(got[0].Header["Set-Cookie"]) != 2 {
		t.Fatalf("answer %+v", got)
	}
	r := srv.requests()[0]
	if srv.body[0] != "abc" || trailer != "7" || r.RequestURI != "/up;v=1//x%2Fy?a;b&c=%zz" || r.Header.Get("X-Forwarded-For") != "" || r.Header.Get("User-Agent") != "" {
		t.Errorf("the server saw %s %q, trailer %q, %v", r.RequestURI, srv.body, trailer, r.Header)
	}
	if a := w.raw("OPTIONS * HTTP/1.1\r\nHost: example.com\r\nConnection: close\r\n\r\n"); len(a) != 1 || a[0].StatusCode != 200 {
		t.Errorf("OPTIONS *: %+v", a)
	}
}

// TestWebStreams: events arrive one by one, and a policy that no longer
// permits them ends them.
func TestWebStreams(t *testing.T) {
	w := newWorld(t, allow("example.com"))
	next := make(chan string)
	srv := newSeen(t, false, func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Type", "text/event-stream")
		for {
			select {
			case s := <-next:
				fmt.Fprintf(rw, "data: %s\n\n", s)
				_ = http.NewResponseController(rw).Flush()
			case <-r.Context().Done():
				return
			}
		}
	})
	w.serve("example.com", webAddr, 80, srv.addr())
	c := w.connect(netip.AddrPortFrom(webAddr, 80))
	fmt.Fprint(c, "GET /events HTTP/1.1\r\nHost: example.com\r\n\r\n")
	r := bufio.NewReader(c)
	for _, want := range []string{"one", "two"} {
		next <- want
		for {
			line, err := r.ReadString('\n')
			if err != nil {
				t.Fatalf("waiting for %s: %v", want, err)
			}
			if strings.Contains(line, "data: "+want) {
				break
			}
		}
	}
	w.policy(func(p *sandbox.NetworkPolicy) { p.Allow = append(p.Allow, "other.net") })
	next <- "three" // still permitted, so it lives
	if line, err := r.ReadString('\n'); err != nil {
		t.Fatalf("after a change that does not matter: %q, %v", line, err)
	}
	begin := time.Now()
	w.policy(func(p *sandbox.NetworkPolicy) { p.Deny = []string{"example.com"} })
	if _, err := io.Copy(io.Discard, r); err == nil {
		t.Error("the stream ended in peace")
	}
	if d := time.Since(begin); d > 5*time.Second {
		t.Errorf("cut after %s", d)
	} else {
		t.Logf("cut after %s", d)
	}
}

// TestWebSocket: after its request is judged, bytes pass both ways.
func TestWebSocket(t *testing.T) {
	w := newWorld(t, allow("example.com"))
	srv := newSeen(t, false, func(rw http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "websocket" || r.Header.Get("Connection") != "Upgrade" {
			rw.WriteHeader(http.StatusBadRequest)
			return
		}
		c, buf, err := http.NewResponseController(rw).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		fmt.Fprint(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		_, _ = io.Copy(c, buf)
	})
	w.serve("example.com", webAddr, 80, srv.addr())
	const ask = "GET /ws HTTP/1.1\r\nHost: example.com\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n"
	c := w.connect(netip.AddrPortFrom(webAddr, 80))
	fmt.Fprint(c, ask)
	r := bufio.NewReader(c)
	resp, err := http.ReadResponse(r, nil)
	if err != nil || resp.StatusCode != 101 {
		t.Fatalf("%+v, %v", resp, err)
	}
	for _, msg := range []string{"ping\n", "GET /x HTTP/1.1\n"} {
		fmt.Fprint(c, msg)
		if got, err := r.ReadString('\n'); got != msg {
			t.Errorf("echo %q, %v", got, err)
		}
	}
	w.policy(func(p *sandbox.NetworkPolicy) { p.Allow = []string{"other.net"} })
	if got, err := r.ReadString('\n'); err == nil {
		t.Errorf("read %q through a forbidden socket", got)
	}
	testenv.Eventually(t, 10*time.Second, "the place is given back", func() bool { return w.gate.Stats().Connections == 0 })
}

// TestWebConnect: the gate as the proxy of programs that were told of one.
func TestWebConnect(t *testing.T) {
	w := newWorld(t, allow("example.com:443", "93.184.216.35:22"))
	srv := newSeen(t, true, hello200)
	w.serve("example.com", webAddr, 443, srv.addr())
	w.set(func() { w.routes[netip.MustParseAddrPort("93.184.216.35:22")] = srv.addr() })
	connect := func(to string) (net.Conn, *http.Response) {
		t.Helper()
		c := w.connect(netip.MustParseAddrPort("10.213.0.1:80"))
		fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", to, to)
		resp, err := http.ReadResponse(bufio.NewReader(c), &http.Request{Method: http.MethodConnect})
		if err != nil {
			t.Fatal(err)
		}
		return c, resp
	}
	client := &http.Client{Transport: &http.Transport{
		TLSClientConfig: tlsConfig(srv, "example.com"),
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			c, resp := connect("example.com:443")
			if resp.StatusCode != 200 {
				return nil, fmt.Errorf("status %d", resp.StatusCode)
			}
			return c, nil
		},
	}}
	resp, err := client.Get("https://example.com/")
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("through the proxy: %v", err)
	}
	_ = resp.Body.Close()
	for _, to := range []string{"evil.net:443", "example.com:8443", "example.com:80", "example.com", "127.0.0.1:443", "93.184.216.35:443", "10.213.0.9:443"} {
		if _, resp := connect(to); resp.StatusCode != 403 && resp.StatusCode != 400 {
			t.Errorf("CONNECT %s: %d", to, resp.StatusCode)
		}
	}
	if _, resp := connect("93.184.216.35:22"); resp.StatusCode != 200 {
		t.Errorf("by address: %d", resp.StatusCode)
	}
	// Inside, another name than the one that was asked for.
	n := len(srv.requests())
	c, resp := connect("example.com:443")
	if resp.StatusCode != 200 {
		t.Fatal(resp.StatusCode)
	}
	if err := tlsClient(c, "evil.net").Handshake(); err == nil || !strings.Contains(err.Error(), "access denied") {
		t.Errorf("another name inside: %v", err)
	}
	if e := w.last(); e.Permitted || e.Kind != KindConnect || len(srv.requests()) != n {
		t.Errorf("%+v", e)
	}
}

func TestWebBounds(t *testing.T) {
	w := newWorld(t, allow("example.com"))
	srv := newSeen(t, false, hello200)
	w.serve("example.com", webAddr, 80, srv.addr())
	if a := w.raw("GET / HTTP/1.1\r\nHost: example.com\r\nX: " + strings.Repeat("a", 2*maxHeader) + "\r\n\r\n"); len(a) != 1 || a[0].StatusCode != 431 {
		t.Errorf("long header: %+v", a)
	}
	if a := w.raw("GET / HTTP/1.1\r\nHost: example.com\r\nX: " + strings.Repeat("a", maxHeader/2) + "\r\n\r\n"); len(a) != 1 || a[0].StatusCode != 200 {
		t.Errorf("header within the bound: %+v", a)
	}
	testenv.Eventually(t, 10*time.Second, "no connection is left", func() bool { return w.gate.Stats().Connections == 0 })
	var open []*net.TCPConn
	for range maxConnsSandbox {
		open = append(open, w.connect(netip.AddrPortFrom(webAddr, 80)))
	}
	testenv.Eventually(t, 10*time.Second, "all are in", func() bool { return w.gate.Stats().Connections == maxConnsSandbox })
	if over, err := w.tryConnect(netip.AddrPortFrom(webAddr, 80)); err == nil {
		if n, err := over.Read(make([]byte, 1)); err == nil {
			t.Errorf("one too many read %d bytes", n)
		}
	}
	if got := w.gate.Stats(); got.Crowded != 1 || w.last().Code != "gate_crowded" {
		t.Errorf("%+v %+v", got, w.last())
	}
	_ = open[0].Close()
	testenv.Eventually(t, 10*time.Second, "there is room again", func() bool { return w.gate.Stats().Connections < maxConnsSandbox })
	if a := w.get("example.com", "/"); a.StatusCode != 200 {
		t.Errorf("with room again: %d", a.StatusCode)
	}
}

// TestWebStrangers: connections nothing led here.
func TestWebStrangers(t *testing.T) {
	w := newWorld(t, allow("example.com"))
	srv := newSeen(t, false, hello200)
	w.serve("example.com", webAddr, 80, srv.addr())
	ask := "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n"
	read := func(origin netip.AddrPort) bool {
		c, err := w.tryConnect(origin)
		if err != nil {
			return false
		}
		fmt.Fprint(c, ask)
		n, _ := c.Read(make([]byte, 1))
		return n == 1
	}
	origin := netip.AddrPortFrom(webAddr, 80)
	if !read(origin) {
		t.Error("the control got no answer")
	}
	if read(w.gate.local()) {
		t.Error("a connection to the gate's own port was answered")
	}
	w.set(func() { w.gone = true })
	if read(origin) {
		t.Error("an address of nobody's was answered")
	}
	w.set(func() { w.gone = false; w.tenant.Policy.HTTP = nil })
	if read(origin) {
		t.Error("a sandbox without a gate was answered")
	}
}

// TestWebNextTenant: an address that changes hands keeps no connection.
func TestWebNextTenant(t *testing.T) {
	w := newWorld(t, allow("example.com"))
	srv := newSeen(t, false, hello200)
	w.serve("example.com", webAddr, 80, srv.addr())
	c := w.connect(netip.AddrPortFrom(webAddr, 80))
	fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n")
	r := bufio.NewReader(c)
	if resp, err := http.ReadResponse(r, nil); err != nil || resp.StatusCode != 200 {
		t.Fatal(resp, err)
	} else if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		t.Fatal(err)
	}
	w.set(func() { w.tenant.ID = "sbbbbbbbbbbbbb" })
	if n, err := r.ReadByte(); err == nil {
		t.Errorf("read %q for the next tenant", n)
	}
}

// TestCrowd fills the gate's book: who holds little gets in where who holds
// much does not.
func TestCrowd(t *testing.T) {
	s := newServer(Config{})
	in := func(id sandbox.ID) bool { return s.enter(&conn{server: s, id: id}) == "" }
	s.sweeping = true // there is nothing to look after
	entered := 0
	for i := range maxConns {
		if in(sandbox.ID(fmt.Sprint("heavy", i%32))) {
			entered++
		}
	}
	if entered != maxConns {
		t.Fatalf("%d entered of %d", entered, maxConns)
	}
	if in("heavy1") {
		t.Error("one who holds many got one more")
	}
	for i := range maxConnsFew {
		if !in("light") {
			t.Errorf("one who holds %d did not get another", i)
		}
	}
	if in("light") {
		t.Errorf("one who holds %d got one more", maxConnsFew)
	}
	for i := 0; len(s.open) < maxConnsHard; i++ {
		if !in(sandbox.ID(fmt.Sprint("new", i))) {
			t.Fatalf("%d in, and no place", len(s.open))
		}
	}
	if in("last") {
		t.Error("there is no end")
	}
}

// TestWebForwardedHeaders: servers behind proxies take client, host, path and
// method from such headers; the sandbox has no proxy's word.
func TestWebForwardedHeaders(t *testing.T) {
	w := newWorld(t, allow("example.com"))
	srv := newSeen(t, false, hello200)
	w.serve("example.com", webAddr, 80, srv.addr())
	names := []string{
		"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Port", "X-Forwarded-Prefix",
		"X-Forwarded-Server", "X-Forwarded-Uri", "X-Forwarded-Method", "X_Forwarded_Host", "x-forwarded-path",
	}
	request := "GET / HTTP/1.1\r\nHost: example.com\r\nX-Forward: control\r\n"
	for _, name := range names {
		request += name + ": evil\r\n"
	}
	if got := w.raw(request + "\r\n"); len(got) != 1 || got[0].StatusCode != http.StatusOK {
		t.Fatalf("%+v", got)
	}
	sent := srv.requests()[0].Header
	for _, name := range names {
		if v := sent[http.CanonicalHeaderKey(name)]; v != nil {
			t.Errorf("%s is sent on: %v", name, v)
		}
	}
	if sent.Get("X-Forward") != "control" {
		t.Errorf("others are lost: %v", sent)
	}
}

// TestWebNewFlows: the gate makes no more connections a second for a sandbox
// than the sandbox may make; one connection to the gate is no way around that.
func TestWebNewFlows(t *testing.T) {
	p := allow("*.example.com:80")
	p.Limits.ConnectionsPerSecond = 1
	w := newWorld(t, p)
	srv := newSeen(t, false, hello200)
	const hosts = 20
	for i := range hosts {
		w.serve(fmt.Sprintf("h%d.example.com", i), webAddr, 80, srv.addr())
	}
	all := func() (codes map[int]int, dials int) {
		before := len(w.dialed())
		answers := make(chan answer, hosts)
		var asking sync.WaitGroup
		for i := range hosts {
			asking.Go(func() { answers <- w.get(fmt.Sprintf("h%d.example.com", i), "/") })
		}
		asking.Wait()
		close(answers)
		codes = map[int]int{}
		for a := range answers {
			codes[a.StatusCode]++
			if a.StatusCode == http.StatusTooManyRequests && (a.code() != codeLimit || a.Header.Get("Retry-After") == "") {
				t.Errorf("refused with %s, %v", a.body, a.Header)
			}
		}
		return codes, len(w.dialed()) - before
	}
	codes, n := all()
	if n < 1 || n > hosts/2 || codes[http.StatusTooManyRequests] != hosts-n || codes[http.StatusOK] != n {
		t.Errorf("%d connections, answers %v", n, codes)
	}
	// The control: without a limit all of them pass.
	w.policy(func(p *sandbox.NetworkPolicy) { p.Limits.ConnectionsPerSecond = 0 })
	if codes, n := all(); n != hosts || codes[http.StatusOK] != hosts {
		t.Errorf("%d connections without a limit, answers %v", n, codes)
	}
}
