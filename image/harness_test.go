package image

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

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
	if w == nil {
		return "", nil
	}
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
	if w == nil {
		return nil
	}
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
