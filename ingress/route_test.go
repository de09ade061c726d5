package ingress

import (
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// listening serves host names on TCP or on a unix socket, and returns a client
// that goes there whatever the URL says.
func listening(t *testing.T, in *Ingress, network string) *http.Client {
	t.Helper()
	at := "127.0.0.1:0"
	if network == "unix" {
		at = filepath.Join(t.TempDir(), "s")
	}
	ln, err := net.Listen(network, at)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- in.Serve(ln) }()
	t.Cleanup(func() {
		in.Close()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	tr := &http.Transport{Dial: func(string, string) (net.Conn, error) { return net.Dial(network, ln.Addr().String()) }} //nolint:staticcheck // nothing to cancel
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }, Timeout: 20 * time.Second}
}

// seen starts a server that notes the requests it gets.
func seen(t *testing.T) (address string, requests chan *http.Request) {
	t.Helper()
	requests = make(chan *http.Request, 100)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests <- r
		_, _ = io.WriteString(w, "hello")
	}))
	t.Cleanup(s.Close)
	return s.Listener.Addr().String(), requests
}

func ask(t *testing.T, c *http.Client, url string, header map[string]string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range header {
		req.Header.Set(k, v)
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(b)
}

// TestForwardedHeaders: who the client is, a sandbox learns from us, or from a
// proxy of ours, and from nobody else.
func TestForwardedHeaders(t *testing.T) {
	for network, want := range map[string]string{"tcp": "127.0.0.1 http", "unix": "192.0.2.1, 192.0.2.2 https"} {
		h := newHouse("dev")
		address, requests := seen(t)
		h.servers[80] = address
		in := open(t, h)
		c := listening(t, in, network)
		if _, err := in.Publish(t.Context(), "dev", sandbox.PortRequest{Port: 80, Public: true}, ""); err != nil {
			t.Fatal(err)
		}
		resp, body := ask(t, c, "http://80-dev.box.test/x", map[string]string{
			"X-Forwarded-For": "192.0.2.1, 192.0.2.2", "X-Forwarded-Proto": "https", "X-Forwarded-Host": "evil.example", "Forwarded": "for=192.0.2.3",
			tokenHeader: "some", "Cookie": "a=b; sandbox_token=some; c=d",
		})
		if resp.StatusCode != http.StatusOK || body != "hello" {
			t.Fatalf("%d %s", resp.StatusCode, body)
		}
		r := <-requests
		if got := strings.Join(r.Header.Values("X-Forwarded-For"), ",") + " " + r.Header.Get("X-Forwarded-Proto"); got != want {
			t.Errorf("over %s: %q, want %q", network, got, want)
		}
		if r.Host != "80-dev.box.test" || r.Header.Get("X-Forwarded-Host") != "80-dev.box.test" || r.Header.Get("Forwarded") != "" || r.Header.Get(tokenHeader) != "" || r.Header.Get("Cookie") != "a=b; c=d" {
			t.Errorf("over %s: host %q, header %v", network, r.Host, r.Header)
		}
	}
}

// TestRouteTo: each request goes to the port and sandbox of its host name, and
// to nothing else.
func TestRouteTo(t *testing.T) {
	h := newHouse("dev", "dev-2")
	one, ones := seen(t)
	two, twos := seen(t)
	h.servers[80], h.servers[8080] = one, two
	in := open(t, h)
	c := listening(t, in, "tcp")
	token, err := in.NewToken(t.Context(), "dev", "")
	if err != nil {
		t.Fatal(err)
	}
	for range 3 { // kept connections must not mix
		for host, to := range map[string]chan *http.Request{"80-dev": ones, "8080-dev": twos, "080-dev": nil, "80-dev-2": nil, "81-dev": nil} {
			resp, body := ask(t, c, "http://"+host+".box.test/", map[string]string{"Authorization": "bearer " + token})
			if (to != nil) != (resp.StatusCode == http.StatusOK) {
				t.Errorf("%s: %d %s", host, resp.StatusCode, body)
			}
			if to == nil {
				continue
			}
			select {
			case r := <-to:
				if r.Header.Get("Authorization") != "" {
					t.Errorf("%s: the token comes through", host)
				}
			case <-time.After(10 * time.Second):
				t.Fatalf("%s: went elsewhere", host)
			}
		}
	}
	for _, s := range []sandbox.Status{sandbox.StatusStopped, sandbox.StatusPaused} {
		h.set("dev", s)
		if resp, body := ask(t, c, "http://80-dev.box.test/", map[string]string{tokenHeader: token}); resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" || !strings.Contains(body, "sandbox_"+string(s)) {
			t.Errorf("%s: %d %s", s, resp.StatusCode, body)
		}
	}
	if len(ones)+len(twos) != 0 {
		t.Error("a request that was refused got through")
	}
}

// TestHostNamesTellNothing: without the token, what is there and what is not
// answer alike, to the last header.
func TestHostNamesTellNothing(t *testing.T) {
	h := newHouse("dev", "bare", "over")
	h.set("over", sandbox.StatusCompleted)
	in := open(t, h)
	c := listening(t, in, "tcp")
	token, err := in.NewToken(t.Context(), "dev", "")
	if err != nil {
		t.Fatal(err)
	}
	said := map[string]bool{}
	for _, ref := range []string{"dev", "bare", "over", "nobody", string(sandbox.NewID())} {
		resp, body := ask(t, c, "http://80-"+ref+".box.test/", map[string]string{tokenHeader: "wrong"})
		resp.Header.Del("Date")
		said[fmt.Sprint(resp.StatusCode, resp.Header, body)] = true
	}
	if len(said) != 1 {
		t.Errorf("%d answers: %v", len(said), said)
	}
	if resp, body := ask(t, c, "http://80-dev.box.test/", map[string]string{tokenHeader: token}); resp.StatusCode != http.StatusGatewayTimeout && resp.StatusCode != http.StatusBadGateway { // the control
		t.Errorf("with the token: %d %s", resp.StatusCode, body)
	}
}

// TestForwardedInDisguise: many servers take X_Forwarded_For for
// X-Forwarded-For, and believe its relatives.
func TestForwardedInDisguise(t *testing.T) {
	for network, port := range map[string]string{"tcp": "", "unix": "443"} {
		h := newHouse("dev")
		address, requests := seen(t)
		h.servers[80] = address
		in := open(t, h)
		c := listening(t, in, network)
		if _, err := in.Publish(t.Context(), "dev", sandbox.PortRequest{Port: 80, Public: true}, ""); err != nil {
			t.Fatal(err)
		}
		resp, _ := ask(t, c, "http://80-dev.box.test/", map[string]string{
			"X_Forwarded_For": "192.0.2.9", "X_forwarded-Proto": "https", "X-Forwarded-Port": "443", "X-Forward": "control",
		})
		if resp.StatusCode != http.StatusOK {
			t.Fatal(resp.Status)
		}
		r := <-requests
		for name := range r.Header {
			if strings.Contains(name, "_") {
				t.Errorf("over %s: %s goes on", network, name)
			}
		}
		if r.Header.Get("X-Forward") != "control" || r.Header.Get("X-Forwarded-Port") != port {
			t.Errorf("over %s: %v", network, r.Header)
		}
	}
}

func TestTokens(t *testing.T) {
	sum := sha256.Sum256([]byte("right"))
	for name, tc := range map[string]struct {
		header http.Header
		ok     bool
		left   string // of Authorization and Cookie
	}{
		"header":             {http.Header{tokenHeader: {"right"}}, true, ""},
		"wrong header":       {http.Header{tokenHeader: {"wrong"}}, false, ""},
		"one right of two":   {http.Header{tokenHeader: {"wrong", "right"}}, true, ""},
		"bearer":             {http.Header{"Authorization": {"Bearer right"}}, true, ""},
		"someone's bearer":   {http.Header{"Authorization": {"Bearer theirs"}}, false, "Bearer theirs"},
		"basic":              {http.Header{"Authorization": {"Basic right"}}, false, "Basic right"},
		"cookie":             {http.Header{"Cookie": {"a=b; sandbox_token=right"}}, true, "a=b"},
		"cookies":            {http.Header{"Cookie": {"sandbox_token=wrong", "sandbox_token=right; a=b"}}, true, "a=b"},
		"cookie and another": {http.Header{"Cookie": {"sandbox_token=right"}, "Authorization": {"Basic x"}}, true, "Basic x"},
		"empty":              {http.Header{tokenHeader: {""}, "Cookie": {"sandbox_token="}, "Authorization": {"Bearer "}}, false, "Bearer "},
		"none":               {http.Header{}, false, ""},
	} {
		out := tc.header.Clone()
		stripOwn(out)
		if ok := allowed(tc.header, sum[:], out); ok != tc.ok {
			t.Errorf("%s: %v", name, ok)
		}
		if left := out.Get("Authorization") + out.Get("Cookie"); left != tc.left || out.Get(tokenHeader) != "" {
			t.Errorf("%s: %q goes on, want %q", name, left, tc.left)
		}
		if allowed(tc.header, nil, http.Header{}) {
			t.Errorf("%s: a sandbox without a token lets it in", name)
		}
	}
}

// TestTokenTakenAway: of a token made and taken away at the same time that
// holds which was written down last, before a restart as after it.
func TestTokenTakenAway(t *testing.T) {
	h := newHouse("dev")
	in := open(t, h)
	made, removed := make(chan struct{}), make(chan struct{})
	h.midToken = func(hash []byte) {
		if hash != nil {
			close(made)
			select {
			case <-removed:
			case <-time.After(200 * time.Millisecond): // it waits for its turn, as it should
			}
		}
	}
	go func() {
		defer close(removed)
		<-made
		if err := in.RemoveToken(t.Context(), "dev", ""); err != nil {
			t.Error(err)
		}
	}()
	if _, err := in.NewToken(t.Context(), "dev", ""); err != nil {
		t.Fatal(err)
	}
	<-removed
	hash, _ := in.access(h.sandboxes[0].ID, 80)
	if len(h.tokens) != 0 || hash != nil {
		t.Errorf("a token that was taken away opens on: %d written down, %x in force", len(h.tokens), hash)
	}
}

// TestTokenTwice: a token that comes in two ways is taken out of both.
func TestTokenTwice(t *testing.T) {
	h := newHouse("dev")
	address, requests := seen(t)
	h.servers[80] = address
	in := open(t, h)
	c := listening(t, in, "tcp")
	token, err := in.NewToken(t.Context(), "dev", "")
	if err != nil {
		t.Fatal(err)
	}
	for authorization, want := range map[string]string{"Bearer " + token: "", "Bearer theirs": "Bearer theirs"} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://80-dev.box.test/?sandbox_token="+token, strings.NewReader("x"))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", authorization)
		resp, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if r := <-requests; resp.StatusCode != http.StatusOK || r.Header.Get("Authorization") != want || strings.Contains(r.URL.RawQuery, token) {
			t.Errorf("%d, the sandbox saw %q and %q", resp.StatusCode, r.Header.Get("Authorization"), r.URL.RawQuery)
		}
	}
}

func TestQueryToken(t *testing.T) {
	for in, want := range map[string][2]string{
		"/?sandbox_token=a":               {"a", "/"},
		"/p?x=1&sandbox_token=a%2Fb&y":    {"a/b", "/p?x=1&y"},
		"/?sandbox%5Ftoken=a":             {"a", "/"},
		"/?sandbox_token=a&sandbox_token": {"", "/"},
		"/?x_sandbox_token=a":             {"", "/?x_sandbox_token=a"},
	} {
		u, err := url.Parse(in)
		if err != nil {
			t.Fatal(err)
		}
		token, rest, found := queryToken(u)
		if token != want[0] || rest.String() != want[1] || found != !strings.HasPrefix(in, "/?x_") {
			t.Errorf("%s: %q %q %v", in, token, rest, found)
		}
	}
}
