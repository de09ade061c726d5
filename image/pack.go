package image

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/klauspost/compress/gzip"

	"github.com/sandboxd/sandboxd/sandbox"
)

// packed is a layer as it goes out.
type packed struct {
	descriptor
	layer  string // its name on the volume
	diffID string
	file   string // compressed, where that had to be done here
}

// pack compresses a layer of a stack into a file beneath dir. The same layer
// gives the same bytes.
func (s *Store) pack(ctx context.Context, layers []string, i int, dir string) (p packed, err error) {
	if err := s.packs.Acquire(ctx, 1); err != nil {
		return p, fmt.Errorf("image: wait for other layers to be packed: %w", err)
	}
	defer s.packs.Release(1)
	f, err := os.Create(filepath.Join(dir, fmt.Sprint(i)))
	if err != nil {
		return p, spaceError("pack a layer", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	h := sha256.New()
	n := &counter{}
	buffered := bufio.NewWriterSize(io.MultiWriter(f, h, n), chunk)
	z, err := gzip.NewWriterLevel(buffered, gzip.BestSpeed)
	if err != nil {
		return p, err
	}
	diffID, err := s.vol.ExportLayer(ctx, layers, i, z)
	if err == nil {
		err = z.Close()
	}
	if err == nil {
		err = buffered.Flush()
	}
	if err != nil {
		return p, spaceError("pack layer "+layers[i], err)
	}
	d := descriptor{MediaType: typeOCILayer + "+gzip", Digest: "sha256:" + hex.EncodeToString(h.Sum(nil)), Size: n.n}
	return packed{descriptor: d, layer: layers[i], diffID: diffID, file: f.Name()}, nil
}

// counter counts what is written.
type counter struct{ n int64 }

func (c *counter) Write(b []byte) (int, error) { c.n += int64(len(b)); return len(b), nil }

// outgoing is an image as it goes out.
type outgoing struct {
	m   *manifest
	cfg []byte
}

// compose makes the manifest and configuration of what goes out: those the
// image came with where its layers go out as they came, else new ones.
func (s *Store) compose(src sandbox.ImageSource, layers []packed) (outgoing, error) {
	var base map[string]json.RawMessage
	var history []historyEntry
	m, err := s.manifest(src.Image.Digest)
	if err == nil {
		raw, cfg, err := s.config(m)
		if err != nil {
			return outgoing{}, err
		}
		if asTheyCame(m, cfg, layers) {
			return outgoing{m, raw}, nil
		}
		if err := json.Unmarshal(raw, &base); err != nil {
			return outgoing{}, fmt.Errorf("image: read the kept configuration %s: %w", m.Config.Digest, err)
		}
		history = cfg.History
	} else if !errors.Is(err, os.ErrNotExist) {
		return outgoing{}, err
	}
	if base == nil {
		if base, err = s.newConfig(src.Image); err != nil {
			return outgoing{}, err
		}
		for _, h := range src.Image.Config.History {
			history = append(history, historyEntry{h.Created, h.CreatedBy, h.Comment, h.Empty})
		}
	}
	return compose(base, history, src.Image.CreatedAt, layers)
}

// asTheyCame tells whether the layers are those of a manifest, byte by byte.
func asTheyCame(m *manifest, cfg *configFile, layers []packed) bool {
	blobs := map[string]bool{}
	var diffIDs []string
	for _, l := range layers {
		blobs[l.Digest] = true
		diffIDs = append(diffIDs, l.diffID)
	}
	return slices.Equal(stack(cfg.RootFS.DiffIDs), diffIDs) &&
		!slices.ContainsFunc(m.Layers, func(d descriptor) bool { return !blobs[d.Digest] })
}

// newConfig is the configuration of an image that came with none.
func (s *Store) newConfig(img sandbox.Image) (map[string]json.RawMessage, error) {
	var c configFile
	c.platform = parsePlatform(s.cfg.Platform)
	if img.Platform != "" {
		c.platform = parsePlatform(img.Platform)
	}
	c.Config.Env, c.Config.User, c.Config.WorkingDir = img.Config.Env, img.Config.User, img.Config.WorkDir
	c.Config.Entrypoint, c.Config.Cmd, c.Config.Shell = img.Config.Entrypoint, img.Config.Cmd, img.Config.Shell
	c.Config.StopSignal, c.Config.Labels = img.Config.StopSignal, img.Config.Labels
	set := func(names []string) map[string]struct{} {
		m := map[string]struct{}{}
		for _, n := range names {
			m[n] = struct{}{}
		}
		return m
	}
	c.Config.ExposedPorts, c.Config.Volumes = set(img.Config.ExposedPorts), set(img.Config.Volumes)
	b, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	var base map[string]json.RawMessage
	return base, json.Unmarshal(b, &base)
}

// compose lays layers into a configuration and makes a manifest for both.
func compose(base map[string]json.RawMessage, history []historyEntry, created time.Time, layers []packed) (outgoing, error) {
	var out outgoing
	rootfs := struct {
		Type    string   `json:"type"`
		DiffIDs []string `json:"diff_ids"`
	}{"layers", []string{}}
	m := manifest{SchemaVersion: 2, MediaType: typeOCIManifest, Layers: []descriptor{}}
	for _, l := range layers {
		rootfs.DiffIDs = append(rootfs.DiffIDs, l.diffID)
		m.Layers = append(m.Layers, descriptor{MediaType: ociLayerType(l.MediaType), Digest: l.Digest, Size: l.Size})
	}
	for key, v := range map[string]any{"rootfs": rootfs, "history": fitHistory(history, len(layers)), "created": created} {
		b, err := json.Marshal(v)
		if err != nil {
			return out, err
		}
		base[key] = b
	}
	cfg, err := json.Marshal(base) // keys in order: the same image gives the same bytes
	if err != nil {
		return out, err
	}
	m.Config = descriptor{MediaType: typeOCIConfig, Digest: digestOf(cfg), Size: int64(len(cfg))}
	raw, err := json.Marshal(m)
	if err != nil {
		return out, err
	}
	made, err := parseManifest(raw, typeOCIManifest)
	return outgoing{made, cfg}, err
}

// fitHistory makes a history tell of n layers: readers compare.
func fitHistory(h []historyEntry, n int) []historyEntry {
	h = slices.Clone(h)
	full := 0
	for _, e := range h {
		if !e.EmptyLayer {
			full++
		}
	}
	if full > n { // layers that came twice
		return []historyEntry{}
	}
	for ; full < n; full++ {
		h = append(h, historyEntry{CreatedBy: "sandboxd"})
	}
	return h
}

// ociLayerType is a layer's media type in OCI's words.
func ociLayerType(t string) string {
	switch {
	case strings.HasSuffix(t, "gzip"):
		return typeOCILayer + "+gzip"
	case strings.HasSuffix(t, "zstd"):
		return typeOCILayer + "+zstd"
	}
	return typeOCILayer
}
