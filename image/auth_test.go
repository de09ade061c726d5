package image

import (
	"crypto/tls"
	"encoding/pem"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/image/imagetest"
	"github.com/sandboxd/sandboxd/sandbox"
)

// tokens protects a registry by a token server on its own address, as most
// registries are, and notes the scopes asked for.
func tokens(g *imagetest.Registry, user, password string) *[]string {
	var mu sync.Mutex
	var scopes []string
	g.Meddle(func(w http.ResponseWriter, r *http.Request) bool {
		if r.URL.Path == "/token" {
			u, p, _ := r.BasicAuth()
			refresh := r.Method == http.MethodPost && r.FormValue("refresh_token") == "identity"
			if (u != user || p != password) && !refresh {
				w.WriteHeader(http.StatusUnauthorized)
				return true
			}
			mu.Lock()
			defer mu.Unlock()
			scopes = append(append(scopes, r.URL.Query()["scope"]...), strings.Fields(r.FormValue("scope"))...)
			_, _ = io.WriteString(w, `{"token":"good","access_token":"good"}`)
			return true
		}
		if r.Header.Get("Authorization") == "Bearer good" {
			return false
		}
		w.Header().Set("WWW-Authenticate", `Bearer realm="`+g.URL+`/token",service="test"`)
		w.WriteHeader(http.StatusUnauthorized)
		return true
	})
	return &scopes
}

func TestTokens(t *testing.T) {
	g := imagetest.Start(t)
	g.Put("private/app", "1", imagetest.New(1, 2, 1000))
	scopes := tokens(g, "me", "hush")
	ref := g.Host() + "/private/app:1"
	for name, tc := range map[string]struct {
		auth *sandbox.RegistryAuth
		code string
	}{
		"user and password": {&sandbox.RegistryAuth{Username: "me", Password: "hush"}, ""},
		"identity token":    {&sandbox.RegistryAuth{IdentityToken: "identity"}, ""},
		"nobody":            {nil, "image_unauthorized"},
		"wrong password":    {&sandbox.RegistryAuth{Username: "me", Password: "loud"}, "image_unauthorized"},
		"wrong identity":    {&sandbox.RegistryAuth{IdentityToken: "other"}, "image_unauthorized"},
	} {
		s, _ := library(t, nil)
		_, err := s.Pull(t.Context(), sandbox.PullRequest{Reference: ref, Auth: tc.auth}, nil)
		if sandbox.CodeOf(err) != tc.code && (err != nil || tc.code != "") || err != nil && strings.Contains(err.Error(), "loud") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if all := strings.Join(*scopes, " "); !strings.Contains(all, "repository:private/app:pull") || strings.Contains(all, "push") {
		t.Errorf("a pull asks for the rights %q", all)
	}
	// The daemon's own credentials serve requests that bring none, and those
	// alone; a push asks to read where it may take layers over from.
	s, _ := library(t, func(c *Config) {
		c.Registries = map[string]Registry{g.Host(): {Auth: &sandbox.RegistryAuth{Username: "me", Password: "hush"}}}
	})
	img, err := s.Pull(t.Context(), sandbox.PullRequest{Reference: ref}, nil)
	if err != nil {
		t.Fatal(err)
	}
	*scopes = nil
	out, err := s.Push(t.Context(), sandbox.ImageSource{Image: img, Layers: img.Layers}, sandbox.PushRequest{Reference: g.Host() + "/mine/copy"}, nil)
	if err != nil || out.Uploaded != 0 || out.Digest != img.Digest {
		t.Errorf("%+v %v", out, err)
	}
	if all := strings.Join(*scopes, " "); !strings.Contains(all, "repository:mine/copy:push,pull") || !strings.Contains(all, "repository:private/app:pull") {
		t.Errorf("a push asks for the rights %q", all)
	}
	if _, err := s.Pull(t.Context(), sandbox.PullRequest{Reference: ref, Auth: &sandbox.RegistryAuth{Username: "me", Password: "loud"}}, nil); sandbox.CodeOf(err) != "image_unauthorized" {
		t.Errorf("the request's own wrong password: %v", err)
	}
}

// TestCredentialsStay sends layers from another place: it sees no
// credentials, nor does a mirror.
func TestCredentialsStay(t *testing.T) {
	var mu sync.Mutex
	var seen []string
	m := imagetest.New(1, 2, 1000)
	cdn := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, r.Header.Get("Authorization"))
		_, _ = w.Write(m.Blobs[strings.TrimPrefix(r.URL.Path, "/")])
	}))
	defer cdn.Close()
	g, mirror := imagetest.Start(t), imagetest.Start(t)
	g.Put("app", "1", m)
	g.Protect("me:hush")
	g.Meddle(func(w http.ResponseWriter, r *http.Request) bool {
		if _, digest, ok := strings.Cut(r.URL.Path, "/blobs/"); ok && r.Header.Get("Authorization") != "" {
			http.Redirect(w, r, cdn.URL+"/"+digest, http.StatusTemporaryRedirect)
			return true
		}
		return false
	})
	mirror.Meddle(func(_ http.ResponseWriter, r *http.Request) bool {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, r.Header.Get("Authorization"))
		return false
	})
	s, _ := library(t, func(c *Config) { c.Registries = map[string]Registry{g.Host(): {Mirrors: []string{mirror.Host()}}} })
	req := sandbox.PullRequest{Reference: g.Host() + "/app:1", Auth: &sandbox.RegistryAuth{Username: "me", Password: "hush"}}
	if _, err := s.Pull(t.Context(), req, nil); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if strings.Join(seen, "") != "" || len(seen) < 4 {
		t.Errorf("mirror and layer server saw %q", seen)
	}
}

func TestTLS(t *testing.T) {
	g := imagetest.Start(t)
	g.Put("app", "1", imagetest.New(1, 1, 1000))
	secure := httptest.NewUnstartedServer(g.Config.Handler)
	secure.StartTLS()
	defer secure.Close()
	host := strings.TrimPrefix(secure.URL, "https://")
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: secure.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	pull := func(r Registry) error {
		s, _ := library(t, func(c *Config) { c.Registries = map[string]Registry{host: r} })
		_, err := s.Pull(t.Context(), sandbox.PullRequest{Reference: host + "/app:1"}, nil)
		return err
	}
	if err := pull(Registry{CAFile: ca}); err != nil {
		t.Errorf("with its CA: %v", err)
	}
	if err := pull(Registry{}); sandbox.CodeOf(err) != "registry_untrusted" {
		t.Errorf("without: %v", err)
	}
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"/nonexistent", pipe} {
		if err := pull(Registry{CAFile: bad}); sandbox.CodeOf(err) != "registry_untrusted" {
			t.Errorf("a CA that is %s: %v", bad, err)
		}
	}
	// From TLS to plain HTTP nobody is led, on this machine or elsewhere.
	for _, plain := range []bool{false, true} {
		inner := http.RoundTripper(&http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}})
		req := httptest.NewRequest(http.MethodGet, g.URL+"/v2/", http.NoBody)
		resp, err := (&guard{inner: inner, plain: plain}).RoundTrip(req)
		if err == nil {
			resp.Body.Close()
		}
		if (err == nil) != plain {
			t.Errorf("plain HTTP, allowed %v: %v", plain, err)
		}
	}
}
