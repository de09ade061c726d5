package image

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/klauspost/compress/gzip"

	"github.com/sandboxd/sandboxd/sandbox"
)

// shelf is a volume in memory: layers are kept as their plain archives.
type shelf struct {
	mu      sync.Mutex
	layers  map[string][]byte
	imports int
}

func newShelf() *shelf { return &shelf{layers: map[string][]byte{}} }

func (s *shelf) Layer(name string) (Layer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, ok := s.layers[name]
	if !ok {
		return Layer{}, sandbox.Errorf(sandbox.ErrNotFound, "no_layer", "no layer %s", name)
	}
	return Layer{Size: int64(len(b)), Files: 1}, nil
}

func (s *shelf) ImportLayer(_ context.Context, diffID string, r io.Reader) (Layer, error) {
	plain, end, err := decompress(r)
	if err != nil {
		return Layer{}, err
	}
	defer end()
	b, err := io.ReadAll(plain)
	if err != nil {
		return Layer{}, badArchive("%w", err)
	}
	if got := digestOf(b); got != diffID {
		return Layer{}, mismatch("layer %s is %s", diffID, got)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.imports++
	s.layers[diffID] = b
	return Layer{Size: int64(len(b)), Files: 1}, nil
}

// ExportLayer gives a layer in other bytes than it came in, as the real one
// does: an archive of its own making.
func (s *shelf) ExportLayer(_ context.Context, stack []string, i int, w io.Writer) (string, error) {
	s.mu.Lock()
	b := s.layers[stack[i]]
	s.mu.Unlock()
	h := sha256.New()
	tw := tar.NewWriter(io.MultiWriter(w, h))
	if err := tw.WriteHeader(&tar.Header{Name: "content", Size: int64(len(b)), Mode: 0o644}); err != nil {
		return "", err
	}
	if _, err := tw.Write(b); err != nil {
		return "", err
	}
	err := tw.Close()
	return "sha256:" + hex.EncodeToString(h.Sum(nil)), err
}

func (s *shelf) ExportTree(_ context.Context, stack []string, w io.Writer) error {
	_, err := fmt.Fprintf(w, "tree of %s", strings.Join(stack, " "))
	return err
}

func (s *shelf) ImportTar(_ context.Context, name string, r io.Reader) (sandbox.Image, error) {
	b, err := io.ReadAll(r)
	return sandbox.Image{Name: name, Kind: sandbox.ImageTar, Digest: digestOf(b)}, err
}

// library opens a store with a volume in memory and short pauses.
func library(t *testing.T, change func(*Config)) (*Store, *shelf) {
	t.Helper()
	v := newShelf()
	cfg := Config{
		Dir: t.TempDir(), Volume: v, Platform: "linux/amd64", Backoff: time.Millisecond, Stall: 2 * time.Second,
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	}
	if change != nil {
		change(&cfg)
	}
	s, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s, v
}

// left lists the files beneath a directory of a store.
func left(t *testing.T, s *Store, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(s.path(dir))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// madeImage is an image as a registry has it.
type madeImage struct {
	blobs    map[string][]byte
	manifest []byte
	kind     string
	layers   []descriptor
	diffIDs  []string
}

func (m *madeImage) add(b []byte) string {
	d := digestOf(b)
	m.blobs[d] = b
	return d
}

// tarOf is an archive of one file.
func tarOf(name string, content []byte) []byte {
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	_ = tw.WriteHeader(&tar.Header{Name: name, Size: int64(len(content)), Mode: 0o644})
	_, _ = tw.Write(content)
	_ = tw.Close()
	return b.Bytes()
}

func gzipped(b []byte) []byte {
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	_, _ = z.Write(b)
	_ = z.Close()
	return out.Bytes()
}

// noise is content that does not compress.
func noise(seed byte, n int) []byte {
	out := make([]byte, 0, n+32)
	sum := sha256.Sum256([]byte{seed})
	for len(out) < n {
		sum = sha256.Sum256(sum[:])
		out = append(out, sum[:]...)
	}
	return out[:n]
}

// makeImage makes an image of layers, each an archive of noise.
func makeImage(t *testing.T, layers, bytesEach int) *madeImage {
	t.Helper()
	m := &madeImage{blobs: map[string][]byte{}, kind: typeOCIManifest}
	for i := range layers {
		plain := tarOf(fmt.Sprintf("file%d", i), noise(byte(i), bytesEach))
		z := gzipped(plain)
		m.diffIDs = append(m.diffIDs, digestOf(plain))
		m.layers = append(m.layers, descriptor{MediaType: typeOCILayer + "+gzip", Digest: m.add(z), Size: int64(len(z))})
	}
	m.seal(t, nil)
	return m
}

// seal makes configuration and manifest, which change may alter.
func (m *madeImage) seal(t *testing.T, change func(cfg, manifest map[string]any)) {
	t.Helper()
	cfg := map[string]any{
		"architecture": "amd64", "os": "linux",
		"config":  map[string]any{"Env": []string{"A=1", "PATH=/bin"}, "Entrypoint": []string{"/bin/x"}, "Cmd": []string{"y"}, "User": "65534", "WorkingDir": "/srv", "ExposedPorts": map[string]any{"80/tcp": map[string]any{}}, "Labels": map[string]string{"l": "v"}, "StopSignal": "SIGINT"},
		"rootfs":  map[string]any{"type": "layers", "diff_ids": m.diffIDs},
		"history": []any{map[string]any{"created_by": "made"}},
	}
	man := map[string]any{"schemaVersion": 2, "mediaType": m.kind, "layers": m.layers}
	if change != nil {
		change(cfg, man)
	}
	b := mustJSON(t, cfg)
	kind := typeOCIConfig
	if m.kind == typeDockerManifest {
		kind = typeDockerConfig
	}
	if man["config"] == nil {
		man["config"] = descriptor{MediaType: kind, Digest: m.add(b), Size: int64(len(b))}
	}
	m.manifest = mustJSON(t, man)
}

func mustJSON(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// registry is a registry for tests, which does as it is told.
type registry struct {
	*httptest.Server
	t *testing.T

	mu        sync.Mutex
	manifests map[string][]byte // by path:tag and path@digest
	kinds     map[string]string
	blobs     map[string][]byte // by path@digest
	uploads   map[string]string // path
	requests  []string          // METHOD path [range]
	// meddle, when set, may answer in place of the registry.
	meddle func(w http.ResponseWriter, r *http.Request) bool
}

func newRegistry(t *testing.T) *registry {
	t.Helper()
	g := &registry{t: t, manifests: map[string][]byte{}, kinds: map[string]string{}, blobs: map[string][]byte{}, uploads: map[string]string{}}
	g.Server = httptest.NewServer(http.HandlerFunc(g.serve))
	t.Cleanup(g.Close)
	return g
}

func (g *registry) host() string { return strings.TrimPrefix(g.URL, "http://") }

func (g *registry) put(path, tag string, m *madeImage) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	for d, b := range m.blobs {
		g.blobs[path+"@"+d] = b
	}
	g.name(path, tag, m.manifest, m.kind)
	return digestOf(m.manifest)
}

func (g *registry) name(path, tag string, b []byte, kind string) {
	d := digestOf(b)
	g.manifests[path+":"+tag], g.manifests[path+"@"+d] = b, b
	g.kinds[d] = kind
}

func (g *registry) seen(part string) (found []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, r := range g.requests {
		if strings.Contains(r, part) {
			found = append(found, r)
		}
	}
	return found
}

func (g *registry) serve(w http.ResponseWriter, r *http.Request) {
	g.mu.Lock()
	g.requests = append(g.requests, strings.TrimSpace(r.Method+" "+r.URL.String()+" "+r.Header.Get("Range")))
	meddle := g.meddle
	g.mu.Unlock()
	if meddle != nil && meddle(w, r) {
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
		switch {
		case kind == "/manifests/":
			g.manifestOf(w, r, path, what)
		case kind == "/blobs/uploads/":
			g.upload(w, r, path, what)
		default:
			g.blob(w, r, path, what)
		}
		return
	}
	http.NotFound(w, r)
}

func (g *registry) manifestOf(w http.ResponseWriter, r *http.Request, path, what string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if r.Method == http.MethodPut {
		b, _ := io.ReadAll(r.Body)
		g.name(path, what, b, r.Header.Get("Content-Type"))
		w.Header().Set("Docker-Content-Digest", digestOf(b))
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
	w.Header().Set("Content-Type", g.kinds[digestOf(b)])
	w.Header().Set("Docker-Content-Digest", digestOf(b))
	_, _ = w.Write(b)
}

func (g *registry) blob(w http.ResponseWriter, r *http.Request, path, digest string) {
	g.mu.Lock()
	b, ok := g.blobs[path+"@"+digest]
	g.mu.Unlock()
	if !ok {
		w.WriteHeader(http.StatusNotFound)
		return
	}
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(b))
}

func (g *registry) upload(w http.ResponseWriter, r *http.Request, path, id string) {
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
		id = fmt.Sprint("u", len(g.uploads))
		g.uploads[id] = path
		w.Header().Set("Location", "/v2/"+path+"/blobs/uploads/"+id)
		w.WriteHeader(http.StatusAccepted)
	case http.MethodPut:
		b, err := io.ReadAll(r.Body)
		if err != nil || digestOf(b) != q.Get("digest") {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		g.blobs[path+"@"+q.Get("digest")] = b
		w.WriteHeader(http.StatusCreated)
	case http.MethodDelete:
		delete(g.uploads, id)
		w.WriteHeader(http.StatusNoContent)
	}
}
