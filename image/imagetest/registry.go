package imagetest

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

// Registry is a registry for tests, which does as it is told.
type Registry struct {
	*httptest.Server

	mu        sync.Mutex
	manifests map[string][]byte // by path:tag and path@digest
	kinds     map[string]string // by digest
	blobs     map[string][]byte // by path@digest
	uploads   map[string]string // id to path
	requests  []string          // METHOD url [range]
	user      string            // user:password, where one is asked for

	// meddle, when set, may answer in place of the registry.
	meddle func(w http.ResponseWriter, r *http.Request) bool
}

// Start starts a registry that ends with the test.
func Start(t testing.TB) *Registry {
	t.Helper()
	g := &Registry{manifests: map[string][]byte{}, kinds: map[string]string{}, blobs: map[string][]byte{}, uploads: map[string]string{}}
	g.Server = httptest.NewServer(http.HandlerFunc(g.serve))
	t.Cleanup(func() { g.CloseClientConnections(); g.Close() })
	return g
}

// Host is the registry's name in references.
func (g *Registry) Host() string { return strings.TrimPrefix(g.URL, "http://") }

// Meddle lets f answer in place of the registry where it returns true.
func (g *Registry) Meddle(f func(w http.ResponseWriter, r *http.Request) bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.meddle = f
}

// Protect asks everybody for a user and password from now on.
func (g *Registry) Protect(userPassword string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.user = userPassword
}

// Put keeps an image and returns the digest of its manifest.
func (g *Registry) Put(path, tag string, m *Image) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	for d, b := range m.Blobs {
		g.blobs[path+"@"+d] = b
	}
	return g.name(path, tag, m.Manifest, m.Kind)
}

// PutManifest keeps a manifest or index under a tag.
func (g *Registry) PutManifest(path, tag, kind string, b []byte) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.name(path, tag, b, kind)
}

func (g *Registry) name(path, tag string, b []byte, kind string) string {
	d := DigestOf(b)
	g.manifests[path+":"+tag], g.manifests[path+"@"+d] = b, b
	g.kinds[d] = kind
	return d
}

// Manifest returns the manifest of a tag, or nil.
func (g *Registry) Manifest(path, tag string) []byte {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.manifests[path+":"+tag]
}

// Forget removes a blob.
func (g *Registry) Forget(path, digest string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.blobs, path+"@"+digest)
}

// Seen lists the requests, as "METHOD url range", that hold part.
func (g *Registry) Seen(part string) (found []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, r := range g.requests {
		if strings.Contains(r, part) {
			found = append(found, r)
		}
	}
	return found
}

// Uploads counts uploads that were begun and neither finished nor given up.
func (g *Registry) Uploads() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.uploads)
}

func (g *Registry) serve(w http.ResponseWriter, r *http.Request) {
	g.mu.Lock()
	g.requests = append(g.requests, strings.TrimSpace(r.Method+" "+r.URL.String()+" "+r.Header.Get("Range")))
	meddle, user := g.meddle, g.user
	g.mu.Unlock()
	if meddle != nil && meddle(w, r) {
		return
	}
	if user != "" && r.Header.Get("Authorization") != "Basic "+base64.StdEncoding.EncodeToString([]byte(user)) {
		w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	if r.URL.Path == "/v2/" {
		return
	}
	rest := strings.TrimPrefix(r.URL.Path, "/v2/")
	for _, kind := range []string{"/manifests/", "/blobs/uploads/", "/blobs/"} {
		path, what, ok := strings.Cut(rest, kind)
		if !ok {
			continue
		}
		switch kind {
		case "/manifests/":
			g.serveManifest(w, r, path, what)
		case "/blobs/uploads/":
			g.serveUpload(w, r, path, what)
		default:
			g.serveBlob(w, r, path, what)
		}
		return
	}
	http.NotFound(w, r)
}

func (g *Registry) serveManifest(w http.ResponseWriter, r *http.Request, path, what string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if r.Method == http.MethodPut {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		w.Header().Set("Docker-Content-Digest", g.name(path, what, b, r.Header.Get("Content-Type")))
		w.WriteHeader(http.StatusCreated)
		return
	}
	b, ok := g.manifests[path+":"+what]
	if !ok {
		b, ok = g.manifests[path+"@"+what]
	}
	if !ok {
		w.WriteHeader(http.StatusNotFound)
		_, _ = io.WriteString(w, `{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}`)
		return
	}
	w.Header().Set("Content-Type", g.kinds[DigestOf(b)])
	w.Header().Set("Docker-Content-Digest", DigestOf(b))
	_, _ = w.Write(b) // the client may be gone
}

func (g *Registry) serveBlob(w http.ResponseWriter, r *http.Request, path, digest string) {
	g.mu.Lock()
	b, ok := g.blobs[path+"@"+digest]
	g.mu.Unlock()
	if !ok {
		w.WriteHeader(http.StatusNotFound)
		return
	}
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(b))
}

func (g *Registry) serveUpload(w http.ResponseWriter, r *http.Request, path, id string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	q := r.URL.Query()
	switch r.Method {
	case http.MethodPost:
		if from := q.Get("from"); from != "" {
			if b, ok := g.blobs[from+"@"+q.Get("mount")]; ok {
				g.blobs[path+"@"+q.Get("mount")] = b
				w.WriteHeader(http.StatusCreated)
				return
			}
		}
		id = fmt.Sprint("u", len(g.requests))
		g.uploads[id] = path
		w.Header().Set("Location", "/v2/"+path+"/blobs/uploads/"+id)
		w.WriteHeader(http.StatusAccepted)
	case http.MethodPut:
		b, err := io.ReadAll(r.Body)
		if err != nil || DigestOf(b) != q.Get("digest") {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		delete(g.uploads, id)
		g.blobs[path+"@"+q.Get("digest")] = b
		w.WriteHeader(http.StatusCreated)
	case http.MethodDelete:
		delete(g.uploads, id)
		w.WriteHeader(http.StatusNoContent)
	}
}
