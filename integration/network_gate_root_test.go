//go:build root

package integration

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// gateHost is where the web server of these tests is; gateNames lead there.
const gateHost = "151.101.1.69"

// gateSecret must never be seen in a sandbox.
const gateSecret = "Bearer only-the-gate-knows"

// gateRequest is what the web server saw.
type gateRequest struct {
	host, method, path, auth, at string
	secure                       bool
}

// webSite is the web server, on ports 80, 443 and 8080 of gateHost.
type webSite struct {
	mu     sync.Mutex
	seen   []gateRequest
	hellos []string // names asked for by TLS
	ended  chan time.Time
}

// serveSite starts the web server on the internet and has this program's
// daemons believe its certificate.
func serveSite(t *testing.T, w *world) *webSite {
	t.Helper()
	s := &webSite{ended: make(chan time.Time, 8)}
	cert, authority := siteCertificate(t, "*.example.com")
	file := filepath.Join(t.TempDir(), "authority.pem")
	if err := os.WriteFile(file, authority, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("SSL_CERT_FILE", file)
	err := w.internet.within(func() error {
		if err := nft("insert rule ip far any_port ip daddr " + gateHost + " tcp dport { 80, 443, 8080 } return"); err != nil {
			return err
		}
		if err := run("ip", "addr", "add", gateHost+"/32", "dev", "lo"); err != nil {
			return err
		}
		plain, err := net.Listen("tcp4", gateHost+":80")
		if err != nil {
			return err
		}
		secure, err := net.Listen("tcp4", gateHost+":443")
		if err != nil {
			return errors.Join(err, plain.Close())
		}
		other, err := net.Listen("tcp4", gateHost+":8080")
		if err != nil {
			return errors.Join(err, plain.Close(), secure.Close())
		}
		srv := &http.Server{Handler: s, ReadHeaderTimeout: 20 * time.Second, TLSConfig: &tls.Config{
			Certificates: []tls.Certificate{cert},
			GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
				s.mu.Lock()
				defer s.mu.Unlock()
				s.hellos = append(s.hellos, h.ServerName)
				return nil, nil //nolint:nilnil // as crypto/tls has it: the same as ever
			},
		}}
		go func() { _ = srv.Serve(plain) }()
		go func() { _ = srv.Serve(other) }()
		go func() { _ = srv.ServeTLS(secure, "", "") }()
		t.Cleanup(func() { _ = srv.Close() })
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func siteCertificate(t *testing.T, name string) (tls.Certificate, []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	about := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "tests"}, DNSNames: []string{name}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, about, about, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// ServeHTTP notes a request. Below /stream it answers without an end.
func (s *webSite) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	at, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	s.mu.Lock()
	s.seen = append(s.seen, gateRequest{r.Host, r.Method, r.URL.Path, r.Header.Get("Authorization"), at.String(), r.TLS != nil})
	s.mu.Unlock()
	fmt.Fprintf(w, "served %s\n", r.Host)
	if !strings.HasPrefix(r.URL.Path, "/pub/stream") {
		return
	}
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-r.Context().Done():
			s.ended <- time.Now()
			return
		case <-tick.C:
			_, _ = fmt.Fprintln(w, "more")
			_ = http.NewResponseController(w).Flush()
		}
	}
}

// take returns what was seen since the last time.
func (s *webSite) take() ([]gateRequest, []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	seen, hellos := s.seen, s.hellos
	s.seen, s.hellos = nil, nil
	return seen, hellos
}

type gateAsk struct {
	To     string `json:"to"`
	Via    string `json:"via,omitempty"`
	Secure bool   `json:"secure,omitempty"`
	Name   string `json:"name,omitempty"`
	Send   string `json:"send"`
}

// web has the probe send something from inside; it returns what came back, or
// the error.
func (d *daemon) web(t testing.TB, ref, probe string, a gateAsk) string {
	t.Helper()
	b, err := json.Marshal([]gateAsk{a})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Files(ref).Write(t.Context(), "root", "/tmp/web.json", 0o644, bytes.NewReader(b)); err != nil {
		t.Fatal(err)
	}
	r := d.exec(t, ref, probe, "web", "/tmp/web.json")
	var out []struct{ Got, Error string }
	if err := json.Unmarshal([]byte(r.stdout), &out); err != nil || len(out) != 1 {
		t.Fatalf("the probe: %v\n%.300s%s", err, r.stdout, r.stderr)
	}
	if out[0].Error != "" {
		return "error: " + out[0].Error
	}
	return out[0].Got
}

func plainAsk(to, method, host, path string) gateAsk {
	return gateAsk{To: to, Send: method + " " + path + " HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\nAuthorization: mine\r\n\r\n"}
}

func secureAsk(to, name string) gateAsk {
	a := plainAsk(to, "GET", name, "/any")
	a.Secure, a.Name = true, name
	return a
}

// gatePolicy permits names, one of them within request rules alone, and two
// with a credential.
func gatePolicy() sandbox.NetworkPolicy {
	return sandbox.NetworkPolicy{
		Mode: sandbox.NetworkAllow, Allow: []string{"ok.example.com:80", "tls.example.com", "api.example.com", "plain.example.com", "inner.example.com"}, Deny: []string{"no.example.com"},
		HTTP: &sandbox.HTTPGate{
			Rules: []string{"GET,HEAD ok.example.com/pub/*", "api.example.com", "plain.example.com", "inner.example.com"},
			Inject: []sandbox.Credential{
				{Host: "api.example.com", Header: "Authorization", Secret: "api-key"},
				{Host: "plain.example.com", Header: "Authorization", Secret: "plain-key", Plain: true},
			},
		},
	}
}

// TestNetworkGate sends web traffic through the gate of the built daemon.
func TestNetworkGate(t *testing.T) {
	w := newWorld(t)
	site := serveSite(t, w)
	serveZones(t, w, map[string]func(int) []string{
		"*.example.com": always("60 A " + gateHost), "inner.example.com": always("60 A 10.9.8.7"), "evil.org": always("60 A 8.8.4.4"),
	})
	d := install(t, networkConfig)
	if _, err := d.SetSecret(t.Context(), sandbox.SecretRequest{Name: "api-key", Value: gateSecret, Hosts: []string{"api.example.com"}}); err != nil {
		t.Fatal(err)
	}
	sb := d.create(t, sandbox.Spec{Name: "s", Network: gatePolicy()})
	probe := d.give(t, "s")
	const web, tlsAt = gateHost + ":80", gateHost + ":443"
	w.internet.seen.take()

	served := func(a gateAsk, want gateRequest) {
		t.Helper()
		got := d.web(t, "s", probe, a)
		seen, _ := site.take()
		if !strings.Contains(got, "served "+want.host) || len(seen) != 1 || seen[0] != want {
			t.Errorf("%+v: %.200q; the server saw %+v, want %+v", a, got, seen, want)
		}
	}
	refused := func(a gateAsk, want string) {
		t.Helper()
		got := d.web(t, "s", probe, a)
		if seen, hellos := site.take(); !strings.Contains(got, want) || len(seen)+len(hellos) != 0 {
			t.Errorf("%+v: %.200q, want %q; the server saw %+v %q", a, got, want, seen, hellos)
		}
	}
	ok := gateRequest{"ok.example.com", "GET", "/pub/x", "mine", gateHost + ":80", false}
	served(plainAsk(web, "GET", "ok.example.com", "/pub/x"), ok)
	served(plainAsk("8.8.4.4:80", "GET", "OK.example.com.", "/pub/x"), ok) // the name decides, not the address
	served(secureAsk("8.8.4.4:443", "tls.example.com"), gateRequest{"tls.example.com", "GET", "/any", "mine", gateHost + ":443", true})
	through := secureAsk("192.0.2.1:80", "tls.example.com")
	through.Via = "CONNECT tls.example.com:443 HTTP/1.1\r\nHost: tls.example.com:443\r\n\r\n"
	served(through, gateRequest{"tls.example.com", "GET", "/any", "mine", gateHost + ":443", true})
	served(plainAsk(web, "PUT", "api.example.com", "/v1"), gateRequest{"api.example.com", "PUT", "/v1", gateSecret, gateHost + ":443", true})

	for _, a := range []gateAsk{
		plainAsk(web, "GET", "no.example.com", "/pub/x"), plainAsk(web, "GET", "evil.org", "/"), plainAsk("8.8.4.4:80", "GET", "evil.org", "/"),
		plainAsk(web, "GET", gateHost, "/pub/x"), plainAsk(web, "POST", "ok.example.com", "/pub/x"), plainAsk(web, "GET", "ok.example.com", "/priv"),
		plainAsk("169.254.169.254:80", "GET", "169.254.169.254", "/latest"), plainAsk(web, "GET", "inner.example.com", "/"), plainAsk(web, "GET", "127.0.0.1", "/"),
		plainAsk(web, "GET", gatewayAddr, "/"),
	} {
		refused(a, "gate_denied")
	}
	// What request rules confine has no other way out: each of these is served
	// for the name beside it.
	refused(secureAsk(tlsAt, "ok.example.com"), "access denied")
	refused(gateAsk{To: web, Via: "CONNECT ok.example.com:443 HTTP/1.1\r\nHost: ok.example.com:443\r\n\r\n"}, "403 Forbidden")
	refused(plainAsk(web, "GET", "ok.example.com:8080", "/pub/x"), "gate_denied")
	d.secretsOfPorts(t, served, refused)
	refused(gateAsk{To: web, Via: "CONNECT evil.org:443 HTTP/1.1\r\nHost: evil.org:443\r\n\r\n"}, "403 Forbidden")
	for _, a := range []gateAsk{plainAsk(web, "GET", "ok.example.com", "/pub/%2e%2e/priv"), plainAsk(web, "GET", "ok.example.com", "/pub//..;/priv"), plainAsk(web, "GET", "2130706433", "/")} {
		refused(a, "gate_ambiguous")
	}
	for _, name := range []string{"evil.org", "no.example.com", ""} {
		refused(secureAsk(tlsAt, name), "access denied")
	}
	// The gate has no door of its own.
	refused(plainAsk(gatewayAddr+":80", "GET", "ok.example.com", "/pub/x"), "error: ")

	for a := range w.internet.seen.take() {
		if to := a.dst.String(); to != gateHost && to != resolverAddr {
			t.Errorf("arrived on the internet: %s", a)
		}
	}
	for a := range w.lan.seen.take() {
		t.Errorf("arrived on the local network: %s", a)
	}
	d.gateIsTold(t, sb.ID)
	d.gateCuts(t, probe, site)

	d.kill()
	d.start()
	served(plainAsk(web, "GET", "ok.example.com", "/pub/x"), ok)
	served(plainAsk(web, "GET", "api.example.com", "/v1"), gateRequest{"api.example.com", "GET", "/v1", gateSecret, gateHost + ":443", true})
	if err := d.RemoveSecret(t.Context(), "api-key"); err != nil {
		t.Fatal(err)
	}
	refused(plainAsk(web, "GET", "api.example.com", "/v1"), "gate_secret")
	if strings.Contains(d.Log.String(), "only-the-gate-knows") {
		t.Error("the daemon's log holds the secret")
	}
}

// secretsOfPorts has a secret for a host, and then for one port of it.
func (d *daemon) secretsOfPorts(t *testing.T, served func(gateAsk, gateRequest), refused func(gateAsk, string)) {
	const web, host = gateHost + ":80", "plain.example.com"
	set := func(value, to string) {
		t.Helper()
		if _, err := d.SetSecret(t.Context(), sandbox.SecretRequest{Name: "plain-key", Value: value, Hosts: []string{to}}); err != nil {
			t.Fatal(err)
		}
	}
	set("of-the-host", host)
	served(plainAsk(web, "GET", host, "/a"), gateRequest{host, "GET", "/a", "of-the-host", gateHost + ":80", false})
	refused(plainAsk(web, "GET", host+":8080", "/a"), "gate_secret")
	set("of-the-port", host+":8080")
	served(plainAsk(web, "GET", host+":8080", "/a"), gateRequest{host + ":8080", "GET", "/a", "of-the-port", gateHost + ":8080", false})
	refused(plainAsk(web, "GET", host, "/a"), "gate_secret")
	// Past the gate nothing is added.
	d.sh(t, "s", "getent hosts "+host) // which opens its address
	served(plainAsk(gateHost+":8080", "GET", host, "/a"), gateRequest{host, "GET", "/a", "mine", gateHost + ":8080", false})
}

// gateIsTold looks for what the gate did in the audit, and for the secret
// where it must not be.
func (d *daemon) gateIsTold(t *testing.T, id sandbox.ID) {
	t.Helper()
	want := map[string]bool{"net.allowed ok.example.com": false, "net.allowed api.example.com": false, "net.denied evil.org": false, "net.denied no.example.com": false}
	testenv.Eventually(t, 20*time.Second, "the audit tells of the gate", func() bool {
		list, _, err := d.Events(t.Context(), client.EventQuery{Sandbox: string(id), Limit: 1000})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range list {
			if strings.Contains(fmt.Sprint(e), "only-the-gate-knows") {
				t.Errorf("an event holds the secret: %+v", e)
			}
			for key := range want {
				kind, dest, _ := strings.Cut(key, " ")
				if e.Type == kind && strings.Contains(fmt.Sprint(e.Data), dest) {
					want[key] = true
				}
			}
		}
		for _, found := range want {
			if !found {
				return false
			}
		}
		return true
	})
	sb, err := d.Sandbox(t.Context(), string(id))
	if err != nil || strings.Contains(fmt.Sprintf("%+v", sb), "only-the-gate-knows") {
		t.Errorf("the sandbox's record: %v", err)
	}
	// The control finds what is there: the name of the secret is no secret.
	if !strings.Contains(fmt.Sprintf("%+v", *sb.Spec.Network.HTTP), "api-key") {
		t.Error("the record does not name the secret either")
	}
}

// gateCuts changes the policy under an answer without an end.
func (d *daemon) gateCuts(t *testing.T, probe string, site *webSite) {
	t.Helper()
	b, err := json.Marshal([]gateAsk{plainAsk(gateHost+":80", "GET", "ok.example.com", "/pub/stream")})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Files("s").Write(t.Context(), "root", "/tmp/stream.json", 0o644, bytes.NewReader(b)); err != nil {
		t.Fatal(err)
	}
	if _, err := d.StartProcess(t.Context(), "s", sandbox.ProcessSpec{Argv: []string{probe, "web", "/tmp/stream.json"}, User: "root"}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 20*time.Second, "the stream flows", func() bool { site.mu.Lock(); defer site.mu.Unlock(); return len(site.seen) == 1 })
	p := gatePolicy()
	p.HTTP.Rules = []string{"GET ok.example.com/pub/x", "api.example.com"}
	d.setNetwork(t, "s", p)
	changed := time.Now()
	select {
	case at := <-site.ended:
		t.Logf("cut %s after the change", at.Sub(changed))
		if at.Sub(changed) > 2*time.Second {
			t.Errorf("cut %s after the change", at.Sub(changed))
		}
	case <-time.After(20 * time.Second):
		t.Error("a request that is no longer permitted goes on")
	}
	d.setNetwork(t, "s", gatePolicy())
	site.take()
}
