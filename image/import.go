package image

import (
	"archive/tar"
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Bounds of an archive of an image.
const (
	peekBytes  = 256 << 10 // looked at to tell what an archive is
	maxNames   = 20000     // entries
	maxLinks   = 8         // from one name to the next
	zstdWindow = 128 << 20
)

// Import makes an image of an archive, plain or compressed with gzip or zstd:
// of a root file system, of an OCI image layout, or of docker save in its old
// form or its new one. Which it is shows in its first names.
//
// Classes and codes: those of the volume for a root file system; ErrInvalid
// image_bad_manifest, image_bad_format, image_digest_mismatch,
// image_ambiguous, image_name_missing; ErrTooLarge image_too_large;
// ErrExhausted disk_full.
func (s *Store) Import(ctx context.Context, req sandbox.ImportRequest, r io.Reader) (sandbox.Image, error) {
	br := bufio.NewReaderSize(r, peekBytes)
	head, err := br.Peek(peekBytes)
	if err != nil && !errors.Is(err, io.EOF) {
		return sandbox.Image{}, sandbox.Errorf(sandbox.ErrInvalid, "image_truncated", "reading the archive: %w", err)
	}
	image, some := holdsImage(head)
	if !some {
		return sandbox.Image{}, sandbox.Errorf(sandbox.ErrInvalid, "image_truncated", "the archive is empty: it has not one entry; pack it again")
	}
	if !image {
		if req.Name == "" {
			return sandbox.Image{}, nameMissing()
		}
		return s.vol.ImportTar(ctx, req.Name, br)
	}
	dir, done, err := s.spool()
	if err != nil {
		return sandbox.Image{}, err
	}
	defer done()
	a := &archive{s: s, dir: dir, files: map[string]entry{}, links: map[string]string{}}
	if err := a.read(ctx, br); err != nil {
		return sandbox.Image{}, err
	}
	return a.image(ctx, req)
}

func nameMissing() error {
	return sandbox.Errorf(sandbox.ErrInvalid, "image_name_missing", "the archive tells no name for the image: give one")
}

func badArchive(format string, args ...any) error {
	return sandbox.Errorf(sandbox.ErrInvalid, "image_bad_format", format, args...)
}

// holdsImage tells an archive of an image by its first name from one of a file
// system, and whether it has any entry. docker save and what writes as it does
// name their files by digests: <hex>.json, sha256:<hex>, <hex>.tar.gz.
func holdsImage(head []byte) (image, some bool) {
	plain, end, err := decompress(bytes.NewReader(head))
	if err != nil {
		return false, true // whoever unpacks it finds out, too
	}
	defer end()
	tr := tar.NewReader(plain)
	for {
		h, err := tr.Next()
		if err != nil {
			return false, some || !errors.Is(err, io.EOF)
		}
		some = true
		name := path.Clean("/" + h.Name)[1:]
		if name == "" {
			continue // the folder itself
		}
		first, _, _ := strings.Cut(name, "/")
		switch first {
		case "oci-layout", "index.json", "manifest.json", "repositories":
			return h.Typeflag == tar.TypeReg, true
		case "blobs":
			return name == "blobs" && h.Typeflag == tar.TypeDir || strings.HasPrefix(name, "blobs/sha256"), true
		}
		stem, _, _ := strings.Cut(strings.TrimPrefix(first, "sha256:"), ".")
		return sandbox.ValidDigest("sha256:" + stem), true
	}
}

// decompress looks at the first bytes of a stream.
func decompress(r io.Reader) (io.Reader, func(), error) {
	br := bufio.NewReaderSize(r, 64<<10)
	magic, _ := br.Peek(4) // what is wrong shows at the next read
	switch {
	case bytes.HasPrefix(magic, []byte("\x1f\x8b")):
		z, err := gzip.NewReader(br)
		if err != nil {
			return nil, nil, badArchive("the archive is no sound gzip: %w", err)
		}
		return z, func() { _ = z.Close() }, nil // frees memory, nothing to lose
	case bytes.Equal(magic, []byte("\x28\xb5\x2f\xfd")):
		z, err := zstd.NewReader(br, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(zstdWindow))
		if err != nil {
			return nil, nil, badArchive("the archive is no sound zstd: %w", err)
		}
		return z, z.Close, nil
	}
	return br, func() {}, nil
}

// archive is an archive of images, its files spooled under names of ours.
type archive struct {
	s     *Store
	dir   string
	files map[string]entry  // by name
	links map[string]string // name to name
}

type entry struct {
	file string
	size int64
}

// read spools the archive's files.
func (a *archive) read(ctx context.Context, r io.Reader) error {
	plain, end, err := decompress(r)
	if err != nil {
		return err
	}
	defer end()
	tr := tar.NewReader(plain)
	left := a.s.cfg.MaxBytes
	for n := 0; ; n++ {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("image: import: %w", err)
		}
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return badArchive("the archive is cut short or damaged: %w", err)
		}
		if n == maxNames {
			return tooLarge("the archive has over %d entries: no image has", maxNames)
		}
		name := path.Clean("/" + h.Name)[1:]
		switch h.Typeflag {
		case tar.TypeReg:
			if h.Size > left {
				return tooLarge("the archive holds over %d bytes: the daemon's configuration takes no more (volume.import_max)", a.s.cfg.MaxBytes)
			}
			left -= h.Size
			e := entry{filepath.Join(a.dir, fmt.Sprint(n)), h.Size}
			if err := spoolFile(e.file, tr); err != nil {
				return err
			}
			a.files[name] = e
		case tar.TypeSymlink:
			a.links[name] = path.Clean("/" + path.Join(path.Dir(name), h.Linkname))[1:]
		case tar.TypeLink:
			a.links[name] = path.Clean("/" + h.Linkname)[1:]
		}
	}
}

func spoolFile(to string, r io.Reader) error {
	f, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return spaceError("spool an archive", err)
	}
	from := &reading{r: r}
	_, err = io.CopyBuffer(struct{ io.Writer }{f}, from, make([]byte, chunk))
	switch err = errors.Join(err, f.Close()); {
	case from.err != nil:
		return badArchive("the archive is cut short or damaged: %w", from.err)
	case err != nil:
		return spaceError("spool an archive", err)
	}
	return nil
}

// reading remembers whether it was the reading that failed.
type reading struct {
	r   io.Reader
	err error
}

func (r *reading) Read(b []byte) (int, error) {
	n, err := r.r.Read(b)
	if err != nil && !errors.Is(err, io.EOF) {
		r.err = err
	}
	return n, err
}

// find follows links from name to a file.
func (a *archive) find(name string) (entry, error) {
	for range maxLinks {
		if e, ok := a.files[name]; ok {
			return e, nil
		}
		to, ok := a.links[name]
		if !ok {
			break
		}
		name = to
	}
	return entry{}, badArchive("the archive lacks %.120q: it is not whole", name)
}

func (a *archive) has(name string) bool { _, ok := a.files[name]; return ok }

// small reads a small file.
func (a *archive) small(name string, limit int64) ([]byte, error) {
	e, err := a.find(name)
	if err != nil {
		return nil, err
	}
	if e.size > limit {
		return nil, tooLarge("%.120q in the archive has %d bytes: at most %d", name, e.size, limit)
	}
	return os.ReadFile(e.file)
}

// blob reads a small blob and verifies it.
func (a *archive) blob(d descriptor, limit int64) ([]byte, error) {
	if err := d.check(limit); err != nil {
		return nil, err
	}
	b, err := a.small(blobPath(d.Digest), limit)
	if err == nil && digestOf(b) != d.Digest {
		err = mismatch("blob %s of the archive is %s: it is damaged", d.Digest, digestOf(b))
	}
	return b, err
}

// found is the image of an archive.
type found struct {
	m     *manifest
	cfg   []byte
	files []entry // of its layers
	name  string
	index string
}

// image makes the image.
func (a *archive) image(ctx context.Context, req sandbox.ImportRequest) (sandbox.Image, error) {
	var f *found
	var err error
	if a.has("index.json") {
		f, err = a.oci(req)
	} else {
		f, err = a.docker(req)
	}
	if err != nil {
		return sandbox.Image{}, err
	}
	name := cmp.Or(req.Name, f.name)
	if name == "" {
		return sandbox.Image{}, nameMissing()
	}
	if err := sandbox.ValidateImageName(name); err != nil {
		return sandbox.Image{}, err
	}
	cfg, err := parseConfig(f.cfg, len(f.m.Layers))
	if err != nil {
		return sandbox.Image{}, err
	}
	record, err := cfg.record()
	if err != nil {
		return sandbox.Image{}, err
	}
	want := parsePlatform(cmp.Or(req.Platform, a.s.cfg.Platform))
	if cfg.OS != "" && want.rank(cfg.platform) == 0 {
		return sandbox.Image{}, sandbox.Errorf(sandbox.ErrNotFound, "image_no_platform", "the image is for %s, not for %s: name its platform with --platform, if this machine can run it", cfg.platform, want)
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(parallelLayers)
	for i, d := range f.m.Layers {
		g.Go(func() error { return a.layer(gctx, d, f.files[i], cfg.RootFS.DiffIDs[i]) })
	}
	if err := g.Wait(); err != nil {
		return sandbox.Image{}, err
	}
	img := sandbox.Image{
		Name: name, Digest: f.m.digest, Kind: sandbox.ImageOCI, Layers: stack(cfg.RootFS.DiffIDs), Config: record, CreatedAt: time.Now().UTC(),
		IndexDigest: f.index, Platform: cfg.String(),
	}
	return img, a.s.adopt(ctx, &img, f.m, f.cfg)
}

// layer brings one layer onto the volume.
func (a *archive) layer(ctx context.Context, d descriptor, e entry, diffID string) error {
	f, err := os.Open(e.file)
	if err != nil {
		return fmt.Errorf("image: read a spooled layer: %w", err)
	}
	defer f.Close()
	got, err := hashOf(f)
	if err != nil {
		return err
	}
	if got != d.Digest || e.size != d.Size {
		return mismatch("layer %s of the archive is %s, with %d bytes of %d: it is damaged", d.Digest, got, e.size, d.Size)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	if _, err := a.s.vol.ImportLayer(ctx, diffID, f); err != nil {
		return err
	}
	return a.s.remember(diffID, diffID, "", d)
}

func hashOf(r io.Reader) (string, error) {
	h := sha256.New()
	if _, err := io.Copy(h, r); err != nil {
		return "", fmt.Errorf("image: read a spooled layer: %w", err)
	}
	return "sha256:" + hex.EncodeToString(h.Sum(nil)), nil
}

// oci finds the image of an OCI image layout.
func (a *archive) oci(req sandbox.ImportRequest) (*found, error) {
	b, err := a.small("index.json", maxManifest)
	if err != nil {
		return nil, err
	}
	m, err := parseManifest(b, typeOCIIndex)
	if err != nil {
		return nil, err
	}
	if !m.isIndex() {
		return nil, badArchive("index.json of the archive is no index")
	}
	d, err := pick(m, req.Name, cmp.Or(req.Platform, a.s.cfg.Platform))
	if err != nil {
		return nil, err
	}
	f := &found{name: cmp.Or(d.Annotations[annotationName], d.Annotations[annotationRef])}
	if sandbox.ValidateImageName(f.name) != nil {
		f.name = ""
	}
	for depth := 0; ; depth++ {
		b, err := a.blob(d, maxManifest)
		if err != nil {
			return nil, err
		}
		if f.m, err = parseManifest(b, d.MediaType); err != nil {
			return nil, err
		}
		if !f.m.isIndex() {
			break
		}
		if depth == maxNesting {
			return nil, badImage("the index names an index, and that another: at most %d", maxNesting)
		}
		f.index = f.m.digest
		if d, err = f.m.choose(cmp.Or(req.Platform, a.s.cfg.Platform)); err != nil {
			return nil, err
		}
	}
	if f.cfg, err = a.blob(f.m.Config, maxConfig); err != nil {
		return nil, err
	}
	for _, l := range f.m.Layers {
		e, err := a.find(blobPath(l.Digest))
		if err != nil {
			return nil, err
		}
		f.files = append(f.files, e)
	}
	return f, nil
}

// pick chooses one image of a layout: the only one, the one of the name asked
// for, or the one of the platform.
func pick(m *manifest, want, platform string) (descriptor, error) {
	var all []descriptor
	var names []string
	for _, d := range m.Manifests {
		name := cmp.Or(d.Annotations[annotationName], d.Annotations[annotationRef])
		if sameName(name, want) || want != "" && d.Annotations[annotationRef] == want {
			return d, nil
		}
		if !slices.ContainsFunc(all, func(o descriptor) bool { return o.Digest == d.Digest }) {
			all = append(all, d)
			names = append(names, cmp.Or(name, d.Digest))
		}
	}
	platforms := 0
	for _, d := range all {
		if d.Platform != nil {
			platforms++
		}
	}
	switch {
	case len(all) == 0:
		return descriptor{}, badArchive("the archive names no image")
	case len(all) == 1:
		return all[0], nil
	case platforms == len(all):
		return (&manifest{Manifests: all}).choose(platform)
	}
	return descriptor{}, ambiguous(names)
}

func ambiguous(names []string) error {
	return sandbox.Errorf(sandbox.ErrInvalid, "image_ambiguous", "the archive holds %d images: give the name of one, of %.300s", len(names), strings.Join(names, ", "))
}

// sameName tells whether two names mean the same image.
func sameName(a, b string) bool {
	ra, err := sandbox.ParseImageRef(a)
	if err != nil {
		return false
	}
	rb, err := sandbox.ParseImageRef(b)
	return err == nil && ra == rb
}

// docker finds the image of an archive of docker save in its old form, which
// has no manifest in our sense; one is made.
func (a *archive) docker(req sandbox.ImportRequest) (*found, error) {
	b, err := a.small("manifest.json", maxManifest)
	if err != nil {
		return nil, err
	}
	var all []dockerEntry
	if err := json.Unmarshal(b, &all); err != nil {
		return nil, badArchive("manifest.json of the archive makes no sense: %w", err)
	}
	e, err := pickDocker(all, req.Name)
	if err != nil {
		return nil, err
	}
	if len(e.Layers) > maxLayers {
		return nil, tooLarge("the image has %d layers: at most %d can be stacked", len(e.Layers), maxLayers)
	}
	f := &found{}
	if len(e.RepoTags) > 0 && sandbox.ValidateImageName(e.RepoTags[0]) == nil {
		f.name = e.RepoTags[0]
	}
	if f.cfg, err = a.small(path.Clean("/" + e.Config)[1:], maxConfig); err != nil {
		return nil, err
	}
	m := manifest{
		SchemaVersion: 2, MediaType: typeOCIManifest, Layers: []descriptor{},
		Config: descriptor{MediaType: typeOCIConfig, Digest: digestOf(f.cfg), Size: int64(len(f.cfg))},
	}
	for _, name := range e.Layers {
		file, err := a.find(path.Clean("/" + name)[1:])
		if err != nil {
			return nil, err
		}
		d, err := describe(file)
		if err != nil {
			return nil, err
		}
		f.files = append(f.files, file)
		m.Layers = append(m.Layers, d)
	}
	if b, err = json.Marshal(m); err != nil {
		return nil, err
	}
	f.m, err = parseManifest(b, typeOCIManifest)
	return f, err
}

func pickDocker(all []dockerEntry, name string) (dockerEntry, error) {
	var names []string
	for _, e := range all {
		if slices.ContainsFunc(e.RepoTags, func(t string) bool { return sameName(t, name) }) {
			return e, nil
		}
		names = append(names, cmp.Or(strings.Join(e.RepoTags, " "), e.Config))
	}
	switch len(all) {
	case 0:
		return dockerEntry{}, badArchive("the archive names no image")
	case 1:
		return all[0], nil
	}
	return dockerEntry{}, ambiguous(names)
}

// describe makes the descriptor of a layer's file.
func describe(e entry) (descriptor, error) {
	f, err := os.Open(e.file)
	if err != nil {
		return descriptor{}, fmt.Errorf("image: read a spooled layer: %w", err)
	}
	defer f.Close()
	magic := make([]byte, 4)
	n, err := io.ReadFull(f, magic)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
		return descriptor{}, err
	}
	d := descriptor{MediaType: typeOCILayer, Size: e.size}
	switch magic = magic[:n]; {
	case bytes.HasPrefix(magic, []byte("\x1f\x8b")):
		d.MediaType += "+gzip"
	case bytes.Equal(magic, []byte("\x28\xb5\x2f\xfd")):
		d.MediaType += "+zstd"
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return d, err
	}
	d.Digest, err = hashOf(f)
	return d, err
}
