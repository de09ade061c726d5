package image

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Export writes an image as one archive: an OCI image layout, the same with
// the file that 'docker load' reads, or its merged root file system. Layers
// are compressed anew, so the digests of a pulled image are others there; the
// same image gives the same archive. What cannot be exported is refused before
// the first byte.
func (s *Store) Export(ctx context.Context, src sandbox.ImageSource, req sandbox.ExportRequest, w io.Writer) error {
	if req.Format == sandbox.FormatTar {
		if err := s.vol.ExportTree(ctx, src.Layers, nil); err != nil {
			return err
		}
		return s.vol.ExportTree(ctx, src.Layers, w)
	}
	for i := range src.Layers {
		if _, err := s.vol.ExportLayer(ctx, src.Layers, i, nil); err != nil {
			return err
		}
	}
	dir, done, err := s.spool()
	if err != nil {
		return err
	}
	defer done()
	x := &export{tw: tar.NewWriter(w), written: map[string]bool{}}
	if err := x.bytes("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)); err != nil {
		return err
	}
	var layers []packed
	for i := range src.Layers {
		p, err := s.pack(ctx, src.Layers, i, dir)
		if err == nil {
			err = errors.Join(x.file(p), remove(p.file))
		}
		if err != nil {
			return err
		}
		layers = append(layers, p)
	}
	out, err := s.compose(src, layers)
	if err != nil {
		return err
	}
	name := req.Name
	if name == "" {
		name = src.Image.Name
	}
	err = errors.Join(x.bytes(blobPath(out.m.Config.Digest), out.cfg), x.bytes(blobPath(out.m.digest), out.m.raw))
	if err == nil {
		err = x.index(out, name)
	}
	if err == nil && req.Format == sandbox.FormatDocker {
		err = x.docker(out, name)
	}
	return errors.Join(err, x.tw.Close())
}

// export is an archive being written.
type export struct {
	tw      *tar.Writer
	written map[string]bool
}

func blobPath(digest string) string { return "blobs/sha256/" + hexOf(digest) }

func (x *export) bytes(name string, b []byte) error {
	if err := x.tw.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(b)), Typeflag: tar.TypeReg}); err != nil {
		return fmt.Errorf("image: write an archive: %w", err)
	}
	_, err := x.tw.Write(b)
	return err
}

// file writes a packed layer, once.
func (x *export) file(p packed) error {
	name := blobPath(p.Digest)
	if x.written[name] {
		return nil
	}
	x.written[name] = true
	f, err := os.Open(p.file)
	if err != nil {
		return fmt.Errorf("image: read a packed layer: %w", err)
	}
	defer f.Close()
	if err := x.tw.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: p.Size, Typeflag: tar.TypeReg}); err != nil {
		return fmt.Errorf("image: write an archive: %w", err)
	}
	_, err = io.Copy(x.tw, f)
	return err
}

// Names of annotations.
const (
	annotationRef  = "org.opencontainers.image.ref.name"
	annotationName = "io.containerd.image.name"
)

func (x *export) index(out outgoing, name string) error {
	d := descriptor{MediaType: out.m.MediaType, Digest: out.m.digest, Size: int64(len(out.m.raw))}
	if ref, err := sandbox.ParseImageRef(name); err == nil && ref.Tag != "" {
		d.Annotations = map[string]string{annotationRef: ref.Tag, annotationName: ref.String()}
	}
	b, err := json.Marshal(struct {
		SchemaVersion int          `json:"schemaVersion"`
		MediaType     string       `json:"mediaType"`
		Manifests     []descriptor `json:"manifests"`
	}{2, typeOCIIndex, []descriptor{d}})
	if err != nil {
		return err
	}
	return x.bytes("index.json", b)
}

// dockerEntry is one image in the manifest.json of docker save.
type dockerEntry struct {
	Config   string
	RepoTags []string
	Layers   []string
}

func (x *export) docker(out outgoing, name string) error {
	e := dockerEntry{Config: blobPath(out.m.Config.Digest)}
	if ref, err := sandbox.ParseImageRef(name); err == nil && ref.Tag != "" {
		if !strings.Contains(name, ":") {
			name += ":" + ref.Tag
		}
		e.RepoTags = []string{name}
	}
	for _, l := range out.m.Layers {
		e.Layers = append(e.Layers, blobPath(l.Digest))
	}
	b, err := json.Marshal([]dockerEntry{e})
	if err != nil {
		return err
	}
	return x.bytes("manifest.json", b)
}
