package gate

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

const theSecret = "Bearer s3cr3t-value-of-the-daemon"

func injectWorld(t *testing.T, c ...sandbox.Credential) *world {
	p := allow("example.com", "plain.net", "redirect.net")
	p.HTTP = &sandbox.HTTPGate{Inject: c}
	w := newWorld(t, p)
	w.values["key"], w.secrets["key"] = theSecret, sandbox.Secret{Name: "key"}
	return w
}

func TestInject(t *testing.T) {
	w := injectWorld(t, sandbox.Credential{Host: "example.com", Header: "authorization", Secret: "key"})
	srv := newSeen(t, true, func(rw http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/moved":
			http.Redirect(rw, r, "https://example.com/api?x=1", http.StatusFound)
		case "/away":
			http.Redirect(rw, r, "https://elsewhere.net/", http.StatusFound)
		default:
			hello200(rw, r)
		}
	})
	plain := newSeen(t, false, hello200)
	w.gate.cfg.Roots = roots(srv)
	w.serve("example.com", webAddr, 443, srv.addr())
	w.serve("plain.net", otherAddr, 80, plain.addr())
	got := w.raw("GET /api HTTP/1.1\r\nHost: example.com\r\nAuthorization: mine\r\nauthorization: mine too\r\nConnection: close, Authorization\r\n\r\n")
	if len(got) != 1 || got[0].StatusCode != 200 || got[0].body != "hello example.com" {
		t.Fatalf("%+v", got)
	}
	r := srv.requests()[0]
	if v := r.Header["Authorization"]; len(v) != 1 || v[0] != theSecret || r.TLS == nil {
		t.Errorf("the server saw %v", r.Header)
	}
	if e := w.last(); !e.Permitted || e.Port != 443 || len(e.Secrets) != 1 || e.Secrets[0] != "key" {
		t.Errorf("event %+v", e)
	}
	// Another host gets what the sandbox sends, and nothing else.
	if a := w.raw("GET / HTTP/1.1\r\nHost: plain.net\r\nAuthorization: mine\r\nConnection: close\r\n\r\n"); len(a) != 1 || a[0].StatusCode != 200 {
		t.Fatalf("%+v", a)
	}
	if v := plain.requests()[0].Header["Authorization"]; len(v) != 1 || v[0] != "mine" {
		t.Errorf("another host saw %v", v)
	}
	// Redirects are the client's to follow: to the same host through the gate.
	if a := w.get("example.com", "/moved"); a.StatusCode != 302 || a.Header.Get("Location") != "http://example.com/api?x=1" {
		t.Errorf("moved: %d %s", a.StatusCode, a.Header.Get("Location"))
	}
	if a := w.get("example.com", "/away"); a.StatusCode != 302 || a.Header.Get("Location") != "https://elsewhere.net/" {
		t.Errorf("away: %d %s", a.StatusCode, a.Header.Get("Location"))
	}
	if n := len(srv.requests()); n != 3 {
		t.Errorf("%d requests", n)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if strings.Contains(fmt.Sprintf("%+v", w.events), "s3cr3t") {
		t.Error("the secret is in an event")
	}
}

// TestInjectNowhereElse: without a trusted certificate, a secret, a name or
// the right host, nothing is sent.
func TestInjectNowhereElse(t *testing.T) {
	w := injectWorld(t, sandbox.Credential{Host: "example.com", Header: "Authorization", Secret: "key"})
	srv := newSeen(t, true, hello200)
	w.serve("example.com", webAddr, 443, srv.addr())
	refused := func(why string, status int, code string) {
		t.Helper()
		a := w.get("example.com", "/")
		if a.StatusCode != status || a.code() != code || strings.Contains(a.body, "s3cr3t") {
			t.Errorf("%s: %d %s", why, a.StatusCode, a.body)
		}
		if n := len(srv.requests()); n != 0 {
			t.Errorf("%s: the server saw %d requests", why, n)
		}
	}
	refused("unknown authority", 502, codeUpstream)
	w.gate.cfg.Roots = roots(srv)
	w.set(func() { delete(w.values, "key") })
	refused("no such secret", 502, codeSecret)
	w.set(func() { w.values["key"] = "a\nHost: evil.net" })
	refused("line end in the secret", 502, codeSecret)
	w.set(func() { w.values["key"], w.secrets["key"] = theSecret, sandbox.Secret{Hosts: []string{"other.net"}} })
	refused("a secret for others", 502, codeSecret)
	w.set(func() { w.secrets["key"] = sandbox.Secret{Hosts: []string{"example.com"}} })
	w.policy(func(p *sandbox.NetworkPolicy) { p.Allow = []string{"93.184.216.34"} })
	refused("by address only", 403, codeDenied)
	w.policy(func(p *sandbox.NetworkPolicy) { p.Allow = []string{"example.com"} })
	if a := w.get("example.com", "/"); a.StatusCode != 200 || srv.requests()[0].Header.Get("Authorization") != theSecret {
		t.Errorf("the control: %d %s", a.StatusCode, a.body)
	}
}

func TestInjectPlain(t *testing.T) {
	w := injectWorld(t, sandbox.Credential{Host: "plain.net", Header: "X-Api-Key", Secret: "key", Plain: true})
	srv := newSeen(t, false, hello200)
	w.serve("plain.net", otherAddr, 80, srv.addr())
	a := w.raw("GET / HTTP/1.1\r\nHost: plain.net\r\nX_Api_Key: mine\r\nConnection: close\r\n\r\n")
	if len(a) != 1 || a[0].StatusCode != 200 {
		t.Fatalf("%+v", a)
	}
	h := srv.requests()[0].Header
	if h.Get("X-Api-Key") != theSecret || len(h["X_api_key"]) != 0 || strings.Contains(fmt.Sprint(h), "mine") {
		t.Errorf("the server saw %v", h)
	}
}

// TestInjectKeepsNoConnection: what an earlier policy connected to gets no
// secret of a later one.
func TestInjectKeepsNoConnection(t *testing.T) {
	w := injectWorld(t)
	evil, good := newSeen(t, false, hello200), newSeen(t, false, hello200)
	w.policy(func(p *sandbox.NetworkPolicy) { p.Allow = []string{"93.184.216.35"} })
	w.set(func() { w.routes[netip.AddrPortFrom(otherAddr, 80)] = evil.addr() })
	w.serve("plain.net", webAddr, 80, good.addr())
	c := w.connect(netip.AddrPortFrom(otherAddr, 80)) // an address the sandbox chose, which a rule names
	answers := bufio.NewReader(c)
	ask := func() {
		t.Helper()
		fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: plain.net\r\n\r\n")
		resp, err := http.ReadResponse(answers, nil)
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("%+v, %v", resp, err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
	}
	ask()
	w.policy(func(p *sandbox.NetworkPolicy) {
		p.Allow = append(p.Allow, "plain.net")
		p.HTTP.Inject = []sandbox.Credential{{Host: "plain.net", Header: "X-Key", Secret: "key", Plain: true}}
	})
	ask()
	if len(evil.requests()) != 1 || len(good.requests()) != 1 || good.requests()[0].Header.Get("X-Key") != theSecret {
		t.Errorf("%d requests to the address, %d to the name", len(evil.requests()), len(good.requests()))
	}
}

// TestDialTCP is about the gate's own dialer: the last look before a packet
// leaves.
func TestDialTCP(t *testing.T) {
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	accepted := make(chan net.Conn, 4)
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	dest := netip.MustParseAddrPort(ln.Addr().String())
	r := reach{foreign: linux.Foreign, admit: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}}
	if c, err := r.dialTCP(t.Context(), dest); err == nil || !strings.Contains(err.Error(), "not an address the gate may dial") {
		t.Errorf("loopback: %v, %v", c, err)
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil || len(addrs) == 0 {
		t.Fatalf("own addresses %v, %v", addrs, err)
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err != nil || r.outside(p.Addr()) {
			t.Errorf("%s is the host's own (%v)", a, err)
		}
	}
	if c, err := net.DialTimeout("tcp", dest.String(), 5*time.Second); err != nil { // the control: it listens
		t.Error(err)
	} else {
		_ = c.Close()
	}
	c := <-accepted
	if b, err := io.ReadAll(c); len(b) != 0 {
		t.Error(b, err)
	}
	select {
	case <-accepted:
		t.Error("the gate's dialer got through")
	default:
	}
}
