package runtime

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/sandbox"
)

// A snapshot travels as a tar archive:
//
//	layers/0001-sha256:<diffID>.tar   each layer, as an OCI image has it
//	snapshot.json                     the record, which names them; last
//
// The layers of the host's own image stay at home: they show this host's
// files, and another host has its own.
const (
	carriedLayers = "layers/"
	carriedRecord = "snapshot.json"
	maxRecord     = 4 << 20
)

// carried is the record of a snapshot on its way.
type carried struct {
	Version  int               `json:"version"`
	Snapshot sandbox.Snapshot  `json:"snapshot"`
	Layers   map[string]string `json:"layers"` // diffIDs of those in the archive, by name
}

// ExportSnapshot writes a snapshot as an archive that ImportSnapshot takes, on
// this host or another.
func (m *Manager) ExportSnapshot(ctx context.Context, ref string) (io.ReadCloser, error) {
	m.imports.RLock()
	s, err := m.state.Snapshot(ctx, ref)
	if err != nil {
		m.imports.RUnlock()
		return nil, err
	}
	done := m.keep(&sandbox.ImageSource{Image: s.Image, Layers: s.Layers})
	m.imports.RUnlock()
	r, w := io.Pipe()
	m.spawn(func() {
		defer done()
		work, cancel := context.WithCancel(ctx)
		defer cancel()
		_ = w.CloseWithError(m.exportSnapshot(work, s, w)) // never fails
	})
	return begun(r)
}

func (m *Manager) exportSnapshot(ctx context.Context, s sandbox.Snapshot, w io.Writer) error {
	s.Spec = s.Spec.Unmarked(sandbox.OwnerMark(s.Owner)) // whose names are others elsewhere
	c := carried{Version: 1, Snapshot: s, Layers: map[string]string{}}
	tw := tar.NewWriter(w)
	home := map[string]bool{}
	if s.Image.Kind == sandbox.ImageHost {
		for _, l := range s.Image.Layers {
			home[l] = true
		}
	}
	for i, l := range s.Layers {
		if home[l] {
			continue
		}
		if _, err := m.roots.ExportLayer(ctx, s.Layers, i, nil); err != nil {
			return err
		}
	}
	for i, l := range s.Layers {
		if home[l] || c.Layers[l] != "" {
			continue
		}
		diffID, err := m.exportLayer(ctx, s.Layers, i, tw)
		if err != nil {
			return err
		}
		c.Layers[l] = diffID
	}
	record, err := json.Marshal(c)
	if err == nil {
		err = tw.WriteHeader(&tar.Header{Name: carriedRecord, Mode: 0o600, Size: int64(len(record)), ModTime: s.CreatedAt})
	}
	if err == nil {
		_, err = tw.Write(record)
	}
	return errors.Join(err, tw.Close())
}

// exportLayer writes one layer; an archive must know its size before it.
func (m *Manager) exportLayer(ctx context.Context, stack []string, i int, tw *tar.Writer) (diffID string, err error) {
	spool, err := m.roots.Spool()
	if err != nil {
		return "", err
	}
	defer spool.Close()
	if diffID, err = m.roots.ExportLayer(ctx, stack, i, spool); err != nil {
		return "", err
	}
	size, err := spool.Seek(0, io.SeekEnd)
	if err == nil {
		_, err = spool.Seek(0, io.SeekStart)
	}
	if err == nil {
		err = tw.WriteHeader(&tar.Header{Name: fmt.Sprintf("%s%04d-%s.tar", carriedLayers, i, diffID), Mode: 0o600, Size: size})
	}
	if err == nil {
		_, err = io.Copy(tw, spool)
	}
	return diffID, err
}

// ImportSnapshot makes a snapshot of what ExportSnapshot wrote. The archive is
// hostile input: each layer must be what its name says, and is unpacked as
// those of images are. ErrInvalid with code snapshot_bad_archive; ErrConflict
// with code snapshot_name_taken, or snapshot_of_other_host where it stands on
// a host image that is not this one's.
func (m *Manager) ImportSnapshot(ctx context.Context, name, actor string, r io.Reader) (s sandbox.Snapshot, err error) {
	if err := (sandbox.SnapshotRequest{Name: name}).Validate(); err != nil {
		return s, err
	}
	ctx, release := m.HoldLayers(ctx)
	defer release()
	c, err := m.importCarried(ctx, r)
	if err != nil {
		return s, err
	}
	m.imports.RLock() // of the host's image the layers are not held
	defer m.imports.RUnlock()
	host, err := m.state.Image(ctx, HostImage)
	if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return s, err
	}
	if s, err = m.unpackRecord(c, host.Layers); err != nil {
		return s, err
	}
	if err := m.measureCarried(ctx, &s, c); err != nil {
		return s, err
	}
	s.Name, s.Owner = first(name, s.Name), actor
	if err := m.state.ReserveSnapshot(ctx, s); err != nil {
		return s, err
	}
	err = m.roots.Sync()
	if err == nil {
		s.Durable = true
		err = m.state.PutSnapshot(ctx, s, "")
	}
	if err != nil {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownTimeout)
		defer cancel()
		err = errors.Join(err, m.state.ReleaseSnapshot(clean, s.ID))
	}
	return s, err
}

func badArchive(format string, args ...any) error {
	return sandbox.Errorf(sandbox.ErrInvalid, "snapshot_bad_archive", "this is no archive of a snapshot: "+format, args...)
}

// importCarried takes the layers in and returns the record, with those layers
// that came.
func (m *Manager) importCarried(ctx context.Context, r io.Reader) (c carried, err error) {
	tr := tar.NewReader(r)
	came := map[string]bool{}
	for {
		hdr, err := tr.Next()
		switch {
		case errors.Is(err, io.EOF):
			return c, badArchive("it ends without its record; send it again")
		case err != nil:
			return c, badArchive("%w", err)
		}
		if hdr.Name == carriedRecord {
			err := readRecord(tr, hdr.Size, &c)
			maps.DeleteFunc(c.Layers, func(_, diffID string) bool { return !came[diffID] })
			return c, err
		}
		_, diffID, ok := strings.Cut(strings.TrimSuffix(strings.TrimPrefix(hdr.Name, carriedLayers), ".tar"), "-")
		if !ok || hdr.Typeflag != tar.TypeReg || !strings.HasPrefix(hdr.Name, carriedLayers) {
			return c, badArchive("%.80q has no place in it", hdr.Name)
		}
		if _, err := m.roots.ImportLayer(ctx, diffID, tr); err != nil {
			return c, err
		}
		came[diffID] = true
	}
}

func readRecord(r io.Reader, size int64, c *carried) error {
	if size > maxRecord {
		return badArchive("its record has %d bytes", size)
	}
	b, err := io.ReadAll(r)
	if err == nil {
		err = json.Unmarshal(b, c)
	}
	if err != nil {
		return badArchive("its record: %w", err)
	}
	if c.Version != 1 {
		return badArchive("its version is %d, and this daemon knows 1: export it with a fitting one", c.Version)
	}
	return nil
}

// unpackRecord makes the record one of this host: layers have other names
// here, and nothing else in it is believed but what a caller may say as well.
// Of this host's own layers it may name those of the host's image: others may
// be another owner's files.
func (m *Manager) unpackRecord(c carried, home []string) (sandbox.Snapshot, error) {
	from := c.Snapshot
	if err := from.Spec.Validate(); err != nil {
		return from, err
	}
	if err := (sandbox.SnapshotRequest{Name: from.Name, Comment: from.Comment}).Validate(); err != nil {
		return from, err
	}
	if err := sandbox.ValidateImageName(from.Image.Name); err != nil {
		return from, err
	}
	here := func(layers []string) ([]string, error) {
		if len(layers) >= rootfs.MaxLayers { // one is the daemon's
			return nil, badArchive("it has %d layers: at most %d can be stacked", len(layers), rootfs.MaxLayers-1)
		}
		var out []string
		for i, l := range layers {
			if slices.Contains(layers[:i], l) {
				return nil, badArchive("layer %.80q is named twice", l)
			}
			name := first(c.Layers[l], l)
			if (c.Layers[l] != "" || slices.Contains(home, l)) && m.roots.HasLayer(name) {
				// Two of the same content count where the upper one lies, which has the last word.
				out = append(slices.DeleteFunc(out, func(lower string) bool { return lower == name }), name)
				continue
			}
			if from.Image.Kind == sandbox.ImageHost {
				return nil, sandbox.Errorf(sandbox.ErrConflict, "snapshot_of_other_host", "it stands on another host's own files (layer %.80s): make sandboxes to be carried about of an image", l)
			}
			return nil, badArchive("layer %.80q is missing", l)
		}
		return out, nil
	}
	s := sandbox.Snapshot{
		ID: sandbox.NewSnapshotID(), Name: from.Name, Kind: sandbox.SnapshotManual, CreatedAt: time.Now().UTC(),
		Comment: first(from.Comment, fmt.Sprintf("imported; was %.14s", from.ID)), Spec: from.Spec, Image: from.Image,
	}
	s.Spec.Snapshot, s.Spec.Volumes = "", nil // of the other host
	s.Spec.Labels = maps.Clone(s.Spec.Labels)
	maps.DeleteFunc(s.Spec.Labels, func(k, _ string) bool { return strings.HasPrefix(k, sandbox.ReservedLabels) })
	var err error
	if s.Layers, err = here(from.Layers); err != nil {
		return s, err
	}
	if len(s.Layers) == 0 {
		return s, badArchive("it has no layers")
	}
	s.Image.Layers, err = here(from.Image.Layers)
	return s, err
}

// measureCarried counts what the layers that came with an archive hold: what it says
// of itself is the sender's word, and quotas are reckoned with it.
func (m *Manager) measureCarried(ctx context.Context, s *sandbox.Snapshot, c carried) error {
	came := slices.Collect(maps.Values(c.Layers))
	for _, layer := range slices.Compact(slices.Sorted(slices.Values(append(slices.Clone(s.Layers), s.Image.Layers...)))) {
		if !slices.Contains(came, layer) {
			continue
		}
		bytes, files, err := m.roots.LayerUsage(ctx, layer)
		if err != nil {
			return err
		}
		s.SizeBytes, s.Files = s.SizeBytes+bytes, s.Files+files
	}
	return nil
}
