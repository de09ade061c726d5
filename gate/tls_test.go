package gate

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

func tlsConfig(s *seen, name string) *tls.Config {
	return &tls.Config{ServerName: name, RootCAs: roots(s)}
}

func tlsClient(c net.Conn, name string) *tls.Conn {
	return tls.Client(c, &tls.Config{ServerName: name, InsecureSkipVerify: true})
}

var tlsOrigin = netip.AddrPortFrom(webAddr, portTLS)

func TestTLSByName(t *testing.T) {
	w := newWorld(t, allow("example.com:443", "http.net:80", "93.184.216.36:443"))
	srv := newSeen(t, true, hello200)
	for i, name := range []string{"example.com", "evil.net", "http.net"} {
		w.serve(name, netip.AddrFrom4([4]byte{93, 184, 216, byte(34 + i)}), 443, srv.addr())
	}
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: tlsConfig(srv, "example.com"), DialContext: func(context.Context, string, string) (net.Conn, error) {
		return w.connect(netip.MustParseAddrPort("93.184.216.35:443")), nil // another address: the name decides
	}}}
	resp, err := client.Post("https://example.com/", "text/plain", strings.NewReader(strings.Repeat("x", 1<<20)))
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("permitted: %v", err)
	}
	_ = resp.Body.Close()
	if e := w.last(); !e.Permitted || e.Kind != KindTLS || e.Host != "example.com" || e.Port != 443 || e.Rule != "example.com:443" {
		t.Errorf("event %+v", e)
	}
	client.CloseIdleConnections()
	dials := len(w.dialed())
	for _, name := range []string{"evil.net", "http.net", "www.example.com", ""} {
		if _, err := w.tlsDial(tlsOrigin, name, roots(srv)); err == nil || !strings.Contains(err.Error(), "access denied") {
			t.Errorf("%q: %v", name, err)
		}
		if e := w.last(); e.Permitted || e.Code != codeDenied {
			t.Errorf("%q: event %+v", name, e)
		}
	}
	if len(w.dialed()) != dials {
		t.Errorf("dialed %v", w.dialed()[dials:])
	}
	// Without a name an address must be permitted as one.
	if _, err := w.tlsDial(netip.MustParseAddrPort("93.184.216.36:443"), "", nil); err != nil {
		t.Errorf("by address: %v", err)
	}
	w.policy(func(p *sandbox.NetworkPolicy) { p.Mode, p.Allow = sandbox.NetworkOpen, nil })
	if c, err := w.tlsDial(tlsOrigin, "evil.net", nil); err == nil || strings.Contains(err.Error(), "access denied") {
		t.Errorf("open: %v, %v", c, err) // the certificate is for another name: it got through
	}
}

func TestTLSIsNotTLS(t *testing.T) {
	w := newWorld(t, allow("example.com"))
	srv := newSeen(t, true, hello200)
	w.serve("example.com", webAddr, 443, srv.addr())
	for name, bytes := range map[string]string{
		"HTTP":      "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n",
		"SSH":       "SSH-2.0-OpenSSH_9.6\r\n",
		"SSLv2":     "\x80\x2e\x01\x00\x02\x00\x15\x00\x00\x00\x10",
		"long":      "\x16\x03\x01\x40\x00\x01\x00\xff\xfc\x03\x03" + strings.Repeat("a", 1<<15),
		"truncated": "\x16\x03\x01\x00\x10\x01",
	} {
		c := w.connect(tlsOrigin)
		_, _ = io.WriteString(c, bytes)
		_ = c.CloseWrite()
		_, _ = io.Copy(io.Discard, c)
		if e := w.last(); e.Permitted || e.Code != codeAmbiguous {
			t.Errorf("%s: %+v", name, e)
		}
	}
	if d := w.dialed(); len(d) != 0 {
		t.Errorf("dialed %v", d)
	}
}

// capture is the first flight of Go's own client.
func capture(t testing.TB, cfg *tls.Config) []byte {
	t.Helper()
	a, b := net.Pipe()
	defer func() { _ = b.Close() }()
	go func() { _ = tls.Client(a, cfg).Handshake(); _ = a.Close() }()
	_ = b.SetReadDeadline(time.Now().Add(5 * time.Second))
	var head [5]byte
	if _, err := io.ReadFull(b, head[:]); err != nil {
		t.Fatal(err)
	}
	body := make([]byte, int(head[3])<<8|int(head[4]))
	if _, err := io.ReadFull(b, body); err != nil {
		t.Fatal(err)
	}
	return append(head[:], body...)
}

func TestReadHello(t *testing.T) {
	raw := capture(t, &tls.Config{ServerName: "Example.com"})
	h, err := readHello(t.Context(), bytes.NewReader(append(raw, "more"...)))
	if err != nil || h.name != "example.com" || h.ech || !bytes.HasPrefix(append(raw, "more"...), h.raw) || len(h.raw) < len(raw) {
		t.Errorf("%q, ech %t, %d bytes of %d, %v", h.name, h.ech, len(h.raw), len(raw), err)
	}
	// In many small records, as some clients send it against filters.
	body, cut := raw[5:], []byte(nil)
	for len(body) > 0 {
		n := min(7, len(body))
		cut = append(append(cut, 22, 3, 1, 0, byte(n)), body[:n]...)
		body = body[n:]
	}
	if h, err := readHello(t.Context(), bytes.NewReader(cut)); err != nil || h.name != "example.com" || !bytes.Equal(h.raw, cut) {
		t.Errorf("in pieces: %q, %v", h.name, err)
	}
	for _, name := range []string{"*.example.com", "exa mple.com", "example.0x10", strings.Repeat("a", 64) + ".com"} {
		if h, err := readHello(t.Context(), bytes.NewReader(capture(t, &tls.Config{ServerName: name}))); err == nil && h.name != "" {
			t.Errorf("%q passed as %q", name, h.name)
		}
	}
	if _, err := readHello(t.Context(), strings.NewReader("\x16\x03\x01\x40\x00\x01\x00\xff\xfc\x03\x03"+strings.Repeat("a", 1<<16))); err == nil {
		t.Error("an endless hello was read")
	}
}

// withECH puts an encrypted_client_hello extension into a hello.
func withECH(t *testing.T, raw []byte) []byte {
	t.Helper()
	out := bytes.Clone(raw)
	at := 5 + 4 + 2 + 32
	at += 1 + int(out[at])                                          // session id
	at += 2 + int(out[at])<<8 + int(out[at+1])                      // cipher suites
	at += 1 + int(out[at])                                          // compression methods
	inner := []byte{0, 0, 1, 0, 1, 5, 0, 2, 9, 9, 0, 4, 1, 2, 3, 4} // outer, HKDF-SHA256, AES-128-GCM, a key's number, key, payload
	ext := append([]byte{0xfe, 0x0d, 0, byte(len(inner))}, inner...)
	n := int(out[at])<<8 | int(out[at+1])
	if at+2+n != len(out) {
		t.Fatalf("extensions end at %d of %d", at+2+n, len(out))
	}
	grow := func(i, size, by int) {
		v := 0
		for _, b := range out[i : i+size] {
			v = v<<8 | int(b)
		}
		v += by
		for k := size - 1; k >= 0; k-- {
			out[i+k] = byte(v)
			v >>= 8
		}
	}
	grow(at, 2, len(ext))
	grow(6, 3, len(ext))
	grow(3, 2, len(ext))
	return append(out, ext...)
}

func TestTLSEncryptedHello(t *testing.T) {
	raw := capture(t, &tls.Config{ServerName: "example.com"})
	w := newWorld(t, allow("example.com"))
	got := make(chan []byte, 1)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			b, _ := io.ReadAll(c)
			_ = c.Close()
			got <- b
		}
	}()
	w.serve("example.com", webAddr, 443, ln.Addr().String())
	send := func(b []byte) {
		c := w.connect(tlsOrigin)
		_, _ = c.Write(b)
		_ = c.CloseWrite()
		_, _ = io.Copy(io.Discard, c)
	}
	hidden := withECH(t, raw)
	send(raw)
	next := func() []byte {
		select {
		case b := <-got:
			return b
		case <-time.After(10 * time.Second):
			t.Fatal("nothing arrived")
			return nil
		}
	}
	if b := next(); !bytes.Equal(b, raw) {
		t.Errorf("the plain hello arrived as %d bytes of %d", len(b), len(raw))
	}
	send(hidden)
	if e := w.last(); e.Permitted || e.Code != codeAmbiguous || !strings.Contains(e.Detail, "encrypted client hello") {
		t.Errorf("hidden name: %+v", e)
	}
	w.policy(func(p *sandbox.NetworkPolicy) {
		p.Mode, p.Allow, p.Deny = sandbox.NetworkOpen, nil, []string{"evil.net"}
	})
	send(hidden)
	if e := w.last(); e.Permitted {
		t.Errorf("open with denied names: %+v", e)
	}
	w.policy(func(p *sandbox.NetworkPolicy) { p.Deny = nil })
	send(hidden)
	if b := next(); !bytes.Equal(b, hidden) {
		t.Errorf("where no name matters: %d bytes of %d", len(b), len(hidden))
	}
}

// TestTLSLife: half-closed ends, and cuts by a changed policy.
func TestTLSLife(t *testing.T) {
	w := newWorld(t, allow("example.com", "second.net"))
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	conns := make(chan net.Conn, 8)
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			conns <- c
		}
	}()
	w.serve("example.com", webAddr, 443, ln.Addr().String())
	w.serve("second.net", otherAddr, 443, ln.Addr().String())
	begin := func(name string) (*net.TCPConn, net.Conn) {
		raw := capture(t, &tls.Config{ServerName: name})
		c := w.connect(tlsOrigin)
		if _, err := c.Write(raw); err != nil {
			t.Fatal(err)
		}
		up := <-conns
		_ = up.SetDeadline(time.Now().Add(10 * time.Second))
		if _, err := io.ReadFull(up, make([]byte, len(raw))); err != nil {
			t.Fatal(err)
		}
		return c, up
	}
	c, up := begin("example.com")
	if _, err := io.WriteString(c, "last words"); err != nil {
		t.Fatal(err)
	}
	_ = c.CloseWrite()
	if b, err := io.ReadAll(up); err != nil || string(b) != "last words" {
		t.Errorf("%q, %v", b, err)
	}
	_, _ = io.WriteString(up, "answer after the end")
	_ = up.Close()
	if b, err := io.ReadAll(c); err != nil || string(b) != "answer after the end" {
		t.Errorf("%q, %v", b, err)
	}
	first, firstUp := begin("example.com")
	second, secondUp := begin("second.net")
	start := time.Now()
	w.policy(func(p *sandbox.NetworkPolicy) { p.Allow = []string{"second.net"} })
	if _, err := first.Read(make([]byte, 1)); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("forbidden now: %v", err)
	}
	t.Logf("cut after %s", time.Since(start))
	if _, err := firstUp.Read(make([]byte, 1)); err == nil {
		t.Error("the server's end lives")
	}
	_, _ = io.WriteString(second, "x")
	if b := make([]byte, 1); true {
		if _, err := io.ReadFull(secondUp, b); err != nil || b[0] != 'x' {
			t.Errorf("still permitted: %q, %v", b, err)
		}
	}
	w.set(func() { w.gone = true })
	if _, err := second.Read(make([]byte, 1)); err == nil {
		t.Error("the connection outlives its sandbox")
	}
	testenv.Eventually(t, 10*time.Second, "the places are given back", func() bool { return w.gate.Stats().Connections == 0 })
}

func FuzzHello(f *testing.F) {
	f.Add(capture(f, &tls.Config{ServerName: "example.com"}))
	f.Add(capture(f, &tls.Config{ServerName: "a.b", MaxVersion: tls.VersionTLS12}))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := readHello(t.Context(), bytes.NewReader(b))
		if len(h.raw) > maxHello || !bytes.HasPrefix(b, h.raw) {
			t.Fatalf("%d bytes read of %d", len(h.raw), len(b))
		}
		if err != nil {
			return
		}
		if h.name != "" {
			if name, addr, err := parseHost(h.name); err != nil || name != h.name || addr.IsValid() {
				t.Errorf("name %q", h.name)
			}
		}
	})
}
